"""Numbers formatted for people."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onnx_ops.reporting.formatting import format_figure, format_interval, number


@pytest.mark.parametrize(
    ("value", "unit", "shown"),
    [
        (0.00125, "s", "1.25 ms"),
        (0.0000034, "s", "3.4 µs"),
        (5e-9, "s", "5 ns"),
        (90.0, "s", "90 s"),
        (0.0, "s", "0 s"),
        (2_400_000, "B", "2.4 MB"),
        (980, "B", "980 B"),
        (1_500, "B", "1.5 kB"),
        (3.2e9, "B", "3.2 GB"),
        (0.9712, "1", "97.1%"),
        (-0.004, "1", "-0.4%"),
        (1.034, "x", "1.03×"),
        (0.51, "steps", "0.51 steps"),
        (7.0, "", "7"),
        (None, "s", "–"),
        (math.nan, "s", "nan s"),
        (math.inf, "1", "inf%"),
    ],
)
def test_format_figure_returns_value_with_scaled_unit(
    value: float | None, unit: str, shown: str
) -> None:
    assert format_figure(value, unit) == shown


@pytest.mark.parametrize(
    ("low", "high", "near", "shown"),
    [
        (0.00121, 0.0013, 0.00125, "[1.21, 1.3] ms"),
        (0.0009, 0.0013, 0.00125, "[0.9, 1.3] ms"),
        (0.00121, None, 0.00125, "≥ 1.21 ms"),
        (-math.inf, 0.0013, 0.00125, "≤ 1.3 ms"),
        (None, 0.0013, None, "≤ 1.3 ms"),
        (None, None, 0.00125, ""),
        (-math.inf, math.inf, 0.1, ""),
    ],
)
def test_format_interval_returns_bounds_with_scaled_unit(
    low: float | None, high: float | None, near: float | None, shown: str
) -> None:
    assert format_interval(low, high, "s", near=near) == shown


@given(st.floats(min_value=-1e300, max_value=1e300))
def test_number_is_accurate_to_three_digits(value: float) -> None:
    assert float(number(value)) == pytest.approx(value, rel=5e-3)


@pytest.mark.parametrize(
    ("value", "shown"),
    [(99_960, "99960"), (123_456, "1.23e+05"), (0.0009996, "0.001"), (12345, "12345")],
)
def test_number_of_large_or_rounded_value_returns_short_text(value: float, shown: str) -> None:
    assert number(value) == shown
