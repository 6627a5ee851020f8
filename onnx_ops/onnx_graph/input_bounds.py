"""Bounds of the values of a model's inputs, derived from its graph."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from onnx_ops.onnx_graph.files import collect_graph_constants, iterate_graphs, share_structure
from onnx_ops.onnx_graph.model_info import read_encoded_inputs

if TYPE_CHECKING:
    import onnx

    Users = Mapping[str, list[tuple[onnx.NodeProto, int]]]

_SAME_VALUES = frozenset(
    {
        "Cast",
        "Identity",
        "Reshape",
        "Squeeze",
        "Unsqueeze",
        "Flatten",
        "Transpose",
        "Slice",
        "Split",
        "Expand",
        "Tile",
    }
    | {"ArrayFeatureExtractor", "Concat", "Gather", "StringNormalizer"}
)
"""Operators whose outputs have values of their first input; for Concat, of all.

`Cast` can change the type of the values, and `StringNormalizer` their case.
"""

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
"""Indices of the inputs that determine the size of an output, by operator."""

_SELECTORS = frozenset(
    {"Gather", "GatherElements", "GatherND", "Scatter", "ScatterElements", "ScatterND"}
)
"""Operators whose second input has indices into the first."""

_COMPARISONS: Mapping[str, tuple[int, ...]] = {
    "Equal": (0, 1),
    "Greater": (0, 1, -1),
    "GreaterOrEqual": (0, 1, -1),
    "Less": (0, 1, -1),
    "LessOrEqual": (0, 1, -1),
}
"""Offsets from the other operand where a comparison's result changes, by operator."""

_TEXTS = frozenset({"cats_strings", "keys_strings", "pool_strings", "string_vocabulary"})
"""Attributes that list the strings known to an operator."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InputBounds:
    """The bounds of one input.

    Args:
        index: the smallest and largest index, if the input has indices into tables or of one-hot
            encodings; with several readers, the smallest range.
        texts: the strings known to the operators that read the input.
        size: whether the size of a value depends on the input.
        missing: whether an operator that reads the input treats NaN specially.
        tables: the sizes, as numbers or symbols, of the computed tensors that the input has indices
            into; `?` if unknown.
        compared: whole numbers at which comparisons with constants change the model's behaviour.
        encoded: whether each row is an encoded file, such as an image.
    """

    index: tuple[int, int] | None = None
    texts: tuple[str, ...] = ()
    size: bool = False
    missing: bool = False
    tables: tuple[int | str, ...] = ()
    compared: tuple[int, ...] = ()
    encoded: bool = False


def read_input_bounds(path: Path) -> dict[str, InputBounds]:
    """Derive the bounds of each input from the operators that read the input.

    If other operators than `_SAME_VALUES` and `Where` change the values before they are used as
    indices, the input has no index bounds.
    """
    model = share_structure(path)
    stored: dict[str, onnx.TensorProto] = {}
    users: dict[str, list[tuple[onnx.NodeProto, int]]] = defaultdict(list)
    for graph in iterate_graphs(model):
        stored |= collect_graph_constants(graph)
        for node in graph.node:
            for place, name in enumerate(node.input):
                users[name].append((node, place))
    shapes = _LazyShapes(model)
    encoded = read_encoded_inputs(path)
    return {
        value.name: replace(
            _read_bounds(value.name, users, stored, shapes), encoded=value.name in encoded
        )
        for value in model.graph.input
    }


def _read_bounds(
    name: str, users: Users, stored: Mapping[str, onnx.TensorProto], shapes: _LazyShapes
) -> InputBounds:
    readers = list(_reached(name, users, copies=True))
    nodes = [node for node, _ in readers]
    entries = [_entries(node, place, stored) for node, place in readers]
    sizes = [size for size in entries if size is not None and size > 0]
    selectors = [node for node, place in readers if _selects_from_computed(node, place, stored)]
    compared = [value for node, place in readers for value in _list_compared(node, place, stored)]
    return InputBounds(
        index=(0, min(sizes) - 1) if sizes else None,
        texts=tuple(sorted({text for node in nodes for text in _list_texts(node)})),
        missing=any(map(_handles_missing, nodes)),
        size=any(place in _SIZES.get(node.op_type, ()) for node, place in _reached(name, users)),
        tables=tuple(dict.fromkeys(map(shapes.read_selected_size, selectors))),
        compared=tuple(dict.fromkeys(compared)),
    )


def _selects_from_computed(
    node: onnx.NodeProto, place: int, stored: Mapping[str, onnx.TensorProto]
) -> bool:
    """Return whether an input has indices into a tensor that the model computes.

    `place` is the index of the node's input.
    """
    return place == 1 and node.op_type in _SELECTORS and node.input[0] not in stored


def _list_texts(node: onnx.NodeProto) -> Iterator[str]:
    """Yield the strings known to an operator."""
    for attribute in node.attribute:
        if attribute.name in _TEXTS:
            yield from (text.decode(errors="replace") for text in attribute.strings)


def _handles_missing(node: onnx.NodeProto) -> bool:
    """Return whether an operator treats NaN specially."""
    if node.op_type in ("Imputer", "IsNaN"):
        return True
    return any(a.name == "nodes_missing_value_tracks_true" and any(a.ints) for a in node.attribute)


def _list_compared(
    node: onnx.NodeProto, place: int, stored: Mapping[str, onnx.TensorProto]
) -> Iterator[int]:
    """Yield the whole numbers at which the result of a comparison can change."""
    from onnx import numpy_helper

    other = stored.get(node.input[1 - place]) if node.op_type in _COMPARISONS else None
    if other is None or other.external_data:
        return
    values = numpy_helper.to_array(other).reshape(-1)
    if values.size == 1 and values.dtype.kind in "iuf" and float(values[0]).is_integer():
        yield from (int(values[0]) + distance for distance in _COMPARISONS[node.op_type])


class _LazyShapes:
    """Inferred shapes of a model's values, computed when first read."""

    def __init__(self, model: onnx.ModelProto) -> None:
        self._model = model
        self._shapes: dict[str, list[int | str]] | None = None

    def read_selected_size(self, node: onnx.NodeProto) -> int | str:
        """Return the size of the axis that the indices of a node select from.

        Return `?` if the size is unknown.
        """
        if self._shapes is None:
            self._shapes = _infer_shapes(self._model)
        shape = self._shapes.get(node.input[0], [])
        attribute = _SELECTED_AXIS.get(node.op_type, "")
        axis = next((given.i for given in node.attribute if given.name == attribute), 0)
        if node.op_type == "GatherND" and self._shapes.get(node.input[1], [])[-1:] != [1]:
            # An entry of the indices can select on several axes, so no single axis limits it.
            return "?"
        return shape[axis] if attribute and -len(shape) <= axis < len(shape) else "?"


