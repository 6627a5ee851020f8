"""Commands about messages to and from this project.

The commands are notify, and webhooks install, check and remove.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from onnx_ops import codec
from onnx_ops.cli.common import (
    AsJson,
    Endpoints,
    add_command,
    make_group,
    open_project,
    print_json,
    print_result,
    say,
)
from onnx_ops.errors import UserError

if TYPE_CHECKING:
    from onnx_ops.adapters.registries.mlflow_webhooks import MlflowWebhooks, WebhookReport
    from onnx_ops.config.settings import Settings
    from onnx_ops.release.notify import DeliveryResult


def notify(
    endpoints: Endpoints = None,
    test: Annotated[
        bool, typer.Option("--test", help="Send only a test message through every notifier.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Send the notifications that are due, as `reconcile --watch` does automatically.

    Exit code 4 if a notification could not be sent.

    Example: onnx-ops notify --test
    """
    from onnx_ops.release.journal import Journal, list_bound_endpoints
    from onnx_ops.release.notify import send_pending_each, send_test_message

    context = open_project().context
    if not context.notifiers():
        remedy = (
            'Set notify = "webhook" in onnx-ops.toml, or ONNX_OPS_NOTIFY; '
            "see `onnx-ops docs notifications`."
        )
        raise UserError("no notifier is set", remedy=remedy)
    if test and endpoints:
        raise UserError("--test takes no endpoint", remedy="onnx-ops notify --test")
    for name in endpoints or ():
        Journal.open(context, name).config  # noqa: B018 (raises NotFoundError)
    if test:
        deliveries = send_test_message(context)
    else:
        deliveries = send_pending_each(
            context, tuple(endpoints or ()) or list_bound_endpoints(context)
        )
    if as_json:
        print_json(codec.to_json(deliveries))
    else:
        _print_deliveries(deliveries)
    if any(delivery.error for delivery in deliveries):
        raise typer.Exit(4)


def _print_deliveries(deliveries: Sequence[DeliveryResult]) -> None:
    """Print the messages that each notifier sent, and the errors of failed notifiers."""
    for delivery in deliveries:
        for notice in delivery.sent:
            say(f"{delivery.notifier}: {notice.title}")
        if delivery.error:
            say(f"{delivery.notifier}: not sent: {delivery.error}", err=True)
    if not any(delivery.sent or delivery.error for delivery in deliveries):
        say("nothing to send")


webhooks = make_group(
    "webhooks",
    "Register the MLflow webhook that triggers the reconciler. "
    "The secret comes from ONNX_OPS_WEBHOOK_SECRET, or from a file in the state folder that "
    "`install` creates.",
    "onnx-ops webhooks install --url http://127.0.0.1:8650/webhooks/mlflow",
)

WebhookName = Annotated[
    str, typer.Option("--name", help="Name in MLflow; other projects there need other names.")
]


@add_command(webhooks, "install")
def webhooks_install(
    url: Annotated[
        str,
        typer.Option(help="Where MLflow's server reaches the receiver; ends in /webhooks/mlflow."),
    ],
    name: WebhookName = "onnx-ops",
    as_json: AsJson = False,
) -> None:
    """Register or repair the webhook in MLflow, and send test deliveries.

    Exit code 4 if test deliveries do not arrive.

    Example: onnx-ops webhooks install --url http://127.0.0.1:8650/webhooks/mlflow
    """
    from onnx_ops.adapters.web.webhook_receiver import make_secret

    settings, client = _open_webhooks(name)
    _report_webhook(
        client.install(url, make_secret(settings.webhook_secret, os.environ)), as_json=as_json
    )


@add_command(webhooks, "check")
def webhooks_check(name: WebhookName = "onnx-ops", as_json: AsJson = False) -> None:
    """Send test deliveries of the webhook.

    Exit code 4 if test deliveries do not arrive.

    Example: onnx-ops webhooks check
    """
    _, client = _open_webhooks(name)
    _report_webhook(client.check(), as_json=as_json)


@add_command(webhooks, "remove")
def webhooks_remove(name: WebhookName = "onnx-ops", as_json: AsJson = False) -> None:
    """Remove the webhook from MLflow.

    Example: onnx-ops webhooks remove
    """
    _, client = _open_webhooks(name)
    removed = client.remove()
    text = f"{name}: {'removed' if removed else 'there was none'}"
    print_result(lambda: {"name": name, "removed": removed}, text, as_json=as_json)


def _open_webhooks(name: str) -> tuple[Settings, MlflowWebhooks]:
    from onnx_ops.adapters.registries.mlflow_webhooks import MlflowWebhooks

    settings = open_project().settings
    return settings, MlflowWebhooks(settings.tracking_uri, name)


def _report_webhook(report: WebhookReport, *, as_json: bool) -> None:
    if as_json:
        print_json({**codec.to_json(report), "ok": report.ok})
    else:
        say(f"{report.name} -> {report.url}: {', '.join(report.did) or 'no change was needed'}")
        say(f"{report.arrived} of {report.tests} test deliveries arrived", err=not report.ok)
        if not report.ok:
            remedy = report.remedy or "check the log of the receiver"
            say(f"  why: {report.problem}\n  try: {remedy}", err=True)
    if not report.ok:
        raise typer.Exit(4)
