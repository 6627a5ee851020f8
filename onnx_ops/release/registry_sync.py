"""May this version serve this target? Asked before every alias move and before every deploy.

Rollouts over several endpoints, one after the other: what an endpoint waits for before it begins.

What the registry asks of an endpoint, after verification.

Makes the registry say what the ledger says.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
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
    RefusedError,
    ServiceUnavailableError,
)
from onnx_ops.ports import Ports
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


def require_approval(ports: Ports, record: VersionRecord, target: str, target_digest: Digest | None) -> SignedDecision:
    """The version's signed decision for the target.

    Refuses a version whose decision is missing, forged, about something else, or not a pass.

    Args:
        record: the version as the registry tells it.
        target: the target it should serve.
        target_digest: the target's definition now; None skips the comparison where it is not known.

    Raises:
        RefusedError: with the reason.
    """
    signed = require_passing_decision(record, target, ports.verifier())
    if target_digest is not None and signed.record.target_digest != target_digest:
        raise RefusedError(
            f"target {target} was defined otherwise when this version was judged",
            where=f"{record.model}/{record.version}",
            remedy="Run the pipeline again, so that the evidence is about the target as it is now.",
        )
    return signed


def materialize(ports: Ports, record: VersionRecord, authority: SignedDecision | SignedOverride) -> Deployment:
    """The version's files, verified against its manifest, where an endpoint can load them.

    Args:
        record: the version.
        authority: what lets it serve.

    Raises:
        DigestMismatchError: what the registry holds is not what was registered.
        ServiceUnavailableError: the registry does not answer.
    """
    location = ports.files.location(record.manifest) or _download(ports, record)
    about = authority.record
    decision = about if isinstance(about, DecisionRecord) else None
    return Deployment(
        name=f"v{record.version}",
        model=record.model,
        version=record.version,
        variant=record.variant,
        release=record.release,
        manifest=record.manifest,
        location=location,
        batchable=decision is not None and decision.batchable,
        evidence=None if decision is None else decision.evidence,
        custom_ops=_libraries(Path(location), about.target, about.custom_ops),
        execution=about.execution,
        authority=authority.envelope,
    )


def restore_files(ports: Ports, deployment: Deployment) -> None:
    """Bring the files of a deployment back where an endpoint loads them, if they are lost or damaged.

    Raises:
        DigestMismatchError: what the registry holds is not what was deployed.
        NotFoundError, ServiceUnavailableError: the registry does not have it, or does not answer.
    """
    if ports.files.location(deployment.manifest) is None:
        record = ports.registry().version(deployment.model, deployment.version)
        _download(ports, replace(record, manifest=deployment.manifest))


def _download(ports: Ports, record: VersionRecord) -> str:
    """Fetch the version's files, verify them against its manifest, and return where they stand."""
    with Scratch() as folder:
        manifest = ports.registry().fetch(record, folder)
        if manifest.digest() != record.manifest:
            raise DigestMismatchError(
                f"the registry holds {short_digest(manifest.digest())}, "
                f"but {short_digest(record.manifest)} was registered",
                where=f"{record.model}/{record.version}",
                remedy="Its artifact was changed after it was judged; run the pipeline again.",
            )
        return ports.files.admit(Path(folder), manifest)


def _libraries(folder: Path, target: str, declared: tuple[Digest, ...]) -> tuple[str, ...]:
    """Those of a version's files that are libraries of operators which the target declares."""
    found = [path for path in (folder / CUSTOM_OPS / target).glob("*") if path.is_file()]
    return tuple(sorted(path.relative_to(folder).as_posix() for path in found if digest_file(path) in declared))


def find_blocking_dependency(journal: Journal, wanted: VersionRecord) -> str:
    """Why this endpoint does not begin with a version yet; empty if it may, or has begun.

    It waits until the endpoints that its policy names serve the version's release with all of their traffic, and have
    done so for as long as the policy says.
    """
    roles, policy = journal.state.roles, journal.state.policy
    if wanted.manifest in [d.manifest for d in (roles.candidate, roles.stable) if d is not None]:
        return ""
    ledger, now = journal.ports.ledger, journal.ports.clock.now()
    for name in policy.after:
        if why := _not_yet(ledger.state(name), wanted, policy.soak, now):
            return f"v{wanted.version} waits for endpoint {name}: {why}"
    return ""


