"""Takes an endpoint out of service for good; its ledger stays."""

from __future__ import annotations

from functools import partial

from onnx_ops.domain.ledger import Deleted
from onnx_ops.errors import LedgerConflictError, OnnxOpsError, StillPendingError
from onnx_ops.ports import Ports
from onnx_ops.release.journal import Journal, looking_again
from onnx_ops.release.patience import PATIENCE_S, within


def delete(ports: Ports, endpoint: str, *, reason: str = "", actor: str = "") -> None:
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
        journal.refuse_while_changed()
        if not journal.state.deleting:
            journal.append(Deleted(reason=reason))
            asked = True
        try:
            finish_deletion(journal, reason=reason)
        except LedgerConflictError:
            raise
        except (OnnxOpsError, OSError) as error:
            raise _still_owed(config.endpoint, str(error)) from error

    looking_again(attempt)


def delete_soon(
    ports: Ports, endpoint: str, *, reason: str = "", actor: str = "", patience_s: float = PATIENCE_S
) -> None:
    """`delete`, for which the caller waits `patience_s` seconds at most; then it is `StillPendingError`."""
    call = partial(delete, ports, endpoint, reason=reason, actor=actor)
    late = f"it did not end within {patience_s:g} s"
    error = within({endpoint: call}, patience_s, lambda _: _still_owed(endpoint, late))[endpoint]
    if error is not None:
        raise error


def finish_deletion(journal: Journal, *, reason: str = "") -> None:
    """End an endpoint that the ledger says is to go.

    Raises:
        ServiceUnavailableError: it could not be ended.
    """
    config = journal.config
    journal.ports.provider(config.provider).remove(config)
    journal.append(Deleted(reason=reason, done=True))


def _still_owed(endpoint: str, why: str) -> StillPendingError:
    return StillPendingError(
        "accepted, still owed: the endpoint's end",
        where=endpoint,
        why=why,
        remedy="Every `onnx-ops reconcile` and watch tries again. Take it back with "
        f"`onnx-ops rollback --withdraw {endpoint} --reason ...`.",
    )
