"""Rounding errors of a model's outputs, computed from the model's graph."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

from onnx_ops.domain.target import CustomOps, Target
from onnx_ops.errors import MeasurementError, OnnxOpsError
from onnx_ops.measure.answers import run_groups
from onnx_ops.onnx_graph.files import copy_model
from onnx_ops.onnx_graph.ort_format import is_ort_format
from onnx_ops.onnx_graph.rounding_errors import RoundingOutputs, write_with_rounding_errors
from onnx_ops.ports import Runtime, Tensors
from onnx_ops.scratch import Scratch
from onnx_ops.statistics.output_columns import Rounding

_TARGET = Target(name="rounding", description="One CPU thread, where rounding errors are computed.")


def measure_roundings(
    runtime: Runtime,
    model: Path,
    groups: Mapping[str, tuple[Tensors, ...]],
    custom_ops: tuple[CustomOps, ...] = (),
) -> dict[str, dict[str, Rounding]]:
    """Return the rounding of each output by group of inputs, computed from the graph.

    The runs of a group are joined along axis 0. A group that the model rejects is omitted. All
    groups are omitted if the model is in ORT format or older than opset 9, or if the copy with
    additional nodes does not run. Outputs are then measured without a floor from the graph.

    Args:
        runtime: ONNX Runtime on this machine.
    """
    if is_ort_format(model):
        return {}
    try:
        with Scratch() as folder:
            copy_model(model, folder / model.name)
            copy = folder / f"{model.stem}-rounding.onnx"
            outputs = write_with_rounding_errors(folder / model.name, copy)
            if not outputs:
                return {}
            answers = run_groups(runtime, replace(_TARGET, custom_ops=custom_ops), copy, groups)
    except (OnnxOpsError, ValueError):
        return {}
    return {
        name: {output: _read_rounding(output, one, answer) for output, one in outputs.items()}
        for name, answer in answers.items()
        if not isinstance(answer, MeasurementError)
    }


def _read_rounding(
    output: str, described: RoundingOutputs, answers: tuple[Tensors, ...]
) -> Rounding:
    names = (output, described.error, described.segments, described.scores, described.scores_error)
    answer, floor, segments, scores, scores_error = (
        np.concatenate([np.atleast_1d(one[name]) for one in answers]) if name else None
        for name in names
    )
    if floor is None and answer is not None and answer.dtype.kind == "f":
        floor = np.zeros(answer.shape)  # An output that only copies inputs has no rounding error.
    return Rounding(
        floor=floor,
        axis=described.axis,
        segments=segments,
        scores=scores,
        scores_error=scores_error,
        scores_axis=described.scores_axis,
        labels=described.labels,
    )
