"""Boosted trees behind a scaler on the breast cancer set, with LightGBM."""

from __future__ import annotations

from collections.abc import Mapping

from lightgbm import LGBMClassifier
from sklearn.pipeline import Pipeline, make_pipeline
from sklearn.preprocessing import StandardScaler

from onnx_ops.ports import Dataset


def train(
    data: Mapping[str, Dataset], *, rounds: int = 40, leaves: int = 15, seed: int = 7
) -> Pipeline:
    """Fit a scaler and boosted trees on the set `train`."""
    rows = data["train"]
    trees = LGBMClassifier(
        n_estimators=rounds,
        num_leaves=leaves,
        random_state=seed,
        n_jobs=1,
        deterministic=True,
        verbose=-1,
    )
    return make_pipeline(StandardScaler(), trees).fit(rows.inputs["x"], rows.label)
