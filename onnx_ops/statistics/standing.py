"""The figures by which a variant is chosen, read off its evidence."""

from __future__ import annotations

import math
from collections.abc import Sequence

from onnx_ops.domain.evidence import Evidence, Interval
from onnx_ops.domain.gate import Gate, MetricGate
from onnx_ops.domain.metric import ACCURACY
from onnx_ops.domain.pipeline import EXPORT
from onnx_ops.domain.standing import Standing
from onnx_ops.statistics.agreement import change_interval
from onnx_ops.statistics.latency import compare, quantile_limit

_EQUAL, _NONE = Interval(estimate=1.0, low=1.0, high=1.0), Interval(estimate=0.0, low=0.0, high=0.0)


def standing(gates: Sequence[Gate], evidence: Evidence) -> Standing:
    """What stands in sound evidence; figures that were not measured are None.

    The task metric is that of the first metric gate, else accuracy.
    """
    gate = next((gate for gate in gates if isinstance(gate, MetricGate)), None)
    metric = gate.definition().label if gate else ACCURACY.label
    lower = gate is not None and False in (gate.higher_is_better, gate.definition().higher_is_better)
    own = evidence.variant == EXPORT
    median = evidence.latency.quantiles_ns.get("p50") if evidence.latency else None
    return Standing(
        size_bytes=evidence.size_bytes,
        ratio=_EQUAL if own else _ratio(evidence),
        metric=metric,
        change=_NONE if own else _finite(_change(evidence, metric, lower=lower)),
        seconds=median / 1e9 if median and math.isfinite(median) else None,
        load=_load(evidence),
    )


def _finite(found: Interval | None) -> Interval | None:
    return found if found and all(map(math.isfinite, (found.estimate, found.low, found.high))) else None


def _ratio(evidence: Evidence) -> Interval | None:
    for one in evidence.comparisons:
        if one.against == EXPORT and any(one.log_ratios):
            found = compare(one.log_ratios, tolerance=0.0)
            if math.isfinite(found.high):
                return Interval(estimate=found.ratio, low=found.low, high=found.high)
    return None


def _change(evidence: Evidence, metric: str, *, lower: bool) -> Interval | None:
    for counts in evidence.metrics:
        if (counts.metric, counts.against) == (metric, EXPORT):
            try:
                return change_interval(counts)
            except ValueError:  # impossible counts, which the gate tells
                return None
    for score in evidence.scores:
        if (score.metric, score.against) == (metric, EXPORT):
            if not lower:
                return score.difference
            if score.ratio is not None:
                return Interval(estimate=1 - score.ratio.estimate, low=1 - score.ratio.high, high=1 - score.ratio.low)
    return None


def _load(evidence: Evidence) -> Interval | None:
    """Seconds per request over fresh sessions at the highest concurrency."""
    measured = [one for one in evidence.throughput if one.per_second]
    if not measured:
        return None
    highest = max(measured, key=lambda one: one.concurrency)
    found = quantile_limit([1 / rate for rate in highest.per_second], 0.5, math.inf)
    if not math.isfinite(found.high):
        return None
    return Interval(estimate=found.quantile, low=found.low, high=found.high)
