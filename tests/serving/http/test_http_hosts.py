"""Host and Origin headers: no web page reaches a server on a loopback address."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from onnx_ops.errors import RefusedError
from onnx_ops.protocol.server_process import ServerOptions
from onnx_ops.serving.http.limits import HostPolicy
from tests.serving.serving_process import INFER, Server, infer_body, serving


def is_allowed(
    host: str | None,
    origin: str | None = None,
    *,
    address: str = "127.0.0.1",
    port: int = 8080,
    hosts: str = "",
    origins: str = "",
) -> bool:
    """Return whether a server with these options answers."""
    policy = HostPolicy.from_options(
        address, port, ServerOptions(allowed_hosts=hosts, allowed_origins=origins)
    )
    given = {b"host": host, b"origin": origin}
    try:
        policy.check({name: value.encode() for name, value in given.items() if value is not None})
    except RefusedError:
        return False
    return True


@pytest.mark.parametrize(
    "host", ["127.0.0.1:8080", "localhost:8080", "LocalHost:8080", "[::1]:8080"]
)
def test_host_policy_with_loopback_host_allows_request(host: str) -> None:
    assert is_allowed(host)


@pytest.mark.parametrize(
    "host",
    [
        *("127.0.0.1:8081", "localhost", "evil.example:8080", "localhost.evil.example:8080"),
        *("localhost:8080.evil.example", "127.0.0.1:8080@evil.example", "", None),
    ],
)
def test_host_policy_on_loopback_with_foreign_or_missing_host_refuses_request(
    host: str | None,
) -> None:
    assert not is_allowed(host)


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "[::1]", "localhost:80"])
def test_host_policy_on_port_80_allows_host_with_or_without_port(host: str) -> None:
    assert is_allowed(host, port=80)


@pytest.mark.parametrize("address", ["127.0.0.2", "::1"])
def test_host_policy_allows_listening_address_and_refuses_foreign_host(address: str) -> None:
    assert is_allowed(f"[{address}]:8080" if ":" in address else f"{address}:8080", address=address)
    assert not is_allowed("evil.example:8080", address=address)


@pytest.mark.parametrize(
    ("host", "allowed"),
    [
        ("models.example", True),
        ("models.example:9000", True),
        ("gpu-box:8080", True),
        ("gpu-box:8081", False),
        ("localhost:8080", True),
        ("evil.example", False),
    ],
)
@pytest.mark.parametrize("address", ["127.0.0.1", "0.0.0.0"])  # noqa: S104 (what a container listens on)
def test_host_policy_with_host_list_allows_only_listed_and_loopback_hosts(
    host: str, allowed: bool, address: str
) -> None:
    assert is_allowed(host, address=address, hosts="Models.example, gpu-box:8080,") is allowed


def test_host_policy_on_all_addresses_refuses_only_origins_outside_list() -> None:
    assert is_allowed("evil.example", "https://evil.example", address="0.0.0.0")  # noqa: S104
    assert is_allowed(None, "https://evil.example", address="::")
    assert not is_allowed(
        "any", "https://evil.example", address="::", origins="https://good.example"
    )


def test_host_policy_with_origin_list_allows_only_listed_origins() -> None:
    host = "localhost:8080"
    allowed = "https://good.example, http://localhost:3000"
    assert not is_allowed(host, "https://good.example")
    assert not is_allowed(host, "null")
    assert not is_allowed(host, f"http://{host}")
    assert is_allowed(host, "https://good.example", origins=allowed)
    assert is_allowed(host, "http://LOCALHOST:3000", origins=allowed)
    assert not is_allowed(host, "https://good.example:444", origins=allowed)
    assert not is_allowed(host, "http://good.example", origins=allowed)


def test_host_policy_with_star_for_hosts_or_origins_allows_foreign_host_or_origin() -> None:
    assert is_allowed("evil.example", "null", hosts="*", origins="*")
    assert not is_allowed("evil.example", "null", hosts="*")
    assert not is_allowed("evil.example", origins="*")


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    options = ("--allowed-hosts=models.example", "--allowed-origins=https://good.example")
    with serving(tmp_path_factory.mktemp("hosts"), *options, blue=100) as server:
        yield server


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("POST", INFER, infer_body([1, 2])),
        ("GET", "/metrics", None),
        ("POST", "/feedback", b'{"feedback": []}'),
    ],
)
def test_request_returns_403_only_with_foreign_host_or_origin(
    endpoint: Server, method: str, path: str, body: bytes | None
) -> None:
    for headers, status in (
        ({}, 200),
        ({"origin": "https://good.example"}, 200),
        ({"host": "models.example"}, 200),
        ({"host": "evil.example"}, 403),
        ({"host": f"evil.example:{endpoint.port}"}, 403),
        ({"origin": "https://evil.example"}, 403),
        ({"origin": "null"}, 403),
    ):
        answer = endpoint.call(method, path, body, {"content-type": "application/json", **headers})
        assert answer.status == status
        if status == 403:
            assert any(
                f"--allowed-{name}" in answer.json()["error"] for name in ("hosts", "origins")
            )
            assert answer.headers["connection"] == "close"


@pytest.mark.parametrize("refused", [{"host": "evil.example"}, {"origin": "https://evil.example"}])
def test_repeated_request_head_returns_403_only_with_foreign_host_or_origin(
    endpoint: Server, refused: dict[str, str]
) -> None:
    usual = {"host": "models.example", "origin": "https://good.example", "x-user-key": "anna"}
    connection = http.client.HTTPConnection("127.0.0.1", endpoint.port, timeout=30)
    for headers, status in (
        *[(usual, 200)] * 3,
        ({**usual, "x-user-key": "bert"}, 200),
        ({**usual, **refused}, 403),
    ):
        connection.request("POST", INFER, infer_body([1, 2]), headers)
        response = connection.getresponse()
        assert response.status == status
        assert ("error" in json.loads(response.read())) == (status == 403)
    connection.close()


def test_server_on_all_addresses_answers_request_with_foreign_host_and_origin(
    tmp_path: Path,
) -> None:
    with Server(folder=tmp_path / "state", options=["--host=0.0.0.0"]) as server:
        headers = {"host": "shop.example", "origin": "https://shop.example"}
        assert server.call("GET", "/v2/health/live", headers=headers).status == 200
