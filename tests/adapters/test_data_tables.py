"""Tables in the formats of spreadsheets, pandas, R and databases."""

from __future__ import annotations

import gzip
import subprocess
import sys
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from onnx_ops.adapters.data.file import FileSource
from onnx_ops.domain.pipeline import FileData
from onnx_ops.errors import OnnxOpsError, UserError

pa: Any = pytest.importorskip("pyarrow")
pq: Any = pytest.importorskip("pyarrow.parquet")


def load(
    folder: Path, content: str | bytes, name: str = "rows.csv"
) -> dict[str, tuple[str, list[Any]]]:
    """Return the kind and the values of each column of a file."""
    (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)
    arrays = FileSource().load(FileData(file=name), folder)
    return {column: (array.dtype.kind, array[:, 0].tolist()) for column, array in arrays.items()}


TWO: dict[str, tuple[str, list[Any]]] = {"a": ("i", [1, 2]), "b": ("U", ["x", "y"])}
DECIMAL: dict[str, tuple[str, list[Any]]] = {"a": ("f", [1.5, 2.25]), "b": ("U", ["x", "y"])}


@pytest.mark.parametrize(
    ("content", "name", "columns"),
    [
        pytest.param("a;b\n1;x\n2;y\n", "t.csv", TWO, id="semicolons"),
        pytest.param("a\tb\n1\tx\n2\ty\n", "t.csv", TWO, id="tabs"),
        pytest.param("a\tb\n1\tx\n2\ty\n", "t.TSV", TWO, id="tsv"),
        pytest.param("a|b\n1|x\n2|y\n", "t.csv", TWO, id="bars"),
        pytest.param("a,b\r\n1,x\r\n2,y\r\n", "t.csv", TWO, id="crlf"),
        pytest.param("a,b\r1,x\r2,y\r", "t.csv", TWO, id="cr"),
        pytest.param("\n\na,b\n1,x\n\n2,y\n\n", "t.csv", TWO, id="blank lines"),
        pytest.param("a,b,\n1,x,\n2,y,\n", "t.csv", TWO, id="separator at the end"),
        pytest.param(",a,b\n0,1,x\n1,2,y\n", "t.csv", TWO, id="index of pandas"),
        pytest.param(
            "Unnamed: 0,a,b\n0,1,x\n1,2,y\n", "t.csv", TWO, id="index of pandas, read and written"
        ),
        pytest.param(
            '"","a","b"\n"Mazda",1,"x"\n"Datsun",2,"y"\n', "t.csv", TWO, id="row names of R"
        ),
        pytest.param("a;b\n1,5;x\n2,25;y\n", "t.csv", DECIMAL, id="decimal commas"),
        pytest.param('a,b\n"1,5",x\n"2,25",y\n', "t.csv", DECIMAL, id="decimal commas in quotes"),
        pytest.param(
            "a;b\n1234,5;x\n1,125;y\n",
            "t.csv",
            {"a": ("f", [1234.5, 1.125]), "b": ("U", ["x", "y"])},
            id="decimal commas after four digits",
        ),
        pytest.param("a;b\n1.5;x\n2.25;y\n", "t.csv", DECIMAL, id="semicolons and points"),
        pytest.param("a,b\n1,x\n2,y\n".encode("utf-8-sig"), "t.csv", TWO, id="utf-8 with its mark"),
        pytest.param("a,b\n1,x\n2,y\n".encode("utf-16"), "t.csv", TWO, id="utf-16"),
        pytest.param(
            b"\xfe\xff" + "a;b\n1,5;x\n2,25;y\n".encode("utf-16-be"),
            "t.csv",
            DECIMAL,
            id="utf-16-be",
        ),
        pytest.param(gzip.compress(b"a,b\n1,x\n2,y\n"), "t.csv.gz", TWO, id="gzip"),
        pytest.param('{"a":1,"b":"x"}\n{"a":2,"b":"y"}\n', "t.jsonl", TWO, id="json lines"),
        pytest.param(
            'a,b\n1,"1,500"\n2,"2,250"\n',
            "t.csv",
            {"a": ("i", [1, 2]), "b": ("U", ["1,500", "2,250"])},
            id="thousands",
        ),
        pytest.param(
            'a\n"x\ny"\n"z, w"\n', "t.csv", {"a": ("U", ["x\ny", "z, w"])}, id="one column"
        ),
        pytest.param(
            "a\n01234\n99999\n", "t.csv", {"a": ("U", ["01234", "99999"])}, id="leading zeros"
        ),
        pytest.param(
            "a,b\n7,01\n8,2\n",
            "t.csv",
            {"a": ("i", [7, 8]), "b": ("U", ["01", "2"])},
            id="zeros at the end",
        ),
        pytest.param(
            "a\n2021-01-01\n2021-01-02\n",
            "t.csv",
            {"a": ("U", ["2021-01-01", "2021-01-02"])},
            id="dates",
        ),
        pytest.param(
            '{"a":"2021-01-01"}\n{"a":"2021-01-02"}\n',
            "t.ndjson",
            {"a": ("U", ["2021-01-01", "2021-01-02"])},
            id="dates in JSON",
        ),
        pytest.param(
            f"a\n{(1 << 64) - 1}\n{(1 << 64) - 2}\n",
            "t.csv",
            {"a": ("U", [str((1 << 64) - 1), str((1 << 64) - 2)])},
            id="unsigned identifiers",
        ),
        pytest.param(
            f'{{"a":{(1 << 64) - 1},"b":0.5}}\n{{"a":null,"b":{-(1 << 64)}}}\n',
            "t.jsonl",
            {"a": ("U", [str((1 << 64) - 1), ""]), "b": ("f", [0.5, -(2.0**64)])},
            id="unsigned identifiers in JSON",
        ),
        pytest.param(
            f'{{"a":{(1 << 63) + 1}}}\n{{"a":{1 << 63}.5}}\n',
            "t.jsonl",
            {"a": ("f", [2.0**63, 2.0**63])},
            id="large fractions in JSON",
        ),
        pytest.param(
            f"a\n{(1 << 63) - 1}\n{-(1 << 63)}\n",
            "t.csv",
            {"a": ("i", [(1 << 63) - 1, -(1 << 63)])},
            id="int64",
        ),
        pytest.param(
            "a,b\n9007199254740993,1\n,2\n",
            "t.csv",
            {"a": ("U", ["9007199254740993", ""]), "b": ("i", [1, 2])},
            id="identifiers beside a missing one",
        ),
        pytest.param(
            "a,b\ninf,1\n-inf,2\n",
            "t.csv",
            {"a": ("f", [np.inf, -np.inf]), "b": ("i", [1, 2])},
            id="inf",
        ),
    ],
)
def test_load_table_in_common_format_returns_its_columns(
    tmp_path: Path, content: str | bytes, name: str, columns: dict[str, tuple[str, list[Any]]]
) -> None:
    assert load(tmp_path, content, name) == columns


