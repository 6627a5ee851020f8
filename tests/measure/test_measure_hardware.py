"""A target that computes a node otherwise than the reference CPU is told with that node."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from onnx_ops.adapters.runtimes.onnxruntime import OnnxRuntime
from onnx_ops.domain.target import Target
from onnx_ops.measure.parity import find_hardware_divergence, measure_parity
from onnx_ops.measure.reference_outputs import ReferenceGroup
from onnx_ops.ports import Ports, Tensors
from onnx_ops.ports.data import Array
from onnx_ops.testing.models import rows, write_perceptron

PORTS = cast("Ports", SimpleNamespace(runtime=lambda _: OnnxRuntime()))
ELSEWHERE = Target(name="elsewhere")


class OddMachine(OnnxRuntime):
    """Its units for one product round the weights to two digits."""

    def __init__(self, weight: str) -> None:
        super().__init__()
        self._weight = weight

    def run(self, model: Path, target: Target, batches: tuple[Tensors, ...]) -> tuple[Mapping[str, Array], ...]:
        graph = onnx.load(model)
        tensor = next(t for t in graph.graph.initializer if t.name == self._weight)
        rounded = np.round(numpy_helper.to_array(tensor), 2)
        tensor.CopyFrom(numpy_helper.from_array(rounded, self._weight))
        odd = model.with_name("odd.onnx")
        onnx.save(graph, odd)
        return super().run(odd, target, batches)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "model.onnx"
    write_perceptron(path)
    return path


def proven(model: Path) -> list[ReferenceGroup]:
    """The answers of the reference CPU stand for those of the source."""
    inputs = rows(64)
    (answers,) = OnnxRuntime().run(model, ELSEWHERE, (inputs,))
    return [ReferenceGroup(name="real", inputs=inputs, single=dict(answers), double=None)]


def test_a_target_that_computes_alike_departs_nowhere(model: Path) -> None:
    reference, runtime = proven(model), OnnxRuntime()
    measured = measure_parity(runtime, model, ELSEWHERE, reference)
    assert find_hardware_divergence(PORTS, runtime, ELSEWHERE, model, reference, measured) is None


def test_the_node_that_is_computed_otherwise_is_named(model: Path) -> None:
    graph = onnx.load(model).graph
    weights = {tensor.name for tensor in graph.initializer if len(tensor.dims) == 2}
    for weight in weights:
        reference, runtime = proven(model), OddMachine(weight)
        measured = measure_parity(runtime, model, ELSEWHERE, reference)
        found = find_hardware_divergence(PORTS, runtime, ELSEWHERE, model, reference, measured)
        assert found is not None
        culprit = next(node for node in graph.node if weight in node.input)
        assert found.node == (culprit.name or culprit.output[0]), (weight, found)
