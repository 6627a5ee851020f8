"""Two real server processes.

One serves a model of many types, the other a classifier from scikit-learn.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
import pytest

from tests.serving.serving_process import Server, build_identity_model, serving_model

if TYPE_CHECKING:
    from sklearn.linear_model import LogisticRegression


@pytest.fixture(scope="session")
def types(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Yield a server of a model that returns every input as `<name>_out`."""
    with serving_model(tmp_path_factory.mktemp("types"), build_identity_model()) as server:
        yield server


@pytest.fixture(scope="session")
def classifier() -> tuple[LogisticRegression, np.ndarray]:
    from sklearn.datasets import load_iris
    from sklearn.linear_model import LogisticRegression

    data = load_iris()
    rows = data.data.astype(np.float32)
    return LogisticRegression(max_iter=500).fit(rows, data.target), rows


@pytest.fixture(scope="session")
def iris(
    classifier: tuple[LogisticRegression, np.ndarray], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    from skl2onnx import to_onnx

    model, rows = classifier
    exported = to_onnx(model, rows[:1], options={"zipmap": False}, target_opset=18)
    with serving_model(tmp_path_factory.mktemp("iris"), exported) as server:
        yield server
