"""Summary of an ONNX file: content, validity, and the cost of running it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from onnx_ops.domain.artifact import Digest, ModelInfo, digest_file
from onnx_ops.domain.row_axes import find_row_axes
from onnx_ops.errors import UserError, quoted
from onnx_ops.onnx_graph.compatibility import (
    check_model,
    find_custom_operators,
    find_unsupported_blocks,
)
from onnx_ops.onnx_graph.files import (
    DEFAULT_DOMAINS,
    get_element_bits,
    get_element_type,
    iterate_nodes,
    iterate_tensors,
    list_subgraphs,
    read_structure,
    resolve_external_files,
)
from onnx_ops.onnx_graph.model_info import (
    AUTHOR,
    LICENSE,
    count_operators,
    read_model_info,
    read_shape,
)

if TYPE_CHECKING:
    import onnx


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSummary:
    """The content of an ONNX file.

    `operators` counts nodes, including those of subgraphs and functions; operators outside the
    default domain have the domain as prefix. `versions` counts nodes by the version of their
    definitions (`Gemm-13`). `foreign` names the nodes of operators outside the domains of ONNX and
    ONNX Runtime, except functions of the model. `blocks` has the reason why no CPU kernel runs a
    node with weights in blocks, by node. `parameters` counts the elements of all constants by type.
    `unranked` names inputs and outputs without a declared shape. `author`, `license`, `version` and
    `description` are copied from the file; empty or 0 if missing. `problem` is the error of the
    ONNX checker; empty without an error.
    """

    file: Digest
    info: ModelInfo
    producer: str
    operators: Mapping[str, int]
    versions: Mapping[str, int]
    foreign: Mapping[str, tuple[str, ...]]
    blocks: Mapping[str, str]
    unranked: tuple[str, ...]
    parameters: Mapping[str, int]
    cost: ModelCost
    author: str
    license: str
    version: int
    description: str
    external: tuple[str, ...]
    metadata: Mapping[str, str]
    problem: str


def summarize_model(
    path: Path, *, batch: int = 1, dims: Mapping[str, int] | None = None
) -> ModelSummary:
    """Return the summary of a file without loading external weights.

    `batch` and `dims` have the same meaning as in `estimate_cost`.
    """
    model = read_structure(path)
    operators = Counter(
        node.op_type if node.domain in DEFAULT_DOMAINS else f"{node.domain}::{node.op_type}"
        for node in iterate_nodes(model)
    )
    metadata = {prop.key: prop.value for prop in model.metadata_props}
    return ModelSummary(
        file=digest_file(path),
        info=read_model_info(path),
        producer=" ".join(part for part in (model.producer_name, model.producer_version) if part),
        operators=_sort_counts(operators),
        versions=count_operators(model),
        foreign=find_custom_operators(model),
        blocks=find_unsupported_blocks(model),
        unranked=tuple(
            value.name
            for value in (*model.graph.input, *model.graph.output)
            if value.type.HasField("tensor_type") and not value.type.tensor_type.HasField("shape")
        ),
        parameters=_sort_counts(_count_parameters(model)),
        cost=estimate_cost(path, batch=batch, dims=dims),
        author=metadata.get(AUTHOR, ""),
        license=metadata.get(LICENSE, ""),
        version=model.model_version,
        description=model.doc_string,
        external=tuple(
            str(file.relative_to(path.parent))
            for file in resolve_external_files(model, path.parent)
        ),
        metadata=metadata,
        problem=_find_problem(path),
    )


def _count_parameters(model: onnx.ModelProto) -> Counter[str]:
    """Count the elements of all constants by their type."""
    parameters: Counter[str] = Counter()
    for tensor in iterate_tensors(model):
        if tensor.data_type:
            parameters[get_element_type(tensor.data_type)] += _count_elements(tensor)
    return parameters


def _count_elements(tensor: onnx.TensorProto) -> int:
    return math.prod(max(0, int(size)) for size in tensor.dims)


def _sort_counts(counts: Counter[str]) -> dict[str, int]:
    """Return the counts in descending order; equal counts are sorted by name."""
    return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))


def _find_problem(path: Path) -> str:
    """Return the error of the ONNX checker; empty if there is none."""
    try:
        check_model(path)
    except UserError as error:
        return error.why or error.what
    return ""


LENGTH = 8
"""Default size of a free dimension other than the batch."""

_PRODUCTS = frozenset({"MatMul", "MatMulInteger", "QLinearMatMul"})
_CONVOLUTIONS = {"Conv": 1, "ConvInteger": 1, "QLinearConv": 3}
"""Index of the weight among the inputs of each convolution operator."""

RECURRENT = frozenset({"GRU", "LSTM", "RNN"})
_COUNTED = _PRODUCTS | set(_CONVOLUTIONS) | RECURRENT | {"ConvTranspose", "Gemm"}
_UNCOUNTED = frozenset(
    {"Attention", "DeformConv", "Einsum", "If", "LinearAttention", "Loop", "Scan"}
)
"""Operators that can multiply, but are not included in `macs`."""


Shape = tuple[int, ...]
_TypedShape = tuple[Shape | None, int]
"""Shape of a value, or None if it is unknown, and its element type."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCost:
    """The cost of a model from static shapes, for the sizes in `dims`.

    `macs` counts multiply-accumulates by operator, of products, convolutions and recurrent layers
    only. `uncounted` counts the other operators that can multiply, all operators outside the
    default domain, and operators as in `macs` whose shapes are unknown. `weight_bytes` is the size
    of all constants. `activation_bytes` is the largest total size of values that exist at the same
    time when nodes run in the order of the file. It excludes working memory, reuse in place and
    alignment. `unknown_values` is the number of values without a shape, which it also excludes.
    `problem` is the reason why no shapes could be inferred.
    """

    dims: Mapping[str, int]
    macs: Mapping[str, int]
    uncounted: Mapping[str, int]
    weight_bytes: int
    activation_bytes: int
    unknown_values: int
    problem: str

    @property
    def flops(self) -> int:
        """Return the floating-point operations, two for each multiply-accumulate."""
        return 2 * sum(self.macs.values())


