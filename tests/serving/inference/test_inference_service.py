"""The service: runs on event loop and threads, batches, deadlines, shadows, counts.

The models run for real, and as slowly as a test needs.
"""

from __future__ import annotations

import gzip
import json
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper

from onnx_ops.domain.endpoint import Deployment
from onnx_ops.protocol.messages import (
    CELL_ERRORS,
    CELL_LATENCIES,
    CELL_REFUSED,
    CELL_REQUESTS,
    UserCountsRequest,
    decode_cells,
)
from onnx_ops.serving import metrics, rollout_counts
from onnx_ops.serving.inference import deployments, models
from onnx_ops.serving.inference.deployments import TableRevision
from onnx_ops.serving.inference.request_queue import LatencyEstimator
from onnx_ops.serving.inference.requests import read_infer
from onnx_ops.serving.inference.service import group_requests
from onnx_ops.serving.inference.signature import InferenceRequest
from onnx_ops.serving.inference.traffic_router import TrafficRouter
from onnx_ops.serving.metrics import WARM_UP_REQUESTS
from onnx_ops.serving.rollout_counts import RolloutCounts
from onnx_ops.testing.endpoints import scaling_deployment, state_of
from tests.serving.serving_process import (
    FOREVER,
    INFER,
    ODD,
    deploy,
    deploy_loop,
    infer_body,
    loop_body,
    mirrored,
    save_graph,
    wait_until,
)
from tests.serving.serving_worker import Gate, Worker, post
from tests.support.must import must
from tests.support.server import received

BODY = infer_body([1, 1])
REQUEST = post(INFER, BODY)
JSON_TYPE = {"content-type": "application/json"}


def status(answer: bytes) -> int:
    return int(answer[9:12])


@pytest.fixture
def batchable(blue: Deployment) -> Deployment:
    return replace(blue, batchable=True)


def behind(gate: Gate, deployment: Deployment, **more: Any) -> AbstractContextManager[Worker]:
    """Return a worker that queues its requests, and whose model runs behind the gate."""
    return Worker(
        state_of(deployment, **{deployment.name: 100}), wrap=gate.wrap, slow=True, **more
    ).running()


def queue_up(worker: Worker, gate: Gate, *requests: bytes) -> list[socket.socket]:
    """Send a request that the gate blocks, and others that queue behind it."""
    clients = [worker.connect() for _ in requests]
    for client, request in zip(clients, requests, strict=True):
        client.sendall(request)
        if client is clients[0]:
            assert gate.entered.acquire(timeout=30)
    wait_until(lambda: worker.shared.sum_slot(1)[metrics.QUEUED] == len(requests) - 1)
    return clients


def answers_to(gate: Gate, clients: Sequence[socket.socket]) -> list[bytes]:
    gate.open.set()
    answers = [received(client) for client in clients]
    for client in clients:
        client.close()
    return answers


def data_of(answer: bytes) -> list[float]:
    return list(json.loads(answer.partition(b"\r\n\r\n")[2])["outputs"][0]["data"])


def test_requests_queued_during_run_are_run_as_one_batch(gate: Gate, batchable: Deployment) -> None:
    rows: list[list[list[float]]] = [
        [[0, 0]],
        *([[number, number + 0.5]] * number for number in range(1, 5)),
    ]
    with behind(gate, batchable) as worker:
        clients = queue_up(worker, gate, *(post(INFER, infer_body(*each)) for each in rows))
        for each, answer in zip(rows, answers_to(gate, clients), strict=True):
            assert data_of(answer) == [2 * value for row in each for value in row]
        totals = worker.shared.sum_slot(1)
    assert gate.rows == [1, 1 + 2 + 3 + 4]
    assert totals[metrics.RUNS] == 2
    assert totals[metrics.BATCHED] == 4
    assert totals[metrics.QUEUED] == totals[metrics.IN_PROGRESS] == 0


def test_queued_requests_of_unbatchable_deployment_run_separately(
    gate: Gate, blue: Deployment
) -> None:
    with behind(gate, blue) as worker:
        clients = queue_up(worker, gate, *[post(INFER, infer_body([1, 1], [2, 2]))] * 4)
        assert [status(answer) for answer in answers_to(gate, clients)] == [200] * 4
    assert gate.rows == [2, 2, 2, 2]


