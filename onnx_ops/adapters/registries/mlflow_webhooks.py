"""The project's webhook in MLflow: install, test, repair, remove."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from onnx_ops.adapters.registries.mlflow_connection import MlflowConnection, read_pages
from onnx_ops.errors import NotFoundError, ServiceUnavailableError, UserError, quoted
from onnx_ops.protocol.webhooks import ALIAS_EVENTS

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities.webhook import Webhook, WebhookEvent, WebhookEventStr

DEFAULT_NAME = "onnx-ops"
TEST_DELIVERIES = 4

_READS = 8
"""Number of concurrent requests for the list of webhooks.

Some of these requests fail if the workers of MLflow's server have different encryption keys.
"""

KEY_REMEDY = (
    "Start every worker of MLflow's server with the same MLFLOW_WEBHOOK_SECRET_ENCRYPTION_KEY (a "
    "Fernet key). Webhooks stored under another key cannot be read: restore the old key, "
    "or delete the rows of table `webhooks` that were stored under the other key. "
    "Then run `onnx-ops webhooks install --url URL`."
)
_SERVER_HINTS = (
    (
        "url scheme",
        "Use https, or start MLflow's server with MLFLOW_WEBHOOK_ALLOWED_SCHEMES=http,https.",
    ),
    (
        "public ip",
        (
            "Start MLflow's server with MLFLOW_WEBHOOK_ALLOW_PRIVATE_IPS=true; "
            "the receiver's address is private."
        ),
    ),
    ("500 error", f"If MLflow's server answers other requests: {KEY_REMEDY}"),
)
"""Remedies for the settings of MLflow's server, by a part of its message."""

_RECEIVER_HINTS = (
    (
        "connection refused",
        (
            "No process listens at the webhook's address: start "
            "`onnx-ops reconcile --watch --listen HOST:PORT`."
        ),
    ),
    ("resolve", "Use a host name that MLflow's server can resolve."),
    ("certificate", "Use a certificate that MLflow's server trusts."),
    ("timed out", "Permit connections from MLflow's server to the receiver."),
)
"""Remedies for a receiver that MLflow cannot reach, by a part of its message.

Errors of this machine's connection to MLflow's server have the same texts.
"""