def estimate_cost(
    path: Path, *, batch: int = 1, dims: Mapping[str, int] | None = None
) -> ModelCost:
    """Estimate the cost from the shapes of a file, without reading weights.

    Args:
        batch: size of the free axis of the rows.
        dims: sizes of free axes by their name, or by `INPUT.AXIS` for an axis without a name. All
            others, except the axis of rows, have the size `LENGTH`.
    """
    model = read_structure(path)
    weight_bytes = sum(
        _count_bytes(_count_elements(tensor), tensor.data_type) for tensor in iterate_tensors(model)
    )
    fixed = _fix(model, batch, dict(dims or {}))
    model, problem = _infer_shapes(model)
    values = _collect_values(model.graph)
    macs, uncounted = _count_macs(model.graph, values)
    peak, unknown = _measure_peak(model.graph, values)
    return ModelCost(
        dims=fixed,
        macs={name: count for name, count in macs.most_common() if count},
        uncounted=dict(uncounted.most_common()),
        weight_bytes=weight_bytes,
        activation_bytes=peak,
        unknown_values=unknown,
        problem=problem,
    )


def _infer_shapes(model: onnx.ModelProto) -> tuple[onnx.ModelProto, str]:
    """Return the model with inferred shapes, and the inference's error.

    The error is empty if the shapes were inferred.
    """
    from onnx import inliner, shape_inference

    try:
        if model.functions:
            model = inliner.inline_local_functions(model)
        return shape_inference.infer_shapes(model, data_prop=True), ""
    except Exception as error:  # Shape inference raises many types of errors.
        return model, quoted(error)


def _collect_values(graph: onnx.GraphProto) -> dict[str, _TypedShape]:
    values: dict[str, _TypedShape] = {}
    for value in (*graph.input, *graph.value_info, *graph.output):
        kind = value.type.tensor_type
        sizes = tuple(dim.dim_value if dim.HasField("dim_value") else -1 for dim in kind.shape.dim)
        known = (
            value.type.HasField("tensor_type")
            and kind.HasField("shape")
            and min(sizes, default=0) >= 0
        )
        values[value.name] = (sizes if known else None, kind.elem_type)
    for tensor in graph.initializer:
        values[tensor.name] = (tuple(tensor.dims), tensor.data_type)
    return values


