"""Balance outlier channels between a normalization and the products that read it.

A normalization may scale a few channels far up, and the weights of the next product scale them down
again. One quantization step for all channels is then too coarse for the other channels. Part of the
factor is moved into the weights, so that 8 bits suffice for values and weights. Gamma migration
(Wei et al. 2022, arXiv 2209.13325) and SmoothQuant (Xiao et al. 2023, arXiv 2211.10438) also do
this. Factors are powers of two, so that the float function does not change by a single bit.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from onnx_ops.errors import MeasurementError
from onnx_ops.onnx_graph.files import (
    iterate_graphs,
    map_readers,
    read_model,
    share_structure,
    write_model,
)

if TYPE_CHECKING:
    import onnx

PROPERTY = "onnx-ops.channel_exponents"
"""Metadata key of the exponents of balanced channels, by value, as JSON."""

_FLOAT = 1
_NORMS = ("LayerNormalization", "SimplifiedLayerNormalization")

_REACH = 3.0
"""Number of standard deviations that a normalized value usually reaches."""

_OUTLIER = 4.0
"""Size above which a channel is an outlier, as a multiple of the median size."""

_LARGEST_EXPONENT = 30


@dataclass(frozen=True, slots=True, kw_only=True)
class _Norm:
    """A value with a scale for each channel, read only by products with constants.

    The value may also have one shift for each channel. `affine` lists the inputs of nodes with the
    scale and the shift, each of shape (channels,). `weights` has the axis of the channels in each
    constant that the value is multiplied by.
    """

    affine: tuple[tuple[onnx.NodeProto, int], ...]
    weights: Mapping[str, int]


def balance_channels(model: onnx.ModelProto) -> int:
    """Balance outlier channels in place, and return the number of balanced channels.

    Their exponents replace those in the metadata.
    """
    from onnx import numpy_helper

    others = [entry for entry in model.metadata_props if entry.key != PROPERTY]
    del model.metadata_props[:]
    model.metadata_props.extend(others)
    _fold_copies(model)
    tensors = {tensor.name: tensor for tensor in model.graph.initializer}
    exponents: dict[str, dict[str, int]] = {}
    for value, norm in _find_norms(model, tensors):
        arrays = {name: numpy_helper.to_array(tensors[name]) for name in norm.weights}
        scale, *shift = (
            numpy_helper.to_array(tensors[node.input[index]]) for node, index in norm.affine
        )
        size = _REACH * np.abs(scale) + sum(np.abs(one) for one in shift)
        columns = [
            np.abs(arrays[name]).max(axis=1 - axis, initial=0.0)
            for name, axis in norm.weights.items()
        ]
        chosen = _choose_exponents(size, np.max(columns, axis=0))
        if chosen.any():
            exponents[value] = {
                str(channel): int(chosen[channel]) for channel in np.flatnonzero(chosen)
            }
    if exponents:
        _apply(model, exponents)
        model.metadata_props.add(key=PROPERTY, value=json.dumps(exponents, sort_keys=True))
    return sum(len(channels) for channels in exponents.values())


def write_balanced(source: Path, path: Path) -> bool:
    """Write `source` with balanced outlier channels, and return True.

    If no channel can be balanced, return False and leave `path` unchanged.
    """
    model = read_model(source)
    if not balance_channels(model):
        return False
    write_model(model, path)
    return True


def write_balanced_like(source: Path, derived: Path, path: Path) -> bool:
    """Write `source` with the channel exponents of `derived`, and return True.

    The exponents are recorded in the metadata of `derived`. Without exponents, return False and
    leave `path` unchanged. Errors are those of `read_model`, and the following.

    Raises:
        MeasurementError: the exponents are invalid, or do not fit the values of `source`.
    """
    recorded = {entry.key: entry.value for entry in share_structure(derived).metadata_props}.get(
        PROPERTY
    )
    if recorded is None:
        return False
    model = read_model(source)
    _fold_copies(model)
    try:
        _apply(model, json.loads(recorded))
    except (ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError) as error:
        raise MeasurementError(
            "the recorded channel balance of the variant is not valid for the source model",
            where=derived.name,
        ) from error
    write_model(model, path)
    return True


def _fold_copies(model: onnx.ModelProto) -> None:
    """Remove Identity nodes of initializers; their readers then read the initializer.

    Exporters share equal constants through Identity nodes. An Identity remains if it produces an
    output of a graph, or if callers can replace the initializer.
    """
    constants = {tensor.name for tensor in model.graph.initializer} - {
        value.name for value in model.graph.input
    }
    outputs = {value.name for graph in iterate_graphs(model) for value in graph.output}
    origin: dict[str, str] = {}
    kept = []
    for node in model.graph.node:
        # The nodes are in topological order, so the source of each value is known.
        source = origin.get(node.input[0], node.input[0]) if node.op_type == "Identity" else ""
        if source in constants and node.output[0] not in outputs:
            origin[node.output[0]] = source
        else:
            kept.append(node)
    if not origin:
        return
    del model.graph.node[:]
    model.graph.node.extend(kept)
    for graph in iterate_graphs(model):
        for node in graph.node:
            node.input[:] = [origin.get(name, name) for name in node.input]


def _find_norms(
    model: onnx.ModelProto, tensors: Mapping[str, onnx.TensorProto]
) -> Iterator[tuple[str, _Norm]]:
    """Yield each value whose channels can be balanced, with its constants."""
    producers = {name: node for node in model.graph.node for name in node.output}
    readers = map_readers(node for graph in iterate_graphs(model) for node in graph.node)
    outputs = {value.name for graph in iterate_graphs(model) for value in graph.output}
    # Callers may replace a constant that is also an input.
    inputs = {value.name for value in model.graph.input}

    def is_constant(name: str, rank: int) -> bool:
        tensor = None if name in inputs else tensors.get(name)
        return tensor is not None and tensor.data_type == _FLOAT and len(tensor.dims) == rank

    def find_affine(name: str) -> tuple[tuple[onnx.NodeProto, int], ...]:
        """Return the inputs that scale and shift each channel of a value.

        The result is empty if the value has no scale for each channel.
        """
        node = producers.get(name)
        if node is None or node.output[0] != name:
            return ()
        if node.op_type in _NORMS:
            places = tuple(
                (node, index) for index in range(1, len(node.input)) if node.input[index]
            )
            return places if all(is_constant(node.input[index], 1) for _, index in places) else ()
        places = tuple((node, index) for index, one in enumerate(node.input) if is_constant(one, 1))
        if node.op_type == "Mul" and len(places) == 1:
            return places
        return (
            find_shifted(node, places[0][1]) if node.op_type == "Add" and len(places) == 1 else ()
        )

    def find_shifted(add: onnx.NodeProto, index: int) -> tuple[tuple[onnx.NodeProto, int], ...]:
        """Return the constant inputs of a Mul, and of the Add that shifts the product.

        The tuple is empty without such a Mul, or if the product has another reader or is an output.
        """
        inner = add.input[1 - index]
        scale = find_affine(inner)
        is_scaled = len(scale) == 1 and scale[0][0].op_type == "Mul" and len(readers[inner]) == 1
        return (*scale, (add, index)) if is_scaled and inner not in outputs else ()

    def find_axis(node: onnx.NodeProto, value: str) -> int | None:
        """Return the channel axis of the weights that a node multiplies a value by.

        Return None for all other nodes, and if the weights cannot be changed.
        """
        is_product = node.op_type in ("MatMul", "Gemm") and node.input[0] == value
        if not (is_product and is_constant(node.input[1], 2) and len(readers[node.input[1]]) == 1):
            return None
        flags = {a.name: a.i for a in node.attribute}
        if flags.get("transA", 0):
            return None
        return 1 if flags.get("transB", 0) else 0

    for value, products in readers.items():
        weights = {
            node.input[1]: axis for node in products if (axis := find_axis(node, value)) is not None
        }
        affine = find_affine(value)
        if value in outputs or len(weights) < len(products) or not affine:
            continue
        norm = _Norm(affine=affine, weights=weights)
        if len(_count_channels(norm, tensors)) == 1:
            yield value, norm


def _count_channels(norm: _Norm, tensors: Mapping[str, onnx.TensorProto]) -> set[int]:
    """Return the numbers of channels of a value's constants.

    A value can be balanced if these numbers are equal.
    """
    counts = {tensors[node.input[index]].dims[0] for node, index in norm.affine}
    return counts | {tensors[name].dims[axis] for name, axis in norm.weights.items()}


def _choose_exponents(
    size: npt.NDArray[np.float32], column: npt.NDArray[np.float32]
) -> npt.NDArray[np.int64]:
    """Return the exponent of each channel's factor; 0 for all but outliers.

    After balancing, a channel's activations and its weights are about equally far above their
    medians. The activations are moved at most to about their median.

    Args:
        size: usual magnitude of the activations of each channel, shape (channels,).
        column: the largest absolute weight of each channel, shape (channels,).
    """
    usual, usual_weight = float(np.median(size)), float(np.median(column))
    if not (
        usual > 0 and usual_weight > 0 and np.isfinite(size).all() and np.isfinite(column).all()
    ):
        return np.zeros(len(size), dtype=np.int64)
    above = np.log2(np.maximum(size / usual, 1.0))
    below = np.log2(np.maximum(column / usual_weight, 2.0**-_LARGEST_EXPONENT))
    shared = np.clip(np.rint((above - below) / 2), 0, np.rint(above))
    return np.where(size > _OUTLIER * usual, np.minimum(shared, _LARGEST_EXPONENT), 0).astype(
        np.int64
    )


def _apply(model: onnx.ModelProto, exponents: Mapping[str, Mapping[str, Any]]) -> None:
    """Move the channels' factors from the normalizations into the weights."""
    from onnx import numpy_helper

    tensors = {tensor.name: tensor for tensor in model.graph.initializer}
    norms = dict(_find_norms(model, tensors))
    for value, channels in exponents.items():
        norm = norms[value]
        places = [tensors[node.input[index]] for node, index in norm.affine]
        factors = _read_factors(channels, places[0].dims[0])
        # Exporters share equal constants. Other nodes can read the old one, so it is not changed.
        for (node, index), tensor in zip(norm.affine, places, strict=True):
            node.input[index] = (
                f"{value}_balanced_{'shift' if node.op_type == 'Add' or index == 2 else 'scale'}"
            )
            own = numpy_helper.from_array(
                numpy_helper.to_array(tensor) / factors, node.input[index]
            )
            model.graph.initializer.append(own)
        for name, axis in norm.weights.items():
            along = factors[:, np.newaxis] if axis == 0 else factors
            tensors[name].CopyFrom(
                numpy_helper.from_array(numpy_helper.to_array(tensors[name]) * along, name)
            )
    _remove_unread_constants(model)


def _read_factors(channels: Mapping[str, Any], count: int) -> npt.NDArray[np.float32]:
    """Return the factor of each channel.

    Factors are powers of two, so that dividing and multiplying by them is exact.
    """
    factors = np.ones(count, dtype=np.float32)
    for channel, exponent in channels.items():
        if int(channel) < 0:
            raise ValueError(f"{channel!r} is not the index of a channel")
        if not (isinstance(exponent, int) and 0 < exponent <= _LARGEST_EXPONENT):
            raise ValueError(
                f"the exponent of channel {channel} is not from 1 to {_LARGEST_EXPONENT}: "
                f"{exponent!r}"
            )
        factors[int(channel)] = 2.0**exponent
    return factors


def _remove_unread_constants(model: onnx.ModelProto) -> None:
    read = {name for graph in iterate_graphs(model) for node in graph.node for name in node.input}
    read |= {value.name for graph in iterate_graphs(model) for value in graph.output}
    kept = [tensor for tensor in model.graph.initializer if tensor.name in read]
    del model.graph.initializer[:]
    model.graph.initializer.extend(kept)