_SERVER_ERROR = 500
_STATUS_HINTS = {
    401: "The receiver uses a different secret. If the secret was changed, restart "
    "`onnx-ops reconcile --watch`. Otherwise, run `{install}` on the receiver's machine.",
    400: "Compare the clocks of MLflow's server and of the receiver, which must agree within "
    "minutes.",
    404: "Another program listens at the address, or the path does not end in /webhooks/mlflow.",
}
"""Remedies by the status of the receiver's answer; `{install}` is a command."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WebhookReport:
    """Result of an operation on the webhook.

    `did` states what `install` changed, and `arrived` is the number of `tests` that arrived.
    `problem` describes a fault of the webhook or of the first failed delivery, and `remedy`
    describes the fix.
    """

    name: str
    url: str
    did: tuple[str, ...] = ()
    tests: int = 0
    arrived: int = 0
    problem: str = ""
    remedy: str = ""

    @property
    def ok(self) -> bool:
        """Return whether there is no problem."""
        return not self.problem


class MlflowWebhooks:
    """Manager of the project's webhook in MLflow, which is identified by its name.

    Projects that share an MLflow server need different names.

    Raises:
        UserError: the URI is that of a database, or its scheme is not supported.
        MissingPackageError: MLflow is not installed.
    """

    def __init__(self, tracking_uri: str, name: str = DEFAULT_NAME) -> None:
        self._mlflow = MlflowConnection(tracking_uri)
        self._name = name
        if self._mlflow.is_database:
            raise UserError(
                "webhooks need an MLflow server",
                where=self._mlflow.shown,
                why="a database sends no webhooks",
                remedy="Set tracking_uri to http://HOST:PORT; "
                "without webhooks the reconciler polls.",
            )

    def install(self, url: str, secret: str) -> WebhookReport:
        """Create the webhook, or repair it; then test it.

        Other webhooks with the same name are deleted.
        """
        from mlflow.entities.webhook import WebhookEvent

        events: list[WebhookEvent | WebhookEventStr] = [
            WebhookEvent(*event.split(".")) for event in ALIAS_EVENTS
        ]
        with self._session() as client:
            webhooks = self._webhooks(client)
            changes = _find_faults(webhooks[0], url) if webhooks else ("created",)
            for duplicate in webhooks[1:]:
                client.delete_webhook(duplicate.webhook_id)
                changes = (*changes, "removed a duplicate")
            if webhooks:
                client.update_webhook(
                    webhooks[0].webhook_id, url=url, events=events, secret=secret, status="ACTIVE"
                )
            else:
                about = "Triggers the onnx-ops reconciler; see `onnx-ops docs webhooks`."
                client.create_webhook(self._name, url, events, about, secret, "ACTIVE")
            return self._test(client, changes)

    def repair(self, secret: str) -> WebhookReport | None:
        """Install the webhook again if `check` finds a problem; return the last report.

        The result is None if no webhook is installed.
        """
        try:
            report = self.check()
        except NotFoundError:
            return None
        return report if report.ok else self.install(report.url, secret)

    def check(self) -> WebhookReport:
        """Check the settings of the webhook; test it if they are as expected.

        Raises:
            NotFoundError: no webhook is installed.
            ServiceUnavailableError: MLflow cannot serve the request.
        """
        with self._session() as client:
            webhooks = self._webhooks(client)
            if not webhooks:
                raise NotFoundError(
                    "no webhook is installed",
                    where=f"{self._mlflow.shown}, {self._name}",
                    remedy=f"Run `{self._install_command('URL')}`; "
                    "without a webhook the reconciler polls.",
                )
            url = webhooks[0].url
            if faults := _find_faults(webhooks[0], url):
                remedy = f"Run `{self._install_command(url)}`."
                problem = f"wrong settings: {', '.join(faults)}"
                return WebhookReport(name=self._name, url=url, problem=problem, remedy=remedy)
            return self._test(client, ())

    def remove(self) -> bool:
        """Delete the webhook; return whether it existed."""
        with self._session() as client:
            webhooks = self._webhooks(client)
            for webhook in webhooks:
                client.delete_webhook(webhook.webhook_id)
            return bool(webhooks)

    def _test(self, client: MlflowClient, changes: tuple[str, ...]) -> WebhookReport:
        webhook = self._webhooks(client)[0]
        report = WebhookReport(name=self._name, url=webhook.url, did=changes)
        statuses = self._mlflow.statuses("/api/2.0/mlflow/webhooks", _READS)
        if unread := sum(status >= _SERVER_ERROR for status in statuses):
            problem = (
                f"{unread} of {_READS} requests for the webhooks failed: "
                "some workers of MLflow may have another encryption key"
            )
            return replace(report, problem=problem, remedy=KEY_REMEDY)
        for number in range(TEST_DELIVERIES):
            result = client.test_webhook(webhook.webhook_id)
            if not result.success:
                message, status = (
                    result.error_message or result.response_body or "",
                    result.response_status,
                )
                text = message.replace("\\", "")
                reason, remedy = quoted(text.rpartition("(Caused by ")[2]), _hint(message)
                if status is not None:
                    details = quoted(text) if text.strip() else ""
                    reason = f"the receiver returned status {status} {details}".rstrip()
                    remedy = _STATUS_HINTS.get(status, "").format(
                        install=self._install_command(webhook.url)
                    )
                problem = f"a test delivery failed: {reason}"
                return replace(
                    report, tests=number + 1, arrived=number, problem=problem, remedy=remedy
                )
        return replace(report, tests=TEST_DELIVERIES, arrived=TEST_DELIVERIES)

    def _install_command(self, url: str) -> str:
        """Return the command that installs this webhook.

        It contains the name of the webhook if this name is not the default.
        """
        name = "" if self._name == DEFAULT_NAME else f" --name {shlex.quote(self._name)}"
        return f"onnx-ops webhooks install --url {shlex.quote(url)}{name}"

    def _webhooks(self, client: MlflowClient) -> list[Webhook]:
        """Return the webhooks with this name, oldest first."""
        webhooks = read_pages(lambda token: client.list_webhooks(max_results=100, page_token=token))
        named = (webhook for webhook in webhooks if webhook.name == self._name)
        return sorted(named, key=lambda webhook: (webhook.creation_timestamp, webhook.webhook_id))

    @contextmanager
    def _session(self) -> Iterator[MlflowClient]:
        """Provide a client; set the known remedies of its errors."""
        try:
            with self._mlflow.session(f"webhook {self._name}") as client:
                yield client
        except UserError as error:
            if isinstance(error, NotFoundError):
                raise
            raise UserError(
                error.what, where=error.where, why=error.why, remedy=_hint(error.why)
            ) from error
        except ServiceUnavailableError as error:
            remedy = _hint(error.why, _SERVER_HINTS) or error.remedy
            raise ServiceUnavailableError(
                error.what, where=error.where, why=error.why, remedy=remedy
            ) from error


def _find_faults(webhook: Webhook, url: str) -> tuple[str, ...]:
    """Return the names of the webhook's wrong settings.

    The secret cannot be read from MLflow, so only a test delivery shows whether it is right.
    """
    faults = {
        "url": webhook.url != url,
        "events": {str(event) for event in webhook.events} != set(ALIAS_EVENTS),
        "disabled": not webhook.status.is_active(),
    }
    return tuple(name for name, is_fault in faults.items() if is_fault)


def _hint(
    message: str, hints: Sequence[tuple[str, str]] = (*_SERVER_HINTS, *_RECEIVER_HINTS)
) -> str:
    lower = message.lower()
    return next((hint for text, hint in hints if text in lower), "")
