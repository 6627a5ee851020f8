"""A few foreign files through the single-file tools; all of them are a nightly test."""

from __future__ import annotations

from pathlib import Path

from benchmarks.foreign_files import outcomes

_KIND = "other domains"
"""An operator that no target has, and one of ONNX Runtime's own."""


def test_files_of_other_domains_end_in_verdicts_and_refusals_with_a_remedy(tmp_path: Path) -> None:
    found = list(outcomes(tmp_path, only=_KIND))
    assert [one for one in found if one.fault] == []
    assert {one.command for one in found} == {"inspect", "judge", "quantize", "bench"}
    assert {one.code for one in found} <= {0, 2, 4}
