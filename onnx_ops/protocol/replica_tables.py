"""Routing tables that replicas follow.

A table is an object that is created once, numbered by the ledger, and signed. A replica follows the
highest table that counts, and skips objects that do not. A table counts if a trusted release key
has signed it for this endpoint and this number. A `WayBack` needs no signature: it names a signed
table, and gives all traffic to the version that answers there without a lease.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Self, TypeAlias

from onnx_ops import codec
from onnx_ops.attestation import sign_bytes, verify_bytes
from onnx_ops.domain.artifact import Digest
from onnx_ops.domain.attestation import EnvelopeSignature
from onnx_ops.domain.endpoint import EndpointState, TrafficSplit
from onnx_ops.domain.quantities import OMIT_DEFAULT
from onnx_ops.errors import CorruptStateError, OnnxOpsError
from onnx_ops.ports import Signer, Verifier
from onnx_ops.protocol.routing_table import RoutingTable, build_next_table

FOLDER = "table"
"""Folder of the tables, below the control location of the place."""
HEAD = "head.json"
"""Name of a hint beside the folder: the last `TableHead` that was written.

Only the time of its writing has an effect.
"""
PAYLOAD_TYPE = "application/vnd.onnx-ops.replica-table+json"
LEASE_S = 30.0
"""Seconds for which a replica gives a candidate traffic.

They begin when it lists the tables.
"""
DEADLINE_S = 5.0
"""Largest duration in seconds of a request that began under the lease.

A replica has the same time to adopt a table.
"""
MAX_TABLE_BYTES = 4 << 20

_NAME = re.compile(r"(\d{8})-([01])\.json")


@dataclass(frozen=True, slots=True, order=True)
class TableNumber:
    """Number of a table: the sequence of the ledger's entry, and a phase.

    The phase is 0 for the table that only has its models loaded.
    """

    sequence: int
    phase: int = 1

    @classmethod
    def parse(cls, name: str) -> Self | None:
        """Return the number in the name of an object; None if it is not that of a table."""
        match = _NAME.fullmatch(name)
        return None if match is None else cls(int(match[1]), int(match[2]))

    @classmethod
    def from_generation(cls, generation: int) -> Self:
        """Return the number of the table that a server publishes under this generation."""
        return cls(*divmod(generation, 2))

    @property
    def generation(self) -> int:
        """Generation of the table at servers, which grows with the number."""
        return 2 * self.sequence + self.phase

    @property
    def name(self) -> str:
        """Name of the object below the control location."""
        return f"{FOLDER}/{self}.json"

    def __str__(self) -> str:
        return f"{self.sequence:08d}-{self.phase}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaTable:
    """What all replicas of an endpoint serve from this number on.

    Attributes:
        table: deployments, without locations, with their layout; its fallback answers without a
            lease.
        limits_s: latency thresholds of the deployments that are compared, as in a
            `UserCountsRequest`; empty if none are compared.
        previous: digest of the bytes of the table that it follows; None if it is the first.
        judge_timeout_s: seconds after which a candidate that is not judged any more loses its
            traffic; 0: never.
    """

    endpoint: str
    number: TableNumber
    table: RoutingTable
    previous: Digest | None
    limits_s: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    judge_timeout_s: float = field(default=0.0, metadata=OMIT_DEFAULT)


@dataclass(frozen=True, slots=True, kw_only=True)
class WayBack:
    """All traffic goes to the fallback of the table with number `to`.

    Without a fallback, it goes to the leader of that table.
    """

    endpoint: str
    number: TableNumber
    to: TableNumber


@dataclass(frozen=True, slots=True, kw_only=True)
class TableHead:
    """The last table, and a count of the judge's observations of the endpoint."""

    number: TableNumber
    beat: int


StoredTable: TypeAlias = ReplicaTable | WayBack


def encode_table(table: StoredTable, signer: Signer | None) -> bytes:
    """Return the object of a table.

    It is a line of JSON and, with a signer, a line of its DSSE signatures.
    """
    kind = "table" if isinstance(table, ReplicaTable) else "way back"
    line = codec.dumps({"kind": kind, "content": codec.to_json(table)})
    if signer is None:
        return line
    return b"\n".join((line, codec.dumps(list(sign_bytes(PAYLOAD_TYPE, line, signer)))))


