"""A new project on machines that have nothing of ours: what its files name exists, and its workflows run."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from onnx_ops.app.scaffold import PROJECTS, TemplateName
from onnx_ops.testing.notifiers import ReceivedRequest, Reply, WebhookSink
from tests.install.bare_environments import install_base, installed_in
from tests.install.workflow_runner import Runner, bare_path
from tests.support.git import commit_all, git
from tests.support.processes import end_all

pytestmark = pytest.mark.nightly  # installs the platform into new environments: minutes for each template

MACHINE = re.compile(r"PIP_|UV_|SSL_|https?_proxy|no_proxy|OMP_", re.IGNORECASE)
"""Variables of the machine, such as where its packages come from."""
TOKEN = "ghs_0123456789"  # noqa: S105 (nobody's)


@dataclass
class World:
    """A repository of the project, its checkout on a runner, and a server that stands for GitHub."""

    name: str
    origin: Path
    folder: Path
    github: WebhookSink

    def commit(self, *, was: str = "", becomes: str = "") -> str:
        """Commit all that is there, after a change of the pipeline file; return the commit."""
        file = self.origin / "configs" / "pipelines" / f"{self.name}.yaml"
        text = file.read_text(encoding="utf-8")
        assert was in text
        if was:
            file.write_text(text.replace(was, becomes), encoding="utf-8")
        return commit_all(self.origin)

    def runner(
        self, event_name: str, event: dict[str, Any], *, hosted: bool, token: str = TOKEN, **inputs: str
    ) -> Runner:
        """Return a machine with a new checkout of the last commit; one that is not hosted keeps its state."""
        checkout, temp, artifacts = (self.folder / name for name in ("checkout", "temp", "artifacts"))
        for folder in (checkout, artifacts):
            shutil.rmtree(folder, ignore_errors=True)
        git(self.folder, "clone", "--quiet", str(self.origin), str(checkout))
        head = git(self.origin, "rev-parse", "HEAD")
        (self.folder / "event.json").write_text(json.dumps(event), encoding="utf-8")
        environ = {name: text for name, text in os.environ.items() if MACHINE.match(name)} | {
            "PATH": bare_path(self.folder / "tools"),
            "HOME": str(self.folder / "home"),
            "CI": "true",
            "GITHUB_ACTIONS": "true",
            "GITHUB_ACTOR": "octocat",
            "GITHUB_API_URL": self.github.url,
            "GITHUB_EVENT_PATH": str(self.folder / "event.json"),
            "GITHUB_REPOSITORY": "acme/models",
            "GITHUB_RUN_ID": "42",
            "GITHUB_SHA": head,
            "RUNNER_ENVIRONMENT": "github-hosted" if hosted else "self-hosted",
        }
        if not hosted:
            environ["ONNX_OPS_STATE"] = str(self.folder / "state")
        contexts = {
            "github": {"event_name": event_name, "event": event, "sha": head, "token": token},
            "inputs": inputs,
            "vars": {},
            "secrets": {},
            "runner": {"temp": str(temp)},
        }
        return Runner(
            origin=self.origin, checkout=checkout, artifacts=artifacts, temp=temp, contexts=contexts, environ=environ
        )

    def publish(self, runner: Runner) -> Runner:
        """Run the job that publishes, on a machine of its own with what the job of a runner has left."""
        machine = self.folder / "publisher"
        shutil.rmtree(machine, ignore_errors=True)
        (machine / "checkout").mkdir(parents=True)
        environ = {**runner.environ, "HOME": str(machine), "PATH": bare_path(machine / "bin")}
        own = replace(
            runner,
            checkout=machine / "checkout",
            temp=machine / "temp",
            contexts={**runner.contexts, "runner": {"temp": str(machine / "temp")}},
            environ=environ,
            done=[],
        )
        assert own.run_job("model-commit.yml", "publish") == 0, log(own)
        return own

    def status(self, runner: Runner) -> dict[str, Any]:
        """Return what the endpoint does after a job, whose processes the runner has ended."""
        command = [str(runner.temp / "venv" / "bin" / "onnx-ops"), "status", "--json"]
        done = subprocess.run(
            command, cwd=runner.checkout, env=runner.environ, capture_output=True, text=True, check=False, timeout=120
        )
        assert done.returncode == 0, done.stdout + done.stderr
        (endpoint,) = json.loads(done.stdout)
        found: dict[str, Any] = endpoint
        return found


def answer(letter: ReceivedRequest) -> Reply:
    return Reply(status=200, document=[]) if letter.method == "GET" else Reply(status=201, document={})


@pytest.fixture(scope="module")
def onnx_ops(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The command of the wheel in an environment of its own."""
    return install_base(tmp_path_factory.mktemp("installed")).with_name("onnx-ops")


@pytest.fixture(params=list(PROJECTS))
def world(request: pytest.FixtureRequest, onnx_ops: Path, tmp_path: Path) -> Iterator[World]:
    template: TemplateName = request.param
    origin = tmp_path / "fraud"
    environ = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}
    subprocess.run([onnx_ops, "init", "fraud", "--template", template], cwd=tmp_path, env=environ, check=True)
    (tmp_path / "home").mkdir()
    with WebhookSink(answer).open() as github:
        made = World(name="fraud", origin=origin, folder=tmp_path, github=github)
        made.commit()
        try:
            yield made
        finally:
            end_all(tmp_path)


def log(runner: Runner) -> str:
    return "\n".join(f"--- {step.name} ended with {step.code}\n{step.output}" for step in runner.done)