@pytest.mark.parametrize("mark", ["?", "", " ", "-", "NA", "n/a", "null", "None", "NaN", "#N/A"])
def test_load_number_column_with_marks_of_missing_values_returns_nan(
    tmp_path: Path, mark: str
) -> None:
    columns = load(tmp_path, f"a,b\n1,x\n{mark},{mark}\n3,y\n")
    assert columns["a"][0] == "f"
    np.testing.assert_array_equal(columns["a"][1], [1, np.nan, 3])
    assert columns["b"] == ("U", ["x", mark, "y"])


@pytest.mark.parametrize(
    ("content", "name", "parts"),
    [
        pytest.param(
            "a,b\n1,Köln\n".encode("latin-1"),
            "t.csv",
            ("line 2", "0xF6", "Köln", "iconv"),
            id="latin-1",
        ),
        pytest.param(
            "größe,b\n1,x\n".encode("latin-1"),
            "t.csv",
            ("line 1", "0xF6", "größe", "iconv"),
            id="header",
        ),
        pytest.param(
            gzip.compress(b"a,b\n1,x\n")[:-9], "t.csv.gz", ("ended before",), id="cut gzip"
        ),
        pytest.param(b"a,b\n1,x\n", "t.csv.gz", ("Not a gzipped file",), id="no gzip"),
        pytest.param(
            gzip.compress(b"a,b\n1,x\n", mtime=0),
            "t.csv",
            ("compressed with gzip", "rename it to end in .csv.gz"),
            id="gzip as csv",
        ),
        pytest.param(b"PK\x03\x04" + bytes(100), "t.csv", ("Excel", "save the sheet"), id="xlsx"),
        pytest.param(
            "a,b\n1.5,1\n-1e300,2\n",
            "t.csv",
            ("column 'a'", "row 2", "-1e+300", "float32"),
            id="too large",
        ),
        pytest.param(b"a,b\nx\0y,1\n", "t.csv", ("column 'a'", "null byte"), id="null byte"),
        pytest.param('{"a":{"b":1}}\n', "t.jsonl", ("column 'a'", "struct"), id="nested"),
        pytest.param(
            '[{"a":1}]',
            "t.jsonl",
            ("as a table in JSONL", "one JSON object"),
            id="array of JSON",
        ),
        pytest.param(
            '{"a":1}\n{"a":"x"}\n',
            "t.jsonl",
            ("as a table in JSONL", "row 1"),
            id="JSON of two types",
        ),
    ],
)
def test_load_unreadable_table_raises_user_error_with_cause(
    tmp_path: Path, content: str | bytes, name: str, parts: tuple[str, ...]
) -> None:
    with pytest.raises(UserError) as caught:
        load(tmp_path, content, name)
    assert [part for part in (name, *parts) if part not in str(caught.value)] == []


