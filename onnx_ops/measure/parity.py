"""Parity of a model with its source, and the node at which they first diverge."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from onnx_ops.domain.evidence import BatchInvariance, Divergence, ParityMeasurement
from onnx_ops.domain.gate import ParityGate
from onnx_ops.domain.target import Target
from onnx_ops.errors import MeasurementError, OnnxOpsError
from onnx_ops.measure.answers import explain_rejection, read_values, run_groups
from onnx_ops.measure.files import slice_rows
from onnx_ops.measure.reference_outputs import ReferenceGroup, find_real_group
from onnx_ops.measure.rounding import measure_roundings
from onnx_ops.onnx_graph.instrumentation import ComputedValue, list_computed_values
from onnx_ops.onnx_graph.model_info import read_model_info
from onnx_ops.ports import Context, Runtime, Tensors, Tracer
from onnx_ops.ports.data import Array
from onnx_ops.statistics.output_columns import WHOLE, ColumnNoise, Rounding, measure_columns
from onnx_ops.statistics.parity import (
    find_first_divergence,
    find_worst_row,
    is_divergent,
    make_mismatch,
    measure_batch_invariance,
    measure_noise,
    measure_output,
    pick_evenly,
    select_rows,
)
from onnx_ops.statistics.probes import MIN_NOISE_ROWS, RANGE, REAL
from onnx_ops.statistics.ranking_ties import is_ranked_by_scores
from onnx_ops.statistics.tree_parity import measure_within_envelope

_SHOWN = 6
"""Maximum number of values of one input that a message shows."""

INVARIANCE_ROWS = 32
"""Maximum number of rows for the measurement of batch invariance.

They are enough to measure rounding, and few enough to run individually.
"""

SHOWN = 64
"""Maximum number of values that one run exposes.

In a graph with more values, the search begins with evenly spaced values. It continues between two
of them.
"""

LIMIT = ParityGate().noise_factor

TracerFactory = Callable[[Tensors], Tracer | None]
"""Function that makes the tracer of the source from the samples of its export.

