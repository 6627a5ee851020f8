"""Data from files of the project and from scikit-learn."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from onnx_ops.adapters.data.file import FileSource, read_arrays
from onnx_ops.adapters.data.sklearn import SklearnSource
from onnx_ops.domain.pipeline import FileData, SklearnData
from onnx_ops.errors import (
    MissingPackageError,
    NotFoundError,
    OnnxOpsError,
    RefusedError,
    UserError,
)
from onnx_ops.ports.data import Sample
from onnx_ops.testing.data import DataSourceSuite
from tests.support.extras import hide
from tests.support.fixtures import fixed

FILE = FileData(file="data/set.npz", inputs={"x": "rows"}, label="target")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "project"
    (root / "data").mkdir(parents=True)
    np.savez(
        root / FILE.file, rows=np.arange(12, dtype=np.float32).reshape(4, 3), target=np.arange(4)
    )
    return root


class TestFile(DataSourceSuite):
    source = fixed(FileSource())
    section = fixed(FILE)


class TestSklearn(DataSourceSuite):
    source = fixed(SklearnSource())
    section = fixed(SklearnData(sklearn="iris", split="test"))


def test_file_fingerprint_of_changed_content_differs(root: Path) -> None:
    before = FileSource().fingerprint(FILE, root)
    content = (root / FILE.file).read_bytes()
    (root / FILE.file).write_bytes(content)
    assert FileSource().fingerprint(FILE, root) == before
    np.savez(root / FILE.file, rows=np.zeros((4, 3), np.float32), target=np.arange(4))
    assert FileSource().fingerprint(FILE, root) != before


def test_file_fingerprint_of_folder_or_missing_file_raises_not_found_error(root: Path) -> None:
    for file in ("data/none.npz", "data"):
        with pytest.raises(NotFoundError):
            FileSource().fingerprint(replace(FILE, file=file), root)


def test_load_npz_with_pickle_raises_user_error_without_unpickling(
    root: Path, tmp_path: Path
) -> None:
    witness = tmp_path / "witness"

    class Payload:
        def __reduce__(self) -> tuple[object, ...]:
            return Path.touch, (witness,)

    np.savez(root / FILE.file, rows=np.array([Payload()], dtype=object), allow_pickle=True)
    with pytest.raises(UserError, match="plain arrays"):
        FileSource().load(FILE, root)
    assert not witness.exists()


@pytest.mark.parametrize(
    "arrays", [{"a": np.zeros((3, 0))}, {"a": np.zeros(3), "b": np.zeros((0, 3))}, {}]
)
def test_load_npz_with_empty_array_or_without_arrays_raises_user_error(
    arrays: dict[str, Any], root: Path
) -> None:
    np.savez(root / FILE.file, **arrays)
    with pytest.raises(UserError, match=r"is empty|no array") as caught:
        FileSource().load(FILE, root)
    assert caught.value.remedy


def test_npz_sample_with_rows_on_other_axis_cuts_that_axis(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arrays = {
        "input": np.arange(1200.0).reshape(400, 3),
        "state": np.arange(1600.0).reshape(2, 400, 2),
        "label": np.arange(400),
        "rate": np.array(16000),
    }
    np.savez(root / FILE.file, allow_pickle=False, **arrays)
    monkeypatch.setattr("onnx_ops.adapters.data.file._SMALL_BYTES", 0)
    monkeypatch.setattr("onnx_ops.adapters.data.file._HEAD_BYTES", 64 * 50)
    part = read_sample(FILE, root).arrays
    assert {name: array.shape for name, array in part.items()} == {
        "input": (50, 3),
        "state": (2, 50, 2),
        "label": (50,),
        "rate": (),
    }
    np.testing.assert_array_equal(part["state"], arrays["state"][:, :50])


def test_load_npy_file_returns_its_array_under_name_of_file(tmp_path: Path) -> None:
    np.save(tmp_path / "rows.npy", np.arange(6.0).reshape(3, 2))
    (name, array), *others = FileSource().load(section("rows.npy"), tmp_path).items()
    assert (name, others) == ("rows", [])
    np.testing.assert_array_equal(array, np.arange(6.0).reshape(3, 2))


def test_load_npy_file_with_objects_raises_user_error_with_supported_format(tmp_path: Path) -> None:
    np.save(tmp_path / "objects.npy", np.array([{}]), allow_pickle=True)
    with pytest.raises(UserError, match=r"\.npz"):
        FileSource().load(section("objects.npy"), tmp_path)


@settings(
    max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_load_damaged_npz_raises_only_onnx_ops_errors(root: Path, data: st.DataObject) -> None:
    path = root / FILE.file
    np.savez_compressed(
        path, rows=np.arange(12, dtype=np.float32).reshape(4, 3), target=np.arange(4)
    )
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(bytes(content[: data.draw(st.integers(0, len(content)))]))
    try:
        arrays = FileSource().load(FILE, root)
    except OnnxOpsError:
        return
    assert len({len(array) for array in arrays.values()}) == 1


def test_sklearn_split_with_seed_is_stratified_and_complete() -> None:
    source, root = SklearnSource(), Path()
    whole = source.load(SklearnData(sklearn="digits"), root)
    sides = [
        source.load(SklearnData(sklearn="digits", split=side, seed=3), root)
        for side in ("train", "test")
    ]
    joined = np.concatenate([side["data"] for side in sides])
    assert sorted(map(bytes, joined)) == sorted(map(bytes, whole["data"]))
    counts = [np.bincount(side["target"]) for side in sides]
    assert np.abs(counts[0] - counts[1]).max() <= 1
    other = source.load(SklearnData(sklearn="digits", split="test", seed=4), root)
    assert not np.array_equal(other["data"], sides[1]["data"])


def test_load_sklearn_data_set_returns_typed_and_scaled_arrays() -> None:
    arrays = SklearnSource().load(SklearnData(sklearn="digits"), Path())
    assert {name: (array.dtype, array.shape) for name, array in arrays.items()} == {
        "data": (np.dtype("float32"), (1797, 64)),
        "images": (np.dtype("float32"), (1797, 1, 8, 8)),
        "target": (np.dtype("int64"), (1797,)),
    }
    np.testing.assert_array_equal(arrays["images"].reshape(-1, 64) * 16, arrays["data"])
    assert (
        SklearnSource().load(SklearnData(sklearn="diabetes", split="test"), Path())["target"].dtype
        == np.float32
    )


def test_sklearn_fingerprint_depends_on_name_and_split_without_importing_sklearn() -> None:
    base = SklearnData(sklearn="digits", split="test")
    variants = (
        base,
        replace(base, split="train"),
        replace(base, seed=1),
        replace(base, test_size=0.25),
        replace(base, sklearn="iris"),
    )
    assert len({SklearnSource().fingerprint(section, Path()) for section in variants}) == len(
        variants
    )
    code = """
