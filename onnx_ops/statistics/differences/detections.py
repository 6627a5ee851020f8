"""Explain the difference of two lists of detected objects, or of two labels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

Floats: TypeAlias = npt.NDArray[np.float64]

_BOXES = ("box", "boxes", "bbox", "bboxes")
_SCORES = ("score", "scores", "confidence", "confidences")
_LABELS = ("label", "labels", "class", "classes", "class_id", "class_ids", "category", "name")


@dataclass(frozen=True, slots=True, kw_only=True)
class Detections:
    """Boxes (n, 4), scores (n,) and labels of n objects, by falling score if known."""

    boxes: Floats
    scores: Floats | None
    labels: tuple[Any, ...] | None

    def __len__(self) -> int:
        return len(self.boxes)


def read_detections(value: Any) -> Detections | None:
    """Return the objects of a value; None if it has no boxes.

    A value is a list of mappings, a mapping of arrays, or an array (n, 4 to 6) with boxes, scores
    and classes. An array (n, 4) has boxes only if its columns can be corners.
    """
    if isinstance(value, Mapping):
        boxes = _find(value, _BOXES)
        return (
            None if boxes is None else _build(boxes, _find(value, _SCORES), _find(value, _LABELS))
        )
    if isinstance(value, np.ndarray):
        return _read_columns(value)
    if isinstance(value, (list, tuple)) and all(isinstance(one, Mapping) for one in value):
        return _read_mappings(value)
    return None


def _read_columns(value: npt.NDArray[Any]) -> Detections | None:
    columns = value.shape[1] if value.ndim == 2 else 0
    if not 4 <= columns <= 6 or (columns == 4 and not _are_corners(value)):
        return None
    scores = value[:, 4] if columns > 4 else None
    return _build(value[:, :4], scores, value[:, 5] if columns > 5 else None)


def _read_mappings(value: Sequence[Mapping[str, Any]]) -> Detections | None:
    parts = [[_find(one, names) for one in value] for names in (_BOXES, _SCORES, _LABELS)]
    known = [part if part and all(x is not None for x in part) else None for part in parts]
    return None if known[0] is None else _build(known[0], known[1], known[2])


def _are_corners(value: npt.NDArray[Any]) -> bool:
    """Return whether four columns are assumed to be box corners, not class scores."""
    return len(value) > 1 and bool((value[:, 2:] > value[:, :2]).all())


def _find(value: Mapping[str, Any], names: Sequence[str]) -> Any:
    return next((value[name] for name in names if name in value), None)


def _build(boxes: Any, scores: Any, labels: Any) -> Detections | None:
    try:
        places = np.asarray(boxes, dtype=np.float64).reshape(-1, 4)
        rates = None if scores is None else np.asarray(scores, dtype=np.float64).reshape(-1)
    except (TypeError, ValueError):
        return None
    names = None if labels is None else tuple(np.asarray(labels).reshape(-1).tolist())
    lengths = {len(part) for part in (places, rates, names) if part is not None}
    if len(lengths) != 1:
        return None
    if rates is not None:
        order = np.argsort(-rates, kind="stable")
        places, rates = places[order], rates[order]
        names = None if names is None else tuple(names[index] for index in order)
    return Detections(boxes=places, scores=rates, labels=names)


def explain_detections(reference: Any, value: Any) -> str:
    """Return how the candidate's objects differ from the reference.

    The result is empty if they are equal, or if the difference is unclear.
    """
    ours, theirs = read_detections(reference), read_detections(value)
    if ours is None or theirs is None:
        return ""
    if len(ours) != len(theirs):
        return _explain_count(ours, theirs)
    if not len(ours):
        return ""
    if box := _explain_boxes(ours.boxes, theirs.boxes):
        return box
    if ours.labels is not None and theirs.labels is not None and ours.labels != theirs.labels:
        return explain_labels(list(zip(ours.labels, theirs.labels, strict=True)))
    if ours.scores is not None and theirs.scores is not None:
        gap = float(np.abs(ours.scores - theirs.scores).max())
        return f"scores: they differ by up to {gap:.3g}" if gap > 1e-6 else ""
    return ""


def _explain_count(ours: Detections, theirs: Detections) -> str:
    counts = f"{len(theirs)} instead of {len(ours)} objects"
    more, fewer = (ours, theirs) if len(ours) > len(theirs) else (theirs, ours)
    side = "candidate" if fewer is theirs else "source"
    kept = _match(fewer.boxes, more.boxes)
    if kept is None:
        return f"detections: {counts}"
    dropped = [index for index in range(len(more)) if index not in kept]
    if more.scores is None:
        return _explain_unscored_count(kept, counts, side)
    lost = more.scores[dropped]
    remaining = more.scores[sorted(kept)]
    is_lowest = not len(remaining) or float(lost.max()) <= float(remaining.min())
    # If suppression drops several boxes, some of them usually have higher scores than a box that is
    # kept. A single dropped box can also have the lowest score.
    if (len(dropped) == 1 or not is_lowest) and _overlaps_kept(more, dropped, kept):
        return f"non-maximum suppression: {counts}; the {side} drops overlapping boxes"
    if is_lowest:
        if len(fewer) and len(fewer) % 5 == 0 and len(more) > len(fewer):
            return (
                f"limit or threshold: {counts}; the {side} keeps the {len(fewer)} highest scores, "
                f"and drops scores up to {lost.max():.3g}"
            )
        return f"score threshold: {counts}; the {side} drops scores up to {lost.max():.3g}"
    return f"detections: {counts}; the {side} drops objects whose scores are not the lowest"


def _explain_unscored_count(kept: set[int], counts: str, side: str) -> str:
    """Return the reason of different numbers of boxes without scores.

    `kept` are the places of the boxes that both sides have; `side` has only these.
    """
    if kept and kept == set(range(len(kept))):
        return f"limit: {counts}; the {side} keeps the first {len(kept)}"
    return f"detections: {counts}; the {side} keeps {len(kept)} of the same boxes"


def _match(fewer: Floats, more: Floats) -> set[int] | None:
    """Return the places in `more` of the boxes of `fewer`; None if a box is missing."""
    kept: set[int] = set()
    for box in fewer:
        tolerance = 1e-3 * (float(np.abs(box).max()) or 1.0)
        close = [
            index
            for index in np.nonzero((np.abs(more - box) <= tolerance).all(axis=1))[0]
            if int(index) not in kept
        ]
        if not close:
            return None
        kept.add(int(close[0]))
    return kept


def _overlaps_kept(more: Detections, dropped: Sequence[int], kept: set[int]) -> bool:
    """Return whether each dropped box overlaps a kept box whose score is not lower."""
    scores = more.scores
    if not dropped or not kept or scores is None:
        return False
    return all(
        any(
            _compute_iou(more.boxes[index], more.boxes[other]) > 0.1
            for other in kept
            if scores[other] >= scores[index]
        )
        for index in dropped
    )


def _compute_iou(a: Floats, b: Floats) -> float:
    """Return the intersection over union of two boxes x1, y1, x2, y2."""
    low, high = np.maximum(a[:2], b[:2]), np.minimum(a[2:], b[2:])
    common = float(np.prod(np.clip(high - low, 0.0, None)))
    total = float(np.prod(a[2:] - a[:2]) + np.prod(b[2:] - b[:2])) - common
    return common / total if total > 0 else 0.0


def _explain_boxes(ours: Floats, theirs: Floats) -> str:
    """Return the format, order or scale that makes boxes equal; empty if equal.

    Without one, the result states that the coordinates differ.
    """
    size = float(np.abs(ours).max()) or 1.0
    if _is_close(ours, theirs, size):
        return ""
    x1, y1, a, b = theirs.T
    formats = {
        "the candidate gives x, y, width, height instead of two corners": (x1, y1, x1 + a, y1 + b),
        "the candidate gives two corners instead of x, y, width, height": (x1, y1, a - x1, b - y1),
        "the candidate gives the center, width, height instead of two corners": (
            x1 - a / 2,
            y1 - b / 2,
            x1 + a / 2,
            y1 + b / 2,
        ),
        "the candidate gives two corners instead of the center, width, height": (
            (x1 + a) / 2,
            (y1 + b) / 2,
            a - x1,
            b - y1,
        ),
        "x and y are swapped": (y1, x1, b, a),
    }
    for name, columns in formats.items():
        if _is_close(ours, np.stack(columns, axis=1), size):
            return f"box format: {name}"
    order = np.lexsort(ours.T), np.lexsort(theirs.T)
    if _is_close(ours[order[0]], theirs[order[1]], size):
        return "order: the same boxes in another order"
    return _explain_coordinates(ours, theirs, size)


def _is_close(ours: Floats, theirs: Floats, size: float) -> bool:
    return bool((np.abs(ours - theirs) <= 2e-3 * size).all())


def _explain_coordinates(ours: Floats, theirs: Floats, size: float) -> str:
    """Return the scale and offset that make coordinates equal, if there are any.

    Coordinates differ in this way if only one side maps the boxes of a letterbox back. Without such
    a scale and offset, the result only states that the coordinates differ.
    """
    lines = []
    for columns in ((0, 2), (1, 3)):
        x, y = theirs[:, columns].reshape(-1), ours[:, columns].reshape(-1)
        variance = float(np.var(x))
        gain = float(np.cov(x, y, bias=True)[0, 1]) / variance if variance else 1.0
        offset = float(y.mean() - gain * x.mean())
        if np.abs(y - gain * x - offset).max() > 5e-3 * size:
            return "boxes: other coordinates"
        lines.append((gain, offset))
    shown = ", ".join(
        f"source {axis} = {g:.4g} × candidate {axis} + {o:.4g}"
        for axis, (g, o) in zip("xy", lines, strict=True)
    )
    return f"box coordinates: {shown} (scale or letterbox)"


def explain_labels(pairs: Sequence[tuple[Any, Any]]) -> str:
    """Return how labels differ: by a fixed mapping, or without one.

    The result is empty if all labels are equal, or if a single source label has one counterpart.

    Args:
        pairs: the source's and the candidate's label of each object or file.
    """
    mapping: dict[Any, Any] = {}
    for ours, theirs in pairs:
        if mapping.setdefault(ours, theirs) != theirs:
            share = sum(a != b for a, b in pairs)
            return f"labels: {share} of {len(pairs)} differ, without a fixed mapping"
    changed = {ours: theirs for ours, theirs in mapping.items() if ours != theirs}
    if not changed or len(mapping) < 2:
        return ""
    if all(isinstance(part, int) for pair in changed.items() for part in pair):
        offsets = {theirs - ours for ours, theirs in mapping.items()}
        if len(offsets) == 1:
            return f"label map: every class number differs by {next(iter(offsets)):+d}"
    shown = ", ".join(f"{ours} becomes {theirs}" for ours, theirs in list(changed.items())[:4])
    return f"label map: {shown}"
