"""Triton's extensions over HTTP.

They are configuration, statistics and the index of versions.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from onnx import TensorProto, helper

from onnx_ops.domain.endpoint import Deployment
from onnx_ops.serving import metrics
from onnx_ops.serving.http.triton_extensions import build_statistics, list_models
from onnx_ops.testing.endpoints import state_of
from tests.serving.serving_process import INFER, infer_body
from tests.serving.serving_worker import Worker, post
from tests.support.server import scaled


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    root = tmp_path_factory.mktemp("models")
    with Worker(
        state_of(scaled(root, "blue"), scaled(root, "green"), blue=70, green=30)
    ).running() as running:
        yield running


def call(worker: Worker, path: str, body: bytes = b"", method: str = "GET") -> tuple[int, Any]:
    head, _, content = worker.send(post(path, body, method=method)).partition(b"\r\n\r\n")
    return int(head.split(b" ")[1]), json.loads(content)


def test_config_of_unbatched_model_has_full_shapes(worker: Worker) -> None:
    for path in ("/v2/models/m/config", "/v2/models/m/versions/2/config"):
        assert call(worker, path) == (
            200,
            {
                "name": "m",
                "platform": "onnxruntime_onnx",
                "backend": "onnxruntime",
                "max_batch_size": 0,
                "input": [{"name": "x", "data_type": "TYPE_FP32", "dims": [-1, 2]}],
                "output": [{"name": "y", "data_type": "TYPE_FP32", "dims": [-1, 2]}],
            },
        )


def test_config_of_batched_model_omits_batch_dimension(blue: Deployment) -> None:
    with Worker(state_of(replace(blue, batchable=True), blue=100)).running() as worker:
        _, config = call(worker, "/v2/models/m/config")
    assert config["max_batch_size"] == 1024
    assert config["input"][0]["dims"] == config["output"][0]["dims"] == [2]


def test_config_of_model_with_scalar_input_has_no_batch_size(
    build: Callable[..., Deployment],
) -> None:
    deployment = build(
        [helper.make_node("Identity", ["x"], ["y"]), helper.make_node("Identity", ["s"], ["t"])],
        [("x", TensorProto.FLOAT, ["n", 3]), ("s", TensorProto.STRING, [])],
        [("y", TensorProto.FLOAT, ["n", 3]), ("t", TensorProto.STRING, [])],
    )
    state = state_of(replace(deployment, batchable=True), **{deployment.name: 100})
    with Worker(state).running() as worker:
        _, config = call(worker, "/v2/models/m/config")
    assert config["max_batch_size"] == 0
    assert config["input"] == [
        {"name": "x", "data_type": "TYPE_FP32", "dims": [-1, 3]},
        {"name": "s", "data_type": "TYPE_STRING", "dims": []},
    ]


@pytest.mark.parametrize("action", ["config", "stats"])
@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("/v2/models/z", "no model is named 'z'"),
        ("/v2/models/m/versions/9", "not serve version '9'"),
        ("/v2/models/z/versions/1", "no model is named 'z'"),
        ("/v2/models/%00%3Cb%3E", r"no model is named '\x00<b>'"),
    ],
)
def test_config_and_stats_of_unknown_model_or_version_return_404(
    worker: Worker, path: str, message: str, action: str
) -> None:
    status, document = call(worker, f"{path}/{action}")
    assert (status, message in document["error"]) == (404, True), document


def test_triton_extensions_with_other_method_or_path_are_refused(worker: Worker) -> None:
    assert call(worker, "/v2/models/m/config", method="POST")[0] == 405
    assert call(worker, "/v2/models/m/stats", method="POST")[0] == 405
    assert call(worker, "/v2/repository/index")[0] == 405
    assert call(worker, "/v2/models/m/config/")[0] == 404
    assert call(worker, "/v2/models/m/versions/1/statsx")[0] == 404


def test_statistics_count_requests_and_runs_by_version(blue: Deployment, green: Deployment) -> None:
    with Worker(state_of(blue, green, blue=70, green=30)).running() as worker:
        assert [
            s["inference_stats"]["success"]
            for s in call(worker, "/v2/models/stats")[1]["model_stats"]
        ] == [
            {"count": 0, "ns": 0},
            {"count": 0, "ns": 0},
        ]
        for version, body in (("1", infer_body([1, 2])), ("1", b"{"), ("2", infer_body([1, 2]))):
            worker.send(post(f"/v2/models/m/versions/{version}/infer", body))
        status, document = call(worker, "/v2/models/m/stats")
        first, second = document["model_stats"]
        assert call(worker, "/v2/models/stats") == (status, document)
        assert call(worker, "/v2/models/m/versions/2/stats") == (status, {"model_stats": [second]})
        row = worker.shared.sum_slot(1)
    assert (status, first["name"], first["version"], second["version"]) == (200, "m", "1", "2")
    assert (first["execution_count"], second["execution_count"]) == (1, 1)
    durations = first["inference_stats"]
    assert (durations["success"]["count"], durations["fail"]["count"]) == (1, 1)
    assert min(durations["success"]["ns"], durations["fail"]["ns"]) > 0
    assert (
        durations["success"]["ns"] + durations["fail"]["ns"]
        == metrics.get_request_latency(row).nanoseconds
    )
    assert second["inference_stats"]["fail"] == {"count": 0, "ns": 0}


def test_build_statistics_of_several_variants_returns_sums() -> None:
    rows = [[0] * metrics.COLUMNS for _ in range(2)]
    for row in rows:
        metrics.count_request(row, 200, 1e-3)  # type: ignore[arg-type]
        metrics.count_queued_request(row, 504, 2e-3, 0.0)  # type: ignore[arg-type]
    assert build_statistics("m", "1", rows)["inference_stats"] == {
        "success": {"count": 2, "ns": 2_000_000},
        "fail": {"count": 2, "ns": 4_000_000},
    }


def test_list_models_with_failed_version_shows_reason(worker: Worker) -> None:
    snapshot = worker.deployments.get_current()
    loaded = {"blue": snapshot.deployments["blue"]}
    partial = replace(snapshot, deployments=loaded, failed={"green": "its digest differs"})
    ready = {"name": "m", "version": "1", "state": "READY"}
    unavailable = {
        "name": "m",
        "version": "2",
        "state": "UNAVAILABLE",
        "reason": "its digest differs",
    }
    assert list_models(partial, only_ready=False) == [ready, unavailable]
    assert list_models(partial, only_ready=True) == [ready]


@pytest.mark.parametrize(
    "body", [b"", b"{}", b'{"ready": true}', b'{"ready": false, "other": [1]}']
)
def test_repository_index_lists_ready_versions(worker: Worker, body: bytes) -> None:
    assert call(worker, "/v2/repository/index", body, "POST") == (
        200,
        [{"name": "m", "version": version, "state": "READY"} for version in "12"],
    )


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"[]", 400),
        (b"{", 400),
        (b"null", 400),
        (b"\xff", 400),
        (b'{"ready": "yes"}', 400),
        (b"[" * 1000, 400),
        (b"[" * 2000, 413),
    ],
)
def test_repository_index_with_invalid_body_returns_error(
    worker: Worker, body: bytes, status: int
) -> None:
    found, document = call(worker, "/v2/repository/index", body, "POST")
    assert (found, bool(document["error"])) == (status, True)
    assert worker.send(post(INFER, infer_body([1, 2]))).startswith(b"HTTP/1.1 200")
