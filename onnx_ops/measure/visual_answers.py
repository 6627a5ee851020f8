"""Boxes, keypoints and masks: outputs and labels of models, and their checks.

Functions raise UserError if labels or outputs are not valid. Functions that read outputs return
None if no output fits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from onnx_ops.domain.gate import MetricDefinition
from onnx_ops.errors import UserError
from onnx_ops.measure.user_functions import CUSTOM_METRIC
from onnx_ops.metric_formulas import Array
from onnx_ops.metric_formulas.detection import (
    BOX_COLUMNS,
    COCO_SIGMAS,
    OBJECT_COLUMNS,
    PADDING,
    POINT_COLUMNS,
    POSE_COLUMNS,
)
from onnx_ops.ports import Tensors

_BOXES = "boxes are x1, y1, x2, y2: the least and the greatest coordinates"
_CORNERS = 4
_SCORE, _CLASS = 4, 5
"""Columns of the score and of the class of a detection."""

_OBJECT_CLASS = 4
"""Column of the class of an object."""

_CLASS_NAMES, _SCORE_NAMES = ("class", "label", "cls"), ("score", "conf", "prob")
"""Parts of the names of outputs with classes or scores, if types are ambiguous."""


def read_detections(outputs: Tensors) -> Array | None:
    """Return detections (rows, detections, 6); None if no outputs can be read.

    The outputs are one array of this shape, or three: boxes (rows, detections, 4), scores and
    classes (rows, detections).
    """
    for array in outputs.values():
        if _has_columns(array, BOX_COLUMNS):
            return array.astype(np.float64)
    boxes = [array for array in outputs.values() if _has_columns(array, _CORNERS)]
    if len(boxes) != 1:
        return None
    flat = {
        name: array
        for name, array in outputs.items()
        if array.shape == boxes[0].shape[:2] and array.dtype.kind in "fiu"
    }
    classes = _find_output(flat, "iu", _CLASS_NAMES)
    scores = _find_output({name: flat[name] for name in flat if name != classes}, "f", _SCORE_NAMES)
    if not classes or not scores:
        return None
    parts = (boxes[0], flat[scores][..., None], flat[classes][..., None])
    return np.concatenate([part.astype(np.float64) for part in parts], axis=2)


def _find_output(arrays: Tensors, kinds: str, names: Sequence[str]) -> str:
    """Return the only output of these types or with such a name; empty without one."""
    for chosen in (
        [name for name, array in arrays.items() if array.dtype.kind in kinds],
        [name for name in arrays if any(part in name.lower() for part in names)],
    ):
        if len(chosen) == 1:
            return chosen[0]
    return ""


def read_poses(outputs: Tensors) -> Array | None:
    """Return detections with keypoints; None if no output can be read.

    The shape is (rows, detections, 6 + 3 * keypoints).
    """
    for array in outputs.values():
        if array.ndim == 3 and array.dtype.kind == "f" and _count_points(array, BOX_COLUMNS):
            return array.astype(np.float64)
    return None


def _has_columns(array: Array, columns: int) -> bool:
    return bool(array.ndim == 3 and array.shape[2] == columns and array.dtype.kind in "fiu")


def _count_points(array: Array, before: int) -> int:
    """Return the number of keypoints after `before` columns; 0 if they do not fit."""
    points, rest = divmod(array.shape[2] - before, POINT_COLUMNS)
    return max(0, points) if not rest else 0


def widen(values: Array, places: int) -> Array:
    """Return detections with that many places; new places are empty."""
    padding = np.zeros((len(values), places - values.shape[1], values.shape[2]))
    padding[..., _CLASS] = PADDING
    return np.concatenate([values, padding], axis=1)


def find_nan(detections: Array) -> Array:
    """Return whether each row has NaN or infinity in a place that is not empty."""
    return np.asarray(~np.isfinite(_clear(detections, _CLASS)).all(axis=(1, 2)))


def _clear(boxes: Array, column: int) -> Array:
    """Return boxes with zeros in empty places."""
    empty = boxes[..., column : column + 1] == PADDING
    return np.where(empty, 0, boxes)


def stack_boxes(definition: MetricDefinition, answers: Sequence[Any]) -> Array:
    """Return the boxes of all rows in one array, with empty places.

    The answer of each row is an array (boxes, columns).

    Raises:
        UserError: the answer of a row has another shape, or is not an array of numbers.
    """
    try:
        rows = [np.asarray(answer, dtype=np.float64) for answer in answers]
    except (TypeError, ValueError) as error:
        raise UserError(
            f"an answer of {definition.decode} is not an array of numbers",
            where=definition.label,
            why=str(error),
            remedy="Return an array (boxes, columns) for each row.",
        ) from error
    columns = next((row.shape[-1] for row in rows if row.size and row.ndim), BOX_COLUMNS)
    rows = [row if row.size else np.zeros((0, columns)) for row in rows]
    for number, row in enumerate(rows):
        if row.ndim != 2 or row.shape[1] != columns:
            raise UserError(
                f"row {number}: the answer of {definition.decode} has shape {row.shape}, "
                f"not (boxes, {columns})",
                where=definition.label,
            )
    places = max(1, *(len(row) for row in rows))
    return np.concatenate([widen(row[None], places) for row in rows])


def prepare_visual_label(definition: MetricDefinition, label: Array | None) -> Array:
    """Return the label of a metric of boxes, keypoints or masks, checked."""
    prepare = prepare_mask if definition.reads == "masks" else prepare_objects
    return prepare(definition, label)


def prepare_objects(definition: MetricDefinition, label: Array | None) -> Array:
    """Return the objects of the label, checked: (rows, objects, columns)."""
    with_points = definition.reads == "keypoints"
    fits = label is not None and label.ndim == 3 and label.dtype.kind in "fiu"
    if with_points:
        needed = "(rows, objects, 7 + 3 * keypoints): x1, y1, x2, y2, class, crowd, area, keypoints"
        fits = fits and label is not None and bool(_count_points(label, POSE_COLUMNS))
    else:
        needed = "(rows, objects, 5 or 6): x1, y1, x2, y2, class[, crowd]"
        fits = fits and label is not None and label.shape[2] in (OBJECT_COLUMNS - 1, OBJECT_COLUMNS)
    if label is None or not fits:
        has = "there is none" if label is None else f"it is {label.dtype} {tuple(label.shape)}"
        raise UserError(
            f"the label must contain objects {needed}; {has}",
            where=definition.label,
            remedy="Give places without an object the class -1.",
        )
    objects = _clear(label.astype(np.float64), _OBJECT_CLASS)
    objects[..., _OBJECT_CLASS] = label[..., _OBJECT_CLASS]
    where = f"{definition.label}: the label"
    _check_boxes(objects, _OBJECT_CLASS, where)
    if objects.shape[2] >= OBJECT_COLUMNS:
        crowd = objects[..., OBJECT_COLUMNS - 1]
        _refuse((crowd != 0) & (crowd != 1), "has a column crowd that is not 0 or 1", where)
    _refuse((objects[..., :2] < 0).any(axis=2), "lies outside the image: x1 or y1 < 0", where)
    if with_points:
        area = objects[..., OBJECT_COLUMNS]
        _refuse((area <= 0) & (objects[..., _OBJECT_CLASS] != PADDING), "has no area", where)
    return objects


def prepare_detections(definition: MetricDefinition, label: Array, detections: Array) -> Array:
    """Return one model's detections, checked; empty places have zeros and class -1."""
    where = f"{definition.label}: the model's answers"
    values = _clear(detections, _CLASS)
    values[..., _CLASS] = detections[..., _CLASS]
    _check_boxes(values, _CLASS, where)
    if definition.reads == "keypoints":
        mine, points = _count_points(values, BOX_COLUMNS), _count_points(label, POSE_COLUMNS)
        if mine != points:
            raise UserError(
                f"the model answers with {mine} keypoints, but the label has {points}",
                where=definition.label,
            )
        sigmas = definition.options["sigmas"] or COCO_SIGMAS
        if len(sigmas) != points:
            raise UserError(
                f"{points} keypoints need {points} values of sigmas, not {len(sigmas)}",
                where=definition.label,
                remedy="In a pipeline, give the spread of each keypoint as a share of the "
                "object's size: `sigmas: [0.05, …]`. The default is that of COCO's 17 points of a "
                f"person. {CUSTOM_METRIC}",
            )
    return values


