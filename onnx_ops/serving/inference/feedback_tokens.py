"""Tokens of responses, with which feedback identifies the deployment.

Any server of the endpoint can count the feedback.
"""

from __future__ import annotations

import binascii
import os
import struct
import time
from base64 import urlsafe_b64decode, urlsafe_b64encode
from dataclasses import dataclass

from onnx_ops.domain.artifact import digest_bytes, short_digest
from onnx_ops.protocol.messages import FEEDBACK_HEADER
from onnx_ops.protocol.routing_table import RoutingTable

_NONCE = struct.Struct(">4sQ")
_CONTENT = struct.Struct(">6s6sH")
_TAG_BYTES = 16
_TOKEN_CHARACTERS = (_NONCE.size + _CONTENT.size + _TAG_BYTES) * 4 // 3
_LINE = b"%b: %%b\r\n" % FEEDBACK_HEADER.encode()


@dataclass(frozen=True, slots=True)
class FeedbackToken:
    """The content of an authentic token.

    Attributes:
        stamp: nanoseconds since the epoch when the token was sealed; different for each token of a
            worker.
        deployment: name of the deployment that answered.
        cell: the user's cell, or `KEYLESS_CELL`.
        is_current: whether the response was sent under the current split.
    """

    stamp: int
    deployment: str
    cell: int
    is_current: bool


class FeedbackTokens:
    """Cipher of feedback tokens, for a routing table that has a feedback key.

    A token is a nonce and a payload, sealed with AES-GCM (NIST SP 800-38D), in base64url. So
    clients can neither read nor change the payload. The nonce is a random prefix of this object and
    an increasing stamp, so it practically never repeats. The payload consists of a digest of the
    deployment's name and files, a digest of the split, and the user's cell. All servers of an
    endpoint share these values, unlike slots. Sealing takes 1 µs (`benchmarks.count_cost`).
    """

    def __init__(self, table: RoutingTable) -> None:
        from cryptography.exceptions import InvalidTag
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        self._cipher = AESGCM(bytes.fromhex(table.feedback_key))
        self._invalid_tag = InvalidTag
        self._split = bytes.fromhex(table.compute_split_digest())
        self._marks = {
            d.name: bytes.fromhex(short_digest(digest_bytes(f"{d.name}\0{d.manifest}".encode())))
            for d in table.state.deployments
        }
        self._names = {mark: name for name, mark in self._marks.items()}
        self._prefix = os.urandom(_NONCE.size - 8)
        self._last = 0

    def seal(self, deployment: str, cell: int) -> bytes:
        """Return the token of a response of a deployment to a user's cell."""
        self._last = stamp = max(time.time_ns(), self._last + 1)
        nonce = _NONCE.pack(self._prefix, stamp)
        content = _CONTENT.pack(self._marks[deployment], self._split, cell)
        return urlsafe_b64encode(nonce + self._cipher.encrypt(nonce, content, None))

    def seal_line(self, deployment: str, cell: int) -> bytes:
        """Return the header line with the token of a response (see `seal`)."""
        return _LINE % self.seal(deployment, cell)

    def open(self, text: str) -> FeedbackToken | None:
        """Return the parsed payload of a token; None for an invalid token.

        A token is invalid if it belongs to another endpoint or was changed. It is also invalid if
        the table does not contain its deployment with the same files.
        """
        if len(text) != _TOKEN_CHARACTERS or not text.isascii():
            return None
        try:
            token = urlsafe_b64decode(text)
            nonce = token[: _NONCE.size]
            content = self._cipher.decrypt(nonce, token[_NONCE.size :], None)
        except (binascii.Error, ValueError, self._invalid_tag):
            return None
        mark, split, cell = _CONTENT.unpack(content)
        name = self._names.get(mark)
        if name is None:
            return None
        return FeedbackToken(_NONCE.unpack(nonce)[1], name, cell, split == self._split)
