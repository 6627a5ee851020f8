"""Signed tables of replicas: how they are planned, signed and found."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onnx_ops.domain.artifact import digest_bytes
from onnx_ops.domain.endpoint import EndpointState, TrafficSplit
from onnx_ops.errors import (
    CorruptStateError,
    InvalidSignatureError,
    NotFoundError,
    ServiceUnavailableError,
)
from onnx_ops.protocol.replica_tables import (
    ReplicaTable,
    RollbackTable,
    StoredTable,
    TableNumber,
    decode_table,
    encode_table,
    find_newest,
    give_way,
    gives_candidate_traffic,
    has_same_traffic,
    plan_tables,
    resolve,
)
from onnx_ops.protocol.routing_table import RoutingTable
from onnx_ops.testing.fakes import FakeSigner
from tests.support.endpoints import fileless_deployment
from tests.support.must import must

ENDPOINT = "digits"
SIGNER, THIEF = FakeSigner(b"release"), FakeSigner(b"thief")


def make_state(
    weights: Mapping[str, int], shadow: Mapping[str, int] | None = None
) -> EndpointState:
    return EndpointState(
        deployments=tuple(map(fileless_deployment, weights)),
        split=TrafficSplit(weights=weights, shadow=shadow or {}),
    )


def plan(
    sequence: int,
    weights: Mapping[str, int],
    before: ReplicaTable | None = None,
    shadow: Mapping[str, int] | None = None,
) -> tuple[ReplicaTable | None, ReplicaTable]:
    return plan_tables(
        ENDPOINT, make_state(weights, shadow), sequence, before, digest=None, limits_s={}
    )


@st.composite
def splits(draw: st.DrawFn) -> dict[str, int]:
    """Return weights of one to three deployments out of four."""
    names = draw(st.lists(st.sampled_from("abcd"), min_size=1, max_size=3, unique=True))
    cuts = sorted(
        draw(st.lists(st.integers(0, 100), min_size=len(names) - 1, max_size=len(names) - 1))
    )
    edges = [0, *cuts, 100]
    return {name: edges[place + 1] - edges[place] for place, name in enumerate(names)}


@given(st.lists(splits(), min_size=1, max_size=5))
def test_plan_tables_after_first_table_adds_deployments_before_moving_traffic(
    history: list[dict[str, int]],
) -> None:
    before: ReplicaTable | None = None
    for sequence, weights in enumerate(history, 1):
        prepared, table = plan(sequence, weights, before)
        assert table.table.state.split.weights == weights
        assert table.number == TableNumber(sequence, 1)
        if before is not None:
            loaded = set((prepared or before).table.state.deployments)
            assert {d for d in table.table.state.deployments if weights[d.name]} <= loaded
        if prepared is not None and before is not None:
            assert before.number < prepared.number < table.number
            served = {
                name: weight for name, weight in before.table.state.split.weights.items() if weight
            }
            assert {n: w for n, w in prepared.table.state.split.weights.items() if w} == served
        before = table


@given(st.lists(splits(), min_size=1, max_size=5))
def test_plan_tables_names_fallback_only_if_several_deployments_serve(
    history: list[dict[str, int]],
) -> None:
    before: ReplicaTable | None = None
    for sequence, weights in enumerate(history, 1):
        stable = None if before is None else give_way(before.table).leader().name
        _, before = plan(sequence, weights, before)
        serving = [name for name, weight in weights.items() if weight]
        assert bool(before.table.fallback) == (len(serving) > 1)
        assert gives_candidate_traffic(before.table) == (len(serving) > 1)
        if before.table.fallback:
            assert before.table.fallback == (stable if stable in serving else serving[-1])
            assert give_way(before.table).split.weights[before.table.fallback] == 100


def test_plan_tables_of_candidate_in_shadow_names_fallback_and_gives_candidate_traffic() -> None:
    _, first = plan(1, {"a": 100})
    prepared, table = plan(2, {"b": 0, "a": 100}, first, shadow={"b": 20})
    assert prepared is not None
    assert prepared.table.state.split.shadow == {}
    assert table.table.fallback == "a"
    assert gives_candidate_traffic(table.table)


def test_plan_tables_with_replaced_files_has_no_prepared_table() -> None:
    _, first = plan(1, {"a": 100})
    changed = replace(make_state({"a": 100}), deployments=(fileless_deployment("a", "other"),))
    prepared, table = plan_tables(ENDPOINT, changed, 2, first, digest=None, limits_s={})
    assert prepared is None
    assert table.table.state.leader().manifest == digest_bytes(b"other")


def test_plan_tables_with_lease_keeps_it_in_prepared_and_rollback_tables() -> None:
    _, stable = plan_tables(
        "digits", make_state({"a": 100}), 1, None, digest=None, limits_s={}, is_leased=True
    )
    prepared, canary = plan_tables(
        "digits",
        make_state({"b": 10, "a": 90}),
        2,
        stable,
        digest=None,
        limits_s={},
        is_leased=True,
    )
    back = resolve(
        RollbackTable(endpoint="digits", number=TableNumber(3), to=canary.number), lambda _: canary
    )
    assert prepared is not None
    assert [each.table.is_leased for each in (stable, prepared, canary, back)] == [True] * 4


def test_has_same_traffic_returns_true_only_for_same_weights_and_files() -> None:
    _, first = plan(1, {"a": 100})
    prepared, canary = plan(2, {"b": 10, "a": 90}, first)
    assert prepared is not None
    assert has_same_traffic(first.table, prepared.table)
    assert not has_same_traffic(first.table, canary.table)
    other = replace(make_state({"a": 100}), deployments=(fileless_deployment("a", "other"),))
    assert not has_same_traffic(first.table, RoutingTable(state=other, layout=("a",)))


def test_has_same_traffic_with_other_files_of_shadow_deployment_returns_false() -> None:
    tables = [
        RoutingTable(
            state=replace(
                make_state({"a": 100}),
                deployments=(fileless_deployment("a", "1"), fileless_deployment("b", version)),
                split=TrafficSplit(weights={"a": 100}, shadow={"b": 50}),
            ),
            layout=("a", "b"),
        )
        for version in ("2", "2", "3")
    ]
    assert has_same_traffic(tables[0], tables[1])
    assert not has_same_traffic(tables[0], tables[2])


@given(splits(), st.integers(1, 10**6))
def test_decode_table_of_signed_table_returns_equal_table(
    weights: dict[str, int], sequence: int
) -> None:
    _, table = plan(sequence, weights)
    assert decode_table(encode_table(table, SIGNER), table.number, ENDPOINT, SIGNER) == table


@pytest.mark.parametrize(
    ("number", "endpoint", "what"),
    [
        (TableNumber(6), ENDPOINT, "the object contains table"),
        (TableNumber(5), "letters", "the table is that of endpoint"),
    ],
)
def test_decode_table_of_other_number_or_endpoint_raises_corrupt_state_error(
    number: TableNumber, endpoint: str, what: str
) -> None:
    data = encode_table(plan(5, {"a": 100})[1], SIGNER)
    with pytest.raises(CorruptStateError, match=what):
        decode_table(data, number, endpoint, SIGNER)


def test_decode_table_without_trusted_signature_raises_invalid_signature_error() -> None:
    table = plan(5, {"a": 100})[1]
    signed = encode_table(table, SIGNER)
    line, _, signatures = signed.partition(b"\n")
    document = json.loads(line)
    document["content"]["table"]["state"]["deployments"][0]["version"] = "2"
    changed = json.dumps(document).encode() + b"\n" + signatures
    for data in (encode_table(table, None), encode_table(table, THIEF), changed, line + b"\n[]"):
        with pytest.raises(InvalidSignatureError):
            decode_table(data, table.number, ENDPOINT, SIGNER)


@given(st.binary(max_size=200) | st.text(max_size=200).map(str.encode))
def test_decode_table_of_arbitrary_bytes_raises_corrupt_state_or_signature_error(
    data: bytes,
) -> None:
    with pytest.raises((CorruptStateError, InvalidSignatureError)):
        decode_table(data, TableNumber(1), ENDPOINT, SIGNER)


class TestFindNewest:
    """A store with six tables: `a` serves, `b` gets 10 % and then all, `c` gets 10 %.

    Two of the tables only load `b` and `c`.
    """

    @pytest.fixture
    def stored(self) -> dict[TableNumber, StoredTable]:
        before: ReplicaTable | None = None
        stored: dict[TableNumber, StoredTable] = {}
        for sequence, weights in enumerate(
            ({"a": 100}, {"b": 10, "a": 90}, {"b": 100, "a": 0}, {"c": 10, "b": 90}), 1
        ):
            prepared, before = plan(sequence, weights, before)
            stored |= {table.number: table for table in (prepared, before) if table is not None}
        return stored

    def find(
        self, stored: Mapping[TableNumber, StoredTable], above: TableNumber | None = None
    ) -> ReplicaTable | None:
        def read(number: TableNumber) -> StoredTable:
            if number not in stored:
                raise NotFoundError("it was deleted")
            return stored[number]

        return find_newest([f"{number}.json" for number in stored], read, above)[0]

    def test_find_newest_returns_table_with_highest_number_above_given_number(
        self, stored: dict[TableNumber, StoredTable]
    ) -> None:
        found = self.find(stored)
        assert found is not None
        assert found.number == TableNumber(4, 1)
        assert self.find(stored, TableNumber(4, 1)) is None

    def test_find_newest_with_unavailable_table_raises_instead_of_returning_older_table(
        self, stored: dict[TableNumber, StoredTable]
    ) -> None:
        def read(number: TableNumber) -> StoredTable:
            if number == max(stored):
                raise ServiceUnavailableError("the store does not answer")
            return stored[number]

        with pytest.raises(ServiceUnavailableError):
            find_newest([f"{number}.json" for number in stored], read)

    @pytest.mark.parametrize(("to", "leader"), [(2, "a"), (3, "b"), (4, "b"), (1, "a")])
    def test_find_newest_with_rollback_table_gives_all_traffic_to_stable_deployment(
        self, stored: dict[TableNumber, StoredTable], to: int, leader: str
    ) -> None:
        number = TableNumber(9)
        found = self.find(
            {**stored, number: RollbackTable(endpoint=ENDPOINT, number=number, to=TableNumber(to))}
        )
        assert found is not None
        assert found.number == number
        assert found.table.state.generation == number.generation
        assert {n: w for n, w in found.table.state.split.weights.items() if w} == {leader: 100}
        assert not gives_candidate_traffic(found.table)

    def test_find_newest_ignores_rollback_table_with_invalid_target(
        self, stored: dict[TableNumber, StoredTable]
    ) -> None:
        ways = {
            number: RollbackTable(endpoint=ENDPOINT, number=number, to=to)
            for number, to in ((TableNumber(7), TableNumber(2)), (TableNumber(8), TableNumber(7)))
        }
        found = self.find(
            {
                **stored,
                **ways,
                TableNumber(9): RollbackTable(
                    endpoint=ENDPOINT, number=TableNumber(9), to=TableNumber(5)
                ),
            }
        )
        assert found is not None
        assert found.number == TableNumber(7)


@given(st.integers(0, 10**8 - 1), st.integers(0, 1))
def test_table_number_round_trips_through_name_and_generation(sequence: int, phase: int) -> None:
    number = TableNumber(sequence, phase)
    assert TableNumber.parse(number.name.rpartition("/")[2]) == number
    assert TableNumber.from_generation(number.generation) == number


@given(st.text(max_size=20))
def test_table_number_parse_of_text_returns_none_or_number_of_that_name(name: str) -> None:
    parsed = TableNumber.parse(name)
    assert parsed is None or parsed.name == f"table/{name}"


KEY = "0f" * 16


def test_plan_tables_keeps_feedback_key_of_first_table() -> None:
    table: ReplicaTable | None = None
    for sequence, weights in enumerate(({"a": 100}, {"a": 90, "b": 10}, {"c": 50, "a": 50}), 1):
        state, key = make_state(weights), f"{sequence:032x}"
        prepared, table = plan_tables(
            ENDPOINT, state, sequence, table, digest=None, limits_s={}, new_key=key
        )
        assert {one.table.feedback_key for one in (prepared, table) if one is not None} == {
            f"{1:032x}"
        }


def test_plan_tables_after_table_without_feedback_key_sets_new_key() -> None:
    _, first = plan(1, {"a": 100})
    _, second = plan_tables(
        ENDPOINT, make_state({"a": 100}), 2, first, digest=None, limits_s={}, new_key=KEY
    )
    assert (first.table.feedback_key, second.table.feedback_key) == ("", KEY)


def test_find_newest_with_rollback_table_keeps_feedback_key() -> None:
    _, first = plan_tables(
        ENDPOINT, make_state({"a": 100}), 1, None, digest=None, limits_s={}, new_key=KEY
    )
    back = RollbackTable(endpoint=ENDPOINT, number=TableNumber(5), to=first.number)
    tables: dict[TableNumber, StoredTable] = {one.number: one for one in (first, back)}
    newest, _ = find_newest([f"{one}.json" for one in tables], tables.__getitem__)
    assert must(newest).table.feedback_key == KEY


def test_feedback_key_does_not_appear_in_text_of_table() -> None:
    _, table = plan_tables(
        ENDPOINT, make_state({"a": 100}), 1, None, digest=None, limits_s={}, new_key=KEY
    )
    assert table.table.feedback_key == KEY
    assert KEY not in f"{table} {table!r} {table.table}"