def test_invalid_request_in_batch_fails_alone(gate: Gate, batchable: Deployment) -> None:
    with behind(gate, batchable) as worker:
        clients = queue_up(worker, gate, REQUEST, REQUEST, post(INFER, b'{"inputs": []}'), REQUEST)
        assert [status(answer) for answer in answers_to(gate, clients)] == [200, 200, 400, 200]


def test_batch_with_inseparable_outputs_runs_one_by_one(
    gate: Gate, build: Callable[..., Deployment]
) -> None:
    """The model drops duplicate rows, so that two equal requests give one row."""
    unique = helper.make_node("Unique", ["x"], ["y"], axis=0)
    model = build(
        [unique], [("x", TensorProto.FLOAT, ["b", 2])], [("y", TensorProto.FLOAT, ["c", 2])]
    )
    with behind(gate, replace(model, batchable=True)) as worker:
        clients = queue_up(worker, gate, *[post(INFER, infer_body([5, 5]))] * 3)
        assert [data_of(answer) for answer in answers_to(gate, clients)] == [[5.0, 5.0]] * 3
    assert gate.rows == [1, 2, 1, 1]


def test_full_queue_returns_retry_after(gate: Gate, blue: Deployment) -> None:
    with behind(gate, blue, queue=2) as worker:
        clients = queue_up(worker, gate, REQUEST, REQUEST, REQUEST)
        answer = worker.send(REQUEST)
        assert status(answer) == 429
        assert b"\r\nretry-after: 2\r\n" in answer
        assert b"\r\nx-onnx-ops-deployment: blue\r\n" in answer
        assert [status(answer) for answer in answers_to(gate, clients)] == [200] * 3
        assert worker.shared.sum_slot(1)[metrics.get_column(429)] == 1


def test_queued_request_past_timeout_returns_504_without_run(gate: Gate, blue: Deployment) -> None:
    late, patient, wrong = (
        post(INFER, BODY, {"x-request-timeout-ms": value}) for value in ("1", "10000", "soon")
    )
    with behind(gate, blue) as worker:
        clients = queue_up(worker, gate, REQUEST, late, patient)
        time.sleep(0.02)
        assert [status(answer) for answer in answers_to(gate, clients)] == [200, 504, 200]
        assert status(worker.send(wrong)) == 400
    assert len(gate.rows) == 2


def test_queued_request_of_disconnected_client_is_not_run(gate: Gate, blue: Deployment) -> None:
    with behind(gate, blue) as worker:
        first, gone = queue_up(worker, gate, REQUEST, REQUEST)
        gone.close()
        wait_until(lambda: len(worker.connections.open) == 1)
        assert status(*answers_to(gate, [first])) == 200
        wait_until(lambda: worker.shared.sum_slot(1)[metrics.get_column(499)] == 1)
    assert len(gate.rows) == 1


def test_pipelined_request_behind_queued_request_waits(gate: Gate, blue: Deployment) -> None:
    ping = post("/ping", b"", method="GET")
    with behind(gate, blue) as worker, worker.connect() as client:
        client.sendall(REQUEST + ping + post(INFER, infer_body([3, 3])))
        assert gate.entered.acquire(timeout=30)
        assert status(worker.send(ping)) == 200
        gate.open.set()
        answers = received(client, 3).split(b"HTTP/1.1 ")[1:]
    assert [
        b'"data":[2.0' in answers[0],
        b'"ready":true' in answers[1],
        b'"data":[6.0' in answers[2],
    ] == [True] * 3


def test_drain_of_worker_answers_running_and_partly_read_requests(
    gate: Gate, blue: Deployment, green: Deployment
) -> None:
    with behind(gate, blue) as worker:
        (waits,) = queue_up(worker, gate, REQUEST)
        # This table removes the deployment that is running.
        worker.publish(state_of(green, green=100))
        reads, idle = worker.connect(), worker.connect()
        reads.sendall(REQUEST[:-5])
        wait_until(lambda: len(worker.connections.open) == 3)
        worker.loop.call_soon_threadsafe(worker.stop.set)
        assert idle.recv(1) == b""
        idle.close()
        reads.sendall(REQUEST[-5:])
        gate.open.set()
        for client in (waits, reads):
            answer = received(client)
            assert status(answer) == 200
            assert b"connection: close" in answer
            assert client.recv(1) == b""
            client.close()


