"""gRPC beside HTTP in one worker: the same deployments, limits and counts."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import grpc
import numpy as np
import pytest

from onnx_ops.domain.endpoint import Deployment
from onnx_ops.protocol.messages import FEEDBACK_HEADER
from onnx_ops.serving import metrics
from onnx_ops.serving.grpc.open_inference import SERVICE, STREAM, encode_request, get_message_class
from onnx_ops.serving.metrics import REVISION
from onnx_ops.testing.endpoints import state_of
from tests.serving.grpc.conftest import Connect
from tests.serving.serving_process import INFER, infer_body, mirrored, wait_until
from tests.serving.serving_worker import Gate, Worker, post
from tests.support.ports import free_port

Code = grpc.StatusCode
X = {"name": "x", "datatype": "FP32", "shape": [1, 2]}
ROW = np.array([[1, 2]], np.float32).tobytes()
INPUT: dict[str, Any] = {"model_name": "m", "inputs": [X], "raw_input_contents": [ROW]}
Message = get_message_class("ModelInferRequest")


@pytest.fixture
def worker(blue: Deployment, green: Deployment) -> Iterator[Worker]:
    with Worker(
        state_of(blue, green, blue=70, green=30), grpc_port=free_port()
    ).running() as worker:
        yield worker


def behind(gate: Gate, blue: Deployment, **more: Any) -> Any:
    """Return a worker that queues its requests, and whose model runs behind the gate."""
    return Worker(
        state_of(blue, blue=100), wrap=gate.wrap, slow=True, grpc_port=free_port(), **more
    ).running()


def count(worker: Worker, status: int) -> int:
    """Return the number of requests with this status, of both deployments and of none."""
    return sum(worker.shared.sum_slot(slot)[metrics.get_column(status)] for slot in range(3))


def test_grpc_infer_returns_deployment_and_request_ids(worker: Worker, connect: Connect) -> None:
    pin = (
        ("x-amzn-sagemaker-target-variant", "green"),
        ("x-request-id", "r-1"),
        ("traceparent", "00-a-b-01"),
    )
    client = connect(worker.grpc_port)
    response, call = client.method("ModelInfer").with_call(Message(id="7", **INPUT), metadata=pin)
    assert (response.model_name, response.model_version, response.id) == ("m", "2", "7")
    (output,) = response.outputs
    assert (output.name, output.datatype, list(output.shape)) == ("y", "FP32", [1, 2])
    assert np.frombuffer(response.raw_output_contents[0], np.float32).tolist() == [3, 6]
    assert dict(call.trailing_metadata()) == {
        "x-onnx-ops-deployment": "green",
        "x-amzn-invoked-production-variant": "green",
        "x-request-id": "r-1",
        "traceparent": "00-a-b-01",
    }


def test_grpc_infer_with_typed_contents_returns_output(worker: Worker, connect: Connect) -> None:
    tensor = {**X, "contents": {"fp32_contents": [1, 2]}}
    response = connect(worker.grpc_port).call(
        "ModelInfer", model_name="m", model_version="1", inputs=[tensor]
    )
    assert np.frombuffer(response.raw_output_contents[0], np.float32).tolist() == [2, 4]


def test_grpc_infer_with_user_key_selects_same_deployment_as_http(
    worker: Worker, connect: Connect
) -> None:
    client = connect(worker.grpc_port)
    for user in map(str, range(40)):
        head = worker.send(
            post(INFER, infer_body([1, 2]), {"x-user-key": user, "connection": "close"})
        )
        response = client.call("ModelInfer", (("x-user-key", user),), **INPUT)
        assert json.loads(head.partition(b"\r\n\r\n")[2])["model_version"] == response.model_version


@pytest.mark.parametrize(
    ("changes", "code", "status", "message"),
    [
        (
            {"model_name": "z"},
            Code.NOT_FOUND,
            404,
            "no model is named 'z'; this endpoint serves 'm'",
        ),
        ({"model_name": ""}, Code.NOT_FOUND, 404, "no model is named ''; this endpoint serves 'm'"),
        ({"model_version": "9"}, Code.NOT_FOUND, 404, "does not serve version '9' of model 'm'"),
        (
            {"inputs": [{**X, "shape": [1, 3]}]},
            Code.INVALID_ARGUMENT,
            400,
            "tensor 'x' must have shape [batch, 2], not [1, 3]",
        ),
        (
            {"inputs": [{**X, "datatype": "FP64"}]},
            Code.INVALID_ARGUMENT,
            400,
            "tensor 'x' must be FP32, not 'FP64'",
        ),
        ({"raw_input_contents": [b"1234567"]}, Code.INVALID_ARGUMENT, 400, "needs 8 bytes, not 7"),
        (
            {"raw_input_contents": [ROW, ROW]},
            Code.INVALID_ARGUMENT,
            400,
            "1 inputs, but 2 raw_input_contents",
        ),
        (
            {"outputs": [{"name": "z"}]},
            Code.INVALID_ARGUMENT,
            400,
            "outputs can contain only y, each at most once",
        ),
    ],
)
def test_grpc_infer_of_invalid_request_returns_code_and_counts_http_status(
    worker: Worker, connect: Connect, changes: dict[str, Any], code: Any, status: int, message: str
) -> None:
    client = connect(worker.grpc_port)
    with pytest.raises(grpc.RpcError) as caught:
        client.call("ModelInfer", **{**INPUT, **changes})
    assert (caught.value.code(), message in caught.value.details()) == (code, True), (
        caught.value.details()
    )
    assert count(worker, status) == 1


@pytest.mark.parametrize(
    ("data", "code", "status"),
    [(b"\x2a\x00" * 5000, Code.RESOURCE_EXHAUSTED, 413), (b"\x2a", Code.INVALID_ARGUMENT, 400)],
)
def test_grpc_message_that_cannot_be_decoded_returns_same_error_in_call_and_stream(
    worker: Worker, connect: Connect, data: bytes, code: Any, status: int
) -> None:
    channel = connect(worker.grpc_port).channel
    with pytest.raises(grpc.RpcError) as caught:
        channel.unary_unary(f"/{SERVICE}/ModelInfer")(data, timeout=30)
    assert caught.value.code() is code
    (answer,) = channel.stream_stream(f"/{SERVICE}/{STREAM}")(iter([data]), timeout=30)
    assert (
        get_message_class("ModelStreamInferResponse").FromString(answer).error_message
        == caught.value.details()
    )
    assert count(worker, status) == 2


def test_grpc_infer_with_unknown_deployment_returns_not_found(
    worker: Worker, connect: Connect
) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        connect(worker.grpc_port).call(
            "ModelInfer", (("azureml-model-deployment", "red"),), **INPUT
        )
    assert caught.value.code() is Code.NOT_FOUND


def test_grpc_server_and_model_calls_report_readiness_and_metadata(
    worker: Worker, connect: Connect
) -> None:
    client = connect(worker.grpc_port)
    assert client.call("ServerLive").live
    assert client.call("ServerReady").ready
    assert client.call("ServerMetadata").name == "onnx-ops"
    assert client.call("ModelReady", name="m", version="2").ready
    assert not client.call("ModelReady", name="z").ready
    model = client.call("ModelMetadata", name="m")
    assert (model.name, list(model.versions), model.platform) == (
        "m",
        ["1", "2"],
        "onnxruntime_onnx",
    )
    assert [(t.name, t.datatype, list(t.shape)) for t in (*model.inputs, *model.outputs)] == [
        ("x", "FP32", [-1, 2]),
        ("y", "FP32", [-1, 2]),
    ]
    with pytest.raises(grpc.RpcError, match="no model is named 'z'"):
        client.call("ModelMetadata", name="z")


def test_grpc_repository_index_lists_ready_versions(worker: Worker, connect: Connect) -> None:
    index = connect(worker.grpc_port).call("RepositoryIndex", ready=True)
    assert [(m.name, m.version, m.state, m.reason) for m in index.models] == [
        ("m", "1", "READY", ""),
        ("m", "2", "READY", ""),
    ]


def test_grpc_infer_with_content_encoding_metadata_ignores_it(
    worker: Worker, connect: Connect
) -> None:
    response = connect(worker.grpc_port).call(
        "ModelInfer", (("content-encoding", "gzip"),), **INPUT
    )
    assert response.model_name == "m"


def test_grpc_server_before_first_publication_is_not_ready(
    worker: Worker, connect: Connect
) -> None:
    worker.shared.header[REVISION] = 0
    client = connect(worker.grpc_port)
    assert client.call("ServerLive").live
    assert not client.call("ServerReady").ready
    with pytest.raises(grpc.RpcError) as caught:
        client.call("ModelInfer", **INPUT)
    assert caught.value.code() is Code.UNAVAILABLE
    assert caught.value.details() == "no deployment is published to this endpoint yet"


def test_grpc_requests_behind_running_http_request_are_queued_up_to_limit(
    gate: Gate, blue: Deployment, connect: Connect
) -> None:
    with behind(gate, replace(blue, batchable=True), queue=2) as worker:
        with worker.connect() as http:
            http.sendall(post(INFER, infer_body([1, 2])))
            assert gate.entered.acquire(timeout=30)
            client = connect(worker.grpc_port)
            calls = [client.method("ModelInfer").future(Message(**INPUT)) for _ in range(2)]
            wait_until(lambda: worker.shared.sum_slot(1)[metrics.QUEUED] == 2)
            with pytest.raises(grpc.RpcError) as caught:
                client.call("ModelInfer", **INPUT)
            gate.open.set()
            assert caught.value.code() is Code.RESOURCE_EXHAUSTED
            assert "too many requests are queued" in caught.value.details()
            assert dict(caught.value.trailing_metadata())["retry-after"].isdigit()
            assert all(call.result().model_version == "1" for call in calls)
        assert gate.rows == [1, 2]


def test_grpc_request_past_deadline_is_not_run(
    gate: Gate, blue: Deployment, connect: Connect
) -> None:
    with behind(gate, blue) as worker:
        client = connect(worker.grpc_port)
        infer = client.method("ModelInfer")
        first = infer.future(Message(**INPUT))
        assert gate.entered.acquire(timeout=30)
        by_header = infer.future(Message(**INPUT), metadata=(("x-request-timeout-ms", "1"),))
        by_call = infer.future(Message(**INPUT), timeout=0.05)
        assert by_call.code() is Code.DEADLINE_EXCEEDED
        time.sleep(0.05)
        gate.open.set()
        assert by_header.code() is Code.DEADLINE_EXCEEDED
        assert by_header.details() == "the request was queued past its deadline"
        assert first.result().model_version == "1"
        wait_until(lambda: worker.shared.sum_slot(1)[metrics.QUEUED] == 0)
    assert gate.rows == [1]


def test_grpc_request_after_cancellation_is_not_run(
    gate: Gate, blue: Deployment, connect: Connect
) -> None:
    with behind(gate, blue) as worker:
        infer = connect(worker.grpc_port).method("ModelInfer")
        first = infer.future(Message(**INPUT))
        assert gate.entered.acquire(timeout=30)
        second = infer.future(Message(**INPUT))
        wait_until(lambda: worker.shared.sum_slot(1)[metrics.QUEUED] == 1)
        second.cancel()
        wait_until(
            lambda: worker.connections.body_bytes == len(encode_request(Message(**INPUT))[0])
        )
        gate.open.set()
        assert first.result().model_version == "1"
        wait_until(lambda: worker.shared.sum_slot(1)[metrics.get_column(499)] == 1)
    assert gate.rows == [1]


@pytest.mark.parametrize("compression", [grpc.Compression.NoCompression, grpc.Compression.Gzip])
def test_grpc_message_above_size_or_total_limit_returns_error(
    blue: Deployment, connect: Connect, compression: Any
) -> None:
    bounds = {"max_body": 1 << 16}
    with Worker(state_of(blue, blue=100), grpc_port=free_port(), bounds=bounds).running() as worker:
        infer = connect(worker.grpc_port).method("ModelInfer")
        big = Message(**{**INPUT, "raw_input_contents": [bytes(1 << 20)]})
        with pytest.raises(grpc.RpcError) as caught:
            infer(big, compression=compression)
        assert caught.value.code() is Code.RESOURCE_EXHAUSTED
        small = Message(
            **{**INPUT, "inputs": [{**X, "shape": [1000, 2]}], "raw_input_contents": [bytes(8000)]}
        )
        assert len(infer(small, compression=compression).raw_output_contents[0]) == 8000
        worker.connections.max_body_bytes = 4000
        with pytest.raises(grpc.RpcError) as caught:
            infer(small)
        assert caught.value.code() is Code.UNAVAILABLE
        assert worker.connections.body_bytes == 0


def test_grpc_stream_with_failing_request_answers_rest_in_order(
    worker: Worker, connect: Connect
) -> None:
    rows = [Message(**{**INPUT, "id": str(number), "model_version": "1"}) for number in range(200)]
    rows[3].model_name = "z"
    rows[5].parameters["triton_enable_empty_final_response"].bool_param = True
    responses = list(connect(worker.grpc_port).method(STREAM)(iter(rows), timeout=30))
    assert [r.infer_response.id for r in responses] == [str(number) for number in range(200)]
    assert [r.error_message for r in responses if r.error_message] == [
        "no model is named 'z'; this endpoint serves 'm'"
    ]
    assert responses[5].infer_response.parameters["triton_final_response"].bool_param
    assert not responses[4].infer_response.parameters
    assert (
        responses[199].infer_response.raw_output_contents[0]
        == np.array([2, 4], np.float32).tobytes()
    )


def test_feedback_by_tokens_of_grpc_answers_is_counted_only_if_table_has_key(
    blue: Deployment, connect: Connect
) -> None:
    for key in ("", "0f" * 16):
        with Worker(
            state_of(blue, blue=100), grpc_port=free_port(), feedback_key=key
        ).running() as worker:
            client = connect(worker.grpc_port)
            _, call = client.method("ModelInfer").with_call(Message(**INPUT))
            tokens = [dict(call.trailing_metadata()).get(FEEDBACK_HEADER, "")]
            responses = client.method(STREAM)(iter([Message(**INPUT)] * 2), timeout=30)
            tokens += [
                each.infer_response.parameters[FEEDBACK_HEADER].string_param for each in responses
            ]
            body = json.dumps(
                {"feedback": [{"token": token, "success": True} for token in tokens]}
            ).encode()
            answer = worker.send(post("/feedback", body, {"content-type": "application/json"}))
            assert answer.endswith(
                b'{"counted":3,"unknown":0}' if key else b'{"counted":0,"unknown":3}'
            )


def test_grpc_stream_runs_queued_requests_as_one_batch(
    gate: Gate, blue: Deployment, connect: Connect
) -> None:
    with behind(gate, replace(blue, batchable=True)) as worker:
        stream = connect(worker.grpc_port).method(STREAM)(iter([Message(**INPUT)] * 9), timeout=30)
        wait_until(lambda: worker.shared.sum_slot(1)[metrics.QUEUED] == 8)
        gate.open.set()
        assert len(list(stream)) == 9
    assert gate.rows == [1, 8]


def test_grpc_request_with_shadow_is_mirrored(
    blue: Deployment, green: Deployment, connect: Connect
) -> None:
    with Worker(mirrored(blue, green), grpc_port=free_port()).running() as worker:
        connect(worker.grpc_port).call("ModelInfer", **INPUT)
        wait_until(lambda: worker.shared.sum_slot(2)[metrics.SHADOW_DONE] == 1)
        assert worker.shared.sum_slot(2)[metrics.SHADOW_DIFFERING] == 1


def test_grpc_server_stop_answers_running_requests_and_ends_idle_streams(
    gate: Gate, blue: Deployment, connect: Connect
) -> None:
    idle = threading.Event()

    def wait_idle() -> Iterator[Any]:
        idle.wait(30)
        yield from ()

    with behind(gate, blue) as worker:
        client = connect(worker.grpc_port)
        call = client.method("ModelInfer").future(Message(**INPUT))
        assert gate.entered.acquire(timeout=30)
        stream = client.method(STREAM)(wait_idle())
        worker.loop.call_soon_threadsafe(worker.stop.set)
        wait_until(lambda: worker.connections.draining)
        time.sleep(0.2)
        gate.open.set()
        assert call.result().model_version == "1"
        # The client would end its empty stream only after 30 s.
        with pytest.raises(grpc.RpcError):
            list(stream)
        assert not idle.is_set()
    idle.set()