def decode_table(
    data: bytes, number: TableNumber, endpoint: str, verifier: Verifier | None
) -> StoredTable:
    """Return the table of an object. Without a verifier, signatures do not count.

    Raises:
        CorruptStateError: it is not a table of this endpoint with this number.
        InvalidSignatureError: no trusted key has signed it.
    """
    where = number.name
    if len(data) > MAX_TABLE_BYTES:
        raise CorruptStateError(f"it has {len(data)} bytes, more than a table", where=where)
    line, _, rest = data.partition(b"\n")
    document = codec.loads(line, dict[str, Any], where=where)
    content = document.get("content")
    table: StoredTable
    if document.get("kind") == "table":
        table = codec.from_json(content, ReplicaTable, where=where)
    else:
        table = codec.from_json(content, WayBack, where=where)
    if table.number != number:
        raise CorruptStateError(f"it is table {table.number}", where=where)
    if table.endpoint != endpoint:
        raise CorruptStateError(
            f"it is a table of endpoint '{table.endpoint[:80]}', not of {endpoint}", where=where
        )
    if isinstance(table, WayBack):
        if table.to >= number:
            raise CorruptStateError("it leads to itself or forward", where=where)
        return table
    if table.table.state.generation != number.generation:
        raise CorruptStateError("its state has another generation", where=where)
    if verifier is not None:
        signatures = codec.loads(rest, tuple[EnvelopeSignature, ...], where=where) if rest else ()
        verify_bytes(PAYLOAD_TYPE, line, signatures, verifier)
    return table


def resolve(table: StoredTable, read: Callable[[TableNumber], ReplicaTable]) -> ReplicaTable:
    """Return the table itself, or the one that a `WayBack` stands for.

    Args:
        read: returns the signed table with a number; raises an OnnxOpsError if there is none.

    Raises:
        OnnxOpsError: the `WayBack` leads to no signed table.
    """
    if isinstance(table, ReplicaTable):
        return table
    target = read(table.to)
    state = give_way(target.table)
    back = RoutingTable(
        state=replace(state, generation=table.number.generation),
        layout=target.table.layout,
        feedback_key=target.table.feedback_key,
        is_leased=target.table.is_leased,
    )
    return ReplicaTable(
        endpoint=table.endpoint, number=table.number, table=back, previous=target.previous
    )


def give_way(table: RoutingTable) -> EndpointState:
    """Return the state in which all traffic goes to the fallback of a table.

    Without a fallback, all traffic goes to its leader.
    """
    name = table.fallback or table.state.leader().name
    weights = {**dict.fromkeys(table.layout, 0), name: 100}
    return replace(table.state, split=TrafficSplit(weights=weights))


def find_newest(
    names: Iterable[str],
    read: Callable[[TableNumber], StoredTable],
    above: TableNumber | None = None,
) -> tuple[ReplicaTable | None, Mapping[str, str]]:
    """Return the highest table that counts, and why higher objects do not, by name.

    Args:
        names: names of the objects in the folder of the tables.
        read: as `read_stored`; raises an OnnxOpsError for an object that does not count.
        above: number of a table that is known: lower ones are not read.
    """
    skipped: dict[str, str] = {}
    numbers: list[TableNumber] = []
    for name in names:
        number = TableNumber.parse(name)
        if number is None:
            skipped[name] = "its name is no number of a table"
        elif above is None or number > above:
            numbers.append(number)
    for number in sorted(numbers, reverse=True):
        try:
            return resolve(read(number), lambda to: require_table(read(to))), skipped
        except OnnxOpsError as error:
            skipped[number.name.removeprefix(f"{FOLDER}/")] = error.what
    return None, skipped


def require_table(table: StoredTable) -> ReplicaTable:
    """Return a table that is no `WayBack`.

    Raises:
        CorruptStateError: it is a `WayBack`.
    """
    if not isinstance(table, ReplicaTable):
        raise CorruptStateError("a way back leads to another way back", where=table.number.name)
    return table


