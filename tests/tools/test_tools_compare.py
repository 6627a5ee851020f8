"""`compare` reports changed trees that no row shows, and the int8 part of a file."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import helper

from onnx_ops.adapters.exporters.sklearn import SklearnExporter
from onnx_ops.adapters.optimizers.onnxruntime import StaticQuantizer
from onnx_ops.adapters.runtimes.onnxruntime import OnnxRuntime
from onnx_ops.config.targets import PROFILES, TargetFiles
from onnx_ops.domain.decision import Verdict
from onnx_ops.domain.pipeline import Calibrate, Export, Quantize
from onnx_ops.errors import UserError
from onnx_ops.onnx_graph.compatibility import drop_zipmaps
from onnx_ops.ports import ExportRequest, OptimizeRequest
from onnx_ops.testing.models import rows, write_perceptron
from onnx_ops.tools.compare import ParityResult, compare
from onnx_ops.tools.generated_rows import generate_samples
from onnx_ops.tools.model_inputs import shared_inputs
from tests.support.backend_models import Outcome, compare_with_itself, look, outcomes, write_models
from tests.support.graphs import write_graph
from tests.support.suite import Sweep
from tests.support.zipmap import zipped


def compared(a: Path, b: Path) -> ParityResult:
    samples = generate_samples(shared_inputs(a, b), count=64, dims={})
    return compare(OnnxRuntime(), TargetFiles(PROFILES).load("cpu-1t"), a, b, samples)


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


def test_compare_of_forest_with_itself_passes(forest: Path) -> None:
    found = compared(forest, forest)
    assert found.verdict is Verdict.PASS
    assert found.trees is not None
    assert (found.trees.trees, found.trees.changed) == (4, 0)


def with_thresholds(forest: Path, change: Callable[[list[float]], Sequence[float]]) -> Path:
    model = onnx.load(forest)
    values = next(
        a for node in model.graph.node for a in node.attribute if a.name == "nodes_values"
    )
    values.floats[:] = change(list(values.floats))
    onnx.save(model, forest.with_name("moved.onnx"))
    return forest.with_name("moved.onnx")


def test_compare_of_forest_with_threshold_moved_by_one_ulp_fails(forest: Path) -> None:
    inf = np.float32(np.inf)
    found = compared(
        forest,
        with_thresholds(forest, lambda v: [float(np.nextafter(np.float32(v[0]), inf)), *v[1:]]),
    )
    assert found.verdict is Verdict.FAIL
    assert "tree 0, node 0: threshold" in found.reason
    assert "A has" in found.reason


def test_compare_of_forest_with_distant_splits_with_itself_passes(forest: Path) -> None:
    far = with_thresholds(forest, lambda values: [value + 100 for value in values])
    assert compared(far, far).verdict is Verdict.PASS


def test_compare_of_forest_with_split_by_equality_passes_without_comparison_of_nodes(
    forest: Path,
) -> None:
    model = onnx.load(forest)
    modes = next(a for node in model.graph.node for a in node.attribute if a.name == "nodes_modes")
    modes.strings[0] = b"BRANCH_EQ"
    onnx.save(model, forest)
    found = compared(forest, forest)
    assert (found.verdict, found.trees) == (Verdict.PASS, None)


def test_compare_of_forest_with_its_ort_format_passes(forest: Path) -> None:
    stored = forest.with_name("forest.ort")
    options = ort.SessionOptions()
    options.optimized_model_filepath = str(stored)
    options.add_session_config_entry("session.save_model_format", "ORT")
    ort.InferenceSession(str(forest), options, providers=["CPUExecutionProvider"])
    for found in (compared(stored, forest), compared(forest, stored)):
        assert (found.verdict, found.trees) == (Verdict.PASS, None)
        assert "splits" in {one.group for one in found.differences}


def test_compare_of_quantized_file_reports_int8_coverage(tmp_path: Path) -> None:
    source, derived = write_perceptron(tmp_path / "source.onnx"), tmp_path / "derived.onnx"
    section = Quantize(name="int8", method="static", calibrate=Calibrate(), exclude=("third",))
    StaticQuantizer().optimize(
        OptimizeRequest(section=section, source=source, path=derived, calibration=rows(64))
    )
    found = compared(source, derived)
    assert found.coverage is not None
    assert found.coverage.int8 == ("first", "second")
    assert [one.name for one in found.coverage.floats] == ["third"]
    assert compared(source, source).coverage is None


_HALVES = "(float[N,4] x) => (seq(float[N,2]) y) { y = SplitToSequence<axis: int = 1>(x, two) }"
_NEGATIVE = (
    "(float[N,4] x) => (seq(float[N,2]) y) { z = Neg(x)\n y = SplitToSequence<axis: int = "
    "1>(z, two) }"
)
_THREE = (
    "(float[N,4] x) => (seq(float[N,2]) y) { s = SplitToSequence<axis: int = 1>(x, "
    "two)\n z = Sub(x, x)\n h = Slice(z, begin, end, axis)\n y = SequenceInsert(s, h) }"
)
_ROWS = "(float[N,4] x) => (seq(float[1,4]) y) { y = SplitToSequence<axis: int = 0>(x) }"
_SAME = "(float[N,4] x) => (optional(float[N,4]) y) { y = Optional(x) }"
_NEGATED = "(float[N,4] x) => (optional(float[N,4]) y) { z = Neg(x)\n y = Optional(z) }"


@pytest.mark.parametrize(
    ("a", "b", "verdict"),
    [
        (_HALVES, _HALVES, Verdict.PASS),
        (_HALVES, _NEGATIVE, Verdict.FAIL),
        (_HALVES, _THREE, Verdict.FAIL),
        (_THREE, _HALVES, Verdict.FAIL),
        (_ROWS, _ROWS, Verdict.PASS),
        (_SAME, _SAME, Verdict.PASS),
        (_SAME, _NEGATED, Verdict.FAIL),
    ],
    ids=[
        "sequence",
        "other-sequence",
        "longer",
        "shorter",
        "as-long-as-the-batch",
        "optional",
        "other-optional",
    ],
)
def test_compare_of_sequences_and_optionals_uses_elements_and_length(
    tmp_path: Path, a: str, b: str, verdict: Verdict
) -> None:
    constants = {"two": 2, "begin": [0], "end": [2], "axis": [1]}
    paths = [
        write_graph(tmp_path / name, text, **{k: v for k, v in constants.items() if k in text})
        for name, text in (("a.onnx", a), ("b.onnx", b))
    ]
    assert compared(*paths).verdict is verdict


@pytest.mark.parametrize(
    ("keys", "verdict"),
    [([0, 1, 2], Verdict.PASS), ([1, 2, 3], Verdict.FAIL), ([2, 0, 1], Verdict.FAIL)],
)
def test_compare_of_maps_uses_keys_and_values(
    tmp_path: Path, keys: list[int], verdict: Verdict
) -> None:
    onnx.save(zipped([0, 1, 2]), tmp_path / "a.onnx")
    onnx.save(zipped(keys), tmp_path / "b.onnx")
    found = compared(tmp_path / "a.onnx", tmp_path / "b.onnx")
    assert found.verdict is verdict
    assert not [note for note in found.notes if "outputs that A lacks" in note]


@pytest.mark.parametrize("dropped", ["a.onnx", "b.onnx"])
def test_compare_of_maps_with_their_matrix_passes(tmp_path: Path, dropped: str) -> None:
    plain = zipped([0, 1, 2])
    assert drop_zipmaps(plain) == ("probabilities",)
    for name in ("a.onnx", "b.onnx"):
        onnx.save(plain if name == dropped else zipped([0, 1, 2]), tmp_path / name)
    assert compared(tmp_path / "a.onnx", tmp_path / "b.onnx").verdict is Verdict.PASS


def test_drop_zipmaps_adds_missing_default_domain() -> None:
    model = zipped([0, 1, 2])
    del model.opset_import[0]
    model.graph.node[0].CopyFrom(helper.make_node("Normalizer", ["x"], ["p"], domain="ai.onnx.ml"))
    drop_zipmaps(model)
    assert {entry.domain for entry in model.opset_import} == {"", "ai.onnx.ml"}
    onnx.checker.check_model(model, full_check=True)


def test_drop_zipmaps_without_maps_changes_nothing(tmp_path: Path) -> None:
    model = onnx.load(write_graph(tmp_path / "plain.onnx", _SAME))
    before = model.SerializeToString(deterministic=True)
    assert drop_zipmaps(model) == ()
    assert model.SerializeToString(deterministic=True) == before


def test_compare_of_too_new_opset_raises_user_error(tmp_path: Path) -> None:
    new = write_perceptron(tmp_path / "new.onnx", opset=99)
    with pytest.raises(UserError, match="accepts opset") as caught:
        compared(new, new)
    assert caught.value.remedy


TROUBLE = {
    "node/test_constantofshape_int_zeros": ("UserError", "has another shape for other rows"),
    "node/test_nonzero_example": ("UserError", "has another shape for other rows"),
}


SAMPLE = {
    name: operator
    for line in (Path(__file__).parent / "backend_sample.txt")
    .read_text(encoding="utf-8")
    .splitlines()
    for name, _, operator in [line.partition(" ")]
}
"""Randomly chosen models, and those of `TROUBLE`, by name.

