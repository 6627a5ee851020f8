"""Format numbers with three significant digits and a short unit.

The module also formats text and tables in Markdown.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from onnx_ops.domain.decision import GateResult, Verdict
from onnx_ops.printable import show

NOTHING = "–"
SIGNS = {Verdict.PASS: "✅", Verdict.INCONCLUSIVE: "⚪", Verdict.ERROR: "⚠️", Verdict.FAIL: "❌"}

_TIMES = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns"))
_ESCAPES = str.maketrans(
    {"&": "&amp;", "<": "&lt;", ">": "&gt;", "@": "&#64;", "\n": " "}
    | {sign: f"\\{sign}" for sign in "\\|`*_[]"}
)
_SIZES = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1.0, "B"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """The notation for a unit: the value / `divisor`, followed by `suffix`."""

    divisor: float
    suffix: str


def scale_for(value: float, unit: str) -> Scale:
    """Return the scale that fits a value of a unit.

    The units are `s`, `B`, `1` (a fraction, written as a percentage) and `x` (a ratio). Any other
    unit is written unchanged.
    """
    if unit == "1":
        return Scale(divisor=0.01, suffix="%")
    if unit == "x":
        return Scale(divisor=1.0, suffix="×")
    steps = {"s": _TIMES, "B": _SIZES}.get(unit)
    if steps is None:
        return Scale(divisor=1.0, suffix=f" {unit}" if unit else "")
    if value == 0 or not math.isfinite(value):
        return Scale(divisor=1.0, suffix=f" {unit}")
    divisor, suffix = next((step for step in steps if abs(value) >= step[0]), steps[-1])
    return Scale(divisor=divisor, suffix=f" {suffix}")


def format_figure(value: float | None, unit: str) -> str:
    """Return one value with its unit: `1.25 ms`, `0.5%`, `1.03×`, `2.4 MB`.

    None is written as `–`.
    """
    if value is None:
        return NOTHING
    scale = scale_for(value, unit)
    return number(value / scale.divisor) + scale.suffix


def format_interval(
    low: float | None, high: float | None, unit: str, *, near: float | None = None
) -> str:
    """Return an interval as a text: `[1.21, 1.35] ms`, or one-sided `≥ 1.21 ms`.

    A bound that is None or infinite is omitted, and the text is empty without a bound. The scale is
    that of the estimate, `near`, or of a bound if there is no estimate.
    """
    low, high = _drop_infinite(low), _drop_infinite(high)
    anchor = next((v for v in (near, high, low) if v is not None), None)
    if anchor is None or (low is None and high is None):
        return ""
    scale = scale_for(anchor, unit)
    shown = [number(v / scale.divisor) for v in (low, high) if v is not None]
    if len(shown) == 2:
        return f"[{shown[0]}, {shown[1]}]{scale.suffix}"
    return f"{'≥' if high is None else '≤'} {shown[0]}{scale.suffix}"


def _drop_infinite(bound: float | None) -> float | None:
    return None if bound is not None and math.isinf(bound) else bound


def result_figure(result: GateResult) -> str:
    """Return the estimate of a gate's result as a text.

    Durations are in milliseconds, as in the result's limit and reason.
    """
    if result.unit == "s" and result.estimate is not None:
        return format_figure(1e3 * result.estimate, "ms")
    return format_figure(result.estimate, result.unit)


def result_interval(result: GateResult) -> str:
    """Return the interval of a gate's result in the unit of the estimate."""
    near, low, high, unit = result.estimate, result.low, result.high, result.unit
    if unit == "s":
        near, low, high = (None if value is None else 1e3 * value for value in (near, low, high))
        unit = "ms"
    return format_interval(low, high, unit, near=near)


def number(value: float) -> str:
    """Return a number that is rounded to at least three significant digits.

    Numbers from 0.001 to below 100,000 have no exponent.
    """
    if not math.isfinite(value):
        return str(value)
    if value == 0:
        return "0"
    rounded = float(f"{value:.3g}")
    if abs(rounded) < 1e-3 or abs(value) >= 1e5:
        return f"{value:.2e}"
    digits = max(0, 2 - math.floor(math.log10(abs(rounded))))
    text = f"{rounded:.{digits}f}" if abs(rounded) < 1000 else f"{value:.0f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def markdown(text: str) -> str:
    """Return text that Markdown and HTML show literally, without mentions of users."""
    return show(text).translate(_ESCAPES)


def markdown_table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return the lines of a Markdown table; the first two are the header.

    Cells are plain text.
    """
    cells = (" | ".join(map(markdown, row)) for row in rows)
    return [f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}", *(f"| {row} |" for row in cells)]
