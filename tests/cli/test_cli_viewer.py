"""`onnx-ops inspect --serve`: a real process that serves pages.

It ends on request.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from onnx_ops.cli.inspect import view
from onnx_ops.errors import MissingPackageError
from onnx_ops.testing.models import write_perceptron
from tests.support.extras import hide


def page(address: str) -> tuple[int, bytes]:
    with urllib.request.urlopen(address, timeout=30) as answer:
        return answer.status, answer.read()


def test_inspect_serve_shows_graph_locally_until_interrupt(tmp_path: Path) -> None:
    write_perceptron(tmp_path / "mine.onnx")
    process = subprocess.Popen(
        [sys.executable, "-m", "onnx_ops", "inspect", "mine.onnx", "--serve", "--json"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stderr is not None
    try:
        said = ""
        for line in process.stderr:
            said += line
            if found := re.search(r"mine\.onnx at (http://127\.0\.0\.1:(\d+))", said):
                break
        else:
            raise AssertionError(said)
        status, body = page(found[1])
        assert status == 200
        assert b"Netron" in body
        status, model = page(f"{found[1]}/data/mine.onnx")
        assert (status, model) == (200, (tmp_path / "mine.onnx").read_bytes())
        with socket.socket() as outside:
            outside.settimeout(2)
            for address in _outer_addresses():
                assert outside.connect_ex((address, int(found[2]))) != 0
    finally:
        os.killpg(process.pid, signal.SIGINT)
        out, _ = process.communicate(timeout=60)
    assert process.returncode in (0, 130)
    assert json.loads(out[: out.rindex("}") + 1])["tool"] == "inspect"
    with pytest.raises(OSError, match=r"refused|reset"):
        page(found[1])


def test_view_stops_server_at_end_of_block(tmp_path: Path) -> None:
    write_perceptron(tmp_path / "mine.onnx")
    with view(tmp_path / "mine.onnx", 0) as (address, _):
        assert page(address)[0] == 200
    with pytest.raises(OSError, match=r"refused|reset"):
        page(address)


def test_view_without_netron_names_missing_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hide(monkeypatch, "netron")
    with (
        pytest.raises(MissingPackageError, match=r"onnx-ops\[view\]"),
        view(tmp_path / "mine.onnx", 0),
    ):
        pass


def _outer_addresses() -> set[str]:
    """Return the addresses under which other machines reach this one."""
    try:
        found = socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)
    except OSError:
        return set()
    return {str(entry[4][0]) for entry in found if not str(entry[4][0]).startswith("127.")}
