"""Endpoints that a changed pipeline file would leave behind: running, paid for, and managed by nobody."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from onnx_ops.domain.endpoint import EndpointConfig
from onnx_ops.domain.ledger import Abandoned, ReleaseState
from onnx_ops.errors import OnnxOpsError, RefusedError
from onnx_ops.ports import Ports
from onnx_ops.release.journal import Journal, bound_endpoints, looking_again, readable


def refuse_orphans(ports: Ports, pipeline: str, configs: Sequence[EndpointConfig], *, abandon: str = "") -> None:
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
        orphans += [bound for bound in (moved_from(ports, readable(ports, config.endpoint), config),) if bound]
    if orphans and not abandon:
        raise refusal(ports, orphans)


def dropped(ports: Ports, pipeline: str, configs: Sequence[EndpointConfig]) -> tuple[ReleaseState, ...]:
    """Endpoints that the pipeline has bound, that serve, and that its file names no longer."""
    named = {config.endpoint for config in configs}
    states = (readable(ports, name) for name in bound_endpoints(ports) if name not in named)
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
    provider.check_change(bound, config)
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


def leave_dropped(
    ports: Ports, pipeline: str, configs: Sequence[EndpointConfig], *, reason: str, actor: str = ""
) -> tuple[str, ...]:
    """Unbind the endpoints that the file names no longer, and record why; returns their names."""
    names = tuple(state.endpoint for state in dropped(ports, pipeline, configs))
    for name in names:
        looking_again(partial(_leave, ports, name, reason, actor))
    return names


def _leave(ports: Ports, endpoint: str, reason: str, actor: str) -> None:
    leave(Journal.open(ports, endpoint, actor=actor), reason=reason)


def leave(journal: Journal, *, reason: str) -> None:
    """Unbind an endpoint and record why; nothing is done to it.

    Raises:
        ConflictError: somebody is changing it right now.
    """
    journal.refuse_while_changed()
    config = journal.config
    place = journal.ports.provider(config.provider).place(config)
    journal.append(Abandoned(reason=reason, place=place))


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
