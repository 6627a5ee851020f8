"""Metrics of boxes, keypoints and masks against pycocotools, faster-coco-eval and scikit-learn.

Cases are new in each run; a failing test shows their seed.
"""

from __future__ import annotations

import contextlib
import io
import secrets
import sys
from typing import Any

import numpy as np
import pytest

from onnx_ops.domain.gate import MetricDefinition
from onnx_ops.metric_formulas.detection import (
    COCO_SIGMAS,
    AveragePrecision,
    average_recall,
    find_recall_jump,
    match_boxes,
    match_keypoints,
)
from onnx_ops.metric_formulas.masks import Overlap, make_overlap_statistic
from onnx_ops.statistics.scores import CANDIDATE, build_metric_statistic, score

CASES = 200
POINTS = len(COCO_SIGMAS)


def make_seeded() -> np.random.Generator:
    seed = secrets.randbits(32)
    sys.stdout.write(f"seed {seed}\n")
    return np.random.default_rng(seed)


def draw_boxes(rng: np.random.Generator, images: int, classes: int, places: int) -> tuple[Any, Any]:
    """Draw objects and detections with crowds, ties of scores and images without objects."""
    label = np.zeros((images, max(1, places), 6))
    answers = np.zeros((images, max(1, 2 * places), 6))
    label[..., 4] = answers[..., 5] = -1
    for image in range(images):
        objects = int(rng.integers(0, places + 1))
        for place in range(objects):
            corner, size = rng.uniform(0, 80, 2), rng.uniform(5, 40, 2)
            crowd = rng.random() < 0.15
            label[image, place] = [*corner, *(corner + size), rng.integers(0, classes), crowd]
        for place in range(int(rng.integers(0, 2 * places + 1))):
            corner, size = rng.uniform(0, 80, 2), rng.uniform(5, 40, 2)
            box, category = [*corner, *(corner + size)], rng.integers(0, classes + 1)
            if objects and rng.random() < 0.7:
                near = label[image, rng.integers(0, objects)]
                box = near[:4] + rng.normal(0, rng.choice([0.5, 3]), 4)
                box[2:] = np.maximum(box[2:], box[:2] + 0.1)
                category = near[4] if rng.random() < 0.8 else category
            value = rng.random()
            answers[image, place] = [
                *box,
                round(value, 1) if rng.random() < 0.6 else value,
                category,
            ]
    return label, answers


def draw_poses(rng: np.random.Generator, images: int) -> tuple[Any, Any]:
    """Draw persons with keypoints; some keypoints of some persons are not visible."""
    label, answers = draw_boxes(rng, images, 1, 4)
    seen = (
        rng.integers(0, 3, (*label.shape[:2], POINTS))
        * (rng.random(label.shape[:2]) < 0.9)[..., None]
    )
    points = rng.uniform(0, 100, (*label.shape[:2], POINTS, 2))
    objects = np.concatenate([points, seen[..., None]], axis=3).reshape(*label.shape[:2], -1)
    area = (label[..., 2] - label[..., 0]) * (label[..., 3] - label[..., 1]) / 2
    found = rng.uniform(0, 100, (*answers.shape[:2], POINTS, 3))
    for image, place in np.argwhere(rng.random(answers.shape[:2]) < 0.7):
        near = points[image, rng.integers(0, label.shape[1])]
        found[image, place, :, :2] = near + rng.normal(0, rng.choice([0.3, 2]), near.shape)
    return (
        np.concatenate([label, area[..., None], objects], axis=2),
        np.concatenate([answers, found.reshape(*answers.shape[:2], -1)], axis=2),
    )


def list_annotations(boxes: Any, score: bool) -> list[dict[str, Any]]:
    """Return boxes in the format of COCO's files."""
    entries: list[dict[str, Any]] = []
    for image, row in enumerate(boxes.tolist()):
        for box in row:
            category = box[5 if score else 4]
            if category < 0:
                continue
            x1, y1, x2, y2 = box[:4]
            entry = {
                "id": len(entries) + 1,
                "image_id": image + 1,
                "category_id": int(category) + 1,
                "bbox": [x1, y1, x2 - x1, y2 - y1],
            }
            points = box[6 if score else 7 :]
            if score:
                entry["score"] = box[4]
            else:
                entry |= {"area": (x2 - x1) * (y2 - y1), "iscrowd": int(box[5])}
            if points:
                entry["keypoints"] = points
                if score:
                    del entry["bbox"]
                else:
                    entry |= {"area": box[6], "num_keypoints": int(sum(np.array(points[2::3]) > 0))}
            entries.append(entry)
    return entries


