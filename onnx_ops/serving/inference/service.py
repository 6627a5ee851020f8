"""Service that routes, runs, counts and logs inference requests."""

from __future__ import annotations

import asyncio
import logging
import random
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from typing import Any

import numpy as np

from onnx_ops.errors import OnnxOpsError, ServiceUnavailableError, UserError
from onnx_ops.ports.data import Array
from onnx_ops.protocol import messages
from onnx_ops.serving.inference import responses
from onnx_ops.serving.inference.cell_counts import CellCounter
from onnx_ops.serving.inference.content_coding import InflateBudget
from onnx_ops.serving.inference.deployments import (
    InferenceRoute,
    LoadedDeployment,
    LoadedDeployments,
    PendingRequest,
    TableSnapshot,
)
from onnx_ops.serving.inference.feedback import FeedbackCounter
from onnx_ops.serving.inference.request_log import RequestLog
from onnx_ops.serving.inference.responses import (
    DeadlineExceededError,
    InputsRejectedError,
    LeaseLapsedError,
    RawResponse,
    RequestHead,
    RunTimeoutError,
)
from onnx_ops.serving.inference.run_monitor import INLINE_LIMIT_S, RunMonitor
from onnx_ops.serving.inference.shadow import ShadowQueue
from onnx_ops.serving.inference.signature import InferenceRequest
from onnx_ops.serving.inference.tensors import RequestBody
from onnx_ops.serving.inference.traffic_router import CellDraw
from onnx_ops.serving.metrics import (
    BATCHED,
    EPOCH,
    INLINE_RUN,
    LAPSED,
    LEASE,
    OUT_OF_SERVICE,
    RUN_CELL,
    RUN_NANOSECONDS,
    RUNS,
    SERVING_LEASE,
    UNJUDGED,
    count_queued_request,
    count_request,
    get_column,
)

_log = logging.getLogger(__name__)

_USER_KEY = messages.USER_KEY_HEADER.encode()
_TIMEOUT = messages.TIMEOUT_HEADER.encode()
_REQUEST_ID = messages.REQUEST_ID_HEADER.encode()
_TRACE_PARENT = messages.TRACE_PARENT_HEADER.encode()
_CLIENT_GONE = 499
MAX_BATCH_ROWS = 1024
"""Maximum number of rows in a batch of several requests.

In a larger batch, a small request would wait for the rows of many other requests.
"""
_REST_S = 10.0
"""Seconds in which a deployment does not run on the event loop.

The time begins with a run on the event loop that took too long. The publication of a table ends it.
"""
_NEVER = float("inf")

Result = RawResponse | OnnxOpsError
LimitRuns = Callable[[Sequence[PendingRequest]], AbstractContextManager[Any]]
"""Function that returns a context for the runs of some requests.

The context limits the time of the runs, and yields the run options for this.
"""


