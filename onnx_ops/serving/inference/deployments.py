"""The loaded deployments of a worker, and the table that routes requests to them."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from onnx_ops.domain.endpoint import Deployment
from onnx_ops.errors import NotFoundError, OnnxOpsError, ServiceUnavailableError
from onnx_ops.ports.data import Array
from onnx_ops.protocol.messages import BINARY_LENGTH_HEADER
from onnx_ops.protocol.routing_table import RoutingTable
from onnx_ops.serving.inference.bound_runs import BoundRuns
from onnx_ops.serving.inference.cell_counts import CellPlace
from onnx_ops.serving.inference.content_coding import Charge, inflate
from onnx_ops.serving.inference.feedback_tokens import FeedbackTokens
from onnx_ops.serving.inference.models import BOUND_ERRORS
from onnx_ops.serving.inference.request_queue import LatencyEstimator, RequestQueue
from onnx_ops.serving.inference.requests import parse_header_length, read_infer, read_invocation
from onnx_ops.serving.inference.responses import (
    RawResponse,
    RequestHead,
    encode_outputs,
    format_deployment_headers,
)
from onnx_ops.serving.inference.signature import InferenceRequest, ModelSignature
from onnx_ops.serving.inference.tensors import RequestBody
from onnx_ops.serving.inference.traffic_router import CellDraw, TrafficRouter
from onnx_ops.serving.metrics import (
    WARM_UP_REQUESTS,
    MetricsRow,
    SharedMetrics,
    count_load,
    make_row,
)

_log = logging.getLogger(__name__)

_BINARY_LENGTH = BINARY_LENGTH_HEADER.encode()
_MAX_INLINE_TEXT = 1 << 16
"""Length in bytes above which the text of a body is read on a thread.

Reading a longer text on the event loop would delay other requests.
"""
_MAX_INLINE_BODY = 1 << 20
"""Size in bytes above which a body in the binary form is read on a thread.

Only the header of such a body is text.
"""
MAX_REPLICA_BYTES = 64 << 20
"""Size in bytes of a model above which it has no control replica.

Larger models do not stay in the processor's caches at any share of the traffic. A replica of them
could exhaust the memory.
"""

Run = Callable[..., Sequence[Array]]
"""Function that returns the requested outputs for a feed.