def test_every_workflow_runs_on_a_bare_machine(world: World) -> None:
    first = git(world.origin, "rev-parse", "HEAD")
    pipeline = yaml.safe_load((world.origin / "configs" / "pipelines" / "fraud.yaml").read_text(encoding="utf-8"))
    seed = 7 if "train" in pipeline else 0
    second_release = str(2 + len(pipeline.get("quantize", ())))
    # A pull request is judged, and nothing is registered. (The machine of these tests is shared.)
    head = world.commit(was="max: 2 MB", becomes="max: 3 MB")
    if "quantize" in pipeline:
        head = world.commit(was="max_regression: 5%", becomes="max_regression: 80%")
    pull = {"pull_request": {"number": 7, "head": {"sha": head}, "base": {"sha": first}}}
    runner = world.runner("pull_request", pull, hosted=True)
    assert runner.run_job("model-commit.yml", "judge") == 0, log(runner)
    assert not world.github.requests
    published = world.publish(runner)
    assert [letter.method for letter in world.github.requests] == ["POST", "GET", "POST"]
    assert "fraud.yaml: PASS" in world.github.requests[-1].document["body"]
    assert "fraud.yaml: PASS" in published.summary
    assert not (runner.checkout / ".onnx-ops" / "ledger").exists()
    # A push on a hosted runner stops at its gates; without a token the summary is written all the same.
    runner = world.runner("push", {"before": first}, hosted=True, token="")
    assert runner.run_job("model-commit.yml", "release") == 0, log(runner)
    published = world.publish(runner)
    assert "fraud.yaml: PASS" in published.summary
    assert "Nothing was registered or released" in published.summary
    assert "no token was given" in log(published)
    assert not (runner.checkout / ".onnx-ops" / "ledger").exists()
    # On a runner that keeps its state what is pushed is registered, promoted by a person, and rolled back.
    world.commit(was="promote: auto", becomes="promote: manual")
    for version in ("1", second_release):
        if version == second_release:
            world.commit(was=f"seed: {seed}", becomes=f"seed: {seed + 1}")
        runner = world.runner("push", {"before": first}, hosted=False)
        assert runner.run_job("model-commit.yml", "release") == 0, log(runner)
        assert "Nothing was registered or released" not in log(runner)
        inputs = {"model": "fraud", "version": version, "target": "cpu-1t", "reason": "it's better"}
        runner = world.runner("workflow_dispatch", {}, hosted=False, **inputs)
        assert runner.run_job("promote.yml", "promote") == 0, log(runner)
        found = world.status(runner)
        assert (found["answers"], f"v{version}" in found["traffic"]) == (True, True), found
    inputs = {"endpoint": "fraud", "to": "", "reason": "wrong on sevens", "force": "false"}
    runner = world.runner("workflow_dispatch", {}, hosted=False, **inputs)
    assert runner.run_job("rollback.yml", "rollback") == 0, log(runner)
    assert "wrong on sevens" in runner.summary
    assert world.status(runner)["traffic"] == {"v1": 100}


STAGES = ("build", "platform")
"""Stages of the image that install something."""


@pytest.mark.parametrize("stage", STAGES)
def test_the_commands_of_the_image_run(stage: str, onnx_ops: Path, tmp_path: Path) -> None:
    """No engine builds it here: what a stage copies is copied, and what it runs is run, below a folder."""
    init = [str(onnx_ops), "init", "fraud"]
    subprocess.run(init, cwd=tmp_path, env={"PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}, check=True)
    project, root = tmp_path / "fraud", tmp_path / "root"
    work = root / "src"
    for folder in (work, root / "opt", root / "tmp"):
        folder.mkdir(parents=True)
    text = (project / "infra" / "docker" / "Dockerfile").read_text(encoding="utf-8").replace("\\\n", " ")
    lines = text[text.index(f" AS {stage}") :].split("\nFROM ")[0].splitlines()
    environ = {name: value for name, value in os.environ.items() if MACHINE.match(name)} | {
        "PATH": bare_path(tmp_path / "tools"),
        "HOME": str(tmp_path),
        "PYTHON_IMAGE": "python:3.11",
    }
    for line in lines:
        instruction, _, rest = line.partition(" ")
        if instruction == "COPY":
            *names, place = rest.split()
            for name in names:
                if (project / name).is_dir():
                    shutil.copytree(project / name, work / place, dirs_exist_ok=True)
                else:
                    shutil.copy(project / name, work / place)
        elif instruction == "RUN":
            script = re.sub(r"(?<![\w.])/(opt|tmp|state)\b", rf"{root}/\1", rest)
            done = subprocess.run(
                ["sh", "-c", script], cwd=work, env=environ, capture_output=True, text=True, timeout=1200, check=False
            )
            assert done.returncode == 0, done.stdout + done.stderr
    python = root / "opt" / "onnx-ops" / "bin" / "python"
    packages = installed_in(python)
    if stage == "build":
        assert {"onnx-ops", "httptools"} <= packages
        assert not packages & {"mlflow", "prefect", "pip", "scikit-learn", "fraud"}
        bill = json.loads((root / "opt" / "onnx-ops" / "sbom.cdx.json").read_text(encoding="utf-8"))
        assert "onnx-ops" in {component["name"] for component in bill["components"]}
    else:
        assert {"onnx-ops", "mlflow", "prefect", "boto3", "psycopg2-binary", "scikit-learn", "fraud"} <= packages
        check = [str(python.with_name("onnx-ops")), "check", "configs/pipelines/fraud.yaml"]
        subprocess.run(check, cwd=work, env=environ, check=True)
