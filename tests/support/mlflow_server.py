"""A real MLflow tracking server for tests and benchmarks."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from tests.support.ports import free_port
from tests.support.processes import does_answer, running_process


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
    """Run a server, and yield its URL.

    Database, artifacts and log are in `folder`.

    Args:
        folder: made if it does not exist.
        database: SQLAlchemy URL; SQLite in the folder by default.
        artifacts: name of the folder of the artifacts.
        port: a free one by default.
        workers: number of processes.
        environ: variables beside those of this process.

    Raises:
        AssertionError: the server did not start; with its log.
    """
    folder.mkdir(parents=True, exist_ok=True)
    port = port or free_port()
    command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port)]
    command += [
        "--workers",
        str(workers),
        "--backend-store-uri",
        database or f"sqlite:///{folder}/mlflow.db",
    ]
    command += ["--artifacts-destination", str(folder / artifacts)]
    quiet = {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "MLFLOW_DISABLE_TELEMETRY": "true"}
    url, env = f"http://127.0.0.1:{port}", {**os.environ, **quiet, **(environ or {})}
    with running_process(
        command, folder / "server.log", lambda: does_answer(f"{url}/health"), cwd=folder, env=env
    ):
        yield url
