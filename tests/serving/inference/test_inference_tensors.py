"""JSON documents and tensors."""

from __future__ import annotations

import json
import math
import threading
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onnx_ops.domain.artifact import TensorSpec
from onnx_ops.errors import TooLargeError, UserError
from onnx_ops.serving.inference import tensors
from onnx_ops.serving.inference.image_tensors import IMAGE_DTYPE
from onnx_ops.serving.inference.tensors import (
    DATATYPE_OF,
    DTYPE_OF_ONNX,
    LARGE_BODY_BYTES,
    LargeArray,
    LazyArray,
    TensorReader,
    describe_tensor,
    get_numpy_dtype,
    parse_document,
)
from tests.serving.inference.tensor_cases import encode, spec

pytestmark = pytest.mark.usefixtures("small_is_large")


PAD = {"pad": " " * 3000}
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False)
    | st.text(max_size=4)
)
TREES = st.recursive(
    SCALARS.filter(lambda value: value not in (np.inf, -np.inf)),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text("ab\0é[", max_size=4), inner, max_size=3)
    ),
    max_leaves=20,
)


def materialised(value: object) -> object:
    if isinstance(value, LazyArray):
        return value.to_lists()
    if isinstance(value, dict):
        return {key: materialised(item) for key, item in value.items()}
    return [materialised(item) for item in value] if isinstance(value, list) else value


@settings(deadline=None)
@given(st.dictionaries(st.sampled_from(["inputs", "data", "shape", "x"]), TREES))
def test_parse_document_of_large_body_equals_small_body(tree: dict[str, object]) -> None:
    found, literals = parse_document(encode({**tree, **PAD}))
    expected, _ = parse_document(encode(tree))
    assert json.dumps(materialised(found)) == json.dumps({**expected, **PAD})
    assert literals or not any(word in json.dumps(tree) for word in ("true", "false"))


