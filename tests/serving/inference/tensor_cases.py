"""Signatures, and the bytes of requests for them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from onnx_ops.domain.artifact import TensorSpec
from onnx_ops.serving.inference.signature import ModelSignature
from onnx_ops.serving.inference.tensors import DATATYPE_OF


def spec(name: str, dtype: str, *shape: int | str) -> TensorSpec:
    return TensorSpec(name=name, dtype=dtype, shape=shape)


def signature(
    inputs: Sequence[TensorSpec],
    outputs: Sequence[TensorSpec] = (),
    *,
    version: str = "3",
    **more: Any,
) -> ModelSignature:
    outputs = outputs or [spec("y", "float32", "batch", 2)]
    given, found = ({tensor.name: tensor for tensor in tensors} for tensors in (inputs, outputs))
    return ModelSignature(model="m", version=version, inputs=given, outputs=found, **more)


def encode(document: object) -> bytes:
    return json.dumps(document).encode()


def text_bytes(values: Sequence[str]) -> bytes:
    encoded = [value.encode() for value in values]
    return b"".join(len(e).to_bytes(4, "little") + e for e in encoded)


def raw_bytes(array: np.ndarray[Any, Any]) -> bytes:
    return text_bytes(array.reshape(-1).tolist()) if array.dtype.kind == "O" else array.tobytes()


def binary(
    tensors: Mapping[str, tuple[str, np.ndarray[Any, Any]]], **more: object
) -> tuple[bytes, int]:
    """Return a body in the binary form and the length of its JSON.

    `tensors` are dtypes and arrays by the name of the tensor.
    """
    items = []
    tail = b""
    for name, (dtype, array) in tensors.items():
        data = raw_bytes(array)
        tail += data
        parameters = {"binary_data_size": len(data)}
        items.append(
            {
                "name": name,
                "datatype": DATATYPE_OF[dtype],
                "shape": list(array.shape),
                "parameters": parameters,
            }
        )
    header = encode({"inputs": items, **more})
    return header + tail, len(header)


def headers_of(lines: bytes) -> dict[bytes, bytes]:
    return {
        name: value for name, _, value in (line.partition(b": ") for line in lines.split(b"\r\n"))
    }


def split_answer(body: bytes, lines: bytes) -> tuple[Any, bytes]:
    """Return the JSON of an answer, and the bytes after it."""
    length = headers_of(lines).get(b"inference-header-content-length")
    size = len(body) if length is None else int(length)
    return json.loads(body[:size]), body[size:]
