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

# The exporter of torch 2.13 causes this warning.
pytestmark = pytest.mark.filterwarnings("ignore:.*treespec:FutureWarning")


@pytest.fixture(scope="module")
def example() -> Any:
    pytest.importorskip("torch")
    return importlib.import_module("examples.drawn_shapes")


def test_shape_files_nearly_equal_images_that_example_draws(example: Any, tmp_path: Path) -> None:
    example.write_images(tmp_path)

    drawn = json.loads((tmp_path / "shapes.json").read_text())
    assert drawn == json.loads((ROOT / "examples/data/shapes.json").read_text())
    for entry in drawn["images"][::8]:
        files = (tmp_path / "shapes" / entry["file_name"], SHAPES / entry["file_name"])
        pixels = [np.asarray(Image.open(file)).astype(int) for file in files]
        # Another build of libjpeg can round differently.
        assert np.abs(pixels[0] - pixels[1]).mean() < 1


def test_load_of_drawn_shapes_returns_images_with_annotated_objects() -> None:
    section = FileData(file="examples/data/shapes", annotations="examples/data/shapes.json")

    arrays = FileSource().load(section, ROOT)

    assert len(arrays["image"]) == len(arrays["objects"]) == 96
    assert {-1.0, 0.0, 1.0, 2.0} == set(np.unique(arrays["objects"][..., 4]).tolist())


def open_session(model: onnx.ModelProto) -> Any:
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.register_custom_ops_library(str(find_decoder_library()))
    return ort.InferenceSession(model.SerializeToString(), options)


def test_decoder_of_image_files_returns_same_input_as_python_code(example: Any) -> None:
    files = sorted(SHAPES.iterdir())[:16]
    encoded = pad_rows([file.read_bytes() for file in files])

    pixels, sizes = open_session(example.build_decoder()).run(None, {"image": encoded})

    for file, planes, size in zip(files, pixels, sizes, strict=True):
        image = example.decode_file(str(file))
        expected = example.normalize(example.letterbox(image))[0]
        # Decoders of JPEG files round differently, by one level. After the normalization, a level
        # is 1 / 255 / 0.25 = 0.016.
        np.testing.assert_allclose(planes, expected, atol=1e-4 if file.suffix == ".png" else 0.03)
        assert size.tolist() == list(image.shape[:2])


@pytest.mark.parametrize("seed", range(4))
def test_build_choice_selects_same_boxes_as_python_code(example: Any, seed: int) -> None:
    random = np.random.default_rng(seed)
    raw = random.uniform(1, 3, (3, 7, 144)).astype(np.float32)
    raw[:, 4:] = np.where(random.random((3, 3, 144)) < 0.08, random.uniform(-3, 4, (3, 3, 144)), -9)
    sizes = np.array([[80, 128], [96, 96], [120, 90]], np.float32)

    (rows,) = open_session(example.build_choice()).run(None, {"raw": raw, "size": sizes})

    for one, size, found in zip(raw, sizes, rows, strict=True):
        boxes = example.suppress(example.choose_boxes(example.read_boxes(one[None])))
        assert len(boxes) > 5
        expected = example.place_boxes(boxes, tuple(size.tolist()))[0]
        assert example.list_objects(found)
        np.testing.assert_allclose(sort_rows(found), sort_rows(expected), atol=1e-3)


def sort_rows(rows: Any) -> Any:
    """Return rows by score: boxes that are clipped at the same side can be in any order."""
    return rows[np.argsort(-rows[:, 4], kind="stable")]


def test_load_net_of_untrained_model_returns_its_weights_and_predict_no_objects(
    example: Any, tmp_path: Path
) -> None:
    net = example.ShapeNet().eval()
    onnx.save(example.build_model(net), tmp_path / "model.onnx")

    loaded = example.load_net(tmp_path / "model.onnx")

    for name, weight in net.state_dict().items():
        np.testing.assert_array_equal(loaded.state_dict()[name].numpy(), weight.numpy())
    answers = example.predict(str(SHAPES / "000.png"), tmp_path / "model.onnx")
    assert answers == []


def test_build_choice_and_choose_boxes_rank_boxes_whose_scores_saturate(example: Any) -> None:
    raw = np.full((1, 7, 144), -9, np.float32)
    raw[:, :4] = 2
    # In float32, the sigmoid of both is 0.9999974. The first place would win a tie.
    raw[0, 6, 66:68] = 12.83723, 12.857393
    assert len(np.unique(1 / (1 + np.exp(-raw[0, 6, 66:68])))) == 1

    (rows,) = open_session(example.build_choice()).run(
        None, {"raw": raw, "size": np.array([[96, 96]], np.float32)}
    )

    (found,) = example.list_objects(rows)
    (expected,) = example.list_objects(
        example.suppress(example.choose_boxes(example.read_boxes(raw)))
    )
    assert found["box"] == expected["box"] == [44, 28, 76, 60]


def test_build_choice_without_detected_shape_returns_only_padding(example: Any) -> None:
    choice = open_session(example.build_choice())
    raw = np.full((2, 7, 144), -9, np.float32)

    (rows,) = choice.run(None, {"raw": raw, "size": np.array([[80, 100], [96, 96]], np.float32)})

    assert rows[..., :5].max() == 0
    assert set(rows[..., 5].reshape(-1).tolist()) == {-1.0}


def test_check_of_drawn_shapes_pipeline_succeeds() -> None:
    checked = check(open_project(ROOT), ROOT / "configs/pipelines/drawn-shapes.yaml")

    assert checked.pipeline.system is not None
