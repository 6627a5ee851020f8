"""Heads that come again: whatever is read off one without a parser is what a parser reads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httptools
import pytest
from hypothesis import given
from hypothesis import strategies as st

from onnx_ops.serving.http.protocol import CachedRequestHead
from onnx_ops.serving.inference.deployments import InferenceRoute

ROUTE = InferenceRoute(model="m")
HEADERS = (
    (b"Host", b"127.0.0.1:8080"),
    (b"content-type", b"application/json"),
    (b"X-User-Key", b"anna"),
    (b"x-request-id", b"r 1"),
    (b"connection", b"keep-alive"),
    (b"Content-Length", b"12"),
)
MOST = 1000


def request_of(headers: tuple[tuple[bytes, bytes], ...], body: bytes) -> bytes:
    lines = b"".join(b"%s: %s\r\n" % pair for pair in headers)
    return b"POST /v2/models/m/infer HTTP/1.1\r\n" + lines + b"\r\n" + body


FIRST = request_of(HEADERS, b'{"inputs":[]')


class Parsed:
    """What the parser makes of bytes. `complete` is 1 if they are one message and nothing else."""

    def __init__(self, data: bytes) -> None:
        self.url, self.headers, self.body, self.complete = b"", list[tuple[bytes, bytes]](), b"", 0
        self.parser = httptools.HttpRequestParser(self)
        self.parser.feed_data(data)

    def on_url(self, url: bytes) -> None:
        self.url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name.lower(), value))

    def on_body(self, body: bytes) -> None:
        self.body += body

    def on_message_complete(self) -> None:
        self.complete += 1


def seen(data: bytes = FIRST) -> CachedRequestHead:
    parsed = Parsed(data)
    start = data[: len(data) - len(parsed.body)]
    return CachedRequestHead(start, len(data), ROUTE, dict(parsed.headers))


def primed() -> CachedRequestHead:
    """One that has met a request in which the user was another one, and nothing else."""
    found = seen()
    assert found.match(changed(b"X-User-Key", b"bert"), MOST) is not None
    return found


BOTH = pytest.mark.parametrize("known", [seen, primed])


def agree(found: tuple[Any, bytes] | None, data: bytes) -> None:
    if found is not None:
        parsed = Parsed(data)
        assert (parsed.complete, parsed.url, parsed.parser.get_method()) == (1, b"/v2/models/m/infer", b"POST")
        assert (parsed.headers, parsed.body) == (list(found[0].items()), found[1])
        assert parsed.parser.should_keep_alive()


def changed(name: bytes, value: bytes, body: bytes = b'{"inputs":[]') -> bytes:
    return request_of(tuple((n, value if n == name else v) for n, v in HEADERS), body)


@pytest.mark.parametrize(
    "data",
    [
        FIRST,
        changed(b"X-User-Key", b"bert and ernie"),
        changed(b"x-request-id", b"~!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}"),
        changed(b"content-type", b"text/csv"),
        changed(b"Content-Length", b"3", b"a,b"),
        changed(b"Content-Length", b"0", b""),
        changed(b"Content-Length", b"0003", b"a,b"),
        changed(b"Content-Length", b"1000", b" " * 1000),
    ],
)
@BOTH
def test_other_values_are_read(data: bytes, known: Callable[[], CachedRequestHead]) -> None:
    found = known().match(data, MOST)
    assert found is not None
    agree(found, data)


@pytest.mark.parametrize(
    "data",
    [
        changed(b"X-User-Key", b""),
        changed(b"X-User-Key", b" anna"),
        changed(b"X-User-Key", b"anna "),
        changed(b"X-User-Key", b"an\tna"),
        changed(b"X-User-Key", b"an\nx: y"),
        changed(b"X-User-Key", b"an\rx: y"),
        changed(b"X-User-Key", b"an\0na"),
        changed(b"X-User-Key", b"\xe4nna"),
        changed(b"X-User-Key", b"a\r\nx: y"),
        changed(b"X-User-Key", b"a" * 3000),
        changed(b"connection", b"close"),
        changed(b"Content-Length", b"+3", b"a,b"),
        changed(b"Content-Length", b"3 ", b"a,b"),
        changed(b"Content-Length", b"3, 3", b"a,b"),
        changed(b"Content-Length", b"0x3", b"a,b"),
        changed(b"Content-Length", b"4", b"a,b"),
        changed(b"Content-Length", b"2", b"a,b"),
        changed(b"Content-Length", b"1001", b" " * 1001),
        FIRST.replace(b"POST", b"GET "),
        FIRST.replace(b"/infer", b"/infex"),
        FIRST.replace(b"1.1", b"1.0"),
        FIRST.replace(b"X-User-Key", b"X-User-Kez"),
        FIRST.replace(b"X-User-Key: ", b"X-User-Key:"),
        FIRST.replace(b"X-User-Key", b" X-User-Key"),
        FIRST.replace(b"X-User-Key: anna\r\n", b""),
        FIRST.replace(b"X-User-Key: anna\r\n", b"X-User-Key: anna\r\n" * 2),
        FIRST.replace(b"X-User-Key", b"Transfer-Encoding"),
        FIRST[:-1],
        FIRST + FIRST,
        b"\r\n" + FIRST,
        b"",
        b"\r\n\r\n",
    ],
)
@BOTH
def test_all_else_is_left_to_the_parser(data: bytes, known: Callable[[], CachedRequestHead]) -> None:
    assert known().match(data, MOST) is None


def test_what_is_odd_stays_as_it_is() -> None:
    """Such a head is never kept; were it, its odd header could not change."""
    data = FIRST.replace(b"X-User-Key: anna", b"Expect: 100-continue")
    assert seen(data).match(data.replace(b"100-continue", b"something"), MOST) is None


edits = st.lists(
    st.tuples(
        st.integers(0, len(FIRST) + 20),
        st.sampled_from(["insert", "delete", "replace"]),
        st.sampled_from([*(bytes([n]) for n in range(256)), b"\r\n", b"\r\n\r\n", b": ", b"0", b"12", b"chunked"]),
    ),
    max_size=4,
)


@given(st.sampled_from([seen, primed]), edits)
def test_any_change_is_read_as_the_parser_reads_it_or_not_at_all(
    known: Callable[[], CachedRequestHead], changes: list[tuple[int, str, bytes]]
) -> None:
    data = FIRST
    for place, how, piece in changes:
        rest = data[place + (0 if how == "insert" else len(piece)) :]
        data = data[:place] + (b"" if how == "delete" else piece) + rest
    agree(known().match(data, MOST), data)


VALUES = st.lists(st.tuples(st.sampled_from([n for n, _ in HEADERS]), st.binary(max_size=20)), max_size=4)


@given(VALUES, st.binary(max_size=30))
def test_any_values_are_read_as_the_parser_reads_them_or_not_at_all(
    values: list[tuple[bytes, bytes]], body: bytes
) -> None:
    known = seen()  # one for all: what it has met must not lead it astray
    for name, value in values:
        read_any(known, name, value, body)


def read_any(known: CachedRequestHead, name: bytes, value: bytes, body: bytes) -> None:
    headers = tuple((n, value if n == name else v) for n, v in HEADERS)
    for data in (
        request_of(headers, b'{"inputs":[]'),
        request_of((*headers[:-1], (b"Content-Length", b"%d" % len(body))), body),
    ):
        agree(known.match(data, MOST), data)
