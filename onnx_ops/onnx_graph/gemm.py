"""Gemm taken apart, for tools that know only MatMul."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import onnx

PRODUCT = "_product"
"""Suffix of what the MatMul of a Gemm with a bias computes."""


def split_gemms(model: onnx.ModelProto, kept: Collection[str] = ()) -> None:
    """Make each plain Gemm a MatMul of its name, and an Add if it has a bias.

    A plain one multiplies by a constant matrix that nobody else reads, scales by 1 and does not transpose its input.
    The matrix is stored transposed under its name where the Gemm transposes it.

    Args:
        model: changed in place.
        kept: names of nodes that are left alone.
    """
    from onnx import helper, numpy_helper

    matrices = {tensor.name: tensor for tensor in model.graph.initializer}
    readers = Counter(name for node in model.graph.node for name in node.input)
    rewritten: list[onnx.NodeProto] = []
    for node in model.graph.node:
        flags = {a.name: a.f if a.name in ("alpha", "beta") else a.i for a in node.attribute}
        plain = (
            node.op_type == "Gemm"
            and node.name not in kept
            and node.input[1] in matrices
            and readers[node.input[1]] == 1
            and flags.get("alpha", 1.0) == flags.get("beta", 1.0) == 1.0
            and not flags.get("transA", 0)
        )
        if not plain:
            rewritten.append(node)
            continue
        if flags.get("transB", 0):
            tensor = matrices[node.input[1]]
            tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor).T.copy(), tensor.name))
        biased = len(node.input) > 2 and bool(node.input[2])
        product = node.output[0] + PRODUCT if biased else node.output[0]
        rewritten.append(helper.make_node("MatMul", node.input[:2], [product], name=node.name))
        if biased:
            rewritten.append(
                helper.make_node("Add", [product, node.input[2]], [node.output[0]], name=f"{node.name}_bias")
            )
    del model.graph.node[:]
    model.graph.node.extend(rewritten)
