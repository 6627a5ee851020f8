"""Comparison of two answers, in both forms of Open Inference and in MLflow's."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from onnx_ops.serving.inference.responses import RawResponse
from onnx_ops.serving.inference.shadow import responses_differ

Output = tuple[str, list[int], Any]


def in_json(*outputs: Output, version: str = "1", **named: Any) -> RawResponse:
    document = {
        "model_name": "m",
        "model_version": version,
        "outputs": [
            {"name": name or "y", "datatype": kind, "shape": shape, "data": data}
            for name, (kind, shape, data) in ({"y": outputs[0]} if outputs else named).items()
        ],
    }
    return RawResponse(200, b"content-type: application/json\r\n", json.dumps(document).encode())


def in_binary(array: np.ndarray[Any, Any], datatype: str) -> RawResponse:
    raw = array.tobytes()
    output = {
        "name": "y",
        "datatype": datatype,
        "shape": list(array.shape),
        "parameters": {"binary_data_size": len(raw)},
    }
    header = json.dumps({"model_name": "m", "outputs": [output]}).encode()
    return RawResponse(200, b"inference-header-content-length: %d\r\n" % len(header), header + raw)


def predicted(predictions: Any) -> RawResponse:
    return RawResponse(
        200,
        b"content-type: application/json\r\n",
        json.dumps({"predictions": predictions}).encode(),
    )


@pytest.mark.parametrize(
    ("before", "after", "differ"),
    [
        ([1.0, -2.0], [1.0019, -2.0], False),
        ([1.0, -2.0], [1.0021, -2.0], True),
        ([0.0, 0.0], [0.0, 1e-30], True),
        ([1.0, None], [1.0, None], False),
        ([1.0, None], [None, 1.0], True),
        ([1.0, 2.0], [1.0], True),
        ([3, 4], [3, 4], False),
        ([3, 4], [3, 5], True),
        (["a"], ["a"], False),
        (["a"], ["b"], True),
        ([True], [False], True),
        ([], [], False),
    ],
)
def test_responses_differ_compares_values_within_tolerance(
    before: list[Any], after: list[Any], differ: bool
) -> None:
    shape = [len(before)]
    assert (
        responses_differ(
            in_json(("X", shape, before)), in_json(("X", shape, after), version="2"), 1e-3
        )
        is differ
    )
    assert responses_differ(predicted({"y": before}), predicted({"y": after}), 1e-3) is differ
    assert responses_differ(predicted(before), predicted(after), 1e-3) is differ
    rows_before, rows_after = ([{"y": value} for value in values] for values in (before, after))
    assert responses_differ(predicted(rows_before), predicted(rows_after), 1e-3) is differ


def test_responses_differ_with_other_shapes_or_names_returns_true() -> None:
    flat, square = ("FP32", [4], [1.0] * 4), ("FP32", [2, 2], [1.0] * 4)
    assert responses_differ(in_json(flat), in_json(square), 1e-3)
    assert responses_differ(in_json(y=flat), in_json(z=flat), 1e-3)
    assert responses_differ(in_json(y=flat, z=flat), in_json(y=flat), 1e-3)
    assert not responses_differ(in_json(y=flat, z=square), in_json(y=flat, z=square), 0.0)


def test_responses_differ_scales_tolerance_for_each_output() -> None:
    before = in_json(large=("FP32", [1], [1e6]), small=("FP32", [1], [1.0]))
    after = in_json(large=("FP32", [1], [1e6]), small=("FP32", [1], [1.1]))
    assert responses_differ(before, after, 1e-3)


@pytest.mark.parametrize(
    ("datatype", "dtype"), [("FP32", np.float32), ("FP64", np.float64), ("FP16", np.float16)]
)
def test_responses_differ_of_binary_floats_applies_tolerance(datatype: str, dtype: type) -> None:
    array: np.ndarray[Any, Any] = np.array([[1.0, np.nan], [np.inf, -4.0]], dtype)
    near, far = array.copy(), array.copy()
    near[1, 1], far[1, 1] = -4.002, -4.2
    assert not responses_differ(in_binary(array, datatype), in_binary(near, datatype), 1e-3)
    assert responses_differ(in_binary(array, datatype), in_binary(far, datatype), 1e-3)
    assert responses_differ(in_binary(array, datatype), in_binary(np.abs(array), datatype), 1e-3)


def test_responses_differ_of_binary_integers_requires_equality() -> None:
    array = np.array([1, 2, 3], np.int64)
    assert not responses_differ(in_binary(array, "INT64"), in_binary(array, "INT64"), 0.5)
    assert responses_differ(in_binary(array, "INT64"), in_binary(array + 1, "INT64"), 0.5)


@given(
    st.lists(st.floats(allow_nan=False, allow_infinity=False, width=32), max_size=8),
    st.floats(0, 0.9),
)
def test_responses_differ_of_equal_answers_returns_false(
    values: list[float], tolerance: float
) -> None:
    answer = in_json(("FP32", [len(values)], values))
    assert not responses_differ(answer, answer, tolerance)
