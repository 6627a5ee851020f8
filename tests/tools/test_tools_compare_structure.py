"""compare tells a changed tree that no row shows, and what of a quantized file runs in int8."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from onnx_ops.adapters.exporters.sklearn import SklearnExporter
from onnx_ops.adapters.optimizers.onnxruntime import StaticQuantizer
from onnx_ops.adapters.runtimes.onnxruntime import OnnxRuntime
from onnx_ops.config.targets import load_profile
from onnx_ops.domain.decision import Verdict
from onnx_ops.domain.pipeline import Calibrate, Export, Quantize
from onnx_ops.ports import ExportRequest, OptimizeRequest
from onnx_ops.testing.models import rows, write_perceptron
from onnx_ops.tools.compare import ParityResult, compare
from onnx_ops.tools.probing import generate_samples, shared_inputs


def compared(a: Path, b: Path) -> ParityResult:
    samples = generate_samples(shared_inputs(a, b), count=64, dims={})
    return compare(OnnxRuntime(), load_profile("cpu-1t"), a, b, samples)


@pytest.fixture
def forest(tmp_path: Path) -> Path:
    from sklearn.datasets import load_iris
    from sklearn.ensemble import RandomForestClassifier

    x, y = load_iris(return_X_y=True)
    x = x.astype(np.float32)
    path = tmp_path / "forest.onnx"
    request = ExportRequest(section=Export(framework="sklearn"), samples={"x": x}, path=path)
    SklearnExporter().export(RandomForestClassifier(4, random_state=0).fit(x, y), request)
    return path


def test_a_forest_is_itself(forest: Path) -> None:
    found = compared(forest, forest)
    assert found.verdict is Verdict.PASS
    assert found.trees is not None
    assert (found.trees.trees, found.trees.changed) == (4, 0)


def test_a_threshold_that_moved_by_one_float_is_told(forest: Path) -> None:
    model = onnx.load(forest)
    values = next(a for node in model.graph.node for a in node.attribute if a.name == "nodes_values")
    values.floats[0] = float(np.nextafter(np.float32(values.floats[0]), np.float32(np.inf)))
    moved = forest.with_name("moved.onnx")
    onnx.save(model, moved)
    found = compared(forest, moved)
    assert found.verdict is Verdict.FAIL
    assert "tree 0, node 0: threshold" in found.reason
    assert "A has" in found.reason


def test_rows_beside_splits_show_a_forest_whose_splits_are_far_from_the_rows(forest: Path) -> None:
    model = onnx.load(forest)
    values = next(a for node in model.graph.node for a in node.attribute if a.name == "nodes_values")
    values.floats[:] = [value + 100 for value in values.floats]
    far = forest.with_name("far.onnx")
    onnx.save(model, far)
    assert compared(far, far).verdict is Verdict.PASS


def test_forest_beside_itself_in_ort_format_is_itself(forest: Path) -> None:
    stored = forest.with_name("forest.ort")
    options = ort.SessionOptions()
    options.optimized_model_filepath = str(stored)
    options.add_session_config_entry("session.save_model_format", "ORT")
    ort.InferenceSession(str(forest), options, providers=["CPUExecutionProvider"])
    for found in (compared(stored, forest), compared(forest, stored)):
        assert (found.verdict, found.trees) == (Verdict.PASS, None)
        assert "splits" in {one.group for one in found.differences}


def test_a_quantized_file_tells_its_coverage(tmp_path: Path) -> None:
    source, derived = tmp_path / "source.onnx", tmp_path / "derived.onnx"
    write_perceptron(source)
    section = Quantize(name="int8", method="static", calibrate=Calibrate(), exclude=("third",))
    StaticQuantizer().optimize(OptimizeRequest(section=section, source=source, path=derived, calibration=rows(64)))
    found = compared(source, derived)
    assert found.coverage is not None
    assert found.coverage.int8 == ("first", "second")
    assert [one.name for one in found.coverage.floats] == ["third"]
    assert compared(source, source).coverage is None
