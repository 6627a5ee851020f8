"""Endpoints whose model takes encoded images."""

from __future__ import annotations

import json
import struct
from base64 import b64encode
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from benchmarks.fuzz_images import ALLOWED_MB, send_images, serving_images
from onnx_ops.domain.artifact import TensorSpec
from onnx_ops.domain.encoded_inputs import ENCODED_PROPERTY
from onnx_ops.domain.endpoint import Deployment
from onnx_ops.errors import UserError
from onnx_ops.protocol.images import ImageLimits
from onnx_ops.serving.inference.image_tensors import IMAGE_DTYPE
from onnx_ops.serving.inference.requests import read_infer
from onnx_ops.serving.inference.signature import ModelSignature
from onnx_ops.testing.endpoints import state_of
from tests.serving.serving_process import INFER, Server, deploy, load_once
from tests.support.images import LIBRARY, draw_pixels, encode_image, write_mean_model

PIXELS = draw_pixels(12, 20), draw_pixels(30, 8, seed=1)
PNG, JPEG = encode_image(PIXELS[0]), encode_image(PIXELS[1], "JPEG", quality=95)

NO_TABLE = JPEG.replace(b"\xff\xdb", b"\xff\xfe")
"""A file without quantization tables, at which libjpeg ends the process."""


def build_signature(**limits: int) -> ModelSignature:
    inputs = {
        "image": TensorSpec(name="image", dtype=IMAGE_DTYPE, shape=("batch",)),
        "weight": TensorSpec(name="weight", dtype="float32", shape=("rows", 1)),
    }
    outputs = {"y": TensorSpec(name="y", dtype="float32", shape=("batch", 3))}
    return ModelSignature(
        model="m",
        version="1",
        inputs=inputs,
        outputs=outputs,
        optional=frozenset({"weight"}),
        image_limits=ImageLimits(**limits),
    )


def build_tensor(*images: bytes, **changes: Any) -> dict[str, Any]:
    data = [b64encode(image).decode() for image in images]
    return {"name": "image", "datatype": "BYTES", "shape": [len(images)], "data": data} | changes


def encode_body(*tensors: dict[str, Any]) -> bytes:
    return json.dumps({"inputs": tensors}).encode()


def build_binary(images: Sequence[bytes]) -> tuple[bytes, int]:
    tail = b"".join(struct.pack("<I", len(image)) + image for image in images)
    header = encode_body(
        {
            "name": "image",
            "datatype": "BYTES",
            "shape": [len(images)],
            "parameters": {"binary_data_size": len(tail)},
        }
    )
    return header + tail, len(header)


def test_read_infer_reads_images_from_json_binary_form_and_raw_body() -> None:
    signature = build_signature()
    from_json = read_infer(encode_body(build_tensor(PNG, JPEG)), None, signature)
    from_binary = read_infer(*build_binary([PNG, JPEG]), signature)
    from_raw = read_infer(JPEG, 0, signature)
    assert from_json.feed["image"].tolist() == [PNG, JPEG]
    assert from_binary.feed["image"].tolist() == [PNG, JPEG]
    assert from_raw.feed["image"].tolist() == [JPEG]
    assert from_json.rows == 0  # Requests with images are not batched.


@pytest.mark.parametrize(
    ("tensor", "cause"),
    [
        (build_tensor(), "0 images"),
        (build_tensor(PNG, PNG, PNG, PNG), "4 images; it must contain 1 to 3"),
        (build_tensor(PNG, shape=[2]), "a list of 2 strings"),
        (build_tensor(PNG, shape=[1, 1]), "shape"),
        (build_tensor(PNG, data=[7]), "image 0 is not a string"),
        (build_tensor(PNG, data=["a"]), "image 0 is not in base64"),
        (build_tensor(PNG, data=["\u00e9===="]), "image 0 is not in base64"),
        (build_tensor(PNG, data="abc"), "a list of 1 strings"),
        (build_tensor(PNG, datatype="UINT8"), "must be BYTES"),
        (build_tensor(PNG, PNG[:50]), "image 1: the PNG file could not be decoded"),
        (build_tensor(PNG, b"x" * 9000), "image 1 has more than 5000 bytes"),
        (build_tensor(b"x" * 5001), "image 0: the image has 5001 bytes"),
    ],
)
def test_read_infer_of_invalid_images_raises_user_error_with_cause(
    tensor: dict[str, Any], cause: str
) -> None:
    with pytest.raises(UserError, match=cause):
        read_infer(encode_body(tensor), None, build_signature(max_images=3, max_bytes=5000))


def test_read_infer_with_different_numbers_of_images_and_rows_raises_user_error() -> None:
    weight = {"name": "weight", "datatype": "FP32", "shape": [3, 1], "data": [1, 2, 3]}
    with pytest.raises(UserError, match="2 in 'image', 3 in 'weight'"):
        read_infer(encode_body(build_tensor(PNG, JPEG), weight), None, build_signature())


