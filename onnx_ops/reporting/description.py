"""The gate table: as plain rows for any surface, and as the Markdown description of a registered version."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from onnx_ops.domain.artifact import short_digest
from onnx_ops.domain.decision import Decision, GateResult, Verdict
from onnx_ops.domain.release import Lineage, Provenance
from onnx_ops.reporting.formatting import result_figure, result_interval

DESCRIPTION_LIMIT = 5000
"""Characters that a registry keeps of a version's description."""

KEPT = "*Written by onnx-ops from the pipeline file. Change this text, and onnx-ops leaves it alone.*"
"""What the description of a registered model ends with as long as no person has changed it."""

_VERSIONS = (
    "Each version is one variant of one release. Its description begins with the verdict on each target, and links the "
    "report of the release."
)
_ALIASES = (
    "Alias `champion-<target>` is on the version that serves, `previous-<target>` on the one that a rollback returns "
    "to. To roll out another version, set `challenger-<target>` on it. If it did not pass, the alias is moved back, "
    "and the version gets the tag `onnxops.rejected.<alias>` with the reason."
)
_REASON_LIMIT = 240
_TABLE_HEAD = ("| gate | target | limit | figure | verdict | reason |", "|---|---|---|---|---|---|")
_ESCAPES = str.maketrans(
    {"&": "&amp;", "<": "&lt;", ">": "&gt;", "@": "&#64;", "\n": " ", "\r": " "}
    | {sign: f"\\{sign}" for sign in "\\|`*_[]"}
)
_ESCAPED = re.compile(r"\\([\\|`*_\[\]])")


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultRow:
    """One gate of one variant on one target, ready to be shown. `figure` and `interval` carry their units."""

    variant: str
    target: str
    gate: str
    metric: str
    limit: str
    figure: str
    interval: str
    n: int
    groups: int
    verdict: Verdict
    reason: str
    advisory: bool

    @property
    def counted(self) -> str:
        """What the figure rests on."""
        return f"{self.n} in {self.groups} groups" if self.groups else str(self.n or "")


def made_by(provenance: Provenance) -> str:
    """Return date, author and commit in one line; each is said to be unknown where it is."""
    branch = f" ({provenance.branch})" if provenance.branch else ""
    changed = ", with uncommitted changes" if provenance.changed else ""
    return " · ".join(
        (
            provenance.at or "date unknown",
            provenance.author or "author unknown",
            f"commit {provenance.commit[:12]}{branch}{changed}" if provenance.commit else "commit unknown",
        )
    )


def result_table(decisions: Iterable[Decision]) -> tuple[ResultRow, ...]:
    """Return the rows of all decisions, in the given order."""
    return tuple(_row(decision, result) for decision in decisions for result in decision.results)


def version_description(
    variant: str,
    decisions: Mapping[str, Decision],
    lineage: Lineage,
    evidence_run_url: str | None = None,
    *,
    figures: Sequence[str] = (),
    provenance: Provenance | None = None,
) -> str:
    """Return Markdown for a registered version: verdicts, figures, gate table, where it comes from.

    The verdicts are plain text, because MLflow lists the first line of a description as it is.

    Never longer than `DESCRIPTION_LIMIT`: the worst results come first, and a line says how many were left out.

    Args:
        variant: its name.
        decisions: by target.
        lineage: where the release comes from.
        evidence_run_url: page that shows the evidence.
        figures: what was measured, in one sentence a target.
        provenance: who made the release when.
    """
    ordered = [decisions[target] for target in sorted(decisions)]
    tail = _origin(variant, lineage, evidence_run_url, provenance)
    room = DESCRIPTION_LIMIT - len(tail) - 2
    verdicts = [_verdict_line(decision) for decision in sorted(ordered, key=_worst_first)]
    head = _fitted(verdicts or ["INCONCLUSIVE: nothing was judged"], room, "target", prefix=())
    rows = sorted(result_table(ordered), key=lambda row: (row.advisory, -row.verdict.rank))
    room -= len(head) + 2
    told = _fitted([f"- {markdown(text)}" for text in figures], room, "target", prefix=()) if figures else ""
    room -= len(told) + 2
    table = _fitted([_markdown_row(row) for row in rows], room, "result", prefix=_TABLE_HEAD) if rows else ""
    return "\n\n".join(part for part in (head, told, table, tail) if part)


