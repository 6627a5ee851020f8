"""How far the weights of a quantized variant are from their originals, and what that does to the layers' answers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from onnx_ops.domain.evidence import WeightMeasurement
from onnx_ops.measure.activations import AS_WRITTEN, feeds_of
from onnx_ops.onnx_graph.layers import show_layer_errors
from onnx_ops.onnx_graph.weights import QuantizedWeight, kept_weights, quantized_weights
from onnx_ops.ports import Runtime, Tensors
from onnx_ops.statistics.parity import LARGEST, ratio_of, weight_error

ROUNDING = 0.51
"""Steps that rounding moves a weight by, and a little."""

_AT_ONCE = 16
"""Weights whose errors one session holds."""


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
    steps = [weight_error(pair.original, pair.dequantized, pair.scale) for pair in pairs]
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
    copy, feeds = source.with_name(f"{source.stem}-layers.onnx"), tuple(feeds_of(derived, samples))
    found: dict[str, float] = {}
    for start in range(0, len(moved), _AT_ONCE):
        try:
            shown = show_layer_errors(source, moved[start : start + _AT_ONCE], copy)
            runs = runtime.run(copy, AS_WRITTEN, feeds) if shown else ()
        finally:
            copy.unlink(missing_ok=True)
            copy.with_name(f"{copy.name}.data").unlink(missing_ok=True)
        for weight, pairs in shown.items():
            sums = [[float(np.sum([run[name] for run in runs], dtype=np.float64)) for name in pair] for pair in pairs]
            found[weight] = max(ratio_of(*both) if np.isfinite(both).all() else LARGEST for both in sums)
    return found
