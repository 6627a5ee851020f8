"""The plots of a release: each from evidence, with a caption that tells units, intervals and n."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from onnx_ops.domain.decision import Decision, Verdict
from onnx_ops.domain.evidence import Evidence, ParityMeasurement
from onnx_ops.reporting.figures import format_figure, number, scale_for
from onnx_ops.reporting.measured import median_latency, task_metric
from onnx_ops.reporting.svg import Axis, Chart, axis_around, room_for
from onnx_ops.statistics.parity import pool_noise

SERIES = 6
"""Colours that the page has for variants; more variants use them again, told apart by their dashes."""

_POINTS = 240
_ROWS = 16
_NAMED = 4
_CLIPPED = 1e6


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """One entry of a legend; `series` is the number of its colour."""

    series: int
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A plot, its title, its legend, and a caption. `svg` is markup, everything else is text still to be escaped."""

    title: str
    svg: str
    caption: str
    keys: tuple[Key, ...] = ()


def limit_of(decision: Decision | None, gate: str, metric: str) -> float | None:
    """The number behind the limit of a gate's result."""
    results = decision.results if decision is not None else ()
    return next((r.bound for r in results if r.gate == gate and r.metric == metric), None)


def latency_figure(target: str, evidence: Sequence[Evidence]) -> Figure | None:
    """Share of runs that took no longer than a given time, one curve a variant."""
    curves = [
        (series, e, e.latency, [ns / 1e9 for ns in e.latency.sorted_ns if ns > 0])
        for series, e in enumerate(evidence)
        if e.latency is not None and any(ns > 0 for ns in e.latency.sorted_ns)
    ]
    if not curves:
        return None
    scale = scale_for(max(seconds[len(seconds) // 2] for *_, seconds in curves), "s")
    ends = [end / scale.divisor for *_, seconds in curves for end in (seconds[0], seconds[-1])]
    axis = axis_around(ends, f"latency of one request ({scale.suffix.strip()}, log scale)", log=True)
    chart = Chart(x=axis, y=Axis(low=0, high=100, label="runs no slower (%)"))
    keys = []
    for series, e, latency, seconds in curves:
        chart.path(_steps([s / scale.divisor for s in seconds]), f"line {_style(series)}")
        lost = f"{share(latency.preempted, latency.runs)} of {latency.runs} runs preempted and left out"
        middle = median_latency(latency)
        keys.append(Key(series=series, text=f"{e.variant}: median {middle.text() if middle else '?'}, {lost}"))
    batches = ", ".join(sorted({str(latency.batch) for _, _, latency, _ in curves}))
    return Figure(
        title=f"Latency on {target}",
        svg=chart.render(f"Distribution of latency on {target}"),
        caption=f"Single runs of {batches} row(s) a request, one session a variant; medians with 90 % intervals. "
        "Verdicts about slower or faster rest on the session pairs, not on these curves.",
        keys=tuple(keys),
    )


def parity_figure(
    what: str, measurements: Sequence[ParityMeasurement], decision: Decision | None, metric: str
) -> Figure | None:
    """Error of each output and group of inputs in units of the source's own rounding noise, worst first."""
    known = [m for m in pool_noise(measurements) if m.mismatch or math.isfinite(m.ratio)]
    if not known:
        return None
    ranked = sorted(known, key=lambda m: (not m.mismatch, -m.ratio, m.output, m.group))
    shown = ranked[:_ROWS]
    limit = limit_of(decision, "parity", metric)
    positive = [m.ratio for m in shown if 0 < m.ratio < _CLIPPED]
    low = max(1e-3, min([0.1, *positive]) / 1.5)
    high = 2 * max([1.0, limit or 0.0, *positive])
    names = [f"{m.group} · {m.output}" for m in shown]
    chart = _rows_chart(names, Axis(low=low, high=high, label="error / noise of the source (×, log scale)", log=True))
    if limit is not None:
        chart.upright(limit, "line limit")
    for place, (name, m) in enumerate(zip(names, shown, strict=True)):
        y = len(shown) - place
        bad = bool(m.mismatch) or (limit is not None and m.ratio > limit)
        told = "mismatch" if m.mismatch else (number(m.ratio) if m.ratio < _CLIPPED else ">1e6") + "×"
        chart.dot(
            high if m.mismatch else m.ratio,
            y,
            "bad" if bad else "solid",
            f"{name}: {m.mismatch or told}, {m.rows} rows",
        )
        chart.row(y, name, told)
    rows = sum(m.rows for m in known if m.output == ranked[0].output)
    of = f"The worst {len(shown)} of {len(known)}" if len(known) > len(shown) else f"All {len(known)}"
    return Figure(
        title=f"Same function? {what}",
        svg=chart.render(f"Parity of {what} by output and group of inputs"),
        caption=f"{of} pairs of output and group of inputs; n = {rows} rows per output. "
        f"Dashed: limit {_times(limit)}. A maximum over the rows, so without interval. "
        "At the left edge: no difference.",
    )


def weights_figure(what: str, evidence: Evidence, decision: Decision | None) -> Figure | None:
    """Distance of each quantized weight from its original, in quantization steps, worst first."""
    known = sorted((w for w in evidence.weights if math.isfinite(w.steps)), key=lambda w: (-w.steps, w.tensor))
    if not known:
        return None
    shown = known[:_ROWS]
    limit = limit_of(decision, "parity", "weights")
    largest = max([limit or 0.0, 0.1, *(min(w.steps, _CLIPPED) for w in shown)])
    chart = _rows_chart(
        [weight.tensor for weight in shown],
        Axis(low=0, high=1.15 * largest, label="largest error (quantization steps)"),
    )
    if limit is not None:
        chart.upright(limit, "line limit")
    for place, weight in enumerate(shown):
        y = len(shown) - place
        told = number(weight.steps) if weight.steps < _CLIPPED else ">1e6"
        bad = limit is not None and weight.steps > limit
        title = f"{weight.tensor}: {told} steps, {weight.elements} elements"
        chart.bar((0, y), (weight.steps, y), f"line {'bad-line' if bad else 'stem'}")
        chart.dot(weight.steps, y, "bad" if bad else "solid", title)
        chart.row(y, weight.tensor, told)
    of = f"The worst {len(shown)} of {len(known)}" if len(known) > len(shown) else f"All {len(known)}"
    elements = sum(w.elements for w in known)
    return Figure(
        title=f"Quantization error: {what}",
        svg=chart.render(f"Quantization error of {what} by weight"),
        caption=f"{of} weights, n = {elements} elements. Dashed: limit "
        f"{'none' if limit is None else number(limit) + ' steps'}. Rounding alone makes up to 0.5. "
        "A maximum over all elements, so without interval.",
    )


def pareto_figure(
    target: str, evidence: Sequence[Evidence], verdicts: dict[str, Verdict], chosen: str | None, metric: str
) -> Figure | None:
    """Size against latency, with the task metric beside each variant."""
    points = [(s, e, m) for s, e in enumerate(evidence) if (m := median_latency(e.latency)) and e.size_bytes > 0]
    if not points:
        return None
    time = scale_for(max(m.estimate for *_, m in points), "s")
    size = scale_for(max(float(e.size_bytes) for _, e, _ in points), "B")
    ends = [v / time.divisor for *_, m in points for v in (m.estimate, m.low, m.high) if 0 < v < math.inf]
    x = axis_around(
        [e.size_bytes / size.divisor for _, e, _ in points], f"size on disk ({size.suffix.strip()})", room=0.25
    )
    y = axis_around(ends, f"median latency ({time.suffix.strip()})", room=0.15)
    chart = Chart(x=x, y=y)
    keys = []
    above = {e.variant: place % 2 == 0 for place, (_, e, _) in enumerate(sorted(points, key=lambda p: p[1].size_bytes))}
    for series, e, middle in points:
        left, top = e.size_bytes / size.divisor, middle.estimate / time.divisor
        if middle.low > 0 and middle.high < math.inf:
            chart.bar((left, middle.low / time.divisor), (left, middle.high / time.divisor), f"line {_style(series)}")
        value = task_metric(e, metric)
        passed = verdicts.get(e.variant) is Verdict.PASS
        told = f"{e.variant}: {format_figure(float(e.size_bytes), 'B')}, median {middle.text()}"
        told += f", {metric} {value.text()}" if value else f", {metric} not measured"
        chart.dot(left, top, f"{_style(series)} {'full' if passed else 'open'}", told, radius=5)
        if e.variant == chosen:
            chart.dot(left, top, "ring", f"{e.variant} is chosen", radius=9)
        name = e.variant if len(points) <= _NAMED else f"{series + 1}:"
        beside = f"{name} {format_figure(value.estimate, value.unit)}" if value else name
        chart.note(left, top, beside, above=above[e.variant])
        keys.append(Key(series=series, text=told if len(points) <= _NAMED else f"{series + 1}: {told}"))
    return Figure(
        title=f"Size, latency and {metric} on {target}",
        svg=chart.render(f"Size against latency on {target}"),
        caption="Lower left is better. Bars and brackets: 90 % intervals. "
        "Full dots passed every gate, open ones did not; "
        f"the ring marks the chosen variant. Beside each variant: its {metric}.",
        keys=tuple(keys),
    )


def _rows_chart(names: Sequence[str], axis: Axis) -> Chart:
    left, height = room_for(names)
    rows = Axis(low=0.3, high=len(names) + 0.7, label="")
    return Chart(x=axis, y=rows, height=height * len(names) + 62, left=left, right=66, y_ticks=False)


def _steps(values: Sequence[float]) -> list[tuple[float, float]]:
    """A step curve in per cent, thinned where there are more values than a plot can show; the ends are kept."""
    n = len(values)
    kept = range(n) if n <= _POINTS else sorted({round(i * (n - 1) / (_POINTS - 1)) for i in range(_POINTS)})
    points = [(values[0], 0.0)]
    for i in kept:
        points += [(values[i], points[-1][1]), (values[i], 100 * (i + 1) / n)]
    return points


def share(part: int, whole: int) -> str:
    return format_figure(part / whole if whole > 0 else 0.0, "1")


def _times(limit: float | None) -> str:
    return "none" if limit is None else f"{number(limit)}×"


def _style(series: int) -> str:
    return f"s{series % SERIES}" + (" dash" if series // SERIES % 2 else "")
