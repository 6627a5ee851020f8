"""Judge the rounding of a candidate.

The rounding is judged in units of noise, by each weight and activation, and by the function without
rounding.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np

from onnx_ops.domain.decision import GateResult, Verdict
from onnx_ops.domain.evidence import (
    ActivationMeasurement,
    Evidence,
    ParityMeasurement,
    WeightMeasurement,
)
from onnx_ops.domain.gate import ParityGate
from onnx_ops.domain.target import Target
from onnx_ops.errors import MeasurementError, UserError
from onnx_ops.measure.answers import GroupAnswers, explain_rejection, run_groups
from onnx_ops.measure.execution import explain_saturation
from onnx_ops.measure.quantization import (
    choose_source_form,
    measure_activations,
    measure_paired_weights,
)
from onnx_ops.measure.rounding import measure_roundings
from onnx_ops.onnx_graph.dequantization import (
    write_dequantized,
    write_with_fp16_weights,
    write_with_weights,
)
from onnx_ops.onnx_graph.files import copy_model
from onnx_ops.onnx_graph.input_bounds import read_input_bounds
from onnx_ops.onnx_graph.quantized_weights import pair_quantized_weights, read_float_weights
from onnx_ops.ports import Runtime, Tensors
from onnx_ops.scratch import Scratch
from onnx_ops.statistics.judge import judge
from onnx_ops.statistics.output_columns import WHOLE, Rounding
from onnx_ops.statistics.parity import make_mismatch, measure_output
from onnx_ops.statistics.rules.parity import is_compensating
from onnx_ops.statistics.rules.parity_rules import CLIPPING, EXPORT_OUTPUTS, SATURATION, WEIGHTS
from onnx_ops.tools.bench import (
    make_evidence,
)
from onnx_ops.tools.compare import REFERENCE, compare
from onnx_ops.tools.judgement import JudgeRequest, add_cause, make_parity_result
from onnx_ops.tools.sample_rows import build_groups

HALF = 2.0**-10
"""Spacing of float16, relative to its values."""

_ACTIVATION_ROWS, _FUNCTION_ROWS = 256, 128
"""Numbers of rows to measure activations, and to compare the functions."""

_LARGE_ROW = 1 << 14
"""Size of a row in bytes from which only a quarter of the rows is used."""

_NAMED = 3
"""Maximum number of weights that a note names."""

_NEEDS_REAL_ROWS = frozenset({SATURATION.metric, CLIPPING.metric})
"""Activation metrics that need rows that resemble those in production."""


def judge_within_noise(
    request: JudgeRequest, runtime: Runtime, target: Target, of: Literal["float16", "baseline"]
) -> GateResult:
    """Judge the answers in units of the noise of their precision.

    The rule is that of the parity gate. For float16, the noise is the effect of rounding the
    baseline's constants, by column. For a rounded baseline, it is the effect of the target's own
    graph optimizations. This noise moves single elements by whole steps, which all columns share,
    so that the output is measured as a whole. If the baseline's sums saturate on the target, this
    noise does not measure rounding, and only equal answers pass.
    """
    samples = request.settings[0].samples
    groups = [
        g
        for g in build_groups(samples, empty=False, bounds=read_input_bounds(request.baseline))
        if g.inside
    ]
    runs = {group.name: group.runs for group in groups}
    exactly, runtime = request.arrange(request.exact), request.arrange(runtime)
    request.report(f"running {request.candidate.name} on {len(groups)} groups of inputs")
    expected = run_groups(exactly, REFERENCE, request.baseline, runs)
    roundings: Mapping[str, Mapping[str, Rounding]] = {}
    if of == "float16":
        noisy = _run_with_fp16_weights(request, exactly, runs)
        roundings = measure_roundings(exactly, request.baseline, runs)
    else:
        noisy = run_groups(runtime, target, request.baseline, runs)
    answers = run_groups(runtime, target, request.candidate, runs)
    spacing = HALF if of == "float16" else 0.0
    measured: list[ParityMeasurement] = []
    for name in runs:
        measured += _measure_group(
            name, expected[name], noisy[name], answers[name], roundings.get(name, {}), spacing
        )

    evidence = replace(make_evidence(runtime, target, request.candidate), parity=tuple(measured))
    result = _judge_parity(evidence, "the noise of float16" if of == "float16" else "A's own noise")
    saturation = (
        explain_saturation(runtime, request.baseline, target, "A") if of == "baseline" else ""
    )
    if saturation and result.verdict is Verdict.PASS and not _are_equal(noisy, answers):
        result = replace(result, verdict=Verdict.INCONCLUSIVE)
    return add_cause(result, saturation)


def _judge_parity(evidence: Evidence, noise: str) -> GateResult:
    """Return the result of the parity gate, worded for two files.

    `noise` names what errors are compared with.
    """
    result = next(r for r in judge((ParityGate(),), evidence).results if r.gate == "parity")
    reason = result.reason.replace("the source's noise", noise).replace(
        "the source gives", "A gives"
    )
    return replace(result, limit=f"≤ {ParityGate().noise_factor:g}x noise", reason=reason)


def _run_with_fp16_weights(
    request: JudgeRequest, runtime: Runtime, runs: Mapping[str, tuple[Tensors, ...]]
) -> GroupAnswers:
    """Run the baseline with those constants rounded that are float16 in the candidate.

    If no such constant is found, all float32 constants are rounded.
    """
    narrowed = {
        pair.origin for pair in pair_quantized_weights(request.baseline, request.candidate).pairs
    }
    with Scratch() as folder:
        rounded = folder / "halves.onnx"
        write_with_fp16_weights(request.baseline, rounded, narrowed)
        return run_groups(runtime, REFERENCE, rounded, runs)


def _measure_group(
    group: str,
    expected: Sequence[Tensors] | MeasurementError,
    noisy: Sequence[Tensors] | MeasurementError,
    answers: Sequence[Tensors] | MeasurementError,
    roundings: Mapping[str, Rounding],
    spacing: float,
) -> Iterator[ParityMeasurement]:
    """Yield the error of each output on one group of inputs.

    Nothing is yielded if the baseline rejects the inputs. `spacing` is the spacing of the
    candidate's floats, relative to their values.
    """
    if isinstance(expected, MeasurementError) or isinstance(noisy, MeasurementError):
        return
    if isinstance(answers, MeasurementError):
        yield make_mismatch(
            "*", group, f"B rejects these inputs, but A does not: {explain_rejection(answers)}"
        )
        return
    double, single, onnx = _stack_runs(expected), _stack_runs(noisy), _stack_runs(answers)
    for output, exact in double.items():
        if output not in onnx:
            yield make_mismatch(output, group, "B lacks this output")
            continue
        yield measure_output(
            group=group,
            output=output,
            onnx=onnx[output],
            single=single[output],
            double=exact,
            epsilon=spacing if exact.dtype.kind == "f" else 0.0,
            rounding=roundings.get(output, WHOLE),
        )


def _are_equal(one: GroupAnswers, other: GroupAnswers) -> bool:
    """Return whether two models give equal answers to all groups of inputs.

    Groups that one of the models rejects are skipped.
    """
    for name, runs in one.items():
        others = other[name]
        if isinstance(runs, MeasurementError) or isinstance(others, MeasurementError):
            continue
        mine, theirs = _stack_runs(runs), _stack_runs(others)
        if mine.keys() != theirs.keys():
            return False
        if not all(
            np.array_equal(mine[n], theirs[n], equal_nan=mine[n].dtype.kind == "f") for n in mine
        ):
            return False
    return True


def _stack_runs(answers: Sequence[Tensors]) -> Tensors:
    return {
        name: np.concatenate([np.atleast_1d(one[name]) for one in answers]) for name in answers[0]
    }


def judge_rounding(request: JudgeRequest, notes: dict[str, None]) -> Iterator[GateResult]:
    """Judge the weights, activations and function without rounding of a candidate.

    The rules are those of a pipeline's parity gate. Copies of both files are measured, since files
    with intermediate values as outputs are written beside them. A weight that cannot be compared is
    reported as a note: the task metric decides about it.
    """
    a, b = request.baseline, request.candidate
    request.report(f"comparing weights and activations of {b.name} with those of {a.name}")
    inside = request.arrange(request.inside)
    rows = _take_few(request.settings[0].samples.rows, _ACTIVATION_ROWS)
    weights: tuple[WeightMeasurement, ...] = ()
    with Scratch() as folder:
        try:
            a, b = _copy_pair(a, b, folder)
            a = choose_source_form(inside, a, b, folder / "simplified.onnx")
            weights, unpaired = measure_paired_weights(a, b, inside, rows)
            if unpaired:
                notes[_describe_unpaired(unpaired)] = None
        except (MeasurementError, UserError) as error:
            notes[f"weights were not compared: {error}"] = None
        activations = _measure_int8_activations(request, inside, a, b, rows, notes)
        corrected = {weight.tensor for weight in weights if weight.bias and is_compensating(weight)}
        # Unlike `inside`, `request.exact` runs the models in a separate process, so a crash can be
        # reported.
        function = _judge_function(request, a, corrected, notes)
    target = request.targets[0]
    evidence = replace(
        make_evidence(request.runtime(target.runtime), target, request.candidate),
        quantized=True,
        weights=weights,
        activations=activations,
    )
    excluded = _list_excluded(request, weights)
    for result in judge((ParityGate(),), evidence).results:
        if result.gate == "parity" and result.metric not in excluded:
            yield result
    yield from function


def _list_excluded(request: JudgeRequest, weights: Sequence[WeightMeasurement]) -> set[str]:
    """Return the metrics that were not measured on rows like those in production.

    Metrics that were not measured at all are included. The result on the outputs of the export is
    also excluded: the comparison of the functions without rounding replaces it.
    """
    excluded = {EXPORT_OUTPUTS.metric}
    if request.dataset is None:
        excluded |= _NEEDS_REAL_ROWS
    if not weights:
        excluded.add(WEIGHTS.metric)
    return excluded


def _measure_int8_activations(
    request: JudgeRequest, inside: Runtime, a: Path, b: Path, rows: Tensors, notes: dict[str, None]
) -> tuple[ActivationMeasurement, ...]:
    """Measure the activations of an int8 candidate.

    Without a data set, clipping and stretch are omitted.
    """
    if request.kind.candidate.precision != "int8" or not rows:
        return ()
    try:
        activations = measure_activations(inside, a, b, rows)
    except (MeasurementError, UserError) as error:
        notes[f"activations were not measured: {error}"] = None
        return ()
    if request.dataset is None:
        return tuple(replace(activation, clipping=None, stretch=None) for activation in activations)
    return activations


def _copy_pair(a: Path, b: Path, folder: Path) -> tuple[Path, Path]:
    """Copy two models into separate folders, and return the paths of the copies."""
    copies = folder / "baseline" / a.name, folder / "candidate" / b.name
    for path, copy in zip((a, b), copies, strict=True):
        copy.parent.mkdir()
        copy_model(path, copy)
    return copies


def _describe_unpaired(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_NAMED]) + (
        f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    )
    count = "1 weight was" if len(names) == 1 else f"{len(names)} weights were"
    return (
        f"{count} not compared, since A lacks the original, or its layout is unknown ({shown}): "
        "the task metric decides"
    )


def _take_few(rows: Tensors, count: int) -> Tensors:
    """Return the first `count` rows, or a quarter of this number if a row is large."""
    size = sum(array.nbytes for array in rows.values()) // max(
        1, max(map(len, rows.values()), default=1)
    )
    return {
        name: array[: count if size < _LARGE_ROW else count // 4] for name, array in rows.items()
    }


def _judge_function(
    request: JudgeRequest, baseline: Path, corrected: Collection[str], notes: dict[str, None]
) -> list[GateResult]:
    """Judge whether the candidate without rounding computes the baseline's function.

    The baseline gets the weights of the candidate. `corrected` names biases that the quantizer
    moved to compensate for rounding. The result is empty if weights of the candidate lack an
    original, or if the functions cannot be computed, which a note explains. The task metric then
    decides.
    """
    with Scratch() as folder:
        plain, exact = folder / "baseline.onnx", folder / "candidate.onnx"
        try:
            paired = pair_quantized_weights(baseline, request.candidate)
            if paired.unpaired:
                return []
            biases = [
                w for w in read_float_weights(baseline, request.candidate) if w.name in corrected
            ]
            write_with_weights(baseline, (*paired.pairs, *biases), plain)
            write_dequantized(baseline, request.candidate, exact)
            samples = request.settings[0].samples
            samples = replace(samples, rows=_take_few(samples.rows, _FUNCTION_ROWS))
            parity = compare(
                request.exact, REFERENCE, plain, exact, samples, request.report, sizes=request.sizes
            )
        except (MeasurementError, UserError) as error:
            notes[f"the unrounded function was not compared: {error}"] = None
            return []
    result = make_parity_result(parity, "function")
    text = "without its rounding, B " + (
        "computes what A computes with B's weights"
        if parity.verdict is Verdict.PASS
        else "was not found equal to A with B's weights"
    )
    return [replace(result, reason=f"{text}: {result.reason}")]
