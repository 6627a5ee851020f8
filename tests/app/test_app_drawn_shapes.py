"""The example of a detector: its data, its released file, and the project's own code."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from PIL import Image

from onnx_ops.adapters.data.file import FileSource
from onnx_ops.app.context import open_project
from onnx_ops.app.project import check
from onnx_ops.domain.pipeline import FileData
from tests.support.images import find_decoder_library, pad_rows
from tests.support.processes import ROOT

SHAPES = ROOT / "examples/data/shapes"


@pytest.fixture(scope="module")
def example() -> Any:
    pytest.importorskip("torch")
    return importlib.import_module("examples.drawn_shapes")


@pytest.fixture(scope="module")
def net(example: Any) -> Any:
    """A network that finds some shapes, since it is trained for a few seconds."""
    return example.train_net(images=96, epochs=12)


def test_shape_files_equal_what_example_draws(example: Any, tmp_path: Path) -> None:
    example.write_images(tmp_path)

    drawn = json.loads((tmp_path / "shapes.json").read_text())
    assert drawn == json.loads((ROOT / "examples/data/shapes.json").read_text())
    for entry in drawn["images"][::8]:
        files = (tmp_path / "shapes" / entry["file_name"], SHAPES / entry["file_name"])
        pixels = [np.asarray(Image.open(file)).astype(int) for file in files]
        # Another build of libjpeg can round differently.
        assert np.abs(pixels[0] - pixels[1]).mean() < 1


def test_shapes_are_rows_with_objects_of_annotations() -> None:
    section = FileData(file="examples/data/shapes", annotations="examples/data/shapes.json")

    arrays = FileSource().load(section, ROOT)

    assert len(arrays["image"]) == len(arrays["objects"]) == 96
    assert {-1.0, 0.0, 1.0, 2.0} == set(np.unique(arrays["objects"][..., 4]).tolist())


def test_released_file_finds_boxes_of_predict(example: Any, net: Any, tmp_path: Path) -> None:
    import onnxruntime as ort

    path = tmp_path / "model.onnx"
    onnx.save(example.build_model(net), path)
    options = ort.SessionOptions()
    options.register_custom_ops_library(str(find_decoder_library()))
    session = ort.InferenceSession(path, options)
    files = sorted(SHAPES.iterdir())[:16]

    (rows,) = session.run(None, {"image": pad_rows([file.read_bytes() for file in files])})

    assert rows.shape == (16, example.MAX_BOXES, 6)
    counts = 0
    for file, boxes in zip(files, rows, strict=True):
        found, expected = example.list_objects(boxes), example.predict(str(file), path)
        assert [one["name"] for one in found] == [one["name"] for one in expected]
        for one, other in zip(found, expected, strict=True):
            np.testing.assert_allclose(one["box"], other["box"], atol=0.5)
        counts += len(found)
    assert counts


def test_choice_of_boxes_without_shape_returns_only_padding(example: Any) -> None:
    import onnxruntime as ort

    choice = ort.InferenceSession(example.build_choice().SerializeToString())
    raw = np.full((2, 7, 144), -9, np.float32)

    (rows,) = choice.run(None, {"raw": raw, "size": np.array([[80, 100], [96, 96]], np.float32)})

    assert rows[..., :5].max() == 0
    assert set(rows[..., 5].reshape(-1).tolist()) == {-1.0}


def test_check_of_drawn_shapes_pipeline_succeeds() -> None:
    checked = check(open_project(ROOT), ROOT / "configs/pipelines/drawn-shapes.yaml")

    assert checked.pipeline.system is not None
