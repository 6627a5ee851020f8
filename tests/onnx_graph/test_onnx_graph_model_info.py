"""What an ONNX file says about itself."""

from __future__ import annotations

from onnx import TensorProto, helper

from onnx_ops.onnx_graph.model_info import count_operators


def test_count_operators_names_the_version_that_a_definition_is_of() -> None:
    nodes = [
        helper.make_node("Relu", ["x"], ["a"]),
        helper.make_node("Relu", ["a"], ["b"]),
        helper.make_node("Gelu", ["b"], ["c"], domain="com.microsoft"),
        helper.make_node("Scaler", ["c"], ["d"], domain="ai.onnx.ml"),
        helper.make_node("Own", ["d"], ["y"], domain="acme"),
    ]
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1]) for name in ("x", "y")]
    body = helper.make_function(
        "acme", "Own", ["x"], ["y"], [helper.make_node("Relu", ["x"], ["y"])], [helper.make_opsetid("", 18)]
    )
    imports = [helper.make_opsetid(*pair) for pair in (("", 13), ("com.microsoft", 1), ("ai.onnx.ml", 3), ("acme", 1))]
    model = helper.make_model(
        helper.make_graph(nodes, "g", ends[:1], ends[1:]), opset_imports=imports, functions=[body]
    )
    assert count_operators(model) == {
        "Relu-13": 3,
        "acme::Own": 1,
        "ai.onnx.ml::Scaler-1": 1,
        "com.microsoft::Gelu": 1,
    }
