"""The weaker latency rule, for sources that tell percentiles of each interval and count no exceedances.

An interval in which the candidate's percentile is more than a tenth above the stable version's is a sign against it.
For a candidate that is not slower at all, a sign is no likelier than heads of a coin, so the signs are tested as a
coin's. This needs at least nine intervals, whatever the traffic; it takes intervals to be independent; it tells nothing
of a slow-down below a tenth; and the percentile of few requests is told with bias, which is why intervals with fewer
than `FEWEST` requests of either version do not count.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from onnx_ops.domain.rollout_observed import Interval, Quantiles
from onnx_ops.domain.rollout_policy import GuardrailName

MARGIN = 1.1
FEWEST: Mapping[GuardrailName, int] = {"latency_p50": 20, "latency_p99": 200}
NEEDED = 10
"""Intervals that a step takes at least."""

_CHANCES = np.array([0.6, 0.7, 0.8, 0.9, 0.99])


def signs(intervals: Sequence[Interval], name: GuardrailName) -> tuple[int, int]:
    """(intervals in which the candidate was slower, intervals that could be compared)."""
    slower = compared = 0
    for one in intervals:
        if one.canary_latency is None or one.stable_latency is None:
            continue
        if min(one.canary.requests, one.stable.requests) < FEWEST[name]:
            continue
        mine, theirs = _percentile(one.canary_latency, name), _percentile(one.stable_latency, name)
        compared += 1
        slower += not mine <= MARGIN * theirs
    return slower, compared


def sign_evidence(slower: int, compared: int) -> float:
    """log10 evidence that signs are likelier than heads: mixture over their chance."""
    logs = slower * np.log(2 * _CHANCES) + (compared - slower) * np.log(2 * (1 - _CHANCES))
    top = float(logs.max())
    return (top + math.log(float(np.exp(logs - top).mean()))) / math.log(10)


def _percentile(latency: Quantiles, name: GuardrailName) -> float:
    return latency.p50_s if name == "latency_p50" else latency.p99_s
