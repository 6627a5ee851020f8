"""Is the candidate's error rate below what was promised, whatever the stable version does?

For a rate s, the e-process against "the rate is s or more" is a mixture of likelihood ratios of smaller rates to s.
The rates that it does not speak against are a confidence sequence for the error rate (Howard, Ramdas, McAuliffe and
Sekhon 2021, Ann. Stat. 49:1055-1080): it may be looked at after every request.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from onnx_ops.statistics.rollout.evidence import RISK
from onnx_ops.statistics.rollout.likelihood import GRID, Array

_SHARES = np.geomspace(0.02, 0.9, 12)
"""Rates that are looked for, as shares of the one that is spoken against; equal weights."""
_LEAST = 1e-12


def below(errors: npt.ArrayLike, requests: npt.ArrayLike, rate: npt.ArrayLike, effect: npt.ArrayLike = 1.0) -> Array:
    """Log evidence against "the share of errors is `rate` or more", by the design effect; the arguments broadcast."""
    bad = np.asarray(errors, dtype=np.float64)[..., None]
    good = np.asarray(requests, dtype=np.float64)[..., None] - bad
    against = np.asarray(rate, dtype=np.float64)[..., None]
    logs = bad * np.log(_SHARES) + good * (np.log1p(-against * _SHARES) - np.log1p(-against))
    logs = logs / np.asarray(effect, dtype=np.float64)[..., None]
    top = logs.max(axis=-1, keepdims=True)
    return np.asarray(top[..., 0] + np.log(np.exp(logs - top).mean(axis=-1)))


def above(errors: int, requests: int, rate: float) -> float:
    """log10 evidence against "the share of errors is `rate` or less"."""
    odds = GRID * rate / (1 - rate)
    rates = odds / (1 + odds)
    logs = errors * np.log(rates / rate) + (requests - errors) * (np.log1p(-rates) - math.log1p(-rate))
    top = float(logs.max())
    return (top + math.log(float(np.exp(logs - top).mean()))) / math.log(10)


def certified(
    errors: npt.ArrayLike, requests: npt.ArrayLike, rate: float, effect: npt.ArrayLike = 1.0
) -> npt.NDArray[np.bool_]:
    """Whether the share of errors is shown to be below `rate`, with a chance of 5 % of ever being wrong."""
    return np.asarray(below(errors, requests, rate, effect) >= math.log(1 / RISK))


def upper_bound(errors: int, requests: int, effect: float = 1.0) -> float:
    """Upper end of the confidence sequence of the share of errors; 1 where nothing is known."""

    def short(rate: float) -> float:
        return float(below(errors, requests, rate, effect)) - math.log(1 / RISK)

    least = max(errors / requests, _LEAST) if requests else 1.0
    if least >= 1 - _LEAST or short(1 - _LEAST) < 0:
        return 1.0
    if short(least) >= 0:
        return least

    from scipy.optimize import brentq  # what only looks at rollouts starts sooner without it

    return float(brentq(short, least, 1 - _LEAST, xtol=1e-9))


def clean_requests(rate: float) -> int:
    """Fewest requests without an error that show a share of errors below `rate`.

    Raises:
        ValueError: `rate` is not between 0 and 1.
    """
    if not 0 < rate < 1:
        raise ValueError(f"{rate} is no rate between 0 and 1")
    high = 1
    while not certified(0, high, rate):
        high *= 2
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if certified(0, middle, rate) else (middle, high)
    return high
