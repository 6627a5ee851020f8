"""Keys and signatures of ECDSA P-256."""

from __future__ import annotations

import base64
import stat
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onnx_ops.adapters.signers.ecdsa import EcdsaSigner, create_key, public_path, read_key
from onnx_ops.attestation import TrustedKeys
from onnx_ops.domain.artifact import digest_bytes, short_digest
from onnx_ops.errors import (
    InfrastructureError,
    InvalidSignatureError,
    NotFoundError,
    RefusedError,
    UserError,
)
from onnx_ops.ports.store import Signer, Verifier

RECORD = b'{"verdict":"pass"}'


@pytest.fixture
def signer(tmp_path: Path) -> EcdsaSigner:
    return create_key(tmp_path / "keys" / "signing.pem")


@pytest.fixture
def trusted(signer: EcdsaSigner, tmp_path: Path) -> TrustedKeys:
    return TrustedKeys(tmp_path / "keys")


def test_verify_of_valid_signature_succeeds(signer: EcdsaSigner, trusted: TrustedKeys) -> None:
    port: Signer = signer
    check: Verifier = trusted
    check.verify(RECORD, port.sign(RECORD), port.key)
    assert trusted.keys() == (signer.key,)


def test_key_identifier_is_digest_of_public_key(signer: EcdsaSigner, tmp_path: Path) -> None:
    pem = (tmp_path / "keys" / "signing.pub.pem").read_text()
    der = base64.b64decode("".join(pem.splitlines()[1:-1]))
    assert signer.key == digest_bytes(der)


def test_sign_with_reloaded_key_returns_same_signature(signer: EcdsaSigner, tmp_path: Path) -> None:
    again = read_key(tmp_path / "keys" / "signing.pem")
    assert (again.key, again.sign(RECORD)) == (signer.key, signer.sign(RECORD))


@given(position=st.integers(0, len(RECORD) - 1), bit=st.integers(0, 7))
def test_verify_of_changed_record_raises_invalid_signature_error(
    tmp_path_factory: pytest.TempPathFactory, position: int, bit: int
) -> None:
    path = tmp_path_factory.getbasetemp() / "shared-key" / "signing.pem"
    signer = create_key(path)
    changed = bytearray(RECORD)
    changed[position] ^= 1 << bit
    with pytest.raises(InvalidSignatureError, match=short_digest(signer.key)):
        TrustedKeys(path.parent).verify(bytes(changed), signer.sign(RECORD), signer.key)


@pytest.mark.parametrize("signature", ["", "AAAA", "not base64!", "é", "A" * 10_000])
def test_verify_of_malformed_signature_raises_invalid_signature_error(
    signer: EcdsaSigner, trusted: TrustedKeys, signature: str
) -> None:
    with pytest.raises(InvalidSignatureError, match="is not valid"):
        trusted.verify(RECORD, signature, signer.key)


def test_verify_with_other_key_raises_invalid_signature_error(
    signer: EcdsaSigner, trusted: TrustedKeys, tmp_path: Path
) -> None:
    other = create_key(tmp_path / "other" / "signing.pem")
    with pytest.raises(
        InvalidSignatureError, match=f"key {short_digest(other.key)} is not trusted"
    ):
        trusted.verify(RECORD, other.sign(RECORD), other.key)
    with pytest.raises(InvalidSignatureError, match="is not valid"):
        trusted.verify(RECORD, other.sign(RECORD), signer.key)


def test_verify_after_removal_of_trusted_key_raises_invalid_signature_error(
    signer: EcdsaSigner, tmp_path: Path
) -> None:
    other = create_key(tmp_path / "other" / "signing.pem")
    verifier = TrustedKeys([tmp_path / "keys", public_path(tmp_path / "other" / "signing.pem")])
    for one in (signer, other):
        verifier.verify(RECORD, one.sign(RECORD), one.key)
    public_path(tmp_path / "other" / "signing.pem").unlink()
    with pytest.raises(InvalidSignatureError, match="not trusted"):
        verifier.verify(RECORD, other.sign(RECORD), other.key)


