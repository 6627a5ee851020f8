"""Runs of small models on dedicated memory.

Such a run serves requests that differ from earlier ones only in their tensor data.

The text before and after the data determines names, types, shapes and outputs. If the same text
arrives a second time, memory is allocated for it. The session's inputs and outputs are bound to
this memory, so that a run creates no arrays (docs/adr/0008-endpoint-server.md, "One path to a
response"). `benchmarks.serving.path` measures the CPU time of a request.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence

import numpy as np
import orjson

from onnx_ops.errors import UserError
from onnx_ops.ports.data import Array
from onnx_ops.serving.inference.requests import read_infer
from onnx_ops.serving.inference.responses import RawResponse
from onnx_ops.serving.inference.signature import InferenceRequest, ModelSignature
from onnx_ops.serving.inference.tensors import RequestBody, may_contain_literals

_MAX_TEXTS = 256
_MAX_TEXT_BYTES = 8192
_MAX_TENSOR_BYTES = 1 << 16
"""Largest total size in bytes of the inputs and outputs of a bound run."""
_DATA = b'"data":'

Bind = Callable[[InferenceRequest, Sequence[Array]], "BoundRun | None"]
"""Function that returns a bound run for requests like a given one.

The arguments are the request and its outputs. The result is None if the session cannot be bound.
"""


class BoundRun:
    """A run of a model on dedicated memory, for one thread.

    Args:
        run: runs the model.
        request: all parts of the requests but their data. The arrays of its feed are the input
            memory.
        outputs: the memory of the outputs, in the order of the request.
        code: the struct module's type code for elements of the first input. It is used for requests
            in JSON, which have only this input.
    """

    __slots__ = (
        *("_end", "_flat", "_is_binary", "_is_row", "_lines", "_memory", "_pack", "_start"),
        *("is_fit", "outputs", "request", "run", "size"),
    )

    def __init__(
        self,
        run: Callable[[], None],
        request: InferenceRequest,
        outputs: Sequence[Array],
        code: str,
    ) -> None:
        self.run = run
        self.request = request
        self.outputs = outputs
        self._memory = [array.reshape(-1).view(np.uint8).data for array in request.feed.values()]
        first = next(iter(request.feed.values()))
        self._is_row = first.ndim == 2 and len(first) == 1
        self._pack = struct.Struct(f"<{first.size}{code}").pack_into
        self.size = sum(map(len, self._memory))
        self._flat = outputs[0].reshape(-1)
        self._is_binary = bool(request.binary)
        self.is_fit = True
        """False after this run has failed on inputs that the model accepts."""
        self._start = self._end = self._lines = b""

    def learn_response(self, response: RawResponse) -> None:
        """Learn the text before and after the data in the response.

        The response contains the current outputs. If there are several, nothing is learned.
        """
        if len(self.outputs) == 1:
            self._start, _, self._end = response.body.rpartition(self._encode())
            self._lines = response.lines

    def build_response(self) -> RawResponse | None:
        """Return the response with the current outputs; None if no response was learned."""
        return (
            RawResponse(200, self._lines, self._start + self._encode() + self._end)
            if self._lines
            else None
        )

    def _encode(self) -> bytes:
        return (
            self._flat.tobytes()
            if self._is_binary
            else orjson.dumps(self._flat, None, orjson.OPT_SERIALIZE_NUMPY)
        )

    def load_json(self, data: bytes) -> bool:
        """Copy the numbers of JSON into the input; return whether all of them fit.

        The JSON is a flat list, or a list with one row.
        """
        if may_contain_literals(data):
            return False
        try:
            values = orjson.loads(data)
            if (
                self._is_row
                and type(values) is list
                and len(values) == 1
                and type(values[0]) is list
            ):
                values = values[0]
            self._pack(self._memory[0], 0, *values)
        except (TypeError, OverflowError, struct.error, orjson.JSONDecodeError):
            return False
        return True

    def load_binary(self, body: RequestBody, at: int) -> None:
        """Copy the tensor data that begins at an offset of a body into the inputs."""
        for memory in self._memory:
            end = at + len(memory)
            memory[:] = body[at:end]
            at = end


class BoundRuns:
    """The bound runs of a deployment, by the text around the data of requests."""

    def __init__(self, signature: ModelSignature, bind: Bind) -> None:
        self._signature = signature
        self._bind = bind
        self._known: dict[object, BoundRun | None] = {}
        """Bound runs by text; None for a text that cannot have a bound run."""
        self._seen: set[int] = set()
        """Hashes of texts that have arrived."""

    def load(self, body: RequestBody, header_length: int | None) -> BoundRun | None:
        """Return the bound run for a body, loaded with its data; None if none fits."""
        if header_length is not None:
            run = self._known.get(bytes(body[:header_length]))
            if run is None or not run.is_fit or len(body) - header_length != run.size:
                return None
            run.load_binary(body, header_length)
            return run
        body = bytes(body)
        start = body.find(_DATA) + len(_DATA)
        end = body.find(b"}", start)
        run = self._known.get((body[:start], body[end:]))
        return run if run is not None and run.is_fit and run.load_json(body[start:end]) else None

    def learn(
        self,
        body: RequestBody,
        header_length: int | None,
        request: InferenceRequest,
        outputs: Sequence[Array],
        response: RawResponse,
    ) -> None:
        """Record the text of a request; bind a run when the text arrives a second time.

        Args:
            outputs: outputs of the request's run.
            response: response with these outputs.
        """
        if header_length is None:
            text = bytes(body)
            start = text.find(_DATA) + len(_DATA)
            end = text.find(b"}", start)
            around = text[:start], text[end:]
            key: object = around
            text_bytes = len(text)
        else:
            around = bytes(body[:header_length]), b""
            key = around[0]
            text_bytes = header_length
        if (
            text_bytes > _MAX_TEXT_BYTES
            or not _can_be_bound((*request.feed.values(), *outputs))
            or self._signature.refuses_nan
            or self._signature.has_bfloat16
            or key in self._known
        ):
            return
        # The text of a request gets its own memory only when it occurs a second time. Otherwise,
        # texts that differ in every request would fill the memory.
        if hash(key) not in self._seen:
            self._seen = {hash(key), *(self._seen if len(self._seen) < _MAX_TEXTS else ())}
            return
        if len(self._known) >= _MAX_TEXTS:
            self._known = {}
        if header_length is None:
            is_known = self._is_data(*around, request)
        else:  # If the sizes differ, some of the data is in the JSON header.
            is_known = (
                sum(array.nbytes for array in request.feed.values()) == len(body) - header_length
            )
        self._known[key] = run = self._bind(request, outputs) if is_known else None
        if run is not None:
            run.learn_response(response)

    def _is_data(self, start: bytes, end: bytes, request: InferenceRequest) -> bool:
        """Return whether only the data of the only input is between two texts.

        The request is parsed again with other numbers at that position. If the input then has these
        numbers, the position is that of the input's data.
        """
        if len(request.feed) != 1:
            return False
        (array,) = request.feed.values()
        other = 1 - (array.reshape(-1) != 0).astype(np.int64)
        try:
            found = read_infer(start + orjson.dumps(other.tolist()) + end, None, self._signature)
        except UserError:
            return False
        return bool(np.array_equal(found.feed[next(iter(request.feed))].reshape(-1), other))


def _can_be_bound(tensors: Sequence[Array]) -> bool:
    """Return whether tensors can be bound to dedicated memory.

    All of them must be numeric and not empty, and together have at most `_MAX_TENSOR_BYTES`.
    """
    size_bytes = 0
    for tensor in tensors:
        if tensor.dtype.kind not in "fiu" or not tensor.size:
            return False
        size_bytes += tensor.nbytes
    return size_bytes <= _MAX_TENSOR_BYTES