The result is None if the source's exporter cannot trace.
"""

REFERENCE_TARGET = Target(
    name="reference", description="One CPU thread, where every export is first compared."
)


def measure_parity(
    runtime: Runtime,
    model: Path,
    target: Target,
    groups: list[ReferenceGroup],
    exact: Runtime | None = None,
) -> tuple[ParityMeasurement, ...]:
    """Measure the parity of each output on each group of inputs.

    Args:
        exact: ONNX Runtime on this machine, which computes the rounding errors; by default
            `runtime`.

    Raises:
        MeasurementError: the model does not run on real rows, or the source's answers in float32
            and float64 have different shapes.
    """
    feeds = {group.name: (group.inputs,) for group in groups}
    answers = run_groups(runtime, target, model, feeds)
    roundings = measure_roundings(exact or runtime, model, feeds, custom_ops=target.custom_ops)
    roundings = _drop_useless_scores(groups, roundings)
    known = _measure_known_columns(groups, roundings)
    measurements: list[ParityMeasurement] = []
    for group in groups:
        measured = _measure_answer(group, answers[group.name], roundings.get(group.name, {}), known)
        measurements += [replace(m, inside=group.inside) for m in measured]
    return tuple(measurements)


def _measure_answer(
    group: ReferenceGroup,
    answer: tuple[Tensors, ...] | MeasurementError,
    roundings: Mapping[str, Rounding],
    known: Mapping[str, ColumnNoise],
) -> list[ParityMeasurement]:
    """Return the measurements of a group, or one mismatch if the export rejects it."""
    if isinstance(answer, MeasurementError):
        return [
            make_mismatch(
                "*", group.name, f"the export refuses these inputs: {explain_rejection(answer)}"
            )
        ]
    (outputs,) = answer
    missing = [name for name in group.outputs if name not in outputs]
    measured = [make_mismatch(name, group.name, "the export lacks this output") for name in missing]
    measured += measure_group(group, outputs, roundings, known)
    if group.name == REAL:
        useless = [name for name, array in outputs.items() if _is_all_nan(array)]
        measured += [
            make_mismatch(name, REAL, "every answer to the rows of the data is NaN")
            for name in useless
        ]
    return measured


def _is_all_nan(array: Array) -> bool:
    return array.dtype.kind == "f" and array.size > 0 and bool(np.isnan(array).all())


def _drop_useless_scores(
    groups: Sequence[ReferenceGroup], roundings: Mapping[str, Mapping[str, Rounding]]
) -> dict[str, dict[str, Rounding]]:
    """Return the roundings, with only the scores that rank the source's answers.

    An output with other scores is measured as a whole.
    """
    real = find_real_group(groups)
    tensors = [answers for answers in (real.single, real.double) if answers] if real else []
    on_real_rows = roundings.get(REAL, {})
    useless = {
        name
        for name, rounding in on_real_rows.items()
        if _are_scores_useless(name, rounding, tensors)
    }
    return {
        group: {
            name: WHOLE if name in useless else rounding for name, rounding in by_output.items()
        }
        for group, by_output in roundings.items()
    }


def _are_scores_useless(name: str, rounding: Rounding, tensors: Sequence[Tensors]) -> bool:
    """Return whether the scores of an output do not rank the source's answers.

    The result is True if the source lacks the output, and False if the output lacks scores.
    """
    if rounding.scores is None:
        return False
    answers = [by_name[name] for by_name in tensors if name in by_name]
    return not answers or not is_ranked_by_scores(answers[0], answers[-1], rounding)


def _measure_known_columns(
    groups: Sequence[ReferenceGroup], roundings: Mapping[str, Mapping[str, Rounding]]
) -> dict[str, ColumnNoise]:
    """Return the noise of the columns of each output on real rows.

    The result is empty if the source does not answer in both float32 and float64.
    """
    real = find_real_group(groups)
    if real is None or real.single is None or real.double is None:
        return {}
    by_output = roundings.get(REAL, {})
    known = {
        name: measure_columns(array, real.double[name], by_output.get(name, WHOLE))
        for name, array in real.single.items()
        if name in real.double
    }
    return {name: columns for name, columns in known.items() if columns is not None}


def measure_group(
    group: ReferenceGroup,
    outputs: Tensors,
    roundings: Mapping[str, Rounding] | None = None,
    known: Mapping[str, ColumnNoise] | None = None,
) -> list[ParityMeasurement]:
    """Measure each output that both the source and the model have.

    Args:
        roundings: rounding of each output, computed from the graph; by default, each output is
            measured as a whole.
        known: noise of the columns of each output on real rows; used for batches of few rows.
    """
    measurements = []
    rows = len(next(iter(group.inputs.values())))
    is_small = group.name.startswith("batches") and rows < MIN_NOISE_ROWS
    for name in group.outputs:
        if name not in outputs:
            continue
        onnx = outputs[name]
        column_noise = (known or {}).get(name) if is_small else None
        measurement = _measure_against_source(
            group, name, onnx, (roundings or {}).get(name, WHOLE), column_noise
        )
        measurements.append(_add_example(measurement, group, onnx, rows))
    return measurements


def _add_example(
    measurement: ParityMeasurement, group: ReferenceGroup, onnx: Array, rows: int
) -> ParityMeasurement:
    """Return the measurement, with its worst row as the example if the rows diverge."""
    reference = (group.double or group.single or {})[measurement.output]
    is_by_row = onnx.shape == reference.shape and onnx.ndim > 0 and len(onnx) == rows > 0
    if not is_by_row or not is_divergent(measurement, LIMIT):
        return measurement
    return replace(measurement, example=_describe_row(group, find_worst_row(onnx, reference)))


def _measure_against_source(
    group: ReferenceGroup, name: str, onnx: Array, rounding: Rounding, known: ColumnNoise | None
) -> ParityMeasurement:
    """Measure one output by its distance from the source's answers.

    If the source's answers have an envelope, the distance is that from the envelope.
    """
    single, double, bounds = (
        answers.get(name) if answers is not None else None
        for answers in (group.single, group.double, group.bounds)
    )
    if bounds is None:
        return measure_output(
            group=group.name,
            output=name,
            onnx=onnx,
            single=single,
            double=double,
            rounding=rounding,
            known=known,
        )
    return measure_within_envelope(
        group=group.name,
        output=name,
        onnx=onnx,
        single=single,
        double=double,
        bounds=bounds,
        rounding=rounding,
        made_up=group.name == RANGE,
    )


def _describe_row(group: ReferenceGroup, row: int) -> str:
    """Return the number of the row, with its values if its group is `range`.

    Other groups contain values of a data set, which are omitted since they may be confidential.
    """
    if group.name != RANGE:
        return f"row {row}"
    shown = []
    for name, array in group.inputs.items():
        values = array[row].reshape(-1)
        first = ", ".join(
            f"{value:.4g}" if array.dtype.kind == "f" else str(value) for value in values[:_SHOWN]
        )
        rest = f" … ({len(values)} values)" if len(values) > _SHOWN else ""
        shown.append(f"{name} = {first}{rest}")
    return f"row {row}: {'; '.join(shown)}"


def measure_invariance(
    runtime: Runtime, model: Path, target: Target, samples: Tensors, reference: list[ReferenceGroup]
) -> tuple[BatchInvariance, ...]:
    """Measure the batch invariance of each output, in units of the output's noise.

    The result is empty for a model with a fixed batch, and for fewer than two rows. It is also
    empty for a model that fails on the batch or on a single row.
    """
    count = min(INVARIANCE_ROWS, *(len(array) for array in samples.values()))
    if count < 2 or read_model_info(model).fixed_batch:
        return ()
    single_rows = (slice_rows(samples, index, index + 1) for index in range(count))
    try:
        together, *alone = runtime.run(model, target, (slice_rows(samples, 0, count), *single_rows))
    except MeasurementError:
        return ()
    real = find_real_group(reference)
    noise = measure_noise(real.single, real.double) if real else {}
    return measure_batch_invariance(together, alone, noise)


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedExport:
    """An export that failed parity, with its reference and the worst measurement."""

    runtime: Runtime
    target: Target
    model: Path
    reference: list[ReferenceGroup]
    worst: ParityMeasurement


def find_worst(measured: Sequence[ParityMeasurement]) -> ParityMeasurement | None:
    """Return the worst divergent measurement on inputs that callers can send.

    Measurements with rows take precedence over those without. Return None if no such measurement
    diverges.
    """
    divergent = [m for m in measured if m.inside and is_divergent(m, LIMIT)]
    return max(divergent, key=lambda m: (m.rows > 0, bool(m.mismatch), m.ratio), default=None)


def locate_divergence(failed: FailedExport, make_tracer: TracerFactory) -> Divergence:
    """Return the first diverging node, or the reason why it is unknown.

    The graph runs without the runtime's optimizations, on inputs of the group where parity failed.
    Errors in this search are reported as a note: the parity gate has already failed, and the search
    only explains the failure.
    """
    plain = replace(failed.target, session=replace(failed.target.session, graph_level="disabled"))
    group = next(g for g in failed.reference if g.name == failed.worst.group)
    try:
        (outputs,) = failed.runtime.run(failed.model, plain, (group.inputs,))
        if not any(is_divergent(m, LIMIT) for m in measure_group(group, outputs)):
            return Divergence(
                note="without the runtime's optimizations the graph agrees with its source"
            )
        tracer = make_tracer(
            next((g.inputs for g in failed.reference if g.name == REAL), group.inputs)
        )
        if tracer is None:
            return Divergence(note="the source exposes no intermediate values")
        return _search_graph(failed, plain, tracer, _select_inputs(failed, group, outputs))
    except (OnnxOpsError, ValueError) as error:
        return Divergence(note=str(error))


def _search_graph(
    failed: FailedExport, plain: Target, tracer: Tracer, inputs: Tensors
) -> Divergence:
    values = list(list_computed_values(failed.model))
    all_names = [value.name for value in values]
    if failed.worst.output in all_names:
        # The divergence was caused before this output, so later values are not compared.
        values = values[: all_names.index(failed.worst.output) + 1]
    while True:
        chosen = pick_evenly([value.name for value in values], SHOWN)
        single, double = tracer(inputs, frozenset(chosen))
        exposed = [name for name in chosen if name in single]
        (arrays,) = read_values(failed.runtime, failed.model, plain, exposed, (inputs,))
        divergence = find_first_divergence(exposed, arrays, single, double)
        if divergence is None:
            return Divergence(
                note="no diverging value was found among those that source and export share"
            )
        divergent, ratio = divergence
        between = _narrow_values(values, exposed, divergent)
        if len(chosen) == len(values) or len(between) == len(values):
            node = between[-1]
            return Divergence(node=node.node, op_type=node.op_type, scope=node.scope, ratio=ratio)
        values = between


def _narrow_values(
    values: Sequence[ComputedValue], exposed: Sequence[str], divergent: str
) -> list[ComputedValue]:
    """Return the values between the last agreeing exposed value and the divergent one.

    The divergent value is included.
    """
    names = [value.name for value in values]
    position, end = exposed.index(divergent), names.index(divergent)
    start = names.index(exposed[position - 1]) + 1 if position else 0
    return list(values[start : end + 1])


def _select_inputs(failed: FailedExport, group: ReferenceGroup, outputs: Any) -> Tensors:
    """Return a few rows, so that all values of a large model fit into memory.

    All rows are returned for a fixed batch, and if export or source lacks the worst output.
    """
    reference = (group.double or group.single or {}).get(failed.worst.output)
    if (
        read_model_info(failed.model).fixed_batch
        or reference is None
        or failed.worst.output not in outputs
    ):
        return group.inputs
    chosen = select_rows(outputs[failed.worst.output], reference)
    return {name: array[chosen] for name, array in group.inputs.items()}


def find_hardware_divergence(
    context: Context,
    runtime: Runtime,
    target: Target,
    model: Path,
    reference: list[ReferenceGroup],
    measured: Sequence[ParityMeasurement],
) -> Divergence | None:
    """Return where a target's values first differ from the reference CPU's.

    Return None if no measurement on inputs that callers can send diverges. Both targets run the
    same file on the same inputs, with intermediate values as outputs. The copies for this are
    written beside the model.
    """
    worst = find_worst(measured)
    if worst is None:
        return None
    proven = replace(REFERENCE_TARGET, custom_ops=target.custom_ops)
    plain = replace(proven, session=replace(proven.session, graph_level="disabled"))

    def tracer(inputs: Tensors, names: Collection[str]) -> tuple[Tensors, None]:
        (values,) = read_values(
            context.runtime(proven.runtime), model, plain, sorted(names), (inputs,)
        )
        return values, None

    failed = FailedExport(
        runtime=runtime, target=target, model=model, reference=reference, worst=worst
    )
    return locate_divergence(failed, lambda _: tracer)
