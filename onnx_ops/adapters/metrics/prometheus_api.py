"""Queries of the HTTP API of Prometheus, Thanos, Mimir or VictoriaMetrics."""

from __future__ import annotations

import os
from typing import Any
from urllib.parse import quote, urlsplit

from onnx_ops.adapters.http_json import request_json, require_https
from onnx_ops.errors import RefusedError, ServiceUnavailableError, quoted

VARIABLE = "ONNX_OPS_PROMETHEUS_TOKEN"


def query_prometheus(
    url: str, query: str, *, where: str, timeout_s: float | None = None
) -> list[Any]:
    """Return the samples of an instant query.

    The token of the environment is sent over https, or over http to this machine.

    Args:
        url: address of the server, without `/api`.
        where: what the query is for, in errors.
        timeout_s: time limit in seconds; None for that of `request_json`.

    Raises:
        ServiceUnavailableError: the request fails, the server refuses the query, or the response is
            partial or unexpected.
        UserError: a token is set, and must not be sent to this address.
    """
    token = os.environ.get(VARIABLE, "").strip()
    host = require_https(url, "prometheus' url") if token else str(urlsplit(url).hostname)
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    address = f"{url}/api/v1/query?query={quote(query, safe='')}"
    try:
        answer = request_json("GET", address, host=host, headers=headers, timeout_s=timeout_s)
    except RefusedError as error:
        what = "Prometheus refused the query"
        raise ServiceUnavailableError(what, where=where, why=str(error)) from error
    try:
        partial, samples = answer.get("warnings"), answer["data"]["result"]
    except (AttributeError, KeyError, TypeError) as error:
        raise make_answer_error(where, answer) from error
    # Thanos warns if some of its stores did not respond. The counts would then be too low.
    if partial:
        what = "Prometheus returned warnings, so the response can be partial"
        raise ServiceUnavailableError(what, where=where, why=quoted(partial))
    if not isinstance(samples, list):
        raise make_answer_error(where, answer)
    return samples


def make_answer_error(where: str, answer: object) -> ServiceUnavailableError:
    """Return the error about an unexpected response."""
    what = "Prometheus returned an unexpected response"
    return ServiceUnavailableError(what, where=where, why=quoted(repr(answer)))


def quote_text(text: str) -> str:
    """Return a string as a literal of PromQL."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'