import json, sys
from pathlib import Path
from typing import Any
from onnx_ops.adapters.data.sklearn import SklearnSource
from onnx_ops.domain.pipeline import SklearnData
SklearnSource().fingerprint(SklearnData(sklearn="digits"), Path())
print(json.dumps(sorted(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert not {"sklearn", "numpy", "scipy"} & set(json.loads(done.stdout))


@pytest.mark.parametrize("name", ["digits", "iris", "wine", "breast_cancer", "diabetes"])
def test_sample_of_sklearn_data_set_has_its_types_widths_and_classes(
    tmp_path: Path, name: Any
) -> None:
    section = SklearnData(sklearn=name)
    sample, whole = (
        SklearnSource().sample(section, tmp_path).arrays,
        SklearnSource().load(section, tmp_path),
    )
    assert {key: (array.dtype, array.shape[1:]) for key, array in sample.items()} == {
        key: (array.dtype, array.shape[1:]) for key, array in whole.items()
    }
    if whole["target"].dtype.kind == "i":
        assert np.array_equal(np.unique(sample["target"]), np.unique(whole["target"]))


pa: Any = pytest.importorskip("pyarrow")
pq: Any = pytest.importorskip("pyarrow.parquet")

TABLE = (
    "age,income,visits,city,member,day,y\n"
    "40.5,1,3,Oslo,true,2024-01-02,a\n"
    ",2,4,,false,2024-01-03,b\n"
)


def test_load_csv_with_mixed_columns_infers_types_and_returns_dates_as_strings(
    tmp_path: Path,
) -> None:
    (tmp_path / "rows.csv").write_text(TABLE)
    arrays = FileSource().load(FileData(file="rows.csv"), tmp_path)
    assert {name: array.dtype.kind for name, array in arrays.items()} == {
        "age": "f", "income": "i", "visits": "i", "city": "U", "member": "b", "day": "U", "y": "U",
    }  # fmt: skip
    assert {array.shape for array in arrays.values()} == {(2, 1)}
    assert np.isnan(arrays["age"][1, 0])
    assert arrays["city"][1, 0] == ""
    assert arrays["day"][0, 0] == "2024-01-02"


def test_load_parquet_with_typed_columns_returns_float32_int64_or_string_arrays(
    tmp_path: Path,
) -> None:
    columns = {
        "age": pa.array([40.5, None]),
        "visits": pa.array([3, 4], pa.int16()),
        "city": pa.array(["Oslo", None]).dictionary_encode(),
        "seen": pa.array([True, None]),
    }
    pq.write_table(pa.table(columns), tmp_path / "rows.parquet")
    arrays = FileSource().load(FileData(file="rows.parquet"), tmp_path)
    assert arrays["age"].dtype == np.float32
    assert arrays["visits"].dtype == np.int64
    assert arrays["city"].tolist() == [["Oslo"], [""]]
    np.testing.assert_array_equal(arrays["seen"], np.array([[1], [np.nan]], np.float32))


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("a,b\n1,2\n3\n", "Expected 2 columns, got 1"),
        ("a,a\n1,2\n", "repeats the column 'a'"),
        ("a,a\n01,1\n", "repeats the column 'a'"),
        ("a,\n1,2\n", "column 2 has no name"),
        (",a,\n0,1,2\n", "column 3 has no name"),
        ("a,,b,,c\n0,1,2,3,4\n", "column 2 has no name"),
        ("a,b\n", "no rows"),
        ("", "the file is empty"),
    ],
)
def test_load_malformed_csv_raises_user_error_with_cause(
    tmp_path: Path, text: str, part: str
) -> None:
    (tmp_path / "rows.csv").write_text(text)
    with pytest.raises(UserError) as caught:
        FileSource().load(FileData(file="rows.csv"), tmp_path)
    assert part in str(caught.value)
    assert "rows.csv" in str(caught.value)


def test_load_csv_without_pyarrow_raises_missing_package_error_with_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "rows.csv").write_text(TABLE)
    hide(monkeypatch, "pyarrow")
    with pytest.raises(MissingPackageError) as caught:
        FileSource().load(FileData(file="rows.csv"), tmp_path)
    assert caught.value.remedy == "Install it with: pip install 'onnx-ops[tables]'"


