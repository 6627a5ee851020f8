"""The page of breakages names only tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def test_breakages_page_names_existing_tests_in_each_row() -> None:
    page = (ROOT / "docs" / "breakages.md").read_text(encoding="utf-8")
    rows = [line for line in page.splitlines() if re.match(r"\| [a-z] \|", line)]
    assert len(rows) >= 10
    sources = "\n".join(
        path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py")
    )
    defined = set(re.findall(r"def (test_\w+)\(", sources))
    for row in rows:
        named = re.findall(r"`(test_\w+)`", row)
        assert named, row
        assert set(named) <= defined, sorted(set(named) - defined)
