"""Bodies for `/invocations`: MLflow's forms, CSV, and Open Inference."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from onnx_ops.errors import UserError
from onnx_ops.serving.inference.requests import read_invocation
from onnx_ops.serving.inference.responses import encode_outputs
from onnx_ops.serving.inference.signature import InferenceRequest, ModelSignature, ResponseFormat
from tests.serving.inference.tensor_cases import binary, encode, signature, spec, split_answer

pytestmark = pytest.mark.usefixtures("small_is_large")

PIXELS = signature([spec("x", "float32", "batch", 3)])
TABLE = signature([spec("age", "int64", "batch", 1), spec("city", "string", "batch")])


def read(body: object, model: ModelSignature = PIXELS) -> InferenceRequest:
    """Read a CSV text, or another body as JSON."""
    if isinstance(body, bytes):
        return read_invocation(body, "text/csv", None, model)
    return read_invocation(encode(body), "application/json", None, model)


ROWS = [[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]
RECORDS = [{"a": 1, "b": 2, "c": 3}, {"c": 6, "b": 5, "a": 4}]


@pytest.mark.parametrize(
    ("document", "table"),
    [
        ({"inputs": ROWS}, False),
        ({"inputs": {"x": ROWS}}, False),
        ({"instances": ROWS}, False),
        ({"instances": [{"x": row} for row in ROWS]}, False),
        ({"dataframe_split": {"columns": ["a", "b", "c"], "data": ROWS}}, True),
        ({"dataframe_split": {"index": [0, 1], "columns": [0, 1, 2], "data": ROWS}}, True),
        ({"dataframe_split": {"columns": ["x"], "data": [[row] for row in ROWS]}}, True),
        ({"dataframe_records": RECORDS}, True),
    ],
)
def test_read_invocation_of_any_mlflow_form_feeds_same_tensor(
    document: object, table: bool
) -> None:
    call = read(document)
    assert call.response_format is (ResponseFormat.RECORDS if table else ResponseFormat.NAMED)
    assert call.rows == 2
    assert call.feed["x"].dtype == np.float32
    np.testing.assert_array_equal(call.feed["x"], ROWS)


@pytest.mark.parametrize(
    "form", ["inputs", "instances", "named", "dataframe_split", "dataframe_records"]
)
def test_read_invocation_of_large_body_in_any_mlflow_form_feeds_same_tensor(form: str) -> None:
    rows = np.arange(3000, dtype=np.float32).reshape(1000, 3) / 7
    document: dict[str, object] = {form: rows.tolist()}
    if form == "named":
        document = {"inputs": {"x": rows.tolist()}}
    if form == "dataframe_split":
        document = {form: {"columns": ["a", "b", "c"], "data": rows.tolist()}}
    if form == "dataframe_records":
        document = {form: [dict(zip("abc", row, strict=True)) for row in rows.tolist()]}
    np.testing.assert_array_equal(read(document).feed["x"], rows)


@pytest.mark.parametrize(
    "document",
    [
        {"inputs": {"age": [[30], [40]], "city": ["Bern", "Ulm"]}},
        {"inputs": {"age": [30, 40], "city": ["Bern", "Ulm"]}},
        {"instances": [{"age": 30, "city": "Bern"}, {"age": 40, "city": "Ulm"}]},
        {"dataframe_split": {"columns": ["city", "age"], "data": [["Bern", 30], ["Ulm", 40]]}},
        {"dataframe_records": [{"city": "Bern", "age": 30}, {"age": 40, "city": "Ulm"}]},
    ],
)
def test_read_invocation_of_columns_feeds_several_inputs(document: object) -> None:
    feed = read(document, TABLE).feed
    assert feed["age"].tolist() == [[30], [40]]
    assert feed["city"].tolist() == ["Bern", "Ulm"]


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ([], "exactly one of inputs, instances"),
        ({}, "exactly one of"),
        ({"inputs": ROWS, "instances": ROWS}, "exactly one of"),
        ({"inputs": ROWS, "params": {"k": 1}}, "no parameters"),
        ({"inputs": {"z": ROWS}}, "no input 'z'"),
        ({"inputs": {}}, "'x' is missing"),
        ({"inputs": [1, 2, 3]}, r"shape \[batch, 3\], not \[3\]"),
        ({"inputs": [[1, 2, 3], [4, 5]]}, "nesting of data"),
        ({"inputs": [[1, 2, "3"]]}, "contains a string"),
        ({"inputs": None}, "shape"),
        ({"instances": []}, "at least one instance"),
        ({"instances": [{"x": [1, 2, 3]}, {"z": [1, 2, 3]}]}, "the same names"),
        ({"instances": [{"x": [1, 2, 3]}, [1, 2, 3]]}, "the same names"),
        ({"dataframe_records": []}, "at least one record"),
        ({"dataframe_records": [[1]]}, "the same names"),
        ({"dataframe_split": ROWS}, "dataframe_split must have columns"),
        ({"dataframe_split": {"columns": ["a", "a", "b"], "data": ROWS}}, "repeats a column"),
        ({"dataframe_split": {"columns": ["a"], "data": ROWS}}, "rows of 1 values"),
        ({"dataframe_split": {"columns": ["a", "b", "c"], "data": []}}, "shape"),
    ],
)
def test_read_invocation_of_invalid_body_raises_user_error_with_cause(
    document: object, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        read(document)


def test_read_invocation_with_mismatched_inputs_raises_user_error() -> None:
    with pytest.raises(UserError, match="this model has age, city"):
        read({"inputs": [[1]]}, TABLE)
    with pytest.raises(UserError, match="no input 'size'"):
        read({"dataframe_records": [{"age": 1, "size": 2}]}, TABLE)
    with pytest.raises(UserError, match="lacks inputs of the model: city"):
        read({"dataframe_records": [{"age": 1}]}, TABLE)
    with pytest.raises(UserError, match="dimension 'batch' is 2"):
        read({"inputs": {"age": [1, 2], "city": ["Bern"]}}, TABLE)


def predictions(call: InferenceRequest, arrays: list[np.ndarray[Any, Any]]) -> Any:
    body, lines = encode_outputs(call, PIXELS, arrays)
    assert lines == b"content-type: application/json\r\n"
    return json.loads(body)["predictions"]


def test_encode_outputs_returns_predictions_by_name_or_as_records() -> None:
    # ONNX Runtime returns int64 tensors with the type `longlong`.
    values: list[np.ndarray[Any, Any]] = [
        np.array([1, 0], np.longlong),
        np.array([[0.1, 0.75], [np.nan, 0.5]], np.float32),
        np.array([["a"], ["b"]], object),
        np.array([True, False]),
    ]
    names = ("label", "p", "s", "flag")
    assert predictions(InferenceRequest({}, names, 2, ResponseFormat.NAMED), values) == {
        "label": [1, 0],
        "p": [[0.1, 0.75], [None, 0.5]],
        "s": [["a"], ["b"]],
        "flag": [True, False],
    }
    table = InferenceRequest({}, names, 2, ResponseFormat.RECORDS)
    assert predictions(table, values) == [
        {"label": 1, "p": [0.1, 0.75], "s": "a", "flag": True},
        {"label": 0, "p": [None, 0.5], "s": "b", "flag": False},
    ]
    assert predictions(InferenceRequest({}, ("y",), 0, ResponseFormat.NAMED), [np.array(1.5)]) == {
        "y": 1.5
    }


def test_encode_outputs_of_records_without_equal_rows_raises_user_error() -> None:
    with pytest.raises(UserError, match="does not fit a table"):
        predictions(InferenceRequest({}, ("y",), 0, ResponseFormat.RECORDS), [np.array(1.0)])
    with pytest.raises(UserError, match="differ in length"):
        predictions(
            InferenceRequest({}, ("a", "b"), 0, ResponseFormat.RECORDS), [np.zeros(1), np.zeros(2)]
        )


def test_read_invocation_of_csv_reads_names_from_first_line() -> None:
    call = read_invocation(
        b"\xef\xbb\xbfa,b,c\r\n1,2,.5\n\n4,5,6e1\n", "text/csv; charset=utf-8", None, PIXELS
    )
    assert call.response_format is ResponseFormat.RECORDS
    np.testing.assert_array_equal(call.feed["x"], [[1, 2, 0.5], [4, 5, 60]])
    call = read(b'city,age\n"Ulm, ""D""",3\n', TABLE)
    assert (call.feed["city"].tolist(), call.feed["age"].tolist()) == (['Ulm, "D"'], [[3]])
    flags = signature([spec("b", "bool", "n")])
    assert read(b"b\nTrue\nfalse\n", flags).feed["b"].tolist() == [True, False]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "must name its columns"),
        (b"1,2,3\n4,5,6\n", "must name its columns"),
        (b"a,b,c\n", "shape"),
        (b"a,b,a\n1,2,3\n", "repeats column 'a'"),
        (b"a,b,c\n1,2\n", "row 1 of the table has 2 cells, not 3"),
        (b"a,b\n1,2\n", r"must have shape \[batch, 3\]"),
        (b"a,b,c\n1,2,x\n", "'x' of FP32 contains 'x'"),
        (b"a,b,c\n1,2,nan\n", "'x' of FP32 contains 'nan'"),
        (b"a,b,c\n1,2,1_0\n", "contains '1_0'"),
        (b"a,b,c\n1,2,1e300\n", "outside the range of FP32"),
        (b'a,b,c\n1,2,"3\n', "not CSV"),
        (b"\xff,b,c\n1,2,3\n", "not CSV"),
    ],
)
def test_read_invocation_of_invalid_csv_raises_user_error_with_cause(
    body: bytes, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        read(body)


def test_read_invocation_of_csv_cell_invalid_for_type_raises_user_error() -> None:
    for dtype, cell in (("int64", "1.0"), ("int64", "9" * 30), ("bool", "1"), ("uint8", "-1")):
        with pytest.raises(UserError, match=r"contains|too large"):
            read(f"a\n{cell}\n".encode(), signature([spec("a", dtype, "n")]))


def test_read_invocation_of_open_inference_body_reads_json_and_binary() -> None:
    x = np.ones((1, 3), np.float32)
    tensor = {"name": "x", "datatype": "FP32", "shape": [1, 3], "data": [1, 1, 1]}
    assert read({"inputs": [tensor]}).response_format is ResponseFormat.INFER
    body, length = binary({"x": ("float32", x)}, parameters={"binary_data_output": True})
    call = read_invocation(body, "application/octet-stream", length, PIXELS)
    assert call.binary == (True,)
    with pytest.raises(UserError, match="needs the header inference-header-content-length"):
        read_invocation(body, "application/octet-stream", None, PIXELS)


def test_read_invocation_of_sagemaker_binary_requires_header_size_and_answers_in_binary() -> None:
    x = np.ones((1, 3), np.float32)
    body, length = binary({"x": ("float32", x)}, parameters={"binary_data_output": True})
    kind = "application/vnd.sagemaker-triton.binary+json"
    call = read_invocation(body, f"{kind};json-header-size={length}", None, PIXELS)
    answer, lines = encode_outputs(call, PIXELS, [x[:, :2]])
    name, value = lines.removesuffix(b"\r\n").split(b": ")
    size = int(value.decode().removeprefix(f"{kind};json-header-size="))
    assert name == b"content-type"
    assert split_answer(answer[:size], b"")[0]["outputs"][0]["shape"] == [1, 2]
    assert answer[size:] == x[:, :2].tobytes()
    for options in ("", ";charset=utf-8", ";json-header-size=", ";json-header-size=-1"):
        with pytest.raises(UserError, match=r"json-header-size|must be a number"):
            read_invocation(body, kind + options, None, PIXELS)


def test_read_invocation_with_bfloat16_output_raises_user_error() -> None:
    model = signature([spec("x", "float32", "n")], [spec("y", "bfloat16", "n")])
    with pytest.raises(UserError, match="output 'y' is BF16"):
        read({"inputs": [1, 2]}, model)


COLUMNS = signature(
    [
        spec("age", "float32", "batch", 1),
        spec("visits", "int64", "batch", 1),
        spec("city", "string", "batch", 1),
    ]
)


@pytest.mark.parametrize(
    "body",
    [
        {
            "dataframe_records": [
                {"age": None, "visits": 3, "city": ""},
                {"age": 4.5, "visits": 4, "city": "Oslo"},
            ]
        },
        {
            "dataframe_split": {
                "columns": ["age", "visits", "city"],
                "data": [[None, 3, ""], [4.5, 4, "Oslo"]],
            }
        },
        {"inputs": {"age": [[None], [4.5]], "visits": [[3], [4]], "city": [[""], ["Oslo"]]}},
        b"age,visits,city\n,3,\n4.5,4,Oslo\n",
    ],
)
def test_read_invocation_of_table_with_missing_values_reads_nan(body: object) -> None:
    feed = read(body, COLUMNS).feed
    np.testing.assert_array_equal(feed["age"], np.array([[np.nan], [4.5]], np.float32))
    assert feed["visits"].tolist() == [[3], [4]]
    assert feed["city"].tolist() == [[""], ["Oslo"]]


def test_read_invocation_with_deep_lists_beside_null_raises_user_error() -> None:
    deep = "[" * 900 + "]" * 900
    model = signature([spec("x", "float32", "batch", 2)])
    with pytest.raises(UserError, match="contains a list"):
        read_invocation(
            f'{{"instances": [[1, null], [1, {deep}]]}}'.encode(), "application/json", None, model
        )


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (
            [{"age": 1, "visits": v, "city": "a"} for v in (2, None)],
            "'visits' of INT64 contains null in row 2",
        ),
        ([{"age": "x", "visits": 2, "city": "a"}], "'age' of FP32 contains a string in row 1"),
        ([{"age": 1, "visits": 2, "city": None}], "'city' of BYTES contains null in row 1"),
        (b"age,visits,city\n1,2,a\n1,,a\n", "'visits' of INT64 contains '' in row 2"),
        (b"age,visits,city\nold,2,a\n", "'age' of FP32 contains 'old' in row 1"),
    ],
)
def test_read_invocation_with_invalid_cell_raises_user_error_with_column_and_row(
    body: object, words: str
) -> None:
    with pytest.raises(UserError, match=words):
        read(body if isinstance(body, bytes) else {"dataframe_records": body}, COLUMNS)
