"""`onnx-ops console`: a real process that serves pages until it is stopped."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import urllib.request
from pathlib import Path

import pytest

from tests.support.command import PROGRAM, run_command


def test_console_serves_pages_until_signal(tmp_path: Path) -> None:
    (tmp_path / "onnx-ops.toml").touch()
    process = subprocess.Popen(
        [PROGRAM, "console", "--listen", "127.0.0.1:0"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    try:
        line = process.stderr.readline()
        found = re.search(r"http://127\.0\.0\.1:\d+", line)
        assert found is not None, line
        with urllib.request.urlopen(found[0], timeout=30) as answer:
            assert b"No endpoints yet" in answer.read()
    finally:
        process.send_signal(signal.SIGTERM)
        _, rest = process.communicate(timeout=60)
    assert (process.returncode, rest) == (0, "")


@pytest.mark.parametrize(
    ("arguments", "code", "expected"),
    [
        (("--listen", "127.0.0.1"), 2, "HOST:PORT"),
        (("--listen", "127.0.0.1:99999"), 2, "HOST:PORT"),
        (("--interval", "1s"), 2, "out of range"),
        (("--listen", "0.0.0.0:0"), 5, "ONNX_OPS_CONSOLE_TOKEN"),
    ],
)
def test_console_with_invalid_option_or_public_address_without_token_exits_with_2_or_5(
    tmp_path: Path, arguments: tuple[str, ...], code: int, expected: str
) -> None:
    (tmp_path / "onnx-ops.toml").touch()
    done = run_command("console", *arguments, cwd=tmp_path)
    assert done.code == code
    assert expected in done.stderr