_SELECTED_AXIS = {
    "Gather": "axis",
    "GatherElements": "axis",
    "GatherND": "batch_dims",
    "Scatter": "axis",
    "ScatterElements": "axis",
}
"""Attribute that names the axis from which indices select, by operator."""


def _infer_shapes(model: onnx.ModelProto) -> dict[str, list[int | str]]:
    """Return the shapes that ONNX can infer.

    The result is empty if the inference rejects the model. Free dimensions of inputs get names,
    which the inference passes on.
    """
    import onnx

    named = onnx.ModelProto()
    named.CopyFrom(model)
    for value in named.graph.input:
        for axis, size in enumerate(value.type.tensor_type.shape.dim):
            if not size.HasField("dim_value") and not size.dim_param:
                size.dim_param = f"{value.name}[{axis}]"  # `list_named_axes` uses the same name.
    try:
        graph = onnx.shape_inference.infer_shapes(named).graph
    except Exception:
        # Shape inference raises many types of errors. Another check reports an invalid model.
        return {}
    return {
        value.name: [
            d.dim_value if d.HasField("dim_value") else d.dim_param or "?" for d in shape.dim
        ]
        for value in (*graph.input, *graph.value_info)
        if (shape := value.type.tensor_type.shape) is not None
    }


def read_index_bounds(path: Path) -> dict[str, tuple[int, int]]:
    """Return the smallest and largest valid index of each index input."""
    return {
        name: bounds.index
        for name, bounds in read_input_bounds(path).items()
        if bounds.index is not None
    }


def _reached(
    start: str, users: Users, *, copies: bool = False
) -> Iterator[tuple[onnx.NodeProto, int]]:
    """Yield the nodes that read a value or a derived value, with the input index.

    With `copies`, only derived values that contain elements of the value are followed.
    """
    waiting, visited = [start], {start}
    while waiting:
        for node, place in users.get(waiting.pop(), ()):
            yield node, place
            if not copies or _copies(node, place):
                fresh = [name for name in node.output if name not in visited]
                visited.update(fresh)
                waiting += fresh


def _copies(node: onnx.NodeProto, place: int) -> bool:
    """Return whether a node's outputs contain the values of its input at this index."""
    if node.op_type == "Where":
        return place > 0
    return node.op_type in _SAME_VALUES and (place == 0 or node.op_type == "Concat")


def _entries(
    node: onnx.NodeProto, place: int, stored: Mapping[str, onnx.TensorProto]
) -> int | None:
    """Return the number of entries that a node selects from by its input at `place`.

    Return None if the node does not select by this input, or if the number is unknown.
    """
    from onnx import numpy_helper

    if node.op_type == "Gather" and place == 1 and node.input[0] in stored:
        table = stored[node.input[0]]
        axis = next((attribute.i for attribute in node.attribute if attribute.name == "axis"), 0)
        return int(table.dims[axis]) if -len(table.dims) <= axis < len(table.dims) else None
    if node.op_type == "OneHot" and place == 0 and node.input[1] in stored:
        depth = stored[node.input[1]]
        return None if depth.external_data else int(numpy_helper.to_array(depth).reshape(-1)[0])
    return None