def test_parse_document_keeps_only_rectangular_numbers_as_lazy_array(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # A parser of simdjson cannot be reused while a value that it has parsed exists.
    monkeypatch.setattr(tensors, "_parsers", {})
    found, _ = parse_document(encode({"data": [[1, 2], [3, 4]], **PAD}))
    assert isinstance(found["data"], LazyArray)
    assert found["data"].shape == (2, 2)
    del found
    for ragged in ([[1, 2], [3]], [1, [2, 3], []], [[1, [2]], [3, 4]], [[1], 2]):
        found, _ = parse_document(encode({"data": ragged, **PAD}))
        assert found["data"] == ragged


NUMBERS = st.floats(width=32, allow_nan=False, allow_infinity=False) | st.integers(-1000, 1000)


@settings(deadline=None)
@given(
    st.lists(NUMBERS, min_size=40, max_size=200)
    | st.integers(1, 9).flatmap(
        lambda n: st.lists(st.lists(NUMBERS, min_size=n, max_size=n), min_size=30, max_size=60)
    )
    | st.tuples(st.integers(1, 4), st.integers(1, 4), st.integers(1, 9), st.integers(30, 31)).map(
        lambda shape: np.arange(math.prod(shape), dtype=np.float64).reshape(shape).tolist()
    ),
    st.sampled_from([(",", ":"), (", ", ": "), (" ,\n", " : ")]),
)
def test_large_array_parsed_in_pieces_equals_whole_array(
    values: list[Any], separators: tuple[str, str]
) -> None:
    body = json.dumps({"data": values, **PAD}, separators=separators).encode()
    found = parse_document(body)[0]["data"]
    assert isinstance(found, LargeArray)
    assert found.to_lists() == values
    assert found.shape == np.shape(values)
    numbers = found.to_numbers("f")
    assert numbers is not None
    np.testing.assert_array_equal(numbers.reshape(found.shape), np.array(values, np.float64))


@pytest.mark.parametrize(
    "text",
    [
        "[" + "1," * 50 + ",2]",
        "[" + "1," * 50 + "]",
        "[" + "1," * 50 + "true]",
        "[" + "1," * 50 + '"2"]',
        "[" + "1," * 50 + "null]",
        "[" + "1," * 50 + "NaN]",
        "[" + "1," * 50 + "1 2]",
        "[" + "1," * 50 + '{"a":1}]',
        "[" + "[1,2]," * 50 + "[1,2,3]]",
        "[" + "[1,2]," * 50 + "[1]]",
        "[" + "[1,2]," * 50 + "[]]",
        "[" + "[1,2],[3],[4,5,6]," * 17 + "[7,8]]",
        "[" + "[1,2],[3,4],[[5,6]]," * 17 + "[7,8]]",
        "[" + "[1,2]," * 50 + "3]]",
        "[" + "[1,2]" * 50 + "[1,2]]",
        "[" + "[1,2]," * 50 + "[1,2],]",
        "[" + "[1,2]x," * 50 + "[1,2]]",
        "[7" + "[1,2]," * 50 + "[1,2]]",
        "[" + "[1,2]7," * 50 + "[1,2]]",
        "[" + "[1,]," * 50 + "[1,2]]",
        "[" + "[1,[2]]," * 50 + "[1,2]]",
    ],
)
def test_large_array_of_malformed_numbers_raises_user_error(text: str) -> None:
    reader = TensorReader(spec("x", "float32", "batch", 2))
    count = text.count(",") + 1 - text.count(",]")
    shape = (count // 2, 2)

    def read() -> None:
        document, literals = parse_document(f'{{"data":{text},"pad":"{" " * 3000}"}}'.encode())
        reader.read_json(shape, 2 * shape[0], document["data"], literals=literals)

    with pytest.raises(UserError):
        read()


def test_parse_document_of_too_deep_array_raises_user_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tensors, "_measure", None)
    with pytest.raises(UserError, match="not JSON"):
        parse_document(b'{"data":' + b"[" * 50_000 + b"1" + b"]" * 50_000 + b"}")


def test_parse_document_with_bracket_in_string_preserves_string() -> None:
    for text in ("[" + "1," * 50 + "1]", '"[' + "1," * 50 + "1]", "\\[" + "1," * 50 + '1]:"'):
        found, _ = parse_document(encode({"id": text, "data": [[1]], **PAD}))
        assert materialised(found) == {"id": text, "data": [[1]], **PAD}


def test_parse_document_with_repeated_key_returns_last_value() -> None:
    found, _ = parse_document(b'{"data": [1], "data": [2], "pad": "' + b" " * 3000 + b'"}')
    assert materialised(found["data"]) == [2]


def test_parse_document_with_nul_in_key_preserves_keys() -> None:
    found, _ = parse_document(encode({"a\0b": [1], "a": [2], **PAD}))
    assert materialised(found) == {"a\0b": [1], "a": [2], **PAD}


def test_parse_document_of_mixed_list_returns_plain_list() -> None:
    found, _ = parse_document(encode({"data": [{}, [[1]], "["], **PAD}))
    assert found["data"] == [{}, [[1]], "["]


def test_lazy_array_after_next_parse_is_unchanged() -> None:
    first, _ = parse_document(encode({"data": [1] * 2000}))
    second, _ = parse_document(encode({"data": [2] * 2000}))
    assert materialised(first["data"]) == [1] * 2000
    assert materialised(second["data"]) == [2] * 2000


def test_parse_document_in_concurrent_threads_returns_own_data() -> None:
    wrong: list[int] = []

    def work(number: int) -> None:
        for _ in range(50):
            found, _ = parse_document(encode({"data": [number] * 2000}))
            block = found["data"]
            if materialised(block) != [number] * 2000:
                wrong.append(number)
            del found, block

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@pytest.mark.parametrize(
    "body", [b"[" + b"0," * (1 << 22) + b"0,0]", b"[[" + b"[]," * (1 << 20) + b"[]]]"]
)
def test_parse_document_with_too_many_values_raises_too_large_error_before_parsing(
    body: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensors, "simdjson", None)
    monkeypatch.setattr(tensors, "orjson", None)
    with pytest.raises(TooLargeError, match="binary form"):
        parse_document(body)


@pytest.mark.parametrize("parser", ["simdjson", "orjson"])
@pytest.mark.parametrize("inner", ['"a": [1, [2], 3]', '"a": 1'])
def test_parse_document_with_too_many_keys_in_object_or_nested_list_raises_too_large_error(
    inner: str, parser: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if parser == "orjson":
        monkeypatch.setattr(tensors, "_parse_lazily", lambda _: None)
    keys = ", ".join(f'"{number}": 1' for number in range(tensors.MAX_KEYS))
    for body in (
        f'{{"parameters": {{{keys}, {inner}}}}}',
        f'[[{{"b": [{{{keys}, {inner}}}]}}], [[]]]',
    ):
        with pytest.raises(TooLargeError, match="4097 keys"):
            parse_document(body.encode())
    document, _ = parse_document(f'{{"parameters": {{{keys}}}, {inner}}}'.encode())
    assert len(document["parameters"]) == tensors.MAX_KEYS


def test_parse_document_with_wide_object_looks_up_none_of_its_keys(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each lookup of simdjson passes all keys before it, which takes quadratic time."""
    looked_up: list[str] = []
    convert = tensors._LazyWalk.convert

    def record(walk: Any, value: Any, key: str) -> Any:
        looked_up.append(key)
        return convert(walk, value, key)

    monkeypatch.setattr(tensors._LazyWalk, "convert", record)
    columns = {f"c{number}": [number] for number in range(1000)}
    document, _ = parse_document(encode({"inputs": columns, "data": [[1] * 9] * 99}))
    assert document["inputs"] == columns
    assert isinstance(document["data"], LazyArray)
    assert looked_up == ["", "inputs", "data"]


def test_small_body_cannot_exceed_key_limit() -> None:
    assert len('"0":1,') * tensors.MAX_KEYS > LARGE_BODY_BYTES


@pytest.mark.parametrize(
    "number", ["1" * 5000, "-" + "9" * 400, "1" + "0" * 400 + ".5", "1e999999999", "-1e400"]
)
def test_large_array_with_number_out_of_range_raises_user_error(number: str) -> None:
    for dtype in ("float32", "int64"):
        with pytest.raises(UserError):
            TensorReader(spec("x", dtype, "n")).read_json(
                (101,),
                101,
                parse_document(f'{{"data": [{"1," * 100}{number}]}}'.encode())[0]["data"],
                literals=False,
            )


def test_describe_tensor_shows_free_dimensions_and_optional_inputs() -> None:
    spec = TensorSpec(name="x", dtype="float32", shape=("batch", 2))
    assert describe_tensor(spec) == {"name": "x", "datatype": "FP32", "shape": [-1, 2]}
    assert describe_tensor(spec, optional=True)["parameters"] == {"optional": True}


def test_datatype_tables_of_onnx_open_inference_and_numpy_agree() -> None:
    assert {*DTYPE_OF_ONNX.values(), IMAGE_DTYPE} == set(DATATYPE_OF)
    for dtype in DTYPE_OF_ONNX.values():
        assert np.dtype(get_numpy_dtype(dtype)).name == get_numpy_dtype(dtype)
