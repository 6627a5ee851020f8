"""Resize pictures with the filters of common libraries, and identify a filter."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

Floats: TypeAlias = npt.NDArray[np.float64]
Kernel: TypeAlias = Callable[[Floats], Floats]


def _triangle(x: Floats) -> Floats:
    return np.clip(1.0 - np.abs(x), 0.0, None)


def _box(x: Floats) -> Floats:
    return ((x > -0.5) & (x <= 0.5)).astype(np.float64)


def _hamming(x: Floats) -> Floats:
    shape = np.sinc(x) * (0.54 + 0.46 * np.cos(math.pi * x))
    return np.where(np.abs(x) < 1.0, shape, 0.0)


def _cubic(a: float) -> Kernel:
    def compute(x: Floats) -> Floats:
        x = np.abs(x)
        near = ((a + 2.0) * x - (a + 3.0)) * x * x + 1.0
        far = (((x - 5.0) * x + 8.0) * x - 4.0) * a
        return np.where(x < 1.0, near, np.where(x < 2.0, far, 0.0))

    return compute


def _lanczos(x: Floats) -> Floats:
    return np.where(np.abs(x) < 3.0, np.sinc(x) * np.sinc(x / 3.0), 0.0)


KERNELS: Mapping[str, tuple[Kernel, float]] = {
    "box": (_box, 0.5),
    "bilinear": (_triangle, 1.0),
    "hamming": (_hamming, 1.0),
    "bicubic": (_cubic(-0.5), 2.0),
    "lanczos": (_lanczos, 3.0),
}
"""Kernels and their radius, as in Pillow's `Resample.c`."""

PLAIN = {"bilinear": (_triangle, 1.0), "bicubic": (_cubic(-0.75), 2.0)}
"""Kernels and their radius for resizing without antialiasing.

They are those of OpenCV and `torch.nn.functional.interpolate`.
"""

FILTERS = (
    *KERNELS,
    *(f"{name} without antialiasing" for name in PLAIN),
    "nearest",
)


def resize(picture: Floats, size: tuple[int, int], name: str) -> Floats:
    """Resize a picture (height, width, channels) with a filter of `FILTERS`."""
    rows = _build_weights(picture.shape[0], size[0], name)
    columns = _build_weights(picture.shape[1], size[1], name)
    narrow = np.einsum("ow,hwc->hoc", columns, picture, optimize=True)
    return np.asarray(np.einsum("oh,hwc->owc", rows, narrow, optimize=True))


def _build_weights(old: int, new: int, name: str) -> Floats:
    """Return the weight of every old position in every new one."""
    scale = old / new
    centers = ((np.arange(new) + 0.5) * scale).astype(np.float64)
    if name == "nearest":
        weights = np.zeros((new, old))
        weights[np.arange(new), np.minimum(centers.astype(int), old - 1)] = 1.0
        return weights
    if name.endswith("without antialiasing"):
        return _build_plain_weights(old, centers, *PLAIN[name.split(" ", maxsplit=1)[0]])
    kernel, _ = KERNELS[name]
    stretch = max(scale, 1.0)
    positions = np.arange(old) + 0.5
    weights = kernel((positions[None, :] - centers[:, None]) / stretch)
    total: Floats = weights.sum(axis=1, keepdims=True)
    return np.asarray(weights / np.where(total == 0.0, 1.0, total))


def _build_plain_weights(old: int, centers: Floats, kernel: Kernel, radius: float) -> Floats:
    """Return the weights of a kernel without antialiasing.

    Outside the picture, its borders are repeated.
    """
    weights = np.zeros((len(centers), old))
    reach = int(radius)
    for index, center in enumerate(centers - 0.5):
        first = math.floor(center) - reach + 1
        places = np.arange(first, first + 2 * reach)
        np.add.at(weights[index], np.clip(places, 0, old - 1), kernel(places - center))
    return weights


@dataclass(frozen=True, slots=True, kw_only=True)
class ResizeMatch:
    """A way of resizing, its filter, and the mean difference from a picture in levels."""

    way: str
    filter_name: str
    residual: float


def identify_resize(source: npt.NDArray[Any], result: npt.NDArray[Any]) -> ResizeMatch | None:
    """Return the way and the filter that come closest to a resized picture.

    Return None if an array does not have three axes, if the numbers of channels differ, or if a
    picture has over four million values.

    Args:
        source: the (height, width, channels) picture before the step.
        result: the picture after the step, with values of the same scale.
    """
    if source.ndim != 3 or result.ndim != 3 or source.shape[2] != result.shape[2]:
        return None
    if max(source.size, result.size) > 4_000_000:
        return None
    matches = [
        ResizeMatch(
            way=way, filter_name=name, residual=float(np.abs(np.round(made) - result).mean())
        )
        for way, name, made in _make_pictures(
            source.astype(np.float64), result.shape[:2], result.astype(np.float64)
        )
    ]
    return min(matches, key=lambda match: match.residual, default=None)


def _make_pictures(
    source: Floats, size: tuple[int, ...], result: Floats
) -> Iterator[tuple[str, str, Floats]]:
    height, width = size
    low, high = float(source.min()), float(source.max())
    for name in FILTERS:
        yield "stretched", name, np.clip(resize(source, (height, width), name), low, high)
        yield from _make_letterboxed(source, height, width, name, result)
    for shorter in dict.fromkeys((min(height, width), round(min(height, width) * 256 / 224))):
        for name in FILTERS:
            made = _crop_center(_resize_shorter(source, shorter, name), height, width)
            if made is not None:
                way = "resized by its shorter side and cropped at the center"
                yield (f"{way}", name, np.clip(made, low, high))
    made = _crop_center(source, height, width)
    if made is not None:
        yield "cropped at the center without resizing", "", made


def _make_letterboxed(
    source: Floats, height: int, width: int, name: str, result: Floats
) -> Iterator[tuple[str, str, Floats]]:
    ratio = min(height / source.shape[0], width / source.shape[1])
    inner = (max(1, round(source.shape[0] * ratio)), max(1, round(source.shape[1] * ratio)))
    if inner == (height, width):
        return
    small = resize(source, inner, name)
    top, left = (height - inner[0]) // 2, (width - inner[1]) // 2
    corners = {(top, left): "letterboxed", (0, 0): "letterboxed at the top left"}
    for (y, x), way in corners.items():
        # The color of the border is read from the picture, so that a letterbox of any color
        # matches.
        border = result[-1, -1]
        made = np.broadcast_to(border, (height, width, source.shape[2])).copy()
        made[y : y + inner[0], x : x + inner[1]] = small
        yield way, name, made


def _resize_shorter(source: Floats, shorter: int, name: str) -> Floats:
    ratio = shorter / min(source.shape[:2])
    size = (round(source.shape[0] * ratio), round(source.shape[1] * ratio))
    return resize(source, size, name)


def _crop_center(source: Floats, height: int, width: int) -> Floats | None:
    if source.shape[0] < height or source.shape[1] < width:
        return None
    top, left = (source.shape[0] - height) // 2, (source.shape[1] - width) // 2
    return source[top : top + height, left : left + width]
