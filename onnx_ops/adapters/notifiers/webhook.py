"""A chat's incoming webhook: Slack's format, which Mattermost, Rocket.Chat, Discord (with `/slack`) and others take."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from onnx_ops.adapters.exchange import exchange, host_of
from onnx_ops.adapters.private import read_private
from onnx_ops.domain.notification import Notification, Severity
from onnx_ops.errors import NotFoundError, UserError

VARIABLE = "ONNX_OPS_NOTIFY_WEBHOOK"
_FILE = "notify.webhook"
_WHAT = "the notification webhook"
_SIGNS = {Severity.CRITICAL: ":rotating_light:", Severity.WARNING: ":warning:", Severity.INFO: ":white_check_mark:"}
_LONGEST = 2900
"""Characters that Slack takes in one block, less some."""


class WebhookNotifier:
    """Sends to the address in ONNX_OPS_NOTIFY_WEBHOOK, or in the file `notify.webhook` of the state folder.

    Whoever knows that address may write there, so it is a secret.

    Args:
        place: empty; there is one webhook.
        state: the state folder.

    Raises:
        UserError: a place was given.
    """

    def __init__(self, place: str, state: Path) -> None:
        if place:
            raise UserError("webhook takes no name", remedy=f"Write `webhook`, and its address into {VARIABLE}.")
        self._file = state / _FILE

    def send(self, notification: Notification) -> None:
        url = self._url()
        exchange("POST", url, message(notification), host=host_of(url, _WHAT))

    def check(self) -> str:
        return f"to {host_of(self._url(), _WHAT)}"

    def _url(self) -> str:
        if (given := os.environ.get(VARIABLE, "").strip()) != "":
            return given
        try:
            return read_private(self._file, _WHAT)
        except FileNotFoundError as error:
            raise NotFoundError(
                "nobody has said where to send notifications",
                where=str(self._file),
                remedy=f"Put the chat's webhook address into {VARIABLE}, or into that file with mode 0600.",
            ) from error


def message(notification: Notification) -> dict[str, Any]:
    """What Slack shows: `text` on a lock screen, the blocks in the channel."""
    title = f"{_SIGNS[notification.severity]} *{_escaped(notification.title)}*"
    told = [f"*Why:* {_escaped(notification.why)}"] if notification.why else []
    told += [f"*{purpose}:* `{_escaped(command)}`" for purpose, command in notification.commands.items()]
    told += [f"<{_escaped(notification.link)}|Look at the registry>"] if notification.link else []
    foot = f"entry {notification.sequence} of the ledger, by {_escaped(notification.actor)}"
    return {
        "text": _cut(_escaped("\n".join([notification.title, *notification.lines]))),
        "blocks": [
            {"type": "section", "text": {"type": "mrkdwn", "text": _cut("\n".join([title, *told]))}},
            {"type": "context", "elements": [{"type": "mrkdwn", "text": _cut(foot)}]},
        ],
    }


def _escaped(text: str) -> str:
    """Nothing in it is a link or a mention."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _cut(text: str) -> str:
    return text if len(text) <= _LONGEST else text[:_LONGEST] + " …"
