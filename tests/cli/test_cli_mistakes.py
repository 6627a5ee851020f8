"""Every mistake of the list causes one message, at its place, with its exit code."""

from __future__ import annotations

import os
import re
import shutil
import socket
from pathlib import Path

import numpy as np
import pytest

from onnx_ops.config import functions
from onnx_ops.testing.models import FEATURES
from tests.cli.mistakes import (
    COMMANDS,
    FILES,
    READY,
    ROWS,
    SHOP,
    Mistake,
    coded,
    rows,
    write_logarithm,
    write_project,
    write_regressor,
)
from tests.support.command import run_command
from tests.support.extras import hide
from tests.support.golden import Golden


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a project without a mistake; each test changes a copy of it."""
    root = tmp_path_factory.mktemp("mistakes") / "shop"
    write_project(root)
    return root


def make(mistake: Mistake, project: Path, root: Path) -> None:
    shutil.copytree(project, root, dirs_exist_ok=True)
    if mistake.old:
        text = (root / mistake.file).read_text()
        assert text.count(mistake.old) == 1
        (root / mistake.file).write_text(text.replace(mistake.old, mistake.new))
    mistake.change(root)


def line_of(mistake: Mistake, root: Path) -> int:
    """Return the number of the reported line."""
    if mistake.line is not None:
        return mistake.line
    return (root / mistake.file).read_text().partition(mistake.new)[0].count("\n") + 1


def test_check_of_valid_project_reports_no_problem(project: Path) -> None:
    document = run_command("check", SHOP, READY, "--json", cwd=project).parsed()
    assert document["problems"] == []
    # The note refers to `validate.samples.limit`, which is 50.
    (note,) = document["notes"]
    assert "gates[0]: accuracy: drop ≤ 2% cannot be passed with 50 rows" in note


@pytest.mark.parametrize("mistake", FILES, ids=lambda mistake: mistake.name)
def test_check_of_mistake_reports_it_once_with_place(
    mistake: Mistake, project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, golden: Golden
) -> None:
    make(mistake, project, tmp_path)
    is_importable = functions._is_importable
    hide(monkeypatch, *mistake.hidden)
    monkeypatch.setattr(
        functions,
        "_is_importable",
        lambda name, root: name not in mistake.hidden and is_importable(name, root),
    )
    for name in [*os.environ]:
        if name.startswith(("AWS_", "AZURE_")):
            monkeypatch.delenv(name)
    environ = {"HOME": str(tmp_path), **mistake.environ}
    done = run_command("check", mistake.file, "--json", cwd=tmp_path, environ=environ)
    (problem,) = done.document()["problems"]
    assert (done.code, problem["path"], problem["line"]) == (
        mistake.code,
        mistake.path,
        line_of(mistake, tmp_path),
    )
    assert problem["column"] > 0
    assert problem["environment"] == (mistake.code == 4)
    golden(
        "mistakes",
        f"{problem['line']}:{problem['column']}: {problem['path']}: {problem['message']}",
    )


def test_check_of_doubtful_values_adds_notes(project: Path, tmp_path: Path) -> None:
    labels = np.arange(ROWS) % 5
    mistake = Mistake(
        name="notes", change=rows(x=np.full((ROWS, FEATURES), np.nan, np.float32), y=labels)
    )
    make(mistake, project, tmp_path)
    notify = '[{"notifier": "github", "options": {"repository": "owner/shop"}}]'
    environ = {"ONNX_OPS_NOTIFY": notify, "HOME": str(tmp_path)}
    notes = run_command("check", SHOP, "--json", cwd=tmp_path, environ=environ).parsed()["notes"]
    assert [note.partition(": ")[0] for note in notes] == [
        "data.test",
        "data.test",
        "gates[0]",
        "notifier github(repository=owner/shop)",
    ]
    assert f"input x is NaN or infinite in {ROWS} of {ROWS} rows" in notes[0]
    assert "these labels do not occur in the training data: 3, 4" in notes[1]
    assert "GITHUB_TOKEN" in notes[3]


@pytest.mark.parametrize(
    "name", ["a data file that is missing", "an unknown parameter of training"]
)
def test_run_with_mistake_prints_same_error_as_check(
    name: str, project: Path, tmp_path: Path
) -> None:
    mistake = next(one for one in FILES if one.name == name)
    make(mistake, project, tmp_path)
    checked, ran = (
        run_command(command, mistake.file, cwd=tmp_path) for command in ("check", "run")
    )
    assert (ran.code, ran.stderr, ran.stdout) == (checked.code, checked.stderr, "")


@pytest.mark.parametrize("mistake", COMMANDS, ids=lambda mistake: mistake.name)
def test_command_with_mistake_prints_one_error(
    mistake: Mistake, project: Path, tmp_path: Path
) -> None:
    make(mistake, project, tmp_path)
    done = run_command(*mistake.command, cwd=tmp_path)
    assert (done.code, done.stdout) == (mistake.code, "")
    assert "Traceback" not in done.stderr
    assert (
        len(re.findall(r"^error: |^╭─ Error|^--set |^\S+:\d+:\d+: ", done.stderr, re.MULTILINE))
        == 1
    ), done.stderr


def test_check_of_taken_port_reports_problem(project: Path, tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        mistake = Mistake(
            name="a port",
            old="rollout: {steps",
            new=f"options: {{port: {port}}}, rollout: {{steps",
        )
        make(mistake, project, tmp_path)
        done = run_command("check", SHOP, "--json", cwd=tmp_path)
    (problem,) = done.document()["problems"]
    assert (done.code, problem["path"]) == (4, "deploy[0].provider")
    assert f"program uses port {port}" in problem["message"]
    assert run_command("check", SHOP, cwd=tmp_path).code == 0


def test_run_with_failing_training_shows_error_once_with_line(
    project: Path, tmp_path: Path
) -> None:
    make(
        Mistake(name="training", change=coded("return None", "numpy.linalg.inv([[0.0]])")),
        project,
        tmp_path,
    )
    done = run_command("run", SHOP, "--until", "train", cwd=tmp_path)
    shown = " ".join(f"{done.stdout} {done.stderr}".split())
    assert done.code == 2
    assert shown.count("LinAlgError: Singular matrix") == 1
    assert "models/shop.py:5" in shown
    assert "site-packages" not in shown


@pytest.mark.parametrize(
    "labels", [np.arange(ROWS) % 2, np.arange(ROWS) % 2 * 1.0], ids=["integers", "floats"]
)
def test_run_with_unsuitable_metric_suggests_others(
    labels: object, project: Path, tmp_path: Path
) -> None:
    """Two labels fit one score per row.

    Only the answers show that the score is not a probability.
    """

    def change(root: Path) -> None:
        write_regressor(root)
        rows(y=labels)(root)

    make(Mistake(name="numbers", change=change), project, tmp_path)
    assert run_command("check", READY, cwd=tmp_path).code == 0
    done = run_command("run", READY, "--until", "gate", cwd=tmp_path)
    shown = " ".join(f"{done.stdout} {done.stderr}".split())
    assert done.code == 2
    assert shown.count("accuracy requires classes; for numbers use rmse, mae or r2.") == 1


@pytest.mark.nightly
def test_run_of_model_with_nan_outputs_exits_with_1(project: Path, tmp_path: Path) -> None:
    make(Mistake(name="NaN", change=write_logarithm), project, tmp_path)
    summary = run_command("run", READY, "--until", "gate", "--json", cwd=tmp_path).document()
    assert summary["exit_code"] == 1
    assert [choice["verdict"] for choice in summary["choices"]] == ["fail"]
