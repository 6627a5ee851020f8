"""Recurrent layers of PyTorch.

Exports with a free length are compared with their source. Refusals name their cause.
"""

from __future__ import annotations

import importlib
import sys
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from onnx_ops.adapters.exporters.torch import TorchExporter
from onnx_ops.domain.pipeline import Export
from onnx_ops.errors import UserError
from onnx_ops.onnx_graph.files import read_structure
from onnx_ops.onnx_graph.model_info import read_model_info
from onnx_ops.ports import ExportRequest, Tensors
from tests.adapters import model_runs

LENGTHS, BATCHES = (1, 7, 40), (1, 3)

Settings = dict[str, Any]


@pytest.fixture(scope="module")
def modules() -> Any:
    """Return modules over sequences; PyTorch is slow to import."""
    return importlib.import_module("tests.support.recurrent_modules")


def make_section(samples: Tensors, opset: int = 18) -> Export:
    """Return a section with a free batch of all inputs, and a free length of `x`."""
    dynamic = {name: {0: "batch"} for name in samples} | {"x": {0: "batch", 1: "length"}}
    return Export(framework="torch", opset=opset, dynamic=dynamic)


def export(module: Any, samples: Tensors, path: Path, opset: int = 18) -> None:
    request = ExportRequest(section=make_section(samples, opset), samples=samples, path=path)
    TorchExporter().export(module, request)


def make(modules: Any, layer: str, settings: Settings, *, stateful: bool) -> Any:
    kind = "Recurrent" if not stateful else "StatefulLstm" if layer == "LSTM" else "Stateful"
    return getattr(modules, kind)(layer, **settings)


def check(modules: Any, module: Any, path: Path, sample_length: int = 40, opset: int = 18) -> None:
    """Export the module, and compare all outputs at all lengths and batches."""
    export(module, modules.sequences(module, 4, sample_length), path, opset)
    assert read_model_info(path).inputs[0].shape[:2] == ("batch", "length")
    assert {node.op_type for node in read_structure(path).graph.node} & {"LSTM", "GRU", "RNN"}
    for seed, (length, batch) in enumerate(product(LENGTHS, BATCHES)):
        feed = modules.sequences(module, batch, length, seed=seed)
        expected = model_runs.reference(TorchExporter(), module, feed)
        answers = model_runs.run(path, feed)
        assert answers.keys() == expected.keys()
        for name in expected:
            assert answers[name].shape == expected[name].shape
            assert np.abs(answers[name] - expected[name]).max() < 1e-6, (name, length, batch)


CASES: dict[str, tuple[str, Settings, bool]] = {
    "lstm": ("LSTM", {"bidirectional": True, "num_layers": 2}, True),
    "gru": ("GRU", {"bidirectional": True, "steps_first": True}, False),
    "rnn": ("RNN", {"num_layers": 2, "nonlinearity": "relu", "bias": False}, True),
}


@pytest.mark.parametrize("case", CASES)
def test_torch_export_of_recurrent_layer_with_free_length_equals_source(
    modules: Any, case: str, tmp_path: Path
) -> None:
    layer, settings, stateful = CASES[case]
    check(modules, make(modules, layer, settings, stateful=stateful), tmp_path / "m.onnx")


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("layer", "layers", "bidirectional", "steps_first", "stateful"),
    list(product(("LSTM", "GRU", "RNN"), (1, 2), (False, True), (False, True), (False, True))),
)
def test_torch_export_of_each_recurrent_form_equals_source(
    modules: Any,
    layer: str,
    layers: int,
    bidirectional: bool,
    steps_first: bool,
    stateful: bool,
    tmp_path: Path,
) -> None:
    settings = {"num_layers": layers, "bidirectional": bidirectional, "steps_first": steps_first}
    check(modules, make(modules, layer, settings, stateful=stateful), tmp_path / "m.onnx")


