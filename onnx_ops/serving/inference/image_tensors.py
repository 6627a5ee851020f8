"""Inputs of requests that are encoded images.

A client sends each image as it is in its file: as an element of BYTES, as a raw body, or in base64
in JSON. The arrays of these inputs hold Python bytes. Each image is checked before a model decodes
it.
"""

from __future__ import annotations

import binascii
from typing import Any

from onnx_ops.domain.artifact import TensorSpec
from onnx_ops.errors import UserError
from onnx_ops.ports.data import Array
from onnx_ops.protocol.images import ImageLimits, check_image
from onnx_ops.serving.inference.tensors import (
    LazyArray,
    RequestBody,
    TensorReader,
    build_object_array,
)

IMAGE_DTYPE = "image"
"""`TensorSpec.dtype` of an input whose elements are encoded images."""


class ImageReader(TensorReader):
    """Reader of the encoded images of one input.

    The methods raise UserError if a request does not fit the input or the limits, or if decoding an
    image fails.
    """

    __slots__ = ("_limits",)

    def __init__(self, spec: TensorSpec, limits: ImageLimits) -> None:
        super().__init__(spec)
        self._limits = limits

    def check_shape(self, given: object) -> tuple[tuple[int, ...], int]:
        """Validate the shape in a request, and return it with the number of images."""
        shape, count = super().check_shape(given)
        if not 1 <= count <= self._limits.max_images:
            raise self.error(f" holds {count} images; it must hold 1 to {self._limits.max_images}")
        return shape, count

    def read_json(
        self, shape: tuple[int, ...], count: int, data: object, *, literals: bool
    ) -> Array:
        """Return the images of a list of strings in base64."""
        if isinstance(data, LazyArray):
            data = data.to_lists()
        if not isinstance(data, list) or len(data) != count:
            raise self.error(f": data must be a list of {count} strings in base64")
        return self._build([self._decode_text(number, item) for number, item in enumerate(data)])

    def _decode_text(self, number: int, text: Any) -> bytes:
        if type(text) is not str:
            raise self.error(f": image {number} is not a string in base64")
        if len(text) > 4 * (self._limits.max_bytes // 3 + 2):
            raise self.error(f": image {number} has more than {self._limits.max_bytes} bytes")
        try:
            return binascii.a2b_base64(text, strict_mode=True)
        except ValueError as error:
            raise self.error(f": image {number} is not in base64: {error}") from error

    def read_binary(
        self, shape: tuple[int, ...], body: RequestBody, start: int, size: int
    ) -> Array:
        """Return the images in `size` bytes at `start`, each of which follows its length."""
        elements = self.split_elements(body, start, size, shape[0])
        return self._build([bytes(element) for element in elements])

    def read_raw(self, body: RequestBody) -> Array:
        """Return the only image of a body that is an image file."""
        return self._build([bytes(body)])

    def _build(self, images: list[bytes]) -> Array:
        for number, content in enumerate(images):
            try:
                check_image(content, self._limits)
            except UserError as error:
                raise UserError(
                    f"tensor {self.name!r}, image {number}: {error.what}",
                    why=error.why,
                    remedy=error.remedy,
                ) from error
        return build_object_array(list(images), (len(images),))
