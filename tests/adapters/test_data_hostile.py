"""Data files made to mislead, and splits that cannot be."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path

import numpy as np
import pytest

from onnx_ops.adapters.data.file import FileSource
from onnx_ops.adapters.data.sklearn import SklearnSource
from onnx_ops.domain.pipeline import FileData, SklearnData
from onnx_ops.errors import NotFoundError, RefusedError, UserError


def section(file: str) -> FileData:
    return FileData(file=file, inputs={"x": "x"})


def archive(path: Path, *, compression: int = zipfile.ZIP_DEFLATED) -> bytes:
    stream = io.BytesIO()
    np.save(stream, np.arange(4000, dtype=np.float32))
    with zipfile.ZipFile(path, "w", compression) as file:
        file.writestr("x.npy", stream.getvalue())
    return path.read_bytes()


def test_damaged_compression_is_told(tmp_path: Path) -> None:
    data = bytearray(archive(tmp_path / "d.npz"))
    data[60:90] = bytes(30)
    (tmp_path / "d.npz").write_bytes(data)
    with pytest.raises(UserError, match="plain arrays"):
        FileSource().load(section("d.npz"), tmp_path)


def test_an_encrypted_member_is_told(tmp_path: Path) -> None:
    data = bytearray(archive(tmp_path / "d.npz", compression=zipfile.ZIP_STORED))
    data[6] |= 1
    data[data.index(b"PK\x01\x02") + 8] |= 1
    (tmp_path / "d.npz").write_bytes(data)
    with pytest.raises(UserError, match=r"plain arrays.*encrypted"):
        FileSource().load(section("d.npz"), tmp_path)


def test_a_member_that_is_no_array_is_told(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "d.npz", "w") as file:
        file.writestr("notes.txt", "hello")
    with pytest.raises(UserError, match=r"notes\.txt in it is no array"):
        FileSource().load(section("d.npz"), tmp_path)


def test_paths_that_lead_nowhere_or_in_circles_are_told(tmp_path: Path) -> None:
    (tmp_path / "circle.npz").symlink_to(tmp_path / "circle.npz")
    for file in ("circle.npz", "zero\0byte.npz", "long" * 2000):
        with pytest.raises((NotFoundError, RefusedError)):
            FileSource().fingerprint(section(file), tmp_path)


def test_a_split_without_rows_of_every_class_is_told(tmp_path: Path) -> None:
    wanted = SklearnData(sklearn="iris", split="test", test_size=0.01)
    with pytest.raises(UserError, match=r"iris cannot be split at 0\.01"):
        SklearnSource().load(wanted, tmp_path)