def _not_yet(state: ReleaseState, wanted: VersionRecord, soak_s: float, now: float) -> str:
    roles = state.roles
    if state.config is None:
        return "no pipeline has bound it"
    if (why := state.find_rejection(wanted)) is not None:
        return f"it rolled this release back ({why})"
    if roles.candidate is not None and roles.candidate.release == wanted.release:
        return "its own rollout is in progress"
    if roles.stable is None or roles.stable.release != wanted.release:
        return "it does not serve this release"
    # Zero once the previous version is gone, which the check of the pipeline file puts after the soak.
    left = roles.finished_at + soak_s - now
    return f"it has served this release for less than {soak_s:g} s" if roles.finished_at and left > 0 else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class DesiredState:
    """`refused` tells what the registry asked for and may not have; `unreachable` why it could not be asked.

    `champion` is the version under the target's champion alias; `waits` is why a version that may serve does not begin.
    """

    wanted: Deployment | None
    champion: str | None = None
    refused: VersionRefused | None = None
    unreachable: str = ""
    waits: str = ""


def read_desired_state(journal: Journal) -> DesiredState:
    """What should serve. While the registry does not answer, or its client is not installed, the endpoint keeps its
    course.

    An override that a person gave in the registry, and that its server signed, is written into the ledger when it is
    first needed.
    """
    ports, state, config = journal.ports, journal.state, journal.config
    try:
        found = ports.registry().aliases(config.model)
        asked = _asked(journal, found)
        wish = DesiredState(wanted=None) if asked is None else _verified(journal, *asked)
        return replace(wish, champion=found.get(format_alias("champion", config.target)))
    except (ServiceUnavailableError, MissingPackageError) as error:
        return DesiredState(wanted=state.roles.candidate or state.roles.stable, unreachable=str(error))


def require_not_rejected(ports: Ports, state: ReleaseState, record: VersionRecord, target: str) -> None:
    """Raises RefusedError if this endpoint rolled the version's release back and nobody overrode that."""
    if (why := find_rejection_reason(state, record, target, ports.verifier())) is not None:
        raise RefusedError(
            f"endpoint {state.endpoint} rolled this release back, and it does not come back by itself",
            where=f"{record.model}/{record.version}",
            why=why,
            remedy=REJECTED_REMEDY,
        )


def build_override_entry(signed: SignedOverride) -> OverrideRecorded:
    """What the ledger says of an override."""
    about = signed.record
    return OverrideRecorded(
        release=about.release,
        manifest=about.manifest,
        version=about.version,
        reason=about.reason,
        signed=signed.envelope,
    )


def is_alias_spent(journal: Journal, version: str) -> bool:
    """Whether a challenger alias on this version asks for nothing any more.

    Its version serves already; or it was rolled back here, and the alias is about to be deleted or is still needed
    by another endpoint of the same model and target.
    """
    state, config = journal.state, journal.config
    if state.roles.stable is not None and version == state.roles.stable.version:
        return True
    deployment = state.known.get(version)
    if deployment is None or find_rejection_reason(state, deployment, config.target, journal.ports.verifier()) is None:
        return False
    owed = format_alias("challenger", config.target) in state.pending_aliases
    return owed or len(list_sibling_states(journal.ports, config.model, config.target)) > 1


def is_moved_by_user(state: ReleaseState, name: str, found: str | None) -> bool:
    """Whether an alias is neither what the ledger last wrote nor what it still owes."""
    return found not in (None, state.aliases.get(name), state.pending_aliases.get(name))


