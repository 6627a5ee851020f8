"""Synchronize an endpoint's ledger with the registry, in both directions.

The module reads the desired state from the registry and verifies it. It writes the ledger's
aliases, refusals and entries to the registry.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from onnx_ops.domain.artifact import CUSTOM_OPS, Digest, digest_file, short_digest
from onnx_ops.domain.attestation import SignedOverride
from onnx_ops.domain.decision import DecisionRecord, SignedDecision
from onnx_ops.domain.endpoint import Deployment
from onnx_ops.domain.ledger import (
    ActionOutcome,
    AliasesWritten,
    LeaseRenewed,
    MetricsRecorded,
    NotificationSent,
    OverrideRecorded,
    ReleaseState,
    VersionRefused,
)
from onnx_ops.domain.release import VersionRecord
from onnx_ops.domain.rollout import format_alias
from onnx_ops.errors import (
    DigestMismatchError,
    MissingPackageError,
    NotFoundError,
    OnnxOpsError,
    RefusedError,
    ServiceUnavailableError,
    StorageError,
)
from onnx_ops.ports import Context
from onnx_ops.release.decision_policy import (
    REJECTED_REMEDY,
    PublishedRollback,
    find_recorded_override,
    find_rejection_reason,
    is_later,
    read_override,
    read_published_rollback,
    require_passing_decision,
    rolled_back_tag,
)
from onnx_ops.release.journal import Journal, find_corruption, list_sibling_states
from onnx_ops.scratch import Scratch

MAX_TEXT = 400
"""Maximum length of a reason in a tag, in characters."""
REGISTRY_OUTAGES = (ServiceUnavailableError, StorageError, MissingPackageError)
"""Errors after which a caller can continue without the registry.

The registry is silent or failed to process the request, storing a download failed, or the client
package of the registry is missing.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class DesiredState:
    """The deployment that should serve, if there is one, and the registry's aliases.

    `request` is the alias that requests the deployment, and its version. `refused` is a version
    that an alias points to but that is not allowed to serve. `registry_down` is the reason why the
    registry could not be read. `blocked_by` is the reason why an approved version does not start
    yet. `champion` is the version under the target's champion alias.
    """

    deployment: Deployment | None
    request: tuple[str, str] | None = None
    champion: str | None = None
    refused: VersionRefused | None = None
    registry_down: str = ""
    blocked_by: str = ""


def read_request(
    journal: Journal, read_aliases: Callable[[str], Mapping[str, str]]
) -> DesiredState:
    """Return the desired state that follows from the registry's aliases.

    `verify_request` adds the deployment that `request` names. Without the registry or its client,
    the endpoint continues with the ledger's state.

    Args:
        read_aliases: function that returns a model's versions by alias.
    """
    config = journal.config
    try:
        aliases = read_aliases(config.model)
        request = _find_request(journal, aliases)
    except REGISTRY_OUTAGES as error:
        return _continue_without_registry(journal.state, error)
    return DesiredState(
        deployment=None,
        request=request,
        champion=aliases.get(format_alias("champion", config.target)),
    )


def verify_request(journal: Journal, desired: DesiredState) -> DesiredState:
    """Return the desired state with the deployment that its request names.

    If the requested version must not serve yet or at all, the state has the reason instead. If the
    version needs a signed override from the registry, the override is recorded in the ledger.

    Raises:
        MissingKeyError: no key on this machine can sign the ledger entry of the override.
        LedgerConflictError: another process wrote an entry before that of the override.
    """
    if desired.request is None:
        return desired
    try:
        verified = _verify_version(journal, *desired.request)
    except REGISTRY_OUTAGES as error:
        return _continue_without_registry(journal.state, error)
    return replace(verified, request=desired.request, champion=desired.champion)


def _continue_without_registry(state: ReleaseState, error: OnnxOpsError) -> DesiredState:
    return DesiredState(
        deployment=state.roles.candidate or state.roles.stable, registry_down=str(error)
    )


