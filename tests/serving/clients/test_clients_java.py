"""The HTTP client of the JDK.

With every request, it offers to change to HTTP/2 (`Upgrade: h2c`).
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests.serving.serving_process import Server
from tests.support.extras import require_programs

HERE = Path(__file__).parent


@pytest.mark.services
def test_jdk_client_with_http2_upgrade_offer_receives_its_answers(types: Server) -> None:
    require_programs("java", "javac", packages="default-jdk-headless")
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
        "java",
        str(HERE / "InferClient.java"),
        f"http://127.0.0.1:{types.port}/v2/models/m/infer",
        body,
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    answers = [line.partition(" ") for line in done.stdout.splitlines()]
    assert [status for status, _, _ in answers] == ["200"] * 5
    assert {str(json.loads(text)["outputs"][0]["data"]) for _, _, text in answers} == {"[1.5, 2.0]"}
