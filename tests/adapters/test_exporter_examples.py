"""The training functions of the examples: good enough, and the same each time."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from onnx_ops.adapters.data.sklearn import SklearnSource
from onnx_ops.adapters.exporters.sklearn import SklearnExporter
from onnx_ops.adapters.exporters.torch import TorchExporter
from onnx_ops.domain.pipeline import SklearnData
from onnx_ops.ports import Dataset
from tests.adapters.model_runs import reference

HALVES = ("train", "test")


def dataset(split: str, name: str, array: str) -> Dataset:
    arrays = SklearnSource().load(SklearnData(sklearn="digits", split=split), Path())  # type: ignore[arg-type]
    return Dataset(inputs={name: arrays[array]}, label=arrays["target"])


def accuracy(labels: object, test: Dataset) -> float:
    return float(np.mean(np.asarray(labels) == test.label))


def test_the_perceptron_is_right_on_95_of_100_and_the_same_each_time() -> None:
    from examples import digits_mlp

    train, test = (dataset(split, "x", "data") for split in HALVES)
    models = (digits_mlp.train({"train": train}) for _ in range(2))
    answers = [reference(SklearnExporter(), model, test.inputs, "float64") for model in models]
    assert accuracy(answers[0]["label"], test) >= 0.95
    np.testing.assert_array_equal(answers[0]["probabilities"], answers[1]["probabilities"])


@pytest.mark.nightly
def test_the_convolution_is_right_on_95_of_100_and_the_same_each_time() -> None:
    from examples import digits_cnn

    train, test = (dataset(split, "image", "images") for split in HALVES)
    models = (digits_cnn.train({"train": train}) for _ in range(2))
    answers = [reference(TorchExporter(), model, test.inputs) for model in models]
    assert accuracy(answers[0]["output"].argmax(1), test) >= 0.95
    np.testing.assert_array_equal(answers[0]["output"], answers[1]["output"])


@pytest.mark.nightly
def test_another_seed_gives_another_model() -> None:
    from examples import digits_mlp

    train = dataset("train", "x", "data")
    feed = {"x": train.inputs["x"][:8]}
    models = (digits_mlp.train({"train": train}, seed=seed) for seed in (7, 8))
    usual, other = (reference(SklearnExporter(), model, feed, "float64")["probabilities"] for model in models)
    assert not np.array_equal(usual, other)
