"""Batch invariance: does an answer depend on the other rows that were asked with it?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from onnx_ops.domain.evidence import BatchInvariance
from onnx_ops.statistics.parity import LARGEST, measure
from onnx_ops.statistics.probes import REAL

AnyArray = npt.NDArray[np.generic]
Tensors = Mapping[str, AnyArray]


def batch_invariance(
    batched: Tensors, alone: Sequence[Tensors], noise: Mapping[str, float] | None = None
) -> tuple[BatchInvariance, ...]:
    """How far the rows of one batch are from the same rows asked one by one.

    Floats: the unit of the ratio is the noise of that output, or, without one, a tenth of rtol 1e-3 +
    atol 1e-5 max |answer|. Labels have no noise of their own: where the model has scores too, a label is as far off
    as the scores are, so that a tie is no finding; where it has none, every change counts. A value that is finite on
    one side only is `LARGEST` off.

    Args:
        batched: outputs of one run on n rows, by name.
        alone: outputs of n runs, each on one row, in the same order.
        noise: the source's own rounding noise by output; outputs that are not in it have none.

    Returns:
        One figure for each output that has one entry a row in every run; others say nothing of rows.
    """
    known = noise or {}
    floats: list[BatchInvariance] = []
    labels: list[BatchInvariance] = []
    for name, together in sorted(batched.items()):
        if (single := _stacked(name, together, alone)) is not None:
            kind = floats if together.dtype.kind == "f" else labels
            kind.append(_compared(name, together, single, known.get(name, 0.0)))
    if floats:
        worst = max(m.ratio for m in floats)
        labels = [_as_far(label, worst) for label in labels]
    return tuple(sorted((*floats, *labels), key=lambda m: m.output))


def noises(single: Tensors | None, double: Tensors | None) -> dict[str, float]:
    """The source's rounding noise by float output, from its answers in float32 and float64 to the same rows.

    Empty if it lacks one of the two. The noise is that of parity: max(max |single - double|, 2 eps max |double|).
    """
    if single is None or double is None:
        return {}
    return {
        name: measure(group=REAL, output=name, onnx=array, single=array, double=double[name]).noise
        for name, array in single.items()
        if array.dtype.kind == "f" and name in double
    }


def _stacked(name: str, together: AnyArray, alone: Sequence[Tensors]) -> AnyArray | None:
    rows = [tensors[name] for tensors in alone if name in tensors]
    if not rows or together.ndim == 0 or together.shape[0] != len(alone):
        return None
    if len(rows) != len(alone) or any(row.shape != (1, *together.shape[1:]) for row in rows):
        return None
    return np.concatenate(rows)


def _compared(name: str, together: AnyArray, single: AnyArray, noise: float) -> BatchInvariance:
    # Fixed tolerances, as for a source that has one answer only; the noise then takes their place.
    found = measure(group=REAL, output=name, onnx=together, single=single, double=None)
    error, ratio = found.error, found.ratio
    if found.mismatch:
        error = ratio = LARGEST
    elif together.dtype.kind == "f" and noise > 0:
        error = _largest_difference(together, single)
        ratio = min(error / noise, LARGEST)
    return BatchInvariance(
        output=name, rows=len(single), error=error, ratio=ratio, changed=_changed(together, single, error)
    )


def _largest_difference(together: AnyArray, single: AnyArray) -> float:
    first, second = together.astype(np.float64), single.astype(np.float64)
    finite = np.isfinite(first) & np.isfinite(second)
    return min(float(np.abs(first[finite] - second[finite]).max(initial=0.0)), LARGEST)


def _changed(together: AnyArray, single: AnyArray, error: float) -> float | None:
    if together.dtype.kind != "f":
        return error
    if together.ndim != 2 or together.shape[1] < 2:
        return None
    return float((together.argmax(axis=1) != single.argmax(axis=1)).mean())


def _as_far(label: BatchInvariance, ratio: float) -> BatchInvariance:
    return BatchInvariance(
        output=label.output,
        rows=label.rows,
        error=label.error,
        ratio=min(label.ratio, ratio),
        changed=label.changed,
    )
