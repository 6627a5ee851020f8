"""The ledgers by their suite, and tests that are specific to files."""

from __future__ import annotations

import errno
import json
import os
import uuid
from pathlib import Path

import pytest

from onnx_ops.adapters.files import FsspecObjects, LocalObjects
from onnx_ops.adapters.ledgers.log import MemoryLedger, ObjectLedger
from onnx_ops.domain.ledger import ReleaseState, fold
from onnx_ops.errors import CorruptStateError
from onnx_ops.testing.fakes import make_ledger_keys
from onnx_ops.testing.ledgers import ENDPOINT, LedgerSuite, Opener, command_entry
from tests.support.objects import ObjectLedgerSuite


class TestLocalLedger(ObjectLedgerSuite):
    @pytest.fixture
    def place(self, tmp_path: Path) -> str:
        return str(tmp_path / "ledger")


class TestRemoteLedger(ObjectLedgerSuite):
    """The ledger on fsspec's file system in memory, which belongs to one process."""

    processes = False

    @pytest.fixture
    def place(self) -> str:
        return f"memory://{uuid.uuid4().hex}/ledger"


class TestMemoryLedger(LedgerSuite):
    processes = False

    @pytest.fixture
    def opener(self) -> Opener:
        ledger = MemoryLedger()
        return lambda: ledger


def open_folder(folder: Path) -> ObjectLedger:
    return ObjectLedger(LocalObjects(folder), make_ledger_keys())


def change_entry(folder: Path, sequence: int, **changes: object) -> None:
    """Change fields of a stored entry, and keep its signatures."""
    path = folder / f"{sequence:08d}.jsonl"
    signed, *rest = path.read_text().splitlines()
    document = json.loads(signed)
    document["entry"] |= changes
    path.write_text("\n".join([json.dumps(document), *rest]))


@pytest.fixture
def written(tmp_path: Path) -> tuple[ObjectLedger, Path]:
    """Return a ledger of three entries, and its folder."""
    ledger = open_folder(tmp_path)
    for sequence in (1, 2, 3):
        ledger.append(command_entry(sequence))
    return ledger, tmp_path / ENDPOINT


@pytest.mark.parametrize("content", [b"", b"{", b"null", b'{"endpoint": "digits"}'])
def test_ledger_read_with_unreadable_entry_raises_corrupt_state_error_with_its_name(
    written: tuple[ObjectLedger, Path], content: bytes
) -> None:
    ledger, folder = written
    (folder / "00000002.jsonl").write_bytes(content)
    with pytest.raises(CorruptStateError) as caught:
        ledger.read(ENDPOINT)
    assert caught.value.where == f"ledger {ENDPOINT}/00000002.jsonl"


def test_ledger_read_with_missing_entry_raises_corrupt_state_error(
    written: tuple[ObjectLedger, Path],
) -> None:
    ledger, folder = written
    (folder / "00000002.jsonl").unlink()
    with pytest.raises(CorruptStateError, match="missing"):
        ledger.read(ENDPOINT)


def test_ledger_read_with_entry_of_other_endpoint_raises_corrupt_state_error(
    written: tuple[ObjectLedger, Path],
) -> None:
    ledger, folder = written
    other = folder.parent / "other"
    other.mkdir()
    (folder / "00000001.jsonl").rename(other / "00000001.jsonl")
    with pytest.raises(CorruptStateError, match="contains entry 1 of endpoint digits"):
        ledger.read("other")


def test_ledger_read_with_foreign_files_ignores_them(written: tuple[ObjectLedger, Path]) -> None:
    ledger, folder = written
    for name in (".tmp-x", "notes.txt", "1.jsonl", "00000004.jsonl.bak"):
        (folder / name).write_text("not an entry")
    assert len(ledger.read(ENDPOINT)) == 3


