"""Does each version get the traffic that it should, and does the candidate fail grossly?"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
from scipy.special import betaln

from onnx_ops.statistics.rollout.likelihood import Array

MISMATCH_LIMIT = 3.0
"""log10 of the evidence that pauses a rollout: a chance of 0.1 % for a split that is right."""
MISMATCH_TOLERANCE = 0.1
"""Share of the candidate's weight by which its share of requests may be off: users are not equally busy."""

BREAKER_REQUESTS = 20
BREAKER_SHARE = 0.5
BREAKER_TIMES = 5
"""Half of 20 or more requests failed, and five times the stable version's share. Requests count by their design effect:
twenty of one user are one."""
REFUSED_REQUESTS = 200
REFUSED_SHARE = 0.1
"""A tenth of 200 or more requests was refused, and five times the stable version's share."""


def mismatch(
    canary: npt.ArrayLike, requests: npt.ArrayLike, percent: npt.ArrayLike, effect: npt.ArrayLike = 1.0
) -> Array:
    """log10 evidence that the candidate's share of requests is not within a tenth of its weight.

    Beta-binomial mixture over the binomial that fits best within the tolerance; dividing by the best fit keeps the
    evidence valid for each split in it (universal inference: Wasserman, Ramdas and Balakrishnan 2020, PNAS
    117:16880-16890). The arguments broadcast; percent lies between 0 and 100, without its ends; effect is that of the
    requests (`units.crowding`).
    """
    k = np.asarray(canary, dtype=np.float64)
    n = np.asarray(requests, dtype=np.float64)
    weight = np.asarray(percent, dtype=np.float64) / 100
    rest = np.minimum(weight, 1 - weight) * MISMATCH_TOLERANCE
    seen = np.where(n > 0, k / np.maximum(n, 1), weight)
    best = np.clip(seen, weight - rest, weight + rest)
    mixture = betaln(k + 0.5, n - k + 0.5) - betaln(0.5, 0.5)
    logs = mixture - k * np.log(best) - (n - k) * np.log1p(-best)
    return np.asarray(logs / np.asarray(effect) / math.log(10))


def grossly_failing(canary: tuple[int, int], stable: tuple[int, int], effect: float = 1.0) -> bool:
    """Whether so many of the candidate's requests failed that no test is needed. Each side: errors, requests.

    Where the stable version fails too, the candidate is not to blame.
    """
    return _grossly(canary, stable, BREAKER_REQUESTS * effect, BREAKER_SHARE)


def refusing(canary: tuple[int, int], stable: tuple[int, int]) -> bool:
    """Whether the candidate refuses requests that the stable version takes. Each side: refused, requests.

    Evidence that grows with each request would mistake one client's bunch of wrong requests, which by a user's key all
    go to the same version, for the candidate's fault.
    """
    return _grossly(canary, stable, REFUSED_REQUESTS, REFUSED_SHARE)


def _grossly(canary: tuple[int, int], stable: tuple[int, int], fewest: float, share: float) -> bool:
    (errors, requests), (others, compared) = canary, stable
    if requests < fewest or errors < share * requests:
        return False
    return compared == 0 or errors * compared >= BREAKER_TIMES * others * requests
