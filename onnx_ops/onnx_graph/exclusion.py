"""Nodes that a person wants kept in float: found by name, followed through rewrites, and checked afterwards."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import TYPE_CHECKING

from onnx_ops.errors import UserError
from onnx_ops.onnx_graph.files import constants

if TYPE_CHECKING:
    import onnx

REMEDY = "Names are those of the exported file; `quantize.exclude` lists them."


def follow(names: Iterable[str], source: onnx.ModelProto, prepared: onnx.ModelProto) -> dict[str, tuple[str, ...]]:
    """Where each named node of `source` went in `prepared`, a rewrite of it: by its name, else by what it makes, else
    by its weights.

    Raises:
        UserError: a name is unknown (all such names at once), or nothing is left of its node.
    """
    wanted = tuple(names)
    known = {node.name: node for node in source.graph.node if node.name}
    if unknown := [name for name in wanted if name not in known]:
        raise UserError(
            "; ".join(_unknown(name, tuple(known)) for name in unknown), where="quantize.exclude", remedy=REMEDY
        )
    matrices = {name for name, tensor in constants(source).items() if len(tensor.dims) > 1}
    found = {name: _heirs(known[name], matrices, prepared) for name in wanted}
    if lost := sorted(name for name, heirs in found.items() if not heirs):
        raise UserError(
            f"nothing is left to exclude of {', '.join(lost)}",
            where="quantize.exclude",
            why="preparation folded it into a constant or into another node",
            remedy="Leave it out of `quantize.exclude`.",
        )
    return found


def still_quantized(excluded: Iterable[str], derived: onnx.ModelProto, rewritten: str) -> tuple[str, ...]:
    """Those of the excluded nodes that `derived` does not hold in float.

    Args:
        excluded: names of nodes before quantization.
        derived: the quantized model.
        rewritten: suffix of a node's name where the quantizer rewrites an operator before it quantizes.
    """
    stored = constants(derived)
    integers = {n.output[0] for n in derived.graph.node if n.op_type == "DequantizeLinear" and n.input[0] in stored}
    floats = {
        node.name
        for node in derived.graph.node
        if not integers.intersection(node.input) and "Integer" not in node.op_type and "QLinear" not in node.op_type
    }
    return tuple(name for name in excluded if name not in floats and name + rewritten not in floats)


def _heirs(node: onnx.NodeProto, matrices: set[str], prepared: onnx.ModelProto) -> tuple[str, ...]:
    weights = matrices.intersection(node.input)
    candidates = (
        [n.name for n in prepared.graph.node if n.name == node.name],
        [n.name for n in prepared.graph.node if n.name and set(n.output) & set(node.output)],
        [n.name for n in prepared.graph.node if n.name and weights.intersection(n.input)],
    )
    return tuple(next((names for names in candidates if names), []))


def _unknown(name: str, known: tuple[str, ...]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {close[0]!r}?" if close else f"there are {', '.join(known[:10])}"
    return f"no node is called {name!r}: {hint}"
