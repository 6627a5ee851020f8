"""All foreign files of the documentation's table: no traceback, no wrong verdict, and a remedy with each refusal."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks.foreign_files import outcomes
from benchmarks.foreign_requests import measure

LEAST_FILES, LEAST_KINDS = 150, 20
LEAST_MODELS, MOST_REFUSED = 60, 0.02


@pytest.mark.nightly
def test_foreign_files_end_in_right_verdicts_and_refusals_with_a_remedy(tmp_path: Path) -> None:
    found = list(outcomes(tmp_path))
    assert [one for one in found if one.fault] == []
    assert len({(one.kind, one.file) for one in found}) >= LEAST_FILES
    assert len({one.kind for one in found}) >= LEAST_KINDS


@pytest.mark.nightly
def test_no_planted_fault_of_a_model_with_state_scalars_or_edges_passes(tmp_path: Path) -> None:
    seed = int(np.random.SeedSequence().entropy) % (1 << 32)
    found = list(measure(LEAST_MODELS, seed, tmp_path))
    assert [one for one in found if one.wrong and one.is_fault] == [], f"seed {seed}"
    right = [one for one in found if not one.wrong]
    assert sum(one.is_fault for one in right) <= MOST_REFUSED * len(right), f"seed {seed}"
