"""The HTTP client of the JDK.

With every request, it offers to change to HTTP/2 (`Upgrade: h2c`).
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.serving.serving_process import Server

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def java() -> str:
    program = shutil.which("java")
    if program is None or shutil.which("javac") is None:
        lacking = (
            "no JDK is installed (Debian: apt-get install default-jdk-headless): "
            "its HTTP client is not tested"
        )
        if os.environ.get("ONNX_OPS_TEST_SERVICES") == "required":
            pytest.fail(lacking)
        pytest.skip(lacking)
    return program


@pytest.mark.services
def test_jdk_client_with_http2_upgrade_offer_receives_its_answers(types: Server, java: str) -> None:
    data = {"bool": [True, False], "text": ["a", "b"], "fp32": [1.5, 2]}
    tensors = [
        {
            "name": name,
            "datatype": "BYTES" if name == "text" else name.upper(),
            "shape": [1, 2],
            "data": data.get(name, [1, 2]),
        }
        for name in ("fp32", "fp16", "fp64", "int64", "int8", "uint64", "bool", "text")
    ]
    body = json.dumps({"inputs": tensors, "outputs": [{"name": "fp32_out"}]})
    command = [
        java,
        str(HERE / "InferClient.java"),
        f"http://127.0.0.1:{types.port}/v2/models/m/infer",
        body,
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    answers = [line.partition(" ") for line in done.stdout.splitlines()]
    assert [status for status, _, _ in answers] == ["200"] * 5
    assert {str(json.loads(text)["outputs"][0]["data"]) for _, _, text in answers} == {"[1.5, 2.0]"}
