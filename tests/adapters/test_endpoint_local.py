"""The local endpoint provider over real server processes."""

from __future__ import annotations

import fcntl
import http.server
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from onnx_ops import codec
from onnx_ops.adapters.endpoints.local import LocalEndpoints
from onnx_ops.adapters.endpoints.local_server import LocalServer
from onnx_ops.domain.artifact import digest_bytes
from onnx_ops.domain.endpoint import Deployment, EndpointConfig
from onnx_ops.errors import (
    ConflictError,
    DigestMismatchError,
    NotFoundError,
    OnnxOpsError,
    ServiceUnavailableError,
    UserError,
)
from onnx_ops.protocol import server_process
from onnx_ops.protocol.server_process import LOCK_FILE, SERVER_FILE, TOKEN_FILE, ServerRecord
from onnx_ops.testing.endpoints import EndpointProviderSuite, scaling_deployment, state_of
from tests.support.ports import free_port

CONFIG = EndpointConfig(
    endpoint="digits",
    provider="local",
    model="scale",
    target="cpu-1t",
    target_digest=digest_bytes(b"target"),
    pipeline="digits",
)


@pytest.fixture
def provider(tmp_path: Path) -> Iterator[LocalEndpoints]:
    provider = LocalEndpoints(tmp_path / "endpoints")
    yield provider
    provider.stop(CONFIG)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "endpoints" / "digits"


@pytest.fixture
def blue(tmp_path: Path) -> Deployment:
    return scaling_deployment(tmp_path / "blue", name="blue", version="1", scale=2.0)


def record_of(folder: Path) -> ServerRecord:
    return codec.loads((folder / SERVER_FILE).read_bytes(), ServerRecord)


class TestLocalEndpoints(EndpointProviderSuite):
    @pytest.fixture
    def provider(self, provider: LocalEndpoints) -> LocalEndpoints:
        return provider

    @pytest.fixture
    def config(self) -> EndpointConfig:
        return CONFIG


@pytest.mark.parametrize("how", ["killed", "supervisor hung", "all hung"])
def test_a_rollback_of_a_server_that_does_not_answer_serves_nothing_else(
    provider: LocalEndpoints, folder: Path, tmp_path: Path, blue: Deployment, how: str
) -> None:
    green = scaling_deployment(tmp_path / "green", name="green", version="2", scale=3.0)
    provider.apply(CONFIG, state_of(green, green=100), generation=1)
    server, workers = record_of(folder).pid, server_process.list_workers(folder)
    number = signal.SIGKILL if how == "killed" else signal.SIGSTOP
    for pid in (server, *(() if how == "supervisor hung" else workers)):
        os.kill(pid, number)
    provider.roll_back(CONFIG, state_of(blue, green, blue=100, green=0), generation=2)
    observed = provider.observe(CONFIG)
    assert observed is not None
    assert observed.is_equivalent(state_of(blue, blue=100))
    assert not set(server_process.list_workers(folder)) & set(workers)
    address = provider.address(CONFIG)
    assert address is not None
    assert TestLocalEndpoints().scale(address) == 2.0


def test_a_killed_server_comes_back_with_the_last_table_on_the_same_port(
    provider: LocalEndpoints, folder: Path, blue: Deployment
) -> None:
    state = state_of(blue, blue=100)
    provider.apply(CONFIG, state, generation=3)
    address, first = provider.address(CONFIG), record_of(folder)
    os.kill(first.pid, signal.SIGKILL)
    while provider.observe(CONFIG) is not None:
        pass
    assert provider.observe(CONFIG) is None
    with pytest.raises(ConflictError):  # it starts again, and remembers generation 3
        provider.apply(CONFIG, state, generation=2)
    observed = provider.observe(CONFIG)
    assert observed == replace(state, generation=3)
    assert provider.address(CONFIG) == address
    assert record_of(folder).pid != first.pid
    assert EndpointProviderSuite().scale(str(address)) == 2.0


