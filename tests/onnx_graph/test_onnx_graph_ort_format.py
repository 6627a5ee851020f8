"""Files in ORT format: their readable parts, and damaged files, which are refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest

from onnx_ops.adapters.runtimes.onnxruntime import OnnxRuntime
from onnx_ops.config.targets import PROFILES, TargetFiles
from onnx_ops.errors import UserError
from onnx_ops.onnx_graph.compatibility import check_model
from onnx_ops.onnx_graph.files import read_model, read_structure
from onnx_ops.onnx_graph.model_info import read_model_info, write_copy
from onnx_ops.onnx_graph.ort_format import is_ort_format
from onnx_ops.onnx_graph.python_source import write_python_source
from onnx_ops.testing.models import rows, write_perceptron
from onnx_ops.tools.quantize import check_paths

_MAGIC_END = 8


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ort")
    write_perceptron(folder / "model.onnx")
    options = ort.SessionOptions()
    options.optimized_model_filepath = str(folder / "model.ort")
    options.add_session_config_entry("session.save_model_format", "ORT")
    ort.InferenceSession(str(folder / "model.onnx"), options, providers=["CPUExecutionProvider"])
    return folder / "model.ort"


def test_read_model_info_of_ort_file_matches_source(stored: Path) -> None:
    assert is_ort_format(stored)
    assert not is_ort_format(stored.with_name("model.onnx"))
    found, source = read_model_info(stored), read_model_info(stored.with_name("model.onnx"))
    assert (found.inputs, found.outputs, found.ir_version) == (
        source.inputs,
        source.outputs,
        source.ir_version,
    )
    assert found.opsets[""] == source.opsets[""]
    graph = read_structure(stored).graph
    assert {node.op_type for node in graph.node} >= {"Gemm"}
    assert {tuple(tensor.dims) for tensor in graph.initializer} >= {(16, 16), (3, 16)}
    check_model(stored)


def test_read_model_of_ort_file_raises_user_error(stored: Path) -> None:
    with pytest.raises(UserError, match="cannot be rewritten") as caught:
        read_model(stored)
    assert caught.value.remedy.startswith("Name the .onnx file")


def test_ort_file_named_onnx_runs_but_cannot_be_quantized(stored: Path, tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(stored.read_bytes())
    runtime, target = OnnxRuntime(), TargetFiles(PROFILES).load("cpu-1t")
    ((answer,), (expected,)) = (
        runtime.run(p, target, (rows(4),)) for p in (path, stored.with_name("model.onnx"))
    )
    np.testing.assert_allclose(
        np.float32(answer["scores"]), np.float32(expected["scores"]), rtol=1e-5, atol=1e-6
    )
    with pytest.raises(UserError, match="cannot be rewritten"):
        check_paths(path, tmp_path / "variant.onnx")


def test_read_structure_of_damaged_ort_file_returns_structure_or_raises_user_error(
    stored: Path, tmp_path: Path
) -> None:
    data, path = stored.read_bytes(), tmp_path / "damaged.ort"
    draw = np.random.default_rng(0)
    remedies: set[str] = set()
    for size in draw.integers(_MAGIC_END, len(data), 60):
        path.write_bytes(data[:size])
        remedies.add(remedy_of(path))
    for _ in range(400):
        damaged = bytearray(data)
        for place in draw.integers(_MAGIC_END, len(data), 8):
            damaged[place] = int(draw.integers(0, 256))
        path.write_bytes(damaged)
        remedies.add(remedy_of(path))
    assert remedies == {"", "Recreate it from the .onnx file."}


def remedy_of(path: Path) -> str:
    """Return the remedy of the error that reading the file raises.

    It is empty if the file is read.
    """
    try:
        read_structure(path)
    except UserError as error:
        return error.remedy or "none"
    return ""


def _set_license(stored: Path) -> None:
    write_copy(stored, stored, {"license": "MIT"})


def _write_source(stored: Path) -> None:
    write_python_source(stored, stored.with_name("source.py"))


@pytest.mark.parametrize("rewrite", [_set_license, _write_source])
def test_rewriting_ort_file_raises_user_error_and_keeps_it(
    stored: Path, rewrite: Callable[[Path], None]
) -> None:
    before = stored.read_bytes()
    with pytest.raises(UserError, match="ORT format cannot be rewritten"):
        rewrite(stored)
    assert stored.read_bytes() == before
    assert not stored.with_name("source.py").exists()
