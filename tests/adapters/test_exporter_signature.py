"""Names and opsets of converters that know neither the pipeline's axes nor its limits."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from onnx import TensorProto, ValueInfoProto, helper

from onnx_ops.adapters.exporters.signature import check_opset, name_axes
from onnx_ops.domain.pipeline import Export
from onnx_ops.errors import UserError


def axes(values: Iterable[ValueInfoProto]) -> list[list[str | int]]:
    """Names of the free axes of each value, and sizes of the others; 0 for a free axis without a name."""
    return [[axis.dim_param or axis.dim_value for axis in value.type.tensor_type.shape.dim] for value in values]


@pytest.mark.parametrize(
    ("dynamic", "inputs", "output"),
    [
        ({}, [["batch", 0], ["batch", 4]], ["batch", 0]),
        ({"a": {0: "rows", 1: "words"}, "b": {0: "rows"}}, [["rows", "words"], ["rows", 4]], ["rows", 0]),
        ({"a": {0: "rows"}}, [["rows", 0], ["batch", 4]], [0, 0]),
    ],
    ids=["by default", "as the pipeline says", "inputs of two batches"],
)
def test_the_first_axis_of_outputs_is_the_batch_that_all_inputs_share(
    dynamic: dict[str, dict[int, str]], inputs: list[list[str | int]], output: list[str | int]
) -> None:
    shapes: dict[str, list[str | int]] = {"a": ["unk_1", "unk_2"], "b": ["unk_3", 4], "y": ["unk_4", "unk_5"]}
    a, b, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in shapes.items())
    model = helper.make_model(helper.make_graph([], "g", [a, b], [y]))
    name_axes(model, Export(framework="keras", dynamic=dynamic))
    assert axes(model.graph.input) == inputs
    assert axes(model.graph.output) == [output]


@pytest.mark.parametrize(("opset", "nearest"), [(8, 9), (9, 9), (17, 17), (18, 17)])
def test_an_opset_that_the_converter_does_not_write_is_refused(opset: int, nearest: int) -> None:
    section = Export(framework="keras", opset=opset)
    if opset == nearest:
        check_opset(section, 9, 17, "tool")
    else:
        with pytest.raises(UserError) as refused:
            check_opset(section, 9, 17, "tool")
        assert str(nearest) in refused.value.remedy
