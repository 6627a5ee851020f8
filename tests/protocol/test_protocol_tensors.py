from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from onnx_ops.domain.artifact import TensorSpec
from onnx_ops.errors import OnnxOpsError, UserError
from onnx_ops.protocol.tensors import (
    DATATYPE_OF,
    DTYPE_OF_ONNX,
    check_symbols,
    make_array,
    metadata,
    nested_shape,
    numpy_dtype,
    read_tensor,
    write_tensor,
)

NUMBERS = [dtype for dtype in DATATYPE_OF if dtype not in ("string", "bool")]
SHAPES = hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4)
SPEC = TensorSpec(name="x", dtype="float32", shape=("batch", 2))


def tensor(**changes: object) -> dict[str, object]:
    return {"name": "x", "datatype": "FP32", "shape": [2, 2], "data": [1, 2, 3, 4.5], **changes}


@given(st.sampled_from([*NUMBERS, "bool"]).flatmap(lambda dtype: hnp.arrays(dtype, SHAPES)))
def test_numbers_survive_the_wire(array: np.ndarray) -> None:
    if array.dtype.kind == "f":
        array = np.nan_to_num(array, nan=0, posinf=1, neginf=-1)
    sent = json.loads(json.dumps(write_tensor("x", array)))
    name, read = read_tensor(sent)
    assert name == "x"
    assert read.dtype == array.dtype
    np.testing.assert_array_equal(read, array)
    nested = {**sent, "data": array.tolist()}
    np.testing.assert_array_equal(read_tensor(nested)[1], array)


@given(hnp.arrays(object, SHAPES, elements=st.text()))
def test_text_survives_the_wire(array: np.ndarray) -> None:
    _, read = read_tensor(json.loads(json.dumps(write_tensor("s", array))))
    assert read.shape == array.shape
    assert read.tolist() == array.tolist()


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
)


@given(
    st.fixed_dictionaries(
        {},
        optional={
            "name": JSON | st.just("x"),
            "datatype": JSON | st.sampled_from([*DATATYPE_OF.values()]),
            "shape": JSON | st.lists(st.integers(-1, 5), max_size=3),
            "data": JSON,
        },
    )
    | JSON,
    st.sampled_from([SPEC, None]),
)
def test_whatever_comes_is_an_array_or_a_user_error(document: object, spec: TensorSpec | None) -> None:
    try:
        _, array = read_tensor(document, spec)
    except UserError:
        return
    assert isinstance(array, np.ndarray)


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ([], "object with a name"),
        (tensor(datatype="FP64"), "'x' must be FP32, not FP64"),
        (tensor(datatype="BF16"), "'BF16' is none of"),
        (tensor(datatype=["FP32"]), "is none of"),
        (tensor(shape=[4]), r"shape \[batch, 2\], not \[4\]"),
        (tensor(shape=[1, 4]), r"shape \[batch, 2\], not \[1, 4\]"),
        (tensor(shape=[-1, 2]), "whole numbers from 0"),
        (tensor(shape=[2.0, 2]), "whole numbers from 0"),
        (tensor(shape=[True, 2]), "whole numbers from 0"),
        (tensor(shape=[10**30, 2]), "whole numbers from 0"),
        (tensor(shape=[10**9, 2]), "needs 2000000000 elements, not 4"),
        (tensor(data=[1, 2, 3]), "needs 4 elements, not 3"),
        (tensor(data=[[1, 2], [3]]), "nesting of data"),
        (tensor(data=[[1, 2], 3]), "nesting of data"),
        (tensor(data="1234"), "data must be a list"),
        (tensor(data=[1, 2, 3, "4"]), "'x' of FP32 holds text"),
        (tensor(data=[1, 2, 3, None]), "holds null"),
        (tensor(data=[1, 2, 3, True]), "holds a truth value"),
        (tensor(data=[1, 2, 3, {}]), "holds an object"),
        (tensor(data=[1, 2, 3, 1e300]), "too large for FP32"),
        ({k: v for k, v in tensor().items() if k != "data"}, "has no data"),
    ],
)
def test_a_wrong_tensor_is_named(document: object, message: str) -> None:
    with pytest.raises(UserError, match=message):
        read_tensor(document, SPEC)


@pytest.mark.parametrize(
    ("dtype", "value"), [("int8", 128), ("uint8", -1), ("int64", 2**63), ("uint64", 2**64), ("float16", 1e6)]
)
def test_numbers_out_of_range_are_refused(dtype: str, value: float) -> None:
    with pytest.raises(UserError, match="too large"):
        make_array("x", dtype, (1,), [value])


@pytest.mark.parametrize(("dtype", "value"), [("int32", 1.0), ("bool", 1), ("string", 1), ("int32", True)])
def test_types_are_not_bent(dtype: str, value: object) -> None:
    with pytest.raises(UserError, match="holds"):
        make_array("x", dtype, (1,), [value])


def test_an_empty_tensor_cannot_ask_for_a_huge_answer() -> None:
    free = TensorSpec(name="x", dtype="float32", shape=("a", "b"))
    assert read_tensor(tensor(shape=[0, 2], data=[]), free)[1].shape == (0, 2)
    with pytest.raises(UserError, match="too large for an empty tensor"):
        read_tensor(tensor(shape=[2**31 - 1, 0], data=[]), free)


def test_symbols_must_agree() -> None:
    specs = {
        "a": TensorSpec(name="a", dtype="float32", shape=("n", "?")),
        "b": TensorSpec(name="b", dtype="float32", shape=("n", "?")),
    }
    check_symbols(specs, {"a": np.zeros((2, 3)), "b": np.zeros((2, 4))})
    with pytest.raises(OnnxOpsError, match="dimension 'n' is 2 in tensor 'a' but 3 in 'b'"):
        check_symbols(specs, {"a": np.zeros((2, 3)), "b": np.zeros((3, 3))})


def test_nested_shape_is_that_of_the_first_elements() -> None:
    assert nested_shape("x", 1) == ()
    assert nested_shape("x", [[1, 2, 3], [4]]) == (2, 3)
    assert nested_shape("x", [[], []]) == (2, 0)
    deep: list[object] = []
    for _ in range(50):
        deep = [deep]
    with pytest.raises(UserError, match="too deeply"):
        nested_shape("x", deep)


def test_metadata_and_type_names_cover_each_other() -> None:
    assert metadata(SPEC) == {"name": "x", "datatype": "FP32", "shape": [-1, 2]}
    assert set(DTYPE_OF_ONNX.values()) == set(DATATYPE_OF)
    for dtype in DATATYPE_OF:
        assert np.dtype(numpy_dtype(dtype)).name == numpy_dtype(dtype)
