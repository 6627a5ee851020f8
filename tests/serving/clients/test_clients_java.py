"""The HTTP client of the JDK, which offers to change to HTTP/2 with every request (`Upgrade: h2c`)."""

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
        lacking = "no JDK is installed (Debian: apt-get install default-jdk-headless): its HTTP client is not tested"
        if os.environ.get("ONNX_OPS_TEST_SERVICES") == "required":
            pytest.fail(lacking)
        pytest.skip(lacking)
    return program


@pytest.mark.services
def test_the_client_of_the_jdk_gets_the_answers_to_its_bodies(types: Server, java: str) -> None:
    tensor = {"name": "fp32", "datatype": "FP32", "shape": [1, 2], "data": [1.5, 2]}
    others = [
        {"name": name, "datatype": datatype, "shape": [1, 2], "data": data}
        for name, datatype, data in (
            ("fp16", "FP16", [1, 2]),
            ("fp64", "FP64", [1, 2]),
            ("int64", "INT64", [1, 2]),
            ("int8", "INT8", [1, 2]),
            ("uint64", "UINT64", [1, 2]),
            ("bool", "BOOL", [True, False]),
            ("text", "BYTES", ["a", "b"]),
        )
    ]
    body = json.dumps({"inputs": [tensor, *others], "outputs": [{"name": "fp32_out"}]})
    command = [java, str(HERE / "InferClient.java"), f"http://127.0.0.1:{types.port}/v2/models/m/infer", body]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    answers = [line.partition(" ") for line in done.stdout.splitlines()]
    assert [status for status, _, _ in answers] == ["200"] * 5
    assert {str(json.loads(text)["outputs"][0]["data"]) for _, _, text in answers} == {"[1.5, 2.0]"}
