"""Casts at the ends of a model: it takes and gives the element types of another one."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from onnx_ops.graph.files import graphs, read_model, read_structure, write_model

if TYPE_CHECKING:
    import onnx

_FLOATS = {1: "float32", 10: "float16", 11: "float64", 16: "bfloat16"}
_CAST_OPSET = 13
"""The first opset whose Cast takes all of them."""


def write_with_casts(model: Path, like: Path, path: Path) -> str:
    """Write the model with casts where its inputs are floats of another type than those of `like`.

    Outputs are cast too then. Shapes, names and other types stay as they are.

    Returns:
        A line on what is cast; empty, and nothing is written, where no float input differs.

    Raises:
        NotFound, UserError, Refused: as for reading the files.
    """
    ends = [{v.name: v.type.tensor_type.elem_type for v in _ends(read_structure(file))} for file in (model, like)]
    types = {
        name: (kind, ends[1][name])
        for name, kind in ends[0].items()
        if {kind, ends[1].get(name, 0)} <= set(_FLOATS) and kind != ends[1][name]
    }
    if not types.keys() & {value.name for value in read_structure(like).graph.input}:
        return ""
    made = read_model(model)
    _cast(made, {name: wanted for name, (_, wanted) in types.items()})
    write_model(made, path)
    own, wanted = next(iter(types.values()))
    return f"{', '.join(types)}: {_FLOATS[own]} in B, {_FLOATS[wanted]} in A; B was judged with casts around it"


def _ends(model: onnx.ModelProto) -> list[onnx.ValueInfoProto]:
    stored = {tensor.name for tensor in model.graph.initializer}  # old files list their weights as inputs
    return [value for value in (*model.graph.input, *model.graph.output) if value.name not in stored]


def _cast(model: onnx.ModelProto, wanted: dict[str, int]) -> None:
    from onnx import helper

    graph = model.graph
    inner = {name: f"{name}.own" for name in wanted}
    before = [
        helper.make_node("Cast", [value.name], [inner[value.name]], to=value.type.tensor_type.elem_type)
        for value in graph.input
        if value.name in wanted
    ]
    for part in graphs(model):
        for node in part.node:
            node.input[:] = [inner.get(name, name) for name in node.input]
            node.output[:] = [inner.get(name, name) for name in node.output]
        if part is not graph:
            for value in part.output:
                value.name = inner.get(value.name, value.name)
    after = [
        helper.make_node("Cast", [inner[value.name]], [value.name], to=wanted[value.name])
        for value in graph.output
        if value.name in wanted
    ]
    for value in _ends(model):
        if value.name in wanted:
            value.type.tensor_type.elem_type = wanted[value.name]
    nodes = [*before, *graph.node, *after]
    del graph.node[:]
    graph.node.extend(nodes)
    kept = [value for value in graph.value_info if value.name not in wanted]
    del graph.value_info[:]
    graph.value_info.extend(kept)
    if not any(entry.domain in ("", "ai.onnx") for entry in model.opset_import):
        model.opset_import.add(version=_CAST_OPSET)
