"""Latency thresholds, read off a histogram of the stable version before the rollout begins and kept until it ends.

Does the candidate take longer to start? Judged once, before any traffic, on loads of either version in turn.

A test that is made once needs no e-process: its p-value is below 1 / L with a chance of at most 1 / L, as evidence that
may be looked at at any time reaches L. So it takes its part of the family error like any other guardrail.


The weaker latency rule, for sources that tell percentiles of each interval and count no exceedances.

An interval in which the candidate's percentile is more than a tenth above the stable version's is a sign against it.
For a candidate that is not slower at all, a sign is no likelier than heads of a coin, so the signs are tested as a
coin's. This needs at least nine intervals, whatever the traffic; it takes intervals to be independent; it tells nothing
of a slow-down below a tenth; and the percentile of few requests is told with bias, which is why intervals with fewer
than `MIN_SIGN_REQUESTS` requests of either version do not count.


Does each version get the traffic that it should, and does the candidate fail grossly?"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
from scipy.special import betaln

from onnx_ops.domain.rollout import GuardrailResult
from onnx_ops.domain.rollout_observations import LatencyQuantiles, LatencyThresholds, ObservationInterval
from onnx_ops.domain.rollout_policy import (
    COLD_START_SAMPLES,
    DEFAULT_SLOWDOWN,
    LATENCY_PLACES,
    LATENCY_QUANTILES,
    Guardrail,
    GuardrailName,
)
from onnx_ops.statistics.rollout.evidence import Array

FEWEST_REQUESTS = 200
"""Below this, the 99th percentile is read off one or two requests."""

SLOWER_MARGIN = 1.1
MIN_SIGN_REQUESTS: Mapping[GuardrailName, int] = {"latency_p50": 20, "latency_p99": 200}
MIN_SIGN_INTERVALS = 10
"""Intervals that a step takes at least."""

_CHANCES = np.array([0.6, 0.7, 0.8, 0.9, 0.99])

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


def fix_thresholds(
    bounds_s: Sequence[float], counts: Sequence[int], slower: Mapping[str, float]
) -> tuple[LatencyThresholds, LatencyThresholds] | tuple[None, None]:
    """The bounds nearest to `LATENCY_QUANTILES` and `LATENCY_PLACES`, and those that lie so much higher.

    A candidate that is slower by less than that fraction exceeds the second ones no more often than the stable version
    exceeds the first ones, whatever the latencies are distributed like and however both drift together. Requests are
    counted against bounds exactly, so it does no harm that a bound is not the percentile itself.

    Args:
        bounds_s: upper bounds of the buckets in seconds, ascending.
        counts: requests in each bucket, and last those above all bounds; one more than bounds.
        slower: how much slower the candidate may be at each of them, as a fraction, rounded to the nearest bound; the
            `LATENCY_PLACES` may be left out.

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
    wanted = {**LATENCY_QUANTILES, **{name: share for name, share in LATENCY_PLACES.items() if name in slower}}
    found = {name: _nearest(bounds_s, over, 1 - share) for name, share in wanted.items()}
    raised = {name: _raised(bounds_s, bound_s, slower.get(name, 0.0)) for name, bound_s in found.items()}
    return _thresholds(found, total), _thresholds(raised, total)


def _thresholds(latencies_s: Mapping[str, float], requests: int) -> LatencyThresholds:
    named = {f"{name.removeprefix('latency_')}_s": latencies_s[name] for name in LATENCY_QUANTILES}
    places_s = tuple(latencies_s[name] for name in LATENCY_PLACES if name in latencies_s)
    return LatencyThresholds(**named, requests=requests, places_s=places_s)


def _raised(bounds_s: Sequence[float], bound_s: float, slower: float) -> float:
    """The bound that lies nearest to so much more, in proportion."""
    return min(bounds_s, key=lambda bound: abs(math.log(bound / (bound_s * (1 + slower)))))


def _nearest(bounds_s: Sequence[float], over: Sequence[float], share: float) -> float:
    """The bound whose share of slower requests has the log odds nearest to those of `share`."""
    return bounds_s[min(range(len(over)), key=lambda index: abs(_log_odds(over[index]) - _log_odds(share)))]


