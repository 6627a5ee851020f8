"""`onnx-ops quantize`: its files, its output, and its refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from typer.testing import CliRunner

from onnx_ops.cli.main import app
from onnx_ops.onnx_graph import files
from onnx_ops.onnx_graph.model_info import read_model_info
from onnx_ops.testing.models import images, rows, write_convolution, write_perceptron
from tests.support.graphs import write_graph
from tests.support.operators import write_softsign


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    write_perceptron(tmp_path / "model.onnx")
    arrays: dict[str, Any] = rows(64)
    np.savez(tmp_path / "rows.npz", **arrays)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(*arguments: str, code: int = 0) -> str:
    result = CliRunner().invoke(app, ["quantize", *arguments])
    assert result.exit_code == code, result.output
    return result.output


def test_quantize_writes_variant_and_prints_size_recipe_and_coverage(folder: Path) -> None:
    said = run("model.onnx", "int8.onnx", "--method", "static", "--data", "rows.npz")
    assert (
        read_model_info(folder / "int8.onnx").inputs
        == read_model_info(folder / "model.onnx").inputs
    )
    assert "times the size" in said
    assert "recipe: activations uint8" in said
    assert "cpu-1t: 3 of 3 MatMul/Conv/Gemm run in int8" in said
    assert "advice" not in said
    assert sorted(path.name for path in folder.iterdir()) == ["int8.onnx", "model.onnx", "rows.npz"]


def test_quantize_as_json_reports_size_coverage_and_recipe(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    arguments = [
        "model.onnx",
        "int8.onnx",
        "--method",
        "dynamic",
        "--exclude",
        "third",
        "--target",
        "cpu-1t",
    ]
    run(*arguments, "--target", "cpu-all", "--json")
    found = json.loads(capfd.readouterr().out)
    assert found["variant"]["bytes"] == (folder / "int8.onnx").stat().st_size
    assert set(found["targets"]) == {"cpu-1t", "cpu-all"}
    assert found["targets"]["cpu-1t"]["coverage"]["int8"] == ["first", "second"]
    assert found["recipe"]


def test_quantize_to_slow_variant_prints_advice_with_setting(folder: Path) -> None:
    write_convolution(folder / "model.onnx")
    arrays: dict[str, Any] = images(32)
    np.savez(folder / "rows.npz", **arrays)
    options = ["--option", "op_types=[Conv]", "--no-per-channel"]
    said = run("model.onnx", "slow.onnx", "--method", "dynamic", *options)
    assert "advice convolutions" in said
    assert "set: method: static" in said


@pytest.mark.parametrize("method", ["onnxslim", "onnxoptimizer"])
def test_quantize_with_onnxslim_or_onnxoptimizer_reports_size_and_time(
    folder: Path, method: str
) -> None:
    said = run("model.onnx", "tidy.onnx", "--method", method)
    assert (
        read_model_info(folder / "tidy.onnx").inputs
        == read_model_info(folder / "model.onnx").inputs
    )
    assert f"recipe: {method} " in said
    assert "times the size" in said
    assert "cpu-1t: " in said
    assert "times the time (" in said


def test_quantize_of_model_that_runtime_rejects_reports_why_time_is_missing(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    write_softsign(folder / "model.onnx")
    run("model.onnx", "tidy.onnx", "--method", "onnxoptimizer", "--json")
    why = json.loads(capfd.readouterr().out)["times"]["cpu-1t"]["why"]
    assert "acme.ops:ScaledSoftsign(-1) is not a registered function/op" in why


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["--method", "static"], "calibration rows"),
        (["--method", "static", "--data", "none.npz"], "no such file"),
        (
            ["--method", "static", "--data", "rows.npz", "--calibration-method", "distribution"],
            "silently give wrong answers",
        ),
        (
            ["--method", "static", "--data", "rows.npz", "--calibration-method", "median"],
            "minmax, entropy, percentile",
        ),
        (["--method", "dynamyc"], "Did you mean 'dynamic'"),
        (["--method", "dynamic", "--exclude", "thrid"], "did you mean 'third'"),
        (["--method", "dynamic", "--option", "reduce_range"], "NAME=VALUE"),
        (["--method", "dynamic", "--option", "reduce_rnge=true"], "reduce_range"),
        (["--method", "dynamic", "--target", "moon"], "moon"),
    ],
)
def test_quantize_with_wrong_input_exits_with_2_and_writes_nothing(
    folder: Path, arguments: list[str], word: str
) -> None:
    assert word in run("model.onnx", "out.onnx", *arguments, code=2)
    assert not (folder / "out.onnx").exists()


def test_quantize_to_existing_file_or_missing_folder_exits_with_2_and_overwrites_nothing(
    folder: Path,
) -> None:
    (folder / "out.onnx").write_bytes(b"mine")
    assert "the file exists already" in run("model.onnx", "out.onnx", "--method", "dynamic", code=2)
    assert (folder / "out.onnx").read_bytes() == b"mine"
    run("model.onnx", "nowhere/out.onnx", "--method", "dynamic", code=2)


def test_quantize_of_large_weights_writes_external_data_file(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "EXTERNAL_LIMIT", 200)
    run("model.onnx", "large.onnx", "--method", "graph")
    written = onnx.load(folder / "large.onnx", load_external_data=False)
    places = {
        e.value for t in written.graph.initializer for e in t.external_data if e.key == "location"
    }
    assert places == {"large.onnx.data"}
    onnx.checker.check_model(str(folder / "large.onnx"), full_check=True)
    assert sorted(path.name for path in folder.iterdir() if "large" in path.name) == [
        "large.onnx",
        "large.onnx.data",
    ]


def test_quantize_with_existing_external_data_file_does_not_overwrite_it(folder: Path) -> None:
    (folder / "int8.onnx.data").write_bytes(b"somebody's")
    assert "int8.onnx.data" in run("model.onnx", "int8.onnx", "--method", "dynamic", code=2)
    assert (folder / "int8.onnx.data").read_bytes() == b"somebody's"
    assert not (folder / "int8.onnx").exists()


def test_quantize_of_model_above_target_opset_exits_with_2(folder: Path) -> None:
    write_perceptron(folder / "new.onnx", opset=99)
    said = run("new.onnx", "int8.onnx", "--method", "dynamic", code=2)
    assert "accepts opset" in said
    assert not (folder / "int8.onnx").exists()


def test_quantize_to_variant_that_crashes_target_reports_crash_and_keeps_variant(
    folder: Path,
) -> None:
    """float16 behind this transposition crashes ONNX Runtime 1.31 on a CPU.

    Encoders have such a transposition.
    """
    text = """(float[batch, 4, 8] x) => (float[rows, columns, 8] y) {
        turned = Transpose<perm = [1, 0, 2]>(x) y = MatMul(turned, weight) }"""
    write_graph(folder / "model.onnx", text, weight=np.ones((8, 8), np.float32))
    said = run("model.onnx", "half.onnx", "--method", "fp16")
    assert "cpu-1t: not examined: model.onnx: ONNX Runtime crashed" in said.replace("\n", " ")
    assert (folder / "half.onnx").exists()
    done = CliRunner().invoke(app, ["bench", "half.onnx"])
    assert done.exit_code == 4
    assert "ONNX Runtime crashed" in done.output
