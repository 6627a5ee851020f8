"""Inputs for a model file: generated from its shapes, or supplied."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from onnx_ops.domain.artifact import TensorSpec
from onnx_ops.domain.pipeline import InputValues
from onnx_ops.errors import UserError
from onnx_ops.measure.answers import cut_batches
from onnx_ops.onnx_graph.input_bounds import InputBounds
from onnx_ops.onnx_graph.model_info import read_model_info
from onnx_ops.ports import Tensors
from onnx_ops.statistics.probes import (
    MIN_NOISE_ROWS,
    REAL,
    ProbeGroup,
    learn_domains,
    make_batch_inputs,
    make_probe_groups,
    take_rows,
)

LENGTH = 8
"""Generated size of a symbolic dimension other than the batch."""

_BITS = 40
"""Size of the largest generated whole numbers: above 32 bits."""

_RUN_BYTES = 1 << 24
"""Inputs of one run; the intermediate values of a model may take a hundred times as much."""

_SET_BYTES = 1 << 26
"""Rows of one group, of about ten groups."""

_ROW_BYTES = 1 << 30

_REMEDIES = {
    "bfloat16": "NumPy has no bfloat16: export the model with float32 inputs, and a Cast to bfloat16 behind them.",
    "map": "Export the model with a tensor that has a column for each key.",
    "optional": "Export the model with plain tensors: one file with this input, and one without it.",
    "sequence": "Export the model with one tensor for each element.",
}
"""What to do about an input that cannot be generated, by its type."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InputGroup:
    """Inputs of one kind, split into runs, whose outputs belong together along axis 0.

    `inside` is whether callers can send such inputs.
    """

    name: str
    runs: tuple[Tensors, ...]
    inside: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRows:
    """Rows to feed a model with.

    `batch` is the number of rows that every run must have, or 0 for any number. `fixed` inputs have no axis for rows
    and are the same in every run.
    """

    rows: Tensors
    fixed: Tensors
    batch: int

    def __len__(self) -> int:
        return len(next(iter(self.rows.values()))) if self.rows else 1

    @property
    def row_bytes(self) -> int:
        """Return the bytes of a row."""
        return sum(array.nbytes for array in self.rows.values()) // max(1, len(self))

    @property
    def large(self) -> bool:
        """Return whether groups of 32 such rows would take too much memory."""
        return self.row_bytes * MIN_NOISE_ROWS > _SET_BYTES

    def select(self, rows: Any) -> Tensors:
        """Return the rows of those indices as one run."""
        return {**{name: array[rows] for name, array in self.rows.items()}, **self.fixed}

    def feed(self, size: int) -> Tensors:
        """Return one run of `size` rows, or of the model's fixed batch."""
        return self.select(np.arange(self.batch or size) % max(1, len(self)))


