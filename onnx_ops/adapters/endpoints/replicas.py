"""Endpoints whose servers run on any machine and follow signed routing tables.

The tables are in object storage. A rollout step, a split or a rollback is a new table, so no
control plane is involved. If replicas must load new models, a table for the load comes first. The
servers of an endpoint are its replicas, and users start them with their own tools. The replicas'
reports contain what they serve and count.
"""

from __future__ import annotations

import functools
import secrets
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from onnx_ops import codec
from onnx_ops.adapters.endpoints.cloud import (
    Finding,
    run_check,
    verify_files,
    verify_new_files,
)
from onnx_ops.adapters.endpoints.replica_ends import find_ends
from onnx_ops.adapters.endpoints.table_options import ReplicaOptions, read_replica_options
from onnx_ops.adapters.files import ListedObject, LocalObjects, ObjectStore, open_objects
from onnx_ops.adapters.replica_files import upload_model
from onnx_ops.adapters.retry import wait_until
from onnx_ops.adapters.server_metrics import ServerMetrics, count_by_server
from onnx_ops.attestation import TrustedKeys
from onnx_ops.domain.artifact import Digest, digest_bytes, short_digest
from onnx_ops.domain.endpoint import (
    Deployment,
    EndpointConfig,
    EndpointServer,
    EndpointState,
    ServerMemory,
    build_rollback_state,
    preview_rollback,
    serves_only,
)
from onnx_ops.domain.quantities import Json
from onnx_ops.domain.rollout_observations import GenerationCounts, ServerUptime
from onnx_ops.domain.target import Diagnosis, Target
from onnx_ops.errors import (
    ConflictError,
    CorruptStateError,
    InfrastructureError,
    InvalidSignatureError,
    MissingKeyError,
    OnnxOpsError,
    ServiceUnavailableError,
)
from onnx_ops.ports import EndpointProvider, Signer
from onnx_ops.protocol.messages import Counts, EpochCounts, TableCounts, UserCountsRequest
from onnx_ops.protocol.replica_reports import (
    CLOCK_FILE,
    CLOCK_FOLDER,
    COUNTS_FOLDER,
    EPOCHS_FOLDER,
    MAX_REPORT_BYTES,
    SILENT_S,
    STATUS_FOLDER,
    ReplicaStatus,
    ReportSource,
    has_possible_cells,
    has_possible_counts,
    parse_counts_name,
    parse_epoch_name,
)
from onnx_ops.protocol.replica_tables import (
    DEADLINE_S,
    FOLDER,
    HEAD,
    LEASE_S,
    ReplicaTable,
    RollbackTable,
    StoredTable,
    TableHead,
    TableNumber,
    decode_table,
    encode_table,
    find_newest,
    give_way,
    list_receivers,
    list_signing_keys,
    plan_tables,
    require_table,
    resolve,
)
from onnx_ops.protocol.routing_table import FEEDBACK_KEY_BYTES, RoutingTable
from onnx_ops.protocol.server_process import CONTAINER_PROVIDERS, explain_unservable

_STORE = "the object store"
_CLOCKS_S = 2.0
_READERS = 16
_PREPARE_S = 300.0
ADOPT_S = 10.0
_REQUEST_S = 4.0
"""Seconds within which a store must answer a request other than an upload.

The limit is short because a rollback makes several requests, and must end within seconds. The
reconciler repeats failed requests.
"""
_ROLLBACK_S = 2.6
"""Seconds to wait until the replicas that report have adopted a rollback."""
_LOOK_S, _LOCAL_LOOK_S = 1.3, 0.1
"""Seconds between two reads of the reports, in a remote store and in a folder."""
_COMPARED_STARTS, _COMPARED_TABLES = 8, 16
"""Maximum numbers of compared starts per replica, and compared tables per start.

A server reports the counts of at most 16 tables.
"""
_KEPT_TABLES = 48
_KEPT_REPORTS_S = 14 * 86_400.0
_T = TypeVar("_T")
_Counted = TypeVar("_Counted", TableCounts, EpochCounts)
_Item = TypeVar("_Item")


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenReplica:
    """The last status of a replica.

    `age_s` is the age of the status by the store's clock. `ahead_s` is the time of the replica's
    clock minus that of the store's clock, in seconds.
    """

    status: ReplicaStatus
    age_s: float
    ahead_s: float

    @property
    def is_live(self) -> bool:
        """Whether the replica has reported within `SILENT_S` and not ended."""
        return not self.status.is_final and self.age_s < SILENT_S


@dataclass(frozen=True, slots=True, kw_only=True)
class StorePlace:
    """The tables and replicas of an endpoint, as read at one moment.

    `digest` is that of the newest table's bytes. `age_s` is the age of this table by the store's
    clock, and `now` the time of this clock. Both are 0 if the replicas were not read. `numbers` are
    those of all objects with the name of a table, valid or not. `skipped` contains the reason for
    each object with another name, and for each invalid object with a later number than the newest
    table.
    """

    newest: ReplicaTable | None
    digest: Digest | None
    age_s: float
    numbers: tuple[TableNumber, ...]
    skipped: Mapping[str, str]
    replicas: tuple[SeenReplica, ...]
    now: float

    @property
    def went_back(self) -> bool:
        """Whether a replica that reports serves a later table than the newest valid one.

        For example, the store lost a table or was restored from a backup.
        """
        newest = TableNumber(0) if self.newest is None else self.newest.number
        return any(one.is_live and (one.status.adopted or newest) > newest for one in self.replicas)


