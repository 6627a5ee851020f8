"""Write arrays as PNG pictures, without a library for pictures."""

from __future__ import annotations

import base64
import struct
import zlib
from typing import Any

import numpy as np
import numpy.typing as npt

Pixels = npt.NDArray[np.uint8]

_LARGEST = 480
"""Largest height and width of a picture in a report; larger ones are subsampled."""


def encode_png(pixels: Pixels) -> bytes:
    """Return a PNG file of a (height, width, 3) picture."""
    height, width = pixels.shape[:2]
    lines = np.zeros((height, 1 + 3 * width), dtype=np.uint8)
    lines[:, 1:] = pixels.reshape(height, -1)
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    parts = ((b"IHDR", header), (b"IDAT", zlib.compress(lines.tobytes(), 6)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(_write_chunk(*part) for part in parts)


def _write_chunk(kind: bytes, content: bytes) -> bytes:
    check = zlib.crc32(kind + content)
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", check)


def make_data_uri(pixels: Pixels) -> str:
    """Return a picture as a URI that a page can contain."""
    step = max(1, -(-max(pixels.shape[:2]) // _LARGEST))
    encoded = base64.b64encode(encode_png(np.ascontiguousarray(pixels[::step, ::step])))
    return f"data:image/png;base64,{encoded.decode()}"


def read_picture(value: Any) -> npt.NDArray[np.float64] | None:
    """Return a value as a (height, width, 3) array; None if it is not a picture."""
    if not isinstance(value, np.ndarray) or value.dtype.kind not in "biuf":
        return None
    array = value
    while array.ndim > 3 and array.shape[0] == 1:
        array = array[0]
    if array.ndim == 3 and array.shape[2] not in (1, 3, 4) and array.shape[0] in (1, 3, 4):
        array = array.transpose(1, 2, 0)
    if array.ndim == 2:
        array = array[..., None]
    if array.ndim != 3 or array.shape[2] not in (1, 3, 4) or min(array.shape[:2]) < 4:
        return None
    colors = np.nan_to_num(array[..., :3].astype(np.float64))
    return np.repeat(colors, 3, axis=2) if colors.shape[2] == 1 else colors


def scale_picture(picture: npt.NDArray[np.float64], low: float, high: float) -> Pixels:
    """Return a picture with its values from `low` to `high` as levels from 0 to 255."""
    scaled = (picture - low) * (255.0 / ((high - low) or 1.0))
    return np.clip(np.round(scaled), 0, 255).astype(np.uint8)
