"""Plots of ratios to a baseline, pair by pair: of latency, throughput, starts and memory."""

from __future__ import annotations

import math
from collections.abc import Sequence

from onnx_ops.domain.decision import Decision
from onnx_ops.domain.evidence import Evidence, LatencyComparison, PairedRatios, find_gate_kind
from onnx_ops.reporting.figures import number
from onnx_ops.reporting.measured import Measured
from onnx_ops.reporting.plots import Figure, limit_of, share
from onnx_ops.reporting.svg import Axis, Chart, axis_around
from onnx_ops.statistics.latency import ALPHA, compare

_LARGEST_LOG = 50.0
_OF = {"load": "load time", "first": "first inference", "peak": "peak memory"}
_BAND = f"Band: interval ({100 * (1 - ALPHA):.3g} % a side over all looks)."


def measured_ratio(comparison: LatencyComparison | PairedRatios) -> Measured | None:
    """The figure over that of the baseline; None where no pair was measured, or a ratio is no number."""
    pairs = [pair for pair in comparison.log_ratios if pair]
    if not pairs or not all(map(math.isfinite, (x for pair in pairs for x in pair))):
        return None
    found = compare(pairs, tolerance=0.0)
    of = f"{_pair(comparison)}s"
    return Measured(estimate=found.ratio, low=found.low, high=found.high, unit="x", n=found.pairs, of=of)


def ratio_figure(
    evidence: Evidence, comparison: LatencyComparison | PairedRatios, decision: Decision | None
) -> Figure | None:
    """Ratio of each pair, the interval over all of them, the limit, and the baseline against itself."""
    found = measured_ratio(comparison)
    if found is None:
        return None
    limit = limit_of(decision, *_place(comparison))
    of, noun = name_of(comparison), _pair(comparison)
    pairs = [[_exp(x) for x in pair] for pair in comparison.log_ratios if pair]
    selves = [[_exp(x) for x in pair if math.isfinite(x)] for pair in comparison.self_log_ratios]
    bounds = [v for v in (found.low, found.high, limit) if v is not None and 0 < v < math.inf]
    centres = [_median(pair) for pair in (*pairs, *(s for s in selves if s))]
    y = axis_around([1.0, *centres, *bounds, *(v for pair in pairs for v in pair)], f"{of} / {comparison.against} (×)")
    chart = Chart(x=Axis(low=0.4, high=len(pairs) + 0.6, label=noun, marks=_counts(len(pairs))), y=y)
    if found.low > 0 and found.high < math.inf:
        chart.band(found.low, found.high, "band")
    chart.across(found.estimate, "line estimate")
    chart.across(1.0, "line one")
    if limit is not None:
        chart.across(limit, "line limit", f"limit {number(limit)}×")
    for index, pair in enumerate(selves[: len(pairs)], 1):
        if pair:
            chart.dot(index - 0.12, _median(pair), "hollow", f"pair {index}: {comparison.against} against itself")
    for index, pair in enumerate(pairs, 1):
        for value in pair if len(pair) > 1 else ():
            chart.dot(index + 0.12, value, "faint", f"pair {index}, one block: {number(value)}×", radius=2)
        chart.dot(index + 0.12, _median(pair), "solid", f"pair {index}: {number(_median(pair))}×")
    parts = "small ones: their blocks; " if any(len(pair) > 1 for pair in pairs) else ""
    what = f"{evidence.variant} against {comparison.against} on {evidence.target}"
    return Figure(
        title=f"{of.capitalize()} ratio: {what}",
        svg=chart.render(f"{of.capitalize()} ratio of {what}"),
        caption=f"{found.text()}{_runs(comparison)}. {_BAND} Full dots: {noun}s; {parts}"
        f"rings: {comparison.against} against itself, the noise of the host.",
    )


def _place(comparison: LatencyComparison | PairedRatios) -> tuple[str, str]:
    """Gate and metric of the result about a ratio."""
    if isinstance(comparison, LatencyComparison):
        return "latency", f"ratio vs {comparison.against}"
    return find_gate_kind(comparison.figure), f"{comparison.figure} vs {comparison.against}"


def name_of(comparison: LatencyComparison | PairedRatios) -> str:
    """Return what a ratio is of, in words."""
    if isinstance(comparison, LatencyComparison):
        return "latency"
    return _OF.get(comparison.figure, f"time per request at {comparison.figure}")


def _pair(comparison: LatencyComparison | PairedRatios) -> str:
    of_processes = isinstance(comparison, PairedRatios) and comparison.figure in _OF
    return "process pair" if of_processes else "session pair"


def _runs(comparison: LatencyComparison | PairedRatios) -> str:
    if not isinstance(comparison, LatencyComparison):
        return ""
    return f", {comparison.runs} runs, {share(comparison.preempted, comparison.runs)} preempted"


def _exp(log_ratio: float) -> float:
    return math.exp(min(max(log_ratio, -_LARGEST_LOG), _LARGEST_LOG))


def _counts(pairs: int) -> tuple[float, ...]:
    step = 1 if pairs <= 10 else 5
    return tuple(float(i) for i in range(step, pairs + 1, step))


def _median(values: Sequence[float]) -> float:
    ordered = sorted(values)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2
