"""Inputs of requests that are encoded images.

A client sends each image as it is in its file: as an element of BYTES, as a raw body, or in base64
in JSON. The arrays of these inputs contain Python bytes. `check_images` checks them before a model
decodes them.
"""

from __future__ import annotations

import binascii
from collections.abc import Mapping
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

    The methods raise UserError if a request does not fit the input or the limits.
    """

    __slots__ = ("_limits",)

    def __init__(self, spec: TensorSpec, limits: ImageLimits) -> None:
        super().__init__(spec)
        self._limits = limits

    def check_shape(self, given: object) -> tuple[tuple[int, ...], int]:
        """Validate the shape in a request, and return it with the number of images.

        If this input alone exceeds the limit for a request, its images are not read.
        """
        shape, count = super().check_shape(given)
        if not 1 <= count <= self._limits.max_images:
            limit = self._limits.max_images
            raise self.error(f" contains {count} images; it must contain 1 to {limit}")
        return shape, count

    def read_json(
        self, shape: tuple[int, ...], count: int, data: object, *, literals: bool
    ) -> Array:
        """Return the images of a list of strings in base64."""
        if isinstance(data, LazyArray):
            data = data.to_lists()
        if not isinstance(data, list) or len(data) != count:
            raise self.error(f": data must be a list of {count} strings in base64")
        images = [self._decode_text(number, item) for number, item in enumerate(data)]
        return build_object_array(images, (count,))

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
        images = [bytes(e) for e in self.split_elements(body, start, size, shape[0])]
        return build_object_array(images, shape)

    def read_raw(self, body: RequestBody) -> Array:
        """Return the only image of a body that is an image file."""
        return build_object_array([bytes(body)], (1,))


def check_images(images: Mapping[str, Array], limits: ImageLimits) -> None:
    """Check the images of a request, given as an array for each input.

    They are counted before the first one is decoded.

    Raises:
        UserError: there are too many images, or one of them is beyond the limits or cannot be
            decoded (see `check_image`).
    """
    total = sum(map(len, images.values()))
    if total > limits.max_images:
        raise UserError(f"the request has {total} images, and the limit is {limits.max_images}")
    for name, array in images.items():
        for number, content in enumerate(array.tolist()):
            try:
                check_image(content, limits)
            except UserError as error:
                raise UserError(
                    f"tensor {name!r}, image {number}: {error.what}",
                    why=error.why,
                    remedy=error.remedy,
                ) from error
