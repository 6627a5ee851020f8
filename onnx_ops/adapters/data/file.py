"""Arrays from a `.npz` file of the project."""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path

from onnx_ops.domain.artifact import digest_file
from onnx_ops.domain.pipeline import DataSection, FileData
from onnx_ops.errors import NotFound, Refused, UserError
from onnx_ops.ports.models import Array

_UNREADABLE = (ValueError, TypeError, OSError, EOFError, RuntimeError, zipfile.BadZipFile, zlib.error)
"""What a file that is no archive of arrays, or a damaged, encrypted or hostile one, lets numpy raise."""


class FileSource:
    """`file: PATH`. Nothing is unpickled, and the path stays below the project's root."""

    def fingerprint(self, section: DataSection, root: Path) -> str:
        return digest_file(_path(section, root))

    def load(self, section: DataSection, root: Path) -> Mapping[str, Array]:
        import numpy as np

        path = _path(section, root)
        try:
            with np.load(path, allow_pickle=False) as archive:
                arrays = {name: np.asarray(archive[name]) for name in archive.files}
        except _UNREADABLE as error:
            raise UserError(
                "not an .npz file of plain arrays",
                where=str(path),
                why=str(error),
                remedy="Write it with numpy.savez; arrays of objects are refused, since reading them runs code.",
            ) from error
        if strange := [name for name, array in arrays.items() if array.dtype.kind == "S" and not array.ndim]:
            raise UserError(f"{strange[0]} in it is no array", where=str(path))
        lengths = {name: len(array) if array.ndim else 0 for name, array in arrays.items()}
        if not arrays or len(set(lengths.values())) != 1:
            raise UserError(f"its arrays must have the same number of rows: {lengths}", where=str(path))
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
    if not path.is_file():
        raise NotFound("no such file", where=str(path), remedy="`file:` is relative to the project's root.")
    return path
