"""Layout of models with rows on other axes than 0, or with inputs without rows.

All measurements have rows on axis 0 of every array. When the model runs, `RowLayout` moves the rows
to the axis that the model's symbols name. It also adds the inputs that have no rows.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from onnx_ops import codec
from onnx_ops.domain.artifact import Manifest, ModelInfo, TensorSpec
from onnx_ops.domain.execution import RuntimeFacts
from onnx_ops.domain.row_axes import find_output_axes, find_row_axes, is_free
from onnx_ops.domain.target import Diagnosis, HardwareFingerprint, Target
from onnx_ops.errors import UserError
from onnx_ops.measure.files import get_values
from onnx_ops.ports import Context, Runtime, Store, Tensors
from onnx_ops.ports.runtime import (
    LoadSamples,
    LoadSchedule,
    PairedBenchmarkSamples,
    PairedBenchmarkSchedule,
    RunSamples,
    StartSamples,
    StartSchedule,
)

if TYPE_CHECKING:
    from onnx_ops.domain.pipeline import Export
    from onnx_ops.ports import ExportRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class RowLayout:
    """The axes of a model's rows, and its inputs without rows.

    Args:
        inputs: axis of the rows by input.
        outputs: axis of the rows by output, where the model states it.
        values: inputs that have no rows and are the same in every run.
        row_values: one row of inputs that have the same value in every row.
    """

    inputs: Mapping[str, int] = field(default_factory=dict)
    outputs: Mapping[str, int] = field(default_factory=dict)
    values: Tensors = field(default_factory=dict)
    row_values: Tensors = field(default_factory=dict)

    @property
    def is_plain(self) -> bool:
        """Return whether every array has rows on its first axis."""
        return self.has_plain_inputs and not any(self.outputs.values())

    @property
    def has_plain_inputs(self) -> bool:
        """Return whether every input has rows of the data on its first axis."""
        return not (self.values or self.row_values or any(self.inputs.values()))

    def arrange(self, rows: Tensors) -> dict[str, Any]:
        """Return the inputs of a run in the model's layout.

        Entries of `rows` override `values` and `row_values`.
        """
        if self.is_plain:
            return dict(rows)
        count = max(self._counts(rows), default=1)
        repeated = {
            name: np.repeat(row[None], count, axis=0) for name, row in self.row_values.items()
        }
        moved = {
            name: _move(array, 0, self.inputs.get(name, 0))
            for name, array in {**repeated, **rows}.items()
        }
        return {**self.values, **moved}

    def _counts(self, rows: Tensors) -> set[int]:
        return {len(array) for name, array in rows.items() if name in self.inputs}

    def read(self, rows: Tensors, outputs: Tensors) -> dict[str, Any]:
        """Return the outputs of a run with rows on axis 0.

        Exporters often omit the names of an output's dimensions. The rows are then assumed to be on
        the first axis that has as many entries as there were input rows.
        """
        if self.is_plain:
            return dict(outputs)
        counts = self._counts(rows)
        count = counts.pop() if len(counts) == 1 else -1
        return {name: self._read_output(name, value, count) for name, value in outputs.items()}

    def _read_output(self, name: str, value: Any, count: int) -> Any:
        shape = getattr(value, "shape", ())  # A sequence or a map of ONNX has no shape.
        axis = self.outputs.get(name, list(shape).index(count) if count in shape else 0)
        return _move(value, axis, 0) if 0 < axis < len(shape) else value


def _move(array: Any, source: int, destination: int) -> Any:
    return (
        array
        if source == destination
        else np.ascontiguousarray(np.moveaxis(array, source, destination))
    )


def read_layout(model: ModelInfo, values: Tensors | None = None) -> RowLayout:
    """Return the layout of a model, with `values` converted to its types and shapes.

    Raises:
        UserError: a value does not fit its input.
    """
    shapes = {spec.name: spec.shape for spec in model.inputs}
    axes = find_row_axes(shapes)
    given = values or {}
    specs = [spec for spec in model.inputs if spec.name in given]
    return RowLayout(
        inputs=axes,
        outputs=find_output_axes(shapes, {spec.name: spec.shape for spec in model.outputs}),
        values={
            spec.name: fit_value(given[spec.name], spec) for spec in specs if spec.name not in axes
        },
        row_values={
            spec.name: fit_value(given[spec.name], remove_axis(spec, axes[spec.name]))
            for spec in specs
            if spec.name in axes
        },
    )


def get_layout(store: Store, export: Manifest, values: Tensors | None = None) -> RowLayout:
    """Return the layout of an exported model.

    The values are the given ones, or by default those that the model was exported with.

    Raises:
        UserError: a value does not fit its input.
    """
    model = codec.loads(store.read(export["info.json"]), ModelInfo)
    return read_layout(model, get_values(store, export) if values is None else values)


def remove_axis(spec: TensorSpec, axis: int) -> TensorSpec:
    """Return the spec of an input without one axis, such as the axis of rows."""
    return replace(spec, shape=(*spec.shape[:axis], *spec.shape[axis + 1 :]))


_CONVERTIBLE = {"f": "fiub", "i": "iub", "u": "iub", "b": "b", "U": "US"}
"""NumPy kinds of values that can be converted to each kind of input."""


def fit_value(value: Any, spec: TensorSpec, sizes: Mapping[str, int] | None = None) -> Any:
    """Return a value in the type of an input, repeated to the sizes of its axes.

    `sizes` are the sizes of free axes by name.

    Raises:
        UserError: the value does not fit the type or the shape of the input, or `read_dtype`
            rejects the type.
    """
    array, kind = np.asarray(value), read_dtype(spec)
    if not _is_convertible(array, kind):
        given = str(value) if array.ndim == 0 else f"values of {array.dtype}"
        raise UserError(
            f"{spec.name!r} takes {spec.dtype}, not {given}", where=f"value of {spec.name}"
        )
    shape = _find_sizes(array, spec, sizes or {})
    try:
        return np.array(np.broadcast_to(array.astype(kind), shape))
    except ValueError as error:
        takes = f"shape {' × '.join(map(str, spec.shape))}" if spec.shape else "a scalar"
        what = f"{spec.name!r} takes {takes}, not shape {array.shape}"
        raise UserError(what, where=f"value of {spec.name}") from error


def _is_convertible(array: np.ndarray[Any, np.dtype[Any]], kind: np.dtype[Any]) -> bool:
    """Return whether the values of an array can be converted to a type.

    Conversion to whole numbers must be exact.
    """
    if array.dtype.kind not in _CONVERTIBLE[kind.kind]:
        return False
    return kind.kind not in "iu" or bool((array.astype(kind) == array).all())


def _find_sizes(
    array: np.ndarray[Any, np.dtype[Any]], spec: TensorSpec, sizes: Mapping[str, int]
) -> list[int]:
    """Return the size of each axis.

    It is the fixed size, the size of the axis' symbol in `sizes`, or the size in the value. The
    size is 1 if the value lacks the axis.
    """
    shape = [sizes.get(str(size), -1) if is_free(size) else int(size) for size in spec.shape]
    start = len(shape) - array.ndim
    for axis, size in enumerate(shape):
        if size < 0:
            shape[axis] = array.shape[axis - start] if axis >= start else 1
    return shape


_REMEDIES = {
    "bfloat16": "NumPy has no bfloat16: export the model with float32 inputs, "
    "and a Cast to bfloat16 after them.",
    "map": "Export the model with a tensor that has a column for each key.",
    "optional": "Export the model with plain tensors: one file with this input, "
    "and one without it.",
    "sequence": "Export the model with one tensor for each element.",
}
"""Remedies for inputs that cannot be generated, by their type."""


def read_dtype(spec: TensorSpec) -> np.dtype[Any]:
    """Return the NumPy type of an input.

    Raises:
        UserError: the type is not one of NumPy's floats, integers, booleans or texts.
    """
    if spec.dtype == "string":
        return np.dtype(np.str_)
    with contextlib.suppress(TypeError):
        dtype = np.dtype(spec.dtype)
        if dtype.kind in "biuf":
            return dtype
    remedy = _REMEDIES.get(
        spec.dtype, "Inputs may be tensors of floats, integers, booleans or texts."
    )
    raise UserError(f"input {spec.name!r} is of type {spec.dtype}", remedy=remedy)


def build_export_request(
    section: Export,
    samples: Tensors,
    layout: RowLayout,
    path: Path,
    *,
    ordered: bool = False,
    features: Mapping[str, tuple[str, ...]] | None = None,
) -> ExportRequest:
    """Return the request to an exporter, with samples in the layout of the model.

    Inputs without rows get only the free axes that the section declares. `ordered` and `features`
    have the same meaning as in `ExportRequest`.
    """
    fixed: dict[str, Mapping[int, str]] = {name: {} for name in layout.values}
    # A judgement of two files uses this module too, and needs no exporter.
    from onnx_ops.ports import ExportRequest

    return ExportRequest(
        section=replace(section, dynamic={**fixed, **section.dynamic}),
        samples=layout.arrange(samples),
        path=path,
        ordered=ordered,
        features=features or {},
        axes={**layout.inputs, **dict.fromkeys(layout.values)},
    )


class RowRuntime(Runtime):
    """A runtime that takes and returns rows on axis 0 for a model of another layout."""

    def __init__(self, runtime: Runtime, layout: RowLayout) -> None:
        self._runtime, self.layout = runtime, layout

    def fingerprint(self, target: Target) -> HardwareFingerprint:
        """Return the machine and the runtime build."""
        return self._runtime.fingerprint(target)

    def facts(self, model: Path, target: Target) -> RuntimeFacts:
        """Return the providers that ran the model, and their numbers of nodes."""
        return self._runtime.facts(model, target)

    def run(self, model: Path, target: Target, batches: tuple[Tensors, ...]) -> tuple[Tensors, ...]:
        """Run the model on batches of rows."""
        answers = self._runtime.run(model, target, tuple(map(self.layout.arrange, batches)))
        return tuple(
            self.layout.read(rows, answer) for rows, answer in zip(batches, answers, strict=True)
        )

    def sample(
        self, model: Path, target: Target, feed: Tensors, *, runs: int, warmup: int
    ) -> RunSamples:
        """Time single runs of the model."""
        return self._runtime.sample(
            model, target, self.layout.arrange(feed), runs=runs, warmup=warmup
        )

    def benchmark(
        self,
        models: Sequence[Path],
        target: Target,
        feed: Tensors,
        schedule: PairedBenchmarkSchedule,
    ) -> PairedBenchmarkSamples:
        """Time models in alternating blocks of runs."""
        return self._runtime.benchmark(models, target, self.layout.arrange(feed), schedule)

    def under_load(
        self, models: Sequence[Path], target: Target, feed: Tensors, schedule: LoadSchedule
    ) -> LoadSamples:
        """Time windows of requests from several threads."""
        return self._runtime.under_load(models, target, self.layout.arrange(feed), schedule)

    def starts(
        self, models: Sequence[Path], target: Target, feed: Tensors, schedule: StartSchedule
    ) -> StartSamples:
        """Time the starts of the model in fresh processes."""
        return self._runtime.starts(models, target, self.layout.arrange(feed), schedule)

    def rewritten(self, model: Path, target: Target, copy: Path) -> None:
        """Write the graph after the runtime's optimizations to `copy`."""
        self._runtime.rewritten(model, target, copy)

    def package(self, model: Path, target: Target, folder: Path) -> None:
        """Write the model in the target's own format into `folder`."""
        self._runtime.package(model, target, folder)

    def diagnose(self) -> Iterable[Diagnosis]:
        """Return diagnoses of the runtime's requirements on this machine."""
        return self._runtime.diagnose()


def read_constants(runtime: Runtime) -> Tensors:
    """Return the inputs without rows that a runtime adds to every run."""
    return runtime.layout.values if isinstance(runtime, RowRuntime) else {}


def arrange_runtime(runtime: Runtime, layout: RowLayout) -> Runtime:
    """Return a runtime that takes rows on axis 0.

    The given runtime is returned if the layout is plain.
    """
    return runtime if layout.is_plain else RowRuntime(runtime, layout)


def arrange_context(context: Context, layout: RowLayout) -> Context:
    """Return the context with runtimes that take rows on axis 0."""
    if layout.is_plain:
        return context
    factory: Callable[[str], Runtime] = cache(
        lambda name: arrange_runtime(context.runtime(name), layout)
    )
    return replace(context, runtime=factory)