class ReplicaEndpoints(EndpointProvider):
    """Provider for endpoints whose replicas users start, with `ReplicaOptions`.

    Nothing is stored in `folder`. Tables are signed with the release key of this process. A signed
    table is valid if a release key in the folder `trusted` has signed it. Signatures are verified
    only if `trusted` is set.
    """

    tools = ()

    def __init__(self, folder: Path | None = None, trusted: Path | None = None) -> None:
        self._keys = None if trusted is None else TrustedKeys(trusted, role="release")
        self._signer: Callable[[], Signer | None] = lambda: None
        self._stores: dict[tuple[str, str], ObjectStore] = {}
        self._tables: dict[tuple[str, TableNumber], bytes] = {}
        self._epochs: dict[tuple[str, str], EpochCounts] = {}
        self._starts: dict[str, dict[tuple[ReportSource, float], Counts]] = {}

    def sign_with(self, signer: Callable[[], Signer | None]) -> None:
        """Set the function that returns the signer of tables."""
        self._signer = signer

    def read_options(self, config: EndpointConfig) -> ReplicaOptions:
        """Return the locations of tables and reports, and how replicas follow them."""
        return read_replica_options(config.options, where=config.endpoint)

    def read_store_options(self, config: EndpointConfig) -> Mapping[str, Any]:
        """Return the options with which the client of the object store is created."""
        return {}

    def capabilities(self, options: Mapping[str, Json] | None = None) -> frozenset[str]:
        """Return `split`, `sticky`, `epochs` and the counts that the servers report."""
        return frozenset({"split", "sticky", "epochs"}) | self.metrics().capabilities()

    def metrics(self, options: Mapping[str, Json] | None = None) -> ServerMetrics:
        """Return the metrics source that reads the counts of the replicas."""
        return ServerMetrics(self._read_counts)

    def validate_options(self, options: Mapping[str, Json]) -> None:
        """Raise UserError if the options of an endpoint are not valid."""
        read_replica_options(options)

    def explain_unservable(self, target: Target) -> str:
        """Return why the image cannot run models of the target; empty if it can."""
        return explain_unservable(target, CONTAINER_PROVIDERS)

    def place(self, config: EndpointConfig) -> str:
        """Return the location of the endpoint's tables."""
        return f"the replicas that follow {self._control(config).place}"

    def address(self, config: EndpointConfig) -> str | None:
        """Return the address in the options, or the address of a replica that reports.

        The result is None before the first table, or if there is no such address.
        """
        if not self._control(config).list_names(FOLDER):
            return None
        if address := self.read_options(config).address:
            return address
        live = (one.status.address for one in self._look(config).replicas if one.is_live)
        return next(filter(None, live), None)

    def observe(self, config: EndpointConfig) -> EndpointState | None:
        """Return the newest table's state, with the replicas that can differ from it.

        The result is None without a valid table.
        """
        seen = self._look(config)
        if seen.newest is None:
            return None
        live = [one.status for one in seen.replicas if one.is_live]
        options = self.read_options(config)
        expected, lease = options.replicas, "leave" if seen.newest.table.is_leased else "serve"
        out_of_service = (
            [] if len(live) >= expected else [f"{len(live)} of {expected} replicas report"]
        )
        out_of_service += [
            f"object {FOLDER}/{name} is ignored: {why}" for name, why in seen.skipped.items()
        ]
        out_of_service += [
            f"{name} on replica {status.replica}: {why}"
            for status in live
            for name, why in {**status.failed, **status.out_of_service}.items()
        ]
        return replace(
            seen.newest.table.state,
            generation=seen.newest.number.sequence,
            out_of_service=tuple(out_of_service),
            stragglers=tuple(self._list_stragglers(config, seen)),
            drift=() if lease == options.lease else (f"lease is {lease}, not {options.lease}",),
            limits_s={},
        )

    def require_changeable(self, config: EndpointConfig) -> None:
        """Raise an error if the tables cannot be listed."""
        self._look(config, with_replicas=False)

    def preview(
        self,
        config: EndpointConfig,
        state: EndpointState,
        current: EndpointState | None,
        *,
        is_rollback: bool = False,
    ) -> EndpointState:
        """Return the state after a change.

        An error is raised if the files of a new deployment are missing or were changed. Changes
        other than a rollback also require a release key.
        """
        if is_rollback:
            after = state if current is None else preview_rollback(current, state)
        else:
            self._require_signer(config)
            after = state
        verify_new_files(after, current)
        return after

    def apply(self, config: EndpointConfig, state: EndpointState, *, generation: int) -> None:
        """Publish a state after its models are stored, and new ones loaded by replicas.

        Nothing is published if the newest table has this state and generation. Then wait a limited
        time until the replicas adopt the state.
        """
        is_followed = self._publish_once(config, state, generation)
        self._wait_until_adopted(config, TableNumber(generation), ADOPT_S if is_followed else 0.0)

    def _publish_once(self, config: EndpointConfig, state: EndpointState, generation: int) -> bool:
        """Publish a state unless it is published; return whether any replica reports."""
        return self._publish_seen(config, self._look(config), state, generation)

    def _publish_seen(
        self, config: EndpointConfig, seen: StorePlace, state: EndpointState, generation: int
    ) -> bool:
        """Publish a state unless `seen` shows it; return whether any replica reports."""
        if not self._is_published(config, seen, replace(state, generation=generation)):
            self._publish(config, seen, state, generation)
            self._clean_up(config)
        return any(one.is_live for one in seen.replicas)

    def roll_back(self, config: EndpointConfig, state: EndpointState, *, generation: int) -> None:
        """Publish a table that restores the previous version, unless it is published.

        If there is an earlier signed table of this version, the published object refers to it in
        three cases:

        - This process has no release key.
        - Its key is in a remote service.
        - Another key signed the newest signed table.

        Then wait a limited time until the replicas adopt the table.

        Raises:
            MissingKeyError: this process has no key, and signed tables of the version are missing.
            ConflictError: a state of a later generation is published.
        """
        seen = self._look(config, with_replicas=False)
        current = None if seen.newest is None else seen.newest.table.state
        desired = state if current is None else build_rollback_state(current, state)
        number = TableNumber(generation)
        is_published = self._is_published(config, seen, replace(desired, generation=generation))
        newest = seen.newest
        if (
            newest is not None
            and newest.number > TableNumber(state.generation)
            and not is_published
        ):
            is_published = newest.table.state.is_equivalent(desired)
            # The table keeps its number, since the age of its object shows when leases end.
            number = newest.number if is_published else number
        if not is_published:
            self._publish_rollback_table(config, seen, desired, generation)
            time.sleep(self._get_pause_s(config))
        self._wait_until_adopted(config, number, _ROLLBACK_S)

    def confirm_rollout(self, config: EndpointConfig) -> None:
        """Record that the rollout was analyzed once more.

        With a `judge_timeout` above 0 s, replicas give the candidate no traffic while this record
        is older than it. If the store did not answer for more than `LEASE_S`, they give it no
        traffic until the record changes.
        """
        seen = self._look(config, with_replicas=False)
        if seen.newest is not None:
            self._write_head(config, seen.newest.number)

    def _publish(
        self, config: EndpointConfig, seen: StorePlace, state: EndpointState, generation: int
    ) -> None:
        """Create the table of a state.

        If new models get traffic, a table with which replicas load them can be created first; see
        `plan_tables`.
        """
        options = self.read_options(config)
        self._upload(config, seen, state.deployments)
        # After the store was restored from a backup, its newest table can give traffic to a version
        # that was rolled back since. So the traffic of this table is not used.
        before = None if seen.went_back else seen.newest
        prepared, table = plan_tables(
            config.endpoint,
            state,
            generation,
            before,
            digest=seen.digest,
            limits_s=state.limits_s,
            judge_timeout_s=options.judge_timeout,
            new_key=secrets.token_hex(FEEDBACK_KEY_BYTES),
            is_leased=options.lease == "leave",
        )
        loading = prepared
        if prepared is not None:
            self._create(config, prepared)
        elif before is not None and list_receivers(state) - list_receivers(before.table.state):
            # The newest table has these models without traffic. If an earlier attempt created it,
            # this attempt was possibly interrupted while it waited for the replicas.
            loading = before
        if loading is not None:
            self._wait_until_loaded(config, loading, options.replicas)
        self._create(config, table)

    def _publish_rollback_table(
        self, config: EndpointConfig, seen: StorePlace, state: EndpointState, generation: int
    ) -> None:
        goal = state.leader()
        self._upload(config, seen, (goal,))
        is_leased = self.read_options(config).lease == "leave"
        _, table = plan_tables(
            config.endpoint,
            state,
            generation,
            seen.newest,
            digest=seen.digest,
            limits_s={},
            is_leased=is_leased,
        )
        signer, missing = None, None
        try:
            signer = self._require_signer(config)
        except MissingKeyError as error:
            missing = error
        # A rollback must not wait for the service of a remote key. Replicas skip a table whose key
        # they do not trust, and they probably trust the key of the newest signed table. With a
        # remote or another key, it is safer to refer to a signed table.
        if signer is not None and signer.is_local and signer.key in self._list_keys(config, seen):
            self._create(config, table)
        elif (known := self._find_rollback_goal(config, seen, goal.manifest)) is not None:
            self._create(
                config, RollbackTable(endpoint=config.endpoint, number=table.number, to=known)
            )
        elif missing is None:
            self._create(config, table)
        else:
            raise MissingKeyError(
                "the rollback needs a signed table of its version, and this process cannot sign "
                "one",
                where=config.endpoint,
                why=": ".join(filter(None, (missing.what, missing.why))),
                remedy=missing.remedy,
            ) from missing

    def _upload(
        self, config: EndpointConfig, seen: StorePlace, deployments: Iterable[Deployment]
    ) -> None:
        """Store the files of deployments that are not in the newest table."""
        for deployment in deployments:
            if seen.newest is None or seen.newest.table.state.find_deployment(deployment) is None:
                verify_files(deployment)
                upload_model(self._control(config), Path(deployment.location))

    def list_replicas(self, config: EndpointConfig) -> Sequence[SeenReplica]:
        """Return the replicas of the endpoint with their last status."""
        return self._read_replicas(config)[0]

    def count_expected(self, config: EndpointConfig, replicas: Sequence[SeenReplica]) -> int:
        """Return how many of the replicas must report."""
        return self.read_options(config).replicas

    def list_servers(self, config: EndpointConfig) -> Sequence[EndpointServer]:
        """Return the replicas with their last status, sorted by name."""
        return [
            EndpointServer(
                name=one.status.replica,
                state="ended" if one.status.is_final else "reports" if one.is_live else "silent",
                table="" if one.status.adopted is None else str(one.status.adopted),
                age_s=max(0.0, one.age_s),
                has_lease=one.is_live and one.status.has_lease,
                address=one.status.address,
                versions=one.status.versions,
                image=one.status.image,
            )
            for one in sorted(self.list_replicas(config), key=lambda one: one.status.replica)
        ]

    def list_memory(self, config: EndpointConfig) -> Sequence[ServerMemory]:
        """Return the memory of the replicas that report."""
        live = (one.status.memory for one in self.list_replicas(config) if one.is_live)
        return [memory for memory in live if memory is not None]

    def count_by_server(
        self, config: EndpointConfig, servers: Collection[str], deployments: Collection[str]
    ) -> Sequence[GenerationCounts]:
        """Return the counts of the last starts of replicas, by start and generation.

        Generations are those of the ledger.
        """
        reports, starts = self._reports(config), dict[str, list[tuple[float, ReportSource]]]()
        entries = _list_starts(reports)
        for source, entry in entries.items():
            if source.replica in servers:
                starts.setdefault(source.replica, []).append((entry.at, source))
        wanted = [
            source for each in starts.values() for _, source in sorted(each)[-_COMPARED_STARTS:]
        ]
        read = _read_each(
            lambda source: (source, _read_report(reports, entries[source], Counts)), wanted
        )
        counts = [
            replace(_convert_counts(one, (), is_live=False, now=one.at), server=source.replica)
            for source, one in read
            if one is not None
        ]
        return count_by_server(
            [replace(one, tables=one.tables[-_COMPARED_TABLES:]) for one in counts], deployments
        )

    def forget_server(self, config: EndpointConfig, name: str) -> None:
        """Record that the replica has ended.

        A later report of the replica replaces this record.
        """
        reports, known = (
            self._reports(config),
            {one.status.replica: one.status for one in self.list_replicas(config)},
        )
        if (status := known.get(name)) is not None:
            reports.write(
                f"{STATUS_FOLDER}/{name}.json", codec.dumps(replace(status, is_final=True))
            )

    def diagnose(self, endpoints: Mapping[str, Mapping[str, Json]]) -> Iterator[Diagnosis]:
        """Check the release key, and the rights, tables, replicas and clocks of endpoints.

        Rights are checked on both locations.
        """
        yield run_check("release key", self._check_key, cloud=_STORE)
        for endpoint, options in endpoints.items():
            config = EndpointConfig(
                endpoint=endpoint,
                provider="replicas",
                model="",
                target="",
                target_digest=digest_bytes(b""),
                pipeline="",
                options=options,
            )
            checks: dict[str, Callable[[EndpointConfig], Finding]] = {
                "tables": lambda config: _check_rights(self._control(config), "tables"),
                "reports": lambda config: _check_rights(self._reports(config), "reports"),
                "objects among the tables": self._check_tables,
                "replicas": self._check_replicas,
                "clocks": self._check_clocks,
            }
            for name, find in checks.items():
                yield run_check(f"{endpoint}: {name}", partial(find, config), cloud=_STORE)

    def _check_key(self) -> Finding:
        signer = self._signer()
        if signer is None:
            return (
                False,
                "signing is off, so this process cannot sign tables",
                'Set `signing = "required"`, and create a key with `onnx-ops keys new`.',
            )
        trusted = () if self._keys is None else self._keys.keys()
        found = f"{short_digest(signer.key)} signs tables" + (
            "" if signer.key in trusted else ", but is not a trusted release key"
        )
        return (
            signer.key in trusted,
            found,
            "Trust this key: copy its NAME.pub.pem into the folder of the setting `trusted_keys`.",
        )

    def _check_tables(self, config: EndpointConfig) -> Finding:
        seen = self._look(config, with_replicas=False)
        if seen.skipped:
            listed = "; ".join(f"{name}: {why}" for name, why in seen.skipped.items())
            remedy = "Check who can write to this location, and delete these objects."
            return False, f"ignored: {listed}", remedy
        newest = (
            "no table yet" if seen.newest is None else f"table {seen.newest.number} is the newest"
        )
        return True, newest, ""

    def _check_replicas(self, config: EndpointConfig) -> Finding:
        options = self.read_options(config)
        live = [one.status for one in self.list_replicas(config) if one.is_live]
        why = [
            f"{one.replica}: {one.refused or '; '.join(one.failed.values())}"
            for one in live
            if not one.is_healthy
        ]
        found = "; ".join([f"{len(live)} of {options.replicas} report", *why])
        return (
            len(live) >= options.replicas and not why,
            found,
            "Start the missing replicas or correct `replicas`, and repair replicas with an error.",
        )

    def _check_clocks(self, config: EndpointConfig) -> Finding:
        live = [one for one in self.list_replicas(config) if one.is_live]
        if not live:
            return False, "not compared: no replica reports", "Start the replicas."
        apart = [
            f"{one.status.replica} by {one.ahead_s:+.0f} s"
            for one in live
            if abs(one.ahead_s) > _CLOCKS_S
        ]
        found = (
            f"different from the store's clock: {', '.join(apart)}"
            if apart
            else f"within {_CLOCKS_S:g} s of the store's clock"
        )
        remedy = (
            "Run NTP on these machines: if the clocks of replicas differ, a user can get both "
            "versions in one epoch."
        )
        return not apart, found, remedy

    def _list_stragglers(self, config: EndpointConfig, seen: StorePlace) -> Iterator[str]:
        """Yield a message for each registered replica that can serve an older table.

        Another message is yielded if the reports are from fewer replicas than expected.
        """
        newest = seen.newest
        if newest is None:
            return
        expected, count = self.count_expected(config, seen.replicas), len(seen.replicas)
        if count < expected:
            # Replicas were not started, their reports were deleted, or this machine lacks the mount
            # of their location.
            yield (
                f"only {count} of {expected} replicas have reported to "
                f"{self._reports(config).place}"
            )
        for one in _list_registered(seen.replicas, expected):
            status = one.status
            if (status.adopted or TableNumber(0)) >= newest.number or self._has_fallen_back(
                config, seen, one
            ):
                continue
            what = "no table" if status.adopted is None else f"table {status.adopted}"
            why = status.refused or f"last report {one.age_s:.0f} s ago"
            yield f"replica {status.replica} reported {what}, not table {newest.number}: {why}"

    def _has_fallen_back(self, config: EndpointConfig, seen: StorePlace, one: SeenReplica) -> bool:
        """Return whether a silent replica cannot contradict the newest table.

        The replica then refuses requests, or answers as this table specifies. This can be the case
        once the lease of the replica is over. Since its last report, the replica possibly adopted
        any later table, so all of these tables are checked.
        """
        is_over = min(seen.age_s, one.age_s) > LEASE_S + DEADLINE_S
        adopted, newest = one.status.adopted, seen.newest
        if (
            one.is_live
            or not is_over
            or adopted is None
            or newest is None
            or adopted not in seen.numbers
        ):
            return False
        for number in seen.numbers:
            if not adopted <= number < newest.number:
                continue
            try:
                table = resolve(
                    self._read_table(config, number), partial(self._read_signed, config)
                ).table
            except (CorruptStateError, InvalidSignatureError):
                if number == adopted:
                    return False
                continue  # Replicas skip an invalid table, too.
            except OnnxOpsError:
                return False
            if not (table.is_leased or _answers_alike(table, newest.table)):
                return False
        return True

    def remove(self, config: EndpointConfig) -> None:
        """Delete tables, models and reports.

        Replicas continue without a lease until they are stopped. A candidate then gets no traffic.
        With `lease: leave`, requests are refused.
        """
        for objects in (self._control(config), self._reports(config)):
            for entry in objects.list_objects(""):
                objects.delete(entry.name)

    def _control(self, config: EndpointConfig) -> ObjectStore:
        return self._open(config, self.read_options(config).control)

    def _reports(self, config: EndpointConfig) -> ObjectStore:
        return self._open(config, self.read_options(config).reports)

    def _get_pause_s(self, config: EndpointConfig) -> float:
        return _LOCAL_LOOK_S if isinstance(self._reports(config), LocalObjects) else _LOOK_S

    def _open(self, config: EndpointConfig, url: str) -> ObjectStore:
        store_options = self.read_store_options(config)
        key = (url, repr(store_options))
        if key not in self._stores:
            self._stores[key] = open_objects(url, deadline_s=_REQUEST_S, options=store_options)
        return self._stores[key]

    def _read_table(self, config: EndpointConfig, number: TableNumber) -> StoredTable:
        """Return the table with a number. The object of a number never changes.

        Raises:
            CorruptStateError: the object of the table was deleted, or is not a table of the
                endpoint.
            InvalidSignatureError: no trusted key has signed the table.
            ServiceUnavailableError, StorageError: the store cannot be used.
        """
        control = self._control(config)
        key = (control.place, number)
        data = self._tables.get(key) or control.read(number.name)
        if data is None:
            raise CorruptStateError("it was deleted", where=number.name)
        table = decode_table(data, number, config.endpoint, self._keys)
        self._tables[key] = data
        return table

    def _read_signed(self, config: EndpointConfig, number: TableNumber) -> ReplicaTable:
        return require_table(self._read_table(config, number))

    def _look(self, config: EndpointConfig, *, with_replicas: bool = True) -> StorePlace:
        """Read the newest table and, if `with_replicas`, the statuses concurrently."""
        control = self._control(config)
        with ThreadPoolExecutor(_READERS) as pool:
            listed = pool.submit(control.list_objects, FOLDER)
            seen = pool.submit(self._read_replicas, config) if with_replicas else None
            tables = {entry.name.rpartition("/")[2]: entry for entry in listed.result()}
            newest, skipped = find_newest(tables, lambda number: self._read_table(config, number))
            replicas, now = ((), 0.0) if seen is None else seen.result()
        numbers = tuple(
            sorted(number for name in tables if (number := TableNumber.parse(name)) is not None)
        )
        digest, age_s = None, 0.0
        if newest is not None:
            digest = digest_bytes(self._tables[control.place, newest.number])
            age_s = max(0.0, now - tables[newest.number.name.rpartition("/")[2]].at)
        return StorePlace(
            newest=newest,
            digest=digest,
            age_s=age_s,
            numbers=numbers,
            skipped=skipped,
            replicas=tuple(replicas),
            now=now,
        )

    def _read_replicas(self, config: EndpointConfig) -> tuple[list[SeenReplica], float]:
        """Return the replicas with their last status, and the store's time.

        The ages of objects are computed with the store's clock. The modification time of an object
        that is written here is the store's time.
        """
        reports = self._reports(config)
        with suppress(OnnxOpsError):
            # Without write access, the newest time of a report or of another client's clock file is
            # used.
            reports.write(CLOCK_FILE, b"")
        entries = [*reports.list_objects(STATUS_FOLDER), *reports.list_objects(CLOCK_FOLDER)]
        now = max((entry.at for entry in entries), default=0.0)
        listed = [entry for entry in entries if entry.name.startswith(f"{STATUS_FOLDER}/")]

        found = _read_each(
            lambda entry: (entry, _read_report(reports, entry, ReplicaStatus)), listed
        )
        return [
            SeenReplica(status=status, age_s=now - entry.at, ahead_s=status.at - entry.at)
            for entry, status in found
            if status is not None and status.endpoint == config.endpoint
        ], now

    def _is_published(self, config: EndpointConfig, seen: StorePlace, state: EndpointState) -> bool:
        """Return whether the newest table publishes exactly this state.

        In this case, the number of the table is recorded again.

        Raises:
            ConflictError: the newest table has a later generation than the state.
        """
        newest = seen.newest
        if newest is None:
            return False
        if newest.number.sequence > state.generation:
            raise ConflictError(
                f"table {newest.number} is newer than generation {state.generation}",
                where=config.endpoint,
                remedy="Run the command again; it starts from the newest table.",
            )
        is_same = newest.number == TableNumber(
            state.generation
        ) and newest.table.state.is_equivalent(state)
        if is_same:
            self._write_head(config, newest.number)
        return is_same

    def _create(self, config: EndpointConfig, table: StoredTable) -> None:
        """Create the object of a table, and record the table as the newest one.

        Raises:
            ConflictError: another table has the same number.
            MissingKeyError: the table must be signed, and this process has no key.
        """
        control, signer = self._control(config), self._sign(config, table)
        data = encode_table(table, signer)
        if not control.create(table.number.name, data):
            found = control.read(table.number.name) or b""
            if found.partition(b"\n")[0] != data.partition(b"\n")[0]:
                raise ConflictError(
                    f"a different object has the number of table {table.number}",
                    where=f"{control.place}/{table.number.name}",
                    remedy="Another process or another writer has published this object: "
                    "inspect the object, and check who can write to its location.",
                )
        self._write_head(config, table.number)

    def _sign(self, config: EndpointConfig, table: StoredTable) -> Signer | None:
        return None if isinstance(table, RollbackTable) else self._require_signer(config)

    def _require_signer(self, config: EndpointConfig) -> Signer:
        """Return the signer of tables; raise MissingKeyError without one."""
        try:
            signer = self._signer()
        except OnnxOpsError as error:
            raise MissingKeyError(
                error.what, where=config.endpoint, why=error.why, remedy=error.remedy
            ) from error
        if signer is None:
            raise MissingKeyError(
                "signing is off, and tables require a signature",
                where=config.endpoint,
                remedy='Set `signing = "required"`, and run the command on a machine with a '
                "trusted release key: `onnx-ops keys list` shows the keys.",
            )
        return signer

    def _write_head(self, config: EndpointConfig, number: TableNumber) -> None:
        """Record the number of the newest table, and that the rollout is analyzed.

        Errors are ignored: replicas list the tables themselves, and the next analysis writes again.
        """
        with suppress(OnnxOpsError):
            self._control(config).write(
                HEAD, codec.dumps(TableHead(number=number, beat=time.time_ns()))
            )

    def _iterate_signed(self, config: EndpointConfig, seen: StorePlace) -> Iterator[ReplicaTable]:
        """Yield the valid signed tables, newest first."""
        for number in reversed(seen.numbers):
            with suppress(OnnxOpsError):
                table = self._read_table(config, number)
                if isinstance(table, ReplicaTable):
                    yield table

    def _list_keys(self, config: EndpointConfig, seen: StorePlace) -> tuple[Digest, ...]:
        """Return the keys that signed the newest signed table; empty if there is none."""
        newest = next(self._iterate_signed(config, seen), None)
        if newest is None:
            return ()
        return list_signing_keys(self._tables[self._control(config).place, newest.number])

    def _find_rollback_goal(
        self, config: EndpointConfig, seen: StorePlace, manifest: Digest
    ) -> TableNumber | None:
        """Return the number of the newest signed table with this stable version.

        `manifest` is that of the stable version. The result is None without such a table.
        """
        return next(
            (
                table.number
                for table in self._iterate_signed(config, seen)
                if give_way(table.table).leader().manifest == manifest
            ),
            None,
        )

    def _wait_until_loaded(
        self, config: EndpointConfig, table: ReplicaTable, expected: int
    ) -> None:
        """Wait until every registered replica has loaded a table.

        Raises:
            InfrastructureError: a replica cannot serve the table.
            ServiceUnavailableError: a replica fails to report in time that it has loaded the table,
                or no replica is registered.
        """
        missing: list[str] = []

        def is_loaded() -> bool:
            replicas, _ = self._read_replicas(config)
            registered = _list_registered(replicas, expected)
            for one in registered:
                status = one.status
                if status.refused.startswith(f"table {table.number}:") or (
                    status.adopted == table.number and status.failed
                ):
                    why = status.refused or "; ".join(
                        f"{name}: {text}" for name, text in status.failed.items()
                    )
                    raise InfrastructureError(
                        f"replica {status.replica} cannot serve table {table.number}",
                        where=config.endpoint,
                        why=why,
                    )
            missing[:] = [
                f"{one.status.replica} has not reported table {table.number}"
                for one in registered
                if (one.status.adopted or TableNumber(0)) < table.number
            ]
            if not registered:
                missing.append("no replica is registered")
            return not missing

        if not wait_until(is_loaded, _PREPARE_S, self._get_pause_s(config)):
            raise ServiceUnavailableError(
                "not all replicas reported in time that they loaded the new version",
                where=config.endpoint,
                why="; ".join(missing),
                remedy="Start the replicas. If a silent replica is lost, run "
                f"`onnx-ops rollback {config.endpoint} --write-off REPLICA --reason WHY`, "
                "which moves no traffic.",
            )

    def _wait_until_adopted(
        self, config: EndpointConfig, number: TableNumber, timeout_s: float
    ) -> None:
        """Wait a limited time until the replicas that report serve a table.

        Replicas that do not serve the table at the end are stragglers.
        """

        def is_adopted() -> bool:
            live = [one for one in self._read_replicas(config)[0] if one.is_live]
            return bool(live) and all(
                (one.status.adopted or TableNumber(0)) >= number for one in live
            )

        wait_until(is_adopted, timeout_s, self._get_pause_s(config))

    def _clean_up(self, config: EndpointConfig) -> None:
        """Delete tables beyond the newest 48, and reports older than 14 days.

        A rollback cannot refer to a deleted table.
        """
        control, reports = self._control(config), self._reports(config)
        with suppress(OnnxOpsError):
            numbers = sorted(filter(None, map(TableNumber.parse, control.list_names(FOLDER))))
            for number in numbers[:-_KEPT_TABLES]:
                control.delete(number.name)
            listed = reports.list_objects("")
            now = max((entry.at for entry in listed), default=0.0)
            for entry in listed:
                if now - entry.at > _KEPT_REPORTS_S:
                    reports.delete(entry.name)

    def _read_counts(
        self, config: EndpointConfig, request: UserCountsRequest | None
    ) -> Sequence[Counts]:
        """Return the counts of the replicas' starts, by generations of the ledger.

        A start before its first table, or with an invalid report, is left out.

        Raises:
            ServiceUnavailableError: no start with a table has reported counts, or the store is
                unavailable.
        """
        seen = self._look(config)
        reporting = {
            ReportSource(one.status.replica, one.status.start): one.status.is_healthy
            for one in seen.replicas
            if one.is_live
        }
        live = {source for source, is_healthy in reporting.items() if is_healthy}
        found = self._read_starts(config, seen.replicas)
        statuses = {one.status.replica: (one.status, seen.now - one.age_s) for one in seen.replicas}
        ended = find_ends(found, statuses, seen.now)
        uptimes = self._list_uptimes(
            config, found, ended, () if request is None else tuple(request.limits_s)
        )
        epochs = self._read_epochs(config)
        now = time.time()  # noqa: TID251 (counts are until now, whatever the clocks of replicas show)
        counts = [
            replace(
                _convert_counts(
                    one,
                    epochs.get(source, []),
                    is_live=source in live,
                    is_ended=source not in reporting,
                    now=now,
                ),
                uptimes=uptimes.get(source, ()),
                server=source.replica,
            )
            # If several followers counted an epoch, the last counts in this order are used. Live
            # servers and newer counts come last, since their counts of an epoch are more complete.
            for source, (one, _) in sorted(
                found.items(), key=lambda each: (each[0] in live, each[1][1])
            )
            if one.bounds_s  # A replica has bounds only after it has loaded a table.
        ]
        if not counts:
            what = "no replica that loaded a table has reported counts"
            raise ServiceUnavailableError(what, where=config.endpoint)
        missing = [*self._list_left_out(config, seen)]
        missing += [
            f"the counts of replica {source.replica} cannot be read"
            for source in sorted(live - set(found))
        ]
        return [
            replace(one, failure="; ".join(filter(None, (one.failure, *missing)))) for one in counts
        ]

    def _list_left_out(self, config: EndpointConfig, seen: StorePlace) -> Iterator[str]:
        """Yield why registered replicas currently provide no evidence."""
        for one in _list_registered(seen.replicas, self.count_expected(config, seen.replicas)):
            if not (one.is_live and one.status.is_healthy):
                why = "it reports an error" if one.is_live else "it does not report"
                yield f"replica {one.status.replica} is skipped: {why}"

    def _read_starts(
        self, config: EndpointConfig, replicas: Iterable[SeenReplica]
    ) -> dict[ReportSource, tuple[Counts, float]]:
        """Return the last counts of each start, and the time of their report.

        The counts of earlier starts of a replica are read again only if they have changed.
        """
        reports = self._reports(config)
        present = {ReportSource(one.status.replica, one.status.start) for one in replicas}
        entries = _list_starts(reports)
        known = self._starts.setdefault(reports.place, {})
        wanted = [
            source
            for source, entry in entries.items()
            if source in present or (source, entry.at) not in known
        ]
        read = _read_each(
            lambda source: (source, _read_report(reports, entries[source], Counts)), wanted
        )
        fresh = {
            (source, entries[source].at): one
            for source, one in read
            if one is not None and has_possible_counts(one)
        }
        listed = {(source, entry.at) for source, entry in entries.items()}
        self._starts[reports.place] = found = {
            key: one for key, one in {**known, **fresh}.items() if key in listed
        }
        return {source: (one, at) for (source, at), one in found.items()}

    def _list_uptimes(
        self,
        config: EndpointConfig,
        starts: Mapping[ReportSource, tuple[Counts, float]],
        ended: Collection[ReportSource],
        names: Sequence[str],
    ) -> Mapping[ReportSource, tuple[ServerUptime, ...]]:
        """Return the comparable uptimes of each start by generations of the ledger.

        Args:
            config: the endpoint.
            starts: the last counts of each start, and the time of their report.
            ended: starts that ended without a last report.
            names: the candidate and the stable version; empty without a rollout.
        """
        is_alone = functools.cache(partial(self._is_alone, config, names))
        found: dict[ReportSource, tuple[ServerUptime, ...]] = {}
        for source, (counts, _) in starts.items():
            last = max((each.generation for each in counts.uptimes), default=0)
            found[source] = tuple(
                replace(
                    each,
                    server=source.replica,
                    generation=each.generation // 2,
                    ends=each.ends + (source in ended and each.generation == last),
                    is_alone=alone,
                )
                for each in counts.uptimes
                if (alone := is_alone(each.generation)) is not None
            )
        return found

    def _is_alone(
        self, config: EndpointConfig, names: Sequence[str], generation: int
    ) -> bool | None:
        """Return whether only the stable version got requests, without a loaded candidate.

        The result is False if the candidate was loaded. It is None if `names` lacks the candidate
        or the stable version. It is also None for a table with which replicas only loaded models, a
        table of other versions, and an unreadable table.
        """
        number = TableNumber.from_generation(generation)
        if len(names) != 2 or not number.phase:
            return None
        try:
            state = resolve(
                self._read_table(config, number), partial(self._read_signed, config)
            ).table.state
        except OnnxOpsError:
            return None
        candidate, stable = names
        if candidate in (d.name for d in state.deployments):
            return False
        return True if list_receivers(state) == {stable} else None

    def _read_epochs(self, config: EndpointConfig) -> Mapping[ReportSource, list[EpochCounts]]:
        """Return the reported closed epochs; each valid report is read only once."""
        reports = self._reports(config)
        wanted = [
            (entry, parsed[2])
            for entry in reports.list_objects(EPOCHS_FOLDER)
            if (parsed := parse_epoch_name(entry.name.rpartition("/")[2])) is not None
            and parsed[0] % 2
        ]
        new = [entry for entry, _ in wanted if (reports.place, entry.name) not in self._epochs]
        for entry, epoch in _read_each(
            lambda entry: (entry, _read_report(reports, entry, EpochCounts)), new
        ):
            if epoch is not None and has_possible_cells(epoch.cells):
                self._epochs[reports.place, entry.name] = epoch
        found: dict[ReportSource, list[EpochCounts]] = {}
        for entry, source in wanted:
            if (known := self._epochs.get((reports.place, entry.name))) is not None:
                found.setdefault(source, []).append(known)
        return found


