"""Checks of a table's cells for probable mistakes in the file."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Sequence

_SAMPLE = 200
"""Number of leading cells that decide whether a column has numbers or texts."""

_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")

_WRITTEN_NUMBER = re.compile(
    r"""[-+(]?\s*[$€£¥]?\s*            # a sign, a currency
    (\d{1,3}([.,'\u00a0\u202f\ ]\d{3})+|\d+)  # digits, in groups of three or not
    ([.,]\d+)?                         # the fraction
    \s*[%$€£¥]?\)?""",
    re.VERBOSE,
)

_VALUE_SHARE = 1 / 3
"""Share of numbers above which a first line can be data instead of names."""


def find_text_among_numbers(cells: Iterable[str]) -> tuple[int, str] | None:
    """Return the first cell that makes a column of numbers a column of texts.

    The result is the row of the cell, from 1, and its text. The result is None for a column whose
    cells are all numbers, or of whose first cells at most half look like numbers.
    """
    texts = [cell.strip() for cell in cells]
    if not _are_mostly_numbers(texts[:_SAMPLE]):
        return None
    odd = (at for at, text in enumerate(texts) if text and not _NUMBER.fullmatch(text))
    at = next(odd, None)
    return None if at is None else (at + 1, texts[at])


def _are_mostly_numbers(texts: Sequence[str]) -> bool:
    written = [text for text in texts if text]
    numbers = sum(_WRITTEN_NUMBER.fullmatch(text) is not None for text in written)
    return bool(written) and 2 * numbers > len(written)


def find_values_in_header(names: Sequence[str]) -> list[str]:
    """Return the column names that are numbers, if the first line seems to be data.

    The first line seems to be data if more than a third of the names, and at least two, are
    numbers. Evenly spaced whole numbers, such as positions and years, are taken for names.
    """
    numbers = [name for name in names if _NUMBER.fullmatch(name.strip())]
    if len(numbers) <= _VALUE_SHARE * len(names) or len(numbers) < 2:
        return []
    values = [float(name) for name in numbers]
    steps = {after - before for before, after in itertools.pairwise(values)}
    return [] if len(steps) == 1 and all(value.is_integer() for value in values) else numbers
