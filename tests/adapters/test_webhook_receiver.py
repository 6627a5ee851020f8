"""The webhook receiver over real HTTP.

Deliveries are doubled, forged, stale, oversize or concurrent. Its secret is tested too.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from onnx_ops.adapters.web import connections
from onnx_ops.adapters.web.webhook_receiver import (
    VARIABLE,
    WebhookReceiver,
    make_secret,
    read_secret,
)
from onnx_ops.errors import (
    NotFoundError,
    OnnxOpsError,
    RefusedError,
    ServiceUnavailableError,
    UserError,
)
from onnx_ops.protocol.webhooks import (
    ID_HEADER,
    MAX_BODY_BYTES,
    SIGNATURE_HEADER,
    TIMESTAMP_HEADER,
    sign_delivery,
)
from onnx_ops.testing.fakes import FakeClock
from tests.support.golden import Golden
from tests.support.must import must

SECRET = "a secret of some length"  # noqa: S105 (of a test)


@dataclass
class Listening:
    url: str
    clock: FakeClock
    woken: list[str] = field(default_factory=list)
    metrics: str | OnnxOpsError = "pending 0\n"
    refused: list[str] = field(default_factory=list)

    def render(self) -> str:
        if isinstance(self.metrics, OnnxOpsError):
            raise self.metrics
        return self.metrics

    def send(
        self,
        model: str = "digits",
        *,
        delivery: str = "d-1",
        age: float = 0.0,
        secret: str = SECRET,
        body: bytes | None = None,
    ) -> int:
        import httpx

        if body is None:
            body = json.dumps(
                {"data": {"name": model, "alias": "champion-cpu", "version": "666"}}
            ).encode()
        timestamp = str(int(self.clock.now() - age))
        signed = {
            ID_HEADER: delivery,
            TIMESTAMP_HEADER: timestamp,
            SIGNATURE_HEADER: sign_delivery(secret, delivery, timestamp, body),
        }
        return httpx.post(self.url, content=body, headers=signed, timeout=30).status_code


@pytest.fixture
def listening() -> Iterator[Listening]:
    found = Listening("", FakeClock())
    with WebhookReceiver(
        "127.0.0.1",
        0,
        secret=SECRET,
        clock=found.clock,
        wake=found.woken.append,
        refused=found.refused.append,
        metrics=found.render,
    ) as receiver:
        found.url = receiver.address
        yield found


def test_webhook_receiver_metrics_are_served_unless_ledger_fails(listening: Listening) -> None:
    import httpx

    url = listening.url.replace("/webhooks/mlflow", "/metrics")
    response = httpx.get(url, timeout=30)
    assert (response.status_code, response.text) == (200, "pending 0\n")
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    listening.metrics = ServiceUnavailableError("the ledger does not answer")
    assert httpx.get(url, timeout=30).status_code == 503
    assert listening.woken == []


def test_webhook_receiver_with_repeated_delivery_calls_wake_once_for_each_id(
    listening: Listening,
) -> None:
    assert [listening.send(), listening.send(), listening.send(delivery="d-2")] == [204, 204, 204]
    assert listening.woken == ["digits", "digits"]


def test_webhook_delivery_with_wrong_signature_returns_401(listening: Listening) -> None:
    assert listening.send(secret="guessed, and wrong") == 401  # noqa: S106 (of a test)
    assert listening.woken == []
    assert listening.send() == 204
    assert listening.woken == ["digits"]


def test_webhook_delivery_replayed_after_time_limit_returns_400(
    listening: Listening, golden: Golden
) -> None:
    assert listening.send() == 204
    assert listening.send(age=0) == 204
    listening.clock.advance(301)
    assert listening.send(age=301) == 400
    assert listening.woken == ["digits"]
    golden("reasons", "\n".join(listening.refused))


def test_webhook_delivery_with_oversize_body_returns_413(listening: Listening) -> None:
    assert listening.send(body=b"x" * (MAX_BODY_BYTES + 1)) == 413
    assert listening.send(body=b"x" * (20 * MAX_BODY_BYTES)) == 413
    assert listening.woken == []


def test_webhook_delivery_with_signed_invalid_body_returns_400(listening: Listening) -> None:
    assert listening.send(body=b"{}") == 400
    assert listening.woken == []


def test_webhook_receiver_with_other_path_or_method_returns_404_or_405(
    listening: Listening,
) -> None:
    import httpx

    base = listening.url.removesuffix("/webhooks/mlflow")
    assert httpx.get(listening.url).status_code == 405
    assert [httpx.post(f"{base}{path}").status_code for path in ("/", "/docs", "/webhooks")] == [
        404,
        404,
        404,
    ]


def test_webhook_receiver_with_concurrent_deliveries_calls_wake_once_for_each_id(
    listening: Listening,
) -> None:
    with ThreadPoolExecutor(8) as pool:
        statuses = list(
            pool.map(
                lambda number: listening.send(f"m-{number}", delivery=f"d-{number // 2}"), range(40)
            )
        )
    assert set(statuses) == {204}
    assert len(listening.woken) == 20


def test_webhook_receiver_with_silent_client_accepts_delivery(listening: Listening) -> None:
    import httpx

    host, port = httpx.URL(listening.url).host, httpx.URL(listening.url).port
    assert port is not None
    silent = socket.create_connection((host, port))
    half = socket.create_connection((host, port))
    half.sendall(b"POST /webhooks/mlflow HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\nab")
    half.close()
    assert listening.send() == 204
    silent.close()
    assert listening.woken == ["digits"]


@pytest.mark.parametrize(
    "start",
    [
        pytest.param(b"", id="nothing"),
        pytest.param(b"POST /webhooks/mlflow HTTP/1.1\r\nHost:", id="part of a head"),
        pytest.param(
            b"POST /webhooks/mlflow HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n", id="no body"
        ),
    ],
)
def test_webhook_receiver_with_many_half_open_connections_accepts_delivery(
    listening: Listening, start: bytes
) -> None:
    import httpx

    url = httpx.URL(listening.url)
    with ExitStack() as stack:
        for number in range(200):
            client = stack.enter_context(
                socket.create_connection((url.host, must(url.port)), timeout=30)
            )
            client.sendall(start)
            if number % 50 == 49:
                assert listening.send(delivery=f"d-{number}") == 204
                assert httpx.get(url.copy_with(path="/metrics"), timeout=30).status_code == 200
    assert listening.woken == ["digits"] * 4


@pytest.mark.parametrize(
    ("sent", "answer"),
    [
        pytest.param(b"", b"", id="nothing"),
        pytest.param(b"GET", b"", id="part of a first head"),
        pytest.param(
            b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\nGET", b"HTTP/1.1 200 OK", id="of a second"
        ),
    ],
)
def test_webhook_connection_without_complete_head_is_closed(
    listening: Listening, monkeypatch: pytest.MonkeyPatch, sent: bytes, answer: bytes
) -> None:
    import httpx

    monkeypatch.setattr(connections, "HEAD_S", 0.05)
    url = httpx.URL(listening.url)
    with socket.create_connection((url.host, must(url.port)), timeout=30) as client:
        client.sendall(sent)
        received = b""
        with suppress(ConnectionResetError):
            while data := client.recv(4096):
                received += data
    assert received.partition(b"\r\n")[0] == answer


def test_webhook_request_head_above_limit_returns_400(listening: Listening) -> None:
    import httpx

    url = httpx.URL(listening.url)
    with socket.create_connection((url.host, must(url.port)), timeout=30) as client:
        client.sendall(
            b"GET /metrics HTTP/1.1\r\nHost: x\r\nX-Long: " + b"y" * connections.MAX_HEAD_BYTES
        )
        assert client.recv(4096).startswith(b"HTTP/1.1 400 ")


def test_webhook_error_response_contains_no_secret(listening: Listening) -> None:
    import httpx

    answer = httpx.post(listening.url, content=b"{}", headers={SIGNATURE_HEADER: "v1,AAAA"})
    assert answer.status_code == 401
    assert SECRET not in answer.text + str(answer.headers)


def test_webhook_receiver_on_taken_port_raises_service_unavailable_error(
    listening: Listening,
) -> None:
    import httpx

    port = httpx.URL(listening.url).port
    assert port is not None
    with pytest.raises(ServiceUnavailableError, match="cannot listen"):
        WebhookReceiver(
            "127.0.0.1",
            port,
            secret=SECRET,
            clock=FakeClock(),
            wake=print,
            refused=print,
            metrics=str,
        )


def test_make_secret_writes_private_file_once(tmp_path: Path) -> None:
    path = tmp_path / "state" / "webhook.secret"
    secret = make_secret(path, {})
    assert len(secret) >= 32
    assert path.stat().st_mode & 0o777 == 0o600
    assert make_secret(path, {}) == read_secret(path, {}) == secret
    assert [entry.name for entry in path.parent.iterdir()] == ["webhook.secret"]


def test_read_secret_with_variable_and_file_returns_variable(tmp_path: Path) -> None:
    path = tmp_path / "webhook.secret"
    make_secret(path, {})
    assert read_secret(path, {VARIABLE: "from the environment"}) == "from the environment"


def test_make_secret_by_concurrent_threads_returns_same_secret(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        secrets = set(pool.map(lambda _: make_secret(tmp_path / "webhook.secret", {}), range(16)))
    assert len(secrets) == 1


def test_read_secret_of_missing_short_or_public_secret_raises_error(tmp_path: Path) -> None:
    path = tmp_path / "webhook.secret"
    with pytest.raises(NotFoundError, match="webhooks install"):
        read_secret(path, {})
    with pytest.raises(UserError, match="shorter than 16"):
        read_secret(path, {VARIABLE: "short"})
    make_secret(path, {})
    os.chmod(path, 0o644)
    with pytest.raises(RefusedError, match="other users have access") as refused:
        read_secret(path, {})
    assert refused.value.remedy.startswith(f"Run `chmod 600 {path}`")
