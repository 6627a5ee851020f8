"""The requests that the guard of the registry's server allows."""

from __future__ import annotations

import base64
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onnx_ops import codec
from onnx_ops.adapters.registries.mlflow_tags import DECISION, DIGEST, RELEASE, VARIANT
from onnx_ops.adapters.signers.ecdsa import create_key
from onnx_ops.attestation import TrustedKeys, read_envelope, sign_record
from onnx_ops.domain.attestation import Envelope, OverrideRecord
from onnx_ops.domain.decision import Verdict
from onnx_ops.errors import OnnxOpsError, RefusedError
from onnx_ops.integrations.mlflow_app import store
from onnx_ops.integrations.mlflow_app.guard import (
    Configuration,
    folded,
    guarded,
    read_configuration,
)
from onnx_ops.release.decision_policy import read_override
from tests.integrations.veto_parts import (
    CHALLENGER,
    CHAMPION,
    MODEL,
    POLICY,
    PREVIOUS,
    TARGET,
    Guarded,
    decision_record,
    tags_of,
)


@pytest.fixture
def plain(tmp_path: Path) -> Guarded:
    return Guarded(tmp_path)


@pytest.fixture
def ruled(tmp_path: Path) -> Guarded:
    return Guarded(tmp_path, policy=POLICY, signs_overrides=True)


@pytest.mark.parametrize("alias", [CHAMPION, CHALLENGER, PREVIOUS])
def test_set_alias_on_version_without_passing_decision_is_refused(
    plain: Guarded, alias: str
) -> None:
    plain.set_alias(alias, "1")
    with pytest.raises(
        RefusedError,
        match=rf"{alias} was not set on version 2 of {MODEL}: the verdict on cpu-1t is FAIL",
    ):
        plain.set_alias(alias, "2")
    with pytest.raises(RefusedError, match="onnx-ops did not register this version"):
        plain.set_alias(alias, "3")


DECISION_TAG, REASON_TAG = f"{DECISION}{TARGET}", f"override.{TARGET}"
RUBBISH = ("", "{}", "NaN", '{"record":NaN}', "[" * 50_000, "x" * 60_000)
SPELLINGS = ("Champion-cpu-1t", "chámpion-cpu-1t", "ｃhampion-cpu-1t", "champion-CPU-1t\n")
Attempt = Callable[[Guarded], None]


def aliasing(alias: str, version: str, user: str = "") -> Attempt:
    return lambda scene: scene.set_alias(alias, version, user=user)


def tagging(key: str, value: str, user: str = "") -> Attempt:
    return lambda scene: scene.set_tag("2", key, value, user=user)


def give_earlier(scene: Guarded) -> None:
    earlier = sign_record(decision_record("b", sequence=9), scene.signer)
    scene.set_tag("2", DECISION_TAG, codec.dumps(earlier.envelope).decode())


REFUSED: list[tuple[Attempt, str]] = [
    (aliasing(CHAMPION, "2"), r"\(latency fail\).*onnx-ops explain digits/2 --target cpu-1t"),
    (aliasing("champion-cuda", "1"), "no signed decision for target cuda"),
    *(
        (aliasing(spelling, "1"), "the alias must be spelled champion-cpu-1t")
        for spelling in SPELLINGS
    ),
    (lambda scene: scene.guard.rename_model(MODEL), "refer to the model by this name"),
    (give_earlier, "the version has a later decision"),
    (
        tagging(DECISION_TAG.replace("decision", "Decision"), ""),
        re.escape(f"the tag must be spelled {DECISION_TAG}"),
    ),
    *(
        (tagging(DECISION_TAG, value), "not a valid decision about this version and target")
        for value in RUBBISH
    ),
    (
        lambda scene: scene.guard.delete_tag("", MODEL, "2", DECISION_TAG),
        "signed decision whose verdict is FAIL",
    ),
]
RULED_OUT: list[tuple[Attempt, str]] = [
    (
        aliasing(CHAMPION, "2", "alice"),
        "is FAIL.*set tag override.cpu-1t to the reason, then set this alias again",
    ),
    (aliasing(CHALLENGER, "2", "bob"), "ask alice to override the decision"),
    (
        tagging(REASON_TAG, "sure", "bob"),
        r"policy\.yaml:6 permits only alice to override, and you are bob",
    ),
    (
        lambda scene: scene.guard.delete_tag("bob", MODEL, "2", REASON_TAG),
        "permits only alice to override",
    ),
    (tagging(REASON_TAG, " ", "alice"), "an override needs a reason"),
    (tagging(REASON_TAG, "x" * 1001, "alice"), "1001 characters; at most 1000 are allowed"),
    (tagging(f"{REASON_TAG}.by", "{}", "alice"), "users cannot change this tag"),
    (tagging("Override.cpu-1t", "{}", "alice"), "users cannot change this tag"),
    (tagging("override.", "{}", "alice"), "users cannot change this tag"),
]


