"""Inputs for a model file: generated from its shapes, or supplied."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from onnx_ops.domain.artifact import TensorSpec
from onnx_ops.domain.pipeline import InputValues
from onnx_ops.domain.row_axes import (
    find_batch_symbol,
    find_output_axes,
    find_row_axes,
    find_sized_axes,
    guess_row_axes,
    is_free,
    is_named,
    list_named_axes,
    move_axis_first,
)
from onnx_ops.domain.target import Target
from onnx_ops.errors import MeasurementError, UserError, suggest
from onnx_ops.measure.answers import cut_batches, explain_rejection
from onnx_ops.measure.row_layout import RowLayout, arrange_runtime, fit_value, read_dtype, remove_axis
from onnx_ops.onnx_graph.compatibility import check_model
from onnx_ops.onnx_graph.input_bounds import InputBounds
from onnx_ops.onnx_graph.model_info import read_model_info
from onnx_ops.ports import Runtime, Tensors
from onnx_ops.statistics.probes import (
    MIN_NOISE_ROWS,
    REAL,
    ProbeGroup,
    learn_domains,
    make_batch_inputs,
    make_probe_groups,
    make_sized_inputs,
    take_rows,
)

LENGTH = 8
"""Generated size of a symbolic dimension other than the batch."""

OTHER_SIZES = (1, 2, 3, 17)
"""Further generated sizes of each symbolic dimension other than the batch."""

_DRAWS = 3
"""Further requests of a model that has inputs without rows."""

_MOST_TRIALS = 32

_BITS = 40
"""Size of the largest generated whole numbers: above 32 bits."""

_RUN_BYTES = 1 << 24
"""Inputs of one run; the intermediate values of a model may take a hundred times as much."""

_SET_BYTES = 1 << 26
"""Rows of one group, of about ten groups."""

_ROW_BYTES = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class InputGroup:
    """Inputs of one kind, split into runs, whose outputs belong together along axis 0.

    `inside` is whether callers can send such inputs. `assumed`: only the model itself can show whether it takes inputs
    of these sizes or values.
    """

    name: str
    runs: tuple[Tensors, ...]
    inside: bool = True
    assumed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRows:
    """Rows to feed a model with, on axis 0 of every array.

    Args:
        rows: the inputs that have rows; none of a model whose inputs share no dimension.
        fixed: the other inputs, the same in every run.
        batch: the number of rows that every run must have, or 0 for any number.
        axes: where the model takes the rows; default: on axis 0.
        further: more runs by group, at other sizes of free dimensions and with other values of `fixed`.
        choices: generated values of inputs of one value, of which the model may refuse some.
    """

    rows: Tensors
    fixed: Tensors
    batch: int
    axes: Mapping[str, int] = field(default_factory=dict)
    further: Mapping[str, Tensors] = field(default_factory=dict)
    choices: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)

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

    def head(self, limit: int) -> SampleRows:
        """Return the first rows."""
        return replace(self, rows={name: array[:limit] for name, array in self.rows.items()})

    def select(self, rows: Any) -> Tensors:
        """Return the rows of those indices as one run."""
        return {name: array[rows] for name, array in self.rows.items()}

    def feed(self, size: int) -> Tensors:
        """Return one run of `size` rows, or of the model's fixed batch."""
        return self.select(np.arange(self.batch or size) % max(1, len(self)))

    def read_layout(self, model: Path) -> RowLayout:
        """Return where the model takes and returns these rows."""
        info = read_model_info(model)
        shapes, outputs = ({spec.name: spec.shape for spec in specs} for specs in (info.inputs, info.outputs))
        inputs = self.axes or dict.fromkeys(self.rows, 0)
        return RowLayout(inputs=inputs, outputs=find_output_axes(shapes, outputs), values=self.fixed)


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
        if is_free(size) and not is_free(other)
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
    if any(x != y and not is_free(x) and not is_free(y) for x, y in pairs):
        return None
    return replace(a, shape=tuple(y if is_free(x) and not is_free(y) else x for x, y in pairs))


