"""Every effect of every release operation, killed at it, refused or lost: the ledger, model folders and the content
store are files; the registry and the endpoints, whose calls are lost too, are in memory.

`python -m benchmarks.effects` tries them all and prints how many there were.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import pytest

from tests.release.effect_operations import OPERATIONS, synthetic
from tests.release.effect_sweep import Point, sweep_effects
from tests.support.suite import Sweep

SOME = {"all at once": 60, "delete": 40, "prune": 120}
"""Operations that every commit tries, and the stride from one effect that it tries to the next."""


def check(name: str, root: Path, choose: Callable[[Iterable[Point]], Sequence[Point]]) -> None:
    with synthetic():
        tally = sweep_effects(OPERATIONS[name], root, choose)
    assert tally.tried
    assert not tally.inconsistent, f"{len(tally.inconsistent)} of {len(tally.tried)} trials"


@pytest.mark.parametrize("name", SOME)
def test_operation_disturbed_at_sampled_effect_ends_as_undisturbed(
    name: str, tmp_path: Path, sweep: Sweep
) -> None:
    check(name, tmp_path / "project", lambda points: list(points)[sweep.part * 7 :: SOME[name]])


@pytest.mark.nightly
@pytest.mark.parametrize("name", OPERATIONS)
def test_operation_disturbed_at_any_effect_ends_as_undisturbed(
    name: str, tmp_path: Path, sweep: Sweep
) -> None:
    check(name, tmp_path / "project", sweep)
