"""Servers, instances and object stores of the fake clouds in this process.

Three parts are real. The follower of an instance (`onnx_ops.app.follower.Follower`) reads, verifies
and adopts signed tables, writes reports and renews its lease. The server's router chooses a version
for a user. ONNX Runtime runs the model in the bytes that were uploaded.

Three parts are modelled. The server is an object without workers, which answers the admin requests
of its follower. The follower's loops are called in turn as time passes, instead of threads. The
object store is a mapping, which is as consistent as S3.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import onnxruntime as ort
from typing_extensions import override

from onnx_ops import codec
from onnx_ops.adapters.endpoints.local_server import LocalServer
from onnx_ops.adapters.files import ListedObject, ObjectStore
from onnx_ops.app.follower import Follower, FollowerOptions, read_release_keys
from onnx_ops.errors import OnnxOpsError, ServiceUnavailableError
from onnx_ops.protocol.messages import (
    COUNTS_PATH,
    LEASE_PATH,
    TABLE_PATH,
    USER_KEY_HEADER,
    AdminState,
    Counts,
    Lease,
    TableCounts,
    error_to_bytes,
)
from onnx_ops.protocol.replica_reports import REPORT_S
from onnx_ops.protocol.routing_table import RoutingTable
from onnx_ops.protocol.server_process import (
    FINAL_COUNTS_FILE,
    FOLLOW_VARIABLE,
    IMAGE_VARIABLE,
    OPTION_PREFIX,
    REPORTS_VARIABLE,
    TRUSTED_KEYS_VARIABLE,
    ServerOptions,
    ServerRecord,
)
from onnx_ops.serving.inference.traffic_router import TrafficRouter
from tests.support.clouds.containers import (
    BROKEN,
    START_S,
    Answer,
    ContainerPool,
    Containers,
    NotReadyError,
)
from tests.support.clouds.virtual_time import VirtualTime
from tests.support.must import must

_MODEL = "model/model.onnx"
_ROUNDS = 20
"""Turns in which a new follower must adopt a table before its ping fails."""
_ATTRIBUTES = "X-Amzn-SageMaker-Custom-Attributes"
_POLL_S = 2.0


@functools.lru_cache(maxsize=64)
def run_model(data: bytes) -> float:
    """Return what a model computes for ones: the factor that identifies a version."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    session = ort.InferenceSession(data, options, providers=["CPUExecutionProvider"])
    return float(session.run(None, {session.get_inputs()[0].name: [[1.0, 1.0]]})[0][0][0])


class MemoryObjects(ObjectStore):
    """Objects in memory, as strongly consistent as those of S3 and Azure Blob.

    `disturb` is called before and after the effect of every request, with its name. If it returns
    a fault, the request fails.
    """

    def __init__(
        self,
        place: str,
        objects: dict[str, tuple[bytes, float]],
        clock: VirtualTime,
        disturb: Callable[[str, bool], object],
    ) -> None:
        self.place = place
        self._objects = objects
        self._clock = clock
        self._disturb_request = disturb

    def _disturb(self, name: str, is_after: bool) -> None:
        if self._disturb_request(name, is_after) is not None:
            raise ServiceUnavailableError("injected", where=self.place)

    @override
    def read(self, name: str) -> bytes | None:
        self._disturb(f"GET {name}", False)
        found = self._objects.get(name)
        return None if found is None else found[0]

    @override
    def write(self, name: str, data: bytes) -> None:
        self._disturb(f"PUT {name}", False)
        self._objects[name] = (data, self._clock.now())
        self._disturb(f"PUT {name}", True)

    @override
    def create(self, name: str, data: bytes) -> bool:
        self._disturb(f"PUT {name}", False)
        is_free = name not in self._objects
        if is_free:
            self._objects[name] = (data, self._clock.now())
        self._disturb(f"PUT {name}", True)
        return is_free

    @override
    def list_names(self, prefix: str) -> list[str]:
        self._disturb(f"LIST {prefix}", False)
        start = f"{prefix}/" if prefix else ""
        below = (name.removeprefix(start) for name in self._objects if name.startswith(start))
        return sorted({name.partition("/")[0] for name in below})

    @override
    def list_objects(self, prefix: str) -> list[ListedObject]:
        self._disturb(f"LIST {prefix}", False)
        start = f"{prefix}/" if prefix else ""
        return [
            ListedObject(name=name, size_bytes=len(data), at=at)
            for name, (data, at) in sorted(self._objects.items())
            if name.startswith(start)
        ]

    @override
    def delete(self, name: str) -> None:
        self._disturb(f"DELETE {name}", False)
        self._objects.pop(name, None)
        self._disturb(f"DELETE {name}", True)

    @override
    def upload(self, name: str, path: Path) -> None:
        self.write(name, path.read_bytes())

    @override
    def download(self, name: str, path: Path) -> bool:
        data = self.read(name)
        if data is not None:
            path.write_bytes(data)
        return data is not None


