"""What MLflow's webhooks and their receiver agree on: headers, signature, age, body.

A delivery is a hint that something changed, never the news itself: all that is taken from it is a model's name.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import re
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass

from onnx_ops.errors import InvalidSignatureError, RefusedError, UserError

ID, TIMESTAMP, SIGNATURE = "x-mlflow-delivery-id", "x-mlflow-timestamp", "x-mlflow-signature"
EVENTS = ("model_version_alias.created", "model_version_alias.deleted")
"""What can change the wish of an endpoint. A decision counts only once an alias asks for its version."""

TOLERANCE = 300.0
"""Seconds that a delivery's clock may be away from ours, either way."""

MAX_BODY = 256 * 1024
"""Bytes of a body that is read. An alias event is far below 1 KiB."""

_MAX_ID = 128
_SECONDS = re.compile(r"[0-9]{1,12}")
_VERSION = "v1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivery:
    """A delivery that is what it claims to be. `model` is the registered model that it is about."""

    id: str
    model: str


def sign(secret: str, delivery: str, timestamp: str, body: bytes) -> str:
    """The signature header: HMAC-SHA256 over `id.timestamp.body`, in base64."""
    mac = hmac.new(secret.encode(), f"{delivery}.{timestamp}.".encode() + body, hashlib.sha256)
    return f"{_VERSION},{base64.b64encode(mac.digest()).decode()}"


def open_delivery(headers: Mapping[str, str], body: bytes, *, secret: str, now: float) -> Delivery:
    """Check a delivery and read it.

    Args:
        headers: by lower-case name.
        body: the bytes as they came.
        secret: shared with MLflow.
        now: seconds since the epoch.

    Raises:
        InvalidSignatureError: it was not signed with the secret.
        RefusedError: it is too old, or from the future.
        UserError: it is signed, but names no model.
    """
    delivery, timestamp = headers.get(ID, ""), headers.get(TIMESTAMP, "")
    given = headers.get(SIGNATURE, "").encode("utf-8", "replace")
    expected = sign(secret, delivery, timestamp, body).encode()
    # Every delivery is compared, so that the time to answer tells nothing about which part was wrong.
    if not hmac.compare_digest(given, expected) or not 0 < len(delivery) <= _MAX_ID:
        raise InvalidSignatureError("the delivery is not signed with this receiver's secret")
    if not _SECONDS.fullmatch(timestamp) or abs(now - int(timestamp)) > TOLERANCE:
        raise RefusedError(
            f"the delivery is more than {TOLERANCE:.0f} s old, or from the future", remedy="Check the clocks."
        )
    return Delivery(id=delivery, model=_model(body))


def _model(body: bytes) -> str:
    try:
        name = json.loads(body)["data"]["name"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise UserError("the delivery names no model") from error
    if not isinstance(name, str) or not name:
        raise UserError("the delivery names no model")
    return name


class Recent:
    """The last ids of deliveries, a bounded number of them."""

    def __init__(self, limit: int = 10_000) -> None:
        self._ids: OrderedDict[str, None] = OrderedDict()
        self._limit = limit

    def add(self, delivery: str) -> bool:
        """Whether the id is new."""
        if delivery in self._ids:
            return False
        self._ids[delivery] = None
        if len(self._ids) > self._limit:
            self._ids.popitem(last=False)
        return True
