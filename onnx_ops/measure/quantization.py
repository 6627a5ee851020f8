"""Quantization error of a variant's weights and activations against the originals."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from onnx_ops.domain.evidence import ActivationMeasurement, WeightMeasurement
from onnx_ops.domain.target import AS_WRITTEN, SIMPLIFIED
from onnx_ops.errors import MeasurementError
from onnx_ops.measure.answers import read_values, split_batches, temporary_copy
from onnx_ops.measure.files import slice_rows
from onnx_ops.measure.row_layout import read_constants
from onnx_ops.measure.timing import count_rows
from onnx_ops.onnx_graph.channel_balance import write_balanced_like
from onnx_ops.onnx_graph.files import read_model, write_model
from onnx_ops.onnx_graph.instrumentation import list_computed_values
from onnx_ops.onnx_graph.quantized_activations import (
    QuantizedActivation,
    expand_integer_operators,
    find_bounded_values,
    find_folded_values,
    read_quantized_activations,
)
from onnx_ops.onnx_graph.quantized_weights import (
    ErrorSumNames,
    QuantizedWeight,
    pair_quantized_weights,
    read_float_weights,
    read_layer_inputs,
    write_with_bias_errors,
    write_with_layer_errors,
)
from onnx_ops.ports import Runtime, Tensors
from onnx_ops.statistics.output_columns import LARGEST, compute_ratio
from onnx_ops.statistics.quantization import ActivationStatistics, compute_weight_error

ACTIVATION_ROWS, ROWS_AT_ONCE = 256, 16
PAIRS_AT_ONCE = 16
"""Maximum number of activations that one session exposes.