@pytest.mark.parametrize(("attempt", "reason"), REFUSED)
def test_change_that_contradicts_or_evades_signed_decision_is_refused(
    plain: Guarded, attempt: Attempt, reason: str
) -> None:
    with pytest.raises(RefusedError, match=reason):
        attempt(plain)


@pytest.mark.parametrize(("attempt", "reason"), RULED_OUT)
def test_alias_without_override_or_invalid_change_of_override_tag_is_refused(
    ruled: Guarded, attempt: Attempt, reason: str
) -> None:
    with pytest.raises(RefusedError, match=reason):
        attempt(ruled)


@pytest.mark.parametrize(
    "alias", ["prod", "champion", "champion_cpu", "my-champion-cpu-1t", "latest-good"]
)
def test_set_alias_with_unguarded_name_is_allowed(plain: Guarded, alias: str) -> None:
    for version in "123":
        plain.set_alias(alias, version)
    plain.guard.delete_alias("", MODEL, alias)


def test_changes_of_model_not_registered_by_onnx_ops_are_allowed(plain: Guarded) -> None:
    plain.versions.put("1", {"stage": "x"}, model="faces", aliases=(CHAMPION,))
    plain.set_alias(CHAMPION, "1", model="faces")
    plain.guard.set_tag("", "faces", "1", "override.cpu-1t", "sure")
    plain.guard.delete_tag("", "faces", "1", f"{DECISION}cpu-1t")
    plain.guard.delete_alias("", "faces", CHAMPION)
    plain.guard.delete_version("faces", "1")
    plain.guard.rename_model("faces")
    plain.guard.delete_model("faces")
    # MLflow itself reports that the version does not exist.
    plain.set_alias(CHAMPION, "9")


RESERVED = r"(champion|challenger|previous)-[a-z0-9][a-z0-9-]*"


@given(st.text(max_size=40) | st.from_regex(RESERVED, fullmatch=True))
def test_folded_alias_is_idempotent_and_guarded_recognizes_reserved_aliases(text: str) -> None:
    assert folded(folded(text)) == folded(text)
    found = guarded(text)
    if re.fullmatch(RESERVED, text):
        assert found is not None
        assert found.name == text


def test_set_alias_without_trusted_keys_is_refused(tmp_path: Path) -> None:
    for scene in (Guarded(tmp_path, trusts=False), Guarded(tmp_path)):
        for public in (tmp_path / "keys").glob("*.pub.pem"):
            public.unlink()
        with pytest.raises(RefusedError, match=r"trusts no keys.*ONNX_OPS_TRUSTED_KEYS"):
            scene.set_alias(CHAMPION, "1")


def test_set_alias_with_unreadable_key_file_is_refused(plain: Guarded) -> None:
    (plain.folder / "keys" / "broken.pub.pem").write_text("no key")
    with pytest.raises(RefusedError, match="champion-cpu-1t was not set"):
        plain.set_alias(CHAMPION, "1")


