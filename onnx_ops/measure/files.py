"""Results of stages in the store: arrays, data sets, folders and JSON documents."""

from __future__ import annotations

import io
import shutil
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from onnx_ops import codec
from onnx_ops.domain.artifact import Digest, Manifest, ModelInfo
from onnx_ops.domain.row_axes import find_row_axes
from onnx_ops.errors import UserError
from onnx_ops.ports import Dataset, Store, Tensors

MODEL = "onnx/"
"""Prefix of the ONNX model's own files in a manifest."""

VALUES = "values.npz"
"""In the export's manifest: inputs that are the same for all rows, if any."""

FRACTIONS = "fractions.json"
"""In the training's manifest: names of the training data's float32 columns."""

FEATURES = "features.json"
"""In the manifests of training and export: names of the columns of each matrix.

The columns are in the order that the model takes.
"""

HARDWARE = "hardware.json"
"""In the manifest of scored rows: the machine that scored them."""

RANGES = "ranges"
"""In the manifest of a calibration: the optimizer's file with activation ranges."""

_TEXTS, _ENDS = "//texts/", "//ends/"
"""Prefixes of the names of two arrays that store texts: bytes, and end offsets."""

PACKAGE = "package/"
"""In the manifest of a benchmark: prefix of the model in the target's own format."""

TRAINED = "trained/"
"""Prefix of the trained model's files in a manifest."""


