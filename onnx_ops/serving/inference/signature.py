"""The inputs and outputs of a model for clients, and one decoded request."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

import numpy as np
import orjson

from onnx_ops.domain.artifact import TensorSpec
from onnx_ops.errors import TooLargeError, UserError
from onnx_ops.ports.data import Array
from onnx_ops.protocol.images import ImageLimits
from onnx_ops.serving.inference.image_tensors import IMAGE_DTYPE, ImageReader, check_images
from onnx_ops.serving.inference.tensors import DATATYPE_OF, TensorReader, join_text, shorten

_NUMPY = orjson.OPT_SERIALIZE_NUMPY
_PIECE = 1 << 14
"""Number of elements of a piece, which is written in one or two milliseconds.

Between two pieces, other requests can be answered.
"""

MAX_PADDED_CHARACTERS = 1 << 25
"""Maximum product of the number of texts and the length of the longest one.

It applies to models that pad the words of every text to those of the longest. In a body of 1 MB,
one text of 100,000 words beside 100,000 texts of one letter would need hundreds of gigabytes.
"""
_LONG_TEXT = MAX_PADDED_CHARACTERS >> 10
"""Length of a text above which a model that pads texts runs its request alone.

A batch contains up to 1,024 rows.
"""


class ResponseFormat(Enum):
    """Format of a response: v2, or MLflow's predictions by output or by row."""

    INFER = 1
    NAMED = 2
    RECORDS = 3


@dataclass(slots=True, eq=False)
class InferenceRequest:
    """One decoded request.

    Attributes:
        feed: one array per input. A bfloat16 array contains its bits as uint16. Text and images are
            arrays of objects.
        outputs: the requested outputs, in the order of the response.
        rows: length of axis 0; 0 if the request cannot be batched. In a request that can be
            batched, axis 0 is free in all inputs of the feed and in all outputs. It has the same
            length in all inputs. There are no images. If the model pads texts, all texts have at
            most `_LONG_TEXT` characters.
        request_id: the client's id of the request, which is copied to the response.
        binary: for each output, whether its data is written in the binary form; empty if none is.
        is_sagemaker: whether the content type contains the length of the JSON, because SageMaker
            does not pass the header for it.
    """

    feed: dict[str, Array]
    outputs: tuple[str, ...]
    rows: int
    response_format: ResponseFormat = ResponseFormat.INFER
    request_id: str | None = None
    binary: tuple[bool, ...] = ()
    is_sagemaker: bool = False


class TensorWriter:
    """Writer of one output of a model as JSON or as bytes."""

    __slots__ = ("_is_text", "_last", "_last_binary", "_prefix")

    def __init__(self, spec: TensorSpec) -> None:
        self._is_text = spec.dtype == "string"
        self._prefix = (
            orjson.dumps({"name": spec.name, "datatype": DATATYPE_OF[spec.dtype]})[:-1]
            + b',"shape":'
        )
        self._last: tuple[tuple[int, ...], bytes] = (), b""
        self._last_binary: tuple[tuple[int, ...], int, bytes] = (), 0, b""

    def write_json(self, array: Array) -> bytes:
        """Return the tensor as JSON with flat data, floats as their shortest text."""
        flat = array.ravel()
        if self._is_text:
            data = orjson.dumps(flat.tolist())
        elif flat.size <= _PIECE:
            data = orjson.dumps(flat, None, _NUMPY)
        else:
            pieces = (flat[start : start + _PIECE] for start in range(0, flat.size, _PIECE))
            data = b"[%b]" % b",".join(
                [orjson.dumps(piece, None, _NUMPY)[1:-1] for piece in pieces]
            )
        shape, prefix = self._last
        if array.shape != shape or not prefix:
            shape = array.shape
            prefix = b'%b%b,"data":' % (self._prefix, orjson.dumps(shape))
            # Other threads read both values, so one atomic assignment sets them.
            self._last = shape, prefix
        return b"".join((prefix, data, b"}"))

    def write_binary(self, array: Array) -> tuple[bytes, bytes]:
        """Return the JSON of a tensor without data, and the data in the binary form."""
        data = (
            join_text(text.encode() for text in array.reshape(-1).tolist())
            if self._is_text
            else array.tobytes()
        )
        shape, size, item = self._last_binary
        if array.shape != shape or len(data) != size or not item:
            shape, size = array.shape, len(data)
            item = b'%b%b,"parameters":{"binary_data_size":%d}}' % (
                self._prefix,
                orjson.dumps(shape),
                size,
            )
            # Other threads read all three values, so one atomic assignment sets them.
            self._last_binary = shape, size, item
        return item, data


