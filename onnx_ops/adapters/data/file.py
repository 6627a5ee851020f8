"""Read arrays from files and folders of the project, or from pinned addresses."""

from __future__ import annotations

import contextlib
import difflib
import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from onnx_ops.adapters.data.coco import read_annotations
from onnx_ops.adapters.data.images import has_images, read_images
from onnx_ops.adapters.data.onnx_test_data import has_test_data, read_test_data
from onnx_ops.adapters.data.tables import SUFFIXES, find_table_suffix, read_table
from onnx_ops.adapters.pinned_files import PINNED, PinnedFiles
from onnx_ops.domain.artifact import Digest, digest_file, digest_folder, digest_json
from onnx_ops.domain.pinned_address import hide_secrets, is_pinned_address
from onnx_ops.domain.pipeline import DataSection, FileData
from onnx_ops.errors import NotFoundError, UserError, describe_error
from onnx_ops.ports import DataSource
from onnx_ops.ports.data import Array, Sample

_SMALL_BYTES = 16 << 20
"""Files up to this size are read completely when their first rows are requested."""

_HEAD_BYTES = 8 << 20
"""Size to which the first rows of larger files are limited.

At least one row is read.
"""

_SAMPLED_IMAGES = 32
"""Maximum number of images that are read for the first rows of a folder."""

_ARRAY = b"\x93NUMPY"
"""Start of the file that `numpy.save` writes: one array."""

_POINTER = b"version https://git-lfs"
"""Start of the file that Git LFS writes in place of a file that was not fetched."""


@dataclass(frozen=True)
class FileSource(DataSource):
    """Data sets of `file: PATH`, a path in the project or a pinned address.

    A folder is accepted if it contains images, or test data of an ONNX model. No pickled data is
    loaded.
    """

    state: Path = Path(".onnx-ops")

    def with_folders(self, environments: Path, state: Path) -> FileSource:
        """Return the same source with the downloads of pinned addresses below `state`."""
        return FileSource(state)

    def fingerprint(self, section: DataSection, root: Path) -> str:
        """Return the digest of the file or folder, or of its pinned address.

        With annotations, their digest is included.
        """
        data, annotations = self._digest(section, root), _find_annotations(section, root)
        if annotations is None:
            return data
        return digest_json([data, digest_file(annotations)])

    def load(self, section: DataSection, root: Path) -> Mapping[str, Array]:
        """Read all arrays or columns of the file, and the objects of its annotations."""
        address = _find_address(section)
        path = self._pinned.fetch(address) if address else _path(section, root)
        where = hide_secrets(address) or str(path)
        if path.is_dir():
            arrays = _read_folder(path, section, where)
        else:
            arrays = read_arrays(path, where=where)
        return _add_objects(arrays, section, root)

    def sample(self, section: DataSection, root: Path) -> Sample | None:
        """Read the first rows of the file; None for a file that was not yet downloaded."""
        address = _find_address(section)
        path = self._pinned.find(address) if address else _path(section, root)
        if path is None:
            return None
        where = hide_secrets(address) or str(path)
        if path.is_dir():
            return _add_sampled_objects(_sample_folder(path, section, where), section, root)
        return _add_sampled_objects(sample_arrays(path, where=where), section, root)

    def _digest(self, section: DataSection, root: Path) -> Digest:
        if address := _find_address(section):
            return self._pinned.digest(address)
        path = _path(section, root)
        return digest_folder(path).digest() if path.is_dir() else digest_file(path)

    @property
    def _pinned(self) -> PinnedFiles:
        return PinnedFiles(cache=self.state / PINNED)


def _find_address(section: DataSection) -> str:
    """Return the pinned address of a section's file; empty if the file has a path."""
    place = section.file if isinstance(section, FileData) else ""
    return place if is_pinned_address(place) else ""


