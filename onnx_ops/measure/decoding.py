"""Answers that a function of the project decodes from the outputs of a model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from onnx_ops.domain.gate import MetricDefinition
from onnx_ops.errors import OnnxOpsError, UserError, describe_error
from onnx_ops.measure.visual_answers import stack_boxes
from onnx_ops.metric_formulas import Array
from onnx_ops.ports import Tensors

Decoder = Callable[[Tensors], Sequence[Any]]
"""Function from the outputs of a batch, by name, to one answer per row."""


def decode_outputs(definition: MetricDefinition, outputs: Tensors, decode: Decoder) -> Tensors:
    """Return the decoded answers as one output, named by the function's reference.

    Raises:
        UserError: the function raises an error, returns another number of answers than rows, or
            returns answers that `stack_answers` refuses. An OnnxOpsError of the function is raised
            unchanged.
    """
    rows = len(next(iter(outputs.values())))
    try:
        answers = decode(outputs)
    except OnnxOpsError:
        raise
    except Exception as error:  # User code can raise any exception.
        raise UserError(
            f"{definition.decode} raised {describe_error(error)}", where=definition.label
        ) from error
    count = len(answers) if hasattr(answers, "__len__") else None
    if isinstance(answers, str | bytes) or count != rows:
        returned = f"{type(answers).__name__} of length {count}" if count is not None else answers
        raise UserError(
            f"{definition.decode} returned {returned}, not one answer for each of {rows} rows",
            where=definition.label,
            remedy="Return a list with one entry per row of the outputs.",
        )
    return {definition.decode: stack_answers(definition, answers)}


def stack_answers(definition: MetricDefinition, answers: Sequence[Any]) -> Array:
    """Return one array of the answers of all rows.

    Raises:
        UserError: the answers are of different shapes, or boxes are not an array (boxes, columns)
            of numbers.
    """
    if any(isinstance(answer, str | bytes) for answer in answers):
        texts = np.empty(len(answers), dtype=object)
        texts[:] = answers
        return texts
    if definition.reads in ("detections", "keypoints"):
        return stack_boxes(definition, answers)
    try:
        return np.stack([np.asarray(answer) for answer in answers])
    except ValueError as error:
        shapes = sorted({_format_shape(answer) for answer in answers})[:5]
        raise UserError(
            f"the answers of {definition.decode} are of different shapes: {', '.join(shapes)}",
            where=definition.label,
        ) from error


def _format_shape(answer: Any) -> str:
    try:
        return str(np.shape(answer))
    except ValueError:
        return "lists of different lengths"
