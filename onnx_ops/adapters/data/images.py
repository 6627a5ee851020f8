"""Folders of images, in the layout that Hugging Face calls ImageFolder.

The files are PNG or JPEG. A table `metadata` beside them (CSV, Parquet or JSON Lines) has a row for
each file, whose path is in the column `file_name`. Without a table, the label of an image is the
name of its folder, if all images are in subfolders.

https://huggingface.co/docs/datasets/image_dataset describes the layout.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from onnx_ops.adapters.data.tables import SUFFIXES, read_table
from onnx_ops.errors import UserError
from onnx_ops.plugins import require
from onnx_ops.ports.data import Array
from onnx_ops.protocol.images import PACKAGE, ImageLimits, check_image

IMAGES = "image"
"""Name of the array of encoded files: uint8 (rows, bytes), padded with zeros."""

NAMES = "file_name"
"""Name of the array of paths, and of the column with paths in the table."""

LABELS = "label"
"""Name of the array with the folder of each image, if there is no table."""

_SUFFIXES = frozenset({".png", ".jpg", ".jpeg"})

_TABLE = "metadata"


def has_images(folder: Path) -> bool:
    """Return whether a folder, or a folder below it, contains images."""
    return any(path.suffix.lower() in _SUFFIXES for path in folder.rglob("*"))


def read_images(folder: Path, *, where: str, limit: int | None = None) -> Mapping[str, Array]:
    """Return a folder's images in the order of their paths, and its table's columns.

    Without a table, the names of the images' folders are returned as labels, if all images are in
    subfolders. Each image is checked as the endpoint server checks it by default.

    Args:
        limit: number of images to read; all by default.

    Raises:
        UserError: an image cannot be decoded or is too large, or the table is invalid or differs
            from the files.
        MissingPackageError: the package for images is not installed, or pyarrow for a table.
    """
    import numpy as np

    require(PACKAGE, where=where)
    paths = sorted(
        (path for path in folder.rglob("*") if path.suffix.lower() in _SUFFIXES),
        key=lambda path: path.relative_to(folder).as_posix(),
    )
    names = [path.relative_to(folder).as_posix() for path in paths]
    columns = _read_columns(folder, names, where)
    paths = paths[:limit]
    contents = [
        _read_image(path, f"{where}/{name}") for path, name in zip(paths, names, strict=False)
    ]
    rows = np.zeros((len(contents), max(map(len, contents))), np.uint8)
    for row, content in zip(rows, contents, strict=True):
        row[: len(content)] = np.frombuffer(content, np.uint8)
    return {
        IMAGES: rows,
        NAMES: np.array(names[:limit]),
        **{name: column[:limit] for name, column in columns.items()},
    }


def _read_image(path: Path, where: str) -> bytes:
    content = path.read_bytes()
    try:
        check_image(content, ImageLimits())
    except UserError as error:
        raise UserError(error.what, where=where, why=error.why, remedy=error.remedy) from error
    return content


def _read_columns(folder: Path, names: Sequence[str], where: str) -> Mapping[str, Array]:
    """Return the columns of the table in the order of the files, or the labels.

    Without a table, the labels are the names of the subfolders. The result is then empty if an
    image is in no subfolder.
    """
    import numpy as np

    tables = [folder / f"{_TABLE}{suffix}" for suffix in SUFFIXES]
    table = next((path for path in tables if path.is_file()), None)
    if table is None:
        parents = [Path(name).parent.name for name in names]
        return {LABELS: np.array(parents)} if all(parents) else {}
    columns = read_table(table, table.name.removeprefix(_TABLE), where=str(table))
    order = _order_rows(columns, names, str(table))
    return {name: column[order] for name, column in columns.items() if name != NAMES}


def _order_rows(columns: Mapping[str, Array], names: Sequence[str], where: str) -> list[int]:
    """Return the row of the table for each file.

    Raises:
        UserError: the table lists a file twice, lacks a file, lists a file that the folder lacks,
            or has a wrong column name.
    """
    if NAMES not in columns:
        remedy = f"Give the column with the paths of the images the name {NAMES!r}."
        raise UserError(f"the table has no column {NAMES!r}", where=where, remedy=remedy)
    if IMAGES in columns:
        remedy = "Give the column another name."
        raise UserError(
            f"the name {IMAGES!r} is reserved for the array of the images",
            where=where,
            remedy=remedy,
        )
    listed = [str(name) for name in columns[NAMES].reshape(-1).tolist()]
    places = {name: row for row, name in enumerate(listed)}
    if len(places) < len(listed):
        repeated = Counter(listed).most_common(1)[0][0]
        raise UserError(
            f"the table lists {repeated!r} more than once",
            where=where,
            remedy="Remove the repeated rows.",
        )
    if missing := sorted(set(names) - places.keys()):
        raise UserError(
            f"the table has no row for {missing[0]!r}",
            where=where,
            remedy="Add a row for the image, or remove the image.",
        )
    if absent := sorted(places.keys() - set(names)):
        what = f"the table lists {absent[0]!r}, which is not a PNG or JPEG file in the folder"
        raise UserError(what, where=where, remedy="Add the file, or remove its row.")
    return [places[name] for name in names]
