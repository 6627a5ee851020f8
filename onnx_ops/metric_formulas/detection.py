"""Average precision and recall of detected boxes and keypoints.

pycocotools matches detections with objects in each image (`COCOeval.evaluate`). The sums over
images are computed here, because pycocotools cannot weight images. With all weights equal to 1, the
results are those of `COCOeval.accumulate` and `COCOeval.summarize`.

Rows are images. An array of detections has shape (rows, detections, columns), and unused places
have the class `PADDING`.
"""

from __future__ import annotations

import contextlib
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from onnx_ops.metric_formulas.statistic import (
    Array,
    MetricStatistic,
    Statistic,
    Weights,
    find_class_step,
)

PADDING = -1
"""Class of a place without a box."""

BOX_COLUMNS = 6
"""Columns of a detection before its keypoints: x1, y1, x2, y2, score, class."""

OBJECT_COLUMNS = 6
"""Columns of an object: x1, y1, x2, y2, class, crowd (optional, default 0)."""

POSE_COLUMNS = 7
"""Columns before the keypoints: `OBJECT_COLUMNS`, then the area in pixels."""

POINT_COLUMNS = 3
"""Columns of a keypoint: x, y, then visibility (object) or score (detection)."""

COCO_SIGMAS = (
    *(0.026, 0.025, 0.025, 0.035, 0.035, 0.079, 0.079, 0.072, 0.072),
    *(0.062, 0.062, 0.107, 0.107, 0.087, 0.087, 0.089, 0.089),
)
"""Spread of COCO's 17 keypoints, as a share of the square root of a person's area."""

_IOU_STEPS = np.linspace(0.5, 0.95, 10)
"""Thresholds 0.5, 0.55, …, 0.95, as in `pycocotools.cocoeval.Params`."""

_RECALL_STEPS = np.linspace(0.0, 1.0, 101)
"""Recalls at which the precision is read, as in `pycocotools.cocoeval.Params`."""

_BLOCK = 256
"""Number of images in a call of pycocotools, which stores a dict for each box."""

_CELLS = 1 << 17
"""Maximum size of an intermediate array: detections times resamples.

Larger arrays leave the processor's cache, and take about twice as long. An array has at least 8
resamples, even if they exceed the maximum.
"""

