"""Properties of a table's file that its cells show."""

from __future__ import annotations

import pytest

from onnx_ops.domain.table_cells import find_text_among_numbers, find_values_in_header


@pytest.mark.parametrize(
    ("cells", "cell"),
    [
        (["1", "12 kg", "3"], (2, "12 kg")),
        (["1.5", "", "2", "unknown"], (4, "unknown")),
        (["1,200", "1,300", "7"], (1, "1,200")),
        (["1.200,50", "3,20"], (1, "1.200,50")),
        (["$ 12", "$ 13"], (1, "$ 12")),
        (["12%", "13 %"], (1, "12%")),
        (["1 200", "3 400"], (1, "1 200")),
        (["01234", "99999", "00001"], None),
        (["red", "blue", "3"], None),
        (["2021-01-01", "2021-01-02"], None),
        (["01.02.2021", "03.04.2021"], None),
        (["10:30", "11:20"], None),
        (["192.168.0.1", "10.0.0.7"], None),
        (["", " "], None),
        ([], None),
        (["1st", "2nd", "3rd"], None),
    ],
)
def test_find_text_among_numbers_returns_first_text_cell_of_numeric_column_only(
    cells: list[str], cell: tuple[int, str] | None
) -> None:
    assert find_text_among_numbers(cells) == cell


@pytest.mark.parametrize(
    ("names", "values"),
    [
        (["5.1", "3.5", "1.4", "0.2", "Iris-setosa"], ["5.1", "3.5", "1.4", "0.2"]),
        (["39", "State-gov", "77516", "Bachelors", "13"], ["39", "77516", "13"]),
        (["0", "1", "2", "3"], []),
        (["2019", "2020", "2021", "country"], []),
        (["age", "income", "1"], []),
        (["1", "y"], []),
        ([], []),
    ],
)
def test_find_values_in_header_returns_numbers_of_data_row_and_nothing_of_header(
    names: list[str], values: list[str]
) -> None:
    assert find_values_in_header(names) == values