class ModelSignature:
    """Inputs and outputs of a model, with their readers and writers.

    Args:
        model: name of the model in every v2 response.
        version: version of the model in every v2 response.
        inputs: inputs by name, in the model's order.
        outputs: outputs by name, in the model's order.
        optional: inputs that a request can omit.
        refuses_nan: whether the source of the model refuses NaN, so that the model's outputs for
            NaN are meaningless.
        image_limits: limits for the images of inputs of type `image`.
        pads_texts: whether the model pads the words of every text to those of the longest.

    Attributes:
        images: inputs of type `image`.
        shared_dims: symbolic dimensions that occur more than once, with input and axis of each
            occurrence.
        binary_only: outputs that JSON cannot represent.
        has_text_input: whether an input is text or images. In every form, such elements are read
            one by one.
        has_fixed_rows: whether axis 0 of an output is fixed, so that the rows of several requests
            could not be separated.
        response_prefix: the start of every v2 response.
        outputs_prefix: the start of most v2 responses, up to the outputs.
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
        image_limits: ImageLimits | None = None,
        pads_texts: bool = False,
    ) -> None:
        self.model, self.version = model, version
        self.inputs, self.outputs = inputs, outputs
        self.optional, self.required = optional, frozenset(inputs) - optional
        self.refuses_nan = refuses_nan
        self.images = tuple(name for name, spec in inputs.items() if spec.dtype == IMAGE_DTYPE)
        self._image_limits = image_limits or ImageLimits()
        self.readers = _build_readers(inputs, self._image_limits)
        self.pads_texts = pads_texts
        self.writers = {name: TensorWriter(spec) for name, spec in outputs.items()}
        self.output_names = tuple(outputs)
        self.shared_dims = _find_shared_dims(inputs)
        self.binary_only = frozenset(
            name for name, spec in outputs.items() if spec.dtype == "bfloat16"
        )
        self.has_bfloat16 = any(
            spec.dtype == "bfloat16" for spec in (*inputs.values(), *outputs.values())
        )
        self.has_text_input = any(spec.dtype in ("string", IMAGE_DTYPE) for spec in inputs.values())
        self.has_fixed_rows = any(
            not spec.shape or isinstance(spec.shape[0], int) for spec in outputs.values()
        )
        self.response_prefix = orjson.dumps({"model_name": model, "model_version": version})[:-1]
        self.outputs_prefix = self.response_prefix + b',"outputs":['

    def check_feed(self, feed: dict[str, Array]) -> int:
        """Check a feed for missing inputs, NaN, sizes and images; return its row count.

        `InferenceRequest.rows` describes the result.

        Raises:
            UserError: a check failed.
        """
        # Most models need none of the checks, so the conditions avoid calls for each request.
        if len(feed) != len(self.readers):
            self._check_completeness(feed)
        if self.refuses_nan:
            _check_nan(feed)
        if self.shared_dims:
            self._check_shared_dims(feed)
        if self.images:
            self._check_image_rows(feed)
            images = {name: feed[name] for name in self.images if name in feed}
            check_images(images, self._image_limits)
            return 0
        if self.pads_texts and _check_lengths(feed) > _LONG_TEXT:
            return 0
        rows = 0
        for name, array in feed.items():
            length = len(array) if self.readers[name].has_free_rows else 0
            if not length or self.has_fixed_rows or (rows and length != rows):
                return 0
            rows = length
        return rows

    def _check_completeness(self, feed: Mapping[str, Array]) -> None:
        """Raise UserError if a required input is missing."""
        if missing := self.required - feed.keys():
            name = next(name for name in self.inputs if name in missing)
            raise UserError(f"input {name!r} is missing")

    def _check_image_rows(self, feed: Mapping[str, Array]) -> None:
        """Raise UserError if inputs with rows have different numbers of rows."""
        counts = {
            name: len(array) for name, array in feed.items() if self.readers[name].has_free_rows
        }
        if len(set(counts.values())) > 1:
            listed = ", ".join(f"{count} in {name!r}" for name, count in counts.items())
            raise UserError(f"the inputs have different numbers of rows: {listed}")

    def _check_shared_dims(self, feed: Mapping[str, Array]) -> None:
        """Raise UserError if a symbolic dimension has two different sizes."""
        for symbol, places in self.shared_dims.items():
            sizes = [(feed[name].shape[axis], name) for name, axis in places if name in feed]
            for size, name in sizes:
                if size != sizes[0][0]:
                    first, first_name = sizes[0]
                    raise UserError(
                        f"dimension {symbol!r} is {first} in tensor {first_name!r} but {size} in "
                        f"{name!r}"
                    )

    def get_reader(self, name: object) -> TensorReader:
        """Return the reader of an input.

        Raises:
            UserError: the model has no such input.
        """
        reader = self.readers.get(name) if isinstance(name, str) else None
        if reader is None:
            raise UserError(
                f"the model has no input {shorten(name)}; its inputs are {', '.join(self.inputs)}"
            )
        return reader

    def get_only_input(self, form: str) -> str:
        """Return the only required input, or the only input if none is required.

        Raises:
            UserError: there are several such inputs, or none.
        """
        names = [name for name in self.inputs if name in self.required] or list(self.inputs)
        if len(names) != 1:
            raise UserError(
                f"only a model with one required input accepts {form} without input names; "
                f"this model has {', '.join(self.inputs)}"
            )
        return names[0]


def _build_readers(
    inputs: Mapping[str, TensorSpec], limits: ImageLimits
) -> dict[str, TensorReader]:
    return {
        name: ImageReader(spec, limits) if spec.dtype == IMAGE_DTYPE else TensorReader(spec)
        for name, spec in inputs.items()
    }


def _find_shared_dims(
    inputs: Mapping[str, TensorSpec],
) -> dict[str, tuple[tuple[str, int], ...]]:
    """Return input and axis of each occurrence of symbols that occur more than once."""
    places: dict[str, tuple[tuple[str, int], ...]] = {}
    for spec in inputs.values():
        for axis, symbol in enumerate(spec.shape):
            if isinstance(symbol, str) and symbol != "?":
                # `?` stands for a dimension without a name.
                places[symbol] = (*places.get(symbol, ()), (spec.name, axis))
    return {symbol: listed for symbol, listed in places.items() if len(listed) > 1}


def _check_nan(feed: Mapping[str, Array]) -> None:
    """Raise UserError if an input of floating-point type contains NaN."""
    for name, array in feed.items():
        if array.dtype.kind == "f" and np.isnan(array).any():
            raise UserError(f"input {name!r} contains NaN, which the model does not support")


def _check_lengths(feed: Mapping[str, Array]) -> int:
    """Return the length of the longest text of a feed.

    Raises:
        TooLargeError: an input has several texts, which exceed `MAX_PADDED_CHARACTERS` if they are
            padded to the longest.
    """
    most = 0
    for name, array in feed.items():
        if array.dtype.kind != "O":
            continue
        texts: list[str] = array.ravel().tolist()
        longest = max(map(len, texts), default=0)
        if array.size > 1 and array.size * longest > MAX_PADDED_CHARACTERS:
            raise TooLargeError(
                f"input {name!r} contains {array.size} texts, the longest of {longest} characters; "
                f"the limit of their product is {MAX_PADDED_CHARACTERS}",
                why="the model pads all texts of a request to the longest",
                remedy="Send long texts in requests of one text.",
            )
        most = max(most, longest)
    return most
