"""A model whose class is edited while its weights stay: what was made of it before is made again."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from onnx_ops.domain.pipeline import StageKind
from onnx_ops.wiring.project import Project, execute, open_project, prepare

NET = """
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.linear = torch.nn.Linear(3, 2)

    def forward(self, x):
        return self.linear(x)
"""
TRAINING = """
def train(data):
    import stale_net
    return stale_net.Net()
"""
PIPELINE = """
pipeline: stale
data: {{test: {{file: data.npz, inputs: {{x: x}}, label: y}}}}
{source}
export: {{framework: torch}}
benchmark: {{targets: [cpu-1t]}}
"""
SOURCES = {"trained": "train: {run: 'stale_training:train'}", "brought": "model: model.pt"}


@pytest.fixture(params=["brought", pytest.param("trained", marks=pytest.mark.nightly)])
def project(request: pytest.FixtureRequest, tmp_path: Path) -> Project:
    (tmp_path / "configs" / "targets").mkdir(parents=True)
    (tmp_path / "configs" / "targets" / "cpu-1t.yaml").write_text("name: cpu-1t\n")
    (tmp_path / "onnx-ops.toml").write_text('signing = "off"\n')
    (tmp_path / "stale_net.py").write_text(NET)
    (tmp_path / "stale_training.py").write_text(TRAINING)
    draw = np.random.default_rng(0)
    np.savez(tmp_path / "data.npz", x=draw.standard_normal((30, 3)).astype(np.float32), y=np.arange(30) % 2)
    if request.param == "brought":
        save = "import stale_net, torch; torch.save(stale_net.Net(), 'model.pt')"
        subprocess.run([sys.executable, "-c", save], cwd=tmp_path, check=True, timeout=120)
    (tmp_path / "stale.yaml").write_text(PIPELINE.format(source=SOURCES[request.param]))
    return open_project(tmp_path)


def run(project: Project) -> tuple[set[str], str]:
    """Which stages did something, and the digest of the export."""
    result = execute(project, prepare(project, project.settings.root / "stale.yaml", until=StageKind.EXPORT))
    assert not result.errors
    exported = result.outcomes["export"].manifest
    assert exported is not None
    return set(result.executed()), exported["onnx/model.onnx"]


def test_an_edited_class_is_exported_again_and_nothing_is_for_an_edit_elsewhere(project: Project) -> None:
    root = project.settings.root
    did, first = run(project)
    assert did == {"data/test", "train", "export"}
    (root / "elsewhere.py").write_text("class Net: ...\n")
    assert run(project) == (set(), first)
    (root / "stale_net.py").write_text(NET.replace("self.linear(x)", "2 * self.linear(x)"))
    did, second = run(project)
    assert did == {"train", "export"}
    assert second != first
    assert run(project) == (set(), second)
