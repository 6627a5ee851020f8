"""The messages in the runbooks are those of the program."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.docs.docs_blocks import ROOT, blocks_of

RUNBOOKS = sorted((ROOT / "docs" / "runbooks").glob("*.md"))
WITH_MESSAGES = [
    page for page in RUNBOOKS if any(block.language == "text" for block in blocks_of(page))
]
SECTIONS = ["Symptoms", "Fix", "Cause", "Prevention"]
_SHORTEST = 7


@pytest.fixture(scope="module")
def messages() -> set[tuple[str, ...]]:
    """Return the constant parts of the program's texts with more than one word.

    A text of an f-string has several parts, with computed parts between them.
    """
    found: set[tuple[str, ...]] = set()
    for path in (ROOT / "onnx_ops").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            parts = node.values if isinstance(node, ast.JoinedStr) else [node]
            texts = [str(part.value) if isinstance(part, ast.Constant) else "" for part in parts]
            if isinstance(node, ast.JoinedStr | ast.Constant) and _tells("".join(texts)):
                # A text that begins with a semicolon is appended to another text.
                texts[0] = texts[0].removeprefix("; ")
                found.add(tuple(text for text in texts if text))
    return found


def _contains(line: str, parts: tuple[str, ...]) -> bool:
    """Return whether a line contains the parts in this order, with a text between two of them."""
    end = -1
    for part in parts:
        start = line.find(part, end + 1)
        if start < 0:
            return False
        end = start + len(part)
    return True


def _tells(text: str) -> bool:
    words = re.findall(r"[A-Za-z]+", text)
    return "\n" not in text and len(words) > 1 and len("".join(words)) >= _SHORTEST


@pytest.mark.parametrize("page", WITH_MESSAGES, ids=lambda page: page.stem)
def test_runbook_message_exists_in_source(page: Path, messages: set[tuple[str, ...]]) -> None:
    for block in blocks_of(page):
        for line in block.text.splitlines() if block.language == "text" else ():
            assert any(_contains(line, parts) for parts in messages), f"{block.place}: {line}"


@pytest.mark.parametrize(
    "page", [page for page in RUNBOOKS if page.stem != "index"], ids=lambda page: page.stem
)
def test_runbook_has_four_required_sections(page: Path) -> None:
    headings = re.findall(r"^## (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    assert headings == SECTIONS


def test_runbook_index_links_each_page() -> None:
    linked = re.findall(
        r"\]\(([a-z-]+\.md)\)",
        (ROOT / "docs" / "runbooks" / "index.md").read_text(encoding="utf-8"),
    )
    assert sorted(linked) == sorted(page.name for page in RUNBOOKS if page.stem != "index")


def test_invented_message_matches_no_source_text(messages: set[tuple[str, ...]]) -> None:
    assert not any(
        _contains("  v4 rests upon 20 %: come back tomorrow", parts) for parts in messages
    )
