"""The follower of a replica: a process beside the endpoint server.

The follower reads new routing tables from the object store. Only this process has the client of the
object store and its credentials. It starts the server without them, and publishes the newest table
to the server through the admin API. It also renews the server's lease, and writes reports about the
server's state and counts. Reading, publishing and reporting have a thread each. A silent store
therefore cannot delay the restart of the server or the end of a lease. The server's workers
determine the end of a lease by their own clock.
"""

from __future__ import annotations

import argparse
import functools
import logging
import os
import platform
import re
import secrets
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from onnx_ops import codec
from onnx_ops.adapters.endpoints.local_server import LocalServer
from onnx_ops.adapters.files import LocalObjects, ObjectStore, open_objects
from onnx_ops.adapters.replica_files import download_model
from onnx_ops.adapters.store import ModelFolders
from onnx_ops.attestation import TrustedKeys, is_encoded_keys
from onnx_ops.config.binding import bind_options
from onnx_ops.config.server_options import list_options
from onnx_ops.domain.endpoint import Deployment
from onnx_ops.domain.rollout_observations import ServerUptime
from onnx_ops.errors import (
    CorruptStateError,
    OnnxOpsError,
    RefusedError,
    ServiceUnavailableError,
    UserError,
)
from onnx_ops.ports import Verifier
from onnx_ops.protocol.messages import (
    COUNTS_PATH,
    LEASE_PATH,
    STATE_PATH,
    TABLE_PATH,
    AdminState,
    Counts,
    Lease,
    UserCountsRequest,
    error_from_bytes,
)
from onnx_ops.protocol.replica_reports import (
    REPORT_S,
    SILENT_S,
    ReplicaStatus,
    ReportSource,
    check_replica_name,
)
from onnx_ops.protocol.replica_tables import (
    FOLDER,
    HEAD,
    LEASE_S,
    ReplicaTable,
    StoredTable,
    TableHead,
    TableNumber,
    decode_table,
    find_newest,
    gives_candidate_traffic,
    has_same_traffic,
)
from onnx_ops.protocol.server_process import FINAL_COUNTS_FILE, ServerOptions, ServerRecord
from onnx_ops.scratch import write_durably

_log = logging.getLogger(__name__)

POLL_S, LEASED_POLL_S, LOCAL_POLL_S = 2.0, 1.0, 0.25
"""Seconds between two reads of the head, the object that names the newest table.

The values apply by default, while a lease is needed, and for a store in a local folder, in this
order.
"""
LIST_S, RENEW_S, LOCAL_LIST_S = 60.0, 8.0, 1.0
"""Seconds between two listings of the tables.

The values apply by default, while a lease is needed, and for a store in a local folder, in this
order.
"""
_RETRY_S = 10.0
"""Seconds before a refused table is published to the server again."""
_STORE_S = 5.0
"""Time limit of one request to a remote store in seconds.

It does not apply to downloads of models. The loops repeat failed requests.
"""
_CHECK_S = 0.2
"""Seconds between two checks for a table to publish."""
_SERVER_CHECK_S = 0.5
_PUBLISH_S = 300.0
"""Time limit for publishing a table, including the load of its models, in seconds."""
_ADMIN_S = 5.0
"""Time limit of other requests to the admin API, in seconds."""
NAME_FILE = "replica"
"""File in the folder of a replica with its name, unless the name is given."""
_MODELS = "models"
_PACKAGES = ("onnx-ops", "onnxruntime")


@dataclass(frozen=True, slots=True, kw_only=True)
class FollowerOptions:
    """Options of a replica.

    `control` is the location of the tables and models, and `reports` that of the reports. `address`
    is the URL for clients; `image` is the image of the container.
    """

    control: str
    reports: str
    endpoint: str
    replica: str
    address: str
    image: str
    port: int
    server: ServerOptions


