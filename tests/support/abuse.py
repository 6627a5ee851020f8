"""Forty kinds of requests that abuse an endpoint server.

`run_abuses` sends them while other clients send good requests.
"""

from __future__ import annotations

import gzip
import json
import random
import socket
import struct
import threading
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import onnx
import onnx.parser

from tests.support.load import LoadPlan, LoadProcess, Payload, Records
from tests.support.processes import memory, until
from tests.support.server import ServerFamily

INFER = "/v2/models/m/infer"
OPTIONS = "--workers=2", "--allowed-hosts=x", "--run-timeout=1 s", "--read-timeout=5 s"
"""Options of a server that is abused.

A run that takes longer than a second is an abuse of this model.
"""
ABUSERS = 3
MEMORY_RATIO = 1.2
SPARE_BYTES = 16 << 20
"""Bytes that a worker's memory may grow beyond `MEMORY_RATIO`.

Python releases an arena only when no object is left in it.
"""
MAX_PAUSE_S = 10.0
_FOREVER = 1 << 40
_READ_S = 30.0
_LARGE = 1 << 20


def build_model() -> onnx.ModelProto:
    """Return a model that adds one to `x`, `n` times.

    It also multiplies `s` by its transpose.
    """
    return onnx.parser.parse_model("""<ir_version: 10, opset_import: ["" : 18]>
    m (int64[1] n, float[b, 2] x, float[r, 1] s) => (float[b, 2] y, float[r, 1] z) {
      zero = Constant<value = int64[1] {0}>()
      trips = Squeeze(n, zero)
      goes = Constant<value = bool {1}>()
      y = Loop(trips, goes, x) <body = b (int64 i, bool c, float[b, 2] v) => (bool d, float[b, 2] w) {
        d = Identity(c)
        one = Constant<value = float {1.0}>()
        w = Add(v, one)
      }>
      turned = Transpose(s)
      square = MatMul(s, turned)
      axes = Constant<value = int64[1] {1}>()
      z = ReduceSum(square, axes)
    }""")  # noqa: E501


def build_tensor(name: str, datatype: str, shape: Sequence[int], data: object) -> dict[str, object]:
    """Return a tensor of a v2 request."""
    return {"name": name, "datatype": datatype, "shape": list(shape), "data": data}


def build_inputs(
    n: object = 1, x: object = (1, 1), s: Sequence[float] = (1,)
) -> list[dict[str, object]]:
    """Return the inputs of a request."""
    return [
        build_tensor("n", "INT64", [1], [n]),
        build_tensor("x", "FP32", [1, 2], x),
        build_tensor("s", "FP32", [len(s), 1], list(s)),
    ]


def encode(**document: object) -> bytes:
    """Return a v2 request as JSON, with good inputs unless others are given."""
    return json.dumps({"inputs": build_inputs(), **document}).encode()


def post(body: bytes, path: str = INFER, length: int | None = None, **headers: object) -> bytes:
    """Return the bytes of the last request of a connection.

    The request announces `length`, if given, instead of the length of the body.
    """
    lines = {
        "host": "x",
        "content-type": "application/json",
        "content-length": len(body) if length is None else length,
        "connection": "close",
    }
    lines |= {name.replace("_", "-"): value for name, value in headers.items()}
    head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
    return f"POST {path} HTTP/1.1\r\n{head}\r\n".encode() + body


def _with_data(data: bytes) -> bytes:
    return encode(inputs=build_inputs(x="?")).replace(b'"?"', data)


def _square(rows: int) -> bytes:
    """Return a binary request whose product has `rows` times `rows` numbers."""
    inputs = [*build_inputs()[:2], build_tensor("s", "FP32", [rows, 1], None)]
    del inputs[2]["data"]
    inputs[2]["parameters"] = {"binary_data_size": 4 * rows}
    header = json.dumps({"inputs": inputs}).encode()
    body = header + struct.pack("<f", 0.5) * rows
    return post(body, inference_header_content_length=len(header))


def _binary(size: object, length: object, tail: bytes = b"") -> bytes:
    tensor = {**build_tensor("s", "FP32", [1, 1], None), "parameters": {"binary_data_size": size}}
    del tensor["data"]
    header = json.dumps({"inputs": [*build_inputs()[:2], tensor]}).encode()
    return post(header + tail, inference_header_content_length=length or len(header))


@cache
def _bomb() -> bytes:
    """Return the compressed start of a request.

    Making it takes a second.
    """
    return gzip.compress(b'{"inputs": [' + b" " * (256 << 20))


def _in_chunks() -> bytes:
    """Return a request whose body is in chunks of one byte."""
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in encode() * 2000) + b"0\r\n\r\n"
    return post(chunks).replace(
        b"content-length: %d" % len(chunks), b"transfer-encoding: chunked", 1
    )


_MANY = range(40_000)
_DIGITS = b"1" * 5_000_000

_CLOSE = b"connection: close\r\n"