def _log_odds(share: float) -> float:
    inside = min(max(share, 1e-9), 1 - 1e-9)
    return math.log(inside / (1 - inside))


def evaluate_cold_start(
    rail: Guardrail, candidate_s: Sequence[float], stable_s: Sequence[float], limit: float
) -> GuardrailResult:
    """Return the guardrail `evaluate_cold_start`.

    Args:
        rail: held against a fixed `max` if it has one, else against the stable version.
        candidate_s: seconds that each load of the candidate took until it could answer.
        stable_s: the same of the stable version, in turn on the same machine.
        limit: log10 of the evidence at which it fires.
    """
    seen = min(len(candidate_s), len(stable_s))
    if seen < COLD_START_SAMPLES:
        p, told = 1.0, "not measured yet"
    elif rail.max is not None:
        p = _often_above(candidate_s, rail.max)
        told = f"candidate {_range(candidate_s)}, at most {rail.max:g} s"
    else:
        allowed = DEFAULT_SLOWDOWN if rail.slower is None else rail.slower
        p = _longer([each / (1 + allowed) for each in candidate_s], stable_s)
        told = f"candidate {_range(candidate_s)}, stable {_range(stable_s)}, {100 * allowed:g} % slower is allowed"
    return GuardrailResult(
        name=rail.name,
        evidence=-math.log10(p),
        limit=limit,
        holds=rail.on_violation == "hold",
        seen=seen,
        needed=COLD_START_SAMPLES,
        rule=told,
    )


def _longer(candidate_s: Sequence[float], stable_s: Sequence[float]) -> float:
    """Exact p-value of the rank sum (Wilcoxon 1945, Biometrics Bulletin 1:80-83; Mann and Whitney 1947)."""
    from scipy.stats import mannwhitneyu  # takes long to import, and few policies need it

    return float(mannwhitneyu(candidate_s, stable_s, alternative="greater", method="exact").pvalue)


def _often_above(candidate_s: Sequence[float], max_s: float) -> float:
    """Exact p-value of the sign test of "half of the loads take no longer"."""
    above, n = sum(each > max_s for each in candidate_s), len(candidate_s)
    return float(sum(math.comb(n, k) for k in range(above, n + 1)) / 2**n)


def _range(loads_s: Sequence[float]) -> str:
    return f"{min(loads_s):.3g}-{max(loads_s):.3g} s"


def count_slower_intervals(intervals: Sequence[ObservationInterval], name: GuardrailName) -> tuple[int, int]:
    """(intervals in which the candidate was slower, intervals that could be compared)."""
    slower = compared = 0
    for one in intervals:
        if one.canary_latency is None or one.stable_latency is None:
            continue
        if min(one.canary.requests, one.stable.requests) < MIN_SIGN_REQUESTS[name]:
            continue
        mine, theirs = _percentile(one.canary_latency, name), _percentile(one.stable_latency, name)
        compared += 1
        slower += not mine <= SLOWER_MARGIN * theirs
    return slower, compared


def compute_sign_evidence(slower: int, compared: int) -> float:
    """log10 evidence that signs are likelier than heads: mixture over their chance."""
    logs = slower * np.log(2 * _CHANCES) + (compared - slower) * np.log(2 * (1 - _CHANCES))
    top = float(logs.max())
    return (top + math.log(float(np.exp(logs - top).mean()))) / math.log(10)


def _percentile(latency: LatencyQuantiles, name: GuardrailName) -> float:
    return latency.p50_s if name == "latency_p50" else latency.p99_s


def compute_mismatch_evidence(
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


def is_grossly_failing(canary: tuple[int, int], stable: tuple[int, int], effect: float = 1.0) -> bool:
    """Whether so many of the candidate's requests failed that no test is needed. Each side: errors, requests.

    Where the stable version fails too, the candidate is not to blame.
    """
    return _grossly(canary, stable, BREAKER_REQUESTS * effect, BREAKER_SHARE)


def is_refusing(canary: tuple[int, int], stable: tuple[int, int]) -> bool:
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
