"""Which task metrics are measured where no gate asks for one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from onnx_ops.domain.gate import ACCURACY, MetricDefinition
from onnx_ops.pipeline.stages.benchmark import add_default_metric
from onnx_ops.ports import Dataset

RMSE = MetricDefinition(name="rmse")


@pytest.mark.parametrize(
    ("label", "asked", "default"),
    [
        (np.array([1.5, 2.5]), (ACCURACY,), RMSE),
        (np.array([1.0, 2.0]), (ACCURACY,), RMSE),
        (np.array([0, 1]), (ACCURACY,), RMSE),
        (np.array([1.5, 2.5]), (ACCURACY, MetricDefinition(name="mae")), None),
        (np.array(["a", "b"]), (ACCURACY,), None),
        (np.zeros((2, 3)), (ACCURACY,), None),
        (None, (ACCURACY,), None),
    ],
)
def test_labels_that_are_numbers_have_an_error_measured(
    label: Any, asked: tuple[MetricDefinition, ...], default: MetricDefinition | None
) -> None:
    found, added = add_default_metric(asked, Dataset(inputs={"x": np.zeros((2, 1))}, label=label))
    assert added == default
    assert found == (asked if default is None else (*asked, default))