The arguments are the names of the outputs and the feed. A call on a thread also passes the run
options that a `RunMonitor` yields.
"""


@dataclass(slots=True, eq=False, kw_only=True)
class DeployedModel:
    """A deployment with its loaded model.

    It decodes requests, runs the model, and encodes responses.

    Args:
        run: returns the requested outputs for a feed; thread-safe.
        max_body: maximum size of a decompressed body in bytes.
    """

    deployment: Deployment
    signature: ModelSignature
    run: Run
    max_body: int
    header_lines: bytes = field(init=False)
    """Header lines with the name of the deployment, which each response contains."""

    def __post_init__(self) -> None:
        self.header_lines = format_deployment_headers(self.deployment.name)

    def decode(
        self,
        route: InferenceRoute,
        head: RequestHead,
        body: RequestBody,
        charge: Charge = lambda _: None,
    ) -> InferenceRequest:
        """Return the decoded request.

        The size of a decompressed body is charged with `charge`.

        Raises:
            UserError: the decompression of the body fails, or the body is too large or does not fit
                the model.
            ServiceUnavailableError: raised by `charge`.
        """
        if route.coding:
            body = inflate(body, route.coding, self.max_body, charge)
        value = head.get(_BINARY_LENGTH)
        length = None if value is None else parse_header_length(value)
        if not route.invocation:
            return read_infer(body, length, self.signature)
        kind = head.get(b"content-type", b"application/json").decode("latin-1")
        return read_invocation(body, kind, length, self.signature)

    def encode(self, request: InferenceRequest, arrays: Sequence[Array]) -> RawResponse:
        """Return the response with the outputs of a request."""
        body, lines = encode_outputs(request, self.signature, arrays)
        return RawResponse(200, lines + self.header_lines, body)


@dataclass(slots=True, eq=False, kw_only=True)
class LoadedDeployment(DeployedModel):
    """A loaded deployment of a worker, with its counters, queue and bound runs.

    Args:
        bound_runs: bound runs of requests that run inline.
        row: the counters of the deployment, in slot `slot`.
        queue: requests that do not run inline.
        latency: estimate of the duration of `run`.
        options: options of runs on the event loop.
        is_unbounded: whether the inputs determine how often a part of the model runs, or are
            images.
        must_queue: whether no request runs on the event loop.
        release_memory: returns to the system the memory that only large requests needed.
        size_bytes: size of the model's files.
        warm_up: number of the next requests whose latency is not compared.
    """

    row: MetricsRow
    queue: RequestQueue[Any]
    latency: LatencyEstimator
    size_bytes: int
    options: Any = None
    is_unbounded: bool = False
    must_queue: bool = False
    release_memory: Callable[[], None] = lambda: None
    slot: int = 0
    warm_up: int = WARM_UP_REQUESTS
    bound_runs: BoundRuns | None = None

    def should_run_inline(
        self, leader: LatencyEstimator, head: RequestHead, body: RequestBody
    ) -> bool:
        """Return whether a request should run on the event loop.

        `leader` is the latency of the leader (see `TableSnapshot.get_leader`).
        """
        if self.must_queue or not self.latency.should_run_inline(leader):
            return False
        if len(body) <= _MAX_INLINE_TEXT:
            return True
        length = head.get(_BINARY_LENGTH, b"")
        if len(body) > _MAX_INLINE_BODY or len(length) > 5 or not length.isdigit():
            return False
        return int(length) <= _MAX_INLINE_TEXT and not self.signature.has_text_input

    def answer(self, request: InferenceRequest, *options: Any) -> RawResponse:
        """Run one decoded request; return its response.

        Raises:
            OnnxOpsError: the run failed (see `LoadedModel.run`), or the outputs do not fit the
                format of the response.
        """
        started_at = time.perf_counter()
        arrays = self.run(request.outputs, request.feed, *options)
        self.latency.observe(time.perf_counter() - started_at)
        return self.encode(request, arrays)

    def answer_inline(
        self, route: InferenceRoute, head: RequestHead, body: RequestBody
    ) -> RawResponse:
        """Decode and run one request on the event loop; return its response.

        Raises:
            OnnxOpsError: the request does not fit the model, or its run fails (see `answer`).
        """
        if route.invocation or self.bound_runs is None:
            return self.answer(self.decode(route, head, body))
        value = head.get(_BINARY_LENGTH)
        length = None if value is None else parse_header_length(value)
        started_at = time.perf_counter()
        bound = self.bound_runs.load(body, length)
        if bound is not None:
            try:
                bound.run()
                self.latency.observe(time.perf_counter() - started_at)
                return bound.build_response() or self.encode(bound.request, bound.outputs)
            except BOUND_ERRORS:
                # The shape of an output depends on the data, the model rejects the request, or the
                # run was ended. The code below handles all of these.
                pass
        request = read_infer(body, length, self.signature)
        started_at = time.perf_counter()
        arrays = self.run(request.outputs, request.feed)
        self.latency.observe(time.perf_counter() - started_at)
        response = self.encode(request, arrays)
        if bound is None:
            self.bound_runs.learn(body, length, request, arrays, response)
        else:
            bound.is_fit = False
        return response


@dataclass(frozen=True, slots=True, kw_only=True)
class InferenceRoute:
    """Model and version that a path selects, and the content coding of the body.

    Without a model, the path selects any model. `invocation` states whether the body can have a
    form of MLflow.
    """

    invocation: bool = False
    model: str | None = None
    version: str | None = None
    coding: bytes = b""


@dataclass(frozen=True, slots=True)
class ControlReplica:
    """A second copy of the main deployment, with the other deployment's traffic share.

    The weights of a model that seldom runs are not in the processor's caches. At a tenth of the
    traffic, a model of 12 MB took 470 µs instead of 250 µs (docs/adr/0030-comparing-versions.md).
    Therefore the deployment with less traffic is compared with a replica of the other deployment.
    The replica gets the same small share: the requests to `loaded` in comparable slots.
    """

    loaded: LoadedDeployment
    replica: LoadedDeployment


@dataclass(frozen=True, slots=True, kw_only=True)
class TableRevision:
    """A table to publish, with the slots of its deployments in the metrics.

    `split_number` is the number of the table's split. It is one higher than in the previous
    revision if the split has changed.
    """

    number: int
    table: RoutingTable
    slots: Mapping[str, int]
    split_number: int = 1

    @classmethod
    def follow(
        cls,
        before: TableRevision | None,
        number: int,
        table: RoutingTable,
        slots: Mapping[str, int],
    ) -> Self:
        """Return the revision that publishes a table in place of the previous revision."""
        if before is None:
            return cls(number=number, table=table, slots=slots)
        is_other_split = before.table.compute_split_digest() != table.compute_split_digest()
        return cls(
            number=number,
            table=table,
            slots=slots,
            split_number=before.split_number + is_other_split,
        )


def find_control(table: RoutingTable) -> Deployment | None:
    """Return the deployment that needs a control replica; None if none needs one.

    A control replica is needed if exactly two deployments get traffic, and their shares differ.
    """
    weights = table.state.split.weights
    serving = [d for d in table.state.deployments if weights.get(d.name)]
    if len(serving) != 2 or weights[serving[0].name] == weights[serving[1].name]:
        return None
    return max(serving, key=lambda deployment: weights[deployment.name])


@dataclass(frozen=True, slots=True, kw_only=True)
class TableSnapshot:
    """One revision of the table, as a worker has loaded it.

    Attributes:
        deployments: loaded deployments by name.
        failed: deployments that could not be loaded after a restart, with the reason.
        routes: routes of inference requests by path.
        shadow: deployments with the percentage of requests that are mirrored to them.
        tokens: seals the tokens of responses; None if the table has no key.
        split_number: number of the revision's split.
        loaded_at: Unix time at which this worker had loaded the table.
    """

    revision: int
    table: RoutingTable
    router: TrafficRouter
    model: str
    deployments: Mapping[str, LoadedDeployment]
    failed: Mapping[str, str]
    routes: Mapping[bytes, InferenceRoute]
    shadow: Sequence[tuple[LoadedDeployment, int]]
    control: ControlReplica | None
    tokens: FeedbackTokens | None
    split_number: int
    loaded_at: float = field(default_factory=time.time)  # noqa: TID251 (for people)

    def list_loaded(self) -> tuple[LoadedDeployment, ...]:
        """Return all loaded deployments of the snapshot, and its control replica."""
        return (
            *self.deployments.values(),
            *(() if self.control is None else (self.control.replica,)),
        )

    def build_model_error(self, model: str) -> NotFoundError:
        """Return the error of a request for a model that this endpoint does not serve."""
        return NotFoundError(f"no model is named {model!r}; this endpoint serves {self.model!r}")

    def get_deployment(self, name: str) -> LoadedDeployment:
        """Return a deployment. Raises ServiceUnavailableError if it is not loaded."""
        loaded = self.deployments.get(name)
        if loaded is None:
            raise ServiceUnavailableError(
                f"deployment {name!r} is not loaded", why=self.failed.get(name, "")
            )
        return loaded

    def get_version(self, version: str) -> LoadedDeployment:
        """Return the deployment of a version.

        Raises:
            NotFoundError: no deployment of the table has this version.
            ServiceUnavailableError: the deployment could not be loaded.
        """
        for deployment in self.table.state.deployments:
            if deployment.version == version:
                return self.get_deployment(deployment.name)
        raise NotFoundError(
            f"this endpoint does not serve version {version!r} of model {self.model!r}"
        )

    def get_leader(self, previous: LatencyEstimator) -> LatencyEstimator:
        """Return the latency of the leader, which decides where models run.

        `previous` is the latency of the leader so far. The leader stays the same while it gets
        traffic, so it does not change during a rollout. When the leader has no traffic any more,
        the loaded deployment with the most traffic becomes the leader. If several deployments have
        equal traffic, this is the oldest of them.
        """
        weights = self.table.state.split.weights
        serving = {
            name: loaded.latency for name, loaded in self.deployments.items() if weights.get(name)
        }
        if any(latency is previous for latency in serving.values()):
            return previous
        names = sorted(serving, key=self.table.layout.index, reverse=True)
        return serving[max(names, key=weights.__getitem__)] if names else previous

    def queue_unbounded(self) -> None:
        """Queue all requests if a deployment with traffic is unbounded.

        All deployments then run in the same way. Requests to unbounded deployments are always
        queued (see `LoadedDeployment.is_unbounded`).
        """
        serving = [
            loaded
            for loaded in self.list_loaded()
            if self.table.state.split.weights.get(loaded.deployment.name)
        ]
        must_queue = any(loaded.is_unbounded for loaded in serving)
        for loaded in self.list_loaded():
            loaded.must_queue = loaded.is_unbounded or must_queue

    def is_warm(self) -> bool:
        """Return whether all deployments with traffic and the control replica are warm.

        Latencies are compared only after the warm-up.
        """
        serving = [
            self.deployments[name] for name in set(self.router.slots) if name in self.deployments
        ]
        return not any(
            loaded.warm_up
            for loaded in (*serving, *([self.control.replica] if self.control else ()))
        )

    def is_ready(self) -> bool:
        """Return whether every deployment with traffic is loaded."""
        return all(name in self.deployments for name in set(self.router.slots))


@dataclass(slots=True, eq=False)
class PendingRequest:
    """An inference request that is queued.

    Attributes:
        started_at: when the request arrived. This and the next two times are on the clock of
            `time.perf_counter`.
        deadline: time after which the request does not start to run.
        expires_at: time at which its run is ended at the latest, as the client has requested; in a
            batch, the latest of these times counts.
        draw: the assignment of users at the time of the request; None if the client selected the
            deployment, or if the fallback answers without a lease.
        cell: the user's cell, or `KEYLESS_CELL`.
        place: where the request is counted as in progress, if it is counted by user.
        is_judged: whether its result is evidence about its version.
        comparable: whether its latency can be compared with other deployments (see
            `TrafficRouter`).
        queue_seconds: time in the queue.
        service_seconds: time to decode the request, run it, and encode its response; 0 if it was
            taken from the queue together with others.
        abandoned: whether the client has disconnected.
    """

    route: InferenceRoute
    head: RequestHead
    body: RequestBody
    respond: Callable[[RawResponse], None]
    started_at: float
    snapshot: TableSnapshot
    loaded: LoadedDeployment
    draw: CellDraw | None
    cell: int
    comparable: bool
    deadline: float = 0.0
    expires_at: float = 0.0
    place: CellPlace | None = None
    is_judged: bool = False
    queue_seconds: float = 0.0
    service_seconds: float = 0.0
    abandoned: bool = False


Load = Callable[[Deployment, MetricsRow, bool], LoadedDeployment]
"""Function that loads a deployment with the row of its counters.

