"""Latency thresholds, read off a histogram of the stable version before the rollout begins and kept until it ends."""

from __future__ import annotations

import math
from collections.abc import Sequence

from onnx_ops.domain.rollout_observed import Thresholds

FEWEST_REQUESTS = 200
"""Below this, the 99th percentile is read off one or two requests."""


def freeze(bounds_s: Sequence[float], counts: Sequence[int]) -> Thresholds | None:
    """The bounds that lie nearest to the median and to the 99th percentile.

    Requests are counted against bounds exactly, so it does no harm that a bound is not the percentile itself.

    Args:
        bounds_s: upper bounds of the buckets in seconds, ascending.
        counts: requests in each bucket, and last those above all bounds; one more than bounds.

    Returns:
        None if there were too few requests.

    Raises:
        ValueError: there is not one count more than bounds.
    """
    if len(counts) != len(bounds_s) + 1:
        raise ValueError(f"{len(counts)} counts do not fit {len(bounds_s)} bounds")
    total = sum(counts)
    if total < FEWEST_REQUESTS:
        return None
    over: list[float] = []
    rest = total
    for count in counts[:-1]:
        rest -= count
        over.append(rest / total)
    return Thresholds(p50_s=_nearest(bounds_s, over, 0.5), p99_s=_nearest(bounds_s, over, 0.01), requests=total)


def _nearest(bounds_s: Sequence[float], over: Sequence[float], share: float) -> float:
    """The bound whose share of slower requests has the log odds nearest to those of `share`."""
    return bounds_s[min(range(len(over)), key=lambda index: abs(_log_odds(over[index]) - _log_odds(share)))]


def _log_odds(share: float) -> float:
    inside = min(max(share, 1e-9), 1 - 1e-9)
    return math.log(inside / (1 - inside))