def test_repeated_request_with_other_output_shape_is_answered(
    build: Callable[..., Deployment],
) -> None:
    """The model drops duplicate rows.

    Its output does not always fit the memory that is bound for it.
    """
    unique = helper.make_node("Unique", ["x"], ["y"], axis=0)
    model = build(
        [unique], [("x", TensorProto.FLOAT, ["b", 2])], [("y", TensorProto.FLOAT, ["c", 2])]
    )
    with Worker(state_of(model, blue=100)).running() as worker:
        for rows, data in (
            *[(([5, 5], [5, 5]), [5.0, 5.0])] * 4,
            (([1, 2], [3, 4]), [1.0, 2.0, 3.0, 4.0]),
            (([6, 6], [6, 6]), [6.0, 6.0]),
        ):
            assert data_of(worker.send(post(INFER, infer_body(*rows)))) == data


def test_repeated_request_that_model_rejects_returns_422(build: Callable[..., Deployment]) -> None:
    constant = helper.make_node(
        "Constant", [], ["t"], value=helper.make_tensor("t", TensorProto.FLOAT, [2], [7, 8])
    )
    gather = helper.make_node("Gather", ["t", "x"], ["y"])
    model = build(
        [constant, gather], [("x", TensorProto.INT64, ["b"])], [("y", TensorProto.FLOAT, ["b"])]
    )
    with Worker(state_of(model, blue=100)).running() as worker:
        for place, code in ((0, 200), (1, 200), (1, 200), (9, 422), (1, 200)):
            tensor = {"name": "x", "datatype": "INT64", "shape": [1], "data": [place]}
            answer = worker.send(post(INFER, json.dumps({"inputs": [tensor]}).encode()))
            assert status(answer) == code
            assert code != 200 or data_of(answer) == [7.0 + place]


def read_judged(worker: Worker, slot: int) -> dict[object, int]:
    """Return the judged requests of a slot by status."""
    return {
        status: count
        for status, count in metrics.count_judged(worker.shared.sum_slot(slot)).items()
        if count
    }


def count_cells(worker: Worker, counts: RolloutCounts) -> dict[str, tuple[int, int, int]]:
    """Return requests, errors and refusals by deployment, as counted by user."""
    fields = {
        name: decode_cells(text)[1][:, [CELL_REQUESTS, CELL_ERRORS, CELL_REFUSED]].sum(0).tolist()
        for name, text in counts.collect(WATCHED).tables[-1].cells.items()
    }
    return {
        name: (requests, errors, refused) for name, (requests, errors, refused) in fields.items()
    }


WATCHED = UserCountsRequest(limits_s={"blue": (), "green": ()})


@pytest.fixture(params=[False, True], ids=["inline", "queued"])
def judged(
    request: pytest.FixtureRequest, tmp_path: Path, blue: Deployment
) -> Iterator[tuple[Worker, RolloutCounts]]:
    """Yield a worker, and its counts by user.

    Its candidate accepts fewer inputs than blue. All requests of a user stay on one version.
    """
    node = helper.make_node("Mul", ["x", "x"], ["y"])
    fields = ("x", TensorProto.FLOAT, [1, 2]), ("y", TensorProto.FLOAT, [1, 2])
    path = save_graph(tmp_path / "narrow", [node], [fields[0]], [fields[1]])
    green = deploy(path.parent, name="green", version="2")
    state = state_of(blue, green, blue=50, green=50)
    with Worker(state, slow=request.param).running() as worker:
        counts = RolloutCounts(worker.shared)
        counts.start_table(
            TableRevision(number=1, table=must(worker.table), slots={"blue": 1, "green": 2}), 0.0
        )
        counts.collect(WATCHED)
        yield worker, counts


def find_user(worker: Worker, name: str) -> dict[str, str]:
    """Return the header of a user of a deployment."""
    router = TrafficRouter.from_table(must(worker.table))
    users = (str(number) for number in range(1000))
    return {
        "x-user-key": next(
            u for u in users if router.route_cell(router.draw, router.get_cell(u.encode())) == name
        )
    }


