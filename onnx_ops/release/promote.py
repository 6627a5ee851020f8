"""Promote versions, and bind, abandon and delete the endpoints that serve them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from onnx_ops import codec
from onnx_ops.attestation import sign_record
from onnx_ops.domain.artifact import Digest
from onnx_ops.domain.attestation import MAX_REASON_LENGTH, override_reason_tag, override_record_tag
from onnx_ops.domain.endpoint import Deployment, EndpointConfig
from onnx_ops.domain.ledger import (
    AliasesWritten,
    EndpointAbandoned,
    EndpointBound,
    EndpointDeleted,
    LedgerOrigin,
    ReleaseLeft,
    ReleaseState,
)
from onnx_ops.domain.release import VersionRecord
from onnx_ops.domain.rollout import format_alias
from onnx_ops.domain.rollout_policy import RolloutPolicy
from onnx_ops.errors import (
    LedgerConflictError,
    OnnxOpsError,
    RefusedError,
    StillPendingError,
    UserError,
)
from onnx_ops.ports import Context
from onnx_ops.release.decision_policy import build_override, find_rejection_reason, read_override
from onnx_ops.release.endpoint_calls import COMMAND_TIMEOUT_S, run_concurrently
from onnx_ops.release.journal import (
    Journal,
    format_stream_name,
    list_bound_endpoints,
    list_sibling_states,
    read_readable_state,
)
from onnx_ops.release.registry_sync import (
    MAX_TEXT,
    build_override_entry,
    require_approval,
    require_not_rejected,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PromotionResult:
    """The result of a promotion.

    `did` is what the version became (`champion`, `challenger`), `serves already`, or `left` if a
    run skipped the promotion. `endpoints` are the endpoints that follow the promotion. If it was
    skipped, field `left` is the version that replaced this one; otherwise it is empty.
    """

    model: str
    version: str
    target: str
    did: str
    endpoints: tuple[str, ...]
    left: str = ""

    def explain_left(self) -> str:
        """Return why the promotion was skipped, and the command that promotes the version."""
        return (
            f"v{self.version} was promoted on {self.target} before, and v{self.left} has replaced "
            f"it since then, so v{self.left} stays in place. To promote v{self.version} again: "
            f"onnx-ops promote {self.model}/{self.version} --target {self.target}"
        )


def promote_release(
    context: Context,
    model: str,
    version: str,
    target: str,
    *,
    release: Digest,
    always: bool = False,
    actor: str = "",
    expects: tuple[str, ...] = (),
) -> PromotionResult:
    """Promote the version that a run registered, unless another version replaced it.

    If the version was promoted before and another version serves now, the other version is newer,
    or an operator chose it. An unchanged run must not revert this, so the promotion is
    skipped. Otherwise, `promote` is called. It is also called if the version is the challenger of
    the target, or if an endpoint rejects the version. `promote` refuses a rejected version.

    Args:
        release: the release of the version. In a new registry, another release can have the same
            version number.
        always: whether to promote the version even if another version replaced it.
        expects: as in `promote`.

    Raises:
        OnnxOpsError: the errors of `promote`.
    """
    aliases = context.registry().aliases(model)
    is_requested = aliases.get(format_alias("challenger", target)) == version
    bound = list_sibling_states(context, model, target)
    if not always and not is_requested and not _is_rejected(context, bound, model, version, target):
        if bound:
            left = _leave_to_serving(context, bound, version, release, actor)
        else:
            left = _find_later_champion(
                context, model, version, target, aliases.get(format_alias("champion", target))
            )
        if left:
            names = tuple(state.endpoint for state in bound)
            return PromotionResult(
                model=model, version=version, target=target, did="left", endpoints=names, left=left
            )
    return promote(context, model, version, target, actor=actor, expects=expects)


def find_successor(state: ReleaseState, version: str, release: Digest) -> Deployment | None:
    """Return the deployment that replaced a version at an endpoint, or None.

    The result is None if the version was never a candidate or stable there, or still is. It is also
    None if a deployment of another release had this version number. A candidate replaces a version
    before the candidate is stable.
    """
    roles, known = state.roles, state.known.get(version)
    if (
        known is None
        or known.release != release
        or roles.stable is None
        or roles.stable.version == version
    ):
        return None
    if roles.candidate is not None:
        return None if roles.candidate.version == version else roles.candidate
    return roles.stable


def _leave_to_serving(
    context: Context, bound: Sequence[ReleaseState], version: str, release: Digest, actor: str
) -> str:
    """Record the skipped promotion at each endpoint where a version was replaced.

    A ledger does not record this again while it is the last skipped promotion.

    Returns:
        The version that replaced `version` at the first of these endpoints; empty if there is none.
    """
    left = ""
    for state in bound:
        successor = find_successor(state, version, release)
        if successor is None:
            continue
        left = left or successor.version
        body = ReleaseLeft(version=version, serving=successor.version)

        def record(journal: Journal, body: ReleaseLeft = body) -> None:
            if journal.state.left != body:
                journal.append(body)

        Journal.update(context, state.endpoint, record, actor=actor)
    return left


def _find_later_champion(
    context: Context, model: str, version: str, target: str, champion: str | None
) -> str:
    """Return the champion that replaced a version in the registry; empty if none did.

    The version must have been champion before. The function is for a model that no endpoint serves
    on the target.
    """
    alias = format_alias("champion", target)
    written = (entry.body for entry in context.ledger.read(format_stream_name(model, target)))
    was_champion = any(
        isinstance(body, AliasesWritten) and body.aliases.get(alias) == version for body in written
    )
    return champion if champion is not None and champion != version and was_champion else ""


def _is_rejected(
    context: Context, bound: Sequence[ReleaseState], model: str, version: str, target: str
) -> bool:
    """Return whether an endpoint rejects a version that it has rolled back.

    `promote` refuses a rejected version.
    """
    record = context.registry().version(model, version)
    return any(
        find_rejection_reason(state, record, target, context.verifier()) is not None
        for state in bound
    )


def promote(
    context: Context,
    model: str,
    version: str,
    target: str,
    *,
    actor: str = "",
    reason: str = "",
    override: bool = False,
    expects: tuple[str, ...] = (),
) -> PromotionResult:
    """Make a version the challenger of a target.

    If no endpoint is bound to the model and target, or is expected, the version becomes the
    champion immediately. If all bound endpoints serve the version already, no alias is set.

    Args:
        reason: recorded in a tag of the version, unless it serves already. An override requires the
            reason, and the ledger records it too.
        override: whether to serve the version regardless of its gates and rollbacks.
        expects: endpoints that will be bound next. If there are any, the reconciler of these
            endpoints sets the champion later.

    Raises:
        RefusedError: the decision does not allow the version to serve, the version was rolled back,
            or the registry refuses the alias. For an override: no key on this machine can sign it.
        NotFoundError: the version does not exist.
        UserError: the override has no reason.
        MissingKeyError: no key on this machine can sign the ledger entry of an override.
    """
    registry = context.registry()
    record = registry.version(model, version)
    bound = list_sibling_states(context, model, target)
    names = tuple(state.endpoint for state in bound)
    if override:
        _override(context, record, target, names, reason, actor)
    else:
        for state in bound:
            require_not_rejected(context, state, record, target)
        digest = next((s.config.target_digest for s in bound if s.config is not None), None)
        require_approval(context, record, target, digest)
    if not bound and not expects:
        _set_champion(context, record, target, actor)
        did = "champion"
    elif bound and all(
        s.roles.stable is not None and s.roles.stable.version == version for s in bound
    ):
        did = "serves already"
    else:
        registry.set_alias(model, format_alias("challenger", target), version)
        did = "challenger"
    if reason and did != "serves already":
        registry.annotate(model, version, {f"promoted.{target}": reason[:MAX_TEXT]})
    return PromotionResult(
        model=model, version=version, target=target, did=did, endpoints=names or expects
    )


def bind_endpoint(
    context: Context,
    config: EndpointConfig,
    policy: RolloutPolicy,
    *,
    actor: str = "",
    abandon: str = "",
) -> bool:
    """Bind an endpoint to its declared config and policy; return whether they changed.

    A pending deletion of the endpoint is completed first.

    Args:
        abandon: recorded reason why deployments at the endpoint's previous place can run unmanaged.

    Raises:
        UserError: the endpoint serves another model or target, or does not support the change while
            it exists.
        RefusedError: the endpoint runs at another place, and `abandon` is empty.
        ConflictError: another process is changing the deployments at the previous place.
        ServiceUnavailableError: the pending deletion could not be completed.
        MissingKeyError: no key on this machine can sign the binding.
    """

    def bind(journal: Journal) -> bool:
        if journal.state.deleting:
            finish_deletion(journal)
        bound = journal.state.config
        if bound is not None and (bound.model, bound.target) != (config.model, config.target):
            raise UserError(
                f"endpoint {config.endpoint} serves {bound.model} on {bound.target}",
                where=f"pipeline {config.pipeline}",
                remedy="An endpoint has one model and one target. "
                "Choose another name for this deployment.",
            )
        if (orphan := _find_moved(context, journal.state, config)) is not None:
            if not abandon:
                raise _orphan_error(context, [orphan])
            _unbind(journal, abandon)
        if bound == config and journal.state.policy == policy:
            return False
        origin = None
        if not journal.state.head:
            ledger = context.ledger
            origin = LedgerOrigin(
                project=context.root.resolve().name, place=ledger.place, keys=ledger.release_keys
            )
        journal.append(EndpointBound(config=config, policy=policy, origin=origin))
        return True

    return Journal.update(context, config.endpoint, bind, actor=actor)


def require_no_orphans(
    context: Context, pipeline: str, configs: Sequence[EndpointConfig], *, abandon: str = ""
) -> None:
    """Raise RefusedError if a changed pipeline file would leave endpoints unmanaged.

    Args:
        configs: configs of all endpoints that the file names.
        abandon: reason why endpoints can run unmanaged.

    Raises:
        RefusedError: an endpoint would run unmanaged, and `abandon` is empty.
        UserError: an existing endpoint does not support the change that the file declares.
    """
    orphans = [
        state.config
        for state in _list_dropped(context, pipeline, configs)
        if state.config is not None
    ]
    moved = (
        _find_moved(context, read_readable_state(context, config.endpoint), config)
        for config in configs
    )
    orphans += [config for config in moved if config is not None]
    if orphans and not abandon:
        raise _orphan_error(context, orphans)


def find_refused_change(context: Context, config: EndpointConfig) -> UserError | None:
    """Return why an existing endpoint does not support a change of its config.

    The result is None if the endpoint supports the change, or after another error, which the run
    reports.
    """
    try:
        _find_moved(context, read_readable_state(context, config.endpoint), config)
    except UserError as error:
        return error
    except OnnxOpsError:  # The run reports any other error.
        pass
    return None


def abandon_dropped(
    context: Context,
    pipeline: str,
    configs: Sequence[EndpointConfig],
    *,
    reason: str,
    actor: str = "",
) -> tuple[str, ...]:
    """Unbind the endpoints that the file no longer names, and record the reason.

    Args:
        pipeline: name of the pipeline.
        configs: configs of all endpoints that its file names.

    Returns:
        The names of the unbound endpoints.

    Raises:
        ConflictError: another process is changing one of the endpoints.
        MissingKeyError: no key on this machine can sign the entry that unbinds an endpoint.
    """
    names = tuple(state.endpoint for state in _list_dropped(context, pipeline, configs))
    for name in names:
        Journal.update(context, name, lambda journal: _unbind(journal, reason), actor=actor)
    return names


def delete_endpoint(context: Context, endpoint: str, *, reason: str = "", actor: str = "") -> None:
    """Delete the endpoint and unbind its name, but keep its ledger.

    If the process is killed, the next call or the reconciler completes the deletion. Versions,
    aliases and rejections remain.

    Raises:
        NotFoundError: the endpoint does not exist.
        ConflictError: another process is changing the endpoint.
        MissingKeyError: no key on this machine can sign the deletion.
        StillPendingError: the endpoint could not be deleted yet; every reconciliation tries again.
    """
    requested = False

    def delete(journal: Journal) -> None:
        nonlocal requested
        if requested and not journal.state.deleting:
            return  # Another process has completed the deletion.
        config = journal.config
        journal.require_idle()
        if not journal.state.deleting:
            journal.append(EndpointDeleted(reason=reason))
            requested = True
        try:
            finish_deletion(journal, reason=reason)
        except LedgerConflictError:
            raise
        except (OnnxOpsError, OSError) as error:
            raise _still_pending(config.endpoint, str(error)) from error

    Journal.update(context, endpoint, delete, actor=actor)


def delete_with_timeout(
    context: Context, endpoint: str, *, reason: str = "", actor: str = ""
) -> None:
    """Call `delete_endpoint`, and wait for at most `COMMAND_TIMEOUT_S`.

    Raises:
        StillPendingError: the deletion takes longer, or failed and will be tried again.
        NotFoundError, ConflictError, MissingKeyError: as `delete_endpoint`.
    """
    call = partial(delete_endpoint, context, endpoint, reason=reason, actor=actor)
    late = f"the deletion did not finish within {COMMAND_TIMEOUT_S:g} s"
    error = run_concurrently(
        {endpoint: call}, COMMAND_TIMEOUT_S, lambda _: _still_pending(endpoint, late)
    )[endpoint]
    if error is not None:
        raise error


def finish_deletion(journal: Journal, *, reason: str = "") -> None:
    """Delete an endpoint whose deletion is recorded.

    Raises:
        ServiceUnavailableError: the endpoint could not be deleted.
        LedgerConflictError: the endpoint was deleted, but another process wrote an entry meanwhile.
    """
    config = journal.config
    journal.context.provider(config.provider).remove(config)
    journal.append(EndpointDeleted(reason=reason, done=True))


def _set_champion(context: Context, record: VersionRecord, target: str, actor: str) -> None:
    """Set the champion immediately, since only endpoints have rollouts."""
    registry = context.registry()
    champion, previous = format_alias("champion", target), format_alias("previous", target)
    present = registry.aliases(record.model)
    current, before = present.get(champion), present.get(previous)
    if current != record.version:
        if current is not None:
            registry.set_alias(record.model, previous, current)
        registry.set_alias(record.model, champion, record.version)
        before = current
    aliases = {champion: record.version, previous: before}

    def record_aliases(journal: Journal) -> None:
        if journal.state.aliases.get(champion) != record.version:
            journal.append(AliasesWritten(aliases=aliases))

    Journal.update(context, format_stream_name(record.model, target), record_aliases, actor=actor)


def _override(
    context: Context,
    record: VersionRecord,
    target: str,
    endpoints: tuple[str, ...],
    reason: str,
    actor: str,
) -> None:
    """Write the override to the registry first, then to the ledgers.

    If the registry's server refuses the override, the ledgers are unchanged.
    """
    if not reason.strip():
        raise UserError(
            "an override needs a reason", remedy="Add --reason REASON; the reason is recorded."
        )
    registry, verifier, reason = context.registry(), context.verifier(), reason[:MAX_REASON_LENGTH]
    before = read_override(record, target, verifier)
    registry.annotate(record.model, record.version, {override_reason_tag(target): reason})
    signed = read_override(registry.version(record.model, record.version), target, verifier)
    if signed is None or signed == before:
        # The server of the registry has not signed the override, so this process signs it.
        signer = context.signer()
        if signer is None:
            raise RefusedError(
                "this machine cannot sign the override",
                where=f"{record.model}/{record.version}",
                why="it must be signed with a trusted key, and MLflow's server did not sign it",
                remedy="Run the command on a machine with a signing key.",
            )
        by, now = actor or context.host.actor(), context.clock.now()
        signed = sign_record(
            build_override(record, target, verifier, reason=reason, by=by, now=now), signer
        )
        tag = {override_record_tag(target): codec.dumps(signed.envelope).decode()}
        registry.annotate(record.model, record.version, tag)
    entry = build_override_entry(signed)
    for endpoint in endpoints:
        Journal.update(context, endpoint, lambda journal: journal.append(entry), actor=actor)


def _list_dropped(
    context: Context, pipeline: str, configs: Sequence[EndpointConfig]
) -> tuple[ReleaseState, ...]:
    """Return the states of existing endpoints that a pipeline's file no longer names.

    The same pipeline bound these endpoints.
    """
    named = {config.endpoint for config in configs}
    states = (
        read_readable_state(context, name)
        for name in list_bound_endpoints(context)
        if name not in named
    )
    return tuple(
        s for s in states if s.config is not None and s.config.pipeline == pipeline and _exists(s)
    )


def _find_moved(
    context: Context, state: ReleaseState, config: EndpointConfig
) -> EndpointConfig | None:
    """Return an endpoint's present config if the new `config` moves it, or None.

    Raises:
        UserError: the place stays the same, and the endpoint does not support the change.
    """
    bound = state.config
    if (
        bound is None
        or not _exists(state)
        or (bound.provider, bound.options) == (config.provider, config.options)
    ):
        return None
    provider = context.provider(bound.provider)
    if bound.provider != config.provider or provider.place(bound) != provider.place(config):
        return bound
    provider.validate_change(bound, config)
    return None


def _exists(state: ReleaseState) -> bool:
    """Return whether the endpoint was started or will be; False during a deletion."""
    if state.deleting:
        return False
    return (
        state.roles.stable is not None
        or state.open_intent is not None
        or state.pending_rollback is not None
    )


def _unbind(journal: Journal, reason: str) -> None:
    """Unbind an endpoint and record the reason; the endpoint is not changed."""
    journal.require_idle()
    config = journal.config
    place = journal.context.provider(config.provider).place(config)
    journal.append(EndpointAbandoned(reason=reason, place=place))


def _orphan_error(context: Context, orphans: Sequence[EndpointConfig]) -> RefusedError:
    names = [config.endpoint for config in orphans]
    return RefusedError(
        f"{', '.join(names)} would run unmanaged",
        where=f"pipeline {orphans[0].pipeline}",
        why="; ".join(_describe_orphan(context, config) for config in orphans),
        remedy="Revert the change, or delete the endpoint first with "
        f"`onnx-ops delete {names[0]}`, or abandon it with `onnx-ops run FILE --abandon REASON`. "
        "An abandoned endpoint runs, and can cost money, until it is deleted at its provider.",
    )


def _describe_orphan(context: Context, config: EndpointConfig) -> str:
    """Return a description of an endpoint: its place, and the versions that it serves."""
    provider = context.provider(config.provider)
    place = provider.place(config)
    try:
        observed = provider.observe(config)
    except OnnxOpsError as error:
        return f"{place}: its traffic could not be read ({error})"
    if observed is None:
        return f"{place}: its traffic could not be read"
    return f"{place} serves " + ", ".join(
        f"{name} {weight} %" for name, weight in observed.split.weights.items()
    )


def _still_pending(endpoint: str, why: str) -> StillPendingError:
    return StillPendingError(
        "accepted, still pending: the deletion of the endpoint",
        where=endpoint,
        why=why,
        remedy="`onnx-ops reconcile`, also with `--watch`, retries the deletion. Withdraw it with "
        f'`onnx-ops rollback --withdraw {endpoint} --reason "…"`.',
    )
