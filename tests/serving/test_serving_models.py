from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from onnx_ops.domain.artifact import TensorSpec
from onnx_ops.domain.endpoint import Deployment
from onnx_ops.errors import DigestMismatchError, InfrastructureError, NotFoundError, UserError
from onnx_ops.serving.inference.models import load_model
from onnx_ops.serving.inference.responses import InputsRejectedError
from tests.serving.serving_process import deploy

FLOAT, INT = TensorProto.FLOAT, TensorProto.INT64


def external_model(folder: Path, location: str) -> None:
    weight = TensorProto(name="w", data_type=FLOAT, dims=[4], data_location=TensorProto.EXTERNAL)
    for key, value in (("location", location), ("offset", "0"), ("length", "16")):
        weight.external_data.add(key=key, value=value)
    graph = helper.make_graph(
        [helper.make_node("Add", ["x", "w"], ["y"])],
        "m",
        [helper.make_tensor_value_info("x", FLOAT, ["b", 4])],
        [helper.make_tensor_value_info("y", FLOAT, ["b", 4])],
        [weight],
    )
    folder.mkdir(exist_ok=True)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    (folder / "model.onnx").write_bytes(model.SerializeToString())


def test_a_loaded_model_knows_its_tensors_and_runs(blue: Deployment) -> None:
    model = load_model(blue)
    assert model.signature.inputs == {"x": TensorSpec(name="x", dtype="float32", shape=("batch", 2))}
    (y,) = model.run(("y",), {"x": np.array([[1, 2]], np.float32)})
    np.testing.assert_array_equal(y, [[2, 4]])


