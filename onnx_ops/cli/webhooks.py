"""The command `webhooks`: this project's own webhook in MLflow."""

from __future__ import annotations

import os
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from onnx_ops import codec
from onnx_ops.cli.common import AsJson, print_json, reported
from onnx_ops.cli.terminal import say
from onnx_ops.errors import UserError

if TYPE_CHECKING:
    from onnx_ops.adapters.registries.mlflow_webhooks import WebhookReport


class WebhookWord(StrEnum):
    """What can be done about the webhook."""

    INSTALL = "install"
    CHECK = "check"
    REMOVE = "remove"


@reported
def webhooks(
    word: Annotated[WebhookWord, typer.Argument(help="install (make or repair, then test), check (test), or remove.")],
    url: Annotated[
        str | None,
        typer.Option(help="Where MLflow's server reaches the receiver; ends in /webhooks/mlflow.", show_default=False),
    ] = None,
    name: Annotated[str, typer.Option(help="Name in MLflow; other projects there need others.")] = "onnx-ops",
    as_json: AsJson = False,
) -> None:
    """Install, check or remove the webhook by which MLflow wakes the reconciler.

    Exit code 4 if test deliveries do not arrive.

    The secret comes from ONNX_OPS_WEBHOOK_SECRET, or from a file in the state folder that `install` makes.

    Example: onnx-ops webhooks install --url http://127.0.0.1:8650/webhooks/mlflow
    """
    from onnx_ops.adapters.registries.mlflow_webhooks import MlflowWebhooks
    from onnx_ops.adapters.webhooks.secret import make_secret
    from onnx_ops.app.project import open_project

    settings = open_project().settings
    ours = MlflowWebhooks(settings.tracking_uri, name)
    match word:
        case WebhookWord.INSTALL:
            if url is None:
                raise UserError("install needs --url", remedy="--url http://127.0.0.1:8650/webhooks/mlflow")
            _tell(ours.install(url, make_secret(settings.webhook_secret, os.environ)), as_json=as_json)
        case WebhookWord.CHECK:
            _tell(ours.check(), as_json=as_json)
        case WebhookWord.REMOVE:
            removed = ours.remove()
            if as_json:
                print_json({"name": name, "removed": removed})
            else:
                say(f"{name}: {'removed' if removed else 'there was none'}")


def _tell(report: WebhookReport, *, as_json: bool) -> None:
    if as_json:
        print_json({**codec.to_json(report), "ok": report.ok})
    else:
        say(f"{report.name} -> {report.url}: {', '.join(report.did) or 'as it should be'}")
        say(f"{report.arrived} of {report.tests} test deliveries arrived", err=not report.ok)
        if not report.ok:
            say(f"  why: {report.problem}\n  try: {report.remedy or 'look at the receiver'}", err=True)
    if not report.ok:
        raise typer.Exit(4)
