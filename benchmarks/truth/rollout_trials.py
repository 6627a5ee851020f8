"""Many rollouts of a world, whose ends are compared with a promise.

Every run of the program draws new seeds.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from benchmarks.truth import claims
from benchmarks.truth.claims import Claim
from benchmarks.truth.rollout_world import Result, Rollouts, World

_AT_ONCE = 2_000_000
"""Maximum number of users that are held in memory, of all rollouts together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trials:
    """The rollouts with which each promise is compared.

    Args:
        count: number of rollouts of each kind.
        seeds: a new seed for each part of a run.
        quick: whether there are fewer kinds and looks.
    """

    count: int
    seeds: Iterator[int]
    quick: bool

    @property
    def looks(self) -> int:
        """Return the number of looks at a canary that never advances."""
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
        """Promise that at most this share of rollouts ends so.

        The promise is missed where the confidence interval lies above.
        """
        return claims.at_most(gate, what, result.count(end), len(result.ends), bound)

    def at_least(self, gate: str, what: str, result: Result, end: str, bound: float) -> Claim:
        """Promise that at least this share of rollouts ends so.

        The promise is missed where the confidence interval lies below.
        """
        return claims.at_least(gate, what, result.count(end), len(result.ends), bound)
