"""May this be done? Every check raises Refused with what a person reads in the UI, or returns."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from onnx_ops.adapters.registries.mlflow_tags import DECISION, DIGEST, RELEASE, VARIANT, decisions, read_record
from onnx_ops.domain.attestation import OVERRIDE_TAG_PREFIX
from onnx_ops.domain.decision import Verdict
from onnx_ops.domain.release import VersionRecord, is_among
from onnx_ops.domain.rollout import format_alias as alias_of
from onnx_ops.errors import InvalidSignatureError, OnnxOpsError, RefusedError
from onnx_ops.integrations.mlflow_app.configuration import TRUSTED_KEYS, Configuration
from onnx_ops.integrations.mlflow_app.names import PREVIOUS, GuardedAlias, folded, guarded
from onnx_ops.integrations.mlflow_app.overrides import Overrides
from onnx_ops.integrations.mlflow_app.store import StoredVersion, Versions
from onnx_ops.ports import Clock, Verifier
from onnx_ops.release.decision_policy import is_valid_for, read_override, require_passing_decision
from onnx_ops.reporting.description import told_reason

_IDENTITY = (RELEASE, VARIANT, DIGEST)


class Guard:
    """The rules, over what the server's store says. `user` is empty where the server knows none."""

    def __init__(self, configuration: Configuration, versions: Versions, clock: Clock) -> None:
        self._configuration = configuration
        self._versions = versions
        self._overrides = Overrides(configuration, versions, clock)

    def set_alias(self, user: str, model: str, alias: str, version: str) -> None:
        """An alias is about to be set."""
        found = self._versions.find(model, version)
        if found is None:
            return
        record = read_record(found.model, found.version, found.tags)
        if record is None and not self._versions.registered_here(found.model):
            return
        done = f"{alias} was not set on version {found.version} of {found.model}"
        self._permit(user, found.model, alias, done)
        target = guarded(alias)
        if target is None:
            return
        with _said(done):
            if target.name != alias:
                raise RefusedError(
                    f"write it {target.name}", remedy="Some databases hold both spellings for one alias."
                )
            if record is None:
                raise RefusedError("onnx-ops did not register this version", remedy="Register it with `onnx-ops run`.")
            self._decided(user, found, record, target)

    def delete_alias(self, user: str, model: str, alias: str) -> None:
        """An alias is about to be deleted: that takes the same permission as setting it."""
        if self._configuration.policy is not None and self._versions.registered_here(model):
            self._permit(user, model, alias, f"{alias} of {model} was not deleted")

    def set_tag(self, user: str, model: str, version: str, key: str, value: str) -> None:
        """A version's tag is about to be set."""
        plain = folded(key)
        if not (plain.startswith((DECISION, OVERRIDE_TAG_PREFIX)) or plain in _IDENTITY):
            return
        found, record = self._read(model, version)
        if found is None or record is None:
            return
        with _said(f"tag {key} was not set on version {found.version} of {found.model}"):
            if plain in _IDENTITY and record.tags.get(plain) != value:
                raise RefusedError(
                    "a version keeps what it was registered as", remedy="Register another with `onnx-ops run`."
                )
            if plain.startswith(DECISION):
                self._no_older_decision(record, key, value)
            if plain.startswith(OVERRIDE_TAG_PREFIX):
                self._overrides.give(user, found, record, key, value)

    def delete_tag(self, user: str, model: str, version: str, key: str) -> None:
        """A version's tag is about to be deleted."""
        plain = folded(key)
        if not (plain.startswith((DECISION, OVERRIDE_TAG_PREFIX)) or plain in _IDENTITY):
            return
        found, record = self._read(model, version)
        if found is None or record is None:
            return
        with _said(f"tag {key} of version {found.version} of {found.model} was not deleted"):
            if plain in _IDENTITY:
                raise RefusedError("a version keeps what it was registered as")
            if plain.startswith(OVERRIDE_TAG_PREFIX):
                self._overrides.take_back(user, key)
            target = plain.removeprefix(DECISION)
            signed = record.decisions.get(target)
            if signed is not None and self._counts(record, target) and signed.record.verdict is not Verdict.PASS:
                raise RefusedError(
                    f"it is a signed decision that ended {signed.record.verdict.value}",
                    remedy="Judge the release again with `onnx-ops run`; a later decision replaces it.",
                )

    def delete_version(self, model: str, version: str) -> None:
        """A version is about to be deleted, and its aliases would go with it without a word."""
        found, _ = self._read(model, version)
        held = [alias for alias in found.aliases if guarded(alias)] if found is not None else []
        if found is not None and held and self._versions.registered_here(found.model):
            with _said(f"version {found.version} of {found.model} was not deleted"):
                raise RefusedError(f"it holds {', '.join(sorted(held))}", remedy="Move that to another version first.")

    def delete_model(self, model: str) -> None:
        """A registered model is about to be deleted with all its versions."""
        if not self._versions.registered_here(model):
            return
        held = [
            f"{alias} on version {number}" for alias, number in self._versions.aliases(model).items() if guarded(alias)
        ]
        if held:
            with _said(f"model {model} was not deleted"):
                raise RefusedError(f"it has {', '.join(sorted(held))}", remedy="Delete those aliases first.")

    def rename_model(self, model: str) -> None:
        """A registered model is about to get another name."""
        if self._versions.registered_here(model):
            with _said(f"model {model} was not renamed"):
                raise RefusedError(
                    "every decision about its versions is signed for this name, and endpoints are bound to it",
                    remedy="Register under the new name with `register.model` and `onnx-ops run`.",
                )

    def _read(self, model: str, version: str) -> tuple[StoredVersion | None, VersionRecord | None]:
        found = self._versions.find(model, version)
        return found, None if found is None else read_record(found.model, found.version, found.tags)

    def _permit(self, user: str, model: str, alias: str, done: str) -> None:
        """What the policy says. It has the last word on guarded aliases: what no rule is about, nobody may move."""
        located, target = self._configuration.policy, guarded(alias)
        if located is None:
            return
        name = alias if target is None else target.name
        index = located.policy.rule(model, name)
        with _said(done):
            if index is None and target is not None:
                raise RefusedError(
                    "no rule of the promotion policy is about it", remedy="Ask who keeps the policy for one."
                )
            if index is not None and not is_among(user, users := located.policy.rules[index].users):
                rule = (
                    f"{located.places[index]} lets only {', '.join(users)} move {located.policy.rules[index].aliases}"
                )
                raise RefusedError(f"{rule}, and you are {user or 'not known'}", remedy=f"Ask {users[0]} to do it.")

    def _decided(self, user: str, found: StoredVersion, record: VersionRecord, target: GuardedAlias) -> None:
        keys = self._keys()
        try:
            require_passing_decision(record, target.target, keys, others=self._versions.twins(record, target.target))
        except RefusedError as error:
            champion = alias_of("champion", target.target)
            if target.role == PREVIOUS and champion in found.aliases:
                return  # it serves now, and is about to be followed
            if read_override(record, target.target, keys) is not None:
                return
            judged = error.why != "" and not isinstance(error, InvalidSignatureError)
            why = (told_reason(found.description, target.target) if judged else "") or error.why
            remedy = f"{error.remedy.rstrip('.')}. {self._overrides.advice(user, target.target)}"
            raise RefusedError(error.what, why=why, remedy=remedy) from error

    def _keys(self) -> Verifier:
        keys = self._configuration.keys
        if keys is None or not keys.keys():
            raise RefusedError(
                "this server trusts no keys, so it can verify no decision",
                remedy=f"Its operator names the folder of public keys in {TRUSTED_KEYS}.",
            )
        return keys

    def _counts(self, record: VersionRecord, target: str) -> bool:
        keys, signed = self._configuration.keys, record.decisions.get(target)
        return keys is not None and signed is not None and is_valid_for(signed, record, target, keys)

    def _no_older_decision(self, record: VersionRecord, key: str, value: str) -> None:
        """A decision that counts is only followed by a later one that counts too."""
        target = folded(key).removeprefix(DECISION)
        if key != f"{DECISION}{target}":
            raise RefusedError(f"write it {DECISION}{target}", remedy="Some databases hold both spellings for one tag.")
        keys, new = self._configuration.keys, decisions({key: value}).get(target)
        if keys is None or not self._counts(record, target):
            return
        if new is None or not is_valid_for(new, record, target, keys):
            raise RefusedError("what stands there is validly signed, and this is not about this version and target")
        if new.record.sequence < record.decisions[target].record.sequence:
            raise RefusedError(
                "a later decision stands there",
                why=f"it was made {record.decisions[target].record.decided_at}, this one {new.record.decided_at}",
                remedy="Judge again with `onnx-ops run FILE --fresh gate`.",
            )


@contextmanager
def _said(done: str) -> Iterator[None]:
    """Puts what was not done in front of the reason. Whatever cannot be checked is not done either."""
    try:
        yield
    except OnnxOpsError as error:
        raise RefusedError(f"{done}: {error.what}", why=error.why, remedy=error.remedy) from error