def _require_rows(folder: Path, where: str) -> None:
    if not has_test_data(folder) and not has_images(folder):
        raise NotFoundError(
            "the folder contains neither images nor test data of an ONNX model",
            where=where,
            remedy="Name one .npz file or table, a folder of PNG and JPEG files, or a folder that "
            "contains test_data_set_0.",
        )


def _read_folder(folder: Path, section: DataSection, where: str) -> Mapping[str, Array]:
    _require_rows(folder, where)
    if has_test_data(folder):
        return read_test_data(folder, where=where, label=section.label)
    return read_images(folder, where=where)


def _sample_folder(folder: Path, section: DataSection, where: str) -> Sample:
    if has_test_data(folder) or not has_images(folder):
        return Sample(arrays=_read_folder(folder, section, where), whole=True)
    arrays = read_images(folder, where=where, limit=_SAMPLED_IMAGES)
    return Sample(arrays=arrays, whole=False)


def _find_annotations(section: DataSection, root: Path) -> Path | None:
    """Return the path of the annotations; None if the section names none."""
    if not isinstance(section, FileData) or not section.annotations:
        return None
    path = _find_file(section.annotations, root)
    if path.is_dir():
        raise UserError(
            "the annotations are a folder",
            where=str(path),
            remedy="Name one JSON file in the format of COCO.",
        )
    return path


def _add_objects(
    arrays: Mapping[str, Array], section: DataSection, root: Path
) -> Mapping[str, Array]:
    """Return the arrays with those of the annotations.

    Raises:
        NotFoundError: the file of the annotations does not exist.
        UserError: the annotations are not valid, or the data already has an array with the name of
            one of theirs.
    """
    path = _find_annotations(section, root)
    if path is None:
        return arrays
    objects = read_annotations(path, arrays, where=str(path))
    if twice := sorted(objects.keys() & arrays.keys()):
        raise UserError(
            f"the data and the annotations both yield an array {twice[0]!r}",
            where=str(path),
            remedy="Rename the array in the data.",
        )
    return {**arrays, **objects}


def _add_sampled_objects(sample: Sample, section: DataSection, root: Path) -> Sample:
    """Return the first rows of the data and of the annotations.

    The annotations are read completely. If the data has further rows, the arrays of the annotations
    are cut to the number of the first rows.
    """
    arrays = _add_objects(sample.arrays, section, root)
    added = arrays.keys() - sample.arrays.keys()
    if added and not sample.whole:
        rows = max(len(array) for array in sample.arrays.values() if array.ndim)
        arrays = {**arrays, **{name: arrays[name][:rows] for name in added}}
    return Sample(arrays=arrays, whole=sample.whole)


def sample_arrays(path: Path, *, where: str) -> Sample:
    """Read the first rows of a file, or all rows of a small file.

    Raises the same errors as `read_arrays`.
    """
    whole = path.stat().st_size <= _SMALL_BYTES
    return Sample(
        arrays=read_arrays(path, where=where, most_bytes=None if whole else _HEAD_BYTES),
        whole=whole,
    )


def read_arrays(
    path: Path, *, where: str, name: str = "", most_bytes: int | None = None
) -> Mapping[str, Array]:
    """Return the arrays of a `.npz` or `.npy` file, or the columns of a table.

    No pickled data is loaded. The suffix of `name`, the file's original name, determines whether
    the file is a table, and its format. With `most_bytes`, only the first rows of the arrays are
    read, and arrays without rows are read whole (see `_read_head`).

    Raises:
        UserError: the file has another format or an unsupported column, is damaged, contains no
            rows, no array or an empty array, or is a pointer of Git LFS.
        MissingPackageError: the file is a table, and pyarrow is not installed.
    """
    named = Path(name or path)
    suffix = find_table_suffix(named.name)
    _require_data(path, where)
    if suffix:
        return read_table(path, suffix, where=where, most_bytes=most_bytes)
    shapes, arrays = _read_archive(path, where, most_bytes, named.stem)
    empty = [name for name, shape in shapes.items() if 0 in shape]
    if empty or not shapes:
        what = (
            f"array {empty[0]!r} is empty: shape {shapes[empty[0]]}"
            if empty
            else "the file contains no array"
        )
        remedy = "Write at least one array, each with at least one element."
        raise UserError(what, where=where, remedy=remedy)
    return arrays


