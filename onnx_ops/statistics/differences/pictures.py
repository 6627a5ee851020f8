"""Explain the difference of two arrays: layout, channels, geometry, scale, size."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from onnx_ops.statistics.differences.resampling import ResizeMatch, identify_resize

Floats: TypeAlias = npt.NDArray[np.float64]

_LARGEST = 600_000
"""Number of elements that limits the search.

Arrays above this size are not tried for softmax and sigmoid. Arrays of at least twice this size are
subsampled for lines that fit all channels. Crops are searched in arrays of up to four times this
size.
"""
_EXPLAINED = 0.2
"""Share of the difference that can remain after a shift that explains it.

For other changes, the weighted share (see `_search_hypotheses`) can be twice as large.
"""
_SHIFTS = 24
"""Maximum number of rows or columns of a shift that is searched for."""
_SCALES = (255.0, 256.0, 127.5, 32768.0, 32767.0)
"""Usual divisors of pixels and sound samples."""

_LAYOUTS = {
    (2, 0, 1): "layout: the source has channels first (CHW), the candidate last (HWC)",
    (1, 2, 0): "layout: the source has channels last (HWC), the candidate first (CHW)",
    (1, 0, 2): "layout: height and width are swapped",
    (0, 2, 1): "layout: height and width are swapped",
}
_GEOMETRY = (
    "",
    "flipped left to right",
    "flipped upside down",
    "rotated by 180°",
    "rotated clockwise",
    "rotated counterclockwise",
    "mirrored at the diagonal",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Hypothesis:
    """Changes of the candidate's value by name, and the changed value."""

    parts: tuple[str, ...]
    value: Floats


def explain_arrays(
    reference: npt.NDArray[Any], value: npt.NDArray[Any], source: npt.NDArray[Any] | None = None
) -> str:
    """Return how the candidate's array differs from the reference; empty if unclear.

    Args:
        source: the reference's value before the step, if it is an array.
    """
    expected, given = _without_batch(reference), _without_batch(value)
    if expected.dtype.kind not in "biuf" or given.dtype.kind not in "biuf":
        return ""
    resized = _explain_resize(expected, given, source)
    if resized:
        return resized
    left, right = (
        np.nan_to_num(expected.astype(np.float64)),
        np.nan_to_num(given.astype(np.float64)),
    )
    if found := _search_hypotheses(left, right):
        return found
    if left.shape != right.shape:
        return _explain_shape(left, right)
    return _explain_crop(left, right) or _explain_borders(left, right) or _explain_rest(left, right)


