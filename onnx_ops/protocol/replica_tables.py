"""Routing tables that replicas follow.

A table is an object that is created once, numbered by the ledger, and signed. A table is valid if a
trusted release key has signed it for this endpoint and this number. A replica follows the valid
table with the highest number, and skips invalid objects. A `RollbackTable` is valid without a
signature. It refers to a signed table, and gives all traffic to the version that answers without a
lease in that table.
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
from onnx_ops.errors import CorruptStateError, OnnxOpsError, ServiceUnavailableError
from onnx_ops.ports import Signer, Verifier
from onnx_ops.protocol.routing_table import RoutingTable, build_next_table

FOLDER = "table"
"""Folder of the tables, below the control location of the endpoint."""
HEAD = "head.json"
"""Name of an object beside the folder: the last `TableHead` that was written.

Replicas read the named table without waiting for their next listing of the folder. They regard a
changed beat as an analysis of the rollout.
"""
PAYLOAD_TYPE = "application/vnd.onnx-ops.replica-table+json"
LEASE_S = 30.0
"""Seconds for which a replica can give traffic to a candidate.

The lease begins at the last listing of the tables or the last report, whichever is earlier.
"""
DEADLINE_S = 5.0
"""Seconds after `LEASE_S` from which a silent replica counts as without a lease."""
MAX_TABLE_BYTES = 4 << 20

_NAME = re.compile(r"(\d{8})-([01])\.json")


@dataclass(frozen=True, slots=True, order=True)
class TableNumber:
    """Number of a table: the sequence number of the ledger's entry, and a phase.

    With a table of phase 0, replicas load new models before these models get traffic.
    """

    sequence: int
    phase: int = 1

    @classmethod
    def parse(cls, name: str) -> Self | None:
        """Return the number in the name of an object; None if it is not a table's name."""
        match = _NAME.fullmatch(name)
        return None if match is None else cls(int(match[1]), int(match[2]))

    @classmethod
    def from_generation(cls, generation: int) -> Self:
        """Return the number of the table that a server publishes under this generation."""
        return cls(*divmod(generation, 2))

    @property
    def generation(self) -> int:
        """Generation of the table at servers. It increases with the number."""
        return 2 * self.sequence + self.phase

    @property
    def name(self) -> str:
        """Name of the table's object below the control location."""
        return f"{FOLDER}/{self}.json"

    def __str__(self) -> str:
        return f"{self.sequence:08d}-{self.phase}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaTable:
    """The table that all replicas of an endpoint serve from this number on.

    Attributes:
        table: deployments, without locations, with their layout. The fallback of the table answers
            without a lease.
        limits_s: latency thresholds of the deployments that are compared, as in a
            `UserCountsRequest`; empty if none are compared.
        previous: digest of the bytes of the newest table when this one was planned; None for the
            first table.
        judge_timeout_s: seconds after which a candidate loses its traffic if the analyses of its
            rollout have stopped; 0: never.
    """

    endpoint: str
    number: TableNumber
    table: RoutingTable
    previous: Digest | None
    limits_s: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    judge_timeout_s: float = field(default=0.0, metadata=OMIT_DEFAULT)


@dataclass(frozen=True, slots=True, kw_only=True)
class RollbackTable:
    """Object that gives all traffic to the fallback of the table with number `to`.

    If that table has no fallback, its leader gets all traffic.
    """

    endpoint: str
    number: TableNumber
    to: TableNumber


@dataclass(frozen=True, slots=True, kw_only=True)
class TableHead:
    """Number of the newest table, and a beat that each analysis of a rollout changes."""

    number: TableNumber
    beat: int


StoredTable: TypeAlias = ReplicaTable | RollbackTable


def encode_table(table: StoredTable, signer: Signer | None) -> bytes:
    """Serialize a table.

    The result is a line of JSON and, with a signer, a line of DSSE signatures.
    """
    kind = "table" if isinstance(table, ReplicaTable) else "rollback"
    line = codec.dumps({"kind": kind, "content": codec.to_json(table)})
    if signer is None:
        return line
    return b"\n".join((line, codec.dumps(list(sign_bytes(PAYLOAD_TYPE, line, signer)))))


def decode_table(
    data: bytes, number: TableNumber, endpoint: str, verifier: Verifier | None
) -> StoredTable:
    """Parse the object of a table. Signatures are checked only with a verifier.

    Raises:
        CorruptStateError: the object is too large, or is not a table of this endpoint with this
            number. The error is also raised for a `RollbackTable` that names no earlier table.
        InvalidSignatureError: no trusted key has signed the table. A `RollbackTable` needs no
            signature.
        UserError: the file of a trusted key cannot be read, or contains another kind of key.
    """
    where = number.name
    if len(data) > MAX_TABLE_BYTES:
        raise CorruptStateError(
            f"the table has {len(data)} bytes; the limit is {MAX_TABLE_BYTES}", where=where
        )
    line, _, rest = data.partition(b"\n")
    document = codec.loads(line, dict[str, Any], where=where)
    content = document.get("content")
    table: StoredTable
    if document.get("kind") == "table":
        table = codec.from_json(content, ReplicaTable, where=where)
    else:
        table = codec.from_json(content, RollbackTable, where=where)
    if table.number != number:
        raise CorruptStateError(f"the object contains table {table.number}", where=where)
    if table.endpoint != endpoint:
        raise CorruptStateError(
            f"the table is that of endpoint '{table.endpoint[:80]}', not of {endpoint}",
            where=where,
        )
    if isinstance(table, RollbackTable):
        if table.to >= number:
            raise CorruptStateError(
                f"the rollback table refers to table {table.to}, which is not an earlier one",
                where=where,
            )
        return table
    if table.table.state.generation != number.generation:
        raise CorruptStateError(
            f"the generation of the state is {table.table.state.generation}, but the table's "
            f"number requires {number.generation}",
            where=where,
        )
    if verifier is not None:
        signatures = codec.loads(rest, tuple[EnvelopeSignature, ...], where=where) if rest else ()
        verify_bytes(PAYLOAD_TYPE, line, signatures, verifier)
    return table


