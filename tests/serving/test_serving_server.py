"""The server as clients use it: a real process over HTTP."""

from __future__ import annotations

import os
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from http.client import HTTPException
from importlib.metadata import version
from itertools import count
from pathlib import Path

import pytest

from onnx_ops import codec
from onnx_ops.domain.endpoint import Deployment
from onnx_ops.domain.execution import Execution
from onnx_ops.protocol.messages import STATE_PATH
from onnx_ops.protocol.routing_table import CURRENT_FILE
from onnx_ops.protocol.server_process import SERVER_FILE, TOKEN_FILE
from onnx_ops.testing.endpoints import state_of
from tests.serving.serving_process import INFER, Server, X, serving
from tests.support.processes import until
from tests.support.server import MAIN


@pytest.fixture(scope="module")
def steady(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Yield one server for all tests that publish nothing."""
    with serving(tmp_path_factory.mktemp("steady"), blue=70, green=30) as server:
        yield server


@pytest.fixture
def published(server: Server, blue: Deployment, green: Deployment) -> Server:
    """Return a server that serves blue at 70 % and green at 30 %."""
    assert server.publish(state_of(blue, blue=100), 1).status == 200
    assert server.publish(state_of(blue, green, blue=70, green=30), 2).status == 200
    return server


def test_server_before_first_publication_is_live_but_not_ready(server: Server) -> None:
    assert server.call("GET", "/v2/health/live").status == 200
    for path in ("/v2/health/ready", "/ping", "/v2/models/m", "/v2/models/m/ready"):
        assert server.call("GET", path).status == 503
    answer = server.infer([1, 2])
    assert answer.status == 503
    assert "no deployment is published" in answer.json()["error"]
    state = server.admin("GET").json()
    assert state.pop("memory")["workers"] > 0
    assert state == {"state": None, "failed": {}, "out_of_service": {}, "counting_failure": ""}


def test_server_metadata_and_readiness_describe_published_model(steady: Server) -> None:
    for path in (
        "/v2/health/live",
        "/v2/health/ready",
        "/ping",
        "/v2/models/m/ready",
        "/v2/models/m/versions/2/ready",
    ):
        assert steady.call("GET", path).status == 200
    metadata = steady.call("GET", "/v2").json()
    assert metadata["name"] == "onnx-ops"
    assert metadata["extensions"] == ["binary_tensor_data", "model_configuration", "statistics"]
    assert steady.call("GET", "/v2/models/m").json() == {
        "name": "m",
        "versions": ["1", "2"],
        "platform": "onnxruntime_onnx",
        "execution": {
            "runtime": f"onnxruntime {version('onnxruntime')}",
            **codec.to_json(Execution()),
        },
        "inputs": [{"name": "x", "datatype": "FP32", "shape": [-1, 2]}],
        "outputs": [{"name": "y", "datatype": "FP32", "shape": [-1, 2]}],
    }


def test_infer_returns_outputs_and_deployment_headers(steady: Server) -> None:
    pin = {"X-Amzn-SageMaker-Target-Variant": "green", "x-request-id": "r-1"}
    answer = steady.call("POST", INFER, {"id": "7", "inputs": [X], "outputs": [{"name": "y"}]}, pin)
    assert answer.status == 200
    assert answer.json() == {
        "model_name": "m",
        "model_version": "2",
        "id": "7",
        "outputs": [{"name": "y", "datatype": "FP32", "shape": [1, 2], "data": [3.0, 6.0]}],
    }
    assert answer.headers["x-onnx-ops-deployment"] == "green"
    assert answer.headers["x-amzn-invoked-production-variant"] == "green"
    assert answer.headers["x-request-id"] == "r-1"
    assert answer.headers["content-type"] == "application/json"


def test_openapi_document_describes_served_model_and_needs_publication(
    steady: Server, server: Server
) -> None:
    document = steady.call("GET", "/openapi.json").json()
    assert "/v2/models/m/infer" in document["paths"]
    assert steady.call("GET", "/version").body.decode() == document["info"]["version"]
    assert server.call("GET", "/openapi.json").status == 503


@pytest.mark.parametrize(
    ("method", "path", "body", "headers", "status", "message"),
    [
        ("POST", INFER, b"{", {}, 400, "not JSON"),
        ("POST", INFER, b"[" + b"[]," * (1 << 20) + b"[]]", {}, 413, "binary form"),
        ("POST", INFER, b"x", {"content-encoding": "br"}, 415, "use gzip or deflate"),
        ("POST", INFER, b"x", {"content-encoding": "gzip"}, 400, "the end of its gzip stream"),
        ("POST", "/v2/models/z/infer", {"inputs": [X]}, {}, 404, "no model is named 'z'"),
        ("POST", "/v2/models/m/versions/9/infer", {"inputs": [X]}, {}, 404, "serve version '9'"),
        ("GET", "/v2/models/z", None, {}, 404, "no model is named 'z'"),
    ],
)
def test_invalid_request_returns_matching_status_and_message(
    steady: Server,
    method: str,
    path: str,
    body: object,
    headers: dict[str, str],
    status: int,
    message: str,
) -> None:
    answer = steady.call(method, path, body, headers)
    assert answer.status == status
    assert message in answer.json()["error"]
    assert steady.infer([1, 2]).status == 200


def test_admin_listener_without_valid_token_returns_401(
    published: Server, blue: Deployment
) -> None:
    body = codec.dumps(replace(state_of(blue, blue=100), generation=9))
    for token in ("", "wrong", "é"):
        assert published.admin("GET", token=token).status == 401
        assert published.admin("PUT", body, token=token).status == 401
    assert published.call("GET", STATE_PATH, admin=True).status == 401
    # The public listener does not have this path.
    assert published.call("GET", STATE_PATH).status == 404
    assert published.admin("GET").json()["state"]["generation"] == 2


def test_invalid_publication_changes_nothing(
    published: Server, blue: Deployment, green: Deployment
) -> None:
    forged = replace(green, name="grey", manifest=green.release)
    for body, status, message in (
        (b"{", 400, "not JSON"),
        (b"[]", 400, "not a"),
        (b'{"deployments": [], "split": {"weights": {"a": 99}}}', 400, "not a EndpointState"),
        (codec.dumps(replace(state_of(blue, blue=100), generation=1)), 409, "older"),
        (
            codec.dumps(replace(state_of(blue, forged, blue=50, grey=50), generation=3)),
            422,
            "digest mismatch",
        ),
        (b" " * (2 << 20), 413, "larger"),
    ):
        answer = published.admin("PUT", body)
        assert answer.status == status
        assert message in answer.body.decode()
    assert published.state() == replace(state_of(blue, green, blue=70, green=30), generation=2)


def test_server_after_kill_restores_last_published_table(
    published: Server, blue: Deployment, green: Deployment
) -> None:
    port, last = published.port, 2

    def publish() -> None:
        nonlocal last
        with suppress(OSError, HTTPException):
            for number in count(last + 1):
                weights = {"blue": number % 100, "green": 100 - number % 100}
                assert published.publish(state_of(blue, green, **weights), number).status == 200
                last = number

    for delay in (0.0, 0.01, 0.03):
        thread = threading.Thread(target=publish)
        thread.start()
        time.sleep(delay)
        published.kill()
        thread.join()
        published.start()
        assert published.port == port
        assert published.generation() in (last, last + 1)
        last = published.generation()
        assert published.infer([1, 2]).status == 200


def test_server_with_torn_table_restores_previous_table(
    published: Server, blue: Deployment
) -> None:
    published.kill()
    (published.folder / CURRENT_FILE).write_bytes(b'{"checksum":')
    published.start()
    assert published.state() == replace(state_of(blue, blue=100), generation=1)
    assert "invalid table" in published.log()


def started(folder: Path, port: int = 0) -> tuple[int, str]:
    """Return exit code and standard error of a server that cannot start."""
    command = Server(folder=folder, port=port).command()
    found = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert "Traceback" not in found.stderr
    return found.returncode, found.stderr


def test_second_server_in_same_folder_is_refused_and_first_one_is_unaffected(
    server: Server,
) -> None:
    code, error = started(server.folder)
    assert (code, "another server uses" in error) == (4, True)
    assert server.record().pid == server.supervisor
    assert server.call("GET", "/v2/health/live").status == 200
    assert server.stop() == 0
    assert not (server.folder / SERVER_FILE).exists()


def test_server_start_with_unusable_port_token_or_folder_exits_with_code_without_traceback(
    tmp_path: Path, server: Server
) -> None:
    code, error = started(tmp_path / "other", server.port)
    assert (code, "port cannot be used" in error) == (4, True)
    open_token = tmp_path / "open"
    open_token.mkdir()
    (open_token / TOKEN_FILE).write_text("secret")
    (open_token / TOKEN_FILE).chmod(0o644)
    code, error = started(open_token)
    assert (code, "chmod 600" in error, "secret" in error) == (5, True, False)
    (tmp_path / "file").write_text("")
    assert started(tmp_path / "file")[0] == 4


def test_server_process_that_serves_requests_imports_no_pydantic_mlflow_prefect_or_onnx(
    tmp_path: Path,
) -> None:
    with serving(tmp_path, program=("-X", "importtime", *MAIN), blue=100) as server:
        assert server.infer([1, 2]).status == 200
        assert server.call("GET", "/metrics").status == 200
        server.stop()
    lines = [
        line.rpartition("|")[2].strip()
        for line in server.log().splitlines()
        if line.startswith("import time:")
    ]
    loaded = {line.partition(".")[0] for line in lines}
    assert {"onnxruntime", "orjson", "uvloop", "httptools"} <= loaded
    assert not loaded & {
        "pydantic",
        "mlflow",
        "prefect",
        "onnx",
        "scipy",
        "fastapi",
        "httpx",
        "starlette",
        "uvicorn",
    }


def test_admin_listener_is_bound_to_loopback_only_and_token_file_is_private(server: Server) -> None:
    port = f"{server.record().admin_port:04X}"
    # `tcp6` is missing on machines without IPv6.
    tables = Path(f"/proc/{server.record().pid}/net").glob("tcp*")
    rows = [line.split() for table in tables for line in table.read_text().splitlines()[1:]]
    listening = [row[1] for row in rows if row[3] == "0A"]
    assert [place for place in listening if place.endswith(f":{port}")] == [f"0100007F:{port}"]
    assert os.stat(server.folder / TOKEN_FILE).st_mode & 0o777 == 0o600


def test_admin_listener_with_upgrade_offer_reads_request_body(server: Server) -> None:
    offer = {
        "connection": "Upgrade, HTTP2-Settings",
        "upgrade": "h2c",
        "http2-settings": "AAEAAEAAAAIAAAAB",
    }
    token = (server.folder / TOKEN_FILE).read_text()
    answer = server.call(
        "PUT", STATE_PATH, b"[1]", {"authorization": f"Bearer {token}", **offer}, admin=True
    )
    assert (answer.status, b"not a JSON object" in answer.body) == (400, True)


def test_publication_after_client_disconnect_is_completed(
    published: Server, blue: Deployment
) -> None:
    body = codec.dumps(replace(state_of(blue, blue=100), generation=9))
    token = (published.folder / TOKEN_FILE).read_text()
    port = published.record().admin_port
    head = (
        f"PUT {STATE_PATH} HTTP/1.1\r\nhost: localhost:{port}\r\nauthorization: Bearer {token}\r\n"
    )
    with socket.create_connection(("127.0.0.1", port)) as client:
        client.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
    until(lambda: published.admin("GET").json()["state"]["generation"] == 9, "the publication")
    assert published.infer([1, 2]).status == 200
