"""Draw the plots of a rollout: shares of traffic, and odds ratios of guardrails."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

from onnx_ops.domain.rollout import GuardrailResult
from onnx_ops.reporting.plots import SERIES, Figure
from onnx_ops.reporting.svg import WIDTH, Axis, Chart, room_for

_MAX_ODDS = 1e3
"""Largest and, inverted, smallest odds ratio that is plotted."""
_BAR_HEIGHT = 14.0


def draw_traffic(weights: Mapping[str, int], series: Mapping[str, int]) -> str:
    """Return the shares of traffic as one bar.

    Args:
        weights: percentages by deployment.
        series: number of each deployment's colour.
    """
    parts, left = [], 0.0
    for name, weight in weights.items():
        width = WIDTH * weight / 100
        if weight:
            box = f'x="{left:.1f}" y="0" width="{width:.1f}" height="{_BAR_HEIGHT:g}"'
            style = f"full s{series.get(name, 0) % SERIES}"
            title = f"<title>{escape(name)} {weight} %</title>"
            parts.append(f'<rect class="{style}" {box}>{title}</rect>')
        left += width
    text = ", ".join(f"{name} {weight} %" for name, weight in weights.items()) or "no traffic"
    return (
        f'<svg class="traffic" viewBox="0 0 {WIDTH:g} {_BAR_HEIGHT:g}" preserveAspectRatio="none" '
        f'role="img" aria-label="{escape(text)}">{"".join(parts)}</svg>'
    )


def share_figure(points: Sequence[tuple[float, int, str]], *, until: float) -> Figure | None:
    """Plot the candidate's share of traffic over time.

    Args:
        points: time in seconds since the epoch, percentage, and name of each change, oldest first.
        until: end of the plot, in seconds since the epoch.

    Returns:
        The plot; None without changes.
    """
    if not points:
        return None
    start = points[0][0]
    duration = max(until - start, points[-1][0] - start, 1.0)
    scale, unit = next(
        (size, name)
        for size, name in (
            (86_400.0, "days"),
            (3600.0, "hours"),
            (60.0, "minutes"),
            (1.0, "seconds"),
        )
        if duration >= 2 * size or size == 1.0
    )
    chart = Chart(
        x=Axis(low=0.0, high=duration / scale, label=f"{unit} since the start"),
        y=Axis(
            low=0.0, high=105.0, label="share of traffic (%)", marks=(0.0, 25.0, 50.0, 75.0, 100.0)
        ),
        height=220.0,
    )
    line: list[tuple[float, float]] = []
    for at, percent, _ in points:
        if line:
            line.append(((at - start) / scale, line[-1][1]))
        line.append(((at - start) / scale, float(percent)))
    chart.path([*line, (duration / scale, line[-1][1])], "line s0")
    for at, percent, name in points:
        chart.dot((at - start) / scale, float(percent), "solid", f"{name}: {percent} %")
    return Figure(
        title="Share of the candidate",
        svg=chart.render("share of traffic of the candidate over time"),
        caption=f"Changes: {len(points)}; the last to {points[-1][1]} %.",
    )


def odds_figure(guardrails: Sequence[GuardrailResult]) -> Figure | None:
    """Plot the interval of the odds ratio of each guardrail that has one.

    Return None if no guardrail has an interval.
    """
    rows = [
        (guard, max(guard.low, 1 / _MAX_ODDS), min(guard.high, _MAX_ODDS))
        for guard in guardrails
        if guard.low is not None and guard.high is not None and not math.isnan(guard.low)
    ]
    if not rows:
        return None
    left, height = room_for([guard.name for guard, *_ in rows])
    low = min(0.5, *(each for _, each, _ in rows)) / 1.2
    high = max(2.0, *(each for *_, each in rows)) * 1.2
    chart = Chart(
        x=Axis(low=low, high=high, label="odds ratio, candidate / stable", log=True),
        y=Axis(low=0.3, high=len(rows) + 0.7, label=""),
        height=height * len(rows) + 70,
        left=left,
        right=96,
        y_ticks=False,
    )
    chart.upright(1.0, "line one")
    for index, (guard, least, most) in enumerate(rows):
        y, style = len(rows) - index, "bad-line" if guard.is_violated else "stem"
        chart.path([(least, y), (most, y)], f"line {style}")
        for end in (least, most):
            chart.dot(end, y, "bad" if guard.is_violated else "solid", guard.summary)
        chart.row(y, guard.name, f"{guard.low:.3g}–{guard.high:.3g}")
    return Figure(
        title="Odds ratios",
        svg=chart.render("odds ratios of the guardrails"),
        caption="Lines: intervals that are valid at every evaluation. Above 1, the candidate is "
        "worse.",
    )
