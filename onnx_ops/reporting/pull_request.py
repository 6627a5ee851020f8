"""What a commit does to its models, in one page of Markdown: for a pull request, a job summary, a check."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from onnx_ops.domain.decision import Decision, Verdict, combine_verdicts
from onnx_ops.domain.release import Choice
from onnx_ops.reporting.comparison import ModelComparison, VariantLine
from onnx_ops.reporting.description import markdown, result_table

LIMIT = 60_000
"""Characters; GitHub takes 65,536 in a comment, and as many in a check."""

SIGNS = {Verdict.PASS: "✅", Verdict.INCONCLUSIVE: "⚪", Verdict.ERROR: "⚠️", Verdict.FAIL: "❌"}
_CHOICES = ("| target | chosen | verdict | why |", "|---|---|---|---|")
_COMPARED = ("| target | metric | this change | compared with | change |", "|---|---|---|---|---|")
_VARIANTS = ("| variant | target | verdict | task metrics | median latency | size |", "|---|---|---|---|---|---|")
_GATES = ("| variant | target | gate | limit | figure | verdict | reason |", "|---|---|---|---|---|---|---|")


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """One pipeline and what its gates said. `error` says why there is nothing to say, or what else went wrong.

    `because` are the changed paths it was run for; `verdict` that of the whole pipeline; `withheld` why what passed was
    not released. `comparisons` are with the champion and with the base branch; `made_by` says who made the change when.
    """

    file: str
    because: tuple[str, ...]
    verdict: Verdict
    pipeline: str = ""
    choices: tuple[Choice, ...] = ()
    decisions: tuple[Decision, ...] = ()
    comparisons: tuple[ModelComparison, ...] = ()
    variants: tuple[VariantLine, ...] = ()
    made_by: str = ""
    error: str = ""
    withheld: str = ""


def overall(checked: Sequence[Checked]) -> Verdict | None:
    """Return the combined verdict; None if no pipeline was judged."""
    return combine_verdicts(one.verdict for one in checked) if checked else None


def title(checked: Sequence[Checked]) -> str:
    """One line: how many pipelines passed, failed, could not be decided or measured."""
    if not checked:
        return "no pipeline is touched by this change"
    words = {
        Verdict.FAIL: "failed",
        Verdict.ERROR: "could not be measured",
        Verdict.INCONCLUSIVE: "inconclusive",
        Verdict.PASS: "passed",
    }
    counts = {verdict: sum(one.verdict is verdict for one in checked) for verdict in words}
    return ", ".join(f"{count} {words[verdict]}" for verdict, count in counts.items() if count)


def page(checked: Sequence[Checked], *, commit: str, reports: str = "") -> str:
    """Markdown, the worst pipeline first, never longer than `LIMIT`.

    Args:
        checked: the pipelines that the change touches.
        commit: what was judged.
        reports: address of the whole reports; empty if there is none.
    """
    made = next((one.made_by for one in checked if one.made_by), f"commit {commit[:12]}")
    head = f"## onnx-ops: {title(checked)}\n\n{markdown(made)}"
    if reports:
        head += f" · [whole reports, with plots]({reports})"
    parts, room = [head], LIMIT - len(head) - 200
    for one in sorted(checked, key=lambda one: -one.verdict.rank):
        part = _part(one)
        if len(part) > room:
            parts.append(f"{len(checked) - len(parts) + 1} more pipelines are in the reports; there was no room here.")
            break
        parts.append(part)
        room -= len(part) + 2
    return "\n\n".join(parts) + "\n"


def _part(one: Checked) -> str:
    lines = [f"### {SIGNS[one.verdict]} {markdown(one.file)}: {one.verdict.value.upper()}"]
    if one.error:
        lines.append("\n".join(f"> {markdown(line)}  " for line in one.error.splitlines()))
    if one.withheld:
        lines.append("\n".join(f"> {markdown(line)}  " for line in one.withheld.splitlines()))
    if one.choices:
        rows = [(c.target, c.variant or "none", c.verdict.value, c.reason) for c in one.choices]
        lines.append("\n".join([*_CHOICES, *map(_row, rows)]))
    lines += _compared(one.comparisons)
    if one.variants:
        variants = [
            _row((v.variant, v.target, v.verdict, "; ".join(map(" ".join, v.metrics)) or "–", v.latency, v.size))
            for v in one.variants
        ]
        lines.append("\n".join(["**Variants**\n", *_VARIANTS, *variants]))
    if one.decisions:
        results = sorted(result_table(one.decisions), key=lambda row: (row.advisory, -row.verdict.rank))
        table = [
            _row(
                (
                    r.variant,
                    r.target,
                    f"{r.gate}: {r.metric}" if r.metric and r.metric != r.gate else r.gate,
                    r.limit,
                    f"{r.figure} {r.interval}".strip(),
                    f"{r.verdict.value} (advisory)" if r.advisory else r.verdict.value,
                    r.reason,
                )
            )
            for r in results
        ]
        folded = "\n".join([*_GATES, *table])
        lines.append(f"<details><summary>{len(results)} gate results</summary>\n\n{folded}\n\n</details>")
    why = ", ".join(markdown(path) for path in one.because[:10])
    lines.append(f"Run because of {why}{' and more' if len(one.because) > 10 else ''}." if why else "")
    return "\n\n".join(line for line in lines if line)


def _compared(comparisons: Sequence[ModelComparison]) -> Iterator[str]:
    """Yield a table for each model that the release is compared with, or a sentence without any."""
    for against in dict.fromkeys(one.against for one in comparisons):
        here = [one for one in comparisons if one.against == against]
        rows = [_row((one.target, r.metric, r.ours, r.theirs, r.change)) for one in here for r in one.rows]
        notes = [f"{one.target}: {one.ours} against {one.theirs}." for one in here if one.rows]
        notes += dict.fromkeys(one.note for one in here if one.note)
        yield f"**Against {markdown(against)}**"
        if rows:
            yield "\n".join([*_COMPARED, *rows])
        yield f"<sub>{markdown(' '.join(notes))}</sub>"


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(markdown(cell) for cell in cells) + " |"
