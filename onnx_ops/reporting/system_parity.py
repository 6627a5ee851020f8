"""The report on a judgement of two systems: table rows, Markdown and HTML page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from onnx_ops.domain.decision import Decision, GateResult, Verdict
from onnx_ops.domain.system_comparison import SystemExample
from onnx_ops.printable import show
from onnx_ops.reporting.formatting import (
    NOTHING,
    SIGNS,
    markdown,
    markdown_table,
    result_figure,
)
from onnx_ops.reporting.png import make_data_uri, read_picture, scale_picture

_SHOWN_CHARACTERS = 1500


@dataclass(frozen=True, slots=True, kw_only=True)
class SystemHeading:
    """The text above the table: both systems, their inputs and the notes."""

    source: str
    candidate: str
    steps: str
    inputs: str
    verdict: Verdict
    notes: Sequence[str] = ()


def describe_reason(decisions: Sequence[Decision]) -> str:
    """Return the reason of the first result with the worst verdict as one line.

    Advisory results are left out. If all others passed, it is the reason of the last of them.
    """
    binding = [one for decision in decisions for one in decision.results if not one.advisory]
    worst = max(binding, key=lambda result: result.verdict.rank, default=None)
    if worst is None:
        return "nothing was judged"
    if worst.verdict is Verdict.PASS:
        return binding[-1].reason
    return f"{worst.metric}: {worst.reason}"


def list_cells(results: Sequence[GateResult]) -> list[tuple[str, str, str, GateResult]]:
    """Return the step, the difference and the limit of each result, with the result."""
    return [
        (
            result.metric,
            NOTHING if result.estimate is None else result_figure(result),
            result.limit or NOTHING,
            result,
        )
        for result in results
    ]


def write_markdown(heading: SystemHeading, decisions: Sequence[Decision]) -> str:
    """Return the judgement as Markdown for a pull request or a job summary."""
    names = f"{markdown(heading.candidate)} against {markdown(heading.source)}"
    lines = [
        f"### {SIGNS[heading.verdict]} {heading.verdict.value.upper()}: {names}",
        "",
        markdown(describe_reason(decisions)),
    ]
    for decision in decisions:
        rows = [
            (
                *cells,
                "note" if result.advisory else f"{SIGNS[result.verdict]} {result.verdict.value}",
                result.reason,
            )
            for *cells, result in list_cells(decision.results)
        ]
        heads = (f"step on {decision.target}", "difference", "limit", "verdict", "reason")
        lines += ["", *markdown_table(heads, rows)]
    lines += ["", f"Steps: {markdown(heading.steps)}. Inputs: {markdown(heading.inputs)}.", ""]
    lines += [f"- {markdown(note)}" for note in heading.notes]
    return "\n".join(lines).rstrip() + "\n"


def build_example(step: str, name: str, reference: Any, value: Any) -> SystemExample:
    """Return both values of a step at one input as pictures, or else as texts."""
    pictures = read_picture(reference), read_picture(value)
    if pictures[0] is not None and pictures[1] is not None:
        return SystemExample(step=step, name=name, pictures=_pair_pictures(*pictures))
    texts = (("source", format_value(reference)), ("candidate", format_value(value)))
    return SystemExample(step=step, name=name, texts=texts)


def _pair_pictures(left: Any, right: Any) -> list[tuple[str, str]]:
    """Return both pictures, and their difference if they have the same size."""
    # Each picture has its own range, so that another scale does not hide what the picture shows.
    shown = [
        (name, make_data_uri(scale_picture(one, float(one.min()), float(one.max()))))
        for name, one in (("source", left), ("candidate", right))
    ]
    if left.shape != right.shape:
        return shown
    difference = np.abs(left - right)
    high = float(difference.max())
    span = float(np.ptp(left)) or 1.0
    name = f"difference, white is {high / span * 255:.3g} levels"
    return [*shown, (name, make_data_uri(scale_picture(difference, 0.0, high)))]


def format_value(value: Any) -> str:
    """Return a value as a text of limited length."""
    if isinstance(value, np.ndarray):
        body = np.array2string(value, threshold=200, edgeitems=20, precision=5, max_line_width=88)
        text = f"{value.dtype} {value.shape}\n{body}" if value.ndim else body
    elif isinstance(value, (list, tuple)):
        text = "\n".join(format_value(part) for part in value[:40]) or "an empty list"
    elif isinstance(value, dict):
        text = ", ".join(f"{key}: {format_value(part)}" for key, part in value.items())
    else:
        text = str(value)
    short = text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]} …"
    return show(short)


def write_html(
    heading: SystemHeading, decisions: Sequence[Decision], example: SystemExample | None
) -> str:
    """Return the judgement as one self-contained HTML page."""
    from onnx_ops.reporting.html import render

    return render(
        "system.html",
        title=f"{heading.candidate} against {heading.source}",
        verdict=heading.verdict,
        reason=describe_reason(decisions),
        facts={"steps": heading.steps, "inputs": heading.inputs},
        notes=list(heading.notes),
        groups=[(decision, list_cells(decision.results)) for decision in decisions],
        example=example,
    )