def put_folder(store: Store, folder: Path, prefix: str) -> dict[str, Digest]:
    """Store the files below a folder; return digests by prefix and relative name."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {prefix + path.relative_to(folder).as_posix(): store.put_file(path) for path in files}


def checkout_files(store: Store, manifest: Manifest, prefix: str, folder: Path) -> Path:
    """Copy the files below `prefix` to `folder`, where they can be modified."""
    for name, digest in manifest.subset(prefix).files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(store.path(digest), path)
    return folder


def pack_arrays(arrays: Mapping[str, Any]) -> bytes:
    """Return arrays as `.npz` bytes, in the given order.

    The same arrays in the same order give the same bytes. Texts that are Python objects are stored
    as UTF-8 bytes and the end offset of each text.
    """
    import numpy as np

    stored: dict[str, Any] = {}
    for name, array in arrays.items():
        if array.dtype.kind != "O":
            stored[name] = array
            continue
        texts = [str(text).encode() for text in array.ravel()]
        ends = np.cumsum([len(text) for text in texts], dtype=np.int64)
        stored[_TEXTS + name] = np.frombuffer(b"".join(texts), dtype=np.uint8)
        stored[_ENDS + name] = ends.reshape(array.shape)
    stream = io.BytesIO()
    np.savez(stream, **stored)
    return stream.getvalue()


def load_arrays(store: Store, digest: Digest) -> dict[str, Any]:
    """Return the arrays of a stored `.npz`; texts are restored as Python objects."""
    import numpy as np

    arrays: dict[str, Any] = {}
    with np.load(store.path(digest), allow_pickle=False) as archive:
        for name in archive.files:
            plain = name.removeprefix(_TEXTS)
            if plain == name:
                arrays[name] = archive[name]
            else:
                arrays[plain] = _split_texts(archive[name].tobytes(), archive[_ENDS + plain])
    return {name: array for name, array in arrays.items() if not name.startswith(_ENDS)}


def _split_texts(content: bytes, ends: Any) -> Any:
    import numpy as np

    stops = ends.ravel().tolist()
    texts = np.empty(len(stops), dtype=object)
    texts[:] = [
        content[start:stop].decode() for start, stop in zip([0, *stops], stops, strict=False)
    ]
    return texts.reshape(ends.shape)


def put_dataset(store: Store, dataset: Dataset) -> Manifest:
    """Store a data set, and return the manifest of its file."""
    import numpy as np

    arrays = {f"input/{name}": array for name, array in dataset.inputs.items()}
    arrays |= {f"column/{name}": array for name, array in dataset.columns.items()}
    arrays |= {f"value/{name}": array for name, array in dataset.values.items()}
    arrays |= {
        name: array
        for name, array in {"label": dataset.label, "group": dataset.group}.items()
        if array is not None
    }
    arrays |= {f"feature/{name}": np.array(columns) for name, columns in dataset.features.items()}
    return Manifest(files={"dataset.npz": store.put_bytes(pack_arrays(arrays))})


def get_dataset(store: Store, manifest: Manifest, export: Manifest | None = None) -> Dataset:
    """Return a stored data set.

    With an export, rows are on axis 0 of every input, and columns are converted for the export's
    model (see `convert_inputs`). The columns of a matrix are in the model's order. If the data set
    lacks the value of an input that is the same for all rows, the value of the export is used.

    Raises:
        UserError: the columns, rows or types of the data set do not fit the export's model.
    """
    arrays = load_arrays(store, manifest["dataset.npz"])
    dataset = Dataset(
        inputs=_select_prefix("input/", arrays),
        label=arrays.get("label"),
        group=arrays.get("group"),
        columns=_select_prefix("column/", arrays),
        features={
            name: tuple(columns.tolist())
            for name, columns in _select_prefix("feature/", arrays).items()
        },
        values=_select_prefix("value/", arrays),
    )
    if export is None:
        return dataset
    dataset = arrange_features(dataset, read_features(store, export))
    model = codec.loads(store.read(export["info.json"]), ModelInfo)
    dataset = dataset.put_rows_first(
        find_row_axes({spec.name: spec.shape for spec in model.inputs})
    )
    values = {**get_values(store, export), **dataset.values}
    return replace(dataset, inputs=convert_inputs(dataset.inputs, model), values=values)


def get_values(store: Store, export: Manifest) -> dict[str, Any]:
    """Return the inputs that are the same for all rows, as the export used them."""
    return load_arrays(store, export[VALUES]) if VALUES in export else {}


def read_features(store: Store, manifest: Manifest) -> dict[str, tuple[str, ...]]:
    """Return the names of the columns of each matrix.

    The result is empty if the stage had no matrix from a table.
    """
    if FEATURES not in manifest.files:
        return {}
    return dict(codec.loads(store.read(manifest[FEATURES]), Mapping[str, tuple[str, ...]]))


def arrange_features(dataset: Dataset, features: Mapping[str, tuple[str, ...]]) -> Dataset:
    """Return the data set with the columns of each matrix in the order of `features`.

    Raises:
        UserError: the columns of a matrix differ from those in `features`.
    """
    inputs = dict(dataset.inputs)
    for name, wanted in features.items():
        columns = dataset.features.get(name, wanted)
        if sorted(columns) != sorted(wanted):
            spare, lacking = sorted(set(columns) - set(wanted)), sorted(set(wanted) - set(columns))
            raise UserError(
                f"the columns of matrix {name!r} differ from those in another data set",
                where="data",
                why="; ".join(
                    [
                        *(f"it also has {c!r}" for c in spare[:1]),
                        *(f"it lacks {c!r}" for c in lacking[:1]),
                    ]
                ),
                remedy="List the columns of every data set: `columns: [age, income]`.",
            )
        if columns != wanted:
            inputs[name] = inputs[name][:, [columns.index(column) for column in wanted]]
    return replace(dataset, inputs=inputs, features={**dataset.features, **features})


def convert_inputs(inputs: Tensors, model: ModelInfo) -> dict[str, Any]:
    """Convert columns to float32 where the model expects float32.

    Only columns of whole numbers or booleans are converted.

    Raises:
        UserError: a column has floats, and the model expects int64 or bool.
    """
    expected = {spec.name: spec.dtype for spec in model.inputs}
    whole = [
        name
        for name, array in inputs.items()
        if is_float_column(array) and expected.get(name) in ("int64", "bool")
    ]
    if whole:
        raise UserError(
            f"column {whole[0]!r} has floats, but the model expects {expected[whole[0]]}",
            where="data",
            why="a column has floats if a cell is missing, or if the file stores floats",
            remedy="Fill the missing cells and store whole numbers as integers, or train with such "
            "rows.",
        )
    return widen_columns(inputs, {name for name, dtype in expected.items() if dtype == "float32"})


def is_float_column(array: Any) -> bool:
    """Return whether an array is float32 of shape (n, 1), as a column of a table is."""
    return bool(array.dtype == "float32" and array.shape[1:] == (1,))


def widen_columns(inputs: Tensors, names: Collection[str]) -> dict[str, Any]:
    """Convert the named columns of whole numbers or booleans to float32.

    Files store these columns as floats if a cell is missing.
    """
    return {
        name: array.astype("float32")
        if name in names and array.dtype.kind in "iub" and array.shape[1:] == (1,)
        else array
        for name, array in inputs.items()
    }


def _select_prefix(prefix: str, arrays: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name.removeprefix(prefix): array
        for name, array in arrays.items()
        if name.startswith(prefix)
    }


def put_document(store: Store, value: object) -> Digest:
    """Store a value as JSON, and return its digest."""
    return store.put_bytes(codec.dumps(value))


def slice_rows(tensors: Tensors, start: int, stop: int) -> Tensors:
    """Return the rows from `start` to `stop`."""
    return {name: array[start:stop] for name, array in tensors.items()}
