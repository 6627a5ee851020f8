"""The action and the hooks of the page about judging files in CI.

They install the built wheel.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from onnx_ops.testing.models import rows, write_perceptron
from tests.docs.docs_blocks import ROOT, blocks_of
from tests.install.bare_environments import build_wheel, environ_of
from tests.install.workflow_runner import Runner, bare_path
from tests.install.workflow_world import MACHINE
from tests.support.git import commit_all, git
from tests.support.pairs import write_changed

# The tests install the base into new environments, which takes a minute for each.
pytestmark = pytest.mark.nightly

WORKFLOW, HOOKS = (
    next(one.text for one in blocks_of(ROOT / "docs" / "judge-ci.md") if begin in one.text)
    for begin in ("\njobs:\n", "repos:\n")
)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    return build_wheel(folder / "source", folder / "dist")


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """Return a repository with two equal models, rows and labels, and a pipeline file."""
    root = tmp_path / "repository"
    for name in ("models", "data", "configs/pipelines"):
        (root / name).mkdir(parents=True)
    write_perceptron(root / "models" / "current.onnx")
    shutil.copyfile(root / "models" / "current.onnx", root / "models" / "next.onnx")
    x = rows(600)["x"]
    np.savez(root / "data" / "test.npz", x=x, y=np.arange(len(x)) % 3)
    pipeline = "configs/pipelines/iris-gates.yaml"
    shutil.copyfile(ROOT / pipeline, root / pipeline)
    git(root, "init", "--quiet")
    return root


def break_candidate(root: Path) -> None:
    models = root / "models"
    write_changed(models / "current.onnx", "third.bias", np.zeros_like, "next.onnx")


@pytest.mark.parametrize("given", ["path", "address"])
def test_judge_action_installs_wheel_and_writes_verdict_into_summary(
    given: str, wheel: Path, repository: Path, tmp_path: Path
) -> None:
    place = repository / "vendor" / wheel.name
    place.parent.mkdir()
    shutil.copyfile(wheel, place)
    text = WORKFLOW if given == "path" else WORKFLOW.replace("vendor/", f"{place.parent.as_uri()}/")
    # Times of a shared machine are not the subject of this test.
    text = text.rstrip() + "\n          only: parity\n"
    for source, file in (
        (text, ".github/workflows/judge.yml"),
        (
            (ROOT / ".github/actions/judge/action.yml").read_text(encoding="utf-8"),
            ".github/actions/judge/action.yml",
        ),
    ):
        (repository / file).parent.mkdir(parents=True)
        (repository / file).write_text(source, encoding="utf-8")
    commit_all(repository)
    environ = {name: value for name, value in os.environ.items() if MACHINE.match(name)}
    temp = tmp_path / "temp"
    runner = Runner(
        origin=repository,
        checkout=repository,
        artifacts=tmp_path / "artifacts",
        temp=temp,
        contexts={"runner": {"temp": str(temp)}},
        environ={**environ, "PATH": bare_path(tmp_path / "tools"), "HOME": str(tmp_path)},
    )
    assert runner.run_job("judge.yml", "judge") == 0, runner.done
    assert "PASS: next.onnx against current.onnx" in runner.summary
    path = runner.environ["PATH"]
    assert str(temp) not in path
    break_candidate(repository)
    assert runner.run_job("judge.yml", "judge") == 1, runner.done
    assert "FAIL: next.onnx against current.onnx" in runner.summary
    assert (temp / "onnx-ops-judge" / "report.html").is_file()


def test_pre_commit_hooks_install_wheel_and_refuse_wrong_candidate(
    wheel: Path, repository: Path, tmp_path: Path
) -> None:
    config = HOOKS.replace(f"/opt/wheels/{wheel.name}", str(wheel))
    assert config != HOOKS
    (repository / ".pre-commit-config.yaml").write_text(config, encoding="utf-8")
    commit_all(repository)
    environ = environ_of(tmp_path) | {"PRE_COMMIT_HOME": str(tmp_path / "pre-commit")}

    def pre_commit(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = ["uv", "tool", "run", "--from", "pre-commit==4.7.0", "pre-commit", *arguments]
        return subprocess.run(
            command, cwd=repository, env=environ, capture_output=True, text=True, check=False
        )

    manifest = pre_commit("validate-manifest", str(ROOT / ".pre-commit-hooks.yaml"))
    assert manifest.returncode == 0, manifest.stdout
    done = pre_commit("run", "--all-files")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("Passed") == 2
    break_candidate(repository)
    pipeline = repository / "configs" / "pipelines" / "iris-gates.yaml"
    text = pipeline.read_text(encoding="utf-8")
    pipeline.write_text(text.replace("cpu-1t", "cpu-2t"), encoding="utf-8")
    git(repository, "add", "--all")
    done = pre_commit("run")
    assert done.returncode == 1
    assert "FAIL next.onnx against current.onnx" in done.stdout
    assert "cpu-2t" in done.stdout
    assert done.stdout.count("Failed") == 2