def _count_macs(
    graph: onnx.GraphProto, values: Mapping[str, _TypedShape]
) -> tuple[Counter[str], Counter[str]]:
    """Count multiply-accumulates by operator, and the operators without a count."""
    shapes = {name: shape for name, (shape, _) in values.items() if shape is not None}
    macs: Counter[str] = Counter()
    uncounted: Counter[str] = Counter()
    for node in graph.node:
        try:
            if node.op_type in _COUNTED and node.domain in DEFAULT_DOMAINS:
                macs[node.op_type] += _count(node, shapes)
            elif node.op_type in _COUNTED | _UNCOUNTED or node.domain not in DEFAULT_DOMAINS:
                uncounted[node.op_type] += 1
        except (
            KeyError,
            IndexError,
        ):
            # Either a shape is unknown, or its rank does not suit the operator.
            uncounted[node.op_type] += 1
    return macs, uncounted


def _fix(model: onnx.ModelProto, batch: int, dims: dict[str, int]) -> dict[str, int]:
    """Set free dimensions of inputs to sizes in place, and return the sizes by name."""
    inputs = _list_inputs(model.graph)
    rows = find_row_axes({value.name: read_shape(value) for value in inputs})
    for value in inputs:
        for axis, dim in enumerate(value.type.tensor_type.shape.dim):
            if dim.HasField("dim_value") and dim.dim_value > 0:
                continue
            name = dim.dim_param or f"{value.name}.{axis}"
            dim.dim_value = dims.setdefault(name, batch if rows.get(value.name) == axis else LENGTH)
    del model.graph.value_info[:]
    # Converters can write output shapes for another batch size.
    for value in model.graph.output:
        value.type.tensor_type.ClearField("shape")
    return dims


def _list_inputs(graph: onnx.GraphProto) -> list[onnx.ValueInfoProto]:
    """Return the inputs of a graph that are not constants."""
    constants = {tensor.name for tensor in graph.initializer}
    return [value for value in graph.input if value.name not in constants]


def _count(node: onnx.NodeProto, shapes: Mapping[str, Shape]) -> int:
    """Return the multiply-accumulates of a node; 0 for a node without elements."""
    first = shapes[node.input[0]]
    if node.op_type in RECURRENT:
        weights = math.prod(shapes[node.input[1]]) + math.prod(shapes[node.input[2]])
        return first[0] * first[1] * weights
    if node.op_type == "ConvTranspose":
        return math.prod(first) * math.prod(shapes[node.input[1]][1:])
    elements = math.prod(shapes[node.output[0]])
    if node.op_type in _CONVOLUTIONS:
        return elements * math.prod(shapes[node.input[_CONVOLUTIONS[node.op_type]]][1:])
    if node.op_type == "Gemm":
        turned = any(a.name == "transA" and a.i for a in node.attribute)
        return elements * first[0 if turned else 1]
    return elements * first[-1]


def _measure_peak(graph: onnx.GraphProto, values: Mapping[str, _TypedShape]) -> tuple[int, int]:
    """Return the maximum bytes in use, and the number of values of unknown size."""
    last = _find_last_reads(graph)
    alive = {value.name: _measure_value(values, value.name) for value in _list_inputs(graph)}
    unknown = sum(size is None for size in alive.values())
    peak = sum(size or 0 for size in alive.values())
    total = peak
    for index, node in enumerate(graph.node):
        for name in node.output:
            if name and name not in alive:
                alive[name] = _measure_value(values, name)
                unknown += alive[name] is None
                total += alive[name] or 0
        peak = max(peak, total)
        for name in {*_read(node), *node.output}:
            if name in alive and last.get(name, index) <= index:
                total -= alive.pop(name) or 0
    return peak, unknown


def _find_last_reads(graph: onnx.GraphProto) -> dict[str, int]:
    """Return the index of the last node that reads each value.

    Outputs are read after all nodes.
    """
    last = {name: index for index, node in enumerate(graph.node) for name in _read(node)}
    return last | {value.name: len(graph.node) for value in graph.output}


def _read(node: onnx.NodeProto) -> Iterator[str]:
    """Yield the values that a node and its subgraphs read."""
    yield from node.input
    for attribute in node.attribute:
        for graph in list_subgraphs(attribute):
            for inner in graph.node:
                yield from _read(inner)


def _measure_value(values: Mapping[str, _TypedShape], name: str) -> int | None:
    """Return the bytes of a value; None if its shape is unknown."""
    shape, element_type = values.get(name, (None, 0))
    return None if shape is None else _count_bytes(math.prod(shape), element_type)


def _count_bytes(elements: int, element_type: int) -> int:
    """Return the bytes of elements, rounded up; 0 for a type without a fixed size."""
    bits = elements * (get_element_bits(element_type) or 0)
    return -(-bits // 8)