class Following:
    """Tables that a replica has read, and the lease of a candidate's traffic.

    Times are seconds since boot, on a clock that also runs while the machine or the process is
    suspended.
    """

    def __init__(self, list_s: float = LIST_S) -> None:
        self.newest: ReplicaTable | None = None
        self.adopted: ReplicaTable | None = None
        self.skipped: Mapping[str, str] = {}
        self.listed_at = float("-inf")
        self.reported_at = float("-inf")
        self._list_s = list_s
        self._beat = -1
        self._beat_at = float("-inf")
        self._heard_at = float("-inf")
        self._is_confirmed = False
        self._serving_end = 0.0

    def see(self, table: ReplicaTable | None) -> None:
        """Record a valid table; the table with the highest number is the newest."""
        if table is not None and (self.newest is None or table.number > self.newest.number):
            self.newest = table

    def see_beat(self, beat: int, now: float) -> None:
        """Record the beat, a number that changes with each analysis of the rollout.

        If the store did not answer for `LEASE_S`, the known tables may lack a rollback that was
        requested meanwhile. After such a gap, the candidate therefore gets no traffic until a later
        call has another beat.
        """
        if now - self._heard_at > LEASE_S:
            self._is_confirmed = False
        elif beat != self._beat:
            self._is_confirmed = True
        self._heard_at = now
        if beat != self._beat:
            self._beat, self._beat_at = beat, now

    @property
    def needs_lease(self) -> bool:
        """Whether the adopted table needs a lease.

        A table needs a lease if it gives a candidate traffic, or if it requires a lease for every
        request.
        """
        table = None if self.adopted is None else self.adopted.table
        return table is not None and (table.is_leased or gives_candidate_traffic(table))

    def is_list_due(self, now: float) -> bool:
        """Return whether the tables must be listed."""
        return now - self.listed_at >= (
            min(RENEW_S, self._list_s) if self.needs_lease else self._list_s
        )

    def compute_lease_end(self, now: float) -> float:
        """Return the time until which the adopted table's candidate may get traffic, or 0.

        If the store did not answer for `LEASE_S`, the result is 0 or in the past. It stays so until
        the replica has listed the tables and written a report, and the beat has changed. The result
        is also 0 if the beat is older than the table's `judge_timeout_s`, unless that is 0. A newer
        table that moves traffic ends the lease before the newer table is adopted.
        """
        # This call must precede `_is_current`. The docstring of `_compute_end` explains why.
        end = self._compute_end()
        timeout_s = 0.0 if self.adopted is None else self.adopted.judge_timeout_s
        is_judged = self._is_confirmed and (not timeout_s or now - self._beat_at < timeout_s)
        return end if self._is_current() and is_judged else 0.0

    def renew_serving_end(self) -> float:
        """Return the time until which a server with a leased table may answer requests.

        While a newest table with other traffic is not adopted yet, the time stays unchanged, so
        that the server answers requests until then. The time is not extended: after a gap in the
        connection to the store, the adopted table may have been rolled back.
        """
        end = self._compute_end()
        if self._is_current():
            self._serving_end = end
        return self._serving_end

    def _compute_end(self) -> float:
        """Return the end of the lease: `LEASE_S` after the older of listing and report.

        Call this before `_is_current`: another thread sets `newest` first, and `listed_at`
        afterwards. In the other order, a new listing would extend the lease of an old table.
        """
        return max(0.0, min(self.listed_at, self.reported_at) + LEASE_S)

    def _is_current(self) -> bool:
        """Return whether the adopted table splits traffic as the newest table does."""
        adopted, newest = self.adopted, self.newest
        if adopted is None or newest is None:
            return False
        return newest.number == adopted.number or has_same_traffic(newest.table, adopted.table)


