"""Checks of requests to the MLflow server.

Each check raises RefusedError with a message for the UI, or returns.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from onnx_ops import codec
from onnx_ops.adapters.registries.mlflow_tags import (
    DECISION,
    DIGEST,
    RELEASE,
    VARIANT,
    read_decisions,
    read_record,
)
from onnx_ops.adapters.signers.ecdsa import public_path, read_key
from onnx_ops.attestation import TrustedKeys, sign_record
from onnx_ops.config.loader import LocatedPolicy, load_policy
from onnx_ops.domain.artifact import short_digest
from onnx_ops.domain.attestation import (
    MAX_REASON_LENGTH,
    OVERRIDE_TAG_PREFIX,
    override_reason_tag,
    override_record_tag,
)
from onnx_ops.domain.decision import Verdict
from onnx_ops.domain.quantities import NAME_PATTERN
from onnx_ops.domain.release import VersionRecord, is_among
from onnx_ops.domain.rollout import format_alias as alias_of
from onnx_ops.errors import InvalidSignatureError, OnnxOpsError, RefusedError, UserError
from onnx_ops.integrations.mlflow_app.store import ServerStore, StoredVersion
from onnx_ops.ports import Clock, Signer
from onnx_ops.release.decision_policy import (
    build_override,
    is_valid_for,
    read_override,
    require_passing_decision,
)
from onnx_ops.reporting.description import parse_reason

TRUSTED_KEYS = "ONNX_OPS_TRUSTED_KEYS"
POLICY = "ONNX_OPS_PROMOTION_POLICY"
OVERRIDE_KEY = "ONNX_OPS_OVERRIDE_KEY"
BASIC_AUTH = "ONNX_OPS_BASIC_AUTH"

_WORDS = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False, "": False}
_IDENTITY = (RELEASE, VARIANT, DIGEST)
_REASON = re.compile(rf"{re.escape(OVERRIDE_TAG_PREFIX)}({NAME_PATTERN})")


@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration:
    """Settings of the server's operator.

    `keys` are the trusted keys, or None if no folder is configured. Users are checked only with a
    `policy`. `signer` signs overrides; if it is None, overrides are refused. `basic_auth` states
    whether MLflow's basic-auth identifies users.
    """

    keys: TrustedKeys | None = None
    policy: LocatedPolicy | None = None
    signer: Signer | None = None
    basic_auth: bool = False


def read_configuration(environ: Mapping[str, str]) -> Configuration:
    """Read the configuration from the environment.

    An empty variable is treated as not set.

    Raises:
        UserError: a value is invalid, or two of them contradict each other.
        NotFoundError, ConfigError, RefusedError: a file is missing or invalid, or other users have
            access to the key file.
    """
    folder, policy_file, key_file = (
        environ.get(name, "") for name in (TRUSTED_KEYS, POLICY, OVERRIDE_KEY)
    )
    flag = environ.get(BASIC_AUTH, "")
    if (basic_auth := _WORDS.get(flag.lower())) is None:
        raise UserError(f"{BASIC_AUTH} is {flag!r}", remedy="Write true or false.")
    keys = TrustedKeys(Path(folder)) if folder else None
    policy = load_policy(Path(policy_file)) if policy_file else None
    if policy is not None and (names := policy.policy.names()) and not basic_auth:
        raise UserError(
            f"the policy names users ({', '.join(sorted(names))}), "
            "but this server does not authenticate users",
            where=policy_file,
            remedy=f"Set {BASIC_AUTH}=true. Otherwise set `users: ['*']` in every rule, and remove "
            "the names from `overrides`.",
        )
    signer = read_key(Path(key_file)) if key_file else None
    if signer is not None and signer.key not in (() if keys is None else keys.keys()):
        raise UserError(
            f"overrides would be signed by key {short_digest(signer.key)}, which is not trusted",
            where=str(Path(key_file)),
            remedy=f"Set {TRUSTED_KEYS} to a folder with {public_path(Path(key_file)).name}.",
        )
    return Configuration(keys=keys, policy=policy, signer=signer, basic_auth=basic_auth)


class Guard:
    """The rules for changes, applied to the server's store.

    The methods raise RefusedError if a change is refused. Their argument `user` is empty if the
    server does not authenticate users.
    """

    def __init__(self, configuration: Configuration, versions: ServerStore, clock: Clock) -> None:
        self._configuration = configuration
        self._versions = versions
        self._clock = clock

    def set_alias(self, user: str, model: str, alias: str, version: str) -> None:
        """Check a request to set an alias.

        A guarded alias requires a passing decision or an override, and its exact spelling. The
        alias of the previous version is also permitted on the present champion.
        """
        stored = self._versions.find(model, version)
        if stored is None:
            return
        record = read_record(stored.model, stored.version, stored.tags)
        if record is None and self._versions.find_registered(stored.model) is None:
            return
        done = f"{alias} was not set on version {stored.version} of {stored.model}"
        self._permit(user, stored.model, alias, done)
        target = guarded(alias)
        if target is None:
            return
        with _prefix_refusals(done):
            if target.name != alias:
                raise RefusedError(
                    f"the alias must be spelled {target.name}",
                    why="some databases treat both spellings as the same alias",
                )
            if record is None:
                raise RefusedError(
                    "onnx-ops did not register this version",
                    remedy="Name it in a pipeline file: "
                    f"`model: models:/{stored.model}/{stored.version}`. Run `onnx-ops run FILE`, "
                    "and set the alias on the version that the run registers.",
                )
            self._require_decision(user, stored, record, target)

    def delete_alias(self, user: str, model: str, alias: str) -> None:
        """Check a request to delete an alias, which requires the permission to set it."""
        name = self._versions.find_registered(model)
        if name is not None:
            self._permit(user, name, alias, f"{alias} of {name} was not deleted")

    def set_tag(self, user: str, model: str, version: str, key: str, value: str) -> None:
        """Check a request to set a tag of a version that onnx-ops registered.

        Setting the tag of an override's reason signs the override.
        """
        plain = folded(key)
        stored, record = self._read(model, version) if is_guarded_tag(plain) else (None, None)
        if stored is None or record is None:
            return
        with _prefix_refusals(
            f"tag {key} was not set on version {stored.version} of {stored.model}"
        ):
            if plain in _IDENTITY and record.tags.get(plain) != value:
                raise RefusedError(
                    "the tags of a registration cannot be changed",
                    remedy="Change the pipeline file and run `onnx-ops run FILE`: another content "
                    "or variant is another version.",
                )
            if plain.startswith(DECISION):
                self._no_older_decision(record, key, value)
            if plain.startswith(OVERRIDE_TAG_PREFIX):
                self._sign_override(user, stored, record, key, value)

    def delete_tag(self, user: str, model: str, version: str, key: str) -> None:
        """Check a request to delete a tag of a version that onnx-ops registered.

        The tags of a registration are kept, and a valid decision whose verdict is not PASS.
        """
        plain = folded(key)
        stored, record = self._read(model, version) if is_guarded_tag(plain) else (None, None)
        if stored is None or record is None:
            return
        with _prefix_refusals(
            f"tag {key} of version {stored.version} of {stored.model} was not deleted"
        ):
            if plain in _IDENTITY:
                raise RefusedError("the tags of a registration cannot be changed")
            if plain.startswith(OVERRIDE_TAG_PREFIX):
                self._permit_override(user, key)
            target = plain.removeprefix(DECISION)
            signed = record.decisions.get(target)
            if (
                signed is not None
                and self._counts(record, target)
                and signed.record.verdict is not Verdict.PASS
            ):
                raise RefusedError(
                    f"it is a signed decision whose verdict is {signed.record.verdict.name}",
                    remedy="Correct the gates in the pipeline file and run `onnx-ops run FILE`. "
                    "Or measure again with `onnx-ops run FILE --no-cache benchmark`. "
                    "A later decision replaces it.",
                )

    def delete_version(self, model: str, version: str) -> None:
        """Check a request to delete a version, which would silently delete its aliases."""
        stored, _ = self._read(model, version)
        aliases = (
            sorted(alias for alias in stored.aliases if guarded(alias))
            if stored is not None
            else []
        )
        if stored is not None and aliases and self._versions.find_registered(stored.model):
            with _prefix_refusals(f"version {stored.version} of {stored.model} was not deleted"):
                raise RefusedError(
                    f"it has {', '.join(aliases)}",
                    remedy="Move these aliases to another version first.",
                )

    def delete_model(self, model: str) -> None:
        """Check a request to delete a registered model, which must have no guarded alias."""
        name = self._versions.find_registered(model)
        if name is None:
            return
        aliases = [
            f"{alias} on version {version}"
            for alias, version in self._versions.aliases(name).items()
            if guarded(alias)
        ]
        if aliases:
            with _prefix_refusals(f"model {name} was not deleted"):
                raise RefusedError(
                    f"it has {', '.join(sorted(aliases))}", remedy="Delete those aliases first."
                )

    def rename_model(self, model: str) -> None:
        """Refuse to rename a model of which onnx-ops registered a version."""
        name = self._versions.find_registered(model)
        if name is not None:
            with _prefix_refusals(f"model {name} was not renamed"):
                raise RefusedError(
                    "signed decisions and endpoints refer to the model by this name",
                    remedy="Copy the pipeline file. In the copy, change `pipeline`, "
                    "`register.model` and the endpoint names in `deploy`, and run "
                    "`onnx-ops run FILE`. Delete the old endpoints with `onnx-ops delete ENDPOINT` "
                    "when they are no longer needed.",
                )

    def _read(self, model: str, version: str) -> tuple[StoredVersion | None, VersionRecord | None]:
        stored = self._versions.find(model, version)
        return stored, None if stored is None else read_record(
            stored.model, stored.version, stored.tags
        )

    def _permit(self, user: str, model: str, alias: str, done: str) -> None:
        """Check whether the policy permits the user to move or delete an alias.

        If a policy is configured, it refuses a guarded alias that none of its rules covers.
        """
        located, target = self._configuration.policy, guarded(alias)
        if located is None:
            return
        name = alias if target is None else target.name
        index = located.policy.rule(model, name)
        with _prefix_refusals(done):
            if index is None and target is not None:
                raise RefusedError(
                    "no rule of the promotion policy covers this alias",
                    remedy="Ask the maintainers of the policy for a rule.",
                )
            if index is not None and not is_among(user, users := located.policy.rules[index].users):
                rule = (
                    f"{located.places[index]} permits only {', '.join(users)} to move "
                    f"{located.policy.rules[index].aliases}"
                )
                raise RefusedError(
                    f"{rule}, and you are {user or 'not known'}", remedy=f"Ask {users[0]} to do it."
                )

    def _require_decision(
        self, user: str, stored: StoredVersion, record: VersionRecord, target: GuardedAlias
    ) -> None:
        keys = self._configuration.keys
        if keys is None or not keys.keys():
            raise RefusedError(
                "this server trusts no keys that could verify decisions",
                remedy=f"Ask its operator to set {TRUSTED_KEYS} to a folder of public keys.",
            )
        try:
            require_passing_decision(
                record,
                target.target,
                keys,
                others=self._versions.list_copies(record, target.target),
            )
        except RefusedError as error:
            champion = alias_of("champion", target.target)
            if target.role == PREVIOUS and champion in stored.aliases:
                # The serving version may become the previous one regardless of its decision.
                return
            if read_override(record, target.target, keys) is not None:
                return
            judged = error.why != "" and not isinstance(error, InvalidSignatureError)
            why = (parse_reason(stored.description, target.target) if judged else "") or error.why
            remedy = f"{error.remedy.rstrip('.')}. {self._advise_override(user, target.target)}"
            raise RefusedError(error.what, why=why, remedy=remedy) from error

    def _counts(self, record: VersionRecord, target: str) -> bool:
        keys, signed = self._configuration.keys, record.decisions.get(target)
        return (
            keys is not None and signed is not None and is_valid_for(signed, record, target, keys)
        )

    def _no_older_decision(self, record: VersionRecord, key: str, value: str) -> None:
        """Refuse to replace a valid decision by an invalid or an older one.

        A tag with another spelling than onnx-ops writes is also refused.
        """
        target = folded(key).removeprefix(DECISION)
        if key != f"{DECISION}{target}":
            raise RefusedError(
                f"the tag must be spelled {DECISION}{target}",
                why="some databases treat both spellings as the same tag",
            )
        keys, new = self._configuration.keys, read_decisions({key: value}).get(target)
        if keys is None or not self._counts(record, target):
            return
        if new is None or not is_valid_for(new, record, target, keys):
            raise RefusedError(
                "the stored decision is valid, and the new value is not a valid decision about "
                "this version and target"
            )
        if new.record.sequence < record.decisions[target].record.sequence:
            raise RefusedError(
                "the version has a later decision",
                why="the stored decision was made at "
                f"{record.decisions[target].record.decided_at}, "
                f"the new one at {new.record.decided_at}",
                remedy="Judge again with `onnx-ops run FILE --no-cache gate`.",
            )

    def _sign_override(
        self, user: str, found: StoredVersion, record: VersionRecord, key: str, reason: str
    ) -> None:
        """Sign the user's override before the tag with the reason is set.

        The signed record has an effect only with that tag.
        """
        target = self._permit_override(user, key)
        signer, keys = self._configuration.signer, self._configuration.keys
        if signer is None:
            raise RefusedError(
                "this server signs no overrides",
                remedy=f"Ask its operator to set {OVERRIDE_KEY} to the file of a key.",
            )
        if not reason.strip():
            raise RefusedError("an override needs a reason", remedy="Write it as the tag's value.")
        if len(reason) > MAX_REASON_LENGTH:
            raise RefusedError(
                f"the reason has {len(reason)} characters; at most {MAX_REASON_LENGTH} are allowed"
            )
        about = build_override(record, target, keys, reason=reason, by=user, now=self._clock.now())
        envelope = sign_record(about, signer).envelope
        self._versions.annotate(found, override_record_tag(target), codec.dumps(envelope).decode())

    def _advise_override(self, user: str, target: str) -> str:
        """Return advice on how this user can override the refusal of the version."""
        located = self._configuration.policy
        if self._configuration.signer is None or located is None or not located.policy.overrides:
            return "Or promote a version that passed."
        if is_among(user, located.policy.overrides):
            return (
                f"Or override the decision: set tag {override_reason_tag(target)} to the reason, "
                "then set this alias again."
            )
        return (
            f"Or ask {' or '.join(located.policy.overrides)} to override the decision "
            "with a reason."
        )

    def _permit_override(self, user: str, key: str) -> str:
        """Return the target of a reason tag that the user is allowed to set and delete.

        If a user deletes the tag, the tag with the signed record remains.

        Raises:
            RefusedError: the user is not allowed to override, or the tag is of another kind.
        """
        located = self._configuration.policy
        if located is None:
            raise RefusedError(
                "no promotion policy names users who can override",
                remedy=f"Ask the operator of the server to set {POLICY} to a policy file.",
            )
        users = located.policy.overrides
        if not is_among(user, users):
            lets = f"only {', '.join(users)} to override" if users else "no user to override"
            raise RefusedError(
                f"{located.overrides_at} permits {lets}, and you are {user or 'not known'}"
            )
        if (match := _REASON.fullmatch(key)) is None:
            remedy = f"Write the reason of an override to tag {override_reason_tag('TARGET')}."
            raise RefusedError("users cannot change this tag", remedy=remedy)
        return match[1]


@contextmanager
def _prefix_refusals(done: str) -> Iterator[None]:
    """Convert errors of the block to RefusedError, with `done` before the message.

    So a change that could not be checked is refused, too.
    """
    try:
        yield
    except OnnxOpsError as error:
        raise RefusedError(f"{done}: {error.what}", why=error.why, remedy=error.remedy) from error


def is_guarded_tag(folded_key: str) -> bool:
    """Return whether the guard protects a tag.

    The guard protects the tags of decisions and overrides. It also protects the tags that identify
    a registered version: its release, variant and digest.
    """
    return folded_key.startswith((DECISION, OVERRIDE_TAG_PREFIX)) or folded_key in _IDENTITY


PREVIOUS = "previous"

_GUARDED = re.compile(rf"(champion|challenger|{PREVIOUS})-({NAME_PATTERN})")


@dataclass(frozen=True, slots=True, kw_only=True)
class GuardedAlias:
    """A guarded alias; `name` is its spelling in onnx-ops."""

    name: str
    role: str
    target: str


def guarded(alias: str) -> GuardedAlias | None:
    """Return the guarded alias that a name is a spelling of; None for any other alias.

    Names are compared without case and accents: a database can treat the name and the alias as
    equal although their spelling differs.
    """
    match = _GUARDED.fullmatch(folded(alias))
    return None if match is None else GuardedAlias(name=match[0], role=match[1], target=match[2])


def folded(text: str) -> str:
    """Return text without case, accents, compatibility forms and outer white space."""
    plain = unicodedata.normalize("NFKD", text)
    return "".join(c for c in plain if not unicodedata.combining(c)).casefold().strip()
