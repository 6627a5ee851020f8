"""Measurements of the evidence as texts, with their intervals and counts."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

from onnx_ops.domain.decision import Decision, Verdict
from onnx_ops.domain.evidence import Evidence, Interval, LatencySamples
from onnx_ops.domain.gate import ACCURACY
from onnx_ops.domain.quantities import Json
from onnx_ops.domain.task_metrics import METRICS
from onnx_ops.reporting.formatting import format_figure, format_interval
from onnx_ops.statistics.intervals import value_interval
from onnx_ops.statistics.latency import compare_latency_quantile
from onnx_ops.statistics.rules.metric import INDEPENDENCE


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured(Interval):
    """A measurement with its interval and the counts behind it.

    `low` and `high` have the same meaning as in the gate table. `of` names what `n` counts.
    """

    unit: str
    n: int
    of: str

    @classmethod
    def from_interval(cls, interval: Interval, unit: str, n: int, of: str = "rows") -> Measured:
        """Return the measurement with the estimate and the bounds of an interval."""
        return cls(
            estimate=interval.estimate, low=interval.low, high=interval.high, unit=unit, n=n, of=of
        )

    @property
    def figure(self) -> str:
        """Return the value and its interval as a text."""
        interval = format_interval(self.low, self.high, self.unit, near=self.estimate)
        return f"{format_figure(self.estimate, self.unit)} {interval}".strip()

    @property
    def count(self) -> str:
        """Return the counts behind the value as a text."""
        return f"n = {self.n} {self.of}"

    def text(self) -> str:
        """Return the value, its interval and its count as a text."""
        return f"{self.figure} ({self.count})"


def sampled_rows(evidence: Iterable[Evidence]) -> str:
    """Return how many rows of the data set were scored; empty if all were scored."""
    texts = {
        f"metrics of {rows.used:,} of {rows.total:,} rows of {rows.data}"
        for one in evidence
        if (rows := one.sampled) is not None
    }
    return "; ".join(sorted(texts))


def median_latency(samples: LatencySamples | None) -> Measured | None:
    """Return the median of the single runs, with its 90 % order-statistic interval.

    Preempted runs are left out, unless all runs were preempted. The result is None without runs.
    """
    usable = [] if samples is None else [ns for ns in samples.sorted_ns if ns > 0]
    if not usable:
        return None
    interval = compare_latency_quantile(usable, 0.5, math.inf)
    return Measured.from_interval(interval, "s", interval.n, "runs")


def headline(decisions: Sequence[Decision], evidence: Sequence[Evidence]) -> str:
    """Return the label of the main task metric of a release.

    It is the first metric that a gate judged, or else the first that was measured, or accuracy.
    """
    results = [
        r for d in decisions for r in d.results if r.gate == "metric" and r.metric != INDEPENDENCE
    ]
    named = [r.metric.split(" vs ")[0] for r in results if r.metric]
    return [*named, *(label for e in evidence for label in task_values(e)), ACCURACY.label][0]


def task_values(evidence: Evidence) -> Mapping[str, Measured]:
    """Return every task metric of the variant that has a value.

    The keys are the labels of the metrics.
    """
    labels = dict.fromkeys(
        [*(c.metric for c in evidence.metrics), *(s.metric for s in evidence.scores)]
    )
    metrics = {label: task_metric(evidence, label) for label in labels}
    return {label: value for label, value in metrics.items() if value is not None}


def champion_values(evidence: Evidence) -> Mapping[str, Measured]:
    """Return every task metric of the champion that the variant was compared with.

    The metrics are measured on the same rows.
    """
    swapped = [
        replace(one, against="", only_baseline=one.only_candidate, only_candidate=one.only_baseline)
        for one in evidence.metrics
        if one.against == "champion"
    ]
    counted = task_values(replace(evidence, metrics=tuple(swapped), scores=()))
    scored = {}
    for one in evidence.scores:
        if one.against == "champion" and one.baseline is not None:
            own = one.reference or Interval(estimate=one.baseline, low=-math.inf, high=math.inf)
            scored[one.metric] = Measured.from_interval(own, unit_of(one.metric), one.n)
    return {**counted, **scored}


def task_metric(evidence: Evidence, name: str) -> Measured | None:
    """Return the variant's value of a metric, by its label, with its 90 % interval.

    If models were compared with each other without labels, it is the value against the baseline.
    """
    for counts in evidence.metrics:
        right = counts.both + counts.only_candidate
        if not counts.against and counts.metric == name and 0 <= right <= counts.n and counts.n:
            return Measured.from_interval(value_interval(counts), "1", counts.n)
    baselines = ("", evidence.baseline)
    for score in evidence.scores:
        if score.metric == name and score.against in baselines and score.candidate is not None:
            return Measured.from_interval(score.candidate, unit_of(name), score.n)
    return None


def unit_of(name: str) -> str:
    """Return `1` for metrics that are shares, otherwise an empty string.

    Other metrics have the label's unit, which is unknown here.
    """
    metric = METRICS.get(name.partition(" ")[0])
    return "1" if metric is not None and metric.is_share else ""


def collect_metrics(evidence: Evidence) -> dict[str, float]:
    """Return measurements by name; names of times, sizes and rates include the unit."""
    metrics = {"size_bytes": float(evidence.size_bytes)}
    if evidence.latency is not None:
        metrics |= {f"{name}_ms": ns / 1e6 for name, ns in evidence.latency.quantiles_ns.items()}
    for throughput in evidence.throughput:
        if throughput.per_second:
            metrics[f"requests_per_second_{throughput.concurrency}"] = median(throughput.per_second)
    for way in evidence.scheduling:
        metrics[f"rows_per_second_{way.threads}x{way.rows}"] = way.rows_per_s
    return {**metrics, **_collect_start_metrics(evidence), **_collect_task_metrics(evidence)}


def _collect_start_metrics(evidence: Evidence) -> dict[str, float]:
    """Return the medians of the measured quantities over starts of the process."""
    starts = evidence.starts
    if starts is None:
        return {}
    samples = {
        "load_ms": [1e3 * seconds for seconds in starts.load_s],
        "first_ms": [1e3 * seconds for seconds in starts.first_s],
        "peak_bytes": [float(size) for size in starts.peak_bytes],
    }
    return {name: median(values) for name, values in samples.items() if values}


def _collect_task_metrics(evidence: Evidence) -> dict[str, float]:
    """Return task metrics by name.

    A comparison with another model is used only for a metric without a value against labels.
    """
    metrics = {
        _name(counts.metric): (counts.both + counts.only_candidate) / counts.n
        for counts in evidence.metrics
        if not counts.against and counts.n
    }
    alone = {score.metric for score in evidence.scores if not score.against}
    for score in evidence.scores:
        if score.candidate is not None and not (score.against and score.metric in alone):
            against = f" vs {score.against}" if score.against else ""
            metrics[f"{_name(score.metric)}{against}"] = score.candidate.estimate
    return metrics


def _name(metric: str) -> str:
    """Replace characters that a registry does not accept in names.

    Class labels and output names can contain any characters.
    """
    return re.sub(r"[^\w\-. :]", "_", metric, flags=re.ASCII)


VariantEvidence = Mapping[str, Mapping[str, tuple[Verdict, Evidence]]]
"""Verdict and evidence by variant and target."""


def dvc_metrics(judged: VariantEvidence) -> Json:
    """Return metrics by variant and target, which `dvc metrics show` flattens."""
    return {
        variant: {
            target: {"verdict": verdict.value, **dict(sorted(collect_metrics(evidence).items()))}
            for target, (verdict, evidence) in sorted(targets.items())
        }
        for variant, targets in judged.items()
    }


def dvc_plots(judged: VariantEvidence) -> Mapping[str, Json]:
    """Return the points of each plot, by file name.

    `latency.json` has quantiles in ms, and `size.json` has bytes.
    """
    latency: list[Json] = []
    size: list[Json] = []
    for variant, targets in judged.items():
        for target, (_, evidence) in sorted(targets.items()):
            place = {"variant": variant, "target": target}
            size.append({**place, "bytes": evidence.size_bytes})
            if evidence.latency is not None:
                quantiles = sorted(evidence.latency.quantiles_ns.items())
                latency += [{**place, "quantile": name, "ms": ns / 1e6} for name, ns in quantiles]
    return {"latency.json": latency, "size.json": size}
