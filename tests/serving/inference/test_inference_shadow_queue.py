"""Mirrored requests between a worker and a shadow process.

The tests cover messages, a full queue, and a connection that ends.
"""

from __future__ import annotations

import asyncio
import functools
import socket
from collections.abc import Callable, Coroutine, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onnx_ops.serving import metrics
from onnx_ops.serving.inference import shadow
from onnx_ops.serving.inference.deployments import InferenceRoute, LoadedDeployment
from onnx_ops.serving.inference.responses import RawResponse
from onnx_ops.serving.inference.shadow import (
    MirroredRequest,
    ShadowQueue,
    encode_request,
    take_requests,
)

HEAD = {
    b"content-type": b"text/csv",
    b"inference-header-content-length": b"7",
    b"x-request-id": b"r-1",
}
ROUTE = InferenceRoute(invocation=True, coding=b"deflate")
RESPONSE = RawResponse(200, b"content-type: application/json\r\n", b"{}")
LARGE = bytes(range(256)) * 16_384


Sockets = Callable[[], tuple[socket.socket, socket.socket]]


def in_event_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    @functools.wraps(test)
    def run(*args: object, **named: object) -> None:
        asyncio.run(test(*args, **named))

    return run


@pytest.fixture
def sockets() -> Iterator[Sockets]:
    """Yield the function that makes pairs: a worker's end and a process's end.

    The worker's end does not block.
    """
    with ExitStack() as stack:

        def make() -> tuple[socket.socket, socket.socket]:
            ours, theirs = (stack.enter_context(end) for end in socket.socketpair())
            ours.setblocking(False)
            theirs.settimeout(30)
            return ours, theirs

        yield make


def build_shadow() -> LoadedDeployment:
    """Return what the queue needs of a deployment: its slot and its row."""
    loaded = object.__new__(LoadedDeployment)
    loaded.slot, loaded.row = 1, metrics.SharedMetrics(1).get_row(0, 1)
    return loaded


def put(queue: ShadowQueue, loaded: LoadedDeployment, body: bytes) -> None:
    queue.put(loaded, InferenceRoute(), {}, body, RESPONSE, 0.1)


def receive_bodies(end: socket.socket, count: int) -> list[bytes]:
    data, bodies = bytearray(), list[bytes]()
    while len(bodies) < count:
        data += end.recv(1 << 16)
        bodies += [request.body for request in take_requests(data)]
    assert not data
    return bodies


def read_counts(loaded: LoadedDeployment) -> tuple[int, int]:
    return loaded.row[metrics.SHADOW_SENT], loaded.row[metrics.SHADOW_DROPPED]


@given(
    bodies=st.lists(st.binary(max_size=40) | st.just(LARGE), max_size=4), piece=st.integers(1, 300)
)
def test_take_requests_from_pieces_returns_each_message_once(
    bodies: list[bytes], piece: int
) -> None:
    sent = b"".join(
        part for body in bodies for part in encode_request(ROUTE, HEAD, body, RESPONSE, 0.25)
    )
    data, taken = bytearray(), list[MirroredRequest]()
    size = piece if len(sent) < 10_000 else 65_536
    for place in range(0, len(sent), size):
        data += sent[place : place + size]
        taken += take_requests(data)
    assert not data
    assert [request.body for request in taken] == bodies
    for request in taken:
        assert request.head == {
            name: HEAD[name] for name in (b"content-type", b"inference-header-content-length")
        }
        assert (request.route, request.expected, request.tolerance) == (ROUTE, RESPONSE, 0.25)


@in_event_loop
async def test_shadow_queue_sends_messages_larger_than_socket_buffer_in_order(
    sockets: Sockets,
) -> None:
    ours, theirs = sockets()
    queue, loaded = ShadowQueue(lambda _: ours), build_shadow()
    bodies = [b"first", LARGE, b"", LARGE[::-1], b"last"]
    for body in bodies:
        put(queue, loaded, body)
    assert await asyncio.to_thread(receive_bodies, theirs, 5) == bodies
    assert read_counts(loaded) == (5, 0)


@in_event_loop
async def test_shadow_queue_beyond_request_limit_drops_and_counts_requests(
    sockets: Sockets,
) -> None:
    ours, theirs = sockets()
    queue, loaded = ShadowQueue(lambda _: ours, limit=3), build_shadow()
    for number in range(5):
        put(queue, loaded, b"%d" % number)
    assert read_counts(loaded) == (3, 2)
    assert await asyncio.to_thread(receive_bodies, theirs, 3) == [b"0", b"1", b"2"]


@in_event_loop
async def test_shadow_queue_beyond_byte_limit_drops_and_counts_requests(
    sockets: Sockets, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shadow, "_MAX_QUEUED_BYTES", 2 * len(LARGE) + 1000)
    queue, loaded = ShadowQueue(lambda _: sockets()[0]), build_shadow()
    for _ in range(3):
        put(queue, loaded, LARGE)
    assert read_counts(loaded) == (2, 1)
    queue.close()
    assert read_counts(loaded) == (2, 3)


@in_event_loop
async def test_shadow_queue_after_process_end_loses_only_current_message(
    sockets: Sockets,
) -> None:
    first, second = sockets(), sockets()
    left = [second[0], first[0]]
    queue, loaded = ShadowQueue(lambda _: left.pop()), build_shadow()
    for body in (LARGE, b"next", LARGE[::-1]):
        put(queue, loaded, body)
    assert await asyncio.to_thread(first[1].recv, 100)
    first[1].close()
    assert await asyncio.to_thread(receive_bodies, second[1], 2) == [b"next", LARGE[::-1]]
    assert read_counts(loaded) == (3, 1)


@in_event_loop
async def test_shadow_queue_without_process_drops_requests_until_next_starts(
    sockets: Sockets, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = sockets()
    connections: list[socket.socket] = []

    def connect(_: int) -> socket.socket:
        if not connections:
            raise FileNotFoundError
        return connections.pop()

    queue, loaded = ShadowQueue(connect), build_shadow()
    put(queue, loaded, b"lost")
    put(queue, loaded, LARGE)
    while read_counts(loaded) != (2, 2):
        await asyncio.sleep(0.001)
    put(queue, loaded, b"dropped at once")
    assert read_counts(loaded) == (2, 3)
    monkeypatch.setattr(queue._links[1], "_refused_until", 0.0)
    connections.append(ours)
    put(queue, loaded, b"new")
    assert await asyncio.to_thread(receive_bodies, theirs, 1) == [b"new"]
    assert read_counts(loaded) == (3, 3)
