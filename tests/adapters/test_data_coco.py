"""Objects of images from annotation files in the format of COCO."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from onnx_ops.adapters.data.file import FileSource
from onnx_ops.domain.pipeline import FileData
from onnx_ops.errors import NotFoundError, UserError
from onnx_ops.pipeline.stages.data import build_dataset
from onnx_ops.testing.data import DataSourceSuite
from tests.support.fixtures import fixed

FILE = FileData(
    file="images.npz", annotations="instances.json", inputs={"x": "images"}, label="objects"
)
SOURCE = FileSource()


def make_annotations() -> dict[str, Any]:
    return {
        "images": [{"id": 7, "width": 64, "height": 48}, {"id": 3}, {"id": 5}],
        "categories": [{"id": 18, "name": "dog"}, {"id": 1, "name": "person"}],
        "annotations": [
            {"id": 1, "image_id": 7, "category_id": 18, "bbox": [10, 20, 30, 8], "area": 200},
            {"id": 2, "image_id": 5, "category_id": 1, "bbox": [0, 0, 5, 5], "iscrowd": 1},
            {"id": 3, "image_id": 7, "category_id": 1, "bbox": [1, 2, 3, 4]},
        ],
    }


def write(root: Path, content: Any, **arrays: Any) -> None:
    np.savez(root / FILE.file, images=np.zeros((3, 2), np.float32), **arrays)
    (root / FILE.annotations).write_text(json.dumps(content), encoding="utf-8")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    write(tmp_path, make_annotations())
    return tmp_path


class TestFileWithAnnotations(DataSourceSuite):
    source = fixed(SOURCE)
    section = fixed(FILE)


def test_load_annotations_returns_objects_in_order_of_images_with_numbered_classes(
    root: Path,
) -> None:
    objects = SOURCE.load(FILE, root)["objects"]
    assert objects.shape == (3, 2, 6)
    np.testing.assert_array_equal(objects[0], [[10, 20, 40, 28, 1, 0], [1, 2, 4, 6, 0, 0]])
    assert (objects[1, :, 4] == -1).all()
    np.testing.assert_array_equal(objects[2, 0], [0, 0, 5, 5, 0, 1])
    assert build_dataset(SOURCE.load(FILE, root), FILE, "data").label is not None


def test_load_annotations_with_image_ids_returns_objects_of_each_row(root: Path) -> None:
    write(root, make_annotations(), image_id=np.array([5, 7, 7]))
    objects = SOURCE.load(FILE, root)["objects"]
    assert objects[:, 0, 2].tolist() == [5, 40, 40]


def test_load_annotations_with_keypoints_returns_poses_with_area(root: Path) -> None:
    content = make_annotations()
    content["annotations"][0]["keypoints"] = [1, 2, 2, 3, 4, 1]
    write(root, content)
    poses = SOURCE.load(FILE, root)["poses"]
    assert poses.shape == (3, 2, 13)
    assert poses[0, 0].tolist() == [10, 20, 40, 28, 1, 0, 200, 1, 2, 2, 3, 4, 1]
    assert poses[2, 0].tolist() == [0, 0, 5, 5, 0, 1, 25, 0, 0, 0, 0, 0, 0]


def test_file_fingerprint_of_changed_annotations_differs(root: Path) -> None:
    before = SOURCE.fingerprint(FILE, root)
    assert SOURCE.fingerprint(replace(FILE, annotations=""), root) != before
    content = make_annotations()
    content["annotations"].pop()
    (root / FILE.annotations).write_text(json.dumps(content), encoding="utf-8")
    assert SOURCE.fingerprint(FILE, root) != before


def test_load_missing_annotations_raises_not_found_error(root: Path) -> None:
    with pytest.raises(NotFoundError):
        SOURCE.load(replace(FILE, annotations="none.json"), root)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"category_id": 2}, "annotation 1 has category 2, which is not among the categories"),
        ({"image_id": 9}, "annotation 1 names image 9, which 'images' does not list"),
        (
            {"bbox": [50, 20, 30, 8]},
            "beyond image 7: [50, 20, 30, 8] (the image has width 64, height 48)",
        ),
        (
            {"bbox": [-5, 20, 30, 8], "image_id": 3},
            "annotation 1 has a box that extends beyond image 3: [-5, 20, 30, 8]. Write",
        ),
        ({"bbox": [10, 20, -3, 8]}, "annotation 1 has a box with a negative size"),
        ({"bbox": [10, 20, 3]}, "annotation 1 has no box of four numbers within"),
        ({"bbox": [10, 20, 3, float("nan")]}, "annotation 1 has no box of four numbers within"),
        ({"image_id": None}, "annotation 1 has no 'image_id' that is an integer or a string"),
        ({"bbox": [10, 20, 10**400, 8]}, "annotation 1 has no box of four numbers within"),
        (
            {"keypoints": [1, 2]},
            "annotation 1 has 2 values of keypoints, but each keypoint needs three",
        ),
        ({"keypoints": 3}, "annotation 1 has a 'keypoints' that is not a list of numbers within"),
        ({"keypoints": [1, 2, "2"]}, "annotation 1 has a 'keypoints' that is not a list"),
        ({"area": "large"}, "annotation 1 has a 'area' that is not a number within ±1e+15: large"),
    ],
)
def test_load_wrong_annotation_raises_user_error_with_its_id(
    root: Path, change: dict[str, Any], expected: str
) -> None:
    content = make_annotations()
    content["annotations"][0] |= change
    write(root, content)
    with pytest.raises(UserError, match=r"instances\.json") as caught:
        SOURCE.load(FILE, root)
    assert expected in str(caught.value)


def test_load_annotations_with_image_size_that_is_not_a_number_raises_user_error(
    root: Path,
) -> None:
    content = make_annotations()
    for image in content["images"]:
        image["width"] = [64]
    write(root, content)
    with pytest.raises(UserError, match="has a 'width' that is not a number within"):
        SOURCE.load(FILE, root)


def test_load_annotations_with_integer_and_string_category_ids_orders_integers_first(
    root: Path,
) -> None:
    expected = SOURCE.load(FILE, root)["objects"]
    content = make_annotations()
    content["categories"].insert(0, {"id": "other", "name": "other"})
    write(root, content)
    np.testing.assert_array_equal(SOURCE.load(FILE, root)["objects"], expected)


def test_load_annotations_that_are_a_folder_raises_user_error(root: Path) -> None:
    folder = root / "test_data_set_0"
    folder.mkdir()
    tensor = onnx.numpy_helper.from_array(np.zeros(1))
    (folder / "input_0.pb").write_bytes(tensor.SerializeToString())
    (root / "empty").mkdir()
    for name in (".", "empty"):
        with pytest.raises(UserError, match="the annotations are a folder"):
            SOURCE.load(replace(FILE, annotations=name), root)


@pytest.mark.parametrize("content", [[], {}, {"images": [], "categories": [], "annotations": [1]}])
def test_load_annotations_of_other_format_raises_user_error(root: Path, content: Any) -> None:
    write(root, content)
    with pytest.raises(UserError, match="the annotations have no list"):
        SOURCE.load(FILE, root)


def test_load_annotations_with_row_of_unknown_image_raises_user_error(root: Path) -> None:
    write(root, make_annotations(), image_id=np.array([5, 7, 8]))
    with pytest.raises(UserError, match="row 2 of 'image_id' names image 8"):
        SOURCE.load(FILE, root)


def test_load_annotations_with_array_named_objects_raises_user_error(root: Path) -> None:
    write(root, make_annotations(), objects=np.zeros(3))
    with pytest.raises(UserError, match="Rename the array"):
        SOURCE.load(FILE, root)


def test_load_annotations_that_are_not_json_raises_user_error(root: Path) -> None:
    (root / FILE.annotations).write_text("{", encoding="utf-8")
    with pytest.raises(UserError, match="the annotations cannot be read as JSON"):
        SOURCE.load(FILE, root)
