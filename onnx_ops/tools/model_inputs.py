"""The inputs of a model, or the inputs that two models share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from onnx_ops.domain.artifact import TensorSpec
from onnx_ops.domain.row_axes import is_free, list_named_axes
from onnx_ops.errors import UserError, suggest
from onnx_ops.onnx_graph.model_info import read_model_info


def shared_inputs(a: Path, b: Path | None = None) -> tuple[TensorSpec, ...]:
    """Return the inputs of a model, or those that two models share.

    Raises:
        UserError: a file is not ONNX, or the two models have different inputs.
    """
    first = read_model_info(a).inputs
    if b is None:
        return first
    second = {spec.name: spec for spec in read_model_info(b).inputs}
    shared = [_merge_specs(spec, second[spec.name]) for spec in first if spec.name in second]
    common = [spec for spec in shared if spec is not None]
    if len(common) < max(len(first), len(second)):
        raise UserError(
            "the models do not take the same inputs",
            where=b.name,
            why=f"{a.name} takes {_list_specs(first)}; "
            f"{b.name} takes {_list_specs(tuple(second.values()))}",
            remedy="Export both with inputs of the same names, shapes and types.",
        )
    return tuple(common)


def find_fixed_sizes(a: Path, b: Path) -> dict[str, int]:
    """Return the sizes that B fixes and A leaves free, by name of the dimension."""
    shapes = {spec.name: spec.shape for spec in read_model_info(a).inputs}
    others = {spec.name: spec.shape for spec in read_model_info(b).inputs}
    return {
        symbol: int(others[name][axis])
        for symbol, name, axis in list_named_axes(shapes)
        if len(others.get(name, ())) == len(shapes[name]) and not is_free(others[name][axis])
    }


def list_free_names(inputs: Sequence[TensorSpec]) -> list[str]:
    """Return the names of the inputs' free dimensions, sorted."""
    return sorted({name for name, _, _ in list_named_axes({s.name: s.shape for s in inputs})})


def check_fixed_names(inputs: Sequence[TensorSpec], fix: Mapping[str, Any]) -> None:
    """Raise UserError if a value is given for an unknown input."""
    names = [spec.name for spec in inputs]
    for name in fix:
        if name not in names:
            remedy = suggest(name, names, f"There are {', '.join(names)}.")
            raise UserError(f"no input is called {name!r}", where="--fix", remedy=remedy)


def find_batch(
    inputs: Sequence[TensorSpec], axes: Mapping[str, int], dims: Mapping[str, int]
) -> int:
    """Return the number of rows that every run must have; 0 for any number.

    `axes` are the axes of rows by input, and `dims` the requested sizes of dimensions.
    """
    sizes = [spec.shape[axes[spec.name]] for spec in inputs if spec.name in axes]
    return max(
        (dims.get(size, 0) if isinstance(size, str) else max(0, size) for size in sizes), default=0
    )


def format_shape(spec: TensorSpec) -> str:
    """Return the sizes and names of an input's dimensions as a text."""
    return " × ".join(map(str, spec.shape)) or "a scalar"


def _merge_specs(a: TensorSpec, b: TensorSpec) -> TensorSpec | None:
    """Return a spec that fits both specs, or None."""
    if a.dtype != b.dtype:
        return None
    if not (a.shape and b.shape):  # One spec is a scalar, or its rank is unknown.
        return a if a.shape else b
    if len(a.shape) != len(b.shape):
        return None
    pairs = list(zip(a.shape, b.shape, strict=True))
    if any(_are_unlike(x, y) for x, y in pairs):
        return None
    return replace(a, shape=tuple(y if is_free(x) and not is_free(y) else x for x, y in pairs))


def _are_unlike(x: int | str, y: int | str) -> bool:
    """Return whether two sizes are both fixed and differ."""
    return x != y and not is_free(x) and not is_free(y)


def _list_specs(specs: Sequence[TensorSpec]) -> str:
    return ", ".join(f"{s.name} ({s.dtype} {format_shape(s)})" for s in specs) or "nothing"
