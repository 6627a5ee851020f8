"""All entries of an endpoint's ledger, with what their signatures grant.

An intact log that was read before is extended by the entries that were appended since then. A
process therefore reads an intact ledger of 10,000 entries only once.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from onnx_ops.domain.ledger import LedgerEntry, ReleaseState, apply_entry
from onnx_ops.domain.ledger_authority import explain_grant
from onnx_ops.errors import CorruptStateError
from onnx_ops.ports import Context


@dataclass(frozen=True, slots=True, kw_only=True)
class EntryLog:
    """The readable entries of a ledger, oldest first.

    Attributes:
        state: the state after the entries.
        grants: what each entry grants; empty if an entry needs no signature, None if its signature
            is unverified.
        error: the damage of the ledger; None for an intact ledger.
    """

    state: ReleaseState
    entries: tuple[LedgerEntry, ...] = ()
    grants: tuple[str | None, ...] = ()
    error: CorruptStateError | None = None


def read_entry_log(context: Context, endpoint: str, known: EntryLog | None = None) -> EntryLog:
    """Return the log of an endpoint; extend a log that was read before.

    A damaged log is not extended but read again.
    """
    ledger, empty = context.ledger, EntryLog(state=ReleaseState(endpoint=endpoint))
    before = empty if known is None or known.error is not None else known
    try:
        after = before.entries[-1].sequence if before.entries else 0
        return _extend(before, ledger.read(endpoint, after=after), is_verified=True)
    except CorruptStateError as error:
        damage = error
    verified = ledger.read_intact(endpoint)
    readable = ledger.read_intact(endpoint, signed=False)
    log = _extend(empty, verified, is_verified=True)
    log = _extend(log, readable[len(verified) :], is_verified=False)
    return EntryLog(state=log.state, entries=log.entries, grants=log.grants, error=damage)


def _extend(log: EntryLog, entries: Iterable[LedgerEntry], *, is_verified: bool) -> EntryLog:
    """Return a log with further entries.

    Entries before an adoption count as not verified, since an adoption can skip damage.
    """
    state, added, grants = log.state, list(log.entries), list(log.grants)
    for entry in entries:
        grant: str | None = None
        try:
            grant = explain_grant(state, entry.body)
            state = apply_entry(state, entry)
        except ValueError:  # After unreadable entries, the state is unknown until an adoption.
            grant = None
        added.append(entry)
        grants.append(grant if is_verified else None)
    checked = (
        None if entry.sequence < state.adopted else grant
        for entry, grant in zip(added, grants, strict=True)
    )
    return EntryLog(state=state, entries=tuple(added), grants=tuple(checked))
