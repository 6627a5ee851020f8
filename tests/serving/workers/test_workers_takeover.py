"""What survives the supervisor, the machine, and a torn table."""

from __future__ import annotations

import http.client
import json
import os
import resource
import signal
import socket
import subprocess
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from onnx_ops.domain.endpoint import Deployment
from onnx_ops.protocol.routing_table import (
    CURRENT_FILE,
    PREVIOUS_FILE,
    RoutingTable,
    TableFile,
    build_next_table,
    write_durably,
)
from onnx_ops.protocol.server_process import AUDIT_FILE, HANDOVER_SOCKET
from onnx_ops.testing.endpoints import state_of
from tests.serving.serving_process import INFER, Clients, Server, infer_body, wait_until

BODY = infer_body([1, 2])


class Steady:
    """A client that keeps its connections open, and says what went wrong and who answered."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.answers: Counter[str] = Counter()
        self.failures: list[str] = []

    def __call__(self) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=30)
        try:
            for _ in range(20):
                connection.request("POST", INFER, BODY)
                response = connection.getresponse()
                response.read()
                if response.status != 200:
                    self.failures.append(str(response.status))
                self.answers[response.headers["x-onnx-ops-deployment"] or ""] += 1
                if response.headers["connection"] == "close":
                    return
        except (OSError, http.client.HTTPException) as error:
            self.failures.append(repr(error))
        finally:
            connection.close()


def test_workers_go_on_when_their_supervisor_is_killed_and_the_next_one_takes_over(
    two_workers: Server, blue: Deployment, green: Deployment
) -> None:
    two_workers.publish(state_of(blue, green, blue=100, green=0), 1)
    steady = Steady(two_workers)
    with Clients(steady, 3) as clients:
        port, orphans = two_workers.port, set(two_workers.workers())
        for number in (2, 3):
            two_workers.end(signal.SIGKILL)
            count = steady.answers.total()
            wait_until(lambda count=count: steady.answers.total() > count + 50)  # type: ignore[misc]
            two_workers.start()
            assert two_workers.port == port
            weights = {"blue": 0, "green": 100} if number == 2 else {"blue": 100, "green": 0}
            assert two_workers.publish(state_of(blue, green, **weights), number).status == 200
            assert orphans.isdisjoint(two_workers.workers())  # they had to be gone before anything was published
            assert two_workers.who_answers() == ("green" if number == 2 else "blue")
            orphans = set(two_workers.workers())
    assert clients.errors == []
    assert steady.failures == []
    assert two_workers.end() == 0
    assert two_workers.workers() == ()


@pytest.mark.nightly
def test_orphans_and_a_supervisor_killed_while_it_takes_over(two_workers: Server, blue: Deployment) -> None:
    two_workers.publish(state_of(blue, blue=100), 1)
    two_workers.end(signal.SIGKILL)
    for _ in range(3):  # each dies while its workers start, or while the orphans drain
        two_workers.process = subprocess.Popen(
            two_workers.command(f"--port={two_workers.port}"), stderr=subprocess.DEVNULL
        )
        before = set(two_workers.workers())
        wait_until(lambda before=before: set(two_workers.workers()) != before)  # type: ignore[misc]
        two_workers.end(signal.SIGKILL)
        assert two_workers.infer([1, 2]).status == 200
    two_workers.start()
    assert two_workers.publish(state_of(blue, blue=100), 2).status == 200
    assert len(two_workers.workers()) == 2
    assert two_workers.infer([1, 2]).status == 200


def test_a_port_that_a_stranger_has_taken_is_refused_although_a_handover_file_is_left(
    two_workers: Server, blue: Deployment
) -> None:
    two_workers.publish(state_of(blue, blue=100), 1)
    two_workers.kill_all()
    assert (two_workers.folder / HANDOVER_SOCKET).exists()
    with socket.socket() as stranger:
        stranger.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        stranger.bind(("127.0.0.1", two_workers.port))
        stranger.listen()
        found = subprocess.run(
            two_workers.command(f"--port={two_workers.port}"), capture_output=True, text=True, timeout=60, check=False
        )
    assert found.returncode == 4
    assert "port cannot be used" in found.stderr
    two_workers.start()
    assert two_workers.infer([1, 2]).status == 200


def test_a_full_disk_refuses_a_publication_and_changes_nothing(
    two_workers: Server, blue: Deployment, green: Deployment
) -> None:
    """The system refuses the supervisor every write from some byte on, as a full disk does."""
    two_workers.publish(state_of(blue, blue=100), 1)
    assert two_workers.process is not None
    size = (two_workers.folder / AUDIT_FILE).stat().st_size
    table = (two_workers.folder / CURRENT_FILE).read_bytes()
    hard = resource.prlimit(two_workers.process.pid, resource.RLIMIT_FSIZE)[1]
    for room in (size + 5, size + 400):  # the audit line does not fit; it does, but the table does not
        resource.prlimit(two_workers.process.pid, resource.RLIMIT_FSIZE, (room, hard))
        answer = two_workers.publish(state_of(blue, green, blue=50, green=50), 2)
        assert answer.status == 503, answer.body
        assert "written" in answer.body.decode()
        assert (two_workers.folder / CURRENT_FILE).read_bytes() == table
        assert two_workers.infer([1, 2]).status == 200
        assert two_workers.generation() == 1
    resource.prlimit(two_workers.process.pid, resource.RLIMIT_FSIZE, (hard, hard))
    assert two_workers.publish(state_of(green, green=100), 2).status == 200
    assert two_workers.who_answers() == "green"
    assert not [path for path in two_workers.folder.iterdir() if path.name.startswith(".tmp-")]
    for line in (two_workers.folder / AUDIT_FILE).read_bytes().splitlines():
        assert line


def test_a_table_that_is_cut_at_any_byte_gives_way_to_the_previous_one(
    two_workers: Server, blue: Deployment, green: Deployment
) -> None:
    two_workers.publish(state_of(blue, blue=100), 1)
    two_workers.publish(state_of(green, green=100), 2)
    two_workers.kill_all()
    audited = [json.loads(line) for line in (two_workers.folder / AUDIT_FILE).read_bytes().splitlines()]
    assert [(line["what"], line["generation"]) for line in audited[-4:]] == [
        *(("publish", 1), ("published", 1)),
        *(("publish", 2), ("published", 2)),
    ]
    whole = (two_workers.folder / CURRENT_FILE).read_bytes()
    tables = TableFile(two_workers.folder)
    for end in range(len(whole)):
        (two_workers.folder / CURRENT_FILE).write_bytes(whole[:end])
        found = tables.read()
        assert found is not None
        assert found.state.generation == 1
    two_workers.start()
    assert two_workers.who_answers() == "blue"
    (two_workers.folder / CURRENT_FILE).write_bytes(whole)
    (two_workers.folder / PREVIOUS_FILE).write_bytes(b"")
    assert tables.read() is not None


@pytest.fixture
def history(blue: Deployment, green: Deployment) -> tuple[RoutingTable, RoutingTable, RoutingTable]:
    first = build_next_table(None, replace(state_of(blue, blue=100), generation=1))
    second = build_next_table(first, replace(state_of(blue, green, blue=90, green=10), generation=2))
    return first, second, build_next_table(second, replace(state_of(blue, green, blue=0, green=100), generation=3))


def test_nothing_was_published_yet(tmp_path: Path) -> None:
    assert TableFile(tmp_path).read() is None


def test_what_was_written_is_read_and_leaves_no_temporary_files(
    tmp_path: Path, history: tuple[RoutingTable, RoutingTable, RoutingTable]
) -> None:
    for number, table in enumerate(history):
        folder = tmp_path / "t"
        folder.mkdir(exist_ok=True)
        TableFile(folder).write(table)
        assert TableFile(folder).read() == table
        assert {p.name for p in folder.iterdir()} == ({CURRENT_FILE} if number == 0 else {CURRENT_FILE, PREVIOUS_FILE})


def test_a_table_cut_at_any_byte_gives_way_to_the_previous_one(
    tmp_path: Path, history: tuple[RoutingTable, RoutingTable, RoutingTable]
) -> None:
    folder = tmp_path / "t"
    folder.mkdir()
    tables = TableFile(folder)
    tables.write(history[0])
    tables.write(history[1])
    whole = (folder / CURRENT_FILE).read_bytes()
    for end in range(len(whole)):
        (folder / CURRENT_FILE).write_bytes(whole[:end])
        assert tables.read() == history[0]
    (folder / CURRENT_FILE).unlink()
    assert tables.read() == history[0]


def test_a_torn_table_never_replaces_the_good_previous_one(
    tmp_path: Path, history: tuple[RoutingTable, RoutingTable, RoutingTable]
) -> None:
    folder = tmp_path / "t"
    folder.mkdir()
    tables = TableFile(folder)
    tables.write(history[0])
    tables.write(history[1])
    (folder / CURRENT_FILE).write_bytes(b"{")
    tables.write(history[2])
    assert tables.read() == history[2]
    (folder / CURRENT_FILE).write_bytes(b"{")
    assert tables.read() == history[0]


def test_two_torn_tables_are_no_table(tmp_path: Path) -> None:
    (tmp_path / CURRENT_FILE).write_bytes(b"\x00" * 100)
    (tmp_path / PREVIOUS_FILE).write_bytes(b'{"format": "something else"}')
    assert TableFile(tmp_path).read() is None


def test_a_write_that_fails_leaves_the_table_of_before(
    tmp_path: Path, history: tuple[RoutingTable, RoutingTable, RoutingTable], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "t"
    folder.mkdir()
    tables = TableFile(folder)
    tables.write(history[0])

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space left"):
        tables.write(history[1])
    assert tables.read() == history[0]
    assert not [p for p in folder.iterdir() if p.name.startswith(".tmp-")]


def test_a_file_is_on_the_disk_before_it_takes_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, int]] = []
    fsync, rename = os.fsync, Path.replace

    def recorded_fsync(handle: int) -> None:
        calls.append(("fsync", os.fstat(handle).st_ino))
        fsync(handle)

    def recorded_rename(path: Path, target: Path) -> Path:
        calls.append(("rename", path.stat().st_ino))
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", recorded_fsync)
    monkeypatch.setattr(Path, "replace", recorded_rename)
    write_durably(tmp_path / CURRENT_FILE, b"{}")
    file, folder = ((tmp_path / CURRENT_FILE).stat().st_ino, tmp_path.stat().st_ino)
    assert calls == [("fsync", file), ("rename", file), ("fsync", folder)]
