"""Draw the plots of a release, and of the evidence of a rollout.

Legends and captions of a release's plots state units, intervals and sample sizes.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from statistics import median

from onnx_ops.domain.decision import Decision
from onnx_ops.domain.evidence import (
    Evidence,
    Interval,
    LatencyComparison,
    LatencySamples,
    PairedRatios,
    ParityMeasurement,
    WeightMeasurement,
)
from onnx_ops.domain.gate import find_gate_kind
from onnx_ops.domain.quantization import SearchRecord, Trial
from onnx_ops.domain.rollout_observations import EvidencePath
from onnx_ops.reporting.formatting import format_figure, number, scale_for
from onnx_ops.reporting.metrics import Measured, median_latency
from onnx_ops.reporting.svg import Axis, Chart, axis_around, make_standalone, room_for
from onnx_ops.statistics.latency import ALPHA, compare
from onnx_ops.statistics.rules.parity_rules import WEIGHTS
from onnx_ops.statistics.rules.performance import PROCESS_FIGURES

SERIES = 6
"""Number of colours for variants.

The next six variants use the same colours with dashes.
"""

_POINTS = 240
_ROWS = 16
_MARKS = 10
"""Maximum number of marks on the axis of session pairs."""
_STEPS = [factor * 10**power for power in range(9) for factor in (1, 2, 5)]
"""Distances between marks on the axis of session pairs."""
_COLUMNS = 6
"""Maximum number of columns whose smallest detectable error is listed."""

_CLIPPED = 1e6

_SHOWN_LOSSES = 6
"""Multiple of the budget above which losses are drawn at the edge.

This leaves room for the other losses.
"""

_LEAST_LOSS = 0.02
"""Minimum margin at both ends of the axis of losses, in percentage points.

It gives the axis a length if all losses are 0.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A plot with title, legend and caption.

    `svg` is markup; the other texts are not escaped yet. `keys` are the entries of the legend: the
    number of a colour, and a text.
    """

    title: str
    svg: str
    caption: str
    keys: tuple[tuple[int, str], ...] = ()


def limit_of(decision: Decision | None, gate: str, metric: str) -> float | None:
    """Return the limit of a gate's result as a number; None without a limit."""
    results = decision.results if decision is not None else ()
    return next((r.bound for r in results if r.gate == gate and r.metric == metric), None)


