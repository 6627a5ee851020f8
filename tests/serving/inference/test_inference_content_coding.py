"""Content codings: decompression, refusals, and the coding that a client prefers."""

from __future__ import annotations

import contextlib
import gzip
import traceback
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onnx_ops.errors import OnnxOpsError, ServiceUnavailableError, TooLargeError, UserError
from onnx_ops.serving.inference.content_coding import (
    CODINGS,
    InflateBudget,
    choose_coding,
    compress,
    inflate,
)

BODY = b'{"inputs": []}' * 40
BARE = zlib.compressobj(wbits=-zlib.MAX_WBITS)
DICTIONARY = zlib.compressobj(zdict=b"inputs")


@given(st.binary(max_size=4000), st.sampled_from(sorted(CODINGS)))
def test_inflate_of_compressed_body_returns_body(body: bytes, coding: bytes) -> None:
    assert inflate(compress(body, coding), coding, len(body)) == body


def test_inflate_of_standard_library_stream_returns_body() -> None:
    assert inflate(gzip.compress(BODY), b"gzip", 1000) == BODY
    assert inflate(zlib.compress(BODY, 9), b"deflate", 1000) == BODY


@pytest.mark.parametrize(
    ("body", "coding"),
    # The cases are named because gzip writes the time into its header, and all workers of
    # pytest-xdist must collect the same ids.
    [
        pytest.param(b"", b"gzip", id="empty"),
        pytest.param(BODY, b"gzip", id="plain as gzip"),
        pytest.param(BODY, b"deflate", id="plain as deflate"),
        pytest.param(gzip.compress(BODY), b"deflate", id="gzip as deflate"),
        pytest.param(zlib.compress(BODY), b"gzip", id="deflate as gzip"),
        pytest.param(gzip.compress(BODY)[:-1], b"gzip", id="gzip without its last byte"),
        pytest.param(gzip.compress(BODY)[:-9], b"gzip", id="gzip without checksum"),
        pytest.param(gzip.compress(BODY)[:20], b"gzip", id="first twenty bytes"),
        pytest.param(gzip.compress(BODY)[:-8] + bytes(8), b"gzip", id="wrong checksum"),
        pytest.param(gzip.compress(BODY) + b"x", b"gzip", id="rest after the stream"),
        pytest.param(gzip.compress(BODY) + gzip.compress(BODY), b"gzip", id="two streams"),
        pytest.param(gzip.compress(b"") * 1000, b"gzip", id="a thousand empty streams"),
        pytest.param(zlib.compress(BODY)[:-1], b"deflate", id="deflate without its last byte"),
        pytest.param(
            BARE.compress(BODY) + BARE.flush(), b"deflate", id="deflate without zlib header"
        ),
        pytest.param(
            DICTIONARY.compress(BODY) + DICTIONARY.flush(), b"deflate", id="preset dictionary"
        ),
    ],
)
def test_inflate_of_broken_body_raises_user_error(body: bytes, coding: bytes) -> None:
    with pytest.raises(UserError) as caught:
        inflate(body, coding, 1000)
    assert not isinstance(caught.value, TooLargeError)


def test_inflate_beyond_budget_raises_service_unavailable_error() -> None:
    budget = InflateBudget(3 << 20)
    large = compress(bytes(2 << 20), b"gzip")
    with budget.reserve() as charge:
        assert len(inflate(large, b"gzip", 1 << 30, charge)) == budget.bytes == 2 << 20
        with pytest.raises(ServiceUnavailableError), budget.reserve() as other:
            inflate(large, b"gzip", 1 << 30, other)
        assert budget.bytes == 2 << 20
    assert budget.bytes == 0


def test_inflate_after_error_keeps_no_inflated_bytes() -> None:
    bomb = compress(bytes(1 << 24), b"gzip")
    for max_bytes, budget_bytes in ((1 << 22, 1 << 30), (1 << 30, 1 << 22)):
        with pytest.raises(OnnxOpsError) as caught, InflateBudget(budget_bytes).reserve() as charge:
            inflate(bomb, b"gzip", max_bytes, charge)
        frames = [frame.f_locals for frame, _ in traceback.walk_tb(caught.tb)]
        assert [frame["pieces"] for frame in frames if "pieces" in frame] == [[]]


@pytest.mark.parametrize("coding", sorted(CODINGS))
def test_inflate_of_bomb_above_limit_raises_too_large_error(coding: bytes) -> None:
    bomb = compress(bytes(1 << 24), coding)
    assert len(bomb) < 1 << 17
    for body in (bomb, bomb[: len(bomb) // 2], bomb + bomb):
        with pytest.raises(TooLargeError):
            inflate(body, coding, 1 << 20)
    assert len(inflate(bomb, coding, 1 << 24)) == 1 << 24


@given(
    st.binary(max_size=300),
    st.sampled_from(sorted(CODINGS)),
    st.integers(0, 400),
    st.binary(max_size=3),
)
def test_inflate_of_damaged_body_raises_only_user_error(
    body: bytes, coding: bytes, place: int, piece: bytes
) -> None:
    compressed = compress(body, coding)
    with contextlib.suppress(UserError):
        assert len(inflate(compressed[:place] + piece + compressed[place:], coding, 100)) <= 100


@pytest.mark.parametrize(
    ("accept_encoding", "coding"),
    [
        (b"", b""),
        (b"gzip", b"gzip"),
        (b"GZIP", b"gzip"),
        (b"x-gzip", b"gzip"),
        (b"deflate", b"deflate"),
        (b"br, zstd", b""),
        (b"gzip, deflate, br", b"gzip"),
        (b"deflate, gzip", b"gzip"),
        (b"gzip;q=0.5, deflate", b"deflate"),
        (b"gzip ; q=0.5 ,deflate;q=0.4", b"gzip"),
        (b"gzip;q=0", b""),
        (b"gzip;q=0.000, deflate;q=0.0", b""),
        (b"gzip;q=0, *", b"deflate"),
        (b"*", b"gzip"),
        (b"*;q=0", b""),
        (b"identity, gzip;q=0.5", b""),
        (b"identity;q=0.5, gzip;q=0.5", b"gzip"),
        (b"identity;q=0, gzip;q=0", b""),
        (b"gzip;q=nan", b""),
        (b"gzip;q=-1", b""),
        (b"gzip;q=", b""),
        (b"gzip;level=9", b""),
        (b";;,,gzip", b"gzip"),
        (b"gzip" + b"," * 300, b""),
    ],
)
def test_choose_coding_of_accept_encoding_returns_preferred_coding(
    accept_encoding: bytes, coding: bytes
) -> None:
    assert choose_coding(accept_encoding) == coding


@given(st.binary(max_size=300))
def test_choose_coding_of_any_bytes_returns_known_coding_or_empty(accept_encoding: bytes) -> None:
    assert choose_coding(accept_encoding) in (b"", b"gzip", b"deflate")
