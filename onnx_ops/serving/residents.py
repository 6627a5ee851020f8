"""The deployments that a worker holds ready, and the published table that says which of them answer."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from onnx_ops.domain.endpoint import Deployment
from onnx_ops.errors import NotFound, OnnxOpsError, ServiceUnavailable
from onnx_ops.protocol.table import Table
from onnx_ops.serving.resident import Resident
from onnx_ops.serving.router import Router
from onnx_ops.serving.shared import LOAD_FAILURES, LOAD_NANOSECONDS, LOADS, Row, Shared

_log = logging.getLogger(__name__)

Load = Callable[[Deployment, Row], Resident]


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """What an inference request asks for by its path. Without a model, whichever is served."""

    invocation: bool = False
    model: str | None = None
    version: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """One published table with everything that a request needs. A request keeps the one it began with.

    `failed` names deployments of the table that could not be loaded after a restart, and why. `routes` are the paths
    of inference by their bytes; `shadow` are the deployments that get a copy of that percentage of requests.
    """

    edition: int
    table: Table
    router: Router
    model: str
    residents: Mapping[str, Resident]
    failed: Mapping[str, str] = field(default_factory=dict)
    routes: Mapping[bytes, Route] = field(default_factory=dict)
    shadow: Sequence[tuple[Resident, int]] = ()

    def loaded(self, name: str) -> Resident:
        """Raises ServiceUnavailable if that deployment could not be loaded."""
        resident = self.residents.get(name)
        if resident is None:
            raise ServiceUnavailable(f"deployment {name!r} is not loaded", why=self.failed.get(name, ""))
        return resident

    def version(self, version: str) -> Resident:
        """Raises NotFound if no deployment holds that version."""
        for deployment in self.table.state.deployments:
            if deployment.version == version:
                return self.loaded(deployment.name)
        raise NotFound(f"model {self.model!r} has no version {version!r} here")

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
            ServiceUnavailable: before the first publication.
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
        """Slot of a deployment; raises ServiceUnavailable or NotFound."""
        snapshot = self.current()
        if name not in snapshot.router.names:
            raise NotFound(f"no deployment is called {name!r}")
        return snapshot.loaded(name).slot

    def slot_of_key(self, key: bytes) -> int:
        """Slot of the deployment that a user's requests go to; raises ServiceUnavailable."""
        snapshot = self.current()
        return snapshot.loaded(snapshot.router.by_key(key)).slot

    def _turn_to(self, edition: int) -> Snapshot:
        if edition == 0:
            raise ServiceUnavailable("no deployment is published here yet")
        if edition not in self._prepared:
            raise ServiceUnavailable(f"edition {edition} was published before this worker was asked to prepare it")
        snapshot = self._prepared[edition]
        self.routes = snapshot.routes
        for number in sorted(n for n in self._prepared if n <= edition):  # no request came while some were published
            if self._previous is not None:
                self._retired.append(self._previous)
            self._snapshot, self._previous = self._prepared.pop(number), self._snapshot
        return snapshot

    def restore(self, edition: int, table: Table, slots: Mapping[str, int], refused: str = "") -> Snapshot:
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

    def prepare(self, edition: int, table: Table, slots: Mapping[str, int]) -> Snapshot:
        """Load what a table needs beyond what is held already, so that turning to it takes no time.

        Raises:
            OnnxOpsError: a deployment could not be loaded (see `load_model`).
        """
        held = self._held()
        residents = {d.name: held[d] if d in held else self._loaded(d, slots[d.name]) for d in table.state.deployments}
        return self._keep(edition, table, residents, {})

    def discard(self, edition: int) -> None:
        """Forget a prepared edition that is not going to be published."""
        if (snapshot := self._prepared.pop(edition, None)) is not None:
            self._retired.append(snapshot)

    def dismiss(self) -> list[Resident]:
        """Residents that no snapshot needs any more. Letting go of them takes time, if their models are large."""
        retired, self._retired = self._retired, []
        held = set(self._held().values())
        return [r for r in {r for snapshot in retired for r in snapshot.residents.values()} if r not in held]

    def _held(self) -> dict[Deployment, Resident]:
        snapshots = (*self._prepared.values(), self._previous, self._snapshot)
        return {r.deployment: r for s in snapshots if s is not None for r in s.residents.values()}

    def _keep(
        self, edition: int, table: Table, residents: Mapping[str, Resident], failed: Mapping[str, str]
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
        )
        self._prepared[edition] = snapshot
        return snapshot

    def _loaded(self, deployment: Deployment, slot: int) -> Resident:
        row = self._shared.row(self._worker, slot)
        began = time.perf_counter_ns()
        try:
            resident = self._load(deployment, row)
        except OnnxOpsError:
            row[LOAD_FAILURES] += 1
            raise
        resident.slot = slot
        row[LOADS] += 1
        row[LOAD_NANOSECONDS] += time.perf_counter_ns() - began
        return resident


def _routes(table: Table, endpoint: str) -> Mapping[bytes, Route]:
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
