"""Checks of encoded images before a model decodes them."""

from __future__ import annotations

import struct
import zlib

import PIL.Image
import pytest

from onnx_ops.errors import UserError
from onnx_ops.protocol.images import (
    SAMPLE_IMAGE,
    ImageHeader,
    ImageLimits,
    check_image,
    read_image_header,
)
from tests.support.images import draw_pixels, encode_image

LIMITS = ImageLimits(max_bytes=4096, max_pixels=1000)
PIXELS = draw_pixels(12, 20)


def build_png(width: int, height: int) -> bytes:
    """Return a PNG file that announces a size and contains no pixels."""

    def chunk(name: bytes, data: bytes) -> bytes:
        checksum = struct.pack(">I", zlib.crc32(name + data))
        return struct.pack(">I", len(data)) + name + data + checksum

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    parts = chunk(b"IHDR", header), chunk(b"IDAT", zlib.compress(b"")), chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


@pytest.mark.parametrize(
    ("content", "kind"),
    [
        (encode_image(PIXELS), "PNG"),
        (encode_image(PIXELS, mode="P"), "PNG"),
        (encode_image(PIXELS, mode="RGBA"), "PNG"),
        (encode_image(PIXELS, "JPEG"), "JPEG"),
        (encode_image(PIXELS, "JPEG", progressive=True), "JPEG"),
        (encode_image(PIXELS, "JPEG", mode="L"), "JPEG"),
        (encode_image(PIXELS, "JPEG", comment=b"c" * 300, dpi=(72, 72)), "JPEG"),
    ],
    ids=["png", "palette", "alpha", "jpeg", "progressive", "gray", "comment"],
)
def test_check_image_within_limits_returns_header(content: bytes, kind: str) -> None:
    assert check_image(content, LIMITS) == ImageHeader(kind, 20, 12)


@pytest.mark.parametrize("kind", ["PNG", "JPEG"])
def test_check_image_above_pixel_limit_of_pillow_returns_header(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PIL.Image, "MAX_IMAGE_PIXELS", 100)
    assert check_image(encode_image(PIXELS, kind), LIMITS) == ImageHeader(kind, 20, 12)


def test_sample_image_is_png_of_one_pixel() -> None:
    assert check_image(SAMPLE_IMAGE, LIMITS) == ImageHeader("PNG", 1, 1)


JPEG = encode_image(PIXELS, "JPEG")
FRAME = JPEG.index(b"\xff\xc0")
SECOND_FRAME = JPEG[FRAME : FRAME + 5] + struct.pack(">HH", 60_000, 60_000) + JPEG[FRAME + 9 :]
SECOND_HEADER = build_png(60_000, 60_000)[8:33]


@pytest.mark.parametrize(
    ("content", "cause"),
    [
        (b"", "neither PNG nor JPEG"),
        (b"hello world", "neither PNG nor JPEG"),
        (encode_image(PIXELS, "GIF"), "neither PNG nor JPEG"),
        (encode_image(PIXELS, "WEBP"), "neither PNG nor JPEG"),
        (encode_image(PIXELS, "BMP"), "neither PNG nor JPEG"),
        (build_png(20, 12)[:18], "truncated"),
        (encode_image(PIXELS)[:-60], "could not be decoded"),
        (build_png(20, 12), "could not be decoded"),
        (build_png(0, 12), "0 × 12 pixels"),
        (build_png(60_000, 60_000), "60000 × 60000 pixels"),
        (build_png(20, 12)[:33] + SECOND_HEADER + build_png(20, 12)[33:], "it has two sizes"),
        (JPEG[:3], "truncated"),
        (JPEG[:FRAME], "truncated"),
        (JPEG[: FRAME + 6], "truncated"),
        (JPEG[: FRAME + 19] + SECOND_FRAME, "it has two sizes"),
        (JPEG[:-80], "could not be decoded"),
        (JPEG[:2] + b"\x00" + JPEG[2:], "neither PNG nor JPEG"),
        (JPEG[:FRAME] + b"\x00" + JPEG[FRAME:], "no marker is at byte"),
        (JPEG[:FRAME] + b"\xff\xc3" + JPEG[FRAME + 2 :], "a kind that is not decoded"),
        (encode_image(PIXELS, "JPEG", mode="CMYK"), "a kind that is not decoded"),
        (JPEG[:2] + b"\xff" * 5000 + JPEG[2:], "bytes, and the limit is 4096"),
        (JPEG + b"\xff\xda" * 200, "scans"),
        (JPEG + b"\0" * 5000, "bytes, and the limit is 4096"),
    ],
)
def test_check_image_of_undecodable_or_over_limit_image_raises_user_error_with_cause(
    content: bytes, cause: str
) -> None:
    with pytest.raises(UserError) as caught:
        check_image(content, LIMITS)
    assert cause in str(caught.value)


def test_read_image_header_with_many_fill_bytes_raises_user_error() -> None:
    with pytest.raises(UserError, match="segments"):
        read_image_header(JPEG[:2] + b"\xff" * 10_000 + JPEG[2:])
