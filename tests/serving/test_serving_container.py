"""The image's entrypoint: its variables, its model folder and its exit codes."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest

from onnx_ops import codec
from onnx_ops.domain.artifact import digest_bytes
from onnx_ops.domain.endpoint import Deployment
from onnx_ops.protocol.server_process import DEPLOYMENT_FILE, MODEL_FOLDER
from onnx_ops.testing.endpoints import scaling_deployment
from tests.serving.serving_process import wait_until
from tests.support.ports import free_port

COMMAND = [sys.executable, "-P", "-m", "onnx_ops.serving.container"]
BODY = json.dumps({"inputs": {"x": [[1.0, 2.0]]}}).encode()


class Container:
    """The entrypoint as a process without the variables of the test run."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self._folder, self._stack = folder, stack
        self.port = free_port()

    def start(
        self, *arguments: str, port: str = "ONNX_OPS_PORT", **given: str
    ) -> subprocess.Popen[str]:
        own = {
            "PATH": os.environ["PATH"],
            "TMPDIR": str(self._folder),
            "ONNX_OPS_HOST": "127.0.0.1",
        }
        environment = own | {port: str(self.port)} | given
        process = subprocess.Popen(
            [*COMMAND, *arguments], env=environment, stderr=subprocess.PIPE, text=True
        )
        self._stack.callback(self.stop, process)
        wait_until(lambda: process.poll() is not None or self.alive())
        return process

    def stop(self, process: subprocess.Popen[str]) -> int:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)
        return process.returncode

    def alive(self) -> bool:
        with suppress(OSError):
            return self.ask("/ping")[0] == 200
        return False

    def ask(self, path: str, body: bytes | None = None) -> tuple[int, Any, Mapping[str, str]]:
        headers = {} if body is None else {"content-type": "application/json"}
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", body, headers)
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status, json.load(answer), answer.headers


@pytest.fixture
def container(tmp_path: Path) -> Iterator[Container]:
    with ExitStack() as stack:
        yield Container(tmp_path, stack)


def released(folder: Path) -> Deployment:
    """Write a model with its record, as a release leaves it in a container."""
    deployment = scaling_deployment(folder / MODEL_FOLDER, name="v7", version="7", scale=2.0)
    (folder / DEPLOYMENT_FILE).write_bytes(codec.dumps(deployment))
    shutil.move(folder, moved := folder.with_name("moved"))
    shutil.move(moved, folder)
    return deployment


def test_container_with_model_without_deployment_record_serves_it(
    container: Container, tmp_path: Path
) -> None:
    scaling_deployment(tmp_path / "plain", name="any", version="1", scale=3.0)
    container.start(
        ONNX_OPS_MODEL_DIR=str(tmp_path / "plain"),
        ONNX_OPS_MODEL="scale",
        ONNX_OPS_SERVE_WORKERS="2",
    )
    assert container.ask("/v2/models/scale")[1]["name"] == "scale"
    assert container.ask("/invocations", BODY)[1]["predictions"]["y"] == [[3.0, 6.0]]


@pytest.mark.parametrize(
    ("arguments", "environment", "code", "said"),
    [
        (["train"], {}, 2, "unknown argument: train"),
        (
            [],
            {"ONNX_OPS_MODEL_DIR": "/unrouted"},
            2,
            "there is neither deployment.json nor model.onnx",
        ),
        (
            [],
            {"ONNX_OPS_STATE_DIR": "/proc/state"},
            4,
            "the folder for the server's state could not be created",
        ),
    ],
)
def test_container_with_invalid_argument_or_folder_exits_with_message_without_traceback(
    container: Container, arguments: list[str], environment: Mapping[str, str], code: int, said: str
) -> None:
    process = container.start(*arguments, **environment)
    output = process.communicate(timeout=60)[1]
    assert (process.returncode, said in output, "Traceback" in output) == (code, True, False)


def test_container_with_record_of_other_manifest_exits_with_digest_mismatch(
    container: Container, tmp_path: Path
) -> None:
    released(tmp_path / "ml")
    record = tmp_path / "ml" / DEPLOYMENT_FILE
    other = json.loads(record.read_bytes()) | {"manifest": digest_bytes(b"another")}
    record.write_text(json.dumps(other))
    process = container.start(ONNX_OPS_MODEL_DIR=str(tmp_path / "ml"))
    assert (process.returncode, "digest mismatch" in process.communicate()[1]) == (5, True)


def test_container_with_unloadable_model_exits_4(container: Container, tmp_path: Path) -> None:
    (tmp_path / "ml").mkdir()
    (tmp_path / "ml" / "model.onnx").write_bytes(b"no model")
    process = container.start(ONNX_OPS_MODEL_DIR=str(tmp_path / "ml"))
    output = process.communicate()[1].splitlines()[-1]
    assert (process.returncode, output.startswith("model: the model cannot be loaded")) == (
        4,
        True,
    ), output
