"""Signers whose key is not in a file.

The key is in a variable, in AWS KMS (moto), or in Azure Key Vault, the last two over a socket.
"""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest
from cryptography.hazmat.primitives.asymmetric.ec import (
    ECDSA,
    SECP256R1,
    SECP384R1,
    generate_private_key,
)
from cryptography.hazmat.primitives.asymmetric.utils import Prehashed, decode_dss_signature
from cryptography.hazmat.primitives.hashes import SHA256

from onnx_ops.adapters.signers.ecdsa import create_key
from onnx_ops.adapters.signers.remote import KeyVaultSigner, KmsSigner, open_signer
from onnx_ops.attestation import TrustedKeys
from onnx_ops.errors import InvalidSignatureError, NotFoundError, RefusedError, UserError
from onnx_ops.ports import Signer

RECORD = b"entry 1"


def require_verifiable(signer: Signer, folder: Path) -> None:
    """Assert that the public key verifies the signature for its record only."""
    folder.mkdir(exist_ok=True)
    (folder / "remote.pub.pem").write_bytes(signer.public_pem())
    trusted = TrustedKeys(folder)
    trusted.verify(RECORD, signer.sign(RECORD), signer.key)
    with pytest.raises(InvalidSignatureError, match="is not valid"):
        trusted.verify(RECORD + b"0", signer.sign(RECORD), signer.key)


