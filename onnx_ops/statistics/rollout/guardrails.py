"""Guardrails: latency, starts and ends of servers, traffic split, gross failures."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
from scipy.special import betaln

from onnx_ops.domain.rollout import GuardrailResult
from onnx_ops.domain.rollout_observations import (
    LatencyThresholds,
    ObservationInterval,
    ServerUptime,
)
from onnx_ops.domain.rollout_policy import (
    COLD_START_SAMPLES,
    DEFAULT_SLOWDOWN,
    LATENCY_PLACES,
    LATENCY_QUANTILES,
    Guardrail,
    GuardrailName,
)
from onnx_ops.statistics.rollout.evidence import GRID, Array, log_mean_exp

FEWEST_REQUESTS = 200
"""Minimum number of requests for latency thresholds.

With fewer requests, the 99th percentile depends on one or two of them.
"""

SLOWER_MARGIN = 1.1
"""Ratio of percentiles above which an interval is a sign against the candidate."""
MIN_SIGN_REQUESTS: Mapping[GuardrailName, int] = {"latency_p50": 20, "latency_p99": 200}
"""Minimum number of requests of each version in a compared interval."""
MIN_SIGN_INTERVALS = 10
"""Minimum number of intervals of a step for a guardrail on percentiles."""

_CHANCES = np.array([0.6, 0.7, 0.8, 0.9, 0.99])
"""Probabilities of a sign that `compute_sign_evidence` tests for.

They have equal weights.
"""

MISMATCH_LIMIT = 3.0
"""log10 of the evidence of a wrong traffic split that pauses a rollout.

A correct split reaches it with a probability of at most 0.1 %.
"""
MISMATCH_TOLERANCE = 0.1
"""Tolerated deviation of the split, as a share of the smaller version's weight.

Users are not equally active.
"""

BREAKER_REQUESTS = 20
BREAKER_SHARE = 0.5
BREAKER_TIMES = 5
"""Conditions of a gross failure.

There were at least 20 requests, and at least half of them failed. The share of failed requests is
at least five times the stable version's share, or the stable version had no requests. If requests
are counted by block of users, as in an A/B test, their number is divided by the design effect.
Twenty requests of one user are worth one request.
"""
BREAKER_LIMIT = 3.0
"""log10 of the evidence of a gross failure or of refusals by units.

It replaces the minimum number of requests, and is also evaluated within epochs.
"""
ENDS_LIMIT = 3.0
"""log10 of the evidence that servers end too often, evaluated after each end."""
REFUSED_REQUESTS = 200
REFUSED_SHARE = 0.1
"""Conditions of a candidate that refuses too many requests.