def _check_rights(objects: ObjectStore, what: str) -> Finding:
    """Check that a location permits to list, create, read and delete objects.

    The check performs each operation.
    """
    name, remedy = (
        f"probe/{secrets.token_hex(8)}",
        (
            "Grant this process the permissions to list, read, create and delete objects "
            f"in {objects.place}."
        ),
    )
    try:
        objects.list_names("")
        objects.create(name, b"probe")
        is_read = objects.read(name) == b"probe"
        objects.delete(name)
    except (OnnxOpsError, OSError) as error:
        return False, f"{objects.place}: {error}", remedy
    found = f"{objects.place}: {what} can be listed, written and deleted"
    return is_read, found if is_read else f"{found}, but not read", remedy


def _answers_alike(table: RoutingTable, newest: RoutingTable) -> bool:
    """Return whether two tables give all traffic to the same version.

    The result is False if `newest` splits the traffic. For `table`, the traffic after the end of
    its lease is compared.
    """
    leader = newest.state.leader()
    if not serves_only(newest.state, leader):
        return False
    state = give_way(table) if table.fallback else table.state
    return [d.manifest for d in state.deployments if state.split.weights.get(d.name)] == [
        leader.manifest
    ]


def _list_registered(replicas: Sequence[SeenReplica], expected: int) -> list[SeenReplica]:
    """Return the replicas that must load a table, and whose counts are expected.

    These are the replicas that report, and silent replicas that have not ended. If the expected
    number of replicas reports, silent replicas are ignored after lease and deadline. By then, they
    give a candidate no traffic.
    """
    live = [one for one in replicas if one.is_live]
    is_complete = len(live) >= expected
    silent = [
        one
        for one in replicas
        if not one.status.is_final
        and not one.is_live
        and not (is_complete and one.age_s > LEASE_S + DEADLINE_S)
    ]
    return [*live, *silent]


