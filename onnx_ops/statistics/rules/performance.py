"""Performance rules: latency, throughput, starts, memory, size and provider."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from statistics import median
from typing import TypeVar

from onnx_ops.domain.decision import GateResult, Verdict
from onnx_ops.domain.evidence import (
    Evidence,
    LatencyComparison,
    PairedRatios,
    ThroughputMeasurement,
    throughput_metric_name,
)
from onnx_ops.domain.execution import RuntimeFacts
from onnx_ops.domain.gate import ColdStartGate, LatencyGate, MemoryGate, SizeGate, ThroughputGate
from onnx_ops.statistics.latency import (
    LOOKS,
    Comparison,
    QuantileComparison,
    compare,
    compare_latency_quantile,
    compare_quantile,
    estimate_pairs_needed,
    explain_withheld_verdict,
    find_trend,
)
from onnx_ops.statistics.rules.common import (
    as_ms,
    as_percent,
    as_size,
    get_baseline,
    judge_gate,
    make_unlimited,
    make_unmeasured,
    name_baseline,
)

T = TypeVar("T", bound=LatencyComparison | PairedRatios)

_SPEEDUP_TEXTS = {
    Verdict.PASS: "faster, with 95 % confidence",
    Verdict.INCONCLUSIVE: "not shown to be faster",
    Verdict.FAIL: "not faster, with 95 % confidence",
}

PROCESS_FIGURES = {"load": "load time", "first": "first inference", "peak": "peak memory"}
"""Descriptions of the quantities of fresh processes, by their name in evidence."""


def _judge_ratio(
    gate: str, metric: str, measured: LatencyComparison | PairedRatios, max_regression: float
) -> GateResult:
    """Judge a ratio; it is INCONCLUSIVE if the host is too biased for a verdict."""
    comparison = compare(measured.log_ratios, tolerance=max_regression)
    noisy = explain_withheld_verdict(measured.log_ratios, measured.self_log_ratios, max_regression)
    limit = f"{1 + max_regression:.4g}x"
    reason = _describe_ratio(measured, comparison, limit)
    # An undecided result shows how many pairs, or which other limit, would decide.
    if comparison.verdict is Verdict.INCONCLUSIVE:
        needed = estimate_pairs_needed(measured.log_ratios, max_regression)
        if needed is None:
            reason += "; the ratio is too near to the limit for any number of pairs"
        elif needed > LOOKS[-1]:
            remedy = f"a run has at most {LOOKS[-1]}: measure on a quieter machine"
            reason += f"; about {needed} consecutive pairs would decide, and {remedy}"
        elif len(measured.log_ratios) >= LOOKS[-1]:
            reason += f"; all {LOOKS[-1]} pairs are measured: measure on a quieter machine"
        else:
            reason += f"; about {needed} pairs would decide, and the time for them ran out"
        if comparison.low > 0 and math.isfinite(comparison.high):
            low = comparison.low / comparison.rest - 1
            high = math.ceil(1000 * (comparison.high * comparison.rest - 1) + 1e-9) / 1000
            below = f", and a limit of {as_percent(low)} broken" if low > 0 else ""
            reason += f"; a limit of {as_percent(high)} would be kept{below}"
    reason = f"{noisy}; {reason}" if noisy else reason
    result = _make_result(
        gate, metric, f"≤ {limit}", reason, comparison, bound=1 + max_regression, unit="x"
    )
    return replace(result, verdict=Verdict.INCONCLUSIVE) if noisy else result


def _describe_ratio(
    measured: LatencyComparison | PairedRatios, comparison: Comparison, limit: str
) -> str:
    """Return the ratio with its interval, limit, pairs and trend as a text."""
    if isinstance(measured, LatencyComparison):
        preempted = measured.preempted / measured.runs if measured.runs > 0 else 0.0
        means = f", each the mean of {measured.calls}" if measured.calls > 1 else ""
        of = "latency"
        counted = f"session pairs ({measured.runs} runs{means}, {as_percent(preempted)} preempted)"
    else:
        of = PROCESS_FIGURES.get(measured.figure, f"time per request at {measured.figure}")
        counted = (
            "pairs of fresh processes" if measured.figure in PROCESS_FIGURES else "session pairs"
        )
    trend = ""
    if (change := find_trend(measured.log_ratios)) is not None:
        trend = f"; it {'grew' if change > 0 else 'fell'} by {as_percent(abs(change))} over the run"
    interval = f"{comparison.estimate:.4g}x [{comparison.low:.4g}, {comparison.high:.4g}]"
    against = name_baseline(measured.against)
    return f"{interval} the {of} of {against}, limit {limit}, {comparison.n} {counted}{trend}"


def _make_result(
    gate: str,
    metric: str,
    limit: str,
    reason: str,
    measured: Comparison | QuantileComparison,
    *,
    bound: float,
    unit: str,
    advisory: bool = False,
) -> GateResult:
    return GateResult(
        gate=gate,
        metric=metric,
        limit=limit,
        verdict=measured.verdict,
        reason=reason,
        estimate=_finite_or_none(measured.estimate),
        low=_finite_or_none(measured.low),
        high=_finite_or_none(measured.high),
        bound=bound,
        unit=unit,
        n=measured.n,
        advisory=advisory,
    )


def _finite_or_none(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _judge_regression(
    gate: str, figure: str, max_regression: float | None, evidence: Evidence
) -> Iterator[GateResult]:
    """Judge the ratio of a quantity to that of the baseline.

    A result is yielded only if the gate has such a limit, and there is a baseline.
    """
    baseline = get_baseline(evidence)
    if max_regression is None or not baseline:
        return
    measured: Sequence[LatencyComparison | PairedRatios] = evidence.comparisons
    if gate != "latency":
        measured = [paired for paired in evidence.ratios if paired.figure == figure]
    metric = f"{figure} vs {baseline}"
    against = _select_measured(measured, baseline)
    for paired in against:
        yield _judge_ratio(gate, metric, paired, max_regression)
    if not against:
        yield make_unmeasured(gate, metric, f"≤ {1 + max_regression:.4g}x")


def _select_measured(measured: Sequence[T], against: str) -> list[T]:
    """Return the ratios to one model that have at least one measured pair."""
    return [paired for paired in measured if paired.against == against and any(paired.log_ratios)]


@judge_gate.register
def judge_latency(gate: LatencyGate, evidence: Evidence) -> Iterator[GateResult]:
    """Judge the latency ratio to the baseline, the speed-up, and absolute quantiles."""
    yield from _judge_regression("latency", "ratio", gate.max_regression, evidence)
    if gate.faster_than is not None and evidence.variant != gate.faster_than:
        yield from _judge_speedup(gate.faster_than, gate.min_speedup or 0.0, evidence)
    limits = {
        name: (share, limit)
        for name, (share, limit) in gate.quantiles().items()
        if limit is not None
    }
    for name, (share, limit_s) in limits.items():
        yield _judge_quantile(name, share, limit_s, evidence)
    if not limits and gate.max_regression is None and gate.faster_than is None:
        yield make_unlimited("latency", "")


def _judge_speedup(faster_than: str, speedup: float, evidence: Evidence) -> Iterator[GateResult]:
    """Judge whether a variant is faster than another one by a required share.

    Only the interval decides: on a noisy host it is wide, and the result is INCONCLUSIVE.
    """
    bound = 1 / (1 + speedup)
    metric, limit = f"faster than {faster_than}", f"< {bound:.4g}x"
    enough = f" by {as_percent(speedup)}" if speedup else ""
    against = _select_measured(evidence.comparisons, faster_than)
    for comparison in against:
        compared = compare(comparison.log_ratios, tolerance=bound - 1)
        ratio = _describe_ratio(comparison, compared, f"{bound:.4g}x")
        reason = f"{_SPEEDUP_TEXTS[compared.verdict]}{enough}: {ratio}"
        yield _make_result("latency", metric, limit, reason, compared, bound=bound, unit="x")
    if not against:
        yield make_unmeasured("latency", metric, limit)


def _judge_quantile(name: str, share: float, limit_s: float, evidence: Evidence) -> GateResult:
    """Judge a quantile of the run times; advisory if the machine is shared."""
    samples, limit, advisory = evidence.latency, f"≤ {as_ms(limit_s)}", not evidence.dedicated
    if samples is None or not samples.sorted_ns:
        return make_unmeasured("latency", name, limit, advisory=advisory)
    quantile = compare_latency_quantile(samples.sorted_ns, share, limit_s)
    reason = (
        f"{name} is {as_ms(quantile.estimate)} [{as_ms(quantile.low)}, {as_ms(quantile.high)}], "
        f"limit {as_ms(limit_s)}, {quantile.exceeding} of {quantile.n} runs above it"
    )
    if quantile.verdict is Verdict.INCONCLUSIVE and quantile.n < quantile.needed:
        reason += f"; to pass, {quantile.needed} runs are needed"
    return _make_result(
        "latency", name, limit, reason, quantile, bound=limit_s, unit="s", advisory=advisory
    )


@judge_gate.register
def judge_throughput(gate: ThroughputGate, evidence: Evidence) -> Iterator[GateResult]:
    """Judge throughput by the time per request; higher values are worse."""
    figure = throughput_metric_name(gate.concurrency)
    yield from _judge_regression("throughput", figure, gate.max_regression, evidence)
    if gate.min is not None:
        measured = [
            t for t in evidence.throughput if t.concurrency == gate.concurrency and t.per_second
        ]
        advisory = not evidence.dedicated
        for session in measured:
            yield _judge_rate(figure, session, gate.min, advisory=advisory)
        if not measured:
            yield make_unmeasured("throughput", figure, f"≥ {_rate(gate.min)}", advisory=advisory)
    if gate.max_regression is None and gate.min is None:
        yield make_unlimited("throughput", figure)


def _judge_rate(
    figure: str, session: ThroughputMeasurement, least: float, *, advisory: bool
) -> GateResult:
    """Judge the median request rate of sessions by the time per request."""
    per_request = compare_quantile([1 / rate for rate in session.per_second], 0.5, 1 / least)
    low = 1 / per_request.high if per_request.high > 0 else 0.0
    high = 1 / per_request.low if per_request.low > 0 else math.inf
    middle = median(session.per_second)
    reason = (
        f"median {_rate(middle)} [{_rate(low)}, {_rate(high)}] at {figure}, limit {_rate(least)}, "
        f"{per_request.n} sessions ({session.requests} requests)"
    )
    result = _make_result(
        "throughput",
        figure,
        f"≥ {_rate(least)}",
        reason,
        per_request,
        bound=least,
        unit="req/s",
        advisory=advisory,
    )
    return replace(result, estimate=middle, low=low, high=_finite_or_none(high))


def _rate(per_second: float) -> str:
    return f"{per_second:.4g} req/s"


@judge_gate.register
def judge_cold_start(gate: ColdStartGate, evidence: Evidence) -> Iterator[GateResult]:
    """Judge the load time and the time to the first inference of fresh processes."""
    for figure in ("load", "first"):
        yield from _judge_regression("cold_start", figure, gate.max_regression, evidence)
    starts = evidence.starts
    for figure, limit, samples in (
        ("load", gate.load, starts.load_s if starts else ()),
        ("first", gate.first, starts.first_s if starts else ()),
    ):
        if limit is not None:
            yield _judge_median(
                "cold_start", figure, samples, limit, "s", advisory=not evidence.dedicated
            )
    if (gate.load, gate.first, gate.max_regression) == (None, None, None):
        yield make_unlimited("cold_start", "")


@judge_gate.register
def judge_memory(gate: MemoryGate, evidence: Evidence) -> Iterator[GateResult]:
    """Judge peak memory, which other load on the machine does not change."""
    yield from _judge_regression("memory", "peak", gate.max_regression, evidence)
    if gate.max is not None:
        samples = () if evidence.starts is None else evidence.starts.peak_bytes
        yield _judge_median("memory", "peak", samples, gate.max, "B", advisory=False)
    if gate.max is None and gate.max_regression is None:
        yield make_unlimited("memory", "")


def _judge_median(
    gate: str, figure: str, samples: Sequence[float], limit: float, unit: str, *, advisory: bool
) -> GateResult:
    def text(value: float) -> str:
        return as_ms(value) if unit == "s" else as_size(round(value)) if value < math.inf else "inf"

    if not samples:
        return make_unmeasured(gate, figure, f"≤ {text(limit)}", advisory=advisory)
    center = compare_quantile(samples, 0.5, limit)
    reason = (
        f"median {figure} {text(center.estimate)} [{text(center.low)}, "
        f"{text(center.high)}], limit {text(limit)}, {center.n} fresh processes, "
        f"from {text(min(samples))} to {text(max(samples))}"
    )
    return _make_result(
        gate,
        figure,
        f"≤ {text(limit)}",
        reason,
        center,
        bound=float(limit),
        unit=unit,
        advisory=advisory,
    )


@judge_gate.register
def judge_size(gate: SizeGate, evidence: Evidence) -> Iterator[GateResult]:
    """Judge the size of the model on disk in bytes."""
    limit = f"≤ {as_size(gate.max)}"
    if evidence.size_bytes <= 0:
        yield make_unmeasured("size", "", limit)
        return
    yield GateResult(
        gate="size",
        metric="",
        limit=limit,
        verdict=Verdict.PASS if evidence.size_bytes <= gate.max else Verdict.FAIL,
        reason=f"{as_size(evidence.size_bytes)} on disk, limit {as_size(gate.max)}",
        estimate=float(evidence.size_bytes),
        bound=float(gate.max),
        unit="B",
        n=1,
    )


def judge_provider(evidence: Evidence) -> Iterator[GateResult]:
    """Yield a result unless evidence shows that the requested provider ran all nodes.

    The result is an ERROR if another provider ran nodes instead, and INCONCLUSIVE if this was not
    recorded. Nodes that compute shapes are not counted. For the CPU provider, only the list of used
    providers is checked.
    """
    facts = evidence.runtime
    first = facts.asked[0] if facts and facts.asked else ""
    verdict, reason = Verdict.INCONCLUSIVE, ""
    if facts is None or not first or not facts.used:
        reason = "which provider ran was not recorded"
    elif first not in facts.used:
        verdict = Verdict.ERROR
        reason = f"{first} was requested, but {', '.join(facts.used)} ran instead"
    elif first != "CPUExecutionProvider":
        if fallbacks := _describe_fallbacks(facts, first):
            verdict, reason = Verdict.ERROR, f"{first} was requested, but {fallbacks}"
        elif not facts.nodes.get(first):
            reason = f"which nodes {first} ran was not recorded"
    if reason:
        yield GateResult(gate="provider", metric="", limit="", verdict=verdict, reason=reason)


def _describe_fallbacks(facts: RuntimeFacts, requested: str) -> str:
    """Return how many nodes ran on other execution providers.

    Nodes that compute shapes are not counted, since they belong on the CPU.
    """
    moved = Counter(facts.nodes) - Counter(facts.shape_nodes)
    others = sorted(name for name in moved if name != requested)
    return ", ".join(f"{moved[name]} nodes fell back on {name}" for name in others)
