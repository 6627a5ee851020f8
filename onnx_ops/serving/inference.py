"""From a request to its answer, whichever way it came in: choose, admit, run, count."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from onnx_ops.errors import NotFoundError, OnnxOpsError, UserError
from onnx_ops.protocol import messages
from onnx_ops.serving import answers
from onnx_ops.serving.access_log import AccessLog
from onnx_ops.serving.answers import Answer, Head
from onnx_ops.serving.batches import Item, Outcome, run_items
from onnx_ops.serving.http import DeadlinePassed
from onnx_ops.serving.outcomes import Outcomes
from onnx_ops.serving.resident import Resident
from onnx_ops.serving.residents import Residents, Route, Snapshot
from onnx_ops.serving.shadow import Shadow
from onnx_ops.serving.shared import BATCHED, RUN_NANOSECONDS, RUNS, Row, column_of, observe, observe_else
from onnx_ops.serving.user_counts import UserCounts

_log = logging.getLogger(__name__)

_USER_KEY = messages.USER_KEY_HEADER.encode()
_TIMEOUT = messages.TIMEOUT_HEADER.encode()
_REQUEST_ID = messages.REQUEST_ID_HEADER.encode()
_GONE = 499

Respond = Callable[[Answer], None]


@dataclass(slots=True, eq=False)
class Request:
    """An inference request that has come whole. Set `abandoned` when nobody waits for its answer any more.

    `began` and `deadline` are on the clock of `time.perf_counter`, in seconds; one without a deadline did not have to
    wait. `waited` are seconds in a queue. `served` are those of its turn if it had one for itself. `telling` is whether
    how long it took may be held against other deployments (see `residents.Pair`).
    """

    route: Route
    head: Head
    body: bytes
    respond: Respond
    began: float
    snapshot: Snapshot | None = None
    resident: Resident | None = None
    deadline: float = 0.0
    waited: float = 0.0
    served: float = 0.0
    telling: bool = True
    abandoned: bool = False

    @property
    def lines(self) -> bytes:
        """Header lines that name the deployment, once it is chosen."""
        return b"" if self.resident is None else self.resident.lines


class Inference:
    """Answers inference requests. All its methods but `work` belong to the event loop on which it is made.

    Args:
        residents: what is served.
        nowhere: the counts of requests that reach no deployment.
        deadline_s: how long a request may wait for its model.
        shadow: where copies of requests go.
        outcomes: remembers who answered which request id.
        users: counts by user.
        access_log: gets one record a request.
    """

    def __init__(
        self,
        residents: Residents,
        nowhere: Row,
        *,
        deadline_s: float,
        shadow: Shadow,
        outcomes: Outcomes,
        users: UserCounts,
        access_log: AccessLog | None = None,
    ) -> None:
        self.residents = residents
        self._nowhere = nowhere
        self._deadline_s = deadline_s
        self._shadow = shadow
        self._outcomes = outcomes
        self._users = users
        self._access_log = access_log
        self._draw = random.Random().random  # noqa: S311 (traffic is split, nothing is kept secret)
        self._loop = asyncio.get_running_loop()

    def call(self, request: Request) -> Answer | None:
        """The answer to a request; None if it has to wait in a lane, whose answer `request.respond` will get.

        The deployment is chosen only here: a request never waits on a table that was replaced while it came in.
        """
        try:
            request.snapshot = snapshot = self.residents.current()
            request.resident = resident = self._choose(snapshot, request.route, request.head)
            if (pair := snapshot.pair) is not None and resident is pair.resident:
                request.telling = self._draw() < pair.share
                if request.telling:
                    request.resident = resident = pair.twin
            if not resident.at_once(self.residents.leader, request.head, request.body):
                request.deadline = request.began + _patience_s(request.head, self._deadline_s)
                resident.lane.put(request)
                return None
            answer = resident.answer(resident.read(request.route.invocation, request.head, request.body))
            resident.row[RUNS] += 1
        except OnnxOpsError as error:
            answer = answers.of_error(error, request.lines, invocation=request.route.invocation)
        except Exception:
            _log.exception("a request failed in a way that nobody foresaw")
            answer = answers.of_crash(request.lines)
        self._finish(request, answer)
        return answer

    def choose(self, model: str, version: str | None, head: Head) -> Resident:
        """The deployment that a request about a model goes to.

        Raises:
            NotFoundError: there is no such model, version or deployment.
            ServiceUnavailableError: nothing is published, or the deployment is not loaded.
        """
        return self._choose(self.residents.current(), Route(model=model, version=version), head)

    def count(self, status: int) -> None:
        """Count a request that was refused before it could reach a deployment."""
        self._nowhere[column_of(status)] += 1

    def work(self, requests: Sequence[Request]) -> None:
        """Run requests of one deployment; called on a thread."""
        began = time.perf_counter()
        for request in requests:
            request.waited = began - request.began
        due = [r for r in requests if not r.abandoned and began < r.deadline]
        outcomes: list[tuple[Request, Answer | OnnxOpsError]] = [
            (r, DeadlinePassed("the request waited too long for its model")) for r in requests if r not in due
        ]
        runs: Sequence[tuple[float, int]] = ()
        try:
            if due and (resident := due[0].resident) is not None:
                items = [Item(r.route.invocation, r.head, r.body) for r in due]
                found, runs = run_items(resident, items)
                outcomes += zip(due, found, strict=True)
                if len(requests) == 1:
                    due[0].served = time.perf_counter() - began
        except Exception:
            _log.exception("requests failed in a way that nobody foresaw")
            outcomes += [(r, answers.of_crash(r.lines)) for r in due]
        try:
            self._loop.call_soon_threadsafe(self._deliver, outcomes, runs)
        except RuntimeError:  # the loop is closed: the drain was too short for these
            _log.warning("%d answers came too late to be sent", len(outcomes))

    def _deliver(self, outcomes: Sequence[tuple[Request, Outcome]], runs: Sequence[tuple[float, int]]) -> None:
        resident = outcomes[0][0].resident
        if resident is not None:
            for seconds, calls in runs:
                resident.row[RUNS] += 1
                resident.row[RUN_NANOSECONDS] += int(seconds * 1e9)
                resident.row[BATCHED] += calls if calls > 1 else 0
        for request, outcome in outcomes:
            if isinstance(outcome, Answer):
                answer = outcome
            else:
                answer = answers.of_error(outcome, request.lines, invocation=request.route.invocation)
            self._finish(request, answer)
            request.respond(answer)

    def _finish(self, request: Request, answer: Answer) -> None:
        """Count a request whose answer is ready, and copy it to whoever shadows.

        What a client has seen is counted, even if this process is killed at that very moment.
        """
        resident, snapshot = request.resident, request.snapshot
        seconds = time.perf_counter() - request.began
        status = _GONE if request.abandoned else answer.status
        if resident is None or snapshot is None:
            observe(self._nowhere, status, seconds)
        else:
            telling = request.telling
            if resident.untimed:
                resident.untimed -= 1
                telling = False
            at_once = telling and not request.deadline
            served = seconds if at_once else request.served if telling else 0.0
            if at_once:
                observe(resident.row, status, seconds)
            else:
                observe_else(resident.row, status, seconds, served)
            name = request.head.get(_REQUEST_ID)
            if name is not None or self._users.watching:
                bucket = snapshot.router.bucket(request.head.get(_USER_KEY))
                self._users.observe(resident.slot, bucket, status, served)
                if name is not None:
                    self._outcomes.remember(name, resident.slot, bucket)
            if snapshot.shadow and status == 200:
                self._mirror(request, resident, snapshot, answer)
        if self._access_log is not None:
            who = "" if resident is None else resident.deployment.name
            self._access_log.put(request.head, request.route, who, status, request.waited, seconds)

    def _mirror(self, request: Request, resident: Resident, snapshot: Snapshot, answer: Answer) -> None:
        for mirror, percent in snapshot.shadow:
            if mirror is not resident and self._draw() * 100 < percent:
                item = Item(request.route.invocation, request.head, request.body)
                self._shadow.put(mirror, item, answer, snapshot.table.state.split.shadow_tolerance)

    def _choose(self, snapshot: Snapshot, route: Route, head: Head) -> Resident:
        if route.model is not None and route.model != snapshot.model:
            raise NotFoundError(f"no model is called {route.model!r}; this endpoint serves {snapshot.model!r}")
        if route.version is not None:
            return snapshot.version(route.version)
        router = snapshot.router
        name = router.pinned(head)
        if name is None:
            key = head.get(_USER_KEY)
            name = router.by_chance(self._draw()) if key is None else router.by_key(key)
        return snapshot.residents.get(name) or snapshot.loaded(name)


def _patience_s(head: Head, default_s: float) -> float:
    """Seconds that a request wants to wait; never longer than the server lets it."""
    wanted = head.get(_TIMEOUT)
    if wanted is None:
        return default_s
    if not wanted.isdigit() or len(wanted) > 9:
        raise UserError(f"{messages.TIMEOUT_HEADER} must be a whole number of milliseconds")
    return min(int(wanted) / 1e3, default_s)