def _convert_counts(
    counts: Counts,
    epochs: Sequence[EpochCounts],
    *,
    is_live: bool,
    is_ended: bool = False,
    now: float,
) -> Counts:
    """Return a replica's counts by generations of the ledger.

    Counts of tables with which replicas only loaded models are not included. While a replica
    reports, only its closed epochs are included. If it does not report any more (`is_ended`), the
    last report of its open epoch is included too. A report of the same epoch after its end replaces
    that report.
    """
    opened = _halve_generations([counts.open_epoch] if counts.open_epoch is not None else [])
    closed = _halve_generations(epochs)
    converted = replace(
        counts,
        at=now,
        tables=_halve_generations(counts.tables),
        epochs=(*opened, *closed) if is_ended else closed,
        open_epoch=next(iter(opened), None),
    )
    return (
        converted
        if is_live
        else replace(converted, open_epoch=None, closed_through=0, cold_s={}, failure="")
    )


def _halve_generations(items: Iterable[_Counted]) -> tuple[_Counted, ...]:
    """Return the counts of tables with traffic, by generations of the ledger.

    With tables of even generations, replicas only loaded models.
    """
    return tuple(
        replace(one, generation=one.generation // 2) for one in items if one.generation % 2
    )


def _list_starts(reports: ObjectStore) -> dict[ReportSource, ListedObject]:
    """Return the object with the counts of each reported start."""
    return {
        source: entry
        for entry in reports.list_objects(COUNTS_FOLDER)
        if (source := parse_counts_name(entry.name.rpartition("/")[2])) is not None
    }


def _read_report(reports: ObjectStore, entry: ListedObject, kind: type[_T]) -> _T | None:
    """Return the report in an object; None if it is too large, damaged or missing."""
    if entry.size_bytes > MAX_REPORT_BYTES:
        return None
    data = reports.read(entry.name)
    with suppress(CorruptStateError):
        return None if data is None else codec.loads(data, kind, where=entry.name)
    return None


def _read_each(read: Callable[[_Item], _T], items: Sequence[_Item]) -> list[_T]:
    """Read several objects concurrently; return the results in the order of `items`."""
    if not items:
        return []
    with ThreadPoolExecutor(min(_READERS, len(items))) as pool:
        return list(pool.map(read, items))
