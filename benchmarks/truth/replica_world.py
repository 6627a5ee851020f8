"""Replicas in simulated time, without processes.

The followers, the counts of servers, and the reports in a folder are real. A simulated server
routes and counts by the functions that a worker calls, and answers its follower's admin requests.
The provider reads the reports, and the judge's functions follow. Only sockets, models and clocks
are missing.
"""

from __future__ import annotations

import heapq
import itertools
import random
import sys
import types
from bisect import bisect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from os import utime
from pathlib import Path
from unittest import mock

from typing_extensions import override

from benchmarks.truth.rollout_worlds import CANARY
from onnx_ops import codec
from onnx_ops.adapters.endpoints import replicas
from onnx_ops.adapters.endpoints.local_server import LocalServer
from onnx_ops.adapters.endpoints.replicas import ReplicaEndpoints
from onnx_ops.adapters.files import LocalObjects
from onnx_ops.adapters.signers.ecdsa import create_key
from onnx_ops.app import follower
from onnx_ops.app.follower import Follower, FollowerOptions
from onnx_ops.attestation import TrustedKeys
from onnx_ops.domain.endpoint import Deployment, EndpointState, TrafficSplit
from onnx_ops.domain.rollout_observations import GenerationUnits, Observations
from onnx_ops.errors import OnnxOpsError, ServiceUnavailableError
from onnx_ops.ports import Verifier
from onnx_ops.protocol.messages import (
    COUNTS_PATH,
    KEYLESS_CELL,
    LEASE_PATH,
    TABLE_PATH,
    AdminState,
    Lease,
    UserCountsRequest,
)
from onnx_ops.protocol.replica_reports import REPORT_S
from onnx_ops.protocol.replica_tables import (
    HEAD,
    ReplicaTable,
    TableHead,
    encode_table,
    plan_tables,
)
from onnx_ops.protocol.routing_table import RoutingTable
from onnx_ops.protocol.server_process import FINAL_COUNTS_FILE, ServerOptions, ServerRecord
from onnx_ops.serving import rollout_counts
from onnx_ops.serving.inference.cell_counts import CellCounter, CellPlace
from onnx_ops.serving.inference.deployments import TableRevision
from onnx_ops.serving.inference.traffic_router import CellDraw, TrafficRouter
from onnx_ops.serving.metrics import EPOCH, SharedMetrics, SlotAllocator, count_request
from onnx_ops.serving.rollout_counts import RolloutCounts
from onnx_ops.statistics.rollout.judge import judge
from tests.support.endpoints import endpoint_config, fileless_deployment

EPOCH_S = 60.0
ENDPOINT, STABLE, CANDIDATE = "digits", "v1", "v2"
_SECONDS = 0.001
"""Latency of all requests in seconds; no latency is judged."""
_SLOW_SHARE, _SLOW_S = 0.02, 15.0
"""Share of requests that last long, of either version, and for how long at most.

Some of them end in the next epoch.
"""
_RENEW_S = 15.0
"""Time after which a replica reports even if nothing reads the report.

Its lease needs these reports.
"""
_DOWN_S = (2.0, 6.0)
"""Time from the end of a replica to its next start."""


class SimulatedTime(types.SimpleNamespace):
    """A replacement for the module `time`.

    Calls that are due are made in the order of time.
    """

    CLOCK_BOOTTIME = 7

    def __init__(self, now: float) -> None:
        super().__init__()
        self.now = now
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._number = itertools.count()
        self.end = now
        """The time until which `run` lets time pass."""

    def time(self) -> float:
        return self.now

    monotonic = time

    def time_ns(self) -> int:
        return int(self.now * 1e9)

    def clock_gettime(self, _clock: int) -> float:
        return self.now

    def call_later(self, seconds: float, call: Callable[[], None]) -> None:
        heapq.heappush(self._due, (self.now + seconds, next(self._number), call))

    def run(self, seconds: float) -> None:
        """Let this many seconds pass."""
        end = self.end = self.now + seconds
        while self._due and self._due[0][0] <= end:
            self.now, _, call = heapq.heappop(self._due)
            call()
        self.now = end


