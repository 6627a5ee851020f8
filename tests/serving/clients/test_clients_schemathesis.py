"""Schemathesis against the server's own OpenAPI document."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.serving.serving_process import Server

CHECKS = (
    "not_a_server_error,status_code_conformance,content_type_conformance,"
    "response_schema_conformance"
)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("name", "phases"),
    [
        ("iris", "coverage"),
        pytest.param("iris", "fuzzing,stateful", marks=pytest.mark.nightly),
        pytest.param("types", "coverage,fuzzing,stateful", marks=pytest.mark.nightly),
    ],
)
def test_server_under_schemathesis_conforms_to_its_openapi_document(
    name: str, phases: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    server: Server = request.getfixturevalue(name)
    command = [
        str(Path(sys.executable).with_name("schemathesis")),
        *("run", f"http://127.0.0.1:{server.port}/openapi.json", "--checks", CHECKS),
        *("--max-examples", "10", "--phases", phases),
        *("--generation-deterministic", "--no-color", "--continue-on-failure"),
    ]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=600, check=False, cwd=tmp_path
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert server.call("GET", "/v2/health/ready").status == 200