def find_blocking_dependency(journal: Journal, version: VersionRecord) -> str:
    """Return why this endpoint cannot start the version yet; empty if it can.

    The version waits until the endpoints in the policy's `depends_on` have served its release with
    all traffic for `depends_on_soak`. If the version has already started, the result is empty.
    """
    roles, policy = journal.state.roles, journal.state.policy
    if version.manifest in [d.manifest for d in (roles.candidate, roles.stable) if d is not None]:
        return ""
    for name in policy.depends_on:
        if why := _not_serving(
            journal.context.ledger.state(name),
            version,
            policy.depends_on_soak,
            journal.context.clock.now(),
        ):
            return f"v{version.version} waits for endpoint {name}: {why}"
    return ""


def find_serving_champion(
    states: Iterable[ReleaseState], selected: str | None
) -> Deployment | None:
    """Return the champion among the versions that endpoints of one model and target serve.

    The alias only chooses one of several versions. Otherwise, a moved or deleted alias would decide
    what is compared and rechecked. The result is None if no endpoint serves a version.

    Args:
        selected: the version under the champion alias.
    """
    stable = [state.roles.stable for state in states]
    serving = {one.version: one for one in stable if one is not None}
    return serving.get(selected or "") or next(iter(serving.values()), None)


def require_approval(
    context: Context, record: VersionRecord, target: str, target_digest: Digest | None
) -> SignedDecision:
    """Return the version's signed decision for the target.

    Args:
        target_digest: digest of the target's current definition, which must equal the digest in the
            decision; None skips the comparison.

    Raises:
        RefusedError: the decision is missing, forged, about another model, version or target, or
            about an earlier definition of the target, or its verdict is not PASS.
        UserError: the file of a trusted key cannot be read, or contains another kind of key.
    """
    signed = require_passing_decision(record, target, context.verifier())
    if target_digest is not None and signed.record.target_digest != target_digest:
        raise RefusedError(
            f"target {target} has changed since this version was evaluated",
            where=f"{record.model}/{record.version}",
            remedy="Check out the commit in the version's tag `git.sha`, with the present target "
            "file. There, run `onnx-ops run FILE --until register`, and promote the version again. "
            f"Or run `onnx-ops promote {record.model}/{record.version} --target {target} "
            '--override --reason "…"`.',
        )
    return signed


def require_not_rejected(
    context: Context, state: ReleaseState, record: VersionRecord, target: str
) -> None:
    """Raise RefusedError if this endpoint rolled the release back.

    An override can allow the release nevertheless.
    """
    if (why := find_rejection_reason(state, record, target, context.verifier())) is not None:
        raise RefusedError(
            f"endpoint {state.endpoint} rolled this release back",
            where=f"{record.model}/{record.version}",
            why=why,
            remedy=REJECTED_REMEDY,
        )


def materialize(
    context: Context, record: VersionRecord, authority: SignedDecision | SignedOverride
) -> Deployment:
    """Return the version as a deployment, and verify its files.

    The files are in a folder from which an endpoint can load them.

    Args:
        authority: the decision or override that allows the version to serve.

    Raises:
        DigestMismatchError: the registry's content differs from what was registered.
        NotFoundError: the registry does not have the files.
        RefusedError: the model references weights outside its folder.
        ServiceUnavailableError: the registry does not answer.
    """
    location = fetch_files(context, record)
    about = authority.record
    decision = about if isinstance(about, DecisionRecord) else None
    libraries = (
        path for path in (Path(location) / CUSTOM_OPS / about.target).glob("*") if path.is_file()
    )
    return Deployment(
        name=f"v{record.version}",
        model=record.model,
        version=record.version,
        variant=record.variant,
        release=record.release,
        manifest=record.manifest,
        batchable=decision is not None and decision.batchable,
        threads=0 if decision is None else decision.threads,
        evidence=None if decision is None else decision.evidence,
        custom_ops=tuple(
            sorted(
                p.relative_to(location).as_posix()
                for p in libraries
                if digest_file(p) in about.custom_ops
            )
        ),
        execution=about.execution,
        authority=authority.envelope,
    )