def evaluate_with(
    coco: Any, evaluation: Any, label: Any, answers: Any, kind: str, most: int
) -> Any:
    """Return (precision, recall) by threshold and class, as a library computes them."""
    with contextlib.redirect_stdout(io.StringIO()):
        truth = coco()
        classes = int(max(label[..., 4].max(), answers[..., 5].max())) + 1
        truth.dataset = {
            "images": [{"id": number + 1} for number in range(len(label))],
            "categories": [{"id": number + 1, "name": str(number)} for number in range(classes)],
            "annotations": list_annotations(label, score=False),
        }
        truth.createIndex()
        run = evaluation(truth, truth.loadRes(list_annotations(answers, score=True)), kind)
        run.params.maxDets = [1, 10, most] if kind == "bbox" else [most]
        run.evaluate()
        run.accumulate()
    return run.eval["precision"][..., 0, -1], run.eval["recall"][..., 0, -1]


def average(values: Any) -> float:
    return float(values[values > -1].mean()) if (values > -1).any() else float("nan")


def compute(matches: Any, images: int) -> tuple[float, float]:
    one = np.ones((1, images))
    return (
        float(AveragePrecision(matches).interpolated(one)[0]),
        float(average_recall(matches)(one)[0]),
    )


def pycocotools() -> tuple[Any, Any]:
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    return COCO, COCOeval


def faster_coco_eval() -> tuple[Any, Any]:
    from faster_coco_eval import COCO, COCOeval_faster

    return COCO, COCOeval_faster


@pytest.mark.parametrize("library", [pycocotools, faster_coco_eval])
def test_average_precision_and_recall_of_random_boxes_match_library(library: Any) -> None:
    rng = make_seeded()
    for _ in range(CASES if library is pycocotools else 40):
        images, most = int(rng.integers(1, 12)), int(rng.choice([10, 11, 100]))
        label, answers = draw_boxes(rng, images, int(rng.integers(1, 5)), int(rng.integers(1, 9)))
        answers[0, 0] = [0, 0, 9, 9, 0.5, 0]
        coco, evaluation = library()
        precision, recall = evaluate_with(coco, evaluation, label, answers, "bbox", most)
        expected = [average(precision), average(recall), average(precision[0]), average(recall[5])]
        mine = [
            *compute(match_boxes(label, answers, None, most), images),
            compute(match_boxes(label, answers, 0.5, most), images)[0],
            compute(match_boxes(label, answers, 0.75, most), images)[1],
        ]
        assert mine == pytest.approx(expected, abs=1e-9, nan_ok=True)


def test_average_precision_and_recall_of_random_keypoints_match_pycocotools() -> None:
    rng = make_seeded()
    for _ in range(40):
        images = int(rng.integers(1, 8))
        label, answers = draw_poses(rng, images)
        answers[0, 0, 4:6] = 0.5, 0
        precision, recall = evaluate_with(*pycocotools(), label, answers, "keypoints", 20)
        mine = compute(match_keypoints(label, answers), images)
        expected = (average(precision), average(recall))
        assert mine == pytest.approx(expected, abs=1e-9, nan_ok=True)


def test_average_precision_and_recall_with_image_weights_equal_those_of_repeated_images() -> None:
    rng = make_seeded()
    for _ in range(40):
        images = int(rng.integers(2, 12))
        label, answers = draw_boxes(rng, images, 3, 5)
        # Ties between images remain. Ties within an image would alternate in repeated images.
        answers[..., 4] += np.arange(answers.shape[1]) * 1e-6
        weights = rng.integers(0, 4, images)
        weights[0] = 1
        rows = np.repeat(np.arange(images), weights)
        weighted = match_boxes(label, answers)
        repeated = match_boxes(label[rows], answers[rows])
        one, own = np.ones((1, len(rows))), weights[None].astype(float)
        expected = AveragePrecision(repeated).interpolated(one)
        found = AveragePrecision(weighted).interpolated(own)
        assert found == pytest.approx(expected, abs=1e-9, nan_ok=True)
        assert average_recall(weighted)(own) == pytest.approx(
            average_recall(repeated)(one), abs=1e-9, nan_ok=True
        )


