"""Reconcile endpoints at an interval, and those of a queued model immediately.

A full pass reads the state again (aliases, ledgers, endpoints, time). A change whose webhook was
lost is therefore found by a later pass.
"""

from __future__ import annotations

import datetime
import logging
import queue
import threading
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from functools import partial

from onnx_ops.domain.endpoint import EndpointConfig
from onnx_ops.errors import ConflictError, OnnxOpsError
from onnx_ops.ports import Context
from onnx_ops.release.endpoint_calls import Backoff
from onnx_ops.release.reconcile import StepReport
from onnx_ops.release.reconcile_pass import ReconcilePass, RegistrySnapshot, read_registry

MAX_QUEUED = 1000
"""Maximum number of queued models; the next full pass includes all other models."""

_log = logging.getLogger(__name__)


class WatchEventKind(StrEnum):
    """Kinds of events of a watch, as `reconcile --watch --json` prints them."""

    WATCHING = "watching"
    STEP = "step"
    REFUSED = "refused"
    WAITING = "waiting"
    TROUBLE = "trouble"
    WOKEN = "woken"
    REGISTRY_DOWN = "registry-down"
    REGISTRY_BACK = "registry-back"
    LISTENING = "listening"
    WEBHOOK = "webhook"
    DELIVERY_REFUSED = "delivery-refused"
    NOTIFIED = "notified"
    NOT_NOTIFIED = "not-notified"
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchEvent:
    """One event of a watch.

    `at` is ISO 8601 in UTC. `endpoint` is empty if the event is not about an endpoint. `did` is the
    change that was made, such as the repair of a webhook, or the notifier of a notification. It is
    empty for other events. `why` is the reason, or a detail of the event, such as the models of
    `woken`.
    """

    at: str
    kind: WatchEventKind
    endpoint: str = ""
    did: str = ""
    why: str = ""


class ReconcileQueue:
    """Queue of models whose endpoints must be reconciled immediately.

    `add` can be called in any thread. `close` can also be called in a signal handler. A SimpleQueue
    allows a put while another put is in progress in the same thread.
    """

    def __init__(self) -> None:
        self._signals: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._models: set[str] = set()
        self._lock = threading.Lock()
        self._closed = False

    def add(self, model: str) -> None:
        """Queue a model.

        The call has no effect if the model or `MAX_QUEUED` models are already queued.
        """
        with self._lock:
            if model in self._models or len(self._models) >= MAX_QUEUED:
                return
            self._models.add(model)
        self._signals.put(True)

    def close(self) -> None:
        """Close the queue, which stops the loop before its next action."""
        self._closed = True
        self._signals.put(True)

    def is_closed(self) -> bool:
        """Return whether the queue is closed, so that the loop must stop."""
        return self._closed

    def wait(self, timeout_s: float) -> frozenset[str]:
        """Return the queued models, and wait for the first one if there are none.

        The wait ends after `timeout_s` seconds, or when the queue is closed.
        """
        try:
            self._signals.get(timeout=max(timeout_s, 0.0))
            while True:
                self._signals.get_nowait()
        except queue.Empty:
            pass
        with self._lock:
            models, self._models = frozenset(self._models), set()
        return models


