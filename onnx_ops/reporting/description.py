"""Descriptions of registered models and versions in Markdown.

The module also builds the rows of the gate table for other reports.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from onnx_ops.domain.artifact import digest_bytes, short_digest
from onnx_ops.domain.decision import Decision, GateResult
from onnx_ops.reporting.formatting import markdown, markdown_table, result_figure, result_interval

if TYPE_CHECKING:
    from onnx_ops.domain.release import Lineage, Provenance

DESCRIPTION_LIMIT = 5000
"""Maximum number of characters of a version's description in a registry."""

_ORIGIN = (
    "*Written by onnx-ops from the pipeline file (text `{}`). onnx-ops never overwrites a changed "
    "text.*"
)
"""End of a registered model's description, with a digest of the text."""

_VERSIONS = (
    "Each version is one variant of one release. Its description begins with the verdict on each "
    "target, and links the report of the release.\n\n"
    "Alias `champion-<target>` is on the version that serves, `previous-<target>` on the one "
    "that a rollback returns to. To roll out another version, set `challenger-<target>` on it. "
    "If it did not pass, the alias is moved back, "
    "and the version gets the tag `onnxops.rejected.<alias>` with the reason."
)
_REASON_LIMIT = 240
_ESCAPED = re.compile(r"\\([\\|`*_\[\]])")


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultRow:
    """One gate result of one variant on one target, with its table cells."""

    variant: str
    target: str
    result: GateResult

    @property
    def counted(self) -> str:
        """Return the numbers of observations and groups of the result as a text."""
        n, groups = self.result.n, self.result.groups
        return f"{n} in {groups} groups" if groups else str(n or "")

    @property
    def measured(self) -> str:
        """Return the estimate and its interval with units."""
        return f"{result_figure(self.result)} {result_interval(self.result)}".strip()

    def describe_gate(self, separator: str = " ") -> str:
        """Return the gate, followed by its metric if the two names differ."""
        gate, metric = self.result.gate, self.result.metric
        return f"{gate}{separator}{metric}" if metric and metric != gate else gate

    def markdown_cells(self) -> tuple[str, ...]:
        """Return table cells as plain text: gate, limit, estimate, verdict and reason."""
        verdict = f"{self.result.verdict.value}{' (advisory)' if self.result.advisory else ''}"
        return (
            self.describe_gate(": "),
            self.result.limit,
            self.measured,
            verdict,
            self.result.reason,
        )


def made_by(provenance: Provenance) -> str:
    """Return date, author and commit in one line; missing parts are `unknown`."""
    branch = f" ({provenance.branch})" if provenance.branch else ""
    changed = ", with uncommitted changes" if provenance.changed else ""
    return " · ".join(
        (
            provenance.at or "date unknown",
            provenance.author or "author unknown",
            f"commit {provenance.commit[:12]}{branch}{changed}"
            if provenance.commit
            else "commit unknown",
        )
    )


def result_table(decisions: Iterable[Decision]) -> tuple[ResultRow, ...]:
    """Return the rows of all decisions, in the given order."""
    return tuple(
        ResultRow(variant=decision.variant, target=decision.target, result=result)
        for decision in decisions
        for result in decision.results
    )


def worst_first(rows: Iterable[ResultRow]) -> list[ResultRow]:
    """Return the binding rows, then the advisory ones, each with the worst first."""
    return sorted(rows, key=lambda row: (row.result.advisory, -row.result.verdict.rank))


