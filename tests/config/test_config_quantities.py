from __future__ import annotations

import re
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onnx_ops.config.quantities import SCALES, format_quantity, parse_quantity


@pytest.mark.parametrize(
    ("written", "unit", "value"),
    [
        ("5 ms", "s", 0.005),
        ("5ms", "s", 0.005),
        ("30 s", "s", 30.0),
        ("24h", "s", 86400.0),
        ("2 min", "s", 120.0),
        ("7d", "s", 604800.0),
        ("100us", "s", 0.0001),
        ("1.5 h", "s", 5400.0),
        ("5%", "1", 0.05),
        ("0.5%", "1", 0.005),
        ("100%", "1", 1.0),
        ("2 MB", "B", 2_000_000),
        ("2 MiB", "B", 2_097_152),
        ("500 kB", "B", 500_000),
        ("1.5 kB", "B", 1500),
    ],
)
def test_parse_quantity_with_unit_returns_value(written: str, unit: str, value: float) -> None:
    parsed = parse_quantity(written, unit)
    assert parsed == value
    assert type(parsed) is type(value)
    assert re.search(SCALES[unit].pattern, written)


@pytest.mark.parametrize(
    ("written", "unit", "message"),
    [
        (30, "s", "expected a duration, got the number 30; write it with a unit, e.g. 5 ms"),
        (0, "s", "expected a duration, got the number 0; write it with a unit, e.g. 5 ms"),
        (0.05, "1", "expected a percentage, got the number 0.05; write it with a unit, e.g. 5%"),
        (0, "B", "expected a size, got the number 0; write it with a unit, e.g. 2 MB"),
        ("30", "s", "expected a duration, got the string '30'; write it with a unit, e.g. 5 ms"),
        ("soon", "s", "expected a duration, e.g. 5 ms, got the string 'soon'"),
        (True, "s", "expected a duration, e.g. 5 ms, got true"),
        (None, "1", "expected a percentage, e.g. 5%, got nothing"),
        ([1], "B", "expected a size, e.g. 2 MB, got a list"),
        ("5 MS", "s", "unknown unit 'MS' in '5 MS'; did you mean 'ms'?"),
        ("20m", "s", "unknown unit 'm' in '20m'; did you mean 'min'?"),
        (
            "5 weeks",
            "s",
            "unknown unit 'weeks' in '5 weeks'; write one of us, ms, s, min, h, d, e.g. 5 ms",
        ),
        ("2 Mb", "B", "unknown unit 'Mb' in '2 Mb'; did you mean 'MB'?"),
        ("0.5 B", "B", "'0.5 B' is not a whole number of bytes"),
        ("1e9 GB", "B", "expected a size, e.g. 2 MB, got the string '1e9 GB'"),
        ("1h30min", "s", "expected a duration, e.g. 5 ms, got the string '1h30min'"),
        ("9" * 50 + " s", "s", f"expected a duration, e.g. 5 ms, got the string '{'9' * 50} s'"),
    ],
)
def test_parse_quantity_of_wrong_value_raises_value_error(
    written: object, unit: str, message: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(message) + "$"):
        parse_quantity(written, unit)


@pytest.mark.parametrize(
    ("unit", "values"),
    [
        ("s", st.decimals(min_value=0, max_value=10**9, places=6).map(float)),
        ("B", st.integers(0, 10**15)),
        ("1", st.integers(0, 10**6).map(lambda hundredths: float(Decimal(hundredths) / 10_000))),
    ],
)
@given(data=st.data())
def test_parse_quantity_of_formatted_value_returns_it(
    unit: str, values: st.SearchStrategy[float], data: st.DataObject
) -> None:
    value = data.draw(values)
    assert parse_quantity(format_quantity(value, unit), unit) == value


@given(st.sampled_from(sorted(SCALES)), st.integers(0, 10**6), st.data())
def test_parse_quantity_of_each_unit_multiplies_exactly(
    base: str, count: int, data: st.DataObject
) -> None:
    unit, factor = data.draw(st.sampled_from(sorted(SCALES[base].units.items())))
    assert parse_quantity(f"{count} {unit}", base) == float(count * factor)


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (0.005, "s", "5 ms"),
        (86400.0, "s", "1 d"),
        (0.0, "s", "0 s"),
        (0.5, "1", "50%"),
        (2_000_000, "B", "2 MB"),
    ],
)
def test_format_quantity_uses_readable_unit(value: float, unit: str, text: str) -> None:
    assert format_quantity(value, unit) == text
