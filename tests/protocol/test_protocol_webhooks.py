"""Deliveries of webhooks: those that are accepted and those that are refused."""

from __future__ import annotations

import json
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onnx_ops.errors import InvalidSignatureError, OnnxOpsError, RefusedError, UserError
from onnx_ops.protocol.webhooks import (
    ID_HEADER,
    SIGNATURE_HEADER,
    TIMESTAMP_HEADER,
    TOLERANCE_S,
    RecentDeliveryIds,
    sign_delivery,
    verify_delivery,
)

SECRET, NOW = "a secret of some length", 1_700_000_000.0
BODY = json.dumps(
    {"entity": "model_version_alias", "action": "created", "data": {"name": "digits"}}
).encode()


def headers(
    body: bytes = BODY, *, delivery: str = "d-1", at: float = NOW, secret: str = SECRET
) -> Mapping[str, str]:
    timestamp = str(int(at))
    return {
        ID_HEADER: delivery,
        TIMESTAMP_HEADER: timestamp,
        SIGNATURE_HEADER: sign_delivery(secret, delivery, timestamp, body),
    }


def test_verify_delivery_with_valid_signature_returns_id_and_model() -> None:
    delivery = verify_delivery(headers(), BODY, secret=SECRET, now=NOW)
    assert (delivery.id, delivery.model) == ("d-1", "digits")


def test_sign_delivery_equals_mlflow_signature() -> None:
    from mlflow.webhooks.delivery import _generate_hmac_signature

    theirs = _generate_hmac_signature(SECRET, "d-1", "1700000000", BODY.decode())
    assert sign_delivery(SECRET, "d-1", "1700000000", BODY) == theirs


@pytest.mark.parametrize("age", [-TOLERANCE_S, 0.0, TOLERANCE_S])
def test_verify_delivery_within_tolerance_passes(age: float) -> None:
    assert verify_delivery(headers(at=NOW - age), BODY, secret=SECRET, now=NOW).model == "digits"


@pytest.mark.parametrize("age", [-TOLERANCE_S - 1, TOLERANCE_S + 1, 1e9])
def test_verify_delivery_outside_tolerance_raises_refused_error(age: float) -> None:
    with pytest.raises(RefusedError, match="timestamp of the delivery is not valid, or differs"):
        verify_delivery(headers(at=NOW - age), BODY, secret=SECRET, now=NOW)


@pytest.mark.parametrize("name", [ID_HEADER, TIMESTAMP_HEADER, SIGNATURE_HEADER])
@pytest.mark.parametrize("value", [None, "", "x", "v1,", "v1,AAAA", "ÿ", "9" * 5000])
def test_verify_delivery_with_changed_or_missing_header_raises_invalid_signature_error(
    name: str, value: str | None
) -> None:
    given_headers = {
        key: text for key, text in headers().items() if key != name or value is not None
    }
    if value is not None:
        given_headers[name] = value
    with pytest.raises(InvalidSignatureError):
        verify_delivery(given_headers, BODY, secret=SECRET, now=NOW)


@pytest.mark.parametrize("timestamp", ["", "soon", "-1", "1e9", "9" * 5000, "١٢٣"])
def test_verify_delivery_with_invalid_timestamp_raises_refused_error(timestamp: str) -> None:
    signed = {
        ID_HEADER: "d-1",
        TIMESTAMP_HEADER: timestamp,
        SIGNATURE_HEADER: sign_delivery(SECRET, "d-1", timestamp, BODY),
    }
    with pytest.raises(RefusedError):
        verify_delivery(signed, BODY, secret=SECRET, now=NOW)


def test_verify_delivery_with_other_secret_raises_invalid_signature_error() -> None:
    with pytest.raises(InvalidSignatureError):
        verify_delivery(headers(secret=SECRET.upper()), BODY, secret=SECRET, now=NOW)


@given(st.binary(max_size=200), st.integers(0, 199), st.integers(1, 255))
def test_verify_delivery_with_changed_body_raises_invalid_signature_error(
    body: bytes, place: int, change: int
) -> None:
    if place >= len(body):
        return
    changed = body[:place] + bytes([body[place] ^ change]) + body[place + 1 :]
    with pytest.raises(InvalidSignatureError):
        verify_delivery(headers(body), changed, secret=SECRET, now=NOW)


@given(
    st.dictionaries(
        st.sampled_from([ID_HEADER, TIMESTAMP_HEADER, SIGNATURE_HEADER]), st.text(max_size=40)
    ),
    st.binary(max_size=80),
)
def test_verify_delivery_without_valid_signature_raises_onnx_ops_error(
    given_headers: dict[str, str], body: bytes
) -> None:
    with pytest.raises(OnnxOpsError):
        verify_delivery(given_headers, body, secret=SECRET, now=NOW)


NAMELESS = [
    b"",
    b"[]",
    b"{}",
    b"null",
    b'{"data":{}}',
    b'{"data":{"name":3}}',
    b'{"data":{"name":""}}',
    b"\xff",
]


@pytest.mark.parametrize("body", [*NAMELESS, b"[" * 100_000], ids=[*map(repr, NAMELESS), "deep"])
def test_verify_delivery_without_model_raises_user_error(body: bytes) -> None:
    with pytest.raises(UserError, match="names no model"):
        verify_delivery(headers(body), body, secret=SECRET, now=NOW)


@given(st.lists(st.text(max_size=3), max_size=60), st.integers(1, 8))
def test_recent_delivery_ids_remember_last_ids_up_to_limit(ids: list[str], limit: int) -> None:
    recent, kept = RecentDeliveryIds(limit), list[str]()
    for delivery in ids:
        assert recent.add(delivery) == (delivery not in kept)
        if delivery not in kept:
            kept = [*kept, delivery][-limit:]
