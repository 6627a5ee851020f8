"""A worker's parts in a thread of this process, with access to its internals.

Sockets and models are real.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import uvloop

from onnx_ops.domain.endpoint import Deployment, EndpointState
from onnx_ops.protocol.routing_table import RoutingTable, build_next_table
from onnx_ops.protocol.server_process import ServerOptions
from onnx_ops.serving.http.app import PublicApp
from onnx_ops.serving.http.limits import ConnectionLimits, HostPolicy
from onnx_ops.serving.http.protocol import HttpProtocol, serve_connections
from onnx_ops.serving.inference.bound_runs import BoundRuns
from onnx_ops.serving.inference.deployments import (
    DeployedModel,
    LoadedDeployment,
    LoadedDeployments,
    TableRevision,
)
from onnx_ops.serving.inference.request_queue import (
    MAX_BATCH,
    LatencyEstimator,
    RequestQueue,
    WorkerThreads,
)
from onnx_ops.serving.inference.service import InferenceService
from onnx_ops.serving.inference.shadow import ShadowQueue
from onnx_ops.serving.metrics import REVISION, MetricsPage, MetricsRow, SharedMetrics, SlotAllocator
from onnx_ops.serving.workers.listeners import connect_unix, listen_tcp, listen_unix
from onnx_ops.serving.workers.shadow_processes import answer_mirrored_requests
from tests.serving.serving_process import load_once
from tests.support.server import received

Wrap = Callable[[Any], Any]
MAX_BODY = 1 << 20


@dataclass
class Gate:
    """A gate that blocks runs of a model until it is opened.

    It records the rows of each run.
    """

    open: threading.Event = field(default_factory=threading.Event)
    entered: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    rows: list[int] = field(default_factory=list)

    def wrap(self, run: Callable[..., Any]) -> Callable[..., Any]:
        def held(outputs: Sequence[str], feed: Mapping[str, Any], *options: Any) -> Any:
            self.rows.append(len(feed["x"]))
            self.entered.release()
            assert self.open.wait(30)
            return run(outputs, feed, *options)

        return held


@dataclass
class Worker:
    """One worker without its process.

    Args:
        state: what is published.
        wrap: replaces the models' run functions.
        slow: whether requests are queued.
        queue, threads, deadline: of the queues.
        run_timeout: of runs, those on the event loop included.
        bounds: arguments of `ConnectionLimits` other than the usual ones.
        hosts: which Host and Origin headers are answered.
        grpc_port: of gRPC; 0: none.
        shadow_queue: how many mirrored requests can wait in the worker.
        feedback_key: of the tables; empty: answers have no tokens.
    """

    state: EndpointState
    wrap: Wrap | None = None
    slow: bool = False
    queue: int = 64
    threads: int = 1
    deadline: float = 30.0
    run_timeout: float = 30.0
    bounds: Mapping[str, Any] = field(default_factory=dict)
    hosts: HostPolicy = field(default_factory=HostPolicy)
    grpc_port: int = 0
    shadow_queue: int = 1024
    feedback_key: str = ""
    shadows: dict[int, tuple[socket.socket, threading.Thread]] = field(
        default_factory=dict, init=False
    )
    table: RoutingTable | None = field(default=None, init=False)
    revision: TableRevision | None = field(default=None, init=False)

    def publish(self, state: EndpointState) -> None:
        revision = self.shared.header[REVISION] + 1
        table = replace(build_next_table(self.table, state), feedback_key=self.feedback_key)
        slots = self.slots.assign(table, self.table)
        self.revision = TableRevision.follow(self.revision, revision, table, slots)
        self.deployments.prepare(self.revision)
        self.table = table
        for name in state.split.shadow:
            self._start_shadow(next(d for d in state.deployments if d.name == name), slots[name])
        self.shared.header[REVISION] = revision

    def _start_shadow(self, deployment: Deployment, slot: int) -> None:
        """Answer mirrored requests to a deployment in a thread.

        It ends when the other end of its control socket is closed.
        """
        if slot in self.shadows:
            return
        loaded = load_once(deployment)
        run = self.wrap(loaded.run) if self.wrap else loaded.run
        model = DeployedModel(
            deployment=deployment, signature=loaded.signature, run=run, max_body=MAX_BODY
        )
        listener = listen_unix(self._shadow_path(slot))
        control, end = socket.socketpair()

        def answer() -> None:
            with listener, end:
                answer_mirrored_requests(model, self.shared.get_shadow_row(slot), listener, end)

        thread = threading.Thread(target=answer)
        self.shadows[slot] = control, thread
        thread.start()

    def _shadow_path(self, slot: int) -> Path:
        return self.folder / f"{slot}.sock"

    def _connect_shadow(self, slot: int) -> socket.socket:
        client = connect_unix(self._shadow_path(slot), timeout_s=0)
        # The kernel raises the size to the smallest one that it allows.
        client.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
        return client

    def metrics(self) -> str:
        return MetricsPage(self.shared, "e").render(self.state)

    @contextlib.contextmanager
    def running(self) -> Iterator[Worker]:
        started = threading.Event()
        thread = threading.Thread(target=lambda: uvloop.run(self._serve(started)))
        with tempfile.TemporaryDirectory(prefix="onnx-ops-shadows-") as folder:
            self.folder = Path(folder)
            thread.start()
            assert started.wait(60)
            try:
                yield self
            finally:
                # The loop is closed if the test has stopped the worker.
                with contextlib.suppress(RuntimeError):
                    self.loop.call_soon_threadsafe(self.stop.set)
                thread.join()
                for control, shadow in self.shadows.values():
                    control.close()
                    shadow.join()

    def assemble(self) -> None:
        """Make all parts; this needs an event loop."""
        self.loop = asyncio.get_running_loop()
        self.shared = SharedMetrics(1)
        self.slots = SlotAllocator(self.shared)
        self.table = None
        self.deployments = LoadedDeployments(self.shared, 0, self._load, endpoint="e")
        self.shadow = ShadowQueue(self._connect_shadow, limit=self.shadow_queue)
        self.worker_threads = WorkerThreads(self.threads, self.loop.call_soon)
        usual = {
            "max_connections": 1000,
            "max_body": MAX_BODY,
            "read_timeout_s": 60.0,
            "keep_alive_s": 60.0,
        }
        self.connections = ConnectionLimits(
            **{**usual, **self.bounds}, row=self.shared.get_row(0, 0)
        )
        self.inference = InferenceService(
            self.deployments,
            self.shadow,
            deadline_s=self.deadline,
            run_timeout_s=self.run_timeout,
            inflated=self.connections.inflated,
        )
        self.inference.monitor.watch_inline()
        self.publish(self.state)
        self.app = PublicApp(self.inference)
        self.build_connection = partial(HttpProtocol, self.app, self.connections, self.hosts)

    async def _serve(self, started: threading.Event) -> None:
        self.assemble()
        self.stop = asyncio.Event()
        with listen_tcp("127.0.0.1", 0) as listener:
            self.port = listener.getsockname()[1]
            serving = [
                serve_connections(
                    self.build_connection, listener, self.connections, self.stop, drain_s=20
                )
            ]
            if self.grpc_port:
                from onnx_ops.serving.grpc.server import GrpcServer

                options = ServerOptions(grpc_port=self.grpc_port, drain=20.0)
                server = GrpcServer(self.app, self.connections, "127.0.0.1", options)
                await server.start()
                serving.append(server.serve(self.stop))
            self.loop.call_soon(started.set)
            await asyncio.gather(*serving)
            self.shadow.close()

    def _load(self, deployment: Deployment, row: MetricsRow, control: bool) -> LoadedDeployment:
        model = load_once(deployment)
        latency = LatencyEstimator(1.0 if self.slow else 0.0)
        queue = RequestQueue(
            threads=self.worker_threads,
            run=self.inference.run_batch,
            limit=self.queue,
            max_batch=MAX_BATCH if deployment.batchable else 1,
            max_batches=self.threads,
            row=row,
            latency=latency,
        )
        return LoadedDeployment(
            deployment=deployment,
            signature=model.signature,
            run=self.wrap(model.run) if self.wrap else model.run,
            options=model.options,
            is_unbounded=model.is_unbounded,
            must_queue=model.is_unbounded,
            bound_runs=None if self.wrap else BoundRuns(model.signature, model.bind),
            row=row,
            queue=queue,
            latency=latency,
            size_bytes=model.size_bytes,
            max_body=self.bounds.get("max_body", MAX_BODY),
        )

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=20)

    def send(self, *pieces: bytes) -> bytes:
        """Send bytes and return what the server sends.

        Return when it closes the connection, or when it has answered and is silent.
        """
        with self.connect() as client:
            for piece in pieces:
                client.sendall(piece)
            return received(client)


def post(
    path: str,
    body: bytes,
    headers: Mapping[str, str] | None = None,
    *,
    method: str = "POST",
    version: str = "1.1",
) -> bytes:
    """Return the bytes of a request."""
    lines = [f"{method} {path} HTTP/{version}", "host: x", f"content-length: {len(body)}"]
    lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
    return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + body


def without_date(answer: bytes) -> bytes:
    return b"\r\n".join(line for line in answer.split(b"\r\n") if not line.startswith(b"date: "))
