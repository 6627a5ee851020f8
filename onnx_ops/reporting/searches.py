"""Searches for variants in the report: what was found, what each node kept in float bought, everything tried."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from html import escape

from onnx_ops.domain.quantization import SearchRecord, Trial
from onnx_ops.reporting.formatting import NOTHING, format_figure, number
from onnx_ops.reporting.gate_table import table
from onnx_ops.reporting.plots import Figure, Key
from onnx_ops.reporting.svg import Axis, Chart, axis_around

_SHOWN = 6
"""Losses of more than so many budgets stand at the edge: where the others are is what matters."""

_NEAREST = 0.02
"""Least width of an axis of losses, in points: none of a thousand rows is no plot."""


def search_section(record: SearchRecord, show: Callable[[Figure], str]) -> Iterator[str]:
    """Markup of one search; `show` renders a figure."""
    yield f"<h2>Search {escape(record.name)}</h2>"
    yield f"<p>{escape(_summary(record))}</p>"
    yield table(("variant", "what it is"), "".join(_slots(record)))
    figures = [figure for target in record.targets if (figure := search_figure(record, target))]
    if figures:
        yield f'<div class="figures">{"".join(map(show, figures))}</div>'
    if record.bought:
        yield "<h3>What each node kept in float bought</h3>"
        heads = ("recipe", "node", f"{record.metric} saved", *(f"time on {name}" for name in record.targets), "kept")
        yield table(heads, "".join(_bought(record)))
    heads = ("no.", "recipe", "in float", f"loss of {record.metric}", "size", "time over fp32", "output error", "why")
    rows = "".join(_trial(record, number_, trial) for number_, trial in enumerate(record.trials))
    yield f"<details><summary>All {len(record.trials)} models tried</summary>{table(heads, rows)}</details>"
    if record.sensitivities:
        yield _sensitivities(record)


def search_figure(record: SearchRecord, target: str) -> Figure | None:
    """Loss of the task metric against time on one target, for everything that was measured."""
    points = [(n, t) for n, t in enumerate(record.trials) if not t.failure and target in t.ratios]
    if not points:
        return None
    losses = [100 * (t.drop or 0.0) for _, t in points]
    limit = 100 * record.budget.metric_drop
    low, high = min([0.0, *losses]), max([limit, *(loss for loss in losses if loss <= _SHOWN * limit)])
    room = max(0.08 * (high - low), _NEAREST)
    times = [v for _, t in points for v in (t.ratios[target].low, t.ratios[target].high) if 0 < v < 100]
    chart = Chart(
        x=axis_around([1.0, *times], "time of a request over that of fp32 (×)"),
        y=Axis(low=low - room, high=high + room, label=f"loss of {record.metric} (points)"),
    )
    chart.bar((chart.x.low, limit), (chart.x.high, limit), "line limit")
    chart.dot(1.0, 0.0, "s1 full", f"fp32: {format_figure(float(record.export_bytes), 'B')}", radius=5)
    chart.note(1.0, 0.0, "fp32", above=True)
    keys = [Key(series=1, text=f"fp32: {format_figure(float(record.export_bytes), 'B')}")]
    named = {slot.trial: f"{record.name}-{slot.role}" for slot in record.slots if slot.trial is not None}
    for n, trial in points:
        ratio, loss = trial.ratios[target], 100 * (trial.drop or 0.0)
        told = f"{n}: {_recipe(trial)}, {number(ratio.estimate)}×, {number(loss)} points, "
        told += format_figure(float(trial.size_bytes), "B")
        chart.bar((max(ratio.low, chart.x.low), loss), (min(ratio.high, chart.x.high), loss), "line s0")
        chart.dot(ratio.estimate, loss, f"s0 {'full' if n in record.front else 'open'}", told, radius=4)
        if n in named:
            chart.dot(ratio.estimate, loss, "ring", f"{named[n]} is this one", radius=8)
        if n in record.front or n in named:
            chart.note(ratio.estimate, loss, str(n), above=True)
            keys.append(Key(series=0, text=f"{named[n]} = {told}" if n in named else told))
    return Figure(
        title=f"What the search {record.name} saw on {target}",
        svg=chart.render(f"Loss of {record.metric} against time on {target}"),
        caption="Lower left is better. Every dot is a model that was built; full ones are on the front: nothing else "
        "is at once as exact, as small and as fast. Rings mark variants. "
        f"Dashed: the budget, {number(limit)} points. What loses far more stands at the upper edge. "
        f"Loss on {record.rows} tuning rows; times of 5 session pairs with 90 % intervals. "
        "The gates measure the variants afresh, on other rows.",
        keys=tuple(keys),
    )


def _summary(record: SearchRecord) -> str:
    budget = record.budget
    asked = [f"a loss of at most {format_figure(budget.metric_drop, '1')} of {record.metric}"]
    if budget.size is not None:
        asked.append(f"at most {format_figure(float(budget.size), 'B')}")
    if budget.p99 is not None:
        asked.append(f"p99 within {format_figure(budget.p99, 's')}")
    return (
        f"Asked for: {', '.join(asked)}. {len(record.trials)} models were built and measured on {record.rows} tuning "
        f"rows, and {len(record.sensitivities)} times a single node was quantized alone, in "
        f"{format_figure(record.seconds, 's')}. It ended: {record.stopped}."
    )


def _slots(record: SearchRecord) -> Iterator[str]:
    for slot in record.slots:
        said = f"empty: {slot.reason}"
        if slot.trial is not None:
            trial = record.trials[slot.trial]
            said = f"no. {slot.trial}, {_recipe(trial)}"
            said += f"; in float: {', '.join(trial.excluded)}" if trial.excluded else ""
        yield f'<tr><th scope="row">{escape(f"{record.name}-{slot.role}")}</th><td>{escape(said)}</td></tr>'


def _bought(record: SearchRecord) -> Iterator[str]:
    for one in record.bought:
        saved = f"{number(100 * one.metric)} points"
        times = (format_figure(one.time.get(name), "x") for name in record.targets)
        cells = (one.recipe, one.node, saved, *times, "yes" if one.kept else "no: it bought too little")
        yield f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in cells)}</tr>"


def _trial(record: SearchRecord, place: int, trial: Trial) -> str:
    times = ", ".join(f"{name} {number(one.estimate)}×" for name, one in sorted(trial.ratios.items()))
    cells = (
        f"{place}{' (front)' if place in record.front else ''}",
        trial.recipe,
        ", ".join(trial.excluded) or NOTHING,
        NOTHING if trial.drop is None else f"{number(100 * trial.drop)} points",
        format_figure(float(trial.size_bytes), "B") if trial.size_bytes else NOTHING,
        times or NOTHING,
        NOTHING if trial.error is None else number(trial.error),
        trial.failure or trial.why,
    )
    return f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in cells)}</tr>"


def _sensitivities(record: SearchRecord) -> str:
    ranked = sorted(record.sensitivities, key=lambda s: (s.recipe, -(s.error or 0.0), s.node))
    rows = "".join(
        f"<tr><td>{escape(s.recipe)}</td><td>{escape(s.node)}</td>"
        f'<td class="figure">{escape(s.failure or number(s.error or 0.0))}</td></tr>'
        for s in ranked
    )
    heads = ("recipe", "only this node quantized", "error of the outputs (standard deviations)")
    return f"<details><summary>Single nodes quantized alone: {len(ranked)}</summary>{table(heads, rows)}</details>"


def _recipe(trial: Trial) -> str:
    count = len(trial.excluded)
    return trial.recipe + (f" with {count} node{'s' if count > 1 else ''} in float" if count else "")
