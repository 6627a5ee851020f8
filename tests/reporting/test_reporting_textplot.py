"""Ratios as rows of characters."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from onnx_ops.reporting.textplot import ratio_plot

RATIO = st.floats(0.01, 100, allow_nan=False)


def test_every_mark_stands_where_its_value_does() -> None:
    rows = ratio_plot([0.9, 1.0, 1.1], estimate=1.0, low=0.95, high=1.1, limit=1.05, width=40)
    first, second, third, interval, axis = rows
    assert first.index("●") < second.index("●") < third.index("●")
    assert first.index("│") == second.index("●") == axis.index("1") == interval.index("◆")
    assert first.index("│") < first.index("┊") < third.index("●") == interval.index("┤")
    assert interval.index("├") < interval.index("◆")
    assert axis.endswith("limit 1.05")
    assert [row.split()[-1] for row in rows[:4]] == ["0.900", "1.000", "1.100", "1.000"]


def test_an_open_side_ends_in_an_arrow() -> None:
    *_, interval, _ = ratio_plot([1.2], estimate=1.2, low=None, high=None, limit=1.05)
    assert "◄" in interval
    assert "►" in interval


@given(st.lists(RATIO, min_size=1, max_size=20), RATIO, st.integers(40, 100))
def test_no_row_is_wider_than_asked_for(ratios: list[float], limit: float, width: int) -> None:
    low, high = min(ratios), max(ratios)
    rows = ratio_plot(ratios, estimate=math.sqrt(low * high), low=low, high=high, limit=limit, width=width)
    assert len(rows) == len(ratios) + 2
    assert all(len(row.rsplit(" ", 1)[0].rstrip()) <= width + 10 for row in rows[:-1])
    assert all(row.count("●") == 1 for row in rows[:-2])
