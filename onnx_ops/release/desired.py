"""What the registry asks of an endpoint, after verification."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from onnx_ops.domain.attestation import SignedOverride
from onnx_ops.domain.decision import SignedDecision
from onnx_ops.domain.endpoint import Deployment
from onnx_ops.domain.ledger import Override, RefusedVersion, ReleaseState
from onnx_ops.domain.release import VersionRecord
from onnx_ops.domain.rollout import alias
from onnx_ops.errors import MissingPackageError, NotFoundError, RefusedError, ServiceUnavailableError
from onnx_ops.ports import Ports
from onnx_ops.release.approve import approve, materialise
from onnx_ops.release.decided import (
    COME_BACK,
    is_later,
    standing_override,
    taken_override,
    told_rollback,
    why_rejected,
)
from onnx_ops.release.journal import Journal, siblings
from onnx_ops.release.staging import waits_for


@dataclass(frozen=True, slots=True, kw_only=True)
class Desired:
    """`refused` tells what the registry asked for and may not have; `unreachable` why it could not be asked.

    `champion` is the version under the target's champion alias; `waits` is why a version that may serve does not begin.
    """

    wanted: Deployment | None
    champion: str | None = None
    refused: RefusedVersion | None = None
    unreachable: str = ""
    waits: str = ""


def desired(journal: Journal) -> Desired:
    """What should serve. While the registry does not answer, or its client is not installed, the endpoint keeps its
    course.

    An override that a person gave in the registry, and that its server signed, is written into the ledger when it is
    first needed.
    """
    ports, state, config = journal.ports, journal.state, journal.config
    try:
        found = ports.registry().aliases(config.model)
        asked = _asked(journal, found)
        wish = Desired(wanted=None) if asked is None else _verified(journal, *asked)
        return replace(wish, champion=found.get(alias("champion", config.target)))
    except (ServiceUnavailableError, MissingPackageError) as error:
        return Desired(wanted=state.roles.candidate or state.roles.stable, unreachable=str(error))


def refuse_rejected(ports: Ports, state: ReleaseState, record: VersionRecord, target: str) -> None:
    """Raises RefusedError if this endpoint rolled the version's release back and nobody overrode that."""
    if (why := why_rejected(state, record, target, ports.verifier())) is not None:
        raise RefusedError(
            f"endpoint {state.endpoint} rolled this release back, and it does not come back by itself",
            where=f"{record.model}/{record.version}",
            why=why,
            remedy=COME_BACK,
        )


def entry_of(signed: SignedOverride) -> Override:
    """What the ledger says of an override."""
    about = signed.record
    return Override(
        release=about.release,
        manifest=about.manifest,
        version=about.version,
        reason=about.reason,
        signed=signed.envelope,
    )


def spent(journal: Journal, version: str) -> bool:
    """Whether a challenger alias on this version asks for nothing any more.

    Its version serves already; or it was rolled back here, and the alias is about to be deleted or is still needed
    by another endpoint of the same model and target.
    """
    state, config = journal.state, journal.config
    if state.roles.stable is not None and version == state.roles.stable.version:
        return True
    deployment = state.known.get(version)
    if deployment is None or why_rejected(state, deployment, config.target, journal.ports.verifier()) is None:
        return False
    owed = alias("challenger", config.target) in state.pending_aliases
    return owed or len(siblings(journal.ports, config.model, config.target)) > 1


def moved_by_a_person(state: ReleaseState, name: str, found: str | None) -> bool:
    """Whether an alias is neither what the ledger last wrote nor what it still owes."""
    return found not in (None, state.aliases.get(name), state.pending_aliases.get(name))


def _asked(journal: Journal, found: Mapping[str, str]) -> tuple[str, str] | None:
    """The alias that asks for a change, and its version.

    A champion alias that a person moved counts as a challenger. An endpoint without any version starts with the
    champion, if the model has one on this target.
    """
    state, target = journal.state, journal.config.target
    champion, challenger = alias("champion", target), alias("challenger", target)
    if state.roles.stable is None:
        return next(((name, found[name]) for name in (champion, challenger) if name in found), None)
    if moved_by_a_person(state, champion, found.get(champion)) and found[champion] != state.roles.stable.version:
        return champion, found[champion]
    if challenger in found and not spent(journal, found[challenger]):
        return challenger, found[challenger]
    return None


def _verified(journal: Journal, name: str, version: str) -> Desired:
    ports, state, config = journal.ports, journal.state, journal.config
    try:
        record = ports.registry().version(config.model, version)
        authority = _authority(journal, record)
        # Before its files are fetched: it may wait for days.
        if why := waits_for(journal, record):
            return Desired(wanted=None, waits=why)
        return Desired(wanted=materialise(ports, record, authority))
    except (RefusedError, NotFoundError) as error:
        champion = alias("champion", config.target)
        restored = state.aliases.get(champion) if name == champion else None
        refused = RefusedVersion(alias=name, version=version, reason=str(error), restored_to=restored)
        return Desired(wanted=None, refused=refused)


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
    refuse_rejected(ports, state, record, config.target)
    if (override := taken_override(state, record, config.target, ports.verifier())) is not None:
        return override
    return approve(ports, record, config.target, config.target_digest)


def _take_override(journal: Journal, record: VersionRecord) -> bool:
    """Write the override that stands signed on the version into the ledger, unless that was done before."""
    signed = standing_override(record, journal.config.target, journal.ports.verifier())
    if signed is None or signed.envelope.digest() in journal.state.overrides_taken:
        return False
    told = told_rollback(record, journal.state.endpoint)
    if told is not None and not is_later(signed, told):
        return False
    journal.append(entry_of(signed), actor=signed.record.by)
    return True
