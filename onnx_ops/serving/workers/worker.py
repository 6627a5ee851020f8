"""One worker process, and its messages with the supervisor."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import math
import os
import signal
import socket
import struct
import sys
import time
from collections.abc import Awaitable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal

import uvloop

from onnx_ops import codec
from onnx_ops.domain.endpoint import Deployment
from onnx_ops.errors import InfrastructureError, OnnxOpsError
from onnx_ops.protocol.images import ImageLimits
from onnx_ops.protocol.messages import error_to_bytes
from onnx_ops.protocol.server_process import ServerOptions, register_worker
from onnx_ops.serving.http.app import PublicApp
from onnx_ops.serving.http.limits import ConnectionLimits, HostPolicy
from onnx_ops.serving.http.protocol import HttpProtocol, serve_connections
from onnx_ops.serving.inference.bound_runs import BoundRuns
from onnx_ops.serving.inference.deployments import (
    LoadedDeployment,
    LoadedDeployments,
    TableRevision,
)
from onnx_ops.serving.inference.integrity import COPIES_FOLDER, ModelCopies, TrustPolicy
from onnx_ops.serving.inference.models import LoadedModel, PackedModelCache, load_model
from onnx_ops.serving.inference.request_log import (
    RequestLog,
    SpanWriter,
    Writer,
    find_collector,
    open_access_log,
)
from onnx_ops.serving.inference.request_queue import (
    MAX_BATCH,
    LatencyEstimator,
    RequestQueue,
    WorkerThreads,
)
from onnx_ops.serving.inference.run_monitor import RunMonitor, end_process
from onnx_ops.serving.inference.service import InferenceService
from onnx_ops.serving.inference.shadow import ShadowQueue
from onnx_ops.serving.metrics import (
    HEARTBEAT,
    HUNG_RUN,
    ISOLATION,
    MIN_WARM_UP_REQUESTS,
    RUN_CELL,
    RUN_SLOT,
    WARM_UP_REQUESTS,
    MetricsRow,
    SharedMetrics,
)
from onnx_ops.serving.workers.listeners import (
    ListenerSockets,
    connect_unix,
    get_shadow_path,
    send_sockets,
)
from onnx_ops.serving.workers.worker_memory import CHECK_S, MemoryTrimmer

_log = logging.getLogger(__name__)

PACKED_FOLDER = "prepacked"
CONTROL_PACKED_FOLDER = "control-prepacked"
"""Folder of the packed models of control replicas.

Processes that map the same file share its pages. The pages of a control replica must not be kept
warm by the first copy, so it has separate files.
"""

_LENGTH = struct.Struct("!I")
_BEAT_S = 0.25
_ISOLATION_S = 60.0
"""Seconds for which a new worker runs one deployment at a time.

This applies if earlier workers ended while they ran several deployments.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrepareRevision:
    """Message to a worker: load this revision's deployments before its publication."""

    revision: TableRevision
    kind: Literal["prepare"] = "prepare"


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishRevision:
    """Message to a worker: the revision was published or discarded."""

    number: int
    is_published: bool
    kind: Literal["finish"] = "finish"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerReady:
    """Message from a worker or a shadow process: its loads have ended.

    A worker that has sent the message accepts connections. `failed` contains the deployments that
    could not be loaded, with the reason.
    """

    failed: Mapping[str, str] = field(default_factory=dict)
    kind: Literal["ready"] = "ready"


@dataclass(frozen=True, slots=True, kw_only=True)
class RevisionPrepared:
    """Message from a worker: it has prepared a revision, or the preparation failed.

    After a failure, `error` contains the reason (`error_to_bytes`).
    """

    number: int
    error: str = ""
    kind: Literal["prepared"] = "prepared"


ControlMessage = PrepareRevision | FinishRevision | WorkerReady | RevisionPrepared


def encode_message(message: ControlMessage) -> bytes:
    """Encode a message for `ControlChannel.receive`."""
    data = codec.dumps(message)
    return _LENGTH.pack(len(data)) + data


