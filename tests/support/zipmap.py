"""A classifier as converters of scikit-learn write it by default."""

from __future__ import annotations

import onnx
from onnx import TensorProto, helper


def zipped(keys: list[int]) -> onnx.ModelProto:
    """Return the softmax of `x` (N, 3) as output `probabilities`.

    The output has one map for each row, with these keys.
    """
    maps = helper.make_sequence_type_proto(
        helper.make_map_type_proto(
            TensorProto.INT64, helper.make_tensor_type_proto(TensorProto.FLOAT, [])
        )
    )
    graph = helper.make_graph(
        [
            helper.make_node("Softmax", ["x"], ["p"]),
            helper.make_node(
                "ZipMap", ["p"], ["probabilities"], domain="ai.onnx.ml", classlabels_int64s=keys
            ),
        ],
        "classifier",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", 3])],
        [helper.make_value_info("probabilities", maps)],
    )
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("ai.onnx.ml", 1)]
    return helper.make_model(graph, ir_version=9, opset_imports=opsets)
