"""Batch invariance under the parity gate: told, and never part of a verdict."""

from __future__ import annotations

import math
from collections.abc import Iterator

from onnx_ops.domain.evidence import Evidence
from onnx_ops.domain.gate import GateResult, ParityGate, Verdict
from onnx_ops.statistics.rules.common import percent

METRIC = "batch invariance"


def judge_invariance(gate: ParityGate, evidence: Evidence) -> Iterator[GateResult]:
    """One advisory line where it was measured: a model of a fixed batch has nothing to measure."""
    measured = [m for m in evidence.batch_invariance if m.rows > 0]
    if not measured:
        return
    limit = f"error ≤ {gate.noise_factor:.4g}x noise"
    rows = max(m.rows for m in measured)
    if strange := sorted(
        m.output for m in measured if not all(map(math.isfinite, (m.error, m.ratio, m.changed or 0.0)))
    ):
        yield GateResult(
            gate="parity",
            metric=METRIC,
            limit=limit,
            verdict=Verdict.ERROR,
            reason=f"output {strange[0]!r}: a figure is not a number",
            n=rows,
            advisory=True,
        )
        return
    worst = max(measured, key=lambda m: (m.ratio, m.error, m.output))
    changed = [m.changed for m in measured if m.changed is not None]
    figures = (
        f"max |Δ| {worst.error:.3g} in output {worst.output!r} is {worst.ratio:.3g}x the source's noise, "
        f"{percent(max(changed)) + ' of classes change, ' if changed else ''}{rows} rows in one batch and one by one"
    )
    depends = worst.ratio > gate.noise_factor
    yield GateResult(
        gate="parity",
        metric=METRIC,
        limit=limit,
        verdict=Verdict.FAIL if depends else Verdict.PASS,
        reason=(
            f"answers depend on the batch's composition: {figures}; do not batch across requests"
            if depends
            else f"answers do not depend on the batch's composition: {figures}"
        ),
        estimate=worst.ratio,
        bound=gate.noise_factor,
        unit="x",
        n=rows,
        advisory=True,
    )
