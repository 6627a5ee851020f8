"""Jitter envelope: what a source that jumps (a tree) answers to inputs that differ by rounding only.

A correct export of a scaler with trees differs from its source in some rows, because a feature rounded otherwise falls
on the other side of a split. Such a row is explained if the source, asked with copies of it jittered by a few times
the rounding of float32, spans the export's answer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from onnx_ops.domain.evidence import ParityMeasurement
from onnx_ops.statistics.parity import LARGEST, epsilon_of, is_float, is_text, measure, ratio_of

AnyArray = npt.NDArray[np.generic]
Floats = npt.NDArray[np.float64]
Tensors = Mapping[str, AnyArray]

JITTER = 2.0**-22
"""Largest relative change of an input, four times the rounding of float32."""

COPIES = 32
"""A split that rounding crosses is crossed by a third of the jittered copies: that all of 32 miss it is no matter."""

_BEYOND = 10.0
"""Error / noise above which a row differs: the parity gate's usual limit."""


def jittered(samples: Tensors, *, seed: int = 0, copies: int = COPIES) -> Tensors:
    """Copies of the rows, floats changed by up to `JITTER` of their size, each element by its own.

    Args:
        samples: inputs by name, axis 0 is the batch of n rows.
        seed: of the draw.
        copies: how many.

    Returns:
        (copies * n, …) by name, copy by copy. Other types than floats are repeated as they are.
    """
    draw = np.random.default_rng(seed)
    found: dict[str, AnyArray] = {}
    for name, array in samples.items():
        many = np.concatenate([array] * copies)
        if array.dtype.kind == "f":
            with np.errstate(over="ignore"):
                many = (many * (1 + draw.uniform(-JITTER, JITTER, many.shape))).astype(array.dtype)
        found[name] = many
    return found


def envelope(answers: Sequence[Tensors]) -> dict[str, AnyArray]:
    """The bounds of several answers to the same rows, by output.

    Args:
        answers: outputs by name, each of shape (n, …).

    Returns:
        Floats: (2, n, …), the least and the largest answer. Everything else: (k, n, …), the different answers, with
        the first one repeated where a row has fewer than k.
    """
    found: dict[str, AnyArray] = {}
    for name, first in answers[0].items():
        stacked = np.stack([answer[name] for answer in answers])
        if is_float(first):
            exact = stacked.astype(np.float64)
            found[name] = np.stack([exact.min(axis=0), exact.max(axis=0)])
        else:
            found[name] = _different(stacked)
    return found


def joined(parts: Sequence[Mapping[str, AnyArray]]) -> dict[str, AnyArray]:
    """Bounds of consecutive parts of the rows as those of all rows.

    Args:
        parts: as `envelope` gives them.
    """
    found: dict[str, AnyArray] = {}
    for name in parts[0]:
        arrays = [part[name] for part in parts]
        most = max(len(array) for array in arrays)
        whole = [np.concatenate([array, *[array[:1]] * (most - len(array))]) for array in arrays]
        found[name] = np.concatenate(whole, axis=1)
    return found


def measure_jumping(
    *, group: str, output: str, onnx: AnyArray, single: AnyArray | None, double: AnyArray | None, bounds: AnyArray
) -> ParityMeasurement:
    """Distance of an export's output from the envelope of a source that jumps.

    Floats: error = max of what lies beyond the bounds; noise as of `parity.measure`, over the rows whose bounds are
    closer together than the noise, since a jump is none. Everything else: error = share of rows with an answer that
    none of the bounds is. Rows that differ from the source's exact answer and lie within the bounds are `explained`.

    Args:
        group: name of the group of inputs.
        output: name of the output.
        onnx: the export's answer (n, …).
        single: the source's answer in float32, if there is one.
        double: the source's answer in float64, if there is one.
        bounds: of this output, as `envelope` gives them.

    Raises:
        MeasurementError: as `parity.measure`.
    """
    plain = measure(group=group, output=output, onnx=onnx, single=single, double=double)
    exact = double if double is not None else single
    if plain.mismatch or exact is None or not onnx.size or bounds.shape[1:] != onnx.shape:
        return plain
    if not (is_float(onnx) or is_float(exact)):
        return _labels(plain, onnx, exact, bounds)
    return _floats(plain, onnx, _as_floats(single, double), bounds.astype(np.float64))


def _floats(plain: ParityMeasurement, answer: AnyArray, answers: Sequence[Floats], bounds: Floats) -> ParityMeasurement:
    onnx, exact = answer.astype(np.float64), answers[0]
    finite = np.isfinite(onnx) & np.isfinite(bounds).all(axis=0)
    for one in answers:
        finite &= np.isfinite(one)
    if not finite.any():
        return plain
    shown = np.where(finite, exact, 0.0)
    noise = 2 * epsilon_of(answer) * float(np.abs(shown).max())
    apart = np.where(finite, bounds[1] - bounds[0], 0.0)
    steady = _by_row(apart, noise * _BEYOND)
    for one in answers[1:]:
        gap = np.abs(np.where(finite, one - exact, 0.0))[steady]
        noise = max(noise, float(gap.max(initial=0.0)))
    beyond = np.where(finite, np.maximum(bounds[0] - onnx, onnx - bounds[1]), 0.0).clip(min=0.0)
    differs = ~_by_row(np.abs(np.where(finite, onnx - exact, 0.0)), noise * _BEYOND)
    outside = ~_by_row(beyond, noise * _BEYOND)
    error = float(beyond.max())
    return replace(
        plain,
        error=min(error, LARGEST),
        noise=min(noise, LARGEST),
        ratio=ratio_of(error, noise),
        tolerance="",
        explained=int((differs & ~outside).sum()),
        unexplained=int(outside.sum()),
    )


def _labels(plain: ParityMeasurement, onnx: AnyArray, exact: AnyArray, bounds: AnyArray) -> ParityMeasurement:
    if is_text(onnx):
        onnx, exact, bounds = (array.astype(np.str_) for array in (onnx, exact, bounds))
    outside = _rows((onnx != bounds).all(axis=0))
    differs = _rows(onnx != exact)
    error = float(outside.mean())
    return replace(
        plain,
        error=error,
        ratio=ratio_of(error, 0.0),
        explained=int((differs & ~outside).sum()),
        unexplained=int(outside.sum()),
    )


def _as_floats(single: AnyArray | None, double: AnyArray | None) -> list[Floats]:
    return [answer.astype(np.float64) for answer in (double, single) if answer is not None]


def _by_row(values: Floats, limit: float) -> npt.NDArray[np.bool_]:
    """Rows of which no value exceeds the limit."""
    return ~_rows(values > limit)


def _rows(wrong: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
    return np.asarray(wrong.reshape(len(wrong), -1).any(axis=1), dtype=np.bool_)


def _different(stacked: AnyArray) -> AnyArray:
    """The different entries along axis 0, place by place, as few as the place with most of them has."""
    if stacked.dtype.kind == "O":
        stacked = stacked.astype(np.str_)
    ordered = np.sort(stacked, axis=0)
    fresh = np.ones(ordered.shape, dtype=bool)
    fresh[1:] = ordered[1:] != ordered[:-1]
    most = int(fresh.sum(axis=0).max(initial=1))
    place = np.argsort(~fresh, axis=0, kind="stable")[:most]
    chosen = np.take_along_axis(ordered, place, axis=0)
    kept = np.take_along_axis(fresh, place, axis=0)
    return np.asarray(np.where(kept, chosen, chosen[:1]))