def test_read_infer_of_two_inputs_with_too_many_images_raises_user_error() -> None:
    inputs = {
        name: TensorSpec(name=name, dtype=IMAGE_DTYPE, shape=(f"{name}_count",))
        for name in ("left", "right")
    }
    signature = ModelSignature(
        model="m", version="1", inputs=inputs, outputs={}, image_limits=ImageLimits(max_images=3)
    )
    left, right = build_tensor(PNG, name="left"), build_tensor(JPEG, name="right")
    feed = read_infer(encode_body(left, right), None, signature).feed
    assert {name: len(images) for name, images in feed.items()} == {"left": 1, "right": 1}
    # The images are counted first, so the corrupt one does not decide the error.
    more = build_tensor(PNG, b"corrupt", name="left"), build_tensor(JPEG, PNG, name="right")
    with pytest.raises(UserError, match="the request has 4 images, and the limit is 3"):
        read_infer(encode_body(*more), None, signature)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("images") / "model"
    write_mean_model(folder)
    return folder


@pytest.fixture(scope="module")
def deployment(folder: Path) -> Deployment:
    return replace(deploy(folder), custom_ops=(LIBRARY,))


def compute_means() -> list[Any]:
    return [pixels.mean((0, 1)) / 255 for pixels in PIXELS]


def build_feed(*images: bytes) -> dict[str, Any]:
    array = np.empty(len(images), object)
    array[:] = images
    return {"image": array}


def test_loaded_model_runs_several_images_and_refuses_corrupt_ones(deployment: Deployment) -> None:
    model = load_once(deployment)
    assert model.signature.inputs["image"].dtype == IMAGE_DTYPE
    assert model.is_unbounded
    means: Any
    (means,) = model.run(("mean",), build_feed(PNG, JPEG, PNG))
    np.testing.assert_allclose(means[:2], compute_means(), atol=0.03)
    np.testing.assert_array_equal(means[0], means[2])
    # `run` does not check images, so the model's decoder gets this truncated file.
    with pytest.raises(UserError, match="cannot be decoded"):
        model.run(("mean",), build_feed(PNG[:60]))


@pytest.mark.parametrize("value", ["[]", "{", '{"image": "sound"}', '"image"'])
def test_load_model_with_invalid_image_property_raises_user_error(
    tmp_path: Path, value: str
) -> None:
    write_mean_model(tmp_path / "model")
    path = tmp_path / "model" / "model.onnx"
    model = onnx.load(path)
    (entry,) = (prop for prop in model.metadata_props if prop.key == ENCODED_PROPERTY)
    entry.value = value
    onnx.save(model, path)
    with pytest.raises(UserError, match="is not valid"):
        load_once(replace(deploy(path.parent), custom_ops=(LIBRARY,)))


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory, deployment: Deployment) -> Iterator[Server]:
    """Yield a server of the model with a limit of pixels and images."""
    state = tmp_path_factory.mktemp("served") / "state"
    options = ("--max-pixels=1000", "--max-images=3")
    with Server(folder=state, options=options) as server:
        assert server.publish(state_of(deployment, blue=100), 1).status == 200
        yield server


@pytest.mark.services
def test_server_answers_valid_images_and_refuses_invalid_or_too_large_ones_with_400(
    images: Server,
) -> None:
    workers = images.workers()
    answer = images.call("POST", INFER, {"inputs": [build_tensor(PNG, JPEG)]})
    assert answer.status == 200
    (output,) = answer.json()["outputs"]
    assert output["shape"] == [2, 3]
    np.testing.assert_allclose(np.reshape(output["data"], (2, 3)), compute_means(), atol=0.03)
    large = encode_image(draw_pixels(40, 40))
    for content in (b"", b"GIF89a", PNG[:70], JPEG[:-40], large, NO_TABLE):
        refused = images.call("POST", INFER, {"inputs": [build_tensor(PNG, content)]})
        assert refused.status == 400, refused.body
        assert "image 1" in refused.json()["error"]
    assert images.workers() == workers
    named = images.call("POST", "/invocations", {"inputs": [b64encode(PNG).decode()]})
    assert named.status == 200
    np.testing.assert_allclose(named.json()["predictions"]["mean"], compute_means()[:1], atol=0.03)
    metadata = images.call("GET", "/v2/models/m").json()
    assert metadata["inputs"] == [{"name": "image", "datatype": "BYTES", "shape": [-1]}]
    assert images.call("GET", "/openapi.json").status == 200
    assert images.call("GET", "/").status == 200


@pytest.mark.services
@pytest.mark.parametrize("requests", [60, pytest.param(2000, marks=pytest.mark.nightly)])
def test_damaged_images_end_no_worker_and_keep_memory_bounded(
    tmp_path: Path, requests: int
) -> None:
    with serving_images(tmp_path) as server:
        counts, growth_mb = send_images(server, seed=1, requests=requests)
    assert set(counts) == {200, 400}
    assert growth_mb < ALLOWED_MB
