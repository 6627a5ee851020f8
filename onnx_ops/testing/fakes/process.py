"""A process as the ports see it: its clock, its host, its key."""

from __future__ import annotations

import base64

from onnx_ops.attestation import TrustedKeys, compute_key_digest
from onnx_ops.domain.artifact import Digest


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
    """A real key of ECDSA P-256, derived from a seed. It verifies what it signed itself and trusts nobody else."""

    def __init__(self, seed: bytes = b"trusted") -> None:
        from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, derive_private_key
        from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

        self._private = derive_private_key(int.from_bytes(seed[:31], "big"), SECP256R1())
        public = self._private.public_key()
        self.key = compute_key_digest(public)
        self.trusted_keys = base64.b64encode(
            public.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
        ).decode()
        """As the option of a server."""
        self._trusted = TrustedKeys((), encoded=self.trusted_keys)

    def sign(self, data: bytes) -> str:
        from cryptography.hazmat.primitives.asymmetric.ec import ECDSA
        from cryptography.hazmat.primitives.hashes import SHA256

        return base64.b64encode(self._private.sign(data, ECDSA(SHA256(), deterministic_signing=True))).decode()

    def verify(self, data: bytes, signature: str, key: Digest) -> None:
        self._trusted.verify(data, signature, key)
