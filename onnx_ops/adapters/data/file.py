"""Arrays from a `.npz`, `.csv` or `.parquet` file of the project."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from onnx_ops.adapters.data.table import SUFFIXES, read_table
from onnx_ops.domain.artifact import digest_file
from onnx_ops.domain.pipeline import DataSection, FileData
from onnx_ops.errors import NotFound, Refused, UserError
from onnx_ops.ports.data import Array


class FileSource:
    """`file: PATH`. Nothing is unpickled, and the path stays below the project's root."""

    def fingerprint(self, section: DataSection, root: Path) -> str:
        return digest_file(_path(section, root))

    def load(self, section: DataSection, root: Path) -> Mapping[str, Array]:
        path = _path(section, root)
        return read_arrays(path, where=str(path))


def read_arrays(path: Path, *, where: str, name: str = "") -> Mapping[str, Array]:
    """All arrays of a `.npz` file or columns of a table, of equal length along axis 0; nothing is unpickled.

    Args:
        path: of the file.
        where: its place in messages.
        name: what the file is called where its content came from; else the path tells its kind.

    Raises:
        UserError: it is no such file.
        MissingPackage: what reads tables is not installed.
    """
    suffix = Path(name or path).suffix.lower()
    if suffix in SUFFIXES:
        return read_table(path, suffix, where=where)
    import numpy as np

    try:
        with path.open("rb") as stream:
            archive = np.load(stream, allow_pickle=False)
            if isinstance(archive, np.ndarray):
                raise ValueError("it is a single array")
            arrays = {name: archive[name] for name in archive.files}
            if strange := [name for name, array in arrays.items() if not isinstance(array, np.ndarray)]:
                raise ValueError(f"{strange[0]} in it is no array")
    except Exception as error:  # a damaged archive makes the libraries below raise almost anything
        raise UserError(
            "not an .npz file of plain arrays",
            where=where,
            why=f"{type(error).__name__}: {str(error)[:300]}",
            remedy="Write it with numpy.savez, without arrays of objects; a table must be called .csv or .parquet.",
        ) from error
    lengths = {name: len(array) if array.ndim else 0 for name, array in arrays.items()}
    if len(set(lengths.values())) != 1 or 0 in lengths.values():
        raise UserError(f"its arrays must have the same number of rows, at least one: {lengths}", where=where)
    return arrays


def _path(section: DataSection, root: Path) -> Path:
    if not isinstance(section, FileData):
        raise UserError("this data source reads `file: PATH`", where=type(section).__name__)
    try:
        path = (root / section.file).resolve()
    except (OSError, RuntimeError, ValueError) as error:  # a circle of links, a zero byte
        raise NotFound("no such file", where=section.file, why=str(error)) from error
    if not path.is_relative_to(root.resolve()):
        raise Refused("data must lie below the project's root", where=section.file)
    if not os.path.isfile(path):  # unlike Path.is_file, it takes a name that is too long
        raise NotFound("no such file", where=str(path), remedy="`file:` is relative to the project's root.")
    return path
