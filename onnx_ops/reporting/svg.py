"""Draw plots as inline SVG: axes, ticks and marks.

The page's CSS classes set colours and fonts.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

STYLE = (Path(__file__).parent / "templates" / "style.css").read_text(encoding="utf-8")
"""The style sheet of the reports and their plots."""

WIDTH = 480.0
"""Width of every plot in user units; the page scales the plot."""

_NEAR = 1e-9
LINE = 15.0
"""Height of a line of text."""
_CHARACTER = 7.2
"""Mean width of a character at the plots' font size."""
_WIDE_CHARACTER = 8.1
"""Mean width of a character at the font size of narrow windows."""


def linear_ticks(low: float, high: float) -> tuple[float, ...]:
    """Return 2 to 6 round values from `low` to `high`.

    Their step is 1, 2, 2.5 or 5 times a power of ten.
    """
    _check(low, high)
    raw = (high - low) / 5
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(
        (m * power for m in (1.0, 2.0, 2.5, 5.0) if m * power >= raw * (1 - _NEAR)), 10 * power
    )
    first, last = math.ceil(low / step - _NEAR), math.floor(high / step + _NEAR)
    return tuple(min(max(k * step, low), high) for k in range(first, last + 1))


def log_ticks(low: float, high: float) -> tuple[float, ...]:
    """Return round values from `low` to `high` for a logarithmic axis.

    They are powers of ten, and intermediate values if there are few powers. If fewer than three
    such values are on the axis, the ticks are those of a linear axis.
    """
    _check(low, high)
    if low <= 0:
        raise ValueError(f"a logarithmic axis cannot start at {low}")
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    stride = max(1, math.ceil((last - first) / 6))
    for mantissas in ((1,), (1, 3), (1, 2, 5), range(1, 10)):
        values = (m * 10.0**power for power in range(first, last + 1, stride) for m in mantissas)
        ticks = tuple(v for v in values if low <= v <= high)
        if len(ticks) >= 3:
            return ticks
    return linear_ticks(low, high)


def tick_texts(ticks: Sequence[float], *, even: bool = True) -> tuple[str, ...]:
    """Return the texts of ticks, with enough digits to distinguish them.

    With `even`, ticks without an exponent have the same number of decimals.
    """
    texts: tuple[str, ...] = ()
    for digits in range(17):
        texts = tuple(
            f"{tick:.{digits}f}"
            if even and (tick == 0 or _is_plain(tick))
            else _plain(tick, digits + 1)
            for tick in ticks
        )
        if all(
            math.isclose(float(text), tick, rel_tol=1e-6)
            for text, tick in zip(texts, ticks, strict=True)
        ):
            break
    return texts


def _is_plain(value: float) -> bool:
    return 1e-4 <= abs(value) < 1e6


def _plain(value: float, digits: int) -> str:
    if value == 0:
        return "0"
    if not _is_plain(value):
        mantissa, _, power = f"{value:.{digits - 1}e}".partition("e")
        return f"{mantissa}e{int(power)}"
    places = max(0, digits - 1 - math.floor(math.log10(abs(value))))
    return f"{value:.{places}f}"


