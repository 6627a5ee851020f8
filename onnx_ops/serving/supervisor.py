"""The supervisor: owns folder, sockets and table, keeps the workers alive, and publishes.

It has everything imported, but loads no model and has no thread, so that it can fork a new worker at any time.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import gc
import logging
import os
import signal
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import uvicorn
from starlette.applications import Starlette

from onnx_ops import codec
from onnx_ops.domain.endpoint import Deployment, EndpointState
from onnx_ops.domain.rollout_policy import COLD_START_SAMPLES
from onnx_ops.errors import ConflictError, InfrastructureError, OnnxOpsError
from onnx_ops.protocol import server_process
from onnx_ops.protocol.messages import AdminState, Counts, UserCountsRequest
from onnx_ops.protocol.routing_table import TableFile, write_durably
from onnx_ops.protocol.server_process import HANDOVER_SOCKET, LOCK_FILE, SERVER_FILE, ServerOptions, ServerRecord
from onnx_ops.serving.admin import AdminApp, read_token
from onnx_ops.serving.audit import Audit
from onnx_ops.serving.counts import counted
from onnx_ops.serving.crew import Crew
from onnx_ops.serving.endpoint import Edition, Endpoint
from onnx_ops.serving.listeners import LOOPBACK, Listeners, bound, bound_to_file, inherited
from onnx_ops.serving.shared import Shared
from onnx_ops.serving.trial_load import try_load
from onnx_ops.serving.verified import Trust
from onnx_ops.serving.worker import Start

_log = logging.getLogger(__name__)

_LOCK_TRIES = 40
_LOCK_PAUSE_S = 0.05
_ORPHAN_PAUSE_S = 0.02
_KILL_MARGIN_S = 2
_PREPARE_S = 280
"""For a trial load and the workers' own together; clients wait a little longer for a publication."""


def serve(
    folder: Path, host: str, port: int, admin_port: int, options: ServerOptions, *, must_load: bool = False
) -> None:
    """Serve the folder's last published table until SIGTERM or SIGINT, then drain.

    Args:
        folder: where table, token and server record stand; made if it is not there.
        host, port: the public listener; port 0 lets the system choose.
        admin_port: the admin listener on loopback; 0 lets the system choose.
        options: everything else.
        must_load: end at once if a deployment of the table cannot be loaded, as nobody will publish another one.

    Raises:
        ConflictError: another server runs on the folder.
        ServiceUnavailableError: a port is taken.
        RefusedError: the token's file is open to others.
        InfrastructureError: the folder cannot be read or written, or what must be loaded cannot be.
    """
    with ExitStack() as stack:
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            stack.enter_context(_only_server(folder))
            token = read_token(folder)
            listeners = _listeners(folder, host, port)
            admin: list[tuple[socket.socket, str | None, str]] = [(bound(LOOPBACK, admin_port), token, "token")]
            if options.admin_socket:
                admin.append((bound_to_file(Path(options.admin_socket)), None, f"uid:{os.getuid()}"))
            endpoint = Endpoint(TableFile(folder), shared := Shared(options.workers))
            endpoint.restore()
        except OSError as error:
            raise InfrastructureError(
                "the server's folder cannot be used", where=str(folder), why=str(error)
            ) from error
        gc.collect()
        gc.freeze()  # else every worker's first collection would copy what all of them share
        supervisor = Supervisor(folder, options, listeners, endpoint, shared, must_load=must_load)
        asyncio.run(supervisor.run([(AdminApp(supervisor, t, who).asgi(), s) for s, t, who in admin]))
        with contextlib.suppress(OSError):
            (folder / SERVER_FILE).unlink(missing_ok=True)
            (folder / HANDOVER_SOCKET).unlink(missing_ok=True)
            if options.admin_socket:
                Path(options.admin_socket).unlink(missing_ok=True)
        for name, why in supervisor.unloaded.items():
            raise InfrastructureError("the model cannot be loaded", where=name, why=why)


