"""Overlap of masks: IoU and Dice, from pixels summed over images.

The counts of pixels are those of all weighted images together, as in scikit-learn's
`jaccard_score` and `f1_score` of all pixels.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from onnx_ops.metric_formulas.statistic import (
    Array,
    MetricStatistic,
    Weights,
    find_class_step,
)

Overlap: TypeAlias = Literal["iou", "dice"]


def make_overlap_statistic(
    label: Array,
    answers: Array,
    overlap: Overlap,
    average: str | None = None,
    positive: int | None = None,
    ignore: int | None = None,
) -> MetricStatistic:
    """Return the overlap of predicted with labelled pixels.

    Args:
        label: class of each pixel, of shape (rows, height, width).
        answers: predicted classes, of the same shape.
        overlap: `iou` is hits / (labelled + predicted - hits), and `dice` is 2 * hits / (labelled +
            predicted). Hits are the pixels whose prediction is the label.
        average: `binary` is the overlap of the class `positive`, by default 1. `macro`, the
            default, is the mean over classes that occur in labels or answers. `weighted` is their
            mean weighted by their numbers of labelled pixels. `micro` is computed from the counts
            over all classes.
        ignore: class of labelled pixels that are not counted.
    """
    shown = 1 if positive is None else positive
    classes = _list_classes(label, answers, shown, ignore)
    hits, true, predicted = _count_pixels(label, answers, classes, ignore)
    total = true + predicted
    chosen = int(np.flatnonzero(classes == shown)[0])
    kind = average or "macro"

    def statistic(weights: Weights) -> npt.NDArray[np.float64]:
        counts = weights @ hits, weights @ true, weights @ total
        return _average(overlap, kind, chosen, *counts)

    holders = (true > 0).sum(axis=0)
    match kind:
        case "binary":
            step = 1 / max(1, int(holders[chosen]))
        case "macro":
            step = find_class_step(len(label), holders)
        case _:
            step = 1 / len(label)
    return MetricStatistic(statistic=statistic, reads=answers, step=step)


def _list_classes(label: Array, answers: Array, positive: int, ignore: int | None) -> Array:
    """Return the sorted classes of all pixels except `ignore`, and the positive class."""
    known = np.union1d(np.unique(label), np.unique(answers))
    return np.union1d(known[known != ignore] if ignore is not None else known, [positive])


def _count_pixels(
    label: Array, answers: Array, classes: Array, ignore: int | None
) -> tuple[Array, Array, Array]:
    """Count the correct, labelled and predicted pixels by row and class.

    Pixels with the label `ignore` are not counted.
    """
    counts = np.zeros((3, len(label), len(classes)))
    for row in range(len(label)):
        counted = np.ones(label[row].shape, np.bool_) if ignore is None else label[row] != ignore
        true, predicted = label[row][counted], answers[row][counted]
        for part, pixels in enumerate((true[true == predicted], true, predicted)):
            # A prediction can have the ignored class, which is not among the classes.
            found, number = np.unique(pixels, return_counts=True)
            places = np.minimum(np.searchsorted(classes, found), len(classes) - 1)
            known = classes[places] == found
            counts[part, row, places[known]] = number[known]
    return counts[0], counts[1], counts[2]


def _average(
    overlap: Overlap, average: str, positive: int, hits: Array, true: Array, total: Array
) -> npt.NDArray[np.float64]:
    """Return the overlap from weighted counts of pixels.

    The counts have the shape (resamples, classes).

    Args:
        positive: index of the positive class.
        hits: pixels whose prediction is the label.
        true: labelled pixels.
        total: labelled plus predicted pixels.
    """

    def divide(both: Array, all_pixels: Array) -> Array:
        return 2 * both / all_pixels if overlap == "dice" else both / (all_pixels - both)

    with np.errstate(all="ignore"):
        each = divide(hits, total)
        match average:
            case "binary":
                return np.asarray(each[:, positive])
            case "micro":
                return np.asarray(divide(hits.sum(axis=1), total.sum(axis=1)))
            case "macro":
                return np.asarray(np.nansum(each, axis=1) / (total > 0).sum(axis=1))
            case "weighted":
                return np.asarray(np.nansum(true * each, axis=1) / true.sum(axis=1))
            case _:
                raise ValueError(f"unknown average {average!r} of classes")
