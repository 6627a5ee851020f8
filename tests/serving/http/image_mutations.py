"""Damaged encoded images, and requests that contain them."""

from __future__ import annotations

import json
import random
import struct
import zlib
from base64 import b64encode
from collections.abc import Callable

from tests.support.images import draw_pixels, encode_image

_SIZES = (0, 1, 2, 65_535, 65_536, 1 << 31, (1 << 32) - 1)


def _encode_all() -> tuple[bytes, ...]:
    pixels = draw_pixels(24, 40)
    return (
        encode_image(pixels),
        encode_image(pixels, mode="P"),
        encode_image(pixels, mode="RGBA"),
        encode_image(pixels, mode="1"),
        encode_image(pixels, "JPEG"),
        encode_image(pixels, "JPEG", progressive=True),
        encode_image(pixels, "JPEG", mode="L"),
        encode_image(pixels, "JPEG", subsampling=0, restart_marker_blocks=2),
    )


VALID = _encode_all()
_OTHERS = tuple(
    encode_image(draw_pixels(8, 8), kind) for kind in ("GIF", "BMP", "TIFF", "WEBP", "PPM")
)


def chunk(name: bytes, data: bytes) -> bytes:
    """Return a chunk of a PNG file."""
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def build_png(width: int, height: int, data: bytes, *extra: bytes) -> bytes:
    """Return a PNG file that announces a size and contains this compressed data."""
    header = struct.pack(">IIBBBBB", width % 2**32, height % 2**32, 8, 2, 0, 0, 0)
    parts = (chunk(b"IHDR", header), *extra, chunk(b"IDAT", data), chunk(b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def _truncate(draw: random.Random, content: bytes) -> bytes:
    return content[: draw.randrange(len(content))]


def _change_bytes(draw: random.Random, content: bytes) -> bytes:
    changed = bytearray(content)
    for _ in range(draw.choice((1, 1, 2, 5, 30))):
        changed[draw.randrange(min(len(changed), draw.choice((60, 700, 1 << 20))))] = draw.choice(
            (0, 1, 255, draw.randrange(256))
        )
    return bytes(changed)


def _move_bytes(draw: random.Random, content: bytes) -> bytes:
    start, size, place = (draw.randrange(len(content)) for _ in range(3))
    part = content[start : start + size % 64]
    rest = content[:start] + content[start + len(part) :]
    return rest[:place] + part + rest[place:] if draw.random() < 0.5 else rest


def _change_size(draw: random.Random, content: bytes) -> bytes:
    """Announce another size in the header, with a valid checksum."""
    width, height = draw.choice(_SIZES), draw.choice((*_SIZES, 40))
    if content.startswith(b"\x89PNG"):
        header = struct.pack(">II", width % 2**32, height % 2**32) + content[24:29]
        return content[:8] + chunk(b"IHDR", header) + content[33:]
    frame = max(content.find(b"\xff\xc0"), content.find(b"\xff\xc2"))
    return (
        content[: frame + 5]
        + struct.pack(">HH", height % 65536, width % 65536)
        + content[frame + 9 :]
    )


def _exchange_marker(draw: random.Random, content: bytes) -> bytes:
    """Replace a marker of a JPEG file by another one."""
    places = [place for place in range(len(content) - 1) if content[place] == 0xFF]
    place = draw.choice(places or [0])
    return content[: place + 1] + bytes([draw.randrange(256)]) + content[place + 2 :]


def _repeat_scans(draw: random.Random, content: bytes) -> bytes:
    """Append scans without data to a JPEG file."""
    scan = content[content.rfind(b"\xff\xda") : -2][:14] or b"\xff\xda"
    return content[:-2] + scan * draw.choice((3, 100, 5000)) + content[-2:]


def _bomb(draw: random.Random, _: bytes) -> bytes:
    """Return a PNG file of few bytes whose data inflates to many."""
    size = draw.choice((1000, 4000, 20_000, 60_000))
    rows = min(size, 2000)
    data = zlib.compress(bytes(rows * (3 * size + 1)), 9)
    text = zlib.compress(bytes(1 << 24), 9)
    extra = draw.choice(
        ((), (chunk(b"zTXt", b"a\0\0" + text),), (chunk(b"iCCP", b"a\0\0" + text),))
    )
    return build_png(size, draw.choice((size, rows)), data, *extra)


def _invent(draw: random.Random, _: bytes) -> bytes:
    start = draw.choice((b"", b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff", b"GIF89a", b"RIFF"))
    return start + draw.randbytes(draw.choice((0, 1, 10, 200)))


_MUTATIONS: tuple[Callable[[random.Random, bytes], bytes], ...] = (
    *(_truncate, _truncate, _change_bytes, _change_bytes, _change_bytes, _move_bytes),
    *(_change_size, _exchange_marker, _exchange_marker, _repeat_scans, _bomb, _invent),
    lambda draw, _: draw.choice(_OTHERS),
    lambda _, content: content,
)


def mutate_image(draw: random.Random) -> bytes:
    """Return a damaged image, or a valid one in some cases."""
    return draw.choice(_MUTATIONS)(draw, draw.choice(VALID))


def build_image_request(draw: random.Random) -> tuple[bytes, dict[str, str]]:
    """Return body and headers of a request with one to three images."""
    images = [mutate_image(draw) for _ in range(draw.choice((1, 1, 2, 3)))]
    form = draw.choice(("json", "binary", "raw"))
    if form == "raw":
        return images[0], {"inference-header-content-length": "0"}
    tensor = {"name": "image", "datatype": "BYTES", "shape": [len(images)]}
    if form == "json":
        data = [b64encode(image).decode() for image in images]
        return json.dumps({"inputs": [tensor | {"data": data}]}).encode(), {}
    tail = b"".join(struct.pack("<I", len(image)) + image for image in images)
    parameters = {"binary_data_size": len(tail)}
    header = json.dumps({"inputs": [tensor | {"parameters": parameters}]}).encode()
    return header + tail, {"inference-header-content-length": str(len(header))}
