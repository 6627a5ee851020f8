"""Open Inference v2 requests, in JSON and in the binary form.

https://github.com/kserve/open-inference-protocol (inference_rest.md), and its extension for binary data, as Triton and
KServe have it: JSON first, `Inference-Header-Content-Length` bytes of it, then the tensors' bytes one after another.
"""

from __future__ import annotations

from typing import Any

from onnx_ops.errors import UserError
from onnx_ops.ports.data import Array
from onnx_ops.serving.wire.call import Call, Form
from onnx_ops.serving.wire.document import parse
from onnx_ops.serving.wire.reader import Reader, shown
from onnx_ops.serving.wire.signature import Signature

_INFER = Form.INFER
_ELSEWHERE = ("shared_memory_region", "shared_memory_offset", "shared_memory_byte_size")


def read_header_length(text: str | None) -> int | None:
    """The value of `Inference-Header-Content-Length`. Raises UserError if it is not a length."""
    if text is None:
        return None
    if not (text.isascii() and text.isdecimal() and len(text) < 16):
        raise UserError(f"inference-header-content-length must be a number of bytes, not {text[:40]!r}")
    return int(text)


def read_infer(body: bytes, header_length: int | None, signature: Signature) -> Call:
    """A v2 request.

    Args:
        body: all of it.
        header_length: how many of its bytes are JSON; None: all. 0: the body is the raw data of the only input.
        signature: the model that it is for.

    Raises:
        UserError: it does not fit the model; the message names the tensor.
        TooLargeError: it holds too many JSON values.
    """
    if header_length is None:
        repeated = signature.repeated.read(body)
        return repeated or _read_json(body, signature)
    if header_length > len(body):
        raise UserError(f"inference-header-content-length is {header_length}, but the body has {len(body)} bytes")
    if header_length == 0:
        return _raw(body, signature)
    document, literals = parse(body[:header_length])
    return read_document(document, signature, literals=literals, tail=_Tail(body, header_length))


def _read_json(body: bytes, signature: Signature) -> Call:
    document, literals = parse(body)
    call = read_document(document, signature, literals=literals)
    if len(call.feed) == 1:
        (name,) = call.feed
        signature.repeated.learn(body, document, call, signature.readers[name])
    return call


class _Tail:
    """The bytes after the JSON, taken from front to back."""

    __slots__ = ("_at", "_body")

    def __init__(self, body: bytes, at: int) -> None:
        self._body = body
        self._at = at

    def take(self, reader: Reader, shape: tuple[int, ...], size: object) -> Array:
        if type(size) is not int or size < 0:
            raise reader.error(": binary_data_size must be a number of bytes")
        left = len(self._body) - self._at
        if size > left:
            raise reader.error(f": binary_data_size is {size}, but {left} bytes are left in the body")
        array = reader.binary(shape, self._body, self._at, size)
        self._at += size
        return array

    def end(self) -> None:
        if self._at != len(self._body):
            raise UserError(f"{len(self._body) - self._at} bytes follow after the last tensor")


def read_document(document: Any, signature: Signature, *, literals: bool, tail: _Tail | None = None) -> Call:
    """The JSON of a v2 request, and the bytes after it. Raises as `read_infer`."""
    listed = document.get("inputs") if type(document) is dict else None
    if type(listed) is not list:
        raise UserError("the body must be an object with a list of inputs")
    feed: dict[str, Array] = {}
    for item in listed:
        if type(item) is not dict:
            raise UserError("a tensor must be an object with a name")
        reader = signature.known(item.get("name"))
        if reader.name in feed:
            raise UserError(f"input {reader.name!r} is given twice")
        feed[reader.name] = _tensor(item, reader, literals, tail)
    if tail is not None:
        tail.end()
    rows = signature.complete(feed)
    identity = document.get("id")
    if identity is not None and type(identity) is not str:
        raise UserError("id must be text")
    outputs, binary = _wanted(document, signature)
    return Call(feed, outputs, rows, _INFER, identity, binary)


def _tensor(item: dict[str, Any], reader: Reader, literals: bool, tail: _Tail | None) -> Array:
    if item.get("datatype") != reader.datatype:
        raise reader.error(f" must be {reader.datatype}, not {shown(item.get('datatype'))}")
    shape, count = reader.shape(item.get("shape"))
    parameters = item.get("parameters")
    if parameters is not None:
        parameters = _parameters(parameters, f"tensor {reader.name!r}")
        if any(name in parameters for name in _ELSEWHERE):
            raise reader.error(": shared memory is not supported", "Send the data in the body.")
        if "binary_data_size" in parameters:
            if "data" in item:
                raise reader.error(" has both data and binary_data_size")
            if tail is None:
                raise reader.error(": binary_data_size needs the header inference-header-content-length")
            return tail.take(reader, shape, parameters["binary_data_size"])
    if "data" not in item:
        raise reader.error(" has neither data nor binary_data_size")
    return reader.array(shape, count, item["data"], literals=literals)


def _raw(body: bytes, signature: Signature) -> Call:
    name = signature.only("a raw body")
    feed = {name: signature.readers[name].raw(body)}
    names = signature.output_names
    return Call(feed, names, signature.complete(feed), _INFER, None, (True,) * len(names))


def _wanted(document: dict[str, Any], signature: Signature) -> tuple[tuple[str, ...], tuple[bool, ...]]:
    """The outputs asked for, and which of them in binary."""
    given, listed = document.get("parameters"), document.get("outputs")
    if given is None and not listed and not signature.raw_only:
        return signature.output_names, ()
    default = given is not None and _flag(_parameters(given, "the request"), "binary_data_output", default=False)
    names: tuple[str, ...]
    if not listed:
        names = signature.output_names
        binary = (default,) * len(names)
    else:
        names, binary = _listed(listed, signature, default)
    for name, as_bytes in zip(names, binary, strict=True) if signature.raw_only else ():
        if name in signature.raw_only and not as_bytes:
            raise UserError(f"output {name!r} is BF16, which JSON cannot carry", remedy="Ask for binary_data.")
    return names, binary if any(binary) else ()


def _listed(listed: Any, signature: Signature, default: bool) -> tuple[tuple[str, ...], tuple[bool, ...]]:
    if type(listed) is not list or not all(type(i) is dict and type(i.get("name")) is str for i in listed):
        raise UserError("outputs must be a list of objects with a name")
    names = tuple(item["name"] for item in listed)
    if not all(name in signature.outputs for name in names) or len(set(names)) != len(names):
        raise UserError(f"outputs must be some of {', '.join(signature.outputs)}, each once")
    binary = []
    for item in listed:
        place = f"output {item['name']!r}"
        parameters = _parameters(item.get("parameters") or {}, place)
        if parameters.get("classification"):
            raise UserError(f"{place}: classification is not supported", remedy="Ask for the output itself.")
        if any(name in parameters for name in _ELSEWHERE):
            raise UserError(f"{place}: shared memory is not supported", remedy="Take the data from the answer.")
        binary.append(_flag(parameters, "binary_data", default=default))
    return names, tuple(binary)


def _parameters(given: Any, place: str) -> dict[str, Any]:
    if type(given) is not dict:
        raise UserError(f"{place}: parameters must be an object")
    return given


def _flag(parameters: dict[str, Any], name: str, *, default: bool) -> bool:
    value = parameters.get(name, default)
    if type(value) is not bool:
        raise UserError(f"{name} must be true or false")
    return value
