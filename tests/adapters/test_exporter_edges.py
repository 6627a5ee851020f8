"""Exporters at the edges: estimators, modules and settings that once went wrong, and bytes across processes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.ensemble import GradientBoostingRegressor, RandomForestClassifier, RandomForestRegressor
from sklearn.linear_model import LogisticRegression
from torch import nn

from onnx_ops.adapters.exporters.naming import OUTPUT
from onnx_ops.adapters.exporters.onnx import OnnxExporter
from onnx_ops.adapters.exporters.sklearn import LABEL, PROBABILITIES, VARIABLE, SklearnExporter
from onnx_ops.adapters.exporters.torch import TorchExporter
from onnx_ops.adapters.runtimes.onnxruntime import OnnxRuntime
from onnx_ops.domain.pipeline import Export
from onnx_ops.domain.target import Target
from onnx_ops.errors import StageFailure, UserError
from onnx_ops.graph.files import nodes, read_structure
from onnx_ops.graph.inspect import info
from onnx_ops.ports.data import Tensors
from onnx_ops.ports.export import Exporter, ExportRequest
from onnx_ops.testing.models import rows, write_perceptron

SAMPLES = rows(60)
X = SAMPLES["x"]
CLASS = (X[:, 0] > 0).astype(np.int64) + (X[:, 1] > 0)
TARGETS = np.stack([X[:, 0] + X[:, 1], X[:, 2] * 2.0], axis=1)


def export(exporter: Exporter, model: object, folder: Path, samples: Tensors, **section: Any) -> Path:
    framework = type(exporter).__name__.removesuffix("Exporter").lower()
    path = folder / "model.onnx"
    exporter.export(model, ExportRequest(section=Export(framework=framework, **section), samples=samples, path=path))
    return path


def answers(path: Path, feed: Tensors) -> dict[str, Any]:
    return dict(OnnxRuntime().run(path, Target(name="cpu"), (feed,))[0])


def test_boosted_trees_are_exported(tmp_path: Path) -> None:
    model = GradientBoostingRegressor(n_estimators=4, random_state=0).fit(X, TARGETS[:, 0])
    path = export(SklearnExporter(), model, tmp_path, SAMPLES)
    np.testing.assert_allclose(answers(path, SAMPLES)[VARIABLE][:, 0], model.predict(X), atol=1e-5)


def test_an_ensemble_declares_as_many_targets_as_it_has(tmp_path: Path) -> None:
    model = RandomForestRegressor(3, random_state=0).fit(X, TARGETS)
    path = export(SklearnExporter(), model, tmp_path, SAMPLES)
    assert info(path).outputs[0].shape == ("batch", 2)
    np.testing.assert_allclose(answers(path, SAMPLES)[VARIABLE], model.predict(X), atol=1e-5)


def test_labels_held_as_objects_become_text(tmp_path: Path) -> None:
    words = np.array(["ant", "bee", "cow"], dtype=object)[CLASS]
    model = LogisticRegression().fit(X, words)
    reference = SklearnExporter().reference(model, SAMPLES, "float64")
    assert reference is not None
    assert reference[LABEL].dtype.kind == "U"
    path = export(SklearnExporter(), model, tmp_path, SAMPLES)
    np.testing.assert_array_equal(answers(path, SAMPLES)[LABEL].astype(str), reference[LABEL])


def test_several_labels_at_once_are_refused(tmp_path: Path) -> None:
    model = RandomForestClassifier(2, random_state=0).fit(X, np.stack([CLASS > 0, CLASS > 1], axis=1))
    with pytest.raises(UserError, match="several labels"):
        export(SklearnExporter(), model, tmp_path, SAMPLES)


def test_boolean_labels_agree_as_numbers(tmp_path: Path) -> None:
    model = LogisticRegression().fit(X, CLASS > 0)
    path = export(SklearnExporter(), model, tmp_path, SAMPLES)
    found = answers(path, SAMPLES)
    np.testing.assert_array_equal(found[LABEL], model.predict(X))
    assert found[PROBABILITIES].shape == (60, 2)


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"dynamic": {"xx": {0: "batch"}}}, "Did you mean 'x'"),
        ({"dynamic": {"x": {2: "batch"}}}, "axes 0 to 1, not 2"),
        ({"dynamic": {"x": {0: "my batch"}}}, "no name of a dimension"),
        ({"options": {"fast": True}}, "no option 'fast'"),
    ],
)
@pytest.mark.parametrize("exporter", [SklearnExporter(), TorchExporter()])
def test_an_entry_without_effect_is_refused(
    exporter: Exporter, section: dict[str, Any], message: str, tmp_path: Path
) -> None:
    model: object = LogisticRegression().fit(X, CLASS) if isinstance(exporter, SklearnExporter) else nn.Linear(8, 2)
    with pytest.raises(UserError, match=message):
        export(exporter, model, tmp_path, SAMPLES, **section)


def test_a_ready_file_takes_no_options(tmp_path: Path) -> None:
    path = tmp_path / "ready.onnx"
    write_perceptron(path)
    with pytest.raises(UserError, match="no option 'fast'"):
        export(OnnxExporter(), path, tmp_path, SAMPLES, options={"fast": True})


class Nested(nn.Module):
    def forward(self, x: torch.Tensor) -> list[object]:
        return [x, {"inner": x}]


class Single(nn.Module):
    """Makes a float32 tensor of its own, so that it does not run in float64."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.mm(x, torch.ones(8, 2))


