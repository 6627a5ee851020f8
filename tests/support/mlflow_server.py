"""A real MLflow tracking server for tests and benchmarks."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from tests.support.ports import free_port

_PATIENCE = 120.0
"""Seconds within which it must answer. On a machine with much else to do it takes tens of them."""


@contextmanager
def mlflow_server(
    folder: Path,
    *,
    database: str = "",
    artifacts: str = "files",
    port: int = 0,
    workers: int = 1,
    environ: Mapping[str, str] | None = None,
) -> Iterator[str]:
    """A server's URL; database, artifacts and log are in `folder`.

    Args:
        folder: made if it is not there.
        database: SQLAlchemy URL; SQLite in the folder by default.
        artifacts: name of their folder.
        port: a free one by default.
        workers: processes.
        environ: variables beside those of this process.

    Raises:
        AssertionError: it did not start; with its log.
    """
    folder.mkdir(parents=True, exist_ok=True)
    port = port or free_port()
    command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--workers", str(workers), "--backend-store-uri", database or f"sqlite:///{folder}/mlflow.db"]
    command += ["--artifacts-destination", str(folder / artifacts)]
    quiet = {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "MLFLOW_DISABLE_TELEMETRY": "true"}
    log = folder / "server.log"
    with log.open("ab") as stream:
        server = subprocess.Popen(
            command, cwd=folder, env={**os.environ, **quiet, **(environ or {})}, stdout=stream, stderr=stream
        )
    try:
        _await(f"http://127.0.0.1:{port}/health", server, log)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.terminate()
        server.wait(timeout=60)


def _await(url: str, server: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + _PATIENCE
    while time.monotonic() < deadline:
        assert server.poll() is None, log.read_text()
        try:
            urllib.request.urlopen(url, timeout=2).close()
        except OSError:
            time.sleep(0.1)
        else:
            return
    raise AssertionError(log.read_text())
