"""Tells people what the ledger calls for: what was not told before a kill is told by whoever looks next.

A notification goes out at least once: it is sent first, and written down as sent afterwards.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from onnx_ops.domain.ledger import LedgerEntry, NotificationSent
from onnx_ops.domain.notification import (
    REPEAT_INTERVAL_S,
    Notification,
    build_test_notification,
    list_pending_notifications,
)
from onnx_ops.errors import ConflictError, CorruptStateError, OnnxOpsError
from onnx_ops.ports import Notifier, Ports, StepNotifier
from onnx_ops.release.journal import Journal
from onnx_ops.release.retry import Backoff

ATTEMPTS = 20
"""Times to get the next ledger entry from drivers that are writing too."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeliveryResult:
    """What one notifier was given about one endpoint; `trouble` is why it took no more."""

    endpoint: str
    notifier: str
    sent: tuple[Notification, ...] = ()
    trouble: str = ""


def send_pending(
    ports: Ports, endpoint: str, *, through: Callable[[str], bool] = lambda _: True
) -> tuple[DeliveryResult, ...]:
    """Send what is due about an endpoint through every notifier, or those that `through` lets pass.

    A notifier that is new to the endpoint is told what is at most an hour old. One that fails keeps its place and is no
    hindrance to the others.

    Raises:
        CorruptStateError: the ledger cannot be read.
    """
    chosen = {name: notifier for name, notifier in ports.notifiers().items() if through(name)}
    return tuple(_tell(ports, endpoint, name, notifier) for name, notifier in chosen.items())


def send_pending_each(ports: Ports, endpoints: Sequence[str]) -> tuple[DeliveryResult, ...]:
    """Call `send_pending` for several endpoints after traffic has moved. Raises nothing; failures are due later."""
    found: list[DeliveryResult] = []
    for name in endpoints:
        try:
            found += send_pending(ports, name)
        except Exception as error:  # of whatever kind the ledger's storage or a notifier raises
            found.append(DeliveryResult(endpoint=name, notifier="", trouble=str(error)))
    return tuple(found)


def send_test_message(ports: Ports) -> tuple[DeliveryResult, ...]:
    """Send a message that says that it is a test."""
    return send_now(ports, build_test_notification("onnx-ops", at=ports.clock.now(), actor=ports.host.actor()))


def send_now(ports: Ports, notice: Notification) -> tuple[DeliveryResult, ...]:
    """Send what no ledger tells, once, through every notifier; one that fails is not tried again."""
    linked = _linked(ports, notice)
    return tuple(_try(linked, name, notifier) for name, notifier in ports.notifiers().items())


class NotificationLoop:
    """Sends what is due, pass after pass, beside whoever moves traffic and never in their way.

    Args:
        ports: the outside world.
        every: seconds between passes.
        endpoints: names of the endpoints to look at, asked for in every pass.
        told: gets what was sent, and each trouble when it begins.
    """

    def __init__(
        self,
        ports: Ports,
        *,
        every: float,
        endpoints: Callable[[], Sequence[str]],
        told: Callable[[DeliveryResult], None],
    ) -> None:
        self._ports = ports
        self._every = every
        self._endpoints = endpoints
        self._told = told
        self._patience: dict[str, Backoff] = {}
        self._troubles: dict[str, str] = {}

    def run(self, stopped: threading.Event) -> None:
        """Until it is stopped; then once more, for what was done last."""
        while True:
            last = stopped.is_set()
            try:
                self.look()
            except Exception:  # a bug here must not end the messages of all endpoints
                _log.exception("notifications")
            if last:
                return
            stopped.wait(self._every)

    def look(self) -> None:
        """One pass over all endpoints. A notifier that failed is left out of some passes, at most a minute's."""
        ready = {name for name in self._ports.notifiers() if self._of(name).due()}
        failed: set[str] = set()
        for endpoint in self._endpoints() if ready else ():
            for told in self._tell(endpoint, ready - failed):
                if told.trouble and told.notifier:
                    failed.add(told.notifier)
                self._report(told)
        for name in ready:
            if name in failed:
                self._of(name).failed()
            else:
                self._of(name).succeeded()
                self._troubles.pop(name, None)

    def _tell(self, endpoint: str, ready: set[str]) -> tuple[DeliveryResult, ...]:
        try:
            return send_pending(self._ports, endpoint, through=ready.__contains__)
        except CorruptStateError as error:  # a damaged ledger, of which the others' people need not suffer
            return (DeliveryResult(endpoint=endpoint, notifier="", trouble=str(error)),)

    def _report(self, told: DeliveryResult) -> None:
        source = told.notifier or told.endpoint
        known = self._troubles.get(source) == told.trouble
        if told.sent or (told.trouble and not known):
            self._told(told)
        if told.trouble:
            self._troubles[source] = told.trouble

    def _of(self, notifier: str) -> Backoff:
        return self._patience.setdefault(notifier, Backoff(self._every))


def _tell(ports: Ports, endpoint: str, name: str, notifier: Notifier) -> DeliveryResult:
    entries = ports.ledger.read(endpoint)
    if not entries:
        return DeliveryResult(endpoint=endpoint, notifier=name)
    sent: list[Notification] = []
    try:
        after = _told_up_to(ports, endpoint, name, entries)
        steps = isinstance(notifier, StepNotifier) and notifier.follows
        for notice in list_pending_notifications(endpoint, entries, after=after, progress=steps):
            done = _try(_linked(ports, notice), name, notifier)
            if done.trouble:
                return replace(done, sent=tuple(sent))
            sent += done.sent
            _mark(ports, endpoint, name, notice.sequence)
    except ConflictError as error:
        return DeliveryResult(endpoint=endpoint, notifier=name, sent=tuple(sent), trouble=str(error))
    return DeliveryResult(endpoint=endpoint, notifier=name, sent=tuple(sent))


def _told_up_to(ports: Ports, endpoint: str, notifier: str, entries: Sequence[LedgerEntry]) -> int:
    """Where this notifier goes on. Its first look fixes that: what is due does not grow old while it is down."""
    marks = [e.body.of for e in entries if isinstance(e.body, NotificationSent) and e.body.notifier == notifier]
    if marks:
        return marks[-1]
    old = ports.clock.now() - REPEAT_INTERVAL_S
    after = max((entry.sequence for entry in entries if entry.at < old), default=0)
    _mark(ports, endpoint, notifier, after)
    return after


def _mark(ports: Ports, endpoint: str, notifier: str, sequence: int) -> None:
    """Raises ConflictError if others never let us write."""
    for _ in range(ATTEMPTS):
        journal = Journal.open(ports, endpoint)
        if journal.state.notified.get(notifier, -1) >= sequence:
            return
        try:
            journal.append(NotificationSent(notifier=notifier, of=sequence))
        except ConflictError:
            continue
        return
    raise ConflictError("the ledger is written without a pause", where=endpoint)


def _try(notice: Notification, name: str, notifier: Notifier) -> DeliveryResult:
    try:
        notifier.send(notice)
    except OnnxOpsError as error:
        return DeliveryResult(endpoint=notice.endpoint, notifier=name, trouble=str(error))
    return DeliveryResult(endpoint=notice.endpoint, notifier=name, sent=(notice,))


def _linked(ports: Ports, notice: Notification) -> Notification:
    """With the address of the model's page, where the registry has pages. A message never waits for the registry."""
    try:
        where = ports.registry().where(notice.model) if notice.model else ""
    except OnnxOpsError:
        where = ""
    return replace(notice, link=where) if where.startswith(("http://", "https://")) else notice
