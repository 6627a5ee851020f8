"""Streams of requests with deliberately damaged bytes.

They serve the short test and `benchmarks/fuzz_http.py`.
"""

from __future__ import annotations

import gzip
import itertools
import json
import random
import re
import socket
import zlib
from contextlib import suppress
from dataclasses import dataclass

from tests.support.server import parse_answers

INFER = b"/v2/models/m/infer"
BODY = json.dumps(
    {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 2], "data": [1, 2]}]}
).encode()
_ROWS = 20_000
_LARGE = {
    "name": "x",
    "datatype": "FP32",
    "shape": [_ROWS, 2],
    "parameters": {"binary_data_size": 8 * _ROWS},
}
_LARGE_HEADER = json.dumps(
    {"inputs": [_LARGE], "parameters": {"binary_data_output": True}}
).encode()
_KEYS = json.dumps(dict.fromkeys(map(str, range(5000)), 1)).encode()
_GZIP = b"content-encoding: gzip"
_ABUSES: tuple[tuple[bytes, tuple[bytes, ...]], ...] = (
    (_KEYS, ()),
    (BODY[:-1] + b', "parameters": ' + _KEYS + b"}", ()),
    (BODY.replace(b"[1, 2]}", b"[1, %b]}" % (b"1" * 200_000)), ()),
    (BODY.replace(b"[1, 2]}", b"[1, 1e%b]}" % (b"9" * 20_000)), ()),
    (BODY.replace(b"[1, 2]}", b"[1, 0.%b]}" % (b"1" * 20_000)), ()),
    (BODY.replace(b"[1, 2]", b"[%b, 2]" % (b"1" * 5000), 1), ()),
    (b'{"inputs": {"x": [[1, null], [1, %b]]}}' % (b"[" * 900 + b"]" * 900), ()),
    (b"[" * 100_000, ()),
    (b'{"a":' * 2000, ()),
    (b'{"inputs": [%b{}]}' % (b"{}, " * 50_000), ()),
    (BODY[:-1] + b', "outputs": [%b{}]}' % (b'{"name": "y"}, ' * 5000), ()),
    (_LARGE_HEADER + bytes(8), (b"inference-header-content-length: %d" % (1 << 40),)),
    (_LARGE_HEADER + bytes(8), (b"inference-header-content-length: " + b"9" * 5000,)),
    (gzip.compress(BODY), (_GZIP,)),
    (gzip.compress(BODY)[:-9], (_GZIP,)),
    (gzip.compress(b" " * (8 << 20)), (_GZIP,)),
    (gzip.compress(b"") * 1000, (_GZIP,)),
    (zlib.compress(BODY), (b"content-encoding: deflate",)),
    (BODY, (b"x-request-timeout-ms: " + b"9" * 5000,)),
)
"""Bodies that expand or take long, with their headers.

`tests/support/abuse.py` has larger ones.
"""
STATUSES = frozenset(
    {200, 400, 403, 404, 405, 408, 411, 413, 414, 415, 417, 422, 429, 431, 501, 503, 505}
)
"""Statuses that are allowed; a 500 is a defect."""

