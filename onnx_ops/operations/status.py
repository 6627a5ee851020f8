"""What an endpoint does, and what happened to it."""

from __future__ import annotations

import datetime
from dataclasses import dataclass
from typing import assert_never

from onnx_ops.domain.endpoint import EndpointState
from onnx_ops.domain.ledger import (
    Configured,
    Deleted,
    Intent,
    LedgerEntry,
    Mirrored,
    Outcome,
    Override,
    RefusedVersion,
    ReleaseState,
    Spoken,
)
from onnx_ops.domain.rollout import Action, ActionKind
from onnx_ops.operations.journal import Journal
from onnx_ops.ports import Ports


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointStatus:
    """The ledger's view and the provider's. `actual` is None if the endpoint does not answer."""

    state: ReleaseState
    actual: EndpointState | None
    address: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryLine:
    """One ledger entry for people. `at` is ISO 8601 in UTC."""

    sequence: int
    at: str
    actor: str
    what: str
    why: str


def status(ports: Ports, endpoint: str) -> EndpointStatus:
    """Raises NotFound if no pipeline has bound this endpoint."""
    journal = Journal.open(ports, endpoint)
    provider = ports.provider(journal.config.provider)
    return EndpointStatus(
        state=journal.state, actual=provider.observe(journal.config), address=provider.address(journal.config)
    )


def history(ports: Ports, endpoint: str) -> tuple[HistoryLine, ...]:
    """Every entry of the endpoint's ledger, oldest first.

    Raises:
        NotFound: no pipeline has bound this endpoint.
    """
    Journal.open(ports, endpoint).config  # noqa: B018 (raises NotFound for an unknown name)
    return tuple(_line(entry) for entry in ports.ledger.read(endpoint))


def _line(entry: LedgerEntry) -> HistoryLine:
    what, why = _told(entry)
    at = datetime.datetime.fromtimestamp(entry.at, tz=datetime.UTC).isoformat(timespec="seconds")
    return HistoryLine(sequence=entry.sequence, at=at, actor=entry.actor, what=what, why=why)


def _told(entry: LedgerEntry) -> tuple[str, str]:
    body = entry.body
    match body:
        case Configured():
            return f"bound to {body.config.model} on {body.config.target}", f"pipeline {body.config.pipeline}"
        case Intent():
            return _action_told(body.action), body.action.why
        case Outcome():
            return f"{'done' if body.ok else 'failed'} (entry {body.of})", body.detail
        case Spoken():
            return f"operator says {body.word.value}", body.reason
        case Mirrored():
            told = ", ".join(f"{name} -> {version or 'none'}" for name, version in body.aliases.items())
            return f"registry: {told}", ""
        case RefusedVersion():
            restored = f"restored to {body.restored_to}" if body.restored_to else "removed"
            return f"refused {body.alias} on version {body.version}, alias {restored}", body.reason
        case Override():
            return f"override for version {body.version}", body.reason
        case Deleted():
            return "deleted" if body.done else "is to be deleted", body.reason
        case _:
            assert_never(body)


def _action_told(action: Action) -> str:
    """What the action does to traffic, and for a change of the stable version from which to which."""
    split = ", ".join(f"{name} {weight} %" for name, weight in action.state.split.weights.items())
    stable, previous = action.roles.stable, action.roles.previous
    if action.kind in (ActionKind.FINISH, ActionKind.ROLLBACK) and stable is not None and previous is not None:
        return f"{action.kind.value} {previous.name} -> {stable.name}: {split}"
    return f"{action.kind.value}: {split}"
