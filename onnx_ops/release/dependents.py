"""What would lose its approval if a key were trusted no longer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from onnx_ops.domain.artifact import Digest
from onnx_ops.domain.rollout import alias
from onnx_ops.errors import NotFoundError
from onnx_ops.ports import Ports
from onnx_ops.release.decided import rests_on
from onnx_ops.release.journal import Journal, bound_endpoints, stream_of

_ROLES = ("champion", "challenger", "previous")


@dataclass(frozen=True, slots=True, kw_only=True)
class Dependent:
    """A version under an alias of a target."""

    model: str
    version: str
    alias: str


def dependents(ports: Ports, key: Digest) -> tuple[Dependent, ...]:
    """Versions under guarded aliases whose decision or override this key signed, of every model in the ledger.

    Raises:
        ServiceUnavailableError: the registry does not answer.
    """
    return tuple(one for model, target in sorted(_promoted(ports)) for one in _of(ports, model, target, key))


def _promoted(ports: Ports) -> set[tuple[str, str]]:
    """Every model and target that an endpoint is bound to, or that was promoted without one."""
    configs = [Journal.open(ports, name).config for name in bound_endpoints(ports)]
    streams = (stream_of(name) for name in ports.ledger.endpoints())
    return {(config.model, config.target) for config in configs} | {pair for pair in streams if pair is not None}


def _of(ports: Ports, model: str, target: str, key: Digest) -> Iterator[Dependent]:
    aliases = ports.registry().aliases(model)
    for name in (alias(role, target) for role in _ROLES):
        if name in aliases and _rests(ports, model, aliases[name], target, key):
            yield Dependent(model=model, version=aliases[name], alias=name)


def _rests(ports: Ports, model: str, version: str, target: str, key: Digest) -> bool:
    try:
        return rests_on(ports.registry().version(model, version), target, key, ports.verifier())
    except NotFoundError:  # onnx-ops did not register it, so it has no decision to lose
        return False
