"""Under the parity gate, what outputs do not tell: trees, quantized activations, int8 coverage, NaN."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from onnx_ops.domain.evidence import Evidence
from onnx_ops.domain.gate import GateResult, ParityGate, Verdict
from onnx_ops.domain.structure import ActivationMeasurement, Int8Coverage
from onnx_ops.statistics.rules.common import one_line, percent

SATURATION_WARNING = 0.03
"""Share of saturated values that is told, though it does not fail."""

_NAMED = 3

_RARE = 0.01
"""Share of rows of a difference that is told of where few rows were asked."""


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
        reason=one_line(reason),
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
    note = f"; more than {percent(SATURATION_WARNING)} is worth a look: calibrate with more rows"
    warned = fits and worst.saturated > SATURATION_WARNING
    return GateResult(
        gate="parity",
        metric="saturation",
        limit=f"≤ {percent(gate.saturation)}",
        verdict=Verdict.PASS if fits else Verdict.FAIL,
        reason=(
            f"{percent(worst.saturated)} of activation {worst.tensor!r} lie outside its quantized range, "
            f"limit {percent(gate.saturation)}, {len(measured)} activations{note if warned else ''}"
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
        reason=one_line(f"{len(found.int8)} of {total} MatMul/Conv/Gemm run in int8{_left(found)}"),
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
            f"{percent(_RARE)} of all rows is seen with a chance of {percent(round(seen, 2))} "
            f"(`validate: {{source_time: …}}` allows more)"
        ),
        n=source.rows,
        advisory=True,
    )
