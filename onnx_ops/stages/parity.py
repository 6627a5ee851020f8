"""Runs a model on the reference inputs and measures how far it is from its source."""

from __future__ import annotations

from pathlib import Path

from onnx_ops.analysis.jitter import measure_jumping
from onnx_ops.analysis.parity import measure, with_pooled_noise
from onnx_ops.domain.evidence import ParityMeasurement
from onnx_ops.domain.target import Target
from onnx_ops.errors import MeasurementFailure
from onnx_ops.ports import Runtime, Tensors
from onnx_ops.stages.group_answers import answers_of, refusal
from onnx_ops.stages.reference import ReferenceGroup


def measure_parity(
    runtime: Runtime, model: Path, target: Target, groups: list[ReferenceGroup]
) -> tuple[ParityMeasurement, ...]:
    """One measurement per group and output; a group that the model refuses and its source answers is a mismatch.

    Raises:
        MeasurementFailure: the runtime could not run the model.
    """
    answers = answers_of(runtime, target, model, {group.name: (group.inputs,) for group in groups})
    found: list[ParityMeasurement] = []
    for group in groups:
        answer = answers[group.name]
        if isinstance(answer, MeasurementFailure):
            found.append(mismatched("*", group.name, f"the export refuses these inputs: {refusal(answer)}"))
            continue
        (outputs,) = answer
        missing = [name for name in group.outputs if name not in outputs]
        found += [mismatched(name, group.name, "the export lacks this output") for name in missing]
        found += measure_group(group, outputs)
    return with_pooled_noise(found)


def measure_group(group: ReferenceGroup, outputs: Tensors) -> list[ParityMeasurement]:
    """One measurement for each of the source's outputs that the model has too."""
    return [_measured(group, name, outputs) for name in group.outputs if name in outputs]


def mismatched(output: str, group: str, text: str) -> ParityMeasurement:
    """A difference that no figure tells."""
    return ParityMeasurement(output=output, group=group, rows=0, error=0.0, noise=0.0, ratio=0.0, mismatch=text)


def _measured(group: ReferenceGroup, name: str, outputs: Tensors) -> ParityMeasurement:
    single = group.single[name] if group.single is not None else None
    double = group.double[name] if group.double is not None else None
    if group.bounds is None or name not in group.bounds:
        return measure(group=group.name, output=name, onnx=outputs[name], single=single, double=double)
    return measure_jumping(
        group=group.name,
        output=name,
        onnx=outputs[name],
        single=single,
        double=double,
        bounds=group.bounds[name],
    )