def _check(low: float, high: float) -> None:
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        raise ValueError(f"an axis cannot go from {low} to {high}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """An axis from `low` to `high`, with the name and unit of its values.

    `marks` overrides the automatic ticks.
    """

    low: float
    high: float
    label: str
    log: bool = False
    marks: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        _check(self.low, self.high)

    def place(self, value: float) -> float:
        """Return the position of a value, 0 at the low end and 1 at the high end.

        Values outside the axis are drawn at the edge.
        """
        inside = min(max(value, self.low), self.high)
        if self.log:
            return math.log(inside / self.low) / math.log(self.high / self.low)
        return (inside - self.low) / (self.high - self.low)

    def ticks(self) -> tuple[float, ...]:
        """Return the values that have a tick."""
        if self.marks:
            return self.marks
        return log_ticks(self.low, self.high) if self.log else linear_ticks(self.low, self.high)


def axis_around(
    values: Sequence[float], label: str, *, log: bool = False, room: float = 0.06
) -> Axis:
    """Return an axis that contains all values, with room at both ends.

    `room` is a share of the axis's extent. The values are finite, and above 0 for a logarithmic
    axis.
    """
    low, high = min(values), max(values)
    if log:
        factor = max((high / low) ** room, 1.05)
        return Axis(low=low / factor, high=high * factor, label=label, log=True)
    extra = room * (high - low) or 0.05 * abs(high) or 1.0
    return Axis(low=low - extra, high=high + extra, label=label)


@dataclass(slots=True, kw_only=True)
class Chart:
    """A plot to draw on, in the units of its axes.

    Its methods escape text. `style` names classes of the page's CSS.
    """

    x: Axis
    y: Axis
    height: float = 280.0
    left: float = 58.0
    right: float = 14.0
    top: float = 12.0
    bottom: float = 42.0
    y_ticks: bool = True
    _marks: list[str] = field(default_factory=list)

    def path(self, points: Sequence[tuple[float, float]], style: str) -> None:
        """Draw a line through points, in the units of the axes."""
        steps = " ".join(f"{_px(self._left_of(x))},{_px(self._top_of(y))}" for x, y in points)
        self._marks.append(f'<polyline class="{style}" points="{steps}"/>')

    def dot(self, x: float, y: float, style: str, title: str, radius: float = 4.0) -> None:
        """Draw a point with a tooltip, in the units of the axes."""
        at = f'cx="{_px(self._left_of(x))}" cy="{_px(self._top_of(y))}" r="{_px(radius)}"'
        self._marks.append(f'<circle class="{style}" {at}><title>{escape(title)}</title></circle>')

    def across(self, y: float, style: str, text: str = "") -> None:
        """Draw a horizontal line over the whole width, with its name at the right end."""
        self.path([(self.x.low, y), (self.x.high, y)], style)
        if text:
            self._text(WIDTH - self.right - 2, self._top_of(y) - 4, text, "end")

    def upright(self, x: float, style: str) -> None:
        """Draw a vertical line over the whole height."""
        self.path([(x, self.y.low), (x, self.y.high)], style)

    def band(self, low: float, high: float, style: str) -> None:
        """Draw a band between two values of y over the whole width."""
        top, bottom = self._top_of(high), self._top_of(low)
        box = f'x="{_px(self.left)}" y="{_px(top)}" width="{_px(WIDTH - self.left - self.right)}"'
        self._marks.append(f'<rect class="{style}" {box} height="{_px(max(bottom - top, 1.0))}"/>')

    def note(self, x: float, y: float, text: str, *, above: bool = True) -> None:
        """Write text above or below a point, on the side that has room for the text."""
        left, top = self._left_of(x), self._top_of(y)
        room = left + 8 + len(text) * _CHARACTER < WIDTH
        self._text(
            left + (8 if room else -8),
            top + (-6 if above else 14),
            text,
            "start" if room else "end",
        )

    def row(self, y: float, name: str, value: str) -> None:
        """Write the name of a row on the left of the drawing, and its value on the right.

        A name that is wider than the left margin is written above the row, on as many lines as
        needed.
        """
        top = self._top_of(y)
        if 8 + len(name) * _CHARACTER <= self.left:
            self._text(self.left - 6, top + 4, name, "end")
        else:
            lines = wrapped(name)
            for number, line in enumerate(lines):
                self._text(self.left, top - 8 - LINE * (len(lines) - 1 - number), line, "start")
        self._text(WIDTH - self.right + 6, top + 4, value, "start")

    def render(self, title: str) -> str:
        """Return the plot as SVG, with `title` as its text alternative."""
        low, bottom = self._top_of(self.y.low), self.height - self.bottom
        grid = []
        ticks = self.x.ticks()
        for tick, text in zip(ticks, tick_texts(ticks, even=not self.x.log), strict=True):
            left = self._left_of(tick)
            grid += [
                _line(left, self.top, left, bottom, "grid"),
                _label(left, bottom + 15, text, "middle"),
            ]
        if self.y_ticks:
            ticks = self.y.ticks()
            for tick, text in zip(ticks, tick_texts(ticks, even=not self.y.log), strict=True):
                top = self._top_of(tick)
                grid.append(_line(self.left, top, WIDTH - self.right, top, "grid"))
                grid.append(_label(self.left - 6, top + 4, text, "end"))
            middle = (self.top + bottom) / 2
            turned = f' transform="rotate(-90 12 {_px(middle)})"'
            grid.append(_label(12, middle, self.y.label, "middle", more=turned))
        grid.append(_line(self.left, low, WIDTH - self.right, low, "axis"))
        grid.append(_line(self.left, self.top, self.left, bottom, "axis"))
        grid.append(
            _label((self.left + WIDTH - self.right) / 2, self.height - 6, self.x.label, "middle")
        )
        box = (
            f'viewBox="0 0 {_px(WIDTH)} {_px(self.height)}" role="img" aria-label="{escape(title)}"'
        )
        return f"<svg {box}>{''.join((*grid, *self._marks))}</svg>"

    def _left_of(self, x: float) -> float:
        return self.left + self.x.place(x) * (WIDTH - self.left - self.right)

    def _top_of(self, y: float) -> float:
        return self.height - self.bottom - self.y.place(y) * (self.height - self.bottom - self.top)

    def _text(self, left: float, top: float, text: str, anchor: str) -> None:
        self._marks.append(_label(left, top, text, anchor))


def room_for(names: Sequence[str]) -> tuple[float, float]:
    """Return the left margin, and the height of one row, for rows with these names.

    The margin has room for all names, or for none if it would be wider than half of the plot.
    """
    margin = 8 + _WIDE_CHARACTER * max(map(len, names), default=0)
    if margin <= WIDTH / 2:
        return margin, 20.0
    return 12.0, 24.0 + LINE * max(len(wrapped(name)) for name in names)


def wrapped(text: str) -> list[str]:
    """Split the text into lines that fit, at spaces where possible."""
    return textwrap.wrap(text, int(0.8 * WIDTH / _CHARACTER)) or [text]


def make_standalone(svg: str, style: str = "") -> str:
    """Return the plot as the text of a file, with the style sheet and `style`."""
    svg = svg.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1)
    return svg.replace(">", f"><style>\n{STYLE}{style}</style>", 1)


def _line(x1: float, y1: float, x2: float, y2: float, style: str) -> str:
    return f'<line class="{style}" x1="{_px(x1)}" y1="{_px(y1)}" x2="{_px(x2)}" y2="{_px(y2)}"/>'


def _label(left: float, top: float, text: str, anchor: str, *, more: str = "") -> str:
    return (
        f'<text x="{_px(left)}" y="{_px(top)}" text-anchor="{anchor}"{more}>{escape(text)}</text>'
    )


def _px(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")
