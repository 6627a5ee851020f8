"""Parity rules: outputs, weights, trees, activations, coverage and batches."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from onnx_ops.domain.decision import GateResult, Verdict
from onnx_ops.domain.evidence import (
    ActivationMeasurement,
    BatchInvariance,
    Divergence,
    Evidence,
    ParityMeasurement,
    WeightMeasurement,
)
from onnx_ops.domain.gate import ParityGate
from onnx_ops.statistics.parity import is_divergent
from onnx_ops.statistics.rules.common import as_percent, join_lines, judge_gate
from onnx_ops.statistics.rules.parity_rules import (
    ACTIVATIONS,
    BATCH_INVARIANCE,
    CLIPPING,
    EXPORT_OUTPUTS,
    EXPORT_OUTSIDE,
    INT8_COVERAGE,
    NAN,
    OUTPUTS,
    OUTPUTS_OUTSIDE,
    RANGES,
    ROWS,
    SATURATION,
    TREES,
    UNUSED_INPUTS,
    WEIGHTS,
    ParityRule,
)

COMPENSATED = 0.95
"""Relative squared error up to which a weight or bias counts as moved on purpose.

It is the squared error of a layer's answers, divided by that of plain rounding. For a bias, it is
divided by that with the original bias. GPTQ-like rounding gave 0.02 to 0.73 in 25 layers, and
faults of the same size gave 0.99 and more: `benchmarks.truth.quantization`.
"""

FURTHEST = 4.0
"""Maximum number of steps that a weight may move to compensate errors.

It limits errors that real rows do not show, from inputs that are 0 in all rows.
"""

NEARLY_ROUNDED = (0.65, 1.15)
"""Maximum steps and relative squared error of a weight that is treated as rounded.

