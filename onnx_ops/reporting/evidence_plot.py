"""The evidence of a rollout as a picture that stands alone: log10 against requests to the candidate, and the limit."""

from __future__ import annotations

import base64
from collections.abc import Sequence

from onnx_ops.reporting.style import STYLE
from onnx_ops.reporting.svg import Axis, Chart, axis_around
from onnx_ops.statistics.rollout.judge import EvidencePath

_FAR = 3.0
"""How far below zero, and above the limit, evidence is drawn; what lies beyond is at the edge."""


def evidence_svg(paths: Sequence[EvidencePath]) -> str:
    """One line for each guardrail that has counts; empty if none has."""
    drawn = [path for path in paths if path.requests]
    if not drawn:
        return ""
    limit = drawn[0].limit
    last = max(path.requests[-1] for path in drawn)
    values = [value for path in drawn for value in path.log10_evidence]
    inside = [min(max(value, -_FAR), limit + _FAR) for value in values]
    chart = Chart(
        x=Axis(low=0.0, high=float(max(last, 1)), label="requests to the candidate"),
        y=axis_around([0.0, limit, *inside], "evidence against it, log10"),
    )
    chart.across(limit, "limit", "rolled back")
    for index, path in enumerate(drawn):
        points = [(0.0, 0.0), *zip(map(float, path.requests), path.log10_evidence, strict=True)]
        chart.path(points, f"line s{index % 6}")
        chart.note(points[-1][0], points[-1][1], path.name, above=points[-1][1] <= limit)
    plot = chart.render("evidence against the candidate").replace(
        "<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1
    )
    return plot.replace(">", f"><style>{STYLE}svg{{background:var(--bg)}}</style>", 1)


def as_data_url(svg: str) -> str:
    """The picture as the address of an image."""
    return f"data:image/svg+xml;base64,{base64.b64encode(svg.encode()).decode()}"
