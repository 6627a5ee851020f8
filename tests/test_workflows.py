"""The GitHub workflows: what they run exists, and user input stays data."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from onnx_ops.cli.main import app

FOLDER = Path(__file__).parents[1] / ".github" / "workflows"
FILES = sorted(
    file
    for file in FOLDER.glob("*.yml")
    if "workflow_dispatch:\n    inputs:" in file.read_text(encoding="utf-8")
)
"""Workflows that have inputs from users."""
HOSTILE = "--help'; $(touch hacked) `touch hacked` \"\n-x"


def load(file: Path) -> dict[str, Any]:
    """Return the workflow; YAML 1.1 reads the key `on` as a boolean."""
    document: dict[Any, Any] = yaml.safe_load(file.read_text(encoding="utf-8"))
    return {"on" if key is True else str(key): value for key, value in document.items()}


def steps_of(workflow: dict[str, Any]) -> list[dict[str, Any]]:
    (job,) = workflow["jobs"].values()
    return list(job["steps"])


def inputs_of(workflow: dict[str, Any]) -> dict[str, Any]:
    return dict(workflow["on"]["workflow_dispatch"]["inputs"])


def parsed(arguments: list[str]) -> dict[str, Any]:
    """Return the parameters that the command line parses."""
    group = typer.main.get_command(app)
    command = group.get_command(None, arguments[0])  # type: ignore[attr-defined]
    # A command takes the names of its help option from its first context, so its parent must set
    # them.
    parent = group.make_context("onnx-ops", [], resilient_parsing=True)
    return dict(command.make_context(arguments[0], arguments[1:], parent=parent).params)


def run(file: Path, folder: Path, **given: str) -> tuple[list[str], int]:
    """Run the workflow's step with these inputs.

    Return the arguments of the call of `onnx-ops`, and the exit code of the step.
    """
    (step,) = [
        step for step in steps_of(load(file)) if f"onnx-ops {file.stem}" in step.get("run", "")
    ]
    program = folder / "onnx-ops"
    ends = given.pop("ends", "0")
    program.write_text(
        f"#!{sys.executable}\nimport json, sys\njson.dump(sys.argv[1:], "
        f"open('called', 'w'))\nsys.exit({int(ends)})\n"
    )
    program.chmod(0o755)
    values = {}
    for name, text in step["env"].items():
        (key,) = re.findall(r"(?:inputs|secrets)\.(\w+)", text)
        values[name] = given.get(key, "")
    environ = {
        **values,
        "PATH": f"{folder}:{os.environ['PATH']}",
        "GITHUB_ACTOR": "octocat",
        "GITHUB_RUN_ID": "42",
        "GITHUB_STEP_SUMMARY": str(folder / "summary"),
    }
    # GitHub runs `shell: bash` in this way.
    bash = [
        shutil.which("bash") or "bash",
        "--noprofile",
        "--norc",
        "-eo",
        "pipefail",
        "-c",
        step["run"],
    ]
    done = subprocess.run(
        bash, cwd=folder, env=environ, capture_output=True, check=False, timeout=60
    )
    return json.loads((folder / "called").read_text()), done.returncode


def test_dispatch_workflows_are_promote_and_rollback() -> None:
    assert [file.stem for file in FILES] == ["promote", "rollback"]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_workflow_is_started_only_by_users_and_may_only_read_contents(file: Path) -> None:
    workflow = load(file)
    assert list(workflow["on"]) == ["workflow_dispatch"]
    assert workflow["permissions"] == {"contents": "read"}


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_workflow_scripts_contain_no_expressions_and_use_each_input(file: Path) -> None:
    workflow = load(file)
    used = set()
    for step in steps_of(workflow):
        assert "${{" not in step.get("run", "")
        for value in map(str, step.get("with", {}).values()):
            assert "${{" not in value or re.fullmatch(r"\$\{\{ vars\.ONNX_OPS_\w+ \}\}", value), (
                value
            )
        used |= set(re.findall(r"inputs\.(\w+)", json.dumps(step.get("env", {}))))
    assert used == set(inputs_of(workflow))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_workflow_secrets_are_in_step_environments_only(file: Path) -> None:
    text = file.read_text(encoding="utf-8")
    of_steps = json.dumps([step.get("env", {}) for step in steps_of(load(file))])
    assert text.count("secrets.") == of_steps.count("secrets.")


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_workflow_writes_signing_key_before_it_calls_command(file: Path, tmp_path: Path) -> None:
    *_, step, last = steps_of(load(file))
    assert f"onnx-ops {file.stem}" in last["run"]
    assert step["env"] == {"KEY": "${{ secrets.ONNX_OPS_SIGNING_PEM }}"}
    settings, key = tmp_path / "settings", tmp_path / "keys" / "signing.pem"
    environ = {
        "KEY": "PEM of the key",
        "PATH": os.environ["PATH"],
        "RUNNER_TEMP": str(tmp_path),
        "GITHUB_ENV": str(settings),
    }
    bash = shutil.which("bash") or "bash"
    subprocess.run([bash, "-e", "-c", step["run"]], env=environ, check=True, timeout=60)
    assert (key.read_text(), key.stat().st_mode & 0o777) == ("PEM of the key\n", 0o600)
    assert settings.read_text() == f"ONNX_OPS_SIGNING_KEY={key}\n"


def test_rollback_workflow_calls_command_with_inputs(tmp_path: Path) -> None:
    called, code = run(
        FOLDER / "rollback.yml",
        tmp_path,
        endpoint="digits",
        reason="wrong on sevens",
        force="false",
    )
    assert code == 0
    found = parsed(called)
    assert (found["endpoints"], found["reason"], found["wait"]) == (
        ["digits"],
        "wrong on sevens",
        True,
    )
    assert (found["to"], found["force"], found["actor"]) == (
        None,
        False,
        "octocat via github run 42",
    )
    called, _ = run(
        FOLDER / "rollback.yml", tmp_path, endpoint="digits", to="3", reason="slow", force="true"
    )
    assert (parsed(called)["to"], parsed(called)["force"]) == ("3", True)


def test_promote_workflow_calls_command_with_inputs(tmp_path: Path) -> None:
    called, code = run(
        FOLDER / "promote.yml", tmp_path, model="digits-mlp", version="3", target="cpu-1t"
    )
    assert code == 0
    found = parsed(called)
    assert (found["version"], found["target"]) == ("digits-mlp/3", "cpu-1t")
    assert found["override"] is False


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_workflow_inputs_with_shell_syntax_stay_data(file: Path, tmp_path: Path) -> None:
    called, _ = run(file, tmp_path, **dict.fromkeys(inputs_of(load(file)), HOSTILE))
    found = parsed(called)
    assert found["reason"] == HOSTILE
    assert (found.get("version") or found["endpoints"]) in (f"{HOSTILE}/{HOSTILE}", [HOSTILE])
    assert not (tmp_path / "hacked").exists()


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_workflow_step_fails_with_exit_code_of_command(file: Path, tmp_path: Path) -> None:
    assert run(file, tmp_path, ends="5", **dict.fromkeys(inputs_of(load(file)), "x"))[1] == 5
