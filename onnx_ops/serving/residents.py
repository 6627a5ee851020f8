"""The deployments that a worker holds ready, and the published table that says which of them answer."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from onnx_ops.domain.endpoint import Deployment
from onnx_ops.errors import NotFoundError, OnnxOpsError, ServiceUnavailableError
from onnx_ops.protocol.routing_table import RoutingTable
from onnx_ops.serving.resident import Resident
from onnx_ops.serving.router import Router
from onnx_ops.serving.run_time import RunTime
from onnx_ops.serving.sessions import size_of
from onnx_ops.serving.shared import COLUMNS, LOAD_FAILURES, LOAD_NANOSECONDS, LOADS, Row, Shared

_log = logging.getLogger(__name__)

_LARGEST_TWIN = 64 << 20
"""Bytes of a model: larger ones are out of the caches at any share, and memory may be short."""

Load = Callable[[Deployment, Row, bool], Resident]
"""Loads a deployment that counts in a row; if it is a twin, without sharing memory with the first one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """What an inference request asks for by its path. Without a model, whichever is served."""

    invocation: bool = False
    model: str | None = None
    version: str | None = None


@dataclass(frozen=True, slots=True)
class Pair:
    """The deployment with most of the traffic, and a twin that gets as much as the other deployment does.

    A model that runs now and then finds its weights out of the processor's caches: one of 12 MB beside itself took 470
    µs instead of 250 at a tenth of the traffic. So the deployment with less traffic is held against a second copy of
    the other one, which has the same small share. `share` is the twin's, of the requests to `resident`.
    """

    resident: Resident
    twin: Resident
    share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """One published table with everything that a request needs. A request keeps the one it began with.

    `failed` names deployments of the table that could not be loaded after a restart, and why. `routes` are the paths
    of inference by their bytes; `shadow` are the deployments that get a copy of that percentage of requests.
    """

    edition: int
    table: RoutingTable
    router: Router
    model: str
    residents: Mapping[str, Resident]
    failed: Mapping[str, str] = field(default_factory=dict)
    routes: Mapping[bytes, Route] = field(default_factory=dict)
    shadow: Sequence[tuple[Resident, int]] = ()
    pair: Pair | None = None

    @property
    def held(self) -> tuple[Resident, ...]:
        """Everything that it keeps loaded."""
        return (*self.residents.values(), *(() if self.pair is None else (self.pair.twin,)))

    def loaded(self, name: str) -> Resident:
        """Raises ServiceUnavailableError if that deployment could not be loaded."""
        resident = self.residents.get(name)
        if resident is None:
            raise ServiceUnavailableError(f"deployment {name!r} is not loaded", why=self.failed.get(name, ""))
        return resident

    def version(self, version: str) -> Resident:
        """Raises NotFoundError if no deployment holds that version."""
        for deployment in self.table.state.deployments:
            if deployment.version == version:
                return self.loaded(deployment.name)
        raise NotFoundError(f"model {self.model!r} has no version {version!r} here")

    def leader(self, before: RunTime) -> RunTime:
        """The run time of the deployment that the others follow: the same one for as long as it gets traffic, which is
        until a rollout ends; else that of the one with the most, the oldest of equals."""
        served = {n: r.run_time for n, r in self.residents.items() if self.table.state.split.weights.get(n)}
        if any(run_time is before for run_time in served.values()):
            return before
        names = sorted(served, key=self.table.layout.index, reverse=True)
        return served[max(names, key=self.table.state.split.weights.__getitem__)] if names else before

    def ready(self) -> bool:
        """Whether every deployment that receives traffic is loaded."""
        return all(name in self.residents for name in set(self.router.slots))


