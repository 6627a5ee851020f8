"""Projects for the tests that run the real commands.

Each project has its own files and state.

A project that has released is made once in a test session (`Releases`). It is copied for every test
that begins in that state.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onnx_ops.file_locks import hold_lock
from tests.support.checkout import copy_parts
from tests.support.command import PROGRAM, Result, clean, run_command
from tests.support.server import stop_endpoints

if TYPE_CHECKING:
    from onnx_ops.adapters.registries.mlflow import MlflowRegistry

MLP = "configs/pipelines/digits-mlp.yaml"
ONLY_FP32 = "quantize=[]"
SECOND = "train.with.seed=8"
"""Setting that distinguishes the second release of `Releases` from the first."""


@dataclass
class Project:
    """A project in whose folder `onnx-ops` runs as a user would run it."""

    root: Path
    environ: dict[str, str] = field(default_factory=dict)

    def command(self, *arguments: str, environ: Mapping[str, str] | None = None) -> Result:
        """Run a command in this process, which has already imported what it needs."""
        return run_command(*arguments, cwd=self.root, environ=self.environment(environ))

    def process(self, *arguments: str, environ: Mapping[str, str] | None = None) -> Result:
        """Run a command in a separate process.

        It is for variables that are read only once, at the start of a process.
        """
        given = self.environment(environ)
        done = subprocess.run(
            [PROGRAM, *arguments],
            cwd=self.root,
            env=given,
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
        return Result(done.returncode, done.stdout, done.stderr)

    def start(
        self, *arguments: str, environ: Mapping[str, str] | None = None
    ) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [PROGRAM, *arguments],
            cwd=self.root,
            env=self.environment(environ),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def document(
        self, *arguments: str, code: int = 0, environ: Mapping[str, str] | None = None
    ) -> Any:
        """Return the JSON document that a command prints; assert the exit code."""
        return self.command(*arguments, "--json", environ=environ).parsed(code)

    def status(self, endpoint: str = "digits") -> Any:
        """Return the output of `onnx-ops status` for one endpoint."""
        (status,) = self.document("status", endpoint)
        return status

    def run(
        self, *overrides: str, code: int = 0, options: Sequence[str] = (), pipeline: str = MLP
    ) -> Any:
        sets = [part for override in overrides for part in ("--set", override)]
        return self.document("run", pipeline, *sets, *options, code=code)

    def environment(self, extra: Mapping[str, str] | None = None) -> dict[str, str]:
        return clean(
            {"ONNX_OPS_ACTOR": "tester", "COLUMNS": "200", **self.environ, **(extra or {})}
        )

    def ask(
        self, endpoint: str, path: str, body: object, content_type: str = "application/json"
    ) -> Any:
        """Send bytes, or a document as JSON, to an endpoint; return the answer."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        url = f"{self.status(endpoint)['address']}/{path}"
        request = urllib.request.Request(url, data, {"content-type": content_type})
        with urllib.request.urlopen(request, timeout=30) as answer:
            return json.load(answer)

    @property
    def registry(self) -> MlflowRegistry:
        """Return the project's registry, to read it directly."""
        from onnx_ops.adapters.registries.mlflow import MlflowRegistry

        state = self.root / ".onnx-ops"
        return MlflowRegistry(
            f"sqlite:///{state / 'mlflow.db'}", artifact_root=str(state / "mlartifacts")
        )

    def serve(self) -> None:
        """Start the endpoint of a copied project, by one reconciliation in this process."""
        from onnx_ops.app.context import open_project
        from onnx_ops.release.reconcile import reconcile_until_stable

        reconcile_until_stable(open_project(self.root).context, "digits", actor="tester")

    def stop_endpoints(self) -> None:
        self._end_what_a_rollback_left_to_do()
        stop_endpoints(self.root / ".onnx-ops" / "endpoints")

    def _end_what_a_rollback_left_to_do(self) -> None:
        """Kill background processes that would restart an endpoint after it is stopped.

        A rollback starts such a process.
        """
        for place in Path("/proc").glob("[0-9]*"):
            # A process can end meanwhile, or belong to another user.
            with suppress(OSError):
                if b"\0onnx_ops\0" in (place / "cmdline").read_bytes() and (place / "cwd").samefile(
                    self.root
                ):
                    os.kill(int(place.name), signal.SIGKILL)


def make_project(folder: Path) -> Project:
    copy_parts(folder, "configs", "examples", "flows", "prefect.yaml")
    for pipeline in (folder / "configs" / "pipelines").glob("*.yaml"):
        # Tests share their machine, and send too little load to judge a canary by. A test about
        # latency or about the rollout sets these values.
        text = pipeline.read_text(encoding="utf-8").replace(
            "max_regression: 5%", "max_regression: 100%"
        )
        pipeline.write_text(
            re.sub(r"rollout: {steps: .*}", "rollout: {steps: [100%]}", text), encoding="utf-8"
        )
    (folder / "onnx-ops.toml").write_text("# settings of the tests' project\n", encoding="utf-8")
    return Project(folder)


class Releases:
    """Snapshots of one project, made in `folder` by the first process that needs them.

    All processes of a test session share them.

    Both were made with `quantize=[]`. `once`: `digits` serves the release of seed 7, and that of
    seed 8 is measured and judged against it, but not registered. `twice`: `digits` serves the
    release of seed 8, and seed 7 before it.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._origin = folder / "project"

    def once(self, folder: Path) -> Project:
        """Copy the first snapshot; its endpoint does not run."""
        return self._copy("once", folder)

    def twice(self, folder: Path) -> Project:
        """Copy the second snapshot; its endpoint does not run."""
        return self._copy("twice", folder)

    def _copy(self, name: str, folder: Path) -> Project:
        self._make()
        shutil.copytree(self._folder / name, folder, dirs_exist_ok=True)
        return Project(folder)

    def _make(self) -> None:
        self._folder.mkdir(exist_ok=True)
        with hold_lock(self._folder / "lock"):
            if (self._folder / "twice").is_dir():
                return
            shutil.rmtree(self._origin, ignore_errors=True)
            self._origin.mkdir()
            project = make_project(self._origin)
            try:
                project.run(ONLY_FP32)
                project.run(ONLY_FP32, SECOND, options=("--until", "gate"))
                self._keep("once")
                project.run(ONLY_FP32, SECOND)
                self._keep("twice")
            finally:
                project.stop_endpoints()

    def _keep(self, name: str) -> None:
        """Copy the project as it is, except for the files of its running server."""
        shutil.rmtree(self._folder / name, ignore_errors=True)
        shutil.copytree(
            self._origin,
            self._folder / name,
            ignore=shutil.ignore_patterns("endpoints", "__pycache__"),
        )
