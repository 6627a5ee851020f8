"""Endpoints that a changed pipeline file would leave behind: running, paid for, and managed by nobody.

Takes an endpoint out of service for good; its ledger stays.

Asks for a version to serve a target: the challenger alias, after verification.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from onnx_ops import codec
from onnx_ops.attestation import sign_record
from onnx_ops.domain.attestation import MAX_REASON_LENGTH, SignedOverride, override_reason_tag, override_record_tag
from onnx_ops.domain.endpoint import EndpointConfig
from onnx_ops.domain.ledger import (
    AliasesWritten,
    EndpointAbandoned,
    EndpointBound,
    EndpointDeleted,
    OverrideRecorded,
    ReleaseState,
)
from onnx_ops.domain.release import VersionRecord
from onnx_ops.domain.rollout import format_alias
from onnx_ops.domain.rollout_policy import RolloutPolicy
from onnx_ops.errors import LedgerConflictError, OnnxOpsError, RefusedError, StillPendingError, UserError
from onnx_ops.ports import Ports
from onnx_ops.release.decision_policy import build_override, read_override
from onnx_ops.release.journal import (
    Journal,
    format_stream_name,
    list_bound_endpoints,
    list_sibling_states,
    read_readable_state,
)
from onnx_ops.release.registry_sync import build_override_entry, require_approval, require_not_rejected
from onnx_ops.release.retry import COMMAND_TIMEOUT_S, retry_on_conflict, run_concurrently


def require_no_orphans(ports: Ports, pipeline: str, configs: Sequence[EndpointConfig], *, abandon: str = "") -> None:
    """Look at what a pipeline's endpoints are bound to, before anything is done.

    Args:
        ports: the outside world.
        pipeline: its name.
        configs: every endpoint that its file names.
        abandon: why endpoints may be left behind.

    Raises:
        RefusedError: an endpoint would be left behind, and nobody says that it may.
        UserError: an endpoint that exists cannot be changed as the file says.
    """
    orphans = [state.config for state in dropped(ports, pipeline, configs) if state.config is not None]
    for config in configs:
        orphans += [
            bound for bound in (moved_from(ports, read_readable_state(ports, config.endpoint), config),) if bound
        ]
    if orphans and not abandon:
        raise refusal(ports, orphans)


def dropped(ports: Ports, pipeline: str, configs: Sequence[EndpointConfig]) -> tuple[ReleaseState, ...]:
    """Endpoints that the pipeline has bound, that serve, and that its file names no longer."""
    named = {config.endpoint for config in configs}
    states = (read_readable_state(ports, name) for name in list_bound_endpoints(ports) if name not in named)
    return tuple(s for s in states if s.config is not None and s.config.pipeline == pipeline and _exists(s))


def moved_from(ports: Ports, state: ReleaseState, config: EndpointConfig) -> EndpointConfig | None:
    """What an endpoint that serves is bound to, if `config` is another one: at another provider, or another place.

    Raises:
        UserError: an endpoint that exists cannot be changed so.
    """
    bound = state.config
    if bound is None or not _exists(state) or (bound.provider, bound.settings) == (config.provider, config.settings):
        return None
    provider = ports.provider(bound.provider)
    if bound.provider != config.provider or provider.place(bound) != provider.place(config):
        return bound
    provider.validate_change(bound, config)
    return None


def refusal(ports: Ports, orphans: Sequence[EndpointConfig]) -> RefusedError:
    """Says what would stay behind, as it is seen now."""
    names = [config.endpoint for config in orphans]
    return RefusedError(
        f"{', '.join(names)} would be left behind, and nobody would manage or delete it",
        where=f"pipeline {orphans[0].pipeline}",
        why="; ".join(_seen(ports, config) for config in orphans),
        remedy=f"Take the change back; or delete first what is there, with `onnx-ops delete {names[0]}`; or leave it "
        "there with `onnx-ops run FILE --abandon REASON`: it then runs, and is paid for, until somebody deletes it at "
        "its provider.",
    )


def abandon_dropped(
    ports: Ports, pipeline: str, configs: Sequence[EndpointConfig], *, reason: str, actor: str = ""
) -> tuple[str, ...]:
    """Unbind the endpoints that the file names no longer, and record why; returns their names."""
    names = tuple(state.endpoint for state in dropped(ports, pipeline, configs))
    for name in names:
        retry_on_conflict(partial(_leave, ports, name, reason, actor))
    return names


def _leave(ports: Ports, endpoint: str, reason: str, actor: str) -> None:
    leave(Journal.open(ports, endpoint, actor=actor), reason=reason)


def leave(journal: Journal, *, reason: str) -> None:
    """Unbind an endpoint and record why; nothing is done to it.

    Raises:
        ConflictError: somebody is changing it right now.
    """
    journal.require_idle()
    config = journal.config
    place = journal.ports.provider(config.provider).place(config)
    journal.append(EndpointAbandoned(reason=reason, place=place))


def _exists(state: ReleaseState) -> bool:
    """Whether anything was ever begun there, and is to stay."""
    if state.deleting:
        return False
    return state.roles.stable is not None or state.open_intent is not None or state.pending_rollback is not None


def _seen(ports: Ports, config: EndpointConfig) -> str:
    """Where an endpoint stands, and what it serves there."""
    provider = ports.provider(config.provider)
    place = provider.place(config)
    try:
        actual = provider.observe(config)
    except OnnxOpsError as error:
        return f"{place}: what it serves cannot be seen ({error})"
    if actual is None:
        return f"{place}: what it serves cannot be seen"
    return f"{place} serves " + ", ".join(f"{name} {weight} %" for name, weight in actual.split.weights.items())


def delete_endpoint(ports: Ports, endpoint: str, *, reason: str = "", actor: str = "") -> None:
    """End the endpoint and unbind its name. Killed in between, the next call or the reconciler completes it.

    Its versions, their aliases and what was rolled back here stay as they are.

    Raises:
        NotFoundError: no such endpoint.
        ConflictError: somebody is changing it right now.
        StillPendingError: it could not be ended yet, and every reconciliation tries again.
    """
    asked = False

    def attempt() -> None:
        nonlocal asked
        journal = Journal.open(ports, endpoint, actor=actor)
        if asked and not journal.state.deleting:
            return  # somebody else has completed it
        config = journal.config
        journal.require_idle()
        if not journal.state.deleting:
            journal.append(EndpointDeleted(reason=reason))
            asked = True
        try:
            finish_deletion(journal, reason=reason)
        except LedgerConflictError:
            raise
        except (OnnxOpsError, OSError) as error:
            raise _still_owed(config.endpoint, str(error)) from error

    retry_on_conflict(attempt)


def delete_with_timeout(
    ports: Ports, endpoint: str, *, reason: str = "", actor: str = "", patience_s: float = COMMAND_TIMEOUT_S
) -> None:
    """`delete_endpoint`, for which the caller waits `patience_s` seconds at most; then it is `StillPendingError`."""
    call = partial(delete_endpoint, ports, endpoint, reason=reason, actor=actor)
    late = f"it did not end within {patience_s:g} s"
    error = run_concurrently({endpoint: call}, patience_s, lambda _: _still_owed(endpoint, late))[endpoint]
    if error is not None:
        raise error


def finish_deletion(journal: Journal, *, reason: str = "") -> None:
    """End an endpoint that the ledger says is to go.

    Raises:
        ServiceUnavailableError: it could not be ended.
    """
    config = journal.config
    journal.ports.provider(config.provider).remove(config)
    journal.append(EndpointDeleted(reason=reason, done=True))


def _still_owed(endpoint: str, why: str) -> StillPendingError:
    return StillPendingError(
        "accepted, still owed: the endpoint's end",
        where=endpoint,
        why=why,
        remedy="Every `onnx-ops reconcile` and watch tries again. Take it back with "
        f"`onnx-ops rollback --withdraw {endpoint} --reason ...`.",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PromotionResult:
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
) -> PromotionResult:
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
    bound = list_sibling_states(ports, model, target)
    if override:
        _override(ports, record, target, tuple(s.endpoint for s in bound), reason, actor)
    else:
        for state in bound:
            require_not_rejected(ports, state, record, target)
        digest = next((s.config.target_digest for s in bound if s.config is not None), None)
        require_approval(ports, record, target, digest)
    if not bound and not expects:
        return _crown(ports, record, target, actor)
    names = tuple(s.endpoint for s in bound) or expects
    if bound and all(s.roles.stable is not None and s.roles.stable.version == version for s in bound):
        return PromotionResult(model=model, version=version, target=target, did="serves already", endpoints=names)
    ports.registry().set_alias(model, format_alias("challenger", target), version)
    if reason:
        ports.registry().annotate(model, version, {f"promoted.{target}": reason[:400]})
    return PromotionResult(model=model, version=version, target=target, did="challenger", endpoints=names)


def bind_endpoint(
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
        journal.append(EndpointBound(config=config, policy=policy))
        return True

    return retry_on_conflict(bind)


def _override(
    ports: Ports, record: VersionRecord, target: str, endpoints: tuple[str, ...], reason: str, actor: str
) -> None:
    """The registry comes first: where its server knows who may override, the ledger is not written for who may not."""
    if not reason.strip():
        raise UserError("an override needs a reason", remedy="Say why with --reason; it is recorded.")
    registry, verifier, reason = ports.registry(), ports.verifier(), reason[:MAX_REASON_LENGTH]
    before = read_override(record, target, verifier)
    registry.annotate(record.model, record.version, {override_reason_tag(target): reason})
    signed = read_override(registry.version(record.model, record.version), target, verifier)
    if signed is None or signed == before:  # the registry's server signs none
        signed = _signed(ports, record, target, reason, actor)
        registry.annotate(
            record.model, record.version, {override_record_tag(target): codec.dumps(signed.envelope).decode()}
        )
    for endpoint in endpoints:
        retry_on_conflict(partial(_note, ports, endpoint, build_override_entry(signed), actor))


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
    return sign_record(build_override(record, target, ports.verifier(), reason=reason, by=by, now=now), signer)


def _note(ports: Ports, endpoint: str, entry: OverrideRecorded, actor: str) -> None:
    Journal.open(ports, endpoint, actor=actor).append(entry)


def _crown(ports: Ports, record: VersionRecord, target: str, actor: str) -> PromotionResult:
    """Without endpoints there is no rollout to wait for."""
    registry = ports.registry()
    champion, previous = format_alias("champion", target), format_alias("previous", target)
    found = registry.aliases(record.model)
    current, before = found.get(champion), found.get(previous)
    if current != record.version:
        if current is not None:
            registry.set_alias(record.model, previous, current)
        registry.set_alias(record.model, champion, record.version)
        before = current
    aliases = {champion: record.version, previous: before}

    def note() -> None:
        journal = Journal.open(ports, format_stream_name(record.model, target), actor=actor)
        if journal.state.aliases.get(champion) != record.version:
            journal.append(AliasesWritten(aliases=aliases))

    retry_on_conflict(note)
    return PromotionResult(model=record.model, version=record.version, target=target, did="champion", endpoints=())
