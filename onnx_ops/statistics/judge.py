"""Judge evidence by gates: a pure function from gates and evidence to a decision with reasons."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from onnx_ops.domain.decision import Decision, GateResult, RankingMetrics, Verdict
from onnx_ops.domain.evidence import (
    ActivationMeasurement,
    ColdStartMeasurement,
    Evidence,
    Interval,
    LatencyComparison,
    PairedRatios,
    ParityMeasurement,
    ThroughputMeasurement,
    WeightMeasurement,
    throughput_metric_name,
)
from onnx_ops.domain.gate import ACCURACY, Gate, MetricGate, find_gate_kind
from onnx_ops.domain.pipeline import EXPORT
from onnx_ops.statistics.intervals import change_interval
from onnx_ops.statistics.latency import compare, compare_quantile
from onnx_ops.statistics.rules.common import join_lines, judge_gate
from onnx_ops.statistics.rules.metric import judge_independence
from onnx_ops.statistics.rules.parity_rules import ACTIVATIONS, EXPORT_OUTPUTS, OUTPUTS, WEIGHTS
from onnx_ops.statistics.rules.performance import judge_provider

_RANKING_METRICS = 2
"""Schema of evidence that introduced ranking metrics in decisions; older evidence is judged without them."""


def judge(gates: Sequence[Gate], evidence: Evidence) -> Decision:
    """Judge evidence by gates.

    A failed measurement makes every gate an ERROR with its reason. A value that is not a number is an ERROR and is not
    judged further. A gate that does not apply (the first export has no baseline) yields nothing; one that applies and
    finds no measurement is INCONCLUSIVE.
    """
    if evidence.failure:
        reason = join_lines(evidence.failure)
        results = tuple(_make_error(gate.kind, reason) for gate in gates)
        return Decision(variant=evidence.variant, target=evidence.target, results=results)
    sound = replace(
        evidence,
        parity=tuple(m for m in evidence.parity if m.mismatch or _is_sound(m)),
        export_parity=tuple(m for m in evidence.export_parity if m.mismatch or _is_sound(m)),
        weights=tuple(w for w in evidence.weights if _is_sound(w)),
        activations=tuple(a for a in evidence.activations if _is_sound(a)),
        comparisons=tuple(c for c in evidence.comparisons if _is_sound(c)),
        ratios=tuple(r for r in evidence.ratios if _is_sound(r)),
        throughput=tuple(t for t in evidence.throughput if _is_sound(t)),
        starts=evidence.starts if evidence.starts and _is_sound(evidence.starts) else None,
    )
    results = (
        *(result for gate in gates for result in judge_gate(gate, sound)),
        *judge_independence(gates, sound),
        *_find_non_finite(evidence),
        *judge_provider(evidence),
    )
    against_export = [
        compare(c.log_ratios, tolerance=0.0)
        for c in sound.comparisons
        if c.against == EXPORT != evidence.variant and any(c.log_ratios)
    ]
    ratio = max((c.estimate for c in against_export), default=math.inf)
    return Decision(
        variant=evidence.variant,
        target=evidence.target,
        results=results,
        faster_than_export=all(c.verdict is Verdict.PASS for c in against_export) if against_export else None,
        latency_ratio=ratio if math.isfinite(ratio) else None,
        standing=compute_ranking_metrics(gates, sound) if evidence.schema >= _RANKING_METRICS else None,
    )


def _find_non_finite(evidence: Evidence) -> Iterator[GateResult]:
    """Yield one ERROR for each kind of measurement with NaN or infinity, whether or not a gate needs it."""
    for name, measurements in ((OUTPUTS.metric, evidence.parity), (EXPORT_OUTPUTS.metric, evidence.export_parity)):
        for m in sorted((m for m in measurements if not _is_sound(m)), key=lambda m: (m.output, m.group))[:1]:
            yield _make_error("parity", f"output {m.output!r}, inputs {m.group!r}: a value is not a number", name)
    if bad := sorted(w.tensor for w in evidence.weights if not _is_sound(w)):
        yield _make_error("parity", f"weight {bad[0]!r}: its error is not a number", WEIGHTS.metric)
    if bad_activations := sorted(a.tensor for a in evidence.activations if not _is_sound(a)):
        yield _make_error("parity", f"activation {bad_activations[0]!r}: a value is not a number", ACTIVATIONS.metric)
    if against := sorted(c.against for c in evidence.comparisons if not _is_sound(c)):
        yield _make_error("latency", f"a ratio against {against[0]} is not a number", f"ratio vs {against[0]}")
    if evidence.latency and not all(map(math.isfinite, evidence.latency.quantiles_ns.values())):
        yield _make_error("latency", "a quantile is not a number", "quantiles")
    for r in sorted((r for r in evidence.ratios if not _is_sound(r)), key=lambda r: (r.figure, r.against)):
        yield _make_error(find_gate_kind(r.figure), "a ratio is not a number", f"{r.figure} vs {r.against}")
    for t in (t for t in evidence.throughput if not _is_sound(t)):
        yield _make_error("throughput", "a rate is not a positive number", throughput_metric_name(t.concurrency))
    if evidence.starts and not _is_sound(evidence.starts):
        yield _make_error("cold_start", "a measurement of a fresh process is not a positive number", "processes")


def _is_sound(measured: object) -> bool:
    """Return whether every figure of a measurement is a number; rates, times and sizes are positive, too."""
    figures: Iterable[float | None]
    match measured:
        case ParityMeasurement():
            figures = (measured.error, measured.noise, measured.ratio)
        case WeightMeasurement():
            figures = (measured.steps, measured.output_error, measured.stretch)
        case ActivationMeasurement():
            figures = (measured.noise, measured.saturated, measured.clipping, measured.stretch)
        case LatencyComparison() | PairedRatios():
            figures = (v for pairs in (measured.log_ratios, measured.self_log_ratios) for pair in pairs for v in pair)
        case ThroughputMeasurement():
            return all(0 < rate < math.inf for rate in measured.per_second)
        case ColdStartMeasurement():
            return all(0 < value < math.inf for value in (*measured.load_s, *measured.first_s, *measured.peak_bytes))
        case _:
            raise TypeError(f"no measurement: {measured!r}")
    return all(math.isfinite(figure) for figure in figures if figure is not None)


def _make_error(gate: str, reason: str, metric: str = "") -> GateResult:
    return GateResult(gate=gate, metric=metric, limit="", verdict=Verdict.ERROR, reason=reason)


def compute_ranking_metrics(gates: Sequence[Gate], evidence: Evidence) -> RankingMetrics:
    """Read the metrics that variants are ranked by; None where not measured.

    The task metric is that of the first metric gate, else accuracy.
    """
    gate = next((gate for gate in gates if isinstance(gate, MetricGate)), None)
    metric = gate.definition().label if gate else ACCURACY.label
    lower = gate is not None and gate.lower_is_better
    own = evidence.variant == EXPORT
    median = evidence.latency.quantiles_ns.get("p50") if evidence.latency else None
    compared = (
        compare(c.log_ratios, tolerance=0.0) for c in evidence.comparisons if c.against == EXPORT and any(c.log_ratios)
    )
    ratios = (Interval(estimate=c.estimate, low=c.low, high=c.high) for c in compared if math.isfinite(c.high))
    load = None  # seconds per request over fresh sessions at the highest concurrency
    if measured := [one for one in evidence.throughput if one.per_second]:
        highest = max(measured, key=lambda one: one.concurrency)
        per_request = compare_quantile([1 / rate for rate in highest.per_second], 0.5, math.inf)
        if math.isfinite(per_request.high):
            load = Interval(estimate=per_request.estimate, low=per_request.low, high=per_request.high)
    return RankingMetrics(
        size_bytes=evidence.size_bytes,
        ratio=Interval.point(1.0) if own else next(ratios, None),
        metric=metric,
        change=Interval.point(0.0) if own else _find_change(evidence, metric, lower=lower),
        seconds=median / 1e9 if median and math.isfinite(median) else None,
        load=load,
    )


def _find_change(evidence: Evidence, metric: str, *, lower: bool) -> Interval | None:
    key, change = (metric, EXPORT), None
    if counts := next((c for c in evidence.metrics if (c.metric, c.against) == key), None):
        try:
            change = change_interval(counts)
        except ValueError:  # impossible counts, which the gate reports
            return None
    elif score := next((s for s in evidence.scores if (s.metric, s.against) == key and (not lower or s.ratio)), None):
        change = score.difference
        if lower and score.ratio is not None:
            change = Interval(estimate=1 - score.ratio.estimate, low=1 - score.ratio.high, high=1 - score.ratio.low)
    return change if change and change.is_finite else None
