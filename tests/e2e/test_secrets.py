"""Secrets appear in no output, file, tag or process list.

They are secrets of the environment, of settings, of files and of URLs.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from onnx_ops.app.scaffold import scaffold
from tests.support.git import commit_all
from tests.support.processes import end_all

# The test runs a pipeline twice, so it runs only nightly.
pytestmark = pytest.mark.nightly

VARIABLES = (
    "AWS_SECRET_ACCESS_KEY",
    "AWS_SESSION_TOKEN",
    "AZURE_CLIENT_SECRET",
    "AZURE_STORAGE_CONNECTION_STRING",
    "GITHUB_TOKEN",
    "HF_TOKEN",
    "MLFLOW_TRACKING_PASSWORD",
    "MLFLOW_TRACKING_TOKEN",
    "ONNX_OPS_NOTIFY_GITHUB_TOKEN",
    "ONNX_OPS_PROMETHEUS_TOKEN",
    "ONNX_OPS_SERVERS_TOKEN",
    "ONNX_OPS_WEBHOOK_SECRET",
    "PREFECT_API_KEY",
)
COMMANDS = (
    "check configs/pipelines/shop.yaml configs/pipelines/remote.yaml",
    "check configs/pipelines/path.yaml",
    "plan configs/pipelines/shop.yaml",
    "plan configs/pipelines/remote.yaml --json",
    "run configs/pipelines/shop.yaml",
    "run configs/pipelines/remote.yaml --until export",
    "run configs/pipelines/remote.yaml --until export --json",
    "run configs/pipelines/shop.yaml --set train.with.seed=8 --details",
    "status",
    "status --json",
    "history shop --json",
    "doctor",
    "doctor --json",
    "rollback shop --reason because",
    "reconcile",
    "report shop/1 --out report.html",
    "keys list",
    "recheck shop",
    "prune --dry-run",
)
BROKEN = (
    "status",
    "doctor",
    "promote shop/1 --target cpu-1t",
    "run configs/pipelines/shop.yaml --set train.with.seed=9",
)
"""Commands whose services do not answer; their messages contain the addresses."""


def _secret(place: str) -> str:
    return f"s3cr3t-{place.lower().replace('_', '-')}-0f1e2d3c"


@contextmanager
def _watched_processes() -> Iterator[set[str]]:
    """Collect the command lines of all processes until the end of the block."""
    lines: set[str] = set()
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(0.02):
            for file in Path("/proc").glob("[0-9]*/cmdline"):
                with suppress(OSError):
                    lines.add(file.read_bytes().decode(errors="replace"))

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield lines
    finally:
        ended.set()
        watcher.join()


def _write_project(root: Path) -> None:
    """Write a project with three pipelines.

    One is the usual one, one has a model at a URL, and one names its data by a variable.
    """
    scaffold(root, "shop", "sklearn")
    folder = root / "configs" / "pipelines"
    shop = (folder / "shop.yaml").read_text(encoding="utf-8")
    url = (
        f"https://user:{_secret('password of a URL')}@127.0.0.1:9/model.onnx"
        f"?sig={_secret('signature of a URL')}"
    )
    sections = f'model: "{url}"\nexport: {{framework: onnx}}\nbenchmark: {{targets: [cpu-1t]}}\n'
    remote = shop.partition("train:\n")[0] + sections
    path = shop.partition("deploy:\n")[0].replace(
        "{sklearn: digits, split: test", "{file: '${env:FOLDER}/x.npz'"
    )
    for name, text in {"remote": remote, "path": path}.items():
        (folder / f"{name}.yaml").write_text(
            text.replace("pipeline: shop", f"pipeline: {name}"), encoding="utf-8"
        )
    with (root / "onnx-ops.toml").open("a", encoding="utf-8") as stream:
        stream.write(
            'allowed_variables = "FOLDER"\nallowed_paths = "https://user, /"\nnotify = "webhook"\n'
        )
    commit_all(root)


def test_secrets_appear_in_no_output_file_or_process_list(tmp_path: Path) -> None:
    root = tmp_path / "shop"
    _write_project(root)
    hook = f"http://127.0.0.1:9/hooks/{_secret('webhook')}"
    environ = {
        **os.environ,
        **{name: _secret(name) for name in VARIABLES},
        "FOLDER": f"/srv/{_secret('folder')}",
        "HOME": str(tmp_path / "home"),
        "MLFLOW_TRACKING_USERNAME": "user",
        "ONNX_OPS_NOTIFY_WEBHOOK": hook,
    }
    (tmp_path / "home").mkdir()
    broken = {
        **environ,
        "ONNX_OPS_TRACKING_URI": f"postgresql+psycopg2://user:{_secret('database')}@127.0.0.1:9/mlflow",
        "ONNX_OPS_STORE": f"s3://key:{_secret('store')}@bucket/prefix",
    }
    outputs = []
    command = [sys.executable, "-m", "onnx_ops"]
    try:
        with _watched_processes() as lines:
            for arguments, given in [(one, environ) for one in COMMANDS] + [
                (one, broken) for one in BROKEN
            ]:
                done = subprocess.run(
                    [*command, *arguments.split()],
                    cwd=root,
                    env=given,
                    capture_output=True,
                    text=True,
                    check=False,
                )
                assert "Traceback" not in done.stderr, done.stderr
                outputs.append(f"$ {arguments}\n{done.stdout}{done.stderr}")
    finally:
        end_all(tmp_path)
    private = "".join((root / ".onnx-ops/keys/signing.pem").read_text().splitlines()[1:-1])[:40]
    secrets = [_secret(name) for name in VARIABLES]
    secrets += [_secret(place) for place in ("folder", "webhook", "database", "store")]
    secrets += [_secret(f"{what} of a URL") for what in ("password", "signature")]
    assert len(secrets) >= 12
    shown = "\n".join(outputs)
    assert "v1" in shown, "nothing was released"
    found = [
        line for line in shown.splitlines() for secret in [*secrets, private] if secret in line
    ]
    assert found == []
    assert [line for line in lines for secret in [*secrets, private] if secret in line] == []
    written_by_hand = {root / "configs/pipelines/remote.yaml"}
    for file in tmp_path.rglob("*"):
        if (
            not file.is_file()
            or file.is_symlink()
            or file in written_by_hand
            or ".git" in file.parts
        ):
            continue
        content = file.read_bytes()
        assert [secret for secret in secrets if secret.encode() in content] == [], file
