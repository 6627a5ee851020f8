"""Data from files of the project and from scikit-learn."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from onnx_ops.adapters.data.file import FileSource
from onnx_ops.adapters.data.sklearn import SklearnSource
from onnx_ops.domain.pipeline import DataSection, FileData, SklearnData
from onnx_ops.errors import NotFoundError, OnnxOpsError, RefusedError, UserError
from onnx_ops.testing.data import DataSourceSuite

FILE = FileData(file="data/set.npz", inputs={"x": "rows"}, label="target")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "project"
    (root / "data").mkdir(parents=True)
    np.savez(root / FILE.file, rows=np.arange(12, dtype=np.float32).reshape(4, 3), target=np.arange(4))
    return root


class TestFile(DataSourceSuite):
    @pytest.fixture
    def source(self) -> FileSource:
        return FileSource()

    @pytest.fixture
    def section(self) -> DataSection:
        return FILE


class TestSklearn(DataSourceSuite):
    @pytest.fixture
    def source(self) -> SklearnSource:
        return SklearnSource()

    @pytest.fixture
    def section(self) -> DataSection:
        return SklearnData(sklearn="iris", split="test")


def test_a_file_is_known_by_its_content(root: Path) -> None:
    before = FileSource().fingerprint(FILE, root)
    content = (root / FILE.file).read_bytes()
    (root / FILE.file).write_bytes(content)
    assert FileSource().fingerprint(FILE, root) == before
    np.savez(root / FILE.file, rows=np.zeros((4, 3), np.float32), target=np.arange(4))
    assert FileSource().fingerprint(FILE, root) != before


@pytest.mark.parametrize("file", ["../outside.npz", "data/../../outside.npz", "link.npz"])
def test_a_path_outside_the_project_is_refused(root: Path, file: str) -> None:
    np.savez(root.parent / "outside.npz", rows=np.zeros(1))
    (root / "link.npz").symlink_to(root.parent / "outside.npz")
    for section in (replace(FILE, file=file), replace(FILE, file=str(root.parent / "outside.npz"))):
        with pytest.raises(RefusedError):
            FileSource().load(section, root)
        with pytest.raises(RefusedError):
            FileSource().fingerprint(section, root)


def test_a_missing_file_is_told(root: Path) -> None:
    for file in ("data/none.npz", "data"):
        with pytest.raises(NotFoundError):
            FileSource().fingerprint(replace(FILE, file=file), root)


def test_pickles_are_never_read(root: Path, tmp_path: Path) -> None:
    witness = tmp_path / "witness"

    class Payload:
        def __reduce__(self) -> tuple[object, ...]:
            return Path.touch, (witness,)

    np.savez(root / FILE.file, rows=np.array([Payload()], dtype=object), allow_pickle=True)
    with pytest.raises(UserError, match="plain arrays"):
        FileSource().load(FILE, root)
    assert not witness.exists()


def test_arrays_must_have_the_same_rows(root: Path) -> None:
    for arrays in ({"a": np.zeros(3), "b": np.zeros(4)}, {"a": np.float32(1)}, {}):
        np.savez(root / FILE.file, **arrays)
        with pytest.raises(UserError, match="rows"):
            FileSource().load(FILE, root)


def test_a_single_array_is_no_archive(root: Path) -> None:
    with (root / FILE.file).open("wb") as stream:
        np.save(stream, np.zeros(3))
    with pytest.raises(UserError, match=r"\.npz"):
        FileSource().load(FILE, root)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_damaged_file_never_gives_a_traceback(root: Path, data: st.DataObject) -> None:
    path = root / FILE.file
    np.savez_compressed(path, rows=np.arange(12, dtype=np.float32).reshape(4, 3), target=np.arange(4))
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(bytes(content[: data.draw(st.integers(0, len(content)))]))
    try:
        arrays = FileSource().load(FILE, root)
    except OnnxOpsError:
        return
    assert len({len(array) for array in arrays.values()}) == 1


def test_the_two_sides_of_a_split_make_the_whole_and_are_stratified() -> None:
    source, root = SklearnSource(), Path()
    whole = source.load(SklearnData(sklearn="digits"), root)
    sides = [source.load(SklearnData(sklearn="digits", split=side, seed=3), root) for side in ("train", "test")]
    joined = np.concatenate([side["data"] for side in sides])
    assert sorted(map(bytes, joined)) == sorted(map(bytes, whole["data"]))
    counts = [np.bincount(side["target"]) for side in sides]
    assert np.abs(counts[0] - counts[1]).max() <= 1
    other = source.load(SklearnData(sklearn="digits", split="test", seed=4), root)
    assert not np.array_equal(other["data"], sides[1]["data"])


def test_types_shapes_and_scale_of_the_digits() -> None:
    arrays = SklearnSource().load(SklearnData(sklearn="digits"), Path())
    assert {name: (array.dtype, array.shape) for name, array in arrays.items()} == {
        "data": (np.dtype("float32"), (1797, 64)),
        "images": (np.dtype("float32"), (1797, 1, 8, 8)),
        "target": (np.dtype("int64"), (1797,)),
    }
    np.testing.assert_array_equal(arrays["images"].reshape(-1, 64) * 16, arrays["data"])
    assert SklearnSource().load(SklearnData(sklearn="diabetes", split="test"), Path())["target"].dtype == np.float32


def test_a_fingerprint_names_everything_that_shapes_the_set_and_imports_nothing() -> None:
    base = SklearnData(sklearn="digits", split="test")
    variants = (
        base,
        replace(base, split="train"),
        replace(base, seed=1),
        replace(base, test_size=0.25),
        replace(base, sklearn="iris"),
    )
    assert len({SklearnSource().fingerprint(section, Path()) for section in variants}) == len(variants)
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
def test_sample_of_a_data_set_of_scikit_learn_has_its_types_and_widths(tmp_path: Path, name: Any) -> None:
    section = SklearnData(sklearn=name)
    sample, whole = SklearnSource().sample(section, tmp_path).arrays, SklearnSource().load(section, tmp_path)
    assert {key: (array.dtype, array.shape[1:]) for key, array in sample.items()} == {
        key: (array.dtype, array.shape[1:]) for key, array in whole.items()
    }
    if whole["target"].dtype.kind == "i":
        assert np.array_equal(np.unique(sample["target"]), np.unique(whole["target"]))