class TimedObjects(LocalObjects):
    """Objects whose times are simulated.

    They can arrive late. They are unavailable while the connection to them is cut.
    """

    def __init__(self, root: Path, clock: SimulatedTime, *, late_s: float = 0.0) -> None:
        super().__init__(root)
        self.is_cut = False
        self._clock, self._late_s = clock, late_s

    def _require_way(self) -> None:
        if self.is_cut:
            raise ServiceUnavailableError("the way to the store is cut")

    @override
    def read(self, name: str) -> bytes | None:
        self._require_way()
        return super().read(name)

    @override
    def list_names(self, prefix: str) -> list[str]:
        self._require_way()
        return super().list_names(prefix)

    @override
    def write(self, name: str, data: bytes) -> None:
        self._require_way()
        if self._late_s:
            self._clock.call_later(self._late_s, lambda: self._write(name, data))
        else:
            self._write(name, data)

    @override
    def create(self, name: str, data: bytes) -> bool:
        if (self.root / name).exists():
            return False
        self.write(name, data)
        return True

    def _write(self, name: str, data: bytes) -> None:
        super().write(name, data)
        utime(self.root / name, (self._clock.now, self._clock.now))


class SimulatedServer(LocalServer):
    """A server with one worker, which can be started repeatedly.

    `ahead_s` is how far its clock is ahead, in seconds.
    """

    def __init__(self, folder: Path, clock: SimulatedTime, ahead_s: float) -> None:
        super().__init__(folder, sys.executable)
        folder.mkdir(parents=True)
        self._clock, self._ahead_s = clock, ahead_s
        self._record: ServerRecord | None = None
        self.table: RoutingTable | None = None

    @override
    def record(self) -> ServerRecord | None:
        return self._record

    @override
    def is_orphaned(self) -> bool:
        return False

    @override
    def start(self, port: int, options: ServerOptions) -> ServerRecord:
        self.shared = SharedMetrics(1)
        self.counts = RolloutCounts(self.shared)
        self._cells, self._allocator = CellCounter(self.shared, 0), SlotAllocator(self.shared)
        self.table, self._watched, self._lease_ns, self.lapsed = (
            None,
            UserCountsRequest(limits_s={}),
            0,
            0,
        )
        self._running: list[Callable[[], None]] = []
        self._record = ServerRecord(
            pid=1, port=port, admin_port=port, started=self._clock.now, options=options
        )
        return self._record

    def kill(self, port: int | None = None) -> None:
        """Kill the server: requests in progress and all counts are lost."""
        self._record = self.table = None

    @override
    def stop(self) -> None:
        """Answer the requests in progress, and write the last counts."""
        if self._record is None:
            return
        for finish in list(self._running):
            finish()
        (self.folder / FINAL_COUNTS_FILE).write_bytes(
            codec.dumps(self.counts.collect(self._watched))
        )
        self.kill()

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
        answer: object
        if path == TABLE_PATH:
            self._publish(codec.loads(body or b"", RoutingTable))
            answer = None
        elif path == LEASE_PATH:
            self._lease_ns = codec.loads(body or b"", Lease).until_ns
            answer = Lease(until_ns=self._lease_ns, lapsed=self.lapsed)
        elif path == COUNTS_PATH:
            watch = None if body is None else codec.loads(body, UserCountsRequest)
            self._watched = watch or self._watched
            answer = self.counts.collect(watch)
        else:
            answer = AdminState(state=None if self.table is None else self.table.state)
        return 200, codec.dumps(answer)

    def _publish(self, table: RoutingTable) -> None:
        if table == self.table:
            return
        slots = self._allocator.assign(table, self.table)
        revision = TableRevision(number=table.state.generation, table=table, slots=slots)
        self.counts.start_table(revision, self._clock.now + self._ahead_s)
        self.table, self.slots, self.router = table, slots, TrafficRouter.from_table(table)
        self._turn_later()

    def _turn_later(self) -> None:
        counts, table = self.counts, self.table
        rest_s = counts.get_epoch_rest_s(self._clock.now + self._ahead_s)

        def turn() -> None:
            if self.counts is counts and self.table is table:
                counts.turn_epoch(self._clock.now + self._ahead_s)
                self._turn_later()

        if rest_s is not None:
            self._clock.call_later(rest_s, turn)

    def answer(self, user: bytes | int, fails: Callable[[str], bool], lasts_s: float) -> str:
        """Route and count one request, and return its version.

        A request has the key of a user, or no key and a slot.
        """
        if self.router.fallback and self._clock.time_ns() >= self._lease_ns:
            self.lapsed += 1
            # The fallback selected the version, so the request is not evidence.
            return self.router.fallback
        draw, cell = self.router.get_draw(self.shared.header[EPOCH]), KEYLESS_CELL
        if isinstance(user, int):
            name = self.router.slots[user]
        else:
            cell = self.router.get_cell(user)
            name = self.router.route_cell(draw, cell)
        status, slot = 500 if fails(name) else 200, self.slots[name]
        if lasts_s:
            self._begin(draw, slot, cell, status, lasts_s)
        else:
            count_request(self.shared.get_row(0, slot), status, _SECONDS)
            if self._cells.is_watching:
                self._cells.count(draw, slot, cell, status, 0.0)
        return name

    def _begin(self, draw: CellDraw, slot: int, cell: int, status: int, lasts_s: float) -> None:
        cells, row, running = self._cells, self.shared.get_row(0, slot), self._running
        place: CellPlace | None = cells.begin(draw, slot, cell) if cells.is_watching else None

        def finish() -> None:
            if finish not in running:
                return
            running.remove(finish)
            count_request(row, status, _SECONDS)
            if place is not None:
                cells.finish(place, status, 0.0)

        running.append(finish)
        self._clock.call_later(lasts_s, finish)


