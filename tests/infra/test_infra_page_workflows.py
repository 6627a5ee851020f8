"""The workflows on pages, which are no files of the repository."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.docs_blocks import ROOT, blocks_of
from tests.infra.infra_tools import tool


@pytest.mark.parametrize("page", ["judge-ci", "publish"])
def test_linters_of_workflow_on_page_report_nothing(page: str, tmp_path: Path) -> None:
    (block,) = [
        one
        for one in blocks_of(ROOT / "docs" / f"{page}.md")
        if one.language == "yaml" and "\njobs:\n" in one.text
    ]
    workflow = tmp_path / ".github" / "workflows" / "page.yml"
    workflow.parent.mkdir(parents=True)
    workflow.write_text(block.text, encoding="utf-8")
    schema = ("check-jsonschema", "--builtin-schema", "vendor.github-workflows", workflow)
    for command in (("zizmor", "--offline", "--quiet", workflow), schema):
        done = tool(*command)
        assert done.returncode == 0, done.stdout + done.stderr


def test_repository_has_no_publishing_workflow() -> None:
    for file in (ROOT / ".github" / "workflows").glob("*.yml"):
        assert "pypi-publish" not in file.read_text(encoding="utf-8")
