"""Columns of CSV and Parquet files as arrays."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from onnx_ops.adapters.data.file import FileSource
from onnx_ops.domain.pipeline import FileData
from onnx_ops.errors import MissingPackageError, UserError
from tests.support.extras import hide

pa: Any = pytest.importorskip("pyarrow")
pq: Any = pytest.importorskip("pyarrow.parquet")

TABLE = "age,income,visits,city,member,day,y\n40.5,1,3,Oslo,true,2024-01-02,a\n,2,4,,false,2024-01-03,b\n"


def test_load_csv_gives_each_column_its_type(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text(TABLE)

    arrays = FileSource().load(FileData(file="rows.csv"), tmp_path)

    assert {name: array.dtype.kind for name, array in arrays.items()} == {
        "age": "f", "income": "i", "visits": "i", "city": "U", "member": "b", "day": "U", "y": "U",
    }  # fmt: skip
    assert {array.shape for array in arrays.values()} == {(2, 1)}
    assert np.isnan(arrays["age"][1, 0])
    assert arrays["city"][1, 0] == ""
    assert arrays["day"][0, 0] == "2024-01-02"


def test_load_parquet_gives_the_same_as_csv(tmp_path: Path) -> None:
    columns = {
        "age": pa.array([40.5, None]),
        "visits": pa.array([3, 4], pa.int16()),
        "city": pa.array(["Oslo", None]).dictionary_encode(),
        "seen": pa.array([True, None]),
    }
    pq.write_table(pa.table(columns), tmp_path / "rows.parquet")

    arrays = FileSource().load(FileData(file="rows.parquet"), tmp_path)

    assert arrays["visits"].dtype == np.int64
    assert arrays["city"].tolist() == [["Oslo"], [""]]
    np.testing.assert_array_equal(arrays["seen"], np.array([[1], [np.nan]], np.float32))


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("a,b\n1,2\n3\n", "Expected 2 columns, got 1"),
        ("a,a\n1,2\n", "repeats the column 'a'"),
        ("a,\n1,2\n", "column 2 of the table has no name"),
        ("a,b\n", "no rows"),
        ("", "the file is empty"),
    ],
)
def test_load_broken_csv_is_refused_with_its_place(tmp_path: Path, text: str, part: str) -> None:
    (tmp_path / "rows.csv").write_text(text)

    with pytest.raises(UserError) as caught:
        FileSource().load(FileData(file="rows.csv"), tmp_path)

    assert part in str(caught.value)
    assert "rows.csv" in str(caught.value)


def test_load_csv_without_its_reader_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "rows.csv").write_text(TABLE)
    hide(monkeypatch, "pyarrow")

    with pytest.raises(MissingPackageError) as caught:
        FileSource().load(FileData(file="rows.csv"), tmp_path)

    assert caught.value.remedy == "Install it with: pip install 'onnx-ops[tables]'"


@pytest.mark.parametrize("name", ["rows.npz", "rows.csv", "rows.parquet"])
def test_sample_of_a_large_file_is_its_first_rows(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = 50_000
    arrays: dict[str, Any] = {"x": np.arange(rows, dtype=np.float32), "y": np.arange(rows) % 3}
    path = tmp_path / name
    if name.endswith(".npz"):
        np.savez_compressed(path, **arrays)
    elif name.endswith(".csv"):
        path.write_text("x,y\n" + "".join(f"{x},{y}\n" for x, y in zip(arrays["x"], arrays["y"], strict=True)))
    else:
        pq.write_table(pa.table(arrays), path)
    section = FileData(file=name)
    whole = FileSource().sample(section, tmp_path)
    monkeypatch.setattr("onnx_ops.adapters.data.file._SMALL_BYTES", 0)
    monkeypatch.setattr("onnx_ops.adapters.data.file._HEAD_BYTES", 1 << 16)
    part = FileSource().sample(section, tmp_path)
    assert (whole.whole, part.whole) == (True, False)
    for key, array in FileSource().load(section, tmp_path).items():
        head = part.arrays[key]
        assert 0 < len(head) < rows
        assert head.dtype == array.dtype
        assert np.array_equal(head, array[: len(head)])
        assert np.array_equal(whole.arrays[key], array)