class Follower:
    """Process that runs one replica, as the module's docstring describes."""

    def __init__(
        self,
        options: FollowerOptions,
        folder: Path,
        server: LocalServer,
        verifier: Verifier,
        *,
        start: str = "",
    ) -> None:
        self._options = options
        self._server = server
        self._verifier = verifier
        self._control: ObjectStore = open_objects(options.control, deadline_s=_STORE_S)
        self._reports: ObjectStore = open_objects(options.reports, deadline_s=_STORE_S)
        self._models = ModelFolders(folder / _MODELS)
        self._intact: set[str] = set()
        self._source = ReportSource(options.replica, start or secrets.token_hex(6))
        self._is_local = isinstance(self._control, LocalObjects)
        self._following = Following(LOCAL_LIST_S if self._is_local else LIST_S)
        self._lock = threading.Lock()
        self._report_due = threading.Event()
        self._stop = threading.Event()
        self._is_ending = False
        self._refused: tuple[TableNumber, float, str] | None = None
        self._lease = 0.0
        self._lapsed = 0
        self._beat = 0
        self._epochs: set[tuple[int, int]] = set()
        self._failures: dict[str, str] = {}
        self._uptimes: dict[int, ServerUptime] = {}
        self._recorded_at = read_boot_clock()
        self._is_serving = False
        self._last_counts: Counts | None = None

    def run(self) -> None:
        """Run the server and the loops until `stop` is called."""
        loops = (self.poll, self.publish, self.report)
        threads = [
            threading.Thread(target=self._repeat, args=(work,), name=work.__name__, daemon=True)
            for work in loops
        ]
        self._attempt(self.keep_server)
        for thread in threads:
            thread.start()
        while not self._is_ending:
            self._attempt(self.keep_server)
            time.sleep(_SERVER_CHECK_S)
        self.end()

    def stop(self) -> None:
        """Make `run` stop the server, write a last report, and return.

        This method acquires no lock, so that signal handlers can call it.
        """
        self._is_ending = True

    def poll(self) -> None:
        """Read the head, list the tables if that is due, and renew the lease."""
        now = read_boot_clock()
        head = self._read_head()
        if head is not None:
            self._following.see_beat(head.beat, now)
            newest = self._following.newest
            if newest is None or head.number > newest.number:
                self._following.see(find_newest([f"{head.number}.json"], self._read_table)[0])
        if self._following.is_list_due(now):
            names = self._control.list_names(FOLDER)
            known = None if self._following.newest is None else self._following.newest.number
            require_known(names, known, self._control.place)
            found, skipped = find_newest(names, self._read_table, known)
            if skipped != self._following.skipped:
                self._following.skipped = skipped
                self._report_due.set()
            self._following.see(found)
            # `now` was read before the request, so the list is at least as recent as this time.
            self._following.listed_at = now
        self.renew_lease()

    def publish(self) -> None:
        """Publish the newest table to the server, unless the server has adopted it.

        An `OnnxOpsError` is logged and reported, not raised. The same table is published again
        after `_RETRY_S`.
        """
        table, adopted = self._following.newest, self._following.adopted
        if table is None or (adopted is not None and adopted.number >= table.number):
            return
        refused = self._refused
        if refused is not None and refused[0] == table.number and read_boot_clock() < refused[1]:
            return
        try:
            self._ask("PUT", TABLE_PATH, codec.dumps(self._locate(table)), timeout_s=_PUBLISH_S)
            # Counting by user must begin before the candidate gets its first request.
            if table.limits_s:
                self._ask(
                    "POST", COUNTS_PATH, codec.dumps(UserCountsRequest(limits_s=table.limits_s))
                )
        except OnnxOpsError as error:
            self._refused = (table.number, read_boot_clock() + _RETRY_S, str(error))
            _log.error("the publication of table %s failed: %s", table.number, error)
        else:
            self._refused = None
            self._following.adopted = table
            _log.info("table %s is served", table.number)
        self._report_due.set()

    def renew_lease(self) -> None:
        """Send the server the times until which it may serve.

        Until the first time, the server may give a candidate traffic. Until the second time, a
        server with a leased table may answer requests.
        """
        with self._lock:
            end, serving_end = (
                self._following.compute_lease_end(read_boot_clock()),
                self._following.renew_serving_end(),
            )
            lease = Lease(until_ns=int(end * 1e9), serving_until_ns=int(serving_end * 1e9))
            answer = self._ask("PUT", LEASE_PATH, codec.dumps(lease))
            self._lease, self._lapsed = end, codec.loads(answer, Lease).lapsed

    def report(self) -> None:
        """Write the status, the counts, and the epochs closed since the last report.

        Without an adopted table, only the status and, once, empty counts are written.
        """
        began = read_boot_clock()
        self._write_status(self._build_status())
        self._following.reported_at = began
        self._attempt(self.renew_lease)
        adopted = self._following.adopted
        if adopted is None:
            if not self._uptimes:
                # The counts record the start of a server even if it ends before its first table.
                now = time.time()  # noqa: TID251 (readers take the time of the report)
                self._write_counts(
                    Counts(origin=self._source.start, at=now, bounds_s=(), deployments={})
                )
            return
        limits = adopted.limits_s
        body = codec.dumps(UserCountsRequest(limits_s=limits)) if limits else None
        self._write_counts(
            codec.loads(self._ask("POST" if limits else "GET", COUNTS_PATH, body), Counts)
        )

    def keep_server(self) -> None:
        """Start the server, or restart it if it runs with other options."""
        record = self._server.record()
        if record is not None and (record.port, record.options) == (
            self._options.port,
            self._options.server,
        ):
            return
        if record is not None and record.port == self._options.port:
            self._server.kill_supervisor()
        elif not self._server.is_orphaned():
            self._server.stop()
        if record is None and self._is_serving:
            self._record_uptime(ends=1)
        self._is_serving = False
        self._server.start(self._options.port, self._options.server)
        self._is_serving = True
        # Without an adopted table, `publish` sends the table to the new server.
        self._following.adopted = None
        self._report_due.set()

    def end(self) -> None:
        """Stop the loops and the server, and write the last report.

        Requests in flight are answered. The end is announced while the server stops: a platform may
        kill a process that has not ended within ten seconds.
        """
        self._stop.set()
        self._report_due.set()
        announcement = threading.Thread(
            target=self._attempt, args=(self.announce_end,), daemon=True
        )
        announcement.start()
        self._server.stop()
        announcement.join()
        try:
            counts = codec.loads((self._server.folder / FINAL_COUNTS_FILE).read_bytes(), Counts)
            self._write_counts(counts, is_final=True)
            self._write_status(replace(self._build_status(), is_final=True))
        except (OnnxOpsError, OSError) as error:
            _log.error("the last report could not be written: %s", error)

    def announce_end(self) -> None:
        """Write the last counts, if there are any, as the final counts of this replica.

        The analysis then does not attribute the end of the server to the model.
        """
        if (counts := self._last_counts) is not None:
            self._write_counts(counts, is_final=True)

    def _repeat(self, work: Callable[[], None]) -> None:
        """Repeat the work of one loop until `end` is called.

        An error is logged once, and the loop tries again.
        """
        while not self._stop.is_set():
            self._attempt(work)
            if work == self.report:
                self._report_due.wait(REPORT_S)
                self._report_due.clear()
            else:
                self._stop.wait(_CHECK_S if work == self.publish else self._get_poll_pause_s())

    def _get_poll_pause_s(self) -> float:
        if self._is_local:
            return LOCAL_POLL_S
        return LEASED_POLL_S if self._following.needs_lease else POLL_S

    def _attempt(self, work: Callable[[], None]) -> None:
        name = work.__name__
        try:
            work()
        except Exception as error:
            # If this error ended the thread, the replica would no longer do this work, such as
            # following new tables or reporting.
            reason = (
                str(error)
                if isinstance(error, OnnxOpsError)
                else f"{type(error).__name__}: {error}"
            )
            if self._failures.get(name) != reason:
                _log.error(
                    "%s failed: %s", name, reason, exc_info=not isinstance(error, OnnxOpsError)
                )
            self._failures[name] = reason
        else:
            if self._failures.pop(name, None):
                _log.info("%s works again", name)

    def _read_head(self) -> TableHead | None:
        data = self._control.read(HEAD)
        try:
            return None if data is None else codec.loads(data, TableHead, where=HEAD)
        except CorruptStateError:
            # The regular listing also finds new tables. The beat stays unknown until the head is
            # written again.
            return None

    def _read_table(self, number: TableNumber) -> StoredTable:
        data = self._control.read(number.name)
        if data is None:
            raise CorruptStateError("it was deleted", where=number.name)
        return decode_table(data, number, self._options.endpoint, self._verifier)

    def _locate(self, table: ReplicaTable) -> object:
        """Return the routing table with the local folders of its models.

        Missing files are downloaded, and folders that the table does not need are removed.
        """
        state = table.table.state
        deployments = tuple(replace(d, location=self._fetch(d)) for d in state.deployments)
        needed = {d.manifest for d in state.deployments}
        for stored in self._models.list_folders():
            if stored.digest is not None and stored.digest not in needed:
                self._intact.discard(stored.digest)
                self._models.forget(stored.digest)
        return replace(table.table, state=replace(state, deployments=deployments))

    def _fetch(self, deployment: Deployment) -> str:
        digest = deployment.manifest
        if digest in self._intact or self._models.location(digest) is not None:
            self._intact.add(digest)
            return self._models.place(digest)
        self._models.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(
            dir=self._models.root.parent, prefix=".download-"
        ) as folder:
            manifest = download_model(self._control, digest, Path(folder))
            place = self._models.admit(Path(folder), manifest)
        self._intact.add(digest)
        return place

    def _build_status(self) -> ReplicaStatus:
        following, refused = self._following, self._refused
        try:
            state = codec.loads(self._ask("GET", STATE_PATH), AdminState)
        except OnnxOpsError as error:
            state = AdminState(
                state=None, failed={"server": str(error)} if not self._stop.is_set() else {}
            )
        deployments = () if state.state is None else state.state.deployments
        self._beat += 1
        return ReplicaStatus(
            replica=self._source.replica,
            start=self._source.start,
            endpoint=self._options.endpoint,
            adopted=None if following.adopted is None else following.adopted.number,
            loaded=tuple(d.manifest for d in deployments if d.name not in state.failed),
            failed=state.failed,
            refused="" if refused is None else f"table {refused[0]}: {refused[2]}",
            skipped=following.skipped,
            out_of_service=state.out_of_service,
            has_lease=following.needs_lease and self._lease > read_boot_clock(),
            lapsed=self._lapsed,
            beat=self._beat,
            at=time.time(),  # noqa: TID251 (a time for people; clocks are not compared)
            address=self._options.address,
            versions=_read_versions(),
            image=self._options.image,
            memory=None
            if state.memory is None
            else replace(state.memory, server=self._source.replica),
        )

    def _write_status(self, status: ReplicaStatus) -> None:
        self._reports.write(self._source.status_name, codec.dumps(status))

    def _record_uptime(self, *, ends: int = 0) -> None:
        """Add the time since the last call, and unexpected ends, to the server's uptime.

        Uptime and ends belong to the generation of the adopted table, or of the newest table if no
        table is adopted.
        """
        now, table = read_boot_clock(), self._following.adopted or self._following.newest
        generation = 0 if table is None else table.number.generation
        known = self._uptimes.get(generation) or ServerUptime(
            server=self._source.replica, generation=generation
        )
        # A suspended process did not serve, so a long pause is counted only in part.
        seconds = min(now - self._recorded_at, SILENT_S)
        self._uptimes[generation] = replace(
            known, seconds=known.seconds + seconds, ends=known.ends + ends
        )
        self._recorded_at = now

    def _write_counts(self, counts: Counts, *, is_final: bool = False) -> None:
        for epoch in counts.epochs:
            if (key := (epoch.generation, epoch.epoch)) not in self._epochs:
                self._reports.create(self._source.name_epoch(*key), codec.dumps(epoch))
                self._epochs.add(key)
        self._record_uptime()
        self._last_counts = counts
        uptimes = tuple(self._uptimes.values())
        final = replace(counts, epochs=(), uptimes=uptimes, is_final=is_final)
        self._reports.write(self._source.counts_name, codec.dumps(final))

    def _ask(
        self, method: str, path: str, body: bytes | None = None, *, timeout_s: float = _ADMIN_S
    ) -> bytes:
        record = self._require_record()
        status, answer = self._server.request(record, method, body, path=path, timeout_s=timeout_s)
        if status != 200:
            raise error_from_bytes(answer)
        return answer

    def _require_record(self) -> ServerRecord:
        if (record := self._server.record()) is None:
            raise ServiceUnavailableError("the server of this replica is not running")
        return record


