"""Send the pending notifications of the ledger.

Pending notifications include those that another process failed to send. Each of them is sent at
least once, because it is recorded as sent only afterwards.
"""

from __future__ import annotations

import logging
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from onnx_ops.domain.ledger import NotificationSent
from onnx_ops.domain.notification import (
    REPEAT_INTERVAL_S,
    Notification,
    build_test_notification,
    list_pending_notifications,
)
from onnx_ops.errors import ConflictError, CorruptStateError, OnnxOpsError
from onnx_ops.ports import Context, Notifier
from onnx_ops.release.endpoint_calls import Backoff
from onnx_ops.release.journal import Journal

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeliveryResult:
    """The notifications that one notifier sent about one endpoint.

    `error` is the reason why the notifier stopped; it is empty if all notifications were sent.
    `notifier` is empty if the error is not that of one notifier, such as a damaged ledger.
    """

    endpoint: str
    notifier: str
    sent: tuple[Notification, ...] = ()
    error: str = ""


def send_pending(
    context: Context, endpoint: str, *, accepts: Callable[[str], bool] = lambda _: True
) -> tuple[DeliveryResult, ...]:
    """Send pending notifications about an endpoint through the accepted notifiers.

    A notifier that is new to the endpoint sends notifications that are at most an hour old. A
    notifier that fails continues at the same notification in the next call. The other notifiers
    still send.

    Args:
        accepts: function that returns whether to use the notifier of a given name.

    Raises:
        CorruptStateError: the ledger is damaged.
        ServiceUnavailableError: the ledger does not answer.
    """
    return tuple(
        _send_through(context, endpoint, name, notifier)
        for name, notifier in context.notifiers().items()
        if accepts(name)
    )


def send_pending_each(context: Context, endpoints: Sequence[str]) -> tuple[DeliveryResult, ...]:
    """Call `send_pending` for several endpoints after traffic has moved.

    The function raises no exception. Notifications that were not sent remain pending.
    """
    results: list[DeliveryResult] = []
    for name in endpoints:
        try:
            results += send_pending(context, name)
        except Exception as error:
            # An error of the ledger or of a notifier must not fail the change of traffic.
            results.append(DeliveryResult(endpoint=name, notifier="", error=str(error)))
    return tuple(results)


def send_test_message(context: Context) -> tuple[DeliveryResult, ...]:
    """Send a test notification through every notifier."""
    return send_now(
        context,
        build_test_notification("onnx-ops", at=context.clock.now(), actor=context.host.actor()),
    )


def send_now(context: Context, notification: Notification) -> tuple[DeliveryResult, ...]:
    """Send a notification, which no ledger records, through every notifier.

    Each notifier tries once.
    """
    linked = _add_link(context, notification)
    return tuple(_send(linked, name, notifier) for name, notifier in context.notifiers().items())


class NotificationLoop:
    """Loop that sends pending notifications, separately from changes of traffic.

    Args:
        on_result: function that receives the sent notifications, and each error when it first
            occurs.
    """

    def __init__(
        self,
        context: Context,
        *,
        interval_s: float,
        endpoints: Callable[[], Sequence[str]],
        on_result: Callable[[DeliveryResult], None],
    ) -> None:
        self._context = context
        self._interval_s = interval_s
        self._endpoints = endpoints
        self._on_result = on_result
        self._backoffs = defaultdict[str, Backoff](partial(Backoff, interval_s))
        self._errors: dict[tuple[str, str], str] = {}
        """Last errors by endpoint (of damaged ledgers) or by notifier; one name is empty."""

    def run(self, stopped: threading.Event) -> None:
        """Run passes until `stopped` is set, then one more pass for the last changes."""
        while True:
            is_last = stopped.is_set()
            try:
                self.send_all()
            except Exception:  # An unexpected error must not stop all later notifications.
                _log.exception("notifications")
            if is_last:
                return
            stopped.wait(self._interval_s)

    def send_all(self) -> None:
        """Run one pass over all endpoints.

        After several successive failures, a notifier is not used for some passes, at most for a
        minute.
        """
        ready = {name for name in self._context.notifiers() if self._backoffs[name].is_due()}
        failed: set[str] = set()
        for endpoint in self._endpoints() if ready else ():
            try:
                results = send_pending(
                    self._context, endpoint, accepts=(ready - failed).__contains__
                )
            # A damaged ledger must not stop the notifications of other endpoints.
            except CorruptStateError as error:
                results = (DeliveryResult(endpoint=endpoint, notifier="", error=str(error)),)
            else:
                self._errors.pop((endpoint, ""), None)
            for result in results:
                source = ("", result.notifier) if result.notifier else (endpoint, "")
                if result.sent or (result.error and self._errors.get(source) != result.error):
                    self._on_result(result)
                if result.error:
                    self._errors[source] = result.error
                    failed.add(result.notifier)
        for name in ready:
            self._backoffs[name].record(failed=name in failed)
            if name not in failed:
                self._errors.pop(("", name), None)


def _send_through(context: Context, endpoint: str, name: str, notifier: Notifier) -> DeliveryResult:
    entries = context.ledger.read(endpoint)
    if not entries:
        return DeliveryResult(endpoint=endpoint, notifier=name)
    sent: list[Notification] = []
    try:
        # The start position depends on the present time, so only the first pass computes it. Later
        # passes would skip notifications that were not sent while a notifier failed.
        positions = [
            e.body.of
            for e in entries
            if isinstance(e.body, NotificationSent) and e.body.notifier == name
        ]
        if not positions:
            oldest = context.clock.now() - REPEAT_INTERVAL_S
            positions = [max((entry.sequence for entry in entries if entry.at < oldest), default=0)]
            _record_position(context, endpoint, name, positions[-1])
        for notification in list_pending_notifications(
            endpoint, entries, after=positions[-1], progress=notifier.wants_steps
        ):
            result = _send(_add_link(context, notification), name, notifier)
            if result.error:
                return replace(result, sent=tuple(sent))
            sent += result.sent
            _record_position(context, endpoint, name, notification.sequence)
    except ConflictError as error:
        return DeliveryResult(endpoint=endpoint, notifier=name, sent=tuple(sent), error=str(error))
    return DeliveryResult(endpoint=endpoint, notifier=name, sent=tuple(sent))


def _record_position(context: Context, endpoint: str, notifier: str, sequence: int) -> None:
    def record(journal: Journal) -> None:
        if journal.state.notified.get(notifier, -1) < sequence:
            journal.append(NotificationSent(notifier=notifier, of=sequence))

    Journal.update(context, endpoint, record)


def _send(notification: Notification, name: str, notifier: Notifier) -> DeliveryResult:
    try:
        notifier.send(notification)
    except OnnxOpsError as error:
        return DeliveryResult(endpoint=notification.endpoint, notifier=name, error=str(error))
    return DeliveryResult(endpoint=notification.endpoint, notifier=name, sent=(notification,))


def _add_link(context: Context, notification: Notification) -> Notification:
    """Return the notification with the web address of its model, if there is one.

    The notification is unchanged if the registry does not answer.
    """
    try:
        address = context.registry().where(notification.model) if notification.model else ""
    except OnnxOpsError:
        address = ""
    return (
        replace(notification, link=address)
        if address.startswith(("http://", "https://"))
        else notification
    )