def model_description(about: str, pipeline: str, variants: Iterable[str], targets: Iterable[str]) -> str:
    """Return Markdown for a registered model: what it is, and how to read its versions and aliases.

    Args:
        about: what the pipeline file says of itself; may be empty.
        pipeline: its name.
        variants: names of the variants, in the order of the file.
        targets: names of the targets.
    """
    named = ", ".join(targets)
    parts = [
        markdown(about),
        f"Pipeline {markdown(pipeline)}. Variants: {markdown(', '.join(variants))}. Targets: {markdown(named)}.",
        _VERSIONS,
        _ALIASES,
        KEPT,
    ]
    return "\n\n".join(part for part in parts if part)


def told_reason(description: str, target: str) -> str:
    """Return the reason that a description gives for the verdict on a target; empty if none."""
    told = re.search(rf"^[A-Z]+ on {re.escape(markdown(target))}: (.*?) *$", description, re.MULTILINE)
    return html.unescape(_ESCAPED.sub(r"\1", told[1])) if told else ""


def _row(decision: Decision, result: GateResult) -> ResultRow:
    return ResultRow(
        variant=decision.variant,
        target=decision.target,
        gate=result.gate,
        metric=result.metric,
        limit=result.limit,
        figure=result_figure(result),
        interval=result_interval(result),
        n=result.n,
        groups=result.groups,
        verdict=result.verdict,
        reason=result.reason,
        advisory=result.advisory,
    )


def _worst_first(decision: Decision) -> int:
    return -decision.verdict.rank


def _verdict_line(decision: Decision) -> str:
    verdict = decision.verdict.value.upper()
    return f"{verdict} on {markdown(decision.target)}: {markdown(_cut(decision.reason))}  "


def _markdown_row(row: ResultRow) -> str:
    gate = f"{row.gate}: {row.metric}" if row.metric and row.metric != row.gate else row.gate
    verdict = f"{row.verdict.value} (advisory)" if row.advisory else row.verdict.value
    figure = f"{row.figure} {row.interval}".strip()
    cells = (gate, row.target, row.limit, figure, verdict, _cut(row.reason))
    return "| " + " | ".join(markdown(cell) for cell in cells) + " |"


def _origin(variant: str, lineage: Lineage, evidence_run_url: str | None, provenance: Provenance | None) -> str:
    parts = [f"variant {variant}", f"pipeline {lineage.pipeline}", f"release {short_digest(lineage.release)}"]
    if provenance is not None:
        parts.append(made_by(provenance))
    elif lineage.git_sha:
        parts.append(f"commit {lineage.git_sha[:12]}")
    parts += [f"{name} data {short_digest(digest)}" for name, digest in sorted(lineage.data.items())]
    text = markdown(_cut(" · ".join(parts), 4 * _REASON_LIMIT))
    return f"{text}\n\n[Evidence]({evidence_run_url})" if evidence_run_url else text


def _fitted(lines: Sequence[str], room: int, what: str, *, prefix: Sequence[str]) -> str:
    """As many lines as `room` characters hold, and one that counts the rest."""
    whole = "\n".join((*prefix, *lines))
    if len(whole) <= room:
        return whole
    for kept in range(len(lines) - 1, -1, -1):
        left_out = len(lines) - kept
        note = f"\n\n{left_out} more {what}{'s' if left_out > 1 else ''} left out here; the evidence holds all of them."
        text = "\n".join((*prefix, *lines[:kept])) + note if kept else note.strip()
        if len(text) <= room:
            return text
    return ""


def _cut(text: str, limit: int = _REASON_LIMIT) -> str:
    return text if len(text) <= limit else text[: limit - 1] + "…"


def markdown(text: str) -> str:
    """Text that Markdown and HTML leave as it is, and that mentions nobody."""
    return text.translate(_ESCAPES)