Their values for all rows of the session are in memory.
"""

_BOUND = 1.01
"""Maximum end of the quantized range of a value that a function bounds to 1."""

ROUNDING = 0.51
"""Maximum quantization steps by which rounding moves a weight, including a margin."""

_WEIGHTS_AT_ONCE = 16
"""Maximum number of weights whose errors one session computes."""


def measure_activations(
    runtime: Runtime, source: Path, derived: Path, samples: Tensors
) -> tuple[ActivationMeasurement, ...]:
    """Measure each activation that has a fixed range.

    Both graphs run without optimizations. Integer operators run as equivalent pairs of
    QuantizeLinear and DequantizeLinear, and the source has the channel balance of the variant.
    Temporary copies of both, with intermediate values as outputs, are written beside the models.

    Raises:
        MeasurementError: one of the models fails on the rows, or an integer operator cannot be
            read. The same error is raised if there are fewer rows than the fixed batch has.
    """
    activations = read_quantized_activations(derived)
    feeds = tuple(split_feeds(derived, samples))
    if activations and not feeds:
        raise MeasurementError(
            "the model's activations were not measured",
            where=derived.name,
            why=f"the first {min(count_rows(samples), ACTIVATION_ROWS)} rows fill no batch of "
            "the model's fixed size",
            remedy=f"Export the model with a free batch, or with one of at most {ACTIVATION_ROWS} "
            "rows, and supply as many rows.",
        )
    measurements: list[ActivationMeasurement] = []
    with _without_integer_operators(derived) as readable, _balanced_like(derived, source) as exact:
        for start in range(0, len(activations), PAIRS_AT_ONCE):
            measurements += _measure_batch(
                runtime, exact, readable, activations[start : start + PAIRS_AT_ONCE], feeds
            )
    # Several activations can share one range, such as the input and output of MaxPool or Reshape.
    # Such a range passes if it fits one of them. It is judged only if all of them were measured.
    stretches: dict[tuple[float, float], list[float | None]] = {}
    for activation, measurement in zip(activations, measurements, strict=True):
        stretches.setdefault((activation.low, activation.high), []).append(measurement.stretch)
    fitting = {
        ends: None if None in values else min(s for s in values if s is not None)
        for ends, values in stretches.items()
    }
    return tuple(
        replace(measurement, stretch=fitting[activation.low, activation.high])
        for activation, measurement in zip(activations, measurements, strict=True)
    )


@contextlib.contextmanager
def _without_integer_operators(derived: Path) -> Iterator[Path]:
    """Yield `derived`, or a temporary copy of it without integer operators."""
    model = read_model(derived)
    pairs = expand_integer_operators(model, derived.name)
    with temporary_copy(derived, "pairs") as path:
        if pairs is not model:
            write_model(pairs, path)
        yield derived if pairs is model else path


@contextlib.contextmanager
def _balanced_like(derived: Path, source: Path) -> Iterator[Path]:
    """Yield the source, or a temporary copy with the channel balance of `derived`.

    The copy computes the same function as the source.
    """
    with temporary_copy(source, "balanced") as path:
        yield path if write_balanced_like(source, derived, path) else source


def _measure_batch(
    runtime: Runtime,
    source: Path,
    derived: Path,
    activations: tuple[QuantizedActivation, ...],
    feeds: tuple[Tensors, ...],
) -> list[ActivationMeasurement]:
    bounded, cut = find_bounded_values(source), find_folded_values(source)
    statistics = [
        ActivationStatistics(
            tensor=a.origin,
            step=a.step,
            low=a.low,
            high=a.high,
            bounded=a.origin in bounded and max(a.high, -a.low) <= _BOUND,
        )
        for a in activations
    ]
    exposed = [name for a in activations for name in (a.name, a.read)]
    exact = [name for a in activations for name in (a.origin, cut.get(a.origin, a.origin))]
    answers = _read_values(runtime, derived, exposed, feeds)
    originals = _read_values(runtime, source, exact, feeds)
    for values, truth in zip(answers, originals, strict=True):
        for activation, statistic in zip(activations, statistics, strict=True):
            origin = activation.origin
            statistic.update(
                values[activation.name],
                values[activation.read],
                truth.get(origin),
                truth.get(cut.get(origin, "")),
            )
    return [one.summarize() for one in statistics]


def _read_values(
    runtime: Runtime, model: Path, names: list[str], feeds: tuple[Tensors, ...]
) -> list[Tensors]:
    """Return the named values of each run, including inputs.

    Values that the model does not compute are omitted.
    """
    computed = {value.name for value in list_computed_values(model)}
    answers = read_values(
        runtime,
        model,
        AS_WRITTEN,
        [name for name in dict.fromkeys(names) if name in computed],
        feeds,
    )
    constants = read_constants(runtime)
    return [{**constants, **feed, **answer} for feed, answer in zip(feeds, answers, strict=True)]


def split_feeds(model: Path, samples: Tensors) -> Iterator[Tensors]:
    """Yield a few rows at a time, or whole batches if the batch is fixed.

    Only the first `ACTIVATION_ROWS` rows are used. An incomplete fixed batch is omitted.
    """
    first = slice_rows(samples, 0, ACTIVATION_ROWS)
    return (
        feed
        for feed, count in split_batches(model, first, ROWS_AT_ONCE)
        if count == count_rows(feed)
    )


def measure_weights(
    source: Path, derived: Path, runtime: Runtime | None = None, samples: Tensors | None = None
) -> tuple[WeightMeasurement, ...]:
    """Measure the distance of each constant of a quantized variant from its original.

    With a runtime and rows, the layers of weights that moved by more than rounding are also run.

    Raises:
        MeasurementError: a quantized weight cannot be compared, an integer operator is unreadable,
            or the export fails.
    """
    measurements, unpaired = measure_paired_weights(source, derived, runtime, samples)
    if unpaired:
        what = (
            f"quantized weight {unpaired[0]} cannot be compared: its original in the source is "
            "missing, or its layout is unknown"
        )
        raise MeasurementError(what, where=derived.name)
    return measurements


def measure_paired_weights(
    source: Path, derived: Path, runtime: Runtime | None = None, samples: Tensors | None = None
) -> tuple[tuple[WeightMeasurement, ...], tuple[str, ...]]:
    """Measure the weights that have an original, and list those without one.

    Returns:
        The measurements, as in `measure_weights`, and the names of the weights without an original.

    Raises:
        MeasurementError: the export fails, or an integer operator cannot be read.
    """
    with _balanced_like(derived, source) as exact:
        pairs, unpaired = _list_pairs(exact, derived)
        steps = [
            compute_weight_error(pair.original, pair.dequantized, pair.scale) for pair in pairs
        ]
        moved = _list_moved(pairs, steps)
        errors, biases = dict[str, float](), dict[str, float]()
        if runtime and samples and moved:
            feeds = tuple(split_feeds(derived, samples))
            rounded = [pair for pair in pairs if pair.rounded]
            weights = [pair for pair in moved if pair.rounded]
            errors = _measure_layer_errors(runtime, exact, feeds, weights, write_with_layer_errors)
            # A moved constant without a layer error can be a bias that corrects the errors of
            # quantized weights.
            others = [pair for pair in moved if pair.name not in errors]
            biases = _measure_layer_errors(
                runtime, exact, feeds, others, partial(_write_bias_errors, derived, rounded)
            )
    measurements = tuple(
        WeightMeasurement(
            tensor=pair.name,
            steps=distance,
            elements=int(pair.original.size),
            output_error=errors.get(pair.name, biases.get(pair.name)),
            stretch=pair.stretch,
            bias=pair.name in biases,
        )
        for pair, distance in zip(pairs, steps, strict=True)
    )
    return measurements, unpaired


def _list_moved(pairs: Sequence[QuantizedWeight], steps: Sequence[float]) -> list[QuantizedWeight]:
    """Return the weights with an original that moved by more than rounding."""
    return [
        pair
        for pair, distance in zip(pairs, steps, strict=True)
        if ROUNDING < distance < LARGEST and pair.origin
    ]


def _list_pairs(source: Path, derived: Path) -> tuple[tuple[QuantizedWeight, ...], tuple[str, ...]]:
    paired = pair_quantized_weights(source, derived)
    return (*paired.pairs, *read_float_weights(source, derived)), paired.unpaired


def choose_source_form(runtime: Runtime, source: Path, derived: Path, simplified: Path) -> Path:
    """Return the source or its simplified form, whichever matches more weights.

    Quantizers often simplify a model first, which folds normalizations into the weights before
    them. ONNX Runtime's basic optimizations do the same. If a weight of `derived` has no matching
    original, the source with these optimizations is written to `simplified`.
    """
    misfits = _count_misfits(source, derived)
    if not misfits:
        return source
    try:
        runtime.rewritten(source, SIMPLIFIED, simplified)
        return simplified if _count_misfits(simplified, derived) < misfits else source
    except MeasurementError:
        return source


def _count_misfits(source: Path, derived: Path) -> int:
    pairs, unpaired = _list_pairs(source, derived)
    distances = [
        compute_weight_error(pair.original, pair.dequantized, pair.scale) for pair in pairs
    ]
    return len(unpaired) + sum(distance > ROUNDING for distance in distances)


_WriteErrors = Callable[
    [Path, Sequence[QuantizedWeight], Path], Mapping[str, tuple[ErrorSumNames, ...]]
]


def _write_bias_errors(
    derived: Path,
    weights: Sequence[QuantizedWeight],
    source: Path,
    biases: Sequence[QuantizedWeight],
    copy: Path,
) -> Mapping[str, tuple[ErrorSumNames, ...]]:
    return write_with_bias_errors(
        source, biases, weights, read_layer_inputs(derived, weights), copy
    )


def _measure_layer_errors(
    runtime: Runtime,
    source: Path,
    feeds: tuple[Tensors, ...],
    moved: Sequence[QuantizedWeight],
    write: _WriteErrors,
) -> dict[str, float]:
    """Return, for each weight, the error of the worst layer that uses the weight."""
    errors: dict[str, float] = {}
    for start in range(0, len(moved), _WEIGHTS_AT_ONCE):
        with temporary_copy(source, "layers") as copy:
            outputs = write(source, moved[start : start + _WEIGHTS_AT_ONCE], copy)
            runs = runtime.run(copy, AS_WRITTEN, feeds) if outputs else ()
        for weight, pairs in outputs.items():
            sums = [
                [float(np.sum([run[name] for run in runs], dtype=np.float64)) for name in pair]
                for pair in pairs
            ]
            errors[weight] = max(
                compute_ratio(*both) if np.isfinite(both).all() else LARGEST for both in sums
            )
    return errors
