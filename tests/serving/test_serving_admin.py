"""The parts of the admin listener, without a server."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.exceptions import HTTPException
from starlette.requests import Request

from onnx_ops.errors import RefusedError
from onnx_ops.protocol.server_process import TOKEN_FILE
from onnx_ops.serving.admin import read_body, read_token


@pytest.mark.parametrize("others", [0o040, 0o020, 0o010, 0o004, 0o002, 0o001])
def test_a_token_that_others_may_use_is_refused(tmp_path: Path, others: int) -> None:
    token = read_token(tmp_path)
    assert read_token(tmp_path) == token
    (tmp_path / TOKEN_FILE).chmod(0o600 | others)
    with pytest.raises(RefusedError):
        read_token(tmp_path)


def in_parts(*parts: bytes) -> Request:
    """A request that announces no length."""
    messages: Iterator[dict[str, Any]] = iter(
        {"type": "http.request", "body": part, "more_body": place < len(parts)} for place, part in enumerate(parts, 1)
    )

    async def receive() -> dict[str, Any]:
        return next(messages)

    return Request({"type": "http", "method": "PUT", "headers": []}, receive)


def test_a_body_in_parts_is_read_up_to_the_limit() -> None:
    assert asyncio.run(read_body(in_parts(b"ab", b"cd"), 4)) == b"abcd"
    with pytest.raises(HTTPException) as refused:
        asyncio.run(read_body(in_parts(b"ab", b"cd", b"e"), 4))
    assert refused.value.status_code == 413
