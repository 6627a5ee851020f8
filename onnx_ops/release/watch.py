"""Wakes a loop that waits: for some models, or to end it.

Reconciles all endpoints again and again: every so often, and at once where somebody rings.

Every pass looks at everything anew (aliases, ledgers, endpoints, time), so nothing is lost with a ring that is.
"""

from __future__ import annotations

import datetime
import logging
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from onnx_ops.domain.endpoint import EndpointConfig
from onnx_ops.errors import ConflictError, OnnxOpsError
from onnx_ops.ports import Ports
from onnx_ops.release.reconcile import DryRun, RegistrySnapshot, StepReport, read_registry
from onnx_ops.release.retry import Backoff

_MOST = 1000
"""Models that can be waiting to be looked at; a bell rung for more is answered by the next pass over everything."""


class ReconcileQueue:
    """`wake` may be called in any thread, `stop` also in a signal handler: a SimpleQueue can be put to within a put."""

    def __init__(self) -> None:
        self._rung: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._models: set[str] = set()
        self._lock = threading.Lock()
        self._stopped = False

    def wake(self, model: str) -> None:
        """Have the endpoints of a model looked at soon; ringing again before that changes nothing."""
        with self._lock:
            if model in self._models or len(self._models) >= _MOST:
                return
            self._models.add(model)
        self._rung.put(True)

    def stop(self) -> None:
        """End the loop before its next effect."""
        self._stopped = True
        self._rung.put(True)

    def stopped(self) -> bool:
        return self._stopped

    def wait(self, seconds: float) -> frozenset[str]:
        """Wait until the bell is rung, at most for some seconds; the models that it was rung for."""
        try:
            self._rung.get(timeout=max(seconds, 0.0))
            while True:
                self._rung.get_nowait()
        except queue.Empty:
            pass
        with self._lock:
            models, self._models = frozenset(self._models), set()
        return models


_log = logging.getLogger(__name__)


class WatchEventKind(StrEnum):
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
    """One line of a watch. `at` is ISO 8601 in UTC; `endpoint` is empty where the report is about none."""

    at: str
    kind: WatchEventKind
    endpoint: str = ""
    did: str = ""
    why: str = ""