def restore_files(context: Context, deployment: Deployment) -> str:
    """Return the location of a deployment's files; download them if they are lost or damaged.

    Raises:
        DigestMismatchError: the registry's content differs from what was deployed.
        NotFoundError: the registry does not have the version.
        RefusedError: the model references weights outside its folder.
        ServiceUnavailableError: the registry does not answer.
    """
    if (location := context.files.location(deployment.manifest)) is not None:
        return location
    record = context.registry().version(deployment.model, deployment.version)
    return fetch_files(context, replace(record, manifest=deployment.manifest))


def build_override_entry(signed: SignedOverride) -> OverrideRecorded:
    """Return the ledger entry of an override."""
    about = signed.record
    return OverrideRecorded(
        release=about.release,
        manifest=about.manifest,
        version=about.version,
        reason=about.reason,
        signed=signed.envelope,
    )


def revert_alias(journal: Journal, refused: VersionRefused) -> None:
    """Record a refusal, revert the alias, and publish the reason on the version.

    If the process is killed before the outcome is recorded, the next call completes the refusal.

    Raises:
        RefusedError: the registry does not permit the change of the alias.
    """
    if journal.state.open_refusal is None:
        journal.append(refused)
    model, registry = journal.config.model, journal.context.registry()
    # If a user has moved the alias in the meantime, the alias stays unchanged.
    if registry.aliases(model).get(refused.alias) == refused.version:
        try:
            if refused.restored_to is None:
                registry.delete_alias(model, refused.alias)
            else:
                registry.set_alias(model, refused.alias, refused.restored_to)
        except (NotFoundError, RefusedError):
            # The previous version was deleted, or the registry no longer permits it.
            if refused.restored_to is None:
                raise
            registry.delete_alias(model, refused.alias)
    conclude_refusal(journal, refused)


def conclude_refusal(journal: Journal, refused: VersionRefused) -> None:
    """Publish the reason of a refusal on the version, and record the outcome.

    The outcome records that the alias no longer points to the version.
    """
    with contextlib.suppress(NotFoundError):
        # The version no longer exists if a user has deleted it meanwhile.
        tags = {f"onnxops.rejected.{refused.alias}": refused.reason[:MAX_TEXT]}
        journal.context.registry().annotate(journal.config.model, refused.version, tags)
    journal.append(ActionOutcome(of=journal.state.refusal_sequence, ok=True))


def is_registry_outdated(journal: Journal, champion: str | None) -> bool:
    """Return whether the registry or the ledger must be written now.

    The registry can lack aliases or rejections of the ledger, and the ledger can lack the
    registry's champion.

    Args:
        champion: the version under the target's champion alias.
    """
    return (
        bool(journal.state.unpublished_rejections)
        or _may_write_aliases(journal)
        or _is_alias_unrecorded(journal, champion)
        or _is_alias_deleted(journal, champion)
    )


