"""Rows on axes other than the first, and inputs without a row axis."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from onnx_ops.adapters.runtimes.onnxruntime import OnnxRuntime
from onnx_ops.config.targets import PROFILES, TargetFiles
from onnx_ops.domain.artifact import TensorSpec
from onnx_ops.errors import UserError
from onnx_ops.measure.row_layout import (
    RowLayout,
    arrange_runtime,
    fit_value,
    read_constants,
    read_layout,
)
from onnx_ops.onnx_graph.model_info import read_model_info
from tests.support.voice import HIDDEN, make_voice_rows, write_voice_detector

CPU = TargetFiles(PROFILES).load("cpu-1t")


def put_first(rows: dict[str, Any]) -> dict[str, Any]:
    return {**rows, "state": np.moveaxis(rows["state"], 1, 0)}


def test_arrange_runtime_moves_rows_to_first_axis(tmp_path: Path) -> None:
    path, plain = write_voice_detector(tmp_path / "m.onnx"), OnnxRuntime()
    rows = make_voice_rows(6)
    runtime = arrange_runtime(plain, read_layout(read_model_info(path), {"sr": np.array(8000)}))
    (expected,) = plain.run(path, CPU, ({**rows, "sr": np.array(8000)},))
    (found,) = runtime.run(path, CPU, (put_first(rows),))
    np.testing.assert_array_equal(found["output"], expected["output"])
    np.testing.assert_array_equal(found["next"], np.moveaxis(expected["next"], 1, 0))
    assert found["next"].shape == (6, 2, HIDDEN)
    assert read_constants(runtime) == {"sr": 8000}
    assert read_constants(plain) == {}


def test_row_layout_with_value_for_input_with_rows_repeats_it_per_row(tmp_path: Path) -> None:
    path = write_voice_detector(tmp_path / "m.onnx")
    layout = read_layout(read_model_info(path), {"sr": np.array(16000), "state": np.array(0)})
    feed = layout.arrange({"input": make_voice_rows(4)["input"]})
    assert feed["state"].shape == (2, 4, HIDDEN)
    assert not feed["state"].any()
    assert feed["sr"].shape == ()


def test_row_layout_with_value_in_feed_prefers_it() -> None:
    layout = RowLayout(inputs={"x": 0}, values={"sr": np.array(1)})
    assert layout.arrange({"x": np.zeros(2), "sr": np.array(7)})["sr"] == 7


def test_arrange_runtime_with_rows_on_first_axis_returns_same_runtime() -> None:
    runtime = OnnxRuntime()
    assert arrange_runtime(runtime, RowLayout(inputs={"x": 0, "y": 0}, outputs={"z": 0})) is runtime


@pytest.mark.parametrize(
    ("value", "dtype", "shape", "expected"),
    [
        (16000, "int64", (), 16000),
        (16000, "float32", (1,), [16000.0]),
        (0, "float32", (2, 2), [[0, 0], [0, 0]]),
        (True, "bool", (), True),
        ([1, 2], "int32", ("n",), [1, 2]),
        (255, "uint8", (), 255),
        ("de", "string", (), "de"),
    ],
)
def test_fit_value_returns_type_and_shape_of_input(
    value: object, dtype: str, shape: tuple[int | str, ...], expected: object
) -> None:
    array = fit_value(value, TensorSpec(name="x", dtype=dtype, shape=shape))
    assert (array.tolist(), array.dtype.name[:3]) == (
        expected,
        np.dtype("U2" if dtype == "string" else dtype).name[:3],
    )


@pytest.mark.parametrize(
    ("value", "dtype", "shape"),
    [
        (0.5, "int64", ()),
        (256, "uint8", ()),
        (2, "bool", ()),
        ("fast", "int64", ()),
        ([1, 2, 3], "float32", (2,)),
        ([1, 2], "float32", ()),
        (1, "string", ()),
    ],
)
def test_fit_value_of_unfit_value_or_shape_raises_user_error_naming_input(
    value: object, dtype: str, shape: tuple[int, ...]
) -> None:
    with pytest.raises(UserError, match="'x' takes"):
        fit_value(value, TensorSpec(name="x", dtype=dtype, shape=shape))
