"""A copy of a graph with intermediate values as outputs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from onnx_ops.adapters.runtimes.onnxruntime import OnnxRuntime
from onnx_ops.domain.target import Target
from onnx_ops.onnx_graph.files import collect_constants
from onnx_ops.onnx_graph.instrumentation import (
    NAME_SCOPES,
    list_activations,
    list_computed_values,
    list_quantizable_nodes,
    write_with_outputs,
    write_with_quantized_node,
)
from onnx_ops.plugins import load
from onnx_ops.testing.models import images, rows, write_convolution, write_perceptron
from tests.measure.search_parts import write_words

TARGET = Target(name="cpu")


def test_list_computed_values_returns_values_in_graph_order_with_nodes(perceptron: Path) -> None:
    values = list_computed_values(perceptron)
    assert [(v.name, v.node, v.op_type) for v in values[:2]] == [
        ("first.product", "first", "MatMul"),
        ("first.sum", "first_bias", "Add"),
    ]
    assert values[-1].name == "scores"
    assert {v.scope for v in values} == {""}


@pytest.mark.parametrize(
    ("scopes", "expected"),
    [
        ("['', 'features', 'features.2', 'conv2d_1']", "features.2"),
        ("['', 'view']", ""),
        ("['alone']", ""),
        ("not a list at all", ""),
        ("[" * 100_000, ""),
    ],
)
def test_list_computed_values_returns_innermost_module_or_empty_text_as_scope(
    perceptron: Path, scopes: str, expected: str
) -> None:
    model = onnx.load(perceptron)
    model.graph.node[0].metadata_props.add(key=NAME_SCOPES, value=scopes)
    model.graph.node[0].name = ""
    onnx.save(model, perceptron)
    first = list_computed_values(perceptron)[0]
    assert (first.scope, first.node) == (expected, "first.product")


def test_write_with_outputs_adds_values_after_same_outputs(perceptron: Path) -> None:
    copy = perceptron.with_name("copy.onnx")
    write_with_outputs(perceptron, ["first.product", "second.out", "scores", "first.product"], copy)
    (before,), (after,) = (OnnxRuntime().run(p, TARGET, (rows(5),)) for p in (perceptron, copy))
    assert list(after) == ["scores", "first.product", "second.out"]
    np.testing.assert_array_equal(before["scores"], after["scores"])
    weights = {
        t.name: onnx.numpy_helper.to_array(t) for t in onnx.load(perceptron).graph.initializer
    }
    product: np.ndarray[Any, Any] = after["first.product"]
    np.testing.assert_allclose(
        product, rows(5)["x"] @ weights["first.weight"], rtol=1e-5, atol=1e-6
    )


def test_write_with_outputs_shares_external_weights(perceptron: Path) -> None:
    model = onnx.load(perceptron)
    onnx.save_model(
        model, perceptron, save_as_external_data=True, location="weights.bin", size_threshold=0
    )
    copy = perceptron.with_name("copy.onnx")
    write_with_outputs(perceptron, ["first.sum"], copy)
    assert sorted(p.name for p in perceptron.parent.iterdir()) == [
        "copy.onnx",
        "model.onnx",
        "weights.bin",
    ]
    stored = onnx.load(copy, load_external_data=False).graph.initializer
    assert {tensor.data_location for tensor in stored} == {onnx.TensorProto.EXTERNAL}
    assert set(OnnxRuntime().run(copy, TARGET, (rows(3),))[0]) == {"scores", "first.sum"}


CPU = Target(name="cpu-1t")


def answers(path: Path, feed: dict[str, Any]) -> list[Any]:
    (found,) = load("runtimes", "onnxruntime").run(path, CPU, (feed,))
    return list(found.values())


def test_list_quantizable_nodes_returns_nodes_that_method_quantizes(
    perceptron: Path, tmp_path: Path
) -> None:
    cnn = write_convolution(tmp_path / "cnn.onnx")
    expected = {
        "static": ("first", "second", "third"),
        "dynamic": ("first", "second", "third"),
        "weight-only": (),
    }
    assert {method: list_quantizable_nodes(perceptron, method) for method in expected} == expected
    assert list_quantizable_nodes(cnn, "static") == ("first", "second")
    assert list_quantizable_nodes(cnn, "dynamic") == ()


def test_write_with_quantized_node_of_table_uses_one_scale(tmp_path: Path) -> None:
    write_words(tmp_path / "words.onnx")
    assert list_quantizable_nodes(tmp_path / "words.onnx", "dynamic") == ("table", "head")
    copy = tmp_path / "alone.onnx"
    write_with_quantized_node(
        tmp_path / "words.onnx", "table", copy, ranges=None, weight_levels=127
    )
    before, after = (collect_constants(onnx.load(path)) for path in (tmp_path / "words.onnx", copy))
    table, rounded = (
        numpy_helper.to_array(before["table_w"]),
        numpy_helper.to_array(after["table_w_alone"]),
    )
    step = np.abs(table).max() / 127
    assert 0.3 * step < np.abs(table - rounded).max() <= 0.51 * step
    assert len(onnx.load(copy).graph.node) == 3


@pytest.mark.parametrize("node", ["first", "second", "third"])
@pytest.mark.parametrize("static", [True, False])
def test_write_with_quantized_node_rounds_only_one_node(
    perceptron: Path, node: str, static: bool
) -> None:
    copy = perceptron.with_name("alone.onnx")
    ranges = {
        name: (-16.0, 16.0) for names in list_activations(perceptron).values() for name in names
    }
    write_with_quantized_node(
        perceptron, node, copy, ranges=ranges if static else None, weight_levels=127
    )
    feed = rows(32)
    exact, rounded = answers(perceptron, feed)[0], answers(copy, feed)[0]
    away = np.sqrt(np.mean((exact - rounded) ** 2)) / np.std(exact)
    assert 0 < away < 0.2
    before, after = (
        {n.name for n in onnx.load(path).graph.initializer} for path in (perceptron, copy)
    )
    assert sum(not name.endswith(("scale_0_alone", "zero_0_alone")) for name in after - before) == 1


def test_write_with_quantized_node_uses_requested_levels_in_each_channel(tmp_path: Path) -> None:
    path = write_convolution(tmp_path / "cnn.onnx")
    node = next(n for n in onnx.load(path).graph.node if n.op_type == "Conv")
    write_with_quantized_node(
        path, node.name, tmp_path / "alone.onnx", ranges=None, weight_levels=7
    )
    stored = numpy_helper.to_array(
        collect_constants(onnx.load(tmp_path / "alone.onnx"))[f"{node.input[1]}_alone"]
    )
    for channel in stored:
        step = np.abs(channel).max() / 7
        assert np.allclose(channel / step, np.round(channel / step), atol=1e-3)
    assert answers(tmp_path / "alone.onnx", images(4))


@pytest.mark.parametrize(("node", "why"), [("tenth", "no node is called"), ("first", "opset 11")])
def test_write_with_quantized_node_of_unknown_node_or_old_opset_raises_value_error(
    tmp_path: Path, node: str, why: str
) -> None:
    path = write_perceptron(tmp_path / "model.onnx", opset=10, ir_version=5)
    with pytest.raises(ValueError, match=why):
        write_with_quantized_node(path, node, tmp_path / "a.onnx", ranges=None, weight_levels=127)
