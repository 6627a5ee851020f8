"""The supervisor, which runs the workers and publishes the routing table.

It owns the folder and the sockets of the server. It has imported the server's modules, but leaves
models and threads to the processes that it forks. So it can fork a worker at any time.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import importlib
import logging
import os
import signal
import socket
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

from onnx_ops import codec
from onnx_ops.domain.endpoint import Deployment, EndpointState
from onnx_ops.domain.rollout_policy import COLD_START_SAMPLES
from onnx_ops.errors import (
    ConflictError,
    InfrastructureError,
    OnnxOpsError,
    ServiceUnavailableError,
    UserError,
)
from onnx_ops.file_locks import try_lock
from onnx_ops.protocol.messages import AdminState, Counts, Lease, UserCountsRequest
from onnx_ops.protocol.routing_table import RoutingTable, TableFile, build_next_table
from onnx_ops.protocol.server_process import (
    FINAL_COUNTS_FILE,
    HANDOVER_SOCKET,
    LOCK_FILE,
    SERVER_FILE,
    ServerOptions,
    ServerRecord,
    list_workers,
    signal_worker,
)
from onnx_ops.scratch import write_durably
from onnx_ops.serving.admin import AdminApp, AdminOperations, AuditTrail, read_token
from onnx_ops.serving.http.limits import ConnectionLimits, HostPolicy
from onnx_ops.serving.http.protocol import HttpProtocol, serve_connections
from onnx_ops.serving.inference.deployments import MAX_REPLICA_BYTES, TableRevision, find_control
from onnx_ops.serving.inference.integrity import COPIES_FOLDER, ModelCopies, TrustPolicy
from onnx_ops.serving.inference.models import measure_folder
from onnx_ops.serving.metrics import (
    EPOCH_FAILURES,
    LAPSED,
    LEASE,
    REVISION,
    SERVING_LEASE,
    SharedMetrics,
    SlotAllocator,
    make_row,
)
from onnx_ops.serving.rollout_counts import RolloutCounts
from onnx_ops.serving.workers.listeners import (
    LOOPBACK,
    ListenerSockets,
    listen_tcp,
    listen_unix,
    receive_sockets,
)
from onnx_ops.serving.workers.memory_admission import measure_server_memory
from onnx_ops.serving.workers.shadow_processes import ShadowProcesses
from onnx_ops.serving.workers.trial_load import LoadPlan, measure_cold_start, run_trial_load
from onnx_ops.serving.workers.worker import Worker
from onnx_ops.serving.workers.worker_health import WorkerHealth
from onnx_ops.serving.workers.worker_pool import WorkerPool

_log = logging.getLogger(__name__)

_LOCK_ATTEMPTS = 40
_LOCK_PAUSE_S = 0.05
_ORPHAN_PAUSE_S = 0.02
_KILL_MARGIN_S = 2
_SHADOW_DRAIN_S = 1.0
_EPOCH_RETRY_S = 1.0
"""Seconds to wait after an error in the change of epochs.

If the error persists, one attempt is made per second.
"""
_MAX_ADMINS = 64
_MAX_ADMIN_BODY = 1 << 20
_ADMIN_DRAIN_S = 1
_PREPARE_S = 280
"""Limit in seconds for a trial load and the workers' loads together.