def _without_batch(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    while array.ndim > 3 and array.shape[0] == 1:
        array = array[0]
    return array


def find_channel_axis(shape: tuple[int, ...]) -> int | None:
    """Return the axis of the colors of a picture; None if it has none."""
    if len(shape) != 3:
        return None
    sizes = [axis for axis in (2, 0) if shape[axis] in (1, 3, 4)]
    return sizes[0] if sizes else None


def _search_hypotheses(left: Floats, right: Floats) -> str:
    """Return the simplest change that makes the arrays about equal; empty without one.

    `left` is the reference, and `right` is the candidate's array, which is changed.
    """
    best: tuple[float, tuple[str, ...]] | None = None
    spread = float(np.abs(left - left.mean()).mean()) or 1.0
    for hypothesis in _list_hypotheses(right, left.shape):
        for parts, residual in _fit_values(left, hypothesis.value):
            found = (*hypothesis.parts, *parts)
            # Each further part must reduce the residual by a factor of more than 1.5, or the
            # simpler hypothesis is kept.
            cost = len(found) + sum("by channel" in part for part in found)
            score = residual / spread * 1.5**cost + 1e-4 * cost
            if found and (best is None or score < best[0]):
                best = (score, found)
            if not found:
                spread = min(spread, max(residual, 1e-12))
    if best is None:
        return ""
    return "; ".join(best[1]) if best[0] < _EXPLAINED * 2 else ""


def _list_hypotheses(right: Floats, shape: tuple[int, ...]) -> Iterator[_Hypothesis]:
    for layout, laid in _list_layouts(right, shape):
        for order, colored in _list_channel_orders(laid):
            for geometry, placed in _list_geometries(colored, shape):
                if placed.shape == shape:
                    parts = tuple(part for part in (layout, order, geometry) if part)
                    yield _Hypothesis(parts=parts, value=placed)


def _list_layouts(right: Floats, shape: tuple[int, ...]) -> Iterator[tuple[str, Floats]]:
    yield "", right
    if right.ndim == len(shape) == 3:
        for axes, name in _LAYOUTS.items():
            moved = right.transpose(axes)
            if moved.shape == shape and (right.shape != shape or axes == (1, 0, 2)):
                yield name, moved
    elif right.size == int(np.prod(shape)) and right.ndim != len(shape):
        yield f"shape: {right.shape} instead of {shape}", right.reshape(shape)


def _list_channel_orders(array: Floats) -> Iterator[tuple[str, Floats]]:
    yield "", array
    axis = find_channel_axis(array.shape)
    if axis is None or array.shape[axis] < 3:
        return
    rest = tuple(range(3, array.shape[axis]))
    for order in itertools.permutations(range(3)):
        if order == (0, 1, 2):
            continue
        name = "RGB and BGR are swapped" if order == (2, 1, 0) else f"channels are in order {order}"
        yield f"channel order: {name}", np.take(array, (*order, *rest), axis=axis)


def _list_geometries(array: Floats, shape: tuple[int, ...]) -> Iterator[tuple[str, Floats]]:
    if array.ndim not in (2, 3):
        yield "", array
        return
    channel = find_channel_axis(array.shape)
    up, across = [axis for axis in range(array.ndim) if axis != channel][:2]
    moved = (
        array,
        np.flip(array, across),
        np.flip(array, up),
        np.flip(array, (up, across)),
        np.rot90(array, 1, (up, across)),
        np.rot90(array, 3, (up, across)),
        np.swapaxes(array, up, across),
    )
    for name, made in zip(_GEOMETRY, moved, strict=True):
        if made.shape == shape:
            yield f"geometry: the candidate's picture is {name}" if name else "", made


def _fit_values(left: Floats, right: Floats) -> Iterator[tuple[tuple[str, ...], float]]:
    """Yield changes of values and the mean difference that remains."""
    step = max(1, left.size // _LARGEST)
    a, b = left.reshape(-1)[::step], right.reshape(-1)[::step]
    yield (), float(np.abs(a - b).mean())
    yield from _fit_functions(left, right)
    # A line fits three or fewer values too easily, and equal values define no line.
    if b.size < 4 or float(np.std(b)) == 0.0:
        return
    gain, offset = _fit_line(b, a)
    if name := _name_line(gain, offset, float(np.abs(a).max())):
        yield (name,), float(np.abs(a - gain * b - offset).mean())
    channel = find_channel_axis(left.shape)
    if channel is not None and left.shape[channel] > 1:
        yield _fit_channels(np.moveaxis(left, channel, 0), np.moveaxis(right, channel, 0))


def _fit_line(x: Floats, y: Floats) -> tuple[float, float]:
    variance = float(np.var(x))
    if variance == 0.0:
        return 1.0, 0.0
    gain = float(((x - x.mean()) * (y - y.mean())).mean()) / variance
    return gain, float(y.mean() - gain * x.mean())


def _name_line(gain: float, offset: float, largest: float) -> str:
    """Return the name of a scale and an offset; empty if they change nothing."""
    if gain <= 0.0:
        return f"values: source = {gain:.4g} x candidate + {offset:.4g}"
    is_shifted = abs(offset) > 1e-3 * (largest or 1.0)
    divided, other = ("candidate", "source") if gain > 1.0 else ("source", "candidate")
    ratio = max(gain, 1.0 / gain)
    scale = min(_SCALES, key=lambda scale: abs(ratio / scale - 1.0))
    if abs(ratio / scale - 1.0) < 0.01:
        side = f"scale: the {divided} divides by {scale:g}, the {other} does not"
        return f"{side}; offset {offset:.4g}" if is_shifted else side
    if abs(gain - 1.0) < 1e-4:
        return f"offset: source = candidate + {offset:.4g}" if is_shifted else ""
    text = f"scale: source = {gain:.5g} x candidate"
    return f"{text} + {offset:.4g} (another mean or scale)" if is_shifted else text


def _fit_channels(left: Floats, right: Floats) -> tuple[tuple[str, ...], float]:
    """Return the line that fits each channel, and the mean difference that remains.

    Another mean or standard deviation in a normalization causes such lines.
    """
    lines = [_fit_line(x.reshape(-1), y.reshape(-1)) for x, y in zip(right, left, strict=True)]
    residual = float(
        np.mean(
            [
                np.abs(y - gain * x - offset).mean()
                for x, y, (gain, offset) in zip(right, left, lines, strict=True)
            ]
        )
    )
    shown = ", ".join(f"{gain:.4g} x candidate + {offset:.4g}" for gain, offset in lines)
    return (f"mean or standard deviation: by channel, source = {shown}",), residual


def _fit_functions(left: Floats, right: Floats) -> Iterator[tuple[tuple[str, ...], float]]:
    """Yield softmax and sigmoid of each side, and the mean difference that remains."""
    for name, made, other in (
        ("the source applies it, the candidate does not", right, left),
        ("the candidate applies it, the source does not", left, right),
    ):
        if made.size > _LARGEST or made.ndim == 0:
            continue
        shifted = np.exp(np.clip(made - made.max(axis=-1, keepdims=True), -700, 0))
        soft = shifted / shifted.sum(axis=-1, keepdims=True)
        yield (f"softmax: {name}",), float(np.abs(soft - other).mean())
        sigmoid = 1.0 / (1.0 + np.exp(-np.clip(made, -700, 700)))
        yield (f"sigmoid: {name}",), float(np.abs(sigmoid - other).mean())


def _explain_resize(
    expected: npt.NDArray[Any], given: npt.NDArray[Any], source: npt.NDArray[Any] | None
) -> str:
    """Return how the two sides resize the picture `source`, if they differ.

    The text is empty if both resize alike, or if a way of resizing is not identified.
    """
    if source is None or source.dtype != np.uint8 or find_channel_axis(source.shape) != 2:
        return ""
    if expected.ndim != 3 or given.ndim != 3 or expected.shape[:2] == source.shape[:2]:
        return ""
    ours, theirs = identify_resize(source, expected), identify_resize(source, given)
    if ours is None or theirs is None or max(ours.residual, theirs.residual) > 1.0:
        return ""
    if ours.way != theirs.way:
        return f"resizing: the source's picture is {ours.way}, the candidate's {theirs.way}"
    if ours.filter_name != theirs.filter_name:
        return f"resize filter: the source uses {_name(ours)}, the candidate {_name(theirs)}"
    return ""


def _name(match: ResizeMatch) -> str:
    return match.filter_name or "none"


def _explain_shape(left: Floats, right: Floats) -> str:
    if left.ndim == right.ndim == 1 and min(left.size, right.size) >= 16:
        return _explain_length(left, right)
    channels = _count_channels(left.shape), _count_channels(right.shape)
    if None in channels or channels[0] == channels[1]:
        return f"size: {right.shape} instead of {left.shape}"
    if 1 in channels:
        return f"channels: the {'source' if channels[0] == 1 else 'candidate'}'s picture is grey"
    return f"channels: {right.shape} instead of {left.shape}"


def _count_channels(shape: tuple[int, ...]) -> int | None:
    """Return the number of colors of a picture; None if the array is no picture."""
    axis = find_channel_axis(shape)
    return shape[axis] if axis is not None else 1 if len(shape) == 2 else None


def _explain_length(left: Floats, right: Floats) -> str:
    """Return the sample rates that fit the lengths of two signals, or both lengths."""
    rates = (8000, 11025, 16000, 22050, 24000, 32000, 44100, 48000)
    ratio = right.size / left.size
    pairs = [(a, b) for a in rates for b in rates if a != b and abs(ratio * a / b - 1.0) < 2e-3]
    if pairs:
        shown = " or ".join(f"{b} Hz instead of {a} Hz" for a, b in pairs[:2])
        return f"sample rate: the lengths fit {shown}"
    shorter = min(left.size, right.size)
    if np.allclose(left[:shorter], right[:shorter], rtol=1e-3, atol=1e-6):
        return (
            f"length: {right.size} instead of {left.size} values; the first {shorter} values agree"
        )
    return f"length: {right.size} instead of {left.size} values"


def _explain_crop(left: Floats, right: Floats) -> str:
    """Return the shift that makes two pictures about equal; empty without one.

    Only the overlap of the shifted pictures is compared.
    """
    if left.ndim not in (2, 3) or left.size > _LARGEST * 4:
        return ""
    channel = find_channel_axis(left.shape)
    if channel is not None:
        left, right = left.mean(axis=channel), right.mean(axis=channel)
    if left.ndim != 2 or min(left.shape) < 8:
        return ""
    before = float(np.abs(left - right).mean())
    reach = min(_SHIFTS, min(left.shape) // 3)
    best = (before, 0, 0)
    for down, across in _list_shifts(left, right, reach):
        residual = float(np.abs(_cut(left, down, across) - _cut(right, -down, -across)).mean())
        best = min(best, (residual, down, across))
    if best[0] > _EXPLAINED * before or best[1:] == (0, 0):
        return ""
    shifts = [
        f"{abs(shift)} {noun}{'s' if abs(shift) != 1 else ''} {later if shift > 0 else earlier}"
        for shift, noun, later, earlier in (
            (best[1], "row", "lower", "higher"),
            (best[2], "column", "further right", "further left"),
        )
        if shift
    ]
    return f"crop: the candidate's crop begins {' and '.join(shifts)}"


def _list_shifts(left: Floats, right: Floats, reach: int) -> Iterator[tuple[int, int]]:
    """Yield the 12 shifts with the highest phase correlation that are within `reach`.

    Kuglin and Hines 1975, Proc. IEEE Int. Conf. on Cybernetics and Society, 163-165.
    """
    spectrum = np.fft.fft2(left - left.mean()) * np.conj(np.fft.fft2(right - right.mean()))
    correlation = np.real(np.fft.ifft2(spectrum / np.maximum(np.abs(spectrum), 1e-12)))
    for flat in np.argsort(correlation, axis=None)[::-1][:12]:
        down, across = (int(part) for part in np.unravel_index(int(flat), left.shape))
        down = down - left.shape[0] if down > left.shape[0] // 2 else down
        across = across - left.shape[1] if across > left.shape[1] // 2 else across
        if max(abs(down), abs(across)) <= reach:
            yield down, across


def _cut(array: Floats, down: int, across: int) -> Floats:
    """Return the part that remains after a shift by whole rows and columns."""
    height, width = array.shape
    rows = slice(max(0, down), height + min(0, down))
    return array[rows, slice(max(0, across), width + min(0, across))]


def _explain_borders(left: Floats, right: Floats) -> str:
    """Return which picture has wider borders of one color; empty without a difference."""
    borders = [_measure_borders(array) for array in (left, right)]
    if max(borders) < 0.04 or abs(borders[0] - borders[1]) < 0.03:
        return ""
    who = ("source", "candidate") if borders[0] > borders[1] else ("candidate", "source")
    return f"resizing: the {who[0]}'s picture is letterboxed, the {who[1]}'s stretched or cropped"


def _measure_borders(array: Floats) -> float:
    """Return the share of rows or columns at a picture's ends that have one color.

    It is the larger of the two shares.
    """
    channel = find_channel_axis(array.shape)
    picture = np.moveaxis(array, channel, -1) if channel is not None else array[..., None]
    if picture.ndim != 3:
        return 0.0
    shares = []
    for axis in (0, 1):
        flat = np.moveaxis(picture, axis, 0)
        constant = (np.ptp(flat, axis=1) == 0.0).all(axis=-1)
        first = int(np.argmin(constant)) if not constant.all() else 0
        last = int(np.argmin(constant[::-1])) if not constant.all() else 0
        shares.append((first + last) / len(constant))
    return max(shares)


def _explain_rest(left: Floats, right: Floats) -> str:
    """Return which picture is sharper, as after another filter; empty if unclear.

    Similar pictures of about equal sharpness are described as different in detail.
    """
    channel = find_channel_axis(left.shape)
    if channel is None or left.size < 192:
        return ""
    axis = 1 if channel == 0 else 0
    sharpness = [float(np.abs(np.diff(array, n=2, axis=axis)).mean()) for array in (left, right)]
    correlation = float(np.corrcoef(left.reshape(-1), right.reshape(-1))[0, 1])
    if not correlation > 0.9 or min(sharpness) == 0.0:
        return ""
    ratio = sharpness[1] / sharpness[0]
    if 0.97 < ratio < 1.03:
        return "values: the pictures are similar, but differ in detail"
    side = "sharper" if ratio > 1 else "smoother"
    return f"resize filter: the candidate's picture is {side} (another filter or antialiasing)"
