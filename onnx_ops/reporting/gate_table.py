"""The gate table of the HTML report: every result with limit, figure, interval, n, noise, reason and evidence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from onnx_ops.domain.artifact import Digest, short_digest
from onnx_ops.domain.decision import Decision, GateResult, Verdict
from onnx_ops.domain.evidence import Evidence, LatencyComparison, PairedRatios
from onnx_ops.reporting.formatting import NOTHING, format_figure, result_figure, result_interval
from onnx_ops.statistics.latency import compare

_HEADS = ("gate", "metric", "verdict", "limit", "estimate", "interval", "n", "noise", "reason")
"""The verdict stands early: on a phone the first columns are what is seen."""
_COUNTED = {
    "parity": "rows",
    "metric": "rows",
    "throughput": "sessions",
    "cold_start": "processes",
    "memory": "processes",
    "size": "model",
}
"""What n counts in results that are no ratio."""

_MARKS = {Verdict.PASS: "✓", Verdict.INCONCLUSIVE: "?", Verdict.ERROR: "!", Verdict.FAIL: "✗"}


def chip(verdict: Verdict) -> str:
    """Return markup of a verdict: a colour, and a sign that does not depend on it."""
    return f'<span class="verdict {verdict.value}">{_MARKS[verdict]} {verdict.value.upper()}</span>'


def table(heads: Sequence[str], rows: str) -> str:
    """Return markup of a table that scrolls in its box; `rows` is markup."""
    names = "".join(f'<th scope="col">{escape(name)}</th>' for name in heads)
    return (
        '<div class="scroll" tabindex="0" role="group" aria-label="table">'
        f"<table><thead><tr>{names}</tr></thead><tbody>{rows}</tbody></table></div>"
    )


def gate_table(
    decisions: Sequence[Decision],
    evidence: Mapping[tuple[str, str], Evidence],
    digests: Mapping[tuple[str, str], Digest],
) -> str:
    """Return markup of the results of each decision, in the given order.

    Args:
        decisions: what to show.
        evidence: by variant and target.
        digests: of the stored evidence, by variant and target.
    """
    rows = []
    for decision in decisions:
        place = (decision.variant, decision.target)
        rows += _rows(decision, evidence.get(place), digests.get(place))
    return table(_HEADS, "".join(rows))


def _rows(decision: Decision, evidence: Evidence | None, digest: Digest | None) -> list[str]:
    """Return a heading with variant, target and machine, and a row for each result."""
    stored = (
        f'evidence <code title="{escape(digest)}">{escape(short_digest(digest))}</code>' if digest else "no evidence"
    )
    place = "" if evidence is None else f" · {escape(_place(evidence))}"
    name = f"{escape(decision.variant)} on {escape(decision.target)}"
    heading = f"<span>{chip(decision.verdict)} {name} <small>{place} · {stored}</small></span>"
    rows = [f'<tr class="group"><th scope="rowgroup" colspan="{len(_HEADS)}">{heading}</th></tr>']
    if not decision.results:
        nothing = f'<td colspan="2">no gate applied</td><td>{chip(decision.verdict)}</td><td colspan="5"></td>'
        rows.append(f'<tr>{nothing}<td class="reason">{escape(decision.reason)}</td></tr>')
    for result in decision.results:
        style = ' class="advisory"' if result.advisory else ""
        rows.append(f"<tr{style}>{_cells(result, evidence)}</tr>")
    return rows


def _place(evidence: Evidence) -> str:
    """Return the CPU and the execution providers that were used."""
    facts, hardware = evidence.runtime, evidence.hardware
    if facts is None:
        used = "provider not recorded"
    else:
        counted = (f"{name} ({nodes} nodes)" for name, nodes in sorted(facts.nodes.items()))
        used = ", ".join(counted) or ", ".join(facts.used) or "no provider"
    return f"{hardware.cpu_model}, {hardware.cores} cores · {used}"


def _cells(result: GateResult, evidence: Evidence | None) -> str:
    advisory = "<br><small>advisory</small>" if result.advisory else ""
    words = (result.gate, result.metric or NOTHING)
    figures = (result_figure(result), result_interval(result) or NOTHING)
    return (
        "".join(f'<td class="words">{escape(text)}</td>' for text in words)
        + f"<td>{chip(result.verdict)}{advisory}</td>"
        + f'<td class="words">{escape(result.limit or NOTHING)}</td>'
        + "".join(f'<td class="figure">{escape(text)}</td>' for text in figures)
        + f'<td class="figure">{_count(result, evidence)}</td>'
        + f'<td class="figure">{_noise(result, evidence)}</td>'
        + f'<td class="reason">{escape(result.reason)}</td>'
    )


def _count(result: GateResult, evidence: Evidence | None) -> str:
    """n with what it counts."""
    if not result.n:
        return NOTHING
    comparison = _comparison(result, evidence)
    if isinstance(comparison, LatencyComparison):
        return f"{result.n} session pairs<br>{comparison.runs} runs"
    if comparison is not None:
        return f"{result.n} {'session' if result.gate == 'throughput' else 'process'} pairs"
    if result.gate == "latency":
        return f"{result.n} session pairs" if result.unit == "x" else f"{result.n} runs<br>1 session"
    if result.gate == "parity" and result.metric == "weights":
        return f"{result.n} elements"
    if result.groups:
        return f"{result.n} rows<br>{result.groups} groups"
    return f"{result.n} {_COUNTED[result.gate]}" if result.gate in _COUNTED else str(result.n)


def _noise(result: GateResult, evidence: Evidence | None) -> str:
    """How well this host knows a model against itself, and how many runs lost their core."""
    comparison = _comparison(result, evidence)
    if comparison is not None:
        selves = [pair for pair in comparison.self_log_ratios if pair]
        against = f"A/A {_half_width(selves)}" if selves else "A/A not measured"
        if not isinstance(comparison, LatencyComparison):
            return escape(against)
        return f"{escape(against)}<br>{_preempted(comparison.preempted, comparison.runs)}"
    if result.gate == "latency" and evidence is not None and evidence.latency is not None and result.n:
        return _preempted(evidence.latency.preempted, evidence.latency.runs)
    return NOTHING


def _half_width(log_ratios: Sequence[Sequence[float]]) -> str:
    found = compare(log_ratios, tolerance=0.0)
    return f"±{format_figure((found.high - found.low) / 2, '1')}"


def _preempted(part: int, whole: int) -> str:
    return f"{format_figure(part / whole if whole > 0 else 0.0, '1')} preempted"


def _comparison(result: GateResult, evidence: Evidence | None) -> LatencyComparison | PairedRatios | None:
    """Return the measurement behind a result about a ratio."""
    if evidence is None:
        return None
    if result.gate == "latency":
        named = ((f"ratio vs {c.against}", f"faster than {c.against}") for c in evidence.comparisons)
        return next((c for c, names in zip(evidence.comparisons, named, strict=True) if result.metric in names), None)
    return next((r for r in evidence.ratios if result.metric == f"{r.figure} vs {r.against}"), None)
