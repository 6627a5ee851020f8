"""The request example that stands beside a registered version."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from onnx_ops.adapters.objects import LocalObjects
from onnx_ops.adapters.store.content import ContentStore
from onnx_ops.domain.artifact import Manifest, ModelInfo, TensorSpec
from onnx_ops.measure.files import put_document
from onnx_ops.measure.reference_outputs import ReferenceGroup, put_reference
from onnx_ops.pipeline.stages.register import build_request_example
from onnx_ops.ports import Store


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return ContentStore(LocalObjects(tmp_path / "objects"), tmp_path / "cache")


def exported(store: Store, array: np.ndarray, batch: int | str = "batch", group: str = "real") -> Manifest:
    info = ModelInfo(
        ir_version=10,
        opsets={"": 18},
        inputs=(TensorSpec(name="x", dtype="float32", shape=(batch, 2)),),
        outputs=(),
        nodes=1,
        size_bytes=1,
    )
    reference = ReferenceGroup(name=group, inputs={"x": array}, single={"y": array}, double=None)
    return Manifest(files={"info.json": put_document(store, info), "reference.npz": put_reference(store, [reference])})


ROWS = np.array([[1.5, 2], [3, 4], [5, 6]], np.float32)


def test_one_row_of_a_free_batch(store: Store) -> None:
    assert json.loads(build_request_example(exported(store, ROWS), store)) == {"inputs": {"x": [[1.5, 2]]}}


def test_a_fixed_batch_gets_as_many_rows(store: Store) -> None:
    assert json.loads(build_request_example(exported(store, ROWS, batch=2), store)) == {
        "inputs": {"x": [[1.5, 2], [3, 4]]}
    }


@pytest.mark.parametrize("array", [np.full((1, 2), np.nan, np.float32), np.zeros((1, 1 << 19), np.float32)])
def test_what_json_cannot_say_or_nobody_would_read_is_left_out(store: Store, array: np.ndarray) -> None:
    assert build_request_example(exported(store, array), store) == b""


def test_no_real_rows_no_example(store: Store) -> None:
    assert build_request_example(exported(store, ROWS, group="edge"), store) == b""