class TestEnvironment:
    def test_open_signer_with_environment_variable_reads_key(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        made = create_key(tmp_path / "signing.pem")
        monkeypatch.setenv("SECRET_PEM", (tmp_path / "signing.pem").read_text())
        signer = open_signer("env:SECRET_PEM")
        assert signer.key == made.key
        require_verifiable(signer, tmp_path / "trusted")

    def test_open_signer_with_missing_or_wrong_variable_raises_user_error_without_secret(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for _ in range(2):
            with pytest.raises(NotFoundError, match="SECRET_PEM is not set, or is empty"):
                open_signer("env:SECRET_PEM")
            monkeypatch.setenv("SECRET_PEM", "")
        monkeypatch.setenv("SECRET_PEM", "a secret that is no key")
        with pytest.raises(UserError, match="not an ECDSA P-256 private key") as caught:
            open_signer("env:SECRET_PEM")
        assert "a secret" not in str(caught.value)

    @pytest.mark.parametrize("text", ["kms:alias/x", "env:", "signing.pem"])
    def test_open_signer_with_unknown_form_raises_user_error_with_known_forms(
        self, text: str
    ) -> None:
        with pytest.raises(UserError, match="names no signer") as caught:
            open_signer(text)
        assert "awskms:KEY" in caught.value.remedy


def sign_digest(key: Any, message: bytes, algorithm: str) -> bytes:
    """Sign a digest as KMS does for the MessageType DIGEST.

    Moto would hash the digest again.
    """
    assert (len(message), algorithm) == (32, "ECDSA_SHA_256")
    return bytes(key.private_key.sign(message, ECDSA(Prehashed(SHA256()))))


@pytest.fixture(scope="module")
def kms() -> Iterator[Any]:
    from moto.kms.utils import ECDSAPrivateKey

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(ECDSAPrivateKey, "sign", sign_digest)
        yield from serve_kms()


def serve_kms() -> Iterator[Any]:
    import boto3
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    secrets = {
        "aws_access_key_id": "a",
        "aws_secret_access_key": "b",
        "region_name": "eu-central-1",
    }
    yield boto3.client("kms", endpoint_url=f"http://{host}:{port}", **secrets)
    server.stop()


class TestKms:
    def make(self, kms: Any, spec: str = "ECC_NIST_P256") -> KmsSigner:
        answer = kms.create_key(KeySpec=spec, KeyUsage="SIGN_VERIFY")
        return KmsSigner(answer["KeyMetadata"]["KeyId"], lambda _: kms)

    def test_kms_signature_verifies_with_its_public_key(self, kms: Any, tmp_path: Path) -> None:
        require_verifiable(self.make(kms), tmp_path)

    def test_kms_key_of_other_curve_raises_user_error(self, kms: Any) -> None:
        with pytest.raises(UserError, match="not an ECDSA P-256 signing key"):
            _ = self.make(kms, "ECC_NIST_P384").key

    def test_kms_key_that_does_not_exist_raises_error_with_its_name(self, kms: Any) -> None:
        with pytest.raises(Exception, match="alias/none"):
            _ = KmsSigner("alias/none", lambda _: kms).key


class Vault(BaseHTTPRequestHandler):
    """A server with two keys of Key Vault: `good` on P-256, `large` on P-384."""

    keys: ClassVar[dict[str, Any]] = {
        "good": generate_private_key(SECP256R1()),
        "large": generate_private_key(SECP384R1()),
    }
    seen: ClassVar[list[str]] = []

    def do_GET(self) -> None:
        name = self.path.split("/")[2].partition("?")[0]
        if self.headers["Authorization"] != "Bearer a token of https://vault.azure.net":
            self.answer({"error": {"code": "Unauthorized"}}, 401)
            return
        if name not in self.keys:
            self.answer({"error": {"code": "KeyNotFound"}}, 404)
            return
        numbers, curve = (
            self.keys[name].public_key().public_numbers(),
            {"good": "P-256", "large": "P-384"}[name],
        )
        size = 32 if name == "good" else 48
        x, y = (
            base64.urlsafe_b64encode(n.to_bytes(size, "big")).rstrip(b"=").decode()
            for n in (numbers.x, numbers.y)
        )
        kid = f"https://other.vault.azure.net/keys/{name}/version1"
        self.answer({"key": {"kid": kid, "kty": "EC", "crv": curve, "x": x, "y": y}})

    def do_POST(self) -> None:
        self.seen.append(self.path)
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        digest = base64.urlsafe_b64decode(asked["value"] + "=")
        r, s = decode_dss_signature(self.keys["good"].sign(digest, ECDSA(Prehashed(SHA256()))))
        raw = r.to_bytes(32, "big") + s.to_bytes(32, "big")
        self.answer({"value": base64.urlsafe_b64encode(raw).rstrip(b"=").decode()})

    def answer(self, document: object, status: int = 200) -> None:
        body = json.dumps(document).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Print nothing."""


@pytest.fixture
def vault() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Vault) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}/keys"
        server.shutdown()


def fetch(service: str) -> str:
    return f"a token of {service}"


class TestKeyVault:
    def test_key_vault_signature_verifies_with_its_public_key(
        self, vault: str, tmp_path: Path
    ) -> None:
        require_verifiable(KeyVaultSigner(f"{vault}/good", fetch), tmp_path)
        assert set(Vault.seen) == {"/keys/good/version1/sign?api-version=7.4"}

    def test_key_vault_key_of_other_curve_raises_user_error(self, vault: str) -> None:
        with pytest.raises(UserError, match="not an ECDSA P-256 signing key"):
            _ = KeyVaultSigner(f"{vault}/large", fetch).key

    @pytest.mark.parametrize(
        ("name", "token"), [("none", "https://vault.azure.net"), ("good", "another")]
    )
    def test_key_vault_key_unknown_or_without_permission_raises_refused_error(
        self, vault: str, name: str, token: str
    ) -> None:
        with pytest.raises(RefusedError):
            _ = KeyVaultSigner(f"{vault}/{name}", lambda _: f"a token of {token}").key

    @pytest.mark.parametrize(
        "url", ["https://evil.example/keys/k", "https://vault.azure.net.evil.example/keys/k"]
    )
    def test_key_vault_signer_with_foreign_url_raises_user_error(self, url: str) -> None:
        with pytest.raises(UserError, match="is not a host of Azure Key Vault"):
            KeyVaultSigner(url, fetch)
