"""Rules in common use, applied to the same kind of traffic.

They are a z-test that is evaluated at every look, and fixed thresholds.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Bools = npt.NDArray[np.bool_]

LEAST_SUCCESS = 0.99
CHECKS = 10
FAILED_CHECKS = 5
HEAD = ("peeked z", f"fixed rule, {CHECKS} checks", "fixed rule, all looks")


def draw(
    rates: npt.ArrayLike, percents: npt.ArrayLike, requests: int, trials: int, seed: int
) -> tuple[npt.NDArray[np.int64], ...]:
    """Draw the events and requests of both versions; each is (trials, looks).

    The order is: candidate's events and requests, stable version's events and requests.

    Args:
        rates: (looks, 2) chance of an event, candidate and stable version.
        percents: (looks,) the candidate's weight.
        requests: number of requests between two looks.
        trials: number of rollouts.
        seed: seed of the draws.
    """
    random = np.random.default_rng(seed)
    chance = np.asarray(rates, dtype=np.float64)
    shape = (trials, len(chance))
    canary = random.binomial(requests, np.broadcast_to(np.asarray(percents) / 100, shape))
    stable = requests - canary
    return (
        random.binomial(canary, chance[:, 0]),
        canary,
        random.binomial(stable, chance[:, 1]),
        stable,
    )


def peeked_z(drawn: tuple[npt.NDArray[np.int64], ...]) -> Bools:
    """Return which rollouts a z-test at every look rolls back; (trials,).

    A rollout is rolled back at the first look at which a pooled one-sided z-test has p < 0.05.
    """
    mine, canary, theirs, stable = (counts.cumsum(axis=1).astype(np.float64) for counts in drawn)
    pooled = (mine + theirs) / (canary + stable)
    spread = np.sqrt(np.maximum(pooled * (1 - pooled) * (1 / canary + 1 / stable), 1e-18))
    return np.asarray(((mine / canary - theirs / stable) / spread > 1.6449).any(axis=1))


def fixed_rule(drawn: tuple[npt.NDArray[np.int64], ...], checks: int) -> Bools:
    """Return which rollouts fixed thresholds roll back; (trials,).

    There is one check at each look. A check fails if less than 99 % of the candidate's requests
    succeed. A rollout is rolled back when 5 of so many checks fail.
    """
    mine, canary, _, _ = drawn
    failed = mine[:, :checks] > (1 - LEAST_SUCCESS) * canary[:, :checks]
    return np.asarray(failed.sum(axis=1) >= FAILED_CHECKS)


def shown(drawn: tuple[npt.NDArray[np.int64], ...]) -> tuple[str, ...]:
    """Return the share of rollouts that each rule rolls back, in columns of `HEAD`."""
    found = (peeked_z(drawn), fixed_rule(drawn, CHECKS), fixed_rule(drawn, drawn[0].shape[1]))
    return tuple(f"{100 * rolled.mean():.1f} %" for rolled in found)
