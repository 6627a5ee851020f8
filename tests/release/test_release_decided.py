"""The rule of signed decisions.

Only a valid and latest PASS lets a version serve, whatever the registry contains.
"""

from __future__ import annotations

import base64
import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from onnx_ops import codec
from onnx_ops.adapters.registries.mlflow_tags import (
    DECISION,
    DIGEST,
    RELEASE,
    VARIANT,
    read_decisions,
    read_record,
)
from onnx_ops.attestation import sign_record
from onnx_ops.domain.artifact import digest_bytes
from onnx_ops.domain.attestation import EnvelopeSignature, override_reason_tag, override_record_tag
from onnx_ops.domain.decision import DecisionRecord, SignedDecision, Verdict
from onnx_ops.domain.execution import Execution, SessionSettings
from onnx_ops.domain.release import VersionRecord
from onnx_ops.errors import InvalidSignatureError, RefusedError
from onnx_ops.release.decision_policy import (
    build_override,
    is_valid_for,
    read_override,
    require_passing_decision,
)
from onnx_ops.testing.fakes import FakeSigner
from tests.release.release_parts import TARGET, decision_record, override_record, override_tags
from tests.support.must import must

SIGNER, STRANGER = FakeSigner(), FakeSigner(b"somebody else")
digests = st.sampled_from([digest_bytes(bytes([n])) for n in range(3)])
names = st.sampled_from(["cpu", "cuda", "digits", "faces"])
verdicts = st.sampled_from(list(Verdict))
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=10), inner, max_size=4)
    ),
    max_leaves=12,
)


def record(**changes: Any) -> DecisionRecord:
    passed = decision_record(digest_bytes(b"release"), "fp32", digest_bytes(b"manifest"))
    values: dict[str, Any] = {"verdicts": {"latency": Verdict.PASS}, "sequence": 10, **changes}
    return replace(passed, **values)


def signed(about: DecisionRecord, signer: FakeSigner = SIGNER) -> SignedDecision:
    return sign_record(about, signer)


def version(*found: SignedDecision, **changes: Any) -> VersionRecord:
    about = record()
    read = VersionRecord(
        model=about.model,
        version="1",
        release=about.release,
        variant=about.variant,
        manifest=about.manifest,
        decisions={one.record.target: one for one in found},
        tags={},
    )
    return replace(read, **changes)


def test_require_passing_decision_with_signed_pass_returns_decision() -> None:
    assert require_passing_decision(version(signed(record())), TARGET, SIGNER).record == record()


@given(
    field=st.sampled_from(
        [
            "verdict",
            "verdicts",
            "sequence",
            "manifest",
            "model",
            "target_digest",
            "batchable",
            "threads",
        ]
    ),
    data=st.data(),
)
def test_failed_decision_with_altered_field_raises_refused_error(
    field: str, data: st.DataObject
) -> None:
    values: dict[str, st.SearchStrategy[Any]] = {
        "verdict": verdicts,
        "verdicts": st.dictionaries(names, verdicts, max_size=3),
        "sequence": st.integers(),
        "manifest": digests,
        "model": names,
        "target_digest": digests,
        "batchable": st.booleans(),
        "threads": st.integers(0, 64),
    }
    genuine = signed(record(verdict=Verdict.FAIL, verdicts={"latency": Verdict.FAIL}))
    lie = replace(genuine, record=replace(genuine.record, **{field: data.draw(values[field])}))
    with pytest.raises(RefusedError):
        require_passing_decision(version(lie), TARGET, SIGNER)


@given(
    model=names,
    variant=st.sampled_from(["fp32", "int8"]),
    release=digests | st.just(record().release),
    manifest=digests | st.just(record().manifest),
    target=names,
)
def test_signed_pass_counts_only_for_its_version_and_target(**about: Any) -> None:
    genuine = signed(record(**about))
    here = version(replace(genuine), decisions={TARGET: genuine})
    if genuine.record == record():
        require_passing_decision(here, TARGET, SIGNER)
        return
    with pytest.raises(InvalidSignatureError, match="about another model, version or target"):
        require_passing_decision(here, TARGET, SIGNER)


@given(st.binary(min_size=64, max_size=64), st.booleans())
def test_decision_with_forged_or_untrusted_signature_raises_invalid_signature_error(
    noise: bytes, claims_trusted: bool
) -> None:
    genuine = signed(record(), STRANGER)
    key = (SIGNER if claims_trusted else STRANGER).key
    noisy = EnvelopeSignature(keyid=key, sig=base64.b64encode(noise).decode())
    forged = replace(genuine, envelope=replace(genuine.envelope, signatures=(noisy,)))
    with pytest.raises(InvalidSignatureError):
        require_passing_decision(version(forged), TARGET, SIGNER)
    with pytest.raises(InvalidSignatureError, match="is not trusted"):
        require_passing_decision(version(signed(record(), STRANGER)), TARGET, SIGNER)


@given(own=st.integers(0, 5), others=st.lists(st.tuples(st.integers(0, 5), verdicts), max_size=5))
def test_require_passing_decision_uses_worst_verdict_of_highest_sequence(
    own: int, others: list[tuple[int, Verdict]]
) -> None:
    here = version(signed(record(sequence=own)))
    elsewhere = [signed(record(sequence=number, verdict=verdict)) for number, verdict in others]
    latest = max([own, *(number for number, _ in others)])
    worst = max([v.rank for n, v in others if n == latest] + [0] * (own == latest))
    if worst == Verdict.PASS.rank:
        assert (
            require_passing_decision(here, TARGET, SIGNER, others=elsewhere).record.sequence
            == latest
        )
    else:
        with pytest.raises(RefusedError, match="the verdict on cpu is"):
            require_passing_decision(here, TARGET, SIGNER, others=elsewhere)


