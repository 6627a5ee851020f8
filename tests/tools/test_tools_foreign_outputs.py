"""compare on files whose outputs are no tensors: sequences, maps and optional values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper, parser

from onnx_ops.adapters.runtimes.onnxruntime import OnnxRuntime
from onnx_ops.config.targets import load_profile
from onnx_ops.domain.decision import Verdict
from onnx_ops.errors import UserError
from onnx_ops.onnx_graph.compatibility import drop_zipmaps
from onnx_ops.testing.models import write_perceptron
from onnx_ops.tools.compare import ParityResult, compare
from onnx_ops.tools.probing import generate_samples, shared_inputs
from tests.support.zipmap import zipped

_HEAD = '<ir_version: 9, opset_import: ["" : 18]>'
_HALVES = "(float[N,4] x) => (seq(float[N,2]) y) { y = SplitToSequence<axis: int = 1>(x, two) }"
_THREE = (
    "(float[N,4] x) => (seq(float[N,2]) y) { s = SplitToSequence<axis: int = 1>(x, two)\n z = Sub(x, x)\n "
    "h = Slice(z, begin, end, axis)\n y = SequenceInsert(s, h) }"
)
_ROWS = "(float[N,4] x) => (seq(float[1,4]) y) { y = SplitToSequence<axis: int = 0>(x) }"
_SAME = "(float[N,4] x) => (optional(float[N,4]) y) { y = Optional(x) }"
_NEGATED = "(float[N,4] x) => (optional(float[N,4]) y) { z = Neg(x)\n y = Optional(z) }"


def write(path: Path, text: str, **constants: Any) -> Path:
    model = parser.parse_model(f"{_HEAD} g {text}")
    for name, value in constants.items():
        model.graph.initializer.append(numpy_helper.from_array(np.array(value, np.int64), name))
    onnx.save(model, path)
    return path


def compared(a: Path, b: Path) -> ParityResult:
    samples = generate_samples(shared_inputs(a, b), count=16, dims={})
    return compare(OnnxRuntime(), load_profile("cpu-1t"), a, b, samples)


@pytest.mark.parametrize(
    ("a", "b", "verdict"),
    [
        (_HALVES, _HALVES, Verdict.PASS),
        (_HALVES, _THREE, Verdict.FAIL),
        (_THREE, _HALVES, Verdict.FAIL),
        (_ROWS, _ROWS, Verdict.PASS),
        (_SAME, _SAME, Verdict.PASS),
        (_SAME, _NEGATED, Verdict.FAIL),
    ],
    ids=["sequence", "longer", "shorter", "as-long-as-the-batch", "optional", "other-optional"],
)
def test_sequences_are_compared_by_elements_and_length(tmp_path: Path, a: str, b: str, verdict: Verdict) -> None:
    constants = {"two": 2, "begin": [0], "end": [2], "axis": [1]}

    def path(name: str, text: str) -> Path:
        return write(tmp_path / name, text, **{k: v for k, v in constants.items() if k in text})

    assert compared(path("a.onnx", a), path("b.onnx", b)).verdict is verdict


@pytest.mark.parametrize(
    ("keys", "verdict"), [([0, 1, 2], Verdict.PASS), ([1, 2, 3], Verdict.FAIL), ([2, 0, 1], Verdict.FAIL)]
)
def test_maps_are_compared_by_keys_and_values(tmp_path: Path, keys: list[int], verdict: Verdict) -> None:
    onnx.save(zipped([0, 1, 2]), tmp_path / "a.onnx")
    onnx.save(zipped(keys), tmp_path / "b.onnx")
    assert compared(tmp_path / "a.onnx", tmp_path / "b.onnx").verdict is verdict


@pytest.mark.parametrize("dropped", ["a.onnx", "b.onnx"])
def test_maps_and_the_matrix_that_they_are_made_of_are_the_same(tmp_path: Path, dropped: str) -> None:
    plain = zipped([0, 1, 2])
    assert drop_zipmaps(plain) == ("probabilities",)
    for name in ("a.onnx", "b.onnx"):
        onnx.save(plain if name == dropped else zipped([0, 1, 2]), tmp_path / name)
    assert compared(tmp_path / "a.onnx", tmp_path / "b.onnx").verdict is Verdict.PASS


def test_a_file_that_imports_trees_only_imports_the_default_operators_for_its_matrix() -> None:
    model = zipped([0, 1, 2])
    del model.opset_import[0]
    model.graph.node[0].CopyFrom(helper.make_node("Normalizer", ["x"], ["p"], domain="ai.onnx.ml"))
    drop_zipmaps(model)
    assert {entry.domain for entry in model.opset_import} == {"", "ai.onnx.ml"}
    onnx.checker.check_model(model, full_check=True)


def test_a_file_without_maps_is_left_as_it_is() -> None:
    model = parser.parse_model(f"{_HEAD} g {_SAME}")
    before = model.SerializeToString(deterministic=True)
    assert drop_zipmaps(model) == ()
    assert model.SerializeToString(deterministic=True) == before


def test_a_file_too_new_for_the_target_is_refused_before_it_runs(tmp_path: Path) -> None:
    write_perceptron(tmp_path / "new.onnx", opset=99)
    with pytest.raises(UserError, match="accepts opset") as caught:
        compared(tmp_path / "new.onnx", tmp_path / "new.onnx")
    assert caught.value.remedy
