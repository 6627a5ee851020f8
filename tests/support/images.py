"""Encoded images, and a model that decodes them by onnxruntime-extensions."""

from __future__ import annotations

import importlib.util
import io
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper
from PIL import Image

from onnx_ops.domain.artifact import digest_file
from onnx_ops.domain.target import CustomOps
from onnx_ops.onnx_graph.joining import DECODER_DOMAIN, build_image_decoder, join_graphs

LIBRARY = "decoder.so"


def draw_pixels(height: int = 12, width: int = 20, seed: int = 0) -> np.ndarray[Any, Any]:
    """Return pixels of shape (height, width, 3) that are close to one random color."""
    draw = np.random.default_rng(seed)
    color = draw.integers(30, 225, 3)
    return (color + draw.integers(-30, 31, (height, width, 1))).astype(np.uint8)


def encode_image(pixels: np.ndarray[Any, Any], kind: str = "PNG", **options: Any) -> bytes:
    """Return pixels as an image file."""
    stream = io.BytesIO()
    image = Image.fromarray(pixels)
    mode = options.pop("mode", "")
    (image.convert(mode) if mode else image).save(stream, kind, **options)
    return stream.getvalue()


def pad_rows(images: Sequence[bytes]) -> np.ndarray[Any, Any]:
    """Return images as rows of bytes, padded with zeros."""
    rows = np.zeros((len(images), max(map(len, images))), np.uint8)
    for row, content in zip(rows, images, strict=True):
        row[: len(content)] = np.frombuffer(content, np.uint8)
    return rows


def find_decoder_library() -> Path:
    """Return the library of onnxruntime-extensions, without importing the package."""
    spec = importlib.util.find_spec("onnxruntime_extensions")
    assert spec is not None
    assert spec.submodule_search_locations
    (library,) = Path(spec.submodule_search_locations[0]).glob("_extensions_pydll*.so")
    return library


def declare_decoder(library: Path) -> CustomOps:
    """Return the declaration of a library for a target."""
    return CustomOps(path=str(library), digest=digest_file(library), domains=(DECODER_DOMAIN,))


def build_mean_model(height: int = 4, width: int = 4) -> onnx.ModelProto:
    """Return a model that decodes images, and returns the mean of each channel."""
    graph = helper.make_graph(
        [helper.make_node("ReduceMean", ["pixels", "axes"], ["mean"], "mean", keepdims=0)],
        "mean",
        [helper.make_tensor_value_info("pixels", TensorProto.FLOAT, ["batch", 3, height, width])],
        [helper.make_tensor_value_info("mean", TensorProto.FLOAT, ["batch", 3])],
        [helper.make_tensor("axes", TensorProto.INT64, [2], [2, 3])],
    )
    net = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    return join_graphs([build_image_decoder(height, width), net])


def write_mean_model(folder: Path) -> None:
    """Write the model of means and its library into a folder."""
    folder.mkdir(exist_ok=True)
    (folder / "model.onnx").write_bytes(build_mean_model().SerializeToString())
    shutil.copyfile(find_decoder_library(), folder / LIBRARY)