def require_known(names: Sequence[str], known: TableNumber | None, place: str) -> None:
    """Raise ServiceUnavailableError if a listing of tables lacks the known table.

    A network share that is no longer mounted looks like an empty folder. Its listing must not renew
    a lease.
    """
    if known is not None and f"{known}.json" not in names:
        raise ServiceUnavailableError(
            f"table {known} is missing",
            where=f"{place}/{FOLDER}",
            why="the location is not mounted any more, or its objects were deleted",
            remedy="Mount the location again, or publish a table: onnx-ops reconcile.",
        )


def read_boot_clock() -> float:
    """Return the seconds since boot, including suspension of the machine."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


@functools.cache
def _read_versions() -> Mapping[str, str]:
    versions = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return versions


def name_replica(folder: Path, given: str) -> str:
    """Return the given name of the replica or, if it is empty, the name in its folder.

    Without both, the replica gets the host's name with random digits, which is stored in its
    folder.
    """
    if given:
        return check_replica_name(given)
    path = folder / NAME_FILE
    if not path.exists():
        host = re.sub(r"[^A-Za-z0-9-]", "-", platform.node()).strip("-")[:40] or "replica"
        write_durably(path, f"{host}-{secrets.token_hex(3)}".encode())
    return check_replica_name(path.read_text(encoding="utf-8").strip())


def main(arguments: Sequence[str]) -> int:
    """Run the follower until SIGTERM or SIGINT; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="onnx_ops.app.follower", description="Serve as a replica of one endpoint."
    )
    parser.add_argument(
        "--state-dir", type=Path, required=True, help="folder of the server, its log and its models"
    )
    parser.add_argument(
        "--follow", required=True, help="location of the tables and models in the object store"
    )
    parser.add_argument("--reports", required=True, help="location of the reports")
    parser.add_argument("--replica", default="", help="name of the replica")
    parser.add_argument("--address", default="", help="URL at which clients reach this replica")
    parser.add_argument("--image", default="", help="image of the replica's container")
    parser.add_argument("--host", default="127.0.0.1", help="address of the public listener")
    parser.add_argument("--port", type=int, required=True, help="port of the public listener")
    parser.add_argument(
        "--log", type=Path, default=None, help="file of the server's log; default: in --state-dir"
    )
    for name, kind, default, text in list_options():
        parser.add_argument(
            f"--{name.replace('_', '-')}", type=kind, default=default, help=text.replace("%", "%%")
        )
    values = vars(parser.parse_args(arguments))
    own = {
        name: values.pop(name)
        for name in ("follow", "reports", "replica", "address", "image", "port")
    }
    folder, host, log = values.pop("state_dir"), values.pop("host"), values.pop("log")
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(process)d %(name)s: %(message)s"
    )
    try:
        options = bind_options(values, ServerOptions)
        check_options(own, options)
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder = folder.resolve()
        if not is_encoded_keys(options.trusted_keys):
            options = replace(options, trusted_keys=_place_keys(options.trusted_keys, folder))
        replica = FollowerOptions(
            control=own["follow"],
            reports=own["reports"],
            endpoint=options.endpoint,
            replica=name_replica(folder, own["replica"]),
            address=own["address"],
            image=own["image"],
            port=own["port"],
            server=options,
        )
        server = LocalServer(folder, sys.executable, host=host, log=log)
        follower = Follower(
            replica, folder, server, read_release_keys(folder, options.trusted_keys)
        )
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: follower.stop())
        follower.run()
    except OnnxOpsError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    return 0


