"""Noise, saturation and deviation of a quantized activation."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from onnx_ops.statistics.output_columns import LARGEST
from onnx_ops.statistics.quantization import ActivationStatistics


def quantize(x: Any, step: float, zero: int) -> Any:
    return ((np.clip(np.rint(x / step) + zero, 0, 255) - zero) * step).astype(np.float32)


def look(x: Any, read: Any, *, step: float, zero: int, original: Any = None) -> Any:
    watched = ActivationStatistics(
        tensor="a", step=step, low=-zero * step, high=(255 - zero) * step
    )
    half = len(x) // 2
    for part in (slice(0, half), slice(half, None)):
        watched.update(x[part], read[part], None if original is None else original[part])
    return watched.summarize()


@given(st.integers(0, 2**31), st.floats(1e-3, 1e3), st.integers(0, 255))
def test_activation_statistics_of_rounding_only_keeps_noise_limit(
    seed: int, scale: float, zero: int
) -> None:
    step = float(np.float32(scale / 100))
    x = np.random.default_rng(seed).normal(0, scale, 500).astype(np.float32)
    found = look(x, quantize(x, step, zero), step=step, zero=zero)
    assert found.noise <= 1.74
    assert found.values == 500
    assert found.departure is None


@pytest.mark.parametrize(("zero", "factor"), [(1, 1.0), (0, 1.02)])
def test_activation_statistics_with_wrong_zero_point_or_scale_exceeds_noise_limit(
    zero: int, factor: float
) -> None:
    x = np.linspace(0, 2, 400, dtype=np.float32)
    read = (quantize(x, 0.01, 0) - zero * 0.01) * factor
    found = look(x, read, step=0.01, zero=0)
    assert found.noise > 3


def test_activation_statistics_of_clipped_values_returns_saturated_share() -> None:
    x = np.concatenate([np.full(80, 1.0), np.full(20, 5.0)]).astype(np.float32)
    found = look(x, quantize(x, 0.01, 0), step=0.01, zero=0, original=x)
    assert found.saturated == pytest.approx(0.2)
    assert found.noise <= 1.74
    assert found.departure is not None
    assert found.departure < 1


def test_activation_statistics_of_folded_relu_reports_no_saturation() -> None:
    x = np.linspace(-1, 1, 200, dtype=np.float32)
    assert look(x, quantize(x, 0.01, 0), step=0.01, zero=0).saturated == 0
    assert look(x, quantize(x, 0.01, 20), step=0.01, zero=20).saturated == pytest.approx(
        0.395, abs=0.01
    )


def test_activation_statistics_departure_includes_errors_of_earlier_nodes() -> None:
    x = np.linspace(0, 1, 300, dtype=np.float32)
    found = look(x + 0.05, quantize(x + 0.05, 0.01, 0), step=0.01, zero=0, original=x)
    assert found.noise <= 1.74
    assert found.departure == pytest.approx(5 * math.sqrt(12), rel=0.02)


def test_activation_statistics_with_nan_returns_largest_noise() -> None:
    x = np.array([0.1, np.nan, 0.2, 0.3], dtype=np.float32)
    assert look(x, x, step=0.01, zero=0).noise == LARGEST


def test_activation_statistics_of_clipping_returns_ratio_to_rounding_energy() -> None:
    x = np.concatenate([np.linspace(0, 2.55, 990), np.full(10, 3.55)]).astype(np.float32)
    found = look(x, quantize(x, 0.01, 0), step=0.01, zero=0)
    assert found.clipping == pytest.approx(0.01 * 0.995**2 / (0.01**2 / 12), rel=0.01)
    fine = look(x, x, step=0.01 / 256, zero=0)
    # A fine step does not hide clipping.
    assert fine.clipping > 100


def test_activation_statistics_stretch_compares_range_with_values_unless_undefined() -> None:
    x = np.linspace(-0.1, 2.55, 400, dtype=np.float32)
    assert look(x, x, step=0.02, zero=128).stretch == pytest.approx(1, abs=0.01)
    assert look(x, x, step=0.06, zero=128).stretch == pytest.approx(3, abs=0.03)
    assert look(0 * x, 0 * x, step=0.02, zero=128).stretch is None
    watched = ActivationStatistics(
        tensor="softmax", step=1 / 256, low=0.0, high=255 / 256, bounded=True
    )
    watched.update(x / 100, x / 100, None)
    assert watched.summarize().stretch is None


def test_activation_statistics_of_clip_in_float_export_reports_no_clipping() -> None:
    x = np.linspace(-3, 9, 400, dtype=np.float32)
    step = 6 / 255
    read = quantize(x, step, 0)
    watched = ActivationStatistics(tensor="conv", step=step, low=0.0, high=6.0)
    watched.update(x, read, x, np.clip(x, 0, 6))
    found = watched.summarize()
    assert (found.clipping, found.saturated) == (0, 0)
    assert found.stretch == pytest.approx(1)
