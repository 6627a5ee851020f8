"""Whatever happens to the table's file, what is read is a table that was published."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from onnx_ops.domain.endpoint import Deployment
from onnx_ops.protocol.routing_table import CURRENT_FILE, PREVIOUS_FILE, RoutingTable, TableFile, build_next_table
from onnx_ops.testing.endpoints import state_of


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Each refused table is logged, and here are thousands."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.fixture
def tables(tmp_path: Path, blue: Deployment, green: Deployment) -> tuple[TableFile, RoutingTable, RoutingTable]:
    """The file, the table before, and the one published last."""
    file = TableFile(tmp_path)
    first = build_next_table(None, replace(state_of(blue, blue=100), generation=1))
    second = build_next_table(first, replace(state_of(blue, green, blue=70, green=30), generation=2))
    file.write(first)
    file.write(second)
    return file, first, second


def test_truncated_at_every_byte_the_previous_table_is_read(
    tmp_path: Path, tables: tuple[TableFile, RoutingTable, RoutingTable]
) -> None:
    file, first, second = tables
    whole = (tmp_path / CURRENT_FILE).read_bytes()
    for size in range(len(whole)):
        (tmp_path / CURRENT_FILE).write_bytes(whole[:size])
        assert file.read() == first, f"truncated to {size} bytes"
    (tmp_path / CURRENT_FILE).write_bytes(whole)
    assert file.read() == second


def test_with_any_byte_changed_no_table_is_read_that_was_not_published(
    tmp_path: Path, tables: tuple[TableFile, RoutingTable, RoutingTable]
) -> None:
    file, first, second = tables
    whole = (tmp_path / CURRENT_FILE).read_bytes()
    for place in range(len(whole)):
        torn = bytearray(whole)
        torn[place] ^= 1 << place % 8
        (tmp_path / CURRENT_FILE).write_bytes(torn)
        assert file.read() in (first, second), f"byte {place}"


def test_garbage_after_the_table_is_not_read_past(
    tmp_path: Path, tables: tuple[TableFile, RoutingTable, RoutingTable]
) -> None:
    file, first, _ = tables
    with (tmp_path / CURRENT_FILE).open("ab") as stream:
        stream.write(b"\0" * 512)
    assert file.read() == first


def test_both_torn_is_no_table(tmp_path: Path, tables: tuple[TableFile, RoutingTable, RoutingTable]) -> None:
    for name in (CURRENT_FILE, PREVIOUS_FILE):
        (tmp_path / name).write_bytes((tmp_path / name).read_bytes()[:-1])
    assert tables[0].read() is None