There were at least 200 requests, and at least a tenth of them was refused. The share of refused
requests is at least five times the stable version's share, or the stable version had no requests.
"""


def fix_thresholds(
    bounds_s: Sequence[float], counts: Sequence[int], max_increases: Mapping[str, float]
) -> tuple[LatencyThresholds, LatencyThresholds] | tuple[None, None]:
    """Return latency thresholds, chosen from a histogram of the stable version.

    The thresholds of the stable version are the bounds closest to the percentiles of
    `LATENCY_QUANTILES` and `LATENCY_PLACES`. The thresholds of the candidate are higher by the
    allowed slow-down. A candidate with a smaller slow-down exceeds its thresholds no more often
    than the stable version exceeds its own. This is true for any distribution of latencies, and for
    any drift that both versions share. Requests are counted exactly against bounds of the
    histogram, so a bound need not be the exact percentile.

    Args:
        bounds_s: upper bounds of the buckets in seconds, ascending.
        counts: requests in each bucket, followed by the requests above all bounds.
        max_increases: allowed slow-down of the candidate at each percentile, as a fraction, rounded
            to the nearest bound; the `LATENCY_PLACES` may be omitted.

    Returns:
        The thresholds of the stable version and of the candidate; (None, None) if there were too
        few requests.

    Raises:
        ValueError: the number of counts is not the number of bounds plus 1.
    """
    if len(counts) != len(bounds_s) + 1:
        raise ValueError(f"{len(counts)} counts do not fit {len(bounds_s)} bounds")
    total = sum(counts)
    if total < FEWEST_REQUESTS:
        return None, None
    over = [(total - below) / total for below in itertools.accumulate(counts[:-1])]
    shares = {
        **LATENCY_QUANTILES,
        **{name: share for name, share in LATENCY_PLACES.items() if name in max_increases},
    }
    stable: dict[str, float] = {}
    # In the tails, log odds compare shares by their ratio, so that high percentiles are fitted too.
    for name, share in shares.items():
        wanted = _log_odds(1 - share)
        stable[name] = bounds_s[
            min(range(len(over)), key=lambda index: abs(_log_odds(over[index]) - wanted))
        ]
    candidate = {
        name: min(
            bounds_s,
            key=lambda bound: abs(math.log(bound / (limit * (1 + max_increases.get(name, 0.0))))),
        )
        for name, limit in stable.items()
    }
    return _make_thresholds(stable, total), _make_thresholds(candidate, total)


def _make_thresholds(latencies_s: Mapping[str, float], requests: int) -> LatencyThresholds:
    named = {f"{name.removeprefix('latency_')}_s": latencies_s[name] for name in LATENCY_QUANTILES}
    places_s = tuple(latencies_s[name] for name in LATENCY_PLACES if name in latencies_s)
    return LatencyThresholds(**named, requests=requests, places_s=places_s)


def _log_odds(share: float) -> float:
    inside = min(max(share, 1e-9), 1 - 1e-9)
    return math.log(inside / (1 - inside))


def evaluate_cold_start(
    rail: Guardrail, candidate_s: Sequence[float], stable_s: Sequence[float], limit: float
) -> GuardrailResult:
    """Evaluate whether the candidate takes longer to start than the stable version.

    The guardrail is evaluated once, before any traffic. The loads of both versions alternate. A
    single test needs no e-process. Its p-value is below 1 / L with a probability of at most 1 / L,
    like anytime-valid evidence that reaches L. The test therefore shares the family-wise error rate
    with the other guardrails.

    Args:
        rail: if it has a fixed `max`, the candidate is compared with this limit instead.
        limit: log10 of the evidence at which the guardrail fires.
    """
    loads = min(len(candidate_s), len(stable_s))
    if loads < COLD_START_SAMPLES:
        p, rule = 1.0, "not measured yet"
    elif rail.max is not None:
        # This is the exact sign test of the hypothesis that at least half of the loads take at most
        # `max`.
        above, n = sum(each > rail.max for each in candidate_s), len(candidate_s)
        p = float(sum(math.comb(n, k) for k in range(above, n + 1)) / 2**n)
        rule = f"candidate {_range(candidate_s)}, a median of at most {rail.max:g} s is allowed"
    else:
        allowed = (
            DEFAULT_SLOWDOWN if rail.max_latency_increase is None else rail.max_latency_increase
        )
        from scipy.stats import mannwhitneyu  # The import is local, since few policies need it.

        # This is the exact rank sum test (Wilcoxon 1945, Biometrics Bulletin 1:80-83; Mann and
        # Whitney 1947).
        scaled_s = [each / (1 + allowed) for each in candidate_s]
        p = float(mannwhitneyu(scaled_s, stable_s, alternative="greater", method="exact").pvalue)
        rule = (
            f"candidate {_range(candidate_s)}, stable {_range(stable_s)}, "
            f"{100 * allowed:g} % slower is allowed"
        )
    return GuardrailResult(
        name=rail.name,
        evidence=-math.log10(p),
        limit=limit,
        holds=rail.on_violation == "hold",
        compared=loads,
        required=COLD_START_SAMPLES,
        rule=rule,
    )


def _range(loads_s: Sequence[float]) -> str:
    return f"{min(loads_s):.3g}-{max(loads_s):.3g} s"


def count_slower_intervals(
    intervals: Sequence[ObservationInterval], name: GuardrailName
) -> tuple[int, int]:
    """Return the numbers of intervals with a slower candidate, and of compared ones.

    This weaker rule is for sources that report percentiles of each interval, but do not count
    requests above a threshold. An interval is a sign against the candidate if the candidate's
    percentile is more than a tenth above that of the stable version. For a candidate that is not
    slower, the probability of a sign is at most one half. To fire, one guardrail needs at least six
    slower intervals, and one of three needs eight. The rule assumes that intervals are independent,
    and detects no slow-down below a tenth. Percentiles of few requests are biased, so intervals
    with fewer than `MIN_SIGN_REQUESTS` of either version are skipped.
    """
    slower = compared = 0
    for interval in intervals:
        if interval.canary_latency is None or interval.stable_latency is None:
            continue
        if min(interval.canary.requests, interval.stable.requests) < MIN_SIGN_REQUESTS[name]:
            continue
        candidate, stable = interval.canary_latency.p99_s, interval.stable_latency.p99_s
        if name == "latency_p50":
            candidate, stable = interval.canary_latency.p50_s, interval.stable_latency.p50_s
        compared += 1
        slower += not candidate <= SLOWER_MARGIN * stable
    return slower, compared


def compute_sign_evidence(slower: int, compared: int) -> float:
    """Return log10 evidence that the probability of a sign is above one half."""
    logs = slower * np.log(2 * _CHANCES) + (compared - slower) * np.log(2 * (1 - _CHANCES))
    return float(log_mean_exp(logs)) / math.log(10)


def evaluate_ends(
    before: Sequence[ServerUptime], now: Sequence[ServerUptime]
) -> GuardrailResult | None:
    """Evaluate whether servers end more often than with the stable version alone.

    Return None if no server ended. Both versions end with their server, so that the traffic split
    gives no evidence. If ends are a Poisson process of one rate, the number of all ends that fall
    into this rollout is binomial. The probability of one end is the rollout's share of the time.
    The evidence is the likelihood ratio of this law, averaged over `GRID`. It is evaluated after
    each end; a higher limit compensates for this. In simulations, at most 0.1 % of rollouts reach
    the limit, for any rate and any time before.
    """
    ends_before, ends_now = (sum(each.ends for each in part) for part in (before, now))
    if not ends_now:
        return None
    before_s, now_s = (sum(each.seconds for each in part) for part in (before, now))
    logs = np.zeros(len(GRID))
    if before_s > 0:
        share = np.log(before_s + now_s) - np.log(before_s + now_s * GRID)
        logs = ends_now * np.log(GRID) + (ends_before + ends_now) * share
    by_server = Counter[str]()
    for each in now:
        by_server[each.server] += each.ends
    servers = ", ".join(f"{name} ({count})" for name, count in by_server.most_common() if count)
    return GuardrailResult(
        name="ends",
        evidence=float(log_mean_exp(logs)) / math.log(10),
        limit=ENDS_LIMIT,
        rule=f"{ends_now} ends of servers without a last report in {_format_time(now_s)} of this "
        f"rollout: {servers}; {ends_before} in {_format_time(before_s)} with the stable "
        "version alone",
    )


def _format_time(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 7200 else f"{seconds / 3600:.0f} h"


def compute_mismatch_evidence(
    canary: npt.ArrayLike,
    requests: npt.ArrayLike,
    percent: npt.ArrayLike,
    effect: npt.ArrayLike = 1.0,
) -> Array:
    """Return log10 evidence that the candidate's share of requests is wrong.

    The share is wrong if it differs from the candidate's weight by more than a tenth of the smaller
    version's weight. The evidence is a beta-binomial mixture, divided by the likelihood of the best
    fit within the tolerance. It is therefore valid for each split within the tolerance (universal
    inference: Wasserman, Ramdas and Balakrishnan 2020, PNAS 117:16880-16890). The arguments
    broadcast.

    Args:
        percent: the requested share, strictly between 0 and 100.
        effect: design effect of the requests (`design_effect.compute_split_effect`); 1 for units.
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


def is_grossly_failing(
    canary: tuple[int, int], stable: tuple[int, int], effect: float = 1.0
) -> bool:
    """Return whether the candidate fails so often that no test is needed.

    If the stable version fails too, the candidate is not the cause. Each version has a pair of
    errors and requests.
    """
    return _exceeds(canary, stable, BREAKER_REQUESTS * effect, BREAKER_SHARE)


def is_refusing(canary: tuple[int, int], stable: tuple[int, int]) -> bool:
    """Return whether the candidate refuses requests that the stable version accepts.

    Each version has a pair of refused requests and all requests. Evidence that grows with each
    request would be misled by a burst of wrong requests of one client, which all reach the same
    version.
    """
    return _exceeds(canary, stable, REFUSED_REQUESTS, REFUSED_SHARE)


def _exceeds(canary: tuple[int, int], stable: tuple[int, int], fewest: float, share: float) -> bool:
    (errors, requests), (others, compared) = canary, stable
    if requests < fewest or errors < share * requests:
        return False
    return compared == 0 or errors * compared >= BREAKER_TIMES * others * requests