def test_set_alias_after_replacement_of_trusted_key_is_refused(plain: Guarded) -> None:
    create_key(plain.folder / "other" / "new.pem")
    (plain.folder / "keys" / "signing.pub.pem").write_bytes(
        (plain.folder / "other" / "new.pub.pem").read_bytes()
    )
    with pytest.raises(RefusedError, match="is not trusted"):
        plain.set_alias(CHAMPION, "1")


def test_set_alias_on_copy_of_version_with_later_failure_is_refused(plain: Guarded) -> None:
    early, late = decision_record("c"), decision_record("c", Verdict.FAIL, sequence=11)
    plain.versions.put("4", tags_of(sign_record(late, plain.signer)))
    plain.versions.put("5", tags_of(sign_record(early, plain.signer)))
    with pytest.raises(RefusedError, match="is FAIL"):
        plain.set_alias(CHAMPION, "5")


def test_set_previous_alias_on_failed_champion_is_allowed(plain: Guarded) -> None:
    found = plain.versions.kept[MODEL, "2"]
    plain.versions.kept[MODEL, "2"] = replace(found, aliases=(CHAMPION,))
    plain.set_alias(PREVIOUS, "2")
    with pytest.raises(RefusedError):
        plain.set_alias(CHALLENGER, "2")


class TestDecisionTags:
    def test_set_tag_with_later_decision_replaces_earlier_decision(self, plain: Guarded) -> None:
        later = sign_record(decision_record("b", sequence=11), plain.signer)
        plain.set_tag("2", DECISION_TAG, codec.dumps(later.envelope).decode())
        plain.set_alias(CHAMPION, "2")

    @pytest.mark.parametrize(
        "verdict", [verdict for verdict in Verdict if verdict is not Verdict.PASS]
    )
    def test_delete_tag_of_decision_other_than_pass_is_refused(
        self, plain: Guarded, verdict: Verdict
    ) -> None:
        plain.versions.put("2", tags_of(sign_record(decision_record("b", verdict), plain.signer)))
        with pytest.raises(RefusedError):
            plain.guard.delete_tag("", MODEL, "2", DECISION_TAG)

    def test_delete_tag_of_passing_decision_is_allowed(self, plain: Guarded) -> None:
        plain.guard.delete_tag("", MODEL, "1", DECISION_TAG)

    def test_set_tag_over_forged_decision_is_allowed(self, plain: Guarded) -> None:
        plain.versions.change("2", **{DECISION_TAG: "{}"})
        plain.set_tag(
            "2",
            DECISION_TAG,
            codec.dumps(sign_record(decision_record("b"), plain.signer).envelope).decode(),
        )

    @pytest.mark.parametrize("key", [DIGEST, RELEASE, VARIANT])
    def test_change_of_registration_tag_is_refused(self, plain: Guarded, key: str) -> None:
        plain.set_tag("1", key, plain.versions.kept[MODEL, "1"].tags[key])
        with pytest.raises(RefusedError, match="the tags of a registration cannot be changed"):
            plain.set_tag("2", key, plain.versions.kept[MODEL, "1"].tags[key] + "x")
        with pytest.raises(RefusedError, match="the tags of a registration cannot be changed"):
            plain.guard.delete_tag("", MODEL, "2", key)


class TestDeletion:
    def test_delete_of_version_under_guarded_alias_is_refused(self, plain: Guarded) -> None:
        found = plain.versions.kept[MODEL, "1"]
        plain.guard.delete_version(MODEL, "1")
        plain.versions.kept[MODEL, "1"] = replace(found, aliases=(CHAMPION, "prod"))
        with pytest.raises(RefusedError, match=f"it has {CHAMPION}"):
            plain.guard.delete_version(MODEL, "1")
        with pytest.raises(RefusedError, match=f"{CHAMPION} on version 1"):
            plain.guard.delete_model(MODEL)


