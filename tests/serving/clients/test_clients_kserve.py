"""KServe's REST client, in an isolated environment.

The environment is built once and kept in pytest's cache.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path

import pytest

from tests.serving.serving_process import Server

HERE = Path(__file__).parent


@pytest.fixture(scope="session")
def interpreter(pytestconfig: pytest.Config) -> Path:
    requirements = HERE / "kserve_requirements.txt"
    digest = hashlib.sha256(requirements.read_bytes() + sys.version.encode()).hexdigest()[:12]
    assert pytestconfig.cache is not None
    folder = pytestconfig.cache.mkdir(f"kserve-{digest}")
    python = folder / "bin" / "python"
    done = folder / "complete"
    if not done.exists():
        for command in (
            [sys.executable, "-m", "venv", "--clear", str(folder)],
            [str(python), "-m", "pip", "install", "--quiet", "--requirement", str(requirements)],
        ):
            built = subprocess.run(
                command, capture_output=True, text=True, timeout=600, check=False
            )
            assert built.returncode == 0, built.stderr[-4000:]
        done.touch()
    return python


@pytest.mark.services
# The test takes a minute. KServe's packages conflict with those of this project, so they have an
# isolated environment.
@pytest.mark.nightly
def test_kserve_client_receives_health_tensors_and_errors(types: Server, interpreter: Path) -> None:
    command = [str(interpreter), str(HERE / "kserve_calls.py"), f"http://127.0.0.1:{types.port}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (0, "ok"), done.stderr[-4000:]
