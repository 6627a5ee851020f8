"""Plot of a target's variants: size, latency and task metric."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from onnx_ops.domain.decision import Decision, Verdict
from onnx_ops.domain.evidence import Evidence
from onnx_ops.reporting.comparison import VariantRow, variant_rows
from onnx_ops.reporting.formatting import Scale, format_figure, scale_for
from onnx_ops.reporting.metrics import Measured, headline, median_latency, task_metric
from onnx_ops.reporting.plots import Figure, is_bounded, style_series
from onnx_ops.reporting.svg import Chart, axis_around, make_standalone

_NAMED = 4
"""Maximum number of variants whose names stand beside their dots."""


def pareto_figure(
    target: str, evidence: Sequence[Evidence], decisions: Sequence[Decision], chosen: str | None
) -> Figure | None:
    """Plot latency against size, with the task metric beside each variant.

    For variants in the table of variants, the latencies are those of the table. Return None without
    measurements.
    """
    here = [e for e in evidence if e.target == target]
    points = _list_points(here, variant_rows(decisions, evidence))
    if not points:
        return None
    metric = headline(decisions, here)
    passed = _list_passed(decisions, target)
    time, size = _choose_scales(points)
    chart = _make_size_chart(points, time, size)
    above = _choose_sides(points)
    keys = []
    for series, e, middle in points:
        left, top = e.size_bytes / size.divisor, middle.estimate / time.divisor
        _draw_interval(chart, left, middle, time, series)
        value = task_metric(e, metric)
        label = f"{e.variant}: {format_figure(e.size_bytes, 'B')}, median {middle.text()}"
        label += f", {metric} {value.text() if value else 'not measured'}"
        chart.dot(
            left,
            top,
            f"{style_series(series)} {'full' if e.variant in passed else 'open'}",
            label,
            radius=5,
        )
        if e.variant == chosen:
            chart.dot(left, top, "ring", f"{e.variant} is chosen", radius=9)
        name = e.variant
        # Long lists of names would overlap, so numbers replace them.
        if len(points) > _NAMED:
            name, label = f"{series + 1}:", f"{series + 1}: {label}"
        beside = f"{name} {format_figure(value.estimate, value.unit)}" if value else name
        chart.note(left, top, beside, above=above[e.variant])
        keys.append((series, label))
    return Figure(
        title=f"Size, latency and {metric} on {target}",
        svg=chart.render(f"Latency against size on {target}"),
        caption="Lower and further left is better. Bars and brackets show 90 % intervals. "
        "Full dots mark variants with the verdict PASS; open dots mark the others. "
        f"The ring marks the chosen variant. The text beside a variant shows its {metric}.",
        keys=tuple(keys),
    )


def _list_points(
    evidence: Sequence[Evidence], rows: Sequence[VariantRow]
) -> list[tuple[int, Evidence, Measured]]:
    """Return number, evidence and median latency of each measured variant."""
    medians = {(row.variant, row.target): row.latency for row in rows if row.verdict is not None}
    return [
        (series, e, median)
        for series, e in enumerate(evidence)
        if (median := medians.get((e.variant, e.target), median_latency(e.latency)))
        and e.size_bytes > 0
    ]


def _choose_sides(points: Sequence[tuple[int, Evidence, Measured]]) -> dict[str, bool]:
    """Return, for each variant, whether its name is above its dot.

    Neighbours have their names on opposite sides.
    """
    by_size = sorted((e for _, e, _ in points), key=lambda e: e.size_bytes)
    return {e.variant: place % 2 == 0 for place, e in enumerate(by_size)}


def _draw_interval(chart: Chart, left: float, middle: Measured, time: Scale, series: int) -> None:
    if is_bounded(middle):
        ends = [(left, middle.low / time.divisor), (left, middle.high / time.divisor)]
        chart.path(ends, f"line {style_series(series)}")


def _list_passed(decisions: Sequence[Decision], target: str) -> set[str]:
    """Return the variants with the verdict PASS on a target."""
    return {d.variant for d in decisions if d.target == target and d.verdict is Verdict.PASS}


def _choose_scales(points: Sequence[tuple[int, Evidence, Measured]]) -> tuple[Scale, Scale]:
    """Return the units of time and size that fit the largest values."""
    return (
        scale_for(max(middle.estimate for *_, middle in points), "s"),
        scale_for(max(e.size_bytes for _, e, _ in points), "B"),
    )


def _make_size_chart(
    points: Sequence[tuple[int, Evidence, Measured]], time: Scale, size: Scale
) -> Chart:
    """Return an empty plot of size and latency.

    The axes have room for all points and their intervals.
    """
    ends = [
        v / time.divisor
        for *_, m in points
        for v in (m.estimate, m.low, m.high)
        if 0 < v < math.inf
    ]
    sizes = [e.size_bytes / size.divisor for _, e, _ in points]
    return Chart(
        x=axis_around(sizes, f"size on disk ({size.suffix.strip()})", room=0.25),
        y=axis_around(ends, f"median latency ({time.suffix.strip()})", room=0.15),
    )


def variants_picture(
    target: str, evidence: Sequence[Evidence], decisions: Sequence[Decision], chosen: str | None
) -> Figure | None:
    """Plot size and latency of a target's variants as a standalone SVG file.

    Return None without measurements.
    """
    figure = pareto_figure(target, evidence, decisions, chosen)
    return None if figure is None else replace(figure, svg=make_standalone(figure.svg))
