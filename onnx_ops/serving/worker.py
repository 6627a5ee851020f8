"""One worker process: it loads models, accepts connections and answers, until it is told to drain."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
import socket
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import uvicorn
import uvloop
from starlette.applications import Starlette

from onnx_ops.domain.endpoint import Deployment
from onnx_ops.errors import InfrastructureError, OnnxOpsError
from onnx_ops.protocol import server_process
from onnx_ops.protocol.messages import error_to_bytes
from onnx_ops.protocol.routing_table import RoutingTable
from onnx_ops.protocol.server_process import ServerOptions
from onnx_ops.serving.access_log import AccessLog
from onnx_ops.serving.app import PublicApp
from onnx_ops.serving.connections import Connections
from onnx_ops.serving.control import Channel, Prepare, Prepared, Ready, Settled
from onnx_ops.serving.host_policy import HostPolicy
from onnx_ops.serving.inference import Inference
from onnx_ops.serving.lanes import MOST_TOGETHER, Hands, Lane
from onnx_ops.serving.listeners import Listeners, hand_over
from onnx_ops.serving.metrics import Metrics
from onnx_ops.serving.models import LoadedModel, load_model
from onnx_ops.serving.outcomes import Outcomes
from onnx_ops.serving.protocol import protocol_for
from onnx_ops.serving.resident import Resident
from onnx_ops.serving.residents import Residents
from onnx_ops.serving.run_time import RunTime
from onnx_ops.serving.sessions import Prepacked
from onnx_ops.serving.shadow import Shadow
from onnx_ops.serving.shared import LEAST_UNTIMED, UNTIMED, Row, Shared
from onnx_ops.serving.user_counts import UserCounts
from onnx_ops.serving.verified import Trust

_log = logging.getLogger(__name__)

PREPACKED_FOLDER = "prepacked"
TWINS_FOLDER = "prepacked-twins"
"""Pages of a file are shared by all who map it: a twin's would be in the caches for the first one's sake."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """What a worker inherits.

    `number` is its place among the workers; `edition`, `table` and `slots` are what was published when it was forked.
    `refused` is why it must not load that table; empty if there is no reason.
    """

    number: int
    folder: Path
    options: ServerOptions
    shared: Shared
    listeners: Listeners
    control: socket.socket
    edition: int
    table: RoutingTable | None
    slots: Mapping[str, int]
    refused: str = ""


def work(start: Start) -> None:
    """The life of a worker process. Returns when it has drained."""
    record = server_process.register_worker(start.folder)
    start.shared.restart(start.number)
    gc.freeze()  # what was inherited lives as long as the process
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_Worker(start).run())
    finally:
        record.unlink(missing_ok=True)


def load(deployment: Deployment, folder: Path, options: ServerOptions, *, twin: bool = False) -> LoadedModel:
    """Load a deployment as a worker of the server on the folder does. Raises OnnxOpsError, see `load_model`."""
    entries = folder / (TWINS_FOLDER if twin else PREPACKED_FOLDER)
    return load_model(deployment, Prepacked(entries, options.prepack or sys.maxsize), Trust.of(folder, options))


class _Server(uvicorn.Server):
    """Leaves signals to the worker."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _Worker:
    def __init__(self, start: Start) -> None:
        self._start = start
        self._options = start.options
        self._nowhere = start.shared.row(start.number, 0)
        self._loads = ThreadPoolExecutor(max_workers=1, thread_name_prefix="load")
        self._threads = start.options.threads or max(1, len(os.sched_getaffinity(0)) // start.options.workers)
        self._hands = Hands(self._threads)
        self._residents = Residents(
            start.shared, start.number, self._load, endpoint=start.options.endpoint or start.folder.name
        )

    async def run(self) -> None:
        start, options = self._start, self._options
        loop = asyncio.get_running_loop()
        channel = await Channel.over(start.control)
        access_log = AccessLog(options.access_log, self._nowhere) if options.access_log else None
        residents = self._residents
        users = UserCounts(start.shared, start.number)
        outcomes = Outcomes(
            start.shared, start.number, named=residents.slot_named, keyed=residents.place_of_key, users=users
        )
        self._inference = Inference(
            residents,
            self._nowhere,
            deadline_s=options.deadline,
            shadow=Shadow(),
            outcomes=outcomes,
            users=users,
            access_log=access_log,
        )
        bounds = Connections(
            most=max(1, options.max_connections // options.workers),
            max_body=options.max_body,
            read_timeout_s=options.read_timeout,
            keep_alive_s=options.keep_alive,
            row=self._nowhere,
        )
        metrics = Metrics(start.shared, residents.endpoint)
        app = PublicApp(self._inference, metrics, outcomes, max_body=options.max_body)
        address, port, *_ = start.listeners.public.getsockname()
        hosts = HostPolicy.of(address, port, options)
        server = _Server(_config(app.asgi(), options, protocol=protocol_for(self._inference, bounds, hosts)))

        def drain() -> None:
            bounds.draining = True
            server.should_exit = True

        loop.add_signal_handler(signal.SIGTERM, drain)
        failed = await self._restore()
        watch = loop.create_task(bounds.watch())
        control = loop.create_task(self._control(channel, failed))
        await server.serve(sockets=[start.listeners.public])
        watch.cancel()
        control.cancel()
        if access_log is not None:
            access_log.close()

    async def _restore(self) -> Mapping[str, str]:
        table = self._start.table
        if table is None:
            return {}
        loop = asyncio.get_running_loop()
        arguments = (self._start.edition, table, self._start.slots, self._start.refused)
        snapshot = await loop.run_in_executor(self._loads, self._residents.restore, *arguments)
        return snapshot.failed

    async def _control(self, channel: Channel, failed: Mapping[str, str]) -> None:
        try:
            await channel.send(Ready(failed=failed))
            while (message := await channel.receive()) is not None:
                if isinstance(message, Prepare):
                    await channel.send(await self._prepare(message))
                elif isinstance(message, Settled):
                    await self._settle(message)
        except ConnectionError:
            pass
        except Exception:
            _log.exception("worker %d cannot follow its supervisor any more and ends", os.getpid())
            os._exit(1)
        _log.warning("the supervisor is gone; worker %d goes on with what is published", os.getpid())
        self._start.listeners.handover.setblocking(False)
        asyncio.get_running_loop().add_reader(self._start.listeners.handover, hand_over, self._start.listeners)

    async def _prepare(self, message: Prepare) -> Prepared:
        loop = asyncio.get_running_loop()
        await self._dismiss()
        try:
            await loop.run_in_executor(
                self._loads, self._residents.prepare, message.edition, message.table, message.slots
            )
        except OnnxOpsError as error:
            return Prepared(edition=message.edition, error=error_to_bytes(error).decode())
        except Exception as error:
            _log.exception("a deployment could not be loaded for a reason that nobody foresaw")
            failure = InfrastructureError("a deployment could not be loaded", why=f"{type(error).__name__}: {error}")
            return Prepared(edition=message.edition, error=error_to_bytes(failure).decode())
        return Prepared(edition=message.edition)

    async def _settle(self, message: Settled) -> None:
        if not message.published:
            self._residents.discard(message.edition)
        await self._dismiss()

    async def _dismiss(self) -> None:
        """Turn to what is published, and let go of models that nothing needs any more outside the event loop."""
        with contextlib.suppress(OnnxOpsError):
            self._residents.current()
        if dismissed := self._residents.dismiss():
            await asyncio.get_running_loop().run_in_executor(self._loads, dismissed.clear)

    def _load(self, deployment: Deployment, row: Row, twin: bool) -> Resident:
        model = load(deployment, self._start.folder, self._options, twin=twin)
        run_time = RunTime(model.seconds)
        lane = Lane(
            hands=self._hands,
            work=self._inference.work,
            limit=self._options.queue,
            together=MOST_TOGETHER if deployment.batchable else 1,
            threads=max(1, self._threads // (deployment.execution.session.intra_op_threads or self._threads)),
            row=row,
            run_time=run_time,
        )
        return Resident(
            deployment=deployment,
            signature=model.signature,
            run=model.run,
            row=row,
            lane=lane,
            run_time=run_time,
            untimed=max(LEAST_UNTIMED, UNTIMED // self._options.workers),
        )


def _config(app: Starlette, options: ServerOptions, *, protocol: type) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http=protocol,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=int(options.drain),
    )
