"""Damage to the stored entries of a ledger: always an error, never another state."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from onnx_ops.adapters.files import LocalObjects
from onnx_ops.adapters.ledgers.log import ObjectLedger
from onnx_ops.domain.ledger import LedgerEntry, OperatorCommandSent, ReleaseState
from onnx_ops.domain.rollout import OperatorCommand
from onnx_ops.errors import CorruptStateError
from onnx_ops.testing.fakes import FakeSigner, make_ledger_keys
from onnx_ops.testing.ledgers import ENDPOINT, command_entry, entry
from tests.support.chains import append_unsigned

LENGTH = 14
KEYS = make_ledger_keys()


def pause(sequence: int) -> LedgerEntry:
    return entry(
        sequence, OperatorCommandSent(command=OperatorCommand.PAUSE, reason=f"pause {sequence}")
    )


class Storage:
    """The folder of a ledger in which every third entry is a pause.

    A pause needs no signature.
    """

    def __init__(self, root: Path) -> None:
        self.root, self.folder = root / "ledger", root / "ledger" / ENDPOINT
        self.seen = root / "seen"
        ledger = self.open(seen=True)
        for sequence in range(1, LENGTH + 1):
            ledger.append(command_entry(sequence) if sequence % 3 else pause(sequence))

    def open(self, *, seen: bool = False) -> ObjectLedger:
        return ObjectLedger(LocalObjects(self.root), KEYS, self.seen if seen else None)

    def path(self, sequence: int) -> Path:
        return self.folder / f"{sequence:08d}.jsonl"

    def edit(
        self, sequence: int, change: Callable[[dict[str, Any]], object], *, sign: bool = True
    ) -> None:
        """Change the document of an entry, and keep its signatures or leave them out."""
        signed, _, rest = self.path(sequence).read_bytes().partition(b"\n")
        document = json.loads(signed)
        change(document)
        text = json.dumps(document, sort_keys=True, separators=(",", ":")).encode()
        self.path(sequence).write_bytes(text + (b"\n" + rest if sign and rest else b""))

    def renumber(self, sequence: int, to: int) -> None:
        self.path(sequence).rename(self.path(to))
        self.edit(to, lambda document: document["entry"].update(sequence=to))


def edit_time(storage: Storage) -> None:
    storage.edit(6, lambda document: document["entry"].update(at=0.5))


def edit_actor_without_signature(storage: Storage) -> None:
    storage.edit(6, lambda document: document["entry"].update(actor="alice"), sign=False)


def edit_reason(storage: Storage) -> None:
    storage.edit(9, lambda document: document["entry"]["body"].update(reason="another"))


def edit_grant(storage: Storage) -> None:
    storage.edit(5, lambda document: document["entry"]["body"].update(command="resume"))


def edit_last(storage: Storage) -> None:
    storage.edit(LENGTH, lambda document: document["entry"]["body"].update(command="resume"))


def edit_previous(storage: Storage) -> None:
    storage.edit(6, lambda document: document.update(previous=None))


def edit_snapshot_digest(storage: Storage) -> None:
    storage.edit(9, lambda document: document.update(snapshot=None))


def space_in_an_entry(storage: Storage) -> None:
    storage.path(6).write_bytes(b" " + storage.path(6).read_bytes())


def remove_signature_of_grant(storage: Storage) -> None:
    storage.edit(5, lambda _: None, sign=False)


def sign_by_stranger(storage: Storage) -> None:
    signed = storage.path(LENGTH).read_bytes().partition(b"\n")[0]
    from onnx_ops.adapters.ledgers.chain import decode, encode

    stranger = make_ledger_keys(FakeSigner(b"a stranger"))
    stored = decode(ENDPOINT, LENGTH, signed)
    storage.path(LENGTH).write_bytes(encode(stored.chained, stranger.sign(signed, "", "", {})))


def borrow_signature(storage: Storage) -> None:
    signed = storage.path(5).read_bytes().partition(b"\n")[0]
    storage.path(5).write_bytes(signed + b"\n" + storage.path(4).read_bytes().partition(b"\n")[2])


def remove_one(storage: Storage) -> None:
    storage.path(7).unlink()


def remove_two(storage: Storage) -> None:
    for sequence in (7, 8):
        storage.path(sequence).unlink()


def remove_first(storage: Storage) -> None:
    storage.path(1).unlink()


def remove_and_renumber(storage: Storage) -> None:
    storage.path(6).unlink()
    for sequence in range(7, LENGTH + 1):
        storage.renumber(sequence, sequence - 1)


def insert_and_renumber(storage: Storage) -> None:
    for sequence in range(LENGTH, 6, -1):
        storage.renumber(sequence, sequence + 1)
    shutil.copy(storage.path(6), storage.path(7))
    storage.edit(7, lambda document: document["entry"].update(sequence=7))


def exchange(storage: Storage) -> None:
    one, other = storage.path(6).read_bytes(), storage.path(9).read_bytes()
    storage.path(6).write_bytes(other)
    storage.path(9).write_bytes(one)


def renumber(document: Any, number: int) -> None:
    document["entry"].update(sequence=number)


def exchange_and_renumber(storage: Storage) -> None:
    exchange(storage)
    for sequence in (6, 9):
        storage.edit(sequence, partial(renumber, number=sequence))


def repeat_last(storage: Storage) -> None:
    shutil.copy(storage.path(LENGTH), storage.path(LENGTH + 1))


def repeat_with_new_number(storage: Storage) -> None:
    repeat_last(storage)
    storage.edit(LENGTH + 1, lambda document: document["entry"].update(sequence=LENGTH + 1))


def cut_tail(storage: Storage) -> None:
    for sequence in (LENGTH - 1, LENGTH):
        storage.path(sequence).unlink()


def cut_all(storage: Storage) -> None:
    shutil.rmtree(storage.folder)


def fork_with_key(storage: Storage) -> None:
    """Continue a restored copy on another machine with the key."""
    cut_tail(storage)
    other = storage.open()
    for sequence in (LENGTH - 1, LENGTH):
        other.append(command_entry(sequence, reason="another history"))


def copy_of_another_endpoint(storage: Storage) -> None:
    other = storage.open()
    for sequence in range(1, LENGTH + 1):
        body = OperatorCommandSent(command=OperatorCommand.ADVANCE)
        other.append(entry(sequence, body, endpoint="faces"))
    shutil.copy(storage.root / "faces" / "00000006.jsonl", storage.path(6))


def append_grant_without_key(storage: Storage) -> None:
    append_unsigned(storage.root, ENDPOINT, OperatorCommandSent(command=OperatorCommand.ADVANCE))


def tear(storage: Storage) -> None:
    storage.path(6).write_bytes(storage.path(6).read_bytes()[:60])


def empty(storage: Storage) -> None:
    storage.path(6).write_bytes(b"")


def append_text(storage: Storage) -> None:
    storage.path(5).write_bytes(storage.path(5).read_bytes() + b"\n[]")


def newer_schema(storage: Storage) -> None:
    storage.edit(LENGTH, lambda document: document["entry"].update(schema=3))


def unknown_kind(storage: Storage) -> None:
    storage.edit(LENGTH, lambda document: document["entry"]["body"].update(kind="of tomorrow"))


DAMAGE = (
    edit_time, edit_actor_without_signature, edit_reason, edit_grant, edit_last, edit_previous,
    edit_snapshot_digest, space_in_an_entry, remove_signature_of_grant, sign_by_stranger,
    borrow_signature, remove_one, remove_two, remove_first, remove_and_renumber,
    insert_and_renumber, exchange, exchange_and_renumber, repeat_last, repeat_with_new_number,
    copy_of_another_endpoint, append_grant_without_key, tear, empty, append_text, newer_schema,
    unknown_kind,
)  # fmt: skip
"""Damage that any reader detects."""

REWINDS = (cut_tail, cut_all, fork_with_key)
"""Damage that only a machine which has read later entries detects."""


@pytest.mark.parametrize("damage", [*DAMAGE, *REWINDS], ids=lambda damage: damage.__name__)
@pytest.mark.parametrize("has_snapshot", [True, False])
def test_state_of_damaged_ledger_raises_error_or_is_unchanged(
    tmp_path: Path, damage: Callable[[Storage], None], has_snapshot: bool
) -> None:
    storage = Storage(tmp_path)
    before = storage.open().state(ENDPOINT)
    damage(storage)
    if not has_snapshot:
        (storage.folder / "snapshot.json").unlink(missing_ok=True)
    found = read_state(storage)
    if isinstance(found, CorruptStateError):
        assert ENDPOINT in found.where
        assert found.remedy
    else:
        assert found == before


def read_state(storage: Storage) -> ReleaseState | CorruptStateError:
    try:
        return storage.open(seen=True).state(ENDPOINT)
    except CorruptStateError as error:
        return error


@pytest.mark.parametrize("damage", DAMAGE, ids=lambda damage: damage.__name__)
def test_read_of_damaged_ledger_raises_error_and_read_intact_returns_first_entries(
    tmp_path: Path, damage: Callable[[Storage], None]
) -> None:
    storage = Storage(tmp_path)
    before = storage.open().read(ENDPOINT)
    damage(storage)
    with pytest.raises(CorruptStateError) as caught:
        storage.open().read(ENDPOINT)
    assert caught.value.remedy
    intact = storage.open().read_intact(ENDPOINT)
    assert [one.sequence for one in intact] == list(range(1, len(intact) + 1))
    undamaged = 0 if damage is remove_first else 4
    assert intact[:undamaged] == before[:undamaged]


def test_read_of_edited_first_entry_suggests_backup_and_of_unknown_key_suggests_trust(
    tmp_path: Path,
) -> None:
    storage = Storage(tmp_path)
    other = ObjectLedger(LocalObjects(storage.root), make_ledger_keys(FakeSigner(b"other")))
    with pytest.raises(CorruptStateError) as unknown:
        other.read(ENDPOINT)
    assert "If you trust the owner of the key" in unknown.value.remedy
    storage.edit(1, lambda document: document["entry"].update(actor="eve"))
    with pytest.raises(CorruptStateError) as edited:
        storage.open().read(ENDPOINT)
    assert edited.value.remedy.startswith("Restore the file from a backup")


@pytest.mark.parametrize("damage", REWINDS, ids=lambda damage: damage.__name__)
def test_state_of_rewound_ledger_raises_corrupt_state_error_until_seen_record_is_deleted(
    tmp_path: Path, damage: Callable[[Storage], None]
) -> None:
    storage = Storage(tmp_path)
    damage(storage)
    with pytest.raises(CorruptStateError, match="the ledger lost entries") as caught:
        storage.open(seen=True).state(ENDPOINT)
    assert f"onnx-ops ledger adopt {ENDPOINT}` on a machine with" in caught.value.remedy
    (storage.seen / f"{ENDPOINT}.json").unlink()
    assert storage.open(seen=True).state(ENDPOINT).head in (0, LENGTH - 2, LENGTH)


def test_state_of_rewritten_ledger_in_open_reader_raises_corrupt_state_error(
    tmp_path: Path,
) -> None:
    storage = Storage(tmp_path)
    reader = storage.open()
    reader.state(ENDPOINT)
    cut_tail(storage)
    other = storage.open()
    for sequence in range(LENGTH - 1, LENGTH + 2):
        other.append(command_entry(sequence, reason="another history"))
    with pytest.raises(CorruptStateError, match="does not follow"):
        reader.state(ENDPOINT)


def test_ledger_state_with_damaged_record_of_seen_head_ignores_that_record(tmp_path: Path) -> None:
    storage = Storage(tmp_path)
    (storage.seen / f"{ENDPOINT}.json").write_text("{")
    cut_tail(storage)
    assert storage.open(seen=True).state(ENDPOINT).head == LENGTH - 2


@pytest.mark.parametrize(("endpoint", "sequence"), [(ENDPOINT, LENGTH - 1), ("other", LENGTH)])
def test_decode_of_entry_under_other_name_raises_corrupt_state_error(
    tmp_path: Path, endpoint: str, sequence: int
) -> None:
    """The chain also detects most exchanged entries; this check needs no other entry."""
    from onnx_ops.adapters.ledgers.chain import decode

    data = Storage(tmp_path).path(LENGTH).read_bytes()
    assert decode(ENDPOINT, LENGTH, data).chained.entry.sequence == LENGTH
    with pytest.raises(CorruptStateError, match="contains entry 14 of endpoint digits"):
        decode(endpoint, sequence, data)
