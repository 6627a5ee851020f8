"""Reports on slices of the rows: forest plots and table cells, worst slice first."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from onnx_ops.domain.decision import Decision, GateResult, SliceResult, Verdict
from onnx_ops.reporting.formatting import (
    NOTHING,
    SIGNS,
    format_figure,
    format_interval,
    markdown,
    markdown_table,
    number,
)
from onnx_ops.reporting.plots import Figure
from onnx_ops.reporting.svg import Axis, Chart, axis_around, room_for

HEADS = ("slice", "verdict", "measured", "n", "p, corrected")

SHOWN = 20
"""Maximum number of slices in a table of a terminal or a pull request."""

_NAMED = 6
"""Maximum number of slices that a sentence names because they are not judged."""

_DRAWN = 30
"""Maximum number of judged slices in a plot."""

_SKIPPED = 8
"""Maximum number of slices in a plot that are not judged."""

_VALUE_WIDTH = 78.0
"""Room for the values at the right of a plot."""

_MARKS = {Verdict.PASS: "✓", Verdict.INCONCLUSIVE: "?", Verdict.ERROR: "!", Verdict.FAIL: "✗"}

_STYLES = {
    Verdict.PASS: ("line estimate", "solid"),
    Verdict.FAIL: ("line bad-line", "bad"),
    Verdict.INCONCLUSIVE: ("line s1", "s1 open"),
    Verdict.ERROR: ("line s3", "s3 open"),
}
"""Styles of the interval and of the dot of a slice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SliceTable:
    """The slices of one gate result of a variant on a target."""

    variant: str
    target: str
    result: GateResult

    @property
    def title(self) -> str:
        """Return the names of the comparison, the variant and the target."""
        return f"{self.result.metric}: {self.variant} on {self.target}"

    def list_cells(self) -> list[tuple[SliceResult, tuple[str, ...]]]:
        """Return each slice with its table cells, without the verdict."""
        return [(one, _list_cells(self.result, one)) for one in self.result.slices]

    def list_worst(self) -> list[tuple[Verdict, tuple[str, ...]]]:
        """Return the verdicts and cells of the worst judged slices for a short table."""
        judged = [
            (one.verdict, cells) for one, cells in self.list_cells() if one.verdict is not None
        ]
        return judged[:SHOWN]

    def describe_rest(self) -> str:
        """Return what a short table omits, as a sentence; empty if it omits nothing."""
        skipped = [one for one in self.result.slices if one.verdict is None]
        more = len(self.result.slices) - len(skipped) - SHOWN
        parts = [f"{more} more judged slices"] if more > 0 else []
        if skipped:
            parts.append(f"not judged because of too few rows or groups: {list_skipped(skipped)}")
        return "; ".join(parts)


def list_skipped(skipped: Sequence[SliceResult]) -> str:
    """Return the names and sizes of slices that are not judged, the largest first."""
    sizes = [f"{one.slice} ({one.reason.partition(': ')[2]})" for one in skipped[:_NAMED]]
    more = len(skipped) - _NAMED
    return ", ".join(sizes) + (f" and {more} more" if more > 0 else "")


def slice_tables(decisions: Iterable[Decision]) -> list[SliceTable]:
    """Return a table for each gate result on slices."""
    return [
        SliceTable(variant=decision.variant, target=decision.target, result=result)
        for decision in decisions
        for result in decision.results
        if result.slices
    ]


def _list_cells(result: GateResult, one: SliceResult) -> tuple[str, ...]:
    """Return the cells of a slice: name, measurement, count, corrected p-value."""
    if one.verdict is None:
        return one.slice, NOTHING, one.reason.partition(": ")[2], NOTHING
    interval = format_interval(one.low, one.high, result.unit, near=one.estimate)
    return (
        one.slice,
        f"{format_figure(one.estimate, result.unit)} {interval}".strip(),
        f"{one.n} in {one.groups} groups" if one.groups else str(one.n),
        NOTHING if one.p_value is None else f"{one.p_value:.2g}",
    )


def slices_markdown(decisions: Sequence[Decision]) -> list[str]:
    """Return the Markdown of all tables of slices, each in a part that can be opened."""
    return [_describe_table(table) for table in slice_tables(decisions)]