The last argument is True for a control replica, whose memory is not shared with the first copy.
"""


class LoadedDeployments:
    """Snapshots of a worker: the current one, the previous one, and prepared ones.

    `get_current`, `discard` and `release` must be called on the event loop, and `restore` and
    `prepare` on one other thread. While one of the latter two runs, the event loop must not switch
    to another revision.
    """

    def __init__(
        self, shared: SharedMetrics, worker: int, load: Load, *, endpoint: str = ""
    ) -> None:
        self.endpoint = endpoint
        self.routes: Mapping[bytes, InferenceRoute] = {}
        """Routes of the snapshot that was used last, by path.

        A newer snapshot can already be published.
        """
        self.leader = LatencyEstimator()
        self.shared = shared
        self.worker = worker
        self._load = load
        self._header = shared.header  # The first number of the header is the published revision.
        self._prepared: dict[int, TableSnapshot] = {}
        self._snapshot: TableSnapshot | None = None
        self._previous: TableSnapshot | None = None
        self._retired: list[TableSnapshot] = []

    def get_current(self) -> TableSnapshot:
        """Return the snapshot of the published revision, after switching to a new one.

        Raises:
            ServiceUnavailableError: no table is published yet, or this worker lacks it.
        """
        snapshot = self._snapshot
        revision = self._header[0]
        if snapshot is None or snapshot.revision != revision:
            if revision == 0:
                raise ServiceUnavailableError("no deployment is published to this endpoint yet")
            if revision not in self._prepared:
                raise ServiceUnavailableError(
                    f"revision {revision} of the routing table was published before this worker "
                    "had prepared it"
                )
            snapshot = self._prepared[revision]
            self.routes = snapshot.routes
            self.leader = snapshot.get_leader(self.leader)
            snapshot.queue_unbounded()
            # The loop handles all revisions that were published since the last call.
            for number in sorted(n for n in self._prepared if n <= revision):
                if self._previous is not None:
                    self._retired.append(self._previous)
                self._snapshot, self._previous = self._prepared.pop(number), self._snapshot
        return snapshot

    @property
    def last(self) -> TableSnapshot | None:
        """The last used snapshot, for threads that must not switch to another one."""
        return self._snapshot

    def get_published(self) -> TableSnapshot | None:
        """Return the current snapshot; None before the first publication.

        Raises:
            ServiceUnavailableError: this worker has not prepared the published table.
        """
        return None if self._header[0] == 0 else self.get_current()

    def restore(self, revision: TableRevision, refusal: str = "") -> Mapping[str, str]:
        """Load a table after a restart; return failed deployments with the reason.

        If `refusal` states a reason, no deployment is loaded.
        """
        deployments: dict[str, LoadedDeployment] = {}
        listed = revision.table.state.deployments
        failed = {d.name: refusal for d in listed if refusal}
        for deployment in () if refusal else listed:
            try:
                deployments[deployment.name] = self._load_counted(
                    deployment, revision.slots[deployment.name]
                )
            except OnnxOpsError as error:
                _log.error("deployment %s could not be loaded: %s", deployment.name, error)
                failed[deployment.name] = str(error)
        self._add_snapshot(revision, deployments, failed)
        return failed

    def prepare(self, revision: TableRevision) -> None:
        """Load the deployments of a table before the event loop switches to it.

        Switching then loads no model.

        Raises:
            OnnxOpsError: a deployment could not be loaded (see `load_model`).
        """
        loaded = {
            d.deployment: d
            for snapshot in self._list_snapshots()
            for d in snapshot.deployments.values()
        }
        deployments = {
            d.name: loaded[d] if d in loaded else self._load_counted(d, revision.slots[d.name])
            for d in revision.table.state.deployments
        }
        self._add_snapshot(revision, deployments, {})

    def discard(self, revision: int) -> None:
        """Drop a prepared revision that will not be published."""
        if (snapshot := self._prepared.pop(revision, None)) is not None:
            self._retired.append(snapshot)

    def release(self) -> list[LoadedDeployment]:
        """Return the deployments that are no longer needed.

        The caller frees their memory on a thread, because this takes time for large models.
        """
        retired, self._retired = self._retired, []
        needed = {
            loaded for snapshot in self._list_snapshots() for loaded in snapshot.list_loaded()
        }
        return [
            d
            for d in {d for snapshot in retired for d in snapshot.list_loaded()}
            if d not in needed
        ]

    def _list_snapshots(self) -> list[TableSnapshot]:
        return [
            s for s in (*self._prepared.values(), self._previous, self._snapshot) if s is not None
        ]

    def _add_snapshot(
        self,
        revision: TableRevision,
        deployments: Mapping[str, LoadedDeployment],
        failed: Mapping[str, str],
    ) -> None:
        table = revision.table
        shadow = table.state.split.shadow.items()
        model = table.state.deployments[0].model
        base = f"/v2/models/{model}"
        routes = {
            f"{base}/infer": InferenceRoute(model=model),
            "/invocations": InferenceRoute(invocation=True),
            f"/endpoints/{self.endpoint}/invocations": InferenceRoute(invocation=True),
        }
        for version in (d.version for d in table.state.deployments):
            routes[f"{base}/versions/{version}/infer"] = InferenceRoute(
                model=model, version=version
            )
        self._prepared[revision.number] = TableSnapshot(
            revision=revision.number,
            table=table,
            router=TrafficRouter.from_table(table),
            model=model,
            deployments=deployments,
            failed=failed,
            routes={path.encode(): route for path, route in routes.items() if path.isascii()},
            shadow=[
                (deployments[name], percent)
                for name, percent in shadow
                if percent and name in deployments
            ],
            control=self._build_control(table, deployments),
            tokens=FeedbackTokens(table) if table.feedback_key else None,
            split_number=revision.split_number,
        )

    def _build_control(
        self, table: RoutingTable, deployments: Mapping[str, LoadedDeployment]
    ) -> ControlReplica | None:
        """Return the control replica; None if it is unnecessary or cannot be loaded.

        A model of more than `MAX_REPLICA_BYTES` has none.
        """
        control = find_control(table)
        loaded = None if control is None else deployments.get(control.name)
        if loaded is None or loaded.size_bytes > MAX_REPLICA_BYTES:
            return None
        controls = [
            s.control
            for s in self._list_snapshots()
            if s.control is not None and s.control.loaded is loaded
        ]
        if controls:
            return ControlReplica(loaded, controls[0].replica)
        try:
            replica = self._load(loaded.deployment, make_row(), True)
        except OnnxOpsError as error:
            _log.warning("%s has no control replica: %s", loaded.deployment.name, error)
            return None
        # The replica shares all counters with the original, except the gauges of its queue.
        replica.row, replica.slot = (
            loaded.row,
            loaded.slot,
        )
        return ControlReplica(loaded, replica)

    def _load_counted(self, deployment: Deployment, slot: int) -> LoadedDeployment:
        row = self.shared.get_row(self.worker, slot)
        with count_load(row):
            loaded = self._load(deployment, row, False)
        loaded.slot = slot
        return loaded
