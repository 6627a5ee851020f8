"""The kind of a candidate relative to its baseline: precision, format or opset."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from onnx_ops.domain.artifact import digest_file
from onnx_ops.onnx_graph.files import (
    collect_constants,
    get_element_bits,
    get_element_type,
    get_opset,
    iterate_nodes,
    share_structure,
)
from onnx_ops.onnx_graph.int8_coverage import INT8_OPERATORS, quantizes_activations
from onnx_ops.onnx_graph.ort_format import is_ort_format

if TYPE_CHECKING:
    import onnx

Precision = Literal["float32", "float16", "int8", "weight-only"]

_HALVES = {10: "float16", 16: "bfloat16"}
_FLOAT = 1
_INT8_BITS, _WIDE = 8, 16
_WIDE_LEVELS = ("int16", "uint16")
_BLOCKED = frozenset({"GatherBlockQuantized", "MatMulNBits"})
_READING = frozenset({"DequantizeLinear", "QuantizeLinear"})
_MOVING = frozenset({"Cast", "Identity", "Reshape", "Squeeze", "Transpose", "Unsqueeze"})
_WITH_WEIGHTS = frozenset({"Conv", "ConvTranspose", "Gemm", "MatMul"})


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelKind:
    """The precision of a model, which determines how the model is judged.

    `why` states how the precision was derived.
    """

    precision: Precision
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CandidateKind:
    """The kinds of a candidate and its baseline, and their other differences."""

    baseline: ModelKind
    candidate: ModelKind
    changes: tuple[str, ...]

    @property
    def is_rounded(self) -> bool:
        """Return whether the candidate was rounded from a float32 baseline."""
        return self.baseline.precision == "float32" != self.candidate.precision

    def describe(self) -> str:
        """Return the precision, how it was derived, and the other changes as one line."""
        return "; ".join((f"{self.candidate.precision} ({self.candidate.why})", *self.changes))


def read_candidate_kind(baseline: Path, candidate: Path) -> CandidateKind:
    """Return the kinds of both files, and what else the candidate changes."""
    before, after = share_structure(baseline), share_structure(candidate)
    kind = CandidateKind(
        baseline=_read_kind(before), candidate=_read_kind(after), changes=("the same file",)
    )
    if digest_file(baseline) == digest_file(candidate):
        return kind
    changes = [".ort format"] if is_ort_format(candidate) else []
    if (opset := get_opset(after)) != get_opset(before):
        changes.append(f"opset {opset}, was {get_opset(before)}")
    old, new = (Counter(node.op_type for node in iterate_nodes(model)) for model in (before, after))
    if kind.baseline.precision == kind.candidate.precision and old != new:
        fused = {
            n.op_type
            for n in iterate_nodes(after)
            if n.domain.startswith("com.m") and n.op_type not in old
        }
        added = ", ".join(f"{name} {new[name]}" for name in sorted(fused)[:3])
        sizes = f"{new.total()} nodes, was {old.total()}"
        changes.append(
            f"graph-optimized ({added}; {sizes})" if added else f"another graph ({sizes})"
        )
    return replace(kind, changes=tuple(changes))


def _read_kind(model: onnx.ModelProto) -> ModelKind:
    operators = Counter(node.op_type for node in iterate_nodes(model))
    stored = collect_constants(model)
    if quantizes_activations(model):
        return ModelKind(
            precision="int8", why=_describe_int8(model, operators, _count_weights(model, stored))
        )
    if weights := _count_weights(model, stored):
        return ModelKind(precision="weight-only", why=_describe_weights(operators, weights))
    sizes = Counter[int]()
    for tensor in stored.values():
        # In a float16 graph, single numbers are sometimes float32, so they are not counted.
        if (elements := math.prod(tensor.dims)) > 1:
            sizes[tensor.data_type] += elements
    half = max(_HALVES, key=lambda kind: sizes[kind])
    floats = sizes[half] + sizes[_FLOAT]
    inputs = [value.type.tensor_type.elem_type for value in model.graph.input]
    if not floats and (taken := next((_HALVES[kind] for kind in inputs if kind in _HALVES), "")):
        return ModelKind(precision="float16", why=f"its inputs are {taken}")
    if sizes[half]:
        return ModelKind(
            precision="float16",
            why=f"{sizes[half]:,} of {floats:,} float weights are {_HALVES[half]}",
        )
    return ModelKind(
        precision="float32", why="no quantized operators or weights of 16 bits or fewer"
    )


def _count_weights(model: onnx.ModelProto, stored: Mapping[str, onnx.TensorProto]) -> Counter[str]:
    """Count the products and convolutions whose weight is a quantized constant.

    The counts are by the type of the weight's levels. Lookups in a quantized table are included.
    """
    # The keys are the names of results that are computed from quantized constants. The values are
    # the types of the constants' levels.
    types: dict[str, str] = {}
    counts = Counter[str]()
    for node in reversed(list(iterate_nodes(model))):
        # `iterate_nodes` yields the last node first, so the order is reversed.
        first = node.input[0] if node.input else ""
        weight = node.input[1] if len(node.input) > 1 else ""
        if kind := _get_levels_type(node, stored):
            types[node.output[0]] = kind
        elif node.op_type in (*_MOVING, "DequantizeLinear") and first in types:
            types[node.output[0]] = types[first]
        elif node.op_type in _BLOCKED:
            counts[f"int{next((a.i for a in node.attribute if a.name == 'bits'), 4)}"] += 1
        elif node.op_type in _WITH_WEIGHTS and weight in types:
            counts[types[weight]] += 1
        elif node.op_type == "Gather" and (
            kind := types.get(first) or _get_narrow_type(first, stored)
        ):
            types[node.output[0]] = kind
            counts[kind] += 1
    return counts


def _get_levels_type(node: onnx.NodeProto, stored: Mapping[str, onnx.TensorProto]) -> str:
    """Return the type of the levels of the constant that a quantization node reads.

    QuantizeLinear computes the levels of a constant, and DequantizeLinear reads them. The result is
    empty for other nodes.
    """
    if node.op_type not in _READING or not node.input or node.input[0] not in stored:
        return ""
    # QuantizeLinear rounds a float constant in each run, to the type of the zero point.
    is_rounded_in_runs = node.op_type == "QuantizeLinear" and len(node.input) > 2
    name = node.input[2] if is_rounded_in_runs else node.input[0]
    if name in stored and (kind := get_element_type(stored[name].data_type)) in _WIDE_LEVELS:
        return kind
    return _get_narrow_type(name, stored)


def _get_narrow_type(name: str, stored: Mapping[str, onnx.TensorProto]) -> str:
    """Return the type of a constant with fewer than 16 bits; empty for other types."""
    if name not in stored:
        return ""
    kind = stored[name].data_type
    return get_element_type(kind) if (get_element_bits(kind) or _WIDE) < _WIDE else ""


def _describe_weights(operators: Counter[str], weights: Counter[str]) -> str:
    """Return how many of the operators that can have weights have quantized ones."""
    tables = sum(operators[name] for name in ("Gather", "GatherBlockQuantized"))
    products = sum(operators[name] for name in (*_WITH_WEIGHTS, "MatMulNBits"))
    count, total = weights.total(), products + tables
    widths = " and ".join(f"{bits}-bit" for bits in _list_bits(weights))
    kinds = (
        "matrix products, convolutions and lookups"
        if tables
        else "matrix products and convolutions"
    )
    return f"{count} of {total} {kinds} have {widths} weights"


def _list_bits(weights: Counter[str]) -> list[int]:
    """Return the bits of types such as int4 and float8e4m3fn in ascending order."""
    return sorted({int(found.group()) for kind in weights if (found := re.search(r"\d+", kind))})


def _describe_int8(model: onnx.ModelProto, operators: Counter[str], weights: Counter[str]) -> str:
    pairs = _count_pairs(model)
    fused = sum(operators[name] for name in INT8_OPERATORS)
    total = fused + sum(operators[name] for name in _WITH_WEIGHTS)
    narrow = [f"{bits}-bit" for bits in _list_bits(weights) if bits < _INT8_BITS]
    note = f", some with {' and '.join(narrow)} weights" if narrow else ""
    return (
        f"{_describe_style(operators, fused)}: {pairs + fused} of {total} MatMul/Conv/Gemm in "
        f"int8{note}"
    )


def _count_pairs(model: onnx.ModelProto) -> int:
    """Return the number of products and convolutions with a dequantized weight.

    The weight is a constant that a DequantizeLinear reads.
    """
    stored = set(collect_constants(model))
    read = {
        node.output[0]
        for node in iterate_nodes(model)
        if node.op_type == "DequantizeLinear" and node.input and node.input[0] in stored
    }
    return sum(
        node.op_type in _WITH_WEIGHTS and bool(read & set(node.input[1:2]))
        for node in iterate_nodes(model)
    )


def _describe_style(operators: Counter[str], fused: int) -> str:
    """Return the method of quantization.

    For static quantization, the storage form is added.
    """
    if operators["DynamicQuantizeLinear"] or operators["DynamicQuantizeMatMul"]:
        return "dynamic"
    if fused and operators["QuantizeLinear"] <= fused:
        return "static, integer operators"
    return "static, QuantizeLinear pairs"
