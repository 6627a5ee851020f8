"""Asks for a version to serve a target: the challenger alias, after verification."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from onnx_ops import codec
from onnx_ops.attestation import sign
from onnx_ops.domain.attestation import LONGEST_REASON, SignedOverride, reason_tag, record_tag
from onnx_ops.domain.endpoint import EndpointConfig
from onnx_ops.domain.ledger import Configured, Mirrored, Override
from onnx_ops.domain.release import VersionRecord
from onnx_ops.domain.rollout import alias
from onnx_ops.domain.rollout_policy import RolloutPolicy
from onnx_ops.errors import RefusedError, UserError
from onnx_ops.ports import Ports
from onnx_ops.release.abandon import leave, moved_from, refusal
from onnx_ops.release.approve import approve
from onnx_ops.release.decided import override_of, standing_override
from onnx_ops.release.delete import finish_deletion
from onnx_ops.release.desired import entry_of, refuse_rejected
from onnx_ops.release.journal import Journal, looking_again, siblings, stream


@dataclass(frozen=True, slots=True, kw_only=True)
class Promotion:
    """What a promotion did. `endpoints` are those that will follow."""

    model: str
    version: str
    target: str
    did: str
    endpoints: tuple[str, ...]


def promote(
    ports: Ports,
    model: str,
    version: str,
    target: str,
    *,
    actor: str = "",
    reason: str = "",
    override: bool = False,
    expects: tuple[str, ...] = (),
) -> Promotion:
    """Make a version the challenger of a target; the champion at once if no endpoint serves the target.

    Args:
        ports: the outside world.
        model: registered model.
        version: its version.
        target: the target it should serve.
        actor: who is answerable.
        reason: why, recorded; an override needs one.
        override: serve it whatever its gates or its history say.
        expects: endpoints that are about to be bound, so that the champion is left to their reconciler.

    Raises:
        RefusedError: its decision does not allow it, or it was rolled back; or nobody here can sign an override.
        NotFoundError: no such version.
        UserError: an override without a reason.
    """
    record = ports.registry().version(model, version)
    bound = siblings(ports, model, target)
    if override:
        _override(ports, record, target, tuple(s.endpoint for s in bound), reason, actor)
    else:
        for state in bound:
            refuse_rejected(ports, state, record, target)
        digest = next((s.config.target_digest for s in bound if s.config is not None), None)
        approve(ports, record, target, digest)
    if not bound and not expects:
        return _crown(ports, record, target, actor)
    names = tuple(s.endpoint for s in bound) or expects
    if bound and all(s.roles.stable is not None and s.roles.stable.version == version for s in bound):
        return Promotion(model=model, version=version, target=target, did="serves already", endpoints=names)
    ports.registry().set_alias(model, alias("challenger", target), version)
    if reason:
        ports.registry().annotate(model, version, {f"promoted.{target}": reason[:400]})
    return Promotion(model=model, version=version, target=target, did="challenger", endpoints=names)


def configure(
    ports: Ports, config: EndpointConfig, policy: RolloutPolicy, *, actor: str = "", abandon: str = ""
) -> bool:
    """Bind an endpoint to what its pipeline says; says whether that changed anything.

    Args:
        ports: the outside world.
        config: what it is bound to.
        policy: of its rollouts.
        actor: who is answerable.
        abandon: why what runs elsewhere under this name may be left behind; it is recorded.

    Raises:
        UserError: the endpoint serves another model or target, or cannot be changed so while it exists.
        RefusedError: it runs elsewhere, and nothing says that it may be left behind.
        ConflictError: somebody changes right now what is to be left behind.
    """

    def bind() -> bool:
        journal = Journal.open(ports, config.endpoint, actor=actor)
        if journal.state.deleting:
            finish_deletion(journal)
        bound = journal.state.config
        if bound is not None and (bound.model, bound.target) != (config.model, config.target):
            raise UserError(
                f"endpoint {config.endpoint} serves {bound.model} on {bound.target}",
                where=f"pipeline {config.pipeline}",
                remedy="An endpoint binds one model and one target; give this deployment another name.",
            )
        if (orphan := moved_from(ports, journal.state, config)) is not None:
            if not abandon:
                raise refusal(ports, [orphan])
            leave(journal, reason=abandon)
        if bound == config and journal.state.policy == policy:
            return False
        journal.append(Configured(config=config, policy=policy))
        return True

    return looking_again(bind)


def _override(
    ports: Ports, record: VersionRecord, target: str, endpoints: tuple[str, ...], reason: str, actor: str
) -> None:
    """The registry comes first: where its server knows who may override, the ledger is not written for who may not."""
    if not reason.strip():
        raise UserError("an override needs a reason", remedy="Say why with --reason; it is recorded.")
    registry, verifier, reason = ports.registry(), ports.verifier(), reason[:LONGEST_REASON]
    before = standing_override(record, target, verifier)
    registry.annotate(record.model, record.version, {reason_tag(target): reason})
    signed = standing_override(registry.version(record.model, record.version), target, verifier)
    if signed is None or signed == before:  # the registry's server signs none
        signed = _signed(ports, record, target, reason, actor)
        registry.annotate(record.model, record.version, {record_tag(target): codec.dumps(signed.envelope).decode()})
    for endpoint in endpoints:
        looking_again(partial(_note, ports, endpoint, entry_of(signed), actor))


def _signed(ports: Ports, record: VersionRecord, target: str, reason: str, actor: str) -> SignedOverride:
    signer = ports.signer()
    if signer is None:
        raise RefusedError(
            "nobody here can sign the override",
            where=f"{record.model}/{record.version}",
            why="it counts only with the signature of a trusted key",
            remedy="Give it where a signing key is, or as a tag in MLflow if its server signs overrides.",
        )
    by, now = actor or ports.host.actor(), ports.clock.now()
    return sign(override_of(record, target, ports.verifier(), reason=reason, by=by, now=now), signer)


def _note(ports: Ports, endpoint: str, entry: Override, actor: str) -> None:
    Journal.open(ports, endpoint, actor=actor).append(entry)


def _crown(ports: Ports, record: VersionRecord, target: str, actor: str) -> Promotion:
    """Without endpoints there is no rollout to wait for."""
    registry = ports.registry()
    champion, previous = alias("champion", target), alias("previous", target)
    found = registry.aliases(record.model)
    current, before = found.get(champion), found.get(previous)
    if current != record.version:
        if current is not None:
            registry.set_alias(record.model, previous, current)
        registry.set_alias(record.model, champion, record.version)
        before = current
    aliases = {champion: record.version, previous: before}

    def note() -> None:
        journal = Journal.open(ports, stream(record.model, target), actor=actor)
        if journal.state.aliases.get(champion) != record.version:
            journal.append(Mirrored(aliases=aliases))

    looking_again(note)
    return Promotion(model=record.model, version=record.version, target=target, did="champion", endpoints=())
