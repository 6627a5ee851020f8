"""Bodies that differ in their data alone: what is read off them is what is read off them for the first time."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onnx_ops.errors import UserError
from onnx_ops.serving.inference.requests import read_infer
from onnx_ops.serving.inference.signature import BoundRun, ModelSignature
from tests.serving.inference.tensor_cases import binary, encode, signature, spec

pytestmark = pytest.mark.usefixtures("small_is_large")

PLACE = "\0data"
KINDS = {
    "FP32": ("float32", st.floats(width=32, allow_nan=False, allow_infinity=False) | st.integers(-9, 9)),
    "INT64": ("int64", st.integers(-(2**63), 2**63 - 1)),
    "UINT8": ("uint8", st.integers(0, 255)),
    "BOOL": ("bool", st.booleans()),
    "BYTES": ("string", st.text(alphabet='a é"[]{},\\\n', max_size=5)),
}
ODD: st.SearchStrategy[Any] = st.sampled_from(
    [None, True, 1e300, -1, 2**70, "x", [], [[]], {}, {"data": [1]}, [1, 2, 3], [[1], [2]]]
)


@st.composite
def sessions(draw: st.DrawFn) -> tuple[str, list[bytes]]:
    """A datatype, and bodies for it from one template, some of them damaged."""
    datatype = draw(st.sampled_from(sorted(KINDS)))
    value = KINDS[datatype][1]
    rows = draw(st.integers(1, 3))
    tensor: dict[str, Any] = {"name": "x", "datatype": datatype, "shape": [rows, 2], "data": PLACE}
    document: dict[str, Any] = {"inputs": [tensor], **draw(st.sampled_from(EXTRAS))}
    if draw(st.booleans()):
        document["inputs"][0]["parameters"] = {"note": "data"}
    text = json.dumps(document, indent=draw(st.sampled_from([None, 1])))
    flat = st.lists(value, min_size=2 * rows, max_size=2 * rows)
    nested = st.lists(st.lists(value, min_size=2, max_size=2), min_size=rows, max_size=rows)
    datas = draw(st.lists(flat | nested | ODD, min_size=1, max_size=5))
    bodies = [text.replace(json.dumps(PLACE), json.dumps(data)).encode() for data in datas]
    for _ in range(draw(st.integers(0, 3))):
        number = draw(st.integers(0, len(bodies) - 1))
        body = bodies[number]
        place = draw(st.integers(0, len(body)))
        piece = draw(st.sampled_from([b"]", b"[", b",", b"1", b" ", b'"', b"}", b'"data":[9],', b"\xff", b""]))
        bodies.insert(number + 1, body[:place] + piece + body[place + draw(st.integers(0, 2)) :])
    return datatype, bodies


EXTRAS: list[dict[str, Any]] = [
    {},
    {"id": "7"},
    {"outputs": [{"name": "y"}]},
    {"outputs": [{"name": "y", "parameters": {"binary_data": True}}]},
    {"parameters": {"data": [1, [2]], "binary_data_output": True}},
]


def model(datatype: str = "FP32") -> ModelSignature:
    return signature([spec("x", KINDS[datatype][0], "batch", 2)])


def read(body: bytes, known: ModelSignature) -> object:
    """What became of a body, in terms that can be compared."""
    try:
        call = read_infer(body, None, known)
    except UserError as error:
        return str(error)
    feed = {n: (a.dtype, a.shape, a.tolist()) for n, a in call.feed.items()}
    return feed, call.outputs, call.rows, call.response_format, call.request_id, call.binary, call.is_sagemaker


@settings(deadline=None, max_examples=300)
@given(sessions())
def test_bodies_are_read_as_if_each_were_the_first(session: tuple[str, list[bytes]]) -> None:
    datatype, bodies = session
    known = model(datatype)
    for body in bodies:
        assert read(body, known) == read(body, model(datatype))


def body_of(*data: object, **more: object) -> bytes:
    return encode({"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 2], "data": [*data]}], **more})


def known_text(body: bytes, known: ModelSignature) -> bool:
    return known.templates.find_json(body) is not None


def after(*bodies: bytes) -> ModelSignature:
    """A model that has read these."""
    known = model()
    for body in bodies:
        read_infer(body, None, known)
    return known


def test_a_text_that_came_twice_is_known() -> None:
    assert not known_text(body_of(5, 6), after(body_of(1, 2)))
    assert known_text(body_of(5, 6), after(body_of(1, 2), body_of(3, 4)))
    request = read_infer(body_of(3, 4.5), None, after(body_of(1, 2), body_of(1, 2)))
    np.testing.assert_array_equal(request.feed["x"], np.array([[3, 4.5]], np.float32))


@pytest.mark.parametrize(
    "other",
    [
        body_of(1, 2, id="7"),
        body_of(1, 2)[:-1],
        body_of(1, 2).replace(b"[1, 2]}", b"[1, 2], " + b'"data": [3]}'),
        b"",
    ],
)
def test_a_body_of_another_kind_is_not(other: bytes) -> None:
    known = after(body_of(1, 2), body_of(1, 2))
    assert read(other, known) == read(other, model())


def test_clients_that_number_their_requests_displace_nobody() -> None:
    known = after(body_of(1, 2), body_of(1, 2))
    for number in range(1000):
        read_infer(body_of(1, 2, id=str(number)), None, known)
    assert known_text(body_of(5, 6), known)


def test_several_inputs_and_long_bodies_are_left_alone() -> None:
    two = signature([spec("x", "float32", "batch", 2), spec("z", "float32", "batch", 2)])
    tensors = [{"name": name, "datatype": "FP32", "shape": [1, 2], "data": [1, 2]} for name in ("x", "z")]
    long = body_of(1, 2).replace(b"[1, 2]}", b"[1, 2]" + b" " * 9000 + b"}")
    known = model()
    for _ in range(2):
        read_infer(encode({"inputs": tensors}), None, two)
        read_infer(long, None, known)
    assert not known_text(encode({"inputs": tensors}), two)
    assert not known_text(long, known)


@settings(deadline=None)
@given(st.sampled_from(["FP32", "INT64", "UINT8"]), st.data())
def test_a_bound_run_takes_the_numbers_that_a_reader_takes(datatype: str, draw: st.DataObject) -> None:
    dtype, value = KINDS[datatype]
    reader = model(datatype).readers["x"]
    memory = np.zeros((1, 2), dtype)
    bound = BoundRun(lambda: None, [memory], [], reader.code)
    flat = draw.draw(st.lists(value | ODD, min_size=1, max_size=3))
    for given_values in (flat, [flat]):
        data = json.dumps(given_values).encode()
        if bound.load_json(data):
            found = reader.read_json((1, 2), 2, json.loads(data), literals=True)
            np.testing.assert_array_equal(memory, found)


@given(st.lists(st.floats(width=32), min_size=2, max_size=2), st.booleans(), st.integers(0, 3))
def test_a_known_header_reads_the_bytes_behind_it(values: list[float], more: bool, lengthen: int) -> None:
    known = model()
    for numbers in ([1.0, 2.0], [1.0, 2.0], values):
        body, length = binary({"x": ("float32", np.array([numbers], np.float32))})
        body += bytes(lengthen if more else 0)
        for signature_ in (known, model()):
            try:
                found: object = read_infer(body, length, signature_).feed["x"].tobytes()
            except UserError as error:
                found = str(error)
            if signature_ is known:
                expected = found
        assert found == expected