class WatchLoop:
    """Moves endpoints toward what the registry wants until its bell stops it.

    Args:
        ports: the outside world.
        bell: wakes and ends the loop.
        every: seconds between passes over everything.
        endpoints: names; all that are bound, now or later, by default.
        actor: who is answerable.
        told: gets a report of everything that happens and of every change of what is waited for.
    """

    def __init__(
        self,
        ports: Ports,
        bell: ReconcileQueue,
        *,
        every: float,
        endpoints: tuple[str, ...] = (),
        actor: str = "",
        told: Callable[[WatchEvent], None],
    ) -> None:
        self._ports = ports
        self._bell = bell
        self._every = every
        self._endpoints = endpoints
        self._actor = actor
        self._told = told
        self._registry = Backoff(every)
        self._seen = RegistrySnapshot(aliases={})
        self._patience: dict[str, Backoff] = {}
        self._last: dict[str, tuple[WatchEventKind, str]] = {}

    def run(self) -> None:
        """Pass after pass until the bell stops it; an effect that has begun is finished first."""
        clock = self._ports.clock
        due = clock.monotonic()
        while not self._bell.stopped():
            if clock.monotonic() >= due:
                self.look_at_all()
                due = clock.monotonic() + self._every
            models = self._bell.wait(due - clock.monotonic())
            if models and not self._bell.stopped():
                self.look_at(models)

    def look_at_all(self) -> None:
        """One pass over all endpoints. The registry is asked once; while it is down, not in every pass."""
        names = self._names()
        if names and self._registry.due():
            self._hear(read_registry(self._ports))
        glance = DryRun(self._ports, lambda: self._seen)
        for name in names:
            if self._bell.stopped():
                return
            if self._patience_with(name).due() and self._config(glance, name) is not None:
                self._settle(glance, name)

    def look_at(self, models: frozenset[str]) -> None:
        """One pass over the endpoints of some models. Names that no endpoint is bound to cost nothing."""
        bound = DryRun(self._ports, lambda: self._seen)
        configs = {name: self._config(bound, name) for name in self._names()}
        woken = {name: config.model for name, config in configs.items() if config and config.model in models}
        if not woken:
            return
        self.tell("", WatchEventKind.WOKEN, why=", ".join(sorted(set(woken.values()))))
        seen = read_registry(self._ports, frozenset(woken.values()))
        if seen.down:
            return
        glance = DryRun(self._ports, lambda: seen)
        for name in woken:
            if self._bell.stopped():
                return
            self._settle(glance, name)

    def _names(self) -> tuple[str, ...]:
        try:
            return self._endpoints or tuple(name for name in self._ports.ledger.endpoints() if "@" not in name)
        except Exception as error:  # of whatever kind the ledger's storage raises
            self.tell("", WatchEventKind.TROUBLE, why=f"the ledger cannot be listed: {error}")
            return ()

    def _config(self, glance: DryRun, name: str) -> EndpointConfig | None:
        try:
            return glance.state(name).config
        except Exception as error:  # of whatever kind the ledger's storage raises
            self._fail(name, str(error))
            return None

    def _hear(self, seen: RegistrySnapshot) -> None:
        was_down, self._seen = bool(self._seen.down), seen
        if seen.down:
            self._registry.failed()
            if not was_down:
                self.tell("", WatchEventKind.REGISTRY_DOWN, why=seen.down)
            return
        self._registry.succeeded()
        if was_down:
            self.tell("", WatchEventKind.REGISTRY_BACK, why="the registry answers again")

    def _settle(self, glance: DryRun, name: str) -> None:
        try:
            reports = glance.settle(
                name, actor=self._actor, told=lambda report: self._step(name, report), stopped=self._bell.stopped
            )
        except ConflictError as error:
            self.tell(name, WatchEventKind.WAITING, why=f"somebody else acted meanwhile: {error.what}")
        except OnnxOpsError as error:
            self._fail(name, str(error))
        except Exception as error:
            # One endpoint's bug must not be the end of all others' watch; its traceback goes to the log.
            _log.exception("endpoint %s", name)
            self._fail(name, f"unexpected: {type(error).__name__}: {error}")
        else:
            undone = not reports[-1].settled and not self._bell.stopped()
            if undone:
                self.tell(name, WatchEventKind.TROUBLE, why="does not come to rest: somebody undoes what is done here")
            if undone or any(report.refused for report in reports):
                self._patience_with(name).failed()
            else:
                self._patience_with(name).succeeded()

    def _step(self, name: str, report: StepReport) -> None:
        if report.refused:
            self.tell(name, WatchEventKind.REFUSED, did=report.did, why=report.why)
        else:
            self.tell(
                name, WatchEventKind.STEP if report.did else WatchEventKind.WAITING, did=report.did, why=report.why
            )

    def _fail(self, name: str, why: str) -> None:
        self._patience_with(name).failed()
        self.tell(name, WatchEventKind.TROUBLE, why=why)

    def _patience_with(self, name: str) -> Backoff:
        return self._patience.setdefault(name, Backoff(self._every))

    def tell(self, endpoint: str, kind: WatchEventKind, *, did: str = "", why: str = "") -> None:
        """Everything that was done is told; what is only so is told when it becomes so."""
        if not did and (endpoint or kind is WatchEventKind.TROUBLE) and self._last.get(endpoint) == (kind, why):
            return
        self._last[endpoint] = (kind, why)
        at = datetime.datetime.fromtimestamp(self._ports.clock.now(), tz=datetime.UTC)
        report = WatchEvent(at=at.isoformat(timespec="seconds"), kind=kind, endpoint=endpoint, did=did, why=why)
        self._told(report)
