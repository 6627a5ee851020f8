"""The local endpoint provider over real server processes."""

from __future__ import annotations

import http.server
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from onnx_ops import codec
from onnx_ops.adapters.endpoints import local_server
from onnx_ops.adapters.endpoints.local import LocalEndpoints
from onnx_ops.adapters.endpoints.local_server import LocalServer
from onnx_ops.domain.endpoint import Deployment, EndpointConfig
from onnx_ops.domain.quantities import Json
from onnx_ops.errors import (
    ConflictError,
    DigestMismatchError,
    NotFoundError,
    OnnxOpsError,
    ServiceUnavailableError,
    UserError,
)
from onnx_ops.file_locks import acquire_lock
from onnx_ops.protocol import server_process
from onnx_ops.protocol.server_process import (
    LOCK_FILE,
    SERVER_FILE,
    TOKEN_FILE,
    ServerOptions,
    ServerRecord,
)
from onnx_ops.serving.inference.integrity import COPIES_FOLDER
from onnx_ops.testing.endpoints import EndpointProviderSuite, state_of
from tests.adapters.endpoint_site import EndpointSite, make_config, make_models
from tests.support.load import LoadPlan, LoadProcess, Payload
from tests.support.ports import free_port
from tests.support.processes import until

CONFIG = make_config("digits")


@dataclass(kw_only=True)
class Site(EndpointSite):
    """A provider whose endpoint is served by a server process on this machine."""

    folder: Path
    provider: LocalEndpoints = field(init=False)
    config = CONFIG

    def __post_init__(self) -> None:
        self.provider = LocalEndpoints(self.folder.parent)

    def record(self) -> ServerRecord:
        return codec.loads((self.folder / SERVER_FILE).read_bytes(), ServerRecord)

    def workers(self) -> Sequence[int]:
        return server_process.list_workers(self.folder)

    def scale(self) -> float:
        return EndpointProviderSuite().scale(str(self.provider.address(CONFIG)))


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    blue, green = make_models(tmp_path / "models")
    site = Site(folder=tmp_path / "endpoints" / "digits", blue=blue, green=green)
    yield site
    site.provider.stop(CONFIG)


class TestLocalEndpoints(EndpointProviderSuite):
    @pytest.fixture
    def provider(self, site: Site) -> LocalEndpoints:
        return site.provider

    @pytest.fixture
    def config(self) -> EndpointConfig:
        return CONFIG

    @pytest.fixture
    def deployments(self, site: Site) -> tuple[Deployment, Deployment]:
        return site.blue, site.green


@pytest.mark.parametrize("how", ["killed", "supervisor hung", "all hung"])
def test_local_rollback_of_unresponsive_server_restores_stable_version(
    site: Site, how: str
) -> None:
    site.apply(1, green=100)
    server, workers = site.record().pid, site.workers()
    number = signal.SIGKILL if how == "killed" else signal.SIGSTOP
    for pid in (server, *(() if how == "supervisor hung" else workers)):
        os.kill(pid, number)
    site.provider.roll_back(CONFIG, site.state(blue=100, green=0), generation=2)
    assert site.observed().is_equivalent(site.state(blue=100))
    assert not set(site.workers()) & set(workers)
    assert site.scale() == 2.0


def test_local_server_after_kill_restarts_with_last_table_and_port(site: Site) -> None:
    state = site.state(blue=100)
    site.provider.apply(CONFIG, state, generation=3)
    address, first = site.provider.address(CONFIG), site.record()
    os.kill(first.pid, signal.SIGKILL)
    while site.provider.observe(CONFIG) is not None:
        pass
    # The restarted server also refuses a generation below 3.
    with pytest.raises(ConflictError):
        site.provider.apply(CONFIG, state, generation=2)
    assert site.observed() == replace(state, generation=3)
    assert site.provider.address(CONFIG) == address
    assert site.record().pid != first.pid
    assert site.scale() == 2.0


