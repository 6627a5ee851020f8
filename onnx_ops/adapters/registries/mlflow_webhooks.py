"""The project's own webhook in MLflow: made, tested by real deliveries, put right, removed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from onnx_ops.adapters.registries.mlflow_connection import Connection
from onnx_ops.errors import NotFoundError, ServiceUnavailableError, UserError, quoted
from onnx_ops.protocol.webhooks import ALIAS_EVENTS

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities.webhook import Webhook, WebhookEvent, WebhookEventStr

TRIES = 4
"""Deliveries of a test."""

_READS = 8
"""Requests at once for the list of webhooks. Workers of one server without a common key fail in some of them."""

KEY_REMEDY = (
    "Start every worker of MLflow's server with the same MLFLOW_WEBHOOK_SECRET_ENCRYPTION_KEY (a Fernet key). What was "
    "stored under another key cannot be read again: give the old key back, or delete the rows of table `webhooks`."
)
_PRIVATE = "Start MLflow's server with MLFLOW_WEBHOOK_ALLOW_PRIVATE_IPS=true; the receiver's address is private."
_HINTS = (
    ("url scheme", "Use https, or start MLflow's server with MLFLOW_WEBHOOK_ALLOWED_SCHEMES=http,https."),
    ("public ip", _PRIVATE),
    ("connection refused", "Nothing listens there: start `onnx-ops reconcile --watch --listen HOST:PORT`."),
    ("resolve", "The name leads nowhere from MLflow's server."),
    ("certificate", "MLflow's server does not trust the receiver's certificate."),
    ("timed out", "The receiver cannot be reached from MLflow's server."),
    ("500 error", f"If it answers other requests: {KEY_REMEDY}"),
)
"""What MLflow says (in lower case), and what a keeper of the server can do about it."""

_SERVER_ERROR = 500
_STATUS_HINTS = {
    401: "The receiver has another secret: `onnx-ops webhooks install --url URL` where its secret is.",
    400: "The clocks of MLflow's server and of the receiver differ by minutes.",
    404: "Another program listens there, or the path is wrong: it ends in /webhooks/mlflow.",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class WebhookReport:
    """What stands in MLflow, what was done about it, and what came of `tests` deliveries, `arrived` of them well.

    `problem` says what is wrong with it or with the first delivery that failed, and `remedy` what to do.
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
        return not self.problem