def _place_keys(path: str, folder: Path) -> str:
    """Return the path of the keys, relative to the server's folder.

    An absolute path, and a relative path that does not exist in the working folder, are returned
    unchanged.
    """
    is_here = not Path(path).is_absolute() and Path(path).exists()
    return os.path.relpath(path, folder) if is_here else path


def check_options(own: Mapping[str, str], options: ServerOptions) -> None:
    """Raise UserError or RefusedError for options with which a replica must not run.

    With such options, no table can be adopted, or replicas could write tables.
    """
    if not options.endpoint:
        raise UserError(
            "a replica needs the name of its endpoint",
            where="--endpoint",
            remedy="Set --endpoint NAME.",
        )
    if not options.trusted_keys:
        raise RefusedError(
            "a replica adopts only signed tables, but there is no key to verify them",
            where="--trusted-keys",
            remedy="Set the folder of the public keys, or the keys in base64: the joined lines of "
            "NAME.pub.pem between BEGIN and END.",
        )
    control, reports = (own[name].rstrip("/") for name in ("follow", "reports"))
    if control == reports or control.startswith(f"{reports}/") or reports.startswith(f"{control}/"):
        raise UserError(
            "the locations of tables and reports are the same, or one contains the other",
            where="--reports",
            why="replicas write reports, and must not be able to write tables",
            remedy="Use separate buckets, containers or folders with different permissions.",
        )


def read_release_keys(folder: Path, trusted: str) -> TrustedKeys:
    """Return the release keys of setting `trusted_keys`.

    A path in the setting is relative to the server's folder.

    Raises:
        UserError: a key in the setting, or a file, is not a public key of ECDSA P-256.
        RefusedError: there is no key for releases.
    """
    keys = TrustedKeys.of(trusted, folder, role="release")
    if not keys.keys():
        raise RefusedError(
            "there is no public key for releases",
            where=f"--trusted-keys {trusted}",
            remedy="Name a folder with the file NAME.pub.pem, or with this file in its subfolder "
            "`release`. `onnx-ops keys list` shows the files.",
        )
    return keys


if __name__ == "__main__":
    code = main(sys.argv[1:])
    logging.shutdown()
    # A normal exit would wait for threads of clients that still wait for the store.
    os._exit(code)
