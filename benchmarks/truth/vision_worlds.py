"""Populations of images on which detectors or segmentation models are compared.

Detections of a population are matched with its objects once. A sample then selects the matches of
its images, which takes much less time than to match them again. The rows of such a population are
the numbers of its images.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias

import numpy as np

from benchmarks.truth.metric_worlds import BASELINE, ROWS, Random, World
from onnx_ops.domain.gate import MetricDefinition, MetricGate
from onnx_ops.domain.task_metrics import METRICS, Options, Resampled
from onnx_ops.metric_formulas import MetricStatistic
from onnx_ops.metric_formulas.detection import (
    Matches,
    make_precision_statistic,
    make_recall_statistic,
    match_boxes,
    match_keypoints,
)
from onnx_ops.statistics.scores import CANDIDATE

SIDE = 12
"""Height and width of masks."""
POINTS = np.array([[0.5, 0.1], [0.1, 0.4], [0.9, 0.4], [0.3, 0.9], [0.7, 0.9]])
"""Places of the keypoints in an object's box, as shares of its width and height."""
SIGMAS = (0.15,) * len(POINTS)

Populate: TypeAlias = Callable[[Random, Any], tuple[Any, Mapping[str, Any]]]
"""Draws the objects of all images, and the detections of two models."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Street:
    """A kind of images with objects.

    Args:
        shares: relative frequency of each class.
        objects: mean number of objects in an image.
        skill: evidence of an object in an image of usual difficulty, in logits.
        false: mean number of false detections in an image.
        jitter: standard deviation of a corner, as a share of the object's size.
        change: size of the candidate's own noise.
        spread: standard deviation of the difficulty of images.
    """

    shares: tuple[float, ...]
    objects: float = 2.0
    skill: float = 2.0
    false: float = 2.0
    jitter: float = 0.05
    change: float = 0.3
    spread: float = 1.0


STREETS = {
    "one class": Street(shares=(1,)),
    "rare classes": Street(shares=tuple(1 / rank for rank in range(1, 21)), objects=3.0),
    "few mistakes": Street(shares=(5, 3, 2), skill=6.0, false=0.1, jitter=0.02, change=0.15),
    "unequal images": Street(shares=(5, 3, 2), skill=1.0, jitter=0.07, change=1.0, spread=2.5),
}


def populate_street(street: Street, random: Random, effect: Any) -> tuple[Any, Mapping[str, Any]]:
    """Draw objects, and the detections of two models, as padded arrays."""
    hard = street.spread * (random.standard_normal(ROWS) + effect) / np.sqrt(2)
    image = np.repeat(np.arange(ROWS), random.poisson(street.objects, ROWS))
    boxes, classes = _draw_boxes(street, random, len(image))
    size = np.sqrt((boxes[:, 2:] - boxes[:, :2]).prod(axis=1))[:, None]
    other = np.repeat(np.arange(ROWS), random.poisson(street.false * np.exp(0.3 * hard)))
    false_boxes, false_classes = _draw_boxes(street, random, len(other))
    found = boxes + street.jitter * size * random.standard_normal(boxes.shape)
    evidence = np.concatenate(
        [
            street.skill - hard[image] + random.logistic(size=len(image)),
            random.normal(-1.5, 1, len(other)),
        ]
    )
    places = np.concatenate([image, other])
    before = (
        np.concatenate([found, false_boxes]),
        evidence,
        np.concatenate([classes, false_classes]),
    )
    moved = before[0].copy()
    noise = random.standard_normal(boxes.shape)
    moved[: len(boxes)] += 0.06 * street.change * size * noise
    after_evidence = evidence + street.change * random.standard_normal(len(evidence))
    after_evidence[: len(boxes)] -= 0.3 * street.change
    swapped = random.random(len(evidence)) < 0.03 * street.change
    after_classes = np.where(swapped, random.permutation(before[2]), before[2])
    label = _pad(image, np.column_stack([boxes, classes]), 4)
    return label, {
        BASELINE: _detect(places, *before),
        CANDIDATE: _detect(places, moved, after_evidence, after_classes),
    }


def _draw_boxes(street: Street, random: Random, count: int) -> tuple[Any, Any]:
    """Return corners and classes."""
    corner, size = random.uniform(0, 500, (count, 2)), np.exp(random.normal(3.5, 0.5, (count, 2)))
    shares = np.array(street.shares) / sum(street.shares)
    classes = random.choice(len(shares), count, p=shares)
    return np.concatenate([corner, corner + size], axis=1), classes


def _detect(image: Any, boxes: Any, evidence: Any, classes: Any) -> Any:
    """Return the detections of one model, with equal scores by rounding to 3 digits."""
    kept = evidence > -2.5
    boxes = boxes.copy()
    boxes[:, 2:] = np.maximum(boxes[:, 2:], boxes[:, :2] + 1)
    scores = np.round(1 / (1 + np.exp(-evidence)), 3)
    return _pad(image[kept], np.column_stack([boxes, scores, classes])[kept], 5)


def _pad(image: Any, entries: Any, column: int) -> Any:
    """Return entries by image; places without an entry have the class -1 in `column`."""
    order = np.argsort(image, kind="stable")
    image, entries = image[order], entries[order]
    count = np.bincount(image, minlength=ROWS)
    place = np.arange(len(image)) - np.repeat(np.cumsum(count) - count, count)
    padded = np.zeros((ROWS, int(count.max()), entries.shape[1]))
    padded[..., column] = -1
    padded[image, place] = entries
    return padded


def select_images(matches: Matches, images: Any) -> Matches:
    """Return the matches of some images, which can occur more than once."""
    order = np.argsort(matches.image, kind="stable")
    begins = np.searchsorted(matches.image[order], np.arange(matches.images + 1))
    count = begins[images + 1] - begins[images]
    place = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count)
    chosen = order[np.repeat(begins[images], count) + place]
    image = np.repeat(np.arange(len(images)), count)
    by_class = np.argsort(matches.category[chosen], kind="stable")
    chosen, image = chosen[by_class], image[by_class]
    return Matches(
        images=len(images),
        objects=matches.objects[:, images].tocsr(),
        image=image,
        category=matches.category[chosen],
        score=matches.score[chosen],
        right=matches.right[chosen],
        ignored=matches.ignored[chosen],
    )


def populate_poses(street: Street, random: Random, effect: Any) -> tuple[Any, Mapping[str, Any]]:
    """Draw objects with keypoints, and the detections of two models.

    One of five keypoints is invisible. An object whose keypoints are all invisible is ignored.
    """
    label, answers = populate_street(street, random, effect)
    size = label[..., 2:4] - label[..., :2]
    crowd, area = np.zeros(size.shape[:2]), 0.5 * size.prod(axis=-1)
    visible = 2 * (random.random((*size.shape[:2], len(POINTS))) < 0.8)
    objects = [label, crowd[..., None], area[..., None], _place_points(label, 0, visible, random)]
    detections = {
        side: _place_points(boxes, street.jitter, np.ones((*boxes.shape[:2], len(POINTS))), random)
        for side, boxes in answers.items()
    }
    return np.concatenate(objects, axis=-1), {
        side: np.concatenate([boxes, detections[side]], axis=-1) for side, boxes in answers.items()
    }


def _place_points(boxes: Any, jitter: float, visible: Any, random: Random) -> Any:
    """Return x, y and visibility of the keypoints in boxes.

    The shape is (rows, boxes, 3 * points). `jitter` is the standard deviation of a keypoint, as a
    share of the box's width and height.
    """
    corner, size = boxes[..., None, :2], boxes[..., None, 2:4] - boxes[..., None, :2]
    noise = jitter * random.standard_normal((*visible.shape, 2))
    points = np.concatenate([corner + (POINTS + noise) * size, visible[..., None]], axis=-1)
    return points.reshape(*points.shape[:2], -1)


def make_image_world(
    name: str, metric: str, populate: Populate, match: Callable[[Any, Any], Matches]
) -> World:
    """Return a world whose rows are image numbers, and add its metric to `METRICS`.

    Answers are `number * 2` for the candidate and `number * 2 + 1` for the baseline.
    """
    pools: list[Matches] = []

    def number_images(random: Random, effect: Any) -> tuple[Any, Mapping[str, Any]]:
        label, answers = populate(random, effect)
        pools[:] = [match(label, answers[side]) for side in (CANDIDATE, BASELINE)]
        numbers = np.arange(ROWS)
        return numbers, {CANDIDATE: 2 * numbers, BASELINE: 2 * numbers + 1}

    def make(label: Any, answers: Any, _: Options) -> MetricStatistic:
        matches = select_images(pools[int(answers[0]) % 2], label)
        build = make_recall_statistic if metric == "ar" else make_precision_statistic
        return build(matches, answers)

    METRICS[name] = replace(METRICS[metric], method=Resampled(make=make))
    return World(definition=MetricDefinition(name=name), populate=number_images)


def populate_masks(random: Random, effect: Any) -> tuple[Any, Mapping[str, Any]]:
    """Draw masks of rectangles; the last of the classes 0 to 3 is in one of 20 images."""
    rows, columns = np.mgrid[:SIDE, :SIDE]
    label = np.zeros((ROWS, SIDE, SIDE), dtype=np.uint8)
    for category, share in ((1, 0.9), (2, 0.6), (3, 0.05)):
        begin = random.integers(0, SIDE - 2, (ROWS, 2, 1, 1))
        size = random.integers(2, SIDE, (ROWS, 2, 1, 1))
        inside = (
            (rows >= begin[:, 0])
            & (rows < begin[:, 0] + size[:, 0])
            & (columns >= begin[:, 1])
            & (columns < begin[:, 1] + size[:, 1])
        )
        label[inside & (random.random((ROWS, 1, 1)) < share)] = category
    wrong = 1 / (1 + np.exp(2.5 - effect - random.standard_normal(ROWS)))[:, None, None]
    before = _change_pixels(random, label, wrong)
    changed = (random.random(ROWS) < 0.3)[:, None, None]
    after = np.where(changed, _change_pixels(random, before, 0.3 * wrong), before)
    return label, {CANDIDATE: after, BASELINE: before}


def _change_pixels(random: Random, masks: Any, share: Any) -> Any:
    chosen = random.random(masks.shape) < share
    return np.where(chosen, random.integers(0, 4, masks.shape, dtype=np.uint8), masks)


def list_image_worlds() -> dict[str, World]:
    """Return the worlds of detections, by name."""
    worlds = {}

    def add(
        name: str, metric: str, populate: Populate, match: Callable[[Any, Any], Matches]
    ) -> None:
        worlds[name] = make_image_world(name, metric, populate, match)

    for name, street in STREETS.items():
        add(f"map, {name}", "map", partial(populate_street, street), match_boxes)
    for name, street in STREETS.items():
        match = partial(match_boxes, iou=0.5)
        add(f"map iou:0.5, {name}", "map", partial(populate_street, street), match)
    rare = partial(populate_street, STREETS["rare classes"])
    add("ar, rare classes", "ar", rare, match_boxes)
    for name in ("one class", "unequal images"):
        populate = partial(populate_poses, STREETS[name])
        match = partial(match_keypoints, sigmas=SIGMAS)
        add(f"keypoints_ap, {name}", "keypoints_ap", populate, match)
    return worlds


VISION_WORLDS: dict[str, World] = {
    **list_image_worlds(),
    "iou": World(definition=MetricGate(name="iou").definition(), populate=populate_masks),
    "dice": World(
        definition=MetricGate(name="dice", positive=3).definition(), populate=populate_masks
    ),
}
