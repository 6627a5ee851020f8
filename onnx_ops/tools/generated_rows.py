"""Rows generated from the types and shapes of a model's inputs."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from onnx_ops.domain.artifact import TensorSpec
from onnx_ops.domain.row_axes import find_row_axes, is_free, is_named, list_named_axes
from onnx_ops.domain.target import Target
from onnx_ops.errors import MeasurementError, UserError
from onnx_ops.measure.answers import explain_rejection
from onnx_ops.measure.row_layout import arrange_runtime, fit_value, read_dtype
from onnx_ops.onnx_graph.compatibility import check_model
from onnx_ops.onnx_graph.input_bounds import InputBounds
from onnx_ops.ports import Runtime, Tensors
from onnx_ops.statistics.probes import MIN_NOISE_ROWS
from onnx_ops.tools.model_inputs import check_fixed_names, find_batch, list_free_names
from onnx_ops.tools.sample_rows import SET_BYTES, SampleRows

LENGTH = 8
"""Default size of a generated symbolic dimension other than the batch."""

OTHER_SIZES = (1, 2, 3, 17)
"""Additional sizes of each symbolic dimension other than the batch."""

_DRAWS = 3
"""Number of additional requests for a model that has inputs without rows."""

_MOST_TRIALS = 32

_ROW_BYTES = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class _Recipe:
    """The settings from which requests are generated.

    `dims` contains requested sizes, and `fix` requested values.
    """

    inputs: Sequence[TensorSpec]
    axes: Mapping[str, int]
    dims: Mapping[str, int]
    fix: Mapping[str, Any]
    bounds: Mapping[str, InputBounds]
    batch: int

    @property
    def symbols(self) -> dict[str, None]:
        """Return the names of free dimensions without rows."""
        places = list_named_axes({spec.name: spec.shape for spec in self.inputs})
        rows = {
            spec.shape[axis]
            for spec in self.inputs
            if (axis := self.axes.get(spec.name)) is not None
        }
        return {
            symbol: None
            for symbol, name, axis in places
            if symbol not in rows and self.axes.get(name) != axis
        }

    def shape(self, spec: TensorSpec, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """Return the shape of an input in one run, without the axis of rows."""
        names = {axis: symbol for symbol, _, axis in list_named_axes({spec.name: spec.shape})}
        return tuple(
            sizes.get(names[axis], self.batch or 1) if axis in names else int(size)
            for axis, size in enumerate(spec.shape)
            if self.axes.get(spec.name) != axis
        )

    def read_sizes(self, wanted: Mapping[str, int]) -> dict[str, int]:
        """Return the size of every free dimension without rows; `wanted` takes precedence."""
        return {
            symbol: wanted.get(symbol, self.dims.get(symbol, LENGTH)) for symbol in self.symbols
        }

    def choices(self, spec: TensorSpec) -> tuple[Any, ...]:
        """Return values to try for an input of one whole number or boolean.

        The result is empty for an index, for an input with a requested value, and for all inputs of
        other types or shapes.
        """
        known, kind = self.bounds.get(spec.name, InputBounds()), read_dtype(spec)
        single = spec.name not in self.axes and all(size == 1 for size in spec.shape)
        if (
            spec.name in self.fix
            or not single
            or known.index
            or known.tables
            or kind.kind not in "biu"
        ):
            return ()
        return (True, False) if kind.kind == "b" else _select_possible(kind, known.compared or (1,))

    def draw(
        self,
        draw: np.random.Generator,
        count: int,
        wanted: Mapping[str, int],
        *,
        fewest: int | None = None,
    ) -> tuple[Tensors, Tensors]:
        """Return `count` rows, and the inputs without rows, at the sizes `wanted`.

        Row indices are valid in runs of `fewest` or more rows. By default, they are valid in runs
        of any number of rows that the model takes.
        """
        sizes = self.read_sizes(wanted)
        places = list_named_axes({spec.name: spec.shape for spec in self.inputs})
        row_symbols = {symbol for symbol, name, axis in places if self.axes.get(name) == axis}
        entries = {**sizes, **dict.fromkeys(row_symbols, fewest or self.batch or 1)}
        rows: dict[str, Any] = {}
        fixed: dict[str, Any] = {}
        # The rows are drawn first, so they do not depend on the other inputs.
        for spec in sorted(self.inputs, key=lambda spec: spec.name not in self.axes):
            part = rows if spec.name in self.axes else fixed
            part[spec.name] = self._draw_input(draw, spec, count, sizes, entries)
        return rows, fixed

    def _draw_input(
        self,
        draw: np.random.Generator,
        spec: TensorSpec,
        count: int,
        sizes: Mapping[str, int],
        entries: Mapping[str, int],
    ) -> Any:
        """Return the values of an input.

        They are the requested value, the first of several values to try, or random values.
        """
        shape, rowed = self.shape(spec, sizes), spec.name in self.axes
        if spec.name in self.fix:
            value = fit_value(self.fix[spec.name], replace(spec, shape=shape))
            return np.repeat(value[None], count, axis=0) if rowed else value
        if choices := self.choices(spec):
            return np.full(shape, choices[0], read_dtype(spec))
        known = self.bounds.get(spec.name, InputBounds())
        return _draw_values(draw, spec, (count, *shape) if rowed else shape, known, entries)


def _select_possible(kind: np.dtype[Any], values: Iterable[int]) -> tuple[int, ...]:
    """Return the values that an integer type can represent."""
    limits = np.iinfo(kind.name)
    return tuple(value for value in values if limits.min <= value <= limits.max)


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

    Floats are standard normal, and booleans 0 or 1. Texts are `a`, `b`, or those that the model
    contains. Integers that are indices can have every valid value. Other integers are most often
    masks: they are 0 or 1, or the values that the model compares them with.

    Inputs with a shared axis (`domain.row_axes`) get rows. Inputs without that axis are drawn as a
    whole, and additional groups have other values of them. Without a shared axis, this applies to
    all inputs. If `count` rows exceed 64 MiB, there are fewer rows, but at least one batch.

    Symbolic dimensions other than the batch have the size 8, unless `dims` names them. Additional
    groups have other sizes.

    Args:
        bounds: bounds of inputs by name, as derived from the graph.
        fix: values of inputs by name.

    Raises:
        UserError: an input takes encoded images, or has a type that cannot be generated, such as a
            sequence. The same error is raised if one row exceeds 1 GiB, or if `dims` or `fix` has
            an unknown name. It is also raised if a value of `fix` does not fit its input.
    """
    fix, bounds = fix or {}, bounds or {}
    _refuse_encoded_inputs(bounds)
    _check_dimension_names(inputs, dims)
    check_fixed_names(inputs, fix)
    axes = _find_axes(inputs, bounds)
    batch = find_batch(inputs, axes, dims)
    recipe = _Recipe(inputs=inputs, axes=axes, dims=dims, fix=fix, bounds=bounds, batch=batch)
    sizes = recipe.read_sizes({})
    row_bytes = sum(
        math.prod(recipe.shape(spec, sizes)) * max(1, read_dtype(spec).itemsize) for spec in inputs
    )
    if row_bytes > _ROW_BYTES:
        raise UserError(
            f"one row of the model's inputs takes {row_bytes / 1e9:.3g} GB, and the limit is "
            f"{_ROW_BYTES / 1e9:.3g} GB",
            remedy="Supply rows with --data FILE.",
        )
    count = max(recipe.batch or 1, min(count, SET_BYTES // max(1, row_bytes)))
    rows, fixed = recipe.draw(np.random.default_rng(seed), count, {})
    choices = {spec.name: values for spec in inputs if (values := recipe.choices(spec))}
    further = {} if row_bytes * MIN_NOISE_ROWS > SET_BYTES else dict(_draw_further(recipe, seed))
    return SampleRows(
        rows=rows, fixed=fixed, batch=recipe.batch, axes=axes, further=further, choices=choices
    )


def _refuse_encoded_inputs(bounds: Mapping[str, InputBounds]) -> None:
    """Raise UserError if an input takes encoded images: they cannot be random."""
    for name, known in bounds.items():
        if known.encoded:
            raise UserError(
                f"input {name!r} takes encoded images, which cannot be generated",
                remedy="Supply a folder of images: --data FOLDER.",
            )


def _check_dimension_names(inputs: Sequence[TensorSpec], dims: Mapping[str, int]) -> None:
    """Raise UserError if a size is given for a dimension that does not exist."""
    named = list_free_names(inputs)
    if unknown := sorted(set(dims) - set(named)):
        remedy = f"Named dimensions: {', '.join(named) or 'none'}."
        raise UserError(f"no dimension is called {unknown[0]!r}", where="--dim", remedy=remedy)


def _find_axes(inputs: Sequence[TensorSpec], bounds: Mapping[str, InputBounds]) -> dict[str, int]:
    """Return the axes of rows by input.

    An input of one number that the model compares with a constant has no axis of rows.
    """
    axes = find_row_axes({spec.name: spec.shape for spec in inputs}, pooled=False)
    flags = [
        spec.name
        for spec in inputs
        if all(size == 1 for size in spec.shape) and bounds.get(spec.name, InputBounds()).compared
    ]
    return {name: axis for name, axis in axes.items() if name not in flags}


_DrawRun = Callable[[Mapping[str, int]], Tensors]
"""Function that draws one run for given sizes of free dimensions."""


def _draw_further(recipe: _Recipe, seed: int) -> Iterator[tuple[str, Tensors]]:
    """Yield additional runs by group name.

    The runs have other sizes of free dimensions, other values to try, or other inputs without rows.
    """
    draw = np.random.default_rng((seed, 1))
    count = recipe.batch or MIN_NOISE_ROWS

    def draw_run(sizes: Mapping[str, int]) -> Tensors:
        rows, fixed = recipe.draw(draw, count, sizes, fewest=count)
        return {**rows, **fixed}

    yield from _draw_other_sizes(recipe, draw_run)
    yield from _draw_other_choices(recipe, draw_run)
    if any(
        spec.name not in (*recipe.axes, *recipe.fix) and not recipe.choices(spec)
        for spec in recipe.inputs
    ):
        for number in range(1, _DRAWS + 1):
            yield f"draws:{number}", draw_run({})
    yield from _draw_unequal_counts(recipe, draw_run)


def _draw_other_sizes(recipe: _Recipe, draw_run: _DrawRun) -> Iterator[tuple[str, Tensors]]:
    """Yield runs at other sizes of the free dimensions without a requested size."""
    for sizes in _list_sizes([symbol for symbol in recipe.symbols if symbol not in recipe.dims]):
        run = draw_run(sizes)
        if sum(array.nbytes for array in run.values()) <= SET_BYTES:
            yield "lengths:" + ",".join(f"{symbol}={size}" for symbol, size in sizes.items()), run


def _draw_other_choices(recipe: _Recipe, draw_run: _DrawRun) -> Iterator[tuple[str, Tensors]]:
    """Yield a run for each further value of the inputs that have values to try."""
    for spec in recipe.inputs:
        for value in recipe.choices(spec)[1:]:
            run = draw_run({})
            yield (
                f"values:{spec.name}={value}",
                {**run, spec.name: np.full_like(run[spec.name], value)},
            )


def _draw_unequal_counts(recipe: _Recipe, draw_run: _DrawRun) -> Iterator[tuple[str, Tensors]]:
    """Yield a run in which the first dimensions of the inputs have different sizes.

    Nothing is yielded for fewer than two inputs with rows, for a fixed batch, or if one of these
    dimensions has a name.
    """
    first_sizes = {spec.name: spec.shape[0] for spec in recipe.inputs if spec.name in recipe.axes}
    if len(first_sizes) < 2 or recipe.batch or any(map(is_named, first_sizes.values())):
        return
    counts = dict(zip(first_sizes, itertools.cycle((3, 17)), strict=False))
    cut_run = {name: array[: counts.get(name, len(array))] for name, array in draw_run({}).items()}
    yield "lengths:" + ",".join(f"{name}[0]={size}" for name, size in counts.items()), cut_run


def _list_sizes(symbols: Sequence[str]) -> Iterator[dict[str, int]]:
    """Yield other sizes of the dimensions.

    Of three or more dimensions, each is first the sum of the others, such as the length of a mask
    that also covers a cache. Then each dimension changes alone. Finally two or more dimensions
    change together, to the same size and to different sizes.
    """
    for size in (LENGTH, 1, 3) if len(symbols) > 2 else ():
        yield from (
            {**dict.fromkeys(symbols, size), total: (len(symbols) - 1) * size} for total in symbols
        )
    for symbol in symbols:
        yield from ({symbol: size} for size in OTHER_SIZES)
    if len(symbols) > 1:
        yield from (dict.fromkeys(symbols, size) for size in OTHER_SIZES)
        for start in range(2):
            yield {
                symbol: OTHER_SIZES[(start + place) % len(OTHER_SIZES)]
                for place, symbol in enumerate(symbols)
            }


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
        return draw.choice(sorted(_select_possible(kind, {*bounds.compared, 0, 1})), shape).astype(
            kind
        )
    low, high = _find_index_range(bounds, sizes)
    return draw.integers(low, high, shape, endpoint=True).astype(kind)


def _find_index_range(bounds: InputBounds, sizes: Mapping[str, int]) -> tuple[int, int]:
    """Return the smallest and the largest index that is valid in every table.

    If no bound is known, the range is 0 to 1.
    """
    low, high = bounds.index or (0, 1)
    if bounds.tables:
        smallest = min(sizes.values(), default=1)
        entries = [
            sizes.get(str(table), smallest) if is_free(table) else int(table)
            for table in bounds.tables
        ]
        high = max(0, min([*entries, *([high + 1] if bounds.index else [])]) - 1)
    return low, high


def settle_samples(
    runtime: Runtime, target: Target, model: Path, samples: SampleRows
) -> SampleRows:
    """Return generated samples that a model accepts.

    They are the given samples, or samples with other values or sizes. At most 32 are tried. Samples
    that need no trial are returned immediately.

    Raises:
        MeasurementError: the model accepts none of the tried samples.
        UserError: the file is not a valid model.
    """
    if not _needs_trial(samples):
        return samples
    first_error: MeasurementError | None = None
    for trial in itertools.islice(_list_trials(samples), _MOST_TRIALS):
        try:
            arrange_runtime(runtime, trial.read_layout(model)).run(model, target, (trial.feed(2),))
        except MeasurementError as error:
            first_error = first_error or error
        else:
            return trial
    if first_error is None:
        return samples
    check_model(model)  # For an invalid file, this call raises a UserError instead.
    if not samples.further and not samples.choices:
        raise first_error
    raise _make_refusal(model, samples, first_error)


def _needs_trial(samples: SampleRows) -> bool:
    """Return whether only a trial can show that the model accepts the samples.

    Rows with one or two free dimensions need no trial.
    """
    if not samples.rows or samples.choices:
        return True
    return any(not name.startswith("lengths:") or name.count("=") > 2 for name in samples.further)


def _make_refusal(model: Path, samples: SampleRows, error: MeasurementError) -> MeasurementError:
    """Return the error for a model that rejects all samples.

    Its remedy names inputs that have no rows.
    """
    names = [*samples.choices, *(name for name in samples.fixed if name not in samples.choices)]
    options = " ".join(f"--fix {name}=VALUE" for name in names[:2])
    values = f"the values that it accepts ({options}) or " if names else ""
    return MeasurementError(
        "the model refuses the generated inputs",
        where=model.name,
        why=explain_rejection(error),
        remedy=f"Set {values}the sizes (--dim NAME=SIZE), or supply real inputs: --data FILE.",
    )


def _list_trials(samples: SampleRows) -> Iterator[SampleRows]:
    """Yield samples with every combination of generated values, then at other sizes."""
    for values in itertools.product(*samples.choices.values()):
        yield _replace_choices(samples, dict(zip(samples.choices, values, strict=True)))
    for run in samples.further.values():
        rows, fixed = (
            {name: run[name] for name in part if name in run}
            for part in (samples.rows, samples.fixed)
        )
        # If the inputs have different numbers of rows, all rows form one request.
        if len({len(array) for array in rows.values()}) > 1:
            rows, fixed = {}, dict(run)
        yield replace(samples, rows=rows, fixed={**samples.fixed, **fixed})


def _replace_choices(samples: SampleRows, values: Mapping[str, Any]) -> SampleRows:
    """Return the samples with other generated values.

    Runs of groups that try one value are unchanged.
    """
    chosen = {name: np.full_like(samples.fixed[name], value) for name, value in values.items()}
    others = {
        name: run if name.startswith("values:") else {**run, **chosen}
        for name, run in samples.further.items()
    }
    return replace(samples, fixed={**samples.fixed, **chosen}, further=others)
