"""The report on a judgement of two files: table rows, Markdown page and HTML page."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from onnx_ops import codec
from onnx_ops.domain.artifact import digest_bytes
from onnx_ops.domain.decision import Decision, GateResult, Verdict
from onnx_ops.domain.evidence import Advice, Evidence
from onnx_ops.reporting.formatting import (
    NOTHING,
    SIGNS,
    format_figure,
    markdown,
    markdown_table,
    result_figure,
    result_interval,
)
from onnx_ops.reporting.structure import advice_lines


@dataclass(frozen=True, slots=True, kw_only=True)
class Heading:
    """The text above the table.

    `kind` describes the candidate, and `rows` the input rows. `times` states the median times of a
    request before and after; `sizes` are the bytes before and after. `notes` name checks that were
    not possible, and other limits of the judgement.
    """

    baseline: str
    candidate: str
    kind: str
    rows: str
    times: str
    sizes: tuple[int, int]
    verdict: Verdict
    notes: Sequence[str] = ()
    advice: Sequence[Advice] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of the table; `verdict` is None for a measurement without a limit."""

    target: str
    what: str
    measured: str
    limit: str
    verdict: Verdict | None
    reason: str
    advisory: bool = False


def table_rows(decisions: Sequence[Decision], sizes: tuple[int, int]) -> list[Row]:
    """Return the results in the order of the decisions, and the size.

    Parity results that are equal on several targets appear once. Advisory results without an
    estimate are omitted.
    """
    rows: list[Row] = []
    seen: list[GateResult] = []
    for decision in decisions:
        results = [
            result for result in decision.results if result not in seen or result.gate != "parity"
        ]
        rows += [
            Row(
                target=decision.target,
                what=_name(result),
                measured=_figure(result),
                limit=result.limit or NOTHING,
                verdict=result.verdict,
                reason=result.reason,
                advisory=result.advisory,
            )
            for result in results
            if not result.advisory or result.estimate is not None
        ]
        seen += results
    before, after = sizes
    ratio = after / before if before else 0.0
    parts = (
        f"{format_figure(ratio, 'x')} ({format_figure(after, 'B')}, "
        f"was {format_figure(before, 'B')})"
    )
    return [
        *rows,
        Row(target="", what="size", measured=parts, limit=NOTHING, verdict=None, reason=""),
    ]


def reason_of(decisions: Sequence[Decision], sizes: tuple[int, int]) -> str:
    """Return the reason of the worst result as one line.

    If all results passed, the line has the main measurements.
    """
    binding = [
        result for decision in decisions for result in decision.results if not result.advisory
    ]
    worst = max(binding, key=lambda result: result.verdict.rank, default=None)
    if worst is None:
        return "nothing was judged"
    if worst.verdict is not Verdict.PASS:
        return f"{_name(worst)}: {worst.reason}"
    return ", ".join(_list_measurements(binding, sizes))


def _list_measurements(results: Sequence[GateResult], sizes: tuple[int, int]) -> list[str]:
    """Return the main measurements of results that all passed.

    They are parity, task metric, latency and size.
    """
    by_gate: dict[str, list[GateResult]] = defaultdict(list)
    for result in results:
        by_gate[result.gate].append(result)
    parts = []
    if by_gate["parity"]:
        parts.append("parity within the limits")
    if by_gate["task"]:
        metric = by_gate["task"][0]
        parts.append(f"{_name(metric)} {_figure(metric)}")
    if timed := by_gate["latency"]:
        slowest = max(timed, key=lambda result: result.estimate or 0.0)
        parts.append(
            f"{_figure(slowest)} the latency"
            + (f" at worst ({_name(slowest)})" if len(timed) > 1 else "")
        )
    before, after = sizes
    if before and after != before:
        parts.append(f"{format_figure(after / before, 'x')} the size")
    return parts