@pytest.mark.parametrize("body", [b"{", infer_body([1, 1]), infer_body([1, "a"])])
def test_requests_that_select_version_are_not_judged(
    judged: tuple[Worker, RolloutCounts], body: bytes
) -> None:
    worker, counts = judged
    pins = {"azureml-model-deployment": "green", "x-request-id": "r-1"}
    for path, headers in ((INFER, pins), (INFER.replace("/infer", "/versions/2/infer"), {})):
        worker.send(post(path, body, headers))
    assert read_judged(worker, 2) == {}
    assert sum(metrics.count_unjudged(worker.shared.sum_slot(2)).values()) == 2
    assert sum(metrics.get_service_latency(worker.shared.sum_slot(2)).buckets) == 0
    assert count_cells(worker, counts) == {"blue": (0, 0, 0), "green": (0, 0, 0)}
    feedback = worker.send(post("/feedback", b'{"request_id": "r-1", "success": true}', JSON_TYPE))
    assert feedback.endswith(b'{"counted":0,"unknown":1}')


def test_request_refused_by_all_versions_is_not_judged(
    judged: tuple[Worker, RolloutCounts],
) -> None:
    worker, counts = judged
    for name in ("blue", "green"):
        for body in (b"{", infer_body([1, "a"])):
            assert status(worker.send(post(INFER, body, find_user(worker, name)))) == 400
    assert [read_judged(worker, slot) for slot in (1, 2)] == [{}, {}]
    assert [metrics.count_unjudged(worker.shared.sum_slot(slot))[400] for slot in (1, 2)] == [2, 2]
    assert count_cells(worker, counts) == {"blue": (0, 0, 0), "green": (0, 0, 0)}


def test_request_accepted_only_by_other_version_counts_as_refused(
    judged: tuple[Worker, RolloutCounts],
) -> None:
    worker, counts = judged
    two_rows = post(INFER, infer_body([1, 1], [2, 2]), find_user(worker, "green"))
    assert status(worker.send(two_rows)) == 400
    assert read_judged(worker, 2) == {400: 1}
    assert count_cells(worker, counts) == {"blue": (0, 0, 0), "green": (1, 0, 1)}


def post_compressed(worker: Worker, body: bytes) -> bytes:
    """Send a compressed body from a user of green; return the response."""
    headers = {"content-encoding": "gzip", **find_user(worker, "green")}
    return worker.send(post(INFER, gzip.compress(body), headers))


def test_compressed_body_read_for_other_version_is_charged_to_budget(
    judged: tuple[Worker, RolloutCounts], monkeypatch: pytest.MonkeyPatch
) -> None:
    worker, _ = judged
    charged: list[int] = []

    def read(*arguments: Any) -> InferenceRequest:
        charged.append(worker.connections.inflated.bytes)
        return read_infer(*arguments)

    monkeypatch.setattr(deployments, "read_infer", read)
    body = infer_body([1, 1], [2, 2])
    assert status(post_compressed(worker, body)) == 400
    assert charged == [len(body)] * 2
    assert worker.connections.inflated.bytes == 0
    assert read_judged(worker, 2) == {400: 1}


def test_request_whose_decompression_for_other_version_exceeds_budget_is_not_judged(
    judged: tuple[Worker, RolloutCounts], monkeypatch: pytest.MonkeyPatch
) -> None:
    worker, counts = judged

    def read(*arguments: Any) -> InferenceRequest:
        worker.connections.inflated.bytes += worker.connections.max_body_bytes
        return read_infer(*arguments)

    monkeypatch.setattr(deployments, "read_infer", read)
    assert status(post_compressed(worker, infer_body([1, 1], [2, 2]))) == 400
    assert read_judged(worker, 2) == {}
    assert count_cells(worker, counts)["green"] == (0, 0, 0)


def test_request_that_selects_version_is_not_mirrored(blue: Deployment, green: Deployment) -> None:
    with Worker(mirrored(blue, green)).running() as worker:
        for headers in ({"azureml-model-deployment": "blue"}, {}):
            assert status(worker.send(post(INFER, BODY, headers))) == 200
        wait_until(lambda: worker.shared.sum_slot(2)[metrics.SHADOW_DONE] == 1)
        assert worker.shared.sum_slot(2)[metrics.SHADOW_SENT] == 1