REQUESTS: Mapping[str, Callable[[], bytes]] = {
    "keys of parameters": lambda: post(encode(parameters=dict.fromkeys(map(str, _MANY), 1))),
    "two million keys": lambda: post(
        b'{"parameters": {%b}}' % b", ".join(b'"%d": 1' % n for n in range(2_000_000))
    ),
    "keys of a tensor": lambda: post(encode(inputs=[dict.fromkeys(map(str, _MANY), 1)])),
    "keys of the request": lambda: post(json.dumps(dict.fromkeys(map(str, _MANY), 1)).encode()),
    "keys of a record": lambda: post(
        json.dumps({"dataframe_records": [dict.fromkeys(map(str, _MANY), 1)] * 9}).encode(),
        "/invocations",
    ),
    "repeated keys": lambda: post(b'{"parameters": {' + b'"a": 1, ' * 100_000 + b'"b": 1}}'),
    "digits": lambda: post(_with_data(b"[1, %b]" % _DIGITS)),
    "digits below zero": lambda: post(_with_data(b"[1, -%b]" % _DIGITS)),
    "digits of a fraction": lambda: post(_with_data(b"[1, 0.%b]" % _DIGITS)),
    "digits of a shape": lambda: post(encode().replace(b"[1, 2]", b"[%b, 2]" % _DIGITS, 1)),
    "exponent": lambda: post(_with_data(b"[1, 1e%b]" % _DIGITS)),
    "numbers as text": lambda: post(_with_data(b'["1", "%b"]' % _DIGITS)),
    "deep lists": lambda: post(b"[" * 5_000_000),
    "deep lists in data": lambda: post(_with_data(b"[" * 900 + b"1" + b"]" * 900)),
    "deep lists beside null": lambda: post(
        b'{"inputs": {"x": [[1, null], [1, %b]]}}' % (b"[" * 900 + b"]" * 900), "/invocations"
    ),
    "deep objects": lambda: post(b'{"a": ' * 100_000),
    "a million inputs": lambda: post(b'{"inputs": [%b{}]}' % (b"{}, " * 1_000_000)),
    "a million outputs": lambda: post(encode(outputs=[{"name": "y"}] * 500_000)),
    "four million values": lambda: post(_with_data(b"[%b1]" % (b"1," * 4_100_000))),
    "ragged lists": lambda: post(_with_data(b"[%b[1]]" % (b"[1, 2], " * 200_000))),
    "a shape that overflows": lambda: post(
        encode(inputs=[build_tensor("x", "FP32", [1 << 62, 1 << 62], [])])
    ),
    "a shape of a million sizes": lambda: post(
        encode(inputs=[build_tensor("x", "FP32", [1] * 1_000_000, [])])
    ),
    "an empty tensor of any size": lambda: post(
        encode(inputs=[build_tensor("x", "FP32", [0, 1 << 60], [])])
    ),
    "a header beyond the body": lambda: _binary(4, 1 << 30),
    "a header of many digits": lambda: _binary(4, "9" * 5000),
    "a tensor beyond the body": lambda: _binary(1 << 62, 0, bytes(4)),
    "a negative size": lambda: _binary(-4, 0, bytes(4)),
    "gzip that inflates": lambda: post(_bomb(), content_encoding="gzip"),
    "gzip that ends early": lambda: post(_bomb()[:-9], content_encoding="gzip"),
    "gzip of many members": lambda: post(gzip.compress(b"") * 100_000, content_encoding="gzip"),
    "deflate that inflates": lambda: post(
        zlib.compress(bytes(128 << 20)), content_encoding="deflate"
    ),
    "chunks of a byte": _in_chunks,
    "a large head": lambda: b"GET / HTTP/1.1\r\nhost: x\r\nx-long: " + b"y" * (8 * _LARGE),
    "cells of a table": lambda: post(
        b"a,b\n" + b"1,2\n" * 2_200_000, "/invocations", content_type="text/csv"
    ),
    "pins to nothing": lambda: (
        post(encode(), azureml_model_deployment="none").replace(_CLOSE, b"") * 100 + post(encode())
    ),
    "feedback": lambda: post(
        json.dumps([{"key": "u", "success": True}] * 25_000).encode(), "/feedback"
    ),
    "a loop without end": lambda: post(encode(inputs=build_inputs(n=_FOREVER))),
    "a loop past its client": lambda: post(
        encode(inputs=build_inputs(n=_FOREVER)), x_request_timeout_ms=50
    ),
    "a product of a gigabyte": lambda: _square(16_000),
    "a product beyond all memory": lambda: _square(4_000_000),
}
"""Requests of one connection by kind."""


def send(data: bytes, port: int) -> None:
    """Send bytes, and read the response until the connection ends or is silent."""
    with socket.create_connection(("127.0.0.1", port), timeout=_READ_S) as client:
        # The server may answer and close the connection before everything is sent.
        with suppress(OSError):
            # The connection stays open: the server does not run requests of a client that
            # disconnected.
            client.sendall(data)
        with suppress(OSError):
            while client.recv(1 << 16):
                pass