def write_pending_aliases(journal: Journal) -> str:
    """Write the pending aliases to the registry, and return them as text.

    The result is empty if there are none, or if they must wait. While the champion is pending, all
    pending aliases wait until every endpoint of the model and target serves it. If a user has moved
    the champion or challenger since the ledger set it, this alias is not changed. `read_request`
    treats it as a request.

    Raises:
        ServiceUnavailableError: the registry does not answer; the aliases remain pending.
        RefusedError: the registry refuses a change; the aliases remain pending.
    """
    if not _may_write_aliases(journal):
        return ""
    state, config = journal.state, journal.config
    pending = dict(state.pending_aliases)
    champion = format_alias("champion", config.target)
    moved: set[str] = set()
    registry = journal.context.registry()
    present = registry.aliases(config.model)
    # The champion alias is written last. While it points to the old version, the registry's server
    # allows that version to become `previous`.
    for name, version in sorted(pending.items(), key=lambda item: item[0] == champion):
        current = present.get(name)
        if version is None:
            if current is not None and not _is_request(journal, name, current):
                registry.delete_alias(config.model, name)
        elif name == champion and _is_moved_by_user(state, name, current):
            moved.add(name)
        elif current != version:
            try:
                registry.set_alias(config.model, name, version)
            except NotFoundError:  # The version was deleted, so the alias stays unchanged.
                pending[name] = current
    publish_entries(journal, pending)
    return ", ".join(
        f"{name} -> {version or 'none'}" for name, version in pending.items() if name not in moved
    )


def publish_rejections(journal: Journal) -> bool:
    """Write each unpublished rejection of this endpoint to a tag of its version.

    The tag has the reason. It is cleared on versions that are no longer rejected.

    Returns:
        Whether there were rejections to publish. Later calls publish the same rejections again,
        until `publish_entries` has recorded the publication.
    """
    state, registry = journal.state, journal.context.registry()
    now = datetime.fromtimestamp(journal.context.clock.now(), tz=UTC)
    for version in sorted(state.unpublished_rejections):
        why = state.find_rejection(state.known[version])
        text = "" if why is None else PublishedRollback(at=now, why=why[:MAX_TEXT]).format()
        with contextlib.suppress(NotFoundError):
            registry.annotate(
                journal.config.model, version, {rolled_back_tag(state.endpoint): text}
            )
    return bool(state.unpublished_rejections)


def record_alias(journal: Journal, champion: str | None) -> bool:
    """Record the registry's champion in the ledger if this endpoint serves it.

    Another process or a user set this alias. Without the entry, this endpoint would treat the alias
    as moved by a user. The alias would then take precedence over every later release.

    Returns:
        Whether the alias was recorded.
    """
    if not _is_alias_unrecorded(journal, champion):
        return False
    publish_entries(journal, {format_alias("champion", journal.config.target): champion})
    return True


def restore_alias(journal: Journal, champion: str | None) -> bool:
    """Set the champion alias again if a user has deleted it.

    Returns:
        Whether the alias was set. It stays deleted if the registry has no such version, has other
        files under its number, or does not permit the alias. A later release must not wait for this
        alias.

    Raises:
        ServiceUnavailableError: the registry does not answer.
    """
    serving, config = journal.state.roles.stable, journal.config
    if serving is None or not _is_alias_deleted(journal, champion):
        return False
    registry = journal.context.registry()
    try:
        if registry.version(config.model, serving.version).manifest != serving.manifest:
            return False
        registry.set_alias(config.model, format_alias("champion", config.target), serving.version)
    except (NotFoundError, RefusedError):
        return False
    return True


def publish_entries(journal: Journal, aliases: Mapping[str, str | None]) -> None:
    """Record that the registry shows these aliases, and publish new ledger entries.

    New entries are published before the aliases are recorded, so that they are published again if
    the process is killed in between. Readings, lease renewals and notifications are not published,
    since the ledger can get one per minute.
    """
    config = journal.config

    def publish(after: int) -> None:
        for entry in journal.context.ledger.read(config.endpoint, after=after):
            if not isinstance(entry.body, MetricsRecorded | NotificationSent | LeaseRenewed):
                journal.context.registry().mirror(entry, config.model)

    publish(max(journal.state.published_sequence - 1, 0))
    publish(journal.append(AliasesWritten(aliases=aliases)) - 1)


