"""Parity gates.

Under the parity gate, what outputs do not tell: trees, quantized activations, int8 coverage, NaN.

Batch invariance under the parity gate: told, and never part of a verdict."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence

from onnx_ops.domain.decision import GateResult, Verdict
from onnx_ops.domain.evidence import (
    ActivationMeasurement,
    Divergence,
    Evidence,
    Int8Coverage,
    ParityMeasurement,
    WeightMeasurement,
)
from onnx_ops.domain.gate import ParityGate
from onnx_ops.statistics.parity import pool_noise
from onnx_ops.statistics.rules.common import as_percent, join_lines, make_unmeasured

COMPENSATED = 0.95
"""Squared error of a layer's answers over that of plain rounding, below which a weight was moved on purpose. GPTQ-like
rounding gave .02 to .73 in 25 layers, faults of the same size .99 and more: `benchmarks.truth.quantization`."""

FURTHEST = 4.0
"""Steps that such a weight may move: what real rows do not show of an input that is 0 in all of them, this bounds."""

SATURATION_WARNING = 0.03
"""Share of saturated values that is told, though it does not fail."""

_NAMED = 3

_RARE = 0.01
"""Share of rows of a difference that is told of where few rows were asked."""

METRIC = "batch invariance"


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
    pooled = pool_noise(measurements)
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
        return make_unmeasured("parity", metric, _limit(gate))
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
        return f"{where}: {join_lines(m.mismatch)}"
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
        return join_lines(f"not located ({divergence.note})")
    module = f" in module {divergence.scope}" if divergence.scope else ""
    return join_lines(f"{divergence.node} ({divergence.op_type}){module}")


def _judge_weights(gate: ParityGate, evidence: Evidence) -> GateResult:
    limit = f"≤ {gate.weight_steps:.4g} steps"
    if not any(w.elements > 0 for w in evidence.weights):
        return make_unmeasured("parity", "weights", limit)
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


def judge_trees(evidence: Evidence) -> Iterator[GateResult]:
    """Nothing for a model without trees, or whose source cannot tell them."""
    found = evidence.trees
    if found is None:
        return
    counted = f"{found.trees} trees, {found.splits} splits and {found.leaves} leaves"
    if found.changed:
        rest = found.changed - len(found.differences)
        told = "; ".join(found.differences[:_NAMED])
        more = f" and {found.changed - _NAMED} more" if rest > 0 or len(found.differences) > _NAMED else ""
        reason = f"{found.changed} of {counted} differ from the source's: {told}{more}"
    else:
        reason = f"{counted} are the source's"
    yield GateResult(
        gate="parity",
        metric="trees",
        limit="0 changed",
        verdict=Verdict.FAIL if found.changed else Verdict.PASS,
        reason=join_lines(reason),
        estimate=float(found.changed),
        bound=0.0,
        unit="nodes",
        n=found.splits + found.leaves,
    )


def judge_activations(gate: ParityGate, evidence: Evidence) -> Iterator[GateResult]:
    """Nothing for a variant whose activations have no fixed range, as that of dynamic quantization."""
    measured = [a for a in evidence.activations if a.values > 0]
    if measured:
        yield _noise(gate, measured)
        yield _saturation(gate, measured)
        yield from _clipping(gate, measured)
    yield from _stretch(gate, evidence)


def _noise(gate: ParityGate, measured: list[ActivationMeasurement]) -> GateResult:
    worst = max(measured, key=lambda a: (a.noise, a.tensor))
    return GateResult(
        gate="parity",
        metric="activations",
        limit=f"≤ {gate.activation_noise:.4g}x rounding",
        verdict=Verdict.PASS if worst.noise <= gate.activation_noise else Verdict.FAIL,
        reason=(
            f"activation {worst.tensor!r} is read back up to {worst.noise:.3g}x step/√12 from what was written, "
            f"limit {gate.activation_noise:.4g}x, {len(measured)} activations"
        ),
        estimate=worst.noise,
        bound=gate.activation_noise,
        unit="x",
        n=sum(a.values for a in measured),
    )


def _saturation(gate: ParityGate, measured: list[ActivationMeasurement]) -> GateResult:
    worst = max(measured, key=lambda a: (a.saturated, a.tensor))
    fits = worst.saturated <= gate.saturation
    note = f"; more than {as_percent(SATURATION_WARNING)} is worth a look: calibrate with more rows"
    warned = fits and worst.saturated > SATURATION_WARNING
    return GateResult(
        gate="parity",
        metric="saturation",
        limit=f"≤ {as_percent(gate.saturation)}",
        verdict=Verdict.PASS if fits else Verdict.FAIL,
        reason=(
            f"{as_percent(worst.saturated)} of activation {worst.tensor!r} lie outside its quantized range, "
            f"limit {as_percent(gate.saturation)}, {len(measured)} activations{note if warned else ''}"
        ),
        estimate=worst.saturated,
        bound=gate.saturation,
        unit="1",
        n=worst.values,
    )


def _clipping(gate: ParityGate, measured: list[ActivationMeasurement]) -> Iterator[GateResult]:
    """Nothing for evidence that is older than the figure."""
    cut = [(a.clipping, a.tensor) for a in measured if a.clipping is not None]
    if not cut:
        return
    worst, tensor = max(cut)
    yield GateResult(
        gate="parity",
        metric="clipping",
        limit=f"≤ {gate.clipping:.4g}x rounding",
        verdict=Verdict.PASS if worst <= gate.clipping else Verdict.FAIL,
        reason=(
            f"the range of activation {tensor!r} cuts off {worst:.3g}x the energy that rounding loses, "
            f"limit {gate.clipping:.4g}x, {len(cut)} activations"
            + ("" if worst <= gate.clipping else "; too narrow: calibrate with more rows, or with another method")
        ),
        estimate=worst,
        bound=gate.clipping,
        unit="x",
        n=sum(a.values for a in measured),
    )


def _stretch(gate: ParityGate, evidence: Evidence) -> Iterator[GateResult]:
    """Nothing for evidence that is older than the figure, or without ranges that come from values."""
    ranges = [
        *((a.stretch, f"activation {a.tensor!r}") for a in evidence.activations if a.stretch is not None),
        *((w.stretch, f"weight {w.tensor!r}") for w in evidence.weights if w.stretch is not None),
    ]
    if not ranges:
        return
    worst, what = max(ranges)
    fits = worst <= gate.stretch
    yield GateResult(
        gate="parity",
        metric="ranges",
        limit=f"≤ {gate.stretch:.4g}x the values",
        verdict=Verdict.PASS if fits else Verdict.FAIL,
        reason=(
            f"the range of {what} reaches {worst:.3g}x as far as its values, limit {gate.stretch:.4g}x, "
            f"{len(ranges)} ranges"
            + ("" if fits else "; too wide, its steps are that much coarser: calibrate with rows like those of use")
        ),
        estimate=worst,
        bound=gate.stretch,
        unit="x",
        n=len(ranges),
    )


def judge_coverage(evidence: Evidence) -> Iterator[GateResult]:
    """One advisory line where the runtime showed its graph and there is something to cover."""
    found = evidence.coverage
    if found is None or not (found.int8 or found.floats):
        return
    total = len(found.int8) + len(found.floats)
    heeded = all(one.reason == "excluded" for one in found.floats) and not found.unheeded
    yield GateResult(
        gate="parity",
        metric="int8 coverage",
        limit="all but excluded ones",
        verdict=Verdict.PASS if heeded else Verdict.FAIL,
        reason=join_lines(f"{len(found.int8)} of {total} MatMul/Conv/Gemm run in int8{_left(found)}"),
        estimate=len(found.int8) / total,
        unit="1",
        n=total,
        advisory=True,
    )


def _left(found: Int8Coverage) -> str:
    text = ""
    if found.floats:
        ranked = sorted(found.floats, key=lambda one: one.reason == "excluded")
        named = ", ".join(f"{one.name} ({one.reason})" for one in ranked[:_NAMED])
        rest = Counter(one.reason for one in ranked[_NAMED:])
        more = f", and {rest.total()} more" if rest else ""
        text += f"; {len(found.floats)} in float: {named}{more}"
    if found.unheeded:
        text += f"; excluded, and run in int8 by the runtime all the same: {', '.join(found.unheeded[:_NAMED])}"
    return text


def judge_nan(evidence: Evidence) -> Iterator[GateResult]:
    """One advisory line where the source refuses NaN, which no ONNX file does by itself."""
    if evidence.source is None or evidence.source.nan != "refused":
        return
    yield GateResult(
        gate="parity",
        metric="NaN",
        limit="",
        verdict=Verdict.PASS,
        reason="the source refuses NaN, so that there is no answer to compare with: an endpoint must refuse it too",
        advisory=True,
    )


def judge_rows(evidence: Evidence) -> Iterator[GateResult]:
    """One advisory line where the source was too slow to be asked all rows, with what that leaves unseen."""
    source = evidence.source
    if source is None or not source.samples:
        return
    seen = 1 - (1 - _RARE) ** source.rows
    yield GateResult(
        gate="parity",
        metric="rows",
        limit="",
        verdict=Verdict.PASS,
        reason=(
            f"the source is slow: it was asked {source.rows} of {source.samples} rows; a difference in "
            f"{as_percent(_RARE)} of all rows is seen with a chance of {as_percent(round(seen, 2))} "
            f"(`validate: {{source_time: …}}` allows more)"
        ),
        n=source.rows,
        advisory=True,
    )


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
        f"{as_percent(max(changed)) + ' of classes change, ' if changed else ''}{rows} rows in one batch and one by one"
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