class Residents:
    """The snapshots of a worker: the published one, the one before it, and those that are prepared.

    `current`, `discard` and `dismiss` belong to the event loop; `restore` and `prepare` to one other thread, and while
    they are at work the event loop must not turn to another edition.
    """

    def __init__(self, shared: Shared, worker: int, load: Load, *, endpoint: str = "") -> None:
        self.endpoint = endpoint
        self.routes: Mapping[bytes, Route] = {}
        """Paths of inference of the snapshot that answered last; a hint, as another one may be published since."""
        self.leader = RunTime()
        """Of the deployment that says where the models are run."""
        self._shared = shared
        self._worker = worker
        self._load = load
        self._words = shared.words
        self._prepared: dict[int, Snapshot] = {}
        self._snapshot: Snapshot | None = None
        self._previous: Snapshot | None = None
        self._retired: list[Snapshot] = []

    def current(self) -> Snapshot:
        """The snapshot of the edition that is published at this very moment.

        Raises:
            ServiceUnavailableError: before the first publication.
        """
        snapshot = self._snapshot
        edition = self._words[0]
        if snapshot is None or snapshot.edition != edition:
            snapshot = self._turn_to(edition)
        return snapshot

    @property
    def snapshot(self) -> Snapshot | None:
        return None if self._words[0] == 0 else self.current()

    def slot_named(self, name: str) -> int:
        """Slot of a deployment; raises ServiceUnavailableError or NotFoundError."""
        snapshot = self.current()
        if name not in snapshot.router.names:
            raise NotFoundError(f"no deployment is called {name!r}")
        return snapshot.loaded(name).slot

    def place_of_key(self, key: bytes) -> tuple[int, int]:
        """Return slot and bucket of a user; raises ServiceUnavailableError."""
        snapshot = self.current()
        return snapshot.loaded(snapshot.router.by_key(key)).slot, snapshot.router.bucket(key)

    def _turn_to(self, edition: int) -> Snapshot:
        if edition == 0:
            raise ServiceUnavailableError("no deployment is published here yet")
        if edition not in self._prepared:
            raise ServiceUnavailableError(f"edition {edition} was published before this worker was asked to prepare it")
        snapshot = self._prepared[edition]
        self.routes = snapshot.routes
        self.leader = snapshot.leader(self.leader)
        for number in sorted(n for n in self._prepared if n <= edition):  # no request came while some were published
            if self._previous is not None:
                self._retired.append(self._previous)
            self._snapshot, self._previous = self._prepared.pop(number), self._snapshot
        return snapshot

    def restore(self, edition: int, table: RoutingTable, slots: Mapping[str, int], refused: str = "") -> Snapshot:
        """Load a published table after a restart. Deployments that cannot be loaded any more are recorded as failed.

        `refused` is why none is even tried; empty if there is no reason.
        """
        residents: dict[str, Resident] = {}
        failed = {d.name: refused for d in table.state.deployments if refused}
        for deployment in table.state.deployments:
            if refused:
                continue
            try:
                residents[deployment.name] = self._loaded(deployment, slots[deployment.name])
            except OnnxOpsError as error:
                _log.error("deployment %s could not be loaded: %s", deployment.name, error)
                failed[deployment.name] = str(error)
        return self._keep(edition, table, residents, failed)

    def prepare(self, edition: int, table: RoutingTable, slots: Mapping[str, int]) -> Snapshot:
        """Load what a table needs beyond what is held already, so that turning to it takes no time.

        Raises:
            OnnxOpsError: a deployment could not be loaded (see `load_model`).
        """
        held = {r.deployment: r for snapshot in self._snapshots() for r in snapshot.residents.values()}
        residents = {d.name: held[d] if d in held else self._loaded(d, slots[d.name]) for d in table.state.deployments}
        return self._keep(edition, table, residents, {})

    def discard(self, edition: int) -> None:
        """Forget a prepared edition that is not going to be published."""
        if (snapshot := self._prepared.pop(edition, None)) is not None:
            self._retired.append(snapshot)

    def dismiss(self) -> list[Resident]:
        """Residents that no snapshot needs any more. Letting go of them takes time, if their models are large."""
        retired, self._retired = self._retired, []
        held = {resident for snapshot in self._snapshots() for resident in snapshot.held}
        return [r for r in {r for snapshot in retired for r in snapshot.held} if r not in held]

    def _snapshots(self) -> list[Snapshot]:
        return [s for s in (*self._prepared.values(), self._previous, self._snapshot) if s is not None]

    def _keep(
        self, edition: int, table: RoutingTable, residents: Mapping[str, Resident], failed: Mapping[str, str]
    ) -> Snapshot:
        snapshot = Snapshot(
            edition=edition,
            table=table,
            router=Router.of(table),
            model=table.state.deployments[0].model,
            residents=residents,
            failed=failed,
            routes=_routes(table, self.endpoint),
            shadow=[(residents[n], p) for n, p in table.state.split.shadow.items() if p and n in residents],
            pair=self._pair(table, residents),
        )
        self._prepared[edition] = snapshot
        return snapshot

    def _pair(self, table: RoutingTable, residents: Mapping[str, Resident]) -> Pair | None:
        """A twin for the deployment with more of the traffic, if there are two and it is worth its memory."""
        shares = sorted((weight, name) for name, weight in table.state.split.weights.items() if weight)
        if len(shares) != 2 or shares[0][0] == shares[1][0]:
            return None
        (less, _), (more, name) = shares
        resident = residents.get(name)
        if resident is None or size_of(Path(resident.deployment.location)) > _LARGEST_TWIN:
            return None
        twins = [s.pair.twin for s in self._snapshots() if s.pair is not None and s.pair.resident is resident]
        twin = twins[0] if twins else self._twin(resident)
        return None if twin is None else Pair(resident, twin, less / more)

    def _twin(self, resident: Resident) -> Resident | None:
        """The same deployment loaded again; it counts where the first one does, but for the gauges of its lane."""
        try:
            twin = self._load(resident.deployment, memoryview(bytearray(8 * COLUMNS)).cast("Q"), True)
        except OnnxOpsError as error:
            _log.warning("%s has no twin: %s", resident.deployment.name, error)
            return None
        twin.row, twin.slot = resident.row, resident.slot
        return twin

    def _loaded(self, deployment: Deployment, slot: int) -> Resident:
        row = self._shared.row(self._worker, slot)
        began = time.perf_counter_ns()
        try:
            resident = self._load(deployment, row, False)
        except OnnxOpsError:
            row[LOAD_FAILURES] += 1
            raise
        resident.slot = slot
        row[LOADS] += 1
        row[LOAD_NANOSECONDS] += time.perf_counter_ns() - began
        return resident


def _routes(table: RoutingTable, endpoint: str) -> Mapping[bytes, Route]:
    model = table.state.deployments[0].model
    base = f"/v2/models/{model}"
    routes = {
        f"{base}/infer": Route(model=model),
        "/invocations": Route(invocation=True),
        f"/endpoints/{endpoint}/invocations": Route(invocation=True),
    }
    for deployment in table.state.deployments:
        version = deployment.version
        routes[f"{base}/versions/{version}/infer"] = Route(model=model, version=version)
    return {path.encode(): route for path, route in routes.items() if path.isascii()}