def _asked(journal: Journal, found: Mapping[str, str]) -> tuple[str, str] | None:
    """The alias that asks for a change, and its version.

    A champion alias that a person moved counts as a challenger. An endpoint without any version starts with the
    champion, if the model has one on this target.
    """
    state, target = journal.state, journal.config.target
    champion, challenger = format_alias("champion", target), format_alias("challenger", target)
    if state.roles.stable is None:
        return next(((name, found[name]) for name in (champion, challenger) if name in found), None)
    if is_moved_by_user(state, champion, found.get(champion)) and found[champion] != state.roles.stable.version:
        return champion, found[champion]
    if challenger in found and not is_alias_spent(journal, found[challenger]):
        return challenger, found[challenger]
    return None


def _verified(journal: Journal, name: str, version: str) -> DesiredState:
    ports, state, config = journal.ports, journal.state, journal.config
    try:
        record = ports.registry().version(config.model, version)
        authority = _authority(journal, record)
        # Before its files are fetched: it may wait for days.
        if why := find_blocking_dependency(journal, record):
            return DesiredState(wanted=None, waits=why)
        return DesiredState(wanted=materialize(ports, record, authority))
    except (RefusedError, NotFoundError) as error:
        champion = format_alias("champion", config.target)
        restored = state.aliases.get(champion) if name == champion else None
        refused = VersionRefused(alias=name, version=version, reason=str(error), restored_to=restored)
        return DesiredState(wanted=None, refused=refused)


def _authority(journal: Journal, record: VersionRecord) -> SignedDecision | SignedOverride:
    """What lets the version serve.

    Raises:
        RefusedError: the version may not serve.
    """
    try:
        return _approved(journal, record)
    except RefusedError:
        if not _take_override(journal, record):
            raise
        return _approved(journal, record)


def _approved(journal: Journal, record: VersionRecord) -> SignedDecision | SignedOverride:
    ports, state, config = journal.ports, journal.state, journal.config
    require_not_rejected(ports, state, record, config.target)
    if (override := find_recorded_override(state, record, config.target, ports.verifier())) is not None:
        return override
    return require_approval(ports, record, config.target, config.target_digest)


def _take_override(journal: Journal, record: VersionRecord) -> bool:
    """Write the override that stands signed on the version into the ledger, unless that was done before."""
    signed = read_override(record, journal.config.target, journal.ports.verifier())
    if signed is None or signed.envelope.digest() in journal.state.used_overrides:
        return False
    told = read_published_rollback(record, journal.state.endpoint)
    if told is not None and not is_later(signed, told):
        return False
    journal.append(build_override_entry(signed), actor=signed.record.by)
    return True


def revert_alias(journal: Journal, refused: VersionRefused) -> None:
    """Write a refusal down, restore the alias that asked for a version that may not serve, and say why on the version.

    A kill in between leaves a refusal without an outcome: the next call goes on with that one.
    """
    begun = journal.state.open_refusal
    if begun is None:
        journal.append(refused)
    config = journal.config
    registry = journal.ports.registry()
    if registry.aliases(config.model).get(refused.alias) == refused.version:  # a person may have been faster
        _restore(journal, refused)
    conclude_refusal(journal, refused)


def conclude_refusal(journal: Journal, refused: VersionRefused) -> None:
    """Say on the version why it was refused, and in the ledger that the alias no longer asks for it."""
    with contextlib.suppress(NotFoundError):  # the version may be gone; then there is nothing to say it on
        said = {f"onnxops.rejected.{refused.alias}": refused.reason[:400]}
        journal.ports.registry().annotate(journal.config.model, refused.version, said)
    journal.append(ActionOutcome(of=journal.state.refusal_sequence, ok=True))


def _restore(journal: Journal, refused: VersionRefused) -> None:
    model, registry = journal.config.model, journal.ports.registry()
    if refused.restored_to is not None:
        with contextlib.suppress(NotFoundError, RefusedError):  # what stood there before is gone too, or counts no more
            registry.set_alias(model, refused.alias, refused.restored_to)
            return
    registry.delete_alias(model, refused.alias)


