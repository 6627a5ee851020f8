"""The loop of `reconcile --watch` with its signals, webhook receiver and output."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
from collections.abc import Iterator
from functools import partial
from types import FrameType

from onnx_ops import codec
from onnx_ops.app.context import Project
from onnx_ops.cli.common import parse_duration, print_line
from onnx_ops.errors import OnnxOpsError, UserError
from onnx_ops.plugins import require
from onnx_ops.release.journal import Journal, list_bound_endpoints
from onnx_ops.release.notify import DeliveryResult, NotificationLoop
from onnx_ops.release.status import render_pending_metrics
from onnx_ops.release.watch import ReconcileQueue, WatchEvent, WatchEventKind, WatchLoop

_LAST_WORDS_S = 15.0
"""Maximum time in seconds to send the last notifications when the watch ends.

The next watch sends the remaining notifications.
"""


def keep_watching(
    project: Project,
    endpoints: tuple[str, ...],
    *,
    interval: str,
    listen: str | None,
    actor: str,
    as_json: bool,
) -> None:
    """Reconcile endpoints repeatedly until SIGTERM or SIGINT."""
    project.context.registry()
    if listen is not None:
        require("starlette", "uvicorn", where="--listen")
    for name in endpoints:
        Journal.open(project.context, name).config  # noqa: B018 (raises NotFoundError)
    seconds = parse_duration(interval, "--interval")
    if not 0.1 <= seconds <= 86_400:
        remedy = "Write a duration from 100 ms to 24 h."
        what = f"the interval {interval} is out of range"
        raise UserError(what, where="--interval", remedy=remedy)
    wakeups = ReconcileQueue()
    watcher = WatchLoop(
        project.context,
        wakeups,
        interval_s=seconds,
        endpoints=endpoints,
        actor=actor,
        on_event=_print_line if as_json else _print_text,
    )
    with (
        _stopped_by_signals(wakeups),
        _notify(project, watcher, endpoints, seconds),
        _listening(project, watcher, wakeups, listen),
    ):
        watched = ", ".join(endpoints) or "every endpoint, including later ones"
        watcher.emit(
            "",
            WatchEventKind.WATCHING,
            why=f"{watched}; once every {seconds:g} s, until SIGTERM or Ctrl-C",
        )
        watcher.reconcile_all()
        if listen is not None and not wakeups.is_closed():
            _repair_webhook(project, watcher)
        watcher.run()
    watcher.emit("", WatchEventKind.STOPPED, why="no step was interrupted; restart to continue")


@contextlib.contextmanager
def _stopped_by_signals(wakeups: ReconcileQueue) -> Iterator[None]:
    """End the loop at the first signal, after the step in progress.

    A second signal ends the process immediately.
    """
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}

    def stop(number: int, frame: FrameType | None) -> None:
        for name, handler in before.items():
            signal.signal(name, handler)
        wakeups.close()

    for number in before:
        signal.signal(number, stop)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _notify(
    project: Project, watcher: WatchLoop, endpoints: tuple[str, ...], every: float
) -> Iterator[None]:
    """Send notifications from a separate thread.

    A silent chat service therefore delays no rollout.
    """
    context = project.context
    if not context.notifiers():
        yield
        return

    def emit_delivery(delivery: DeliveryResult) -> None:
        for notice in delivery.sent:
            watcher.emit("", WatchEventKind.NOTIFIED, did=delivery.notifier, why=notice.title)
        if delivery.error:
            watcher.emit("", WatchEventKind.NOT_NOTIFIED, did=delivery.notifier, why=delivery.error)

    notifications = NotificationLoop(
        context,
        interval_s=every,
        endpoints=lambda: endpoints or list_bound_endpoints(context),
        on_result=emit_delivery,
    )
    stopped = threading.Event()
    thread = threading.Thread(
        target=notifications.run, args=(stopped,), name="notifications", daemon=True
    )
    thread.start()
    try:
        yield
    finally:
        stopped.set()
        thread.join(_LAST_WORDS_S)


@contextlib.contextmanager
def _listening(
    project: Project, watcher: WatchLoop, wakeups: ReconcileQueue, listen: str | None
) -> Iterator[None]:
    if listen is None:
        yield
        return
    from onnx_ops.adapters.web.webhook_receiver import WebhookReceiver, read_secret

    host, _, port = listen.rpartition(":")
    if not (port.isascii() and port.isdecimal() and int(port) < 1 << 16):
        remedy = "For example: --listen 127.0.0.1:8650"
        raise UserError(f"{listen!r} is not HOST:PORT", where="--listen", remedy=remedy)
    last = ""

    def refused(why: str) -> None:
        """Log a refusal when its reason changes.

        If every refusal were logged, any client of the port could fill the log.
        """
        nonlocal last
        if why != last:
            last = why
            watcher.emit("", WatchEventKind.DELIVERY_REFUSED, why=why)

    secret = read_secret(project.settings.webhook_secret, os.environ)
    with WebhookReceiver(
        host.strip("[]") or "127.0.0.1",
        int(port),
        secret=secret,
        clock=project.context.clock,
        wake=wakeups.add,
        refused=refused,
        metrics=partial(render_pending_metrics, project.context),
    ) as receiver:
        watcher.emit("", WatchEventKind.LISTENING, why=receiver.address)
        yield


def _repair_webhook(project: Project, watcher: WatchLoop) -> None:
    """Repair the webhook, and report the result as an event.

    After a failure, the watch continues, since it also polls.
    """
    from onnx_ops.adapters.registries.mlflow_webhooks import MlflowWebhooks
    from onnx_ops.adapters.web.webhook_receiver import read_secret

    try:
        secret = read_secret(project.settings.webhook_secret, os.environ)
        report = MlflowWebhooks(project.settings.tracking_uri).repair(secret)
    except OnnxOpsError as error:
        watcher.emit("", WatchEventKind.WEBHOOK, why=str(error))
        return
    did, why = "", "no webhook is installed; run `onnx-ops webhooks install --url URL`"
    if report is not None:
        did = ", ".join(report.did)
        why = f"{report.url} works" if report.ok else f"{report.problem}. {report.remedy}".strip()
    watcher.emit("", WatchEventKind.WEBHOOK, did=did, why=why)


def _print_text(report: WatchEvent) -> None:
    plain = (WatchEventKind.STEP, WatchEventKind.WAITING, WatchEventKind.REFUSED)
    wrong = (
        WatchEventKind.TROUBLE,
        WatchEventKind.REFUSED,
        WatchEventKind.REGISTRY_DOWN,
        WatchEventKind.DELIVERY_REFUSED,
        WatchEventKind.NOT_NOTIFIED,
    )
    parts = (report.endpoint, "" if report.kind in plain else report.kind.value, report.did)
    text = "".join(f"{part}: " for part in parts if part) + report.why
    print_line(f"{report.at} {text}", err=report.kind in wrong)


def _print_line(report: WatchEvent) -> None:
    output = sys.__stdout__ or sys.stdout
    output.write(json.dumps(codec.to_json(report), ensure_ascii=False) + "\n")
    output.flush()
