from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onnx_ops.domain.artifact import digest_json
from onnx_ops.domain.endpoint import EndpointState, TrafficSplit
from onnx_ops.errors import CorruptStateError
from onnx_ops.protocol.routing_table import (
    CURRENT_FILE,
    PREVIOUS_FILE,
    RoutingTable,
    TableFile,
    build_next_table,
    decode_table,
    encode_table,
)
from tests.support.endpoints import fileless_deployment


def state(weights: dict[str, int], generation: int = 1) -> EndpointState:
    return EndpointState(
        deployments=tuple(map(fileless_deployment, weights)),
        split=TrafficSplit(weights=weights),
        generation=generation,
    )


@st.composite
def states(draw: st.DrawFn) -> EndpointState:
    names = draw(st.lists(st.sampled_from("abcdef"), min_size=1, max_size=4, unique=True))
    cuts = sorted(
        draw(st.lists(st.integers(0, 100), min_size=len(names) - 1, max_size=len(names) - 1))
    )
    edges = [0, *cuts, 100]
    return state(
        {name: edges[i + 1] - edges[i] for i, name in enumerate(names)}, draw(st.integers(0, 10**9))
    )


@given(st.lists(states(), min_size=1, max_size=4))
def test_decode_table_restores_table_and_slots_match_split(history: list[EndpointState]) -> None:
    table: RoutingTable | None = None
    for published in history:
        table = build_next_table(table, published)
    assert table is not None
    assert decode_table(encode_table(table)) == table
    percent = table.list_slots()
    assert len(percent) == 100
    assert {n: percent.count(n) for n in table.layout} == {
        n: table.state.split.weights.get(n, 0) for n in table.layout
    }


def test_build_next_table_puts_new_deployments_first() -> None:
    first = build_next_table(None, state({"a": 100}))
    second = build_next_table(first, state({"a": 90, "b": 10}))
    assert second.layout == ("b", "a")
    assert build_next_table(second, state({"a": 10, "b": 90})).layout == ("b", "a")
    assert build_next_table(second, state({"b": 70, "a": 20, "c": 10})).layout == ("c", "b", "a")
    assert build_next_table(second, state({"a": 100})).layout == ("a",)


def test_build_next_table_with_two_new_deployments_orders_them_by_weight() -> None:
    assert build_next_table(None, state({"a": 10, "b": 90})).layout == ("a", "b")
    assert build_next_table(None, state({"a": 90, "b": 10})).layout == ("b", "a")
    assert build_next_table(None, state({"a": 50, "b": 50})).layout == ("b", "a")


def test_build_next_table_with_changed_manifest_treats_deployment_as_new() -> None:
    first = build_next_table(None, state({"a": 90, "b": 10}))
    changed = replace(
        state({"a": 10, "b": 90}),
        deployments=(fileless_deployment("a", "other"), fileless_deployment("b")),
    )
    assert build_next_table(first, changed).layout == ("a", "b")


def test_get_experiment_returns_newest_deployment_with_traffic() -> None:
    table = build_next_table(build_next_table(None, state({"a": 100})), state({"a": 90, "b": 10}))
    begun = table.get_experiment()
    assert build_next_table(table, state({"a": 50, "b": 50})).get_experiment() == begun
    assert build_next_table(table, state({"a": 50, "b": 50, "c": 0})).get_experiment() == begun
    assert build_next_table(table, state({"a": 50, "b": 40, "c": 10})).get_experiment() != begun


def test_decode_table_of_damaged_bytes_raises_corrupt_state_error() -> None:
    data = encode_table(build_next_table(None, state({"a": 60, "b": 40}, generation=17)))
    for end in range(len(data)):
        with pytest.raises(CorruptStateError):
            decode_table(data[:end])
    for place in range(len(data)):
        altered = bytes([*data[:place], data[place] ^ 1, *data[place + 1 :]])
        with pytest.raises(CorruptStateError):
            decode_table(altered)
    with pytest.raises(CorruptStateError):
        decode_table(data + b"\0" * 512)


def test_decode_table_of_invalid_documents_raises_corrupt_state_error() -> None:
    good = json.loads(encode_table(build_next_table(None, state({"a": 100}))))
    content = {**good["table"], "layout": ["z"]}
    document: Any
    for document in (
        [],
        {},
        {**good, "format": "other"},
        {**good, "version": 2},
        {**good, "table": None},
        {**good, "table": content, "checksum": digest_json(content)},
    ):
        with pytest.raises(CorruptStateError):
            decode_table(json.dumps(document).encode())
    with pytest.raises(CorruptStateError):
        decode_table(b'{"format":"onnx-ops/table","version":1,"checksum":"","table":NaN}')


@pytest.fixture
def history() -> list[RoutingTable]:
    first = build_next_table(None, state({"a": 100}))
    second = build_next_table(first, state({"a": 90, "b": 10}, 2))
    return [first, second, build_next_table(second, state({"a": 0, "b": 100}, 3))]


def test_table_file_read_returns_current_table_or_previous_one_if_current_is_missing(
    tmp_path: Path, history: list[RoutingTable]
) -> None:
    tables = TableFile(tmp_path)
    assert tables.read() is None
    for number, table in enumerate(history):
        tables.write(table)
        assert tables.read() == table
        files = {CURRENT_FILE} if number == 0 else {CURRENT_FILE, PREVIOUS_FILE}
        assert {path.name for path in tmp_path.iterdir()} == files
    (tmp_path / CURRENT_FILE).unlink()
    assert tables.read() == history[1]


def test_table_file_write_over_damaged_table_keeps_valid_previous_table(
    tmp_path: Path, history: list[RoutingTable]
) -> None:
    tables = TableFile(tmp_path)
    tables.write(history[0])
    tables.write(history[1])
    (tmp_path / CURRENT_FILE).write_bytes(b"{")
    tables.write(history[2])
    assert tables.read() == history[2]
    (tmp_path / CURRENT_FILE).write_bytes(b"{")
    assert tables.read() == history[0]


def test_table_file_read_of_two_invalid_files_returns_none(tmp_path: Path) -> None:
    (tmp_path / CURRENT_FILE).write_bytes(b"{")
    (tmp_path / PREVIOUS_FILE).write_bytes(b'{"format": "something else"}')
    assert TableFile(tmp_path).read() is None


def test_table_file_write_that_fails_keeps_previous_table(
    tmp_path: Path, history: list[RoutingTable], monkeypatch: pytest.MonkeyPatch
) -> None:
    tables = TableFile(tmp_path)
    tables.write(history[0])

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space left"):
        tables.write(history[1])
    assert tables.read() == history[0]
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".tmp-")]
