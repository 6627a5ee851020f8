"""Memory after large requests."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest

from onnx_ops.serving.inference.deployments import LoadedDeployment
from onnx_ops.serving.inference.models import LoadedModel
from onnx_ops.serving.inference.request_queue import LatencyEstimator, RequestQueue, WorkerThreads
from onnx_ops.serving.metrics import make_row
from onnx_ops.serving.workers.worker_memory import TRIM_RATIO, MemoryTrimmer, read_resident_bytes
from tests.serving.serving_process import deploy, load_once, serving_model, wait_until
from tests.support.processes import memory

ROWS = 8000
"""Rows of a request of 31 KiB whose product with itself takes 244 MiB."""


def build_square() -> onnx.ModelProto:
    """Return a model that multiplies a column by its transpose, and sums each row."""
    return onnx.parser.parse_model("""<ir_version: 10, opset_import: ["" : 18]>
    m (float[b, 1] x) => (float[b, 1] y) {
      turned = Transpose(x)
      square = MatMul(x, turned)
      axes = Constant<value = int64[1] {1}>()
      y = ReduceSum(square, axes)
    }""")


def load_square(folder: Path) -> LoadedModel:
    folder.mkdir()
    onnx.save_model(build_square(), folder / "model.onnx")
    return load_once(deploy(folder))


def test_memory_trimmer_check_after_large_run_frees_memory(tmp_path: Path) -> None:
    model = load_square(tmp_path / "square")
    latency = LatencyEstimator()
    queue = RequestQueue[object](
        WorkerThreads(),
        lambda _: None,
        limit=1,
        max_batch=1,
        max_batches=1,
        row=make_row(),
        latency=latency,
    )
    loaded = LoadedDeployment(
        deployment=model.deployment,
        signature=model.signature,
        run=model.run,
        row=queue.row,
        queue=queue,
        latency=latency,
        size_bytes=0,
        max_body=1,
        release_memory=model.release_memory,
    )
    before = read_resident_bytes()
    trimmer = MemoryTrimmer(lambda: [loaded], rest_s=0.0)
    assert not trimmer.check()
    # The product needs at least four tenths of this process's memory.
    rows = max(ROWS, math.isqrt(int(before * 0.1)))
    model.run(("y",), {"x": np.ones((rows, 1), np.float32)})
    assert read_resident_bytes() > TRIM_RATIO * before
    assert trimmer.check()
    assert read_resident_bytes() < TRIM_RATIO * before
    assert not trimmer.check()


@pytest.mark.nightly
def test_server_after_large_request_frees_memory(tmp_path: Path) -> None:
    with serving_model(tmp_path, build_square(), "--workers=1") as server:
        before = memory(server.workers()).rss
        for _ in range(2):
            x = np.ones((ROWS, 1), np.float32)
            header = {
                "name": "x",
                "datatype": "FP32",
                "shape": [ROWS, 1],
                "data": x.reshape(-1).tolist(),
            }
            assert server.call("POST", "/v2/models/m/infer", {"inputs": [header]}).status == 200
            wait_until(
                lambda: memory(server.workers()).rss < TRIM_RATIO * before,
                "memory that is given back",
            )