class SimulatedServer(LocalServer):
    """A server that answers the admin requests of its follower, and routes requests."""

    def __init__(self, folder: Path, clock: VirtualTime) -> None:
        super().__init__(folder, "")
        self.table: RoutingTable | None = None
        self.models: dict[str, float] = {}
        self._clock = clock
        self._record: ServerRecord | None = None
        self._lease = Lease(until_ns=0)
        self._lapsed = 0
        self._router: TrafficRouter | None = None

    @override
    def record(self) -> ServerRecord | None:
        return self._record

    @override
    def is_orphaned(self) -> bool:
        return False

    @override
    def start(self, port: int, options: ServerOptions) -> ServerRecord:
        self._record = ServerRecord(
            pid=port, port=port, admin_port=port, started=self._clock.now(), options=options
        )
        return self._record

    @override
    def stop(self) -> None:
        (self.folder / FINAL_COUNTS_FILE).write_bytes(codec.dumps(self._counts()))
        self._record = None

    @override
    def request(
        self,
        record: ServerRecord,
        method: str,
        body: bytes | None = None,
        *,
        path: str = "",
        timeout_s: float,
    ) -> tuple[int, bytes]:
        try:
            return 200, self._answer(method, path, body or b"")
        except OnnxOpsError as error:
            return error_status(error), error_to_bytes(error)

    def invoke(self, headers: Mapping[str, str]) -> Answer:
        """Answer a request as the table and the lease require."""
        table, router = self.table, self._router
        now_ns = int(self._clock.now() * 1e9)
        if table is None or router is None or self._record is None:
            return make_answer(BROKEN, {"error": "no table"})
        if table.is_leased and now_ns >= self._lease.serving_until_ns:
            return make_answer(503, {"error": "no lease"})
        name = router.route_cell(router.get_draw(0), router.get_cell(_read_user(headers)))
        if table.fallback and now_ns >= self._lease.until_ns:
            self._lapsed += name != table.fallback
            name = table.fallback
        return make_answer(200, {"factor": self.models[name]})

    def _answer(self, method: str, path: str, body: bytes) -> bytes:
        if path == TABLE_PATH:
            self._publish(codec.loads(body, RoutingTable))
            return b"{}"
        if path == LEASE_PATH:
            self._lease = codec.loads(body, Lease)
            lease = Lease(until_ns=self._lease.until_ns, lapsed=self._lapsed)
            return codec.dumps(lease)
        if path == COUNTS_PATH:
            return codec.dumps(self._counts())
        return codec.dumps(AdminState(state=None if self.table is None else self.table.state))

    def _publish(self, table: RoutingTable) -> None:
        models = {
            d.name: run_model(Path(d.location, "model.onnx").read_bytes())
            for d in table.state.deployments
        }
        self.table, self.models, self._router = table, models, TrafficRouter.from_table(table)

    def _counts(self) -> Counts:
        generation = 0 if self.table is None else self.table.state.generation
        tables = (TableCounts(generation=generation, split="", deployments={}),)
        return Counts(
            origin=str(self.folder),
            at=self._clock.now(),
            bounds_s=(0.1,),
            deployments={},
            tables=tables,
        )


def error_status(error: OnnxOpsError) -> int:
    return 503 if isinstance(error, ServiceUnavailableError) else 400


def make_answer(status: int, document: object) -> Answer:
    return Answer(
        status=status,
        body=json.dumps(document).encode(),
        content_type="application/json",
        seconds=0.001,
    )


def _read_user(headers: Mapping[str, str]) -> bytes:
    given = {name.lower(): value for name, value in headers.items()}
    attributes = given.get(_ATTRIBUTES.lower(), "")
    return (given.get(USER_KEY_HEADER) or attributes.removeprefix("user=")).encode()


@dataclass(slots=True, kw_only=True, eq=False)
class Instance:
    """An instance of a fleet: a follower with its server."""

    follower: Follower
    server: SimulatedServer
    clock: VirtualTime
    due: dict[str, float] = field(default_factory=dict)
    reported: RoutingTable | None = None

    def work(self) -> None:
        """Let the loops of the follower do what is due now."""
        now = self.clock.now()
        if now >= self.due.get("poll", 0.0):
            self.due["poll"] = now + _POLL_S
            self._attempt(self.follower.poll)
        self._attempt(self.follower.publish)
        if now >= self.due.get("report", 0.0) or self.server.table is not self.reported:
            self.due["report"], self.reported = now + REPORT_S, self.server.table
            self._attempt(self.follower.report)

    def _attempt(self, work: Callable[[], None]) -> None:
        """Repeat a failed loop at its next turn, as the follower does."""
        try:
            work()
        except OnnxOpsError:
            if work == self.follower.report:
                self.reported = None


