"""Judgement of evidence by gates.

`judge` is a pure function from gates and evidence to a decision with reasons.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TypeVar

from onnx_ops.domain.decision import Decision, GateResult, RankingMetrics, Verdict
from onnx_ops.domain.evidence import (
    EXPORT,
    ActivationMeasurement,
    ColdStartMeasurement,
    Evidence,
    Interval,
    LatencyComparison,
    PairedCounts,
    PairedRatios,
    ParityMeasurement,
    ScoreComparison,
    ThroughputMeasurement,
    WeightMeasurement,
    throughput_metric_name,
)
from onnx_ops.domain.gate import ACCURACY, Gate, TaskMetricGate, find_gate_kind
from onnx_ops.statistics.intervals import change_interval
from onnx_ops.statistics.latency import Comparison, QuantileComparison, compare, compare_quantile
from onnx_ops.statistics.rules.common import join_lines, judge_gate
from onnx_ops.statistics.rules.metric import judge_independence
from onnx_ops.statistics.rules.parity_rules import ACTIVATIONS, EXPORT_OUTPUTS, OUTPUTS, WEIGHTS
from onnx_ops.statistics.rules.performance import judge_provider

T = TypeVar("T")

_RANKING_METRICS = 2
"""First schema of evidence with ranking metrics in decisions.