def _figure(result: GateResult) -> str:
    """Return the estimate with its interval; a change has a sign."""
    sign = "+" if result.gate == "task" and (result.estimate or 0) > 0 else ""
    return f"{sign}{result_figure(result)} {result_interval(result)}".strip()


def _name(result: GateResult) -> str:
    return result.metric or result.gate


def markdown_page(heading: Heading, decisions: Sequence[Decision]) -> str:
    """Return the judgement as Markdown for a pull request or a job summary."""
    several = len(decisions) > 1
    rows = table_rows(decisions, heading.sizes)
    heads, first = ("target", "what", "measured", "limit", "verdict"), 0 if several else 1
    names = f"{markdown(heading.candidate)} against {markdown(heading.baseline)}"
    times = f" Median time of a request: {markdown(heading.times)}." if heading.times else ""
    lines = [
        f"### {SIGNS[heading.verdict]} {heading.verdict.value.upper()}: {names}",
        "",
        markdown(reason_of(decisions, heading.sizes)),
        "",
        *markdown_table(heads[first:], [_list_cells(row)[first:] for row in rows]),
        "",
        f"Candidate: {markdown(heading.kind)}. Rows: {markdown(heading.rows)}.{times}",
        "",
    ]
    failed = [row for row in rows if row.verdict not in (None, Verdict.PASS)]
    parts = [f"{row.what}{f' on {row.target}' if several else ''}: {row.reason}" for row in failed]
    lines += _list_items((*parts, *heading.notes))
    if any(result.slices for decision in decisions for result in decision.results):
        # `slices` imports the plots, which are not needed for other results.
        from onnx_ops.reporting.slices import slices_markdown

        lines += [part for table in slices_markdown(decisions) for part in ("", table)]
    if heading.advice:
        listed = "\n".join(_list_items(advice_lines(heading.advice)))
        lines += ["", f"<details><summary>What slows it down</summary>\n\n{listed}\n\n</details>"]
    return "\n".join(lines).rstrip() + "\n"


def _list_cells(row: Row) -> tuple[str, ...]:
    verdict = NOTHING if row.verdict is None else f"{SIGNS[row.verdict]} {row.verdict.value}"
    return row.target, row.what, row.measured, row.limit, "note" if row.advisory else verdict


def _list_items(texts: Sequence[str]) -> list[str]:
    return [f"- {markdown(text)}" for text in texts]


def html_report(
    heading: Heading, decisions: Sequence[Decision], timings: Sequence[tuple[Decision, Evidence]]
) -> str:
    """Return the judgement as one self-contained HTML page.

    `timings` are the latency comparisons, each with its decision.
    """
    # Most verdicts are printed as text, which is faster without importing charts and templates.
    from onnx_ops.reporting.html import list_gates, plot_ratios, render
    from onnx_ops.reporting.slices import slice_figures, slice_tables

    # The loop is reversed, so that the first timing of a target determines its machine.
    machines = {timing.target: timing for _, timing in reversed(timings)}
    evidence = {
        (d.variant, d.target): machines[d.target] for d in decisions if d.target in machines
    }
    figures = plot_ratios([(timing, decision) for decision, timing in timings])
    return render(
        "judgement.html",
        title=f"{heading.candidate} against {heading.baseline}",
        verdict=heading.verdict,
        reason=reason_of(decisions, heading.sizes),
        facts=_list_facts(heading),
        notes=[*heading.notes, *advice_lines(heading.advice)],
        gates=list_gates(
            decisions,
            evidence,
            {at: digest_bytes(codec.dumps(one)) for at, one in evidence.items()},
        ),
        slices=slice_tables(decisions),
        slice_figures=list(slice_figures(decisions)),
        figures=[figure for figure in figures if figure is not None],
    )


def _list_facts(heading: Heading) -> dict[str, str]:
    before, after = (format_figure(size, "B") for size in heading.sizes)
    facts = {
        "candidate": heading.kind,
        "size": f"{after}, was {before}",
        "rows": heading.rows,
        "time": heading.times,
    }
    return {name: text for name, text in facts.items() if text}