def test_external_data_in_the_folder_is_loaded_and_covered_by_the_manifest(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    external_model(folder, "weights.bin")
    (folder / "weights.bin").write_bytes(np.full(4, 7, np.float32).tobytes())
    deployment = deploy(folder)
    (y,) = load_model(deployment).run(("y",), {"x": np.zeros((1, 4), np.float32)})
    np.testing.assert_array_equal(y, [[7, 7, 7, 7]])
    (folder / "weights.bin").write_bytes(np.full(4, 8, np.float32).tobytes())
    with pytest.raises(DigestMismatchError, match="digest mismatch"):
        load_model(deployment)


@pytest.mark.parametrize("kind", ["relative", "absolute", "link"])
def test_external_data_outside_the_folder_is_refused(tmp_path: Path, kind: str) -> None:
    (tmp_path / "secret.bin").write_bytes(bytes(16))
    folder = tmp_path / "m"
    place = {"relative": "../secret.bin", "absolute": str(tmp_path / "secret.bin"), "link": "link.bin"}[kind]
    external_model(folder, place)
    if kind == "link":
        (folder / "link.bin").symlink_to("../secret.bin")
    with pytest.raises(InfrastructureError, match="cannot load"):
        load_model(deploy(folder))


def test_files_that_are_missing_or_broken(tmp_path: Path, blue: Deployment) -> None:
    with pytest.raises(NotFoundError, match="folder does not exist"):
        load_model(replace(blue, location=str(tmp_path / "unrouted")))
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(NotFoundError, match=r"no model\.onnx"):
        load_model(deploy(empty))
    (empty / "model.onnx").write_bytes(b"not a model")
    with pytest.raises(InfrastructureError, match="cannot load"):
        load_model(deploy(empty))


def test_outputs_that_the_protocol_cannot_carry_are_refused_with_a_remedy(
    build: Callable[..., Deployment],
) -> None:
    deployment = build(
        [helper.make_node("SequenceConstruct", ["x"], ["s"])],
        [("x", FLOAT, ["b", 2])],
        [],
    )
    path = Path(deployment.location) / "model.onnx"
    model = onnx.load(path)
    model.graph.output.append(helper.make_tensor_sequence_value_info("s", FLOAT, ["b", 2]))
    onnx.save_model(model, path)
    with pytest.raises(UserError, match="has no datatype") as caught:
        load_model(deploy(path.parent))
    assert "ZipMap" in caught.value.remedy


def test_a_model_that_runs_on_other_sizes_only_is_loaded_without_warm_up(build: Callable[..., Deployment]) -> None:
    index = helper.make_node("Constant", [], ["i"], value=helper.make_tensor("i", INT, [1], [2]))
    gather = helper.make_node("Gather", ["x", "i"], ["y"], axis=1)
    model = load_model(build([index, gather], [("x", FLOAT, ["b", "n"])], [("y", FLOAT, ["b", 1])]))
    (y,) = model.run(("y",), {"x": np.array([[1, 2, 3]], np.float32)})
    assert y.tolist() == [[3]]
    assert model.seconds == 0


def test_a_model_of_categories_is_loaded_although_it_knows_no_empty_text(build: Callable[..., Deployment]) -> None:
    encode = helper.make_node("OneHotEncoder", ["city"], ["y"], domain="ai.onnx.ml", cats_strings=["Oslo"], zeros=0)
    deployment = build([encode], [("city", TensorProto.STRING, ["b", 1])], [("y", FLOAT, ["b", 1, 1])])
    (y,) = load_model(deployment).run(("y",), {"city": np.array([["Oslo"]], object)})
    assert y.tolist() == [[[1]]]


def test_a_model_that_fails_on_one_row_is_refused(build: Callable[..., Deployment]) -> None:
    shape = helper.make_node("Constant", [], ["s"], value=helper.make_tensor("s", INT, [1], [3]))
    reshape = helper.make_node("Reshape", ["x", "s"], ["y"])
    deployment = build([shape, reshape], [("x", FLOAT, ["b", 2])], [("y", FLOAT, [3])])
    with pytest.raises(InfrastructureError, match="fails on zeros"):
        load_model(deployment)


def test_inputs_that_the_runtime_refuses_are_unfit(blue: Deployment) -> None:
    with pytest.raises(InputsRejectedError, match="rejects these inputs"):
        load_model(blue).run(("y",), {"x": np.zeros((1, 2), np.float64)})


def test_optional_inputs_and_defaults_may_be_left_out(tmp_path: Path) -> None:
    maybe = helper.make_optional_type_proto(helper.make_tensor_type_proto(FLOAT, ["b"]))
    tensors = [
        helper.make_tensor_value_info("x", FLOAT, ["b", 2]),
        helper.make_value_info("o", maybe),
        helper.make_tensor_value_info("scale", FLOAT, [1]),
        helper.make_tensor_value_info("weights", FLOAT, [2]),
    ]
    graph = helper.make_graph(
        [
            helper.make_node("Mul", ["x", "scale"], ["scaled"]),
            helper.make_node("Add", ["scaled", "weights"], ["y"]),
            helper.make_node("OptionalHasElement", ["o"], ["has"]),
        ],
        "m",
        tensors,
        [
            helper.make_tensor_value_info("y", FLOAT, ["b", 2]),
            helper.make_tensor_value_info("has", TensorProto.BOOL, []),
        ],
        [helper.make_tensor("scale", FLOAT, [1], [2.0]), helper.make_tensor("weights", FLOAT, [2], [0.0, 1.0])],
    )
    folder = tmp_path / "m"
    folder.mkdir()
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    onnx.save_model(model, folder / "model.onnx")
    loaded = load_model(deploy(folder))
    assert list(loaded.signature.inputs) == ["x", "o", "scale"]  # weights are nobody's input
    assert loaded.signature.optional == {"o", "scale"}
    x = np.ones((1, 2), np.float32)
    y, has = loaded.run(("y", "has"), {"x": x})
    assert (y.tolist(), bool(has)) == ([[2, 3]], False)
    full = {"x": x, "o": np.zeros(1, np.float32), "scale": np.array([5], np.float32)}
    y, has = loaded.run(("y", "has"), full)
    assert (y.tolist(), bool(has)) == ([[5, 6]], True)


def test_bfloat16_runs_by_its_bits(build: Callable[..., Deployment]) -> None:
    bf16 = TensorProto.BFLOAT16
    nodes = [helper.make_node("Cast", ["x"], ["y"], to=FLOAT), helper.make_node("Cast", ["y"], ["z"], to=bf16)]
    model = load_model(build(nodes, [("x", bf16, ["b"])], [("y", FLOAT, ["b"]), ("z", bf16, ["b"])]))
    bits = np.array([0x3F80, 0x4000], np.uint16)
    z, y = model.run(("z", "y"), {"x": bits})
    assert y.tolist() == [1.0, 2.0]
    assert z.tolist() == bits.tolist()
    assert model.run(("z",), {"x": bits[:0]})[0].shape == (0,)


@pytest.mark.parametrize("kind", [TensorProto.FLOAT8E4M3FN, TensorProto.INT4])
def test_types_without_a_name_in_the_protocol_are_refused(build: Callable[..., Deployment], kind: int) -> None:
    deployment = build([helper.make_node("Cast", ["x"], ["y"], to=FLOAT)], [("x", kind, ["b"])], [("y", FLOAT, ["b"])])
    path = Path(deployment.location) / "model.onnx"
    model = onnx.load(path)
    model.opset_import[0].version = 21
    onnx.save_model(model, path)
    with pytest.raises(UserError, match="has no datatype"):
        load_model(deploy(path.parent))
