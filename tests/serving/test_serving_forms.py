from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from onnx_ops.domain.artifact import TensorSpec
from onnx_ops.errors import UserError
from onnx_ops.serving.forms import is_infer, read_infer, read_invocation, write_infer, write_predictions


def specs(*tensors: TensorSpec) -> dict[str, TensorSpec]:
    return {spec.name: spec for spec in tensors}


PIXELS = specs(TensorSpec(name="x", dtype="float32", shape=("batch", 3)))
TABLE = specs(
    TensorSpec(name="age", dtype="int64", shape=("batch", 1)),
    TensorSpec(name="city", dtype="string", shape=("batch",)),
)
OUT = specs(
    TensorSpec(name="label", dtype="int64", shape=("batch",)),
    TensorSpec(name="p", dtype="float32", shape=("batch", 2)),
)
X = {"name": "x", "datatype": "FP32", "shape": [1, 3], "data": [1, 2, 3]}


def test_a_v2_body_is_read() -> None:
    request = read_infer({"id": "7", "inputs": [X], "outputs": [{"name": "p"}]}, PIXELS, OUT)
    assert request.id == "7"
    assert request.outputs == ("p",)
    np.testing.assert_array_equal(request.feed["x"], [[1, 2, 3]])
    assert read_infer({"inputs": [X]}, PIXELS, OUT).outputs == ("label", "p")


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ([], "list of inputs"),
        ({"inputs": {}}, "list of inputs"),
        ({"inputs": []}, "input 'x' is missing"),
        ({"inputs": [X, X]}, "'x' is given twice"),
        ({"inputs": [{**X, "name": "z"}]}, "no input 'z'; its inputs are x"),
        ({"inputs": ["x"]}, "object with a name"),
        ({"inputs": [X], "outputs": [{"name": "q"}]}, "outputs must be some of label, p"),
        ({"inputs": [X], "outputs": ["p"]}, "outputs must be a list of objects"),
        ({"inputs": [X], "outputs": [{"name": "p"}, {"name": "p"}]}, "each once"),
        ({"inputs": [X], "id": 7}, "id must be text"),
    ],
)
def test_a_wrong_v2_body_says_what_is_wrong(document: object, message: str) -> None:
    with pytest.raises(UserError, match=message):
        read_infer(document, PIXELS, OUT)


def test_a_v2_answer_is_written() -> None:
    values = {"label": np.array([1]), "p": np.array([[0.25, 0.75]], np.float32)}
    answer = write_infer(values, OUT, model="m", version="3", identity="7")
    assert (answer["model_name"], answer["model_version"], answer["id"]) == ("m", "3", "7")
    outputs = answer["outputs"]
    assert isinstance(outputs, list)
    assert outputs[1] | {"data": outputs[1]["data"].tolist()} == {
        "name": "p",
        "datatype": "FP32",
        "shape": [1, 2],
        "data": [0.25, 0.75],
    }


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
def test_every_form_of_mlflow_feeds_the_same_tensor(document: object, table: bool) -> None:
    feed, as_table = read_invocation(document, PIXELS)
    assert as_table is table
    assert feed["x"].dtype == np.float32
    np.testing.assert_array_equal(feed["x"], ROWS)


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
def test_columns_feed_several_inputs(document: object) -> None:
    feed, _ = read_invocation(document, TABLE)
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
        ({"inputs": [[1, 2, "3"]]}, "holds text"),
        ({"inputs": None}, "shape"),
        ({"instances": []}, "at least one instance"),
        ({"instances": [{"x": [1, 2, 3]}, {"z": [1, 2, 3]}]}, "the same names"),
        ({"instances": [{"x": [1, 2, 3]}, [1, 2, 3]]}, "the same names"),
        ({"dataframe_records": []}, "at least one record"),
        ({"dataframe_records": [[1]]}, "the same names"),
        ({"dataframe_split": ROWS}, "list of columns"),
        ({"dataframe_split": {"columns": ["a", "a", "b"], "data": ROWS}}, "repeats a column"),
        ({"dataframe_split": {"columns": ["a"], "data": ROWS}}, "rows of 1 values"),
        ({"dataframe_split": {"columns": ["a", "b", "c"], "data": []}}, "shape"),
    ],
)
def test_a_wrong_invocation_says_what_is_wrong(document: object, message: str) -> None:
    with pytest.raises(UserError, match=message):
        read_invocation(document, PIXELS)


def test_several_inputs_must_be_named() -> None:
    with pytest.raises(UserError, match="must name them: age, city"):
        read_invocation({"inputs": [[1]]}, TABLE)
    with pytest.raises(UserError, match="no input 'size'"):
        read_invocation({"dataframe_records": [{"age": 1, "size": 2}]}, TABLE)
    with pytest.raises(UserError, match="lacks an input"):
        read_invocation({"dataframe_records": [{"age": 1}]}, TABLE)
    with pytest.raises(UserError, match="dimension 'batch' is 2"):
        read_invocation({"inputs": {"age": [1, 2], "city": ["Bern"]}}, TABLE)


def test_predictions_come_by_name_or_as_records() -> None:
    values = {
        "label": np.array([1, 0]),
        "p": np.array([[0.25, 0.75], [0.5, 0.5]]),
        "s": np.array([["a"], ["b"]], object),
    }
    named = write_predictions(values, table=False)["predictions"]
    assert isinstance(named, dict)
    assert {name: np.asarray(value).tolist() for name, value in named.items()} == {
        "label": [1, 0],
        "p": [[0.25, 0.75], [0.5, 0.5]],
        "s": [["a"], ["b"]],
    }
    assert write_predictions(values, table=True)["predictions"] == [
        {"label": 1, "p": [0.25, 0.75], "s": "a"},
        {"label": 0, "p": [0.5, 0.5], "s": "b"},
    ]
    with pytest.raises(UserError, match="fits no table"):
        write_predictions({"y": np.array(1.0)}, table=True)
    with pytest.raises(UserError, match="differ in length"):
        write_predictions({"y": np.zeros(2), "z": np.zeros(3)}, table=True)


def test_a_v2_body_is_told_from_a_list_of_values() -> None:
    assert is_infer({"inputs": [X]})
    assert not is_infer({"inputs": ROWS})
    assert not is_infer({"inputs": {"x": ROWS}})
    assert not is_infer({"inputs": []})
    assert not is_infer(None)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["x", "name", "columns", "data", "datatype", "shape"]), inner, max_size=4)
    ),
    max_leaves=12,
)


@given(JSON | st.dictionaries(st.sampled_from(["inputs", "instances", "dataframe_split", "dataframe_records"]), JSON))
def test_whatever_comes_is_a_feed_or_a_user_error(document: object) -> None:
    for read in (lambda: read_invocation(document, PIXELS)[0], lambda: read_infer(document, PIXELS, OUT).feed):
        try:
            feed = read()
        except UserError:
            continue
        assert feed["x"].dtype == np.float32
        assert feed["x"].shape[1:] == (3,)