def _list_specs(specs: Sequence[TensorSpec]) -> str:
    return ", ".join(f"{s.name} ({s.dtype} {_format_shape(s)})" for s in specs) or "nothing"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Recipe:
    """What requests are generated from; `dims` are requested sizes, `fix` requested values."""

    inputs: Sequence[TensorSpec]
    axes: Mapping[str, int]
    dims: Mapping[str, int]
    fix: Mapping[str, Any]
    bounds: Mapping[str, InputBounds]
    batch: int

    @property
    def symbols(self) -> dict[str, None]:
        """Return the names of free dimensions that hold no rows."""
        places = list_named_axes({spec.name: spec.shape for spec in self.inputs})
        rows = {spec.shape[axis] for spec in self.inputs if (axis := self.axes.get(spec.name)) is not None}
        return {symbol: None for symbol, name, axis in places if symbol not in rows and self.axes.get(name) != axis}

    def shape(self, spec: TensorSpec, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """Return the shape of an input in one run, without the axis of the rows."""
        names = {axis: symbol for symbol, _, axis in list_named_axes({spec.name: spec.shape})}
        return tuple(
            sizes.get(names[axis], self.batch or 1) if axis in names else int(size)
            for axis, size in enumerate(spec.shape)
            if self.axes.get(spec.name) != axis
        )

    def read_sizes(self, wanted: Mapping[str, int]) -> dict[str, int]:
        """Return the size of every free dimension."""
        return {symbol: wanted.get(symbol, self.dims.get(symbol, LENGTH)) for symbol in self.symbols}

    def choices(self, spec: TensorSpec) -> tuple[Any, ...]:
        """Return the values to try of an input of one whole number or boolean that is no index; none of others."""
        known, kind = self.bounds.get(spec.name, InputBounds()), read_dtype(spec)
        single = spec.name not in self.axes and all(size == 1 for size in spec.shape)
        if spec.name in self.fix or not single or known.index or known.tables or kind.kind not in "biu":
            return ()
        if kind.kind == "b":
            return (True, False)
        limits = np.iinfo(kind.name)
        return tuple(value for value in known.compared or (1,) if limits.min <= value <= limits.max)

    def draw(self, draw: np.random.Generator, count: int, wanted: Mapping[str, int]) -> tuple[Tensors, Tensors]:
        """Return `count` rows, and the inputs without rows, at those sizes."""
        sizes = self.read_sizes(wanted)
        rows: dict[str, Any] = {}
        fixed: dict[str, Any] = {}
        for spec in sorted(self.inputs, key=lambda spec: spec.name not in self.axes):
            shape, rowed = self.shape(spec, sizes), spec.name in self.axes
            if spec.name in self.fix:
                value = fit_value(self.fix[spec.name], replace(spec, shape=shape))
                values = np.repeat(value[None], count, axis=0) if rowed else value
            elif choices := self.choices(spec):
                values = np.full(shape, choices[0], read_dtype(spec))
            else:
                known = self.bounds.get(spec.name, InputBounds())
                values = _draw_values(draw, spec, (count, *shape) if rowed else shape, known, sizes)
            (rows if rowed else fixed)[spec.name] = values
        return rows, fixed


def generate_samples(
    inputs: Sequence[TensorSpec],
    *,
    count: int,
    dims: Mapping[str, int],
    seed: int = 0,
    bounds: Mapping[str, InputBounds] | None = None,
    fix: Mapping[str, Any] | None = None,
) -> SampleRows:
    """Generate random rows from the types and shapes of the inputs.

    Floats are standard normal, booleans 0 or 1, texts known to the model, `a` or `b`. Integers that are indices reach
    every entry; others are most often masks, and are 0 or 1, or what the model compares them with. Rows are on the axis
    that the inputs share (`domain.row_axes`). Inputs without it are drawn as a whole, and further groups draw them
    again; so do all inputs where there is no such axis. There are fewer rows than `count` if these would not fit into
    64 MiB. Symbolic dimensions that are not in `dims`, other than the batch, have the size 8, and further groups have
    other sizes.

    Args:
        fix: values of inputs by name.

    Raises:
        UserError: an input is not a tensor, or its type or size cannot be generated, or `dims` or `fix` name what does
            not exist.
    """
    named = sorted({symbol for symbol, _, _ in list_named_axes({spec.name: spec.shape for spec in inputs})})
    if unknown := sorted(set(dims) - set(named)):
        remedy = f"Named ones: {', '.join(named) or 'none'}."
        raise UserError(f"no dimension is called {unknown[0]!r}", where="--dim", remedy=remedy)
    check_fixed_names(inputs, fix or {})
    known_bounds = bounds or {}
    axes = _find_axes(inputs, known_bounds)
    recipe = _Recipe(
        inputs=inputs,
        axes=axes,
        dims=dims,
        fix=fix or {},
        bounds=known_bounds,
        batch=_find_batch(inputs, axes, dims),
    )
    sizes = recipe.read_sizes({})
    row_bytes = sum(math.prod(recipe.shape(spec, sizes)) * max(1, read_dtype(spec).itemsize) for spec in inputs)
    if row_bytes > _ROW_BYTES:
        raise UserError(f"one row of the model's inputs takes {row_bytes / 1e9:.3g} GB", remedy="Supply rows: --data.")
    count = max(recipe.batch or 1, min(count, _SET_BYTES // max(1, row_bytes)))
    rows, fixed = recipe.draw(np.random.default_rng(seed), count, {})
    choices = {spec.name: values for spec in inputs if (values := recipe.choices(spec))}
    further = {} if row_bytes * MIN_NOISE_ROWS > _SET_BYTES else dict(_draw_further(recipe, seed))
    return SampleRows(rows=rows, fixed=fixed, batch=recipe.batch, axes=axes, further=further, choices=choices)


def check_fixed_names(inputs: Sequence[TensorSpec], fix: Mapping[str, Any]) -> None:
    """Raise UserError if a value is given for an input that does not exist."""
    names = [spec.name for spec in inputs]
    for name in fix:
        if name not in names:
            remedy = suggest(name, names, f"There are {', '.join(names)}.")
            raise UserError(f"no input is called {name!r}", where="--fix", remedy=remedy)


def _find_axes(inputs: Sequence[TensorSpec], bounds: Mapping[str, InputBounds]) -> dict[str, int]:
    """Return the axes of rows; a number that the model compares with a constant is none, in a batch of 1."""
    axes = find_row_axes({spec.name: spec.shape for spec in inputs}, pooled=False)
    flags = [
        spec.name
        for spec in inputs
        if all(size == 1 for size in spec.shape) and bounds.get(spec.name, InputBounds()).compared
    ]
    return {name: axis for name, axis in axes.items() if name not in flags}


def _find_batch(inputs: Sequence[TensorSpec], axes: Mapping[str, int], dims: Mapping[str, int]) -> int:
    """Return the number of rows that every run must have; 0 for any number."""
    sizes = [spec.shape[axes[spec.name]] for spec in inputs if spec.name in axes]
    return max((dims.get(size, 0) if isinstance(size, str) else max(0, size) for size in sizes), default=0)


def _draw_further(recipe: _Recipe, seed: int) -> Iterator[tuple[str, Tensors]]:
    """Yield further runs: other sizes of free dimensions, other values, and other inputs without rows."""
    draw = np.random.default_rng((seed, 1))
    count = recipe.batch or MIN_NOISE_ROWS

    def make(wanted: Mapping[str, int]) -> Tensors:
        rows, fixed = recipe.draw(draw, count, wanted)
        return {**rows, **fixed}

    for wanted in _list_sizes([symbol for symbol in recipe.symbols if symbol not in recipe.dims]):
        run = make(wanted)
        if sum(array.nbytes for array in run.values()) <= _SET_BYTES:
            yield "lengths:" + ",".join(f"{symbol}={size}" for symbol, size in wanted.items()), run
    for spec in recipe.inputs:
        for value in recipe.choices(spec)[1:]:
            run = make({})
            yield f"values:{spec.name}={value}", {**run, spec.name: np.full_like(run[spec.name], value)}
    if any(spec.name not in (*recipe.axes, *recipe.fix) and not recipe.choices(spec) for spec in recipe.inputs):
        for number in range(1, _DRAWS + 1):
            yield f"draws:{number}", make({})
    pooled = {spec.name: spec.shape[0] for spec in recipe.inputs if spec.name in recipe.axes}
    if len(pooled) > 1 and not any(map(is_named, pooled.values())) and not recipe.batch:
        counts = dict(zip(pooled, itertools.cycle((3, 17)), strict=False))
        run = make({})
        apart = {name: array[: counts.get(name, len(array))] for name, array in run.items()}
        yield "lengths:" + ",".join(f"{name}[0]={size}" for name, size in counts.items()), apart


def _list_sizes(symbols: Sequence[str]) -> Iterator[dict[str, int]]:
    """Yield other sizes of the dimensions: sums, of each one alone, and of all together, the same and different ones.

    A dimension can be the sum of the others, as the length of a mask that covers a cache too.
    """
    for size in (LENGTH, 1, 3) if len(symbols) > 2 else ():
        yield from ({**dict.fromkeys(symbols, size), total: (len(symbols) - 1) * size} for total in symbols)
    for symbol in symbols:
        yield from ({symbol: size} for size in OTHER_SIZES)
    if len(symbols) > 1:
        yield from (dict.fromkeys(symbols, size) for size in OTHER_SIZES)
        for start in range(2):
            yield {symbol: OTHER_SIZES[(start + place) % len(OTHER_SIZES)] for place, symbol in enumerate(symbols)}


def check_samples(
    inputs: Sequence[TensorSpec],
    arrays: Mapping[str, Any],
    *,
    where: str,
    limit: int,
    fix: Mapping[str, Any] | None = None,
) -> SampleRows:
    """Check the user's own rows against the model's inputs; other arrays are ignored.

    Args:
        fix: values of inputs, in place of arrays.

    Raises:
        UserError: an input is missing, or has another shape or type, or the numbers of rows differ.
    """
    given = fix or {}
    check_fixed_names(inputs, given)
    shapes = {spec.name: spec.shape for spec in inputs}
    sizes = {name: arrays[name].shape for name, shape in shapes.items() if name in arrays}
    same_ranks = all(len(shapes[name]) == len(size) for name, size in sizes.items())
    axes = find_row_axes(shapes) or (guess_row_axes(shapes, sizes) if same_ranks else {})
    read = [spec for spec in inputs if spec.name not in given]
    arranged = {spec.name: _read_array(spec, arrays, axes, inputs, where) for spec in read}
    count = max((len(arranged[name]) for name in axes if name in arranged), default=1)
    for spec in inputs:
        if spec.name in given and spec.name in axes:
            value = fit_value(given[spec.name], remove_axis(spec, axes[spec.name]))
            arranged[spec.name] = np.repeat(value[None], count, axis=0)
        elif spec.name in given:
            arranged[spec.name] = fit_value(given[spec.name], spec)
    rows = {name: arranged[name] for name in axes}
    counts = {name: len(array) for name, array in rows.items()}
    named = find_batch_symbol(shapes)
    if len(set(counts.values())) > 1 and not named and not _find_batch(inputs, axes, {}):
        rows, axes = {}, {}  # dimensions that are independent of each other: one request
    elif len(set(counts.values())) > 1 or 0 in counts.values():
        text = ", ".join(f"{name} {count} on axis {axes[name]}" for name, count in counts.items())
        raise UserError(f"its arrays must have the same number of rows, at least one: {text}", where=where)
    fixed = {name: array for name, array in arranged.items() if name not in rows}
    samples = SampleRows(
        rows={name: array[:limit] for name, array in rows.items()},
        fixed=fixed,
        batch=_find_batch(inputs, axes, {}),
        axes=axes,
    )
    return samples if samples.large or not rows else replace(samples, further=_resize(samples, inputs))


def _read_array(
    spec: TensorSpec, arrays: Mapping[str, Any], axes: Mapping[str, int], inputs: Sequence[TensorSpec], where: str
) -> Any:
    """Return one array in the input's type, with rows on axis 0."""
    if spec.name not in arrays:
        remedy = "Save the arrays under the names of the model's inputs: numpy.savez(FILE, NAME=array)."
        raise UserError(
            f"it has no array {spec.name!r}",
            where=where,
            why=f"the model takes {', '.join(s.name for s in inputs)}; the file has {', '.join(arrays) or 'none'}",
            remedy=remedy if spec.name in axes else f"It is the same for all rows: --fix {spec.name}=VALUE.",
        )
    array, kind, axis = arrays[spec.name], read_dtype(spec), axes.get(spec.name)
    if not _has_shape(spec, array, axis):
        what = f"array {spec.name!r} has shape {array.shape}, the model takes {_format_shape(spec)}"
        raise UserError(what, where=where)
    if kind.kind == "U" and array.dtype.kind in "US":
        kind = np.dtype(np.str_)
    elif kind.kind == "U" or not np.can_cast(array.dtype, kind, casting="same_kind"):
        what = f"array {spec.name!r} is of type {array.dtype}, the model takes {spec.dtype}"
        raise UserError(what, where=where)
    return np.ascontiguousarray(np.moveaxis(array, axis, 0) if axis else array).astype(kind, copy=False)


def _resize(samples: SampleRows, inputs: Sequence[TensorSpec]) -> dict[str, Tensors]:
    """Return real rows, cut or repeated to other sizes of the free dimensions."""
    shapes = {s.name: move_axis_first(s.shape, samples.axes[s.name]) for s in inputs if s.name in samples.axes}
    return make_sized_inputs(samples.rows, find_sized_axes(shapes))


def settle_samples(runtime: Runtime, target: Target, model: Path, samples: SampleRows) -> SampleRows:
    """Return generated samples that a model takes: the same ones, or those with other values or sizes.

    Raises:
        MeasurementError: it takes none of them.
    """
    related = [name for name in samples.further if not name.startswith("lengths:") or name.count("=") > 2]
    if samples.rows and not samples.choices and not related:
        return samples  # rows of one or two free dimensions, and nothing else was generated
    problem: MeasurementError | None = None
    for trial in itertools.islice(_list_trials(samples), _MOST_TRIALS):
        try:
            arrange_runtime(runtime, trial.read_layout(model)).run(model, target, (trial.feed(2),))
        except MeasurementError as error:
            problem = problem or error
        else:
            return trial
    if problem is None:
        return samples
    check_model(model)  # an invalid ONNX file is the user's to fix
    if not samples.further and not samples.choices:
        raise problem
    names = [*samples.choices, *(name for name in samples.fixed if name not in samples.choices)]
    values = f"Give the values that it takes: {' '.join(f'--fix {name}=VALUE' for name in names[:2])}; "
    raise MeasurementError(
        "the model refuses all generated inputs",
        where=model.name,
        why=explain_rejection(problem),
        remedy=(values if names else "") + "sizes: --dim NAME=SIZE; or inputs of its use: --data FILE.",
    )


def _list_trials(samples: SampleRows) -> Iterator[SampleRows]:
    """Yield the samples with every combination of generated values, then at other sizes."""
    for values in itertools.product(*samples.choices.values()):
        chosen = {
            name: np.full_like(samples.fixed[name], value) for name, value in zip(samples.choices, values, strict=True)
        }
        others = {  # its own values are those of the samples now
            name: run if name.startswith("values:") else {**run, **chosen} for name, run in samples.further.items()
        }
        yield replace(samples, fixed={**samples.fixed, **chosen}, further=others)
    for run in samples.further.values():
        rows, fixed = ({name: run[name] for name in part if name in run} for part in (samples.rows, samples.fixed))
        if len({len(array) for array in rows.values()}) > 1:  # independent first dimensions: one request
            rows, fixed = {}, dict(run)
        yield replace(samples, rows=rows, fixed={**samples.fixed, **fixed})


def find_input_problems(
    inputs: Sequence[TensorSpec], arrays: Mapping[str, Any], values: Mapping[str, Any]
) -> Iterator[tuple[str, str]]:
    """Yield why a model cannot take these arrays, by input.

    Unlike in `check_samples`, nothing is converted but `values`: a pipeline passes on what its data set holds.
    """
    if missing := [spec.name for spec in inputs if spec.name not in (*arrays, *values)]:
        names = ", ".join(map(repr, missing))
        yield "", f"the model takes {names}, and the data set gives it {', '.join(map(repr, arrays))}"
        return
    axes = find_row_axes({spec.name: spec.shape for spec in inputs})
    for spec in inputs:
        if spec.name in values:
            yield from _find_value_problems(spec, values[spec.name], axes.get(spec.name))
            continue
        array, axis = arrays[spec.name], axes.get(spec.name, 0)
        if not _has_shape(spec, array, axis):
            shape = " × ".join("rows" if place == axis else str(size) for place, size in enumerate(array.shape))
            yield spec.name, f"{spec.name!r} is of shape {shape}, the model takes {_format_shape(spec)}"
        elif not (array.dtype.kind in "US" if spec.dtype == "string" else array.dtype == read_dtype(spec)):
            text = f"{spec.name!r} is of type {array.dtype}, the model takes {spec.dtype}"
            numbers = array.dtype.kind in "biuf" and spec.dtype != "string"
            yield spec.name, f"{text}. Convert it: array.astype({spec.dtype!r})" if numbers else text
    known = [spec.name for spec in inputs]
    for name in (*arrays, *values):
        if name not in known:
            yield name, f"the model takes no input {name!r}; it takes {', '.join(known)}"


def _find_value_problems(spec: TensorSpec, value: Any, axis: int | None) -> Iterator[tuple[str, str]]:
    """Yield why an input cannot have a value in every row."""
    try:
        fit_value(value, spec if axis is None else remove_axis(spec, axis))
    except UserError as error:
        yield spec.name, error.without_place()


def _has_shape(spec: TensorSpec, array: Any, rows: int | None) -> bool:
    """Return whether an array has the shape of an input, but for the number of rows on the axis `rows`."""
    if len(spec.shape) != array.ndim:
        return not spec.shape
    pairs = enumerate(zip(spec.shape, array.shape, strict=True))
    return all(axis == rows or is_free(size) or size == actual for axis, (size, actual) in pairs)


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
    further = [InputGroup(name=name, runs=(run,), assumed=True) for name, run in samples.further.items()]
    if not samples.rows:
        return (InputGroup(name=REAL, runs=({},)), *further)
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
    return (*groups, *further)


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
    return tuple(feed for feed, _ in cut_batches(rows, samples.batch, _RUN_BYTES)) or (rows,)


def _draw_values(
    draw: np.random.Generator,
    spec: TensorSpec,
    shape: tuple[int, ...],
    bounds: InputBounds,
    sizes: Mapping[str, int],
) -> Any:
    kind = read_dtype(spec)
    if kind.kind == "f":
        return draw.standard_normal(shape).astype(kind)
    if kind.kind == "U":
        return draw.choice([*bounds.texts, "a", "b"], shape)
    if bounds.compared and not (bounds.index or bounds.tables):
        limits = np.iinfo(kind.name)
        known = [value for value in {*bounds.compared, 0, 1} if limits.min <= value <= limits.max]
        return draw.choice(sorted(known), shape).astype(kind)
    low, high = bounds.index or (0, 1)
    if bounds.tables:
        smallest = min(sizes.values(), default=1)
        entries = [sizes.get(str(table), smallest) if is_free(table) else int(table) for table in bounds.tables]
        high = max(0, min([*entries, *([high + 1] if bounds.index else [])]) - 1)
    return draw.integers(low, high, shape, endpoint=True).astype(kind)
