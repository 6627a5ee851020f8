"""Several pipelines side by side, with real stages in real processes.

Shared stages run once, and a pipeline that fails stops no other.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from onnx_ops.app.context import Project, open_project
from onnx_ops.app.project import run_files, worst_exit_code
from onnx_ops.cli.main import app
from onnx_ops.domain.plan import StageKind
from tests.support.processes import is_alive, until

TRAINING = """
import pathlib, time
import numpy as np
from sklearn.linear_model import LogisticRegression

def train(data, bad=False):
    with (pathlib.Path(__file__).with_name("trained.txt")).open("a") as stream:
        stream.write("bad\\n" if bad else "good\\n")
    if bad:
        raise ConnectionError("no luck")
    time.sleep(0.5)
    rows = data["train"]
    return LogisticRegression().fit(rows.inputs["x"], rows.label)
"""

PIPELINE = """
pipeline: {name}
data:
  train: {{file: data.npz, inputs: {{x: x}}, label: y}}
  test: {{file: data.npz, inputs: {{x: x}}, label: y}}
train: {{run: "batch_training:train"{bad}}}
export: {{framework: sklearn}}
benchmark: {{targets: [cpu-1t]}}
"""


@pytest.fixture
def project(tmp_path: Path) -> Project:
    """Return a project with four pipelines.

    `same-a` and `same-b` have the same training, `bad` fails at it, `wrong` cannot be read.
    """
    (tmp_path / "configs" / "targets").mkdir(parents=True)
    (tmp_path / "configs" / "targets" / "cpu-1t.yaml").write_text("name: cpu-1t\n")
    (tmp_path / "onnx-ops.toml").write_text('signing = "off"\n')
    (tmp_path / "batch_training.py").write_text(TRAINING)
    draw = np.random.default_rng(0)
    np.savez(
        tmp_path / "data.npz",
        x=draw.standard_normal((30, 3)).astype(np.float32),
        y=np.arange(30) % 2,
    )
    for name in ("same-a", "same-b"):
        (tmp_path / f"{name}.yaml").write_text(PIPELINE.format(name=name, bad=""))
    (tmp_path / "bad.yaml").write_text(PIPELINE.format(name="bad", bad=", with: {bad: true}"))
    (tmp_path / "wrong.yaml").write_text("pipeline: [\n")
    return open_project(tmp_path)


def files(project: Project, *names: str) -> list[Path]:
    return [project.settings.root / f"{name}.yaml" for name in names]


def trained(project: Project) -> list[str]:
    return (project.settings.root / "trained.txt").read_text().split()


def test_run_files_executes_shared_stage_once_and_isolates_failures(project: Project) -> None:
    wanted = files(project, "bad", "same-a", "wrong", "same-b")
    ended = list(run_files(project, wanted, jobs=4, until=StageKind.TRAIN))
    assert [one.file for one in ended] == wanted
    assert [one.exit_code for one in ended] == [4, 0, 2, 0]
    assert sorted(trained(project)) == ["bad", "good"]
    bad, first, wrong, second = ended
    assert "no luck" in str(bad.errors["train"])
    assert wrong.refused is not None
    assert first.summary is not None
    assert second.summary is not None
    executed = [*first.summary.executed, *second.summary.executed]
    assert executed.count("train") == 1, "the other one took its result"
    assert list(project.settings.claims.iterdir()) == []


def test_run_command_with_several_files_reports_each_and_worst_exit_code(
    project: Project, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(project.settings.root)
    names = ["bad.yaml", "same-a.yaml", "wrong.yaml"]
    done = CliRunner().invoke(app, ["run", *names, "--jobs", "2", "--until", "train"])
    assert done.exit_code == 2
    assert [done.stdout.index(name) for name in names] == sorted(
        done.stdout.index(name) for name in names
    )
    assert "3 pipelines: 1 done, 2 not done" in done.stdout
    assert "same-a ✓ train" in done.stderr
    assert "no luck" in done.stdout
    capfd.readouterr()
    again = CliRunner().invoke(app, ["run", *names[:2], "--json", "--until", "train"])
    document = json.loads(capfd.readouterr().out)
    assert (again.exit_code, document["exit_code"]) == (4, 4)
    assert [one["exit_code"] for one in document["pipelines"]] == [4, 0]
    assert document["pipelines"][1]["executed"] == []


def test_run_command_after_interrupt_exits_with_130_and_ends_stages(project: Project) -> None:
    (project.settings.root / "batch_training.py").write_text(
        "import os, pathlib, time\n"
        "def train(data, bad=False):\n"
        "    place = pathlib.Path(__file__)\n"
        "    place.with_name('pid.tmp').write_text(str(os.getpid()))\n"
        "    place.with_name('pid.tmp').rename(place.with_name('pid'))\n"
        "    time.sleep(1000)\n"
    )
    code = (
        "import os, signal, sys, threading, time, pathlib\n"
        "def later():\n"
        "    while not pathlib.Path('pid').exists(): time.sleep(0.05)\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "threading.Thread(target=later, daemon=True).start()\n"
        "from onnx_ops.cli.main import main\n"
        "sys.argv = ['onnx-ops', 'run', 'same-a.yaml', 'same-b.yaml', '--jobs', '2']\n"
        "main()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=project.settings.root,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env=dict(os.environ),
    )
    assert done.returncode == 130, done.stderr
    assert "interrupted" in done.stderr
    trainer = int((project.settings.root / "pid").read_text())
    until(lambda: not is_alive(trainer), "the end of the training")


@given(codes=st.lists(st.sampled_from([0, 1, 2, 3, 4, 5])))
def test_worst_exit_code_of_any_codes_returns_one_of_them_and_zero_only_for_zeros(
    codes: list[int],
) -> None:
    worst = worst_exit_code(codes)
    assert worst in (codes or [0])
    assert (worst == 0) is (set(codes) <= {0})


@given(codes=st.lists(st.sampled_from([0, 1, 2, 3, 4, 5])))
def test_worst_exit_code_of_reordered_or_repeated_codes_is_equal(codes: list[int]) -> None:
    worst = worst_exit_code(codes)
    assert worst_exit_code([*codes, *codes]) == worst_exit_code(sorted(codes)) == worst