class MlflowWebhooks:
    """The webhook of one name. A person who looks at MLflow's list knows by the name whose it is.

    Args:
        tracking_uri: a tracking server's URL.
        name: of the webhook; projects that share an MLflow need different ones.

    Raises:
        UserError: it is a database; only a server sends webhooks.
    """

    def __init__(self, tracking_uri: str, name: str = "onnx-ops") -> None:
        self._mlflow = Connection(tracking_uri)
        self._name = name
        if self._mlflow.is_database:
            raise UserError(
                "webhooks need an MLflow server",
                where=self._mlflow.shown,
                why="a database that is used directly sends none",
                remedy="Set tracking_uri to http://HOST:PORT; without webhooks the reconciler polls.",
            )

    def install(self, url: str, secret: str) -> WebhookReport:
        """Make the webhook, or put everything about it right; then test it. Doing it again changes nothing.

        Raises:
            UserError: MLflow does not accept the URL.
            ServiceUnavailableError: MLflow does not answer, or cannot read its webhooks.
        """
        with self._session() as client:
            found = _named(client, self._name)
            did = _wrong(found[0], url) if found else ("created",)
            if found[1:]:
                did += ("removed a double",)
            for extra in found[1:]:
                client.delete_webhook(extra.webhook_id)
            if found:
                client.update_webhook(found[0].webhook_id, url=url, events=_events(), secret=secret, status="ACTIVE")
            else:
                client.create_webhook(
                    self._name, url, _events(), "Wakes onnx-ops; see docs/reconcile.md.", secret, "ACTIVE"
                )
            return self._tested(client, did)

    def repair(self, secret: str) -> WebhookReport | None:
        """Put right what `check` finds wrong, at the URL that the webhook has; None if there is no such webhook."""
        try:
            report = self.check()
        except NotFoundError:
            return None
        return report if report.ok else self.install(report.url, secret)

    def check(self) -> WebhookReport:
        """Look at the webhook and test it; changes nothing.

        Raises:
            NotFoundError: there is none.
            ServiceUnavailableError: MLflow does not answer, or cannot read its webhooks.
        """
        with self._session() as client:
            found = _named(client, self._name)
            if not found:
                raise NotFoundError(
                    "no webhook is installed",
                    where=f"{self._mlflow.shown}, {self._name}",
                    remedy="`onnx-ops webhooks install --url URL`; without one the reconciler polls.",
                )
            if wrong := _wrong(found[0], found[0].url):
                remedy = f"onnx-ops webhooks install --url {found[0].url}"
                return WebhookReport(
                    name=self._name, url=found[0].url, problem=f"wrong: {', '.join(wrong)}", remedy=remedy
                )
            return self._tested(client, ())

    def remove(self) -> bool:
        """Delete the webhook; whether there was one."""
        with self._session() as client:
            found = _named(client, self._name)
            for webhook in found:
                client.delete_webhook(webhook.webhook_id)
            return bool(found)

    def _tested(self, client: MlflowClient, did: tuple[str, ...]) -> WebhookReport:
        (webhook, *_) = _named(client, self._name)
        report = WebhookReport(name=self._name, url=webhook.url, did=did)
        statuses = self._mlflow.statuses("/api/2.0/mlflow/webhooks", _READS)
        if unread := sum(status >= _SERVER_ERROR for status in statuses):
            problem = f"{unread} of {_READS} requests for the webhooks failed: MLflow's workers cannot read the secret"
            return replace(report, problem=problem, remedy=KEY_REMEDY)
        for number in range(1, TRIES + 1):
            result = client.test_webhook(webhook.webhook_id)
            if not result.success:
                problem, remedy = _diagnosis(result.response_status, result.error_message or result.response_body or "")
                told = f"a test delivery failed: {problem}"
                return replace(report, tests=number, arrived=number - 1, problem=told, remedy=remedy)
        return replace(report, tests=TRIES, arrived=TRIES)

    @contextmanager
    def _session(self) -> Iterator[MlflowClient]:
        """A client, whose errors are told with what a keeper of the server can do about them."""
        try:
            with self._mlflow.session(f"webhook {self._name}") as client:
                yield client
        except UserError as error:
            if isinstance(error, NotFoundError):
                raise
            raise UserError(error.what, where=error.where, why=error.why, remedy=_hint(error.why)) from error
        except ServiceUnavailableError as error:
            remedy = _hint(error.why) or error.remedy
            raise ServiceUnavailableError(error.what, where=error.where, why=error.why, remedy=remedy) from error


def _named(client: MlflowClient, name: str) -> list[Webhook]:
    """The webhooks of that name, oldest first."""
    found: list[Webhook] = []
    token = None
    while True:
        page = client.list_webhooks(max_results=100, page_token=token)
        found += [webhook for webhook in page if webhook.name == name]
        token = page.token
        if not token:
            return sorted(found, key=lambda webhook: (webhook.creation_timestamp, webhook.webhook_id))


def _events() -> list[WebhookEvent | WebhookEventStr]:
    from mlflow.entities.webhook import WebhookEvent

    return [WebhookEvent(*event.split(".")) for event in ALIAS_EVENTS]


def _wrong(webhook: Webhook, url: str) -> tuple[str, ...]:
    """What is not as it should be. Nobody can see which secret it has; the test tells."""
    wrong = {
        "url": webhook.url != url,
        "events": {str(event) for event in webhook.events} != set(ALIAS_EVENTS),
        "disabled": not webhook.status.is_active(),
    }
    return tuple(what for what, is_so in wrong.items() if is_so)


def _diagnosis(status: int | None, said: str) -> tuple[str, str]:
    if status is not None:
        return f"the receiver answered {status} {_short(said)}".rstrip(), _STATUS_HINTS.get(status, "")
    return _short(said.rpartition("(Caused by ")[2]), _hint(said)


def _hint(said: str) -> str:
    lower = said.lower()
    return next((hint for word, hint in _HINTS if word in lower), "")


def _short(text: str) -> str:
    return quoted(text.replace("\\", ""))
