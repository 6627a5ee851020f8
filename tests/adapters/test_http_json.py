"""One exchange of JSON with a service that answers too much."""

from __future__ import annotations

import pytest

from onnx_ops.adapters.http_json import MAX_ANSWER_BYTES, request_json
from onnx_ops.errors import ServiceUnavailableError
from onnx_ops.testing.webhook_sink import Reply, WebhookSink


def test_an_answer_is_read_up_to_its_bound() -> None:
    text = "x" * (MAX_ANSWER_BYTES - len('""'))
    inbox = WebhookSink(lambda letter: Reply(document=text if letter.path == "/largest" else text + "x"))
    with inbox.open():
        assert request_json("GET", f"{inbox.url}/largest", host="here") == text
        with pytest.raises(ServiceUnavailableError):
            request_json("GET", f"{inbox.url}/larger", host="here")
