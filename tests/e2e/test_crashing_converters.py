"""Converters that crash, abort, hang, exhaust memory or print without end: each is reported, and the run continues."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.e2e.e2e_project import Project
from tests.support.suite import Sweep

pytestmark = pytest.mark.services

FAULTY = {"PYTHONPATH": str(Path(__file__).parent / "plugins")}
PIPELINE = "configs/pipelines/iris-onnx.yaml"
REASONS = {
    "segfault": "ended with signal SIGSEGV",
    "abort": "ended with signal SIGABRT",
    "hang": "longer than its time-out of 5 s",
    "swallow": "more memory than its limit of 1.5 GB",
    "babble": "ended with exit code 3",
}
MEMORY = {"memory": "1.5 GB"}


def rewrite(project: Project, **sections: object) -> None:
    path = project.root / PIPELINE
    document: dict[str, Any] = yaml.safe_load(path.read_text())
    document.pop("register")
    path.write_text(yaml.safe_dump(document | sections, sort_keys=False))


@pytest.mark.nightly
def test_the_other_variants_are_made_and_judged(fresh_project: Project, sweep: Sweep) -> None:
    reasons = {how: REASONS[how] for how in sweep(REASONS)}
    wild = [{"name": how, "method": "wild", "options": {"how": how}, **MEMORY} for how in reasons]
    for variant in wild:
        variant["timeout"] = "5 s" if variant["name"] == "hang" else "60 s"
    rewrite(fresh_project, quantize=[*wild, {"name": "laid-out", "method": "graph"}])
    done = fresh_project.document("run", PIPELINE, environ=FAULTY)  # exit code 0: the target has a choice
    decisions = {one["variant"]: one for one in done["decisions"]}
    assert set(decisions) == {"fp32", "laid-out", *reasons}
    for name in ("fp32", "laid-out"):
        assert {one["verdict"] for one in decisions[name]["results"] if not one["advisory"]} == {"pass"}
    for how, words in reasons.items():
        (result,) = decisions[how]["results"]
        assert result["verdict"] == "error"
        assert words in result["reason"], result
        if how != "swallow":
            assert f"about to {how}" in result["reason"] or how == "babble"
        if how == "babble":
            assert "100 MB of output" in result["reason"]
    assert done["choices"][0]["verdict"] == "pass"
    table = fresh_project.command("run", PIPELINE, environ=FAULTY)
    assert table.code == 0
    for how, words in reasons.items():
        assert words in " ".join(table.stdout.split()), how


@pytest.mark.sweep
@pytest.mark.parametrize("how", ["segfault", "swallow"])
def test_an_export_that_fails_is_reported_and_ends_the_run_as_an_error(fresh_project: Project, how: str) -> None:
    export = {"framework": "wild", "options": {"how": how}, **MEMORY}
    rewrite(fresh_project, export=export)
    done = fresh_project.document("run", PIPELINE, environ=FAULTY, code=4)
    (decision,) = done["decisions"]
    (result,) = decision["results"]
    assert result["verdict"] == "error"
    assert REASONS[how] in result["reason"]
