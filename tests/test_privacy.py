"""Tools that onnx-ops loads send no reports to their makers."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest


@pytest.mark.parametrize(("given", "expected"), [(None, "1"), ("0", "0")])
def test_onnxruntime_telemetry_is_disabled_unless_enabled_by_environment(
    given: str | None, expected: str
) -> None:
    environ = {name: value for name, value in os.environ.items() if name != "ORT_DISABLE_TELEMETRY"}
    if given is not None:
        environ["ORT_DISABLE_TELEMETRY"] = given
    program = (
        "import onnx_ops.adapters.runtimes.onnxruntime, "
        "os; print(os.environ['ORT_DISABLE_TELEMETRY'])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], env=environ, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == expected