class WatchLoop:
    """Loop that reconciles endpoints until the queue is closed.

    Args:
        models: queue of models to reconcile immediately. When the queue is closed, the loop ends.
        endpoints: names of endpoints; by default, all endpoints that are bound now or later.
        on_event: function that receives every event.
    """

    def __init__(
        self,
        context: Context,
        models: ReconcileQueue,
        *,
        interval_s: float,
        endpoints: tuple[str, ...] = (),
        actor: str = "",
        on_event: Callable[[WatchEvent], None],
    ) -> None:
        self._context = context
        self._queue = models
        self._interval_s = interval_s
        self._endpoints = endpoints
        self._actor = actor
        self._on_event = on_event
        self._registry_backoff = Backoff(interval_s)
        self._snapshot = RegistrySnapshot(aliases={})
        self._backoffs = defaultdict[str, Backoff](partial(Backoff, interval_s))
        self._last: dict[str, tuple[WatchEventKind, str]] = {}

    def run(self) -> None:
        """Run pass after pass until the queue is closed.

        An action in progress is completed first.
        """
        clock = self._context.clock
        due = clock.monotonic()
        while not self._queue.is_closed():
            if clock.monotonic() >= due:
                self.reconcile_all()
                due = clock.monotonic() + self._interval_s
            models = self._queue.wait(due - clock.monotonic())
            if models and not self._queue.is_closed():
                self.reconcile_models(models)

    def reconcile_all(self) -> None:
        """Run one pass over all endpoints.

        The registry is read at most once per pass to find due changes. While the registry is down,
        some passes do not read it.
        """
        names = self._list_endpoints()
        if names and self._registry_backoff.is_due():
            was_down, self._snapshot = bool(self._snapshot.down), read_registry(self._context)
            why = self._snapshot.down
            self._registry_backoff.record(failed=bool(why))
            if why and not was_down:
                self.emit("", WatchEventKind.REGISTRY_DOWN, why=why)
            elif was_down and not why:
                self.emit("", WatchEventKind.REGISTRY_BACK, why="the registry answers again")
        reconcile_pass = ReconcilePass(self._context, lambda: self._snapshot)
        for name in names:
            if self._queue.is_closed():
                return
            if (
                self._backoffs[name].is_due()
                and self._read_config(reconcile_pass, name) is not None
            ):
                self._reconcile(reconcile_pass, name)

    def reconcile_models(self, models: frozenset[str]) -> None:
        """Run one pass over the endpoints of some models.

        Models that no endpoint serves are ignored. If the registry does not answer, the endpoints
        wait for the next full pass.
        """
        reconcile_pass = ReconcilePass(self._context, lambda: self._snapshot)
        configs = {name: self._read_config(reconcile_pass, name) for name in self._list_endpoints()}
        woken = {
            name: config.model
            for name, config in configs.items()
            if config and config.model in models
        }
        if not woken:
            return
        self.emit("", WatchEventKind.WOKEN, why=", ".join(sorted(set(woken.values()))))
        snapshot = read_registry(self._context, frozenset(woken.values()))
        if snapshot.down:
            return
        reconcile_pass = ReconcilePass(self._context, lambda: snapshot)
        for name in woken:
            if self._queue.is_closed():
                return
            self._reconcile(reconcile_pass, name)

    def emit(self, endpoint: str, kind: WatchEventKind, *, did: str = "", why: str = "") -> None:
        """Report an event, unless it repeats the state that was reported last."""
        is_state = not did and bool(endpoint or kind is WatchEventKind.TROUBLE)
        if is_state and self._last.get(endpoint) == (kind, why):
            return
        self._last[endpoint] = (kind, why)
        at = datetime.datetime.fromtimestamp(self._context.clock.now(), tz=datetime.UTC).isoformat(
            timespec="seconds"
        )
        self._on_event(WatchEvent(at=at, kind=kind, endpoint=endpoint, did=did, why=why))

    def _list_endpoints(self) -> tuple[str, ...]:
        try:
            return self._endpoints or tuple(
                name for name in self._context.ledger.endpoints() if "@" not in name
            )
        except Exception as error:  # The storage of a ledger can raise any exception.
            self.emit("", WatchEventKind.TROUBLE, why=f"the ledger could not be listed: {error}")
            return ()

    def _read_config(self, reconcile_pass: ReconcilePass, name: str) -> EndpointConfig | None:
        try:
            return reconcile_pass.state(name).config
        except Exception as error:  # The storage of a ledger can raise any exception.
            self._fail(name, str(error))
            return None

    def _reconcile(self, reconcile_pass: ReconcilePass, name: str) -> None:
        def emit_step(report: StepReport) -> None:
            kind = WatchEventKind.STEP if report.did else WatchEventKind.WAITING
            kind = WatchEventKind.REFUSED if report.refused else kind
            self.emit(name, kind, did=report.did, why=report.why)

        try:
            reports = reconcile_pass.reconcile(
                name, actor=self._actor, on_step=emit_step, is_stopped=self._queue.is_closed
            )
        except ConflictError as error:
            self.emit(
                name, WatchEventKind.WAITING, why=f"another process acted meanwhile: {error.what}"
            )
        except OnnxOpsError as error:
            self._fail(name, str(error))
        except Exception as error:
            # A defect that affects one endpoint must not stop the watch of the other endpoints.
            _log.exception("endpoint %s", name)
            self._fail(name, f"unexpected: {type(error).__name__}: {error}")
        else:
            is_unstable = not reports[-1].stable and not self._queue.is_closed()
            if is_unstable:
                why = "the endpoint does not become stable; another process may revert each change"
                self.emit(name, WatchEventKind.TROUBLE, why=why)
            self._backoffs[name].record(
                failed=is_unstable or any(report.refused for report in reports)
            )

    def _fail(self, name: str, why: str) -> None:
        self._backoffs[name].record(failed=True)
        self.emit(name, WatchEventKind.TROUBLE, why=why)
