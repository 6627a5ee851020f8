"""The example of the page on whole systems, run in an empty folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.docs_blocks import ROOT
from tests.docs.test_docs_run import follow


def test_system_parity_page_followed_literally_writes_report_with_image(tmp_path: Path) -> None:
    pytest.importorskip("PIL")
    follow(ROOT / "docs" / "system-parity.md", tmp_path, tmp_path)
    assert "data:image/png" in (tmp_path / "report.html").read_text(encoding="utf-8")
