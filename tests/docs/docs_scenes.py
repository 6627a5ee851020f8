"""Preconditions of pages: running servers and broken parts."""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import psutil

from onnx_ops import codec
from onnx_ops.adapters.endpoints.local import LocalEndpoints
from onnx_ops.app.context import open_project
from onnx_ops.domain.artifact import Manifest, digest_bytes, digest_file
from onnx_ops.domain.endpoint import Deployment
from onnx_ops.protocol.server_process import SERVER_FILE, ServerRecord
from onnx_ops.release.journal import Journal, list_bound_endpoints
from onnx_ops.testing.endpoints import state_of
from onnx_ops.testing.notifiers import WebhookSink
from tests.docs.docs_shell import Shell
from tests.support.git import commit_all, git
from tests.support.mlflow_server import mlflow_server
from tests.support.server import ServerFamily


def stop(project: Path) -> None:
    """End the project's servers after the background work of a rollback is done."""
    for process in psutil.process_iter(["cwd", "cmdline"]):
        words = process.info["cmdline"] or ()
        if process.info["cwd"] == str(project) and "onnx_ops.serving.main" not in words:
            process.wait(timeout=60)
    stop_endpoints(project)


def stop_endpoints(project: Path) -> None:
    opened = open_project(project)
    for endpoint in list_bound_endpoints(opened.context):
        LocalEndpoints(opened.settings.endpoints).stop(
            Journal.open(opened.context, endpoint).config
        )


@contextlib.contextmanager
def broken(what: str | None, project: Path, shell: Shell) -> Iterator[None]:
    """Break what a page names while its block runs."""
    match what:
        case None:
            yield
        case "the server is killed before this":
            kill_server(project)
            yield
        case "the supervisor is killed before this":
            kill_supervisor(project)
            yield
        case "MLflow cannot be reached during this":
            shell.run("export ONNX_OPS_TRACKING_URI=http://127.0.0.1:1")
            yield
            shell.run("unset ONNX_OPS_TRACKING_URI")
        case "an entry of the ledger is cut short; afterwards it is whole again":
            entry = project / ".onnx-ops" / "ledger" / "digits" / "00000002.jsonl"
            whole = entry.read_bytes()
            entry.write_bytes(whole[:60])
            yield
            entry.write_bytes(whole)
        case _:
            raise AssertionError(f"unknown value of `breaks`: {what}")


@contextlib.contextmanager
def there(what: str, project: Path, shell: Shell) -> Iterator[None]:
    """Provide what a page needs for its remaining blocks."""
    match what:
        case "a webhook for notifications":
            with WebhookSink().open() as inbox:
                shell.run(
                    f"export ONNX_OPS_NOTIFY=webhook ONNX_OPS_NOTIFY_WEBHOOK={inbox.url}/hook"
                )
                yield
                assert inbox.requests
        case "a repository with a remote, and a change that is not pushed":
            commit_all(project)
            git(project, "remote", "add", "origin", ".")
            git(project, "fetch", "--quiet", "origin")
            code = project / "models" / "train.py"
            code.write_text(code.read_text(encoding="utf-8") + "\n# changed\n", encoding="utf-8")
            yield
        case "the files of an endpoint whose server is not running":
            stop_endpoints(project)
            yield
        case "an MLflow server that may send webhooks to this machine":
            with webhook_server(project, shell):
                yield
        case "an installed webhook of an MLflow server":
            with webhook_server(project, shell):
                # The command creates the secret.
                shell.run("onnx-ops webhooks install --url http://127.0.0.1:8650/webhooks/mlflow")
                yield
        case "rows.json":
            (project / what).write_text(json.dumps([[0.0] * 64]), encoding="utf-8")
            yield
        case "a model of iris, and a server of it at port 8080":
            with iris_server(project):
                yield
        case _:
            raise AssertionError(f"unknown value of `with`: {what}")


@contextlib.contextmanager
def webhook_server(project: Path, shell: Shell) -> Iterator[None]:
    from cryptography.fernet import Fernet

    environ = {
        "MLFLOW_WEBHOOK_ALLOWED_SCHEMES": "http,https",
        "MLFLOW_WEBHOOK_ALLOW_PRIVATE_IPS": "true",
        "MLFLOW_WEBHOOK_SECRET_ENCRYPTION_KEY": Fernet.generate_key().decode(),
    }
    database = f"sqlite:///{project}/.onnx-ops/mlflow.db"
    with mlflow_server(project.parent / "mlflow", database=database, environ=environ) as url:
        shell.run(f"export ONNX_OPS_TRACKING_URI={url}")
        yield


@contextlib.contextmanager
def iris_server(project: Path) -> Iterator[None]:
    from skl2onnx import to_onnx
    from sklearn.datasets import load_iris
    from sklearn.linear_model import LogisticRegression

    data = load_iris()
    rows = data.data.astype(np.float32)
    fitted = LogisticRegression(max_iter=1000).fit(rows, data.target)
    model = to_onnx(
        fitted, rows[:1], options={"zipmap": False}, target_opset={"": 18, "ai.onnx.ml": 3}
    )
    onnx.save(model, project / "model.onnx")
    folder = project / "iris"
    folder.mkdir()
    shutil.copy(project / "model.onnx", folder)
    deployment = Deployment(
        name="v1",
        model="iris",
        version="1",
        variant="fp32",
        release=digest_bytes(b"iris"),
        manifest=Manifest(files={"model.onnx": digest_file(folder / "model.onnx")}).digest(),
        location=str(folder),
    )
    server = ServerFamily(folder=project.parent / "iris-state", port=8080)
    server.start()
    try:
        assert server.publish(state_of(deployment, v1=100), 1).status == 200
        yield
    finally:
        server.destroy()


def kill_supervisor(project: Path) -> None:
    """Send SIGKILL to the supervisor alone; its workers continue to answer."""
    folder = project / ".onnx-ops" / "endpoints" / "digits"
    supervisor = psutil.Process(codec.loads((folder / SERVER_FILE).read_bytes(), ServerRecord).pid)
    supervisor.send_signal(signal.SIGKILL)
    supervisor.wait(timeout=10)


def kill_server(project: Path) -> None:
    """Send SIGKILL to the supervisor and its workers, found by their state folder."""
    folder = project / ".onnx-ops" / "endpoints" / "digits"
    for process in psutil.process_iter(["cmdline", "cwd"]):
        if folder in [
            Path(process.info["cwd"] or "/", word) for word in process.info["cmdline"] or ()
        ]:
            process.send_signal(signal.SIGKILL)
            process.wait(timeout=10)
