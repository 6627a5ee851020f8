"""Quantization error: distances of weights and activations from their originals, in quantization steps."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from onnx_ops.domain.evidence import ActivationMeasurement
from onnx_ops.statistics.parity import LARGEST

Floats = npt.NDArray[np.float64]
AnyArray = npt.NDArray[np.generic]

_LEVELS = 255

TINY = 1e-30
"""Values nearer to 0 do not count as values that a range must hold."""

_SPACINGS = 4
"""Spacings of float32 at a value by which its rounding may miss the middle of a step."""


@dataclass(slots=True, kw_only=True)
class ActivationStatistics:
    """One activation over several runs. `step`, `low` and `high` describe its levels as it is written.

    `bounded`: its range is that of the function that makes it.
    """

    tensor: str
    step: float
    low: float
    high: float
    bounded: bool = False
    values: int = 0
    strange: bool = False
    largest: float = 0.0
    outside: int = 0
    squares: float = 0.0
    compared: int = 0
    clipped: float = 0.0
    least: float = 0.0
    most: float = 0.0

    def see(self, written: AnyArray, read: AnyArray, original: AnyArray | None, meant: AnyArray | None = None) -> None:
        """Take in one run.

        Args:
            written: the quantized model's value before QuantizeLinear, any shape.
            read: after DequantizeLinear, the same shape.
            original: the float export's value of that name; None if it has none, or one of another shape.
            meant: what the float export makes of it by a ReLU or Clip, which a range can stand for; None without.
        """
        before, after = written.astype(np.float64), read.astype(np.float64)
        exact = original.astype(np.float64) if original is not None and original.shape == written.shape else None
        cut = meant.astype(np.float64) if meant is not None and meant.shape == written.shape else exact
        truth = before if cut is None else cut
        self.strange |= not (np.isfinite(before).all() and np.isfinite(after).all() and np.isfinite(truth).all())
        inside = (before >= self.low - self.step / 2) & (before <= self.high + self.step / 2)
        rounding = _SPACINGS * np.spacing(np.abs(before).astype(np.float32)).astype(np.float64)
        with np.errstate(invalid="ignore"):
            wrong = np.maximum(np.abs(after - before) - rounding, 0.0)[inside]
        self.largest = max(self.largest, float(wrong.max(initial=0.0)))
        beyond = truth > self.high + self.step / 2
        if self.low < 0:  # a range that begins at 0 cuts off below on purpose
            beyond |= truth < self.low - self.step / 2
        self.outside += int(beyond.sum())
        self.values += int(truth.size)
        self.least = min(self.least, float(truth.min(initial=0.0)))
        self.most = max(self.most, float(truth.max(initial=0.0)))
        with np.errstate(over="ignore", invalid="ignore"):
            nearest = np.clip(truth, self.low - self.step / 2, self.high + self.step / 2)
            self.clipped += float(((truth - nearest)[beyond] ** 2).sum())
        if exact is not None:
            kept = inside & ~beyond
            with np.errstate(over="ignore", invalid="ignore"):
                self.squares += float(((after - exact)[kept] ** 2).sum())
            self.compared += int(kept.sum())

    def measured(self) -> ActivationMeasurement:
        """What was seen, noise and departure in units of step / sqrt(12); NaN or infinity as `LARGEST`."""
        unit = self.step / math.sqrt(12)
        departure = math.sqrt(self.squares / self.compared) / unit if self.compared else None
        if departure is not None and not math.isfinite(departure):
            departure = LARGEST
        return ActivationMeasurement(
            tensor=self.tensor,
            values=self.values,
            noise=LARGEST if self.strange else min(self.largest / unit, LARGEST),
            saturated=self.outside / self.values if self.values else 0.0,
            departure=departure,
            clipping=self._clipping(),
            stretch=self._stretch(),
        )

    def _clipping(self) -> float:
        """A step finer than that of 8 bits is taken for one: what it loses less by rounding may not be clipped."""
        step = max(self.step, (self.high - self.low) / _LEVELS)
        found = self.clipped / self.values / (step**2 / 12) if self.values else 0.0
        return min(found, LARGEST) if math.isfinite(found) else LARGEST

    def _stretch(self) -> float | None:
        """A symmetric range of values of one sign fits at one end only, and is as it should be."""
        ends = [
            end / reached for end, reached in ((self.low, self.least), (self.high, self.most)) if abs(reached) > TINY
        ]
        return None if self.bounded or not ends or self.strange else min(*ends, LARGEST)
