"""Boosted trees on handwritten digits, with XGBoost."""

from __future__ import annotations

from collections.abc import Mapping

from xgboost import XGBClassifier

from onnx_ops.ports import Dataset


def train(
    data: Mapping[str, Dataset],
    *,
    rounds: int = 40,
    depth: int = 4,
    rate: float = 0.3,
    seed: int = 7,
) -> XGBClassifier:
    """Fit boosted trees on the set `train`."""
    rows = data["train"]
    model = XGBClassifier(
        n_estimators=rounds, max_depth=depth, learning_rate=rate, random_state=seed, n_jobs=1
    )
    return model.fit(rows.inputs["x"], rows.label)
