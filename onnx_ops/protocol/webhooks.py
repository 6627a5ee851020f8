"""MLflow's webhooks at the receiver: check of headers, signature, age and body.

A delivery is only a hint that an alias has changed. Of its body, only the name of the model is
used.
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

ID_HEADER, TIMESTAMP_HEADER, SIGNATURE_HEADER = (
    "x-mlflow-delivery-id",
    "x-mlflow-timestamp",
    "x-mlflow-signature",
)
ALIAS_EVENTS = ("model_version_alias.created", "model_version_alias.deleted")
"""Events that can change the desired state of an endpoint."""

TOLERANCE_S = 300.0
"""Largest accepted age of a delivery in seconds.

A delivery from more than this time in the future is also refused.
"""

MAX_BODY_BYTES = 256 * 1024
"""Largest body in bytes that is read.

An alias event is far below 1 KiB.
"""

_MAX_ID_CHARS = 128
_SECONDS = re.compile(r"[0-9]{1,12}")
_SIGNATURE_VERSION = "v1"


@dataclass(frozen=True, slots=True, kw_only=True)
class WebhookDelivery:
    """A delivery with a valid signature, about a registered model."""

    id: str
    model: str


def sign_delivery(secret: str, delivery: str, timestamp: str, body: bytes) -> str:
    """Return the signature header: `v1,` and base64 of an HMAC-SHA256.

    The signed text is `id.timestamp.body`.
    """
    mac = hmac.new(secret.encode(), f"{delivery}.{timestamp}.".encode() + body, hashlib.sha256)
    return f"{_SIGNATURE_VERSION},{base64.b64encode(mac.digest()).decode()}"


def verify_delivery(
    headers: Mapping[str, str], body: bytes, *, secret: str, now: float
) -> WebhookDelivery:
    """Verify and parse a delivery.

    Header names are in lower case. `now` is in seconds since the epoch.

    Raises:
        InvalidSignatureError: the delivery was not signed with the secret, or its id is empty or
            too long.
        RefusedError: the timestamp is invalid, or differs from `now` by more than `TOLERANCE_S`.
        UserError: the delivery is signed but names no model.
    """
    delivery, timestamp = headers.get(ID_HEADER, ""), headers.get(TIMESTAMP_HEADER, "")
    signature = headers.get(SIGNATURE_HEADER, "").encode("utf-8", "replace")
    expected = sign_delivery(secret, delivery, timestamp, body).encode()
    # The signature is always compared, so that the response time does not reveal which check
    # failed.
    if not hmac.compare_digest(signature, expected) or not 0 < len(delivery) <= _MAX_ID_CHARS:
        raise InvalidSignatureError(
            "the signature of the delivery is missing or wrong, or its id does not have 1 to "
            f"{_MAX_ID_CHARS} characters"
        )
    if not _SECONDS.fullmatch(timestamp) or abs(now - int(timestamp)) > TOLERANCE_S:
        raise RefusedError(
            "the timestamp of the delivery is not valid, or differs from the time of this machine "
            f"by more than {TOLERANCE_S:.0f} s",
            remedy="Compare the clocks of MLflow's server and of this machine.",
        )
    try:
        name = json.loads(body)["data"]["name"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise UserError("the delivery names no model") from error
    if not isinstance(name, str) or not name:
        raise UserError("the delivery names no model")
    return WebhookDelivery(id=delivery, model=name)


class RecentDeliveryIds:
    """The ids of the last `limit` deliveries."""

    def __init__(self, limit: int = 10_000) -> None:
        self._ids: OrderedDict[str, None] = OrderedDict()
        self._limit = limit

    def add(self, delivery: str) -> bool:
        """Add an id; return whether it is new."""
        if delivery in self._ids:
            return False
        self._ids[delivery] = None
        if len(self._ids) > self._limit:
            self._ids.popitem(last=False)
        return True