class SimulatedFollower(Follower):
    """A follower of a simulated server, which downloads nothing."""

    def __init__(
        self,
        name: str,
        server: SimulatedServer,
        verifier: Verifier,
        control: TimedObjects,
        reports: TimedObjects,
    ) -> None:
        options = FollowerOptions(
            control=str(control.root),
            reports=str(reports.root),
            endpoint=ENDPOINT,
            replica=name,
            address="",
            image="",
            port=1,
            server=ServerOptions(),
        )
        super().__init__(options, server.folder, server, verifier)
        self._control, self._reports = control, reports

    @override
    def _fetch(self, deployment: Deployment) -> str:
        return ""


class SimulatedReplica:
    """A replica: its server, and one follower after another."""

    def __init__(
        self, site: SimulatedSite, name: str, *, ahead_s: float = 0.0, late_s: float = 0.0
    ) -> None:
        self._clock, self._verifier = site.clock, site.verifier
        self.name = name
        self.server = SimulatedServer(site.folder / name, site.clock, ahead_s)
        self._stores = (
            TimedObjects(site.control.root, site.clock),
            TimedObjects(site.reports.root, site.clock, late_s=late_s),
        )
        self._late_s = late_s
        self._follower: SimulatedFollower | None = None
        self._reported_at = float("-inf")
        self.ends_at = float("inf")
        """The time at which the replica is killed, stopped or cut off."""

    @property
    def is_ready(self) -> bool:
        return self.server.table is not None

    def start(self) -> None:
        self._reported_at = float("-inf")
        self._follower = SimulatedFollower(self.name, self.server, self._verifier, *self._stores)
        self._follower.keep_server()
        self._report(self._follower)

    def _report(self, present: SimulatedFollower) -> None:
        if self._follower is not present:
            return
        for work in (present.poll, present.publish, self._report_if_read):
            with suppress(OnnxOpsError):
                # Errors are ignored here, since the real follower also tries again.
                work()
        self._clock.call_later(REPORT_S, lambda: self._report(present))

    def _report_if_read(self) -> None:
        """Report, unless this report would be replaced before it matters.

        The next report can replace this one before it is read, or before this replica ends.
        """
        now = self._clock.now
        is_last = any(now <= at <= now + REPORT_S for at in (self._clock.end, self.ends_at))
        if self._follower is not None and (
            is_last or self._late_s or now - self._reported_at >= _RENEW_S
        ):
            self._follower.report()
            self._reported_at = now

    def kill(self) -> None:
        """Kill the follower and the server without a report."""
        self._follower = None
        self.server.kill()

    def restart(self, down_s: float, *, with_server: bool = True) -> None:
        """Kill the replica, or its follower alone, and start it again."""
        self._follower = None
        if with_server:
            self.server.kill()
        self._clock.call_later(down_s, self.start)

    def stop(self) -> None:
        """Stop the replica in order, as SIGTERM does."""
        if self._follower is not None:
            self._follower.end()
        self._follower = None

    def cut(self, *, is_cut: bool) -> None:
        """Cut the replica off from the store, or connect it again."""
        for objects in self._stores:
            objects.is_cut = is_cut


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """The requests of a rollout.

    There are `requests` in an epoch, of users by Zipf's law with the exponent `skew`. Without
    `users`, they have no keys. Each user has a different chance of errors where they are `uneven`.
    The mean chance is `errors`, and `worse` times that with the candidate.
    """

    users: int = 0
    skew: float = 0.0
    requests: int = 200
    errors: float = 0.005
    worse: float = 1.0
    uneven: bool = True


