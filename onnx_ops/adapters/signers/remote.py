"""Signing keys in an environment variable, in AWS KMS, or in Azure Key Vault.

A key of KMS or Key Vault never leaves the service. Both services sign the SHA-256 of the data with
ECDSA P-256.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import os
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import urlsplit

from onnx_ops.adapters.aws import Clients, make_clients, read_access, translate_errors
from onnx_ops.adapters.azure import fetch_token
from onnx_ops.adapters.http_json import request_json, require_https
from onnx_ops.adapters.signers.ecdsa import EcdsaSigner
from onnx_ops.attestation import build_key_error, compute_key_digest
from onnx_ops.domain.artifact import Digest
from onnx_ops.errors import CorruptStateError, NotFoundError, UserError
from onnx_ops.ports import Signer

_API = "api-version=7.4"
_VAULTS = (".vault.azure.net", ".vault.azure.cn", ".vault.usgovcloudapi.net")
_FORMS = (
    "env:VARIABLE, awskms:KEY (its ID, ARN or alias/NAME) "
    "or azurekv:https://VAULT.vault.azure.net/keys/NAME"
)


def open_signer(text: str) -> Signer:
    """Return the signer that the setting `signer` names.

    No request is sent. The signer of a service sends requests when it is used, and then raises the
    errors of the service.

    Raises:
        UserError: the setting is malformed, or the environment variable does not contain an ECDSA
            P-256 key.
        NotFoundError: the environment variable is not set, or is empty.
    """
    kind, _, name = text.partition(":")
    if kind not in _KINDS or not name:
        raise UserError(f"{text!r} names no signer", where="signer", remedy=f"Write {_FORMS}.")
    return _KINDS[kind](name)


def read_variable(name: str) -> EcdsaSigner:
    """Return the signer with the PEM key from an environment variable.

    Raises:
        NotFoundError: the variable is not set, or is empty.
        UserError: the variable does not contain an ECDSA P-256 key.
    """
    if not (text := os.environ.get(name)):
        remedy = "Set the variable to the PEM text of the private key."
        what = f"variable {name} is not set, or is empty"
        raise NotFoundError(what, where="signer", remedy=remedy)
    return EcdsaSigner(text.encode(), f"variable {name}")


class _RemoteSigner:
    """Base of the signers that use a service. The public key is fetched once."""

    def __init__(self, where: str) -> None:
        self.is_local = False
        self._where = where

    @functools.cached_property
    def _public(self) -> Any:
        raise NotImplementedError

    @property
    def key(self) -> Digest:
        """Return the digest of the public key, SubjectPublicKeyInfo in DER."""
        return compute_key_digest(self._public)

    def public_pem(self) -> bytes:
        """Return the public key, SubjectPublicKeyInfo in PEM."""
        from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

        return bytes(self._public.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))


class KmsSigner(_RemoteSigner):
    """Signer with a key in AWS KMS, of key spec ECC_NIST_P256.

    Args:
        name: ID, ARN or alias of the key.
        clients: clients of boto3, by default for the environment's account and region.
    """

    def __init__(self, name: str, clients: Clients | None = None) -> None:
        super().__init__(f"AWS KMS {name}")
        self._name = name
        self._clients = clients

    @functools.cached_property
    def _client(self) -> Any:
        return (self._clients or make_clients(read_access(), where=self._where))("kms")

    @functools.cached_property
    def _public(self) -> Any:
        from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, EllipticCurvePublicKey
        from cryptography.hazmat.primitives.serialization import load_der_public_key

        with translate_errors(self._where):
            answer = self._client.get_public_key(KeyId=self._name)
        key = load_der_public_key(answer["PublicKey"])
        if not isinstance(key, EllipticCurvePublicKey) or not isinstance(key.curve, SECP256R1):
            raise build_key_error("signing", self._where)
        return key

    def sign(self, data: bytes) -> str:
        """Return the signature over the SHA-256 of the data, DER in base64."""
        with translate_errors(self._where):
            answer = self._client.sign(
                KeyId=self._name,
                Message=hashlib.sha256(data).digest(),
                MessageType="DIGEST",
                SigningAlgorithm="ECDSA_SHA_256",
            )
        return base64.b64encode(answer["Signature"]).decode("ascii")


class KeyVaultSigner(_RemoteSigner):
    """Signer with a key in Azure Key Vault on the curve P-256.

    If the URL names no version, the signer uses the version that was current at its first use.

    Args:
        url: `https://VAULT.vault.azure.net/keys/NAME`, with or without a version.
        fetch: returns a token for the vault's service.
    """

    def __init__(self, url: str, fetch: Callable[[str], str] = fetch_token) -> None:
        host = require_https(url, "the address of the key")
        service = next((suffix for suffix in _VAULTS if host.endswith(suffix)), "")
        # `require_https` permits http only for this machine.
        is_here = urlsplit(url).scheme == "http"
        if not service and not is_here:
            # The token must not be sent to a service other than Key Vault.
            raise UserError(
                f"{host} is not a host of Azure Key Vault",
                where="signer",
                remedy=f"Write {_FORMS}.",
            )
        super().__init__(f"Azure Key Vault {host}")
        self._url, self._host = url, host
        self._scope = f"https://{(service or _VAULTS[0]).removeprefix('.')}"
        self._fetch = fetch

    @functools.cached_property
    def _description(self) -> Mapping[str, Any]:
        answer = self._request("GET", self._url)
        key = answer.get("key") if isinstance(answer, dict) else None
        if not isinstance(key, dict) or (key.get("crv"), isinstance(key.get("kid"), str)) != (
            "P-256",
            True,
        ):
            raise build_key_error("signing", self._where)
        return key

    @functools.cached_property
    def _public(self) -> Any:
        from cryptography.hazmat.primitives.asymmetric.ec import (
            SECP256R1,
            EllipticCurvePublicNumbers,
        )

        try:
            x, y = (
                int.from_bytes(_decode(str(self._description.get(name, ""))), "big")
                for name in "xy"
            )
            return EllipticCurvePublicNumbers(x, y, SECP256R1()).public_key()
        except ValueError as error:
            raise build_key_error("signing", self._where) from error

    def sign(self, data: bytes) -> str:
        """Return the signature over the SHA-256 of the data, DER in base64.

        Raises:
            CorruptStateError: the response of the vault is not a signature.
            OnnxOpsError: the errors of the vault and of `fetch`.
        """
        from cryptography.hazmat.primitives.asymmetric.utils import encode_dss_signature

        digest = (
            base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode("ascii")
        )
        place = (
            urlsplit(self._url)._replace(path=urlsplit(str(self._description["kid"])).path).geturl()
        )
        answer = self._request("POST", f"{place}/sign", {"alg": "ES256", "value": digest})
        raw = _decode(str(answer.get("value", ""))) if isinstance(answer, dict) else b""
        if len(raw) != 64:
            raise CorruptStateError("the vault's response is not a signature", where=self._where)
        r, s = (int.from_bytes(half, "big") for half in (raw[:32], raw[32:]))
        return base64.b64encode(encode_dss_signature(r, s)).decode("ascii")

    def _request(self, method: str, url: str, document: object = None) -> Any:
        headers = {"Authorization": f"Bearer {self._fetch(self._scope)}"}
        return request_json(method, f"{url}?{_API}", document, host=self._host, headers=headers)


_KINDS: Mapping[str, Callable[[str], Signer]] = {
    "env": read_variable,
    "awskms": KmsSigner,
    "azurekv": KeyVaultSigner,
}


def _decode(text: str) -> bytes:
    """Decode base64url without padding."""
    return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