class Branching(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if x.sum() > 0 else -x


class Conditional(nn.Module):
    def forward(self, x: torch.Tensor) -> Any:
        return torch.cond(x.sum() > 0, lambda y: y.sin() + 1, lambda y: y.cos() * 2, (x,))


def test_outputs_that_are_no_tensors_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="other things than tensors"):
        export(TorchExporter(), Nested(), tmp_path, SAMPLES)


def test_a_module_that_refuses_the_samples_is_told_what_it_was_given(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"forward.*in this order: x"):
        export(TorchExporter(), nn.Linear(3, 2), tmp_path, SAMPLES)


def test_a_module_that_does_not_run_in_float64_has_no_such_answers() -> None:
    exporter = TorchExporter()
    assert exporter.reference(Single(), SAMPLES, "float64") is None
    assert exporter.reference(Single(), SAMPLES, "float32") is not None
    with pytest.raises(ValueError, match="refuses these inputs"):
        exporter.reference(Single(), {"x": X[:, :3]}, "float64")


def test_a_failed_export_says_why_and_prints_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(StageFailure, match="Could not guard on data-dependent expression") as caught:
        export(TorchExporter(), Branching(), tmp_path, SAMPLES, dynamic={"x": {0: "batch"}})
    assert "\n" not in str(caught.value)
    assert capfd.readouterr() == ("", "")


def test_branches_hold_no_stack_traces_either(tmp_path: Path) -> None:
    path = export(TorchExporter(), Conditional(), tmp_path, SAMPLES, dynamic={"x": {0: "batch"}})
    model = read_structure(path)
    inner = list(nodes(model))
    assert len(inner) > len(model.graph.node)
    assert not [p.key for node in inner for p in node.metadata_props if "stack" in p.key]
    assert b".py" not in path.read_bytes()
    np.testing.assert_allclose(
        answers(path, SAMPLES)[OUTPUT], TorchExporter().reference(Conditional(), SAMPLES, "float32")[OUTPUT], atol=1e-6
    )


_ELSEWHERE = """
import sys
from pathlib import Path
import numpy as np, torch
from sklearn.neighbors import KNeighborsClassifier
from onnx_ops.adapters.exporters.sklearn import SklearnExporter
from onnx_ops.adapters.exporters.torch import TorchExporter
from onnx_ops.domain.artifact import digest_file
from onnx_ops.domain.pipeline import Export
from onnx_ops.ports.export import ExportRequest
from onnx_ops.testing.models import rows

samples = rows(40)
torch.manual_seed(0)
models = {
    SklearnExporter: KNeighborsClassifier().fit(samples["x"], (samples["x"][:, 0] > 0).astype(int)),
    TorchExporter: torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2)),
}
for number, (kind, model) in enumerate(models.items()):
    path = Path(f"{number}.onnx")
    section = Export(framework="any", dynamic={"x": {0: "batch"}})
    kind().export(model, ExportRequest(section=section, samples=samples, path=path))
    print(digest_file(path))
"""


def test_two_processes_in_two_folders_write_the_same_bytes(tmp_path: Path) -> None:
    """Hashing of strings, and with it the order of sets, is another in each process."""
    running = []
    for seed in ("1", "2"):
        folder = tmp_path / f"folder-{seed}"
        folder.mkdir()
        environment = {"PYTHONHASHSEED": seed, "PYTHONPATH": str(Path(__file__).parents[2]), "HOME": str(folder)}
        command = [sys.executable, "-c", _ELSEWHERE]
        running.append(subprocess.Popen(command, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True))
    found = [process.communicate(timeout=120)[0] for process in running]
    assert [process.returncode for process in running] == [0, 0]
    assert found[0] == found[1]
    assert found[0].count("sha256:") == 2