_REQUEST_LINE = re.compile(rb"[A-Z-]{3,} +[^ \r\n]+ +HTTP/1")
"""Pattern of a request line; the parser ignores further spaces."""
_ID = b"x-request-id: "
_HEADS = (
    *(
        b"content-length: 5",
        b"content-length: +5",
        b"content-length: 5, 5",
        b"content-length : 5",
        b"content-length:",
    ),
    *(
        b"transfer-encoding: chunked",
        b"transfer-encoding: chunked, identity",
        b"transfer-encoding: \x0bchunked",
    ),
    *(
        b"transfer-encoding: xchunked",
        b"connection: close",
        b"connection: keep-alive, upgrade",
        b"upgrade: h2c",
    ),
    *(
        b"expect: 100-continue",
        b"expect: x",
        b"host: a\r\nhost: b",
        b"content-encoding: gzip",
        b"accept-encoding: gzip",
    ),
    *(
        b"traceparent: 00-1",
        b" folded",
        b"a\0b: c",
        b"\xff: \xff",
        b"x: " + b"y" * 70_000,
        b": x",
        b"accept-encoding: gzip",
    ),
    *(
        b"inference-header-content-length: 9",
        b"x-user-key: \xe9",
        b"x-request-timeout-ms: -1",
        b"origin: http://e",
    ),
)
_BYTES = (
    b"\r",
    b"\n",
    b"\r\n",
    b"\r\n\r\n",
    b"0\r\n\r\n",
    b" ",
    b"\t",
    b"\0",
    b":",
    b"HTTP/1.1",
    b"HTTP/9.9",
    b"\x80",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Attack:
    """Bytes for one connection, in packets, and the ids of requests inside of bodies."""

    packets: tuple[bytes, ...]
    inner: frozenset[str] = frozenset()


def build_attack(draw: random.Random) -> Attack:
    """Build some requests, in many cases with damaged bytes.

    If a request contains another one in its body, its framing is left intact.
    """
    is_nested = draw.random() < 0.3
    requests = [
        _build_request(draw, number, is_nested=is_nested)
        for number in range(draw.choice([1, 1, 2, 3, 8]))
    ]
    data = bytearray(b"".join(requests))
    if not is_nested:
        _damage(draw, data)
    cuts = sorted(draw.randrange(len(data) + 1) for _ in range(draw.choice([0, 0, 1, 3, 40])))
    ends = [0, *cuts, len(data)]
    packets = tuple(bytes(data[a:b]) for a, b in itertools.pairwise(ends) if a < b)
    inner = re.findall(r"inner-\d+", data.decode("latin-1")) if is_nested else ()
    return Attack(packets=packets, inner=frozenset(inner))


def _build_request(draw: random.Random, number: int, *, is_nested: bool) -> bytes:
    body = BODY
    if is_nested:
        # A request inside a body must not be answered.
        hidden = b"GET /v2 HTTP/1.1\r\nhost: x\r\n%binner-%d\r\n\r\n" % (_ID, number)
        body = draw.choice([hidden, BODY + b"\r\n\r\n" + hidden, hidden * 2])
    header: list[bytes] = []
    if (size := draw.random()) < 0.05:
        # A large body is read without the parser.
        body += b" " * draw.choice([1 << 16, 70_000, 200_000])
    elif size < 0.1 and not is_nested:
        body = _LARGE_HEADER + bytes(8 * _ROWS)
        header = [b"inference-header-content-length: %d" % len(_LARGE_HEADER)]
    elif size < 0.2 and not is_nested:
        body, (*header,) = draw.choice(_ABUSES)
    method = (
        b"POST"
        if is_nested
        else draw.choice([b"POST"] * 6 + [b"GET", b"PUT", b"OPTIONS", b"CONNECT", b"PRI"])
    )
    path = draw.choice(
        [
            INFER,
            INFER,
            b"/invocations",
            b"/v2/health/live",
            b"/docs",
            b"/v2/models/%6d/infer",
            b"*",
            b"//",
        ]
    )
    lines = [
        b"%b %b HTTP/1.%d" % (method, path, draw.random() < 0.95),
        b"host: x",
        b"%bouter-%d" % (_ID, number),
        *header,
    ]
    if draw.random() < 0.3:
        piece_size = draw.randrange(1 + len(body) // 1000, len(body) + 1)
        pieces = [body[start : start + piece_size] for start in range(0, len(body), piece_size)]
        body = b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"
        lines.append(b"transfer-encoding: chunked")
    else:
        lines.append(b"content-length: %d" % len(body))
    for _ in range(0 if is_nested else draw.choice([0, 0, 0, 1, 2])):
        lines.insert(draw.randrange(1, len(lines) + 1), draw.choice(_HEADS))
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


def _damage(draw: random.Random, data: bytearray) -> None:
    for _ in range(draw.choice([0, 0, 1, 1, 2, 5])):
        at, change = draw.randrange(len(data) + 1), draw.random()
        if change < 0.3 and at < len(data):
            data[at] = draw.randrange(256)
        elif change < 0.5:
            del data[at : at + draw.randrange(1, 30)]
        elif change < 0.8:
            data[at:at] = draw.choice(_BYTES)
        else:
            start = draw.randrange(len(data) + 1)
            data[at:at] = data[start : start + draw.randrange(1, 60)]
        if not data:
            data += b"\r\n"


def send_attack(attack: Attack, port: int) -> list[int]:
    """Send an attack and check all that is answered; return the statuses.

    There is at most one answer for each request line, and one more for bytes that are no request.
    No answer has the id of a request inside a body.
    """
    data = b""
    with socket.create_connection(("127.0.0.1", port), timeout=30) as client:
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # The attack can be refused, and the connection closed.
        with suppress(OSError):
            for packet in attack.packets:
                client.sendall(packet)
            client.shutdown(socket.SHUT_WR)
        with suppress(ConnectionResetError):
            while piece := client.recv(1 << 16):
                data += piece
    # A reset can cut off an answer.
    answers = [answer for answer in parse_answers(data)[0] if answer.status != 100]
    statuses, ids = (
        [answer.status for answer in answers],
        {answer.headers.get("x-request-id") for answer in answers},
    )
    lines = len(_REQUEST_LINE.findall(b"".join(attack.packets)))
    assert len(statuses) <= lines + 1, f"{len(statuses)} answers to {lines} requests"
    assert STATUSES.issuperset(statuses), statuses
    assert not attack.inner & ids, "a request inside of a body was answered"
    return statuses