def test_load_parquet_with_unsigned_identifiers_keeps_their_digits(tmp_path: Path) -> None:
    ids = [(1 << 64) - 1, 5]
    columns = {"id": pa.array(ids, pa.uint64()), "n": pa.array([5, 5], pa.uint64())}
    pq.write_table(pa.table(columns), tmp_path / "t")
    loaded = load(tmp_path, (tmp_path / "t").read_bytes(), "t.parquet")
    assert loaded == {"id": ("U", [str(number) for number in ids]), "n": ("i", [5, 5])}


def test_load_parquet_with_decimals_of_scale_zero_keeps_their_digits(tmp_path: Path) -> None:
    columns = {
        "large": pa.array([Decimal((1 << 64) - 1), Decimal(5)], pa.decimal128(20, 0)),
        "gap": pa.array([Decimal((1 << 53) + 1), None], pa.decimal128(20, 0)),
        "small": pa.array([Decimal((1 << 63) - 1), Decimal(5)], pa.decimal128(20, 0)),
        "price": pa.array([Decimal("1.50"), Decimal(5)], pa.decimal128(20, 2)),
    }
    pq.write_table(pa.table(columns), tmp_path / "t")
    assert load(tmp_path, (tmp_path / "t").read_bytes(), "t.parquet") == {
        "large": ("U", [str((1 << 64) - 1), "5"]),
        "gap": ("U", [str((1 << 53) + 1), ""]),
        "small": ("i", [(1 << 63) - 1, 5]),
        "price": ("f", [1.5, 5]),
    }


def test_load_csv_with_one_long_string_limits_memory(tmp_path: Path) -> None:
    lines = [f"word {row}" for row in range(20_000)]
    lines[7] = "x" * 60_000
    path = tmp_path / "t.csv"
    (tmp_path / "small.csv").write_text("text,y\na,1\n")
    path.write_text("text,y\n" + "".join(f"{line},{row % 2}\n" for row, line in enumerate(lines)))
    program = """
import sys
from pathlib import Path
from onnx_ops.adapters.data.file import FileSource
from onnx_ops.domain.pipeline import FileData
import numpy, pyarrow, pyarrow.compute, pyarrow.csv
def read_peak():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM"))
FileSource().load(FileData(file="small.csv"), Path(sys.argv[1]))  # imports what reading needs
before = read_peak()
arrays = FileSource().load(FileData(file="t.csv"), Path(sys.argv[1]))
print(arrays["text"].dtype, len(arrays["text"][7, 0]), read_peak() - before)
"""  # noqa: E501
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], check=True, capture_output=True, text=True
    )
    dtype, length, kib = done.stdout.split()
    assert (dtype, length) == ("object", "60000")
    assert int(kib) << 10 < 10 * path.stat().st_size + (16 << 20)


def test_load_decompression_bomb_raises_user_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("onnx_ops.adapters.data.tables._MOST_CSV_BYTES", 1 << 20)
    with pytest.raises(UserError, match="a CSV file must be smaller than 2 GiB") as caught:
        load(tmp_path, gzip.compress(b"a\n" + b"1\n" * (1 << 20)), "t.csv.gz")
    assert caught.value.remedy == "Write the table as Parquet."


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    st.lists(
        st.tuples(st.integers(-(10**6), 10**6), st.text("abc ,;|\t\"'éß", min_size=1)),
        min_size=3,
        max_size=20,
    ),
    st.sampled_from([",", ";", "\t", "|"]),
)
def test_load_of_written_csv_returns_same_values(
    tmp_path: Path, rows: list[tuple[int, str]], separator: str
) -> None:
    import csv
    import io

    stream = io.StringIO()
    writer = csv.writer(stream, delimiter=separator, quoting=csv.QUOTE_NONNUMERIC)
    writer.writerow(["number", "text", "third"])
    writer.writerows((number, f"t{text}", "x") for number, text in rows)
    columns = load(tmp_path, stream.getvalue())
    assert columns["number"] == ("i", [number for number, _ in rows])
    assert columns["text"] == ("U", [f"t{text}" for _, text in rows])


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    st.binary(min_size=1, max_size=200),
    st.sampled_from(["t.csv", "t.jsonl", "t.csv.gz", "t.parquet"]),
)
def test_load_random_bytes_raises_only_onnx_ops_errors(
    tmp_path: Path, content: bytes, name: str
) -> None:
    try:
        assert load(tmp_path, content, name)
    except OnnxOpsError:
        return
