"""Runs a model on the reference inputs and measures how far it is from its source."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from onnx_ops.domain.evidence import ParityMeasurement
from onnx_ops.domain.gate import ParityGate
from onnx_ops.domain.target import Target
from onnx_ops.errors import MeasurementError
from onnx_ops.measure.group_answers import answers_of, refusal
from onnx_ops.measure.reference import ReferenceGroup
from onnx_ops.ports import Runtime, Tensors
from onnx_ops.ports.data import Array
from onnx_ops.statistics.divergence import departed, worst_row
from onnx_ops.statistics.jitter import measure_jumping
from onnx_ops.statistics.parity import measure, with_pooled_noise
from onnx_ops.statistics.probes import REAL

_NO_ANSWER = "every answer to the rows of the data is NaN"
_SHOWN = 6
"""Values of a row that are shown."""


def measure_parity(
    runtime: Runtime, model: Path, target: Target, groups: list[ReferenceGroup]
) -> tuple[ParityMeasurement, ...]:
    """One measurement per group and output; a group that the model refuses and its source answers is a mismatch.

    Raises:
        MeasurementError: the runtime could not run the model.
    """
    answers = answers_of(runtime, target, model, {group.name: (group.inputs,) for group in groups})
    found: list[ParityMeasurement] = []
    for group in groups:
        answer = answers[group.name]
        if isinstance(answer, MeasurementError):
            measured = [mismatched("*", group.name, f"the export refuses these inputs: {refusal(answer)}")]
        else:
            (outputs,) = answer
            missing = [name for name in group.outputs if name not in outputs]
            measured = [mismatched(name, group.name, "the export lacks this output") for name in missing]
            measured += measure_group(group, outputs)
            if group.name == REAL:
                measured += [mismatched(name, group.name, _NO_ANSWER) for name in outputs if _is_nan(outputs[name])]
        found += [replace(m, inside=group.inside) for m in measured]
    return with_pooled_noise(found)


def _is_nan(array: Array) -> bool:
    return bool(array.dtype.kind == "f" and array.size and (array != array).all())  # noqa: PLR0124 (NaN)


def measure_group(group: ReferenceGroup, outputs: Tensors) -> list[ParityMeasurement]:
    """One measurement for each of the source's outputs that the model has too."""
    return [_measured(group, name, outputs) for name in group.outputs if name in outputs]


def mismatched(output: str, group: str, text: str) -> ParityMeasurement:
    """A difference that no figure tells."""
    return ParityMeasurement(output=output, group=group, rows=0, error=0.0, noise=0.0, ratio=0.0, mismatch=text)


def _measured(group: ReferenceGroup, name: str, outputs: Tensors) -> ParityMeasurement:
    onnx = outputs[name]
    single = group.single[name] if group.single is not None else None
    double = group.double[name] if group.double is not None else None
    bounds = group.bounds[name] if group.bounds is not None and name in group.bounds else None
    if bounds is None:
        found = measure(group=group.name, output=name, onnx=onnx, single=single, double=double)
    else:
        found = measure_jumping(group=group.name, output=name, onnx=onnx, single=single, double=double, bounds=bounds)
    reference = double if double is not None else single
    count = len(next(iter(group.inputs.values())))
    if reference is None or onnx.shape != reference.shape or not onnx.ndim or len(onnx) != count or not count:
        return found
    if not departed(found, ParityGate().noise_factor):
        return found
    return replace(found, example=_example(group, worst_row(onnx, reference)))


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