class TestPolicy:
    def test_set_alias_against_first_matching_rule_is_refused_with_place_of_rule(
        self, ruled: Guarded
    ) -> None:
        ruled.set_alias(CHAMPION, "1", user="alice")
        ruled.set_alias(CHALLENGER, "1", user="bob")
        with pytest.raises(
            RefusedError,
            match=r"policy.yaml:3 permits only alice, release-bot to move champion-\*, and you",
        ):
            ruled.set_alias(CHAMPION, "1", user="bob")
        with pytest.raises(RefusedError, match="and you are not known"):
            ruled.set_alias(CHAMPION, "1")
        with pytest.raises(RefusedError, match=r"policy\.yaml:5"):
            ruled.guard.delete_alias("bob", MODEL, PREVIOUS)

    def test_set_guarded_alias_without_matching_rule_is_refused(self, tmp_path: Path) -> None:
        scene = Guarded(
            tmp_path,
            policy='rules: [{aliases: "prod", users: [alice]}, {aliases: "champion-*", '
            'users: ["*"]}]',
        )
        with pytest.raises(RefusedError, match="no rule of the promotion policy"):
            scene.set_alias(CHALLENGER, "1", user="alice")
        with pytest.raises(RefusedError, match=r"policy\.yaml:1 permits only alice"):
            scene.set_alias("prod", "1", user="bob")
        scene.set_alias(CHAMPION, "1")
        scene.set_alias("other", "1")

    def test_delete_alias_with_other_case_of_model_follows_rule_of_model(
        self, tmp_path: Path
    ) -> None:
        scene = Guarded(
            tmp_path, policy=f'rules: [{{models: "{MODEL}", aliases: "prod", users: [alice]}}]'
        )
        scene.guard.delete_alias("alice", MODEL.upper(), "prod")
        with pytest.raises(RefusedError, match=f"prod of {MODEL} was not deleted"):
            scene.guard.delete_alias("bob", MODEL.upper(), "prod")


