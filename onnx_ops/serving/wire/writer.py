"""One output of a model: its array to JSON or to bytes."""

from __future__ import annotations

import orjson

from onnx_ops.domain.artifact import TensorSpec
from onnx_ops.ports.data import Array
from onnx_ops.protocol.tensors import DATATYPE_OF
from onnx_ops.serving.wire.text import join_text

_NUMPY = orjson.OPT_SERIALIZE_NUMPY


class Writer:
    __slots__ = ("_is_text", "_last", "_opening")

    def __init__(self, spec: TensorSpec) -> None:
        self._is_text = spec.dtype == "string"
        self._opening = orjson.dumps({"name": spec.name, "datatype": DATATYPE_OF[spec.dtype]})[:-1] + b',"shape":'
        self._last: tuple[tuple[int, ...], bytes] = (), b""

    def json(self, array: Array) -> bytes:
        """The tensor with flat data: float32 as the shortest text that reads back as the same float32."""
        flat = array.ravel()
        data = orjson.dumps(flat.tolist()) if self._is_text else orjson.dumps(flat, None, _NUMPY)
        shape, opening = self._last
        if array.shape != shape or not opening:
            shape = array.shape
            opening = b'%b%b,"data":' % (self._opening, orjson.dumps(shape))
            self._last = shape, opening  # in one step: other threads read it
        return b"".join((opening, data, b"}"))

    def binary(self, array: Array) -> tuple[bytes, bytes]:
        """The tensor without its data, and its data: little-endian, row-major; text with its length before it."""
        data = join_text(text.encode() for text in array.reshape(-1).tolist()) if self._is_text else array.tobytes()
        shape = orjson.dumps(array.shape)
        return b'%b%b,"parameters":{"binary_data_size":%d}}' % (self._opening, shape, len(data)), data
