"""The training functions of the examples: their accuracy and reproducibility."""

from __future__ import annotations

import importlib
from pathlib import Path

import numpy as np
import pytest

from onnx_ops.adapters.data.sklearn import SklearnSource
from onnx_ops.adapters.exporters.signature import Precision
from onnx_ops.adapters.exporters.sklearn import SklearnExporter
from onnx_ops.adapters.exporters.torch import TorchExporter
from onnx_ops.domain.pipeline import SklearnData
from onnx_ops.ports import Dataset
from onnx_ops.ports.export import Exporter
from tests.adapters.model_runs import reference


def dataset(split: str, name: str, array: str) -> Dataset:
    arrays = SklearnSource().load(SklearnData(sklearn="digits", split=split), Path())  # type: ignore[arg-type]
    return Dataset(inputs={name: arrays[array]}, label=arrays["target"])


@pytest.mark.parametrize(
    ("name", "feed", "exporter", "precision"),
    [
        ("digits_mlp", ("x", "data"), SklearnExporter(), "float64"),
        pytest.param(
            "digits_cnn", ("image", "images"), TorchExporter(), "float32", marks=pytest.mark.nightly
        ),
    ],
)
def test_example_training_reaches_accuracy_and_is_reproducible(
    name: str, feed: tuple[str, str], exporter: Exporter, precision: Precision
) -> None:
    example = importlib.import_module(f"examples.{name}")
    train, test = (dataset(split, *feed) for split in ("train", "test"))
    answers = [
        reference(exporter, example.train({"train": train}), test.inputs, precision)
        for _ in range(2)
    ]
    *_, scores = answers[0].values()
    assert np.mean(scores.argmax(1) == test.label) >= 0.95
    np.testing.assert_array_equal(scores, [*answers[1].values()][-1])


@pytest.mark.nightly
def test_example_training_with_other_seed_returns_other_model() -> None:
    from examples import digits_mlp

    train = dataset("train", "x", "data")
    feed = {"x": train.inputs["x"][:8]}
    models = (digits_mlp.train({"train": train}, seed=seed) for seed in (7, 8))
    usual, other = (
        reference(SklearnExporter(), model, feed, "float64")["probabilities"] for model in models
    )
    assert not np.array_equal(usual, other)