class TestOverride:
    def test_override_by_permitted_user_allows_alias_and_is_signed(self, ruled: Guarded) -> None:
        ruled.set_tag("2", REASON_TAG, "the old one is worse", user="alice")
        ruled.set_alias(CHAMPION, "2", user="alice")
        ruled.set_alias(CHAMPION, "2", user="release-bot")
        signed = read_envelope(
            ruled.versions.kept[MODEL, "2"].tags[f"{REASON_TAG}.by"].encode(), OverrideRecord
        )
        assert (signed.record.by, signed.record.reason) == ("alice", "the old one is worse")
        assert signed.record.at == "2023-11-14T22:13:20.000+00:00"

    def test_override_after_removal_of_reason_is_not_applied(self, ruled: Guarded) -> None:
        ruled.set_tag("2", REASON_TAG, "sure", user="alice")
        ruled.guard.delete_tag("alice", MODEL, "2", REASON_TAG)
        found = ruled.versions.kept[MODEL, "2"]
        tags = {key: value for key, value in found.tags.items() if key != REASON_TAG}
        ruled.versions.kept[MODEL, "2"] = replace(found, tags=tags)
        with pytest.raises(RefusedError, match="is FAIL"):
            ruled.set_alias(CHAMPION, "2", user="alice")

    def test_override_copied_to_other_version_is_not_applied(self, ruled: Guarded) -> None:
        ruled.set_tag("2", REASON_TAG, "sure", user="alice")
        ruled.versions.put("4", ruled.versions.kept[MODEL, "2"].tags)
        with pytest.raises(RefusedError, match="is FAIL"):
            ruled.set_alias(CHAMPION, "4", user="alice")

    def test_override_without_policy_or_key_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(RefusedError, match="ONNX_OPS_PROMOTION_POLICY"):
            Guarded(tmp_path, signs_overrides=True).set_tag("2", REASON_TAG, "sure")
        with pytest.raises(RefusedError, match="ONNX_OPS_OVERRIDE_KEY"):
            Guarded(tmp_path, policy=POLICY).set_tag("2", REASON_TAG, "sure", user="alice")

    def test_override_with_forged_record_is_not_applied(self, ruled: Guarded) -> None:
        ruled.set_tag("2", REASON_TAG, "sure", user="alice")
        tags = ruled.versions.kept[MODEL, "2"].tags
        envelope = codec.loads(tags[f"{REASON_TAG}.by"].encode(), Envelope)
        payload = base64.b64encode(
            base64.b64decode(envelope.payload).replace(b"alice", b"bobby")
        ).decode()
        forged = codec.dumps(replace(envelope, payload=payload)).decode()
        ruled.versions.change("2", **{f"{REASON_TAG}.by": forged})
        with pytest.raises(RefusedError, match="is FAIL"):
            ruled.set_alias(CHAMPION, "2", user="alice")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (
            {"ONNX_OPS_BASIC_AUTH": ""},
            r"names users \(alice, bob, release-bot\), but this server does not authenticate users",
        ),
        ({"ONNX_OPS_BASIC_AUTH": "maybe"}, "ONNX_OPS_BASIC_AUTH is 'maybe'"),
        ({"ONNX_OPS_PROMOTION_POLICY": "missing.yaml"}, "no such file"),
        ({"ONNX_OPS_PROMOTION_POLICY": "wrong.yaml"}, r"wrong\.yaml:2:6: rules\[0\]"),
        ({"ONNX_OPS_TRUSTED_KEYS": ""}, "which is not trusted"),
        ({"ONNX_OPS_TRUSTED_KEYS": "empty"}, "which is not trusted"),
        ({"ONNX_OPS_OVERRIDE_KEY": "missing.pem"}, "the signing key cannot be read"),
    ],
)
def test_read_configuration_with_invalid_setting_raises_onnx_ops_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, str], reason: str
) -> None:
    monkeypatch.chdir(tmp_path)
    create_key(tmp_path / "keys" / "signing.pem")
    (tmp_path / "policy.yaml").write_text(POLICY, encoding="utf-8")
    (tmp_path / "wrong.yaml").write_text(
        "rules:\n  - {alias: x, users: [alice]}\n", encoding="utf-8"
    )
    right = {
        "ONNX_OPS_BASIC_AUTH": "TRUE",
        "ONNX_OPS_PROMOTION_POLICY": "policy.yaml",
        "ONNX_OPS_TRUSTED_KEYS": "keys",
        "ONNX_OPS_OVERRIDE_KEY": "keys/signing.pem",
    }
    assert read_configuration(right).basic_auth
    with pytest.raises(OnnxOpsError, match=reason):
        read_configuration(right | changes)


def test_find_registered_with_other_case_of_model_returns_stored_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """MLflow over MySQL: a read ignores case, and a search does not."""
    server = SimpleNamespace(
        get_registered_model=lambda _: SimpleNamespace(name=MODEL),
        search_model_versions=lambda query, **_: [1] if f"name = '{MODEL}'" in query else [],
    )
    monkeypatch.setattr(store, "_store", lambda: server)
    assert store.ServerStore().find_registered(MODEL.upper()) == MODEL


def test_read_configuration_without_settings_returns_defaults() -> None:
    assert read_configuration({}) == Configuration()


def test_read_override_accepts_override_of_mlflow_server_for_its_target_only(
    ruled: Guarded,
) -> None:
    from onnx_ops.adapters.registries.mlflow_tags import read_record

    ruled.set_tag("2", "override.cpu-1t", "sure", user="alice")
    record = read_record(MODEL, "2", ruled.versions.kept[MODEL, "2"].tags)
    assert record is not None
    assert read_override(record, TARGET, TrustedKeys(ruled.folder / "keys")) is not None
    assert read_override(record, "cuda", TrustedKeys(ruled.folder / "keys")) is None
