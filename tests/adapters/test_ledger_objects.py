"""The ledgers, each by the suite for ledgers, and what is special to files."""

from __future__ import annotations

import functools
import uuid
from pathlib import Path

import pytest

from onnx_ops.adapters.ledgers.log import MemoryLedger, ObjectLedger
from onnx_ops.adapters.objects import FsspecObjects, LocalObjects, open_objects
from onnx_ops.errors import StateCorrupt
from onnx_ops.ports import Ledger
from onnx_ops.testing.ledgers import ENDPOINT, LedgerSuite, Opener, spoken


def open_ledger(url: str) -> Ledger:
    return ObjectLedger(open_objects(url))


class TestLocalLedger(LedgerSuite):
    @pytest.fixture
    def opener(self, tmp_path: Path) -> Opener:
        return functools.partial(open_ledger, str(tmp_path / "ledger"))


class TestRemoteLedger(LedgerSuite):
    """fsspec's file system in memory belongs to one process."""

    processes = False

    @pytest.fixture
    def opener(self) -> Opener:
        return functools.partial(open_ledger, f"memory://{uuid.uuid4().hex}/ledger")


class TestMemoryLedger(LedgerSuite):
    processes = False

    @pytest.fixture
    def opener(self) -> Opener:
        ledger = MemoryLedger()
        return lambda: ledger


@pytest.fixture
def written(tmp_path: Path) -> tuple[ObjectLedger, Path]:
    """A ledger of three entries, and its folder."""
    ledger = ObjectLedger(LocalObjects(tmp_path))
    for sequence in (1, 2, 3):
        ledger.append(spoken(sequence))
    return ledger, tmp_path / ENDPOINT


@pytest.mark.parametrize("content", [b"", b"{", b"null", b'{"endpoint": "digits"}'])
def test_an_entry_that_cannot_be_read_is_named(written: tuple[ObjectLedger, Path], content: bytes) -> None:
    ledger, folder = written
    (folder / "00000002.json").write_bytes(content)
    with pytest.raises(StateCorrupt) as caught:
        ledger.read(ENDPOINT)
    assert caught.value.where == f"ledger {ENDPOINT}/00000002.json"


def test_a_missing_entry_is_not_passed_over(written: tuple[ObjectLedger, Path]) -> None:
    ledger, folder = written
    (folder / "00000002.json").unlink()
    with pytest.raises(StateCorrupt, match="not where it belongs"):
        ledger.read(ENDPOINT)


def test_an_entry_of_another_endpoint_is_refused(written: tuple[ObjectLedger, Path]) -> None:
    ledger, folder = written
    other = folder.parent / "other"
    other.mkdir()
    (folder / "00000001.json").rename(other / "00000001.json")
    with pytest.raises(StateCorrupt, match="not where it belongs"):
        ledger.read("other")


def test_files_that_are_no_entries_are_passed_over(written: tuple[ObjectLedger, Path]) -> None:
    ledger, folder = written
    for name in (".tmp-x", "notes.txt", "1.json", "00000004.json.bak"):
        (folder / name).write_text("not an entry")
    assert len(ledger.read(ENDPOINT)) == 3


def test_a_remote_ledger_keeps_what_a_local_one_keeps(written: tuple[ObjectLedger, Path]) -> None:
    ledger, folder = written
    remote = FsspecObjects(f"memory://{uuid.uuid4().hex}")
    for path in sorted(folder.iterdir()):
        remote.write(f"{ENDPOINT}/{path.name}", path.read_bytes())
    assert ObjectLedger(remote).read(ENDPOINT) == ledger.read(ENDPOINT)
