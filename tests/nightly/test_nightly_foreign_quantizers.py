"""Files of other quantizers get verdicts: sound ones pass, planted faults fail, on networks with a fresh seed."""

from __future__ import annotations

import secrets
import sys
from pathlib import Path

import pytest

from benchmarks.foreign_quantizers import CAUGHT, SOUND, compute_share, outcomes

pytestmark = pytest.mark.nightly


def test_sound_files_pass_and_planted_faults_fail(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    seed = secrets.randbelow(1 << 20)
    sys.stdout.write(f"seed {seed}\n")
    found = list(outcomes(tmp_path, seed, ("mlp", "cnn-norm", "encoder"), ("ort", "by hand")))
    judged = [one for one in found if one.verdict not in ("missing", "lossy")]
    assert len(judged) > 150
    assert not [one for one in judged if one.verdict in ("INCONCLUSIVE", "ERROR", "refused")]
    assert compute_share(found, planted=False) >= SOUND
    assert compute_share(found, planted=True) >= CAUGHT