class InferenceService:
    """Service for inference requests.

    Only `run_batch` is called outside the event loop. Requests that reach no deployment are counted
    in slot 0. `deadline_s` is the longest time in a queue, and `run_timeout_s` the longest time of
    a run.
    """

    def __init__(
        self,
        deployments: LoadedDeployments,
        shadow: ShadowQueue,
        *,
        deadline_s: float,
        run_timeout_s: float = _NEVER,
        request_log: RequestLog | None = None,
        monitor: RunMonitor | None = None,
        inflated: InflateBudget | None = None,
    ) -> None:
        self.deployments = deployments
        self._unrouted = deployments.shared.get_row(deployments.worker, 0)
        self._deadline_s = deadline_s
        self._run_timeout_s = run_timeout_s
        self.monitor = monitor or RunMonitor()
        self.must_queue = False
        """Whether all requests run on threads and none on the event loop."""
        self._inflated = inflated or InflateBudget(sys.maxsize)
        self._process = deployments.shared.get_process_state(deployments.worker)
        self._shadow = shadow
        self._header = deployments.shared.header
        self._cells = CellCounter(deployments.shared, deployments.worker)
        self.feedback = FeedbackCounter(deployments, self._cells)
        self._exemplars = deployments.shared.get_exemplars(deployments.worker)
        self._request_log = request_log
        self._draw = random.Random().random  # noqa: S311 (traffic is split, nothing is kept secret)
        self._loop = asyncio.get_running_loop()

    def handle(
        self,
        route: InferenceRoute,
        head: RequestHead,
        body: RequestBody,
        respond: Callable[[RawResponse], None],
    ) -> RawResponse | PendingRequest:
        """Return the response, or the queued request that calls `respond` with it.

        The deployment is selected only here, after the request has arrived completely. So a table
        that is published while a request arrives applies to this request.
        """
        started_at = time.perf_counter()
        snapshot: TableSnapshot | None = None
        loaded: LoadedDeployment | None = None
        draw: CellDraw | None = None
        cell = messages.KEYLESS_CELL
        drawn_cell = 0
        response: RawResponse | None = None
        is_inline = comparable = is_judged = True
        try:
            snapshot = self._get_served()
            loaded = self._find_requested(snapshot, route, head)
            if loaded is None:
                control, router = snapshot.control, snapshot.router
                if router.fallback and not self._has_lease():
                    loaded, comparable = self._fall_back(snapshot), False
                else:
                    draw = self._get_draw(snapshot)
                    if (key := head.get(_USER_KEY)) is not None:
                        cell = router.get_cell(key)
                    slot = int(self._draw() * 100) if key is None else draw.slots[cell]
                    name, comparable = router.slots[slot], router.comparable[slot]
                    loaded = snapshot.deployments.get(name) or snapshot.get_deployment(name)
                    drawn_cell = cell + 1
                    if comparable and control is not None and loaded is control.loaded:
                        loaded = control.replica
            if self._header[OUT_OF_SERVICE]:
                self.check_in_service(loaded)
            if not (route.coding or self.must_queue) and loaded.should_run_inline(
                self.deployments.leader, head, body
            ):
                response = self._answer_inline(loaded, route, head, body, drawn_cell)
            if response is None:
                is_inline = False
                return self._enqueue(
                    PendingRequest(
                        route,
                        head,
                        body,
                        respond,
                        started_at,
                        snapshot,
                        loaded,
                        draw,
                        cell,
                        comparable,
                    )
                )
            loaded.row[RUNS] += 1
        except OnnxOpsError as error:
            lines = b"" if loaded is None else loaded.header_lines
            response = responses.build_error_from(error, lines, invocation=route.invocation)
            is_judged = draw is not None and self._is_judged(
                error, snapshot, loaded, route, head, body
            )
        except Exception:
            _log.exception("a request failed unexpectedly")
            response = responses.build_internal_error(
                b"" if loaded is None else loaded.header_lines
            )
        seconds = time.perf_counter() - started_at
        service_s = seconds if comparable and is_inline else 0.0
        is_judged = is_judged and draw is not None
        service_s = self._count(loaded, response.status, seconds, service_s, is_judged)
        if loaded is not None and draw is not None and is_judged and self._cells.is_watching:
            self._cells.count(
                draw, loaded.slot, cell, response.status, service_s if draw.is_timed else 0.0
            )
        self._finish(snapshot, loaded, route, head, body, draw, cell, response, seconds)
        return response

    def _has_lease(self) -> bool:
        """Return whether the server has a lease for giving a candidate traffic.

        The clock is read at each request. Otherwise, a process that was suspended could not detect
        in time that its lease has ended.
        """
        return time.clock_gettime_ns(time.CLOCK_BOOTTIME) < self._header[LEASE]

    def _get_served(self) -> TableSnapshot:
        """Return the snapshot of the current table.

        Raises:
            LeaseLapsedError: the table is leased, and the server has no lease for it.
            ServiceUnavailableError: this worker has no current table.
        """
        snapshot = self.deployments.get_current()
        if snapshot.router.is_leased and not self.has_serving_lease():
            self._process[LAPSED] += 1
            raise LeaseLapsedError()
        return snapshot

    def has_serving_lease(self, ahead_s: float = 0.0) -> bool:
        """Return whether the server's lease for a leased table is still valid.

        The lease must be valid now and in `ahead_s` seconds.
        """
        return (
            time.clock_gettime_ns(time.CLOCK_BOOTTIME) + ahead_s * 1e9 < self._header[SERVING_LEASE]
        )

    def _fall_back(self, snapshot: TableSnapshot) -> LoadedDeployment:
        """Return the deployment that answers without a lease; count the request as lapsed.

        The fallback answers regardless of the split, so the request is not evidence.
        """
        self._process[LAPSED] += 1
        return snapshot.get_deployment(snapshot.router.fallback)

    def _enqueue(self, request: PendingRequest) -> PendingRequest:
        """Put a request into the queue of its deployment, to run on a thread."""
        timeout_s = self._read_timeout_s(request.head)
        request.deadline = request.started_at + min(timeout_s, self._deadline_s)
        request.expires_at = request.started_at + timeout_s
        request.loaded.queue.put(request)
        request.is_judged = request.draw is not None
        if request.draw is not None and self._cells.is_watching:
            request.place = self._cells.begin(request.draw, request.loaded.slot, request.cell)
        return request

    def _is_judged(
        self,
        error: OnnxOpsError,
        snapshot: TableSnapshot | None,
        loaded: LoadedDeployment | None,
        route: InferenceRoute,
        head: RequestHead,
        body: RequestBody,
    ) -> bool:
        """Return whether the error of a routed request is evidence against its version.

        If every version with traffic refuses a request, its client is the cause. If such errors
        were evidence, a client could decide a rollout by sending many of these requests to one
        version. Therefore the other versions decode the request too. Without another version, every
        error is evidence. An error that is not a refusal, such as the failure of a run, is always
        evidence. If the budget of decompressed bodies is exhausted while the other versions decode
        the request, the cause stays unknown. The error is then not evidence.
        """
        is_refusal = isinstance(error, UserError) and not isinstance(error, InputsRejectedError)
        if not is_refusal or snapshot is None or loaded is None:
            return True
        weights = snapshot.table.state.split.weights
        others = [
            other
            for name, other in snapshot.deployments.items()
            if weights.get(name) and other.deployment is not loaded.deployment
        ]
        for other in others:
            try:
                self._read_timeout_s(head)
                with self._inflated.reserve() as charge:
                    other.decode(route, head, body, charge)
            except OnnxOpsError:
                continue
            return True
        return not others

    def check_in_service(self, loaded: LoadedDeployment) -> None:
        """Raise ServiceUnavailableError if a deployment is out of service.

        `worker_health` takes deployments out of service.
        """
        if self._header[OUT_OF_SERVICE] >> loaded.slot & 1:
            raise ServiceUnavailableError(
                f"deployment {loaded.deployment.name!r} is out of service",
                why="workers crashed or hung while they ran it",
                remedy="Roll it back, or publish another state.",
            )

    def _answer_inline(
        self,
        loaded: LoadedDeployment,
        route: InferenceRoute,
        head: RequestHead,
        body: RequestBody,
        drawn_cell: int,
    ) -> RawResponse | None:
        """Return the response of a run on the event loop; None if the run was ended.

        In that case, the request must be queued. The run is recorded before it starts, which takes
        0.2 µs of the time that `benchmarks.serving.path` measures.
        """
        process, monitor = self._process, self.monitor
        process[INLINE_RUN + RUN_CELL] = drawn_cell
        # The slot is stored at INLINE_RUN itself, because the offset RUN_SLOT is 0.
        process[INLINE_RUN] = loaded.slot
        started_at = monitor.inline_since = time.perf_counter()
        monitor.inline_options = loaded.options
        try:
            return loaded.answer_inline(route, head, body)
        except RunTimeoutError:
            _log.warning(
                "a run of %s took more than %g s on the event loop",
                loaded.deployment.name,
                INLINE_LIMIT_S,
            )
            loaded.must_queue = True
            self._loop.call_later(_REST_S, self._end_rest, loaded)
            return None
        finally:
            process[INLINE_RUN] = 0
            monitor.inline_options = None
            if time.perf_counter() - started_at > INLINE_LIMIT_S:
                monitor.reset(loaded.options)

    def _end_rest(self, loaded: LoadedDeployment) -> None:
        """Let a deployment run on the event loop again, if the published table permits it."""
        loaded.must_queue = loaded.is_unbounded
        with suppress(ServiceUnavailableError):
            self.deployments.get_current().queue_unbounded()

    def _read_timeout_s(self, head: RequestHead) -> float:
        """Return the seconds after which the client no longer needs the response.

        The result is infinite if the head has no limit.
        """
        if (value := head.get(_TIMEOUT)) is None:
            return _NEVER
        if not value.isdigit() or len(value) > 9:
            raise UserError(
                f"{messages.TIMEOUT_HEADER} must be a whole number of milliseconds with at most 9 "
                f"digits, not {value[:40].decode('latin-1')!r}"
            )
        return int(value) / 1e3

    def choose(self, model: str, version: str | None, head: RequestHead) -> LoadedDeployment:
        """Return the deployment that answers a request with this path and head.

        Raises:
            NotFoundError: the endpoint has no such model, version or deployment.
            ServiceUnavailableError: the server lacks its lease, or this worker lacks the deployment
                or the current table.
        """
        snapshot = self._get_served()
        requested = self._find_requested(
            snapshot, InferenceRoute(model=model, version=version), head
        )
        if requested is not None:
            return requested
        router = snapshot.router
        if router.fallback and not self._has_lease():
            return snapshot.get_deployment(router.fallback)
        key = head.get(_USER_KEY)
        slot = (
            int(self._draw() * 100)
            if key is None
            else self._get_draw(snapshot).slots[router.get_cell(key)]
        )
        return snapshot.get_deployment(router.slots[slot])

    def _get_draw(self, snapshot: TableSnapshot) -> CellDraw:
        """Return the assignment of users in the current epoch."""
        router = snapshot.router
        draw = router.draw
        if router.epoch_s and draw.epoch != self._header[EPOCH]:
            draw = router.get_draw(self._header[EPOCH])
            draw.is_timed = snapshot.is_warm()
        return draw

    def count_rejected(self, status: int) -> None:
        """Count a request that was rejected before it could reach a deployment."""
        self._unrouted[get_column(status)] += 1

    def run_batch(self, requests: Sequence[PendingRequest]) -> None:
        """Run requests of one deployment on a thread; pass the results to the event loop."""
        started_at = time.perf_counter()
        for request in requests:
            request.queue_seconds = started_at - request.started_at
        due = [r for r in requests if not r.abandoned and started_at < r.deadline]
        results: list[tuple[PendingRequest, Result]] = [
            (r, DeadlineExceededError("the request was queued past its deadline"))
            for r in requests
            if r not in due
        ]
        runs: Sequence[tuple[float, int]] = ()
        try:
            if due:
                batch, runs = run_requests(due[0].loaded, due, self._limit_runs, self._inflated)
                results += zip(due, batch, strict=True)
                if len(requests) == 1:
                    due[0].service_seconds = time.perf_counter() - started_at
        except Exception:
            _log.exception("requests failed unexpectedly")
            results += [(r, responses.build_internal_error(r.loaded.header_lines)) for r in due]
        for request, result in results:
            if request.is_judged and isinstance(result, OnnxOpsError):
                source = request.snapshot, request.loaded, request.route, request.head, request.body
                request.is_judged = self._is_judged(result, *source)
        try:
            self._loop.call_soon_threadsafe(self._deliver, results, runs)
        except RuntimeError:
            # The time limit of the drain has ended, so the event loop is closed and these requests
            # are lost.
            _log.warning("%d responses were too late to be sent", len(results))

    def _limit_runs(self, requests: Sequence[PendingRequest]) -> AbstractContextManager[Any]:
        """Limit the runs of requests on this thread (see `RunMonitor.limit`)."""
        deadline = min(
            time.perf_counter() + self._run_timeout_s, max(r.expires_at for r in requests)
        )
        cell = min(0 if request.draw is None else request.cell + 1 for request in requests)
        return self.monitor.limit(deadline, requests[0].loaded.slot, cell)

    def _deliver(
        self, results: Sequence[tuple[PendingRequest, Result]], runs: Sequence[tuple[float, int]]
    ) -> None:
        loaded = results[0][0].loaded
        for seconds, count in runs:
            loaded.row[RUNS] += 1
            loaded.row[RUN_NANOSECONDS] += int(seconds * 1e9)
            loaded.row[BATCHED] += count if count > 1 else 0
        for request, result in results:
            if isinstance(result, RawResponse):
                response = result
            else:
                invocation = request.route.invocation
                response = responses.build_error_from(
                    result, request.loaded.header_lines, invocation=invocation
                )
            seconds = time.perf_counter() - request.started_at
            if request.abandoned:
                response = RawResponse(_CLIENT_GONE, b"", b"")
            service_s = request.service_seconds if request.comparable else 0.0
            service_s = self._count(loaded, response.status, seconds, service_s, request.is_judged)
            if request.place is not None and not request.is_judged:
                self._cells.cancel(request.place)
            elif request.place is not None:
                is_timed = request.draw is not None and request.draw.is_timed
                self._cells.finish(request.place, response.status, service_s if is_timed else 0.0)
            self._finish(
                *(
                    request.snapshot,
                    loaded,
                    request.route,
                    request.head,
                    request.body,
                    request.draw,
                    request.cell,
                ),
                *(response, seconds, request.queue_seconds),
            )
            request.respond(response)

    def _count(
        self,
        loaded: LoadedDeployment | None,
        status: int,
        seconds: float,
        service_s: float,
        is_judged: bool,
    ) -> float:
        """Count a request whose response is ready; return its comparable latency.

        A request is counted before its response is sent. So every response that a client has
        received is counted, even if this process is killed directly afterwards.

        Args:
            service_s: seconds minus the time in the queue; 0 if the latency is not comparable.
            is_judged: whether the request is evidence about its version.
        """
        if loaded is None:
            count_request(self._unrouted, status, seconds)
            return 0.0
        if not is_judged:
            loaded.row[UNJUDGED + get_column(status)] += 1
            service_s = 0.0
        if loaded.warm_up:
            loaded.warm_up -= 1
            service_s = 0.0
        if service_s == seconds:
            # The request ran on the event loop, so its time can be compared between versions.
            count_request(loaded.row, status, seconds)
        else:
            count_queued_request(loaded.row, status, seconds, service_s)
        return service_s

    def _finish(
        self,
        snapshot: TableSnapshot | None,
        loaded: LoadedDeployment | None,
        route: InferenceRoute,
        head: RequestHead,
        body: RequestBody,
        draw: CellDraw | None,
        cell: int,
        response: RawResponse,
        seconds: float,
        queue_s: float = 0.0,
    ) -> None:
        """Mirror and log a request that is answered and counted.

        A request that the split has routed is recorded for feedback. With status 200, it is
        mirrored to each shadow deployment with the probability that the split sets. If the table
        has a feedback key, the response to such a request gets a feedback token.
        """
        status = response.status
        if loaded is not None and snapshot is not None:
            # Without a draw, a client selected the deployment, or the fallback answered. Such a
            # request must not affect an A/B test or a shadow.
            if draw is not None:
                request_id = head.get(_REQUEST_ID)
                self.feedback.remember(
                    request_id, loaded.slot, snapshot.split_number, draw.epoch, cell
                )
                for shadow, percent in snapshot.shadow if status == 200 else ():
                    if shadow is not loaded and self._draw() * 100 < percent:
                        tolerance = snapshot.table.state.split.shadow_tolerance
                        self._shadow.put(shadow, route, head, body, response, tolerance)
                if snapshot.tokens is not None:
                    response.lines += snapshot.tokens.seal_line(loaded.deployment.name, cell)
            if (trace_parent := head.get(_TRACE_PARENT)) is not None:
                self._exemplars.put(loaded.slot, trace_parent, seconds)
        if self._request_log is not None:
            self._request_log.put(route, head, loaded, status, queue_s, seconds)

    def _find_requested(
        self, snapshot: TableSnapshot, route: InferenceRoute, head: RequestHead
    ) -> LoadedDeployment | None:
        """Return the deployment that the path or a header of a request names, if any.

        Raises:
            NotFoundError: the model, version or deployment does not exist.
            ServiceUnavailableError: the deployment is not loaded.
        """
        if route.model is not None and route.model != snapshot.model:
            raise snapshot.build_model_error(route.model)
        if route.version is not None:
            return snapshot.get_version(route.version)
        name = snapshot.router.get_pinned(head)
        return None if name is None else snapshot.get_deployment(name)


