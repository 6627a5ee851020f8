"""Intermediate values as outputs of a copy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from onnx_ops.adapters.runtimes.onnxruntime import OnnxRuntime
from onnx_ops.domain.target import Target
from onnx_ops.errors import RefusedError
from onnx_ops.onnx_graph.instrumentation import (
    MAX_EXPOSED_VALUES,
    NAME_SCOPES,
    list_computed_values,
    write_with_outputs,
)
from onnx_ops.testing.models import rows, write_perceptron

TARGET = Target(name="cpu")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "model.onnx"
    write_perceptron(path)
    return path


def test_values_come_in_the_order_of_the_graph_with_the_node_that_computes_them(path: Path) -> None:
    values = list_computed_values(path)
    assert [(v.name, v.node, v.op_type) for v in values[:2]] == [
        ("first.product", "first", "MatMul"),
        ("first.sum", "first_bias", "Add"),
    ]
    assert values[-1].name == "scores"
    assert {v.scope for v in values} == {""}


@pytest.mark.parametrize(
    ("scopes", "told"),
    [
        ("['', 'features', 'features.2', 'conv2d_1']", "features.2"),
        ("['', 'view']", ""),
        ("['alone']", ""),
        ("not a list at all", ""),
        ("[" * 100_000, ""),
    ],
)
def test_the_module_is_the_last_one_around_the_node(path: Path, scopes: str, told: str) -> None:
    model = onnx.load(path)
    model.graph.node[0].metadata_props.add(key=NAME_SCOPES, value=scopes)
    model.graph.node[0].name = ""
    onnx.save(model, path)
    assert (list_computed_values(path)[0].scope, list_computed_values(path)[0].node) == (told, "first.product")


def test_the_copy_gives_the_values_after_the_same_outputs(path: Path) -> None:
    copy = path.with_name("copy.onnx")
    write_with_outputs(path, ["first.product", "second.out", "scores", "first.product"], copy)
    (before,), (after,) = (OnnxRuntime().run(p, TARGET, (rows(5),)) for p in (path, copy))
    assert list(after) == ["scores", "first.product", "second.out"]
    np.testing.assert_array_equal(before["scores"], after["scores"])
    weights = {t.name: onnx.numpy_helper.to_array(t) for t in onnx.load(path).graph.initializer}
    product: np.ndarray[Any, Any] = after["first.product"]
    np.testing.assert_allclose(product, rows(5)["x"] @ weights["first.weight"], rtol=1e-5, atol=1e-6)


def test_weights_beside_the_file_are_shared_and_not_copied(path: Path) -> None:
    model = onnx.load(path)
    onnx.save_model(model, path, save_as_external_data=True, location="weights.bin", size_threshold=0)
    copy = path.with_name("copy.onnx")
    write_with_outputs(path, ["first.sum"], copy)
    assert sorted(p.name for p in path.parent.iterdir()) == ["copy.onnx", "model.onnx", "weights.bin"]
    assert set(OnnxRuntime().run(copy, TARGET, (rows(3),))[0]) == {"scores", "first.sum"}


def test_weights_outside_the_folder_are_refused(path: Path) -> None:
    model = onnx.load(path)
    onnx.save_model(model, path, save_as_external_data=True, location="weights.bin", size_threshold=0)
    hostile = onnx.load(path, load_external_data=False)
    hostile.graph.initializer[0].external_data[0].value = "../weights.bin"
    path.write_bytes(hostile.SerializeToString())
    with pytest.raises(RefusedError):
        write_with_outputs(path, ["first.sum"], path.with_name("copy.onnx"))


def test_what_cannot_be_shown_is_told(path: Path, tmp_path: Path) -> None:
    copy = path.with_name("copy.onnx")
    with pytest.raises(ValueError, match=r"computes 'first\.weight'"):
        write_with_outputs(path, ["first.weight"], copy)
    with pytest.raises(ValueError, match="are more than"):
        write_with_outputs(path, ["scores"] * (MAX_EXPOSED_VALUES + 1), copy)
    with pytest.raises(ValueError, match="same folder"):
        write_with_outputs(path, ["scores"], tmp_path / "elsewhere" / "copy.onnx")
    with pytest.raises(ValueError, match="same folder"):
        write_with_outputs(path, ["scores"], path)
    assert not copy.exists()
