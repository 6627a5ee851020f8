"""Comparison of the values of one step, and the causes that are found for a difference."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from onnx_ops.domain.system_comparison import Tolerances
from onnx_ops.statistics.differences.resampling import FILTERS, identify_resize, resize
from onnx_ops.statistics.step_differences import explain_answers, explain_difference
from onnx_ops.statistics.step_values import (
    Form,
    differs_in_answer,
    measure_step,
    rate_distance,
)


def make_picture(seed: int = 0, height: int = 60, width: int = 48) -> np.ndarray[Any, Any]:
    random = np.random.default_rng(seed)
    small = random.uniform(0, 255, (9, 7, 3)) * [1, 0.8, 0.6]
    return np.round(np.clip(resize(small, (height, width), "bicubic"), 0, 255)).astype(np.uint8)


def rate(reference: Any, value: Any, form: Form = "same") -> float:
    distance = measure_step(reference, value)
    return rate_distance(distance, form, distance.span, Tolerances()).ratio


PICTURE = make_picture()
LARGER = make_picture(1, height=80, width=64)
FLOATS = PICTURE.astype(np.float32) / 255
SOUND = np.random.default_rng(0).integers(-32767, 32768, 4000)


@pytest.mark.parametrize(
    ("reference", "value", "form"),
    [
        ("a text", "a text", "same"),
        ({"label": "cat", "score": 0.5}, {"score": 0.500001, "label": "cat"}, "same"),
        (FLOATS, FLOATS.astype(np.float64)[None], "same"),
        (PICTURE, PICTURE.astype(np.float32) + 0.4, "resampled"),
        ([1, 2, 3], np.array([[1, 2, 3]]), "same"),
        ([], [], "same"),
    ],
)
def test_rate_distance_of_values_equal_up_to_rounding_stays_within_tolerance(
    reference: Any, value: Any, form: Form
) -> None:
    assert rate(reference, value, form) <= 1


@pytest.mark.parametrize(
    ("reference", "value"),
    [
        ("a text", "a Text"),
        ([1, 2, 3], [1, 2, 4]),
        (FLOATS, FLOATS * 255 / 256),
        (FLOATS, FLOATS.transpose(2, 0, 1)),
        (PICTURE, PICTURE[:, ::-1]),
        ({"a": 1.0}, {"b": 1.0, "c": 2.0}),
        (FLOATS, np.where(FLOATS > 0.5, np.nan, FLOATS)),
        ([{"box": [1, 2, 3, 4]}], []),
    ],
)
def test_rate_distance_of_different_values_exceeds_tolerance(reference: Any, value: Any) -> None:
    assert rate(reference, value) > 1


@pytest.mark.parametrize(
    ("reference", "value", "words"),
    [
        (PICTURE, PICTURE[..., ::-1], "RGB and BGR are swapped"),
        (PICTURE, PICTURE.transpose(2, 0, 1), "channels last (HWC)"),
        (PICTURE, PICTURE[:, ::-1], "flipped left to right"),
        (PICTURE, np.rot90(PICTURE), "rotated counterclockwise"),
        (PICTURE, FLOATS, "the candidate divides by 255"),
        (PICTURE, PICTURE / 256, "the candidate divides by 256"),
        (PICTURE / 127.5, PICTURE, "the source divides by 127.5"),
        (SOUND / 32767, SOUND, "the source divides by 32767"),
        (SOUND / 32768, SOUND, "the source divides by 32768"),
        (FLOATS - [0.4, 0.5, 0.6], PICTURE, "mean or standard deviation"),
        (FLOATS, (FLOATS - [0.4, 0.5, 0.6]) / [0.2, 0.3, 0.4], "mean or standard deviation"),
        (PICTURE, PICTURE.mean(axis=2), "the candidate's picture is grey"),
        (PICTURE[..., :1], LARGER, "the source's picture is grey"),
        (PICTURE[..., :1], LARGER[..., 0], "size: (80, 64) instead of (60, 48, 1)"),
        (
            PICTURE[4:52, 4:44],
            PICTURE[7:55, 6:46],
            "crop begins 3 rows lower and 2 columns further right",
        ),
        (np.array([5, 6, 7, 0, 0]), np.array([0, 0, 5, 6, 7]), "pads on the right"),
        (np.array([1, 5, 6, 2, 0]), np.array([5, 6, 0, 0, 0]), "special tokens"),
        (np.arange(1, 30), np.arange(1, 20), "truncation: the candidate cuts to 19"),
        (np.array([9, 5, 7, 30]), np.array([10, 6, 8, 31]), "+1"),
        ("A cat", "a cat", "upper and lower case"),
        ("a cat", " a cat ", "white space at the ends"),
        ("naïve", "naive", "accents"),
        (np.sin(np.arange(16000)), np.sin(np.arange(8000)), "sample rate"),
        (np.array([[1.0, 3, 0, 2]]), np.array([[0.0871, 0.6439, 0.0321, 0.2369]]), "softmax"),
    ],
)
def test_explain_difference_names_cause(reference: Any, value: Any, words: str) -> None:
    assert words in explain_difference(reference, value)


def test_explain_difference_of_pictures_without_shift_names_no_crop() -> None:
    reference = np.zeros((10, 10))
    reference[3:7, 2:6] = 1.0
    value = reference.copy()
    value[0, 0] = np.nan
    assert "crop" not in explain_difference(reference, value)


@pytest.mark.parametrize("name", FILTERS)
def test_identify_resize_of_resized_image_returns_its_filter(name: str) -> None:
    random = np.random.default_rng(1)
    source = random.integers(0, 256, (50, 70, 3)).astype(np.uint8)
    made = np.round(np.clip(resize(source.astype(np.float64), (20, 24), name), 0, 255))
    match = identify_resize(source, made)
    assert match is not None
    assert (match.way, match.filter_name) == ("stretched", name)


@pytest.mark.parametrize(
    ("name", "size"), [("bilinear", (20, 24)), ("bicubic", (20, 24)), ("lanczos", (90, 100))]
)
def test_resize_agrees_with_pillow(name: str, size: tuple[int, int]) -> None:
    image = pytest.importorskip("PIL.Image")
    picture = make_picture(3)
    filters = {"bilinear": 2, "bicubic": 3, "lanczos": 1}
    pillow = np.asarray(image.fromarray(picture).resize(size[::-1], filters[name]))
    ours = np.clip(resize(picture.astype(np.float64), size, name), 0, 255)
    assert np.abs(ours - pillow).max() <= 1.5


OBJECTS = [
    {"box": [1.0, 2.0, 11.0, 22.0], "score": 0.9, "label": "cat"},
    {"box": [30.0, 30.0, 50.0, 60.0], "score": 0.6, "label": "dog"},
    {"box": [31.0, 31.0, 50.0, 60.0], "score": 0.5, "label": "dog"},
    {"box": [70.0, 5.0, 90.0, 15.0], "score": 0.4, "label": "cat"},
]


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (OBJECTS[:2], "threshold"),
        ([OBJECTS[0], OBJECTS[1], OBJECTS[3]], "non-maximum suppression"),
        (
            [{**o, "box": [part / 2 for part in o["box"]]} for o in OBJECTS],  # type: ignore[attr-defined]
            "box coordinates",
        ),
        (
            [{**o, "label": "dog" if o["label"] == "cat" else "cat"} for o in OBJECTS],
            "label map: cat becomes dog",
        ),
    ],
)
def test_explain_difference_of_objects_names_cause(value: Any, words: str) -> None:
    assert words in explain_difference(OBJECTS, value)


@pytest.mark.parametrize(
    ("places", "text"),
    [
        ([0, 1], "limit: 2 instead of 4 objects; the candidate keeps the first 2"),
        (
            [0, 3],
            "detections: 2 instead of 4 objects; the candidate keeps 2 of the same boxes",
        ),
        ([], "detections: 0 instead of 4 objects; the candidate keeps 0 of the same boxes"),
    ],
)
def test_explain_difference_of_boxes_without_scores_names_limit_only_for_first_boxes(
    places: list[int], text: str
) -> None:
    boxes = np.array([one["box"] for one in OBJECTS])
    assert text in explain_difference({"boxes": boxes}, {"boxes": boxes[places]})


def test_explain_answers_of_exchanged_labels_names_label_map() -> None:
    pairs = [("cat", "dog"), ("dog", "cat"), ("cat", "dog")]
    assert explain_answers(pairs) == "label map: cat becomes dog, dog becomes cat"
    assert not explain_answers([("a", "a"), ("b", "b")])


def test_differs_in_answer_compares_labels_and_large_changes_of_scores() -> None:
    assert not differs_in_answer({"label": 1, "score": 0.9}, {"label": 1, "score": 0.89})
    assert differs_in_answer({"label": 1, "score": 0.9}, {"label": 2, "score": 0.9})
    assert differs_in_answer(np.array([0.9, 0.1]), np.array([0.6, 0.4]))


@pytest.mark.parametrize(
    ("text", "words"), [("the app crashes", "case"), (" The app crashes\n", "white space")]
)
def test_explain_difference_of_text_arrays_names_cause(text: str, words: str) -> None:
    expected = np.array([["Equal"], ["The app crashes"]], dtype=object)

    assert words in explain_difference(expected, np.array([["Equal"], [text]], dtype=object))
    assert explain_difference(expected, np.array([[text]], dtype=object)) == ""
