"""All foreign files of the documentation's table: no traceback, no wrong verdict, and a remedy with each refusal."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.foreign_files import outcomes

LEAST_FILES, LEAST_KINDS = 150, 20


@pytest.mark.nightly
def test_foreign_files_end_in_right_verdicts_and_refusals_with_a_remedy(tmp_path: Path) -> None:
    found = list(outcomes(tmp_path))
    assert [one for one in found if one.fault] == []
    assert len({(one.kind, one.file) for one in found}) >= LEAST_FILES
    assert len({one.kind for one in found}) >= LEAST_KINDS