def is_alias_spent(journal: Journal, version: str) -> bool:
    """Return whether a challenger alias on this version is no longer a request.

    It is not a request if the version already serves, or if this endpoint rolled the version back.
    After a rollback, the alias will be deleted, unless the model and target have several endpoints.
    With one endpoint, an alias that a user sets again after its deletion is a request, which needs
    an override.
    """
    state, config = journal.state, journal.config
    if state.roles.stable is not None and version == state.roles.stable.version:
        return True
    deployment = state.known.get(version)
    verifier = journal.context.verifier()
    if (
        deployment is None
        or find_rejection_reason(state, deployment, config.target, verifier) is None
    ):
        return False
    is_pending = format_alias("challenger", config.target) in state.pending_aliases
    return is_pending or len(list_sibling_states(journal.context, config.model, config.target)) > 1


def _may_write_aliases(journal: Journal) -> bool:
    """Return whether pending aliases can be written now.

    If the champion alias is pending, every endpoint of the model and target must serve its version.
    """
    pending = journal.state.pending_aliases
    champion = pending.get(format_alias("champion", journal.config.target))
    return bool(pending) and _is_served_everywhere(journal, champion)


def _is_alias_unrecorded(journal: Journal, champion: str | None) -> bool:
    """Return whether the ledger lacks the registry's champion.

    The result is True only if the endpoint serves the champion. A pending alias that the registry
    already shows is recorded without waiting for other endpoints. Otherwise, the alias would seem
    to be moved by a user. It would be treated as a request as soon as the endpoint serves another
    version.
    """
    state, name = journal.state, format_alias("champion", journal.config.target)
    serving = state.roles.stable
    if champion is None or serving is None or champion != serving.version:
        return False
    is_pending = state.pending_aliases.get(name, champion) != champion
    return not is_pending and state.aliases.get(name) != champion


def _is_alias_deleted(journal: Journal, champion: str | None) -> bool:
    """Return whether the registry lacks the champion alias that the ledger has set.

    The result is True only if the endpoint serves that version, and no rollout is in progress. The
    judgement of a rollout must not wait for a registry that cannot be written.
    """
    state, name = journal.state, format_alias("champion", journal.config.target)
    serving = state.roles.stable
    return (
        champion is None
        and serving is not None
        and state.roles.candidate is None
        and name not in state.pending_aliases
        and state.aliases.get(name) == serving.version
    )


def _is_request(journal: Journal, name: str, version: str) -> bool:
    """Return whether an alias is a challenger that still requests its version."""
    return name == format_alias("challenger", journal.config.target) and not is_alias_spent(
        journal, version
    )


def _is_moved_by_user(state: ReleaseState, name: str, version: str | None) -> bool:
    """Return whether an alias points to a version that the ledger did not set for it."""
    return version not in (None, state.aliases.get(name), state.pending_aliases.get(name))


def _find_request(journal: Journal, aliases: Mapping[str, str]) -> tuple[str, str] | None:
    """Return the alias that requests a change, and its version.

    A champion alias that a user moved is treated as a challenger. An endpoint without any version
    starts with the champion if there is one.
    """
    state, target = journal.state, journal.config.target
    champion, challenger = format_alias("champion", target), format_alias("challenger", target)
    if state.roles.stable is None:
        return next(
            ((name, aliases[name]) for name in (champion, challenger) if name in aliases), None
        )
    if (
        _is_moved_by_user(state, champion, aliases.get(champion))
        and aliases[champion] != state.roles.stable.version
    ):
        return champion, aliases[champion]
    if challenger in aliases and not is_alias_spent(journal, aliases[challenger]):
        return challenger, aliases[challenger]
    return None


def _verify_version(journal: Journal, name: str, version: str) -> DesiredState:
    context, config = journal.context, journal.config
    try:
        record = context.registry().version(config.model, version)
        authority = _find_authority(journal, record)
        # A version can wait for its dependencies for days, so its files are downloaded only after
        # this check.
        if why := find_blocking_dependency(journal, record):
            return DesiredState(deployment=None, blocked_by=why)
        return DesiredState(deployment=materialize(context, record, authority))
    except (RefusedError, NotFoundError) as error:
        restored = (
            journal.state.aliases.get(name)
            if name == format_alias("champion", config.target)
            else None
        )
        refused = VersionRefused(
            alias=name, version=version, reason=str(error), restored_to=restored
        )
        return DesiredState(deployment=None, refused=refused)


