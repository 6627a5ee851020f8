"""Requests of the real SDKs to the fake clouds, without sockets.

A function of the caller is called before and after the effect of every request. It can delay the
request, make it fail, lose its answer, or end the process. Kinds of faults become the answers and
errors that the SDKs handle.
"""

from __future__ import annotations

import functools
import io
import json
import os
import ssl
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, Literal
from unittest.mock import patch
from urllib.parse import parse_qsl, unquote, urlsplit

from onnx_ops.adapters import aws
from tests.support.clouds.azureml import AzureCloud
from tests.support.clouds.azureml_web import FAULTS, Call, Reply
from tests.support.clouds.sagemaker_faults import Fault, fail
from tests.support.clouds.sagemaker_parts import CALLER
from tests.support.clouds.sagemaker_server import Fake

FaultKind = Literal["throttle", "error", "drop"]
"""Kind of a failure: throttled, an error of the service, or a lost connection."""
Disturb = Callable[[str, bool], FaultKind | None]
"""Function that returns the fault of a request.

With True it is the fault after the request's effect, otherwise the one before.
"""
URL = "http://127.0.0.1:9"
"""Address of the fake SageMaker, on which nothing listens."""
_HEADERS = {"content-type": "CONTENT_TYPE", "content-length": "CONTENT_LENGTH"}
_FREE = ("/metadata/", "/identity")
"""Paths of requests for tokens and metadata, which are not disturbed."""


@contextmanager
def boto3_calls(fake: Fake, disturb: Disturb) -> Iterator[Callable[[str], Any]]:
    """Let boto3 call the fake SageMaker in this process.

    Yield a function that returns a client with all permissions, whose requests are not disturbed.
    """
    make_clients = aws.make_clients

    @functools.cache
    def make_disturbed(access: aws.AwsAccess, *, where: str = "") -> aws.Clients:
        return hook(make_clients(access, where=where), functools.partial(_send, fake, disturb))

    def hook(clients: Callable[[str], Any], send: Callable[..., Any]) -> Callable[[str], Any]:
        @functools.cache
        def get(service: str) -> Any:
            client = clients(service)
            client.meta.events.register("before-send", send)
            return client

        return get

    def make_owner(service: str) -> Any:
        import boto3

        return boto3.client(
            service,
            region_name="us-east-1",
            endpoint_url=URL,
            aws_access_key_id="testing",
            aws_secret_access_key="testing",  # noqa: S106 (it opens nothing)
        )

    environment = {
        "AWS_ENDPOINT_URL": URL,
        "AWS_ACCESS_KEY_ID": CALLER,
        "AWS_SECRET_ACCESS_KEY": "testing",
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_CONFIG_FILE": os.devnull,
        "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
    }
    with (
        patch.dict(os.environ, environment),
        patch("onnx_ops.adapters.endpoints.sagemaker.make_clients", make_disturbed),
    ):
        yield hook(make_owner, functools.partial(_send, fake, lambda *_: None))


def _send(fake: Fake, disturb: Disturb, request: Any, **_: object) -> Any:
    """Answer a request of botocore."""
    from botocore.awsrequest import AWSResponse
    from botocore.exceptions import ConnectionClosedError

    parts, body = urlsplit(request.url), request.body or b""
    if hasattr(body, "read"):
        body = body.read()
    body = body.encode() if isinstance(body, str) else bytes(body)
    environ = {
        "REQUEST_METHOD": request.method,
        "PATH_INFO": unquote(parts.path),
        "RAW_URI": f"{parts.path}?{parts.query}",
        "QUERY_STRING": parts.query,
        "SERVER_NAME": parts.hostname,
        "SERVER_PORT": str(parts.port),
        "SERVER_PROTOCOL": "HTTP/1.1",
        "wsgi.url_scheme": parts.scheme,
        "HTTP_HOST": parts.netloc,
    }
    for name, value in request.headers.items():
        text = value.decode() if isinstance(value, bytes) else str(value)
        key = _HEADERS.get(name.lower()) or f"HTTP_{name.upper().replace('-', '_')}"
        environ[key] = text
    environ["CONTENT_LENGTH"] = str(len(body))
    target = environ.get("HTTP_X_AMZ_TARGET", "")
    name = target or f"{request.method} {environ['PATH_INFO']} {parts.query}".strip()

    def answer(is_fault: bool, kind: str = "") -> Any:
        head: list[Any] = []

        def start(status: str, headers: list[tuple[str, str]], *_: object) -> None:
            head[:] = [int(status.split(maxsplit=1)[0]), headers]

        given = {**environ, "wsgi.input": io.BytesIO(body)}
        fault = Fault(at=0, kind=kind)
        chunks = fail(fault, name, given, start) if is_fault else fake(given, start)
        data = b"".join(chunks)
        return AWSResponse(request.url, head[0], _Headers(head[1]), _Raw(data))

    if (kind := disturb(name, False)) is not None:
        if kind == "drop":
            raise ConnectionClosedError(endpoint_url=request.url)
        return answer(is_fault=True, kind=kind)
    result = answer(is_fault=False)
    if (kind := disturb(name, True)) is not None:
        if kind == "drop":
            raise ConnectionClosedError(endpoint_url=request.url)
        return answer(is_fault=True, kind=kind)
    return result