def run_requests(
    loaded: LoadedDeployment,
    requests: Sequence[PendingRequest],
    limit: LimitRuns,
    inflated: InflateBudget,
) -> tuple[list[Result], list[tuple[float, int]]]:
    """Run requests within their limits, in batches if the model supports it.

    Return the result of each request. Also return, for each run of the model, its seconds and the
    number of its requests.
    """
    results: dict[int, Result] = {}
    decoded: dict[int, InferenceRequest] = {}
    runs: list[tuple[float, int]] = []

    def run_alone(position: int, member: InferenceRequest) -> RawResponse:
        with limit([requests[position]]) as options:
            started_at = time.perf_counter()
            response = loaded.answer(member, options)
            runs.append((time.perf_counter() - started_at, 1))
        return response

    for position, request in enumerate(requests):
        source = request.route, request.head, request.body
        try:
            if request.route.coding:
                # Requests with compressed bodies run one by one: the decompressed bodies of a whole
                # batch could exhaust the memory. The budget limits those of all threads.
                with inflated.reserve() as charge:
                    results[position] = run_alone(position, loaded.decode(*source, charge))
            else:
                decoded[position] = loaded.decode(*source)
        except OnnxOpsError as error:
            results[position] = _forget_frames(error)
    for group in group_requests(decoded, batchable=loaded.deployment.batchable):
        batch = [decoded[position] for position in group]
        together = None
        if len(batch) > 1:
            try:
                with limit([requests[position] for position in group]) as options:
                    together = _run_together(loaded, batch, runs, options)
            except RunTimeoutError as error:
                results |= dict.fromkeys(group, error)
                continue
        outputs: Sequence[tuple[Array, ...] | None] = (
            [None] * len(batch) if together is None else together
        )
        for position, member, arrays in zip(group, batch, outputs, strict=True):
            try:
                results[position] = (
                    run_alone(position, member) if arrays is None else loaded.encode(member, arrays)
                )
            except OnnxOpsError as error:
                results[position] = _forget_frames(error)
    return [results[position] for position in range(len(requests))], runs