def gives_candidate_traffic(table: RoutingTable) -> bool:
    """Return whether any deployment but the fallback gets requests or copies of them."""
    return bool(table.fallback) and bool(list_receivers(table.state) - {table.fallback})


def has_same_traffic(one: RoutingTable, other: RoutingTable) -> bool:
    """Return whether both tables give the same deployments the same traffic.

    Traffic consists of requests and copies.
    """
    first, second = (
        (
            {name: weight for name, weight in table.state.split.weights.items() if weight},
            {name: share for name, share in table.state.split.shadow.items() if share},
            {
                d.name: d.manifest
                for d in table.state.deployments
                if table.state.split.weights.get(d.name)
            },
            table.fallback,
        )
        for table in (one, other)
    )
    return first == second


def plan_tables(
    endpoint: str,
    state: EndpointState,
    sequence: int,
    before: ReplicaTable | None,
    *,
    digest: Digest | None,
    limits_s: Mapping[str, tuple[float, ...]],
    judge_timeout_s: float = 0.0,
    new_key: str = "",
    is_leased: bool = False,
) -> tuple[ReplicaTable | None, ReplicaTable]:
    """Return the table that loads new models, if needed, and that of the state.

    A model that gets traffic for the first time is first loaded everywhere, while the traffic stays
    as it was. The first table does that; it is None if nothing must be waited for.

    Args:
        before: the newest table.
        digest: digest of its bytes.
        new_key: feedback key if the newest table has none.
        is_leased: whether replicas refuse all requests without a lease.
    """
    number = TableNumber(sequence)
    bare = tuple(replace(d, location="") for d in state.deployments)
    state = replace(
        state, deployments=bare, generation=number.generation, drift=(), out_of_service=()
    )
    prepared = (
        None if before is None else _plan_load(before, state, TableNumber(sequence, 0), digest)
    )
    last = prepared or before
    following = build_next_table(None if last is None else last.table, state)
    fallback = _choose_fallback(
        state, None if before is None else give_way(before.table).leader().name
    )
    table = ReplicaTable(
        endpoint=endpoint,
        number=number,
        table=replace(
            following,
            fallback=fallback,
            feedback_key=following.feedback_key or new_key,
            is_leased=is_leased,
        ),
        previous=digest,
        limits_s=limits_s,
        judge_timeout_s=judge_timeout_s,
    )
    return prepared, table


def _plan_load(
    before: ReplicaTable, state: EndpointState, number: TableNumber, digest: Digest | None
) -> ReplicaTable | None:
    """Return the table that has the new models of a state loaded.

    Its traffic is that of the table before. None if no new model gets traffic. None, too, if a
    deployment that serves gets other files: then nothing is kept.
    """
    old, served = before.table.state, before.table.state.split
    new = [d for d in state.deployments if d not in old.deployments]
    names = {d.name for d in new}
    if not names & list_receivers(state) or names & {
        name for name, weight in served.weights.items() if weight
    }:
        return None
    kept = [d for d in old.deployments if d.name not in names]
    shares = {d.name: served.weights.get(d.name, 0) for d in kept}
    shadow = {name: share for name, share in served.shadow.items() if name in shares}
    split = replace(served, weights={**shares, **dict.fromkeys(names, 0)}, shadow=shadow)
    waiting = EndpointState(deployments=(*new, *kept), split=split, generation=number.generation)
    table = build_next_table(before.table, waiting)
    fallback = before.table.fallback if before.table.fallback in table.layout else ""
    table = replace(table, fallback=fallback, is_leased=before.table.is_leased)
    return replace(before, number=number, table=table, previous=digest)


def list_receivers(state: EndpointState) -> set[str]:
    """Return the deployments that get requests, or copies of them."""
    split = state.split
    return {
        name for shares in (split.weights, split.shadow) for name, share in shares.items() if share
    }


def _choose_fallback(state: EndpointState, served: str | None) -> str:
    """Return the deployment that needs no lease.

    Empty unless another one gets requests or copies too. It is the deployment that needed no lease
    before, or else the last listed one with traffic.
    """
    serving = [d.name for d in state.deployments if state.split.weights.get(d.name)]
    chosen = served if served in serving else serving[-1]
    return chosen if list_receivers(state) - {chosen} else ""