def write_pending_aliases(journal: Journal) -> str:
    """Write the aliases that the ledger owes the registry; returns what was written, or nothing if it must wait.

    A champion is written once every endpoint of the model and target serves it. An alias that a person moved after
    the entry that owes it is left alone: `read_desired_state` takes it as a wish.

    Raises:
        ServiceUnavailableError, RefusedError: the registry does not answer, or refuses; what is owed stays owed.
    """
    state, config = journal.state, journal.config
    owed = dict(state.pending_aliases)
    champion = format_alias("champion", config.target)
    if not owed or not _agreed(journal, owed.get(champion)):
        return ""
    registry = journal.ports.registry()
    found = registry.aliases(config.model)
    # The champion last: while it is still the old one, the registry's server lets that become `previous`.
    for name, version in sorted(owed.items(), key=lambda item: item[0] == champion):
        if version is None:
            # A challenger that a person has set meanwhile is a wish.
            if name in found and (
                name != format_alias("challenger", config.target) or is_alias_spent(journal, found[name])
            ):
                registry.delete_alias(config.model, name)
        elif found.get(name) != version and not (name == champion and is_moved_by_user(state, name, found.get(name))):
            try:
                registry.set_alias(config.model, name, version)
            except NotFoundError:  # somebody deleted that version: the registry can say no more than it does
                owed[name] = found.get(name)
    publish_entries(journal, owed)
    return ", ".join(f"{name} -> {version or 'none'}" for name, version in owed.items())


def publish_rejections(journal: Journal) -> bool:
    """Say on versions that were rolled back here why they do not come back by themselves, and no more on those that
    may. Until that is written down it is done again. Says whether there was anything to tell."""
    state, model, registry = journal.state, journal.config.model, journal.ports.registry()
    now = datetime.fromtimestamp(journal.ports.clock.now(), tz=UTC)
    for version in sorted(state.unpublished_rejections):
        why = state.find_rejection(state.known[version])
        text = "" if why is None else PublishedRollback(at=now, why=why[:400]).text()
        with contextlib.suppress(NotFoundError):
            registry.annotate(model, version, {rolled_back_tag(state.endpoint): text})
    return bool(state.unpublished_rejections)


def record_alias(journal: Journal, champion: str | None) -> bool:
    """Write down that the registry's champion is what serves here, although somebody else made it so.

    Without that, the alias would look moved by a person for ever, and outrank every later release.
    """
    state, name = journal.state, format_alias("champion", journal.config.target)
    serving = state.roles.stable
    if champion is None or serving is None or champion != serving.version:
        return False
    if name in state.pending_aliases or state.aliases.get(name) == champion:
        return False
    publish_entries(journal, {name: champion})
    return True


def publish_entries(journal: Journal, aliases: Mapping[str, str | None]) -> None:
    """Write down that the registry shows these aliases, and show it the ledger's entries, for people to read.

    What came after the last such note is shown before the next one is written: killed in between, it is shown again.
    Readings and renewals stay out, as there may be one a minute, and so does who was told.
    """
    config, shown = journal.config, max(journal.state.published_sequence - 1, 0)

    def show(after: int) -> None:
        for entry in journal.ports.ledger.read(config.endpoint, after=after):
            if not isinstance(entry.body, MetricsRecorded | NotificationSent | LeaseRenewed):
                journal.ports.registry().mirror(entry, config.model)

    show(shown)
    show(journal.append(AliasesWritten(aliases=aliases)) - 1)


def _agreed(journal: Journal, champion: str | None) -> bool:
    """Whether every endpoint of this model and target serves the version that would become champion."""
    if champion is None:
        return True
    states = list_sibling_states(journal.ports, journal.config.model, journal.config.target)
    return all(_serves(journal.ports, state, champion) for state in states)


def _serves(ports: Ports, state: ReleaseState, version: str) -> bool:
    """Whether the endpoint serves this version to all. Where its ledger is damaged, it is asked itself."""
    if state.config is None or find_corruption(ports, state.endpoint) is None:
        return state.roles.stable is not None and state.roles.stable.version == version
    actual = ports.provider(state.config.provider).observe(state.config)
    if actual is None:
        return False
    return {one.version for one in actual.deployments if actual.split.weights.get(one.name)} == {version}
