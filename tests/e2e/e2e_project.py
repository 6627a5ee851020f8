"""A project of its own for the tests that run the real commands: its files copied, its state beside them."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
ONNX_OPS = Path(sys.executable).with_name("onnx-ops")
MLP = "configs/pipelines/digits-mlp.yaml"
COPIED = ("configs", "examples", "flows", "prefect.yaml")


@dataclass
class Project:
    """Runs `onnx-ops` as a user would: a process of its own, in the project's folder."""

    root: Path
    environ: dict[str, str] = field(default_factory=dict)

    def command(self, *arguments: str, environ: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [ONNX_OPS, *arguments],
            cwd=self.root,
            env=self.environment(environ),
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )

    def start(self, *arguments: str, environ: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [ONNX_OPS, *arguments],
            cwd=self.root,
            env=self.environment(environ),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def document(self, *arguments: str, code: int = 0, environ: Mapping[str, str] | None = None) -> Any:
        """The JSON document that a command prints, which must end with that exit code."""
        done = self.command(*arguments, "--json", environ=environ)
        assert done.returncode == code, f"exit {done.returncode}\n{done.stdout}\n{done.stderr}"
        return json.loads(done.stdout)

    def run(self, *overrides: str, code: int = 0, options: Sequence[str] = (), pipeline: str = MLP) -> Any:
        sets = [part for override in overrides for part in ("--set", override)]
        return self.document("run", pipeline, *sets, *options, code=code)

    def environment(self, extra: Mapping[str, str] | None = None) -> dict[str, str]:
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(("ONNX_OPS_", "MLFLOW_", "PREFECT_"))}
        return {**inherited, "ONNX_OPS_ACTOR": "tester", "COLUMNS": "200", **self.environ, **(extra or {})}

    def stop_endpoints(self) -> None:
        from onnx_ops.adapters.endpoints.server_process import ServerProcess

        self._end_what_a_rollback_left_to_do()
        folder = self.root / ".onnx-ops" / "endpoints"
        for endpoint in folder.iterdir() if folder.is_dir() else ():
            ServerProcess(endpoint, sys.executable).stop()

    def _end_what_a_rollback_left_to_do(self) -> None:
        """A process in the background that would bring an endpoint back as soon as it is stopped."""
        for place in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):  # it has ended, or is a stranger's
                if b"\0onnx_ops\0" in (place / "cmdline").read_bytes() and (place / "cwd").samefile(self.root):
                    os.kill(int(place.name), signal.SIGKILL)


def make_project(folder: Path) -> Project:
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        elif source.is_file():
            shutil.copyfile(source, folder / name)
    for pipeline in (folder / "configs" / "pipelines").glob("*.yaml"):
        # Tests share their machine with each other; where latency is the subject, a test sets the limit itself.
        text = pipeline.read_text(encoding="utf-8")
        pipeline.write_text(text.replace("max_regression: 5%", "max_regression: 100%"), encoding="utf-8")
    (folder / "onnx-ops.toml").write_text("# settings of the tests' project\n", encoding="utf-8")
    return Project(folder)


def until(condition: Any, *, seconds: float = 60.0, what: str = "condition") -> Any:
    """Wait for something to become true; the time is a limit of patience, not a measurement."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if found := condition():
            return found
        time.sleep(0.05)
    raise AssertionError(f"{what} did not come true within {seconds:.0f} s")