def test_the_server_outlives_the_process_that_started_it(
    provider: LocalEndpoints, tmp_path: Path, blue: Deployment
) -> None:
    script = (
        "import sys; from pathlib import Path; from onnx_ops import codec;"
        "from onnx_ops.adapters.endpoints.local import LocalEndpoints;"
        "from onnx_ops.domain.endpoint import EndpointConfig, EndpointState;"
        "LocalEndpoints(Path(sys.argv[1])).apply(codec.loads(sys.argv[2].encode(), EndpointConfig),"
        "codec.loads(sys.argv[3].encode(), EndpointState), generation=1);"
        "assert 'onnxruntime' not in sys.modules and 'httpx' not in sys.modules and 'numpy' not in sys.modules"
    )
    state = state_of(blue, blue=100)
    arguments = [str(tmp_path / "endpoints"), codec.dumps(CONFIG).decode(), codec.dumps(state).decode()]
    subprocess.run([sys.executable, "-c", script, *arguments], check=True, timeout=60)
    observed = provider.observe(CONFIG)
    assert observed is not None
    assert observed.is_equivalent(state)


def test_the_folder_and_the_token_are_private(provider: LocalEndpoints, folder: Path, blue: Deployment) -> None:
    provider.apply(CONFIG, state_of(blue, blue=100), generation=1)
    assert folder.stat().st_mode & 0o777 == 0o700
    assert (folder / TOKEN_FILE).stat().st_mode & 0o777 == 0o600
    token = (folder / TOKEN_FILE).read_text()
    command_line = Path(f"/proc/{record_of(folder).pid}/cmdline").read_bytes()
    assert token.encode() not in command_line
    assert token not in (folder / "server.log").read_text()


def test_the_server_gets_no_secrets_of_its_starter(
    provider: LocalEndpoints, folder: Path, blue: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "do-not-leak")
    provider.apply(CONFIG, state_of(blue, blue=100), generation=1)
    assert b"do-not-leak" not in Path(f"/proc/{record_of(folder).pid}/environ").read_bytes()


