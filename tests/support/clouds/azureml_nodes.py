"""The machines behind the deployments of the fake: real server processes, started as a container would be."""

from __future__ import annotations

import http.client
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from onnx_ops.domain.artifact import digest_bytes, digest_json
from tests.support.ports import free_port

_START_S = 60.0
_PAUSE_S = 0.05
_LOG_CHARACTERS = 400


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A server that answers `/ping` on this port of the loopback."""

    port: int
    process: subprocess.Popen[bytes]


class Nodes:
    """Servers by what they serve: the same files with the same variables are served by the same process.

    So a test that goes through hundreds of deployments of two models starts two processes.
    """

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="onnx-ops-nodes-"))
        self._running: dict[str, Node] = {}

    def start(self, files: Mapping[str, bytes], variables: Mapping[str, str]) -> Node | str:
        """A server of a model folder, or the end of the log of one that did not start."""
        key = digest_json([{name: digest_bytes(data) for name, data in files.items()}, dict(variables)])
        node = self._running.get(key)
        if node is not None and node.process.poll() is None:
            return node
        place = self._folder / str(len(list(self._folder.iterdir())))
        for name, data in files.items():
            path = place / "mounted" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        found = _start(place, variables)
        if isinstance(found, Node):
            self._running[key] = found
        return found

    def close(self) -> None:
        for node in self._running.values():
            node.process.send_signal(signal.SIGTERM)
        for node in self._running.values():
            try:
                node.process.wait(10)
            except subprocess.TimeoutExpired:
                node.process.kill()
                node.process.wait(10)
        shutil.rmtree(self._folder, ignore_errors=True)


def _start(place: Path, variables: Mapping[str, str]) -> Node | str:
    (place / "mounted").mkdir(parents=True, exist_ok=True)
    port = free_port()
    environment = {
        **{name: os.environ[name] for name in ("PATH", "HOME", "PYTHONPATH") if name in os.environ},
        **variables,
        "AZUREML_MODEL_DIR": str(place / "mounted"),
        "ONNX_OPS_HOST": "127.0.0.1",
        "ONNX_OPS_PORT": str(port),
        "ONNX_OPS_STATE_DIR": str(place / "state"),
    }
    log = place / "log"
    with log.open("wb") as sink:
        process = subprocess.Popen(
            [sys.executable, "-m", "onnx_ops.serving.container", "serve"],
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
    deadline = time.monotonic() + _START_S
    while time.monotonic() < deadline and process.poll() is None:
        if _ready(port):
            return Node(port=port, process=process)
        time.sleep(_PAUSE_S)
    if process.poll() is None:
        process.kill()
        process.wait()
    return log.read_text(encoding="utf-8", errors="replace")[-_LOG_CHARACTERS:]


def _ready(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=2)
    try:
        connection.request("GET", "/ping")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()