def test_verify_without_trusted_keys_raises_invalid_signature_error(
    signer: EcdsaSigner, tmp_path: Path
) -> None:
    with pytest.raises(InvalidSignatureError, match="trusted keys: none"):
        TrustedKeys(tmp_path / "nowhere").verify(RECORD, signer.sign(RECORD), signer.key)


def test_verify_with_private_key_file_raises_user_error(
    signer: EcdsaSigner, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match="not an ECDSA P-256 public key"):
        TrustedKeys(tmp_path / "keys" / "signing.pem").verify(
            RECORD, signer.sign(RECORD), signer.key
        )


def test_create_key_restricts_mode_of_private_file(signer: EcdsaSigner, tmp_path: Path) -> None:
    folder = tmp_path / "keys"
    assert sorted(path.name for path in folder.iterdir()) == ["signing.pem", "signing.pub.pem"]
    assert stat.S_IMODE((folder / "signing.pem").stat().st_mode) == 0o600
    assert b"PRIVATE" not in (folder / "signing.pub.pem").read_bytes()


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o644, 0o610])
def test_read_or_create_key_with_permissions_for_others_raises_refused_error(
    signer: EcdsaSigner, tmp_path: Path, mode: int
) -> None:
    path = tmp_path / "keys" / "signing.pem"
    path.chmod(mode)
    with pytest.raises(RefusedError, match=f"{mode:04o}"):
        read_key(path)
    with pytest.raises(RefusedError):
        create_key(path)


def test_read_key_of_missing_or_invalid_file_raises_user_error(tmp_path: Path) -> None:
    path = tmp_path / "signing.pem"
    with pytest.raises(NotFoundError, match="keys new"):
        read_key(path)
    folder = tmp_path / "folder.pem"
    folder.mkdir(mode=0o700)
    with pytest.raises(NotFoundError, match="Make the file readable for this user"):
        read_key(folder)
    path.touch(mode=0o600)
    with pytest.raises(UserError, match="not an ECDSA P-256 private key"):
        read_key(path)
    from cryptography.hazmat.primitives.asymmetric.ec import SECP384R1, generate_private_key
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    other = generate_private_key(SECP384R1())
    path.write_bytes(other.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    with pytest.raises(UserError, match="not an ECDSA P-256 private key"):
        read_key(path)


def test_create_key_twice_keeps_key_and_restores_public_file(
    signer: EcdsaSigner, tmp_path: Path
) -> None:
    path = tmp_path / "keys" / "signing.pem"
    public = public_path(path).read_bytes()
    public_path(path).unlink()
    assert create_key(path).key == signer.key
    assert public_path(path).read_bytes() == public


def test_create_key_by_concurrent_threads_creates_one_key(tmp_path: Path) -> None:
    path = tmp_path / "keys" / "signing.pem"
    with ThreadPoolExecutor(8) as pool:
        signers = list(pool.map(lambda _: create_key(path), range(8)))
    assert len({signer.key for signer in signers}) == 1
    assert sorted(p.name for p in path.parent.iterdir()) == ["signing.pem", "signing.pub.pem"]


def test_create_key_in_unusable_folder_raises_infrastructure_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InfrastructureError, match="cannot be written"):
        create_key(tmp_path / "file" / "signing.pem")


def test_import_of_ecdsa_module_does_not_load_cryptography() -> None:
    code = "import sys, onnx_ops.adapters.signers.ecdsa; print('cryptography' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "False"


def test_sign_of_rfc_6979_vector_returns_known_signature(tmp_path: Path) -> None:
    """RFC 6979, A.2.5: P-256, SHA-256, message "sample"."""
    from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, derive_private_key
    from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    secret = 0xC9AFA9D845BA75166B5C215767B1D6934E50C3DB36E89B127B8A622B120F6721
    key = derive_private_key(secret, SECP256R1())
    path = tmp_path / "signing.pem"
    path.touch(mode=0o600)
    path.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    assert decode_dss_signature(base64.b64decode(read_key(path).sign(b"sample"))) == (
        0xEFD48B2AACB6A8FD1140DD9CD45E81D69D2C877B56AAF991C34D0EA84EAF3716,
        0xF7CB1C942D657C41D436C7A1B6E29F65F3E900DBB9AFF4064DC4AB2F843ACDA8,
    )
