from __future__ import annotations

import pytest

from onnx_ops.errors import (
    ConflictError,
    DigestMismatchError,
    OnnxOpsError,
    ServiceUnavailableError,
)
from onnx_ops.protocol.messages import error_from_bytes, error_to_bytes


@pytest.mark.parametrize("kind", [ConflictError, DigestMismatchError, ServiceUnavailableError])
def test_error_from_bytes_of_encoded_error_keeps_type_and_texts(kind: type[OnnxOpsError]) -> None:
    error = kind("what", where="where", why="why", remedy="remedy")
    back = error_from_bytes(error_to_bytes(error))
    assert type(back) is kind
    assert back.as_document() == error.as_document()


@pytest.mark.parametrize(
    "data", [b"", b"<html>", b"[]", b'{"error":"internal error"}', b"\xff\xfe"]
)
def test_error_from_bytes_of_foreign_data_returns_service_unavailable_error(data: bytes) -> None:
    assert type(error_from_bytes(data)) is ServiceUnavailableError


def test_error_from_bytes_with_unknown_type_returns_base_error() -> None:
    error = error_from_bytes(b'{"error": "SystemExit", "what": "x"}')
    assert type(error) is OnnxOpsError
    assert error.what == "x"
