"""Disturbance of every effect of every release operation.

The process is killed at the effect, or the effect is refused or lost. The ledger, model folders and
content store are files. The registry and the endpoints are in memory, and their calls are lost too.

`python -m benchmarks.effects` tries all effects and prints their number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import pytest

from tests.release.effect_operations import OPERATIONS, synthetic
from tests.release.effect_sweep import Point, sweep_effects
from tests.support.suite import Sweep

SOME = {"all at once": 60, "delete": 40, "prune": 120}
"""Operations that every commit tries, and the stride between the tried effects."""


def check(name: str, root: Path, choose: Callable[[Iterable[Point]], Sequence[Point]]) -> None:
    with synthetic():
        tally = sweep_effects(OPERATIONS[name], root, choose)
    assert tally.tried
    assert not tally.inconsistent, f"{len(tally.inconsistent)} of {len(tally.tried)} trials"


@pytest.mark.parametrize("name", SOME)
def test_operation_disturbed_at_sampled_effect_ends_like_undisturbed_operation(
    name: str, tmp_path: Path, sweep: Sweep
) -> None:
    check(name, tmp_path / "project", lambda points: list(points)[sweep.part * 7 :: SOME[name]])


@pytest.mark.nightly
@pytest.mark.parametrize("name", OPERATIONS)
def test_operation_disturbed_at_any_effect_ends_like_undisturbed_operation(
    name: str, tmp_path: Path, sweep: Sweep
) -> None:
    check(name, tmp_path / "project", sweep)
