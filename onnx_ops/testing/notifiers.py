"""Conformance suite for HTTP notifiers. Subclass `NotifierSuite` with a `notifier` fixture.

class TestMyChat(NotifierSuite):
    secret = "never in a message"

    @pytest.fixture
    def notifier(self, inbox: WebhookSink) -> Notifier: ...      # one that sends to `inbox.url`
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from typing import ClassVar

import pytest

from onnx_ops.adapters import http_json
from onnx_ops.domain.notification import Notification, NotificationKind, Severity
from onnx_ops.errors import OnnxOpsError, RefusedError, ServiceUnavailableError
from onnx_ops.ports import Notifier
from onnx_ops.testing.webhook_sink import ReceivedRequest, Reply, WebhookSink

ROLLED_BACK = Notification(
    endpoint="digits",
    sequence=12,
    at=1_700_000_000.0,
    actor="reconciler@host",
    what=NotificationKind.ROLLED_BACK,
    severity=Severity.CRITICAL,
    headline="v3 was rolled back, v2 has all traffic",
    why="errors: canary 28/800 (3.50%) vs stable 67/7200 (0.93%); evidence 346211:1 (limit 60:1) -> ROLL BACK",
    commands={"Undo": "onnx-ops promote digits-mlp 3 --target cpu --override"},
    model="digits-mlp",
    link="https://registry.example/models/digits-mlp",
)


class NotifierSuite:
    """Conformance of a Notifier."""

    secret: ClassVar[str]

    @pytest.fixture
    def inbox(self) -> Iterator[WebhookSink]:
        with WebhookSink().open() as inbox:
            yield inbox

    def usual(self, letter: ReceivedRequest) -> Reply:
        """Return the reply of the service to an accepted message."""
        return Reply()

    def test_a_message_holds_what_a_person_needs(self, notifier: Notifier, inbox: WebhookSink) -> None:
        inbox.answer = self.usual
        notifier.send(ROLLED_BACK)
        sent = json.dumps(inbox.requests[-1].document)
        for text in ("digits", "v3 was rolled back", "28/800", "limit 60:1", "onnx-ops promote digits-mlp 3"):
            assert text in sent
        assert ROLLED_BACK.link in sent

    @pytest.mark.parametrize("status", [408, 429, 500, 502, 503, 504])
    def test_a_service_in_trouble_is_tried_again(self, notifier: Notifier, inbox: WebhookSink, status: int) -> None:
        inbox.answer = lambda _: Reply(status=status)
        with pytest.raises(ServiceUnavailableError, match=str(status)):
            notifier.send(ROLLED_BACK)
        inbox.answer = self.usual
        notifier.send(ROLLED_BACK)

    @pytest.mark.parametrize("status", [400, 401, 403, 404, 410, 422])
    def test_a_refusal_says_which(self, notifier: Notifier, inbox: WebhookSink, status: int) -> None:
        inbox.answer = lambda _: Reply(status=status, document={"message": "no"})
        with pytest.raises(RefusedError, match=str(status)):
            notifier.send(ROLLED_BACK)

    @pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
    def test_no_redirect_is_followed(self, notifier: Notifier, inbox: WebhookSink, status: int) -> None:
        with WebhookSink().open() as elsewhere:
            inbox.answer = lambda _: Reply(status=status, headers={"Location": f"{elsewhere.url}/taken"})
            with pytest.raises(RefusedError, match="redirect"):
                notifier.send(ROLLED_BACK)
            assert elsewhere.requests == []

    def test_a_service_that_hangs_is_left(
        self, notifier: Notifier, inbox: WebhookSink, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(http_json, "TIMEOUT_S", 0.2)
        inbox.answer = lambda _: Reply(hang=True)
        with pytest.raises(ServiceUnavailableError):
            notifier.send(ROLLED_BACK)

    def test_no_error_and_no_log_holds_the_secret(
        self, notifier: Notifier, inbox: WebhookSink, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level(logging.DEBUG)
        text = [repr(notifier), notifier.check()]
        for reply in (Reply(status=404), Reply(status=500), Reply(status=302, headers={"Location": "https://x"})):

            def answer(_: ReceivedRequest, reply: Reply = reply) -> Reply:
                return reply

            inbox.answer = answer
            with pytest.raises(OnnxOpsError) as caught:
                notifier.send(ROLLED_BACK)
            text += [str(caught.value), repr(caught.value.as_document()), repr(caught.value.__cause__)]
        assert self.secret not in "\n".join([*text, caplog.text])

    def test_a_check_sends_nothing(self, notifier: Notifier, inbox: WebhookSink) -> None:
        assert notifier.check()
        assert inbox.requests == []
