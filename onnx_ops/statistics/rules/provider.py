"""The truth about execution providers, which every decision needs."""

from __future__ import annotations

from collections.abc import Iterator

from onnx_ops.domain.evidence import Evidence
from onnx_ops.domain.gate import GateResult, Verdict


def judge_provider(evidence: Evidence) -> Iterator[GateResult]:
    """Nothing if the provider asked for first did the work; else the reason why the figures are not its own."""
    facts = evidence.runtime
    if facts is None or not facts.asked:
        yield _provider(Verdict.INCONCLUSIVE, "which provider ran was not recorded")
        return
    first = facts.asked[0]
    elsewhere = {name: nodes for name, nodes in sorted(facts.nodes.items()) if name != first and nodes > 0}
    if first not in facts.used:
        used = ", ".join(facts.used) or "nothing"
        yield _provider(Verdict.ERROR, f"{first} was asked for, {used} ran instead")
    elif first != "CPUExecutionProvider" and elsewhere:
        taken = ", ".join(f"{nodes} nodes fell back on {name}" for name, nodes in elsewhere.items())
        yield _provider(Verdict.ERROR, f"{first} was asked for, {taken}")
    elif first != "CPUExecutionProvider" and not facts.nodes.get(first):
        yield _provider(Verdict.INCONCLUSIVE, f"which nodes {first} took was not recorded")


def _provider(verdict: Verdict, reason: str) -> GateResult:
    return GateResult(gate="provider", metric="", limit="", verdict=verdict, reason=reason)
