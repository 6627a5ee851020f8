"""A process as the ports see it: its clock, its host, its key."""

from __future__ import annotations

import base64

from onnx_ops.domain.artifact import Digest, digest_bytes
from onnx_ops.errors import SignatureInvalid


class FakeClock:
    """Time that moves only when it is told to; starts at `now` seconds since the epoch."""

    def __init__(self, now: float = 1_700_000_000.0) -> None:
        self._now = now

    def now(self) -> float:
        return self._now

    def monotonic(self) -> float:
        return self._now

    def advance(self, seconds: float) -> None:
        self._now += seconds


class FakeHost:
    """One process of a machine. `dead` is shared by the machine's processes: who is in it no longer runs."""

    def __init__(self, name: str = "process-1", dead: set[str] | None = None) -> None:
        self._name = name
        self.dead: set[str] = set() if dead is None else dead

    def holder(self) -> str:
        return self._name

    def alive(self, holder: str) -> bool:
        return holder not in self.dead

    def actor(self) -> str:
        return f"tester@{self._name}"


class FakeSigner:
    """A real Ed25519 key that is derived from a seed. It verifies what it signed itself and trusts nobody else."""

    def __init__(self, seed: bytes = b"trusted") -> None:
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

        self._private = Ed25519PrivateKey.from_private_bytes(seed.ljust(32, b"\0")[:32])
        self._public = self._private.public_key()

    @property
    def key(self) -> Digest:
        return digest_bytes(self._public.public_bytes_raw())

    def sign(self, data: bytes) -> str:
        return base64.b64encode(self._private.sign(data)).decode()

    def verify(self, data: bytes, signature: str, key: Digest) -> None:
        from cryptography.exceptions import InvalidSignature

        if key != self.key:
            raise SignatureInvalid("signed by a key that nobody trusts")
        try:
            self._public.verify(base64.b64decode(signature), data)
        except (InvalidSignature, ValueError) as error:
            raise SignatureInvalid("the signature does not fit") from error
