"""The traffic of an endpoint: measured now, or recorded by its last rollout."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace

from onnx_ops.domain.rollout_forecast import Traffic
from onnx_ops.domain.rollout_observations import (
    GenerationUnits,
    LatencyThresholds,
    MetricsReading,
    RequestCounts,
    UserBlocks,
    sum_generation,
)
from onnx_ops.errors import ServiceUnavailableError, UserError
from onnx_ops.ports import Context
from onnx_ops.release.journal import Journal
from onnx_ops.release.status import build_timeline

_POLL_S = 5.0
_LATE_S = 180.0
"""Time that a metrics service can take to report counts, added to the window."""
_KEYLESS = 0.98
"""Ratio of units to requests from which requests are assumed to have no key."""
_MOST_USERS = 10_000_000


def measure_traffic(
    context: Context,
    endpoint: str,
    window_s: float,
    *,
    sleep: Callable[[float], None] = time.sleep,
) -> Traffic:
    """Measure an endpoint's traffic from the counts of its metrics source.

    The rate is that of the window. The share of errors, and the latencies, are those of all counts
    that the source has of the stable version.

    Args:
        window_s: shortest time between the two readings that are compared, in seconds.

    Raises:
        NotFoundError: no pipeline has bound the endpoint.
        UserError: the endpoint lacks a version, or got no requests.
        ServiceUnavailableError: the source does not answer, returns outdated counts, or its counts
            restarted.
    """
    journal = Journal.open(context, endpoint)
    state, stable = journal.state, journal.state.roles.stable
    config, candidate = journal.config, journal.state.roles.candidate
    if stable is None:
        raise UserError(
            "the endpoint serves no version, so its traffic is zero",
            where=endpoint,
            remedy="Give the expected traffic: --rate 5/s.",
        )
    seen = state.observations
    # A rollout in progress reads the same counts. Reading with other latency limits would restart
    # its counts.
    limits: dict[str, LatencyThresholds | None] = {}
    if candidate is not None:
        limits[candidate.name] = None if seen is None else seen.slower
    limits[stable.name] = None if seen is None else seen.thresholds
    source = context.metrics(config)
    before, after = _read_window(lambda: source.read(config, limits), window_s, sleep)
    added = _subtract(before, after, endpoint)
    rate = added.requests / (after.at - before.at)
    if not added.requests:
        raise UserError(
            f"no request was counted in {after.at - before.at:.0f} s",
            where=endpoint,
            remedy="Measure longer with --window 10min, or give the expected traffic: --rate 5/s.",
        )
    counts = after.sum_tallies().get(stable.name, added)
    histogram = source.latencies(config, stable.name)
    bounds_s, latencies = ((), ()) if histogram is None else histogram
    split = None if seen is None else next((s for s in reversed(seen.drawn) if s.epochs), None)
    users = (
        _estimate_users(after, stable.name)
        if split is None
        else _solve_users(rate, split, state.policy.epoch)
    )
    return Traffic(
        rate=rate,
        errors=min(_divide(counts.errors, counts.requests), 0.999),
        users=users,
        counted=added.requests,
        bounds_s=tuple(bounds_s),
        latencies=tuple(latencies),
        feedback=_divide(counts.feedback, counts.requests),
        success=_divide(counts.successes, counts.feedback),
    )


def _divide(part: int, whole: int) -> float:
    return part / whole if whole else 0.0


def _read_window(
    read: Callable[[], MetricsReading], window_s: float, sleep: Callable[[float], None]
) -> tuple[MetricsReading, MetricsReading]:
    """Return readings at the beginning and the end of the window.

    A metrics service can report later than the window ends. The last reading is therefore repeated
    for up to `_LATE_S` seconds until its time is later than that of the first.
    """
    before = read()
    sleep(window_s)
    after, waited_s = read(), window_s
    while after.at <= before.at and waited_s < window_s + _LATE_S:
        sleep(_POLL_S)
        after, waited_s = read(), waited_s + _POLL_S
    return before, after


def read_recorded_traffic(context: Context, endpoint: str) -> Traffic | None:
    """Return the traffic of the endpoint's last rollout in its ledger.

    The result is None if the ledger has no requests of this rollout in intervals of known duration.
    """
    timeline = build_timeline(endpoint, context.ledger.read(endpoint))
    if timeline is None or not timeline.history:
        return None
    seen = timeline.history[-1]
    timed = [each for each in seen.intervals if each.seconds > 0]
    seconds = sum(each.seconds for each in timed)
    requests = sum(each.canary.requests + each.stable.requests for each in timed)
    if not requests:
        return None
    rate = requests / seconds
    stable = sum(each.stable.requests for each in timed)
    errors = sum(each.stable.errors for each in timed) / stable if stable else 0.0
    split = next((each for each in reversed(seen.drawn) if each.epochs), None)
    users = 0 if split is None else _solve_users(rate, split, timeline.policy.epoch)
    return Traffic(rate=rate, errors=min(errors, 0.999), users=users, counted=requests)


def _subtract(before: MetricsReading, after: MetricsReading, endpoint: str) -> RequestCounts:
    """Return the requests and errors of all deployments between two readings.

    Raises:
        ServiceUnavailableError: the counts restarted, or the second reading is not later.
    """
    totals: list[RequestCounts | None] = [
        total.minus(before.sum_tallies().get(name)) for name, total in after.sum_tallies().items()
    ]
    known = [each for each in totals if each is not None]
    if after.at <= before.at or len(known) < len(totals) or before.origin != after.origin:
        raise ServiceUnavailableError(
            "the metrics source has no counts of the measured time",
            where=endpoint,
            why="its counters or its targets restarted, or it returned no later counts",
            remedy="Try again, measure longer with --window, or give the traffic: --rate 5/s.",
        )
    total = RequestCounts()
    for each in known:
        total = replace(
            total, requests=total.requests + each.requests, errors=total.errors + each.errors
        )
    return total


def _estimate_users(reading: MetricsReading, stable: str) -> int:
    """Estimate the number of equally active users from the counts of blocks of users.

    A user belongs to one of the blocks. Let w be the users' shares of all requests. The squared
    coefficient of variation of the blocks' counts is about the number of blocks times the sum of
    w^2, plus that of Poisson counts. If the first term is within two standard errors of Poisson
    counts, as many users as requests are assumed. The result is 0 if the source does not count
    blocks, or if at least half of the requests lack a key.
    """
    latest = max((one.generation for one in reading.counts), default=0)
    blocks: UserBlocks | None = (
        sum_generation(reading.counts, latest).blocks.get(stable, {}).get("errors")
    )
    if blocks is None:
        return 0
    *keyed, keyless = blocks.requests
    total = sum(keyed)
    if total <= keyless:
        return 0
    mean = total / len(keyed)
    variation = sum((n - mean) ** 2 for n in keyed) / len(keyed) / mean**2
    excess = variation - 1 / mean
    noise = 2 * math.sqrt(2 / len(keyed)) / mean
    return max(1, total if excess <= noise else round(len(keyed) / excess))


def _solve_users(rate: float, split: GenerationUnits, epoch_s: float) -> int:
    """Return the number of equally active users who give the counted units.

    N users with A requests in an epoch give N (1 - exp(-A / N)) units. The result is 0 if no units
    were counted. It is also 0 if nearly every request is a unit, so that keys seem to be missing.
    """
    counted = split.units.get("errors")
    requests = rate * epoch_s
    if counted is None or not split.epochs:
        return 0
    units = (sum(counted.candidate) + sum(counted.stable)) / split.epochs
    if units <= 0 or units >= _KEYLESS * requests:
        return 0
    low, high = 1, _MOST_USERS
    while low < high:
        middle = (low + high) // 2
        if -middle * math.expm1(-requests / middle) < units:
            low = middle + 1
        else:
            high = middle
    return low
