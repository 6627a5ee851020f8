"""Change the keys whose signatures ledgers accept, and the state that applies.

Both can be necessary after a ledger was damaged, or after a key was stolen.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace

from onnx_ops.domain.artifact import Digest, short_digest
from onnx_ops.domain.ledger import LedgerAdopted, LedgerEntry, ReleaseState, fold
from onnx_ops.errors import (
    CorruptStateError,
    MissingKeyError,
    NotFoundError,
    OnnxOpsError,
    RefusedError,
    UserError,
)
from onnx_ops.ports import Context
from onnx_ops.release.endpoint_calls import call_each
from onnx_ops.release.journal import Journal


@dataclass(frozen=True, slots=True, kw_only=True)
class Adoption:
    """An earlier state of a ledger that can be set as its current state.

    The state includes the entries up to `state.head`. Later entries, up to entry `count`, will have
    no effect. Some of the later entries can be known only to this machine or to the endpoint.
    `damage` is the error of reading the ledger; it is empty for an intact ledger.
    """

    state: ReleaseState
    count: int
    damage: str


def list_ledgers(context: Context) -> tuple[str, ...]:
    """Return the endpoints that have a ledger."""
    return tuple(name for name in context.ledger.endpoints() if "@" not in name)


def find_missing_key(context: Context, key: Digest) -> dict[str, str]:
    """Return why signatures by a key are not valid in ledgers, by endpoint.

    Ledgers that accept the key or list no keys, and unreadable ledgers, are left out.
    """
    states, _ = call_each(list_ledgers(context), context.ledger.state)
    return {
        name: f"accepted keys: {', '.join(map(short_digest, sorted(state.keys)))}"
        for name, state in states.items()
        if state.keys and key not in state.keys
    }


def admit_key(
    context: Context, keys: Mapping[Digest, str], *, by: Digest | None = None, actor: str = ""
) -> tuple[str, ...]:
    """Admit keys in the ledgers of endpoints, which then accept their signatures.

    Args:
        keys: public keys in base64 of DER, by digest.
        by: a key; only ledgers that accept it are changed. Ledgers that list no keys, or that
            already accept `keys`, always stay unchanged.

    Returns:
        The endpoints of the ledgers that changed.

    Raises:
        OnnxOpsError: a ledger could not be changed. The other ledgers are changed before the first
            error is raised.
    """

    def admit(name: str) -> bool:
        def change(journal: Journal) -> bool:
            known = journal.state.keys
            if not known or keys.keys() <= known.keys() or by not in (None, *known):
                return False
            journal.append(LedgerAdopted(keys={**known, **keys}, reason="keys admitted"))
            return True

        return Journal.update(context, name, change, actor=actor)

    changed, errors = call_each(list_ledgers(context), admit)
    for error in errors.values():
        raise error
    return tuple(name for name, done in changed.items() if done)


def withdraw_key(
    context: Context,
    key: Digest,
    *,
    keep: Mapping[str, int] | None = None,
    reason: str = "",
    actor: str = "",
) -> tuple[dict[str, int], dict[str, Exception]]:
    """Withdraw a key, so that no endpoint's ledger accepts new signatures by this key.

    Only ledgers that accept the key, that list no keys, or that `keep` names, are changed. Call
    this function before the key is removed from the trusted keys.

    Args:
        keep: the last entry of a ledger that stays in effect, by endpoint; by default, all existing
            entries stay in effect.

    Returns:
        The sequence of the new entry by endpoint, and the errors of the ledgers that could not be
        changed.
    """

    def withdraw(name: str) -> int:
        last = (keep or {}).get(name)
        if last is not None:
            return adopt(
                context,
                find_adoption(context, name, last=last),
                without=key,
                reason=reason,
                actor=actor,
            )

        def change(journal: Journal) -> int:
            state = journal.state
            if not state.head or (state.keys and key not in state.keys):
                return 0
            _require_counting(context, state)
            left = _remove_key(state.keys or context.ledger.release_keys, key, name)
            return journal.append(
                LedgerAdopted(keys=left, state=state, reason=reason or "key retired")
            )

        return Journal.update(context, name, change, actor=actor)

    changed, errors = call_each(list_ledgers(context), withdraw)
    return {name: sequence for name, sequence in changed.items() if sequence}, dict(errors)


def _require_counting(context: Context, state: ReleaseState) -> None:
    """Raise MissingKeyError if a ledger does not accept this machine's signature.

    Other machines would refuse an entry with that signature.
    """
    signer = context.signer()
    if state.keys and (signer is None or signer.key not in state.keys):
        raise MissingKeyError(
            "this machine has no key that the ledger accepts",
            where=f"ledger {state.endpoint}",
            why=f"accepted keys: {', '.join(map(short_digest, sorted(state.keys)))}",
            remedy="Admit the key of this machine on a machine with an accepted key: "
            "`onnx-ops keys admit FILE`. If there is no such machine: "
            f"`onnx-ops keys retire KEY --keep {state.endpoint}={state.head}`.",
        )


def find_adoption(
    context: Context, endpoint: str, *, last: int | None = None, signed: bool = True
) -> Adoption:
    """Return the state of a ledger before its damage, or after an earlier entry.

    If `last` is None, the present state is returned if all entries are intact, or if the damaged
    entries are before a valid snapshot.

    Args:
        last: sequence of the last entry that stays in effect; by default, the last readable entry.
        signed: whether signatures are required. False is safe only if the storage is trusted.

    Raises:
        NotFoundError: there is no such ledger.
        UserError: entry `last` does not exist, or is after the damage.
    """
    count, damage, state = context.ledger.count(endpoint), "", None
    if not count:
        known = ", ".join(list_ledgers(context)) or "none"
        raise NotFoundError("there is no such ledger", where=endpoint, remedy=f"Ledgers: {known}.")
    try:
        state = context.ledger.state(endpoint)
        context.ledger.read(endpoint)  # This also finds damage before the snapshot of the state.
    except CorruptStateError as error:
        damage = str(error)
    if state is not None and last is None:
        return Adoption(
            state=state, count=max(count, _observe_generation(context, state)), damage=damage
        )
    entries = context.ledger.read_intact(endpoint, signed=signed)
    wanted = tuple(entry for entry in entries if last is None or entry.sequence <= last)
    state = fold(endpoint, wanted)
    if last is not None and state.head != last:
        readable = entries[-1].sequence if entries else 0
        remedy = f"Readable entries: 1 to {readable}." if readable else "No entry is readable."
        raise UserError(
            f"entry {last} is missing or unreadable, or follows an unreadable entry",
            where=f"ledger {endpoint}",
            why=damage,
            remedy=remedy,
        )
    return Adoption(
        state=state, count=max(count, _observe_generation(context, state)), damage=damage
    )


def _observe_generation(context: Context, state: ReleaseState) -> int:
    """Return the sequence of the last entry that the endpoint applied; 0 if unknown."""
    if state.config is None:
        return 0
    with suppress(OnnxOpsError):
        observed = context.provider(state.config.provider).observe(state.config)
        return 0 if observed is None else observed.generation
    return 0


def adopt(
    context: Context,
    adoption: Adoption,
    *,
    without: Digest | None = None,
    reason: str = "",
    actor: str = "",
) -> int:
    """Set a ledger's state with one signed entry; return the entry's sequence.

    The accepted keys become the release keys of this machine, because keys of the older state were
    possibly retired since then.

    Args:
        without: a key whose signatures the ledger no longer accepts.

    Raises:
        MissingKeyError: no trusted key on this machine can sign the entry.
        RefusedError: no accepted key would remain.
        LedgerConflictError: another process appended an entry meanwhile.
    """
    state = adoption.state
    # After this entry, the registry sync writes the rollback tags of the adopted state again. Tags
    # that the lost entries caused stay in the registry.
    marked = frozenset(
        version for version, d in state.known.items() if state.find_rejection(d) is not None
    )
    sequence = adoption.count + 1
    state = replace(state, published_sequence=sequence, unpublished_rejections=marked)
    keys = _remove_key(context.ledger.release_keys, without, state.endpoint)
    body = LedgerAdopted(keys=keys, state=state, reason=reason)
    context.ledger.append(
        LedgerEntry(
            endpoint=state.endpoint,
            sequence=sequence,
            at=context.clock.now(),
            actor=actor or context.host.actor(),
            body=body,
        )
    )
    return sequence


def _remove_key(keys: Mapping[Digest, str], key: Digest | None, endpoint: str) -> dict[Digest, str]:
    """Return the keys without `key`.

    Raises:
        RefusedError: no key would remain.
    """
    left = {digest: public for digest, public in keys.items() if digest != key}
    if keys and not left:
        raise RefusedError(
            "the key was not removed, since the ledger accepts only this key",
            where=f"ledger {endpoint}",
            remedy="Replace the key first (`onnx-ops keys rotate`), or admit another key "
            "(`onnx-ops keys admit FILE`).",
        )
    return left
