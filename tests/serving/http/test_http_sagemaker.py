"""What reaches a container through SageMaker, and what comes back.

Like the service, `invoke` sends only the content type, `CustomAttributes` and `InferenceId` of the
caller's headers. Of the answer's headers it returns only `CustomAttributes`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onnx_ops.domain.endpoint import Deployment
from onnx_ops.errors import UserError
from onnx_ops.serving.http.sagemaker import (
    CUSTOM_ATTRIBUTES,
    FEEDBACK_TYPE,
    INFERENCE_ID,
    add_attributes,
    read_attributes,
)
from onnx_ops.serving.inference.responses import RawResponse
from onnx_ops.serving.metrics import get_column
from onnx_ops.testing.endpoints import state_of
from tests.serving.serving_process import infer_body
from tests.serving.serving_worker import Gate, Worker, post
from tests.support.server import parse_answers

BODY = infer_body([1, 2])
USERS = [f"user {n}" for n in range(60)]
_KEPT_FROM_CALLER = {
    "CustomAttributes": CUSTOM_ATTRIBUTES.decode(),
    "InferenceId": INFERENCE_ID.decode(),
}


@pytest.fixture
def worker(blue: Deployment, green: Deployment) -> Iterator[Worker]:
    state = state_of(blue, green, blue=50, green=50)
    with Worker(state, feedback_key="00" * 16).running() as running:
        yield running


def invoke(
    worker: Worker, body: bytes = BODY, kind: str = "application/json", **given: str
) -> tuple[int, dict[str, str], bytes]:
    """Call `InvokeEndpoint`; return the status, the custom attributes and the body."""
    headers = {_KEPT_FROM_CALLER[name]: value for name, value in given.items()}
    answer = parse_answers(
        worker.send(post("/invocations", body, {"content-type": kind, **headers}))
    )
    first = answer[0][0]
    attributes = first.headers.get(CUSTOM_ATTRIBUTES.decode(), "")
    pairs = (part.partition("=") for part in attributes.split(";") if part)
    return first.status, {name: value for name, _, value in pairs}, first.body


def report(worker: Worker, **subject: str) -> Mapping[str, int]:
    body = json.dumps({"feedback": [{**subject, "success": True}]}).encode()
    status, _, answer = invoke(worker, body, FEEDBACK_TYPE.decode())
    assert status == 200
    counts: Mapping[str, int] = json.loads(answer)
    return counts


def test_user_in_attributes_gets_same_version_as_user_header(worker: Worker) -> None:
    answered = {}
    for user in USERS:
        status, attributes, _ = invoke(worker, CustomAttributes=f"user={quote(user)}")
        assert status == 200
        answered[user] = attributes["deployment"]
        direct = parse_answers(worker.send(post("/invocations", BODY, {"x-user-key": user})))
        assert direct[0][0].headers["x-onnx-ops-deployment"] == answered[user]
    assert set(answered.values()) == {"blue", "green"}


@pytest.mark.parametrize("name", ["blue", "green"])
def test_pin_in_attributes_selects_deployment(worker: Worker, name: str) -> None:
    for user in USERS[:10]:
        text = f"user={quote(user)}; PIN={name}"
        assert invoke(worker, CustomAttributes=text)[1]["deployment"] == name


def test_feedback_of_user_by_token_in_attributes_is_counted_once(worker: Worker) -> None:
    _, attributes, _ = invoke(worker, CustomAttributes="user=anna")
    assert report(worker, token=attributes["token"]) == {"counted": 1, "unknown": 0}
    assert report(worker, token=attributes["token"]) == {"counted": 0, "unknown": 1}


def test_feedback_with_charset_in_content_type_is_counted(worker: Worker) -> None:
    invoke(worker, InferenceId="order-9")
    body = json.dumps({"feedback": [{"request_id": "order-9", "success": True}]}).encode()
    status, _, answer = invoke(worker, body, f"{FEEDBACK_TYPE.decode()}; charset=utf-8")
    assert (status, json.loads(answer)) == (200, {"counted": 1, "unknown": 0})


def test_feedback_by_inference_id_is_counted(worker: Worker) -> None:
    status, attributes, _ = invoke(worker, InferenceId="order-7")
    assert (status, attributes) == (200, {})
    assert report(worker, request_id="order-7") == {"counted": 1, "unknown": 0}
    assert report(worker, request_id="order-8") == {"counted": 0, "unknown": 1}


def test_invocation_without_attributes_returns_no_attributes(worker: Worker) -> None:
    assert invoke(worker)[:2] == (200, {})


def test_queued_invocation_with_attributes_returns_attributes(blue: Deployment) -> None:
    gate = Gate()
    with Worker(state_of(blue, blue=100), wrap=gate.wrap, slow=True).running() as worker:
        gate.open.set()
        status, attributes, _ = invoke(worker, CustomAttributes="user=anna", InferenceId="r-1")
        assert (status, attributes) == (200, {"deployment": "blue"})


def test_failed_invocation_names_deployment_in_attributes(worker: Worker) -> None:
    status, attributes, _ = invoke(worker, b"{", CustomAttributes="pin=blue")
    assert (status, attributes["deployment"]) == (400, "blue")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("usr=anna", "'usr=anna' is neither user=… nor pin=…"),
        ("c000b4f9-df62", "'c000b4f9-df62' is neither user=… nor pin=…"),
        ("user=", "'user=' is neither user=… nor pin=…"),
        ("user=a;user=b", "user is given twice"),
        ("user=" + "a" * 1020, "the header has more than 1024 characters"),
        ("pin=red", "no deployment is named 'red'"),
    ],
)
def test_invocation_with_unusable_attributes_returns_error_with_reason(
    worker: Worker, text: str, reason: str
) -> None:
    status, _, body = invoke(worker, CustomAttributes=text)
    assert status in (400, 404)
    assert reason in json.dumps(json.loads(body), ensure_ascii=False)
    # Slot 0 counts the requests that reach no deployment.
    assert worker.shared.sum_slot(0)[get_column(status)] == 1


@given(st.text(min_size=1), st.text(min_size=1))
def test_read_attributes_decodes_percent_encoded_values(user: str, pin: str) -> None:
    text = f"user={quote(user, '')};pin={quote(pin, '')}"
    if len(text) <= 1024:
        head = read_attributes({CUSTOM_ATTRIBUTES: text.encode()})
        assert head[b"x-user-key"] == user.encode()
        assert head[b"x-amzn-sagemaker-target-variant"] == pin.encode()


@given(st.binary())
def test_read_attributes_of_any_bytes_returns_known_headers_or_raises_user_error(
    text: bytes,
) -> None:
    try:
        head = read_attributes({CUSTOM_ATTRIBUTES: text})
    except UserError:
        return
    assert set(head) <= {CUSTOM_ATTRIBUTES, b"x-user-key", b"x-amzn-sagemaker-target-variant"}


def test_add_attributes_writes_one_line_of_escaped_values() -> None:
    lines = b"content-type: a\r\nx-onnx-ops-deployment: d;x=1\r\nx-onnx-ops-feedback: T_-\r\n"
    response = add_attributes(RawResponse(200, lines, b""))
    added = response.lines.removeprefix(lines)
    assert added == CUSTOM_ATTRIBUTES + b": deployment=d%3Bx%3D1;token=T_-\r\n"