class Supervisor:
    """Publishes one endpoint to a crew of workers."""

    def __init__(
        self,
        folder: Path,
        options: ServerOptions,
        listeners: Listeners,
        endpoint: Endpoint,
        shared: Shared,
        *,
        must_load: bool = False,
    ) -> None:
        self._folder = folder
        self._options = options
        self._listeners = listeners
        self._endpoint = endpoint
        self._shared = shared
        self._audit = Audit(folder)
        self._crew = Crew(options.workers, self._start_of)
        self._changing = asyncio.Lock()
        self._alone = asyncio.Event()
        self._stop = asyncio.Event()
        self._must_load = must_load
        self._previous: EndpointState | None = None
        self._cold_s: dict[Deployment, list[float]] = {}
        self._loading: asyncio.Task[None] | None = None
        self.unloaded: Mapping[str, str] = {}
        """By deployment, why it is not loaded although it must be."""

    def shown(self) -> AdminState:
        current = self._endpoint.state
        names = set() if current is None else {d.name for d in current.deployments}
        failed = {name: why for name, why in self._crew.failed().items() if name in names}
        return AdminState(state=current, failed=failed)

    def counts(self, asked: UserCountsRequest | None = None) -> Counts:
        """What every deployment that is published was asked and answered; those that are watched by user, too."""
        current = self._endpoint.current
        if current is None:
            return counted(self._shared, {}, asked)
        if asked is not None and self._watch_cold_starts(current.table.state, asked):
            asked = None  # users are counted from the first request on that the candidate might get
        cold_s = {deployment.name: loads_s for deployment, loads_s in self._cold_s.items()}
        return counted(self._shared, current.slots, asked, split=current.table.compute_split_digest(), cold_s=cold_s)

    def _watch_cold_starts(self, state: EndpointState, asked: UserCountsRequest) -> bool:
        """Load what is watched again and again in the background, if some of it gets neither traffic nor copies; return
        whether that is so."""
        watched = [deployment for deployment in state.deployments if deployment.name in asked.limits_s]
        idle = [d for d in watched if not state.split.weights.get(d.name) and not state.split.shadow.get(d.name)]
        if not idle or (self._loading is not None and not self._loading.done()):
            return bool(idle)
        self._cold_s = {deployment: self._cold_s.get(deployment, []) for deployment in watched}
        if min(map(len, self._cold_s.values())) < COLD_START_SAMPLES:
            self._loading = asyncio.get_running_loop().create_task(self._start_coldly())
        return True

    async def _start_coldly(self) -> None:
        """The deployment that was loaded less often has the next turn; nothing prepared for this machine is used."""
        options = replace(self._options, prepack=0)
        try:
            while len(loads_s := min(self._cold_s.values(), key=len)) < COLD_START_SAMPLES:
                deployment = next(one for one, found in self._cold_s.items() if found is loads_s)
                loads_s.append(await try_load([deployment], self._folder, options, (), limit_s=_PREPARE_S))
        except (OnnxOpsError, OSError) as error:
            _log.warning("a cold start could not be measured: %s", error)

    async def publish(self, state: EndpointState, who: str) -> None:
        """Serve a state: on return every answer of every worker is by it or by a later one.

        Raises:
            ConflictError, UserError: see `Endpoint.settled`.
            OnnxOpsError: it could not be prepared or written, and nothing has changed.
        """
        if self._loading is not None:
            self._loading.cancel()
        async with self._changing:
            await self._alone.wait()
            if self._endpoint.settled(state) and not self.shown().failed:
                return
            self._audit.intend(who, state)
            asked: list[Edition] = []

            async def prepare(edition: Edition) -> None:
                began = time.monotonic()
                if new := self._not_loaded(state):
                    await try_load(new, self._folder, self._options, self._crew.pids, limit_s=_PREPARE_S)
                asked.append(edition)
                await self._crew.prepare(edition, _PREPARE_S - (time.monotonic() - began))

            before = self._endpoint.state
            try:
                edition = await self._endpoint.publish(state, prepare)
            except OnnxOpsError as error:
                for abandoned in asked:
                    await self._crew.settle(abandoned, published=False)
                with contextlib.suppress(OnnxOpsError):  # the first error is the one to tell
                    self._audit.outcome(who, state, str(error))
                raise
            self._previous = before
            if (trust := Trust.of(self._folder, self._options)) is not None:
                trust.bind(state)
            self._crew.healed()
            await self._crew.settle(edition, published=True)
            try:
                self._audit.outcome(who, state)
            except OnnxOpsError as error:
                _log.error("generation %d is published, but %s", state.generation, error)

    def _not_loaded(self, state: EndpointState) -> list[Deployment]:
        """The deployments that no worker has loaded: neither for what is published nor for what was before."""
        failed = self._crew.failed()
        states = [held for held in (self._endpoint.state, self._previous) if held is not None]
        loaded = {d for held in states for d in held.deployments if d.name not in failed}
        return [d for d in state.deployments if d not in loaded]

    async def run(self, apps: list[tuple[Starlette, socket.socket]]) -> None:
        """Serve until the process is told to stop."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop.set)
        servers = [(_Server(_config(app)), listener) for app, listener in apps]
        async with asyncio.TaskGroup() as group:
            starting = group.create_task(self._begin(servers, group))
            await self._stop.wait()
            starting.cancel()
            for server, _ in servers:
                server.should_exit = True
            self._listeners.public.close()
            await self._crew.end(self._options.drain + _KILL_MARGIN_S)

    async def _begin(self, servers: list[tuple[_Server, socket.socket]], group: asyncio.TaskGroup) -> None:
        await self._crew.start()
        if self._must_load and (failed := self.shown().failed):
            self.unloaded = failed
            self._stop.set()
            return
        for server, listener in servers:
            group.create_task(server.serve(sockets=[listener]))
        record = ServerRecord(
            pid=os.getpid(),
            port=self._listeners.public.getsockname()[1],
            admin_port=servers[0][1].getsockname()[1],
            started=time.time(),  # noqa: TID251 (the process's own start, for people to read)
            options=self._options,
        )
        write_durably(self._folder / SERVER_FILE, codec.dumps(record))
        _log.info("serving on port %d with %d workers", record.port, self._options.workers)
        await self._retire_orphans()
        self._alone.set()

    async def _retire_orphans(self) -> None:
        """Let workers of a supervisor that died drain. Until they are gone nothing is published: they would not know.

        They go on answering, by the same table, until the new workers are ready.
        """
        orphans = self._orphans()
        if orphans:
            _log.warning("taking over from workers %s, whose supervisor died", ", ".join(map(str, orphans)))
        for number, patience_s in ((signal.SIGTERM, self._options.drain + _KILL_MARGIN_S), (signal.SIGKILL, 5)):
            for pid in self._orphans():
                server_process.signal_worker(pid, self._folder, number)
            deadline = time.monotonic() + patience_s
            while self._orphans() and time.monotonic() < deadline:
                await asyncio.sleep(_ORPHAN_PAUSE_S)

    def _orphans(self) -> list[int]:
        return [pid for pid in server_process.list_workers(self._folder) if pid not in self._crew.pids]

    def _start_of(self, number: int, control: socket.socket, refused: str) -> Start:
        current = self._endpoint.current
        return Start(
            number=number,
            folder=self._folder,
            options=self._options,
            shared=self._shared,
            listeners=self._listeners,
            control=control,
            edition=0 if current is None else current.number,
            table=None if current is None else current.table,
            slots={} if current is None else current.slots,
            refused=refused,
        )


class _Server(uvicorn.Server):
    """Leaves signals to the supervisor."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _config(app: Starlette) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http="h11",  # reads the body of a request that offers another protocol; httptools does not
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=1,
    )


def _listeners(folder: Path, host: str, port: int) -> Listeners:
    """Those of workers whose supervisor died, or new ones."""
    if server_process.list_workers(folder) and (found := inherited(folder, host, port)) is not None:
        return found
    return Listeners(public=bound(host, port), handover=bound_to_file(folder / HANDOVER_SOCKET))


@contextmanager
def _only_server(folder: Path) -> Iterator[None]:
    """Hold the folder's lock. A crash lets go of it, so that nobody takes a dead server for a live one."""
    with (folder / LOCK_FILE).open("a+", encoding="utf-8") as stream:
        for attempt in range(_LOCK_TRIES):
            try:
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as error:  # a client that looks whether we live holds it for an instant
                if attempt == _LOCK_TRIES - 1:
                    raise ConflictError("another server runs on this folder", where=str(folder)) from error
                time.sleep(_LOCK_PAUSE_S)
        stream.truncate(0)
        (folder / SERVER_FILE).unlink(missing_ok=True)
        stream.write(str(os.getpid()))
        stream.flush()
        yield
