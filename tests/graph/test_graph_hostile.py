"""Files made to mislead: external data in every corner of a model, and types that do not exist."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import onnx
import pytest
from onnx import AttributeProto, TensorProto, helper

from onnx_ops.domain.target import Target
from onnx_ops.errors import NotFound, Refused
from onnx_ops.graph.check import ceiling
from onnx_ops.graph.files import graphs, nodes, read_structure, write_model
from onnx_ops.graph.inspect import info
from onnx_ops.testing.models import write_external, write_perceptron


def outside() -> TensorProto:
    tensor = TensorProto(name="hidden", data_type=TensorProto.FLOAT, dims=[1], data_location=TensorProto.EXTERNAL)
    tensor.external_data.add(key="location", value="../secret")
    return tensor


def graph_with(tensor: TensorProto) -> onnx.GraphProto:
    return helper.make_graph([], "inner", [], [], [tensor])


def in_training(model: onnx.ModelProto) -> None:
    model.training_info.add().algorithm.CopyFrom(graph_with(outside()))


def in_default_of_a_function(model: onnx.ModelProto) -> None:
    function = model.functions.add(name="f", domain="own")
    function.attribute_proto.add(name="value", type=AttributeProto.TENSOR).t.CopyFrom(outside())


def in_branch_of_a_function(model: onnx.ModelProto) -> None:
    node = model.functions.add(name="f", domain="own").node.add(op_type="If")
    node.attribute.add(name="then_branch", type=AttributeProto.GRAPH).g.CopyFrom(graph_with(outside()))


def in_sparse_attribute(model: onnx.ModelProto) -> None:
    attribute = model.graph.node.add(op_type="Constant").attribute.add(name="sparse_value")
    attribute.type = AttributeProto.SPARSE_TENSOR
    attribute.sparse_tensor.values.CopyFrom(outside())


def in_attribute_of_false_type(model: onnx.ModelProto) -> None:
    model.graph.node.add(op_type="Constant").attribute.add(name="v", type=AttributeProto.INT).t.CopyFrom(outside())


def in_list_of_graphs(model: onnx.ModelProto) -> None:
    model.graph.node.add(op_type="Own").attribute.add(name="g").graphs.append(graph_with(outside()))


def in_sparse_initializer(model: onnx.ModelProto) -> None:
    model.graph.sparse_initializer.add().indices.CopyFrom(outside())


@pytest.mark.parametrize(
    "hide",
    [
        in_training,
        in_default_of_a_function,
        in_branch_of_a_function,
        in_sparse_attribute,
        in_attribute_of_false_type,
        in_list_of_graphs,
        in_sparse_initializer,
    ],
)
def test_external_data_is_found_wherever_it_hides(hide: Callable[[onnx.ModelProto], None], tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    write_perceptron(path)
    model = read_structure(path)
    hide(model)
    path.write_bytes(model.SerializeToString())
    with pytest.raises(Refused, match="outside its folder"):
        info(path)


@pytest.mark.parametrize("location", ["zero\0byte", "long" * 2000, "", "a/../../b", "..\\b"])
def test_names_that_are_no_names_are_refused(location: str, tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    model = helper.make_model(graph_with(outside()))
    model.graph.initializer[0].external_data[0].value = location
    model.graph.output.add(name="hidden")
    path.write_bytes(model.SerializeToString())
    with pytest.raises((Refused, NotFound)):
        read_structure(path)


def test_a_circle_of_links_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    write_external(path, "../circle")
    model = onnx.load(path, load_external_data=False)
    model.graph.initializer[0].external_data[0].value = "circle"
    path.write_bytes(model.SerializeToString())
    (tmp_path / "circle").symlink_to(tmp_path / "circle")
    with pytest.raises(Refused):
        read_structure(path)


def test_a_type_that_does_not_exist_is_undefined(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    write_perceptron(path)
    model = read_structure(path)
    model.graph.output[0].type.tensor_type.elem_type = 99
    path.write_bytes(model.SerializeToString())
    assert info(path).outputs[0].dtype == "undefined"


def test_the_other_name_of_the_default_domain_hides_no_opset(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    write_perceptron(path, opset=22)
    model = read_structure(path)
    model.opset_import[0].domain = "ai.onnx"
    path.write_bytes(model.SerializeToString())
    assert info(path).opsets == {"": 22}
    assert "opset <= 21" in ceiling(info(path), Target(name="old", max_opset=21))


def test_nodes_and_graphs_of_branches_are_walked_once(tmp_path: Path) -> None:
    then = helper.make_graph([helper.make_node("Relu", ["x"], ["a"])], "then", [], [])
    other = helper.make_graph([helper.make_node("Neg", ["x"], ["b"])], "else", [], [])
    branch = helper.make_node("If", ["c"], ["y"], then_branch=then, else_branch=other)
    model = helper.make_model(helper.make_graph([branch], "outer", [], []))
    assert sorted(node.op_type for node in nodes(model)) == ["If", "Neg", "Relu"]
    assert sorted(graph.name for graph in graphs(model)) == ["else", "outer", "then"]


def test_operator_sets_are_written_in_order(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    write_perceptron(path)
    model = read_structure(path)
    model.opset_import.insert(0, helper.make_opsetid("own", 1))
    write_model(model, path)
    assert [entry.domain for entry in read_structure(path).opset_import] == ["", "own"]
