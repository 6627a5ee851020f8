"""Runs many rollouts of a world and holds their ends against a promise. Every run of the program draws new seeds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from benchmarks.truth import claims
from benchmarks.truth.claims import Claim
from benchmarks.truth.rollout_world import Result, Rollouts, World

_AT_ONCE = 2_000_000
"""Users that are held in memory, of all rollouts together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trials:
    """How many rollouts each promise is held against.

    Args:
        count: rollouts of each kind.
        seeds: for each part of a run, a new one.
        quick: fewer kinds and looks.
    """

    count: int
    seeds: Iterator[int]
    quick: bool

    @property
    def looks(self) -> int:
        """Looks at a canary that never advances."""
        return 40 if self.quick else 100

    def with_trials(self, count: int) -> Trials:
        """Return the same with another number of rollouts."""
        return replace(self, count=count)

    def run(self, world: World) -> Result:
        """Run the rollouts of one world."""
        users = 1 if world.users is None else max(world.users.count, world.requests)
        most = max(1, _AT_ONCE // users)
        parts = [
            Rollouts(world, min(most, self.count - done), seed=next(self.seeds)).run()
            for done in range(0, self.count, most)
        ]
        return Result(
            ends=[end for part in parts for end in part.ends],
            exposed=[n for part in parts for n in part.exposed],
            looks=[n for part in parts for n in part.looks],
        )

    def at_most(
        self, gate: str, what: str, result: Result, end: str | tuple[str, ...], bound: float
    ) -> Claim:
        """Promise that at most this share of rollouts ends so; missed where the interval lies above."""
        return claims.at_most(gate, what, result.count(end), len(result.ends), bound)

    def at_least(self, gate: str, what: str, result: Result, end: str, bound: float) -> Claim:
        """Promise that at least this share of rollouts ends so; missed where the interval lies below."""
        return claims.at_least(gate, what, result.count(end), len(result.ends), bound)
