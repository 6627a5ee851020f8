"""Counts of two real servers behind one endpoint, whose users call either of them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from onnx_ops.adapters.metrics.servers import VARIABLE, SeveralServers
from onnx_ops.domain.artifact import digest_bytes
from onnx_ops.domain.endpoint import EndpointConfig
from onnx_ops.domain.rollout_observations import UnitSums
from onnx_ops.errors import ServiceUnavailableError, UserError
from onnx_ops.protocol.server_process import TOKEN_FILE
from onnx_ops.testing.endpoints import scaling_deployment, state_of
from tests.support.server import ServerFamily

CONFIG = EndpointConfig(
    endpoint="digits", provider="local", model="m", target="cpu", target_digest=digest_bytes(b"t"), pipeline="p"
)
BODY = json.dumps({"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 2], "data": [1, 2]}]}).encode()
WATCHED = {"blue": None, "green": None}


@pytest.fixture
def servers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[ServerFamily]]:
    """Two servers with the same token and table; blue and green share the traffic."""
    monkeypatch.setenv(VARIABLE, "one for all")
    pair = [
        scaling_deployment(tmp_path / name, name=name, version=version, scale=2.0, model="m")
        for name, version in (("blue", "1"), ("green", "2"))
    ]
    found = [ServerFamily(folder=tmp_path / f"server-{number}") for number in range(2)]
    try:
        for server in found:
            server.folder.mkdir(mode=0o700)
            (server.folder / TOKEN_FILE).write_text("one for all")
            (server.folder / TOKEN_FILE).chmod(0o600)
            server.start()
            assert server.publish(state_of(*pair, blue=50, green=50), 1).status == 200
        yield found
    finally:
        for server in found:
            server.destroy()


def source_of(servers: list[ServerFamily]) -> SeveralServers:
    urls = [f"http://127.0.0.1:{server.record().admin_port}" for server in servers]
    return SeveralServers({"urls": list(urls)})


def call(server: ServerFamily, user: str, times: int) -> None:
    for _ in range(times):
        headers = {"content-type": "application/json", "x-user-key": user}
        assert server.call("POST", "/v2/models/m/infer", BODY, headers).status == 200


def test_users_of_both_servers_are_added_before_they_are_squared(servers: list[ServerFamily]) -> None:
    source = source_of(servers)
    assert source.read(CONFIG, WATCHED).units["errors"] == UnitSums()
    totals = {f"user-{number}": (number % 3, number % 5) for number in range(12)}
    for user, times in totals.items():
        for server, many in zip(servers, times, strict=True):
            call(server, user, many)
    reading = source.read(CONFIG, WATCHED)
    summed = [sum(times) for times in totals.values()]
    assert sum(tally.requests for tally in reading.tallies.values()) == sum(summed)
    found = reading.units["errors"]
    assert (found.requests, found.requests_squared) == (sum(summed), sum(n * n for n in summed))
    counted = source.latencies(CONFIG, "blue")
    assert counted is not None
    assert len(counted[1]) == len(counted[0]) + 1
    assert source.read(CONFIG, WATCHED).origin == reading.origin
    port = servers[0].record().admin_port
    with pytest.raises(ServiceUnavailableError, match="the same server"):
        SeveralServers({"urls": [f"http://127.0.0.1:{port}", f"http://localhost:{port}"]}).read(CONFIG, WATCHED)


def test_a_server_that_cannot_be_counted_is_no_silence(
    servers: list[ServerFamily], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = source_of(servers)
    call(servers[0], "u", 3)
    before = source.read(CONFIG, WATCHED)
    state = servers[0].state()
    assert state is not None
    blue, green = state.deployments
    assert servers[1].publish(state_of(blue, green, blue=40, green=60), 2).status == 200
    with pytest.raises(ServiceUnavailableError, match="split users differently"):
        source.read(CONFIG, WATCHED)
    assert servers[0].publish(state_of(blue, green, blue=40, green=60), 2).status == 200
    call(servers[0], "u", 2)
    assert source.read(CONFIG, WATCHED).units["errors"].requests_squared == 4
    servers[1].stop()
    with pytest.raises(ServiceUnavailableError, match="does not answer"):
        source.read(CONFIG, WATCHED)
    servers[1].start()
    call(servers[0], "u", 1)
    again = source_of(servers)
    after = again.read(CONFIG, WATCHED)
    assert after.origin != before.origin
    assert after.units["errors"] == UnitSums(), "else the first server's users would count in either epoch"
    monkeypatch.setenv(VARIABLE, "another")
    with pytest.raises(ServiceUnavailableError, match="401"):
        again.read(CONFIG, WATCHED)
    monkeypatch.delenv(VARIABLE)
    with pytest.raises(ServiceUnavailableError, match=VARIABLE):
        again.read(CONFIG, WATCHED)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"urls": "https://one.example"},
        {"urls": ["https://one.example", "https://one.example/"]},
        {"urls": ["http://one.example"]},
        {"urls": ["https://one.example"], "url": "x"},
    ],
)
def test_settings_that_name_no_servers_are_refused(settings: dict[str, str]) -> None:
    with pytest.raises(UserError):
        SeveralServers(settings)