def hold(start: bytes, port: int, connections: int = 50) -> None:
    """Keep connections open for 1 s that have sent only a part of a request."""
    with ExitStack() as stack:
        for _ in range(connections):
            with suppress(OSError):
                client = stack.enter_context(
                    socket.create_connection(("127.0.0.1", port), timeout=_READ_S)
                )
                client.sendall(start)
        time.sleep(1)


def flood(data: bytes, port: int) -> None:
    """Send requests, and read no response."""
    with socket.create_connection(("127.0.0.1", port), timeout=1.0) as client, suppress(OSError):
        for _ in range(100):
            client.sendall(data)


CONNECTIONS: Mapping[str, Callable[[int], None]] = {
    "half a head": lambda port: hold(b"POST /v2/models/m/infer HTTP/1.1\r\nhost:", port),
    "half a body": lambda port: hold(post(b"{", length=1 << 25), port, 20),
    "no reader": lambda port: flood(post(encode()).replace(_CLOSE, b"") * 50, port),
}
"""Abuses that need more than one message, by kind."""
KINDS: Sequence[str] = (*REQUESTS, *CONNECTIONS)


def abuse(kind: str, port: int) -> None:
    """Abuse a server once."""
    if kind in REQUESTS:
        send(REQUESTS[kind](), port)
    else:
        CONNECTIONS[kind](port)


@dataclass(slots=True)
class AbuseResult:
    """Effects of abuse on a server and its other clients.

    `pauses_s` are the times in which a worker was missing. `deaths` counts the workers that were
    replaced. `growth_bytes` is the mean growth of a worker's memory.
    """

    records: Records
    deaths: int
    pauses_s: list[float]
    memory_ratio: float
    growth_bytes: float
    kinds: Counter[str] = field(default_factory=Counter)

    @property
    def other_failures(self) -> int:
        """Return the failures of good requests that no replaced worker explains.

        A replaced worker explains one failure on each connection of these requests.
        """
        return max(0, self.records.failed - self.deaths * _CONNECTIONS)


_CONNECTIONS = 4


def run_abuses(
    server: ServerFamily, kinds: Sequence[str], *, abusers: int = ABUSERS
) -> AbuseResult:
    """Send abusive requests, several at a time, while other clients send good ones."""
    load = LoadPlan(
        url=server.url(INFER),
        payloads=[Payload(body=encode())],
        headers={"host": "x"},
        connections=_CONNECTIONS,
        seconds=3600.0,
        rate=50.0,
        timeout_s=30.0,
    )
    before, first = memory(server.workers()).rss, set(server.workers())
    waiting, sent = list(reversed(kinds)), Counter[str]()
    lock = threading.Lock()

    def work() -> None:
        while True:
            with lock:
                if not waiting:
                    return
                kind = waiting.pop()
                sent[kind] += 1
            with suppress(OSError):
                abuse(kind, server.port)

    with LoadProcess(load) as clients, _watching(server) as watch:
        threads = [threading.Thread(target=work) for _ in range(abusers)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        time.sleep(1)
        records = clients.stop()
    # The memory ratio of the result shows whether memory was released.
    with suppress(AssertionError):
        until(
            lambda: memory(server.workers()).rss <= MEMORY_RATIO * before,
            "memory that is given back",
            seconds=60,
        )
    growth = (memory(server.workers()).rss - before) / len(first)
    deaths = len(watch.seen - first)
    return AbuseResult(
        records=records,
        deaths=deaths,
        pauses_s=watch.pauses_s,
        memory_ratio=memory(server.workers()).rss / before,
        growth_bytes=growth,
        kinds=sent,
    )


@dataclass(slots=True)
class _Watch:
    seen: set[int] = field(default_factory=set)
    pauses_s: list[float] = field(default_factory=list)
    is_over: threading.Event = field(default_factory=threading.Event)

    def follow(self, server: ServerFamily, workers: int) -> None:
        """Record each worker, and how long any worker was missing."""
        missing_since = None
        while not self.is_over.wait(0.05):
            pids = server.workers()
            self.seen.update(pids)
            if len(pids) < workers:
                missing_since = missing_since or time.monotonic()
            elif missing_since is not None:
                self.pauses_s.append(time.monotonic() - missing_since)
                missing_since = None
        if missing_since is not None:
            self.pauses_s.append(time.monotonic() - missing_since)


@contextmanager
def _watching(server: ServerFamily) -> Iterator[_Watch]:
    watch = _Watch()
    thread = threading.Thread(target=watch.follow, args=(server, len(server.workers())))
    thread.start()
    try:
        yield watch
    finally:
        watch.is_over.set()
        thread.join()


def shuffle_kinds(seed: int, rounds: int = 1) -> list[str]:
    """Return the kinds in an order that the seed determines, `rounds` times each."""
    kinds = [*KINDS] * rounds
    random.Random(seed).shuffle(kinds)  # noqa: S311 (to be repeatable)
    return kinds


def write_model(folder: Path) -> Path:
    """Write the model of `build_model` into a folder; return the folder."""
    folder.mkdir()
    onnx.save_model(build_model(), folder / "model.onnx")
    return folder