Decisions on older evidence have no ranking metrics.
"""


def judge(gates: Sequence[Gate], evidence: Evidence) -> Decision:
    """Judge evidence by gates.

    If a measurement failed, every gate is an ERROR with the reason of the failure. A NaN or
    infinite value is an ERROR, and is not judged further. Only gates that apply yield results. For
    example, a comparison with the baseline does not apply to the first release. A gate that applies
    but has no measurement is INCONCLUSIVE.
    """
    if evidence.failure:
        reason = join_lines(evidence.failure)
        results = tuple(_make_error(gate.kind, reason) for gate in gates)
        return Decision(variant=evidence.variant, target=evidence.target, results=results)
    sound = _keep_sound(evidence)
    results = (
        *(result for gate in gates for result in judge_gate(gate, sound)),
        *judge_independence(gates, sound),
        *_find_non_finite(evidence),
        *judge_provider(evidence),
        *_list_system_results(evidence),
    )
    against_export = [] if evidence.variant == EXPORT else list(_compare_with_export(sound))
    return Decision(
        variant=evidence.variant,
        target=evidence.target,
        results=results,
        faster_than_export=all(c.verdict is Verdict.PASS for c in against_export)
        if against_export
        else None,
        latency_ratio=_find_largest_ratio(against_export),
        standing=compute_ranking_metrics(gates, sound)
        if evidence.schema >= _RANKING_METRICS
        else None,
    )


def _keep_sound(evidence: Evidence) -> Evidence:
    """Return the evidence without unsound measurements of parity and speed.

    `_is_sound` defines them. An output with a mismatch is included: it fails even if its error is
    not a number.
    """
    return replace(
        evidence,
        parity=tuple(m for m in evidence.parity if m.mismatch or _is_sound(m)),
        export_parity=tuple(m for m in evidence.export_parity if m.mismatch or _is_sound(m)),
        weights=_select_sound(evidence.weights),
        activations=_select_sound(evidence.activations),
        comparisons=_select_sound(evidence.comparisons),
        ratios=_select_sound(evidence.ratios),
        throughput=_select_sound(evidence.throughput),
        starts=evidence.starts if evidence.starts and _is_sound(evidence.starts) else None,
    )


def _select_sound(measurements: Iterable[T]) -> tuple[T, ...]:
    return tuple(m for m in measurements if _is_sound(m))


def _select_unsound(measurements: Iterable[T]) -> list[T]:
    return [m for m in measurements if not _is_sound(m)]


def _compare_with_export(evidence: Evidence) -> Iterator[Comparison]:
    for measured in evidence.comparisons:
        if measured.against == EXPORT and any(measured.log_ratios):
            yield compare(measured.log_ratios, tolerance=0.0)


def _list_system_results(evidence: Evidence) -> Iterator[GateResult]:
    """Yield the steps of the comparison with the project's own code as gate results.

    The results apply to every variant: the steps around the model are the same.
    """
    for one in evidence.system:
        verdict = Verdict(one.verdict)
        yield GateResult(
            gate="system",
            metric=one.step,
            limit=one.limit,
            verdict=verdict,
            reason=one.reason if verdict is Verdict.PASS else f"step {one.step}: {one.reason}",
            estimate=one.estimate,
            high=one.high,
            bound=one.bound,
            unit=one.unit,
            n=one.inputs,
            advisory=one.advisory,
        )


def _find_largest_ratio(compared: Sequence[Comparison]) -> float | None:
    ratio = max((c.estimate for c in compared), default=math.inf)
    return ratio if math.isfinite(ratio) else None


def _find_non_finite(evidence: Evidence) -> Iterator[GateResult]:
    """Yield an ERROR for measurements that contain NaN or infinity.

    Of outputs, weights, activations and latency ratios, only the first is reported. Measurements
    that no gate needs are checked too.
    """
    yield from _find_non_finite_parity(evidence)
    yield from _find_non_finite_performance(evidence)


def _find_non_finite_parity(evidence: Evidence) -> Iterator[GateResult]:
    for name, measurements in (
        (OUTPUTS.metric, evidence.parity),
        (EXPORT_OUTPUTS.metric, evidence.export_parity),
    ):
        outputs = sorted((m.output, m.group) for m in _select_unsound(measurements))
        for output, group in outputs[:1]:
            yield _make_error(
                "parity",
                f"output {output!r}, inputs {group!r}: a measured value is not finite",
                name,
            )
    weights = sorted(w.tensor for w in _select_unsound(evidence.weights))
    for tensor in weights[:1]:
        yield _make_error(
            "parity", f"weight {tensor!r}: a measured value is not finite", WEIGHTS.metric
        )
    activations = sorted(a.tensor for a in _select_unsound(evidence.activations))
    for tensor in activations[:1]:
        yield _make_error(
            "parity", f"activation {tensor!r}: a measured value is not finite", ACTIVATIONS.metric
        )


def _find_non_finite_performance(evidence: Evidence) -> Iterator[GateResult]:
    baselines = sorted(c.against for c in _select_unsound(evidence.comparisons))
    for against in baselines[:1]:
        yield _make_error(
            "latency", f"a ratio against {against} is not a finite number", f"ratio vs {against}"
        )
    if evidence.latency and not all(map(math.isfinite, evidence.latency.quantiles_ns.values())):
        yield _make_error("latency", "a quantile is not finite", "quantiles")
    for r in sorted(_select_unsound(evidence.ratios), key=lambda r: (r.figure, r.against)):
        yield _make_error(
            find_gate_kind(r.figure), "a ratio is not a finite number", f"{r.figure} vs {r.against}"
        )
    for t in _select_unsound(evidence.throughput):
        yield _make_error(
            "throughput",
            "a rate is not a finite positive number",
            throughput_metric_name(t.concurrency),
        )
    if evidence.starts and not _is_sound(evidence.starts):
        yield _make_error(
            "cold_start",
            "a measurement of a fresh process is not a finite positive number",
            "processes",
        )


def _is_sound(measured: object) -> bool:
    """Return whether every value of a measurement is a finite number.

    Rates, times and sizes must also be positive.
    """
    values: Iterable[float | None]
    match measured:
        case ParityMeasurement():
            values = (measured.error, measured.noise, measured.ratio)
        case WeightMeasurement():
            values = (measured.steps, measured.output_error, measured.stretch)
        case ActivationMeasurement():
            values = (measured.noise, measured.saturated, measured.clipping, measured.stretch)
        case LatencyComparison() | PairedRatios():
            values = itertools.chain(*measured.log_ratios, *measured.self_log_ratios)
        case ThroughputMeasurement():
            return _are_positive(measured.per_second)
        case ColdStartMeasurement():
            return _are_positive((*measured.load_s, *measured.first_s, *measured.peak_bytes))
        case _:
            raise TypeError(f"no measurement: {measured!r}")
    return all(math.isfinite(value) for value in values if value is not None)


def _are_positive(values: Iterable[float]) -> bool:
    return all(0 < value < math.inf for value in values)


def _make_error(gate: str, reason: str, metric: str = "") -> GateResult:
    return GateResult(gate=gate, metric=metric, limit="", verdict=Verdict.ERROR, reason=reason)


def compute_ranking_metrics(gates: Sequence[Gate], evidence: Evidence) -> RankingMetrics:
    """Return the metrics by which variants are ranked; None where not measured.

    The task metric is that of the first gate on a task metric, or accuracy without such a gate.
    """
    gate = next((gate for gate in gates if isinstance(gate, TaskMetricGate)), None)
    metric = gate.definition().label if gate else ACCURACY.label
    lower = gate is not None and gate.lower_is_better
    own = evidence.variant == EXPORT
    median = evidence.latency.quantiles_ns.get("p50") if evidence.latency else None
    return RankingMetrics(
        size_bytes=evidence.size_bytes,
        ratio=Interval.point(1.0) if own else _find_time_ratio(evidence),
        metric=metric,
        change=Interval.point(0.0) if own else _find_change(evidence, metric, lower=lower),
        seconds=median / 1e9 if median and math.isfinite(median) else None,
        load=_find_load(evidence),
    )


def _find_time_ratio(evidence: Evidence) -> Interval | None:
    """Return the ratio of the variant's time to the export's."""
    compared = _compare_with_export(evidence)
    return next((_make_interval(c) for c in compared if math.isfinite(c.high)), None)


def _find_load(evidence: Evidence) -> Interval | None:
    """Return the seconds per request of fresh sessions at the highest concurrency."""
    measured = [throughput for throughput in evidence.throughput if throughput.per_second]
    if not measured:
        return None
    highest = max(measured, key=lambda throughput: throughput.concurrency)
    per_request = compare_quantile([1 / rate for rate in highest.per_second], 0.5, math.inf)
    return _make_interval(per_request) if math.isfinite(per_request.high) else None


def _make_interval(compared: Comparison | QuantileComparison) -> Interval:
    return Interval(estimate=compared.estimate, low=compared.low, high=compared.high)


def _find_change(evidence: Evidence, metric: str, *, lower: bool) -> Interval | None:
    """Return by how much the variant's task metric is better than the export's.

    The result is a difference of shares or scores. If lower scores are better, it is a relative
    decrease.
    """
    for counts in evidence.metrics:
        if (counts.metric, counts.against) == (metric, EXPORT):
            return _compute_change(counts)
    for score in evidence.scores:
        if (score.metric, score.against) == (metric, EXPORT) and (not lower or score.ratio):
            return _compute_gain(score, lower=lower)
    return None


def _compute_change(counts: PairedCounts) -> Interval | None:
    try:
        change = change_interval(counts)
    except ValueError:  # The counts are impossible, and a gate on this metric reports them.
        return None
    return change if change.is_finite else None


def _compute_gain(score: ScoreComparison, *, lower: bool) -> Interval | None:
    """Return the gain of a score over the export's.

    If lower scores are better, the gain is the relative decrease of the score.
    """
    change = score.difference
    if lower and score.ratio is not None:
        change = Interval(
            estimate=1 - score.ratio.estimate, low=1 - score.ratio.high, high=1 - score.ratio.low
        )
    return change if change and change.is_finite else None