def latency_figure(target: str, evidence: Sequence[Evidence]) -> Figure | None:
    """Plot the cumulative distribution of run times, with one curve per variant."""
    curves = _list_curves(evidence)
    if not curves:
        return None
    scale = scale_for(max(seconds[len(seconds) // 2] for *_, seconds in curves), "s")
    ends = [end / scale.divisor for *_, seconds in curves for end in (seconds[0], seconds[-1])]
    axis = axis_around(
        ends, f"latency of one request ({scale.suffix.strip()}, log scale)", log=True
    )
    chart = Chart(x=axis, y=Axis(low=0, high=100, label="runs no slower (%)"))
    keys = []
    for series, e, latency, seconds in curves:
        chart.path(
            _step_curve([value / scale.divisor for value in seconds]),
            f"line {style_series(series)}",
        )
        is_omitted = latency.preempted < latency.runs
        lost = (
            f"{share(latency.preempted, latency.runs)} of {latency.runs} runs preempted"
            f"{' and omitted' if is_omitted else ''}"
        )
        middle = median_latency(latency)
        keys.append((series, f"{e.variant}: median {middle.text() if middle else '?'}, {lost}"))
    batches = ", ".join(sorted({str(latency.batch) for _, _, latency, _ in curves}))
    return Figure(
        title=f"Latency on {target}",
        svg=chart.render(f"Distribution of latency on {target}"),
        caption=f"Single runs of {batches} row(s) per request, in one session per variant; "
        "medians with 90 % intervals. Verdicts on latency ratios come from the session "
        "pairs, not from these curves.",
        keys=tuple(keys),
    )


def _list_curves(
    evidence: Sequence[Evidence],
) -> list[tuple[int, Evidence, LatencySamples, list[float]]]:
    """Return the variants that have positive run times.

    An entry has the number of the variant, its evidence, its latency and the times in seconds.
    """
    curves = []
    for series, e in enumerate(evidence):
        if e.latency is not None and (
            seconds := [ns / 1e9 for ns in e.latency.sorted_ns if ns > 0]
        ):
            curves.append((series, e, e.latency, seconds))
    return curves


def _step_curve(values: Sequence[float]) -> list[tuple[float, float]]:
    """Return the corners of the cumulative distribution of sorted values, in percent.

    There are at most `_POINTS` steps, evenly spread.
    """
    n = len(values)
    places = (
        range(n)
        if n <= _POINTS
        else sorted({round(i * (n - 1) / (_POINTS - 1)) for i in range(_POINTS)})
    )
    points = [(values[0], 0.0)]
    for i in places:
        points += [(values[i], points[-1][1]), (values[i], 100 * (i + 1) / n)]
    return points


def parity_figure(
    what: str, measurements: Sequence[ParityMeasurement], decision: Decision | None, metric: str
) -> Figure | None:
    """Plot the error of each output and input group, worst first.

    The errors are in units of the source's rounding noise. At most `_ROWS` are drawn. `what` names
    the model, and `metric` the result of the decision whose limit is drawn.
    """
    known = [m for m in measurements if m.mismatch or math.isfinite(m.ratio)]
    if not known:
        return None
    ranked = sorted(known, key=lambda m: (not m.mismatch, -m.ratio, m.output, m.group))
    limit = limit_of(decision, "parity", metric)
    axis = _make_error_axis(ranked[:_ROWS], limit)
    rows = [_describe_error(m, limit, axis.high) for m in ranked[:_ROWS]]
    n = sum(m.rows for m in known if m.output == ranked[0].output)
    return Figure(
        title=f"Same function? {what}",
        svg=_draw_rows(axis, limit, rows).render(f"Parity of {what} by output and group of inputs"),
        caption=f"{_count_shown(known)} pairs of output and group of inputs; "
        f"n = {n} rows per output. Dashed line: "
        f"limit {'none' if limit is None else number(limit) + '×'}. "
        "Errors of floats are maxima over the rows, and those of labels are shares of the rows. "
        "They have no interval. A dot at the left edge shows a very small or no difference."
        + _describe_columns(known, limit),
    )


def _make_error_axis(measurements: Sequence[ParityMeasurement], limit: float | None) -> Axis:
    positive = [m.ratio for m in measurements if 0 < m.ratio < _CLIPPED]
    low = max(1e-3, min([0.1, *positive]) / 1.5)
    high = 2 * max([1.0, limit or 0.0, *positive])
    return Axis(low=low, high=high, label="error / noise of the source (×, log scale)", log=True)


def _describe_error(
    measurement: ParityMeasurement, limit: float | None, edge: float
) -> tuple[str, float, str, bool, str]:
    """Return the row of one error for `_draw_rows`.

    A mismatch has no ratio, and is drawn at the edge.
    """
    name = " · ".join(filter(None, (measurement.group, measurement.output, measurement.column)))
    if measurement.mismatch:
        return (
            name,
            edge,
            "mismatch",
            True,
            f"{name}: {measurement.mismatch}, {measurement.rows} rows",
        )
    ratio = f"{number(measurement.ratio) if measurement.ratio < _CLIPPED else '>1e6'}×"
    is_bad = limit is not None and measurement.ratio > limit
    return name, measurement.ratio, ratio, is_bad, f"{name}: {ratio}, {measurement.rows} rows"


def _describe_columns(measurements: Sequence[ParityMeasurement], limit: float | None) -> str:
    """Return a text on the smallest error that exceeds the limit.

    It describes the columns of real rows in which this error is largest, relative to the largest
    answer.
    """
    if limit is None:
        return ""
    columns = [
        (c.noise * limit / c.scale, m.output, c) for m in measurements for c in m.columns if c.scale
    ]
    ranked = sorted(columns, key=lambda entry: -entry[0])[:_COLUMNS]
    texts = [
        f"{' · '.join(filter(None, (output, column.column)))} {number(column.noise * limit)} "
        f"({100 * share:.2g}% of the largest answer {number(column.scale)})"
        for share, output, column in ranked
    ]
    return f" Smallest detectable errors on real rows: {'; '.join(texts)}." if texts else ""


def weights_figure(what: str, evidence: Evidence, decision: Decision | None) -> Figure | None:
    """Plot the distance of each quantized weight from its original, worst first.

    The distances are in quantization steps. At most `_ROWS` are drawn.
    """
    known = sorted(
        (w for w in evidence.weights if math.isfinite(w.steps)), key=lambda w: (-w.steps, w.tensor)
    )
    if not known:
        return None
    limit = limit_of(decision, "parity", WEIGHTS.metric)
    rows = [_describe_rounding(w, limit) for w in known[:_ROWS]]
    largest = max([limit or 0.0, 0.1, *(min(w.steps, _CLIPPED) for w in known[:_ROWS])])
    axis = Axis(low=0, high=1.15 * largest, label="largest error (quantization steps)")
    return Figure(
        title=f"Quantization error: {what}",
        svg=_draw_rows(axis, limit, rows, stems=True).render(
            f"Quantization error of {what} by weight"
        ),
        caption=f"{_count_shown(known)} weights, n = {sum(w.elements for w in known)} elements. "
        f"Dashed line: limit {'none' if limit is None else number(limit) + ' steps'}. "
        "Rounding alone causes errors of up to 0.5 steps. "
        "Errors are maxima over all elements and have no interval.",
    )


def _describe_rounding(
    weight: WeightMeasurement, limit: float | None
) -> tuple[str, float, str, bool, str]:
    """Return the row of one weight for `_draw_rows`."""
    steps = number(weight.steps) if weight.steps < _CLIPPED else ">1e6"
    is_bad = limit is not None and weight.steps > limit
    return (
        weight.tensor,
        weight.steps,
        steps,
        is_bad,
        f"{weight.tensor}: {steps} steps, {weight.elements} elements",
    )


def _draw_rows(
    axis: Axis,
    limit: float | None,
    rows: Sequence[tuple[str, float, str, bool, str]],
    *,
    stems: bool = False,
) -> Chart:
    """Draw one dot per row.

    A row consists of a name, a value, the value's text, whether the value exceeds the limit, and a
    tooltip.
    """
    left, height = room_for([name for name, *_ in rows])
    y_axis = Axis(low=0.3, high=len(rows) + 0.7, label="")
    chart = Chart(
        x=axis, y=y_axis, height=height * len(rows) + 62, left=left, right=66, y_ticks=False
    )
    if limit is not None:
        chart.upright(limit, "line limit")
    for index, (name, value, text, bad, title) in enumerate(rows):
        y = len(rows) - index
        if stems:
            chart.path([(0, y), (value, y)], f"line {'bad-line' if bad else 'stem'}")
        chart.dot(value, y, "bad" if bad else "solid", title)
        chart.row(y, name, text)
    return chart


def _count_shown(known: Sequence[object]) -> str:
    return f"The worst {_ROWS} of {len(known)}" if len(known) > _ROWS else f"All {len(known)}"


def search_figure(record: SearchRecord, target: str) -> Figure | None:
    """Plot the loss of the task metric against time on one target.

    All measured models are shown.
    """
    points = [(n, t) for n, t in enumerate(record.trials) if not t.failure and target in t.ratios]
    if not points:
        return None
    limit = 100 * record.budget.metric_drop
    chart = _make_loss_chart(record, [trial for _, trial in points], target)
    chart.across(limit, "line limit")
    export = f"fp32: {format_figure(record.export_bytes, 'B')}"
    chart.dot(1.0, 0.0, "s1 full", export, radius=5)
    chart.note(1.0, 0.0, "fp32")
    keys = [(1, export)]
    named = {
        slot.trial: f"{record.name}-{slot.role}" for slot in record.slots if slot.trial is not None
    }
    for n, trial in points:
        label = _draw_trial(
            chart, n, trial, target, name=named.get(n, ""), on_front=n in record.pareto_front
        )
        keys += [(0, label)] if label else []
    return Figure(
        title=f"Models of the search {record.name} on {target}",
        svg=chart.render(f"Loss of {record.metric} against time on {target}"),
        caption="Lower and further left is better. Every dot except fp32 is a model that was "
        "built. Full ones are on the Pareto front: no other model is as accurate, "
        "as small and as fast. Rings mark variants. Dashed line: the budget, "
        f"{number(limit)} points. Models with a much larger loss are at the upper edge. "
        f"Losses are measured on {record.rows} tuning rows. "
        "Times come from 5 session pairs, with 90 % intervals. "
        "The gates measure the variants again, on other rows.",
        keys=tuple(keys),
    )


def _draw_trial(
    chart: Chart, n: int, trial: Trial, target: str, *, name: str, on_front: bool
) -> str:
    """Draw the dot of a trial, and return the entry of the trial in the legend.

    The entry is empty for a trial without a number in the plot. `name` is that of the variant that
    the trial became, if any.
    """
    ratio, loss = trial.ratios[target], 100 * (trial.drop or 0.0)
    size = format_figure(trial.size_bytes, "B")
    label = f"{n}: {trial.label}, {number(ratio.estimate)}×, {number(loss)} points, {size}"
    chart.path(
        [(max(ratio.low, chart.x.low), loss), (min(ratio.high, chart.x.high), loss)], "line s0"
    )
    chart.dot(ratio.estimate, loss, f"s0 {'full' if on_front else 'open'}", label)
    if name:
        chart.dot(ratio.estimate, loss, "ring", f"this model is variant {name}", radius=8)
    if not on_front and not name:
        return ""
    chart.note(ratio.estimate, loss, str(n))
    return f"{name} = {label}" if name else label


def _make_loss_chart(record: SearchRecord, trials: Sequence[Trial], target: str) -> Chart:
    """Return an empty plot of loss and time.

    The axes have room for the trials, the budget and fp32.
    """
    limit = 100 * record.budget.metric_drop
    losses = [100 * (trial.drop or 0.0) for trial in trials]
    low, high = (
        min([0.0, *losses]),
        max([limit, *(loss for loss in losses if loss <= _SHOWN_LOSSES * limit)]),
    )
    room = max(0.08 * (high - low), _LEAST_LOSS)
    ratios = [trial.ratios[target] for trial in trials]
    times = [v for ratio in ratios for v in (ratio.low, ratio.high) if 0 < v < 100]
    return Chart(
        x=axis_around([1.0, *times], "time of a request / time of fp32 (×)"),
        y=Axis(low=low - room, high=high + room, label=f"loss of {record.metric} (points)"),
    )


def share(part: int, whole: int) -> str:
    """Return a part of a whole as a percentage."""
    return format_figure(part / whole if whole > 0 else 0.0, "1")


def is_bounded(interval: Interval) -> bool:
    """Return whether both ends of an interval can be plotted."""
    return interval.low > 0 and interval.high < math.inf


def style_series(series: int) -> str:
    """Return the CSS classes of a variant's colour and dashes."""
    return f"s{series % SERIES}" + (" dash" if series // SERIES % 2 else "")


_LARGEST_LOG = 50.0
_BAND = f"Band: interval ({100 * (1 - ALPHA):.3g} % on each side, over all evaluations)."


def measured_ratio(comparison: LatencyComparison | PairedRatios) -> Measured | None:
    """Return the ratio to the baseline.

    Return None without a measured pair, or if a ratio is infinite or NaN.
    """
    pairs = [pair for pair in comparison.log_ratios if pair]
    if not pairs or not all(map(math.isfinite, (x for pair in pairs for x in pair))):
        return None
    interval = compare(pairs, tolerance=0.0)
    return Measured.from_interval(interval, "x", interval.n, f"{_pair(comparison)}s")


def ratio_figure(
    evidence: Evidence, comparison: LatencyComparison | PairedRatios, decision: Decision | None
) -> Figure | None:
    """Plot the ratio of each pair.

    The plot also shows the interval over all pairs, the limit, and the ratios of the baseline to
    itself.
    """
    ratio = measured_ratio(comparison)
    if ratio is None:
        return None
    limit, of, noun = (
        _find_ratio_limit(comparison, decision),
        name_of(comparison),
        _pair(comparison),
    )
    pairs = list(filter(None, _list_ratios(comparison.log_ratios)))
    selves = _list_ratios(comparison.self_log_ratios)
    centres = [median(pair) for pair in (*pairs, *filter(None, selves))]
    bounds = [v for v in (ratio.low, ratio.high, limit) if v is not None and 0 < v < math.inf]
    values = [1.0, *centres, *bounds, *chain.from_iterable(pairs)]
    step = next(step for step in _STEPS if len(pairs) <= _MARKS * step)
    marks = tuple(map(float, range(step, len(pairs) + 1, step)))
    chart = Chart(
        x=Axis(low=0.4, high=len(pairs) + 0.6, label=noun, marks=marks),
        y=axis_around(values, f"{of} / {comparison.against} (×)"),
    )
    # The lines are drawn first, so that the dots cover them.
    if is_bounded(ratio):
        chart.band(ratio.low, ratio.high, "band")
    chart.across(ratio.estimate, "line estimate")
    chart.across(1.0, "line one")
    if limit is not None:
        chart.across(limit, "line limit", f"limit {number(limit)}×")
    _draw_selves(chart, selves[: len(pairs)], comparison.against)
    _draw_pairs(chart, pairs)
    what = f"{evidence.variant} against {comparison.against} on {evidence.target}"
    return Figure(
        title=f"{of.capitalize()} ratio: {what}",
        svg=chart.render(f"{of.capitalize()} ratio of {what}"),
        caption=f"{ratio.text()}{_describe_runs(comparison)}. {_BAND} Full dots: "
        f"{noun}s; {_name_blocks(pairs)}"
        f"rings: {comparison.against} against itself, which shows the noise of the host.",
    )


def _list_ratios(log_ratios: Sequence[Sequence[float]]) -> list[list[float]]:
    """Return the finite ratios of each pair."""
    return [[_exp(x) for x in pair if math.isfinite(x)] for pair in log_ratios]


def _find_ratio_limit(
    comparison: LatencyComparison | PairedRatios, decision: Decision | None
) -> float | None:
    """Return the limit of the gate that judges a ratio; None if there is none."""
    if isinstance(comparison, LatencyComparison):
        return limit_of(decision, "latency", f"ratio vs {comparison.against}")
    metric = f"{comparison.figure} vs {comparison.against}"
    return limit_of(decision, find_gate_kind(comparison.figure), metric)


def _describe_runs(comparison: LatencyComparison | PairedRatios) -> str:
    """Return the number of runs behind a latency; empty for other ratios."""
    if not isinstance(comparison, LatencyComparison):
        return ""
    return f", {comparison.runs} runs, {share(comparison.preempted, comparison.runs)} preempted"


def _name_blocks(pairs: Sequence[Sequence[float]]) -> str:
    """Return the caption of the small dots; empty if no pair has several blocks."""
    return "small dots: the blocks of these pairs; " if any(len(pair) > 1 for pair in pairs) else ""


def _draw_selves(chart: Chart, selves: Sequence[Sequence[float]], against: str) -> None:
    """Draw a ring for each pair of baseline sessions.

    The ring is left of the candidate's pair of the same round.
    """
    for index, pair in enumerate(selves, 1):
        if pair:
            chart.dot(
                index - 0.12, median(pair), "hollow", f"pair {index}: {against} against itself"
            )


def _draw_pairs(chart: Chart, pairs: Sequence[Sequence[float]]) -> None:
    """Draw a dot for the median of each pair.

    If a pair has several blocks, each has a small dot.
    """
    for index, pair in enumerate(pairs, 1):
        for value in pair if len(pair) > 1 else ():
            chart.dot(
                index + 0.12, value, "faint", f"pair {index}, one block: {number(value)}×", radius=2
            )
        chart.dot(index + 0.12, median(pair), "solid", f"pair {index}: {number(median(pair))}×")


def name_of(comparison: LatencyComparison | PairedRatios) -> str:
    """Return the name of the quantity that a ratio compares."""
    if isinstance(comparison, LatencyComparison):
        return "latency"
    return PROCESS_FIGURES.get(comparison.figure, f"time per request at {comparison.figure}")


def _pair(comparison: LatencyComparison | PairedRatios) -> str:
    of_processes = isinstance(comparison, PairedRatios) and comparison.figure in PROCESS_FIGURES
    return "process pair" if of_processes else "session pair"


def _exp(log_ratio: float) -> float:
    return math.exp(min(max(log_ratio, -_LARGEST_LOG), _LARGEST_LOG))


_FAR = 3.0
"""Maximum plotted distance of evidence (log10) below zero and above the limit.

Evidence beyond this distance is drawn at the edge.
"""


def evidence_svg(paths: Sequence[EvidencePath]) -> str:
    """Return an SVG plot with one line for each guardrail that has counts.

    The text is empty if no guardrail has counts. The plot contains its style sheet.
    """
    drawn = [path for path in paths if path.requests]
    if not drawn:
        return ""
    return make_standalone(_draw_evidence(drawn, is_named=True), "svg{background:var(--bg)}")


def evidence_figure(paths: Sequence[EvidencePath]) -> Figure | None:
    """Plot the evidence against a candidate, one line for each counted guardrail.

    Return None if no guardrail has counts.
    """
    drawn = [path for path in paths if path.requests]
    if not drawn:
        return None
    last = "; ".join(f"{path.name} {path.log10_evidence[-1]:.2g}" for path in drawn)
    return Figure(
        title="Evidence against the candidate",
        svg=_draw_evidence(drawn, is_named=False),
        caption=f"A guardrail that reaches {drawn[0].limit:.2g} is violated. Now: {last}.",
        keys=tuple((index, path.name) for index, path in enumerate(drawn)),
    )


def _draw_evidence(drawn: Sequence[EvidencePath], *, is_named: bool) -> str:
    """Draw the lines of guardrails, with their names beside the lines if `is_named`."""
    limit = drawn[0].limit
    last = max(path.requests[-1] for path in drawn)
    values = [value for path in drawn for value in path.log10_evidence]
    inside = [min(max(value, -_FAR), limit + _FAR) for value in values]
    chart = Chart(
        x=Axis(low=0.0, high=float(max(last, 1)), label="requests to the candidate"),
        y=axis_around([0.0, limit, *inside], "evidence against it, log10"),
    )
    chart.across(limit, "limit", "violated")
    for index, path in enumerate(drawn):
        points = [(0.0, 0.0), *zip(map(float, path.requests), path.log10_evidence, strict=True)]
        chart.path(points, f"line s{index % 6}")
        if is_named:
            chart.note(points[-1][0], points[-1][1], path.name, above=points[-1][1] <= limit)
    return chart.render("evidence against the candidate")


def as_data_url(svg: str) -> str:
    """Return an SVG plot as a data URL."""
    return f"data:image/svg+xml;base64,{base64.b64encode(svg.encode()).decode()}"
