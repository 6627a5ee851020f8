"""Latency thresholds, read off a histogram of the stable version before the rollout begins and kept until it ends."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from onnx_ops.domain.rollout_observed import Thresholds
from onnx_ops.domain.rollout_policy import PLACES, QUANTILES

FEWEST_REQUESTS = 200
"""Below this, the 99th percentile is read off one or two requests."""


def freeze(
    bounds_s: Sequence[float], counts: Sequence[int], slower: Mapping[str, float]
) -> tuple[Thresholds, Thresholds] | tuple[None, None]:
    """The bounds that lie nearest to the percentiles of `QUANTILES` and `PLACES`, and those that lie so much higher.

    A candidate that is slower by less than that fraction exceeds the second ones no more often than the stable version
    exceeds the first ones, whatever the latencies are distributed like and however both drift together. Requests are
    counted against bounds exactly, so it does no harm that a bound is not the percentile itself.

    Args:
        bounds_s: upper bounds of the buckets in seconds, ascending.
        counts: requests in each bucket, and last those above all bounds; one more than bounds.
        slower: how much slower the candidate may be at each of them, as a fraction, rounded to the nearest bound; the
            `PLACES` may be left out.

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
    wanted = {**QUANTILES, **{name: share for name, share in PLACES.items() if name in slower}}
    found = {name: _nearest(bounds_s, over, 1 - share) for name, share in wanted.items()}
    raised = {name: _raised(bounds_s, bound_s, slower.get(name, 0.0)) for name, bound_s in found.items()}
    return _thresholds(found, total), _thresholds(raised, total)


def _thresholds(latencies_s: Mapping[str, float], requests: int) -> Thresholds:
    named = {f"{name.removeprefix('latency_')}_s": latencies_s[name] for name in QUANTILES}
    places_s = tuple(latencies_s[name] for name in PLACES if name in latencies_s)
    return Thresholds(**named, requests=requests, places_s=places_s)


def _raised(bounds_s: Sequence[float], bound_s: float, slower: float) -> float:
    """The bound that lies nearest to so much more, in proportion."""
    return min(bounds_s, key=lambda bound: abs(math.log(bound / (bound_s * (1 + slower)))))


def _nearest(bounds_s: Sequence[float], over: Sequence[float], share: float) -> float:
    """The bound whose share of slower requests has the log odds nearest to those of `share`."""
    return bounds_s[min(range(len(over)), key=lambda index: abs(_log_odds(over[index]) - _log_odds(share)))]


def _log_odds(share: float) -> float:
    inside = min(max(share, 1e-9), 1 - 1e-9)
    return math.log(inside / (1 - inside))