def find_strange_classes(label: Array, detections: Array) -> str:
    """Return a message if no detection has a class of the label; otherwise empty.

    The message is also empty if detections or the label's objects are missing.
    """
    answered = np.unique(detections[..., _CLASS][detections[..., _CLASS] != PADDING])
    known = np.unique(label[..., _OBJECT_CLASS][label[..., _OBJECT_CLASS] != PADDING])
    if not answered.size or not known.size or np.isin(answered, known).any():
        return ""
    spans = (f"{span[0]:.0f} to {span[-1]:.0f}" for span in (answered, known))
    return "no detection has a class of the label: classes {} instead of {}".format(*spans)


def _check_boxes(boxes: Array, column: int, where: str) -> None:
    """Check the corners and the class of each box."""
    category = boxes[..., column]
    _refuse(~np.isfinite(boxes).all(axis=2), "has NaN or infinity", where)
    _refuse(
        (category % 1 != 0) | (category < PADDING),
        "has a class that is not a whole number from 0",
        where,
    )
    swapped = (boxes[..., 2] < boxes[..., 0]) | (boxes[..., 3] < boxes[..., 1])
    _refuse(swapped, "has x2 < x1 or y2 < y1", where, f"{_BOXES[:1].upper()}{_BOXES[1:]}.", boxes)