Clients wait slightly longer for a publication.
"""


class TablePublisher:
    """Publisher of table revisions; only this class changes the published revision."""

    def __init__(self, tables: TableFile, shared: SharedMetrics) -> None:
        self._tables = tables
        self._shared = shared
        self._slots = SlotAllocator(shared)
        self._last = 0
        self.counts = RolloutCounts(shared)
        self.health = WorkerHealth(shared)
        self.current: TableRevision | None = None

    @property
    def state(self) -> EndpointState | None:
        """The state that was published last; None before the first publication."""
        return None if self.current is None else self.current.table.state

    def restore(self) -> None:
        """Publish the stored table before any worker is started."""
        if (table := self._tables.read()) is not None:
            self._set_current(self._build_revision(table))

    def is_published(self, desired: EndpointState | RoutingTable) -> bool:
        """Return whether exactly this state, or table, is published.

        Raises:
            UserError: the deployments are not all of one model.
            ConflictError: the generation is older than the current one, or equal with different
                content.
        """
        state = desired.state if isinstance(desired, RoutingTable) else desired
        if len({d.model for d in state.deployments}) != 1:
            raise UserError("an endpoint serves deployments of exactly one model")
        current = self.state
        if current is None or state.generation > current.generation:
            return False
        remedy = "Read the state of the endpoint again, and publish a newer generation."
        if state.generation < current.generation:
            raise ConflictError(
                f"generation {state.generation} is older than the published generation "
                f"{current.generation}",
                remedy=remedy,
            )
        if not state.is_equivalent(current):
            raise ConflictError(
                f"generation {state.generation} is already published with different content",
                remedy=remedy,
            )
        return self.current is not None and desired in (current, self.current.table)

    def build_revision(self, desired: EndpointState | RoutingTable) -> TableRevision:
        """Return the revision that publishes a state or a table.

        Call `is_published` first, because it validates the state.

        Raises:
            UserError: the table has too many deployments, or names that are too long (see
                `SlotAllocator.assign`).
        """
        if isinstance(desired, RoutingTable):
            return self._build_revision(desired)
        return self._build_revision(
            build_next_table(None if self.current is None else self.current.table, desired)
        )

    def publish(self, revision: TableRevision) -> None:
        """Write a revision durably and publish it.

        Call this when every worker has prepared the revision, without awaiting anything in between.
        Otherwise, a worker that starts meanwhile would not get the revision.

        Raises:
            ServiceUnavailableError: the table could not be written.
        """
        try:
            # The feedback key is not stored on disk. The follower sends it again after a restart.
            self._tables.write(replace(revision.table, feedback_key=""))
        except OSError as error:
            raise ServiceUnavailableError(
                "the table could not be written", why=str(error)
            ) from error
        self._set_current(revision)
        state = revision.table.state
        _log.info("generation %d is published: %s", state.generation, dict(state.split.weights))

    def _build_revision(self, table: RoutingTable) -> TableRevision:
        self._last += 1
        slots = self._slots.assign(table, None if self.current is None else self.current.table)
        return TableRevision.follow(self.current, self._last, table, slots)

    def _set_current(self, revision: TableRevision) -> None:
        self.counts.start_table(revision, time.time())  # noqa: TID251 (epochs are those of the clock)
        self.health.start_table(revision)
        self.current = revision
        self._shared.header[REVISION] = revision.number


class Supervisor:
    """Supervisor of one endpoint, which publishes to a pool of workers (see `serve`)."""

    def __init__(
        self,
        folder: Path,
        options: ServerOptions,
        listeners: ListenerSockets,
        publisher: TablePublisher,
        shared: SharedMetrics,
        *,
        must_load: bool,
    ) -> None:
        self._folder = folder
        self._options = options
        self._listeners = listeners
        self._publisher = publisher
        self._shared = shared
        self._audit = AuditTrail(folder)
        self._copies = ModelCopies(folder / COPIES_FOLDER)
        keep = listeners.public.fileno(), listeners.handover.fileno()
        self._pool = WorkerPool(
            options.workers,
            self._run_worker,
            keep=keep,
            health=publisher.health,
            max_body=options.max_body,
        )
        self._shadows = ShadowProcesses(folder, options, shared)
        self._publishing = asyncio.Lock()
        self._orphans_ended = asyncio.Event()
        self._stop = asyncio.Event()
        self._must_load = must_load
        self._previous: EndpointState | None = None
        self._cold_s: dict[Deployment, list[float]] = {}
        self._cold_starts: asyncio.Task[None] | None = None
        self._epochs: asyncio.Task[None] | None = None
        self._failures: dict[str, str] = {}
        self._watched: UserCountsRequest | None = None
        self.not_loaded: Mapping[str, str] = {}
        """Deployments that must be loaded and could not be loaded, with the reason."""

    def get_state(self) -> AdminState:
        """Return the `AdminState` without `memory`: the published state, and failures."""
        current = self._publisher.state
        names = set() if current is None else {d.name for d in current.deployments}
        failed = {**self._shadows.get_failed(), **self._pool.get_failed()}
        return AdminState(
            state=current,
            failed={name: why for name, why in failed.items() if name in names},
            out_of_service=self._publisher.health.get_out_of_service(),
            counting_failure=self._describe_failures(),
        )

    def report_state(self) -> AdminState:
        """Return the state, the workers' memory, and the memory that is still available."""
        return replace(self.get_state(), memory=measure_server_memory(self._pool.pids))

    def set_lease(self, lease: Lease) -> Lease:
        """Set the ends of the leases; return the lease with the number of lapsed requests."""
        self._shared.header[LEASE], self._shared.header[SERVING_LEASE] = (
            lease.until_ns,
            lease.serving_until_ns,
        )
        lapsed = sum(
            self._shared.get_process_state(worker)[LAPSED]
            for worker in range(self._options.workers)
        )
        return replace(lease, lapsed=lapsed)

    def _describe_failures(self) -> str:
        """Return why the counts lack evidence; empty if nothing failed."""
        return "; ".join(f"{what}: {why}" for what, why in self._failures.items())

    def collect_counts(self, request: UserCountsRequest | None = None) -> Counts:
        """Return the counts of the current table's deployments; by user if requested.

        Counts by user are returned only if every watched deployment gets traffic or mirrored
        requests. Otherwise, the cold starts of all watched deployments are measured in the
        background.
        """
        self._watched = request or self._watched
        if request is not None and not self._can_count_users(request):
            request = None
        cold_s = {deployment.name: loads_s for deployment, loads_s in self._cold_s.items()}
        counts = self._publisher.counts.collect(request, cold_s=cold_s)
        # An epoch is evidence only if all deployments are loaded.
        open_epoch = None if self.get_state().failed else counts.open_epoch
        return replace(counts, failure=self._describe_failures(), open_epoch=open_epoch)

    def _can_count_users(self, request: UserCountsRequest) -> bool:
        """Return whether the watched deployments get requests, or no table is published.

        If not, and if samples are missing, the measurement of their cold starts is started. It is
        not started while it is running, or while a publication is in progress. Requests are counted
        by user as soon as the candidate can get requests.
        """
        if (current := self._publisher.current) is None:
            return True
        split, listed = current.table.state.split, current.table.state.deployments
        watched = [d for d in listed if d.name in request.limits_s]
        if all(split.weights.get(d.name) or split.shadow.get(d.name) for d in watched):
            return True
        if not self._publishing.locked() and (
            self._cold_starts is None or self._cold_starts.done()
        ):
            self._cold_s = {deployment: self._cold_s.get(deployment, []) for deployment in watched}
            if min(map(len, self._cold_s.values())) < COLD_START_SAMPLES:
                self._cold_starts = asyncio.get_running_loop().create_task(
                    self._measure_cold_starts()
                )
        return False

    async def _measure_cold_starts(self) -> None:
        """Load the watched deployments in turn, without the cache of packed models."""
        options = replace(self._options, prepack=0)
        try:
            while len(loads_s := min(self._cold_s.values(), key=len)) < COLD_START_SAMPLES:
                deployment = next(d for d, listed in self._cold_s.items() if listed is loads_s)
                loads_s.append(
                    await measure_cold_start(
                        [deployment], self._folder, options, limit_s=_PREPARE_S
                    )
                )
        except Exception as error:  # The next request for counts repeats the measurement.
            self._record_failure("a cold start could not be measured", error)
        else:
            self._failures.pop("a cold start could not be measured", None)

    def _start_epochs(self) -> None:
        """Start the task that changes the epochs of the published table."""
        if self._epochs is not None:
            self._epochs.cancel()
        self._failures.clear()  # The recorded failures belong to the previous table.
        self._epochs = asyncio.get_running_loop().create_task(self._turn_epochs())

    async def _turn_epochs(self) -> None:
        """Begin an epoch whenever the previous one ends, while the split has epochs.

        After an error, the epoch is not evidence, and the change is repeated after a pause. If this
        task ended instead, a rollout would wait forever for further epochs, without a stated
        reason.
        """
        counts, what = self._publisher.counts, "the next epoch could not be started"
        while True:
            try:
                if (rest_s := counts.get_epoch_rest_s(time.time())) is None:  # noqa: TID251 (epochs are the clock's)
                    return
                await asyncio.sleep(rest_s)
                counts.turn_epoch(time.time(), is_complete=not self.get_state().failed)  # noqa: TID251
                self._failures.pop(what, None)
            except Exception as error:
                counts.discard_epoch()
                self._shared.get_shadow_row(0)[EPOCH_FAILURES] += 1
                self._record_failure(what, error)
                await asyncio.sleep(_EPOCH_RETRY_S)

    def _record_failure(self, what: str, error: Exception) -> None:
        """Store the reason of a background task's error for readers of state and counts.

        The error is logged, unless this task's last error had the same reason.
        """
        reason = (
            str(error) if isinstance(error, OnnxOpsError) else f"{type(error).__name__}: {error}"
        )
        if self._failures.get(what) != reason:
            _log.error("%s", what, exc_info=error)
        self._failures[what] = reason

    async def publish(self, desired: EndpointState | RoutingTable, actor: str) -> None:
        """Publish a state or a table.

        After the method has returned, every new request is answered according to this state or a
        later one. If the publication fails with an OnnxOpsError, the published state has not
        changed.
        """
        state = desired.state if isinstance(desired, RoutingTable) else desired
        async with self._publishing:
            if self._cold_starts is not None:
                self._cold_starts.cancel()
                # The publication waits until the measurement has released its memory.
                await asyncio.wait([self._cold_starts])
            await self._orphans_ended.wait()
            if self._publisher.is_published(desired) and not self.get_state().failed:
                return
            self._audit.record_request(actor, state)
            before = self._publisher.state
            revision: TableRevision | None = None
            try:
                revision = self._publisher.build_revision(desired)
                started_at = time.monotonic()
                await self._try_new(revision.table, before)
                # The trial load and the workers' loads share one time limit.
                await self._pool.prepare(revision, _PREPARE_S - (time.monotonic() - started_at))
                self._shadows.start(revision)
                self._bind(state)
                self._publisher.publish(revision)
                self._start_epochs()
            except OnnxOpsError as error:
                self._shadows.retain(self._publisher.current)
                if revision is not None:
                    await self._pool.finish(revision.number, is_published=False)
                with contextlib.suppress(OnnxOpsError):
                    # Only the first error is reported to the client.
                    self._audit.record_result(actor, state, str(error))
                raise
            self._previous = before
            self._watched = None
            self._shadows.retain(revision)
            await self._pool.finish(revision.number, is_published=True)
            self._copies.retain(_list_deployments(state, before))
            try:
                self._audit.record_result(actor, state)
            except OnnxOpsError as error:
                _log.error("generation %d is published, but %s", state.generation, error)

    def _bind(self, state: EndpointState) -> None:
        """Bind the server to the model of the first state, if it must be signed."""
        trust = TrustPolicy.from_options(self._folder, self._options)
        if trust is None:
            return
        try:
            trust.bind(state)
        except OSError as error:
            raise ServiceUnavailableError(
                "the file with the model and target of this server could not be written",
                why=str(error),
            ) from error

    async def _try_new(self, table: RoutingTable, before: EndpointState | None) -> None:
        """Load the models that the workers do not have, in a trial process.

        A deployment that crashes its process then crashes the trial process and not a worker.
        """
        state, failed = table.state, self.get_state().failed
        loaded = {d for d in _list_deployments(before, self._previous) if d.name not in failed}
        new = [d for d in state.deployments if d not in loaded]
        control = self._find_new_control(table, new)
        plan = LoadPlan(
            size=self._options.workers,
            pids=self._pool.pids,
            shadows=[d.name for d in new if state.split.shadow.get(d.name)],
            has_control=control is not None,
        )
        if control is not None:
            new.append(replace(control, name=f"control replica of {control.name}"))
        if new:
            await run_trial_load(new, self._folder, self._options, plan, limit_s=_PREPARE_S)

    def _find_new_control(
        self, table: RoutingTable, new: Collection[Deployment]
    ) -> Deployment | None:
        """Return the deployment of the control replica that the workers must load, if any.

        They keep the control replica of the current table if the next table needs the same one.
        """
        control, current = find_control(table), self._publisher.current
        if control is None:
            return None
        is_kept = current is not None and find_control(current.table) == control
        if is_kept and control not in new:
            return None
        is_large = measure_folder(Path(control.location)) > MAX_REPLICA_BYTES
        return None if is_large else control

    async def run(self, admin: list[tuple[socket.socket, str | None, str]]) -> None:
        """Serve until SIGTERM or SIGINT.

        `admin` has the socket, the token and the actor of each admin listener. The listener with a
        TCP port is the first.
        """
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop.set)
        async with asyncio.TaskGroup() as group:
            starting = group.create_task(self._start(admin, group))
            await self._stop.wait()
            starting.cancel()
            self._listeners.public.close()
            deadline = time.monotonic() + self._options.drain + _KILL_MARGIN_S
            await self._pool.stop(deadline - time.monotonic())
            self._keep_counts()
            await self._shadows.stop(min(_SHADOW_DRAIN_S, max(0.0, deadline - time.monotonic())))

    def _keep_counts(self) -> None:
        """Write the last counts to a file, for readers after the end of this process."""
        try:
            write_durably(
                self._folder / FINAL_COUNTS_FILE,
                codec.dumps(self._publisher.counts.collect(self._watched)),
            )
        except OSError as error:
            _log.error("the last counts could not be written: %s", error)

    async def _start(
        self, admin: list[tuple[socket.socket, str | None, str]], group: asyncio.TaskGroup
    ) -> None:
        await self._pool.start()
        if self._publisher.current is not None:
            self._start_epochs()
            self._shadows.start(self._publisher.current)
        if self._must_load and (failed := self.get_state().failed):
            self.not_loaded = failed
            self._stop.set()
            return
        admin_port = admin[0][0].getsockname()[1]
        operations = AdminOperations(
            report_state=self.report_state,
            collect_counts=self.collect_counts,
            set_lease=self.set_lease,
            publish=self.publish,
        )
        for listener, token, actor in admin:
            limits = ConnectionLimits(
                max_connections=_MAX_ADMINS,
                max_body=_MAX_ADMIN_BODY,
                read_timeout_s=self._options.read_timeout,
                keep_alive_s=self._options.keep_alive,
                row=make_row(),  # The metrics page does not show the counts of this row.
            )
            hosts = (
                HostPolicy()
                if token is None
                else HostPolicy.from_options(LOOPBACK, admin_port, self._options)
            )
            build = partial(HttpProtocol, AdminApp(operations, token, actor), limits, hosts)
            group.create_task(
                serve_connections(build, listener, limits, self._stop, drain_s=_ADMIN_DRAIN_S)
            )
        record = ServerRecord(
            pid=os.getpid(),
            port=self._listeners.public.getsockname()[1],
            admin_port=admin_port,
            started=time.time(),  # noqa: TID251 (the start of the process, for people)
            options=self._options,
        )
        write_durably(self._folder / SERVER_FILE, codec.dumps(record))
        _log.info("serving on port %d with %d workers", record.port, self._options.workers)
        # Workers of a supervisor that ended would miss a publication, so they are ended. Until now
        # they have answered according to the same table.
        if orphans := self._list_orphans():
            _log.warning(
                "taking over from workers %s, whose supervisor has ended",
                ", ".join(map(str, orphans)),
            )
        for number, limit_s in (
            (signal.SIGTERM, self._options.drain + _KILL_MARGIN_S),
            (signal.SIGKILL, 5),
        ):
            for pid in self._list_orphans():
                signal_worker(pid, self._folder, number)
            deadline = time.monotonic() + limit_s
            while self._list_orphans() and time.monotonic() < deadline:
                await asyncio.sleep(_ORPHAN_PAUSE_S)
        self._orphans_ended.set()

    def _list_orphans(self) -> list[int]:
        return [pid for pid in list_workers(self._folder) if pid not in self._pool.pids]

    def _run_worker(self, number: int, control: socket.socket, refusal: str) -> None:
        Worker(
            number=number,
            folder=self._folder,
            options=self._options,
            shared=self._shared,
            listeners=self._listeners,
            control=control,
            revision=self._publisher.current,
            refusal=refusal,
        ).run()


