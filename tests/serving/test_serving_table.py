from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from onnx_ops.domain.endpoint import Deployment
from onnx_ops.protocol.routing_table import (
    CURRENT_FILE,
    PREVIOUS_FILE,
    RoutingTable,
    TableFile,
    build_next_table,
    write_durably,
)
from onnx_ops.testing.endpoints import state_of


@pytest.fixture
def history(blue: Deployment, green: Deployment) -> tuple[RoutingTable, RoutingTable, RoutingTable]:
    first = build_next_table(None, replace(state_of(blue, blue=100), generation=1))
    second = build_next_table(first, replace(state_of(blue, green, blue=90, green=10), generation=2))
    return first, second, build_next_table(second, replace(state_of(blue, green, blue=0, green=100), generation=3))


def test_nothing_was_published_yet(tmp_path: Path) -> None:
    assert TableFile(tmp_path).read() is None


def test_what_was_written_is_read_and_leaves_no_temporary_files(
    tmp_path: Path, history: tuple[RoutingTable, RoutingTable, RoutingTable]
) -> None:
    for number, table in enumerate(history):
        folder = tmp_path / "t"
        folder.mkdir(exist_ok=True)
        TableFile(folder).write(table)
        assert TableFile(folder).read() == table
        assert {p.name for p in folder.iterdir()} == ({CURRENT_FILE} if number == 0 else {CURRENT_FILE, PREVIOUS_FILE})


def test_a_table_cut_at_any_byte_gives_way_to_the_previous_one(
    tmp_path: Path, history: tuple[RoutingTable, RoutingTable, RoutingTable]
) -> None:
    folder = tmp_path / "t"
    folder.mkdir()
    tables = TableFile(folder)
    tables.write(history[0])
    tables.write(history[1])
    whole = (folder / CURRENT_FILE).read_bytes()
    for end in range(len(whole)):
        (folder / CURRENT_FILE).write_bytes(whole[:end])
        assert tables.read() == history[0]
    (folder / CURRENT_FILE).unlink()
    assert tables.read() == history[0]


def test_a_torn_table_never_replaces_the_good_previous_one(
    tmp_path: Path, history: tuple[RoutingTable, RoutingTable, RoutingTable]
) -> None:
    folder = tmp_path / "t"
    folder.mkdir()
    tables = TableFile(folder)
    tables.write(history[0])
    tables.write(history[1])
    (folder / CURRENT_FILE).write_bytes(b"{")
    tables.write(history[2])
    assert tables.read() == history[2]
    (folder / CURRENT_FILE).write_bytes(b"{")
    assert tables.read() == history[0]


def test_two_torn_tables_are_no_table(tmp_path: Path) -> None:
    (tmp_path / CURRENT_FILE).write_bytes(b"\x00" * 100)
    (tmp_path / PREVIOUS_FILE).write_bytes(b'{"format": "something else"}')
    assert TableFile(tmp_path).read() is None


def test_a_write_that_fails_leaves_the_table_of_before(
    tmp_path: Path, history: tuple[RoutingTable, RoutingTable, RoutingTable], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "t"
    folder.mkdir()
    tables = TableFile(folder)
    tables.write(history[0])

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space left"):
        tables.write(history[1])
    assert tables.read() == history[0]
    assert not [p for p in folder.iterdir() if p.name.startswith(".tmp-")]


def test_a_file_is_on_the_disk_before_it_takes_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, int]] = []
    fsync, rename = os.fsync, Path.replace

    def recorded_fsync(handle: int) -> None:
        calls.append(("fsync", os.fstat(handle).st_ino))
        fsync(handle)

    def recorded_rename(path: Path, target: Path) -> Path:
        calls.append(("rename", path.stat().st_ino))
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", recorded_fsync)
    monkeypatch.setattr(Path, "replace", recorded_rename)
    write_durably(tmp_path / CURRENT_FILE, b"{}")
    file, folder = ((tmp_path / CURRENT_FILE).stat().st_ino, tmp_path.stat().st_ino)
    assert calls == [("fsync", file), ("rename", file), ("fsync", folder)]
