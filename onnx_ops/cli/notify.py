"""The command `notify`: tell people what is due, or see whether anything arrives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from onnx_ops import codec
from onnx_ops.cli.common import AsJson, print_json, reported
from onnx_ops.cli.terminal import say
from onnx_ops.errors import UserError

if TYPE_CHECKING:
    from onnx_ops.release.notify import DeliveryResult

REMEDY = 'Set notify = "webhook" in onnx-ops.toml, or ONNX_OPS_NOTIFY; see docs/notifications.md.'


@reported
def notify(
    endpoints: Annotated[list[str] | None, typer.Argument(help="Endpoints; all by default.")] = None,
    test: Annotated[bool, typer.Option("--test", help="Send only a test message through every notifier.")] = False,
    as_json: AsJson = False,
) -> None:
    """Send the notifications that are due, as `reconcile --watch` does automatically.

    Exit code 4 if a notifier could not be reached.

    Example: onnx-ops notify --test
    """
    from onnx_ops.app.project import open_project
    from onnx_ops.release.journal import Journal, list_bound_endpoints
    from onnx_ops.release.notify import send_pending_each, send_test_message

    ports = open_project().ports
    if not ports.notifiers():
        raise UserError("no notifier is set", remedy=REMEDY)
    if test and endpoints:
        raise UserError("--test is about no endpoint", remedy="onnx-ops notify --test")
    for name in endpoints or ():
        Journal.open(ports, name).config  # noqa: B018 (raises NotFound for an unknown name)
    found = (
        send_test_message(ports)
        if test
        else send_pending_each(ports, tuple(endpoints or ()) or list_bound_endpoints(ports))
    )
    if as_json:
        print_json(codec.to_json(found))
    else:
        _tell(found)
    if any(told.trouble for told in found):
        raise typer.Exit(4)


def _tell(found: Sequence[DeliveryResult]) -> None:
    for told in found:
        for notice in told.sent:
            say(f"{told.notifier}: {notice.title}")
        if told.trouble:
            say(f"{told.notifier}: not told: {told.trouble}", err=True)
    if not any(told.sent or told.trouble for told in found):
        say("nothing to tell")
