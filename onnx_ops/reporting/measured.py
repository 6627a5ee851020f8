"""Figures of the evidence for people, each with its interval and what it rests on."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from onnx_ops.domain.decision import Decision
from onnx_ops.domain.evidence import Evidence, Interval, LatencySamples
from onnx_ops.domain.gate import ACCURACY, METRICS
from onnx_ops.reporting.figures import format_figure, format_interval
from onnx_ops.statistics.intervals import value_interval
from onnx_ops.statistics.latency import compare_latency_quantile
from onnx_ops.statistics.rules.metric import INDEPENDENCE


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A figure with its interval and what it rests on; `low` and `high` as in the gate table."""

    estimate: float
    low: float
    high: float
    unit: str
    n: int
    of: str

    def text(self) -> str:
        interval = format_interval(self.low, self.high, self.unit, near=self.estimate)
        return f"{format_figure(self.estimate, self.unit)} {interval} (n = {self.n} {self.of})"


def median_latency(samples: LatencySamples | None) -> Measured | None:
    """Median of the single runs that were not preempted, with 90 % order-statistic bounds."""
    usable = [] if samples is None else [ns for ns in samples.sorted_ns if ns > 0]
    if not usable:
        return None
    found = compare_latency_quantile(usable, 0.5, math.inf)
    return Measured(estimate=found.quantile, low=found.low, high=found.high, unit="s", n=found.runs, of="runs")


def headline(decisions: Sequence[Decision], evidence: Sequence[Evidence]) -> str:
    """The task metric that stands for the release: the first that a gate judged, else the first that was measured."""
    results = [r for d in decisions for r in d.results if r.gate == "metric" and r.metric != INDEPENDENCE]
    named = [r.metric.split(" vs ")[0] for r in results if r.metric]
    return [*named, *(label for e in evidence for label in task_values(e)), ACCURACY.label][0]


def task_values(evidence: Evidence) -> Mapping[str, Measured]:
    """Every task metric of the variant that has a value, by the label of its definition."""
    labels = dict.fromkeys([*(c.metric for c in evidence.metrics), *(s.metric for s in evidence.scores)])
    found = {label: task_metric(evidence, label) for label in labels}
    return {label: value for label, value in found.items() if value is not None}


def champion_values(evidence: Evidence) -> Mapping[str, Measured]:
    """Every task metric of the champion that the variant was compared with, on the same rows."""
    swapped = [
        replace(
            one,
            against="",
            only_baseline=one.only_candidate,
            only_candidate=one.only_baseline,
        )
        for one in evidence.metrics
        if one.against == "champion"
    ]
    counted = task_values(replace(evidence, metrics=tuple(swapped), scores=()))
    scored = {}
    for one in evidence.scores:
        if one.against == "champion" and one.baseline is not None:
            own = one.reference or Interval(estimate=one.baseline, low=-math.inf, high=math.inf)
            scored[one.metric] = Measured(
                estimate=own.estimate, low=own.low, high=own.high, unit=unit_of(one.metric), n=one.n, of="rows"
            )
    return {**counted, **scored}


def task_metric(evidence: Evidence, name: str) -> Measured | None:
    """The variant's own value of a metric, by the label of its definition, with its 90 % interval.

    Where models were compared with each other, without labels, it is the value against the baseline.
    """
    for counts in evidence.metrics:
        right = counts.both + counts.only_candidate
        if not counts.against and counts.metric == name and 0 <= right <= counts.n and counts.n:
            found = value_interval(counts)
            return Measured(estimate=found.estimate, low=found.low, high=found.high, unit="1", n=counts.n, of="rows")
    baselines = ("", evidence.baseline)
    for score in evidence.scores:
        if score.metric == name and score.against in baselines and score.candidate is not None:
            own = score.candidate
            return Measured(estimate=own.estimate, low=own.low, high=own.high, unit=unit_of(name), n=score.n, of="rows")
    return None


def unit_of(name: str) -> str:
    """`1` for metrics that are shares; others have the unit of the label, which is not known here."""
    known = {str(metric): traits for metric, traits in METRICS.items()}
    traits = known.get(name.partition(" ")[0])
    return "1" if traits is not None and traits.higher_is_better else ""
