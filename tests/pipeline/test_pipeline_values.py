"""A model with a state on another axis and a scalar input, from data to gates."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from onnx_ops.domain.pipeline import FileData
from onnx_ops.errors import UserError
from onnx_ops.measure.files import get_dataset, put_dataset
from onnx_ops.pipeline.stages.data import build_dataset, find_data_problems
from onnx_ops.ports import Dataset
from onnx_ops.testing.fakes import FakeWorld
from tests.support.command import run_command
from tests.support.voice import make_voice_rows, write_voice_detector

PIPELINE = """
pipeline: voice
data:
  test: {file: data/test.npz, inputs: {input: input, state: state}, values: {sr: 16000}, label: y}
  train: {file: data/train.npz, inputs: {input: input, state: state}, values: {sr: rate}}
model: voice.onnx
export: {framework: onnx, opset: 18, ir_version: 10}
quantize:
  - {name: int8, method: static, calibrate: {data: train, samples: 40}}
benchmark: {targets: [cpu-1t], batch: 3}
gates:
  - {kind: parity}
"""


def write_project(folder: Path, pipeline: str = PIPELINE, **arrays: Any) -> None:
    (folder / "data").mkdir()
    (folder / "configs" / "pipelines").mkdir(parents=True)
    write_voice_detector(folder / "voice.onnx")
    rows = make_voice_rows(48)
    np.savez(
        folder / "data" / "test.npz",
        allow_pickle=False,
        **{**rows, "y": np.arange(48) % 2, **arrays},
    )
    np.savez(folder / "data" / "train.npz", allow_pickle=False, **rows, rate=np.array(16000))
    (folder / "configs" / "pipelines" / "voice.yaml").write_text(pipeline, encoding="utf-8")


def test_run_of_model_with_state_and_scalar_input_succeeds(tmp_path: Path) -> None:
    write_project(tmp_path)
    done = run_command("run", "configs/pipelines/voice.yaml", "--json", "--quiet", cwd=tmp_path)
    assert done.code == 0, done.stdout + done.stderr
    assert '"int8"' in done.stdout


@pytest.mark.parametrize(
    ("old", "new", "path"),
    [
        ("values: {sr: 16000}", "values: {sr: fast}", "data.test.values.sr"),
        ("values: {sr: 16000}", "values: {sr: 0.5}", "data.test.values.sr"),
        ("values: {sr: 16000}", "values: {sr: [1, [2]]}", "data.test.values.sr"),
        ("values: {sr: 16000}", "values: {sr: 16000, input: 0}", "data.test.values.input"),
        ("values: {sr: 16000}, ", "", "data.test.inputs"),
    ],
)
def test_check_with_unfit_or_missing_input_value_reports_path(
    old: str, new: str, path: str, tmp_path: Path
) -> None:
    write_project(tmp_path, PIPELINE.replace(old, new))
    done = run_command("check", "configs/pipelines/voice.yaml", "--json", cwd=tmp_path)
    assert [problem["path"] for problem in done.document()["problems"]] == [path]


def test_check_with_undeclared_row_axis_reports_export_dynamic(tmp_path: Path) -> None:
    declared = "export: {framework: torch, opset: 18, dynamic: {state: {1: batch}}}"
    for export, paths in (
        (declared, []),
        ("export: {framework: torch, opset: 18}", ["export.dynamic"]),
    ):
        text = PIPELINE.replace("model: voice.onnx", 'train: {run: "net:train"}')
        folder = tmp_path / str(len(paths))
        folder.mkdir()
        write_project(
            folder, text.replace("export: {framework: onnx, opset: 18, ir_version: 10}", export)
        )
        (folder / "net.py").write_text("def train(data): ...\n", encoding="utf-8")
        done = run_command("check", "configs/pipelines/voice.yaml", "--json", cwd=folder)
        assert [problem["path"] for problem in json.loads(done.stdout)["problems"]] == paths


def restore_dataset(folder: Path, rows: Any) -> Dataset:
    """Return a data set that was stored, and whose state has its rows on axis 1."""
    inputs = {"input": "input", "state": "state"}
    section = FileData(
        file="rows.npz", inputs=inputs, label="y", values={"sr": "rate", "gain": 0.5}
    )
    store = FakeWorld().context(root=folder).store
    return get_dataset(store, put_dataset(store, build_dataset(rows, section, "data/test")))


def make_rows() -> dict[str, Any]:
    return {**make_voice_rows(9), "y": np.arange(9), "rate": np.array(8000)}


def test_stored_dataset_with_values_and_other_row_axis_is_restored(tmp_path: Path) -> None:
    rows = make_rows()
    dataset = restore_dataset(tmp_path, rows)
    assert (len(dataset), dataset.inputs["state"].shape) == (9, (2, 9, 5))
    np.testing.assert_array_equal(dataset.inputs["state"], rows["state"])
    assert dataset.values["sr"].tolist() == 8000
    assert dataset.values["gain"].dtype == np.float32


def test_put_rows_first_moves_row_axis_and_rejects_axis_without_rows(tmp_path: Path) -> None:
    rows = make_rows()
    dataset = restore_dataset(tmp_path, rows)
    first = dataset.put_rows_first({"state": 1}).head(4)
    assert (len(first), first.inputs["state"].shape) == (4, (4, 2, 5))
    np.testing.assert_array_equal(first.inputs["state"][3], rows["state"][:, 3])
    with pytest.raises(UserError, match="'state' of shape"):
        dataset.put_rows_first({"state": 2})


def test_find_data_problems_with_scalar_array_suggests_values() -> None:
    rows = {**make_voice_rows(9), "rate": np.array(8000)}
    ((_, problem),) = find_data_problems(rows, FileData(file="rows.npz"), "data/test")
    assert "values: {rate: rate}" in problem.remedy
