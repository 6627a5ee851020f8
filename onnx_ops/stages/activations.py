"""Runs a quantized variant beside its float export and looks at every quantized activation."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from onnx_ops.analysis.activations import Watched
from onnx_ops.domain.execution import SessionSettings
from onnx_ops.domain.structure import ActivationMeasurement
from onnx_ops.domain.target import Target
from onnx_ops.errors import MeasurementFailure
from onnx_ops.graph.activations import QuantizedActivation, quantized_activations
from onnx_ops.graph.inspect import info
from onnx_ops.graph.intermediate import computed_values, expose
from onnx_ops.ports import Runtime, Tensors
from onnx_ops.stages.files import rows

AS_WRITTEN = Target(
    name="as-written",
    description="One CPU thread, the graph as it stands in the file.",
    session=SessionSettings(graph_level="disabled"),
)

ROWS, ROWS_AT_ONCE = 256, 16
PAIRS_AT_ONCE = 16
"""Activations that one session shows: they are held in memory for all of its rows."""

_BYTES = 1 << 25
"""Inputs of one run; what a model holds on the way may be a hundred times as much."""


def measure_activations(
    runtime: Runtime, source: Path, derived: Path, samples: Tensors
) -> tuple[ActivationMeasurement, ...]:
    """One measurement for each activation with a fixed range; nothing for a model without.

    Both graphs run as they are written. A copy of each, which shows its intermediate values, is written beside it and
    removed again.

    Args:
        runtime: runs them.
        source: the float export.
        derived: the quantized variant.
        samples: real rows by ONNX name.

    Raises:
        MeasurementFailure: one of them does not run on the rows.
    """
    activations = quantized_activations(derived)
    feeds = tuple(_feeds(derived, samples))
    if activations and not feeds:
        raise MeasurementFailure("there are too few rows to look at its activations", where=derived.name)
    found: list[ActivationMeasurement] = []
    for start in range(0, len(activations), PAIRS_AT_ONCE):
        found += _looked_at(runtime, source, derived, activations[start : start + PAIRS_AT_ONCE], feeds)
    return tuple(found)


def _looked_at(
    runtime: Runtime,
    source: Path,
    derived: Path,
    activations: tuple[QuantizedActivation, ...],
    feeds: tuple[Tensors, ...],
) -> list[ActivationMeasurement]:
    watched = [Watched(tensor=a.origin, step=a.step, low=a.low, high=a.high) for a in activations]
    shown = [name for a in activations for name in (a.name, a.read)]
    exact = [a.origin for a in activations]
    answers = _values(runtime, derived, shown, feeds)
    originals = _values(runtime, source, exact, feeds)
    for values, truth in zip(answers, originals, strict=True):
        for activation, seen in zip(activations, watched, strict=True):
            seen.see(values[activation.name], values[activation.read], truth.get(activation.origin))
    return [one.measured() for one in watched]


def _values(runtime: Runtime, model: Path, names: list[str], feeds: tuple[Tensors, ...]) -> list[Tensors]:
    """The named values of each run, inputs included; those that the model does not compute are left out."""
    computed = {value.name for value in computed_values(model)}
    chosen = [name for name in dict.fromkeys(names) if name in computed]
    copy = model.with_name(f"{model.stem}-inside.onnx")
    expose(model, chosen, copy)
    try:
        answers = runtime.run(copy, AS_WRITTEN, feeds)
    finally:
        copy.unlink()
    return [{**feed, **answer} for feed, answer in zip(feeds, answers, strict=True)]


def _feeds(model: Path, samples: Tensors) -> Iterator[Tensors]:
    """The rows a few at a time; at a fixed batch, whole ones only."""
    fixed = {spec.shape[0] for spec in info(model).inputs if spec.shape and isinstance(spec.shape[0], int)}
    count = min(ROWS, *(len(array) for array in samples.values()))
    row_bytes = max(1, sum(array.nbytes for array in samples.values()) // max(1, count))
    size = min(fixed) if fixed else max(1, min(ROWS_AT_ONCE, _BYTES // row_bytes))
    last = count // size * size if fixed else count
    for start in range(0, last, size):
        yield rows(samples, start, min(start + size, count))