Kind: TypeAlias = Literal["bbox", "keypoints"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Matches:
    """Detections of all images, matched with the objects of their class.

    Args:
        images: number of images.
        objects: number of objects that count, by class and image: (classes, images), sparse.
        image: image of each detection, of shape (detections,).
        category: number of each detection's class.
        score: score of each detection.
        right: whether each detection matches an object, by threshold: (detections, thresholds).
        ignored: whether each detection counts neither as right nor as wrong, of the same shape.
            Such a detection matches a crowd, or an object without a visible keypoint.
    """

    images: int
    objects: Any
    image: npt.NDArray[np.intp]
    category: npt.NDArray[np.intp]
    score: npt.NDArray[np.float64]
    right: npt.NDArray[np.bool_]
    ignored: npt.NDArray[np.bool_]


def match_boxes(
    label: Array, answers: Array, iou: float | None = None, max_detections: int = 100
) -> Matches:
    """Match detected boxes with objects.

    Args:
        label: objects, of shape (rows, objects, 5 or 6).
        answers: detections, of shape (rows, detections, 6).
        iou: least intersection over union of a match; None for the thresholds 0.5, 0.55, …, 0.95.
        max_detections: number of best detections per image and class that count.
    """
    return _match("bbox", label, answers, iou, max_detections)


def match_keypoints(
    label: Array,
    answers: Array,
    iou: float | None = None,
    max_detections: int = 20,
    sigmas: Sequence[float] = COCO_SIGMAS,
) -> Matches:
    """Match detected keypoints with objects, by object keypoint similarity (OKS).

    Args:
        label: objects with keypoints, of shape (rows, objects, 7 + 3 * keypoints).
        answers: detections with keypoints, of shape (rows, detections, 6 + 3 * keypoints).
        iou: least similarity of a match; None for the thresholds 0.5, 0.55, …, 0.95.
        max_detections: number of best detections per image and class that count.
        sigmas: spread of each keypoint, as a share of the square root of the object's area.
    """
    return _match("keypoints", label, answers, iou, max_detections, sigmas)


def _match(
    kind: Kind,
    label: Array,
    answers: Array,
    iou: float | None,
    max_detections: int,
    sigmas: Sequence[float] = COCO_SIGMAS,
) -> Matches:
    from scipy import sparse  # The import is local, since few metrics need it.

    classes = np.unique(label[..., 4][label[..., 4] != PADDING])
    thresholds = _IOU_STEPS if iou is None else np.array([iou])
    found: list[tuple[Array, Array, Array, Array, Array]] = []
    objects: list[tuple[int, int, int]] = []
    for start in range(0, len(label), _BLOCK):
        rows = slice(start, start + _BLOCK)
        results = _evaluate(
            kind, label[rows], answers[rows], classes, thresholds, max_detections, sigmas
        )
        for result in results:
            image = start + result["image_id"] - 1
            category = int(np.searchsorted(classes, result["category_id"]))
            objects.append((category, image, int(np.sum(np.equal(result["gtIgnore"], 0)))))
            scores = np.asarray(result["dtScores"], dtype=np.float64)
            matched, ignored = result["dtMatches"].T != 0, result["dtIgnore"].T != 0
            places = np.full(len(scores), image), np.full(len(scores), category)
            found.append((*places, scores, matched & ~ignored, ignored))
    shape = len(classes), len(label)
    cells = np.array(objects, dtype=np.intp).reshape(-1, 3)
    count = cells[:, 2].astype(np.float64)
    if found:
        joined = [np.concatenate(parts) for parts in zip(*found, strict=True)]
    else:
        none = np.zeros((0, len(thresholds)), dtype=np.bool_)
        joined = [np.zeros(0, np.intp), np.zeros(0, np.intp), np.zeros(0), none, none]
    # Each block contains all classes of some images. pycocotools orders the detections by class
    # first, and then by image.
    order = np.argsort(joined[1], kind="stable")
    images, categories, scores, right, ignored = (part[order] for part in joined)
    return Matches(
        images=len(label),
        objects=sparse.csr_array((count, (cells[:, 0], cells[:, 1])), shape=shape),
        image=images,
        category=categories,
        score=scores,
        right=right,
        ignored=ignored,
    )


def _evaluate(
    kind: Kind,
    label: Array,
    answers: Array,
    classes: Array,
    thresholds: Array,
    max_detections: int,
    sigmas: Sequence[float],
) -> list[dict[str, Any]]:
    """Return pycocotools' results for each class and image with objects or detections.

    Images have the ids 1, 2, …
    """
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    frame = {
        "images": [{"id": number + 1} for number in range(len(label))],
        "categories": [{"id": value} for value in classes.tolist()],
    }
    sides = []
    with contextlib.redirect_stdout(io.StringIO()):  # pycocotools prints its progress
        for annotations in (_list_objects(kind, label), _list_detections(kind, answers, classes)):
            side = COCO()
            side.dataset = frame | {"annotations": annotations}
            side.createIndex()
            sides.append(side)
        evaluation = COCOeval(*sides, kind)
        parameters = evaluation.params
        parameters.iouThrs, parameters.maxDets = thresholds, [max_detections]
        parameters.areaRng, parameters.areaRngLbl = parameters.areaRng[:1], ["all"]
        if kind == "keypoints":
            parameters.kpt_oks_sigmas = np.asarray(sigmas, dtype=np.float64)
        evaluation.evaluate()
    return [result for result in evaluation.evalImgs if result is not None]


def _list_objects(kind: Kind, label: Array) -> list[dict[str, Any]]:
    """Return the objects as pycocotools reads them.

    The ids begin with 1, since the id 0 means that a detection has no match.
    """
    image, place = np.nonzero(label[..., 4] != PADDING)
    annotations = []
    for number, (row, columns) in enumerate(zip(image, label[image, place].tolist(), strict=True)):
        x1, y1, x2, y2, category = columns[:5]
        area = (x2 - x1) * (y2 - y1)
        entry = {
            "id": number + 1,
            "image_id": int(row) + 1,
            "category_id": category,
            "bbox": [x1, y1, x2 - x1, y2 - y1],
            "area": area if kind == "bbox" else columns[OBJECT_COLUMNS],
            "iscrowd": int(len(columns) >= OBJECT_COLUMNS and columns[OBJECT_COLUMNS - 1] != 0),
        }
        if kind == "keypoints":
            points = columns[POSE_COLUMNS:]
            entry["keypoints"] = points
            entry["num_keypoints"] = sum(visible > 0 for visible in points[2::POINT_COLUMNS])
        annotations.append(entry)
    return annotations


def _list_detections(kind: Kind, answers: Array, classes: Array) -> list[dict[str, Any]]:
    """Return the detections as pycocotools reads them.

    Detections of classes without an object are omitted, since the precision of such classes is
    undefined.
    """
    image, place = np.nonzero(np.isin(answers[..., 5], classes))
    annotations = []
    for number, (row, columns) in enumerate(
        zip(image, answers[image, place].tolist(), strict=True)
    ):
        x1, y1, x2, y2, score, category = columns[:BOX_COLUMNS]
        entry = {
            "id": number + 1,
            "image_id": int(row) + 1,
            "category_id": category,
            "bbox": [x1, y1, x2 - x1, y2 - y1],
            "area": (x2 - x1) * (y2 - y1),
            "iscrowd": 0,
            "score": score,
        }
        if kind == "keypoints":
            points = columns[BOX_COLUMNS:]
            xs, ys = points[::POINT_COLUMNS], points[1::POINT_COLUMNS]
            entry["keypoints"] = points
            # `COCO.loadRes` also computes the area of keypoints in this way.
            entry["area"] = (max(xs) - min(xs)) * (max(ys) - min(ys))
        annotations.append(entry)
    return annotations


def make_precision_statistic(matches: Matches, answers: Array) -> MetricStatistic:
    """Return the mean average precision of one model."""
    precision = AveragePrecision(matches)
    return MetricStatistic(
        statistic=precision.interpolated,
        plain=precision.plain,
        jump=find_recall_jump(matches),
        reads=answers,
        step=find_class_step(matches.images, (matches.objects > 0).sum(axis=1)),
    )


def find_recall_jump(matches: Matches) -> float:
    """Return the change of the mean average precision at the next recall steps.

    The precision is read at 101 recalls. Whether a class reaches the next recall depends on single
    objects. With one class and one threshold, the metric then changes by 1/101 of the last
    precision. If the recalls of a class are near the same step at several thresholds, the same
    objects decide. These jumps are therefore added. Other jumps are added as independent changes.
    """
    objects = np.asarray(matches.objects.sum(axis=1)).ravel()
    known = int((objects > 0).sum())
    squares = 0.0
    for number in np.flatnonzero(objects > 0):
        chosen = np.flatnonzero(matches.category == number)
        chosen = chosen[np.argsort(-matches.score[chosen], kind="stable")]
        counted = np.cumsum(~matches.ignored[chosen], axis=0)
        jumps: dict[tuple[int, int], float] = {}
        for right, count in zip(matches.right[chosen].T, counted.T, strict=True):
            places = np.flatnonzero(right)
            if not places.size:
                continue
            recall, size = len(places) / objects[number], objects[number]
            # Even if all `size` objects are found, up to 3 of another `size` objects can be missed
            # (rule of three).
            reach = 2 * np.sqrt(recall * (1 - recall) / size) + 3 / size
            steps = math.floor(100 * (recall - reach)), math.floor(100 * min(recall + reach, 1))
            if steps[0] < steps[1]:
                jumps[steps] = jumps.get(steps, 0.0) + len(places) / count[places[-1]]
        squares += sum(jump**2 for jump in jumps.values())
    curves = matches.right.shape[1] * max(1, known)
    return float(np.sqrt(squares) / (len(_RECALL_STEPS) * curves))


def make_recall_statistic(matches: Matches, answers: Array) -> MetricStatistic:
    """Return the mean recall of one model."""
    return MetricStatistic(
        statistic=average_recall(matches),
        reads=answers,
        step=find_class_step(matches.images, (matches.objects > 0).sum(axis=1)),
    )


def average_recall(matches: Matches) -> Statistic:
    """Return the statistic for the mean recall over classes and thresholds.

    The mean is over classes with an object.
    """
    from scipy import sparse

    cells = (matches.category, matches.image)
    share = matches.right.mean(axis=1)
    right = sparse.csr_array((share, cells), shape=matches.objects.shape)

    def statistic(weights: Weights) -> npt.NDArray[np.float64]:
        by_image = np.ascontiguousarray(weights.T)
        with np.errstate(all="ignore"):
            return _average(right @ by_image / (matches.objects @ by_image))

    return statistic


class AveragePrecision:
    """Mean average precision as a function of image weights.

    The mean is over thresholds and classes with an object. If an image has the weight w, each of
    its detections counts as w successive detections in the order of scores.
    """

    def __init__(self, matches: Matches) -> None:
        self._objects = matches.objects
        self._curves = [
            _Curves.build(matches, number) for number in range(matches.objects.shape[0])
        ]
        self._weights: Weights | None = None
        self._values: npt.NDArray[np.float64] = np.zeros((2, 0))

    def interpolated(self, weights: Weights) -> npt.NDArray[np.float64]:
        """Return the metric of COCO.

        The precision at a recall is the best precision at this or any higher recall.
        """
        return np.asarray(self._compute(weights)[0])

    def plain(self, weights: Weights) -> npt.NDArray[np.float64]:
        """Return the metric from precisions that are not interpolated.

        The metric of COCO is too high in small samples for two reasons. Interpolation takes the
        best of several noisy precisions, and the precision at a right detection counts this
        detection itself. This method does not interpolate, and counts only the detections before
        the right detection. Its result has little bias. For many images, it approaches COCO's
        metric if precision falls with recall.
        """
        return np.asarray(self._compute(weights)[1])

    def _compute(self, weights: Weights) -> npt.NDArray[np.float64]:
        """Return both values, from the cache if the weights are the same object as before."""
        if self._weights is not weights:
            by_image = np.ascontiguousarray(weights.T)
            objects = self._objects @ by_image
            values = [
                curve.average(by_image, count)
                for curve, count in zip(self._curves, objects, strict=True)
            ] or [np.full((2, len(weights)), np.nan)]
            self._values = _average(np.stack(values))
            self._weights = weights
        return self._values


def _average(values: Array) -> npt.NDArray[np.float64]:
    """Return the mean over classes; NaN values do not count."""
    defined = np.isfinite(values)
    with np.errstate(all="ignore"):
        return np.asarray(np.where(defined, values, 0).sum(axis=0) / defined.sum(axis=0))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Curves:
    """The curves of precision and recall of one class, one for each threshold.

    The best precision at a recall is always that of a right detection, so curves consist of right
    detections only. `parts` has one entry for all thresholds. If a detection is ignored, it has one
    entry for each threshold with a right detection. An entry consists of:

    - a matrix that sums the weights of detections between right ones: (right detections at any
      threshold of the entry, images);
    - for each threshold, the places of its right detections in this matrix, and their images.
    """

    parts: Sequence[tuple[Any, Sequence[tuple[Array, Array]]]]
    thresholds: int
    size: int

    @classmethod
    def build(cls, matches: Matches, number: int) -> _Curves:
        """Build the curves of a class; the order of images decides ties of scores."""
        chosen = np.flatnonzero(matches.category == number)
        chosen = chosen[np.argsort(-matches.score[chosen], kind="stable")]
        image, right, ignored = (
            matches.image[chosen],
            matches.right[chosen],
            matches.ignored[chosen],
        )
        everywhere = np.arange(right.shape[1])
        sets = [everywhere] if not ignored.any() else [everywhere[t : t + 1] for t in everywhere]
        parts = []
        for thresholds in sets:
            ends = np.flatnonzero(right[:, thresholds].any(axis=1))
            if not ends.size:
                continue
            counted = np.flatnonzero(~ignored[: ends[-1] + 1, thresholds[0]])
            sums = _sum_between(image, counted, ends, matches.images)
            of_thresholds = []
            for threshold in thresholds:
                numbers = np.flatnonzero(right[ends, threshold])
                of_thresholds.append((numbers, image[ends[numbers]]))
            parts.append((sums, of_thresholds))
        return cls(
            parts=parts,
            thresholds=len(everywhere),
            size=max((part[0].shape[0] for part in parts), default=1),
        )

    def average(self, by_image: Array, objects: Array) -> npt.NDArray[np.float64]:
        """Return the average precision, interpolated and plain, of shape (2, resamples).

        The result is NaN where no object has a weight.

        Args:
            by_image: weights of the images, of shape (images, resamples).
            objects: sum of the weights of the class' objects, of shape (resamples,).
        """
        width = max(8, _CELLS // self.size)
        result = np.empty((2, by_image.shape[1]))
        for start in range(0, by_image.shape[1], width):
            some = slice(start, start + width)
            result[:, some] = self._average(by_image[:, some], objects[some])
        return np.where(objects > 0, result, np.nan)

    def _average(self, by_image: Array, objects: Array) -> npt.NDArray[np.float64]:
        total = np.zeros((2, by_image.shape[1]))
        least = np.maximum(objects, 1)
        for sums, of_thresholds in self.parts:
            counted = np.cumsum(sums @ by_image, axis=0)
            for numbers, image in of_thresholds:
                if numbers.size:
                    total += _integrate(by_image[image], counted[numbers], least)
        return total / (self.thresholds * len(_RECALL_STEPS))


def _sum_between(image: Array, counted: Array, ends: Array, images: int) -> Any:
    """Return the matrix that sums the weights of the detections between the ends.

    Each row sums the counted detections after the previous end, up to its own end.

    Args:
        image: image of each detection.
        counted: the detections that count, up to the last end.
        ends: places of the right detections, ascending.
        images: number of images.
    """
    from scipy import sparse

    cells = np.searchsorted(ends, counted), image[counted]
    return sparse.csr_array((np.ones(len(counted)), cells), shape=(len(ends), images))


def _integrate(right: Array, counted: Array, objects: Array) -> npt.NDArray[np.float64]:
    """Return the sums of the precisions at `_RECALL_STEPS`, interpolated and plain.

    Args:
        right: weights of right detections, best first: (detections, resamples).
        counted: sum of the weights of the counted detections up to each right one.
        objects: weights of the objects, of shape (resamples,).
    """
    hits = np.cumsum(right, axis=0)
    precision = hits / (counted + np.spacing(1))
    best = np.maximum.accumulate(precision[::-1], axis=0)[::-1]
    others = counted - right
    plain = np.divide(hits - right, others, out=precision, where=others > 0)
    # `steps` becomes the number of recall steps that each right detection is the first to reach.
    # Recalls are compared as in pycocotools: 0.29 does not reach 0.29000000000000004.
    recall = hits / objects
    steps = (recall * 100 + 1e-9).astype(np.intp)
    steps += _RECALL_STEPS[steps] <= recall
    steps[1:] -= steps[:-1].copy()
    return np.stack([np.einsum("ij,ij->j", curve, steps) for curve in (best, plain)])