def _list_deployments(*states: EndpointState | None) -> list[Deployment]:
    return [deployment for state in states if state is not None for deployment in state.deployments]


def serve(
    folder: Path, host: str, port: int, admin_port: int, options: ServerOptions, *, must_load: bool
) -> None:
    """Serve the folder's last published table until SIGTERM or SIGINT, then drain.

    A missing folder is created, and port 0 selects any free port. With `must_load`, a stored
    deployment that cannot be loaded raises InfrastructureError. Use it for a server to which no
    other table is published.
    """
    with ExitStack() as stack:
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            stack.enter_context(_lock_folder(folder))
            token = read_token(folder)
            orphans = list_workers(folder)
            listeners = receive_sockets(folder, host, port) if orphans else None
            if options.grpc_port:
                # The module is imported here, so that workers share its memory. It starts no thread
                # until a server is created.
                importlib.import_module("onnx_ops.serving.grpc.server")
                if not orphans:
                    listen_tcp(
                        host,
                        options.grpc_port,
                        # Without this check, the workers would share the port with another server.
                    ).close()
            if listeners is None:
                handover = folder / HANDOVER_SOCKET
                listeners = ListenerSockets(
                    public=listen_tcp(host, port), handover=listen_unix(handover)
                )
            admin: list[tuple[socket.socket, str | None, str]] = [
                (listen_tcp(LOOPBACK, admin_port), token, "token")
            ]
            if options.admin_socket:
                admin.append((listen_unix(Path(options.admin_socket)), None, f"uid:{os.getuid()}"))
            publisher = TablePublisher(TableFile(folder), shared := SharedMetrics(options.workers))
            publisher.restore()
        except OSError as error:
            why = str(error)
            raise InfrastructureError(
                "a file or socket of the server cannot be used", where=str(folder), why=why
            ) from error
        gc.collect()
        # Without this call, the first garbage collection of every worker would copy the memory that
        # all workers share.
        gc.freeze()
        supervisor = Supervisor(folder, options, listeners, publisher, shared, must_load=must_load)
        asyncio.run(supervisor.run(admin))
        with contextlib.suppress(OSError):
            (folder / SERVER_FILE).unlink(missing_ok=True)
            (folder / HANDOVER_SOCKET).unlink(missing_ok=True)
            if options.admin_socket:
                Path(options.admin_socket).unlink(missing_ok=True)
        for name, why in supervisor.not_loaded.items():
            raise InfrastructureError("the model cannot be loaded", where=name, why=why)


@contextlib.contextmanager
def _lock_folder(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder during the block; remove files of an earlier server.

    Raises:
        ConflictError: another server uses the folder.
    """
    with (folder / LOCK_FILE).open("a+", encoding="utf-8") as stream:
        # A client that checks whether the server runs holds the lock for a moment.
        for _ in range(_LOCK_ATTEMPTS):
            if try_lock(stream.fileno()):
                break
            time.sleep(_LOCK_PAUSE_S)
        else:
            raise ConflictError("another server uses this folder", where=str(folder))
        stream.truncate(0)
        (folder / SERVER_FILE).unlink(missing_ok=True)
        (folder / FINAL_COUNTS_FILE).unlink(missing_ok=True)
        stream.write(str(os.getpid()))
        stream.flush()
        yield
