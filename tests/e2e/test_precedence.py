"""A person's decision takes precedence over an unchanged run.

A release is compared with the current champion before it takes over.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from tests.e2e.e2e_project import ONLY_FP32, SECOND, Project

ROOT = Path(__file__).parents[2]
THIRD = "train.with.seed=9"
TARGET = "cpu-1t"


def traffic(project: Project) -> dict[str, int]:
    return {name: share for name, share in project.status()["traffic"].items() if share}


def promote_by_command(project: Project) -> None:
    assert (
        project.command(
            "promote", "digits-mlp/1", "--target", TARGET, "--reason", "better on zeros"
        ).code
        == 0
    )


def promote_by_alias(project: Project) -> None:
    project.registry.set_alias("digits-mlp", f"challenger-{TARGET}", "1")


def promote_by_workflow(project: Project) -> None:
    """Run the step of the workflow `promote` in a shell, with GitHub's variables."""
    workflow = yaml.safe_load(
        (ROOT / "onnx_ops" / "templates" / "workflows" / "promote.yml").read_text()
    )
    (step,) = [
        s for s in workflow["jobs"]["promote"]["steps"] if "onnx-ops promote" in s.get("run", "")
    ]
    given = {"MODEL": "digits-mlp", "VERSION": "1", "TARGET": TARGET, "REASON": "better on zeros"}
    given |= {"GITHUB_ACTOR": "ada", "GITHUB_RUN_ID": "1", "GITHUB_STEP_SUMMARY": "/dev/null"}
    environ = project.environment({**{name: given.get(name, "") for name in step["env"]}, **given})
    path = f"{Path(sys.executable).parent}{os.pathsep}{environ['PATH']}"
    subprocess.run(
        ["bash", "-euc", step["run"]], cwd=project.root, env={**environ, "PATH": path}, check=True
    )


@pytest.mark.nightly
@pytest.mark.parametrize("by_hand", [promote_by_command, promote_by_alias, promote_by_workflow])
def test_fifty_unchanged_runs_after_manual_promotion_move_no_traffic(
    twice: Project, by_hand: Callable[[Project], None]
) -> None:
    by_hand(twice)
    assert twice.command("reconcile", "digits").code == 0
    assert traffic(twice) == {"v1": 100}
    before = twice.command("history", "digits", "--traffic").stdout
    for _ in range(50):
        done = twice.run(ONLY_FP32, SECOND)
        assert [(one["version"], one["left"]) for one in done["left"]] == [("2", "1")]
        assert traffic(twice) == {"v1": 100}
    assert twice.command("history", "digits", "--traffic").stdout == before


@pytest.mark.parametrize("by_hand", [promote_by_command, promote_by_alias])
def test_unchanged_run_after_manual_promotion_moves_no_traffic(
    twice: Project, by_hand: object
) -> None:
    assert callable(by_hand)
    by_hand(twice)
    assert twice.command("reconcile", "digits").code == 0
    assert traffic(twice) == {"v1": 100}
    done = twice.run(ONLY_FP32, SECOND)
    assert [(one["version"], one["left"], one["target"]) for one in done["left"]] == [
        ("2", "1", TARGET)
    ]
    assert not [
        stage
        for stage in done["executed"]
        if stage.startswith(("train", "benchmark", "gate", "register"))
    ]
    shown = twice.command(
        "run", "configs/pipelines/digits-mlp.yaml", "--set", ONLY_FP32, "--set", SECOND
    )
    assert (shown.code, "v1 has replaced it since then" in " ".join(shown.stdout.split())) == (
        0,
        True,
    )
    assert traffic(twice) == {"v1": 100}
    assert "skipped version 2" in twice.command("history", "digits").stdout
    # This is the command that the message names.
    assert twice.command("promote", "digits-mlp/2", "--target", TARGET).code == 0
    assert twice.command("reconcile", "digits").code == 0
    assert traffic(twice) == {"v2": 100}


def test_run_of_cached_release_after_change_of_champion_measures_it_again(once: Project) -> None:
    """The release of seed 8 was measured against version 1, but seed 9 serves now."""
    cached = once.run(ONLY_FP32, SECOND, options=("--until", "gate"))
    assert cached["executed"] == []
    once.run(ONLY_FP32, THIRD)
    assert traffic(once) == {"v2": 100}
    done = once.run(ONLY_FP32, SECOND)
    measured = [stage for stage in done["executed"] if stage.startswith("benchmark")]
    assert measured == [f"benchmark/fp32@{TARGET}"]
    assert once.document("explain", "digits-mlp/3")
    again = once.run(ONLY_FP32, SECOND)
    assert again["executed"] == []
    assert traffic(once) == {"v3": 100}
