"""A new project on machines without this project's packages.

Its workflows run, and the image installs the right packages.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from onnx_ops.app.scaffold import PRESETS, PresetName
from tests.install.bare_environments import install_base, installed_in
from tests.install.workflow_runner import bare_path
from tests.install.workflow_world import MACHINE, World, log, open_world
from tests.support.git import git

# The tests install the platform into new environments, which takes minutes for each preset.
pytestmark = pytest.mark.nightly


@pytest.fixture(scope="module")
def onnx_ops(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the command of the wheel in an isolated environment."""
    return install_base(tmp_path_factory.mktemp("installed")).with_name("onnx-ops")


@pytest.fixture(params=[name for name, preset in PRESETS.items() if preset.releases])
def world(request: pytest.FixtureRequest, onnx_ops: Path, tmp_path: Path) -> Iterator[World]:
    preset: PresetName = request.param
    with open_world(onnx_ops, tmp_path, preset) as made:
        yield made


def test_workflows_of_new_project_judge_release_promote_and_roll_back_on_bare_machine(
    world: World,
) -> None:
    first = git(world.origin, "rev-parse", "HEAD")
    text = (world.origin / "configs" / "pipelines" / "fraud.yaml").read_text(encoding="utf-8")
    pipeline = yaml.safe_load(text)
    given = next(given for given in ("strength: 1.0", "seed: 7", "seed: 0") if given in text)
    second_release = str(2 + len(pipeline.get("quantize", ())))
    # A pull request is judged, and nothing is registered. The limit of latency is raised, since
    # these tests share their machine.
    head = world.commit(was="max: 2 MB", becomes="max: 3 MB")
    if "quantize" in pipeline:
        head = world.commit(was="max_regression: 5%", becomes="max_regression: 80%")
    pull = {"pull_request": {"number": 7, "head": {"sha": head}, "base": {"sha": first}}}
    runner = world.run("judge", "pull_request", pull)
    assert not world.github.requests
    published = world.run("publish", "pull_request", pull)
    assert [letter.method for letter in world.github.requests] == ["POST", "GET", "POST"]
    assert "fraud.yaml: PASS" in world.github.requests[-1].document["body"]
    assert "fraud.yaml: PASS" in published.summary
    assert not (runner.checkout / ".onnx-ops" / "ledger").exists()
    # On a hosted runner, the release job of a push stops after the gates. The summary is written
    # even without a token.
    runner = world.push(first, hosted=True, token="")
    published = world.run("publish", "push", {"before": first}, token="")
    assert "fraud.yaml: PASS" in published.summary
    assert "Nothing was registered or released" in published.summary
    assert "no token was given" in log(published)
    assert not (runner.checkout / ".onnx-ops" / "ledger").exists()
    # On a runner that keeps its state, a pushed model is registered, promoted by a person, and
    # rolled back.
    world.commit(was="promote: auto", becomes="promote: manual")
    for version in ("1", second_release):
        if version == second_release:
            world.commit(was=given, becomes=f"{given[:-1]}{int(given[-1]) + 1}")
        runner = world.push(first, hosted=False)
        assert "Nothing was registered or released" not in log(runner)
        inputs = {"model": "fraud", "version": version, "target": "cpu-1t", "reason": "it's better"}
        runner = world.run(
            "promote", "workflow_dispatch", {}, workflow="promote.yml", hosted=False, inputs=inputs
        )
        found = world.status(runner)
        assert (found["answers"], f"v{version}" in found["traffic"]) == (True, True), found
    inputs = {"endpoint": "fraud", "to": "", "reason": "wrong on sevens", "force": "false"}
    runner = world.run(
        "rollback", "workflow_dispatch", {}, workflow="rollback.yml", hosted=False, inputs=inputs
    )
    assert "wrong on sevens" in runner.summary
    assert world.status(runner)["traffic"] == {"v1": 100}


def test_gates_of_ci_only_project_run_on_pull_request_with_base_installation(
    onnx_ops: Path, tmp_path: Path
) -> None:
    with open_world(onnx_ops, tmp_path, "ci-only") as world:
        first = git(world.origin, "rev-parse", "HEAD")
        head = world.commit(was="max: 2 MB", becomes="max: 100 B")
        pull = {"pull_request": {"number": 7, "head": {"sha": head}, "base": {"sha": first}}}
        runner = world.run("judge", "pull_request", pull)
        packages = installed_in(runner.temp / "venv" / "bin" / "python")
        assert not packages & {"mlflow", "prefect", "scikit-learn"}
        published = world.run("publish", "pull_request", pull, code=1)
        assert "fraud.yaml: FAIL" in published.summary
        world.forget_artifacts()
        head = world.commit(was="max: 100 B", becomes="max: 3 MB")
        pull["pull_request"]["head"] = {"sha": head}
        world.run("judge", "pull_request", pull)
        published = world.run("publish", "pull_request", pull)
        assert "fraud.yaml: PASS" in published.summary
        assert "fraud.yaml: PASS" in world.github.requests[-1].document["body"]
        # The job leaves the metrics of a merged change for the cache, but nothing for a release.
        world.forget_artifacts()
        runner = world.run("evaluate", "push", {"before": first})
        (recorded,) = (runner.temp / "onnx-ops-metrics").iterdir()
        assert (recorded.name, [path.name for path in recorded.iterdir()]) == (head, ["fraud"])
        assert not [path for path in (runner.temp / "onnx-ops").iterdir() if path.is_dir()]
        published = world.run("publish", "push", {"before": first})
        assert "fraud.yaml: PASS" in published.summary


STAGES = ("build", "platform")
"""Stages of the image that install something."""


@pytest.mark.parametrize("stage", STAGES)
def test_dockerfile_stage_commands_run_without_container_engine(
    stage: str, onnx_ops: Path, tmp_path: Path
) -> None:
    """The test copies and runs what a stage does, below a folder.

    No container engine builds the image.
    """
    init = [str(onnx_ops), "init", "fraud"]
    subprocess.run(
        init, cwd=tmp_path, env={"PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}, check=True
    )
    project, root = tmp_path / "fraud", tmp_path / "root"
    work = root / "src"
    for folder in (work, root / "opt", root / "tmp"):
        folder.mkdir(parents=True)
    text = (
        (project / "infra" / "docker" / "Dockerfile")
        .read_text(encoding="utf-8")
        .replace("\\\n", " ")
    )
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
                ["sh", "-c", script],
                cwd=work,
                env=environ,
                capture_output=True,
                text=True,
                timeout=1200,
                check=False,
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
        assert {
            "onnx-ops",
            "mlflow",
            "prefect",
            "boto3",
            "psycopg2-binary",
            "scikit-learn",
            "fraud",
        } <= packages
        check = [str(python.with_name("onnx-ops")), "check", "configs/pipelines/fraud.yaml"]
        subprocess.run(check, cwd=work, env=environ, check=True)