The squared error is relative to that of plain rounding. A weight within both limits has a scale
that was chosen by another criterion, as in k-quants. A level that is off by one is up to 1.5 steps
away. Planted faults gave a relative error of 1.3 and more.
"""

SATURATION_WARNING = 0.03
"""Share of saturated values above which the reason of a PASS advises more rows."""

_NAMED = 3
"""Maximum number of differences, nodes or inputs that a reason names."""

_RARE = 0.01
"""Share of differing rows whose detection the advice on a slow source describes."""


@judge_gate.register
def judge_parity(gate: ParityGate, evidence: Evidence) -> Iterator[GateResult]:
    """Judge a float variant by its outputs, a quantized one by its export and weights.

    The activations of a quantized variant are judged too. Trees, coverage, unused inputs, the
    source and batches are judged for both, if they were measured.
    """
    if not evidence.quantized:
        yield from _judge_outputs(
            OUTPUTS, OUTPUTS_OUTSIDE, gate, evidence.parity, evidence.divergence
        )
    else:
        yield from _judge_outputs(
            EXPORT_OUTPUTS, EXPORT_OUTSIDE, gate, evidence.export_parity, evidence.divergence
        )
        yield _judge_weights(gate, evidence)
        yield from judge_activations(gate, evidence)
    yield from judge_trees(gate, evidence)
    yield from judge_coverage(gate, evidence)
    yield from judge_source(gate, evidence)
    yield from judge_invariance(gate, evidence)


def _judge_outputs(
    rule: ParityRule,
    rule_outside: ParityRule,
    gate: ParityGate,
    measurements: Sequence[ParityMeasurement],
    divergence: Divergence | None,
) -> Iterator[GateResult]:
    """Yield the verdict on the groups of inputs that the gate enforces.

    These are the inputs that callers can send, unless the gate sets another rule for a group. If
    advisory groups differ, one advisory line follows.
    """
    binding = [m for m in measurements if gate.rule(m.group, inside=m.inside) == "fail"]
    outside = [m for m in measurements if gate.rule(m.group, inside=m.inside) == "advise"]
    yield _verdict(rule, gate, binding, divergence)
    yield from _advise_outside(rule_outside, gate, outside)


def _advise_outside(
    rule: ParityRule, gate: ParityGate, measurements: Sequence[ParityMeasurement]
) -> Iterator[GateResult]:
    differing = [m for m in measurements if m.mismatch or m.ratio > gate.noise_factor]
    if not differing:
        return
    worst = max(differing, key=_rank_badness)
    groups = ", ".join(sorted({m.group for m in differing}))
    yield rule.make_result(
        gate,
        f"differs on inputs that do not decide the gate: {groups}; {_describe(worst)}; "
        f"with `groups: {{{worst.group.partition(':')[0]}: fail}}`, the gate fails",
        estimate=None if worst.mismatch else worst.ratio,
        n=_count_rows(measurements, worst.output),
    )


def _count_rows(measurements: Sequence[ParityMeasurement], output: str) -> int:
    return sum(m.rows for m in measurements if m.output == output)


def _verdict(
    rule: ParityRule,
    gate: ParityGate,
    measurements: Sequence[ParityMeasurement],
    divergence: Divergence | None,
) -> GateResult:
    if not any(m.rows > 0 or m.mismatch for m in measurements):
        return rule.make_unmeasured(gate)
    worst = max(measurements, key=_rank_badness)
    rows = _count_rows(measurements, worst.output)
    reason = (
        _describe(worst)
        + _describe_limit(worst, gate)
        + f", {rows} rows"
        + _describe_explained(measurements)
    )
    if is_divergent(worst, gate.noise_factor):
        reason += f"; for example {worst.example}" if worst.example else ""
        reason += _describe_divergence(divergence)
    return rule.make_result(gate, reason, estimate=None if worst.mismatch else worst.ratio, n=rows)


def _describe_limit(m: ParityMeasurement, gate: ParityGate) -> str:
    """Describe the limit, and the smallest detectable error of the worst column."""
    if m.mismatch or (m.noise == 0 and m.error > 0):
        return ""
    limit = f", limit {gate.noise_factor:.4g}x"
    if not m.scale or not m.noise:
        return limit
    smallest = m.noise * gate.noise_factor
    return (
        f"{limit}, smallest detectable error {as_percent(smallest / m.scale)} of the largest "
        f"answer {m.scale:.3g}"
    )


def _describe_explained(measurements: Sequence[ParityMeasurement]) -> str:
    explained = sum(m.explained for m in measurements)
    differing = explained + sum(m.unexplained for m in measurements)
    if not differing:
        return ""
    return (
        f"; of {differing} answers that differ, {explained} are explained by rounding of the inputs"
    )


def _describe_divergence(divergence: Divergence | None) -> str:
    if divergence is None:
        return ""
    if not divergence.node:
        return f"; first diverging node: {join_lines(f'not located ({divergence.note})')}"
    module = f" in module {divergence.scope}" if divergence.scope else ""
    return (
        f"; first diverging node: {join_lines(f'{divergence.node} ({divergence.op_type}){module}')}"
    )


def _rank_badness(m: ParityMeasurement) -> tuple[bool, float, float, str, str]:
    return bool(m.mismatch), m.ratio, m.error, m.output, m.group


def _describe(m: ParityMeasurement) -> str:
    where = f"output {m.output!r}, inputs {m.group!r}" + (f", {m.column}" if m.column else "")
    if m.mismatch:
        return f"{where}: {join_lines(m.mismatch)}"
    if m.noise == 0 and m.error > 0:
        return f"{where}: error {m.error:.3g} although the source's noise is 0"
    if m.tolerance:
        unit = f"a tenth of the tolerance {m.tolerance} (the source does not run in float64)"
    else:
        unit = f"the source's noise {m.noise:.3g}"
    return f"{where}: error {m.error:.3g} is {m.ratio:.3g}x {unit}"


def _judge_weights(gate: ParityGate, evidence: Evidence) -> GateResult:
    if not any(w.elements > 0 for w in evidence.weights):
        return WEIGHTS.make_unmeasured(gate)
    worst = max(evidence.weights, key=lambda w: (not _is_rounded(w, gate), w.steps, w.tensor))
    answers = ""
    if worst.steps > gate.weight_steps and worst.output_error is not None:
        answers = (
            f", and its layer's answers on real rows have {worst.output_error:.3g}x the squared "
            "error of plain rounding"
        )
        if not _is_rounded(worst, gate):
            steps, error = NEARLY_ROUNDED
            answers += (
                f" (accepted: up to {COMPENSATED}x within {FURTHEST:g} steps, or "
                f"up to {error}x within {steps} steps)"
            )
    return WEIGHTS.make_result(
        gate,
        f"weight {worst.tensor!r} is {worst.steps:.3g} quantization steps from its original, "
        f"limit {gate.weight_steps:.4g}{answers}, {len(evidence.weights)} weights",
        passes=_is_rounded(worst, gate),
        estimate=worst.steps,
        n=sum(w.elements for w in evidence.weights),
    )


def _is_rounded(weight: WeightMeasurement, gate: ParityGate) -> bool:
    """Return whether a weight was rounded, or moved to compensate rounding errors.

    GPTQ moves weights further than plain rounding does. Faults do not bring a layer's answers
    notably closer to the float export's than plain rounding does (`COMPENSATED`). A bias that
    brings them closer was corrected, however far it moved. A bias is added to every row in the same
    way.
    """
    steps, error = NEARLY_ROUNDED
    is_near = (
        weight.steps <= steps and weight.output_error is not None and weight.output_error <= error
    )
    return weight.steps <= gate.weight_steps or is_near or is_compensating(weight)


def is_compensating(weight: WeightMeasurement) -> bool:
    """Return whether a weight or bias was moved to compensate rounding errors."""
    moved = weight.output_error is not None and weight.output_error <= COMPENSATED
    return moved and (weight.bias or weight.steps <= FURTHEST)


def judge_trees(gate: ParityGate, evidence: Evidence) -> Iterator[GateResult]:
    """Judge the trees, if the model has any and the source shows them."""
    trees = evidence.trees
    if trees is None:
        return
    counted = f"{trees.trees} trees, {trees.splits} splits and {trees.leaves} leaves"
    reason = f"{counted} are the source's"
    if trees.changed:
        rest = trees.changed - len(trees.differences)
        shown = "; ".join(trees.differences[:_NAMED])
        more = (
            f" and {trees.changed - _NAMED} more"
            if rest > 0 or len(trees.differences) > _NAMED
            else ""
        )
        reason = f"{trees.changed} of {counted} differ from the source's: {shown}{more}"
    yield TREES.make_result(
        gate,
        join_lines(reason),
        estimate=float(trees.changed),
        n=trees.splits + trees.leaves,
    )


def judge_activations(gate: ParityGate, evidence: Evidence) -> Iterator[GateResult]:
    """Judge the activations that have a fixed range, and the ranges of weights."""
    measured = [a for a in evidence.activations if a.values > 0]
    if measured:
        yield _judge_noise(gate, measured)
        yield _judge_saturation(gate, measured)
    # Older evidence lacks the next two measurements.
    yield from _judge_clipping(gate, measured)
    yield from _judge_ranges(gate, evidence)


def _judge_noise(gate: ParityGate, measured: Sequence[ActivationMeasurement]) -> GateResult:
    worst = max(measured, key=lambda a: (a.noise, a.tensor))
    return ACTIVATIONS.make_result(
        gate,
        f"the largest rounding error of activation {worst.tensor!r} is {worst.noise:.3g}x "
        f"step/√12, limit {gate.activation_noise:.4g}x, {len(measured)} activations",
        estimate=worst.noise,
        n=sum(a.values for a in measured),
    )


def _judge_saturation(gate: ParityGate, measured: Sequence[ActivationMeasurement]) -> GateResult:
    worst = max(measured, key=lambda a: (a.saturated, a.tensor))
    note = ""
    if SATURATION_WARNING < worst.saturated <= gate.saturation:
        note = (
            f"; more than {as_percent(SATURATION_WARNING)} is suspicious: calibrate with more rows"
        )
    return SATURATION.make_result(
        gate,
        f"{as_percent(worst.saturated)} of activation {worst.tensor!r} lie outside its quantized "
        f"range, limit {as_percent(gate.saturation)}, {len(measured)} activations{note}",
        estimate=worst.saturated,
        n=worst.values,
    )


def _judge_clipping(
    gate: ParityGate, measured: Sequence[ActivationMeasurement]
) -> Iterator[GateResult]:
    clippings = [(a.clipping, a.tensor) for a in measured if a.clipping is not None]
    if not clippings:
        return
    clipping, tensor = max(clippings)
    fits = clipping <= gate.clipping
    yield CLIPPING.make_result(
        gate,
        f"the range of activation {tensor!r} cuts off {clipping:.3g}x the energy that rounding "
        f"loses, limit {gate.clipping:.4g}x, {len(clippings)} activations"
        + ("" if fits else "; too narrow: calibrate with more rows, or with another method"),
        estimate=clipping,
        n=sum(a.values for a in measured),
    )


def _judge_ranges(gate: ParityGate, evidence: Evidence) -> Iterator[GateResult]:
    """Judge how far the ranges of activations and weights exceed their values."""
    ranges = [
        *(
            (a.stretch, f"activation {a.tensor!r}")
            for a in evidence.activations
            if a.stretch is not None
        ),
        *((w.stretch, f"weight {w.tensor!r}") for w in evidence.weights if w.stretch is not None),
    ]
    if not ranges:
        return
    stretch, tensor = max(ranges)
    fits = stretch <= gate.stretch
    yield RANGES.make_result(
        gate,
        f"the range of {tensor} reaches {stretch:.3g}x as far as its values, "
        f"limit {gate.stretch:.4g}x, {len(ranges)} ranges"
        + (
            ""
            if fits
            else "; too wide, its steps are that much coarser: calibrate with rows like those that "
            "callers send"
        ),
        estimate=stretch,
        n=len(ranges),
    )


def judge_coverage(gate: ParityGate, evidence: Evidence) -> Iterator[GateResult]:
    """Judge how many quantizable nodes the runtime executes in int8; advisory only."""
    coverage = evidence.coverage
    if coverage is None or not (coverage.int8 or coverage.floats):
        return
    total, text = len(coverage.int8) + len(coverage.floats), coverage.summary
    if coverage.floats:
        ranked = sorted(coverage.floats, key=lambda node: node.reason == "excluded")
        named = ", ".join(f"{node.name} ({node.reason})" for node in ranked[:_NAMED])
        more = f", and {len(ranked) - _NAMED} more" if len(ranked) > _NAMED else ""
        text += f"; {len(coverage.floats)} in float: {named}{more}"
    if coverage.unheeded:
        text += (
            f"; excluded, but run in int8 by the runtime: {', '.join(coverage.unheeded[:_NAMED])}"
        )
    yield INT8_COVERAGE.make_result(
        gate,
        join_lines(text),
        passes=all(node.reason == "excluded" for node in coverage.floats) and not coverage.unheeded,
        estimate=len(coverage.int8) / total,
        n=total,
    )


def judge_source(gate: ParityGate, evidence: Evidence) -> Iterator[GateResult]:
    """Yield advisory lines on unused inputs, and on the source.

    The lines on the source report that it refuses NaN, or that it is slow.
    """
    if evidence.unused_inputs:
        names = ", ".join(evidence.unused_inputs[:_NAMED])
        more = (
            f" and {len(evidence.unused_inputs) - _NAMED} more"
            if len(evidence.unused_inputs) > _NAMED
            else ""
        )
        reason = (
            f"no answer to the compared rows depends on these inputs: {names}{more}; "
            "leave them out, or look for a wrong name"
        )
        yield UNUSED_INPUTS.make_result(gate, join_lines(reason), passes=True)
    source = evidence.source
    if source is not None and source.nan == "refused":
        # An ONNX file cannot refuse NaN, so the endpoint must do it.
        reason = (
            "the source refuses NaN, so that there is no answer to compare with: "
            "an endpoint must refuse it too"
        )
        yield NAN.make_result(gate, reason, passes=True)
    if source is None or not source.samples:
        return
    detected = 1 - (1 - _RARE) ** source.rows
    yield ROWS.make_result(
        gate,
        f"the source is slow: it answered {source.rows} of {source.samples} rows; "
        f"a difference in {as_percent(_RARE)} of all rows is detected with a probability of "
        f"{as_percent(round(detected, 2))} (`validate: {{source_time: …}}` allows more)",
        passes=True,
        n=source.rows,
    )


def judge_invariance(gate: ParityGate, evidence: Evidence) -> Iterator[GateResult]:
    """Judge whether answers depend on the other rows of a batch; advisory only.

    Nothing is yielded if batch invariance was not measured.
    """
    measured = [m for m in evidence.batch_invariance if m.rows > 0]
    if not measured:
        return
    rows = max(m.rows for m in measured)
    non_finite = [m.output for m in measured if not _is_finite(m)]
    if non_finite:
        reason = f"output {min(non_finite)!r}: a measured value is not finite"
        result = BATCH_INVARIANCE.make_result(gate, reason, n=rows)
        yield replace(result, verdict=Verdict.ERROR, bound=None, unit="")
        return
    worst = max(measured, key=lambda m: (m.ratio, m.error, m.output))
    figures = (
        f"max |Δ| {worst.error:.3g} in output {worst.output!r} is {worst.ratio:.3g}x the "
        f"source's noise, {_describe_changed_classes(measured)}{rows} rows in one batch and one "
        "by one"
    )
    reason = f"answers do not depend on the batch's composition: {figures}"
    if worst.ratio > gate.noise_factor:
        reason = (
            f"answers depend on the batch's composition: {figures}; do not batch across requests"
        )
    yield BATCH_INVARIANCE.make_result(gate, reason, estimate=worst.ratio, n=rows)


def _is_finite(measured: BatchInvariance) -> bool:
    return all(map(math.isfinite, (measured.error, measured.ratio, measured.changed or 0.0)))


def _describe_changed_classes(measured: Sequence[BatchInvariance]) -> str:
    changed = [m.changed for m in measured if m.changed is not None]
    return f"{as_percent(max(changed))} of classes change, " if changed else ""
