"""Ed25519 keys and signatures."""

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

from onnx_ops.adapters.signers.ed25519 import Ed25519Signer, TrustedKeys, create_key, public_path
from onnx_ops.domain.artifact import digest_bytes, short
from onnx_ops.errors import EnvironmentFailure, NotFound, Refused, SignatureInvalid, UserError
from onnx_ops.ports.store import Signer, Verifier

RECORD = b'{"verdict":"pass"}'


@pytest.fixture
def signer(tmp_path: Path) -> Ed25519Signer:
    return create_key(tmp_path / "keys" / "signing.pem")


@pytest.fixture
def trusted(signer: Ed25519Signer, tmp_path: Path) -> TrustedKeys:
    return TrustedKeys(tmp_path / "keys")


def test_a_signature_holds(signer: Ed25519Signer, trusted: TrustedKeys) -> None:
    port: Signer = signer
    check: Verifier = trusted
    check.verify(RECORD, port.sign(RECORD), port.key)
    assert trusted.keys() == (signer.key,)


def test_the_key_is_named_by_its_public_bytes(signer: Ed25519Signer, tmp_path: Path) -> None:
    from cryptography.hazmat.primitives.serialization import load_pem_public_key

    public = load_pem_public_key((tmp_path / "keys" / "signing.pub.pem").read_bytes())
    assert signer.key == digest_bytes(public.public_bytes_raw())  # type: ignore[union-attr]


def test_signing_is_deterministic_and_survives_the_process(signer: Ed25519Signer, tmp_path: Path) -> None:
    again = Ed25519Signer(tmp_path / "keys" / "signing.pem")
    assert (again.key, again.sign(RECORD)) == (signer.key, signer.sign(RECORD))


@given(position=st.integers(0, len(RECORD) - 1), bit=st.integers(0, 7))
def test_a_changed_record_is_refused(tmp_path_factory: pytest.TempPathFactory, position: int, bit: int) -> None:
    path = tmp_path_factory.getbasetemp() / "shared-key" / "signing.pem"
    signer = create_key(path)
    changed = bytearray(RECORD)
    changed[position] ^= 1 << bit
    with pytest.raises(SignatureInvalid, match=short(signer.key)):
        TrustedKeys(path.parent).verify(bytes(changed), signer.sign(RECORD), signer.key)


@pytest.mark.parametrize("signature", ["", "AAAA", "not base64!", "é", "A" * 10_000])
def test_a_malformed_signature_is_refused(signer: Ed25519Signer, trusted: TrustedKeys, signature: str) -> None:
    with pytest.raises(SignatureInvalid, match="does not fit"):
        trusted.verify(RECORD, signature, signer.key)


def test_a_signature_for_another_key_is_refused(signer: Ed25519Signer, trusted: TrustedKeys, tmp_path: Path) -> None:
    other = create_key(tmp_path / "other" / "signing.pem")
    with pytest.raises(SignatureInvalid, match=f"key {short(other.key)} is not trusted"):
        trusted.verify(RECORD, other.sign(RECORD), other.key)
    with pytest.raises(SignatureInvalid, match="does not fit"):
        trusted.verify(RECORD, other.sign(RECORD), signer.key)


def test_several_keys_may_be_trusted_and_one_withdrawn(signer: Ed25519Signer, tmp_path: Path) -> None:
    other = create_key(tmp_path / "other" / "signing.pem")
    verifier = TrustedKeys([tmp_path / "keys", public_path(tmp_path / "other" / "signing.pem")])
    for one in (signer, other):
        verifier.verify(RECORD, one.sign(RECORD), one.key)
    public_path(tmp_path / "other" / "signing.pem").unlink()
    with pytest.raises(SignatureInvalid, match="not trusted"):
        verifier.verify(RECORD, other.sign(RECORD), other.key)


def test_no_keys_trust_nobody(signer: Ed25519Signer, tmp_path: Path) -> None:
    with pytest.raises(SignatureInvalid, match="trusted keys: none"):
        TrustedKeys(tmp_path / "nowhere").verify(RECORD, signer.sign(RECORD), signer.key)


def test_the_verifier_takes_no_private_key(signer: Ed25519Signer, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="not an Ed25519 public key"):
        TrustedKeys(tmp_path / "keys" / "signing.pem").verify(RECORD, signer.sign(RECORD), signer.key)


def test_files_have_the_right_modes(signer: Ed25519Signer, tmp_path: Path) -> None:
    folder = tmp_path / "keys"
    assert sorted(path.name for path in folder.iterdir()) == ["signing.pem", "signing.pub.pem"]
    assert stat.S_IMODE((folder / "signing.pem").stat().st_mode) == 0o600
    assert b"PRIVATE" not in (folder / "signing.pub.pem").read_bytes()


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o644, 0o610])
def test_a_key_that_others_may_read_is_refused(signer: Ed25519Signer, tmp_path: Path, mode: int) -> None:
    path = tmp_path / "keys" / "signing.pem"
    path.chmod(mode)
    with pytest.raises(Refused, match=f"{mode:04o}"):
        Ed25519Signer(path)
    with pytest.raises(Refused):
        create_key(path)


def test_files_that_are_no_keys(tmp_path: Path) -> None:
    path = tmp_path / "signing.pem"
    with pytest.raises(NotFound):
        Ed25519Signer(path)
    path.touch(mode=0o600)
    with pytest.raises(UserError, match="not an Ed25519 private key"):
        Ed25519Signer(path)
    from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    other = generate_private_key(SECP256R1())
    path.write_bytes(other.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    with pytest.raises(UserError, match="not an Ed25519 private key"):
        Ed25519Signer(path)


def test_creating_twice_keeps_the_key_and_restores_the_public_file(signer: Ed25519Signer, tmp_path: Path) -> None:
    path = tmp_path / "keys" / "signing.pem"
    public = public_path(path).read_bytes()
    public_path(path).unlink()
    assert create_key(path).key == signer.key
    assert public_path(path).read_bytes() == public


def test_many_that_create_at_once_end_with_one_key(tmp_path: Path) -> None:
    path = tmp_path / "keys" / "signing.pem"
    with ThreadPoolExecutor(8) as pool:
        signers = list(pool.map(lambda _: create_key(path), range(8)))
    assert len({signer.key for signer in signers}) == 1
    assert sorted(p.name for p in path.parent.iterdir()) == ["signing.pem", "signing.pub.pem"]


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(EnvironmentFailure, match="cannot be created"):
        create_key(tmp_path / "file" / "signing.pem")


def test_importing_the_module_does_not_load_cryptography() -> None:
    code = "import sys, onnx_ops.adapters.signers.ed25519; print('cryptography' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "False"


def test_a_known_vector(tmp_path: Path) -> None:
    """RFC 8032, section 7.1, test 2."""
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    seed = bytes.fromhex("4ccd089b28ff96da9db6c346ec114e0f5b8a319f35aba624da8cf6ed4fb8a6fb")
    key = Ed25519PrivateKey.from_private_bytes(seed)
    path = tmp_path / "signing.pem"
    path.touch(mode=0o600)
    path.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    expected = (
        "92a009a9f0d4cab8720e820b5f642540a2b27b5416503f8fb3762223ebdb69da"
        "085ac1e43e15996e458f3613d0f11d8c387b2eaeb4302aeeb00d291612bb0c00"
    )
    assert base64.b64decode(Ed25519Signer(path).sign(bytes.fromhex("72"))).hex() == expected
