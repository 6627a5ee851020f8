"""Graphs that are joined into one model."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper
from PIL import Image

import onnx_ops
from onnx_ops.errors import UserError
from onnx_ops.onnx_graph.input_bounds import read_input_bounds
from onnx_ops.onnx_graph.joining import build_image_decoder, join_graphs
from onnx_ops.onnx_graph.model_info import read_encoded_inputs, read_model_info
from tests.support.images import (
    build_mean_model,
    draw_pixels,
    encode_image,
    find_decoder_library,
    pad_rows,
)


def build_step(
    operator: str, source: str, result: str, *, opset: int = 18, weight: float = 2.0
) -> onnx.ModelProto:
    """Return a graph of one operator with a weight, whose names all steps share."""
    graph = helper.make_graph(
        [helper.make_node(operator, [source, "w"], [result], "node")],
        "step",
        [helper.make_tensor_value_info(source, TensorProto.FLOAT, ["batch", 2])],
        [helper.make_tensor_value_info(result, TensorProto.FLOAT, ["batch", 2])],
        [helper.make_tensor("w", TensorProto.FLOAT, [1], [weight])],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)


def run(model: onnx.ModelProto, x: list[float]) -> list[float]:
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    (y,) = session.run(None, {session.get_inputs()[0].name: np.array([x], np.float32)})
    return [float(value) for value in y[0]]


def test_join_graphs_with_equal_inner_names_runs_steps_in_order(tmp_path: Path) -> None:
    steps = [
        build_step("Add", "x", "a", weight=1),
        build_step("Mul", "a", "b", weight=3),
        build_step("Sub", "other", "y", weight=5),
    ]
    onnx.save(steps[1], tmp_path / "second.onnx")
    joined = onnx_ops.join_graphs(
        [steps[0], tmp_path / "second.onnx", steps[2]], tmp_path / "joined.onnx"
    )
    assert run(joined, [1, 2]) == [1, 4]
    assert run(onnx.load(tmp_path / "joined.onnx"), [1, 2]) == [1, 4]
    assert [i.name for i in joined.graph.input] == ["x"]
    assert [o.name for o in joined.graph.output] == ["y"]


@pytest.mark.parametrize("number", [1, 2])
def test_join_graphs_with_input_named_like_prefixed_weight_keeps_both(number: int) -> None:
    steps = [build_step("Add", f"step{number}/w", "a", weight=1), build_step("Mul", "a", "y")]
    joined = onnx_ops.join_graphs(steps)
    assert [i.name for i in joined.graph.input] == [f"step{number}/w"]
    assert run(joined, [1, 2]) == run(
        onnx_ops.join_graphs([build_step("Add", "x", "a", weight=1), steps[1]]), [1, 2]
    )


def test_join_graphs_with_connect_argument_connects_values_of_different_names() -> None:
    joined = join_graphs(
        [build_step("Add", "x", "a"), build_step("Mul", "b", "y")], connect=[{"a": "b"}]
    )
    assert run(joined, [1, 2]) == [6, 8]


@pytest.mark.parametrize(
    ("steps", "connect", "cause"),
    [
        ([], [], "no graphs"),
        ([("Add", "x", "a", 18), ("Mul", "a", "y", 17)], [], "different opsets"),
        ([("Add", "x", "a", 18), ("Mul", "a", "y", 18)], [{"z": "a"}], "'z' cannot be connected"),
        ([("Add", "x", "a", 18), ("Mul", "a", "y", 18)], [{"a": "z"}], "'z' cannot be connected"),
        ([("Add", "x", "a", 18), ("Mul", "a", "x", 18)], [], "cannot be joined"),
    ],
)
def test_join_graphs_of_unfit_graphs_or_connections_raises_user_error(
    steps: list[tuple[str, str, str, int]], connect: list[dict[str, str]], cause: str
) -> None:
    models = [build_step(kind, source, result, opset=o) for kind, source, result, o in steps]
    with pytest.raises(UserError, match=cause):
        join_graphs(models, connect=connect)


def test_build_image_decoder_returns_rgb_planes_of_rgb_rgba_and_gray_images(tmp_path: Path) -> None:
    model = build_image_decoder(12, 20, scale=1.0, mean=(1, 2, 3), std=(2, 2, 2))
    options = ort.SessionOptions()
    options.register_custom_ops_library(str(find_decoder_library()))
    session = ort.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    pixels = draw_pixels(12, 20)
    gray = np.repeat(pixels[:, :, :1], 3, axis=2)
    rows = pad_rows(
        [
            encode_image(pixels),
            encode_image(pixels, mode="RGBA"),
            encode_image(gray, "JPEG", mode="L", quality=100),
            encode_image(pixels, "JPEG", quality=100, subsampling=0),
        ]
    )
    (planes,) = session.run(None, {"image": rows})
    expected = [
        ((each.astype(np.float32) - [1, 2, 3]) / 2).transpose(2, 0, 1)
        for each in (pixels, pixels, gray, pixels)
    ]
    np.testing.assert_allclose(planes[:2], expected[:2], atol=1e-4)
    np.testing.assert_allclose(planes[2:], expected[2:], atol=2)


@pytest.mark.parametrize(("height", "width"), [(70, 131), (96, 96), (200, 150), (37, 40), (5, 400)])
def test_build_image_decoder_with_letterbox_keeps_proportions_and_returns_size(
    height: int, width: int
) -> None:
    model = build_image_decoder(96, 64, scale=1.0, letterbox=114, size_output="size")
    onnx.checker.check_model(model)
    options = ort.SessionOptions()
    options.register_custom_ops_library(str(find_decoder_library()))
    session = ort.InferenceSession(model.SerializeToString(), options)
    pixels = draw_pixels(height, width)

    planes, size = session.run(None, {"image": pad_rows([encode_image(pixels)] * 2)})

    assert size.tolist() == [[height, width]] * 2
    ratio = min(96 / height, 64 / width)
    inner = (max(1, round(width * ratio)), max(1, round(height * ratio)))
    expected = np.full((3, 96, 64), 114, np.float32)
    for channel in range(3):
        plane = Image.fromarray(pixels[..., channel].astype(np.float32))
        small = plane.resize(inner, Image.Resampling.BILINEAR)
        expected[channel, : inner[1], : inner[0]] = np.asarray(small)
    np.testing.assert_allclose(planes, np.stack([expected] * 2), atol=1e-3)


def test_read_encoded_inputs_of_joined_decoder_returns_image_input(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    onnx.save(build_mean_model(), path)
    assert read_encoded_inputs(path) == {"image": "image"}
    assert read_input_bounds(path)["image"].encoded
    (given,) = read_model_info(path).inputs
    assert (given.dtype, given.shape) == ("uint8", ("batch", "?"))
