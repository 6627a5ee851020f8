"""`onnx-ops doctor`: its findings about this project."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from onnx_ops import plugins
from onnx_ops.app.context import open_project
from onnx_ops.cli.diagnosis import CHECKS, diagnose
from onnx_ops.domain.rollout_policy import RolloutPolicy
from onnx_ops.release.promote import bind_endpoint
from onnx_ops.testing.models import rows, write_perceptron
from tests.release.release_parts import config_of

KEPT = """\
pipeline: kept
data: {test: {file: rows.npz, inputs: {x: x}}}
model: model.onnx
export: {framework: onnx}
benchmark: {targets: [cpu]}
"""


def test_doctor_reports_endpoint_whose_pipeline_file_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "onnx-ops.toml").touch()
    folder = tmp_path / "configs" / "pipelines"
    folder.mkdir(parents=True)
    (folder.parent / "targets").mkdir()
    (folder.parent / "targets" / "cpu.yaml").write_text("name: cpu\n")
    (folder / "kept.yaml").write_text(KEPT)
    np.savez(tmp_path / "rows.npz", allow_pickle=False, **rows(8))
    write_perceptron(tmp_path / "model.onnx")
    for pipeline in ("kept", "renamed"):
        config = replace(config_of(pipeline), provider="local", pipeline=pipeline)
        bind_endpoint(open_project().context, config, RolloutPolicy())
    found = {
        one.check: one for one in diagnose(open_project()) if one.check.startswith("pipeline of")
    }
    assert found.keys() == {"pipeline of renamed"}
    assert found["pipeline of renamed"].found.endswith("onnx-ops delete renamed")


def test_doctor_reports_exporter_with_missing_packages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    real = plugins.absent
    monkeypatch.setattr(
        plugins,
        "absent",
        lambda packages: tuple(p for p in packages if p == "skl2onnx") or real(packages),
    )
    begun: list[str] = []
    found = {one.check: one for one in diagnose(open_project(), begun.append)}
    one = found["exporters sklearn"]
    assert (one.ok, one.absent, one.found) == (True, True, "not installed: skl2onnx")
    assert "pip install 'onnx-ops[sklearn]'" in one.remedy
    assert not found["exporters onnx"].absent
    assert tuple(begun) == CHECKS