@given(others=st.lists(st.tuples(st.integers(0, 99), st.booleans(), names), max_size=5))
def test_require_passing_decision_ignores_untrusted_and_unrelated_decisions(
    others: list[tuple[int, bool, str]],
) -> None:
    here = version(signed(record(verdict=Verdict.FAIL)))
    elsewhere = [
        signed(
            record(
                sequence=number,
                target=TARGET if stranger else name,
                model="digits" if stranger else "faces",
            ),
            STRANGER if stranger else SIGNER,
        )
        for number, stranger, name in others
    ]
    with pytest.raises(RefusedError, match="is FAIL"):
        require_passing_decision(here, TARGET, SIGNER, others=elsewhere)


def test_version_without_own_signed_decision_raises_refused_error() -> None:
    with pytest.raises(RefusedError, match="no signed decision"):
        require_passing_decision(version(), TARGET, SIGNER, others=[signed(record(sequence=99))])


def tags(value: str) -> dict[str, str]:
    about = record()
    identity = {RELEASE: about.release, VARIANT: about.variant, DIGEST: about.manifest}
    return {**identity, f"{DECISION}{TARGET}": value}


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(json_values.map(json.dumps) | st.text(max_size=60))
def test_unsigned_decision_tag_raises_refused_error(value: str) -> None:
    read = must(read_record("digits", "1", tags(value)))
    with pytest.raises(RefusedError):
        require_passing_decision(read, TARGET, SIGNER)


HUGE = codec.dumps(signed(record()).envelope).decode()


def changed(old: str, new: str) -> str:
    """Return the tag with other text in the signed bytes."""
    envelope = signed(record()).envelope
    payload = base64.b64decode(envelope.payload).decode()
    assert old in payload
    text = payload.replace(old, new).encode(errors="surrogatepass")
    return codec.dumps(replace(envelope, payload=base64.b64encode(text).decode())).decode()


ODD = {
    "nan": changed('"sequence":10', '"sequence":NaN'),
    "infinite": changed('"sequence":10', '"sequence":1e999'),
    "long": changed('"sequence":10', '"sequence":' + "9" * 5000),
    "twice": changed('"sequence":10', '"sequence":10,"sequence":11'),
    "escaped half": changed('"fp32"', r'"fp32\ud800"'),
    "half": changed('"fp32"', '"fp32\ud800"'),
    "deep": changed('{"latency":"pass"}', "[" * 60_000),
    "huge": changed('"latency"', '"' + "x" * 2_000_000 + '"'),
    "fields": HUGE.replace("payloadType", "payload"),
    "half type": HUGE.replace("in-toto", "in\ud800toto"),
    "unsigned": codec.dumps(replace(signed(record()).envelope, signatures=())).decode(),
    "type": codec.dumps(replace(signed(record()).envelope, payloadType="text/plain")).decode(),
    "payload": codec.dumps(replace(signed(record()).envelope, payload="no base64")).decode(),
    "two": HUGE + HUGE,
}


@pytest.mark.parametrize("value", ODD.values(), ids=ODD)
def test_malformed_decision_tag_raises_refused_error(value: str) -> None:
    read = must(read_record("digits", "1", tags(value)))
    with pytest.raises(RefusedError):
        require_passing_decision(read, TARGET, SIGNER)


def test_read_record_of_signed_decision_tag_returns_decision() -> None:
    read = must(read_record("digits", "1", tags(HUGE)))
    assert require_passing_decision(read, TARGET, SIGNER).record == record()
    assert is_valid_for(read_decisions(tags(HUGE))[TARGET], read, TARGET, SIGNER)


def given_override(signer: FakeSigner = SIGNER, **changes: Any) -> dict[str, str]:
    return override_tags(sign_record(override_record(version(), **changes), signer).envelope)


def test_read_override_returns_only_trusted_override_of_version_and_target() -> None:
    assert read_override(version(tags=given_override()), TARGET, SIGNER) is not None
    assert read_override(version(tags=given_override()), "cuda", SIGNER) is None
    assert read_override(version(tags=given_override(STRANGER)), TARGET, SIGNER) is None
    others = {
        "version": "2",
        "model": "faces",
        "target": "cuda",
        "reason": "other",
        "variant": "int8",
    }
    for name, value in others.items():
        changes: dict[str, Any] = {name: value}
        assert read_override(version(tags=given_override(**changes)), TARGET, SIGNER) is None


@pytest.mark.parametrize(("verifier", "judged"), [(SIGNER, True), (STRANGER, False), (None, False)])
def test_build_override_copies_execution_only_from_trusted_decision(
    verifier: FakeSigner | None, judged: bool
) -> None:
    library, execution = (
        digest_bytes(b"library"),
        Execution(session=SessionSettings(intra_op_threads=4)),
    )
    failed = signed(record(verdict=Verdict.FAIL, custom_ops=(library,), execution=execution))
    about = build_override(version(failed), TARGET, verifier, reason="sure", by="alice", now=0.0)
    assert (about.custom_ops, about.execution) == (
        ((library,), execution) if judged else ((), Execution())
    )
    assert (about.model, about.version, about.manifest, about.target) == (
        "digits",
        "1",
        record().manifest,
        TARGET,
    )


@given(st.text(max_size=60) | json_values.map(json.dumps))
def test_read_override_of_malformed_tag_returns_none(value: str) -> None:
    found = {override_reason_tag(TARGET): "sure", override_record_tag(TARGET): value}
    assert read_override(version(tags=found), TARGET, SIGNER) is None
