"""`onnx-ops quantize --method auto`: its findings, its files, and its refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from onnx_ops import codec
from onnx_ops.cli.main import app
from onnx_ops.domain.quantization import Budget, SearchRecord
from onnx_ops.domain.target import Target
from onnx_ops.onnx_graph.files import read_model
from onnx_ops.plugins import load
from onnx_ops.testing.models import rows, write_perceptron


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    write_perceptron(tmp_path / "model.onnx")
    tune: dict[str, Any] = rows(200, seed=1)
    arrays: dict[str, Any] = rows(64)
    (answers,) = load("runtimes", "onnxruntime").run(
        tmp_path / "model.onnx", Target(name="cpu-1t"), (tune,)
    )
    scores = next(array for array in answers.values() if array.ndim == 2)
    np.savez(tmp_path / "tune.npz", **tune, label=scores.argmax(axis=1))
    np.savez(tmp_path / "bare.npz", **tune)
    np.savez(tmp_path / "rows.npz", **arrays)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(*arguments: str, code: int = 0) -> str:
    result = CliRunner().invoke(app, ["quantize", "model.onnx", "best.onnx", *arguments])
    assert result.exit_code == code, result.output
    return " ".join(result.output.split())


@pytest.mark.nightly
def test_quantize_auto_writes_found_variant_and_record_of_trials(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (folder / "best.closest.onnx").write_bytes(b"of an earlier search")
    budget = ["--budget", "metric_drop=40%", "--budget", "max_builds=9", "--budget", "size=1MB"]
    run(
        "--method",
        "auto",
        "--data",
        "rows.npz",
        "--tuning-data",
        "tune.npz",
        "--select",
        "exact",
        *budget,
        "--json",
    )
    found = json.loads(capfd.readouterr().out)
    record = codec.loads((folder / "best.onnx.search.json").read_bytes(), SearchRecord)
    assert (folder / "best.onnx").stat().st_size == found["variant"]["bytes"]
    assert not (folder / "best.closest.onnx").exists()
    assert found["recipe"][0].startswith("found by search best ")
    assert record.budget == Budget(metric_drop=0.4, size=10**6, max_builds=9)
    assert {trial.recipe for trial in record.trials} >= {"static", "dynamic", "weights-8"}
    assert record.rows == 200


def test_quantize_auto_with_unreachable_budget_writes_closest_variant(folder: Path) -> None:
    said = run("--method", "auto", "--tuning-data", "tune.npz", "--budget", "size=1B", code=2)
    assert "the search found no model for the role within the budget" in said
    assert sorted(path.name for path in folder.glob("best*")) == [
        "best.closest.onnx",
        "best.onnx.search.json",
    ]
    assert (
        "best.onnx.search.json contains all trials, and best.closest.onnx has the smallest loss: "
        in said
    )
    read_model(folder / "best.closest.onnx")


def test_quantize_auto_of_file_that_search_replaces_exits_with_2(folder: Path) -> None:
    (folder / "model.onnx").rename(folder / "best.closest.onnx")
    (folder / "model.onnx").symlink_to("best.closest.onnx")
    said = run("--method", "auto", "--tuning-data", "tune.npz", code=2)
    assert "the search would replace its source" in said
    read_model(folder / "best.closest.onnx")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "needs tuning rows"),
        (["--tuning-data", "none.npz"], "no such file"),
        (["--tuning-data", "bare.npz"], "--label NAME"),
        (["--tuning-data", "tune.npz", "--metric", "accurracy"], "no metric is called"),
        (["--tuning-data", "tune.npz", "--budget", "speed=5"], "a budget has no limit 'speed'"),
        (["--tuning-data", "tune.npz", "--budget", "metric_drop=0.5"], "percentage"),
        (["--tuning-data", "tune.npz", "--budget", "max_builds=0"], "above 0"),
        (["--tuning-data", "tune.npz", "--select", "best"], "there are fast, small, exact"),
        (["--tuning-data", "tune.npz", "--exclude", "first"], "determines these options"),
    ],
)
@pytest.mark.usefixtures("folder")
def test_quantize_auto_with_wrong_arguments_exits_with_2(arguments: list[str], said: str) -> None:
    assert said in run("--method", "auto", *arguments, code=2)


@pytest.mark.usefixtures("folder")
def test_quantize_with_search_option_for_other_method_exits_with_2() -> None:
    assert "Use these options only with --method auto" in run(
        "--method", "dynamic", "--tuning-data", "tune.npz", code=2
    )
