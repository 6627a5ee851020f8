"""Between the store and folders: arrays, folders and documents as stage results."""

from __future__ import annotations

import io
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from onnx_ops import codec
from onnx_ops.domain.artifact import Digest, Manifest
from onnx_ops.ports import Dataset, Store, Tensors

MODEL = "onnx/"
"""Prefix of the ONNX model's own files in a manifest."""

PACKAGE = "package/"
"""Prefix of what a target gets instead of the ONNX model, in its benchmark's manifest."""

TRAINED = "trained/"
"""Prefix of the trained model's files in a manifest."""


def put_folder(store: Store, folder: Path, prefix: str) -> dict[str, Digest]:
    """Store every file below a folder under `prefix` and its relative name."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {prefix + path.relative_to(folder).as_posix(): store.put_file(path) for path in files}


def checkout(store: Store, manifest: Manifest, prefix: str, folder: Path) -> Path:
    """Copies of the files below `prefix`, in `folder`: whoever gets them may write to them."""
    for name, digest in manifest.subset(prefix).files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(store.path(digest), path)
    return folder


def pack(arrays: Mapping[str, Any]) -> bytes:
    """Arrays as `.npz`; the same arrays always give the same bytes."""
    import numpy as np

    stream = io.BytesIO()
    np.savez(stream, **{name: arrays[name] for name in sorted(arrays)})
    return stream.getvalue()


def unpack(store: Store, digest: Digest) -> dict[str, Any]:
    import numpy as np

    with np.load(store.path(digest), allow_pickle=False) as archive:
        return {name: archive[name] for name in archive.files}


def put_dataset(store: Store, dataset: Dataset) -> Manifest:
    arrays = _prefixed("input/", dataset.inputs) | _prefixed("column/", dataset.columns)
    arrays |= {
        name: array for name, array in {"label": dataset.label, "group": dataset.group}.items() if array is not None
    }
    return Manifest(files={"dataset.npz": store.put_bytes(pack(arrays))})


def get_dataset(store: Store, manifest: Manifest) -> Dataset:
    arrays = unpack(store, manifest["dataset.npz"])
    return Dataset(
        inputs=_below("input/", arrays),
        label=arrays.get("label"),
        group=arrays.get("group"),
        columns=_below("column/", arrays),
    )


def _prefixed(prefix: str, arrays: Mapping[str, Any]) -> dict[str, Any]:
    return {prefix + name: array for name, array in arrays.items()}


def _below(prefix: str, arrays: Mapping[str, Any]) -> dict[str, Any]:
    return {name.removeprefix(prefix): array for name, array in arrays.items() if name.startswith(prefix)}


def put_document(store: Store, value: object) -> Digest:
    return store.put_bytes(codec.dumps(value))


def rows(tensors: Tensors, start: int, stop: int) -> Tensors:
    return {name: array[start:stop] for name, array in tensors.items()}
