"""The parts of the admin listener, without a server."""

from __future__ import annotations

from pathlib import Path

import pytest

from onnx_ops.errors import RefusedError
from onnx_ops.protocol.server_process import TOKEN_FILE
from onnx_ops.serving.admin import read_token


@pytest.mark.parametrize("others", [0o040, 0o020, 0o010, 0o004, 0o002, 0o001])
def test_read_token_with_access_for_group_or_others_raises_refused_error(
    tmp_path: Path, others: int
) -> None:
    token = read_token(tmp_path)
    assert read_token(tmp_path) == token
    (tmp_path / TOKEN_FILE).chmod(0o600 | others)
    with pytest.raises(RefusedError):
        read_token(tmp_path)
