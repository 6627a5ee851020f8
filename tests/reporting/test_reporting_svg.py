"""Axes, ticks and marks of the report's plots."""

from __future__ import annotations

import itertools
import math
from xml.etree import ElementTree as ET

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from onnx_ops.reporting.svg import (
    Axis,
    Chart,
    axis_around,
    linear_ticks,
    log_ticks,
    room_for,
    tick_texts,
)

values = st.floats(min_value=-1e9, max_value=1e9)
positive = st.floats(min_value=1e-9, max_value=1e12)


def is_wide_enough(low: float, high: float) -> bool:
    """Return whether the extent is large enough for ticks of 16 digits."""
    return high - low > 1e-6 * max(abs(low), abs(high), 1e-6)


@given(values, values)
def test_linear_ticks_are_few_increasing_and_within_range(one: float, other: float) -> None:
    low, high = min(one, other), max(one, other)
    assume(is_wide_enough(low, high))
    ticks = linear_ticks(low, high)
    assert 2 <= len(ticks) <= 6
    assert all(low <= tick <= high for tick in ticks)
    assert all(a < b for a, b in itertools.pairwise(ticks))
    gaps = [b - a for a, b in itertools.pairwise(ticks)]
    assert max(gaps) - min(gaps) <= 1e-6 * (high - low)


@given(positive, positive)
def test_log_ticks_are_few_increasing_and_within_range(one: float, other: float) -> None:
    low, high = min(one, other), max(one, other)
    assume(is_wide_enough(low, high))
    ticks = log_ticks(low, high)
    assert 2 <= len(ticks) <= 10
    assert all(low <= tick <= high for tick in ticks)
    assert all(a < b for a, b in itertools.pairwise(ticks))


@given(values, values)
def test_tick_texts_are_distinct_and_show_their_values(one: float, other: float) -> None:
    low, high = min(one, other), max(one, other)
    assume(is_wide_enough(low, high))
    ticks = linear_ticks(low, high)
    texts = tick_texts(ticks)
    assert len(set(texts)) == len(ticks)
    assert all(
        abs(float(text) - tick) <= 1e-4 * (high - low)
        for text, tick in zip(texts, ticks, strict=True)
    )


def test_tick_texts_of_common_ranges_have_no_more_digits_than_needed() -> None:
    assert tick_texts(linear_ticks(0, 100)) == ("0", "20", "40", "60", "80", "100")
    assert tick_texts(linear_ticks(0.98, 1.26)) == ("1.0", "1.1", "1.2")
    assert tick_texts(linear_ticks(0.94, 1.06)) == ("0.950", "0.975", "1.000", "1.025", "1.050")
    assert tick_texts(log_ticks(0.01, 100), even=False) == ("0.01", "0.1", "1", "10", "100")
    assert tick_texts(log_ticks(8, 70), even=False) == ("10", "20", "50")


@pytest.mark.parametrize(
    ("low", "high"), [(1.0, 1.0), (2.0, 1.0), (math.nan, 1.0), (0.0, math.inf)]
)
def test_axis_with_empty_reversed_or_nonfinite_range_raises_value_error(
    low: float, high: float
) -> None:
    with pytest.raises(ValueError, match="axis"):
        linear_ticks(low, high)
    with pytest.raises(ValueError, match="axis"):
        Axis(low=low, high=high, label="x")


def test_log_ticks_from_zero_raise_value_error() -> None:
    with pytest.raises(ValueError, match="logarithmic"):
        log_ticks(0, 1)


@given(st.lists(positive, min_size=1, max_size=20), st.booleans())
def test_axis_around_values_places_them_in_order_within_range(data: list[float], log: bool) -> None:
    axis = axis_around(data, "x", log=log)
    assert all(axis.low <= value <= axis.high for value in data)
    places = [axis.place(value) for value in sorted(data)]
    assert all(0 <= place <= 1 for place in places)
    assert places == sorted(places)


def test_axis_place_of_value_outside_range_returns_edge() -> None:
    axis = Axis(low=1, high=100, label="x", log=True)
    assert (axis.place(0), axis.place(1e30)) == (0.0, 1.0)
    assert axis.place(10) == pytest.approx(0.5)


def test_chart_render_is_well_formed_escaped_and_within_view_box() -> None:
    chart = Chart(x=Axis(low=0, high=1, label="a < b"), y=Axis(low=0, high=10, label='"&"'))
    chart.path([(0, 0), (0.5, 5), (2, 20)], "line")
    chart.dot(0.5, 5, "solid", "<script>alert(1)</script>")
    chart.across(5, "line limit", "limit <5>")
    chart.upright(0.5, "line limit")
    chart.band(4, 6, "band")
    chart.note(1, 5, "</svg>")
    chart.row(3, "a name that is much too long to fit", "<value>")
    text = chart.render('title "<&>"')
    root = ET.fromstring(text)  # noqa: S314 (rendered above)
    assert root.get("aria-label") == 'title "<&>"'
    assert "<script" not in text
    assert text.count("</svg>") == 1
    width, height = (float(part) for part in root.get("viewBox", "").split()[2:])
    for line in root.iter("polyline"):
        for point in line.get("points", "").split():
            x, y = (float(part) for part in point.split(","))
            assert 0 <= x <= width
            assert 0 <= y <= height
    assert "a name that is much too long to fit" in [e.text for e in root.iter("text")]


def test_chart_row_shows_whole_name_within_plot() -> None:
    for name in (
        "short",
        "batches:257 · probabilities",
        "model.layers.11.self_attention.projection.weight" * 3,
    ):
        left, height = room_for([name])
        chart = Chart(
            x=Axis(low=0, high=1, label="x"),
            y=Axis(low=0.3, high=1.7, label=""),
            left=left,
            height=height + 62,
        )
        chart.row(1, name, "±")
        texts = ET.fromstring(chart.render("t")).iter("text")  # noqa: S314
        found = [e for e in texts if (e.text or "x") in name]
        assert "".join(e.text or "" for e in found) == name
        assert all(0 < float(e.get("y", "0")) < height + 62 for e in found)