def _find_authority(journal: Journal, record: VersionRecord) -> SignedDecision | SignedOverride:
    """Return the decision or override that allows the version to serve.

    If a signed override on the version is necessary, it is recorded in the ledger.

    Raises:
        RefusedError: no decision or override allows the version to serve.
    """
    context, config = journal.context, journal.config

    def find() -> SignedDecision | SignedOverride:
        require_not_rejected(context, journal.state, record, config.target)
        override = find_recorded_override(journal.state, record, config.target, context.verifier())
        return override or require_approval(context, record, config.target, config.target_digest)

    try:
        return find()
    except RefusedError:
        signed = read_override(record, config.target, context.verifier())
        if signed is None or signed.envelope.digest() in journal.state.used_overrides:
            raise
        published = read_published_rollback(record, config.endpoint)
        if published is not None and not is_later(signed, published):
            raise
        journal.append(build_override_entry(signed), actor=signed.record.by)
        return find()


def _not_serving(state: ReleaseState, version: VersionRecord, soak_s: float, now: float) -> str:
    """Return why an endpoint has not served a release long enough; empty if it has."""
    roles = state.roles
    if state.config is None:
        return "no pipeline has bound the endpoint"
    if (why := state.find_rejection(version)) is not None:
        return f"the endpoint rolled this release back ({why})"
    if roles.candidate is not None and roles.candidate.release == version.release:
        return "the endpoint's rollout of this release is in progress"
    if roles.stable is None or roles.stable.release != version.release:
        return "the endpoint does not serve this release"
    if now < state.stable_since + soak_s:
        return f"the endpoint has served this release for less than {soak_s:g} s"
    return ""


def fetch_files(context: Context, record: VersionRecord) -> str:
    """Return the location of the version's files; download them if they are missing.

    Downloaded files are verified against the version's manifest.

    Raises:
        DigestMismatchError: the registry's content differs from what was registered.
        NotFoundError: the registry does not have the files.
        RefusedError: the model references weights outside its folder.
        ServiceUnavailableError: the registry does not answer.
    """
    if (location := context.files.location(record.manifest)) is not None:
        return location
    with Scratch() as folder:
        manifest = context.registry().fetch(record, folder)
        if manifest.digest() != record.manifest:
            raise DigestMismatchError(
                f"the registry contains {short_digest(manifest.digest())}, "
                f"but {short_digest(record.manifest)} was registered",
                where=f"{record.model}/{record.version}",
                why="the artifact or the tags of the version were changed after the registration",
                remedy="Register a new release, or roll back to an intact version.",
            )
        return context.files.admit(folder, manifest)


def _is_served_everywhere(journal: Journal, champion: str | None) -> bool:
    """Return whether every endpoint of the model and target serves the champion.

    `champion` is the version that becomes the champion. If it is None, the result is true.
    """
    if champion is None:
        return True
    siblings = list_sibling_states(journal.context, journal.config.model, journal.config.target)
    return all(_serves(journal.context, sibling, champion) for sibling in siblings)


def _serves(context: Context, state: ReleaseState, version: str) -> bool:
    """Return whether this version is the stable version of the endpoint.

    If the ledger of the endpoint is damaged, the endpoint is observed. The result is then whether
    the endpoint serves only this version.
    """
    if state.config is None or find_corruption(context, state.endpoint) is None:
        return state.roles.stable is not None and state.roles.stable.version == version
    observed = context.provider(state.config.provider).observe(state.config)
    if observed is None:
        return False
    return {
        one.version for one in observed.deployments if observed.split.weights.get(one.name)
    } == {version}
