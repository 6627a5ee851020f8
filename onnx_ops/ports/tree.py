"""The structure of decision trees, which exporters of trees return."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


@dataclass(frozen=True, slots=True, kw_only=True)
class Tree:
    """One decision tree, its n nodes in preorder.

    A split is followed by its branch up to the threshold, then by the other branch.

    Attributes:
        features: The column that a split compares, int64 of shape (n,); -1 at a leaf.
        thresholds: The largest float32 that still takes the first branch, of shape (n,); 0 at a
            leaf.
        weights: What a leaf adds to each output, float32 of shape (n, outputs); 0 at a split.
    """

    features: npt.NDArray[np.int64]
    thresholds: npt.NDArray[np.float32]
    weights: npt.NDArray[np.float32]
