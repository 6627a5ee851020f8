"""The pipelines of `configs/pipelines`, at least one for each framework.

They run from data to gates. The heavy ones run at night.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from onnx_ops.app.context import open_project
from onnx_ops.app.project import execute, prepare
from onnx_ops.domain.decision import Verdict
from onnx_ops.domain.evidence import EXPORT
from onnx_ops.domain.plan import StageKind, StageStatus
from onnx_ops.errors import MissingPackageError
from tests.support.checkout import copy_parts
from tests.support.extras import hide
from tests.support.processes import ROOT

KEPT = "ONNX_OPS_TEST_ENVIRONMENTS"
"""Variable with the folder for environments that later test runs reuse."""

LIGHT = ("iris-gates", "iris-onnx")
HEAVY = (
    "cancer-lightgbm",
    "churn-table",
    "digits-keras",
    "digits-mlp",
    "digits-paddle",
    "digits-tensorflow",
    "digits-tflite",
    "digits-vit",
    "digits-xgboost",
    "ticket-texts",
)
GATES = {"digits-mlp": ("gates=[{kind: parity}, {kind: metric, name: accuracy, min: 90%}]",)}
"""Gates without latency, because tests share their machine with each other."""
ELSEWHERE = ("digits-cnn", "drawn-shapes")
"""Pipelines that other tests run."""


def test_pipeline_files_are_all_listed_as_run_by_tests() -> None:
    found = {path.stem for path in (ROOT / "configs/pipelines").glob("*.yaml")}
    assert found == {*LIGHT, *HEAVY, *ELSEWHERE}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    copy_parts(tmp_path, "configs", "examples")
    (tmp_path / "onnx-ops.toml").write_text("signing = 'auto'\n")
    if KEPT in os.environ:
        (tmp_path / ".onnx-ops").mkdir()
        (tmp_path / ".onnx-ops/environments").symlink_to(os.environ[KEPT])
    return tmp_path


def run(root: Path, name: str, *overrides: str) -> Any:
    project = open_project(root)
    file = root / f"configs/pipelines/{name}.yaml"
    prepared = prepare(
        project, file, overrides=[*GATES.get(name, ()), *overrides], until=StageKind.GATE
    )
    return project, execute(project, prepared)


# Keras causes this warning with numpy 2.
@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
@pytest.mark.parametrize(
    "name", [*LIGHT, *(pytest.param(name, marks=pytest.mark.nightly) for name in HEAVY)]
)
def test_run_of_framework_pipeline_passes_gates_of_export_and_is_cached_when_repeated(
    root: Path, name: str
) -> None:
    project, result = run(root, name)
    assert [
        (o.stage, o.reason) for o in result.outcomes.values() if o.status is StageStatus.FAILED
    ] == []
    handler = project.handler()
    decided = [
        handler.decision(o.manifest)
        for o in result.outcomes.values()
        if o.stage.startswith("gate/")
    ]
    float_ones = [d for d in decided if d is not None and d.variant == EXPORT]
    assert [
        [(r.gate, r.reason) for r in d.results] for d in float_ones if d.verdict is not Verdict.PASS
    ] == []
    assert float_ones
    again = run(root, name)[1]
    assert {o.status for o in again.outcomes.values()} == {StageStatus.CACHED}


def test_execute_without_table_reader_raises_missing_package_error(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project = open_project(root)
    prepared = prepare(project, root / "configs/pipelines/churn-table.yaml", until=StageKind.GATE)
    hide(monkeypatch, "pyarrow")

    with pytest.raises(MissingPackageError) as caught:
        execute(project, prepared)

    assert caught.value.remedy == "Install it with: pip install 'onnx-ops[tables]'"
    assert "data/train needs pyarrow" in caught.value.why
