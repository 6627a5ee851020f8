"""Credentials of requests for the versions of a registry, which are sent without MLflow."""

from __future__ import annotations

import base64
from typing import Any

import pytest

from onnx_ops.adapters.registries.mlflow_listing import _authorize

BASIC = f"Basic {base64.b64encode(b'me:secret').decode()}"


@pytest.mark.parametrize(
    ("variables", "header"),
    [
        ({}, None),
        ({"TOKEN": "token"}, "Bearer token"),
        ({"USERNAME": "me", "PASSWORD": "secret"}, BASIC),
        ({"USERNAME": "me", "PASSWORD": "secret", "TOKEN": "token"}, BASIC),
        ({"USERNAME": "me", "TOKEN": "token"}, "Bearer token"),
        ({"USERNAME": "me"}, None),
    ],
    ids=["none", "token", "password", "both", "user and token", "user"],
)
def test_authorize_uses_same_credentials_as_mlflow(
    variables: dict[str, str], header: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlflow.tracking._tracking_service import utils
    from mlflow.utils import rest_utils

    find_credentials: Any = vars(utils)["get_default_host_creds"]

    for part in ("USERNAME", "PASSWORD", "TOKEN"):
        monkeypatch.delenv(f"MLFLOW_TRACKING_{part}", raising=False)
    for part, value in variables.items():
        monkeypatch.setenv(f"MLFLOW_TRACKING_{part}", value)
    sent: list[str | None] = []

    def record(*arguments: Any, headers: dict[str, str], **named: Any) -> None:
        sent.append(headers.get("Authorization"))

    monkeypatch.setattr("mlflow.utils.rest_utils._get_http_response_with_retries", record)
    request: Any = rest_utils.http_request
    request(find_credentials("http://127.0.0.1:1"), "/", "GET")
    assert sent == [_authorize().get("Authorization")] == [header]
