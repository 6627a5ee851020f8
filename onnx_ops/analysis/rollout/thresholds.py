"""Latency thresholds, read off a histogram of the stable version before the rollout begins and kept until it ends."""

from __future__ import annotations

import math
from collections.abc import Sequence

from onnx_ops.domain.rollout_observed import Thresholds

FEWEST_REQUESTS = 200
"""Below this, the 99th percentile is read off one or two requests."""


def freeze(
    bounds_s: Sequence[float], counts: Sequence[int], *, p50_slower: float = 0.0, p99_slower: float = 0.0
) -> tuple[Thresholds, Thresholds] | tuple[None, None]:
    """The bounds that lie nearest to the median and to the 99th percentile, and those that lie so much higher.

    A candidate that is slower by less than that fraction exceeds the second ones no more often than the stable version
    exceeds the first ones, whatever the latencies are distributed like and however both drift together. Requests are
    counted against bounds exactly, so it does no harm that a bound is not the percentile itself.

    Args:
        bounds_s: upper bounds of the buckets in seconds, ascending.
        counts: requests in each bucket, and last those above all bounds; one more than bounds.
        p50_slower, p99_slower: how much slower the candidate may be, as a fraction; rounded to the nearest bound.

    Returns:
        The thresholds of the stable version and of the candidate; None if there were too few requests.

    Raises:
        ValueError: there is not one count more than bounds.
    """
    if len(counts) != len(bounds_s) + 1:
        raise ValueError(f"{len(counts)} counts do not fit {len(bounds_s)} bounds")
    total = sum(counts)
    if total < FEWEST_REQUESTS:
        return None, None
    over: list[float] = []
    rest = total
    for count in counts[:-1]:
        rest -= count
        over.append(rest / total)
    p50_s, p99_s = _nearest(bounds_s, over, 0.5), _nearest(bounds_s, over, 0.01)
    slower = Thresholds(
        p50_s=_raised(bounds_s, p50_s, p50_slower), p99_s=_raised(bounds_s, p99_s, p99_slower), requests=total
    )
    return Thresholds(p50_s=p50_s, p99_s=p99_s, requests=total), slower


def _raised(bounds_s: Sequence[float], bound_s: float, slower: float) -> float:
    """The bound that lies nearest to so much more, in proportion."""
    return min(bounds_s, key=lambda bound: abs(math.log(bound / (bound_s * (1 + slower)))))


def _nearest(bounds_s: Sequence[float], over: Sequence[float], share: float) -> float:
    """The bound whose share of slower requests has the log odds nearest to those of `share`."""
    return bounds_s[min(range(len(over)), key=lambda index: abs(_log_odds(over[index]) - _log_odds(share)))]


def _log_odds(share: float) -> float:
    inside = min(max(share, 1e-9), 1 - 1e-9)
    return math.log(inside / (1 - inside))
