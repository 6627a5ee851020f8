"""Plots for terminals, as rows of characters."""

from __future__ import annotations

from collections.abc import Sequence

_ROOM = 0.06
"""Empty share of the width on each side."""


def ratio_plot(
    ratios: Sequence[float], *, estimate: float, low: float | None, high: float | None, limit: float, width: int = 60
) -> tuple[str, ...]:
    """One row for each session pair, one for the interval, and an axis, all to one scale.

    `│` stands at 1 (as fast as the baseline), `┊` at the limit, `●` at a session pair's ratio, `├──◆──┤` for estimate
    and interval; an open side ends in an arrow.

    Args:
        ratios: one for each session pair, above 0.
        estimate: of the ratio.
        low: its lower bound, None if there is none.
        high: its upper bound, None if there is none.
        limit: largest ratio that passes.
        width: characters of the drawing, beside the labels.
    """
    bounds = [value for value in (low, high) if value is not None]
    values = [*ratios, estimate, *bounds, 1.0, limit]
    room = _ROOM * (max(values) - min(values)) or 0.01
    start, end = min(values) - room, max(values) + room

    def column(value: float) -> int:
        return round((value - start) / (end - start) * (width - 1))

    blank = _with(_with(" " * width, column(limit), "┊"), column(1.0), "│")
    rows = [f"{f'pair {i}':>9} {_with(blank, column(r), '●')} {r:.3f}" for i, r in enumerate(ratios, 1)]
    left, right = column(low if low is not None else start), column(high if high is not None else end)
    band = _with(blank, left, "─" * (right - left + 1))
    band = _with(_with(band, left, "├" if low is not None else "◄"), right, "┤" if high is not None else "►")
    rows.append(f"{'interval':>9} {_with(band, column(estimate), '◆')} {estimate:.3f}")
    rows.append(f"{'':>9} {_axis(width, column(1.0), column(limit), f'limit {limit:.4g}')}")
    return tuple(row.rstrip() for row in rows)


def _with(row: str, at: int, text: str) -> str:
    return row[:at] + text + row[at + len(text) :]


def _axis(width: int, one: int, limit: int, text: str) -> str:
    """The names of the two lines below them; the limit's stands where it does not cover the other."""
    row = _with(" " * width, one, "1")
    at = min(limit, width - len(text))
    free = at > one + 1 or at + len(text) < one
    return _with(row, at, text) if free else f"{row.rstrip()}   ┊ {text}"
