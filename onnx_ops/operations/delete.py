"""Takes an endpoint out of service for good; its ledger stays."""

from __future__ import annotations

from onnx_ops.domain.ledger import Deleted
from onnx_ops.errors import Conflict
from onnx_ops.operations.journal import Journal, looking_again
from onnx_ops.ports import Ports


def delete(ports: Ports, endpoint: str, *, reason: str = "", actor: str = "") -> None:
    """End the endpoint and unbind its name. Killed in between, the next call or the reconciler completes it.

    Its versions, their aliases and what was rolled back here stay as they are.

    Raises:
        NotFound: no such endpoint.
        Conflict: somebody is changing it right now.
        ServiceUnavailable: it could not be ended; it still counts as being deleted.
    """
    asked = False

    def attempt() -> None:
        nonlocal asked
        journal = Journal.open(ports, endpoint, actor=actor)
        if asked and not journal.state.deleting:
            return  # somebody else has completed it
        config, intent = journal.config, journal.state.open_intent
        if intent is not None and ports.clock.now() < intent.expires_at and ports.host.alive(intent.holder):
            raise Conflict(
                f"{intent.holder} is changing this endpoint",
                where=config.endpoint,
                why=intent.action.why,
                remedy="Try again when that is done.",
            )
        if not journal.state.deleting:
            journal.append(Deleted(reason=reason))
            asked = True
        finish_deletion(journal, reason=reason)

    looking_again(attempt)


def finish_deletion(journal: Journal, *, reason: str = "") -> None:
    """End an endpoint that the ledger says is to go.

    Raises:
        ServiceUnavailable: it could not be ended.
    """
    config = journal.config
    journal.ports.provider(config.provider).remove(config)
    journal.append(Deleted(reason=reason, done=True))
