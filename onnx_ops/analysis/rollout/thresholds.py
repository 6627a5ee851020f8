"""Latency thresholds, read off a histogram of the stable version before the rollout begins and kept until it ends."""

from __future__ import annotations

import math
from collections.abc import Sequence

from onnx_ops.domain.rollout_observed import Thresholds

_ROUNDING = 1e-9
FEWEST_REQUESTS = 200
"""Below this, the 99th percentile is read off one or two requests."""


def freeze(
    bounds_s: Sequence[float], counts: Sequence[int], *, p50_slower: float = 0.0, p99_slower: float = 0.0
) -> Thresholds | None:
    """The bounds that lie nearest to the median and to the 99th percentile, and so much more.

    Requests are counted against bounds exactly, so it does no harm that a bound is not the percentile itself.

    Args:
        bounds_s: upper bounds of the buckets in seconds, ascending.
        counts: requests in each bucket, and last those above all bounds; one more than bounds.
        p50_slower, p99_slower: added to the percentile, as a fraction of it.

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
    p50_s = _raised(bounds_s, _nearest(bounds_s, over, 0.5), p50_slower)
    return Thresholds(p50_s=p50_s, p99_s=_raised(bounds_s, _nearest(bounds_s, over, 0.01), p99_slower), requests=total)


def _raised(bounds_s: Sequence[float], bound_s: float, slower: float) -> float:
    """The first bound that is no lower than that; the last one where none is."""
    wanted = bound_s * (1 + slower)
    return next((bound for bound in bounds_s if bound >= wanted * (1 - _ROUNDING)), bounds_s[-1])


def _nearest(bounds_s: Sequence[float], over: Sequence[float], share: float) -> float:
    """The bound whose share of slower requests has the log odds nearest to those of `share`."""
    return bounds_s[min(range(len(over)), key=lambda index: abs(_log_odds(over[index]) - _log_odds(share)))]


def _log_odds(share: float) -> float:
    inside = min(max(share, 1e-9), 1 - 1e-9)
    return math.log(inside / (1 - inside))