def _forget_frames(error: OnnxOpsError) -> OnnxOpsError:
    """Return an error without references to the frames that raised it.

    The frames would keep decompressed bodies and tensors in memory.
    """
    error.__traceback__ = error.__cause__ = error.__context__ = None
    return error


def group_requests(requests: Mapping[int, InferenceRequest], *, batchable: bool) -> list[list[int]]:
    """Group the positions of requests that can run in one batch.

    The requests of a group have equal outputs, types, and shapes except axis 0. Several requests of
    a group have at most `MAX_BATCH_ROWS` rows together. A request whose `rows` is 0 is alone in its
    group.
    """
    if not batchable:
        return [[position] for position in requests]
    groups: list[list[int]] = []
    open_groups: dict[object, tuple[list[int], int]] = {}
    for position, request in requests.items():
        tensors = tuple(
            sorted((name, a.dtype.str, a.shape[1:]) for name, a in request.feed.items())
        )
        kind = (request.outputs, tensors) if request.rows else None
        group, rows = open_groups.get(kind, ([], 0))
        if not group or kind is None or rows + request.rows > MAX_BATCH_ROWS:
            group, rows = [], 0
            groups.append(group)
        group.append(position)
        open_groups[kind] = (group, rows + request.rows)
    return groups


def _run_together(
    loaded: LoadedDeployment,
    requests: Sequence[InferenceRequest],
    runs: list[tuple[float, int]],
    options: Any,
) -> list[tuple[Array, ...]] | None:
    """Return outputs by request; None if the requests must run separately.

    This is the case if the run fails, or an output has another number of rows than the inputs.

    Raises:
        RunTimeoutError: the run was ended at its deadline.
    """
    feed = {
        name: np.concatenate([request.feed[name] for request in requests])
        for name in requests[0].feed
    }
    started_at = time.perf_counter()
    try:
        arrays = loaded.run(requests[0].outputs, feed, options)
    except RunTimeoutError:
        raise
    except OnnxOpsError:
        return None
    seconds = time.perf_counter() - started_at
    rows = [request.rows for request in requests]
    if any(array.ndim == 0 or array.shape[0] != sum(rows) for array in arrays):
        return None
    loaded.latency.observe(seconds / len(requests))
    runs.append((seconds, len(requests)))
    ends = np.cumsum(rows)[:-1]
    return list(zip(*(np.split(array, ends) for array in arrays), strict=True))
