"""Output of `onnx-ops judge`: a report, a table for a pull request, or a document."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from onnx_ops import codec
from onnx_ops.cli.common import Markup, print_table, print_text, say, verdict_markup, writing
from onnx_ops.domain.decision import Decision, Verdict

if TYPE_CHECKING:
    from onnx_ops.reporting.judgement import Heading, Row
    from onnx_ops.tools.judgement import Judgement, SweepPoint

_SHOWN = 3
"""Maximum number of reasons below the table, which has all verdicts."""


def build_heading(
    judgement: Judgement, baseline: str, candidate: str, rows: str, settings: Sequence[SweepPoint]
) -> Heading:
    """Return the heading above the table.

    `rows` describes the source of the rows. `settings` are the measured combinations of dimensions
    and batch size.
    """
    from onnx_ops.reporting.formatting import format_figure
    from onnx_ops.reporting.judgement import Heading

    notes = list(judgement.notes)
    if "generated from" in rows:
        notes.append(
            "generated rows show whether the candidate computes the same as the baseline; ranges, "
            "accuracy and times that depend on values need real rows"
        )
    if _have_other_answers(judgement):
        notes.append(
            "the candidate must compute the same as the baseline; if it was trained again, judge "
            "its task metric with --retrained --data FILE --labels NAME"
        )
    several = len(judgement.targets) > 1
    times = []
    for target in judgement.targets:
        for setting, paired in zip(settings, target.paired, strict=False):
            before, after = (format_figure(seconds, "s") for seconds in paired.medians["latency"])
            place = ", ".join(
                part for part in (target.target if several else "", setting.name) if part
            )
            times.append(f"{place + ': ' if place else ''}{after}, was {before}")
    shown = (place if ":" in place else Path(place).name for place in (baseline, candidate))
    return Heading(
        baseline=next(shown),
        candidate=next(shown),
        kind=judgement.kind.describe(),
        rows=rows,
        times="; ".join(times),
        sizes=judgement.sizes,
        verdict=judgement.verdict,
        notes=notes,
        advice=next((target.advice for target in judgement.targets if target.advice), ()),
    )


def _have_other_answers(judgement: Judgement) -> bool:
    """Return whether the answers of float models differ, as those of two trainings do."""
    return any(
        result.verdict is Verdict.FAIL and result.metric.startswith("outputs")
        for target in judgement.targets
        for result in target.decision.results
    )


def build_document(
    judgement: Judgement, heading: Heading, baseline: str, candidate: str
) -> dict[str, Any]:
    """Return the judgement as a JSON document."""
    from onnx_ops.reporting.judgement import reason_of

    return {
        "tool": "judge",
        "verdict": judgement.verdict.value,
        "reason": reason_of([target.decision for target in judgement.targets], judgement.sizes),
        "exit_code": judgement.verdict.exit_code,
        "baseline": {"path": baseline, "digest": judgement.digests[0], "bytes": judgement.sizes[0]},
        "candidate": {
            "path": candidate,
            "digest": judgement.digests[1],
            "bytes": judgement.sizes[1],
        },
        "kind": {
            "precision": judgement.kind.candidate.precision,
            "why": judgement.kind.candidate.why,
            "baseline": judgement.kind.baseline.precision,
            "changes": list(judgement.kind.changes),
        },
        "rows": heading.rows,
        "targets": [
            {
                "target": target.target,
                "verdict": target.decision.verdict.value,
                "remedy": target.remedy,
                "results": [codec.to_json(result) for result in target.decision.results],
                "timings": [
                    {
                        "batch": paired.batch,
                        "medians": paired.medians,
                        "evidence": codec.to_json(paired.evidence),
                    }
                    for paired in target.paired
                ],
            }
            for target in judgement.targets
        ],
        "notes": list(heading.notes),
        "advice": [codec.to_json(target) for target in heading.advice],
    }


def write_reports(
    judgement: Judgement, heading: Heading, html: Path | None, page: str | None
) -> None:
    """Write the HTML report and the Markdown table to their files, if any are named."""
    from onnx_ops.reporting.judgement import html_report, markdown_page

    decisions = [target.decision for target in judgement.targets]
    if html:
        timings = [
            (paired.decision, paired.evidence)
            for target in judgement.targets
            for paired in target.paired
        ]
        with writing("the report", f"--html {html}"):
            html.write_text(html_report(heading, decisions, timings), encoding="utf-8")
    if page and page != "-":
        with writing("the table", f"--markdown {page}"):
            Path(page).write_text(markdown_page(heading, decisions), encoding="utf-8")


def print_judgement(judgement: Judgement, heading: Heading, *, as_markdown: bool) -> None:
    """Print the table for a pull request, or the report for a terminal."""
    from onnx_ops.reporting.judgement import markdown_page

    decisions = [target.decision for target in judgement.targets]
    if as_markdown:
        typer.echo(markdown_page(heading, decisions), nl=False)
    else:
        _print_report(heading, decisions)


def _print_report(heading: Heading, decisions: Sequence[Decision]) -> None:
    from onnx_ops.cli.tables import slice_report
    from onnx_ops.cli.tools import advise
    from onnx_ops.reporting.description import result_table
    from onnx_ops.reporting.judgement import reason_of, table_rows

    where = ", ".join(decision.target for decision in decisions)
    title = f"{heading.candidate} against {heading.baseline} on {where}"
    print_text("{} {}", verdict_markup(heading.verdict), title)
    say(reason_of(decisions, heading.sizes))
    for name, text in (("kind", heading.kind), ("rows", heading.rows), ("time", heading.times)):
        if text:
            print_text("[dim]{}[/dim] {}", name, text, hang=5)
    rows = table_rows(decisions, heading.sizes)
    _print_rows(rows, with_target=len(decisions) > 1)
    worse = [row for row in rows if row.verdict not in (None, Verdict.PASS) and not row.advisory]
    _print_reasons(worse, with_target=len(decisions) > 1)
    slice_report([row for row in result_table(decisions) if row.result.slices])
    for note in heading.notes:
        print_text("[yellow]note[/yellow] {}", note)
    is_slower = any(row.what.startswith("latency") for row in worse)
    advice = heading.advice if is_slower else ()
    advise(advice[:1])
    if len(worse) > _SHOWN or len(advice) > 1:
        print_text("[dim]More reasons and advice: --json, --markdown or --html.[/dim]")


def _print_rows(rows: Sequence[Row], *, with_target: bool) -> None:
    """Print the table; only the first row of each target shows the target's name."""
    cells = []
    previous_target = ""
    for row in rows:
        verdict: Markup | str = "–"
        if row.verdict is not None:
            verdict = Markup("[dim]note[/dim]") if row.advisory else verdict_markup(row.verdict)
        target = "" if row.target == previous_target else row.target
        cells.append((target, row.what, row.measured, row.limit, verdict))
        previous_target = row.target
    first_column = 0 if with_target else 1
    header = ("target", "what", "measured", "limit", "verdict")
    print_table(header[first_column:], [row[first_column:] for row in cells])


def _print_reasons(rows: Sequence[Row], *, with_target: bool) -> None:
    """Print the reasons of rows that did not pass.

    If there is only one such row and one target, the reason is already printed above the table.
    """
    if len(rows) < 2 and not with_target:
        return
    for row in rows[:_SHOWN]:
        place = f" on {row.target}" if with_target else ""
        print_text("[bold]{}{}[/bold] {}", row.what, place, row.reason)
