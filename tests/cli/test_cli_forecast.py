"""`forecast`, and what `check`, `plan` and `rollout status` show of forecasts."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from onnx_ops.cli import rollouts
from onnx_ops.domain.rollout_forecast import Traffic
from onnx_ops.testing.models import rows, write_perceptron
from tests.release.release_scenes import begun
from tests.support.command import Result, run_command
from tests.support.golden import Golden

FILE = """\
pipeline: digits
data: {test: {file: rows.npz, inputs: {x: x}}}
model: model.onnx
export: {framework: onnx}
benchmark: {targets: [cpu-1t]}
gates: [{kind: parity}]
register: {model: digits}
deploy:
  - {endpoint: digits, target: cpu-1t, rollout: {steps: [10%, 100%], guardrails: [errors]LEVEL}}
  - {endpoint: manual, target: cpu-1t, rollout: {steps: [10%, 100%]}}
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "onnx-ops.toml").touch()
    write_perceptron(tmp_path / "model.onnx")
    np.savez(tmp_path / "rows.npz", allow_pickle=False, **rows(64))
    write_file(tmp_path, "")
    return tmp_path


def write_file(folder: Path, level: str) -> None:
    (folder / "p.yaml").write_text(FILE.replace("LEVEL", level), encoding="utf-8")


def run(project: Path, *arguments: str) -> Result:
    return run_command(*arguments, cwd=project)


def test_forecast_of_file_prints_steps(project: Path, golden: Golden) -> None:
    done = run(project, "forecast", "p.yaml", "--rate", "2/s", "--errors", "0.1%")
    assert (done.code, done.stderr) == (0, "")
    golden("forecasts", done.stdout)


def test_forecast_with_json_returns_document(project: Path) -> None:
    done = run(
        project,
        "forecast",
        "p.yaml",
        "--rate",
        "20/h",
        "--users",
        "5",
        "--harm",
        "errors=5%",
        "--json",
    )
    first, second = json.loads(done.stdout)
    assert first["forecast"]["traffic"]["users"] == 5
    assert first["forecast"]["harms"][0]["harm"] == {"name": "errors", "value": 0.05}
    assert "in 95 % of simulated rollouts" in first["warnings"][0]
    assert second["forecast"] is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("p.yaml",), "its traffic is unknown"),
        (("nowhere", "--rate", "1/s"), "there is no endpoint of this name"),
        (("nowhere.yaml", "--rate", "1/s"), "nowhere.yaml"),
        (("p.yaml", "--rate", "0/s"), "is not a rate"),
        (("p.yaml", "--rate", "5"), "is not a rate"),
        (("p.yaml", "--rate", "5/s", "--errors", "100%"), "must be at least 0 and less than 1"),
        (("p.yaml", "--rate", "5/s", "--harm", "errors=2x"), "is not a valid harm"),
        (("p.yaml", "--rate", "5/s", "--harm", "cold_start=2x"), "is not a valid harm"),
        (("p.yaml", "--rate", "5/s", "--harm", "errors=200%"), "is not a valid harm"),
    ],
)
def test_forecast_with_invalid_input_exits_with_2(
    project: Path, arguments: tuple[str, ...], message: str
) -> None:
    done = run(project, "forecast", *arguments)
    assert done.code == 2
    assert message in " ".join(done.stderr.split())


def test_check_warns_of_step_that_cannot_end_at_any_traffic(project: Path) -> None:
    assert "warning" not in run(project, "check", "--static", "p.yaml").stdout
    write_file(project, ", slo: {error_rate: 0.01%}")
    done = run(project, "check", "--static", "p.yaml")
    assert done.code == 0
    assert (
        "warning: digits: step 1, 10 %: this step does not end in most simulated rollouts"
        in done.stdout
    )
    assert "manual" not in done.stdout


def test_plan_and_check_use_traffic_of_last_rollout(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "onnx_ops.release.traffic.read_recorded_traffic", lambda *_: Traffic(rate=0.001)
    )
    shown = run(project, "check", "--static", "p.yaml").stdout
    assert "warning: digits (traffic of its last rollout): step 1, 10 %: this step takes" in shown
    assert "send 2.08 requests/min" in shown
    notes = run(project, "plan", "p.yaml").stderr
    assert "with 3.6 requests/h, requests without a key, 0 % errors, traffic of its" in notes


def test_plan_prints_least_duration_only_for_rollout_with_guardrails(project: Path) -> None:
    notes = run(project, "plan", "p.yaml").stderr
    assert "rollout of digits: at least " in notes
    assert "rollout of manual" not in notes
    assert json.loads(run(project, "plan", "p.yaml", "--json").stdout)["pipeline"] == "digits"


def test_rollout_status_shows_time_until_enough_requests(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    scene = begun()
    counted = scene.world.provider.counted
    counted.clock.advance(100.0)
    counted.count("v1", requests=900)
    counted.count("v2", requests=100)
    monkeypatch.setattr(
        "onnx_ops.app.context.open_project", lambda: SimpleNamespace(context=scene.context)
    )
    rollouts.rollout_status("digits")
    shown = " ".join(capfd.readouterr().out.split())
    assert "here for 100 s; 200 requests expected in 2 min (90 %: 79 s to 2 min)" in shown