def test_local_server_start_beyond_time_limit_ends_its_workers(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.apply(1, blue=100)
    site.provider.stop(CONFIG)

    def wait_for_workers(server: LocalServer) -> None:
        until(lambda: bool(site.workers()))

    with monkeypatch.context() as patch:
        patch.setattr(local_server, "_START_S", 0.1)
        patch.setattr(LocalServer, "record", wait_for_workers)
        with pytest.raises(ServiceUnavailableError, match="the endpoint server was not ready"):
            LocalServer(site.folder, sys.executable).start(free_port(), ServerOptions())
    until(lambda: not site.workers())


def test_list_memory_counts_workers_that_run_and_is_empty_without_server(site: Site) -> None:
    assert not site.provider.list_memory(CONFIG)
    site.provider.apply(CONFIG, site.state(blue=100), generation=1)
    (memory,) = site.provider.list_memory(CONFIG)
    assert (memory.server, memory.workers) == ("", 1)
    assert 0 < memory.worker_bytes < memory.available_bytes


def test_local_apply_in_short_process_leaves_server_and_imports_no_large_package(
    site: Site, tmp_path: Path
) -> None:
    script = (
        "import sys; from pathlib import Path; from onnx_ops import codec;"
        "from onnx_ops.adapters.endpoints.local import LocalEndpoints;"
        "from onnx_ops.domain.endpoint import EndpointConfig, EndpointState;"
        "LocalEndpoints(Path(sys.argv[1])).apply(codec.loads(sys.argv[2].encode(), "
        "EndpointConfig),"
        "codec.loads(sys.argv[3].encode(), EndpointState), generation=1);"
        "assert 'onnxruntime' not in sys.modules and 'httpx' not in sys.modules and 'numpy' not "
        "in sys.modules"
    )
    state = site.state(blue=100)
    arguments = [
        str(tmp_path / "endpoints"),
        codec.dumps(CONFIG).decode(),
        codec.dumps(state).decode(),
    ]
    subprocess.run([sys.executable, "-c", script, *arguments], check=True, timeout=60)
    assert site.observed().is_equivalent(state)


def test_local_apply_creates_private_folder_and_token(site: Site) -> None:
    site.apply(1, blue=100)
    assert site.folder.stat().st_mode & 0o777 == 0o700
    assert (site.folder / TOKEN_FILE).stat().st_mode & 0o777 == 0o600
    token = (site.folder / TOKEN_FILE).read_text()
    command_line = Path(f"/proc/{site.record().pid}/cmdline").read_bytes()
    assert token.encode() not in command_line
    assert token not in (site.folder / "server.log").read_text()


def test_local_server_started_with_aws_secret_in_environment_does_not_inherit_it(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "do-not-leak")
    site.apply(1, blue=100)
    assert b"do-not-leak" not in Path(f"/proc/{site.record().pid}/environ").read_bytes()


def test_local_observe_with_stale_record_sends_no_token(site: Site) -> None:
    """Another process now has the recorded process id and port."""
    calls: list[str] = []

    class Stranger(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            calls.append(str(self.headers))
            self.send_response(200)
            self.end_headers()

    with http.server.HTTPServer(("127.0.0.1", 0), Stranger) as stranger:
        thread = threading.Thread(target=stranger.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        site.folder.mkdir(parents=True)
        port = stranger.server_address[1]
        record = ServerRecord(pid=os.getpid(), port=port, admin_port=port, started=0.0)
        (site.folder / SERVER_FILE).write_bytes(codec.dumps(record))
        (site.folder / LOCK_FILE).write_text(str(os.getpid()))
        (site.folder / TOKEN_FILE).write_text("secret")
        assert site.provider.observe(CONFIG) is None
        stranger.shutdown()
        thread.join()
    assert calls == []


def test_local_server_record_of_process_without_lock_returns_none(site: Site) -> None:
    server = LocalServer(site.folder, sys.executable)
    site.folder.mkdir(parents=True)
    with (site.folder / LOCK_FILE).open("w", encoding="utf-8") as lock:
        acquire_lock(lock.fileno())
        lock.write(str(os.getpid()))
        lock.flush()
        dead, living = (
            ServerRecord(pid=pid, port=1, admin_port=2, started=0.0) for pid in (1, os.getpid())
        )
        for record, trusted in ((dead, None), (living, living)):
            (site.folder / SERVER_FILE).write_bytes(codec.dumps(record))
            assert server.record() == trusted


def test_local_apply_while_hung_server_is_killed_restarts_server(site: Site) -> None:
    site.apply(1, blue=100)
    first = site.record()
    os.kill(first.pid, signal.SIGSTOP)  # the server accepts but does not answer
    death = threading.Timer(0.2, os.kill, (first.pid, signal.SIGKILL))
    death.start()
    site.apply(2, blue=100)
    death.join()
    assert site.record().pid != first.pid
    assert site.observed().generation == 2


def test_local_apply_with_taken_port_raises_error_with_remedy(site: Site) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        config = replace(CONFIG, options={"port": port})
        with pytest.raises(ServiceUnavailableError, match=f"program uses port {port}") as caught:
            site.apply(1, config, blue=100)
    assert "options" in caught.value.remedy
    site.apply(1, config, blue=100)
    assert site.provider.address(config) == f"http://127.0.0.1:{port}"


def test_local_apply_with_new_port_and_queue_moves_server_and_resolves_drift(site: Site) -> None:
    site.apply(1, blue=100)
    first, port = str(site.provider.address(CONFIG)), free_port()
    moved = replace(CONFIG, options={"port": port, "workers": 1, "queue": 7})
    assert site.drift(moved) == [
        f"port: {first.rpartition(':')[2]}, not {port}",
        "queue: 128, not 7",
    ]
    site.apply(1, moved, blue=100)
    assert site.drift(moved) == []
    assert EndpointProviderSuite().scale(f"http://127.0.0.1:{port}") == 2.0


def test_local_apply_with_changed_or_missing_files_raises_error(site: Site, tmp_path: Path) -> None:
    good = site.state(blue=100)
    site.provider.apply(CONFIG, good, generation=1)
    (Path(site.green.location) / "extra.bin").write_bytes(b"x")
    with pytest.raises(DigestMismatchError, match="digest mismatch"):
        site.apply(2, blue=50, green=50)
    lost = replace(site.green, location=str(tmp_path / "nowhere"))
    with pytest.raises(NotFoundError):
        site.provider.apply(CONFIG, state_of(site.blue, lost, blue=50, green=50), generation=2)
    assert site.provider.observe(CONFIG) == replace(good, generation=1)


def test_local_observe_after_loss_of_model_files_returns_none_until_restored(
    site: Site, tmp_path: Path
) -> None:
    state = site.state(blue=100)
    site.provider.apply(CONFIG, state, generation=1)
    site.provider.stop(CONFIG)
    Path(site.blue.location).rename(tmp_path / "away")
    shutil.rmtree(site.folder / COPIES_FOLDER)
    with pytest.raises(NotFoundError):
        site.provider.apply(CONFIG, state, generation=1)
    assert site.provider.observe(CONFIG) is None
    (tmp_path / "away").rename(site.blue.location)
    site.provider.apply(CONFIG, state, generation=1)
    assert site.provider.observe(CONFIG) == replace(state, generation=1)


def test_local_apply_with_server_that_fails_to_start_raises_error_with_its_log(
    site: Site, tmp_path: Path
) -> None:
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho something is broken here\nexit 7\n")
    broken.chmod(0o700)
    site.provider = LocalEndpoints(site.folder.parent, python=str(broken))
    with pytest.raises(ServiceUnavailableError, match="exit code 7") as caught:
        site.apply(1, blue=100)
    assert "something is broken here" in caught.value.why


def test_local_apply_by_concurrent_callers_ends_with_latest_generation(site: Site) -> None:
    states = {number: site.state(blue=100 - number, green=number) for number in range(1, 5)}
    outcomes: dict[int, OnnxOpsError | None] = {}

    def apply(generation: int) -> None:
        try:
            LocalEndpoints(site.folder.parent).apply(
                CONFIG, states[generation], generation=generation
            )
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
    assert site.provider.observe(CONFIG) == replace(states[4], generation=4)
    assert site.record().port > 0


@pytest.mark.parametrize("name", ["", "../escape", "a/b", "-x", ".", "x" * 64])
def test_local_apply_with_invalid_endpoint_name_raises_user_error(site: Site, name: str) -> None:
    with pytest.raises(UserError, match="cannot be the name"):
        site.apply(1, replace(CONFIG, endpoint=name), blue=100)


@pytest.mark.parametrize("port", [0, 65536, "8080", True])
def test_local_apply_with_invalid_port_raises_user_error(
    site: Site, port: int | str | bool
) -> None:
    with pytest.raises(UserError, match="port: "):
        site.apply(1, replace(CONFIG, options={"port": port}), blue=100)


OUTSIDE = (
    "/etc/cron.d/x.log",
    "../x.log",
    "a/../../x.sock",
    "server.log",
    "token",
    "x",
    ".log",
    "-",
    "a\n.log",
)


def test_local_validate_options_with_unknown_key_or_wrong_value_raises_user_error(
    site: Site,
) -> None:
    site.provider.validate_options(
        {"workers": 2, "access_log": "access.log", "admin_socket": "admin.sock"}
    )
    wrong: list[tuple[dict[str, Json], str]] = [
        ({"worker": 2}, "unknown key .worker."),
        ({"workers": 0}, "at least 1"),
        ({"port": 0}, "port: "),
    ]
    wrong += [
        ({key: name}, r"must end with \.(log|sock), consist of at most 100 of")
        for key in ("access_log", "admin_socket")
        for name in OUTSIDE
    ]
    for options, message in wrong:
        with pytest.raises(UserError, match=message):
            site.provider.validate_options(options)


def test_local_apply_with_workers_option_changes_number_only_if_different(site: Site) -> None:
    state = site.state(blue=100)
    site.provider.apply(CONFIG, state, generation=1)
    first = site.record()
    site.provider.apply(replace(CONFIG, options={"workers": 2}), state, generation=2)
    assert (first.options.workers, site.record().options.workers) == (1, 2)
    assert site.record().port == first.port
    assert len(site.workers()) == 2
    second = site.record()
    site.provider.apply(replace(CONFIG, options={"workers": 2}), state, generation=3)
    assert site.record() == second


def test_local_apply_with_other_worker_count_drops_no_request(site: Site) -> None:
    state = site.state(blue=100)
    site.provider.apply(CONFIG, state, generation=1)
    body = b'{"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 2], "data": [1, 2]}]}'
    url = f"{site.provider.address(CONFIG)}/v2/models/scale/infer"
    with LoadProcess(
        LoadPlan(url=url, payloads=[Payload(body=body)], connections=4, seconds=300.0)
    ) as load:
        for generation, workers in ((2, 3), (3, 1), (4, 2)):
            before = set(site.workers())
            site.provider.apply(
                replace(CONFIG, options={"workers": workers}), state, generation=generation
            )
            until(lambda: not before & set(site.workers()), "the end of the old workers")  # noqa: B023
            assert len(site.workers()) == workers
        records = load.stop()
    assert records.failures() == {}
    assert len(records) > 100


def test_local_workers_without_supervisor_answer_until_takeover(site: Site) -> None:
    site.apply(1, blue=100)
    address, orphans = str(site.provider.address(CONFIG)), site.workers()
    os.kill(site.record().pid, signal.SIGKILL)
    assert not site.provider.is_unsupervised(replace(CONFIG, endpoint="other"))
    # The system takes a moment to end a process and to release its resources.
    for _ in range(400):
        if site.provider.observe(CONFIG) is None and site.provider.is_unsupervised(CONFIG):
            break
        time.sleep(0.05)
    assert site.provider.is_unsupervised(CONFIG)
    assert site.scale() == 2.0
    site.apply(2, green=100)
    assert site.provider.address(CONFIG) == address
    assert site.scale() == 3.0
    assert set(orphans).isdisjoint(site.workers())
    assert not site.provider.is_unsupervised(CONFIG)


def test_local_is_unsupervised_with_supervisor_or_without_workers_returns_false(site: Site) -> None:
    assert not site.provider.is_unsupervised(CONFIG)
    site.apply(1, blue=100)
    assert not site.provider.is_unsupervised(CONFIG)
    workers = site.workers()
    # Only an endpoint with running workers can be unsupervised.
    for pid in (site.record().pid, *workers):
        os.kill(pid, signal.SIGKILL)
    while site.workers():
        pass
    assert not site.provider.is_unsupervised(CONFIG)
    assert site.provider.observe(CONFIG) is None


def test_local_stop_after_supervisor_kill_ends_workers(site: Site) -> None:
    site.apply(1, blue=100)
    os.kill(site.record().pid, signal.SIGKILL)
    site.provider.stop(CONFIG)
    assert site.workers() == ()


def test_local_stop_before_first_apply_does_nothing(site: Site) -> None:
    site.provider.stop(CONFIG)
    assert not site.folder.exists()
    assert site.provider.observe(CONFIG) is None


def test_local_server_record_after_apply_is_json_and_after_stop_is_absent(site: Site) -> None:
    site.apply(1, blue=100)
    document = json.loads((site.folder / SERVER_FILE).read_text())
    assert set(document) == {"pid", "port", "admin_port", "started", "options"}
    site.provider.stop(CONFIG)
    assert not (site.folder / SERVER_FILE).exists()
