"""Deliberately damaged requests for the short test and `benchmarks/fuzz_wire.py`."""

from __future__ import annotations

import json
import random
from typing import Any, Literal

import numpy as np

from onnx_ops.errors import OnnxOpsError
from onnx_ops.serving.inference.requests import parse_header_length, read_infer, read_invocation
from onnx_ops.serving.inference.responses import encode_outputs, get_status
from onnx_ops.serving.inference.signature import InferenceRequest, ModelSignature
from onnx_ops.serving.inference.tensors import get_numpy_dtype
from tests.serving.inference.tensor_cases import binary, encode, headers_of, signature, spec

SIGNATURES: dict[str, ModelSignature] = {
    "pixels": signature([spec("x", "float32", "batch", 2)]),
    "table": signature([spec("age", "int64", "batch", 1), spec("city", "string", "batch")]),
    "flags": signature([spec("b", "bool", "n"), spec("h", "float16", "n"), spec("u", "uint8", 2)]),
    "bits": signature([spec("x", "bfloat16", "n")], [spec("y", "bfloat16", "n")]),
    "scalar": signature([spec("x", "float64")]),
    "large": signature([spec("x", "float32", "n", "c", 30)], optional=frozenset({"x"})),
}

Seed = tuple[str, bytes, int | None, str]

_WORDS = (
    *(
        b"null",
        b"true",
        b"-1",
        b"1e400",
        b"NaN",
        b"[]",
        b"{}",
        b'"x"',
        b"9223372036854775808",
        b"0.5",
        b"[[",
        b"}",
    ),
    *(
        b'"shape":[0,4294967296]',
        b'"parameters":{"binary_data_size":18446744073709551615}',
        b"\xff\xff\xff\xff",
        b"\0",
    ),
    *(b'"a\\u0000b":1,', b'"data":[[', b'"data":[{},', b"[],", b"[1],"),
    *(
        b'"inputs":',
        b'"instances":',
        b'"name":"x",',
        b"1" * 400,
        b"[" * 2000,
        b",",
        b"\\ud800",
        b"\xed\xa0\x80",
    ),
)


def seeds() -> list[Seed]:
    """Return valid requests of every form.

    Each has a signature, a body, the length of its JSON and a content type.
    """
    kind = "application/json"
    image = np.zeros((1, 10, 30), np.float32)
    v2 = {"name": "x", "datatype": "FP32", "shape": [1, 2], "data": [1.5, 2]}
    large = {"name": "x", "datatype": "FP32", "shape": [1, 10, 30], "data": (image + 1.25).tolist()}
    flags = {
        "b": ("bool", np.array([True])),
        "h": ("float16", np.ones(1, np.float16)),
        "u": ("uint8", np.zeros(2, np.uint8)),
    }
    rows = {"age": ("int64", np.array([[3]])), "city": ("string", np.array(["Ulm"], object))}
    everything = {"binary_data_output": True}
    small: list[Seed] = [
        ("pixels", encode({"id": "a", "inputs": [v2], "outputs": [{"name": "y"}]}), None, kind),
        ("pixels", encode({"instances": [[1, 2], [3, 4]]}), None, kind),
        (
            "pixels",
            encode({"dataframe_split": {"columns": ["a", "b"], "data": [[1, 2]]}}),
            None,
            kind,
        ),
        ("pixels", b"a,b\n1,2\n3,4\n", None, "text/csv"),
        ("pixels", bytes(16), 0, "application/octet-stream"),
        ("table", encode({"dataframe_records": [{"age": 3, "city": "Ulm"}]}), None, kind),
        ("table", encode({"inputs": {"age": [3], "city": ["Ulm"]}}), None, kind),
        ("scalar", encode({"inputs": 3}), None, kind),
        ("large", encode({"inputs": [large]}), None, kind),
        ("large", encode({"inputs": {"x": (image + 0.5).tolist()}}), None, kind),
        *(
            (name, *binary(tensors, parameters=everything), "application/octet-stream")
            for name, tensors in (
                ("table", rows),
                ("flags", flags),
                ("bits", {"x": ("bfloat16", np.ones(3, np.uint16))}),
                ("large", {"x": ("float32", image)}),
            )
        ),
    ]
    padded = [
        (name, body[:-1] + b" " * 8200 + b"}", None, kind)
        for name, body, _, kind in small
        if body[-1:] == b"}"
    ]
    # Large bodies are read in another way.
    return small + padded


def attack(draw: random.Random, corpus: list[Seed]) -> Literal["read", "refused"]:
    """Damage one request and read it.

    An error propagates to the caller unless it is a refusal with a status of 4xx.
    """
    name, body, length, kind = draw.choice(corpus)
    if draw.random() < 0.1:
        name = draw.choice(list(SIGNATURES))
    model = SIGNATURES[name]
    body, length = _damaged(draw, body, length)
    if draw.random() < 0.05:
        kind = draw.choice(
            [
                "text/csv",
                "application/vnd.sagemaker-triton.binary+json;json-header-size=9",
                "",
                ";;=",
            ]
        )
    try:
        if length is not None and draw.random() < 0.1:
            length = parse_header_length(
                draw.choice([b"", b"-1", b"99999999999999", b"x", b"%d" % length])
            )
        call = (
            read_infer(body, length, model)
            if draw.random() < 0.5
            else read_invocation(body, kind, length, model)
        )
        check(call, model)
    except OnnxOpsError as error:
        if not 400 <= get_status(error) < 500 or len(str(error)) > 2000:
            raise
        return "refused"
    return "read"


def check(call: InferenceRequest, model: ModelSignature) -> None:
    """Assert what `InferenceRequest` promises, and that an answer can be written."""
    assert model.required <= call.feed.keys() <= model.inputs.keys()
    for name, array in call.feed.items():
        reader = model.readers[name]
        assert array.dtype == reader.dtype
        assert array.flags.aligned
        assert len(array.shape) == len(reader.dims)
        assert all(
            want in (None, have) for want, have in zip(reader.dims, array.shape, strict=True)
        )
    answers = [
        np.zeros(
            (call.rows or 1,) * len(model.outputs[n].shape), get_numpy_dtype(model.outputs[n].dtype)
        )
        for n in call.outputs
    ]
    body, lines = encode_outputs(call, model, answers)
    size = int(headers_of(lines).get(b"inference-header-content-length", len(body)))
    if not call.is_sagemaker:
        json.loads(body[:size])


def _damaged(draw: random.Random, body: bytes, length: int | None) -> tuple[bytes, int | None]:
    data = bytearray(body)
    for _ in range(draw.choice([0, 1, 1, 2, 4, 16])):
        at = draw.randrange(len(data) + 1)
        change: Any = draw.random()
        before = len(data)
        if change < 0.3 and at < len(data):
            data[at] = draw.randrange(256)
        elif change < 0.5:
            del data[at : at + draw.randrange(1, 40)]
        elif change < 0.8:
            data[at:at] = draw.choice(_WORDS)
        else:
            start = draw.randrange(len(data) + 1)
            data[at:at] = data[start : start + draw.randrange(1, 60)]
        # Usually move the boundary after the JSON header along with the change.
        if length and at < length and draw.random() < 0.8:
            length = max(0, length + len(data) - before)
    if length is not None and draw.random() < 0.1:
        length = draw.randrange(len(data) + 10)
    return bytes(data), length
