"""Runs a model on the reference inputs and measures how far it is from its source."""

from __future__ import annotations

from pathlib import Path

from onnx_ops.analysis.parity import measure, with_pooled_noise
from onnx_ops.domain.evidence import ParityMeasurement
from onnx_ops.domain.target import Target
from onnx_ops.ports import Runtime
from onnx_ops.stages.reference import ReferenceGroup


def measure_parity(
    runtime: Runtime, model: Path, target: Target, groups: list[ReferenceGroup]
) -> tuple[ParityMeasurement, ...]:
    """One measurement per group and output.

    Raises:
        MeasurementFailure: the runtime could not run the model.
    """
    answers = runtime.run(model, target, tuple(group.inputs for group in groups))
    found = []
    for group, outputs in zip(groups, answers, strict=True):
        names = (group.double or group.single or {}).keys()
        for name in names:
            if name not in outputs:
                found.append(_missing(group.name, name))
                continue
            single = group.single[name] if group.single is not None else None
            double = group.double[name] if group.double is not None else None
            found.append(measure(group=group.name, output=name, onnx=outputs[name], single=single, double=double))
    return with_pooled_noise(found)


def _missing(group: str, output: str) -> ParityMeasurement:
    return ParityMeasurement(
        output=output, group=group, rows=0, error=0.0, noise=0.0, ratio=0.0, mismatch="the export lacks this output"
    )
