"""Data sets that are part of scikit-learn."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from onnx_ops.domain.pipeline import DataSection, SklearnData
from onnx_ops.errors import UserError
from onnx_ops.plugins import require, version
from onnx_ops.ports import DataSource
from onnx_ops.ports.data import Array, Sample

DIGIT_LEVELS = 16.0
"""Highest gray level of a pixel of the digits; images are scaled to [0, 1]."""


_SHAPES = {
    "digits": (64, 10),
    "iris": (4, 3),
    "wine": (13, 3),
    "breast_cancer": (30, 2),
    "diabetes": (10, 0),
}
"""Numbers of features and classes of each data set.

The number of classes is 0 if the target is a quantity.
"""


class SklearnSource(DataSource):
    """Data sets of `sklearn: NAME`: whole, or one side of a split by seed.

    Splits are stratified if the target is a class.

    Arrays: `data` float32 (rows, features), `target` int64 (classes) or float32 (a quantity), and
    for digits `images` float32 (rows, 1, 8, 8) in [0, 1].
    """

    tools = ("scikit-learn",)

    def fingerprint(self, section: DataSection, root: Path) -> str:
        """Return the scikit-learn version, the data set and its split."""
        wanted = _section(section)
        brought = f"scikit-learn {version('scikit-learn')}"
        return f"{brought}: {wanted.sklearn} {wanted.split} {wanted.test_size!r} seed {wanted.seed}"

    def sample(self, section: DataSection, root: Path) -> Sample:
        """Return one row for each class, without importing scikit-learn.

        The features are zeros. If the target is a quantity, the result has one row.
        """
        import numpy as np

        wanted = _section(section)
        features, classes = _SHAPES[wanted.sklearn]
        target = np.arange(classes, dtype=np.int64) if classes else np.zeros(1, np.float32)
        arrays: dict[str, Any] = {
            "data": np.zeros((len(target), features), np.float32),
            "target": target,
        }
        if wanted.sklearn == "digits":
            arrays["images"] = np.zeros((len(target), 1, 8, 8), np.float32)
        return Sample(arrays=arrays, whole=False)

    def load(self, section: DataSection, root: Path) -> Mapping[str, Array]:
        """Load the data set, or one side of its split.

        Raises:
            MissingPackageError: scikit-learn is not installed.
            UserError: the data set cannot be split with this `test_size`.
        """
        wanted = _section(section)
        require(*self.tools, where=f"data `sklearn: {wanted.sklearn}`")
        import numpy as np
        from sklearn import datasets
        from sklearn.model_selection import train_test_split

        bunch = getattr(datasets, f"load_{wanted.sklearn}")()
        classes = bunch.target.dtype.kind in "iu"
        rows = np.arange(len(bunch.target))
        if wanted.split != "all":
            stratify = bunch.target if classes else None
            try:
                sides = train_test_split(
                    rows, test_size=wanted.test_size, random_state=wanted.seed, stratify=stratify
                )
            except ValueError as error:
                raise UserError(
                    f"{wanted.sklearn} cannot be split with test_size {wanted.test_size:g}",
                    where="data",
                    why=str(error),
                    remedy="Change test_size, so that neither set is empty and both contain every "
                    "class.",
                ) from error
            rows = np.sort(sides[0] if wanted.split == "train" else sides[1])
        arrays: dict[str, Any] = {
            "data": bunch.data[rows].astype(np.float32),
            "target": bunch.target[rows].astype(np.int64 if classes else np.float32),
        }
        if wanted.sklearn == "digits":
            arrays["images"] = (bunch.images[rows, None] / DIGIT_LEVELS).astype(np.float32)
        return arrays


def _section(section: DataSection) -> SklearnData:
    if not isinstance(section, SklearnData):
        raise UserError("the data section has no `sklearn: NAME`", where=type(section).__name__)
    return section
