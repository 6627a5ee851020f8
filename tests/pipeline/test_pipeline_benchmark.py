"""Task metrics: unneeded ones, and those that a gate cannot judge."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from onnx_ops import codec
from onnx_ops.adapters.runtimes.onnxruntime import OnnxRuntime
from onnx_ops.app.context import open_project
from onnx_ops.domain.evidence import EXPORT
from onnx_ops.domain.gate import ACCURACY, MetricDefinition
from onnx_ops.domain.plan import Stage, StageKind
from onnx_ops.domain.target import Target
from onnx_ops.errors import UserError
from onnx_ops.measure.scoring import ScoringRequest, add_default_metric
from onnx_ops.pipeline.stages.benchmark import _measure_metrics
from onnx_ops.ports import Dataset
from onnx_ops.statistics.scores import CANDIDATE
from onnx_ops.testing.models import CLASSES, rows, write_perceptron
from tests.cli.mistakes import write_regressor

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
def test_add_default_metric_adds_rmse_only_for_unscored_vector_of_numbers(
    label: Any, asked: tuple[MetricDefinition, ...], default: MetricDefinition | None
) -> None:
    found, added = add_default_metric(asked, Dataset(inputs={"x": np.zeros((2, 1))}, label=label))
    assert added == default
    assert found == (asked if default is None else (*asked, default))


@pytest.mark.parametrize("is_judged", [True, False])
def test_measure_metrics_unfit_for_labels_raises_user_error_only_if_gated(
    tmp_path: Path, is_judged: bool
) -> None:
    write_perceptron(tmp_path / "model.onnx")
    label = np.linspace(0, 1, 9)
    if is_judged:
        with pytest.raises(UserError, match="accuracy requires classes"):
            measured(tmp_path, "model.onnx", label, "accuracy")
    else:
        assert measured(tmp_path, "model.onnx", label) == [("accuracy", True), ("rmse", True)]


def test_measure_metrics_of_variant_with_other_output_reports_gated_metric_as_failed(
    tmp_path: Path,
) -> None:
    write_perceptron(tmp_path / "export.onnx")
    write_perceptron(tmp_path / "model.onnx")
    write_regressor(tmp_path)
    assert ("accuracy", True) in measured(
        tmp_path, "export.onnx", np.arange(9) % CLASSES, "accuracy"
    )


def measured(root: Path, export: str, label: Any, *judged: str) -> list[tuple[str, bool]]:
    """Return each metric of `model.onnx` alone, and whether it has no value."""
    settings: Any = {"metrics": [{"definition": codec.to_json(ACCURACY)}]}
    stage = Stage(
        id="benchmark", kind=StageKind.BENCHMARK, settings=settings, hints={"judged": judged}
    )
    scorer = ScoringRequest(
        runtime=OnnxRuntime(),
        target=Target(name="cpu"),
        models={CANDIDATE: root / "model.onnx", EXPORT: root / export},
        dataset=Dataset(inputs=rows(len(label)), label=label),
        seed=0,
    )
    found = _measure_metrics(scorer, root / export, stage, open_project(root).context)
    return [(one.metric, bool(one.failed)) for one in found.scores if not one.against]
