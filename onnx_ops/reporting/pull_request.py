"""The Markdown page on the gate results of the pipelines that a commit affects.

The page is for a pull request, a job summary or a check.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from onnx_ops.domain.decision import Decision, Verdict, combine_verdicts
from onnx_ops.domain.release import Choice
from onnx_ops.reporting.comparison import ModelComparison, VariantRow
from onnx_ops.reporting.description import result_table, worst_first
from onnx_ops.reporting.formatting import NOTHING, SIGNS, format_figure, markdown, markdown_table
from onnx_ops.reporting.slices import slices_markdown

LIMIT = 60_000
"""Maximum number of characters of a page.

GitHub accepts 65,536 characters in a comment or a check.
"""

_LONGEST = 300
"""Maximum number of characters of author and time."""

_UNREVIEWED = (
    "The code of this pull request computed these results, in a job without credentials. "
    "The pipelines are judged again when the pull request is merged."
)

_VARIANT_HEADS = ("variant", "target", "verdict", "task metrics", "median latency", "size")
_RESULT_HEADS = ("variant", "target", "gate", "limit", "measured", "verdict", "reason")


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """One pipeline and its gate results.

    `error` is the reason for missing results, or another failure. `because` are the changed paths
    that caused the run. `verdict` is that of the whole pipeline. `withheld` is the reason why a
    passing variant was not released. `comparisons` are with the champion and the base branch.
    `made_by` is author and time of the change.
    """

    file: str
    because: tuple[str, ...]
    verdict: Verdict
    pipeline: str = ""
    choices: tuple[Choice, ...] = ()
    decisions: tuple[Decision, ...] = ()
    comparisons: tuple[ModelComparison, ...] = ()
    variants: tuple[VariantRow, ...] = ()
    made_by: str = ""
    error: str = ""
    withheld: str = ""


def overall(checked: Sequence[Checked]) -> Verdict | None:
    """Return the combined verdict; None if no pipeline was judged."""
    return combine_verdicts(one.verdict for one in checked) if checked else None


def find_contradiction(one: Checked) -> str:
    """Return why a pipeline's verdict contradicts its choices and decisions.

    A verdict that is better than the choices contradicts them, and so does PASS without choices. A
    choice contradicts the decisions if it has passed and its variant has not. The text is empty
    without a contradiction.
    """
    worst = (
        combine_verdicts(choice.verdict for choice in one.choices) if one.choices else one.verdict
    )
    if one.verdict.rank < worst.rank or (one.verdict is Verdict.PASS and not one.choices):
        return f"{one.file} has verdict {one.verdict.value}, which its choices do not support"
    return _find_unfounded_choice(one)


def _find_unfounded_choice(one: Checked) -> str:
    decided = {(decision.variant, decision.target): decision.verdict for decision in one.decisions}
    for choice in one.choices:
        verdict = decided.get((choice.variant or "", choice.target), Verdict.INCONCLUSIVE)
        if choice.verdict is Verdict.PASS and verdict is not Verdict.PASS:
            return (
                f"{one.file} chooses {choice.variant or 'nothing'} for {choice.target} "
                "without a decision that passes"
            )
    return ""


def title(checked: Sequence[Checked]) -> str:
    """Return the number of pipelines for each verdict, as one line."""
    if not checked:
        return "no pipeline is affected by this change"
    words = {
        Verdict.FAIL: "failed",
        Verdict.ERROR: "could not be measured",
        Verdict.INCONCLUSIVE: "inconclusive",
        Verdict.PASS: "passed",
    }
    counts = {verdict: sum(one.verdict is verdict for one in checked) for verdict in words}
    return ", ".join(f"{count} {words[verdict]}" for verdict, count in counts.items() if count)


def page(
    checked: Sequence[Checked], *, commit: str, reports: str = "", unreviewed: bool = False
) -> str:
    """Return a Markdown page on the pipelines that a commit affects, the worst first.

    The page is never longer than `LIMIT`. `reports` is the address of the full reports; empty if
    there is none. Results of `unreviewed` code are marked.
    """
    made = next((one.made_by for one in checked if one.made_by), f"commit {commit[:12]}")[:_LONGEST]
    head = f"## onnx-ops: {title(checked)}\n\n{markdown(made)}"
    if reports:
        head += f" · [full reports with plots]({reports})"
    if unreviewed and checked:
        head += f"\n\n<sub>{_UNREVIEWED}</sub>"
    parts, room = [head], LIMIT - len(head) - 200
    for one in sorted(checked, key=lambda one: -one.verdict.rank):
        part = _describe_pipeline(one)
        if len(part) > room:
            parts.append(
                f"Pipelines that do not fit on this page: {len(checked) - len(parts) + 1}. "
                "See the full reports."
            )
            break
        parts.append(part)
        room -= len(part) + 2
    return "\n\n".join(parts) + "\n"


def _describe_pipeline(one: Checked) -> str:
    parts = [
        f"### {SIGNS[one.verdict]} {markdown(one.file)}: {one.verdict.value.upper()}",
        _quote(one.error),
        _quote(one.withheld),
        _describe_choices(one.choices),
        *_describe_comparisons(one.comparisons),
        _describe_variants(one.variants),
        _describe_results(one.decisions),
        *slices_markdown(one.decisions),
        _describe_cause(one.because),
    ]
    return "\n\n".join(part for part in parts if part)


def _quote(text: str) -> str:
    # Two spaces end a line of Markdown.
    return "\n".join(f"> {markdown(line)}  " for line in text.splitlines())


def _describe_choices(choices: Sequence[Choice]) -> str:
    if not choices:
        return ""
    rows = [(c.target, c.variant or "none", c.verdict.value, c.reason) for c in choices]
    return "\n".join(markdown_table(("target", "chosen", "verdict", "why"), rows))


def _describe_comparisons(comparisons: Sequence[ModelComparison]) -> list[str]:
    """Return a heading, a table and a note for each comparison with another model."""
    parts = []
    for against in dict.fromkeys(c.against for c in comparisons):
        parts.append(f"**Against {markdown(against)}**")
        parts += _describe_comparison([c for c in comparisons if c.against == against])
    return parts


def _describe_comparison(comparisons: Sequence[ModelComparison]) -> Iterator[str]:
    if rows := [
        (c.target, r.metric, r.ours, r.theirs, r.change) for c in comparisons for r in c.rows
    ]:
        heads = ("target", "metric", "this change", "compared with", "change")
        yield "\n".join(markdown_table(heads, rows))
    notes = [f"{c.target}: {c.ours} against {c.theirs}." for c in comparisons if c.rows]
    notes += dict.fromkeys(c.note for c in comparisons if c.note)
    yield f"<sub>{markdown(' '.join(notes))}</sub>"


def _describe_variants(variants: Sequence[VariantRow]) -> str:
    if not variants:
        return ""
    rows = [_describe_variant(variant) for variant in variants]
    return "\n".join(["**Variants**\n", *markdown_table(_VARIANT_HEADS, rows)])


def _describe_variant(variant: VariantRow) -> tuple[str, ...]:
    """Return the table cells of a variant.

    Only the champion has no verdict; its latency is measured only in comparisons.
    """
    metrics = "; ".join(f"{label} {value.figure}" for label, value in variant.metrics.items())
    if variant.latency is not None:
        latency = variant.latency.figure
    else:
        latency = NOTHING if variant.verdict is None else "not measured"
    return (
        f"{variant.variant} (version {variant.version})" if variant.version else variant.variant,
        variant.target,
        variant.verdict.value if variant.verdict is not None else "serves now",
        metrics or NOTHING,
        latency,
        format_figure(variant.size_bytes, "B") if variant.size_bytes else "not measured",
    )


def _describe_results(decisions: Sequence[Decision]) -> str:
    if not decisions:
        return ""
    results = [
        (r.variant, r.target, *r.markdown_cells()) for r in worst_first(result_table(decisions))
    ]
    table = "\n".join(markdown_table(_RESULT_HEADS, results))
    return f"<details><summary>{len(results)} gate results</summary>\n\n{table}\n\n</details>"


def _describe_cause(paths: Sequence[str]) -> str:
    if not paths:
        return ""
    why = ", ".join(markdown(path) for path in paths[:10])
    return f"Run because of {why}{' and more' if len(paths) > 10 else ''}."