def _refuse(
    wrong: Any, what: str, where: str, remedy: str = "", boxes: Array | None = None
) -> None:
    """Raise UserError with the first wrong box, if there is one.

    `wrong` has shape (rows, boxes).
    """
    if not wrong.any():
        return
    row, place = (int(number) for number in np.argwhere(wrong)[0])
    shown = ""
    if boxes is not None:
        shown = f": {', '.join(f'{value:g}' for value in boxes[row, place, :_CORNERS])}"
    raise UserError(f"row {row}: box {place} {what}{shown}", where=where, remedy=remedy)


def read_mask(outputs: Tensors) -> tuple[Array, int, int] | None:
    """Return the class of each pixel, and the numbers of classes and of rows with NaN.

    The number of classes is 0 if the output has classes, not scores. Return None if no output is a
    mask.
    """
    for array in outputs.values():
        kind = array.dtype.kind
        if array.ndim == 4 and kind == "f" and array.shape[1] > 1:
            classes = array.argmax(axis=1).astype(np.uint8 if array.shape[1] <= 256 else np.int32)
            return classes, array.shape[1], int(np.isnan(array).any(axis=(1, 2, 3)).sum())
        flat = array[:, 0] if array.ndim == 4 and array.shape[1] == 1 else array
        if flat.ndim == 3 and kind in "iub":
            return flat.astype(np.uint8) if kind == "b" else flat, 0, 0
        if flat.ndim == 3 and kind == "f":
            scores = flat.astype(np.float64)
            if ((scores < 0) | (scores > 1)).any():
                raise UserError(
                    "one score per pixel is read as a probability, but some scores are not between "
                    "0 and 1"
                )
            broken = int(np.isnan(scores).any(axis=(1, 2)).sum())
            return (scores > 1 / 2).astype(np.uint8), 2, broken
    return None


def prepare_mask(definition: MetricDefinition, label: Array | None) -> Array:
    """Return the label's class of each pixel, of shape (rows, height, width)."""
    if label is not None and label.ndim == 4 and label.shape[1] == 1:
        label = label[:, 0]
    if label is None or label.ndim != 3 or label.dtype.kind not in "iub":
        has = "there is none" if label is None else f"it is {label.dtype} {tuple(label.shape)}"
        raise UserError(
            f"the label must be the class of each pixel, (rows, height, width); {has}",
            where=definition.label,
        )
    return label.astype(np.uint8) if label.dtype.kind == "b" else label


def check_mask(definition: MetricDefinition, label: Array, classes: Array, columns: int) -> None:
    """Check that a model's mask has the shape and the classes of the label."""
    if classes.shape != label.shape:
        shapes = f"{tuple(classes.shape)} and {tuple(label.shape)}"
        raise UserError(
            f"masks of shapes {shapes} cannot be compared pixel by pixel",
            where=definition.label,
            remedy="Resize the model's mask in its graph or, in a pipeline, in the `decode` "
            "function.",
        )
    if not columns:
        return
    unknown = label >= columns
    if (ignore := definition.options["ignore"]) is not None:
        unknown &= label != ignore
    if unknown.any():
        row = int(np.argwhere(unknown.any(axis=(1, 2)))[0, 0])
        raise UserError(
            f"row {row}: the label has class {label[row][unknown[row]][0]}, but the model has "
            f"{columns} classes",
            where=definition.label,
            remedy="Number the classes of the label as the model numbers them. In a pipeline, set "
            "`ignore` to the value of pixels without a class.",
        )