def shared_inputs(a: Path, b: Path | None = None) -> tuple[TensorSpec, ...]:
    """Return the inputs of a model, or those that two models share.

    Raises:
        UserError: a file is not ONNX, or the two do not have the same inputs.
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
            why=f"{a.name} takes {_list_specs(first)}; {b.name} takes {_list_specs(tuple(second.values()))}",
            remedy="Export both with inputs of the same names, shapes and types.",
        )
    return tuple(common)


def find_fixed_sizes(a: Path, b: Path) -> dict[str, int]:
    """Return the sizes that B fixes of dimensions that A leaves free."""
    second = {spec.name: spec for spec in read_model_info(b).inputs}
    return {
        str(size): int(other)
        for spec in read_model_info(a).inputs
        if spec.name in second and len(spec.shape) == len(second[spec.name].shape)
        for size, other in zip(spec.shape, second[spec.name].shape, strict=True)
        if _is_free(size) and not _is_free(other)
    }


def _merge_specs(a: TensorSpec, b: TensorSpec) -> TensorSpec | None:
    """Return a spec that fits both, or None."""
    if a.dtype != b.dtype:
        return None
    if not (a.shape and b.shape):  # the rank of one is not known, or it is a scalar
        return a if a.shape else b
    if len(a.shape) != len(b.shape):
        return None
    pairs = list(zip(a.shape, b.shape, strict=True))
    if any(x != y and not _is_free(x) and not _is_free(y) for x, y in pairs):
        return None
    return replace(a, shape=tuple(y if _is_free(x) and not _is_free(y) else x for x, y in pairs))


def _is_free(size: int | str) -> bool:
    return isinstance(size, str) or size < 0


def _list_specs(specs: Sequence[TensorSpec]) -> str:
    return ", ".join(f"{s.name} ({s.dtype} {_format_shape(s)})" for s in specs) or "nothing"


def generate_samples(
    inputs: Sequence[TensorSpec],
    *,
    count: int,
    dims: Mapping[str, int],
    seed: int = 0,
    bounds: Mapping[str, InputBounds] | None = None,
) -> SampleRows:
    """Generate random rows from the types and shapes of the inputs.

    Floats are standard normal, booleans 0 or 1, texts known to the model, `a` or `b`. Integers that are indices reach
    every entry; others are most often masks, and are 0 or 1. Inputs that begin with different fixed sizes have no axis
    for rows: each is drawn once, as a whole. There are fewer rows than `count` if these would not fit into 64 MiB;
    symbolic dimensions that are not in `dims`, other than the batch, have the size 8.

    Raises:
        UserError: an input is not a tensor, or its type or size cannot be generated, or `dims` names no dimension.
    """
    named = sorted({size for spec in inputs for size in spec.shape if isinstance(size, str)} - {"?"})
    if unknown := sorted(set(dims) - set(named)):
        remedy = f"Named ones: {', '.join(named) or 'none'}."
        raise UserError(f"no dimension is called {unknown[0]!r}", where="--dim", remedy=remedy)
    starts = {spec.shape[0] for spec in inputs if spec.shape}
    whole = len(starts) > 1 and not any(map(_is_free, starts))
    rowed = [] if whole else [spec for spec in inputs if spec.shape]
    batch = 1 if whole else _find_fixed_batch(inputs, dims)
    symbols = {str(spec.shape[0]): batch or 1 for spec in rowed}
    draw = np.random.default_rng(seed)
    known_sizes = {**symbols, **dims}
    shapes = {
        spec.name: tuple(map(int, spec.shape))
        if whole
        else tuple(known_sizes.get(s, LENGTH) if isinstance(s, str) else LENGTH if s < 0 else s for s in spec.shape[1:])
        for spec in inputs
    }
    row_bytes = sum(math.prod(shapes[spec.name]) * max(1, _dtype(spec).itemsize) for spec in inputs)
    if row_bytes > _ROW_BYTES:
        raise UserError(f"one row of the model's inputs takes {row_bytes / 1e9:.3g} GB", remedy="Supply rows: --data.")
    count = max(batch or 1, min(count, _SET_BYTES // max(1, row_bytes)))
    known_bounds = bounds or {}
    known = {spec.name: known_bounds.get(spec.name, InputBounds()) for spec in inputs}
    rows = {s.name: _draw_values(draw, s, (count, *shapes[s.name]), known[s.name]) for s in rowed}
    fixed = {s.name: _draw_values(draw, s, shapes[s.name], known[s.name]) for s in inputs if s not in rowed}
    return SampleRows(rows=rows, fixed=fixed, batch=batch)


def check_samples(inputs: Sequence[TensorSpec], arrays: Mapping[str, Any], *, where: str, limit: int) -> SampleRows:
    """Check the user's own rows against the model's inputs; other arrays are ignored.

    Raises:
        UserError: an input is missing, or has another shape or type.
    """
    rows = {}
    for spec in inputs:
        if spec.name not in arrays:
            raise UserError(
                f"it has no array {spec.name!r}",
                where=where,
                why=f"the model takes {', '.join(s.name for s in inputs)}; the file has {', '.join(arrays) or 'none'}",
                remedy="Save the arrays under the names of the model's inputs: numpy.savez(FILE, NAME=array).",
            )
        array, kind = arrays[spec.name], _dtype(spec)
        if not _has_shape(spec, array):
            what = f"array {spec.name!r} has shape {array.shape}, the model takes {_format_shape(spec)}"
            raise UserError(what, where=where)
        if kind.kind == "U" and array.dtype.kind in "US":
            kind = np.dtype(np.str_)
        elif kind.kind == "U" or not np.can_cast(array.dtype, kind, casting="same_kind"):
            what = f"array {spec.name!r} is of type {array.dtype}, the model takes {spec.dtype}"
            raise UserError(what, where=where)
        rows[spec.name] = array.astype(kind, copy=False)[:limit]
    return SampleRows(rows=rows, fixed={}, batch=_find_fixed_batch(inputs, {}))


def find_input_problems(inputs: Sequence[TensorSpec], arrays: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield why a model cannot take these arrays, by input.

    Unlike in `check_samples`, nothing is converted: a pipeline passes on what its data set holds.
    """
    if missing := [spec.name for spec in inputs if spec.name not in arrays]:
        names = ", ".join(map(repr, missing))
        yield "", f"the model takes {names}, and the data set gives it {', '.join(map(repr, arrays))}"
        return
    for spec in inputs:
        array = arrays[spec.name]
        if not _has_shape(spec, array):
            shape = " × ".join(["rows", *map(str, array.shape[1:])])
            yield spec.name, f"{spec.name!r} is of shape {shape}, the model takes {_format_shape(spec)}"
        elif not (array.dtype.kind in "US" if spec.dtype == "string" else array.dtype == _dtype(spec)):
            text = f"{spec.name!r} is of type {array.dtype}, the model takes {spec.dtype}"
            numbers = array.dtype.kind in "biuf" and spec.dtype != "string"
            yield spec.name, f"{text}. Convert it: array.astype({spec.dtype!r})" if numbers else text
    known = [spec.name for spec in inputs]
    for name in arrays:
        if name not in known:
            yield name, f"the model takes no input {name!r}; it takes {', '.join(known)}"


