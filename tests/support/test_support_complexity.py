"""The complexity check of the lint step.

The tests cover the counts, the problems, and what `--lower` writes.
"""

from __future__ import annotations

import pytest

from tests.support.complexity import (
    LIMIT,
    MAX_EXEMPTIONS,
    find_problems,
    lower_entries,
    measure_text,
)

SOURCE = """
def pick(values, limit):
    chosen = [value for value in values if value and value < limit or limit is None]
    return chosen if chosen else None

class Reader:
    def read(self):
        def parse(line):
            return line or None
        return [parse(line) for line in self]
"""


def test_measure_text_counts_branching_expressions() -> None:
    # The complexity of `pick` is 1 + comprehension + its `if` + `and` + `or` + ternary. A closure
    # has a separate value.
    assert measure_text(SOURCE) == {"pick": 6, "Reader.read": 2, "Reader.read.parse": 2}


@pytest.mark.parametrize(
    ("measured", "to_split", "exempt", "problem"),
    [
        ({"f": LIMIT + 1}, {}, {}, "above"),
        ({"f": 21}, {"f": 20}, {}, "rose from 20 to 21"),
        ({"f": 21}, {}, {"f": 20}, "rose from 20 to 21"),
        ({"f": 19}, {"f": 20}, {}, "fell from 20 to 19"),
        ({"f": LIMIT}, {"f": 20}, {}, "stale entry"),
        ({}, {"f": 20}, {}, "stale entry"),
        ({"f": 20}, {"f": 20}, {"f": 20}, "both"),
        (
            dict.fromkeys("abcdefghijklmnop", 20),
            {},
            dict.fromkeys("abcdefghijklmnop", 20),
            f"at most {MAX_EXEMPTIONS}",
        ),
    ],
)
def test_find_problems_with_wrong_table_returns_one_problem(
    measured: dict[str, int], to_split: dict[str, int], exempt: dict[str, int], problem: str
) -> None:
    (only,) = find_problems(measured, to_split, exempt)
    assert problem in only


def test_find_problems_with_entries_equal_to_measurement_returns_none() -> None:
    assert find_problems({"f": 20, "g": 30, "h": LIMIT}, {"f": 20}, {"g": 30}) == []


def test_lower_entries_lowers_or_removes_reduced_entries_only() -> None:
    table = (
        '# why\n[to_split]\n"a.py: gone" = 20\n"a.py: same" = 20\n"a.py: '
        'rose" = 20\n"a.py: fell" = 20\n'
        '[exempt]\n"b.py: fell" = {complexity = 20, reason = "a match over 16 kinds"}\n'
    )
    measured = {
        "a.py: gone": LIMIT,
        "a.py: same": 20,
        "a.py: rose": 21,
        "a.py: fell": 18,
        "b.py: fell": 17,
    }
    assert lower_entries(table, measured) == (
        '# why\n[to_split]\n"a.py: same" = 20\n"a.py: rose" = 20\n"a.py: fell" = 18\n'
        '[exempt]\n"b.py: fell" = {complexity = 17, reason = "a match over 16 kinds"}\n'
    )
