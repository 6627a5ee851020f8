"""Convert durations, percentages and sizes between text and numbers.

The text has a unit, and the number is in the base unit. The base units are those of
`onnx_ops.domain.quantities`: seconds (`s`), a plain ratio (`1`) and bytes (`B`). Arithmetic is
decimal, so `5 ms` is exactly the float 0.005 and `0.5%` exactly 0.005.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal

from onnx_ops.config.messages import describe, did_you_mean
from onnx_ops.errors import UserError

_QUANTITY = re.compile(r"([+-]?[0-9]+(?:\.[0-9]+)?) ?([A-Za-zµ%]*)")
_LONGEST = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitScale:
    """The units of one kind of quantity as multiples of the base unit, smallest first."""

    noun: str
    units: Mapping[str, Decimal]
    examples: tuple[str, ...]
    whole: bool = False

    @property
    def pattern(self) -> str:
        """Regular expression that matches every valid quantity without a sign."""
        return rf"^[0-9]+(\.[0-9]+)? ?({'|'.join(self.units)})$"


SCALES: Mapping[str, UnitScale] = {
    "s": UnitScale(
        noun="a duration",
        units={
            "us": Decimal("1e-6"),
            "ms": Decimal("1e-3"),
            "s": Decimal(1),
            "min": Decimal(60),
            "h": Decimal(3600),
            "d": Decimal(86400),
        },
        examples=("5 ms", "30 s", "24h"),
    ),
    "1": UnitScale(noun="a percentage", units={"%": Decimal("1e-2")}, examples=("5%", "0.5%")),
    "B": UnitScale(
        noun="a size",
        units={
            "B": Decimal(1),
            "kB": Decimal(10**3),
            "KiB": Decimal(2**10),
            "MB": Decimal(10**6),
            "MiB": Decimal(2**20),
            "GB": Decimal(10**9),
            "GiB": Decimal(2**30),
        },
        examples=("2 MB", "512 KiB"),
        whole=True,
    ),
}
"""Scales by the name of the base unit, as in `annotated_types.Unit`."""


def parse_quantity(written: object, unit: str) -> float | int:
    """Return the number of base units of a written quantity.

    Raises:
        ValueError: `written` is not a quantity of this kind; the message shows the value.
    """
    scale = SCALES[unit]
    example = f"e.g. {scale.examples[0]}"
    if isinstance(written, int | float) and not isinstance(written, bool):
        raise ValueError(
            f"expected {scale.noun}, got {describe(written)}; write it with a unit, {example}"
        )
    match = (
        _QUANTITY.fullmatch(written)
        if isinstance(written, str) and len(written) <= _LONGEST
        else None
    )
    if match is None:
        raise ValueError(f"expected {scale.noun}, {example}, got {describe(written)}")
    number, suffix = match.groups()
    if not suffix:
        raise ValueError(
            f"expected {scale.noun}, got {describe(written)}; write it with a unit, {example}"
        )
    if suffix not in scale.units:
        meant = "min" if suffix == "m" else suffix
        hint = (
            did_you_mean(meant, scale.units)
            or f"; write one of {', '.join(scale.units)}, {example}"
        )
        raise ValueError(f"unknown unit '{suffix}' in '{written}'{hint}")
    value = Decimal(number) * scale.units[suffix]
    if not scale.whole:
        return float(value)
    if value % 1:
        raise ValueError(f"'{written}' is not a whole number of bytes")
    return int(value)


def parse_option(text: str, unit: str, where: str, remedy: str = "") -> float:
    """Return the number of base units of an option or parameter.

    Raises:
        UserError: the text is not a quantity of this kind.
    """
    try:
        return float(parse_quantity(text, unit))
    except ValueError as error:
        raise UserError(str(error), where=where, remedy=remedy) from error


def format_quantity(value: float, unit: str) -> str:
    """Return a quantity in the largest unit that needs no decimal places.

    If there is no such unit, the smallest unit is used, with all decimal places of the number. A
    duration or size of 0 has the base unit.
    """
    units = SCALES[unit].units
    exact = Decimal(repr(value))
    if not value and "%" not in units:
        return _join(exact, unit)
    for name, factor in reversed(tuple(units.items())):
        if value and not exact % factor:
            return _join(exact / factor, name)
    name, factor = next(iter(units.items()))
    return _join(exact / factor, name)


def _join(number: Decimal, unit: str) -> str:
    text = f"{number:f}"
    text = text.rstrip("0").rstrip(".") if "." in text else text
    return f"{text}%" if unit == "%" else f"{text} {unit}"
