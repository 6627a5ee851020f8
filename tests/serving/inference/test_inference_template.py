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
from onnx_ops.serving.inference.signature import ModelSignature
from tests.serving.inference.tensor_cases import encode, signature, spec

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


def test_the_second_body_of_a_kind_is_known() -> None:
    known = model()
    read_infer(body_of(1, 2), None, known)
    call = known.template.read(body_of(3, 4.5))
    assert call is not None
    np.testing.assert_array_equal(call.feed["x"], np.array([[3, 4.5]], np.float32))


@pytest.mark.parametrize(
    "other",
    [
        body_of(1, 2, id="7"),
        body_of(1, 2)[:-1],
        body_of(1, 2).replace(b"[1, 2]", b""),
        body_of(1, 2).replace(b"[1, 2]", b"[1, 2], [3]"),
        body_of(1, 2).replace(b"[1, 2]", b"[1, 2]}, {" + b'"data": [1, 2]'),
        b"",
    ],
)
def test_a_body_of_another_kind_is_not(other: bytes) -> None:
    known = model()
    read_infer(body_of(1, 2), None, known)
    assert known.template.read(other) is None


def test_another_kind_is_learnt_in_time() -> None:
    known = model()
    read_infer(body_of(1, 2), None, known)
    for number in range(40):  # a client that numbers its requests, and comes in between
        read_infer(body_of(1, 2, id=str(number)), None, known)
        read_infer(body_of(3, 4, parameters={}), None, known)
    assert known.template.read(body_of(5, 6, parameters={})) is not None


def test_several_inputs_and_long_bodies_are_left_alone() -> None:
    two = signature([spec("x", "float32", "batch", 2), spec("z", "float32", "batch", 2)])
    tensors = [{"name": name, "datatype": "FP32", "shape": [1, 2], "data": [1, 2]} for name in ("x", "z")]
    read_infer(encode({"inputs": tensors}), None, two)
    assert two.template.read(encode({"inputs": tensors})) is None
    known = model()
    long = body_of(1, 2).replace(b"[1, 2]}", b"[1, 2]" + b" " * 9000 + b"}")
    read_infer(long, None, known)
    assert known.template.read(long) is None