class Counted(FsspecObjects):
    """Objects that count the calls which read or list them."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.reads = 0

    def read(self, name: str) -> bytes | None:
        self.reads += 1
        return super().read(name)

    def list_names(self, prefix: str) -> list[str]:
        self.reads += 1
        return super().list_names(prefix)


def test_state_of_long_ledger_needs_at_most_ten_reads() -> None:
    objects = Counted(f"memory://{uuid.uuid4().hex}")
    writer = ObjectLedger(objects, make_ledger_keys())
    for sequence in range(1, 201):
        writer.append(command_entry(sequence))
        objects.reads = 0
        assert ObjectLedger(objects, make_ledger_keys()).state(ENDPOINT).head == sequence
        assert objects.reads <= 10


@pytest.fixture
def kept(tmp_path: Path) -> tuple[ReleaseState, Path]:
    """Return the state of a ledger of nine entries, and its folder.

    The folder has a snapshot of the first eight entries.
    """
    ledger = open_folder(tmp_path)
    for sequence in range(1, 10):
        ledger.append(command_entry(sequence))
    assert (tmp_path / ENDPOINT / "snapshot.json").exists()
    return ledger.state(ENDPOINT), tmp_path


@pytest.mark.parametrize(
    "content", ["torn", "another fold", "another state", "gone", "of a longer ledger"]
)
def test_ledger_state_with_missing_or_unusable_snapshot_is_computed_from_entries(
    kept: tuple[ReleaseState, Path], content: str
) -> None:
    state, folder = kept
    path = folder / ENDPOINT / "snapshot.json"
    document = json.loads(path.read_text())
    if content == "torn":
        path.write_text(path.read_text()[:100])
    elif content == "gone":
        path.unlink()
    elif content == "of a longer ledger":
        for sequence in range(6, 10):
            (folder / ENDPOINT / f"{sequence:08d}.jsonl").unlink()
        state = fold(ENDPOINT, open_folder(folder).read(ENDPOINT))
        assert state.head == 5
    else:
        changed = (
            {"fold": 0}
            if content == "another fold"
            else {"state": document["state"] | {"generation": 99}}
        )
        path.write_text(json.dumps(document | changed))
    assert open_folder(folder).state(ENDPOINT) == state


def test_state_of_restored_ledger_with_other_entries_ignores_snapshot(
    kept: tuple[ReleaseState, Path],
) -> None:
    _, folder = kept
    for sequence in range(6, 10):
        (folder / ENDPOINT / f"{sequence:08d}.jsonl").unlink()
    for sequence in range(6, 9):
        open_folder(folder).append(command_entry(sequence, reason="another history", actor="other"))
    ledger = open_folder(folder)
    assert ledger.state(ENDPOINT) == fold(ENDPOINT, ledger.read(ENDPOINT))


@pytest.mark.parametrize("first", [1, 4, 8])
@pytest.mark.parametrize("count", [1, 2, 5])
@pytest.mark.parametrize("has_snapshot", [True, False])
def test_ledger_state_with_missing_entries_raises_corrupt_state_error_unless_in_snapshot(
    tmp_path: Path, first: int, count: int, has_snapshot: bool
) -> None:
    ledger = open_folder(tmp_path)
    for sequence in range(1, 15):
        ledger.append(command_entry(sequence))
    for sequence in range(first, first + count):
        (tmp_path / ENDPOINT / f"{sequence:08d}.jsonl").unlink()
    state = ledger.state(ENDPOINT)
    if not has_snapshot:
        (tmp_path / ENDPOINT / "snapshot.json").unlink()
    cold = open_folder(tmp_path)
    if has_snapshot and first + count - 1 <= 12:  # the snapshot includes these entries
        assert cold.state(ENDPOINT) == state
    else:
        with pytest.raises(CorruptStateError, match="missing"):
            cold.state(ENDPOINT)
    with pytest.raises(CorruptStateError):
        open_folder(tmp_path).read(ENDPOINT)


def test_ledger_state_in_open_reader_with_missing_entries_raises_corrupt_state_error(
    tmp_path: Path,
) -> None:
    writer, reader = (open_folder(tmp_path) for _ in range(2))
    for sequence in range(1, 8):
        writer.append(command_entry(sequence))
        if sequence == 3:
            assert reader.state(ENDPOINT).head == 3
    for name in ("00000004.jsonl", "00000005.jsonl", "snapshot.json"):
        (tmp_path / ENDPOINT / name).unlink()
    with pytest.raises(CorruptStateError, match="missing"):
        reader.state(ENDPOINT)


@pytest.mark.parametrize(("schema", "remedy"), [(3, "upgrade"), (0, "backup"), ("two", "backup")])
def test_ledger_state_with_entry_of_other_schema_raises_corrupt_state_error(
    written: tuple[ObjectLedger, Path], schema: int | str, remedy: str
) -> None:
    _, folder = written
    change_entry(folder, 2, schema=schema)
    with pytest.raises(CorruptStateError) as caught:
        open_folder(folder.parent).state(ENDPOINT)
    assert caught.value.where.endswith("00000002.jsonl")
    assert remedy in caught.value.remedy


def test_ledger_append_deletes_old_temporary_files_of_killed_writers(tmp_path: Path) -> None:
    ledger = open_folder(tmp_path)
    ledger.append(command_entry(1))
    old, young = (tmp_path / ENDPOINT / f".tmp-{name}" for name in ("old", "young"))
    for path in (old, young):
        path.write_bytes(b"half an entry")
    os.utime(old, (0, 0))
    for sequence in range(2, 66):
        ledger.append(command_entry(sequence))
    assert (old.exists(), young.exists()) == (False, True)


def test_ledger_append_with_unwritable_snapshot_stores_entry(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: LocalObjects, name: str, data: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(LocalObjects, "write", full)
    ledger = open_folder(tmp_path)
    for sequence in range(1, 6):
        ledger.append(command_entry(sequence))
    assert open_folder(tmp_path).state(ENDPOINT).head == 5


def test_read_of_remote_ledger_equals_read_of_local_ledger(
    written: tuple[ObjectLedger, Path],
) -> None:
    ledger, folder = written
    remote = FsspecObjects(f"memory://{uuid.uuid4().hex}")
    for path in sorted(folder.iterdir()):
        remote.write(f"{ENDPOINT}/{path.name}", path.read_bytes())
    assert ObjectLedger(remote, make_ledger_keys()).read(ENDPOINT) == ledger.read(ENDPOINT)
