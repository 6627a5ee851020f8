"""A model as its clients see it, and one decoded request to it."""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
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
_MAX_TEMPLATES = 256
"""Texts of at most `LARGE_BODY_BYTES` that are known, and texts that came once."""
_DATA = b'"data":'
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

    __slots__ = ("_is_text", "_last", "_last_binary", "_prefix")

    def __init__(self, spec: TensorSpec) -> None:
        self._is_text = spec.dtype == "string"
        self._prefix = orjson.dumps({"name": spec.name, "datatype": DATATYPE_OF[spec.dtype]})[:-1] + b',"shape":'
        self._last: tuple[tuple[int, ...], bytes] = (), b""
        self._last_binary: tuple[tuple[int, ...], int, bytes] = (), 0, b""

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
        shape, size, item = self._last_binary
        if array.shape != shape or len(data) != size or not item:
            shape, size = array.shape, len(data)
            item = b'%b%b,"parameters":{"binary_data_size":%d}}' % (self._prefix, orjson.dumps(shape), size)
            self._last_binary = shape, size, item  # in one step: other threads read it
        return item, data


@dataclass(slots=True, eq=False)
class RequestTemplate:
    """What a text says about its tensors.

    Attributes:
        tensors: reader, shape and size of each tensor: elements in JSON, else bytes.
        size: the sum of their sizes.
        request: the request without its feed.
        bound, may_bind: runs the model on its own memory, and whether that was not tried yet. For the event loop.
    """

    tensors: Sequence[tuple[TensorReader, tuple[int, ...], int]]
    size: int
    request: InferenceRequest
    bound: BoundRun | None = None
    may_bind: bool = True

    def read_json(self, data: bytes) -> dict[str, Array] | None:
        """Return the feed; None if the data is not JSON. Raises UserError if it does not fit."""
        reader, shape, count = self.tensors[0]
        try:
            values = orjson.loads(data)
        except orjson.JSONDecodeError:
            return None
        return {reader.name: reader.read_json(shape, count, values, literals=may_contain_literals(data))}

    def read_binary(self, body: bytes, at: int) -> dict[str, Array]:
        """Return the feed from the bytes behind a header."""
        feed = {}
        for reader, shape, size in self.tensors:
            feed[reader.name] = reader.view(shape, body, at, size)
            at += size
        return feed


class BoundRun:
    """A run of a model on memory of its own, for one thread.

    A small model takes a third less time than with arrays that are made for each run (benchmarks/serving/path.py).

    Args:
        run: runs the model.
        inputs, outputs: its memory, in the order of the template and of the response.
        code: type of the elements of the only input in the struct module; empty if JSON cannot be packed into it.
    """

    __slots__ = ("_bytes", "_pack", "outputs", "run")

    def __init__(self, run: Callable[[], None], inputs: Sequence[Array], outputs: Sequence[Array], code: str) -> None:
        self.run = run
        self.outputs = outputs
        self._bytes = [array.reshape(-1).view(np.uint8).data for array in inputs]
        count = inputs[0].size
        self._pack = struct.Struct(f"<{count}{code}").pack_into if code else None

    def load_json(self, data: bytes) -> bool:
        """Take the numbers of JSON; return whether all fit, as flat or as only row."""
        if self._pack is None or may_contain_literals(data):
            return False
        try:
            values = orjson.loads(data)
            if type(values) is list and len(values) == 1 and type(values[0]) is list:
                values = values[0]
            self._pack(self._bytes[0], 0, *values)
        except (TypeError, OverflowError, struct.error, orjson.JSONDecodeError):
            return False
        return True

    def load_binary(self, body: bytes, at: int) -> bool:
        """Take the bytes behind a header; return True."""
        for memory in self._bytes:
            end = at + len(memory)
            memory[:] = body[at:end]
            at = end
        return True


class RequestTemplates:
    """Texts of requests without their data, to read similar ones quickly.

    A client writes the same text around its data each time: in JSON before and after the data of the only input, in the
    binary form the whole header. A text that came twice is known, and only the data is parsed. Threads may share this.
    """

    __slots__ = ("_known", "_refuses_nan", "_seen")

    def __init__(self, *, refuses_nan: bool) -> None:
        self._refuses_nan = refuses_nan
        self._known: dict[object, RequestTemplate] = {}
        self._seen: set[int] = set()
        """Hashes of texts that came once."""

    def find_json(self, body: bytes) -> tuple[RequestTemplate, bytes] | None:
        """Return the template of a body, and the data; None if its text is not known."""
        start = body.find(_DATA) + len(_DATA)
        end = body.find(b"}", start)
        template = self._known.get((body[:start], body[end:]))
        return None if template is None else (template, body[start:end])

    def find_binary(self, body: bytes, length: int) -> RequestTemplate | None:
        """Return the template of a body whose header has `length` bytes; None if it is not known."""
        template = self._known.get(body[:length])
        if template is None or len(body) - length != template.size or self._refuses_nan:
            return None
        return template

    def learn_json(
        self, body: bytes, document: dict[str, Any], request: InferenceRequest, reader: TensorReader
    ) -> None:
        """Learn the text of a request with one tensor."""
        start = body.find(_DATA) + len(_DATA)
        end = body.find(b"}", start)
        key = body[:start], body[end:]
        if len(body) >= LARGE_BODY_BYTES or not self._came_before(key):
            return
        (array,) = request.feed.values()
        expected = {**document, "inputs": [{**document["inputs"][0], "data": _PLACEHOLDER}]}
        try:
            if orjson.loads(key[0] + orjson.dumps(_PLACEHOLDER) + key[1]) == expected:
                self._add(key, RequestTemplate([(reader, array.shape, array.size)], array.size, request.with_feed({})))
        except orjson.JSONDecodeError:
            return

    def learn_binary(
        self, header: bytes, document: dict[str, Any], request: InferenceRequest, signature: ModelSignature
    ) -> None:
        """Learn the header of a request all of whose tensors are in the binary form."""
        if len(header) >= LARGE_BODY_BYTES or not self._came_before(header):
            return
        tensors = []
        for item in document["inputs"]:
            reader = signature.readers[item["name"]]
            size = (item.get("parameters") or {}).get("binary_data_size")
            if size is None or not reader.is_any_byte_valid:
                return
            tensors.append((reader, request.feed[reader.name].shape, size))
        self._add(header, RequestTemplate(tensors, sum(size for _, _, size in tensors), request.with_feed({})))

    def _came_before(self, key: object) -> bool:
        place = hash(key)
        if place in self._seen:
            return True
        if len(self._seen) >= _MAX_TEMPLATES:
            self._seen = set()
        self._seen.add(place)
        return False

    def _add(self, key: object, template: RequestTemplate) -> None:
        if len(self._known) >= _MAX_TEMPLATES:
            self._known = {}
        self._known[key] = template


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
        response_prefix, outputs_prefix: the start of every v2 response, and of most.
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
        self.outputs_prefix = self.response_prefix + b',"outputs":['
        self.templates = RequestTemplates(refuses_nan=refuses_nan)

    def check_feed(self, feed: dict[str, Array]) -> int:
        """Check that a feed is complete, and its sizes and NaN; return its rows (see `InferenceRequest`)."""
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
