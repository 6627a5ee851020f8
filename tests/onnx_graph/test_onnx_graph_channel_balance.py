"""Balancing of outlier channels.

The function stays the same. Channels that another node reads are not balanced.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from onnx_ops.errors import MeasurementError
from onnx_ops.onnx_graph.channel_balance import (
    PROPERTY,
    balance_channels,
    write_balanced,
    write_balanced_like,
)
from onnx_ops.onnx_graph.files import read_model, write_model
from tests.onnx_graph.norms import CHANNELS, LOUD, OUTPUTS, answers, write_norm


def constants(path: Path) -> dict[str, np.ndarray[Any, Any]]:
    return {
        tensor.name: numpy_helper.to_array(tensor) for tensor in read_model(path).graph.initializer
    }


@pytest.mark.parametrize("form", ["norm", "steps", "no shift"])
def test_write_balanced_keeps_outputs_bit_identical(tmp_path: Path, form: str) -> None:
    source, balanced = write_norm(tmp_path / "model.onnx", form), tmp_path / "balanced.onnx"
    assert write_balanced(source, balanced)
    for before, after in zip(answers(source), answers(balanced), strict=True):
        np.testing.assert_array_equal(before, after)
    weights = constants(balanced)
    assert np.abs(weights["n_balanced_scale"]).max() < 2
    assert np.abs(weights["first"]).max(axis=1).min() > 0.1
    assert np.abs(weights["second"]).max(axis=0).min() > 0.1


def test_write_balanced_without_outlier_channels_returns_false(tmp_path: Path) -> None:
    source = write_norm(tmp_path / "model.onnx", loud=2.0)
    assert not write_balanced(source, tmp_path / "balanced.onnx")
    assert not (tmp_path / "balanced.onnx").exists()


def test_balance_channels_with_large_weights_skips_channel(tmp_path: Path) -> None:
    """Balancing would make its weights larger than all others.

    Their quantization steps would become too coarse.
    """
    source = write_norm(tmp_path / "model.onnx")
    model = read_model(source)
    for tensor in model.graph.initializer:
        if tensor.name in ("first", "second"):
            values = numpy_helper.to_array(tensor).copy()
            values[(slice(None), LOUD[0]) if tensor.name == "second" else LOUD[0]] *= 60 * 60
            tensor.CopyFrom(numpy_helper.from_array(values, tensor.name))
    assert balance_channels(model) == 1


def read_by_another(model: onnx.ModelProto) -> None:
    model.graph.node.append(helper.make_node("Relu", ["n"], ["c"]))


def returned(model: onnx.ModelProto) -> None:
    model.graph.output.add(name="n")


def shares_a_weight(model: onnx.ModelProto) -> None:
    model.graph.node.append(helper.make_node("Abs", ["first"], ["c"]))


def takes_a_weight_as_input(model: onnx.ModelProto) -> None:
    model.graph.input.append(
        helper.make_tensor_value_info("first", TensorProto.FLOAT, [CHANNELS, OUTPUTS])
    )


def transposes_rows(model: onnx.ModelProto) -> None:
    next(node for node in model.graph.node if node.name == "b").attribute.append(
        helper.make_attribute("transA", 1)
    )


@pytest.mark.parametrize(
    "change", [read_by_another, returned, shares_a_weight, takes_a_weight_as_input, transposes_rows]
)
def test_balance_channels_of_unsupported_graph_changes_nothing(
    tmp_path: Path, change: Callable[[onnx.ModelProto], None]
) -> None:
    model = read_model(write_norm(tmp_path / "model.onnx"))
    change(model)
    before = model.SerializeToString()
    assert balance_channels(model) == 0
    assert model.SerializeToString() == before


def test_write_balanced_with_shared_constants_copies_them(tmp_path: Path) -> None:
    """An exporter stores equal constants only once."""
    source, balanced = write_norm(tmp_path / "model.onnx"), tmp_path / "balanced.onnx"
    model = read_model(source)
    model.graph.node.insert(
        1, helper.make_node("LayerNormalization", ["x", "gain", "shift"], ["other"], axis=-1)
    )
    model.graph.output.add(name="other")
    write_model(model, source)
    assert write_balanced(source, balanced)
    np.testing.assert_array_equal(constants(source)["gain"], constants(balanced)["gain"])
    for before, after in zip(answers(source), answers(balanced), strict=True):
        np.testing.assert_array_equal(before, after)


def read_through_identities(source: Path, *, chained: bool) -> None:
    """Read each constant through an Identity, as exporters share equal constants."""
    model = read_model(source)
    copies = {}
    for tensor in model.graph.initializer:
        names = [tensor.name, f"{tensor.name}_copy", *([f"{tensor.name}_again"] if chained else [])]
        copies[tensor.name] = names[-1]
        for place, (before, after) in enumerate(itertools.pairwise(names)):
            model.graph.node.insert(place, helper.make_node("Identity", [before], [after]))
    for node in model.graph.node:
        if node.op_type != "Identity":
            node.input[:] = [copies.get(name, name) for name in node.input]
    order = sorted(
        model.graph.node,
        key=lambda node: (node.op_type != "Identity", node.output[0].endswith("_again")),
    )
    del model.graph.node[:]
    model.graph.node.extend(order)
    write_model(model, source)


@pytest.mark.parametrize("chained", [False, True])
@pytest.mark.parametrize("form", ["norm", "steps", "no shift"])
def test_write_balanced_of_constants_behind_identities_keeps_outputs(
    tmp_path: Path, form: str, chained: bool
) -> None:
    source, balanced, again = (
        write_norm(tmp_path / "model.onnx", form),
        tmp_path / "balanced.onnx",
        tmp_path / "2.onnx",
    )
    expected = answers(source)
    read_through_identities(source, chained=chained)
    assert write_balanced(source, balanced)
    assert write_balanced_like(source, balanced, again)
    for path in (balanced, again):
        for before, after in zip(expected, answers(path), strict=True):
            np.testing.assert_array_equal(before, after)
        assert not [node for node in read_model(path).graph.node if node.op_type == "Identity"]
    assert np.abs(constants(balanced)["n_balanced_scale"]).max() < 2


def test_write_balanced_like_derived_model_writes_same_constants(tmp_path: Path) -> None:
    source, balanced, again = (
        write_norm(tmp_path / "model.onnx"),
        tmp_path / "balanced.onnx",
        tmp_path / "again.onnx",
    )
    write_balanced(source, balanced)
    assert write_balanced_like(source, balanced, again)
    for name, values in constants(balanced).items():
        np.testing.assert_array_equal(values, constants(again)[name])
    assert not write_balanced_like(source, source, tmp_path / "none.onnx")


@pytest.mark.parametrize(
    "recorded",
    [
        "", "7", "[1]", "{", '{"n": 3}', '{"n": {"x": 1}}', '{"n": {"-1": 1}}', '{"n": {"32": 1}}',
        '{"n": {"0": 31}}', '{"n": {"0": -1}}', '{"n": {"0": 0.5}}', '{"n": {"0": "1"}}',
        '{"a": {"0": 1}}', '{"gone": {"0": 1}}',
        json.dumps({"n": {"0": None}}), "[" * 10_000,
    ],
)  # fmt: skip
def test_write_balanced_like_with_invalid_record_raises_measurement_error(
    tmp_path: Path, recorded: str
) -> None:
    source, derived = write_norm(tmp_path / "model.onnx"), tmp_path / "derived.onnx"
    model = read_model(source)
    model.metadata_props.add(key=PROPERTY, value=recorded)
    write_model(model, derived)
    with pytest.raises(MeasurementError, match="is not valid for the source model"):
        write_balanced_like(source, derived, tmp_path / "copy.onnx")
