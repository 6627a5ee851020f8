"""Boxes, keypoints and masks: which outputs and labels are read, and which are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from onnx_ops.adapters.runtimes.onnxruntime import OnnxRuntime
from onnx_ops.domain.gate import MetricDefinition, MetricGate
from onnx_ops.domain.target import Target
from onnx_ops.errors import UserError
from onnx_ops.measure.predictions import join_predictions, prepare_label, read_prediction
from onnx_ops.measure.scoring import (
    ScoringRequest,
    TaskMetrics,
    find_label_problem,
    measure_metrics,
)
from onnx_ops.ports import Dataset
from onnx_ops.statistics.scores import CANDIDATE
from tests.support.graphs import write_graph

MAP = MetricGate(name="map").definition()
KEYPOINTS = MetricGate(name="keypoints_ap").definition()
IOU = MetricGate(name="iou").definition()
IMAGES = 30


def make_detections(images: int = IMAGES, places: int = 3) -> Any:
    """Return one right box of class 1 per image; other places are empty."""
    answers = np.zeros((images, places, 6), dtype=np.float32)
    answers[..., 5] = -1
    answers[:, 0] = [10, 10, 30, 40, 0.9, 1]
    return answers


def make_objects(images: int = IMAGES) -> Any:
    return np.tile(np.array([[10, 10, 30, 40, 1.0]]), (images, 1, 1))


def measure(path: Path, answers: Any, label: Any, definition: MetricDefinition) -> TaskMetrics:
    shape = ",".join(str(size) for size in answers.shape[1:])
    model = write_graph(path, f"(float[N,{shape}] x) => (float[N,{shape}] y) {{ y = Identity(x) }}")
    request = ScoringRequest(
        runtime=OnnxRuntime(),
        target=Target(name="cpu"),
        models={CANDIDATE: model},
        dataset=Dataset(inputs={"x": answers}, label=label),
        seed=1,
    )
    return measure_metrics(request, [definition])


def as_dataset(label: Any) -> Dataset:
    return Dataset(inputs={"x": np.zeros((len(label), 1))}, label=label)


def change(array: Any, row: int, place: int, column: int, value: float) -> Any:
    changed = array.copy()
    changed[row, place, column] = value
    return changed


def test_read_prediction_of_three_outputs_equals_that_of_one() -> None:
    answers = make_detections()
    parts = {
        "out_a": answers[..., :4],
        "out_b": answers[..., 4],
        "out_c": answers[..., 5].astype(np.int64),
    }
    whole = read_prediction(MAP, {"y": answers})
    assert np.array_equal(read_prediction(MAP, parts).values, whole.values)
    named = {"scores": parts["out_b"], "labels": answers[..., 5], "boxes": parts["out_a"]}
    assert np.array_equal(read_prediction(MAP, named).values, whole.values)


def test_read_prediction_of_ambiguous_outputs_raises_user_error() -> None:
    answers = make_detections()
    outputs = {"a": answers[..., :4], "b": answers[..., 4], "c": answers[..., 5]}
    with pytest.raises(UserError, match="boxes"):
        read_prediction(MAP, outputs)


def test_join_predictions_with_different_numbers_of_boxes_adds_empty_places() -> None:
    few = read_prediction(MAP, {"y": make_detections(2, 1)})
    many = read_prediction(MAP, {"y": make_detections(3, 5)})
    joined = join_predictions([few, many])
    assert joined.values.shape == (5, 5, 6)
    assert (joined.values[:2, 1:, 5] == -1).all()


def test_read_prediction_of_decoded_rows_joins_boxes_and_rejects_wrong_shape() -> None:
    definition = MetricGate(name="map", decode="shop:decode").definition()
    rows = [make_detections(1, 2)[0], [], make_detections(1, 1)[0].tolist()]
    prediction = read_prediction(definition, {"raw": np.zeros((3, 7))}, lambda _: rows)
    assert prediction.values.shape == (3, 2, 6)
    assert (prediction.values[..., 5] >= 0).sum() == 2
    with pytest.raises(UserError, match="row 1: the answer of shop:decode has shape"):
        read_prediction(definition, {"raw": np.zeros((3, 7))}, lambda _: [rows[0], [1.0, 2], []])


@pytest.mark.parametrize("answer", [{"box": 1}, [[1, 2], [3]], 0.5])
def test_read_prediction_of_decoded_row_without_array_raises_user_error(answer: object) -> None:
    definition = MetricGate(name="map", decode="shop:decode").definition()
    with pytest.raises(UserError, match="answer of shop:decode"):
        read_prediction(definition, {"raw": np.zeros((1, 7))}, lambda _: [answer])


def test_measure_metrics_of_map_returns_estimate_and_interval(tmp_path: Path) -> None:
    answers = make_detections()
    answers[0, 0, 5] = 0
    (entry,) = measure(tmp_path / "model.onnx", answers, make_objects(), MAP).scores
    assert entry.metric == "map"
    assert entry.candidate is not None
    assert entry.candidate.estimate == pytest.approx(97 / 101)
    assert entry.candidate.low < 0.9


@pytest.mark.parametrize(
    ("row", "place", "column", "value", "expected"),
    [
        (7, 0, 2, 5, "row 7: box 0 has x2 < x1"),
        (3, 0, 3, 1, "row 3: box 0 has x2 < x1 or y2 < y1"),
        (4, 1, 5, 0.5, "row 4: box 1 has a class"),
        (5, 0, 5, -3, "row 5: box 0 has a class"),
    ],
)
def test_measure_metrics_of_invalid_detection_reports_failure_with_row(
    tmp_path: Path, row: int, place: int, column: int, value: float, expected: str
) -> None:
    answers = change(make_detections(), row, place, column, value)
    (entry,) = measure(tmp_path / "model.onnx", answers, make_objects(), MAP).scores
    assert expected in entry.failed


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_measure_metrics_of_nonfinite_score_reports_broken_row(
    tmp_path: Path, value: float
) -> None:
    answers = change(make_detections(), 12, 0, 4, value)
    (entry,) = measure(tmp_path / "model.onnx", answers, make_objects(), MAP).scores
    assert "row 12" in entry.broken


def test_measure_metrics_of_nan_in_empty_place_ignores_it(tmp_path: Path) -> None:
    answers = change(make_detections(), 12, 1, 0, np.nan)
    (entry,) = measure(tmp_path / "model.onnx", answers, make_objects(), MAP).scores
    assert entry.candidate is not None


def test_measure_metrics_of_detections_of_other_classes_reports_failure(tmp_path: Path) -> None:
    answers = make_detections()
    answers[:, 0, 5] = 2
    (entry,) = measure(tmp_path / "model.onnx", answers, make_objects(), MAP).scores
    assert "classes 2 to 2 instead of 1 to 1" in entry.failed


@pytest.mark.parametrize(
    ("row", "column", "value", "expected"),
    [
        (2, 0, np.nan, "row 2: box 0 has NaN"),
        (9, 2, 3, "row 9: box 0 has x2 < x1"),
        (6, 0, -4, "row 6: box 0 lies outside the image"),
        (1, 4, 1.5, "row 1: box 0 has a class"),
    ],
)
def test_find_label_problem_of_wrong_object_names_row(
    row: int, column: int, value: float, expected: str
) -> None:
    label = change(make_objects(), row, 0, column, value)
    assert expected in find_label_problem(MAP, as_dataset(label), None)


@pytest.mark.parametrize("label", [None, np.zeros((4, 5)), np.zeros((4, 2, 7))])
def test_prepare_label_without_objects_raises_user_error(label: Any) -> None:
    with pytest.raises(UserError, match="must contain objects"):
        prepare_label(MAP, label)


def test_find_label_problem_of_keypoints_requires_as_many_sigmas_and_answered_keypoints() -> None:
    answers = np.concatenate([make_detections(2, 1), np.ones((2, 1, 15))], axis=2)
    label = np.concatenate([make_objects(2), np.array([[[0.0, 600]]] * 2), np.ones((2, 1, 15))], 2)
    assert "5 values of sigmas" in find_label_problem(KEYPOINTS, as_dataset(label), {"y": answers})
    own = MetricGate(name="keypoints_ap", sigmas=(0.05,) * 5).definition()
    assert not find_label_problem(own, as_dataset(label), {"y": answers})
    fewer = {"y": answers[..., :12]}
    assert "2 keypoints, but the label has 5" in find_label_problem(own, as_dataset(label), fewer)


def test_read_prediction_of_masks_as_scores_or_classes_returns_classes() -> None:
    label = np.random.default_rng(0).integers(0, 2, (4, 5, 6))
    scores = np.stack([1 - label, label], axis=1).astype(np.float32)
    for output in (scores, label, label[:, None], label.astype(np.float32), label.astype(bool)):
        assert np.array_equal(read_prediction(IOU, {"y": output}).values, label)


def test_measure_metrics_of_iou_with_ignored_pixels_returns_value(tmp_path: Path) -> None:
    label = np.random.default_rng(0).integers(0, 3, (IMAGES, 5, 6))
    scores = np.eye(3, dtype=np.float32)[label].transpose(0, 3, 1, 2)
    label[0, 0, 0] = 255
    (entry,) = measure(tmp_path / "model.onnx", scores, label, IOU).scores
    assert entry.candidate is not None
    assert (entry.metric, entry.candidate.estimate) == ("iou macro", 1.0)


def test_measure_metrics_of_label_with_unknown_class_reports_failure_with_row(
    tmp_path: Path,
) -> None:
    label = np.zeros((IMAGES, 5, 6), dtype=np.int64)
    label[8, 1, 1] = 3
    scores = np.zeros((IMAGES, 3, 5, 6), dtype=np.float32)
    (entry,) = measure(tmp_path / "model.onnx", scores, label, IOU).scores
    assert "row 8: the label has class 3, but the model has 3 classes" in entry.failed


def test_find_label_problem_of_mask_of_other_size_reports_it() -> None:
    label = np.zeros((2, 5, 6), dtype=np.int64)
    outputs = {"y": np.zeros((2, 3, 4, 4), dtype=np.float32)}
    assert "cannot be compared pixel by pixel" in find_label_problem(
        IOU, as_dataset(label), outputs
    )