def test_run_past_time_limit_returns_504_and_next_run_succeeds(tmp_path: Path) -> None:
    with Worker(
        state_of(deploy_loop(tmp_path / "loop"), blue=100), run_timeout=0.2
    ).running() as worker:
        answer = worker.send(post(INFER, loop_body(FOREVER)))
        assert status(answer) == 504
        assert b"was ended after 0.2" in answer
        assert b"x-onnx-ops-deployment: blue" in answer
        assert data_of(worker.send(post(INFER, loop_body(5)))) == [6.0, 6.0]
        totals = worker.shared.sum_slot(1)
    assert (totals[metrics.get_column(504)], totals[metrics.get_column(200)]) == (1, 1)


def test_run_past_request_timeout_returns_504(tmp_path: Path) -> None:
    with Worker(state_of(deploy_loop(tmp_path / "loop"), blue=100)).running() as worker:
        assert (
            status(worker.send(post(INFER, loop_body(FOREVER), {"x-request-timeout-ms": "100"})))
            == 504
        )


def test_batch_past_time_limit_returns_504(gate: Gate, tmp_path: Path) -> None:
    deployment = replace(deploy_loop(tmp_path / "loop"), batchable=True)
    with behind(gate, deployment, run_timeout=0.2) as worker:
        clients = queue_up(worker, gate, *[post(INFER, loop_body(FOREVER))] * 3)
        assert [status(answer) for answer in answers_to(gate, clients)] == [504] * 3


def test_model_after_long_run_on_event_loop_moves_to_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(models, "_UNBOUNDED_OPERATORS", (b"no operator",))
    with Worker(
        state_of(deploy_loop(tmp_path / "loop"), blue=100), run_timeout=0.2
    ).running() as worker:
        # These JSON requests have two inputs, so none of them uses bound memory.
        for _ in range(3):
            assert status(worker.send(post(INFER, loop_body(2)))) == 200
        # No run was on a thread.
        assert worker.shared.sum_slot(1)[metrics.RUN_NANOSECONDS] == 0
        assert status(worker.send(post(INFER, loop_body(FOREVER)))) == 504
        for _ in range(3):
            assert data_of(worker.send(post(INFER, loop_body(3)))) == [4.0, 4.0]
        assert worker.shared.sum_slot(1)[metrics.RUN_NANOSECONDS] > 0


def test_model_with_loop_and_versions_that_share_its_traffic_must_queue(tmp_path: Path) -> None:
    loop, plain = (
        deploy_loop(tmp_path / "loop"),
        scaling_deployment(tmp_path / "plain", name="green", version="2", scale=2.0, model="m"),
    )
    with Worker(state_of(loop, plain, blue=50, green=50)).running() as worker:
        snapshot = worker.deployments.get_current()
        assert [loaded.must_queue for loaded in snapshot.list_loaded()] == [True, True]
        worker.publish(state_of(loop, plain, blue=0, green=100))
        snapshot = worker.deployments.get_current()
        assert {name: loaded.must_queue for name, loaded in snapshot.deployments.items()} == {
            "blue": True,
            "green": False,
        }


