"""The load generator against sockets that behave correctly or not."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from time import monotonic_ns

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from onnx_ops.errors import MeasurementError, UserError
from tests.support.load import Failure, LoadPlan, LoadProcess, Payload, Publication, Records, stale
from tests.support.load.plan import Requests
from tests.support.load.records import FOREVER_NS

GOOD = b"HTTP/1.1 200 OK\r\nx-onnx-ops-deployment: blue\r\ncontent-length: 2\r\n\r\n{}"
CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n"
LAST = b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 2\r\n\r\n{}"
BUSY = b"HTTP/1.1 429 Too Many Requests\r\ncontent-length: 0\r\n\r\n"


class Peer:
    """A server that answers the nth request, over all connections, with `behave(n)`.

    None closes the connection instead of an answer; b"" leaves the request without one.
    """

    def __init__(self, behave: Callable[[int], bytes | None]) -> None:
        self.requests: list[bytes] = []
        self._behave = behave
        self._lock = threading.Lock()
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=100)
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._talk, args=(client,), daemon=True).start()

    def _talk(self, client: socket.socket) -> None:
        with client, client.makefile("rb") as stream:
            while (
                head := b"".join(iter(stream.readline, b"\r\n"))
                if (first := stream.peek(1))
                else first
            ):
                length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
                body = stream.read(length)
                with self._lock:
                    number = len(self.requests)
                    self.requests.append(head + b"\r\n" + body)
                answer = self._behave(number)
                if answer is None:
                    return
                try:
                    client.sendall(answer)
                except OSError:
                    return

    def close(self) -> None:
        self._listener.close()


@pytest.fixture
def peer(request: pytest.FixtureRequest) -> Iterator[Peer]:
    peer = Peer(getattr(request, "param", lambda _: GOOD))
    yield peer
    peer.close()


def plan(peer: Peer, **changes: object) -> LoadPlan:
    options: dict[str, object] = {
        "payloads": [Payload(body=b'{"a": 1}')],
        "seconds": 20,
        "timeout_s": 5,
    }
    return LoadPlan(url=f"http://127.0.0.1:{peer.port}/v2?x=1", **{**options, **changes})  # type: ignore[arg-type]


def played(plan: LoadPlan) -> Records:
    with LoadProcess(plan) as load:
        return load.wait()


def test_load_process_sends_and_records_each_request_once(peer: Peer) -> None:
    payloads = [Payload(body=b"[1]"), Payload(body=b"[22]")]
    records = played(
        plan(peer, requests=120, connections=4, keys=3, payloads=payloads, headers={"X-Trace": "t"})
    )
    assert len(records) == len(peer.requests) == 120
    assert sorted(records.number.tolist()) == list(range(120))
    assert records.failed == 0
    assert records.by_deployment() == {"blue": 120}
    assert np.bincount(records.key).tolist() == [40, 40, 40]
    for user in range(3):
        for body in (b"[1]", b"[22]"):
            lines = [
                r
                for r in peer.requests
                if f"x-user-key: user-{user}\r\n".encode() in r and r.endswith(body)
            ]
            assert len(lines) == 20
    assert all(
        r.startswith(b"POST /v2?x=1 HTTP/1.1\r\n") and b"\r\nx-trace: t\r\n" in r
        for r in peer.requests
    )
    assert (records.sent_ns >= records.due_ns).all()
    assert (records.done_ns >= records.sent_ns).all()


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("peer", "failures"),
    [
        (lambda n: BUSY if n % 10 == 0 else GOOD, {"429": 3}),
        (lambda n: None if n in (5, 6) else GOOD, {"closed": 2}),
        (
            lambda n: b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n{}" if n == 29 else GOOD,
            {"timed_out": 1},
        ),
        (lambda n: b"" if n == 29 else GOOD, {"timed_out": 1}),
        (lambda n: b"SSH-2.0-OpenSSH\r\n" if n == 3 else GOOD, {"garbled": 1}),
        (lambda n: (LAST, CHUNKED, b"HTTP/1.1 100 Continue\r\n\r\n" + GOOD)[n % 3], {}),
    ],
    indirect=["peer"],
)
def test_load_process_counts_failures_by_kind(peer: Peer, failures: dict[str, int]) -> None:
    records = played(plan(peer, requests=30, timeout_s=0.5))
    assert len(records) == 30
    assert records.failures() == failures
    assert records.failed == sum(failures.values())


def test_load_process_distinguishes_reset_from_refused_connection() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    load = LoadProcess(
        LoadPlan(
            url=f"http://127.0.0.1:{port}/", payloads=[Payload(body=b"{}")], seconds=20, requests=3
        )
    )
    thread = threading.Thread(target=load.start)
    thread.start()
    client, _ = listener.accept()
    assert client.recv(1000).startswith(b"POST / ")
    listener.close()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
    # With SO_LINGER 0, this call sends a reset.
    client.close()
    thread.join()
    assert load.wait().failures() == {"reset": 1, "refused": 2}


def test_load_process_at_fixed_rate_includes_waiting_in_latency() -> None:
    gate = threading.Event()

    def behave(number: int) -> bytes:
        if number == 0:
            gate.wait(10)
        return GOOD

    peer = Peer(behave)
    with LoadProcess(plan(peer, rate=400.0, requests=100)) as load:
        while not peer.requests:
            time.sleep(0.001)
        threading.Timer(0.4, gate.set).start()
        records = load.wait()
    peer.close()
    assert len(records) == 100
    assert records.failed == 0
    waited = records.sent_ns - records.due_ns
    # Arrivals did not wait for the first answer.
    assert waited.max() > 100_000_000
    assert records.latencies_ms().max() >= waited.max() / 1e6


def test_load_process_stop_waits_for_open_requests(peer: Peer) -> None:
    with LoadProcess(plan(peer, connections=3)) as load:
        while len(peer.requests) < 50:
            time.sleep(0.001)
        records = load.stop()
    assert records.failed == 0
    assert len(records) == len(peer.requests)


def test_load_process_without_server_raises_measurement_error(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    nobody = LoadPlan(url=f"http://127.0.0.1:{port}/", payloads=[Payload(body=b"")])
    with pytest.raises(MeasurementError, match="takes no connection"):
        LoadProcess(nobody).start()


@pytest.mark.parametrize(
    "changes",
    [
        {"url": "https://x/"},
        {"url": "x"},
        {"payloads": []},
        {"connections": 0},
        {"seconds": 0},
        {"rate": -1},
    ],
)
def test_load_plan_with_invalid_option_raises_user_error(changes: dict[str, object]) -> None:
    options: dict[str, object] = {"url": "http://x/", "payloads": [Payload(body=b"")], **changes}
    with pytest.raises(UserError):
        LoadPlan(**options)  # type: ignore[arg-type]


def test_requests_with_line_break_in_header_raises_user_error() -> None:
    with pytest.raises(UserError, match="line break"):
        Requests(
            LoadPlan(url="http://x/", payloads=[Payload(body=b"", headers={"a": "b\r\nc: d"})])
        )


def test_load_command_prints_json_and_exits_1_on_failures_or_4_on_missing_body(
    peer: Peer, tmp_path: Path
) -> None:
    (tmp_path / "body").write_bytes(b"{}")
    command = [
        sys.executable,
        "-m",
        "tests.support.load",
        f"http://127.0.0.1:{peer.port}/",
        "--json",
    ]
    command += [
        "--body",
        str(tmp_path / "body"),
        "--requests",
        "10",
        "--records",
        str(tmp_path / "records.npz"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert (summary["requests"], summary["failed"], summary["deployments"]) == (10, 0, {"blue": 10})
    assert Records.read(tmp_path / "records.npz").summary() == summary
    busy = Peer(lambda _: BUSY)
    command[3] = f"http://127.0.0.1:{busy.port}/"
    failing = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    busy.close()
    assert failing.returncode == 1
    assert json.loads(failing.stdout)["failures"] == {"429": 10}
    nothing = subprocess.run(
        [*command[:5], "--body", "/nowhere"], capture_output=True, text=True, check=False
    )
    assert (nothing.returncode, "Traceback" in nothing.stderr) == (4, False)


def answered(*rows: tuple[int, int, str]) -> Records:
    """Return records of answers: time sent, time done, and deployment."""
    names = ("", *sorted({name for _, _, name in rows}))
    table = [(s, s, d, 200, names.index(n), i, 0) for i, (s, d, n) in enumerate(rows)]
    return Records.from_rows(np.array(table, dtype=np.int64), names)


def published(*rows: tuple[int, int, str]) -> list[Publication]:
    return [
        Publication(begun_ns=begun, returned_ns=returned, names=frozenset(names))
        for begun, returned, names in rows
    ]


def test_stale_returns_answers_of_deployments_not_published_during_request() -> None:
    publications = published((0, 10, "a"), (100, 110, "b"), (200, 210, "a"))
    records = answered(
        (20, 30, "a"),
        (20, 30, "b"),  # "b" is not published yet
        (90, 105, "b"),
        (105, 106, "a"),
        (111, 120, "a"),  # "a" is replaced, and the publication had returned
        (111, 205, "a"),  # the rollback had begun before the answer
        (205, 206, "b"),
        (211, 220, "b"),  # "b" was rolled back
        (300, 301, ""),  # the answer names no deployment
    )
    assert stale(records, publications).tolist() == [1, 4, 7, 8]


def test_stale_with_unfinished_publication_accepts_both_deployments() -> None:
    assert monotonic_ns() < FOREVER_NS
    publications = published((0, 10, "a"), (100, FOREVER_NS, "b"), (200, 210, "c"))
    records = answered(
        (150, 160, "a"), (150, 160, "b"), (250, 260, "a"), (250, 260, "b"), (250, 260, "c")
    )
    assert stale(records, publications).tolist() == [2, 3]


@given(st.lists(st.sampled_from("abc"), min_size=1, max_size=6), st.data())
def test_stale_allows_switch_within_publication_but_no_late_answers(
    states: list[str], data: st.DataObject
) -> None:
    publications = published(*((100 * k, 100 * k + 50, name) for k, name in enumerate(states)))
    flips = [100 * k + data.draw(st.integers(0, 50)) for k in range(len(states))]
    rows = []
    for _ in range(10):
        sent = data.draw(st.integers(flips[0], 100 * len(states)))
        seen = data.draw(st.integers(sent, sent + 150))
        done = seen + data.draw(st.integers(0, 50))
        rows.append((sent, done, states[max(k for k, flip in enumerate(flips) if flip <= seen)]))
    assert not len(stale(answered(*rows), publications))
    sent = publications[-1].returned_ns + 1
    late = answered(*((sent, sent + 5, name) for name in "abc" if name != states[-1]))
    assert len(stale(late, publications)) == len(late)


def test_stale_ignores_failed_requests() -> None:
    records = answered((300, 301, "b"))
    records.status[:] = Failure.RESET
    assert not len(stale(records, published((0, 10, "a"))))
