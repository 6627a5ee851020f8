"""Incoming webhooks in Slack's format, which other chat services also accept.

Mattermost and Rocket.Chat accept this format. Discord accepts it if the address ends with `/slack`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from onnx_ops.adapters.files import read_private
from onnx_ops.adapters.http_json import request_json, require_https
from onnx_ops.config.binding import refuse_options
from onnx_ops.domain.notification import Notification, Severity
from onnx_ops.domain.quantities import Json
from onnx_ops.errors import NotFoundError
from onnx_ops.ports import Notifier

VARIABLE = "ONNX_OPS_NOTIFY_WEBHOOK"
_WHAT = "the notification webhook"
_SIGNS = {
    Severity.CRITICAL: ":rotating_light:",
    Severity.WARNING: ":warning:",
    Severity.INFO: ":white_check_mark:",
}
_LONGEST = 2900
"""Number of characters after which a text is cut.

Slack accepts 3,000 characters in the text of a block.
"""


class WebhookNotifier(Notifier):
    """Notifier that sends to the address of an incoming webhook.

    The address comes from ONNX_OPS_NOTIFY_WEBHOOK or from `notify.webhook` of the state folder. The
    address is a secret, since posting messages requires nothing else.
    """

    def __init__(self, options: Mapping[str, Json], state: Path) -> None:
        refuse_options(options, "webhook")
        self._file = state / "notify.webhook"

    def send(self, notification: Notification) -> None:
        """Post the message."""
        url = self._url()
        request_json("POST", url, format_message(notification), host=require_https(url, _WHAT))

    def check(self) -> str:
        """Return the host, but send no request; raise an error if the address is missing."""
        return f"to {require_https(self._url(), _WHAT)}"

    def _url(self) -> str:
        if (given := os.environ.get(VARIABLE, "").strip()) != "":
            return given
        try:
            return read_private(self._file, _WHAT)
        except FileNotFoundError as error:
            raise NotFoundError(
                "there is no address for notifications",
                where=str(self._file),
                remedy=f"Put the webhook address of the chat into {VARIABLE}, "
                f"or into {self._file} with mode 0600.",
            ) from error


def format_message(notification: Notification) -> dict[str, Any]:
    """Return Slack's message: `text` for notifications, `blocks` for the channel.

    Other chats show only `text`.
    """
    title = f"{_SIGNS[notification.severity]} *{_escaped(notification.title)}*"
    lines = [f"*Why:* {_escaped(notification.why)}"] if notification.why else []
    lines += [
        f"*{purpose}:* `{_escaped(command)}`" for purpose, command in notification.commands.items()
    ]
    lines += [f"<{_escaped(notification.link)}|Open the registry>"] if notification.link else []
    plain = "\n".join([notification.title, *notification.lines])
    sequence = notification.sequence
    origin = f"entry {sequence} of the ledger, by" if sequence else "by"
    foot = f"{origin} {_escaped(notification.actor)}"
    return {
        "text": _cut(_split_mentions(_escaped(plain))),
        "blocks": [
            {"type": "section", "text": _make_text("\n".join([title, *lines]))},
            {"type": "context", "elements": [_make_text(foot)]},
        ],
    }


def _make_text(text: str) -> dict[str, Any]:
    """Return a text object in which Slack links only what the markup links.

    Without `verbatim`, Slack also makes links of URLs and of names of channels and users.
    """
    return {"type": "mrkdwn", "text": _cut(text), "verbatim": True}


def _escaped(text: str) -> str:
    """Escape characters that Slack would read as a link or a mention."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _split_mentions(text: str) -> str:
    """Insert a zero-width space after each `@`, so that `@channel` is not a mention."""
    return text.replace("@", "@\u200b")


def _cut(text: str) -> str:
    return text if len(text) <= _LONGEST else text[:_LONGEST] + " …"
