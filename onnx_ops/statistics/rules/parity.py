"""Parity gates."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from onnx_ops.domain.evidence import Divergence, Evidence, ParityMeasurement, WeightMeasurement
from onnx_ops.domain.gate import GateResult, ParityGate, Verdict
from onnx_ops.statistics.parity import with_pooled_noise
from onnx_ops.statistics.rules.common import not_measured, one_line
from onnx_ops.statistics.rules.invariance import judge_invariance
from onnx_ops.statistics.rules.structure import judge_activations, judge_coverage, judge_nan, judge_rows, judge_trees

COMPENSATED = 0.95
"""Squared error of a layer's answers over that of plain rounding, below which a weight was moved on purpose. GPTQ-like
rounding gave .02 to .73 in 25 layers, faults of the same size .99 and more: `benchmarks.truth.quantization`."""

FURTHEST = 4.0
"""Steps that such a weight may move: what real rows do not show of an input that is 0 in all of them, this bounds."""


def judge_parity(gate: ParityGate, evidence: Evidence) -> Iterator[GateResult]:
    """A float variant by its outputs; a quantized one by those of the export it stems from, and by its weights."""
    if not evidence.quantized:
        yield from _judge_outputs("outputs", gate, evidence.parity, evidence.divergence)
    else:
        yield from _judge_outputs("export", gate, evidence.export_parity, evidence.divergence)
        yield _judge_weights(gate, evidence)
        yield from judge_activations(gate, evidence)
    yield from judge_trees(evidence)
    yield from judge_coverage(evidence)
    yield from judge_nan(evidence)
    yield from judge_rows(evidence)
    yield from judge_invariance(gate, evidence)


def _judge_outputs(
    metric: str, gate: ParityGate, measurements: Sequence[ParityMeasurement], divergence: Divergence | None
) -> Iterator[GateResult]:
    """The verdict on what callers can send, and one advisory line where something else differs."""
    pooled = with_pooled_noise(measurements)
    binding = [m for m in pooled if gate.rule(m.group, inside=m.inside) == "fail"]
    outside = [m for m in pooled if gate.rule(m.group, inside=m.inside) == "advise"]
    yield _verdict(metric, gate, binding, divergence)
    if departed := [m for m in outside if m.mismatch or m.ratio > gate.noise_factor]:
        worst = max(departed, key=_badness)
        groups = ", ".join(sorted({m.group for m in departed}))
        yield GateResult(
            gate="parity",
            metric=f"{metric} outside the domain",
            limit=_limit(gate),
            verdict=Verdict.FAIL,
            reason=(
                f"differs on inputs outside the domain: {groups}; {_told(worst)}; "
                f"`groups: {{{worst.group.partition(':')[0]}: fail}}` makes the gate refuse it"
            ),
            estimate=None if worst.mismatch else worst.ratio,
            bound=gate.noise_factor,
            unit="x",
            n=sum(m.rows for m in outside if m.output == worst.output),
            advisory=True,
        )


def _verdict(
    metric: str, gate: ParityGate, measurements: Sequence[ParityMeasurement], divergence: Divergence | None
) -> GateResult:
    if not any(m.rows > 0 or m.mismatch for m in measurements):
        return not_measured("parity", metric, _limit(gate))
    worst = max(measurements, key=_badness)
    rows = sum(m.rows for m in measurements if m.output == worst.output)
    good = not worst.mismatch and worst.ratio <= gate.noise_factor
    if worst.mismatch or (worst.noise == 0 and worst.error > 0):
        reason = f"{_told(worst)}, {rows} rows"
    else:
        reason = f"{_told(worst)}, limit {gate.noise_factor:.4g}x, {rows} rows"
    reason += _jumps(measurements)
    if not good:
        reason += f"; for example {worst.example}" if worst.example else ""
        reason += f"; first diverging node: {_place(divergence)}" if divergence is not None else ""
    return GateResult(
        gate="parity",
        metric=metric,
        limit=_limit(gate),
        verdict=Verdict.PASS if good else Verdict.FAIL,
        reason=reason,
        estimate=None if worst.mismatch else worst.ratio,
        bound=gate.noise_factor,
        unit="x",
        n=rows,
    )


def _limit(gate: ParityGate) -> str:
    return f"error ≤ {gate.noise_factor:.4g}x noise"


def _badness(m: ParityMeasurement) -> tuple[bool, float, float, str, str]:
    return bool(m.mismatch), m.ratio, m.error, m.output, m.group


def _told(m: ParityMeasurement) -> str:
    where = f"output {m.output!r}, inputs {m.group!r}"
    if m.mismatch:
        return f"{where}: {one_line(m.mismatch)}"
    if m.noise == 0 and m.error > 0:
        return f"{where}: error {m.error:.3g} where the source leaves no room"
    return f"{where}: {_figures(m)}"


def _figures(worst: ParityMeasurement) -> str:
    """The error in units of the noise, or of the fixed tolerance that took its place."""
    if worst.tolerance:
        unit = f"a tenth of the tolerance {worst.tolerance} (the source does not run in float64)"
    else:
        unit = f"the source's noise {worst.noise:.3g}"
    return f"error {worst.error:.3g} is {worst.ratio:.3g}x {unit}"


def _jumps(measurements: Sequence[ParityMeasurement]) -> str:
    """Rows in which a tree decides otherwise: those that rounding of the inputs explains, and the others."""
    explained = sum(m.explained for m in measurements)
    unexplained = sum(m.unexplained for m in measurements)
    if not explained and not unexplained:
        return ""
    return f"; of {explained + unexplained} answers that differ, {explained} are explained by rounding of the inputs"


def _place(divergence: Divergence) -> str:
    if not divergence.node:
        return one_line(f"not located ({divergence.note})")
    module = f" in module {divergence.scope}" if divergence.scope else ""
    return one_line(f"{divergence.node} ({divergence.op_type}){module}")


def _judge_weights(gate: ParityGate, evidence: Evidence) -> GateResult:
    limit = f"≤ {gate.weight_steps:.4g} steps"
    if not any(w.elements > 0 for w in evidence.weights):
        return not_measured("parity", "weights", limit)
    worst = max(evidence.weights, key=lambda w: (not _is_sound(w, gate), w.steps, w.tensor))
    return GateResult(
        gate="parity",
        metric="weights",
        limit=limit,
        verdict=Verdict.PASS if _is_sound(worst, gate) else Verdict.FAIL,
        reason=(
            f"weight {worst.tensor!r} is {worst.steps:.3g} quantization steps from its original, "
            f"limit {gate.weight_steps:.4g}{_made_up_for(worst, gate)}, {len(evidence.weights)} weights"
        ),
        estimate=worst.steps,
        bound=gate.weight_steps,
        unit="steps",
        n=sum(w.elements for w in evidence.weights),
    )


def _is_sound(weight: WeightMeasurement, gate: ParityGate) -> bool:
    """Rounded, or moved further so that errors make up for one another, as GPTQ does: no fault brings a layer's answers
    nearer to the float export's than plain rounding does."""
    moved = weight.output_error is not None and weight.output_error <= COMPENSATED and weight.steps <= FURTHEST
    return weight.steps <= gate.weight_steps or moved


def _made_up_for(weight: WeightMeasurement, gate: ParityGate) -> str:
    if weight.steps <= gate.weight_steps or weight.output_error is None:
        return ""
    told = f", and its layer's answers on real rows have {weight.output_error:.3g}x the squared error of plain rounding"
    return told if _is_sound(weight, gate) else f"{told} (at most {COMPENSATED}x, and {FURTHEST:g} steps, would do)"
