"""`forecast`, and what `check`, `plan` and `rollout status` show of forecasts."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from onnx_ops.testing.models import rows, write_perceptron
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
    assert "cannot end before" in first["warnings"][0]
    assert second["forecast"] is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("p.yaml",), "its traffic cannot be measured"),
        (("nowhere", "--rate", "1/s"), "no endpoint of that name"),
        (("nowhere.yaml", "--rate", "1/s"), "nowhere.yaml"),
        (("p.yaml", "--rate", "0/s"), "is not a rate"),
        (("p.yaml", "--rate", "5"), "is not a rate"),
        (("p.yaml", "--rate", "5/s", "--errors", "100%"), "out of range"),
        (("p.yaml", "--rate", "5/s", "--harm", "errors=2x"), "is not a harm"),
        (("p.yaml", "--rate", "5/s", "--harm", "cold_start=2x"), "is not a harm"),
        (("p.yaml", "--rate", "5/s", "--harm", "errors=200%"), "is not a harm"),
    ],
)
def test_forecast_with_impossible_input_is_refused(
    project: Path, arguments: tuple[str, ...], message: str
) -> None:
    done = run(project, "forecast", *arguments)
    assert done.code == 2
    assert message in " ".join(done.stderr.split())
