"""Bounds of the values of a model's inputs, derived from its graph."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from onnx_ops.onnx_graph.files import collect_constants, read_structure

if TYPE_CHECKING:
    import onnx

    Users = Mapping[str, list[tuple[onnx.NodeProto, int]]]

_SAME_VALUES = frozenset(
    {"Cast", "Identity", "Reshape", "Squeeze", "Unsqueeze", "Flatten", "Transpose", "Slice", "Split", "Expand", "Tile"}
    | {"ArrayFeatureExtractor", "Concat", "StringNormalizer"}
)
"""Operators whose first input's values are those of their outputs."""

_SIZES: Mapping[str, tuple[int, ...]] = {
    "ConstantOfShape": (0,),
    "Expand": (1,),
    "Loop": (0,),
    "OneHot": (1,),
    "Pad": (1,),
    "Range": (0, 1, 2),
    "Reshape": (1,),
    "Resize": (1, 2, 3),
    "Slice": (1, 2, 4),
    "Tile": (1,),
    "TopK": (1,),
    "Upsample": (1,),
}
"""Inputs that determine a size or an end."""

_TEXTS = frozenset({"cats_strings", "keys_strings", "pool_strings", "string_vocabulary"})
"""Attributes that list the texts which an operator knows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InputBounds:
    """The bounds of one input.

    Args:
        index: the least and the largest index, if it is one: of tables that are gathered from, and of one-hot
            encodings; the smallest range of several counts.
        texts: the texts known to the operators that read it.
        size: whether something's size depends on it.
        missing: whether an operator that reads it has a special answer for NaN.
    """

    index: tuple[int, int] | None = None
    texts: tuple[str, ...] = ()
    size: bool = False
    missing: bool = False


def read_input_bounds(path: Path) -> dict[str, InputBounds]:
    """Derive the bounds of each input from the operators that read it.

    An input that is transformed before it becomes an index has none.
    """
    model = read_structure(path)
    stored = collect_constants(model)
    users: dict[str, list[tuple[onnx.NodeProto, int]]] = defaultdict(list)
    for node in model.graph.node:
        for place, name in enumerate(node.input):
            users[name].append((node, place))
    bounds = {}
    for value in model.graph.input:
        readers = list(_reached(value.name, users, copies=True))
        sizes = [size for node, place in readers if (size := _entries(node, place, stored)) is not None and size > 0]
        texts = {
            text.decode(errors="replace")
            for node, _ in readers
            for a in node.attribute
            if a.name in _TEXTS
            for text in a.strings
        }
        bounds[value.name] = InputBounds(
            index=(0, min(sizes) - 1) if sizes else None,
            texts=tuple(sorted(texts)),
            missing=any(
                node.op_type in ("Imputer", "IsNaN")
                or any(a.name == "nodes_missing_value_tracks_true" and any(a.ints) for a in node.attribute)
                for node, _ in readers
            ),
            size=any(place in _SIZES.get(node.op_type, ()) for node, place in _reached(value.name, users)),
        )
    return bounds


def read_index_bounds(path: Path) -> dict[str, tuple[int, int]]:
    """Return the smallest and largest valid index of each index input."""
    return {name: bounds.index for name, bounds in read_input_bounds(path).items() if bounds.index is not None}


def _reached(start: str, users: Users, *, copies: bool = False) -> Iterator[tuple[onnx.NodeProto, int]]:
    """Yield the nodes that read a value or a derived one, with the input index; `copies`: same values only."""
    waiting, visited = [start], {start}
    while waiting:
        for node, place in users.get(waiting.pop(), ()):
            yield node, place
            if not copies or (node.op_type in _SAME_VALUES and (place == 0 or node.op_type == "Concat")):
                fresh = [name for name in node.output if name not in visited]
                visited.update(fresh)
                waiting += fresh


def _entries(node: onnx.NodeProto, place: int, stored: Mapping[str, onnx.TensorProto]) -> int | None:
    """Return how many entries a node selects from by its input at `place`; None if it does not select by it."""
    from onnx import numpy_helper

    if node.op_type == "Gather" and place == 1 and node.input[0] in stored:
        table = stored[node.input[0]]
        axis = next((attribute.i for attribute in node.attribute if attribute.name == "axis"), 0)
        return int(table.dims[axis]) if -len(table.dims) <= axis < len(table.dims) else None
    if node.op_type == "OneHot" and place == 0 and node.input[1] in stored:
        depth = stored[node.input[1]]
        return None if depth.external_data else int(numpy_helper.to_array(depth).reshape(-1)[0])
    return None
