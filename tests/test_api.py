"""The commands as Python functions: the document of --json, exit code, and output."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest

import onnx_ops
from onnx_ops import api
from onnx_ops.errors import NotFoundError, UserError
from onnx_ops.testing.models import rows
from tests.cli.tool_files import write_models
from tests.support.command import run_command


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_models(tmp_path)
    return tmp_path


def test_package_exports_api_functions_lazily_and_rejects_unknown_name() -> None:
    assert all(getattr(onnx_ops, name) is getattr(api, name) for name in api.__all__)
    assert set(api.__all__) <= set(dir(onnx_ops))
    with pytest.raises(AttributeError, match="no attribute 'juge'"):
        onnx_ops.juge  # noqa: B018
    loaded = "import sys, onnx_ops; print('onnx_ops.api' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", loaded], capture_output=True, text=True, check=True
    )
    assert done.stdout == "False\n"


def test_api_judge_returns_document_of_command_and_shows_verdict(folder: Path) -> None:
    found = onnx_ops.judge("good.onnx", "wrong.onnx", only="parity", quiet=True)
    command = run_command(
        "judge", "good.onnx", "wrong.onnx", "--only", "parity", "--json", cwd=folder
    )
    assert (found.exit_code, found.document) == (command.code, json.loads(command.stdout))
    assert found["verdict"] == "fail"
    assert repr(found).startswith("FAIL wrong.onnx against good.onnx")
    page = found._repr_html_()
    assert page.startswith("<pre")
    assert "\x1b" not in page
    assert ">FAIL</span>" in page


def test_api_judge_accepts_arrays_of_inputs_and_rejects_unknown_inputs(folder: Path) -> None:
    x, y = rows(900)["x"], np.arange(900) % 3
    found = onnx_ops.judge(
        "good.onnx", "good.onnx", data={"x": x}, labels=y, metric="accuracy", only="parity"
    )
    assert found.exit_code == 0
    assert found["rows"].startswith("900 of ")
    with pytest.raises(UserError, match="wrong"):
        onnx_ops.judge("good.onnx", "good.onnx", data={"wrong": x, "other": x})


def test_api_judge_with_input_named_labels_keeps_input(folder: Path) -> None:
    model = onnx.parser.parse_model("""
        <ir_version: 10, opset_import: ["": 18]>
        sign (float[batch, 2] labels) => (int64[batch] answer) {
            answer = ArgMax <axis = 1, keepdims = 0> (labels)
        }
    """)
    onnx.save(model, folder / "labels.onnx")
    scores = np.random.default_rng(0).normal(size=(900, 2)).astype(np.float32)
    found = onnx_ops.judge(
        "labels.onnx",
        "labels.onnx",
        data={"labels": scores},
        labels=scores.argmax(axis=1),
        metric="accuracy",
        only="parity",
    )
    assert found.exit_code == 0


def test_api_check_of_invalid_file_returns_problems(folder: Path) -> None:
    (folder / "p.yaml").write_text("pipeline: p\nbenchmrk: {}\n")
    found = onnx_ops.check("p.yaml")
    command = run_command("check", "p.yaml", "--json", cwd=folder)
    assert (
        (found.exit_code, found.document)
        == (command.code, json.loads(command.stdout))
        == (2, found.document)
    )
    assert "benchmrk" in repr(found)


def test_api_status_without_endpoints_is_empty(folder: Path) -> None:
    assert (onnx_ops.status().document, onnx_ops.status().exit_code) == ([], 0)
    assert "No endpoints yet" in repr(onnx_ops.status())


def test_api_status_and_rollback_of_unknown_endpoint_raise_not_found_error(folder: Path) -> None:
    with pytest.raises(NotFoundError):
        onnx_ops.status("nobody")
    with pytest.raises(NotFoundError):
        onnx_ops.rollback("nobody", reason="trying")
