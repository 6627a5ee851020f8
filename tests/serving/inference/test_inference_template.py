"""Bodies that differ only in their data.

A body read by a template gives the same result as one that is read without it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onnx_ops.errors import UserError
from onnx_ops.serving.inference.bound_runs import BoundRun, BoundRuns
from onnx_ops.serving.inference.requests import read_infer
from onnx_ops.serving.inference.responses import RawResponse
from onnx_ops.serving.inference.signature import InferenceRequest
from tests.serving.inference.tensor_cases import binary, encode, signature, spec

pytestmark = pytest.mark.usefixtures("small_is_large")

PLACE = "\0data"
KINDS = {
    "FP32": (
        "float32",
        st.floats(width=32, allow_nan=False, allow_infinity=False) | st.integers(-9, 9),
    ),
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
    """Return a datatype, and bodies for it from one template, some of them damaged."""
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
        piece = draw(
            st.sampled_from(
                [b"]", b"[", b",", b"1", b" ", b'"', b"}", b'"data":[9],', b"\xff", b""]
            )
        )
        bodies.insert(number + 1, body[:place] + piece + body[place + draw(st.integers(0, 2)) :])
    return datatype, bodies


EXTRAS: list[dict[str, Any]] = [
    {},
    {"id": "7"},
    {"outputs": [{"name": "y"}]},
    {"outputs": [{"name": "y", "parameters": {"binary_data": True}}]},
    {"parameters": {"data": [1, [2]], "binary_data_output": True}},
]


def body_of(*data: object, **more: object) -> bytes:
    return encode(
        {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 2], "data": [*data]}], **more}
    )


class Served:
    """A model whose outputs are its inputs, called as on the event loop."""

    def __init__(self, datatype: str = "FP32", *, inputs: int = 1) -> None:
        names = ("x", "z")[:inputs]
        self.signature = signature([spec(name, KINDS[datatype][0], "batch", 2) for name in names])
        self.runs = BoundRuns(self.signature, self.bind)
        self.bound: list[BoundRun] = []

    def bind(self, request: InferenceRequest, _: Sequence[Any]) -> BoundRun:
        feed = {name: array.copy() for name, array in request.feed.items()}
        code = self.signature.readers["x"].code
        self.bound.append(
            BoundRun(lambda: None, replace(request, feed=feed), list(feed.values()), code)
        )
        return self.bound[-1]

    def read(self, body: bytes, length: int | None = None) -> object:
        """Return what a body contains, in a form that can be compared."""
        bound = self.runs.load(body, length)
        try:
            request = read_infer(body, length, self.signature) if bound is None else bound.request
        except UserError as error:
            return str(error)
        if bound is None:
            outputs = list(request.feed.values())
            self.runs.learn(body, length, request, outputs, RawResponse(200, b"", b""))
        feed = {
            name: (array.dtype, array.shape, array.tolist()) for name, array in request.feed.items()
        }
        return feed, request.outputs, request.rows, request.request_id, request.binary

    def is_bound(self, body: bytes, length: int | None = None) -> bool:
        return self.runs.load(body, length) is not None


def after(*bodies: bytes) -> Served:
    served = Served()
    for body in bodies:
        served.read(body)
    return served


@settings(deadline=None, max_examples=300)
@given(sessions())
def test_bound_runs_read_repeated_bodies_like_first_bodies(
    session: tuple[str, list[bytes]],
) -> None:
    datatype, bodies = session
    served = Served(datatype)
    for body in (*bodies, *bodies):
        assert served.read(body) == Served(datatype).read(body)


def test_bound_runs_after_two_bodies_of_same_form_load_third() -> None:
    assert not after(body_of(1, 2)).is_bound(body_of(5, 6))
    assert after(body_of(1, 2), body_of(3, 4)).is_bound(body_of(5, 6))
    assert not after(body_of(1, 2), body_of(3, 4)).is_bound(body_of(5, 6, id="7"))


def test_bound_runs_with_data_key_elsewhere_bind_nothing() -> None:
    tensor = '"name": "x", "datatype": "FP32", "shape": [1, 2], "data": [1, 2]'
    body = f'{{"inputs": [{{"parameters": {{"data":[1, 2]}}, {tensor}}}]}}'.encode()
    served = after(body, body, body)
    assert not served.is_bound(body)
    assert not served.bound


def test_bound_runs_with_numbered_requests_keep_known_form() -> None:
    served = after(body_of(1, 2), body_of(1, 2))
    for number in range(1000):
        served.read(body_of(1, 2, id=str(number)))
    assert served.is_bound(body_of(5, 6))
    assert len(served.bound) == 1


def test_bound_runs_of_known_form_with_wrong_nesting_are_refused() -> None:
    bodies = [
        body_of(*data).replace(b'[1, 2], "data', b'[2, 2], "data')
        for data in ((1, 2, 3, 4), ([1, 2, 3, 4],))
    ]
    served = after(bodies[0], bodies[0])
    assert served.is_bound(bodies[0])
    assert served.read(bodies[1]) == Served().read(bodies[1]) == served.read(bodies[1])
    assert "nesting" in str(served.read(bodies[1]))


def test_bound_runs_of_long_json_bodies_or_with_several_inputs_bind_nothing() -> None:
    two = Served(inputs=2)
    tensors = [
        {"name": name, "datatype": "FP32", "shape": [1, 2], "data": [1, 2]} for name in ("x", "z")
    ]
    long = body_of(1, 2).replace(b"[1, 2]}", b"[1, 2]" + b" " * 9000 + b"}")
    one = Served()
    for _ in range(3):
        two.read(encode({"inputs": tensors}))
        one.read(long)
    assert not two.bound
    assert not one.bound


@given(st.lists(st.floats(width=32, allow_nan=False), min_size=4, max_size=4), st.integers(0, 3))
def test_bound_runs_of_known_binary_header_read_following_bytes(
    values: list[float], more: int
) -> None:
    served = Served(inputs=2)
    for turn, numbers in enumerate(([1.0, 2.0, 3.0, 4.0], [4.0, 3.0, 2.0, 1.0], values)):
        arrays = np.array(numbers, np.float32).reshape(2, 1, 2)
        body, length = binary({"x": ("float32", arrays[0]), "z": ("float32", arrays[1])})
        body += bytes(more if turn == 2 else 0)
        assert served.is_bound(body, length) == (turn == 2 and not more)
        assert served.read(body, length) == Served(inputs=2).read(body, length)


def test_bound_runs_with_inline_data_in_binary_header_bind_nothing() -> None:
    served = Served()
    body = body_of(1, 2)
    for _ in range(3):
        served.read(body, len(body))
    assert not served.bound
