"""Conversion of SageMaker's headers to and from headers of the server.

SageMaker passes only headers of its API to a container. Among them are the content type,
`CustomAttributes` and `InferenceId`. Of the response's headers, `CustomAttributes` reaches the
caller, but those with the deployment and the token do not. In a request, `CustomAttributes`
contains the user and the selected deployment: `user=anna;pin=digits-cnn-2`. In a response, it
contains the deployment that answered and its feedback token: `deployment=digits-cnn-2;token=…`.
"""

from __future__ import annotations

from urllib.parse import quote, unquote

from onnx_ops.errors import UserError
from onnx_ops.protocol.messages import (
    DEPLOYMENT_HEADER,
    FEEDBACK_HEADER,
    PIN_HEADERS,
    REQUEST_ID_HEADER,
    USER_KEY_HEADER,
)
from onnx_ops.serving.inference.responses import RawResponse, RequestHead

CUSTOM_ATTRIBUTES = b"x-amzn-sagemaker-custom-attributes"
INFERENCE_ID = b"x-amzn-sagemaker-inference-id"
FEEDBACK_TYPE = b"application/vnd.onnx-ops.feedback+json"
"""Content type of feedback that is sent to `/invocations`.

SageMaker forwards requests of clients to no other path.
"""

_REQUEST_ID = REQUEST_ID_HEADER.encode()
_REQUESTED = {"user": USER_KEY_HEADER.encode(), "pin": PIN_HEADERS[0].encode()}
_ANSWERED = {DEPLOYMENT_HEADER.encode(): b"deployment", FEEDBACK_HEADER.encode(): b"token"}
_MAX_BYTES = 1024
"""Largest size of the custom attributes in bytes, as SageMaker's API defines it."""


def read_attributes(head: RequestHead) -> RequestHead:
    """Return the head with the headers that SageMaker's two headers represent.

    A value of an attribute is percent-encoded if it contains `;`, `%`, or a character that is not
    visible ASCII.

    Raises:
        UserError: an attribute is unknown, has no value or is given twice, or the header is too
            long.
    """
    text = head.get(CUSTOM_ATTRIBUTES, b"").decode("latin-1")
    if len(text) > _MAX_BYTES:
        raise _refuse(f"the header has more than {_MAX_BYTES} characters")
    headers: dict[bytes, bytes] = {}
    if (inference_id := head.get(INFERENCE_ID)) is not None:
        headers[_REQUEST_ID] = inference_id
    for part in filter(None, map(str.strip, text.split(";"))):
        name, _, value = part.partition("=")
        header = _REQUESTED.get(name.strip().lower())
        if header is None or not value:
            raise _refuse(f"{part!r} is neither user=… nor pin=…")
        if header in headers:
            raise _refuse(f"{name.strip()} is given twice")
        headers[header] = unquote(value.strip()).encode()
    return {**head, **headers}


def add_attributes(response: RawResponse) -> RawResponse:
    """Add deployment and feedback token to a response as attributes; return it."""
    headers = (line.partition(b": ") for line in response.lines.split(b"\r\n"))
    found = {_ANSWERED[name]: value for name, _, value in headers if name in _ANSWERED}
    if found:
        text = ";".join(f"{name.decode()}={quote(value)}" for name, value in found.items())
        response.lines += b"%b: %b\r\n" % (CUSTOM_ATTRIBUTES, text.encode())
    return response


def _refuse(why: str) -> UserError:
    remedy = "Send attributes such as user=anna;pin=digits-cnn-2, or none."
    return UserError("the custom attributes cannot be read", why=why, remedy=remedy)