def test_average_precision_and_recall_of_300_images_match_pycocotools() -> None:
    rng = make_seeded()
    label, answers = draw_boxes(rng, 300, 3, 3)
    precision, recall = evaluate_with(*pycocotools(), label, answers, "bbox", 100)
    expected = (average(precision), average(recall))
    assert compute(match_boxes(label, answers), 300) == pytest.approx(expected, abs=1e-9)


def test_average_precision_and_recall_without_objects_are_nan() -> None:
    label = np.full((3, 1, 5), -1.0)
    answers = np.tile([0.0, 0, 1, 1, 0.5, 0], (3, 1, 1))
    assert all(np.isnan(value) for value in compute(match_boxes(label, answers), 3))


@pytest.mark.parametrize("overlap", ["iou", "dice"])
@pytest.mark.parametrize("kind", ["macro", "micro", "weighted", "binary"])
def test_overlap_statistic_with_weights_matches_scikit_learn(overlap: Overlap, kind: str) -> None:
    from sklearn.metrics import f1_score, jaccard_score

    rng = make_seeded()
    classes = 2 if kind == "binary" else 4
    label = rng.integers(0, classes, (9, 6, 5))
    answers = np.where(rng.random(label.shape) < 0.7, label, rng.integers(0, classes, label.shape))
    label[rng.random(label.shape) < 0.1] = 255
    weights = rng.integers(0, 4, (5, 9))
    statistic = make_overlap_statistic(label, answers, overlap, kind, None, 255).statistic
    function = jaccard_score if overlap == "iou" else f1_score
    for value, weight in zip(statistic(weights.astype(float)), weights, strict=True):
        rows = np.repeat(np.arange(9), weight)
        counted = label[rows] != 255
        expected = function(label[rows][counted], answers[rows][counted], average=kind)
        assert value == pytest.approx(expected, abs=1e-9)


def test_score_of_equal_detectors_returns_pycocotools_estimate_and_zero_difference() -> None:
    rng = make_seeded()
    label, answers = draw_boxes(rng, 40, 2, 4)
    definition = MetricDefinition(name="map", max_detections=100)
    entries = score(
        definition, label, {CANDIDATE: answers, "base": answers.copy()}, seed=1, resamples=100
    )
    precision, _ = evaluate_with(*pycocotools(), label, answers, "bbox", 100)
    assert entries[0].candidate is not None
    assert entries[0].candidate.estimate == pytest.approx(average(precision), abs=1e-9)
    assert entries[1].difference is not None
    assert entries[1].difference.estimate == 0


@pytest.mark.parametrize(
    ("found", "expected"),
    [(400, 1 / 101), (396, 1 / 101), (394, 0), (0, 0)],
    ids=["all found", "at a step", "between steps", "none found"],
)
def test_find_recall_jump_returns_one_step_near_recall_step_and_zero_elsewhere(
    found: int, expected: float
) -> None:
    """With 4,000 objects, 2 standard errors of a recall of 0.985 are 0.004."""
    label = np.tile([10.0, 10, 30, 40, 0], (4000, 1, 1))
    answers = np.tile([10.0, 10, 30, 40, 0.9, 0], (4000, 1, 1))
    answers[10 * found :, 0, 5] = -1
    assert find_recall_jump(match_boxes(label, answers, 0.5)) == pytest.approx(expected)


def test_score_of_map_returns_interval_that_contains_plain_value() -> None:
    rng = make_seeded()
    label, answers = draw_boxes(rng, 60, 2, 4)
    definition = MetricDefinition(name="map", iou=0.5, max_detections=100)
    built = build_metric_statistic(definition, label, answers)
    one = np.ones((1, 60))
    assert built.plain is not None
    assert built.plain(one)[0] <= built.statistic(one)[0]
    (entry,) = score(definition, label, {CANDIDATE: answers}, seed=1, resamples=200)
    assert entry.candidate is not None
    assert entry.candidate.low <= built.plain(one)[0] <= entry.candidate.high