@pytest.mark.parametrize("name", ["rows.npz", "rows.npy", "rows.csv", "rows.parquet"])
def test_file_sample_of_large_file_returns_its_first_rows(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = 50_000
    arrays: dict[str, Any] = {"x": np.arange(rows, dtype=np.float32), "y": np.arange(rows) % 3}
    path = tmp_path / name
    if name.endswith(".npz"):
        np.savez_compressed(path, **arrays)
    elif name.endswith(".npy"):
        np.save(path, arrays["x"])
    elif name.endswith(".csv"):
        path.write_text(
            "x,y\n" + "".join(f"{x},{y}\n" for x, y in zip(arrays["x"], arrays["y"], strict=True))
        )
    else:
        pq.write_table(pa.table(arrays), path)
    section = FileData(file=name)
    whole = read_sample(section, tmp_path)
    monkeypatch.setattr("onnx_ops.adapters.data.file._SMALL_BYTES", 0)
    monkeypatch.setattr("onnx_ops.adapters.data.file._HEAD_BYTES", 1 << 16)
    part = read_sample(section, tmp_path)
    assert (whole.whole, part.whole) == (True, False)
    for key, array in FileSource().load(section, tmp_path).items():
        head = part.arrays[key]
        assert 0 < len(head) < rows
        assert head.dtype == array.dtype
        assert np.array_equal(head, array[: len(head)])
        assert np.array_equal(whole.arrays[key], array)


def read_sample(section: FileData, root: Path) -> Sample:
    sample = FileSource().sample(section, root)
    assert sample is not None
    return sample


def section(file: str) -> FileData:
    return FileData(file=file, inputs={"x": "x"})


def archive(path: Path, *, compression: int = zipfile.ZIP_DEFLATED) -> bytes:
    stream = io.BytesIO()
    np.save(stream, np.arange(4000, dtype=np.float32))
    with zipfile.ZipFile(path, "w", compression) as file:
        file.writestr("x.npy", stream.getvalue())
    return path.read_bytes()


def test_load_npz_with_damaged_compression_raises_user_error(tmp_path: Path) -> None:
    data = bytearray(archive(tmp_path / "d.npz"))
    data[60:90] = bytes(30)
    (tmp_path / "d.npz").write_bytes(data)
    with pytest.raises(UserError, match="plain arrays"):
        FileSource().load(section("d.npz"), tmp_path)


def test_load_npz_with_encrypted_member_raises_user_error(tmp_path: Path) -> None:
    data = bytearray(archive(tmp_path / "d.npz", compression=zipfile.ZIP_STORED))
    data[6] |= 1
    data[data.index(b"PK\x01\x02") + 8] |= 1
    (tmp_path / "d.npz").write_bytes(data)
    with pytest.raises(UserError, match=r"plain arrays.*encrypted"):
        FileSource().load(section("d.npz"), tmp_path)


def test_load_npz_with_non_array_member_raises_user_error(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "d.npz", "w") as file:
        file.writestr("notes.txt", "hello")
    with pytest.raises(UserError, match=r"the entry notes\.txt of the archive is not an array"):
        FileSource().load(section("d.npz"), tmp_path)


def test_file_fingerprint_with_unusable_path_raises_not_found_or_refused_error(
    tmp_path: Path,
) -> None:
    (tmp_path / "circle.npz").symlink_to(tmp_path / "circle.npz")
    for file in ("circle.npz", "zero\0byte.npz", "long" * 2000):
        with pytest.raises((NotFoundError, RefusedError)):
            FileSource().fingerprint(section(file), tmp_path)


def test_load_missing_file_beside_dvc_pointer_suggests_pull_of_its_path(tmp_path: Path) -> None:
    pointer = tmp_path / "data sets/a.npz.dvc"
    pointer.parent.mkdir()
    pointer.touch()
    with pytest.raises(NotFoundError) as caught:
        FileSource().load(section("data sets/a.npz"), tmp_path)
    assert f"`dvc pull '{pointer}'`" in caught.value.remedy


def test_load_git_lfs_pointer_suggests_install_and_pull_or_address_of_content(
    tmp_path: Path,
) -> None:
    (tmp_path / "d.npz").write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(UserError, match="pointer of Git LFS") as caught:
        FileSource().load(section("d.npz"), tmp_path)
    assert caught.value.remedy == "Run `git lfs install`, then `git lfs pull`."
    with pytest.raises(UserError, match="pointer of Git LFS") as caught:
        read_arrays(tmp_path / "d.npz", where="https://example.org/d.npz#sha256=00")
    assert "Pin the address of the content" in caught.value.remedy


def test_load_sklearn_split_without_row_of_each_class_raises_user_error(tmp_path: Path) -> None:
    wanted = SklearnData(sklearn="iris", split="test", test_size=0.01)
    with pytest.raises(UserError, match=r"iris cannot be split with test_size 0\.01"):
        SklearnSource().load(wanted, tmp_path)