def _describe_table(table: SliceTable) -> str:
    rows = [(name, _write_verdict(verdict), *rest) for verdict, (name, *rest) in table.list_worst()]
    lines = "\n".join(markdown_table(HEADS, rows)) if rows else ""
    if rest := table.describe_rest():
        lines += f"\n\n{markdown(rest)}."
    summary = f"{markdown(table.title)}, {markdown(table.result.limit)}"
    return f"<details><summary>{summary}</summary>\n\n{lines}\n\n</details>"


def _write_verdict(verdict: Verdict) -> str:
    return f"{SIGNS[verdict]} {verdict.value}"


def slice_figures(decisions: Iterable[Decision]) -> Iterator[Figure]:
    """Yield a forest plot of each gate result that has slices with an estimate."""
    for table in slice_tables(decisions):
        figure = _plot_slices(table)
        if figure is not None:
            yield figure


def _plot_slices(table: SliceTable) -> Figure | None:
    """Plot the estimate and the interval of each slice, the worst first."""
    result = table.result
    measured = [one for one in result.slices if _is_drawable(one)]
    if not measured:
        return None
    drawn = measured[:_DRAWN]
    skipped = [one for one in result.slices if one.verdict is None]
    rows = [*drawn, *skipped[:_SKIPPED]]
    scale = 100.0 if result.unit == "1" else 1.0
    left, height = room_for([one.slice for one in rows])
    chart = Chart(
        x=_make_axis(result, drawn, scale),
        y=Axis(low=0.3, high=len(rows) + 0.7, label=""),
        height=height * len(rows) + 62,
        left=left,
        right=_VALUE_WIDTH,
        y_ticks=False,
    )
    if _is_change(result):
        chart.upright(0.0, "line one")
    if result.bound is not None:
        chart.upright(scale * result.bound, "line limit")
    for index, one in enumerate(rows):
        _draw_slice(chart, result, one, len(rows) - index, scale)
    return Figure(
        title=table.title,
        svg=chart.render(f"Forest plot of {table.title}"),
        caption=_write_caption(result, len(measured), skipped),
    )


def _is_drawable(one: SliceResult) -> bool:
    return one.verdict is not None and one.estimate is not None and math.isfinite(one.estimate)


def _is_change(result: GateResult) -> bool:
    return result.limit.startswith(("drop", "increase"))


def _make_axis(result: GateResult, drawn: Sequence[SliceResult], scale: float) -> Axis:
    """Return an axis with room for all intervals and the limit."""
    values = [value for one in drawn for value in (one.estimate, one.low, one.high)]
    values += [result.bound, *([0.0] if _is_change(result) else [])]
    metric, _, against = result.metric.partition(" by slice")
    other = f" against{against.removeprefix(' vs')}" if against else ""
    label = f"change of {metric}{other}" if _is_change(result) else metric
    unit = " (%)" if result.unit == "1" else ""
    finite = [scale * value for value in values if value is not None and math.isfinite(value)]
    return axis_around(finite, f"{label}{unit}")


def _draw_slice(chart: Chart, result: GateResult, one: SliceResult, y: float, scale: float) -> None:
    """Draw the row of a slice.

    A slice that is not judged has a text instead of marks.
    """
    if one.verdict is None or one.estimate is None:
        chart.row(y, one.slice, f"{one.n} rows")
        chart.note(chart.x.low, y - 0.5, "not judged")
        return
    line, dot = _STYLES[one.verdict]
    estimate = scale * one.estimate
    ends = [
        scale * value if value is not None and math.isfinite(value) else edge
        for value, edge in ((one.low, chart.x.low), (one.high, chart.x.high))
    ]
    text = f"{one.slice}: {_list_cells(result, one)[1]}, n = {one.n}"
    chart.path([(ends[0], y), (ends[1], y)], line)
    chart.dot(estimate, y, dot, text)
    chart.row(y, one.slice, f"{_MARKS[one.verdict]} {number(estimate)}")


def _write_caption(result: GateResult, count: int, skipped: Sequence[SliceResult]) -> str:
    shown = f"The worst {_DRAWN} of {count}" if count > _DRAWN else f"All {count}"
    text = (
        f"{shown} judged slices with an estimate, the worst first, with 90 % intervals. "
        f"Dashed line: {result.limit}. ✗ is beyond the limit after the correction for all slices, "
        "✓ is within it, ? is undecided."
    )
    if skipped:
        text += f" Not judged because of too few rows or groups: {list_skipped(skipped)}."
    return text
