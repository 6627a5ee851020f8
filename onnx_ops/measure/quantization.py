"""Quantization error of a variant: each weight and activation beside its original."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from onnx_ops.domain.evidence import ActivationMeasurement, WeightMeasurement
from onnx_ops.domain.execution import SessionSettings
from onnx_ops.domain.target import Target
from onnx_ops.errors import MeasurementError
from onnx_ops.measure.files import slice_rows
from onnx_ops.onnx_graph.files import read_model, write_model
from onnx_ops.onnx_graph.instrumentation import computed_values, expose
from onnx_ops.onnx_graph.model_info import info
from onnx_ops.onnx_graph.quantized_activations import (
    QuantizedActivation,
    as_pairs,
    bounded_values,
    cut_off,
    quantized_activations,
)
from onnx_ops.onnx_graph.quantized_weights import QuantizedWeight, kept_weights, quantized_weights, show_layer_errors
from onnx_ops.ports import Runtime, Tensors
from onnx_ops.statistics.parity import LARGEST, compute_ratio
from onnx_ops.statistics.quantization import ActivationStatistics, compute_weight_error

AS_WRITTEN = Target(
    name="as-written",
    description="One CPU thread, the graph as it stands in the file.",
    session=SessionSettings(graph_level="disabled"),
)

ACTIVATION_ROWS, ROWS_AT_ONCE = 256, 16
PAIRS_AT_ONCE = 16
"""Activations that one session shows: they are held in memory for all of its rows."""

_BOUND = 1.01
"""How far the range of a function that ends at 1 may reach, and a little."""

_BYTES = 1 << 25
"""Inputs of one run; what a model holds on the way may be a hundred times as much."""

ROUNDING = 0.51
"""Steps that rounding moves a weight by, and a little."""

_WEIGHTS_AT_ONCE = 16
"""Weights whose errors one session holds."""


def measure_activations(
    runtime: Runtime, source: Path, derived: Path, samples: Tensors
) -> tuple[ActivationMeasurement, ...]:
    """One measurement for each activation with a fixed range; nothing for a model without.

    Both graphs run as they are written, but for integer operators, which run as the pairs of QuantizeLinear and
    DequantizeLinear that they stand for. A copy of each, which shows its intermediate values, is written beside it and
    removed again.

    Args:
        runtime: runs them.
        source: the float export.
        derived: the quantized variant.
        samples: real rows by ONNX name.

    Raises:
        MeasurementError: one of them does not run on the rows.
    """
    activations = quantized_activations(derived)
    feeds = tuple(split_feeds(derived, samples))
    if activations and not feeds:
        raise MeasurementError("there are too few rows to look at its activations", where=derived.name)
    found: list[ActivationMeasurement] = []
    with _pairs(derived) as shown:
        for start in range(0, len(activations), PAIRS_AT_ONCE):
            found += _looked_at(runtime, source, shown, activations[start : start + PAIRS_AT_ONCE], feeds)
    return _shared(activations, found)


@contextlib.contextmanager
def _pairs(derived: Path) -> Iterator[Path]:
    """The file, or one beside it without integer operators."""
    model = read_model(derived)
    pairs = as_pairs(model, derived.name)
    if pairs is model:
        yield derived
        return
    path = derived.with_name(f"{derived.stem}-pairs.onnx")
    write_model(pairs, path)
    try:
        yield path
    finally:
        path.unlink()
        path.with_name(f"{path.name}.data").unlink(missing_ok=True)


def _shared(
    activations: Sequence[QuantizedActivation], found: Sequence[ActivationMeasurement]
) -> tuple[ActivationMeasurement, ...]:
    """What moves values about (MaxPool, Slice, Reshape …) shares its range with them: it fits if it fits one of them,
    and is not asked where one of them is not."""
    stretches: dict[tuple[float, float], list[float | None]] = {}
    for activation, one in zip(activations, found, strict=True):
        stretches.setdefault((activation.low, activation.high), []).append(one.stretch)
    fitting = {
        ends: None if None in those else min(s for s in those if s is not None) for ends, those in stretches.items()
    }
    return tuple(
        replace(one, stretch=fitting[activation.low, activation.high])
        for activation, one in zip(activations, found, strict=True)
    )


def _looked_at(
    runtime: Runtime,
    source: Path,
    derived: Path,
    activations: tuple[QuantizedActivation, ...],
    feeds: tuple[Tensors, ...],
) -> list[ActivationMeasurement]:
    bounded, cut = bounded_values(source), cut_off(source)
    watched = [
        ActivationStatistics(
            tensor=a.origin,
            step=a.step,
            low=a.low,
            high=a.high,
            bounded=a.origin in bounded and max(a.high, -a.low) <= _BOUND,
        )
        for a in activations
    ]
    shown = [name for a in activations for name in (a.name, a.read)]
    exact = [name for a in activations for name in (a.origin, cut.get(a.origin, a.origin))]
    answers = _values(runtime, derived, shown, feeds)
    originals = _values(runtime, source, exact, feeds)
    for values, truth in zip(answers, originals, strict=True):
        for activation, seen in zip(activations, watched, strict=True):
            origin = activation.origin
            seen.update(
                values[activation.name], values[activation.read], truth.get(origin), truth.get(cut.get(origin, ""))
            )
    return [one.summarize() for one in watched]


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


def split_feeds(model: Path, samples: Tensors) -> Iterator[Tensors]:
    """The rows a few at a time; at a fixed batch, whole ones only."""
    fixed = {spec.shape[0] for spec in info(model).inputs if spec.shape and isinstance(spec.shape[0], int)}
    count = min(ACTIVATION_ROWS, *(len(array) for array in samples.values()))
    row_bytes = max(1, sum(array.nbytes for array in samples.values()) // max(1, count))
    size = min(fixed) if fixed else max(1, min(ROWS_AT_ONCE, _BYTES // row_bytes))
    last = count // size * size if fixed else count
    for start in range(0, last, size):
        yield slice_rows(samples, start, min(start + size, count))


def measure_weights(
    source: Path, derived: Path, runtime: Runtime | None = None, samples: Tensors | None = None
) -> tuple[WeightMeasurement, ...]:
    """Distance of every constant of a quantized variant from its original.

    Args:
        source: the float export.
        derived: the variant.
        runtime: runs the layers of weights that moved by more than rounding does; None leaves that out.
        samples: real rows by ONNX name, for them.

    Raises:
        MeasurementError: a quantized weight cannot be compared, or the export does not run.
    """
    pairs = (*quantized_weights(source, derived), *kept_weights(source, derived))
    steps = [compute_weight_error(pair.original, pair.dequantized, pair.scale) for pair in pairs]
    moved = [pair for pair, far in zip(pairs, steps, strict=True) if ROUNDING < far < LARGEST and pair.origin]
    errors = _layer_errors(runtime, source, derived, moved, samples) if runtime and samples and moved else {}
    return tuple(
        WeightMeasurement(
            tensor=pair.name,
            steps=far,
            elements=int(pair.original.size),
            output_error=errors.get(pair.name),
            stretch=pair.stretch,
        )
        for pair, far in zip(pairs, steps, strict=True)
    )


def _layer_errors(
    runtime: Runtime, source: Path, derived: Path, moved: Sequence[QuantizedWeight], samples: Tensors
) -> dict[str, float]:
    """By weight, the worst of the layers that use it."""
    copy, feeds = source.with_name(f"{source.stem}-layers.onnx"), tuple(split_feeds(derived, samples))
    found: dict[str, float] = {}
    for start in range(0, len(moved), _WEIGHTS_AT_ONCE):
        try:
            shown = show_layer_errors(source, moved[start : start + _WEIGHTS_AT_ONCE], copy)
            runs = runtime.run(copy, AS_WRITTEN, feeds) if shown else ()
        finally:
            copy.unlink(missing_ok=True)
            copy.with_name(f"{copy.name}.data").unlink(missing_ok=True)
        for weight, pairs in shown.items():
            sums = [[float(np.sum([run[name] for run in runs], dtype=np.float64)) for name in pair] for pair in pairs]
            found[weight] = max(compute_ratio(*both) if np.isfinite(both).all() else LARGEST for both in sums)
    return found
