"""A small perceptron on handwritten digits, with scikit-learn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sklearn.neural_network import MLPClassifier
from sklearn.pipeline import Pipeline, make_pipeline
from sklearn.preprocessing import StandardScaler

from onnx_ops.ports import Dataset


def train(
    data: Mapping[str, Dataset],
    *,
    hidden: Sequence[int] = (64,),
    seed: int = 7,
    max_iter: int = 200,
    learning_rate: float = 0.001,
) -> Pipeline:
    """Fit a scaler and a multi-layer perceptron on the set `train`."""
    rows = data["train"]
    network = MLPClassifier(
        hidden_layer_sizes=tuple(hidden),
        max_iter=max_iter,
        learning_rate_init=learning_rate,
        random_state=seed,
        early_stopping=False,
        tol=1e-3,
    )
    return make_pipeline(StandardScaler(), network).fit(rows.inputs["x"], rows.label)