@dataclass(slots=True, kw_only=True, eq=False)
class SimulatedPool(ContainerPool):
    """The servers of one deployment: of a model, or of a fleet's instances."""

    factor: float | None = None
    count: int = 0
    instances: list[Instance] = field(default_factory=list)

    def invoke(self, body: bytes, headers: Mapping[str, str]) -> Answer:
        if self.factor is not None:
            return make_answer(200, {"factor": self.factor})
        self.turn += 1
        if not self.instances:
            return make_answer(BROKEN, {"error": "no instance"})
        return self.instances[self.turn % len(self.instances)].server.invoke(headers)

    def list_served(self) -> list[Mapping[float, int]]:
        """Return the percentages by factor that each server gives."""
        if self.factor is not None:
            return [{self.factor: 100}]
        found: list[Mapping[float, int]] = []
        for instance in self.instances:
            table, models = must(instance.server.table), instance.server.models
            weights = table.state.split.weights
            found.append({models[name]: weight for name, weight in weights.items() if weight})
        return found


class SimulatedContainers(Containers):
    """Containers of the fake clouds that run in this process.

    `dies` decides whether an instance that the cloud ends is killed without a last report.
    """

    def __init__(self, folder: Path, clock: VirtualTime, dies: Callable[[], bool]) -> None:
        self.startup_s = START_S
        self.follower_environment = {}
        self._simulated = folder
        self._clock = clock
        self._dies = dies
        self._number = 0
        self._pools: list[SimulatedPool] = []

    @override
    def start(
        self, files: Mapping[str, bytes], variables: Mapping[str, str], count: int
    ) -> ContainerPool:
        pool = SimulatedPool(containers=[], count=count)
        if FOLLOW_VARIABLE in variables:
            self._grow(pool, variables, count)
            self._pools.append(pool)
            return pool
        models = [data for name, data in files.items() if name.endswith(_MODEL)]
        if len(models) != 1 or not any(name.endswith("deployment.json") for name in files):
            raise NotReadyError(f"the container has no model: {sorted(files)}")
        pool.factor = run_model(models[0])
        return pool

    @override
    def resize(self, pool: ContainerPool, variables: Mapping[str, str], count: int) -> None:
        assert isinstance(pool, SimulatedPool)
        pool.count = count
        if FOLLOW_VARIABLE in variables:
            ended = pool.instances[count:]
            del pool.instances[count:]
            self._end(ended)
            self._grow(pool, variables, count)

    @override
    def end(self, pool: ContainerPool) -> None:
        assert isinstance(pool, SimulatedPool)
        if pool in self._pools:
            self._pools.remove(pool)
        self._end(pool.instances)
        pool.instances = []

    @override
    def end_followers(self) -> None:
        self._pools.clear()

    @override
    def stop(self) -> None:
        self._pools.clear()

    def work(self) -> None:
        """Let all instances do what is due now."""
        for pool in self._pools:
            for instance in pool.instances:
                instance.work()

    def _grow(self, pool: SimulatedPool, variables: Mapping[str, str], count: int) -> None:
        added = [self._launch_instance(variables) for _ in range(count - len(pool.instances))]
        for instance in added:
            for _ in range(_ROUNDS):
                instance.due.clear()
                instance.work()
                if instance.server.table is not None:
                    break
            else:
                raise NotReadyError("the instance has adopted no table")
        pool.instances += added

    def _launch_instance(self, variables: Mapping[str, str]) -> Instance:
        self._number += 1
        folder = self._simulated / f"instance-{self._number}"
        folder.mkdir(parents=True)
        trusted, endpoint = variables[TRUSTED_KEYS_VARIABLE], variables[f"{OPTION_PREFIX}ENDPOINT"]
        options = FollowerOptions(
            control=variables[FOLLOW_VARIABLE],
            reports=variables[REPORTS_VARIABLE],
            endpoint=endpoint,
            replica=f"instance-{self._number}",
            address="",
            image=variables[IMAGE_VARIABLE],
            port=self._number,
            server=ServerOptions(trusted_keys=trusted, endpoint=endpoint),
        )
        server = SimulatedServer(folder, self._clock)
        keys = read_release_keys(folder, trusted)
        follower = Follower(options, folder, server, keys, start=f"{self._number:012x}")
        follower.keep_server()
        return Instance(follower=follower, server=server, clock=self._clock)

    def _end(self, instances: Sequence[Instance]) -> None:
        for instance in instances:
            if not self._dies():
                instance.follower.end()
