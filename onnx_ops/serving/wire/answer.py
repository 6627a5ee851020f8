"""Answers: Open Inference v2 in JSON and in the binary form, and MLflow's predictions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import orjson

from onnx_ops.errors import UserError
from onnx_ops.ports.data import Array
from onnx_ops.protocol.messages import BINARY_LENGTH_HEADER
from onnx_ops.serving.wire.call import Call, Form
from onnx_ops.serving.wire.signature import Signature

Headers = tuple[tuple[bytes, bytes], ...]

SAGEMAKER_TYPE = "application/vnd.sagemaker-triton.binary+json"
"""Content type of the binary form where no header but the content type passes: `;json-header-size=N` is added."""

_INFER = Form.INFER
_JSON: Headers = ((b"content-type", b"application/json"),)


def write(call: Call, signature: Signature, arrays: Sequence[Array]) -> tuple[bytes, Headers]:
    """The body of the answer, and the headers that it needs.

    JSON has no NaN and no infinities: they are written as null. The binary form keeps them.

    Args:
        call: the request.
        signature: the model that answered.
        arrays: one an output of `call.outputs`, in that order.

    Raises:
        UserError: an answer as a table was asked for, and the outputs fit none.
    """
    if call.form is not _INFER:
        return _predictions(call, arrays), _JSON
    writers = signature.writers
    if len(arrays) == 1 and not call.binary and call.identity is None:  # what most requests ask for
        (name,), (array,) = call.outputs, arrays
        return b'%b,"outputs":[%b]}' % (signature.opening, writers[name].json(array)), _JSON
    tail: list[bytes] = []
    items = []
    for name, array, as_bytes in zip(call.outputs, arrays, call.binary or (False,) * len(arrays), strict=True):
        if as_bytes:
            item, data = writers[name].binary(array)
            items.append(item)
            tail.append(data)
        else:
            items.append(writers[name].json(array))
    identity = b"" if call.identity is None else b',"id":' + orjson.dumps(call.identity)
    header = b'%b%b,"outputs":[%b]}' % (signature.opening, identity, b",".join(items))
    if not call.binary:
        return header, _JSON
    return b"".join((header, *tail)), _lengths(call, len(header))


def _lengths(call: Call, size: int) -> Headers:
    if call.sagemaker:
        return ((b"content-type", b"%b;json-header-size=%d" % (SAGEMAKER_TYPE.encode(), size)),)
    return ((b"content-type", b"application/octet-stream"), (BINARY_LENGTH_HEADER.encode(), b"%d" % size))


def _predictions(call: Call, arrays: Sequence[Array]) -> bytes:
    named = dict(zip(call.outputs, arrays, strict=True))
    content: object
    if call.form is Form.NAMED:
        content = {name: _plain(array) for name, array in named.items()}
    else:
        content = _records({name: _column(name, array) for name, array in named.items()})
    return orjson.dumps({"predictions": content}, option=orjson.OPT_SERIALIZE_NUMPY)


def _plain(array: Array) -> object:
    """What the JSON writer takes: a contiguous array of numbers; else text, or a single value, as Python has it."""
    return array.tolist() if array.dtype.kind == "O" or array.ndim == 0 else np.ascontiguousarray(array)


def _column(name: str, array: Array) -> list[Any]:
    if array.ndim == 0:
        raise UserError(f"output {name!r} is a single value and fits no table; send inputs or instances")
    flat = array[:, 0] if array.shape[1:] == (1,) else array
    if flat.dtype.kind == "O":
        return list(flat.tolist())
    # Through JSON, so that float32 keeps its short text and NaN becomes null, as in every other form.
    return list(orjson.loads(orjson.dumps(np.ascontiguousarray(flat), option=orjson.OPT_SERIALIZE_NUMPY)))


def _records(columns: dict[str, list[Any]]) -> list[dict[str, Any]]:
    if len({len(column) for column in columns.values()}) > 1:
        raise UserError("the outputs differ in length and fit no table; send inputs or instances")
    rows = zip(*columns.values(), strict=True)
    return [dict(zip(columns, row, strict=True)) for row in rows]
