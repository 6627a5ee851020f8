"""ONNX Runtime's int8 matrix products, in NumPy.

They are exact, or computed as x86 without VNNI computes them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

_ENDS = np.iinfo(np.int16)


def multiply(
    activations: npt.NDArray[Any], weights: npt.NDArray[Any], *, saturates: bool
) -> npt.NDArray[np.int32]:
    """Multiply uint8 activations (rows, inner) by int8 weights (inner, columns).

    With `saturates`, neighbouring products are added in pairs, and each sum saturates at 16 bits
    (`vpmaddubsw`).
    """
    if not saturates:
        return activations.astype(np.int32) @ weights.astype(np.int32)
    if len(weights) % 2:
        activations, weights = (
            np.pad(activations, ((0, 0), (0, 1))),
            np.pad(weights, ((0, 1), (0, 0))),
        )
    products = activations.astype(np.int32)[:, :, None] * weights.astype(np.int32)[None]
    pairs = products[:, ::2] + products[:, 1::2]
    return np.asarray(np.clip(pairs, _ENDS.min, _ENDS.max).sum(axis=1, dtype=np.int32))
