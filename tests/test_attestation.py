"""Signed statements, and what they permit to be loaded."""

from __future__ import annotations

import base64
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onnx_ops import codec
from onnx_ops.attestation import (
    PAYLOAD_TYPE,
    TrustedKeys,
    build_key_error,
    read_authority_target,
    read_envelope,
    sign_record,
    verify_authority,
    verify_envelope,
)
from onnx_ops.domain.artifact import digest_bytes, hex_digits
from onnx_ops.domain.attestation import Envelope, OverrideRecord
from onnx_ops.domain.decision import DecisionRecord, Verdict
from onnx_ops.domain.endpoint import Deployment
from onnx_ops.domain.execution import Execution, SessionSettings
from onnx_ops.errors import CorruptStateError, InvalidSignatureError, RefusedError, UserError
from onnx_ops.testing.fakes import FakeSigner

SIGNER, STRANGER = FakeSigner(), FakeSigner(b"a stranger")
RELEASE, MANIFEST, EVIDENCE = (
    digest_bytes(b"release"),
    digest_bytes(b"manifest"),
    digest_bytes(b"evidence"),
)


def decision(**changes: Any) -> DecisionRecord:
    passed = DecisionRecord(
        model="digits",
        release=RELEASE,
        variant="fp32",
        target="cpu",
        manifest=MANIFEST,
        target_digest=digest_bytes(b"target"),
        gates_digest=digest_bytes(b"gates"),
        evidence=EVIDENCE,
        verdict=Verdict.PASS,
        verdicts={"latency": Verdict.PASS},
        decided_at="2026-01-01T00:00:00+00:00",
        sequence=10,
    )
    return replace(passed, **changes)


def override(**changes: Any) -> OverrideRecord:
    given_ = OverrideRecord(
        model="digits",
        version="2",
        release=RELEASE,
        variant="fp32",
        manifest=MANIFEST,
        target="cpu",
        reason="sure",
        by="alice",
        at="2026-01-01T00:00:00+00:00",
    )
    return replace(given_, **changes)


def deployment(**changes: Any) -> Deployment:
    approved = Deployment(
        name="v2",
        model="digits",
        version="2",
        variant="fp32",
        release=RELEASE,
        manifest=MANIFEST,
        location="/models",
        evidence=EVIDENCE,
        authority=sign_record(decision(), SIGNER).envelope,
    )
    return replace(approved, **changes)


def test_sign_record_writes_dsse_envelope_with_in_toto_statement() -> None:
    """The signature is verified here with only the definitions of the standard."""
    from cryptography.hazmat.primitives.asymmetric.ec import ECDSA, EllipticCurvePublicKey
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.serialization import load_der_public_key

    document = json.loads(codec.dumps(sign_record(decision(), SIGNER).envelope))
    assert set(document) == {"payload", "payloadType", "signatures"}
    kind, payload = document["payloadType"].encode(), base64.b64decode(document["payload"])
    encoded = b" ".join(
        [b"DSSEv1", str(len(kind)).encode(), kind, str(len(payload)).encode(), payload]
    )
    key = load_der_public_key(base64.b64decode(SIGNER.trusted_keys))
    assert isinstance(key, EllipticCurvePublicKey)
    (signature,) = document["signatures"]
    key.verify(base64.b64decode(signature["sig"]), encoded, ECDSA(SHA256()))
    statement = json.loads(payload)
    assert statement["_type"] == "https://in-toto.io/Statement/v1"
    assert statement["subject"] == [
        {"name": "manifest.json", "digest": {"sha256": hex_digits(MANIFEST)}}
    ]
    assert statement["predicateType"] == "urn:onnx-ops:decision:v1"


@pytest.mark.parametrize("record", [decision(), override()], ids=["decision", "override"])
def test_verify_envelope_of_signed_record_returns_it_only_with_trusted_key(
    record: DecisionRecord | OverrideRecord,
) -> None:
    attested = sign_record(record, SIGNER)
    text = codec.dumps(attested.envelope)
    assert read_envelope(text, type(record)) == attested
    assert attested.keys == (SIGNER.key,)
    assert verify_envelope(attested.envelope, type(record), SIGNER) == record
    with pytest.raises(InvalidSignatureError, match="is not trusted"):
        verify_envelope(attested.envelope, type(record), STRANGER)


@given(position=st.integers(0, 10_000), bit=st.integers(0, 7))
def test_verify_envelope_with_changed_byte_raises_invalid_signature_error(
    position: int, bit: int
) -> None:
    envelope = sign_record(decision(), SIGNER).envelope
    payload = bytearray(base64.b64decode(envelope.payload))
    payload[position % len(payload)] ^= 1 << bit
    changed = replace(envelope, payload=base64.b64encode(bytes(payload)).decode())
    with pytest.raises(InvalidSignatureError):
        verify_envelope(changed, DecisionRecord, SIGNER)


def test_verify_envelope_of_other_record_or_payload_type_raises_invalid_signature_error() -> None:
    with pytest.raises(InvalidSignatureError, match="the signed record is not valid"):
        verify_envelope(sign_record(override(), SIGNER).envelope, DecisionRecord, SIGNER)
    with pytest.raises(InvalidSignatureError):
        verify_envelope(
            replace(sign_record(decision(), SIGNER).envelope, payloadType="text/plain"),
            DecisionRecord,
            SIGNER,
        )


