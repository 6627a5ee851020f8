"""A project's repository, a fake GitHub, and the machines of the workflows' jobs."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onnx_ops.app.scaffold import PresetName
from onnx_ops.testing.notifiers import ReceivedRequest, Reply, WebhookSink
from tests.install.workflow_runner import Runner, bare_path
from tests.support.git import commit_all, git
from tests.support.processes import end_all

TOKEN = "ghs_a-token"  # noqa: S105 (of no account)
MACHINE = re.compile(r"PIP_|UV_|SSL_|https?_proxy|no_proxy|OMP_", re.IGNORECASE)
"""Variables of the machine, such as those for the source of its packages."""


@dataclass
class World:
    """A repository of the project, and a fake server of GitHub.

    Each job runs on a machine with separate folders: home, workspace and temporary files.
    """

    name: str
    origin: Path
    folder: Path
    github: WebhookSink

    def commit(self, *, was: str = "", becomes: str = "") -> str:
        """Commit all files, after a change of the pipeline file; return the commit."""
        file = self.origin / "configs" / "pipelines" / f"{self.name}.yaml"
        text = file.read_text(encoding="utf-8")
        assert was in text
        if was:
            file.write_text(text.replace(was, becomes), encoding="utf-8")
        return commit_all(self.origin)

    def run(
        self,
        job: str,
        event_name: str,
        event: dict[str, Any],
        *,
        workflow: str = "model-commit.yml",
        hosted: bool = True,
        token: str = TOKEN,
        secrets: Mapping[str, str] | None = None,
        inputs: Mapping[str, str] | None = None,
        code: int = 0,
    ) -> Runner:
        """Run a job of the last commit, after the jobs whose artifacts it needs.

        The job must end with the given exit code.

        A runner that is not hosted keeps its state.
        """
        machine = self.folder / "machines" / job
        checkout, home = machine / "checkout", machine / "home"
        shutil.rmtree(checkout, ignore_errors=True)
        home.mkdir(parents=True, exist_ok=True)
        if job == "publish":
            checkout.mkdir()
        else:
            git(machine, "clone", "--quiet", str(self.origin), str(checkout))
        temp = machine / "temp"
        # The environments are kept, since new environments would be equal.
        for path in temp.glob("*"):
            if path.name not in ("venv", "publish"):
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        head = git(self.origin, "rev-parse", "HEAD")
        (machine / "event.json").write_text(json.dumps(event), encoding="utf-8")
        environ = {name: text for name, text in os.environ.items() if MACHINE.match(name)} | {
            "PATH": bare_path(machine / "tools"),
            "HOME": str(home),
            "CI": "true",
            "GITHUB_ACTIONS": "true",
            "GITHUB_ACTOR": "octocat",
            "GITHUB_API_URL": self.github.url,
            "GITHUB_EVENT_PATH": str(machine / "event.json"),
            "GITHUB_REPOSITORY": "acme/models",
            "GITHUB_RUN_ID": "42",
            "GITHUB_SHA": head,
            "RUNNER_ENVIRONMENT": "github-hosted" if hosted else "self-hosted",
        }
        if not hosted:
            environ["ONNX_OPS_STATE"] = str(self.folder / "state")
        contexts = {
            "github": {"event_name": event_name, "event": event, "sha": head, "token": token},
            "inputs": dict(inputs or {}),
            "vars": {},
            "secrets": dict(secrets or {}),
            "runner": {"temp": str(temp)},
        }
        runner = Runner(
            origin=self.origin,
            checkout=checkout,
            artifacts=self.folder / "artifacts",
            temp=temp,
            contexts=contexts,
            environ=environ,
        )
        assert runner.run_job(workflow, job) == code, log(runner)
        return runner

    def push(self, before: str, *, hosted: bool, token: str = TOKEN) -> Runner:
        """Run the jobs of a push; return the machine of the job that releases."""
        self.forget_artifacts()
        self.run("evaluate", "push", {"before": before}, token=token)
        return self.run("release", "push", {"before": before}, hosted=hosted, token=token)

    def forget_artifacts(self) -> None:
        """Begin another run of the workflow."""
        shutil.rmtree(self.folder / "artifacts", ignore_errors=True)

    def status(self, runner: Runner) -> dict[str, Any]:
        """Return the status of the endpoint after a job, whose processes have ended."""
        command = [str(runner.temp / "venv" / "bin" / "onnx-ops"), "status", "--json"]
        done = subprocess.run(
            command,
            cwd=runner.checkout,
            env=runner.environ,
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        (endpoint,) = json.loads(done.stdout)
        found: dict[str, Any] = endpoint
        return found


@contextmanager
def open_world(onnx_ops: Path, folder: Path, preset: PresetName) -> Iterator[World]:
    """Yield a committed project; end the processes that its jobs have left.

    Args:
        onnx_ops: the command of an installed release, which makes the project.
    """
    environ = {"PATH": "/usr/bin:/bin", "HOME": str(folder)}
    subprocess.run(
        [onnx_ops, "init", "fraud", "--preset", preset], cwd=folder, env=environ, check=True
    )
    with WebhookSink(answer).open() as github:
        made = World(name="fraud", origin=folder / "fraud", folder=folder, github=github)
        made.commit()
        try:
            yield made
        finally:
            end_all(folder)


def answer(letter: ReceivedRequest) -> Reply:
    """Answer as GitHub does for a repository without comments."""
    return (
        Reply(status=200, document=[]) if letter.method == "GET" else Reply(status=201, document={})
    )


def log(runner: Runner) -> str:
    """Return the output of the steps of a job."""
    return "\n".join(
        f"--- {step.name} ended with {step.code}\n{step.output}" for step in runner.done
    )
