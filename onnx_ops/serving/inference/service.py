"""Turn a request into its response: choose a deployment, queue or run, count, log."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from onnx_ops.errors import OnnxOpsError, UserError
from onnx_ops.ports.data import Array
from onnx_ops.protocol import messages
from onnx_ops.serving.inference import responses
from onnx_ops.serving.inference.deployments import (
    InferenceRoute,
    LoadedDeployment,
    LoadedDeployments,
    PendingRequest,
    TableSnapshot,
)
from onnx_ops.serving.inference.responses import DeadlineExceededError, RawResponse, RequestHead
from onnx_ops.serving.inference.shadow import ShadowQueue
from onnx_ops.serving.inference.signature import InferenceRequest
from onnx_ops.serving.inference.tensors import RequestBody
from onnx_ops.serving.metrics import BATCHED, RUN_NANOSECONDS, RUNS, count_queued_request, count_request, get_column
from onnx_ops.serving.request_log import RequestLog
from onnx_ops.serving.rollout_counts import FeedbackCounter, UserCounts

_log = logging.getLogger(__name__)

_USER_KEY = messages.USER_KEY_HEADER.encode()
_TIMEOUT = messages.TIMEOUT_HEADER.encode()
_REQUEST_ID = messages.REQUEST_ID_HEADER.encode()
_TRACE_PARENT = messages.TRACE_PARENT_HEADER.encode()
_CLIENT_GONE = 499
MAX_BATCH_ROWS = 1024
"""Rows of one batch, so that a request never waits for a run that is much longer than its own."""

Result = RawResponse | OnnxOpsError


class InferenceService:
    """Answers inference requests. All methods but `run_batch` need its event loop.

    Requests that reach no deployment are counted in `unrouted`. `deadline_s` is the longest time in a queue.
    """

    def __init__(
        self,
        deployments: LoadedDeployments,
        shadow: ShadowQueue,
        *,
        deadline_s: float,
        request_log: RequestLog | None = None,
    ) -> None:
        self.deployments = deployments
        self._unrouted = deployments.shared.get_row(deployments.worker, 0)
        self._deadline_s = deadline_s
        self._shadow = shadow
        self._users = UserCounts(deployments.shared, deployments.worker)
        self.feedback = FeedbackCounter(deployments, self._users)
        self._exemplars = deployments.shared.get_exemplars(deployments.worker)
        self._request_log = request_log
        self._draw = random.Random().random  # noqa: S311 (traffic is split, nothing is kept secret)
        self._loop = asyncio.get_running_loop()

    def handle(
        self, route: InferenceRoute, head: RequestHead, body: RequestBody, respond: Callable[[RawResponse], None]
    ) -> RawResponse | PendingRequest:
        """Return the response, or the queued request that calls `respond` with it.

        The deployment is chosen only here, so a request never uses a table that was replaced while it was received.
        """
        started_at = time.perf_counter()
        snapshot: TableSnapshot | None = None
        loaded: LoadedDeployment | None = None
        user: int | None = None
        is_inline = comparable = True
        try:
            snapshot = self.deployments.get_current()
            key = head.get(_USER_KEY)
            if key is not None:
                user = snapshot.router.hash_key(key)
            loaded = self._choose(snapshot, route, head, user)
            if (control := snapshot.control) is not None and loaded is control.loaded:
                comparable = self._draw() < control.share
                if comparable:
                    loaded = control.replica
            if route.coding or not loaded.should_run_inline(self.deployments.leader, head, body):
                is_inline = False
                deadline = started_at + self._read_timeout_s(head)
                request = PendingRequest(
                    route, head, body, respond, started_at, snapshot, loaded, user, deadline, comparable
                )
                loaded.queue.put(request)
                return request
            response = loaded.answer_inline(route, head, body)
            loaded.row[RUNS] += 1
        except OnnxOpsError as error:
            lines = b"" if loaded is None else loaded.header_lines
            response = responses.build_error_from(error, lines, invocation=route.invocation)
        except Exception:
            _log.exception("a request failed unexpectedly")
            response = responses.build_internal_error(b"" if loaded is None else loaded.header_lines)
        seconds = time.perf_counter() - started_at
        service_s = seconds if comparable and is_inline else 0.0
        self._finish(snapshot, loaded, route, head, body, user, response, seconds, service_s)
        return response

    def _read_timeout_s(self, head: RequestHead) -> float:
        """Return the longest time in the queue."""
        timeout_s = self._deadline_s
        if (value := head.get(_TIMEOUT)) is not None:
            if not value.isdigit() or len(value) > 9:
                raise UserError(f"{messages.TIMEOUT_HEADER} must be a whole number of milliseconds")
            timeout_s = min(int(value) / 1e3, timeout_s)
        return timeout_s

    def choose(self, model: str, version: str | None, head: RequestHead) -> LoadedDeployment:
        """Return the deployment that would answer a request; raises NotFoundError or ServiceUnavailableError."""
        snapshot = self.deployments.get_current()
        key = head.get(_USER_KEY)
        user = None if key is None else snapshot.router.hash_key(key)
        return self._choose(snapshot, InferenceRoute(model=model, version=version), head, user)

    def count_rejected(self, status: int) -> None:
        """Count a request that was rejected before it could reach a deployment."""
        self._unrouted[get_column(status)] += 1

    def run_batch(self, requests: Sequence[PendingRequest]) -> None:
        """Run requests of one deployment, on a thread."""
        started_at = time.perf_counter()
        for request in requests:
            request.queue_seconds = started_at - request.started_at
        due = [r for r in requests if not r.abandoned and started_at < r.deadline]
        results: list[tuple[PendingRequest, Result]] = [
            (r, DeadlineExceededError("the request was queued past its deadline")) for r in requests if r not in due
        ]
        runs: Sequence[tuple[float, int]] = ()
        try:
            if due:
                batch, runs = run_requests(due[0].loaded, due)
                results += zip(due, batch, strict=True)
                if len(requests) == 1:
                    due[0].service_seconds = time.perf_counter() - started_at
        except Exception:
            _log.exception("requests failed unexpectedly")
            results += [(r, responses.build_internal_error(r.loaded.header_lines)) for r in due]
        try:
            self._loop.call_soon_threadsafe(self._deliver, results, runs)
        except RuntimeError:  # the loop is closed: the drain was too short for these
            _log.warning("%d responses were too late to be sent", len(results))

    def _deliver(self, results: Sequence[tuple[PendingRequest, Result]], runs: Sequence[tuple[float, int]]) -> None:
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
                response = responses.build_error_from(result, request.loaded.header_lines, invocation=invocation)
            seconds = time.perf_counter() - request.started_at
            if request.abandoned:
                response = RawResponse(_CLIENT_GONE, b"", b"")
            self._finish(
                *(request.snapshot, loaded, request.route, request.head, request.body, request.user, response, seconds),
                *(request.service_seconds if request.comparable else 0.0, request.queue_seconds),
            )
            request.respond(response)

    def _finish(
        self,
        snapshot: TableSnapshot | None,
        loaded: LoadedDeployment | None,
        route: InferenceRoute,
        head: RequestHead,
        body: RequestBody,
        user: int | None,
        response: RawResponse,
        seconds: float,
        service_s: float,
        queue_s: float = 0.0,
    ) -> None:
        """Count a request whose response is ready, and mirror it. `service_s` is 0 if its latency is not comparable.

        It is counted before it is sent: what a client has seen is counted, even if this process is killed then.
        """
        status = response.status
        if loaded is None or snapshot is None:
            count_request(self._unrouted, status, seconds)
        else:
            if loaded.warm_up:
                loaded.warm_up -= 1
                service_s = 0.0
            if service_s == seconds:  # it ran inline
                count_request(loaded.row, status, seconds)
            else:
                count_queued_request(loaded.row, status, seconds, service_s)
            request_id = head.get(_REQUEST_ID)
            is_watching = self._users.is_watching
            if request_id is not None or is_watching:
                bucket = messages.KEYLESS_CELL if user is None else snapshot.router.get_bucket(user)
                if is_watching:
                    self._users.count_request(loaded.slot, bucket, status, service_s)
                if request_id is not None:
                    self.feedback.remember(request_id, loaded.slot, bucket)
            for shadow, percent in snapshot.shadow if status == 200 else ():
                if shadow is not loaded and self._draw() * 100 < percent:
                    tolerance = snapshot.table.state.split.shadow_tolerance
                    self._shadow.put(shadow, route, head, body, response, tolerance)
            if (trace_parent := head.get(_TRACE_PARENT)) is not None:
                self._exemplars.put(loaded.slot, trace_parent, seconds)
        if self._request_log is not None:
            self._request_log.put(route, head, loaded, status, queue_s, seconds)

    def _choose(
        self, snapshot: TableSnapshot, route: InferenceRoute, head: RequestHead, user: int | None
    ) -> LoadedDeployment:
        if route.model is not None and route.model != snapshot.model:
            raise snapshot.build_model_error(route.model)
        if route.version is not None:
            return snapshot.get_version(route.version)
        router = snapshot.router
        name = router.get_pinned(head)
        if name is None:
            name = router.route_draw(self._draw()) if user is None else router.route_user(user)
        return snapshot.deployments.get(name) or snapshot.get_deployment(name)


def run_requests(
    loaded: LoadedDeployment, requests: Sequence[PendingRequest]
) -> tuple[list[Result], list[tuple[float, int]]]:
    """Run requests, in batches where the model allows it.

    Return the result of each request, and of each run of the model its seconds and the number of its requests.
    """
    results: dict[int, Result] = {}
    decoded: dict[int, InferenceRequest] = {}
    runs: list[tuple[float, int]] = []

    def run_alone(member: InferenceRequest) -> RawResponse:
        started_at = time.perf_counter()
        response = loaded.answer(member)
        runs.append((time.perf_counter() - started_at, 1))
        return response

    for position, request in enumerate(requests):
        try:
            member = loaded.decode(request.route, request.head, request.body)
            if request.route.coding:  # the inflated bodies of a batch could fill the memory
                results[position] = run_alone(member)
            else:
                decoded[position] = member
        except OnnxOpsError as error:
            results[position] = error
    for group in group_requests(decoded, batchable=loaded.deployment.batchable):
        batch = [decoded[position] for position in group]
        together = _run_together(loaded, batch, runs) if len(batch) > 1 else None
        outputs: Sequence[tuple[Array, ...] | None] = [None] * len(batch) if together is None else together
        for position, member, arrays in zip(group, batch, outputs, strict=True):
            try:
                results[position] = run_alone(member) if arrays is None else loaded.encode(member, arrays)
            except OnnxOpsError as error:
                results[position] = error
    return [results[position] for position in range(len(requests))], runs


def group_requests(requests: Mapping[int, InferenceRequest], *, batchable: bool) -> list[list[int]]:
    """Group requests with the same outputs, types, and shapes except for axis 0."""
    if not batchable:
        return [[position] for position in requests]
    groups: list[list[int]] = []
    open_groups: dict[object, tuple[list[int], int]] = {}
    for position, request in requests.items():
        tensors = tuple(sorted((name, a.dtype.str, a.shape[1:]) for name, a in request.feed.items()))
        kind = (request.outputs, tensors) if request.rows else None
        group, rows = open_groups.get(kind, ([], 0))
        if not group or kind is None or rows + request.rows > MAX_BATCH_ROWS:
            group, rows = [], 0
            groups.append(group)
        group.append(position)
        open_groups[kind] = (group, rows + request.rows)
    return groups


def _run_together(
    loaded: LoadedDeployment, requests: Sequence[InferenceRequest], runs: list[tuple[float, int]]
) -> list[tuple[Array, ...]] | None:
    """Return outputs by request; None if the run fails or rows do not match."""
    feed = {name: np.concatenate([request.feed[name] for request in requests]) for name in requests[0].feed}
    started_at = time.perf_counter()
    try:
        arrays = loaded.run(requests[0].outputs, feed)
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