class ControlChannel:
    """One end of the control socket between the supervisor and one of its processes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def open(cls, end: socket.socket) -> ControlChannel:
        """Open a channel over one end of a socket pair."""
        return cls(*await asyncio.open_connection(sock=end))

    async def send(self, message: ControlMessage) -> None:
        """Send a message.

        Raises:
            ConnectionError: the other process has ended.
        """
        self._writer.write(encode_message(message))
        await self._writer.drain()

    async def receive(self) -> ControlMessage | None:
        """Return the next message; None after the other end was closed."""
        try:
            (length,) = _LENGTH.unpack(await self._reader.readexactly(_LENGTH.size))
            return codec.loads(
                await self._reader.readexactly(length), ControlMessage, where="control socket"
            )
        except (asyncio.IncompleteReadError, ConnectionError):
            return None

    def close(self) -> None:
        """Close this end of the socket."""
        self._writer.close()


def load_deployment(
    deployment: Deployment, folder: Path, options: ServerOptions, *, control: bool = False
) -> LoadedModel:
    """Load the model of a deployment as a worker does.

    Args:
        folder: folder of the server.
        control: whether the model is a control replica, whose packed files are separate.

    Raises:
        OnnxOpsError: the model cannot be loaded (see `load_model`).
    """
    entries = folder / (CONTROL_PACKED_FOLDER if control else PACKED_FOLDER)
    cache = PackedModelCache(entries, options.prepack or sys.maxsize)
    copies = ModelCopies(folder / COPIES_FOLDER, TrustPolicy.from_options(folder, options))
    limits = ImageLimits(
        max_bytes=options.max_image,
        max_pixels=options.max_pixels,
        max_images=options.max_images,
    )
    return load_model(deployment, copies, cache, image_limits=limits)


@dataclass(eq=False, kw_only=True)
class Worker:
    """One worker process, with the objects that it inherits from the supervisor.

    `revision` is the revision that was published when the worker was forked. `refusal` states why
    the worker must not load this revision; empty if it can load the revision.
    """

    number: int
    folder: Path
    options: ServerOptions
    shared: SharedMetrics
    listeners: ListenerSockets
    control: socket.socket
    revision: TableRevision | None
    refusal: str

    def __post_init__(self) -> None:
        options, endpoint = self.options, self.options.endpoint or self.folder.name
        self._unrouted = self.shared.get_row(self.number, 0)
        self._state = self.shared.get_process_state(self.number)
        self._loader = ThreadPoolExecutor(max_workers=1, thread_name_prefix="load")
        self._thread_count = options.threads or max(
            1, len(os.sched_getaffinity(0)) // options.workers
        )
        self._threads = WorkerThreads(self._thread_count)
        self._deployments = LoadedDeployments(
            self.shared, self.number, self._load, endpoint=endpoint
        )

    def run(self) -> None:
        """Serve until SIGTERM, then drain: answer the requests within the drain time."""
        record = register_worker(self.folder)
        self.shared.reset_gauges(self.number)
        gc.freeze()  # Objects that the process inherited are never freed before it ends.
        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(self._serve())
        finally:
            record.unlink(missing_ok=True)

    async def _serve(self) -> None:
        options, deployments = self.options, self._deployments
        loop = asyncio.get_running_loop()
        self._threads.defer = loop.call_soon
        channel = await ControlChannel.open(self.control)
        spans = SpanWriter(deployments.endpoint) if find_collector() else None
        writers: list[Writer] = [open_access_log(options.access_log)] if options.access_log else []
        if spans is not None:
            writers.append(spans.write)
        request_log = RequestLog(writers, self._unrouted) if writers else None
        shadow = ShadowQueue(
            lambda slot: connect_unix(
                get_shadow_path(self.folder, self.shared.origin, slot), timeout_s=0
            )
        )
        limits = ConnectionLimits(
            max_connections=max(1, options.max_connections // options.workers),
            max_body=options.max_body,
            read_timeout_s=options.read_timeout,
            keep_alive_s=options.keep_alive,
            row=self._unrouted,
        )
        self._service = InferenceService(
            deployments,
            shadow,
            deadline_s=options.deadline,
            run_timeout_s=options.run_timeout,
            request_log=request_log,
            monitor=RunMonitor(self.shared.get_thread_runs(self.number), self._give_up),
            inflated=limits.inflated,
        )
        self._service.monitor.watch_inline()
        if self.shared.header[ISOLATION]:
            _log.warning(
                "worker %d runs one deployment at a time for %.0f s", os.getpid(), _ISOLATION_S
            )
            self._set_isolation(is_isolating=True)
            loop.call_later(_ISOLATION_S, partial(self._set_isolation, is_isolating=False))
        app = PublicApp(self._service)
        address, port, *_ = self.listeners.public.getsockname()
        hosts = HostPolicy.from_options(address, port, options)
        stop = asyncio.Event()
        loop.add_signal_handler(signal.SIGTERM, stop.set)
        failed: Mapping[str, str] = {}
        if self.revision is not None:
            failed = await loop.run_in_executor(
                self._loader, deployments.restore, self.revision, self.refusal
            )
        self._trimmer = MemoryTrimmer(self._list_loaded)
        serving: list[Awaitable[None]] = []
        if options.grpc_port:
            from onnx_ops.serving.grpc.server import GrpcServer

            grpc_server = GrpcServer(app, limits, address, options)
            await grpc_server.start()
            serving.append(grpc_server.serve(stop))
        control = loop.create_task(self._follow(channel, failed))
        heart, trimming = loop.create_task(self._beat()), loop.create_task(self._trim_memory())
        build = partial(HttpProtocol, app, limits, hosts)
        serving.append(
            serve_connections(build, self.listeners.public, limits, stop, drain_s=options.drain)
        )
        await asyncio.gather(*serving)
        control.cancel()
        heart.cancel()
        trimming.cancel()
        shadow.close()
        if request_log is not None:
            request_log.close()
        if spans is not None:
            spans.close()

    async def _beat(self) -> None:
        """Write the heartbeat of the event loop for the supervisor, without end."""
        while True:
            self._state[HEARTBEAT] = time.monotonic_ns()
            await asyncio.sleep(_BEAT_S)

    async def _trim_memory(self) -> None:
        """Return memory to the system after large requests, without end."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(CHECK_S)
            try:
                await loop.run_in_executor(self._loader, self._trimmer.check)
            except Exception:  # If this error ended the task, memory would never be trimmed again.
                _log.exception("the memory could not be trimmed")

    def _list_loaded(self) -> Sequence[LoadedDeployment]:
        snapshot = self._deployments.last
        return () if snapshot is None else snapshot.list_loaded()

    def _set_isolation(self, *, is_isolating: bool) -> None:
        """Set whether the worker runs one deployment at a time.

        In that case, all requests run on the threads. Otherwise, deployments run at the same time,
        on the event loop or the threads.
        """
        self._threads.is_isolating = self._service.must_queue = is_isolating

    def _give_up(self, slot: int, cell: int) -> None:
        """End this process because a run does not end; the supervisor replaces it."""
        self._state[HUNG_RUN + RUN_CELL] = cell
        self._state[HUNG_RUN + RUN_SLOT] = slot
        end_process(slot, cell)

    async def _follow(self, channel: ControlChannel, failed: Mapping[str, str]) -> None:
        """Process the supervisor's messages; after its end, pass on the sockets."""
        try:
            await channel.send(WorkerReady(failed=failed))
            while (message := await channel.receive()) is not None:
                if isinstance(message, PrepareRevision):
                    await channel.send(await self._prepare(message.revision))
                elif isinstance(message, FinishRevision):
                    if not message.is_published:
                        self._deployments.discard(message.number)
                    await self._release()
        except ConnectionError:
            pass
        except Exception:
            _log.exception(
                "worker %d cannot process its supervisor's messages and ends", os.getpid()
            )
            os._exit(1)
        _log.warning(
            "the supervisor has ended; worker %d continues with the published deployments",
            os.getpid(),
        )
        self.listeners.handover.setblocking(False)
        asyncio.get_running_loop().add_reader(self.listeners.handover, send_sockets, self.listeners)

    async def _prepare(self, revision: TableRevision) -> RevisionPrepared:
        loop = asyncio.get_running_loop()
        await self._release()
        try:
            await loop.run_in_executor(self._loader, self._load_revision, revision)
        except OnnxOpsError as error:
            return RevisionPrepared(number=revision.number, error=error_to_bytes(error).decode())
        except Exception as error:
            _log.exception("a deployment could not be loaded")
            failure = InfrastructureError(
                "a deployment could not be loaded", why=f"{type(error).__name__}: {error}"
            )
            return RevisionPrepared(number=revision.number, error=error_to_bytes(failure).decode())
        return RevisionPrepared(number=revision.number)

    def _load_revision(self, revision: TableRevision) -> None:
        with self._trimmer.loading():
            self._deployments.prepare(revision)

    async def _release(self) -> None:
        """Switch to the published revision, and free models that are no longer needed."""
        with contextlib.suppress(OnnxOpsError):
            self._deployments.get_current()
        if released := self._deployments.release():
            await asyncio.get_running_loop().run_in_executor(self._loader, released.clear)

    def _load(self, deployment: Deployment, row: MetricsRow, control: bool) -> LoadedDeployment:
        model = load_deployment(deployment, self.folder, self.options, control=control)
        latency = LatencyEstimator(model.seconds)
        queue = RequestQueue(
            threads=self._threads,
            run=self._service.run_batch,
            limit=self.options.queue,
            max_batch=MAX_BATCH if deployment.batchable else 1,
            max_batches=count_parallel_runs(deployment, self._thread_count, self.options.workers),
            row=row,
            latency=latency,
        )
        return LoadedDeployment(
            deployment=deployment,
            signature=model.signature,
            run=model.run,
            size_bytes=model.size_bytes,
            options=model.options,
            is_unbounded=model.is_unbounded,
            must_queue=model.is_unbounded,
            release_memory=model.release_memory,
            bound_runs=BoundRuns(model.signature, model.bind),
            row=row,
            queue=queue,
            latency=latency,
            max_body=self.options.max_body,
            warm_up=max(MIN_WARM_UP_REQUESTS, WARM_UP_REQUESTS // self.options.workers),
        )


def count_parallel_runs(deployment: Deployment, threads: int, workers: int) -> int:
    """Return how many runs of a deployment a worker executes at most at the same time.

    A run is a request or a batch of requests on one of its threads.
    """
    runs = max(1, threads // (deployment.execution.session.intra_op_threads or threads))
    return min(runs, math.ceil(deployment.threads / workers)) if deployment.threads else runs
