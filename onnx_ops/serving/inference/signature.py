"""A model as its clients see it, and one decoded request to it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np
import orjson

from onnx_ops.domain.artifact import TensorSpec
from onnx_ops.errors import UserError
from onnx_ops.ports.data import Array
from onnx_ops.serving.inference.tensors import (
    DATATYPE_OF,
    LARGE_BODY_BYTES,
    TensorReader,
    join_text,
    may_contain_literals,
    shorten,
)

_NUMPY = orjson.OPT_SERIALIZE_NUMPY
_MAX_MISSES = 17
"""Requests in a row that differ from the template before another one is learned, as learning costs more than it may
save. An odd number, so that each of two alternating clients gets its turn."""
_DATA_KEY = re.compile(rb'"data"\s*:\s*(?=\[)')
_BRACKET = re.compile(rb"[\[\]]")
_PLACEHOLDER = "\0"


class ResponseFormat(Enum):
    """Format of a response: v2, or MLflow's predictions by output or by row."""

    INFER = 1
    NAMED = 2
    RECORDS = 3


@dataclass(slots=True, eq=False)
class InferenceRequest:
    """One decoded request.

    Attributes:
        feed: one array per input; bfloat16 as its bits in uint16, text as an array of objects.
        outputs: the requested outputs, in the order of the response.
        rows: length of axis 0, if that axis is free in every input of the feed and in every output, and the same in
            all inputs. Else 0: such a request cannot be batched.
        request_id: the client's id of the request, copied to the response.
        binary: for each output whether its data is written in the binary form; empty if for none.
        is_sagemaker: the content type carries the length of the JSON, since SageMaker passes no other header.
    """

    feed: dict[str, Array]
    outputs: tuple[str, ...]
    rows: int
    response_format: ResponseFormat = ResponseFormat.INFER
    request_id: str | None = None
    binary: tuple[bool, ...] = ()
    is_sagemaker: bool = False

    def with_feed(self, feed: dict[str, Array]) -> InferenceRequest:
        """Return the same request with another feed."""
        return InferenceRequest(feed, self.outputs, self.rows, self.response_format, self.request_id, self.binary)


class TensorWriter:
    """Writes one output of a model as JSON or as bytes."""

    __slots__ = ("_is_text", "_last", "_prefix")

    def __init__(self, spec: TensorSpec) -> None:
        self._is_text = spec.dtype == "string"
        self._prefix = orjson.dumps({"name": spec.name, "datatype": DATATYPE_OF[spec.dtype]})[:-1] + b',"shape":'
        self._last: tuple[tuple[int, ...], bytes] = (), b""

    def write_json(self, array: Array) -> bytes:
        """Return the tensor as JSON with flat data, floats as their shortest text."""
        flat = array.ravel()
        data = orjson.dumps(flat.tolist()) if self._is_text else orjson.dumps(flat, None, _NUMPY)
        shape, prefix = self._last
        if array.shape != shape or not prefix:
            shape = array.shape
            prefix = b'%b%b,"data":' % (self._prefix, orjson.dumps(shape))
            self._last = shape, prefix  # in one step: other threads read it
        return b"".join((prefix, data, b"}"))

    def write_binary(self, array: Array) -> tuple[bytes, bytes]:
        """Return the tensor without its data, and its data in the binary form."""
        data = join_text(text.encode() for text in array.reshape(-1).tolist()) if self._is_text else array.tobytes()
        shape = orjson.dumps(array.shape)
        return b'%b%b,"parameters":{"binary_data_size":%d}}' % (self._prefix, shape, len(data)), data


@dataclass(frozen=True, slots=True)
class _Template:
    start: bytes
    end: bytes
    reader: TensorReader
    shape: tuple[int, ...]
    count: int
    request: InferenceRequest


class RequestTemplate:
    """The JSON of a request without its data, to read similar ones quickly.

    A client of a model with one input writes the same text around its data each time. That text is compared, and only
    the data is parsed. Threads may share a template: it is replaced as a whole.
    """

    __slots__ = ("_misses", "_template")

    def __init__(self) -> None:
        self._template: _Template | None = None
        self._misses = 0

    def read(self, body: bytes) -> InferenceRequest | None:
        """Return the request of a body that differs only in its data, else None."""
        template = self._template
        if (
            template is None
            or len(body) >= LARGE_BODY_BYTES
            or not (body.startswith(template.start) and body.endswith(template.end))
        ):
            return None
        data = body[len(template.start) : len(body) - len(template.end)]
        try:
            values = orjson.loads(data)
        except orjson.JSONDecodeError:
            return None
        reader = template.reader
        array = reader.read_json(template.shape, template.count, values, literals=may_contain_literals(data))
        self._misses = _MAX_MISSES
        return template.request.with_feed({reader.name: array})

    def learn(self, body: bytes, document: dict[str, Any], request: InferenceRequest, reader: TensorReader) -> None:
        """Take a request with one tensor as the template, unless the present one is still in use."""
        if len(body) >= LARGE_BODY_BYTES:
            return
        self._misses -= 1
        if self._misses > 0 or (parts := _split_around_data(body)) is None:
            return
        self._misses = _MAX_MISSES
        start, end = parts
        (array,) = request.feed.values()
        expected = {**document, "inputs": [{**document["inputs"][0], "data": _PLACEHOLDER}]}
        try:
            if orjson.loads(start + orjson.dumps(_PLACEHOLDER) + end) != expected:
                return
        except orjson.JSONDecodeError:
            return
        self._template = _Template(start, end, reader, array.shape, array.size, request.with_feed({}))


