"""Parity of a model with its source, and the node at which the two first diverge."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from onnx_ops.domain.evidence import BatchInvariance, Divergence, ParityMeasurement
from onnx_ops.domain.gate import ParityGate
from onnx_ops.domain.target import Target
from onnx_ops.errors import MeasurementError, OnnxOpsError
from onnx_ops.measure.answers import explain_rejection, run_groups
from onnx_ops.measure.files import slice_rows
from onnx_ops.measure.reference_outputs import ReferenceGroup
from onnx_ops.onnx_graph.instrumentation import ComputedValue, computed_values, expose
from onnx_ops.onnx_graph.model_info import info
from onnx_ops.ports import Ports, Runtime, Tensors, Tracer
from onnx_ops.ports.data import Array
from onnx_ops.statistics.parity import (
    DivergentValue,
    find_first_divergence,
    find_worst_row,
    is_divergent,
    measure_batch_invariance,
    measure_noise,
    measure_output,
    pick_evenly,
    pool_noise,
    select_rows,
)
from onnx_ops.statistics.probes import REAL
from onnx_ops.statistics.tree_parity import measure_within_envelope

_NO_ANSWER = "every answer to the rows of the data is NaN"
_SHOWN = 6
"""Values of a row that are shown."""

INVARIANCE_ROWS = 32
"""As many as make a fair sample of rounding, and few enough to ask one by one."""

SHOWN = 64
"""Values that one run shows; a longer graph is searched coarsely first and then between two of them."""

LIMIT = ParityGate().noise_factor

TracerFactory = Callable[[Tensors], Tracer | None]
"""Makes the tracer of the source, given samples to export it with; None if its exporter cannot look inside."""

REFERENCE_TARGET = Target(name="reference", description="One CPU thread, where every export is first compared.")


def measure_parity(
    runtime: Runtime, model: Path, target: Target, groups: list[ReferenceGroup]
) -> tuple[ParityMeasurement, ...]:
    """One measurement per group and output; a group that the model refuses and its source answers is a mismatch.

    Raises:
        MeasurementError: the runtime could not run the model.
    """
    answers = run_groups(runtime, target, model, {group.name: (group.inputs,) for group in groups})
    found: list[ParityMeasurement] = []
    for group in groups:
        answer = answers[group.name]
        if isinstance(answer, MeasurementError):
            measured = [make_mismatch("*", group.name, f"the export refuses these inputs: {explain_rejection(answer)}")]
        else:
            (outputs,) = answer
            missing = [name for name in group.outputs if name not in outputs]
            measured = [make_mismatch(name, group.name, "the export lacks this output") for name in missing]
            measured += measure_group(group, outputs)
            if group.name == REAL:
                measured += [make_mismatch(name, group.name, _NO_ANSWER) for name in outputs if _is_nan(outputs[name])]
        found += [replace(m, inside=group.inside) for m in measured]
    return pool_noise(found)


def _is_nan(array: Array) -> bool:
    return bool(array.dtype.kind == "f" and array.size and (array != array).all())  # noqa: PLR0124 (NaN)


def measure_group(group: ReferenceGroup, outputs: Tensors) -> list[ParityMeasurement]:
    """One measurement for each of the source's outputs that the model has too."""
    return [_measured(group, name, outputs) for name in group.outputs if name in outputs]


def make_mismatch(output: str, group: str, text: str) -> ParityMeasurement:
    """A difference that no figure tells."""
    return ParityMeasurement(output=output, group=group, rows=0, error=0.0, noise=0.0, ratio=0.0, mismatch=text)


def _measured(group: ReferenceGroup, name: str, outputs: Tensors) -> ParityMeasurement:
    onnx = outputs[name]
    single = group.single[name] if group.single is not None else None
    double = group.double[name] if group.double is not None else None
    bounds = group.bounds[name] if group.bounds is not None and name in group.bounds else None
    if bounds is None:
        found = measure_output(group=group.name, output=name, onnx=onnx, single=single, double=double)
    else:
        found = measure_within_envelope(
            group=group.name, output=name, onnx=onnx, single=single, double=double, bounds=bounds
        )
    reference = double if double is not None else single
    count = len(next(iter(group.inputs.values())))
    if reference is None or onnx.shape != reference.shape or not onnx.ndim or len(onnx) != count or not count:
        return found
    if not is_divergent(found, ParityGate().noise_factor):
        return found
    return replace(found, example=_example(group, find_worst_row(onnx, reference)))


def _example(group: ReferenceGroup, row: int) -> str:
    """The row, and what it holds where it is made up: rows of a data set may be nobody's to read."""
    if group.name != "range":
        return f"row {row}"
    shown = []
    for name, array in group.inputs.items():
        values = array[row].reshape(-1)
        first = ", ".join(f"{value:.4g}" if array.dtype.kind == "f" else str(value) for value in values[:_SHOWN])
        shown.append(f"{name} = {first}{f' … ({len(values)} values)' if len(values) > _SHOWN else ''}")
    return f"row {row}: {'; '.join(shown)}"


def measure_invariance(
    runtime: Runtime, model: Path, target: Target, samples: Tensors, reference: list[ReferenceGroup]
) -> tuple[BatchInvariance, ...]:
    """One figure per output, in units of the source's noise on real samples.

    Nothing for a model whose batch is fixed, for fewer than two rows, and for one that cannot take a single row.
    """
    count = min(INVARIANCE_ROWS, *(len(array) for array in samples.values()))
    if count < 2 or info(model).fixed_batch:
        return ()
    single_rows = (slice_rows(samples, index, index + 1) for index in range(count))
    try:
        together, *alone = runtime.run(model, target, (slice_rows(samples, 0, count), *single_rows))
    except MeasurementError:
        return ()
    real = next((group for group in reference if group.name == REAL), None)
    noise = measure_noise(real.single, real.double) if real else {}
    return measure_batch_invariance(together, alone, noise)


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedExport:
    """An export that failed, the source's answers, and the measurement that failed worst."""

    runtime: Runtime
    target: Target
    model: Path
    reference: list[ReferenceGroup]
    worst: ParityMeasurement


