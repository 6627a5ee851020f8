"""Checks of encoded images before a model decodes them.

onnxruntime-extensions decodes JPEG files with libjpeg. With version 0.15, most errors in a file end
the process, such as a wrong marker or a wrong Huffman table. Therefore a model gets only files that
Pillow has decoded, which raises an exception for such errors. The size in the header is checked
before Pillow decodes a file.

- PNG: https://www.w3.org/TR/png-3/#11IHDR
- JPEG: ITU-T T.81, B.2.2 (frame header)
"""

from __future__ import annotations

import base64
import io
import struct
from dataclasses import dataclass

from onnx_ops.errors import UserError

PACKAGE = "pillow"
"""Distribution that decodes images for the check."""

SAMPLE_IMAGE = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAIAAACQd1PeAAAADElEQVR4nGNgYGAAAAAEAAH2FzhVAAAAAElFTkSuQmCC"
)
"""A black image of one pixel, for sample inputs."""

_PNG = b"\x89PNG\r\n\x1a\n"
_PNG_HEADER = struct.Struct(">I4sII")
_JPEG = b"\xff\xd8\xff"
_JPEG_FRAME = struct.Struct(">HBHHB")
_FRAME_MARKERS = frozenset({*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC})
_DECODED_FRAMES = frozenset({0xC0, 0xC1, 0xC2})
"""Baseline, extended and progressive frames with Huffman codes."""
_WITHOUT_LENGTH = frozenset({0x01, *range(0xD0, 0xD8)})
_START_OF_SCAN = b"\xff\xda"
_MAX_SEGMENTS = 4096
"""Largest number of segments and fill bytes of a JPEG file up to its frame header."""
_MAX_SCANS = 128
"""Largest number of start-of-scan markers in a JPEG file.

Each scan of a progressive file can visit every block of the image, and takes only a few bytes.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageLimits:
    """Limits for the images that are decoded.

    Attributes:
        max_bytes: size of one file.
        max_pixels: width times height.
        max_images: number of images of one request.
    """

    max_bytes: int = 10 << 20
    max_pixels: int = 1 << 24
    max_images: int = 32


@dataclass(frozen=True, slots=True)
class ImageHeader:
    """Format, width and height that an encoded image announces."""

    format: str
    width: int
    height: int


def read_image_header(content: bytes) -> ImageHeader:
    """Return what the header of an encoded image announces.

    Raises:
        UserError: the file is of another format than PNG and JPEG, or of a kind that is not
            decoded. The same error is raised if the header is corrupt or truncated, or announces no
            pixels.
    """
    if content.startswith(_PNG):
        header = _read_png_header(content)
    elif content.startswith(_JPEG):
        header = _read_jpeg_header(content)
    else:
        shown = bytes(content[:8])
        what = f"it begins with {shown!r}" if shown else "it is empty"
        raise UserError("the image is neither PNG nor JPEG", why=what)
    if not header.width or not header.height:
        raise UserError(f"the image has {header.width} × {header.height} pixels")
    return header


def _read_png_header(content: bytes) -> ImageHeader:
    try:
        _, name, width, height = _PNG_HEADER.unpack_from(content, len(_PNG))
    except struct.error as error:
        raise _build_truncation_error("PNG") from error
    if name != b"IHDR":
        raise UserError("the PNG file does not begin with its header")
    return ImageHeader("PNG", width, height)


def _read_jpeg_header(content: bytes) -> ImageHeader:
    """Return what the frame header announces; it must precede the first scan."""
    place = 2
    for _ in range(_MAX_SEGMENTS):
        if place + 4 > len(content):
            raise _build_truncation_error("JPEG")
        if content[place] != 0xFF:
            raise UserError("the JPEG file is corrupt", why=f"no marker is at byte {place}")
        marker = content[place + 1]
        if marker == 0xFF:
            # 0xFF in place of a marker is a fill byte.
            place += 1
        elif marker in _WITHOUT_LENGTH:
            place += 2
        elif marker in _FRAME_MARKERS:
            return _read_frame(content, place + 2, marker)
        elif marker in (0xD9, 0xDA):
            raise UserError(
                "the JPEG file is corrupt",
                why="a scan, or the end of the image, precedes the frame header",
            )
        else:
            place += 2 + int.from_bytes(content[place + 2 : place + 4], "big")
    raise UserError(
        f"the JPEG file has no frame header in its first {_MAX_SEGMENTS} segments and fill bytes"
    )


def _read_frame(content: bytes, place: int, marker: int) -> ImageHeader:
    try:
        _, bits, height, width, components = _JPEG_FRAME.unpack_from(content, place)
    except struct.error as error:
        raise _build_truncation_error("JPEG") from error
    if marker not in _DECODED_FRAMES or bits != 8 or components not in (1, 3):
        raise UserError(
            "the JPEG file is of a kind that is not decoded",
            why=f"frame C{marker & 15:X}, {bits} bits, {components} components",
            remedy="Save it as baseline or progressive JPEG in RGB or gray, or as PNG.",
        )
    return ImageHeader("JPEG", width, height)


def _build_truncation_error(kind: str) -> UserError:
    return UserError(f"the {kind} file is truncated", why="it ends in its header")


def check_image(content: bytes, limits: ImageLimits) -> ImageHeader:
    """Check an encoded image against the limits, and decode it; return its header.

    Raises:
        UserError: the file has too many bytes, pixels or scans, or no pixels. The same error is
            raised if it is of a kind that is not decoded, or is corrupt or truncated.
    """
    if len(content) > limits.max_bytes:
        raise UserError(f"the image has {len(content)} bytes, and the limit is {limits.max_bytes}")
    header = read_image_header(content)
    if header.width * header.height > limits.max_pixels:
        raise UserError(
            f"the image has {header.width} × {header.height} pixels, "
            f"and the limit is {limits.max_pixels}"
        )
    if header.format == "JPEG" and content.count(_START_OF_SCAN) > _MAX_SCANS:
        raise UserError(f"the JPEG file has more than {_MAX_SCANS} scans")
    _decode(content, header)
    return header


def _decode(content: bytes, header: ImageHeader) -> None:
    """Decode an image with Pillow.

    A JPEG file is decoded at an eighth of its size. The decoder then reads all of the bytes, and
    computes few of the pixels.

    Raises:
        UserError: Pillow cannot decode the image, or its size differs from `header`.
    """
    from PIL.JpegImagePlugin import JpegImageFile
    from PIL.PngImagePlugin import PngImageFile

    # `Image.open` would also apply Pillow's own limit of pixels. The limit is one value for all
    # threads, and `max_pixels` can be higher.
    file_type = PngImageFile if header.format == "PNG" else JpegImageFile
    try:
        with file_type(io.BytesIO(content)) as image:
            if image.size != (header.width, header.height):
                raise ValueError("it has two sizes")
            image.draft(None, (1, 1))
            image.load()
    except Exception as error:  # Pillow raises errors of many types for a corrupt file.
        raise UserError(
            f"the {header.format} file could not be decoded", why=str(error)[:200]
        ) from error