def _require_data(path: Path, where: str) -> None:
    """Raise UserError if a file is empty, or is a pointer of Git LFS."""
    with path.open("rb") as stream:
        head = stream.read(len(_POINTER))
    if head == _POINTER:
        remedy = (
            "Pin the address of the content. For GitHub, it is "
            "`https://media.githubusercontent.com/media/OWNER/NAME/COMMIT/PATH`."
            if is_pinned_address(where)
            else "Run `git lfs install`, then `git lfs pull`."
        )
        raise UserError(
            "the file is a pointer of Git LFS, not the data", where=where, remedy=remedy
        )
    if not head:
        raise UserError(
            "the file is empty", where=where, remedy="Recreate the file, or fetch it again."
        )


def _read_archive(
    path: Path, where: str, most_bytes: int | None, stem: str
) -> tuple[Mapping[str, tuple[int, ...]], Mapping[str, Array]]:
    """Return the shapes of all arrays in a `.npz` or `.npy` file, and the arrays.

    With `most_bytes`, only the first rows of arrays with rows are returned (see `_read_head`). The
    array of a `.npy` file has no name; it gets the name `stem`.

    Raises:
        UserError: the file is not a file of plain arrays, or is damaged.
    """
    import numpy as np

    try:
        with path.open("rb") as stream:
            head = stream.peek(len(_ARRAY))
            if head.startswith(_ARRAY):
                array = np.load(path, mmap_mode="r", allow_pickle=False)
                row_bytes = max(1, array.nbytes // max(1, len(array)))
                rows = len(array) if most_bytes is None else max(1, most_bytes // row_bytes)
                return {stem: array.shape}, {stem: np.array(array[:rows])}
            # `numpy.savez` writes a zip archive, which begins with `PK`.
            if not head.startswith(b"PK"):
                raise ValueError(
                    f"neither a zip archive nor an array: it begins with {stream.peek(16)[:16]!r}"
                )
            archive = np.load(stream, allow_pickle=False)
            if most_bytes is None:
                arrays = {name: archive[name] for name in archive.files}
                shapes = {name: getattr(array, "shape", ()) for name, array in arrays.items()}
            else:
                shapes, arrays = _read_head(archive, most_bytes)
            if strange := [
                name for name, array in arrays.items() if not isinstance(array, np.ndarray)
            ]:
                raise ValueError(f"the entry {strange[0]} of the archive is not an array")
            return shapes, arrays
    except Exception as error:
        # For a damaged archive, NumPy and zipfile raise errors of many types.
        is_pickled = "allow_pickle" in str(error)
        raise UserError(
            "the file cannot be read as an .npz or .npy file of plain arrays",
            where=where,
            why="the file contains an array of Python objects, which NumPy stores as a pickle"
            if is_pickled
            else describe_error(error),
            remedy="Write the file with numpy.savez, without arrays of objects. The name of a "
            f"table ends in {', '.join(SUFFIXES)}.",
        ) from error


def _read_head(archive: Any, most_bytes: int) -> tuple[dict[str, tuple[int, ...]], dict[str, Any]]:
    """Return the shapes of all arrays, and their first rows.

    As many rows are read as fit into `most_bytes`, but at least one. An array without an axis of
    rows is returned whole. A multi-dimensional array that is stored by column is not read: zeros
    stand for its values.
    """
    import numpy as np
    from numpy.lib import format as npy

    headers: dict[str, tuple[tuple[int, ...], bool, Any]] = {}
    for name in archive.files:
        with archive.zip.open(f"{name}.npy") as stream:
            headers[name] = _header(npy, stream)
    shapes = {name: shape for name, (shape, _, _) in headers.items()}
    axes = _find_axes(shapes)
    row_bytes = sum(
        int(np.prod((*shape[:axis], *shape[axis + 1 :]), dtype=object)) * headers[name][2].itemsize
        for name, shape in shapes.items()
        if (axis := axes.get(name)) is not None
    )
    rows = max(1, most_bytes // max(1, row_bytes))
    arrays: dict[str, Any] = {}
    for name, (shape, by_column, dtype) in headers.items():
        axis = axes.get(name)
        cut = (slice(None),) * axis + (slice(rows),) if axis is not None else ()
        first = (min(rows, shape[0]), *shape[1:]) if axis == 0 else shape
        if by_column and len(shape) > 1:
            # The first rows of an array that is stored by column are spread over the whole file.
            # Zeros replace them, so that the file is not read.
            arrays[name] = np.zeros(first, dtype)[cut]
            continue
        with archive.zip.open(f"{name}.npy") as stream:
            _header(npy, stream)
            wanted = int(np.prod(first, dtype=object)) * dtype.itemsize
            array = np.frombuffer(stream.read(wanted), dtype).reshape(first)
            arrays[name] = array[cut] if cut else array
    return shapes, arrays


def _find_axes(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, int]:
    """Return, for each array with an axis of rows, the index of this axis.

    The number of rows is the size that occurs in most shapes. Of equally frequent sizes, the size
    that is most often on axis 0 is used, and then the largest.
    """
    sizes = {size for shape in shapes.values() for size in shape}

    def rank(size: int) -> tuple[int, int, int]:
        holders = [shape for shape in shapes.values() if size in shape]
        return len(holders), sum(shape[0] == size for shape in holders), size

    count = max(sizes, key=rank, default=0)
    return {name: shape.index(count) for name, shape in shapes.items() if count in shape}


def _header(npy: Any, stream: IO[bytes]) -> tuple[tuple[int, ...], bool, Any]:
    """Read the header of an array: its shape, Fortran order and type.

    Raises:
        ValueError: the array contains Python objects.
    """
    version = npy.read_magic(stream)
    read = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
    shape, by_column, dtype = read(stream)
    if dtype.hasobject:
        raise ValueError("Object arrays cannot be loaded when allow_pickle=False")
    return shape, by_column, dtype


def _path(section: DataSection, root: Path) -> Path:
    if not isinstance(section, FileData):
        raise UserError("the data section has no `file: PATH`", where=type(section).__name__)
    path = _find_file(section.file, root)
    if path.is_dir():
        _require_rows(path, str(path))
    return path


def _find_file(name: str, root: Path) -> Path:
    """Return the path of a file or folder of the project.

    Raises:
        NotFoundError: the path does not exist.
    """
    try:
        path = (root / name).resolve()
    except (OSError, RuntimeError, ValueError) as error:
        # For example, the path has a loop of links or contains a null byte.
        raise NotFoundError("no such file", where=name, why=str(error)) from error
    if os.path.exists(path):
        # Unlike `os.path.exists`, Path.exists of Python 3.11 raises OSError for a name that is too
        # long.
        return path
    remedy = "Write the path relative to the project's root."
    with contextlib.suppress(OSError):
        names = {Path(name).stem: name for name in sorted(os.listdir(path.parent))}
        if close := difflib.get_close_matches(path.stem, names, n=1, cutoff=0.7):
            remedy = f"Did you mean {names[close[0]]!r}?"
    if os.path.isfile(f"{path}.dvc"):
        remedy = (
            f"Fetch the file with `dvc pull {shlex.quote(f'{path}.dvc')}`, or read it from DVC "
            "with `source: dvc`."
        )
    raise NotFoundError("no such file", where=str(path), remedy=remedy)
