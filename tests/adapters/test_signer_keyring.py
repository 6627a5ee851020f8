"""The life cycle of a key: creation, rotation, retirement."""

from __future__ import annotations

import itertools
import os
import shutil
import stat
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from onnx_ops.adapters.signers.ecdsa import create_key, read_key
from onnx_ops.adapters.signers.keyring import Keyring
from onnx_ops.attestation import TrustedKeys
from onnx_ops.domain.artifact import Digest, hex_digits
from onnx_ops.errors import (
    InvalidSignatureError,
    NotFoundError,
    RefusedError,
    StorageError,
    UserError,
)

RECORD = b'{"verdict":"pass"}'


def admit_nowhere(keys: Mapping[Digest, str]) -> None:
    """Do nothing, since there is no ledger."""


@pytest.fixture(params=["beside", "apart"])
def places(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, Path]:
    """Return the signing key and the trusted folder.

    The folder is the key's own or another one.
    """
    return tmp_path / "keys" / "signing.pem", tmp_path / (
        "keys" if request.param == "beside" else "trusted"
    )


@pytest.fixture
def keyring(places: tuple[Path, Path]) -> Keyring:
    ring = Keyring(*places)
    ring.create()
    return ring


def test_keyring_create_makes_trusted_key_and_refuses_second(
    keyring: Keyring, places: tuple[Path, Path]
) -> None:
    (one,) = keyring.list_keys()
    assert (one.signs, one.trusted) == (True, True)
    assert places[0].stat().st_mode & 0o077 == 0
    with pytest.raises(UserError, match="a file already exists"):
        keyring.create()


def test_keyring_create_at_other_path_writes_key_there(keyring: Keyring, tmp_path: Path) -> None:
    made = keyring.create(tmp_path / "server" / "override.pem")
    assert made.key not in [one.key for one in keyring.list_keys()]
    assert read_key(tmp_path / "server" / "override.pem").key == made.key
    assert (tmp_path / "server" / "override.pub.pem").exists()


def test_keyring_rotate_keeps_old_signatures_valid_and_signs_with_new_key(
    keyring: Keyring, places: tuple[Path, Path]
) -> None:
    before = read_key(places[0])
    signature = before.sign(RECORD)
    old, new = keyring.rotate(admit_nowhere)
    now = read_key(places[0])
    assert (old, new) == (before.key, now.key)
    assert old != new
    trusted = TrustedKeys(places[1])
    trusted.verify(RECORD, signature, old)
    trusted.verify(RECORD, now.sign(RECORD), new)
    assert [(one.key, one.signs, one.trusted) for one in keyring.list_keys()] == [
        (new, True, True),
        (old, False, True),
    ]
    third = keyring.rotate(admit_nowhere)[1]
    assert set(trusted.keys()) == {old, new, third}


def test_keyring_rotate_of_key_created_without_keyring_trusts_old_key(
    places: tuple[Path, Path],
) -> None:
    signing, trusted = places
    old = create_key(signing)
    Keyring(signing, trusted).rotate(admit_nowhere)
    TrustedKeys(trusted).verify(RECORD, old.sign(RECORD), old.key)
    modes = {stat.S_IMODE(path.stat().st_mode) for path in trusted.glob("*.pub.pem")}
    assert modes == {0o644}, "other users can read public keys"


def test_keyring_rotate_leaves_no_old_private_key(
    keyring: Keyring, places: tuple[Path, Path], tmp_path: Path
) -> None:
    old_private = places[0].read_bytes()
    keyring.rotate(admit_nowhere)
    kept = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert [path.name for path in kept if b"PRIVATE" in path.read_bytes()] == ["signing.pem"]
    assert all(path.read_bytes() != old_private for path in kept)


def rotate_until_kill(keyring: Keyring, calls: int) -> bool:
    """Rotate in a forked process that ends after some file operations; return whether it ended."""
    child = os.fork()
    if child == 0:
        remaining = itertools.count(calls - 1, -1)

        def limit(call: Callable[..., Any]) -> Callable[..., Any]:
            def limited(*arguments: Any, **options: Any) -> Any:
                result = call(*arguments, **options)
                if next(remaining) == 0:
                    os._exit(1)
                return result

            return limited

        for name in ("open", "fchmod", "close", "fsync", "link", "replace", "unlink"):
            setattr(os, name, limit(getattr(os, name)))
        keyring.rotate(admit_nowhere)
        os._exit(0)
    return os.waitpid(child, 0)[1] != 0


def test_keyring_rotate_after_kill_at_any_file_operation_completes_same_rotation(
    places: tuple[Path, Path], tmp_path: Path
) -> None:
    for calls in itertools.count(1):
        root = tmp_path / str(calls)
        signing, trusted = (root / place.relative_to(tmp_path) for place in places)
        ring = Keyring(signing, trusted)
        old = ring.create()
        if not rotate_until_kill(ring, calls):
            break
        verifier, signer = TrustedKeys(trusted), read_key(signing)
        verifier.verify(RECORD, signer.sign(RECORD), signer.key)
        following = signing.with_name("signing.next.pem")
        begun = read_key(following).key if following.exists() else None
        if signer.key == old.key:
            _, new = ring.rotate(admit_nowhere)
            assert begun in (None, new)
            assert {known.key for known in ring.list_keys()} == {old.key, new}
        assert signing.with_name("signing.pub.pem").read_bytes() == read_key(signing).public_pem()
        assert not list(signing.parent.glob("signing.next.*"))
        verifier.verify(RECORD, old.sign(RECORD), old.key)
    assert calls > 20