def _split_around_data(body: bytes) -> tuple[bytes, bytes] | None:
    """Return the text before and after what looks like the data of the only tensor."""
    key = _DATA_KEY.search(body)
    if key is None:
        return None
    depth = 0
    for bracket in _BRACKET.finditer(body, key.end()):
        depth += 1 if bracket[0] == b"[" else -1
        if not depth:
            return body[: key.end()], body[bracket.end() :]
    return None


class ModelSignature:
    """Inputs and outputs of a model, and what requests need of them.

    Args:
        model, version: named in every response.
        inputs, outputs: by name, in the model's order.
        optional: inputs that a request may omit.
        refuses_nan: the source of the model refuses NaN, so the model's outputs for NaN are meaningless.

    Attributes:
        shared_dims: symbolic dimensions that occur more than once: input and axis of each place.
        binary_only: outputs that JSON cannot represent.
        has_text_input: elements of text are read one by one in every form.
        has_fixed_rows: axis 0 of an output is fixed, so the rows of several requests could not be separated.
        response_prefix: the start of every v2 response.
    """

    def __init__(
        self,
        *,
        model: str,
        version: str,
        inputs: Mapping[str, TensorSpec],
        outputs: Mapping[str, TensorSpec],
        optional: frozenset[str] = frozenset(),
        refuses_nan: bool = False,
    ) -> None:
        self.model, self.version = model, version
        self.inputs, self.outputs = inputs, outputs
        self.optional, self.required = optional, frozenset(inputs) - optional
        self.refuses_nan = refuses_nan
        self.readers = {name: TensorReader(spec) for name, spec in inputs.items()}
        self.writers = {name: TensorWriter(spec) for name, spec in outputs.items()}
        self.output_names = tuple(outputs)
        places: dict[str, tuple[tuple[str, int], ...]] = {}
        for spec in inputs.values():
            for axis, symbol in enumerate(spec.shape):
                if isinstance(symbol, str) and symbol != "?":  # `?` is a dimension without a name
                    places[symbol] = (*places.get(symbol, ()), (spec.name, axis))
        self.shared_dims = {symbol: listed for symbol, listed in places.items() if len(listed) > 1}
        self.binary_only = frozenset(name for name, spec in outputs.items() if spec.dtype == "bfloat16")
        self.has_bfloat16 = any(spec.dtype == "bfloat16" for spec in (*inputs.values(), *outputs.values()))
        self.has_text_input = any(spec.dtype == "string" for spec in inputs.values())
        self.has_fixed_rows = any(not spec.shape or isinstance(spec.shape[0], int) for spec in outputs.values())
        self.response_prefix = orjson.dumps({"model_name": model, "model_version": version})[:-1]
        self.template = RequestTemplate()

    def check_feed(self, feed: dict[str, Array]) -> int:
        """Check a feed for completeness, sizes and NaN; return its rows (see `InferenceRequest`)."""
        if len(feed) != len(self.readers) and (missing := self.required - feed.keys()):
            name = next(name for name in self.inputs if name in missing)
            raise UserError(f"input {name!r} is missing")
        if self.refuses_nan:
            for name, array in feed.items():
                if array.dtype.kind == "f" and np.isnan(array).any():
                    raise UserError(f"input {name!r} holds NaN, which the model does not support")
        if self.shared_dims:
            for symbol, places in self.shared_dims.items():
                _check_symbol(symbol, places, feed)
        rows = 0
        for name, array in feed.items():
            length = len(array) if self.readers[name].has_free_rows else 0
            if not length or self.has_fixed_rows or (rows and length != rows):
                return 0
            rows = length
        return rows

    def get_reader(self, name: object) -> TensorReader:
        """Return the reader of an input. Raises UserError if the model has no such input."""
        reader = self.readers.get(name) if isinstance(name, str) else None
        if reader is None:
            raise UserError(f"the model has no input {shorten(name)}; its inputs are {', '.join(self.inputs)}")
        return reader

    def get_only_input(self, form: str) -> str:
        """Return the only input. Raises UserError if there are several."""
        names = [name for name in self.inputs if name in self.required] or list(self.inputs)
        if len(names) != 1:
            raise UserError(f"the model has several inputs; {form} must name them: {', '.join(self.inputs)}")
        return names[0]


def _check_symbol(symbol: str, places: tuple[tuple[str, int], ...], feed: Mapping[str, Array]) -> None:
    first: tuple[int, str] | None = None
    for name, axis in places:
        if name not in feed:
            continue
        size = feed[name].shape[axis]
        if first is None:
            first = size, name
        elif first[0] != size:
            raise UserError(f"dimension {symbol!r} is {first[0]} in tensor {first[1]!r} but {size} in {name!r}")
