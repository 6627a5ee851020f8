"""The workflow on the page about publishing, which is no file of the repository."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.docs_blocks import ROOT, blocks_of
from tests.infra.infra_tools import tool


@pytest.fixture
def workflow(tmp_path: Path) -> Path:
    (block,) = [one for one in blocks_of(ROOT / "docs" / "publish.md") if one.language == "yaml"]
    file = tmp_path / ".github" / "workflows" / "publish.yml"
    file.parent.mkdir(parents=True)
    file.write_text(block.text, encoding="utf-8")
    return file


def test_linters_of_publishing_workflow_report_nothing(workflow: Path) -> None:
    schema = ("check-jsonschema", "--builtin-schema", "vendor.github-workflows", workflow)
    for command in (("zizmor", "--offline", "--quiet", workflow), schema):
        done = tool(*command)
        assert done.returncode == 0, done.stdout + done.stderr


def test_repository_has_no_publishing_workflow() -> None:
    for file in (ROOT / ".github" / "workflows").glob("*.yml"):
        assert "pypi-publish" not in file.read_text(encoding="utf-8")
