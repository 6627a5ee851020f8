"""What stands at a provider and is needed by no release: found, and removed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from onnx_ops.domain.endpoint import Deployment, EndpointConfig, Leftover
from onnx_ops.domain.ledger import ReleaseState
from onnx_ops.errors import ConflictError, ServiceUnavailableError
from onnx_ops.ports import Ports


@dataclass(frozen=True, slots=True, kw_only=True)
class Orphan:
    """A leftover of an endpoint that is, or was."""

    endpoint: str
    provider: str
    leftover: Leftover


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """What was found, and the endpoints whose provider could not say: there may be more."""

    orphans: tuple[Orphan, ...] = ()
    silent: tuple[str, ...] = ()


def needed(ports: Ports, state: ReleaseState) -> tuple[Deployment, ...]:
    """What an endpoint serves, may go back to at once, or is about to serve."""
    roles = state.roles
    held = [d for d in (roles.stable, roles.previous, roles.candidate) if d is not None]
    if state.open_intent is not None:
        held += state.open_intent.action.state.deployments
    if state.pending_rollback is not None:
        held += state.pending_rollback.action.state.deployments
    if state.config is not None:
        actual = ports.provider(state.config.provider).observe(state.config)
        held += state.known.values() if actual is None else actual.deployments
    return tuple(held)


def survey(ports: Ports, endpoints: Sequence[str]) -> Survey:
    """What is left of these endpoints and needed by none of them, nor by any other. Nothing is changed."""
    states = [ports.ledger.state(name) for name in ports.ledger.endpoints()]
    manifests = frozenset(deployment.manifest for state in states for deployment in needed(ports, state))
    found, silent = [], []
    for config in _configs(states, endpoints):
        try:
            left = ports.provider(config.provider).leftovers(config, manifests)
        except ServiceUnavailableError:
            silent.append(config.endpoint)
        else:
            found += [Orphan(endpoint=config.endpoint, provider=config.provider, leftover=one) for one in left]
    return Survey(orphans=tuple(found), silent=tuple(silent))


def discard(ports: Ports, found: Sequence[Orphan]) -> tuple[Orphan, ...]:
    """Remove orphans; returns those that went. One that came into use meanwhile stays.

    Raises:
        ServiceUnavailableError: a provider does not answer; what was removed until then stays removed.
    """
    states = [ports.ledger.state(name) for name in {one.endpoint for one in found}]
    configs = {config.endpoint: config for config in _configs(states, [state.endpoint for state in states])}
    gone = []
    for one in found:
        try:
            ports.provider(one.provider).discard(configs[one.endpoint], one.leftover)
        except ConflictError:
            continue
        gone.append(one)
    return tuple(gone)


def _configs(states: Sequence[ReleaseState], endpoints: Sequence[str]) -> list[EndpointConfig]:
    return [state.config for state in states if state.config is not None and state.endpoint in endpoints]