def test_a_stale_record_is_never_shown_the_token(folder: Path, provider: LocalEndpoints) -> None:
    """The process that now has the recorded id and port is somebody else's."""
    calls: list[str] = []

    class Stranger(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            calls.append(str(self.headers))
            self.send_response(200)
            self.end_headers()

    with http.server.HTTPServer(("127.0.0.1", 0), Stranger) as stranger:
        thread = threading.Thread(target=stranger.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        folder.mkdir(parents=True)
        port = stranger.server_address[1]
        record = ServerRecord(pid=os.getpid(), port=port, admin_port=port, started=0.0)
        (folder / SERVER_FILE).write_bytes(codec.dumps(record))
        (folder / LOCK_FILE).write_text(str(os.getpid()))
        (folder / TOKEN_FILE).write_text("secret")
        assert provider.observe(CONFIG) is None
        stranger.shutdown()
        thread.join()
    assert calls == []


def test_the_record_of_a_dead_server_is_not_that_of_the_one_that_starts(folder: Path) -> None:
    server = LocalServer(folder, sys.executable)
    folder.mkdir(parents=True)
    with (folder / LOCK_FILE).open("w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        lock.write(str(os.getpid()))
        lock.flush()
        dead, living = (ServerRecord(pid=pid, port=1, admin_port=2, started=0.0) for pid in (1, os.getpid()))
        for record, trusted in ((dead, None), (living, living)):
            (folder / SERVER_FILE).write_bytes(codec.dumps(record))
            assert server.record() == trusted


def test_a_server_that_dies_during_a_publication_is_started_again(
    provider: LocalEndpoints, folder: Path, blue: Deployment
) -> None:
    provider.apply(CONFIG, state_of(blue, blue=100), generation=1)
    first = record_of(folder)
    os.kill(first.pid, signal.SIGSTOP)  # it takes the request, and answers it no more
    death = threading.Timer(0.2, os.kill, (first.pid, signal.SIGKILL))
    death.start()
    provider.apply(CONFIG, state_of(blue, blue=100), generation=2)
    death.join()
    assert record_of(folder).pid != first.pid
    observed = provider.observe(CONFIG)
    assert observed is not None
    assert observed.generation == 2


def test_a_taken_port_is_named_with_a_remedy(provider: LocalEndpoints, blue: Deployment) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        config = replace(CONFIG, settings={"port": port})
        with pytest.raises(ServiceUnavailableError, match=f"port {port} is taken") as caught:
            provider.apply(config, state_of(blue, blue=100), generation=1)
    assert "settings" in caught.value.remedy
    provider.apply(config, state_of(blue, blue=100), generation=1)
    assert provider.address(config) == f"http://127.0.0.1:{port}"


def test_a_new_port_in_the_settings_moves_the_server(provider: LocalEndpoints, blue: Deployment) -> None:
    provider.apply(CONFIG, state_of(blue, blue=100), generation=1)
    first, port = str(provider.address(CONFIG)), free_port()
    moved = replace(CONFIG, settings={"port": port, "workers": 1, "queue": 7})
    observed = provider.observe(moved)
    assert observed is not None
    assert observed.drift == (f"port: {first.rpartition(':')[2]}, not {port}", "queue: 128, not 7")
    provider.apply(moved, state_of(blue, blue=100), generation=1)
    observed = provider.observe(moved)
    assert observed is not None
    assert observed.drift == ()
    assert EndpointProviderSuite().scale(f"http://127.0.0.1:{port}") == 2.0


def test_files_that_are_not_those_of_the_manifest_are_refused(
    provider: LocalEndpoints, blue: Deployment, tmp_path: Path
) -> None:
    good = state_of(blue, blue=100)
    provider.apply(CONFIG, good, generation=1)
    green = scaling_deployment(tmp_path / "green", name="green", version="2", scale=3.0)
    (tmp_path / "green" / "extra.bin").write_bytes(b"x")
    with pytest.raises(DigestMismatchError, match="digest mismatch"):
        provider.apply(CONFIG, state_of(blue, green, blue=50, green=50), generation=2)
    lost = replace(green, location=str(tmp_path / "nowhere"))
    with pytest.raises(NotFoundError):
        provider.apply(CONFIG, state_of(blue, lost, blue=50, green=50), generation=2)
    assert provider.observe(CONFIG) == replace(good, generation=1)


def test_a_deployment_lost_while_the_server_was_down_is_not_observed_and_comes_back(
    provider: LocalEndpoints, blue: Deployment, tmp_path: Path
) -> None:
    state = state_of(blue, blue=100)
    provider.apply(CONFIG, state, generation=1)
    provider.stop(CONFIG)
    Path(blue.location).rename(tmp_path / "away")
    with pytest.raises(NotFoundError):
        provider.apply(CONFIG, state, generation=1)
    assert provider.observe(CONFIG) is None
    (tmp_path / "away").rename(blue.location)
    provider.apply(CONFIG, state, generation=1)
    assert provider.observe(CONFIG) == replace(state, generation=1)


def test_a_server_that_cannot_start_shows_the_end_of_its_log(tmp_path: Path, blue: Deployment) -> None:
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho something is broken here\nexit 7\n")
    broken.chmod(0o700)
    provider = LocalEndpoints(tmp_path / "endpoints", python=str(broken))
    with pytest.raises(ServiceUnavailableError, match="exit code 7") as caught:
        provider.apply(CONFIG, state_of(blue, blue=100), generation=1)
    assert "something is broken here" in caught.value.why


def test_two_appliers_at_once_end_with_the_later_generation(
    provider: LocalEndpoints, blue: Deployment, tmp_path: Path, folder: Path
) -> None:
    green = scaling_deployment(tmp_path / "green", name="green", version="2", scale=3.0)
    states = {number: state_of(blue, green, blue=100 - number, green=number) for number in range(1, 5)}
    outcomes: dict[int, OnnxOpsError | None] = {}

    def apply(generation: int) -> None:
        try:
            LocalEndpoints(tmp_path / "endpoints").apply(CONFIG, states[generation], generation=generation)
            outcomes[generation] = None
        except ConflictError as error:
            outcomes[generation] = error

    threads = [threading.Thread(target=apply, args=(generation,)) for generation in states]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(outcomes) == set(states)
    assert outcomes[4] is None
    assert provider.observe(CONFIG) == replace(states[4], generation=4)
    assert record_of(folder).port > 0


@pytest.mark.parametrize("name", ["", "../escape", "a/b", "-x", ".", "x" * 64])
def test_hostile_endpoint_names_are_refused(provider: LocalEndpoints, blue: Deployment, name: str) -> None:
    with pytest.raises(UserError, match="cannot be the name"):
        provider.apply(replace(CONFIG, endpoint=name), state_of(blue, blue=100), generation=1)


@pytest.mark.parametrize("port", [0, 65536, "8080", True])
def test_a_port_must_be_one(provider: LocalEndpoints, blue: Deployment, port: int | str | bool) -> None:
    with pytest.raises(UserError, match="port: "):
        provider.apply(replace(CONFIG, settings={"port": port}), state_of(blue, blue=100), generation=1)


def test_settings_of_the_server_reach_it_and_others_are_refused(
    provider: LocalEndpoints, folder: Path, blue: Deployment
) -> None:
    provider.validate_settings({"port": 8080, "workers": 2})
    for settings, message in (
        ({"worker": 2}, "unknown key .worker."),
        ({"workers": 0}, "at least 1"),
        ({"port": 0}, "port: "),
    ):
        with pytest.raises(UserError, match=message):
            provider.validate_settings(settings)
    state = state_of(blue, blue=100)
    provider.apply(CONFIG, state, generation=1)
    first = record_of(folder)
    provider.apply(replace(CONFIG, settings={"workers": 2}), state, generation=2)
    assert (first.options.workers, record_of(folder).options.workers) == (1, 2)
    assert record_of(folder).port == first.port
    assert len(server_process.list_workers(folder)) == 2
    second = record_of(folder)
    provider.apply(replace(CONFIG, settings={"workers": 2}), state, generation=3)
    assert record_of(folder) == second


def test_workers_whose_supervisor_was_killed_answer_until_a_new_one_has_taken_over(
    provider: LocalEndpoints, folder: Path, blue: Deployment, tmp_path: Path
) -> None:
    provider.apply(CONFIG, state_of(blue, blue=100), generation=1)
    address, orphans = str(provider.address(CONFIG)), server_process.list_workers(folder)
    os.kill(record_of(folder).pid, signal.SIGKILL)
    assert not provider.is_unsupervised(replace(CONFIG, endpoint="other"))
    for _ in range(400):  # the system takes a moment to end a process, and to give back what it held
        if provider.observe(CONFIG) is None and provider.is_unsupervised(CONFIG):
            break
        time.sleep(0.05)
    assert provider.is_unsupervised(CONFIG)
    assert EndpointProviderSuite().scale(address) == 2.0
    green = scaling_deployment(tmp_path / "green", name="green", version="2", scale=3.0)
    provider.apply(CONFIG, state_of(green, green=100), generation=2)
    assert provider.address(CONFIG) == address
    assert EndpointProviderSuite().scale(address) == 3.0
    assert set(orphans).isdisjoint(server_process.list_workers(folder))
    assert not provider.is_unsupervised(CONFIG)


def test_who_is_dead_or_does_not_serve_is_not_called_unsupervised(
    provider: LocalEndpoints, folder: Path, blue: Deployment
) -> None:
    assert not provider.is_unsupervised(CONFIG)
    provider.apply(CONFIG, state_of(blue, blue=100), generation=1)
    assert not provider.is_unsupervised(CONFIG)
    workers = server_process.list_workers(folder)
    for pid in (record_of(folder).pid, *workers):  # workers cannot come back without their supervisor
        os.kill(pid, signal.SIGKILL)
    while server_process.list_workers(folder):
        pass
    assert not provider.is_unsupervised(CONFIG)
    assert provider.observe(CONFIG) is None


def test_stopping_ends_workers_whose_supervisor_was_killed(
    provider: LocalEndpoints, folder: Path, blue: Deployment
) -> None:
    provider.apply(CONFIG, state_of(blue, blue=100), generation=1)
    os.kill(record_of(folder).pid, signal.SIGKILL)
    provider.stop(CONFIG)
    assert server_process.list_workers(folder) == ()


def test_stopping_what_does_not_run_is_no_error(provider: LocalEndpoints) -> None:
    provider.stop(CONFIG)
    assert provider.observe(CONFIG) is None


def test_the_record_on_disk_is_plain_json(provider: LocalEndpoints, folder: Path, blue: Deployment) -> None:
    provider.apply(CONFIG, state_of(blue, blue=100), generation=1)
    document = json.loads((folder / SERVER_FILE).read_text())
    assert set(document) == {"pid", "port", "admin_port", "started", "options"}
    provider.stop(CONFIG)
    assert not (folder / SERVER_FILE).exists()
