"""Size gates."""

from __future__ import annotations

from collections.abc import Iterator

from onnx_ops.domain.evidence import Evidence
from onnx_ops.domain.gate import GateResult, SizeGate, Verdict
from onnx_ops.statistics.rules.common import not_measured, size_text


def judge_size(gate: SizeGate, evidence: Evidence) -> Iterator[GateResult]:
    limit = f"≤ {size_text(gate.max)}"
    if evidence.size_bytes <= 0:
        yield not_measured("size", "", limit)
        return
    fits = evidence.size_bytes <= gate.max
    yield GateResult(
        gate="size",
        metric="",
        limit=limit,
        verdict=Verdict.PASS if fits else Verdict.FAIL,
        reason=f"{size_text(evidence.size_bytes)} on disk, limit {size_text(gate.max)}",
        estimate=float(evidence.size_bytes),
        bound=float(gate.max),
        unit="B",
        n=1,
    )