def test_keyring_retire_of_old_key_revokes_trust_and_keeps_file(
    keyring: Keyring, places: tuple[Path, Path]
) -> None:
    old = read_key(places[0])
    keyring.rotate(admit_nowhere)
    kept = keyring.retire(keyring.find(hex_digits(old.key)[:8]))
    assert kept
    assert all(path.name.endswith(".retired.pem") and path.exists() for path in kept)
    with pytest.raises(InvalidSignatureError, match="is not trusted"):
        TrustedKeys(places[1]).verify(RECORD, old.sign(RECORD), old.key)
    assert [(one.signs, one.trusted) for one in keyring.list_keys()] == [
        (True, True),
        (False, False),
    ]
    with pytest.raises(NotFoundError, match="no trusted key begins with"):
        keyring.find(hex_digits(old.key))


def test_keyring_retire_of_signing_key_raises_refused_error(keyring: Keyring) -> None:
    (one,) = keyring.list_keys()
    with pytest.raises(RefusedError, match="this machine signs with key"):
        keyring.retire(one)


def test_keyring_find_accepts_only_unambiguous_prefix(keyring: Keyring) -> None:
    keyring.rotate(admit_nowhere)
    with pytest.raises(NotFoundError, match="Trusted: "):
        keyring.find("zz")
    with pytest.raises(NotFoundError):
        keyring.find("")
    for one in keyring.list_keys():
        assert keyring.find(one.key) == keyring.find(hex_digits(one.key)[:16]) == one
    for _ in range(20):
        keyring.rotate(admit_nowhere)
    first = [hex_digits(one.key)[0] for one in keyring.list_keys()]
    repeated = next(digit for digit in first if first.count(digit) > 1)
    with pytest.raises(UserError, match="several keys begin with"):
        keyring.find(repeated)


def test_keyring_without_signing_key_lists_trusted_keys_and_raises_not_found_error_on_rotate(
    tmp_path: Path,
) -> None:
    create_key(tmp_path / "elsewhere" / "ci.pem")
    (tmp_path / "trusted").mkdir()
    shutil.copy(tmp_path / "elsewhere" / "ci.pub.pem", tmp_path / "trusted")
    (one,) = Keyring(tmp_path / "keys" / "signing.pem", tmp_path / "trusted").list_keys()
    assert (one.signs, one.trusted) == (False, True)
    with pytest.raises(NotFoundError, match="the signing key cannot be read"):
        Keyring(tmp_path / "keys" / "signing.pem", tmp_path / "trusted").rotate(admit_nowhere)


@pytest.mark.parametrize("act", ["rotate", "retire"])
def test_keyring_with_remote_signer_refuses_rotate_and_retire_of_signing_key_with_manual_steps(
    tmp_path: Path, act: str
) -> None:
    signer = create_key(tmp_path / "remote" / "signing.pem")
    ring = Keyring(tmp_path / "keys" / "signing.pem", tmp_path / "trusted", remote=signer)
    with pytest.raises((UserError, RefusedError)) as refused:
        ring.rotate(admit_nowhere) if act == "rotate" else ring.retire(ring.list_keys()[0])
    assert refused.value.where == "signer"
    assert "onnx-ops keys admit new.pub.pem" in refused.value.remedy


def test_keyring_list_keys_of_key_in_role_folder_shows_that_role(
    keyring: Keyring, places: tuple[Path, Path]
) -> None:
    signer = create_key(places[0].parent / "elsewhere" / "release.pem")
    folder = places[1] / "release"
    folder.mkdir()
    shutil.copy(places[0].parent / "elsewhere" / "release.pub.pem", folder)
    assert {one.key: one.roles for one in keyring.list_keys()}[signer.key] == ("release",)
    TrustedKeys(places[1], role="release").verify(RECORD, signer.sign(RECORD), signer.key)
    with pytest.raises(InvalidSignatureError, match="is not trusted"):
        TrustedKeys(places[1]).verify(RECORD, signer.sign(RECORD), signer.key)


def test_keyring_rotate_with_unreachable_ledger_keeps_old_signing_key(
    keyring: Keyring, places: tuple[Path, Path]
) -> None:
    old = read_key(places[0])

    def fail(keys: Mapping[Digest, str]) -> None:
        assert set(keys) == {read_key(places[0].with_name("signing.next.pem")).key}
        raise StorageError("no bucket")

    with pytest.raises(StorageError, match="no bucket"):
        keyring.rotate(fail)
    assert read_key(places[0]).key == old.key
    assert keyring.rotate(admit_nowhere) == (old.key, read_key(places[0]).key)


def test_keyring_trust_for_role_stores_one_copy_of_valid_public_key(
    keyring: Keyring, places: tuple[Path, Path]
) -> None:
    signer = create_key(places[0].parent / "elsewhere" / "reconciler.pem")
    file = places[0].parent / "elsewhere" / "reconciler.pub.pem"
    for _ in range(2):
        assert set(keyring.trust(file, "release")) == {signer.key}
    assert len(list((places[1] / "release").iterdir())) == 1
    TrustedKeys(places[1], role="release").verify(RECORD, signer.sign(RECORD), signer.key)
    with pytest.raises(InvalidSignatureError, match="is not trusted"):
        TrustedKeys(places[1]).verify(RECORD, signer.sign(RECORD), signer.key)
    with pytest.raises(NotFoundError, match="there is no such file"):
        keyring.trust(file.with_name("other.pub.pem"), "release")
    with pytest.raises(UserError, match="not an ECDSA P-256 public key"):
        keyring.trust(file.with_name("reconciler.pem"), "release")