def find_worst(measured: Sequence[ParityMeasurement]) -> ParityMeasurement | None:
    """The measurement farthest beyond the parity gate's usual limit, of inputs that callers can send.

    One with rows comes before one without.
    """
    bad = [m for m in measured if m.inside and is_divergent(m, LIMIT)]
    return max(bad, key=lambda m: (m.rows > 0, bool(m.mismatch), m.ratio), default=None)


def locate_divergence(look: FailedExport, inside: TracerFactory) -> Divergence:
    """The first diverging node, or why none is named.

    The graph is run as it is written, without the runtime's optimizations, on the inputs where parity failed.
    Never raises for what goes wrong on the way: the parity gate has failed already, and this only explains it.
    """
    try:
        return _locate(look, inside)
    except (OnnxOpsError, ValueError) as error:
        return Divergence(note=str(error))


def _locate(look: FailedExport, inside: TracerFactory) -> Divergence:
    plain = replace(look.target, session=replace(look.target.session, graph_level="disabled"))
    group = next(g for g in look.reference if g.name == look.worst.group)
    (outputs,) = look.runtime.run(look.model, plain, (group.inputs,))
    if not any(is_divergent(m, LIMIT) for m in measure_group(group, outputs)):
        return Divergence(note="as it is written the graph agrees with its source; the runtime's optimization departs")
    samples = next((g.inputs for g in look.reference if g.name == REAL), group.inputs)
    tracer = inside(samples)
    if tracer is None:
        return Divergence(note="the source shows no intermediate values")
    return _search(look, plain, tracer, _telling(look, group, outputs))


def _search(look: FailedExport, plain: Target, tracer: Tracer, inputs: Tensors) -> Divergence:
    values = _up_to(look.worst.output, computed_values(look.model))
    copy = look.model.with_name(f"{look.model.stem}-inside.onnx")
    while True:
        chosen = pick_evenly([value.name for value in values], SHOWN)
        single, double = tracer(inputs, frozenset(chosen))
        shown = [name for name in chosen if name in single]
        expose(look.model, shown, copy)
        (answers,) = look.runtime.run(copy, plain, (inputs,))
        found = find_first_divergence(shown, _arrays(answers), single, double)
        if found is None:
            return Divergence(note="no value that source and export share departs")
        closer = _between(values, shown, found)
        if len(chosen) == len(values) or len(closer) == len(values):
            return _describe_divergence(found, values)
        values = closer


def _up_to(output: str, values: Sequence[ComputedValue]) -> list[ComputedValue]:
    """What comes after the output that departs has no part in it."""
    names = [value.name for value in values]
    return list(values[: names.index(output) + 1]) if output in names else list(values)


def _between(values: list[ComputedValue], shown: list[str], found: DivergentValue) -> list[ComputedValue]:
    """The values after the last one shown that agreed, up to the one that departs."""
    names = [value.name for value in values]
    position = shown.index(found.value)
    start = names.index(shown[position - 1]) + 1 if position else 0
    return values[start : names.index(found.value) + 1]


def _describe_divergence(found: DivergentValue, values: list[ComputedValue]) -> Divergence:
    value = next(v for v in values if v.name == found.value)
    return Divergence(node=value.node, op_type=value.op_type, scope=value.scope, ratio=found.ratio)


def _telling(look: FailedExport, group: ReferenceGroup, outputs: Any) -> Tensors:
    """Few rows are enough, and keep the values of a large model within memory; a fixed batch is asked whole."""
    if any(isinstance(spec.shape[0], int) for spec in info(look.model).inputs if spec.shape):
        return group.inputs
    reference = (group.double or group.single or {}).get(look.worst.output)
    if reference is None or look.worst.output not in outputs:
        return group.inputs
    chosen = select_rows(outputs[look.worst.output], reference)
    return {name: array[chosen] for name, array in group.inputs.items()}


def _arrays(answers: Any) -> dict[str, Any]:
    """Without sequences and maps, which a graph may hold inside."""
    return {name: value for name, value in answers.items() if hasattr(value, "dtype")}


def find_hardware_divergence(
    ports: Ports,
    runtime: Runtime,
    target: Target,
    model: Path,
    reference: list[ReferenceGroup],
    measured: Sequence[ParityMeasurement],
) -> Divergence | None:
    """Where a float model first computes otherwise on the target than on the reference CPU; None if it does not.

    Both run the same file on the same inputs, with intermediate values shown.

    Args:
        ports: bring the reference's runtime.
        runtime: of the target.
        target: where parity failed, if it did.
        model: a file in a folder that may be written to.
        reference: the source's answers by group of inputs.
        measured: parity on the target.
    """
    worst = find_worst(measured)
    if worst is None:
        return None
    proven = replace(REFERENCE_TARGET, custom_ops=target.custom_ops)
    plain = replace(proven, session=replace(proven.session, graph_level="disabled"))
    copy = model.with_name(f"{model.stem}-here.onnx")

    def tracer(inputs: Tensors, names: Collection[str]) -> tuple[Tensors, None]:
        expose(model, sorted(names), copy)
        (answers,) = ports.runtime(proven.runtime).run(copy, plain, (inputs,))
        return {name: value for name, value in answers.items() if hasattr(value, "dtype")}, None

    look = FailedExport(runtime=runtime, target=target, model=model, reference=reference, worst=worst)
    return locate_divergence(look, lambda _: tracer)
