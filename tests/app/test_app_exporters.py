"""Where an exporter runs.

It runs in this environment, in the one that it brings, or in the one that the pipeline names.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from onnx_ops.adapters.exporters.paddle import PaddleExporter
from onnx_ops.adapters.exporters.sklearn import SklearnExporter
from onnx_ops.adapters.isolation.isolated_tools import IsolatedExporter
from onnx_ops.app.context import load_tool, open_project
from onnx_ops.app.project import prepare
from onnx_ops.config.settings import load_settings
from onnx_ops.domain.execution import Environment
from onnx_ops.errors import UserError
from onnx_ops.plugins import select_environment
from onnx_ops.ports import TracingExporter, TrainingExporter, TreeExporter

PIPELINE = """\
pipeline: toy
data: {test: {sklearn: digits}, train: {sklearn: iris}}
train: {run: toy:train}
export: {framework: tensorflow, env: {timeout: 1 min}}
benchmark: {targets: [cpu-1t]}
"""


def test_select_environment_uses_requirements_of_exporter_or_pipeline() -> None:
    own = Environment(requirements=PaddleExporter.requirements)
    assert select_environment(SklearnExporter(), None) is None
    assert select_environment(PaddleExporter(), None) == own
    assert select_environment(PaddleExporter(), Environment(isolated=False)) is None
    asked = Environment(requirements=("scikit-learn==1.6",), python="3.12", memory=10, timeout=3.0)
    assert select_environment(SklearnExporter(), asked) == asked
    assert select_environment(PaddleExporter(), Environment(memory=10)) == Environment(
        requirements=own.requirements, memory=10
    )


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        (Environment(), "no requirements"),
        (Environment(isolated=False, requirements=("a",)), "installs no packages"),
        (Environment(isolated=False, python="3.12"), "installs no packages"),
    ],
)
def test_select_environment_with_empty_or_conflicting_settings_raises_user_error(
    env: Environment, expected: str
) -> None:
    with pytest.raises(UserError, match=expected) as refused:
        select_environment(SklearnExporter(), env)
    assert refused.value.remedy


def test_load_tool_of_isolated_exporter_returns_training_exporter(tmp_path: Path) -> None:
    settings = load_settings(tmp_path, {})
    found = load_tool(settings, "exporters", "tensorflow")
    assert isinstance(found, IsolatedExporter)
    assert isinstance(found, TrainingExporter)
    assert not isinstance(found, TracingExporter | TreeExporter)
    assert isinstance(load_tool(settings, "exporters", "sklearn"), SklearnExporter)
    # No environment is created before its first use.
    assert not (tmp_path / ".onnx-ops").exists()


def test_stage_key_depends_on_requirements_but_not_on_timeout(tmp_path: Path) -> None:
    (tmp_path / "configs/targets").mkdir(parents=True)
    (tmp_path / "configs/targets/cpu-1t.yaml").write_text("name: cpu-1t\n")
    (tmp_path / "toy.py").write_text("def train(data):\n    return None\n")
    project = open_project(tmp_path)

    def keys(text: str) -> list[str]:
        (tmp_path / "toy.yaml").write_text(text)
        planned = prepare(project, tmp_path / "toy.yaml").plan
        train, export = planned["train"], planned["export"]
        assert train.hints["env"] == export.hints["env"] == planned["validate"].hints["env"]
        return [train.key({}), export.key({})]

    first = keys(PIPELINE)
    assert keys(PIPELINE.replace("1 min", "2 min")) == first
    changed = keys(PIPELINE.replace("timeout: 1 min", "requirements: [tensorflow-cpu==2.20]"))
    assert all(a != b for a, b in zip(first, changed, strict=True))
