"""Slices of scored rows: columns that can be slices, storage, and metrics of each slice."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from onnx_ops.adapters.runtimes.onnxruntime import OnnxRuntime
from onnx_ops.domain.gate import ACCURACY, MetricDefinition
from onnx_ops.domain.target import Target
from onnx_ops.errors import UserError
from onnx_ops.measure.scoring import ScoringRequest, measure_metrics
from onnx_ops.measure.slices import (
    SlicePlan,
    find_slice_problem,
    get_slicings,
    make_slicings,
    put_slicings,
)
from onnx_ops.ports import Dataset
from onnx_ops.statistics.scores import CANDIDATE
from onnx_ops.statistics.slices import make_slicing
from onnx_ops.testing.fakes import FakeWorld
from onnx_ops.testing.models import CLASSES, rows, write_perceptron
from tests.support.pairs import write_changed

ROWS = 120
TARGET = Target(name="cpu")
COLUMNS: dict[str, Any] = {
    "country": np.array(["DE", "AT", ""] * 40),
    "id": np.arange(ROWS),
    "matrix": np.zeros((ROWS, 2)),
    "short": np.array(["a"] * 10),
    "part": np.arange(ROWS) % 30,
}


@pytest.mark.parametrize(
    ("by", "what"),
    [
        ("contry", "there is no column 'contry'"),
        ("matrix", "must have one value per row"),
        ("short", "has 10 values, and the scored data set has 120 rows"),
        ("country*contry", "there is no column 'contry'"),
    ],
)
def test_make_slicings_of_wrong_column_raises_user_error(by: str, what: str) -> None:
    with pytest.raises(UserError, match=what):
        make_slicings([by], COLUMNS, ROWS, where="slices")


def test_find_slice_problem_of_unknown_column_suggests_similar_name() -> None:
    problem = find_slice_problem("contry", COLUMNS, ROWS)
    assert problem is not None
    assert "'country'" in problem.remedy


def test_find_slice_problem_of_identifier_names_remedy() -> None:
    problem = find_slice_problem("id", {"id": np.arange(10_000)}, 10_000)
    assert problem is not None
    assert "10,000 different values" in problem.what
    assert "`group:`" in problem.remedy


def test_find_slice_problem_without_number_of_rows_ignores_lengths() -> None:
    assert find_slice_problem("short*country", COLUMNS, None) is None


def test_get_slicings_of_stored_slicings_returns_first_rows(tmp_path: Path) -> None:
    store = FakeWorld().context(root=tmp_path).store
    slicings = make_slicings(["country", "part"], COLUMNS, ROWS, where="slices")
    first, second = get_slicings(store, put_slicings(store, slicings), 5)
    assert first.names == ("country=(missing)", "country=AT", "country=DE")
    assert first.numbers.tolist() == [2, 1, 0, 2, 1]
    assert second.numbers.tolist() == [0, 1, 12, 23, 24]


@pytest.mark.parametrize("definition", [ACCURACY, MetricDefinition(name="f1", average="macro")])
def test_measure_metrics_of_slice_equals_metrics_of_its_rows(
    tmp_path: Path, definition: MetricDefinition
) -> None:
    model = write_perceptron(tmp_path / "model.onnx")
    random = np.random.default_rng(0)
    data = Dataset(inputs=rows(ROWS), label=random.integers(0, CLASSES, ROWS))
    slicing = make_slicing({"country": COLUMNS["country"]})
    request = ScoringRequest(
        runtime=OnnxRuntime(),
        target=TARGET,
        models={
            CANDIDATE: write_changed(
                model, "third.bias", lambda bias: bias + 0.5 * np.arange(bias.size)
            ),
            "fp32": model,
        },
        dataset=data,
        seed=0,
        slices=SlicePlan(slicings=[slicing], metrics=[definition.label]),
    )
    whole = measure_metrics(request, [definition])
    part = np.flatnonzero(slicing.numbers == slicing.names.index("country=DE"))
    selected = replace(
        data,
        inputs={name: array[part] for name, array in data.inputs.items()},
        label=None if data.label is None else data.label[part],
    )
    alone = measure_metrics(replace(request, dataset=selected, slices=SlicePlan()), [definition])

    (measured,) = [one for one in whole.slices if one.slice == "country=DE"]
    assert (measured.rows, len(whole.slices)) == (40, 3)
    assert (measured.metrics, measured.scores) == (alone.counts, alone.scores)


def test_measure_metrics_of_metric_outside_slice_plan_omits_it_from_slices(tmp_path: Path) -> None:
    request = ScoringRequest(
        runtime=OnnxRuntime(),
        target=TARGET,
        models={CANDIDATE: write_perceptron(tmp_path / "model.onnx")},
        dataset=Dataset(inputs=rows(ROWS), label=np.zeros(ROWS, int)),
        seed=0,
        slices=SlicePlan(slicings=[make_slicing({"c": COLUMNS["country"]})], metrics=["f1"]),
    )
    slices = measure_metrics(request, [ACCURACY]).slices
    assert slices
    assert not any(one.metrics for one in slices)
