"""Casts at the ends of a model: it takes and gives the element types of another one."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from onnx_ops.onnx_graph.files import graphs, read_model, read_structure, write_model

if TYPE_CHECKING:
    import onnx

_FLOAT, _BFLOAT = 1, 16
_FLOATS = {_FLOAT: "float32", 10: "float16", 11: "float64", _BFLOAT: "bfloat16"}
_CAST_OPSET = 13
"""The first opset whose Cast takes all of them."""


def read_types(model: Path) -> dict[str, int]:
    """The element types of inputs and outputs, by name; float32 for bfloat16, which NumPy lacks.

    Raises:
        NotFoundError, UserError, RefusedError: as for reading the file.
    """
    ends = _ends(read_structure(model))
    types = {value.name: value.type.tensor_type.elem_type for value in ends}
    return {name: _FLOAT if kind == _BFLOAT else kind for name, kind in types.items()}


def write_with_casts(model: Path, wanted: Mapping[str, int], path: Path) -> str:
    """Write the model with casts around it where its inputs are floats of another type than wanted.

    Outputs are cast too then. Shapes, names and other types stay as they are.

    Returns:
        What is cast, in words; empty, and nothing is written, where no float input differs.

    Raises:
        NotFoundError, UserError, RefusedError: as for reading the file.
    """
    structure = read_structure(model)
    types = {value.name: value.type.tensor_type.elem_type for value in _ends(structure)}
    types = {
        name: kind
        for name, kind in types.items()
        if {kind, wanted.get(name, 0)} <= set(_FLOATS) and kind != wanted[name]
    }
    if not types or (_BFLOAT not in types.values() and not types.keys() & {v.name for v in structure.graph.input}):
        return ""
    made = read_model(model)
    _cast(made, {name: wanted[name] for name in types})
    write_model(made, path)
    name, kind = next(iter(types.items()))
    return f"{', '.join(types)}: {_FLOATS[kind]}, run with casts from and to {_FLOATS[wanted[name]]}"


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
