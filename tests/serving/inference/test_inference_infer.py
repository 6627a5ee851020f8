"""Open Inference v2: accepted and refused requests."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from onnx_ops.errors import TooLargeError, UserError
from onnx_ops.serving.inference.image_tensors import IMAGE_DTYPE
from onnx_ops.serving.inference.requests import parse_header_length, read_infer
from onnx_ops.serving.inference.responses import encode_outputs
from onnx_ops.serving.inference.signature import InferenceRequest, ModelSignature
from onnx_ops.serving.inference.tensors import DATATYPE_OF, MAX_VALUES
from tests.serving.inference.tensor_cases import (
    binary,
    encode,
    headers_of,
    signature,
    spec,
    split_answer,
    text_bytes,
)

pytestmark = pytest.mark.usefixtures("small_is_large")

TENSOR_TYPES = [dtype for dtype in DATATYPE_OF if dtype != IMAGE_DTYPE]
JSON_TYPES = [dtype for dtype in TENSOR_TYPES if dtype != "bfloat16"]
SHAPES = hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4)
INPUTS, OUTPUTS = (
    [spec("x", "float32", "batch", 2)],
    [spec("label", "int64", "b"), spec("p", "float32", "b", 2)],
)
PIXELS = signature(INPUTS, OUTPUTS)
X = {"name": "x", "datatype": "FP32", "shape": [2, 2], "data": [1, 2, 3, 4.5]}


def x(**changes: object) -> bytes:
    return encode({"inputs": [{**X, **changes}]})


@st.composite
def typed_arrays(
    draw: st.DrawFn, dtypes: list[str] = JSON_TYPES
) -> tuple[str, np.ndarray[Any, Any]]:
    dtype = draw(st.sampled_from(dtypes))
    if dtype == "string":
        return dtype, draw(hnp.arrays(object, SHAPES, elements=st.text()))
    return dtype, draw(hnp.arrays({"bfloat16": "uint16"}.get(dtype, dtype), SHAPES))


def mirror(dtype: str, array: np.ndarray[Any, Any]) -> ModelSignature:
    """Return the signature of a model whose output is like its input."""
    dims = [f"d{i}" for i in range(array.ndim)]
    return signature([spec("x", dtype, *dims)], [spec("y", dtype, *dims)])


def echoed(call: InferenceRequest, model: ModelSignature) -> tuple[Any, bytes]:
    return split_answer(*encode_outputs(call, model, [call.feed["x"]]))


@settings(deadline=None)
@given(typed_arrays(), st.booleans())
def test_json_round_trip_of_any_type_that_json_supports_preserves_values(
    case: tuple[str, np.ndarray[Any, Any]], nested: bool
) -> None:
    dtype, array = case
    if array.dtype.kind == "f":
        array = np.nan_to_num(array, nan=0, posinf=1, neginf=-1)
    model = mirror(dtype, array)
    data = array.tolist() if nested else array.reshape(-1).tolist()
    tensor = {"name": "x", "datatype": DATATYPE_OF[dtype], "shape": list(array.shape), "data": data}
    call = read_infer(encode({"inputs": [tensor]}), None, model)
    assert call.feed["x"].dtype == array.dtype
    np.testing.assert_array_equal(call.feed["x"], array)
    document, _ = echoed(call, model)
    [output] = document["outputs"]
    assert (output["datatype"], output["shape"]) == (DATATYPE_OF[dtype], list(array.shape))
    np.testing.assert_array_equal(np.array(output["data"], array.dtype).reshape(array.shape), array)


@settings(deadline=None)
@given(typed_arrays(TENSOR_TYPES), st.integers(0, 7), st.none() | st.integers(0, 7))
def test_binary_round_trip_of_any_type_preserves_bits(
    case: tuple[str, np.ndarray[Any, Any]], pad: int, place: int | None
) -> None:
    dtype, array = case
    model = mirror(dtype, array)
    body, length = binary(
        {"x": (dtype, array)}, parameters={"binary_data_output": True}, pad=" " * pad
    )
    call = read_infer(
        body if place is None else memoryview(bytes(place) + body)[place:], length, model
    )
    read = call.feed["x"]
    assert read.flags.aligned
    document, tail = echoed(call, model)
    assert tail == body[length:]
    assert document["outputs"][0]["parameters"] == {"binary_data_size": len(tail)}
    if dtype != "string":
        assert read.tobytes() == array.tobytes()
    else:
        assert read.tolist() == array.tolist()


@settings(deadline=None)
@given(
    st.sampled_from(["float16", "float32", "float64", "int8", "uint8", "int64", "uint64"]),
    st.booleans(),
    st.data(),
)
def test_read_infer_of_large_json_body_returns_same_values(
    dtype: str, nested: bool, data: st.DataObject
) -> None:
    """Large bodies are parsed by simdjson, without Python objects."""
    array = data.draw(
        hnp.arrays(dtype, (3, 10, 30), elements=hnp.from_dtype(np.dtype(dtype), allow_nan=False))
    )
    if array.dtype.kind == "f":
        array = np.nan_to_num(array, posinf=1, neginf=-1)
    tensor = {
        "name": "x",
        "datatype": DATATYPE_OF[dtype],
        "shape": [3, 10, 30],
        "data": array.tolist(),
    }
    if not nested:
        tensor["data"] = array.reshape(-1).tolist()
    body = encode({"inputs": [tensor], "id": "a[b", "pad": " " * 3000})
    call = read_infer(body, None, mirror(dtype, array))
    assert call.feed["x"].dtype == array.dtype
    assert call.feed["x"].tobytes() == array.tobytes()


LONG = [1.5] * 1000


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data": [*LONG[1:], True]}, "contains a boolean"),
        ({"data": [*LONG[1:], "1"]}, "contains a string"),
        ({"data": [*LONG[1:], None]}, "contains null"),
        ({"data": [*LONG[1:], 1e300]}, "outside the range of FP32"),
        ({"data": LONG[1:]}, "needs 1000 elements, not 999"),
        ({"data": [*LONG[2:], [1, 2]]}, "nesting"),
        ({"data": [*LONG[3:], [1, 2], 1.5, []]}, "nesting|contains a list"),
        ({"data": [LONG, LONG]}, "nesting"),
        ({"data": [*LONG[1:], {}]}, "contains an object"),
        ({"shape": [True, 1000]}, "integers"),
    ],
)
def test_read_infer_of_invalid_large_body_raises_user_error(
    changes: dict[str, object], message: str
) -> None:
    model = signature([spec("x", "float32", "b", 1000)])
    tensor = {"name": "x", "datatype": "FP32", "shape": [1, 1000], "data": LONG}
    read_infer(encode({"inputs": [tensor]}), None, model)
    with pytest.raises(UserError, match=message):
        read_infer(encode({"inputs": [{**tensor, **changes}]}), None, model)


def test_read_infer_of_valid_request_returns_its_fields() -> None:
    call = read_infer(encode({"id": "7", "inputs": [X], "outputs": [{"name": "p"}]}), None, PIXELS)
    assert (call.request_id, call.outputs, call.rows, call.binary) == ("7", ("p",), 2, ())
    np.testing.assert_array_equal(call.feed["x"], [[1, 2], [3, 4.5]])
    assert read_infer(x(), None, PIXELS).outputs == ("label", "p")


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ([], "list of inputs"),
        ({"inputs": {}}, "list of inputs"),
        ({"inputs": []}, "input 'x' is missing"),
        ({"inputs": [X, X]}, "'x' is given twice"),
        ({"inputs": [{**X, "name": "z"}]}, "no input 'z'; its inputs are x"),
        ({"inputs": [{**X, "name": ["x"]}]}, "no input"),
        ({"inputs": ["x"]}, "object with a name"),
        ({"inputs": [X], "outputs": [{"name": "q"}]}, "outputs can contain only label, p"),
        ({"inputs": [X], "outputs": ["p"]}, "outputs must be a list of objects"),
        ({"inputs": [X], "outputs": [{"name": "p"}, {"name": "p"}]}, "each at most once"),
        (
            {"inputs": [X], "outputs": [{"name": "p", "parameters": {"classification": 2}}]},
            "classification",
        ),
        (
            {"inputs": [X], "outputs": [{"name": "p", "parameters": {"binary_data": 1}}]},
            "true or false",
        ),
        (
            {
                "inputs": [X],
                "outputs": [{"name": "p", "parameters": {"shared_memory_region": "r"}}],
            },
            "shared memory",
        ),
        ({"inputs": [X], "parameters": []}, "parameters must be an object"),
        ({"inputs": [X], "parameters": {"binary_data_output": "yes"}}, "true or false"),
        ({"inputs": [{**X, "parameters": {"shared_memory_region": "r"}}]}, "'x': shared memory"),
        ({"inputs": [{**X, "parameters": {"binary_data_size": 16}}]}, "'x' has both data and"),
        ({"inputs": [{**X, "parameters": 1}]}, "'x': parameters must be"),
        ({"inputs": [X], "id": 7}, "id must be a string"),
        ({"inputs": [{k: v for k, v in X.items() if k != "data"}]}, "'x' has neither data nor"),
    ],
)
def test_read_infer_of_invalid_request_raises_user_error_with_cause(
    document: object, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        read_infer(encode(document), None, PIXELS)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"datatype": "FP64"}, "'x' must be FP32, not 'FP64'"),
        ({"datatype": ["FP32"]}, "must be FP32"),
        ({"shape": [4]}, r"shape \[batch, 2\], not \[4\]"),
        ({"shape": [1, 4]}, r"shape \[batch, 2\], not \[1, 4\]"),
        ({"shape": [-1, 2]}, "non-negative integers"),
        ({"shape": [2.0, 2]}, "non-negative integers"),
        ({"shape": [True, 2]}, "non-negative integers"),
        ({"shape": [1] * 100}, "at most 32"),
        ({"shape": None}, "integers"),
        ({"shape": [2**62, 2]}, f"needs {2**63} elements, not 4"),
        ({"data": [1, 2, 3]}, "needs 4 elements, not 3"),
        ({"data": [[1, 2], [3]]}, "nesting of data"),
        ({"data": [[1, 2], 3]}, "nesting of data"),
        ({"data": "1234"}, "data must be a list"),
        ({"data": [1, 2, 3, "4"]}, "'x' of FP32 contains a string"),
        ({"data": [1, 2, 3, None]}, "contains null"),
        ({"data": [1, 2, 3, True]}, "contains a boolean"),
        ({"data": [1, 2, 3, {}]}, "contains an object"),
        ({"data": [1, 2, 3, 1e300]}, "outside the range of FP32"),
    ],
)
def test_read_infer_with_invalid_tensor_raises_user_error_with_its_name(
    changes: dict[str, object], message: str
) -> None:
    with pytest.raises(UserError, match=message) as caught:
        read_infer(x(**changes), None, PIXELS)
    assert "'x'" in str(caught.value)


@pytest.mark.parametrize(
    ("dtype", "value", "message"),
    [
        ("int8", 128, "outside the range"),
        ("uint8", -1, "outside the range"),
        ("int64", 2**63, "outside the range"),
        ("float16", 1e6, "outside the range"),
        ("int32", 1.0, "contains a fraction"),
        ("int32", True, "contains a boolean"),
        ("bool", 1, "contains an integer"),
        ("string", 1, "contains an integer"),
        ("bfloat16", 1.0, "of BF16 is not supported in JSON"),
    ],
)
def test_read_infer_with_unrepresentable_element_raises_user_error(
    dtype: str, value: object, message: str
) -> None:
    tensor = {"name": "x", "datatype": DATATYPE_OF[dtype], "shape": [1], "data": [value]}
    with pytest.raises(UserError, match=message):
        read_infer(encode({"inputs": [tensor]}), None, signature([spec("x", dtype, "b")]))


@pytest.mark.parametrize(
    "body", [b"", b"{", b"\xff\xfe", b'{"inputs": NaN}', b"[" * 100_000, b"{}x", b'"x"']
)
def test_read_infer_of_body_without_json_object_raises_user_error(body: bytes) -> None:
    with pytest.raises(UserError, match=r"not JSON|list of inputs"):
        read_infer(body, None, PIXELS)


def test_read_infer_of_huge_shape_without_elements_raises_user_error() -> None:
    model = signature([spec("x", "float32", "a", "b")])
    assert read_infer(x(shape=[0, 2], data=[]), None, model).feed["x"].shape == (0, 2)
    with pytest.raises(UserError, match="too large for an empty tensor"):
        read_infer(x(shape=[2**31 - 1, 0], data=[]), None, model)


def test_read_infer_of_long_padded_texts_disables_batching_or_raises_too_large_error() -> None:
    inputs = [spec("text", "string", "batch", 1)]
    model = signature(inputs, pads_texts=True)

    def read(texts: list[str], of: ModelSignature = model) -> int:
        tensor = {"name": "text", "datatype": "BYTES", "shape": [len(texts), 1], "data": texts}
        return read_infer(encode({"inputs": [tensor]}), None, of).rows

    long = "ab " * 12_000
    assert read(["a", "b"]) == 2
    assert read([long, "b"]) == 0
    assert read([long * 1000]) == 0
    with pytest.raises(TooLargeError, match="2000 texts, the longest of 36000 characters"):
        read([long, *["b"] * 1999])
    assert read([long, *["b"] * 1999], signature(inputs)) == 2000


def test_read_infer_returns_rows_and_rejects_unequal_sizes_of_one_symbol() -> None:
    model = signature([spec("a", "float32", "n", "?"), spec("b", "float32", "n", "?")])

    def tensor(name: str, rows: int, columns: int) -> dict[str, object]:
        return {
            "name": name,
            "datatype": "FP32",
            "shape": [rows, columns],
            "data": [0] * (rows * columns),
        }

    assert (
        read_infer(encode({"inputs": [tensor("a", 2, 3), tensor("b", 2, 4)]}), None, model).rows
        == 2
    )
    with pytest.raises(UserError, match="dimension 'n' is 2 in tensor 'a' but 3 in 'b'"):
        read_infer(encode({"inputs": [tensor("a", 2, 3), tensor("b", 3, 3)]}), None, model)
    fixed = signature([spec("a", "float32", "n", "?")], [spec("y", "float32", 1)])
    assert read_infer(encode({"inputs": [tensor("a", 2, 3)]}), None, fixed).rows == 0
    other = signature([spec("a", "float32", "n", "?"), spec("b", "float32", "k", "?")])
    assert (
        read_infer(encode({"inputs": [tensor("a", 2, 3), tensor("b", 3, 3)]}), None, other).rows
        == 0
    )


def test_read_infer_requires_all_but_optional_inputs() -> None:
    model = signature(
        [spec("x", "float32", "batch", 2), spec("t", "float32", 1)], optional=frozenset({"t"})
    )
    assert read_infer(x(), None, model).feed.keys() == {"x"}
    t = {"name": "t", "datatype": "FP32", "shape": [1], "data": [3]}
    assert read_infer(encode({"inputs": [X, t]}), None, model).feed["t"].tolist() == [3]
    with pytest.raises(UserError, match="input 'x' is missing"):
        read_infer(encode({"inputs": [t]}), None, model)


ONE = np.ones((1, 2), np.float32)


def test_binary_request_with_several_inputs_returns_mixed_outputs() -> None:
    model = signature(
        [spec("a", "float32", "n", 2), spec("s", "string", "n")],
        [spec("y", "float32", "n", 2), spec("t", "string", "n")],
    )
    text = np.array(["é\0"], object)
    body, length = binary(
        {"s": ("string", text), "a": ("float32", ONE)},
        outputs=[{"name": "t", "parameters": {"binary_data": True}}, {"name": "y"}],
        id="7",
    )
    call = read_infer(body, length, model)
    assert call.feed["s"].tolist() == ["é\0"]
    answer, lines = encode_outputs(
        call, model, [text, np.array([[math.nan, math.inf]], np.float32)]
    )
    document, tail = split_answer(answer, lines)
    assert headers_of(lines)[b"content-type"] == b"application/octet-stream"
    assert document["id"] == "7"
    assert [o["name"] for o in document["outputs"]] == ["t", "y"]
    # JSON has neither infinities nor NaN.
    assert document["outputs"][1]["data"] == [None, None]
    assert tail == text_bytes(["é\0"])


def test_read_infer_of_raw_body_fills_single_input_or_raises_user_error() -> None:
    call = read_infer(np.ones((3, 2), np.float32).tobytes(), 0, PIXELS)
    assert call.feed["x"].shape == (3, 2)
    assert call.binary == (True, True)
    text = signature([spec("s", "string", "n")])
    assert read_infer(memoryview("é".encode()), 0, text).feed["s"].tolist() == ["é"]
    with pytest.raises(UserError, match="needs 8 bytes, not 12"):
        read_infer(bytes(12), 0, PIXELS)
    with pytest.raises(UserError, match="several free dimensions"):
        read_infer(bytes(12), 0, signature([spec("x", "float32", "a", "b")]))
    with pytest.raises(UserError, match="only a model with one required input"):
        read_infer(bytes(8), 0, signature([spec("a", "int8", 8), spec("b", "int8", 8)]))


def header(parameters: object, shape: tuple[int, ...] = (1, 2), **more: object) -> bytes:
    tensor = {"name": "x", "datatype": "FP32", "shape": shape, "parameters": parameters}
    return encode({"inputs": [{**tensor, **more}]})


@pytest.mark.parametrize(
    ("json_part", "tail", "message"),
    [
        (header({"binary_data_size": 4}), bytes(8), "'x': shape .* needs 8 bytes, not 4"),
        (
            header({"binary_data_size": 8}),
            bytes(7),
            "'x': binary_data_size is 8, but 7 bytes are left",
        ),
        (header({"binary_data_size": 8}), bytes(9), "1 bytes follow after the last tensor"),
        (header({"binary_data_size": -8}), bytes(8), "must be a number of bytes"),
        (header({"binary_data_size": 2**62}, (2**60, 2)), bytes(8), "8 bytes are left"),
        (header({"binary_data_size": True}), bytes(8), "must be a number of bytes"),
        (header({"binary_data_size": "8"}), bytes(8), "must be a number of bytes"),
        (header({"binary_data_size": 8}, data=[1, 2]), bytes(8), "both data and binary_data_size"),
        (header({}), bytes(8), "neither data nor binary_data_size"),
        (header({}, data=[1, 2]), bytes(8), "8 bytes follow"),
    ],
)
def test_read_infer_of_invalid_binary_body_raises_user_error_with_cause(
    json_part: bytes, tail: bytes, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        read_infer(json_part + tail, len(json_part), PIXELS)


def test_read_infer_with_wrong_header_length_raises_user_error() -> None:
    body, length = binary({"x": ("float32", ONE)})
    assert read_infer(body, length, PIXELS).rows == 1
    with pytest.raises(UserError, match=f"is {len(body) + 1}, but the body has {len(body)} bytes"):
        read_infer(body, len(body) + 1, PIXELS)
    with pytest.raises(UserError, match="not JSON"):
        read_infer(body, length - 1, PIXELS)
    with pytest.raises(UserError, match="binary_data_size needs the header"):
        read_infer(body[:length], None, PIXELS)


def test_parse_header_length_of_invalid_value_raises_user_error() -> None:
    assert parse_header_length(b"12") == 12
    for value in (b"", b"-1", b"1e3", b" 1", b"\xb2", b"9" * 30, b"0x10"):
        with pytest.raises(UserError, match="must be a number of bytes"):
            parse_header_length(value)


@pytest.mark.parametrize(
    ("tail", "message"),
    [
        (b"\x01\0\0\0a", "need more than|end after 1 of 2"),
        (b"\x01\0\0\0a\x09\0\0\0b", "announces 9 bytes, but 1 follow"),
        (b"\xff\xff\xff\xffab" + bytes(8), "announces 4294967295 bytes"),
        (b"\x01\0\0\0a\x01\0\0\0\xff", "element 1 is not UTF-8"),
        (text_bytes(["a", "b", "c"]), "bytes follow after its 2 elements"),
        (text_bytes(["abcdef"]) + b"\0\0", "its bytes end after 1 of 2"),
    ],
)
@pytest.mark.parametrize("count", [2, 10**12])
def test_read_infer_of_invalid_binary_string_raises_user_error_with_cause(
    tail: bytes, message: str, count: int
) -> None:
    tensor = {
        "name": "s",
        "datatype": "BYTES",
        "shape": [count],
        "parameters": {"binary_data_size": len(tail)},
    }
    json_part = encode({"inputs": [tensor]})
    expected = message if count == 2 else "need more than"
    with pytest.raises(UserError, match=f"'s'.*({expected})"):
        read_infer(json_part + tail, len(json_part), signature([spec("s", "string", "n")]))


def test_read_infer_with_too_many_strings_raises_too_large_error() -> None:
    count = MAX_VALUES + 1
    tensor = {
        "name": "s",
        "datatype": "BYTES",
        "shape": [count],
        "parameters": {"binary_data_size": 4 * count},
    }
    json_part = encode({"inputs": [tensor]})
    with pytest.raises(TooLargeError, match="4194304 elements"):
        read_infer(
            json_part + bytes(4 * count), len(json_part), signature([spec("s", "string", "n")])
        )


def test_read_infer_of_bool_byte_other_than_0_or_1_raises_user_error() -> None:
    model = signature([spec("x", "bool", "n")])
    body, length = binary({"x": ("bool", np.array([True, False]))})
    assert read_infer(body, length, model).feed["x"].tolist() == [True, False]
    with pytest.raises(UserError, match="'x': a byte of BOOL must be 0 or 1"):
        read_infer(body[:-1] + b"\2", length, model)


def test_read_infer_with_bfloat16_output_requires_binary_form() -> None:
    model = signature([spec("x", "bfloat16", "n")], [spec("y", "bfloat16", "n")])
    bits = np.array([0x3F80], np.uint16)
    body, length = binary({"x": ("bfloat16", bits)})
    with pytest.raises(UserError, match="output 'y' is BF16, which JSON cannot represent"):
        read_infer(body, length, model)
    body, length = binary({"x": ("bfloat16", bits)}, parameters={"binary_data_output": True})
    _, tail = split_answer(*encode_outputs(read_infer(body, length, model), model, [bits]))
    assert tail == b"\x80\x3f"


def test_read_infer_error_with_long_values_is_short() -> None:
    for changes in ({"name": "z" * 10_000}, {"datatype": "z" * 10_000}, {"shape": [1] * 10_000}):
        with pytest.raises(UserError) as caught:
            read_infer(x(**changes), None, PIXELS)
        assert len(str(caught.value)) < 200


def test_encode_outputs_of_float32_writes_shortest_decimal() -> None:
    model = signature([spec("x", "float32", "n")], [spec("y", "float32", "n")])
    body, _ = encode_outputs(InferenceRequest({}, ("y",), 1), model, [np.array([0.1], np.float32)])
    assert b"[0.1]" in body
    assert json.loads(body)["model_version"] == "3"


@pytest.mark.parametrize("value", [math.nan, -math.nan, math.inf, 3])
def test_read_infer_raises_user_error_only_for_nan_and_model_that_refuses_it(value: float) -> None:
    body, length = binary({"x": ("float32", np.array([[1, value]], np.float32))})
    np.testing.assert_equal(read_infer(body, length, PIXELS).feed["x"][0, 1], np.float32(value))
    strict = signature(INPUTS, OUTPUTS, refuses_nan=True)
    if math.isnan(value):
        with pytest.raises(UserError, match="input 'x' contains NaN"):
            read_infer(body, length, strict)
    else:
        assert read_infer(body, length, strict).feed["x"][0, 1] == value