class SimulatedSite:
    """Replicas of one endpoint with the judge of its rollout, from one seed."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.random = random.Random(seed)  # noqa: S311 (a simulation)
        self.clock = SimulatedTime(self.random.uniform(1e9, 3e9))
        self.folder = folder
        (folder / "keys").mkdir(parents=True)
        self.control = TimedObjects(folder / "control", self.clock)
        self.reports = TimedObjects(folder / "reports", self.clock)
        self.replicas: list[SimulatedReplica] = []
        self._numbers = itertools.count(1)
        self._signer = create_key(folder / "keys" / "signing.pem")
        self.verifier = TrustedKeys(folder / "keys", role="release")
        settings = {
            "control": str(self.control.root),
            "reports": str(self.reports.root),
            "replicas": 2,
        }
        self._config = endpoint_config(ENDPOINT, provider="replicas", settings=settings)
        self._provider = ReplicaEndpoints(trusted=folder / "keys")
        self._table: ReplicaTable | None = None
        self._observations: Observations | None = None

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Let the product's modules use the simulated time, and the provider its stores."""
        stores = {str(store.root): store for store in (self.control, self.reports)}
        with ExitStack() as stack:
            for module in (replicas, follower, rollout_counts):
                stack.enter_context(mock.patch.object(module, "time", self.clock))
            stack.enter_context(
                mock.patch.object(replicas, "open_objects", lambda url, **_: stores[url])
            )
            yield

    def add(self, *, ahead_s: float = 0.0, late_s: float = 0.0) -> SimulatedReplica:
        """Start one more replica."""
        replica = SimulatedReplica(self, f"r{next(self._numbers)}", ahead_s=ahead_s, late_s=late_s)
        self.replicas.append(replica)
        replica.start()
        return replica

    def publish(self, sequence: int, percent: int) -> None:
        """Publish a table, after the table that lets replicas load its new models."""
        weights = {STABLE: 100} if not percent else {CANDIDATE: percent, STABLE: 100 - percent}
        split = TrafficSplit(weights=weights, epoch_s=EPOCH_S if percent else 0.0)
        state = EndpointState(deployments=tuple(map(fileless_deployment, weights)), split=split)
        limits_s: dict[str, tuple[float, ...]] = dict.fromkeys(weights, ()) if percent else {}
        planned = plan_tables(
            ENDPOINT, state, sequence, self._table, digest=None, limits_s=limits_s
        )
        for table in planned:
            if table is not None:
                self.control.create(table.number.name, encode_table(table, self._signer))
                head = TableHead(number=table.number, beat=self.clock.time_ns())
                self.control.write(HEAD, codec.dumps(head))
                self._table = table
                self.clock.run(2 * REPORT_S)
        if percent:
            unit = GenerationUnits(generation=sequence, step=0, percent=percent, is_drawn=True)
            observations = Observations(candidate=fileless_deployment(CANDIDATE).manifest)
            self._observations = observations.move_to_step(unit, self.clock.now)
            self.confirm()

    def confirm(self) -> None:
        """Confirm to the replicas that the rollout is judged."""
        self._provider.confirm_rollout(self._config)

    def send(self, traffic: Traffic) -> None:
        """Let users send requests from now on."""
        shares = list(
            itertools.accumulate((k + 1) ** -traffic.skew for k in range(max(1, traffic.users)))
        )
        salt, draw = self.random.getrandbits(64), self.random
        chances = [
            traffic.errors * (draw.expovariate(1.0) if traffic.uneven and traffic.users else 1.0)
            for _ in shares
        ]
        times = {STABLE: 1.0, CANDIDATE: traffic.worse}

        def send() -> None:
            user = bisect(shares, draw.random() * shares[-1])
            if ready := [each.server for each in self.replicas if each.is_ready]:
                lasts_s = draw.uniform(0.0, _SLOW_S) if draw.random() < _SLOW_SHARE else 0.0
                chance = chances[user]
                key = b"%d-%d" % (salt, user) if traffic.users else draw.randrange(100)
                draw.choice(ready).answer(
                    key, lambda name: draw.random() < chance * times[name], lasts_s
                )
            self.clock.call_later(draw.expovariate(traffic.requests / EPOCH_S), send)

        send()

    def choose_down_s(self) -> float:
        """Return the time that a replica is down."""
        return self.random.uniform(*_DOWN_S)

    def judge(self) -> str:
        """Judge the rollout as a reconciliation does.

        Return why it is rolled back; the text is empty if it is not.
        """
        assert self._observations is not None
        reading = self._provider.metrics().read(self._config, {CANDIDATE: None, STABLE: None})
        reading = self._observations.select_new(reading)
        self._observations = self._observations.with_reading(
            reading, stable=STABLE, candidate=CANDIDATE
        )
        self.confirm()
        return judge(self._observations, CANARY).abort_reason

    def count_units(self) -> tuple[int, int, int]:
        """Return the number of counted epochs, and the units in them.

        The units are those of the candidate, then those of the stable version.
        """
        assert self._observations is not None
        (split,) = self._observations.drawn
        errors = split.units.get("errors")
        return (
            (split.epochs, 0, 0)
            if errors is None
            else (split.epochs, sum(errors.candidate), sum(errors.stable))
        )