@pytest.mark.nightly
@pytest.mark.parametrize("layer", ["LSTM", "GRU", "RNN"])
@pytest.mark.parametrize(
    ("sample_length", "opset"), [(1, 18), (2, 18), (3, 18), (5, 18), (40, 21), (40, 22)]
)
def test_torch_export_of_recurrent_layer_with_other_sample_length_or_opset_equals_source(
    modules: Any, layer: str, sample_length: int, opset: int, tmp_path: Path
) -> None:
    module = make(modules, layer, {"num_layers": 2, "bidirectional": True}, stateful=True)
    check(modules, module, tmp_path / "m.onnx", sample_length, opset)


@pytest.mark.parametrize(
    ("kind", "arguments", "parts"),
    [
        ("Mixing", (8,), ("at 8", "layer inner.1 (Linear)", "self.inner(x.transpose(1, 2))")),
        ("Unrolled", (), ("at 8", "`forward` of Unrolled", "for step in x.unbind(1):")),
    ],
)
def test_torch_export_of_fixed_length_module_raises_error_with_place_and_removes_hooks(
    modules: Any, kind: str, arguments: tuple[int, ...], parts: tuple[str, ...], tmp_path: Path
) -> None:
    module, trace = getattr(modules, kind)(*arguments), sys.gettrace()
    with pytest.raises(UserError) as caught:
        export(module, modules.sequences(module, 4, 8), tmp_path / "m.onnx")
    assert sys.gettrace() is trace
    assert not any(layer._forward_pre_hooks or layer._forward_hooks for layer in module.modules())
    assert caught.value.where == "export.dynamic"
    remove = "remove the axis from `export.dynamic.x`"
    for part in ("axis 1 of x (length)", *parts, "recurrent_modules.py, line ", remove):
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "what"), [("Packed", "uses packed sequences"), ("Projected", "LSTM with proj_size")]
)
@pytest.mark.filterwarnings("ignore:LSTM with projections:UserWarning")
def test_torch_export_of_unsupported_recurrent_layer_raises_user_error(
    modules: Any, kind: str, what: str, tmp_path: Path
) -> None:
    module = getattr(modules, kind)()
    with pytest.raises(UserError) as caught:
        export(module, modules.sequences(module, 4, 8), tmp_path / "m.onnx")
    assert what in caught.value.what


def test_torch_export_of_two_inputs_with_same_length_shares_symbol_and_equals_source(
    modules: Any, tmp_path: Path
) -> None:
    module = modules.Masked()
    samples = {
        **modules.sequences(module, 4, 8),
        "mask": np.arange(32, dtype=np.float32).reshape(4, 8) % 5,
    }
    axes = {0: "batch", 1: "length"}
    section = Export(framework="torch", dynamic={"x": axes, "mask": axes})
    TorchExporter().export(
        module, ExportRequest(section=section, samples=samples, path=tmp_path / "m.onnx")
    )
    shapes = [spec.shape for spec in read_model_info(tmp_path / "m.onnx").inputs]
    assert shapes == [("batch", "length", 3), ("batch", "length")]
    for length in LENGTHS:
        feed = {**modules.sequences(module, 3, length), "mask": np.ones((3, length), np.float32)}
        (answer,) = model_runs.run(tmp_path / "m.onnx", feed).values()
        (expected,) = model_runs.reference(TorchExporter(), module, feed).values()
        assert np.abs(answer - expected).max() < 1e-6


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["Strided", "Encoder", "Summed", "Banded", "Padded"])
def test_torch_export_of_sequence_models_with_free_length_equals_source(
    modules: Any, kind: str, tmp_path: Path
) -> None:
    module = getattr(modules, kind)().eval()
    export(module, modules.sequences(module, 4, 24), tmp_path / "m.onnx")
    for length in (7, 24, 40):
        feed = modules.sequences(module, 3, length)
        (answer,) = model_runs.run(tmp_path / "m.onnx", feed).values()
        (expected,) = model_runs.reference(TorchExporter(), module, feed).values()
        assert answer.shape == expected.shape
        assert np.abs(answer - expected).max() <= 1e-5 * np.abs(expected).max()
