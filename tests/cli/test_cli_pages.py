"""`onnx-ops docs`, and the pages that messages name."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from onnx_ops.cli.pages import PAGES
from tests.support.command import run_command

PACKAGE = PAGES.parent.parent


def test_docs_without_page_lists_pages_with_titles() -> None:
    listed = run_command("docs", "--json", cwd=Path()).parsed()
    assert listed["rollback"]
    assert listed["runbooks/ledger-damaged"] == "The ledger or a routing table is damaged"
    assert all(listed.values())
    lines = run_command("docs", cwd=Path()).stdout.splitlines()
    assert len(lines) == len(listed)


def test_docs_with_page_prints_it_unchanged() -> None:
    shown = run_command("docs", "runbooks/disk-full", cwd=Path())
    assert (shown.code, shown.stdout) == (
        0,
        (PAGES / "runbooks" / "disk-full.md").read_text(encoding="utf-8"),
    )
    assert run_command("docs", "docs/runbooks/disk-full.md", cwd=Path()).stdout == shown.stdout


@pytest.mark.parametrize("topic", ["rolback", "../pyproject", "/etc/passwd", "ledger"])
def test_docs_with_unknown_page_exits_with_2(topic: str) -> None:
    refused = run_command("docs", topic, cwd=Path())
    assert (refused.code, "the documentation has no such page" in refused.stderr) == (2, True)


def test_messages_refer_to_existing_pages() -> None:
    texts = {
        path: path.read_text(encoding="utf-8")
        for path in PACKAGE.rglob("*.py")
        if "templates" not in path.parts
    }
    named = {
        page
        for text in texts.values()
        for page in re.findall(r"`onnx-ops docs ([a-z0-9/_-]+)`", text)
    }
    assert len(named) >= 10
    assert [page for page in sorted(named) if not (PAGES / f"{page}.md").is_file()] == []