The value is the module of the onnx package that makes the model.
"""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    found = write_models(tmp_path_factory.mktemp("models"), sorted(set(SAMPLE.values()) - {""}))
    return {"/".join(path.parts[-3:-1]): path for path in found}


def test_tools_on_backend_models_end_in_verdicts_or_typed_errors(
    models: dict[str, Path], sweep: Sweep
) -> None:
    found = tuple(
        outcomes([models[name] for name in sweep(name for name in SAMPLE if name not in TROUBLE)])
    )
    assert [one for one in found if one.fault] == []
    assert {one.tool for one in found} == {"inspect", "judge"}
    assert {"pass", "valid"} <= {one.kind for one in found}


@pytest.mark.parametrize("name", TROUBLE)
def test_compare_of_same_model_with_data_dependent_shapes_raises_user_error(
    name: str, models: dict[str, Path]
) -> None:
    kind, said = TROUBLE[name]
    assert look(models[name]).kind == "valid"
    found = compare_with_itself(models[name])
    assert found.kind == kind
    assert said in found.text


def test_outcomes_with_crashing_process_report_crash_and_continue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every process ends immediately here, since its interpreter exits with 3."""
    crashing = tmp_path / "python"
    crashing.write_text("#!/bin/sh\nread line\nexit 3\n")
    crashing.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(crashing))
    paths = [tmp_path / "node" / name / "model.onnx" for name in ("a", "b")]
    assert list(outcomes(paths)) == [
        Outcome(model=f"node/{name}", tool="inspect", kind="crashed", text="exit 3")
        for name in ("a", "b")
    ]