def _Headers(pairs: list[tuple[str, str]]) -> Any:  # noqa: N802 (it makes botocore's type)
    from botocore.awsrequest import HeadersDict

    headers = HeadersDict()
    for name, value in pairs:
        headers[name] = value
    return headers


class _Raw(io.BytesIO):
    """The body of an answer, as botocore reads it."""

    def stream(self, amount: int = 65_536, **_: object) -> Iterator[bytes]:
        while chunk := self.read(amount):
            yield chunk


def invoke_sagemaker(fake: Fake, endpoint: str, user: str) -> tuple[int, bytes]:
    """Send a request of a client to the endpoint; return status and body."""
    head: list[str] = []
    environ = {
        "REQUEST_METHOD": "POST",
        "PATH_INFO": f"/endpoints/{endpoint}/invocations",
        "CONTENT_TYPE": "application/json",
        "CONTENT_LENGTH": "2",
        "HTTP_X_AMZN_SAGEMAKER_CUSTOM_ATTRIBUTES": f"user={user}",
        "wsgi.input": io.BytesIO(b"{}"),
    }
    body = b"".join(fake(environ, lambda status, *_: head.append(status)))
    return int(head[0].split(maxsplit=1)[0]), body


@contextmanager
def azure_calls(cloud: AzureCloud, disturb: Disturb) -> Iterator[None]:
    """Let the Azure SDK and plain requests call the fake Azure in this process."""
    import httpx
    import requests.adapters
    import urllib3

    def answer(method: str, url: str, headers: Mapping[str, str], body: bytes) -> Reply | None:
        parts = urlsplit(url)
        call = Call(
            method=method,
            path=unquote(parts.path),
            query={k.lower(): v for k, v in parse_qsl(parts.query, keep_blank_values=True)},
            headers={name.lower(): value for name, value in headers.items()},
            body=body,
        )
        if call.path.startswith(_FREE):
            return cloud.answer(call)
        name = f"{method} {call.path}"
        if (kind := disturb(name, False)) is not None:
            return FAULTS[kind]
        result = cloud.answer(call)
        return result if (kind := disturb(name, True)) is None else FAULTS[kind]

    def send(adapter: Any, request: Any, **_: object) -> Any:
        body = request.body or b""
        body = body.read() if hasattr(body, "read") else body
        body = body.encode() if isinstance(body, str) else bytes(body)
        headers = {name: str(value) for name, value in request.headers.items()}
        reply = answer(request.method, request.url, headers, body)
        if reply is None:
            raise requests.exceptions.ConnectionError("injected")
        raw = urllib3.HTTPResponse(
            body=io.BytesIO(b"" if request.method == "HEAD" else reply.body),
            headers=_complete(reply),
            status=reply.status,
            preload_content=False,
            request_method=request.method,
        )
        return adapter.build_response(request, raw)

    def handle(_: httpx.HTTPTransport, request: httpx.Request) -> httpx.Response:
        headers = dict(request.headers.items())
        reply = answer(request.method, str(request.url), headers, request.read())
        if reply is None:
            raise httpx.ConnectError("injected")
        return httpx.Response(reply.status, headers=_complete(reply), content=reply.body)

    # A new context loads the authorities again, which takes longer than the request.
    context = ssl.create_default_context()
    with ExitStack() as stack:
        stack.enter_context(patch.object(requests.adapters.HTTPAdapter, "send", send))
        stack.enter_context(patch.object(httpx.HTTPTransport, "handle_request", handle))
        stack.enter_context(patch.object(ssl, "create_default_context", lambda **_: context))
        yield


def _complete(reply: Reply) -> dict[str, str]:
    return {
        "Content-Type": "application/json",
        "Content-Length": str(len(reply.body)),
        **reply.headers,
    }


def invoke_azure(cloud: AzureCloud, endpoint: str, user: str) -> tuple[int, bytes]:
    """Send a request of a client to the endpoint; return status and body."""
    call = Call(
        method="POST",
        path=f"/score/{endpoint}/invocations",
        query={},
        headers={"authorization": f"Bearer key-of-{endpoint}", "x-user-key": user},
        body=json.dumps({}).encode(),
    )
    reply = cloud.answer(call)
    return (0, b"") if reply is None else (reply.status, reply.body)
