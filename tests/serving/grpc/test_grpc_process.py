"""gRPC of real server processes, as Triton's and gRPC's own clients call it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import numpy as np
import pytest

from onnx_ops.domain.endpoint import Deployment
from onnx_ops.errors import MeasurementError
from onnx_ops.serving.grpc.open_inference import SERVICE
from onnx_ops.testing.endpoints import state_of
from tests.serving.grpc.conftest import Connect
from tests.serving.serving_process import (
    VALUES,
    Server,
    after,
    build_identity_model,
    serving_model,
    wait_until,
)
from tests.support.ports import free_port
from tests.support.processes import until

if TYPE_CHECKING:
    import tritonclient.grpc as triton

ROW: dict[str, Any] = {
    "model_name": "m",
    "inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 2]}],
    "raw_input_contents": [bytes(8)],
}


@pytest.fixture(scope="module")
def port() -> int:
    return free_port()


@pytest.fixture(scope="module")
def types(tmp_path_factory: pytest.TempPathFactory, port: int) -> Iterator[Server]:
    """Yield a server of a model that returns every input as `<name>_out`."""
    options = (
        f"--grpc-port={port}",
        "--workers=2",
        f"--access-log={tmp_path_factory.mktemp('log') / 'access'}",
    )
    with serving_model(
        tmp_path_factory.mktemp("types"), build_identity_model(), *options
    ) as server:
        yield server


@pytest.fixture
def client(types: Server, port: int) -> Iterator[triton.InferenceServerClient]:
    import tritonclient.grpc as triton

    with triton.InferenceServerClient(f"127.0.0.1:{port}") as client:
        yield client


def build_inputs() -> list[triton.InferInput]:
    import tritonclient.grpc as triton

    inputs = []
    for name, (datatype, array) in VALUES.items():
        tensor = triton.InferInput(name, list(array.shape), datatype)
        tensor.set_data_from_numpy(array)
        inputs.append(tensor)
    return inputs


def check_outputs(result: triton.InferResult) -> None:
    for name, (_, array) in VALUES.items():
        output = result.as_numpy(f"{name}_out")
        if output.dtype == object:
            output = np.array([[text.decode() for text in row] for row in output], object)
        np.testing.assert_array_equal(output, array)


def test_triton_grpc_client_preserves_values_of_eight_types_and_request_ids(
    client: triton.InferenceServerClient, types: Server
) -> None:
    import tritonclient.grpc as triton

    result = client.infer(
        "m", build_inputs(), request_id="7", headers={"x-request-id": "r-7"}, client_timeout=30
    )
    assert result.get_response().id == "7"
    check_outputs(result)
    only = client.infer("m", build_inputs(), outputs=[triton.InferRequestedOutput("text_out")])
    assert [output.name for output in only.get_response().outputs] == ["text_out"]
    log = Path(types.options[-1].partition("=")[2])
    wait_until(lambda: '"request_id":"r-7"' in log.read_text(encoding="utf-8"))


def test_triton_grpc_stream_returns_responses_in_order(
    client: triton.InferenceServerClient,
) -> None:
    responses: list[tuple[Any, Any]] = []
    client.start_stream(lambda result, error: responses.append((result, error)))
    for number in range(20):
        model = "other" if number == 3 else "m"
        client.async_stream_infer(
            model, build_inputs(), request_id=str(number), enable_empty_final_response=True
        )
    client.stop_stream()
    assert "no model is named 'other'" in str(responses.pop(3)[1].message())
    assert [result.get_response().id for result, _ in responses] == [
        str(n) for n in range(20) if n != 3
    ]
    for result, _ in responses:
        check_outputs(result)
        assert result.get_response().parameters["triton_final_response"].bool_param


def test_grpc_health_and_reflection_implement_standard_services(
    types: Server, connect: Connect, port: int
) -> None:
    from grpc_health.v1 import health_pb2, health_pb2_grpc
    from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
        ProtoReflectionDescriptorDatabase,
    )

    channel = connect(port).channel
    health = health_pb2_grpc.HealthStub(channel)
    for name in ("", SERVICE):
        request = health_pb2.HealthCheckRequest(service=name)
        assert health.Check(request).status == health_pb2.HealthCheckResponse.SERVING
        watch = health.Watch(request)
        assert next(watch).status == health_pb2.HealthCheckResponse.SERVING
        watch.cancel()
    database = ProtoReflectionDescriptorDatabase(channel)
    assert {SERVICE, "grpc.health.v1.Health"} <= set(database.get_services())
    file = database.FindFileContainingSymbol(SERVICE)
    assert "ModelInferRequest" in [message.name for message in file.message_type]
    assert database.FindFileContainingSymbol("grpc.health.v1.Health").package == "grpc.health.v1"


def test_grpc_port_answers_after_worker_or_server_kill_and_refuses_second_server(
    tmp_path: Path, blue: Deployment, connect: Connect
) -> None:
    port = free_port()
    with Server(folder=tmp_path / "state", options=(f"--grpc-port={port}",)) as server:
        assert server.publish(state_of(blue, blue=100), 1).status == 200
        connect(port).call("ModelInfer", **ROW)
        (worker,) = server.workers()
        os.kill(worker, signal.SIGKILL)
        wait_until(lambda: server.workers() not in ([], [worker]))
        assert connect(port).call("ModelInfer", **ROW).model_version == "1"
        second = Server(folder=tmp_path / "second", options=(f"--grpc-port={port}",))
        with pytest.raises(
            MeasurementError, match=f"127.0.0.1:{port}: the address or port cannot be used"
        ):
            second.start()
        server.kill()
        # The new server takes over from the worker that still answers.
        server.start()
        assert until(lambda: _infer(connect(port))).model_version == "1"


def _infer(client: Any) -> Any:
    """Return the response; None if gRPC ends the call because its worker ends."""
    try:
        return client.call("ModelInfer", **ROW)
    except grpc.RpcError as error:
        if error.code() not in (grpc.StatusCode.CANCELLED, grpc.StatusCode.UNAVAILABLE):
            raise
        return None


def test_grpc_port_option_without_extra_exits_4_and_names_missing_packages(tmp_path: Path) -> None:
    hidden = (
        "from importlib import metadata\nfrom onnx_ops import plugins\nreal = plugins.version\n"
    )
    hidden += (
        "plugins.version = lambda name: plugins.MISSING if name.startswith('grpcio') "
        "else real(name)"
    )
    command = [
        sys.executable,
        *after(hidden),
        "--state-dir",
        str(tmp_path / "state"),
        "--port=0",
        "--grpc-port=9",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 4
    assert "grpcio, grpcio-health-checking, grpcio-reflection are not installed" in done.stderr
    assert "pip install 'onnx-ops[grpc]'" in done.stderr
