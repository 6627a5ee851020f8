"""Quantization error of weights and activations, in quantization steps."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from onnx_ops.domain.evidence import ActivationMeasurement
from onnx_ops.ports.data import Array
from onnx_ops.statistics.output_columns import LARGEST

_LEVELS = 255
"""Number of steps between the levels of 8 bits."""

TINY = 1e-30
"""Magnitude below which values are ignored in comparisons with a range."""

_SPACINGS = 4
"""Tolerance at the middle of a step, in spacings of the value's type.

The type is float32 or float16.
"""


@dataclass(slots=True, kw_only=True)
class ActivationStatistics:
    """Accumulator of the error of one quantized activation over several runs.

    Args:
        bounded: whether the range is the full range of the function that computes the activation.
    """

    tensor: str
    step: float
    low: float
    high: float
    bounded: bool = False
    values: int = 0
    non_finite: bool = False
    largest: float = 0.0
    outside: int = 0
    squares: float = 0.0
    compared: int = 0
    clipped: float = 0.0
    least: float = 0.0
    most: float = 0.0

    def update(
        self, written: Array, read: Array, original: Array | None, meant: Array | None = None
    ) -> None:
        """Add the values of one run.

        Args:
            written: the activation before its quantization.
            read: the activation after its dequantization.
            original: the activation in the float export, or None.
            meant: `original` after the ReLU or Clip that the range replaces, or None.
        """
        before, after = written.astype(np.float64), read.astype(np.float64)
        exact = _read_comparable(original, written)
        cut = _read_comparable(meant, written)
        truth = next(values for values in (cut, exact, before) if values is not None)
        lowest, highest = self.low - self.step / 2, self.high + self.step / 2
        self.non_finite |= not (
            np.isfinite(before).all() and np.isfinite(after).all() and np.isfinite(truth).all()
        )
        inside = (before >= lowest) & (before <= highest)
        narrow = written.dtype if written.dtype == np.float16 else np.dtype(np.float32)
        rounding = _SPACINGS * np.spacing(np.abs(before).astype(narrow)).astype(np.float64)
        with np.errstate(invalid="ignore"):
            wrong = np.maximum(np.abs(after - before) - rounding, 0.0)[inside]
        self.largest = max(self.largest, float(wrong.max(initial=0.0)))
        beyond = truth > highest
        if self.low < 0:  # A range that begins at 0 clips negative values on purpose.
            beyond |= truth < lowest
        self.outside += int(beyond.sum())
        self.values += int(truth.size)
        self.least = min(self.least, float(truth.min(initial=0.0)))
        self.most = max(self.most, float(truth.max(initial=0.0)))
        with np.errstate(over="ignore", invalid="ignore"):
            self.clipped += float(((truth - np.clip(truth, lowest, highest))[beyond] ** 2).sum())
            if exact is not None:
                usable = inside & ~beyond
                self.squares += float(((after - exact)[usable] ** 2).sum())
                self.compared += int(usable.sum())

    def summarize(self) -> ActivationMeasurement:
        """Return the measurement over all runs.

        Noise and departure are in units of step / sqrt(12), the noise of rounding. Clipping is the
        mean squared error that the range cuts off, in squares of such a unit. Its step is at least
        that of 8 bits, since the gain of a finer step must not be lost by clipping. The stretch is
        that of the end that fits more tightly. A symmetric range of values of one sign fits at one
        end only. The stretch is None for a bounded range, and if a value is not finite or all
        values are below `TINY`.
        """
        unit = self.step / math.sqrt(12)
        departure = math.sqrt(self.squares / self.compared) / unit if self.compared else None
        step = max(self.step, (self.high - self.low) / _LEVELS)
        clipping = self.clipped / self.values / (step**2 / 12) if self.values else 0.0
        return ActivationMeasurement(
            tensor=self.tensor,
            values=self.values,
            noise=LARGEST if self.non_finite else min(self.largest / unit, LARGEST),
            saturated=self.outside / self.values if self.values else 0.0,
            departure=departure if departure is None or math.isfinite(departure) else LARGEST,
            clipping=min(clipping, LARGEST) if math.isfinite(clipping) else LARGEST,
            stretch=self._measure_stretch(),
        )

    def _measure_stretch(self) -> float | None:
        if self.bounded or self.non_finite:
            return None
        reached = ((self.low, self.least), (self.high, self.most))
        stretches = [end / value for end, value in reached if abs(value) > TINY]
        return min(*stretches, LARGEST) if stretches else None


def _read_comparable(values: Array | None, written: Array) -> npt.NDArray[np.float64] | None:
    """Return the float export's values; None if their shape is not that of `written`."""
    return (
        values.astype(np.float64) if values is not None and values.shape == written.shape else None
    )


def compute_weight_error(
    original: npt.ArrayLike, dequantized: npt.ArrayLike, scale: npt.ArrayLike
) -> float:
    """Return the largest |original - dequantized| in quantization steps.

    Return `LARGEST` if a weight is not finite, or changes where the step is 0.

    Raises:
        ValueError: the two weights have different shapes.
    """
    before, after = (
        np.asarray(original, dtype=np.float64),
        np.asarray(dequantized, dtype=np.float64),
    )
    if before.shape != after.shape:
        raise ValueError(f"a weight of shape {before.shape} became one of shape {after.shape}")
    if not before.size:
        return 0.0
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        moved = np.abs(before - after)
        steps = np.where(moved == 0, 0.0, moved / np.abs(np.asarray(scale, dtype=np.float64)))
    largest = float(steps.max())
    return min(largest, LARGEST) if not np.isnan(largest) else LARGEST