def _has_shape(spec: TensorSpec, array: Any) -> bool:
    pairs = zip(spec.shape[1:], array.shape[1:], strict=False)
    fits = len(spec.shape) == array.ndim and all(_is_free(size) or size == actual for size, actual in pairs)
    return fits or not spec.shape


def _format_shape(spec: TensorSpec) -> str:
    return " × ".join(map(str, spec.shape))


def build_groups(
    samples: SampleRows,
    *,
    empty: bool = True,
    bounds: Mapping[str, InputBounds] | None = None,
    splits: Tensors | None = None,
) -> tuple[InputGroup, ...]:
    """Build the groups: the rows, rows derived from them, and batches.

    Large rows come without others, and in batches of at most 16 MiB. Whole numbers that are neither indices nor sizes
    have all magnitudes and both signs: a model that rejects these has no answer to compare. `empty` adds a group
    without rows. `bounds` are the bounds that the graph shows for the inputs, and `splits` rows next to the splits of
    trees.
    """
    if not samples.rows:
        return (InputGroup(name=REAL, runs=(samples.fixed,)),)
    known_bounds = bounds or {}
    indices = {name: known.index for name, known in known_bounds.items() if known.index is not None}
    probes = {REAL: ProbeGroup(inputs=samples.rows)}
    if not samples.large:
        missing = {name: InputValues(missing=True) for name, known in known_bounds.items() if known.missing}
        domains = learn_domains(samples.rows, missing, indices)
        probes = make_probe_groups(samples.rows, domains, empty=empty and not samples.batch)
        if splits is not None:
            probes["splits"] = ProbeGroup(inputs=splits)
        whole = [name for name, array in samples.rows.items() if array.dtype.kind in "iu" and name not in indices]
        if plain := [name for name in whole if name in known_bounds and not known_bounds[name].size]:
            probes["range:whole_numbers"] = ProbeGroup(inputs=_draw_whole_numbers(samples.rows, plain))
    groups = [
        InputGroup(name=name, runs=_cut_runs(probe.inputs, samples), inside=probe.inside)
        for name, probe in probes.items()
    ]
    if not samples.batch:
        for name, index in make_batch_inputs({"row": np.arange(len(samples))}).items():
            rows = index["row"].astype(np.intp)
            if len(rows) < 2 or len(rows) * samples.row_bytes <= _RUN_BYTES:
                groups.append(InputGroup(name=name, runs=(samples.select(rows),)))
    return tuple(groups)


def _draw_whole_numbers(rows: Tensors, names: Sequence[str]) -> Tensors:
    """Replace whole numbers of those inputs by others of every magnitude and sign."""
    draw = np.random.default_rng(1)
    inputs = dict(take_rows(rows, 3 * MIN_NOISE_ROWS))
    for name in names:
        limits = np.iinfo(inputs[name].dtype.name)
        sizes = np.exp2(draw.uniform(0, min(_BITS, np.log2(float(limits.max))), inputs[name].shape))
        signed = sizes * (draw.choice([-1.0, 1.0], sizes.shape) if limits.min < 0 else 1.0)
        inputs[name] = np.clip(signed, float(limits.min), float(limits.max) / 2).astype(inputs[name].dtype)
    return inputs


def _cut_runs(rows: Tensors, samples: SampleRows) -> tuple[Tensors, ...]:
    """Cut the rows into runs of the batch; no rows are one run."""
    feeds = [feed for feed, _ in cut_batches(rows, samples.batch, _RUN_BYTES)] or [rows]
    return tuple({**feed, **samples.fixed} for feed in feeds)


def _find_fixed_batch(inputs: Sequence[TensorSpec], dims: Mapping[str, int]) -> int:
    """Return the number of rows that the model requires; 0 for any number."""
    first = {spec.shape[0] for spec in inputs if spec.shape}
    sizes = {dims.get(size, 0) if isinstance(size, str) else max(0, size) for size in first} - {0}
    if len(sizes) > 1:
        raise UserError(
            f"its inputs begin with different dimensions: {sorted(sizes)}",
            why="axis 0 is the batch, so all inputs must have the same number of rows",
            remedy="Export the model with a batch axis in every input.",
        )
    return min(sizes, default=0)


def _dtype(spec: TensorSpec) -> np.dtype[Any]:
    if spec.dtype == "string":
        return np.dtype(np.str_)
    with contextlib.suppress(TypeError):
        dtype = np.dtype(spec.dtype)
        if dtype.kind in "biuf":
            return dtype
    remedy = _REMEDIES.get(spec.dtype, "Inputs may be tensors of floats, integers, booleans or texts.")
    raise UserError(f"input {spec.name!r} is of type {spec.dtype}", remedy=remedy)


def _draw_values(draw: np.random.Generator, spec: TensorSpec, shape: tuple[int, ...], bounds: InputBounds) -> Any:
    kind = _dtype(spec)
    if kind.kind == "f":
        return draw.standard_normal(shape).astype(kind)
    if kind.kind == "U":
        return draw.choice([*bounds.texts, "a", "b"], shape)
    low, high = bounds.index or (0, 1)
    return draw.integers(low, high, shape, endpoint=True).astype(kind)