def list_signing_keys(data: bytes) -> tuple[Digest, ...]:
    """Return the digests of the keys that a valid signed table names."""
    signatures = codec.loads(data.partition(b"\n")[2], tuple[EnvelopeSignature, ...])
    return tuple(signature.keyid for signature in signatures)


def resolve(table: StoredTable, read: Callable[[TableNumber], ReplicaTable]) -> ReplicaTable:
    """Return a signed table, or the table that a `RollbackTable` describes.

    The latter table has the deployments of the signed table that the `RollbackTable` names. It
    gives all traffic to the fallback of that table, or to its leader if it has no fallback.

    Args:
        read: returns the signed table with a number. It raises an OnnxOpsError if there is none.

    Raises:
        OnnxOpsError: raised by `read`, for example if the table to which the `RollbackTable` refers
            is missing or not signed.
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
    """Return the state in which the fallback of a table gets all traffic.

    If the table has no fallback, its leader gets all traffic.
    """
    name = table.fallback or table.state.leader().name
    weights = {**dict.fromkeys(table.layout, 0), name: 100}
    return replace(table.state, split=TrafficSplit(weights=weights))


def find_newest(
    names: Iterable[str],
    read: Callable[[TableNumber], StoredTable],
    above: TableNumber | None = None,
) -> tuple[ReplicaTable | None, Mapping[str, str]]:
    """Return the highest valid table, and why invalid objects were skipped, by name.

    Objects with a lower number than this table are read only if a `RollbackTable` names them. The
    table is None if no object that was read is valid.

    Args:
        names: names of the objects in the folder of the tables.
        read: returns the table with a number. It raises an OnnxOpsError for an invalid object.
        above: number of a known table. Tables with lower or equal numbers are not returned.

    Raises:
        ServiceUnavailableError: a table cannot be read now.
    """
    skipped: dict[str, str] = {}
    numbers: list[TableNumber] = []
    for name in names:
        number = TableNumber.parse(name)
        if number is None:
            skipped[name] = "the object's name is not the number of a table"
        elif above is None or number > above:
            numbers.append(number)
    for number in sorted(numbers, reverse=True):
        try:
            return resolve(read(number), lambda to: require_table(read(to))), skipped
        except ServiceUnavailableError:
            # The table can be valid, so no older table may be taken for the newest.
            raise
        except OnnxOpsError as error:
            skipped[number.name.removeprefix(f"{FOLDER}/")] = error.what
    return None, skipped


def require_table(table: StoredTable) -> ReplicaTable:
    """Return a table after checking that it is not a `RollbackTable`.

    Raises:
        CorruptStateError: the table is a `RollbackTable`.
    """
    if not isinstance(table, ReplicaTable):
        raise CorruptStateError(
            "a rollback table refers to another rollback table", where=table.number.name
        )
    return table


def gives_candidate_traffic(table: RoutingTable) -> bool:
    """Return whether a deployment other than the fallback gets requests or copies.

    The result is False if the table has no fallback.
    """
    return bool(table.fallback) and bool(list_receivers(table.state) - {table.fallback})


def has_same_traffic(one: RoutingTable, other: RoutingTable) -> bool:
    """Return whether both tables give the same deployments the same traffic.

    Traffic consists of requests and mirrored copies of requests. The tables must also have the same
    fallback.
    """
    first, second = (
        (
            {name: weight for name, weight in table.state.split.weights.items() if weight},
            {name: share for name, share in table.state.split.shadow.items() if share},
            {
                d.name: d.manifest
                for d in table.state.deployments
                if d.name in list_receivers(table.state)
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
    """Return the table that loads new models, and the table of the state.

    Before a model gets its first traffic, all replicas must load it while the traffic stays
    unchanged. The first table causes this load. It is None if `before` is None, or if no new model
    gets traffic. It is also None if a deployment with traffic gets other files or settings. The
    previous traffic cannot continue in that case.

    Args:
        sequence: sequence number of the ledger's entry (see `TableNumber`).
        before: the newest table.
        digest: digest of the bytes of `before`.
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
    """Return the table with which replicas load the new models of a state.

    Its traffic is the traffic of the previous table. The result is None if no new model gets
    traffic. It is also None if a deployment with traffic gets other files or settings. The previous
    traffic cannot continue in that case.
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
    """Return the names of deployments that get requests or mirrored copies of them."""
    split = state.split
    return {
        name for shares in (split.weights, split.shadow) for name, share in shares.items() if share
    }


def _choose_fallback(state: EndpointState, served: str | None) -> str:
    """Return the name of the deployment that needs no lease.

    The deployment that needed no lease before (`served`) is returned if it still gets traffic.
    Otherwise, the last listed deployment with traffic is returned. The result is empty if no other
    deployment gets requests or copies.
    """
    serving = [d.name for d in state.deployments if state.split.weights.get(d.name)]
    chosen = served if served in serving else serving[-1]
    return chosen if list_receivers(state) - {chosen} else ""
