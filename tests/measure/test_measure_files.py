"""Arrays and data sets in the store."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from onnx_ops.adapters.files import LocalObjects
from onnx_ops.adapters.store import ContentStore
from onnx_ops.measure.files import get_dataset, pack_arrays, put_dataset
from onnx_ops.measure.paired_rows import digest_rows
from onnx_ops.ports import Dataset


def test_put_dataset_with_texts_of_different_lengths_keeps_them(tmp_path: Path) -> None:
    texts = np.array([["a"], [""], ["Köln ∑ 🚀"], ["x" * 60_000]], dtype=object)
    dataset = Dataset(
        inputs={"text": texts, "n": np.arange(4)[:, None]}, label=np.array([0, 1, 0, 1])
    )
    store = ContentStore(LocalObjects(tmp_path / "store"), tmp_path / "cache")
    manifest = put_dataset(store, dataset)
    loaded = get_dataset(store, manifest)
    assert list(loaded.inputs) == ["text", "n"]
    assert loaded.inputs["text"].dtype == object
    assert loaded.inputs["text"].tolist() == texts.tolist()
    assert len(store.read(manifest["dataset.npz"])) < 70_000
    digests = [
        {name: array.tolist() for name, array in digest_rows(rows).items()}
        for rows in (loaded, dataset)
    ]
    assert digests[0] == digests[1]


def test_pack_arrays_of_equal_strings_returns_equal_bytes() -> None:
    first = np.array(["ab", "abc"], dtype=object)
    second = np.array(["".join("ab"), "".join(["ab", "c"])], dtype=object)
    assert pack_arrays({"x": first}) == pack_arrays({"x": second})
    assert pack_arrays({"x": first}) != pack_arrays({"x": first[::-1]})