def test_verify_envelope_requires_one_trusted_signature() -> None:
    mine, theirs = (
        sign_record(decision(), SIGNER).envelope,
        sign_record(decision(), STRANGER).envelope,
    )
    both = replace(mine, signatures=(*theirs.signatures, *mine.signatures))
    assert verify_envelope(both, DecisionRecord, SIGNER) == decision()
    with pytest.raises(InvalidSignatureError):
        verify_envelope(replace(mine, signatures=()), DecisionRecord, SIGNER)


def statement_of(**changes: Any) -> Envelope:
    """Return a statement whose members were changed after it was signed."""
    signed = sign_record(decision(), SIGNER).envelope
    document = {**json.loads(base64.b64decode(signed.payload)), **changes}
    payload = base64.b64encode(json.dumps(document).encode()).decode()
    return replace(signed, payload=payload)


@pytest.mark.parametrize(
    ("envelope", "why"),
    [
        (statement_of(_type="https://in-toto.io/Statement/v0.1"), "not an in-toto statement"),
        (statement_of(predicateType="https://slsa.dev/provenance/v1"), "it is a https://slsa.dev"),
        (statement_of(predicate={"model": "digits"}), "not a DecisionRecord"),
        (
            statement_of(subject=[{"name": "manifest.json", "digest": {"sha256": "0" * 64}}]),
            "does not match the predicate",
        ),
        (statement_of(subject=[]), "does not match the predicate"),
        (Envelope(payload="é", payloadType=PAYLOAD_TYPE, signatures=()), "not base64"),
    ],
)
def test_read_envelope_of_invalid_statement_raises_corrupt_state_error(
    envelope: Envelope, why: str
) -> None:
    with pytest.raises(CorruptStateError, match=why):
        read_envelope(envelope, DecisionRecord)


def test_verify_authority_of_matching_decision_or_override_returns_it() -> None:
    assert verify_authority(deployment(), SIGNER) == decision()
    overridden = deployment(evidence=None, authority=sign_record(override(), SIGNER).envelope)
    assert verify_authority(overridden, SIGNER) == override()


def test_read_authority_target_returns_target_of_approval_or_empty_text() -> None:
    assert read_authority_target(deployment()) == "cpu"
    overridden = deployment(evidence=None, authority=sign_record(override(), SIGNER).envelope)
    assert read_authority_target(overridden) == "cpu"
    assert read_authority_target(deployment(authority=None)) == ""


@pytest.mark.parametrize(
    ("other", "why"),
    [
        (deployment(authority=None), "no signed decision names the files of this version"),
        (deployment(manifest=digest_bytes(b"other")), "is not about this version"),
        (deployment(release=digest_bytes(b"other")), "is not about this version"),
        (
            deployment(execution=Execution(session=SessionSettings(intra_op_threads=2))),
            "execution settings are not those that were approved for target cpu",
        ),
        (deployment(variant="int8"), "is not about this version"),
        (deployment(model="faces"), "is not about this version"),
        (
            deployment(authority=sign_record(decision(verdict=Verdict.FAIL), SIGNER).envelope),
            "is FAIL",
        ),
        (deployment(authority=sign_record(decision(), STRANGER).envelope), "is not trusted"),
        (
            deployment(authority=sign_record(override(), SIGNER).envelope),
            "the signed record is not valid",
        ),
        (deployment(evidence=None), "the signed record is not valid"),
        (
            deployment(
                evidence=None, version="3", authority=sign_record(override(), SIGNER).envelope
            ),
            "is not about this version.*, release .*, version 2",
        ),
        (deployment(evidence=digest_bytes(b"other")), "are not those of the signed decision"),
        (deployment(batchable=True), "are not those of the signed decision"),
        (deployment(threads=1), "are not those of the signed decision"),
    ],
)
def test_verify_authority_without_trusted_matching_approval_raises_refused_error(
    other: Deployment, why: str
) -> None:
    with pytest.raises(RefusedError, match=why):
        verify_authority(other, SIGNER)


def test_trusted_keys_accept_folder_or_encoded_keys_and_reject_truncated_key(tmp_path: Any) -> None:
    from onnx_ops.adapters.signers.ecdsa import create_key

    signer = create_key(tmp_path / "keys" / "signing.pem")
    folder = TrustedKeys.of(str(tmp_path / "keys"))
    given_ = TrustedKeys.of(f"{folder.encoded()},{SIGNER.trusted_keys}")
    assert folder.keys() == (signer.key,)
    assert set(given_.keys()) == {signer.key, SIGNER.key}
    with pytest.raises(UserError, match="not an ECDSA P-256 public key"):
        TrustedKeys.of(SIGNER.trusted_keys[:-8]).keys()


@pytest.mark.parametrize("kind", ["folder", "broken link"])
def test_trusted_keys_with_unreadable_file_raise_user_error_with_reason(
    tmp_path: Path, kind: str
) -> None:
    path = tmp_path / "a.pub.pem"
    if kind == "folder":
        path.mkdir()
    else:
        path.symlink_to(tmp_path / "missing.pub.pem")
    with pytest.raises(UserError, match="a trusted key cannot be read") as caught:
        TrustedKeys(tmp_path).keys()
    assert caught.value.where == str(path)


@pytest.mark.parametrize(
    ("kind", "where", "remedy"),
    [
        ("private", "/keys/a.pem", "`onnx-ops keys new --out /keys/a.pem`"),
        ("private", "variable PEM", "Set the variable"),
        ("signing", "AWS KMS alias/a", "ECC_NIST_P256"),
        ("public", "/keys/a.pub.pem", "NAME.pub.pem"),
    ],
)
def test_build_key_error_names_remedy_for_kind_and_place(
    kind: str, where: str, remedy: str
) -> None:
    assert remedy in build_key_error(kind, where).remedy
