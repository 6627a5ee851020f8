"""Conformance suite for HTTP notifiers.

Subclass `NotifierSuite` with a `notifier` fixture.

class TestMyChat(NotifierSuite):
    secret = "never in a message"

    @pytest.fixture
    def notifier(self, inbox: WebhookSink) -> Notifier: ...      # one that sends to `inbox.url`
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar

import pytest

from onnx_ops.adapters import http_json
from onnx_ops.domain.notification import Notification, NotificationKind, Severity
from onnx_ops.errors import OnnxOpsError, RefusedError, ServiceUnavailableError
from onnx_ops.ports import Notifier

ROLLED_BACK = Notification(
    endpoint="digits",
    sequence=12,
    at=1_700_000_000.0,
    actor="reconciler@host",
    what=NotificationKind.ROLLED_BACK,
    severity=Severity.CRITICAL,
    headline="v3 was rolled back, v2 has all traffic",
    why="errors: canary 28/800 (3.50%) vs stable 67/7200 (0.93%); evidence 346211:1 (limit 60:1) "
    "-> ROLL BACK",
    commands={"Undo": 'onnx-ops promote digits-mlp/3 --target cpu --override --reason "..."'},
    model="digits-mlp",
    link="https://registry.example/models/digits-mlp",
)


class NotifierSuite:
    """Conformance of a Notifier.

    `secret` is the notifier's credential, which must not be in errors and logs.
    """

    secret: ClassVar[str]

    @pytest.fixture
    def inbox(self) -> Iterator[WebhookSink]:
        with WebhookSink().open() as inbox:
            yield inbox

    def usual(self, letter: ReceivedRequest) -> Reply:
        """Return the reply of the service to an accepted message."""
        return Reply()

    def test_send_delivers_headline_reason_command_and_link(
        self, notifier: Notifier, inbox: WebhookSink
    ) -> None:
        inbox.answer = self.usual
        notifier.send(ROLLED_BACK)
        sent = json.dumps(inbox.requests[-1].document)
        for text in (
            "digits",
            "v3 was rolled back",
            "28/800",
            "limit 60:1",
            "onnx-ops promote digits-mlp/3",
        ):
            assert text in sent
        assert ROLLED_BACK.link in sent

    @pytest.mark.parametrize("status", [408, 429, 500, 502, 503, 504])
    def test_send_to_failing_service_raises_service_unavailable_error(
        self, notifier: Notifier, inbox: WebhookSink, status: int
    ) -> None:
        inbox.answer = lambda _: Reply(status=status)
        with pytest.raises(ServiceUnavailableError, match=str(status)):
            notifier.send(ROLLED_BACK)
        inbox.answer = self.usual
        notifier.send(ROLLED_BACK)

    @pytest.mark.parametrize("status", [400, 401, 403, 404, 410, 422])
    def test_send_that_is_refused_raises_refused_error_with_status(
        self, notifier: Notifier, inbox: WebhookSink, status: int
    ) -> None:
        inbox.answer = lambda _: Reply(status=status, document={"message": "no"})
        with pytest.raises(RefusedError, match=str(status)):
            notifier.send(ROLLED_BACK)

    @pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
    def test_send_to_redirecting_service_follows_no_redirect(
        self, notifier: Notifier, inbox: WebhookSink, status: int
    ) -> None:
        with WebhookSink().open() as elsewhere:
            inbox.answer = lambda _: Reply(
                status=status, headers={"Location": f"{elsewhere.url}/taken"}
            )
            with pytest.raises(RefusedError, match="redirect"):
                notifier.send(ROLLED_BACK)
            assert elsewhere.requests == []

    def test_send_to_hanging_service_raises_service_unavailable_error(
        self, notifier: Notifier, inbox: WebhookSink, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(http_json, "TIMEOUT_S", 0.2)
        inbox.answer = lambda _: Reply(hang=True)
        with pytest.raises(ServiceUnavailableError):
            notifier.send(ROLLED_BACK)

    def test_send_that_fails_keeps_secret_out_of_errors_and_logs(
        self, notifier: Notifier, inbox: WebhookSink, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level(logging.DEBUG)
        text = [repr(notifier), notifier.check()]
        for reply in (
            Reply(status=404),
            Reply(status=500),
            Reply(status=302, headers={"Location": "https://x"}),
        ):

            def answer(_: ReceivedRequest, reply: Reply = reply) -> Reply:
                return reply

            inbox.answer = answer
            with pytest.raises(OnnxOpsError) as caught:
                notifier.send(ROLLED_BACK)
            text += [
                str(caught.value),
                repr(caught.value.as_document()),
                repr(caught.value.__cause__),
            ]
        assert self.secret not in "\n".join([*text, caplog.text])

    def test_check_sends_no_message(self, notifier: Notifier, inbox: WebhookSink) -> None:
        assert notifier.check()
        assert inbox.requests == []


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceivedRequest:
    """A request. Header names are lower case.

    `document` is the JSON value of the body; None without a body.
    """

    method: str
    path: str
    headers: dict[str, str]
    document: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """A reply; with `hang`, the request stays unanswered until the server stops."""

    status: int = 200
    document: Any = None
    headers: dict[str, str] = field(default_factory=dict)
    hang: bool = False


class WebhookSink:
    """A server that records requests in order; `answer` returns the reply to each."""

    def __init__(self, answer: Callable[[ReceivedRequest], Reply] = lambda _: Reply()) -> None:
        self.answer = answer
        self.requests: list[ReceivedRequest] = []
        self.url = ""

    @contextmanager
    def open(self) -> Iterator[WebhookSink]:
        """Listen on this machine at `url`."""
        sink, over = self, threading.Event()

        class SinkHandler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                length = int(self.headers.get("Content-Length") or 0)
                raw = self.rfile.read(length)
                headers = {name.lower(): value for name, value in self.headers.items()}
                request = ReceivedRequest(
                    method=self.command,
                    path=self.path,
                    headers=headers,
                    document=json.loads(raw) if raw else None,
                )
                sink.requests.append(request)
                reply = sink.answer(request)
                if reply.hang:
                    over.wait()
                    return
                body = b"ok" if reply.document is None else json.dumps(reply.document).encode()
                self.send_response(reply.status)
                for name, value in {"Content-Length": str(len(body)), **reply.headers}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(body)

            do_POST = do_PATCH = do_GET  # noqa: N815 (names of http.server)

            def log_message(self, *_: object) -> None:
                pass

        with ThreadingHTTPServer(("127.0.0.1", 0), SinkHandler) as server:
            server.daemon_threads = True
            thread = threading.Thread(
                target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True
            )
            thread.start()
            self.url = f"http://127.0.0.1:{server.server_port}"
            try:
                yield self
            finally:
                over.set()
                server.shutdown()
                thread.join()