def version_description(
    variant: str,
    decisions: Mapping[str, Decision],
    lineage: Lineage,
    *,
    summaries: Sequence[str] = (),
    provenance: Provenance | None = None,
) -> str:
    """Return the description of a registered version in Markdown.

    It has verdicts, measurements, gate table and origin. The verdicts are plain text, because
    MLflow lists the first line of a description unrendered. The text has at most
    `DESCRIPTION_LIMIT` characters: the worst results come first, and one line states how many
    results are omitted. `decisions` are by target; `summaries` state the measurements on each
    target.
    """
    ordered = [decisions[target] for target in sorted(decisions)]
    tail = markdown(_cut(_describe_origin(variant, lineage, provenance), 4 * _REASON_LIMIT))
    verdicts = [
        f"{decision.verdict.value.upper()} on {markdown(decision.target)}: "
        f"{markdown(_cut(decision.reason))}  "
        for decision in sorted(ordered, key=lambda decision: -decision.verdict.rank)
    ]
    results = []
    for row in worst_first(result_table(ordered)):
        gate, limit, measured, verdict, reason = row.markdown_cells()
        results.append((gate, row.target, limit, measured, verdict, _cut(reason)))
    head, separator, *rows = markdown_table(
        ("gate", "target", "limit", "measured", "verdict", "reason"), results
    )
    room = DESCRIPTION_LIMIT - len(tail) - 2
    sections = []
    for lines, what, prefix in (
        (verdicts or ["INCONCLUSIVE: nothing was judged"], "target", ()),
        ([f"- {markdown(text)}" for text in summaries], "target", ()),
        (rows, "result", (head, separator)),
    ):
        sections.append(_fitted(lines, room, what, prefix=prefix) if lines else "")
        room -= len(sections[-1]) + 2
    return "\n\n".join(section for section in (*sections, tail) if section)


def _describe_origin(variant: str, lineage: Lineage, provenance: Provenance | None) -> str:
    parts = [
        f"variant {variant}",
        f"pipeline {lineage.pipeline}",
        f"release {short_digest(lineage.release)}",
    ]
    if provenance is not None:
        parts.append(made_by(provenance))
    elif lineage.git_sha:
        parts.append(f"commit {lineage.git_sha[:12]}")
    parts += [
        f"{name} data {short_digest(digest)}" for name, digest in sorted(lineage.data.items())
    ]
    return " · ".join(parts)


def model_description(
    about: str, pipeline: str, variants: Iterable[str], targets: Iterable[str]
) -> str:
    """Return the description of a registered model in Markdown.

    It has the pipeline file's description, and explains how to read the model's versions. Its end
    contains a digest, by which `is_unchanged` detects changes.
    """
    variants, targets = (markdown(", ".join(names)) for names in (variants, targets))
    made = f"Pipeline {markdown(pipeline)}. Variants: {variants}. Targets: {targets}."
    text = "\n\n".join(part for part in (markdown(about), made, _VERSIONS) if part)
    return f"{text}\n\n{_make_origin(text)}"


def is_unchanged(description: str) -> bool:
    """Return whether a registered model's description is what onnx-ops has written."""
    text, _, origin = description.rpartition("\n\n")
    return origin == _make_origin(text)


def _make_origin(text: str) -> str:
    return _ORIGIN.format(short_digest(digest_bytes(text.encode())))


def parse_reason(description: str, target: str) -> str:
    """Return the reason that a description states for the verdict on a target.

    The text is empty if the description has none.
    """
    shown = re.search(
        rf"^[A-Z]+ on {re.escape(markdown(target))}: (.*?) *$", description, re.MULTILINE
    )
    return html.unescape(_ESCAPED.sub(r"\1", shown[1])) if shown else ""


def _fitted(lines: Sequence[str], room: int, what: str, *, prefix: Sequence[str]) -> str:
    """Return the lines that fit in `room` characters, and the number of the others."""
    whole = "\n".join((*prefix, *lines))
    if len(whole) <= room:
        return whole
    for count in range(len(lines) - 1, -1, -1):
        left_out = len(lines) - count
        note = (
            f"\n\nOmitted here: {left_out} more {what}{'s' if left_out > 1 else ''}. "
            "The evidence contains all of them."
        )
        text = "\n".join((*prefix, *lines[:count])) + note if count else note.strip()
        if len(text) <= room:
            return text
    return ""


def _cut(text: str, limit: int = _REASON_LIMIT) -> str:
    return text if len(text) <= limit else text[: limit - 1] + "…"