def only(name: str, wrap: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the runs of one deployment."""
    return lambda run: wrap(run) if run.__self__.deployment.name == name else run


def failing(error: Exception) -> Callable[..., Any]:
    def fail(*_: Any) -> Any:
        raise error

    return lambda _: fail


def test_shadow_receives_copies_and_its_answers_reach_no_client(
    blue: Deployment, green: Deployment
) -> None:
    with Worker(mirrored(blue, green)).running() as worker:
        for number in range(20):
            answer = worker.send(post(INFER, infer_body([number, 1])))
            assert b"x-onnx-ops-deployment: blue" in answer
            assert b'"data":[%.1f,2.0]' % (2 * number) in answer
        # Only valid requests are mirrored, since an invalid one shows nothing about the shadow.
        assert status(worker.send(post(INFER, b"{"))) == 400
        wait_until(lambda: worker.shared.sum_slot(2)[metrics.SHADOW_DONE] == 20)
        totals = worker.shared.sum_slot(2)
    assert totals[metrics.SHADOW_SENT] == 20
    # All answers differ: green multiplies by three, and blue by two.
    assert totals[metrics.SHADOW_DIFFERING] == 20
    assert totals[metrics.get_column(200)] == 0


@pytest.mark.parametrize(("tolerance", "differing"), [(1e-3, 0), (1e-4, 3)])
def test_shadow_answer_beyond_tolerance_counts_as_differing(
    blue: Deployment, tmp_path: Path, tolerance: float, differing: int
) -> None:
    replica = scaling_deployment(
        tmp_path / "replica", name="replica", version="3", scale=2.0005, model="m"
    )
    with Worker(mirrored(blue, replica, shadow_tolerance=tolerance)).running() as worker:
        for number in range(3):
            worker.send(post(INFER, infer_body([number, 1])))
        wait_until(lambda: worker.shared.sum_slot(2)[metrics.SHADOW_DONE] == 3)
        assert worker.shared.sum_slot(2)[metrics.SHADOW_DIFFERING] == differing


def test_mirrored_requests_beyond_shadow_queue_are_dropped_and_counted(
    gate: Gate, blue: Deployment, green: Deployment
) -> None:
    with Worker(
        mirrored(blue, green), wrap=only("green", gate.wrap), shadow_queue=8
    ).running() as worker:
        sent = 0
        # The socket and the shadow process take some requests from the queue.
        while not worker.shared.sum_slot(2)[metrics.SHADOW_DROPPED]:
            assert status(worker.send(REQUEST)) == 200
            sent += 1
        totals = worker.shared.sum_slot(2)
        assert totals[metrics.SHADOW_SENT] + totals[metrics.SHADOW_DROPPED] == sent
        gate.open.set()
        wait_until(
            lambda: worker.shared.sum_slot(2)[metrics.SHADOW_DONE] == totals[metrics.SHADOW_SENT]
        )


def test_queued_mirrored_requests_run_before_shadow_ends(
    gate: Gate, blue: Deployment, green: Deployment
) -> None:
    with Worker(mirrored(blue, green), wrap=only("green", gate.wrap)).running() as worker:
        for _ in range(5):
            assert status(worker.send(REQUEST)) == 200
        assert gate.entered.acquire(timeout=30)
        gate.open.set()
    assert worker.shared.sum_slot(2)[metrics.SHADOW_DONE] == 5


def test_failing_shadow_does_not_affect_clients(blue: Deployment, green: Deployment) -> None:
    wrap = only("green", failing(ValueError("an unexpected error")))
    with Worker(mirrored(blue, green), wrap=wrap).running() as worker:
        for _ in range(3):
            assert status(worker.send(REQUEST)) == 200
        wait_until(lambda: worker.shared.sum_slot(2)[metrics.SHADOW_FAILED] == 3)


@pytest.mark.parametrize("slow", [False, True])
def test_unexpected_error_in_model_returns_500_without_details(
    blue: Deployment, slow: bool
) -> None:
    with Worker(
        state_of(blue, blue=100), wrap=failing(ZeroDivisionError("secret")), slow=slow
    ).running() as worker:
        for headers in ({}, ODD):
            answer = worker.send(post(INFER, infer_body([1, 1]), headers))
            assert status(answer) == 500
            assert answer.endswith(b'{"error":"internal error"}')


@pytest.mark.parametrize("slow", [False, True])
def test_invocation_that_model_rejects_returns_500(
    build: Callable[..., Deployment], slow: bool
) -> None:
    """SageMaker counts 4xx as the client's errors, so a rollout would not count them."""
    table = helper.make_tensor("t", TensorProto.FLOAT, [4], [1.0, 2.0, 3.0, 4.0])
    constant = helper.make_node("Constant", [], ["t"], value=table)
    gather = helper.make_node("Gather", ["t", "x"], ["y"])
    deployment = build(
        [constant, gather], [("x", TensorProto.INT64, ["b"])], [("y", TensorProto.FLOAT, ["b"])]
    )
    infer = {"inputs": [{"name": "x", "datatype": "INT64", "shape": [1], "data": [7]}]}
    with Worker(state_of(deployment, **{deployment.name: 100}), slow=slow).running() as worker:
        assert status(worker.send(post(INFER, json.dumps(infer).encode()))) == 422
        for value, expected in ((7, 500), (3, 200), (0.5, 400)):
            answer = worker.send(
                post("/invocations", json.dumps({"inputs": {"x": [value]}}).encode())
            )
            assert status(answer) == expected


def test_metrics_after_mixed_requests_have_exact_counts(
    blue: Deployment, green: Deployment
) -> None:
    with Worker(state_of(blue, green, blue=70, green=30)).running() as worker:
        for number in range(30):
            headers = {"azureml-model-deployment": "blue" if number % 3 else "green"}
            headers |= ODD if number % 2 else {}
            worker.send(post(INFER, infer_body([1, 1]) if number % 5 else b"{", headers))
        worker.send(post(INFER, b"", {"content-encoding": "br"}))
        worker.send(post("/v2/models/z/infer", infer_body([1, 1])))
        unrouted, first, second = (worker.shared.sum_slot(slot) for slot in range(3))
        text = worker.metrics()
    assert (first[metrics.get_column(200)], first[metrics.get_column(400)]) == (16, 4)
    assert (second[metrics.get_column(200)], second[metrics.get_column(400)]) == (8, 2)
    assert (unrouted[metrics.get_column(415)], unrouted[metrics.get_column(404)]) == (1, 1)
    assert sum(metrics.get_request_latency(first).buckets) == 20
    blue_labels = 'endpoint="e",deployment="blue",version="1",variant="fp32"'
    assert f'onnx_ops_request_duration_seconds_bucket{{{blue_labels},le="+Inf"}} 20\n' in text
    assert f"onnx_ops_model_runs_total{{{blue_labels}}} 16\n" in text
    assert f'onnx_ops_requests_total{{{blue_labels},status="200",judged="false"}} 16\n' in text
    assert f'onnx_ops_errors_total{{{blue_labels},reason="input"}} 4\n' in text
    assert (
        'onnx_ops_requests_total{endpoint="e",deployment="",version="",variant="",status="404"} 1\n'
        in text
    )
    assert 'onnx_ops_generation{endpoint="e"} 0\n' in text
    assert (
        'onnx_ops_traffic_weight_ratio{endpoint="e",deployment="green",version="2",variant="fp32"} '
        "0.3\n" in text
    )


@pytest.mark.parametrize("slow", [False, True])
def test_service_latency_compares_equal_shares_of_both_versions(
    blue: Deployment, green: Deployment, slow: bool
) -> None:
    """The version with most of the traffic is compared by the requests of its replica.

    That control replica answers as many requests as the other version. Its requests also count for
    the version.
    """
    with Worker(
        state_of(blue, green, blue=80, green=20), slow=slow, queue=1000
    ).running() as worker:
        for _ in range(800):
            assert status(worker.send(REQUEST)) == 200
        first, second = (worker.shared.sum_slot(slot) for slot in (1, 2))
        control = worker.deployments.get_current().control
        assert control is not None
        assert control.loaded.deployment == blue
    assert first[metrics.get_column(200)] + second[metrics.get_column(200)] == 800
    assert sum(metrics.get_request_latency(first).buckets) == first[metrics.get_column(200)]
    assert (
        sum(metrics.get_service_latency(second).buckets)
        == second[metrics.get_column(200)] - WARM_UP_REQUESTS
    ), "the first ones are cold"
    compared = sum(metrics.get_service_latency(first).buckets) + WARM_UP_REQUESTS
    assert 0.1 * first[metrics.get_column(200)] < compared < 0.4 * first[metrics.get_column(200)]
    assert (first[metrics.QUEUED], first[metrics.IN_PROGRESS]) == (0, 0)


@pytest.mark.parametrize("slow", [False, True])
def test_user_latencies_are_counted_only_in_warm_comparable_slots(
    blue: Deployment, green: Deployment, slow: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rollout_counts, "_SETTLE_S", 0.0)
    state = state_of(blue, green, blue=70, green=30)
    state = replace(state, split=replace(state.split, epoch_s=60.0))
    watch = UserCountsRequest(limits_s={"blue": (), "green": ()})
    with Worker(state, slow=slow, queue=1000).running() as worker:
        counts, table = RolloutCounts(worker.shared), must(worker.table)
        counts.start_table(
            TableRevision(number=1, table=table, slots={"blue": 1, "green": 2}), 1001 * 60.0
        )
        counts.collect(watch)
        for epoch in range(1001, 1004):
            for number in range(100):
                assert (
                    status(worker.send(post(INFER, BODY, {"x-user-key": f"user-{number}"}))) == 200
                )
            if epoch == 1002:
                for loaded in worker.deployments.get_current().list_loaded():
                    assert loaded.warm_up < WARM_UP_REQUESTS
                    loaded.warm_up = 0
            counts.turn_epoch((epoch + 1) * 60.0)
        first, second, third = counts.collect(watch).epochs
    router = TrafficRouter.from_table(table)
    draw = router.get_draw(1003)
    comparable = {"blue": 0, "green": 0}
    for epoch_counts in (first, second, third):
        requests = 0
        for name, text in epoch_counts.cells.items():
            cells, fields = decode_cells(text)
            timed = fields[:, CELL_LATENCIES:].sum(1)
            requests += int(fields[:, CELL_REQUESTS].sum())
            if epoch_counts is not third:
                assert not timed.any(), "the caches were cold when the epoch began"
                continue
            expected = [router.comparable[draw.slots[cell]] for cell in cells]
            assert (timed > 0).tolist() == expected
            comparable[name] = sum(expected)
        assert requests == 100
    assert min(comparable.values()) > 10
    assert comparable["blue"] < 60, (
        "of the 70 cells, those in as many slots as the other version has"
    )


def in_binary(rows: int, *, json_bytes: int = 0) -> tuple[bytes, dict[str, str]]:
    """Return a binary body of `rows` rows, and its headers.

    Its JSON is padded to `json_bytes` bytes.
    """
    tensor = {
        "name": "x",
        "datatype": "FP32",
        "shape": [rows, 2],
        "parameters": {"binary_data_size": 8 * rows},
    }
    head = json.dumps(
        {"inputs": [tensor], "outputs": [{"name": "y", "parameters": {"binary_data": True}}]}
    ).encode()
    head = head.ljust(json_bytes)
    return head + bytes(8 * rows), {"inference-header-content-length": str(len(head))}


@pytest.mark.parametrize(
    ("request_body", "headers", "at_once"),
    [
        (infer_body([1, 2]), {}, True),
        (infer_body([1, 2]).ljust(66_000), {}, False),
        (*in_binary(60_000), True),
        (*in_binary(60_000, json_bytes=66_000), False),
        (*in_binary(140_000), False),
        (in_binary(60_000)[0], {"inference-header-content-length": "x"}, False),
    ],
)
def test_should_run_inline_depends_on_length_of_json_and_binary_parts(
    blue: Deployment, request_body: bytes, headers: dict[str, str], at_once: bool
) -> None:
    with Worker(state_of(blue, blue=100), bounds={"max_body": 4 << 20}).running() as worker:
        (loaded,) = worker.deployments.get_current().deployments.values()
        head = {name.encode(): value.encode() for name, value in headers.items()}
        assert loaded.should_run_inline(LatencyEstimator(), head, request_body) is at_once
        answer = worker.send(post(INFER, request_body, headers))
    assert status(answer) == (400 if "x" in headers.values() else 200)


def test_should_run_inline_of_large_binary_strings_returns_false(
    build: Callable[..., Deployment],
) -> None:
    """Each text element is a separate object.

    A megabyte of text elements takes as long as a megabyte of JSON.
    """
    same = helper.make_node("Identity", ["x"], ["y"])
    model = build([same], [("x", TensorProto.STRING, ["b"])], [("y", TensorProto.STRING, ["b"])])
    with Worker(state_of(model, blue=100)).running() as worker:
        (loaded,) = worker.deployments.get_current().deployments.values()
        assert loaded.should_run_inline(
            LatencyEstimator(), {b"inference-header-content-length": b"100"}, bytes(60_000)
        )
        assert not loaded.should_run_inline(
            LatencyEstimator(), {b"inference-header-content-length": b"100"}, bytes(70_000)
        )


def call(rows: int, width: int, outputs: tuple[str, ...]) -> InferenceRequest:
    return InferenceRequest(
        feed={"x": np.zeros((max(1, rows), width), np.float32)}, outputs=outputs, rows=rows
    )


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 700), st.integers(1, 2), st.sampled_from([("y",), ("y", "z")])),
        max_size=20,
    )
)
def test_group_requests_puts_each_request_into_one_compatible_group(
    drawn: list[tuple[int, int, tuple[str, ...]]],
) -> None:
    calls = {number: call(*arguments) for number, arguments in enumerate(drawn)}
    found = group_requests(calls, batchable=True)
    assert sorted(n for group in found for n in group) == list(calls)
    for group in found:
        assert len({(calls[n].outputs, calls[n].feed["x"].shape[1]) for n in group}) == 1
        assert len(group) == 1 or (
            all(calls[n].rows for n in group) and sum(calls[n].rows for n in group) <= 1024
        )
    assert group_requests(calls, batchable=False) == [[n] for n in calls]
