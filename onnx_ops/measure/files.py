"""Between the store and folders: arrays, folders and documents as stage results."""

from __future__ import annotations

import io
import shutil
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from onnx_ops import codec
from onnx_ops.domain.artifact import Digest, Manifest, ModelInfo
from onnx_ops.errors import UserError
from onnx_ops.ports import Dataset, Store, Tensors

MODEL = "onnx/"
"""Prefix of the ONNX model's own files in a manifest."""

FRACTIONS = "fractions.json"
"""In the manifest of the training: names of the columns that were float32 in one of its data sets."""

PACKAGE = "package/"
"""Prefix of what a target gets instead of the ONNX model, in its benchmark's manifest."""

TRAINED = "trained/"
"""Prefix of the trained model's files in a manifest."""


def put_folder(store: Store, folder: Path, prefix: str) -> dict[str, Digest]:
    """Store every file below a folder under `prefix` and its relative name."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {prefix + path.relative_to(folder).as_posix(): store.put_file(path) for path in files}


def checkout_files(store: Store, manifest: Manifest, prefix: str, folder: Path) -> Path:
    """Copies of the files below `prefix`, in `folder`: whoever gets them may write to them."""
    for name, digest in manifest.subset(prefix).files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(store.path(digest), path)
    return folder


def pack_arrays(arrays: Mapping[str, Any]) -> bytes:
    """Arrays as `.npz`; the same arrays always give the same bytes."""
    import numpy as np

    stream = io.BytesIO()
    np.savez(stream, **{name: arrays[name] for name in sorted(arrays)})
    return stream.getvalue()


def load_arrays(store: Store, digest: Digest) -> dict[str, Any]:
    import numpy as np

    with np.load(store.path(digest), allow_pickle=False) as archive:
        return {name: archive[name] for name in archive.files}


def put_dataset(store: Store, dataset: Dataset) -> Manifest:
    arrays = _prefixed("input/", dataset.inputs) | _prefixed("column/", dataset.columns)
    arrays |= {
        name: array for name, array in {"label": dataset.label, "group": dataset.group}.items() if array is not None
    }
    return Manifest(files={"dataset.npz": store.put_bytes(pack_arrays(arrays))})


def get_dataset(store: Store, manifest: Manifest, export: Manifest | None = None) -> Dataset:
    """A data set; for an export, its whole numbers as float32 where the model takes that.

    Raises:
        UserError: a column has missing cells, and the model takes whole numbers.
    """
    arrays = load_arrays(store, manifest["dataset.npz"])
    inputs = _below("input/", arrays)
    if export is not None:
        inputs = convert_inputs(inputs, codec.loads(store.read(export["info.json"]), ModelInfo))
    return Dataset(
        inputs=inputs,
        label=arrays.get("label"),
        group=arrays.get("group"),
        columns=_below("column/", arrays),
    )


def convert_inputs(inputs: Tensors, model: ModelInfo) -> dict[str, Any]:
    """Inputs of a data set as a model takes them: whole numbers of a table as float32 where it takes that.

    Raises:
        UserError: a column has missing cells, and the model takes whole numbers.
    """
    taken = {spec.name: spec.dtype for spec in model.inputs}
    whole = [name for name, array in inputs.items() if is_float_column(array) and taken.get(name) in ("int64", "bool")]
    if whole:
        raise UserError(
            f"column {whole[0]!r} has missing cells or fractions, and the model takes {taken[whole[0]]}",
            where="data",
            why="the rows that the model was trained and exported with have none",
            remedy="Fill the missing cells, or train with rows that have some.",
        )
    return widen_columns(inputs, {name for name, dtype in taken.items() if dtype == "float32"})


def is_float_column(array: Any) -> bool:
    """Whether it is a table's column of float32."""
    return bool(array.dtype == "float32" and array.shape[1:] == (1,))


def widen_columns(inputs: Tensors, names: Collection[str]) -> dict[str, Any]:
    """Columns of whole numbers or truth values as float32, which they are in a file where one cell of them is missing.

    Args:
        inputs: of a data set.
        names: of the columns that are float32 elsewhere.
    """
    return {
        name: array.astype("float32")
        if name in names and array.dtype.kind in "iub" and array.shape[1:] == (1,)
        else array
        for name, array in inputs.items()
    }


def _prefixed(prefix: str, arrays: Mapping[str, Any]) -> dict[str, Any]:
    return {prefix + name: array for name, array in arrays.items()}


def _below(prefix: str, arrays: Mapping[str, Any]) -> dict[str, Any]:
    return {name.removeprefix(prefix): array for name, array in arrays.items() if name.startswith(prefix)}


def put_document(store: Store, value: object) -> Digest:
    return store.put_bytes(codec.dumps(value))


def slice_rows(tensors: Tensors, start: int, stop: int) -> Tensors:
    return {name: array[start:stop] for name, array in tensors.items()}
