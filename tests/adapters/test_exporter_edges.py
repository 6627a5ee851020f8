"""Exporters at the edges: estimators, modules and settings that once went wrong, and bytes across processes."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from onnx_ops.adapters.exporters.onnx import OnnxExporter
from onnx_ops.adapters.exporters.signature import OUTPUT
from onnx_ops.adapters.exporters.sklearn import LABEL, PROBABILITIES, VARIABLE, SklearnExporter
from onnx_ops.adapters.exporters.torch import TorchExporter
from onnx_ops.domain.artifact import digest_file
from onnx_ops.domain.pipeline import Export
from onnx_ops.errors import UserError
from onnx_ops.onnx_graph.files import iterate_nodes, read_structure
from onnx_ops.onnx_graph.model_info import read_model_info
from onnx_ops.ports.export import Exporter
from onnx_ops.testing.models import rows, write_perceptron
from tests.adapters import model_runs
from tests.adapters.model_runs import reference, sk

SAMPLES = rows(60)
X = SAMPLES["x"]
CLASS = (X[:, 0] > 0).astype(np.int64) + (X[:, 1] > 0)
TARGETS = np.stack([X[:, 0] + X[:, 1], X[:, 2] * 2.0], axis=1)


def export(exporter: Exporter, model: object, folder: Path, **section: Any) -> dict[str, Any]:
    framework = type(exporter).__name__.removesuffix("Exporter").lower()
    path = folder / "model.onnx"
    return model_runs.export(exporter, model, SAMPLES, path, Export(framework=framework, **section))


def test_boosted_trees_are_exported(tmp_path: Path) -> None:
    model = sk("ensemble.GradientBoostingRegressor", n_estimators=4, random_state=0).fit(X, TARGETS[:, 0])
    answers = export(SklearnExporter(), model, tmp_path)
    np.testing.assert_allclose(answers[VARIABLE][:, 0], model.predict(X), atol=1e-5)


def test_an_ensemble_declares_as_many_targets_as_it_has(tmp_path: Path) -> None:
    model = sk("ensemble.RandomForestRegressor", 3, random_state=0).fit(X, TARGETS)
    answers = export(SklearnExporter(), model, tmp_path)
    assert read_model_info(tmp_path / "model.onnx").outputs[0].shape == ("batch", 2)
    np.testing.assert_allclose(answers[VARIABLE], model.predict(X), atol=1e-5)


def test_labels_held_as_objects_become_text(tmp_path: Path) -> None:
    model = sk("linear_model.LogisticRegression").fit(X, np.array(["ant", "bee", "cow"], dtype=object)[CLASS])
    labels = reference(SklearnExporter(), model, SAMPLES, "float64")[LABEL]
    assert labels.dtype.kind == "U"
    np.testing.assert_array_equal(export(SklearnExporter(), model, tmp_path)[LABEL].astype(str), labels)


def test_several_labels_at_once_are_refused(tmp_path: Path) -> None:
    model = sk("ensemble.RandomForestClassifier", 2, random_state=0).fit(X, np.stack([CLASS > 0, CLASS > 1], axis=1))
    with pytest.raises(UserError, match="several labels"):
        export(SklearnExporter(), model, tmp_path)


def test_boolean_labels_agree_as_numbers(tmp_path: Path) -> None:
    model = sk("linear_model.LogisticRegression").fit(X, CLASS > 0)
    answers = export(SklearnExporter(), model, tmp_path)
    np.testing.assert_array_equal(answers[LABEL], model.predict(X))
    assert answers[PROBABILITIES].shape == (60, 2)


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
    from torch import nn

    model: object = (
        sk("linear_model.LogisticRegression").fit(X, CLASS)
        if isinstance(exporter, SklearnExporter)
        else nn.Linear(8, 2)
    )
    with pytest.raises(UserError, match=message):
        export(exporter, model, tmp_path, **section)


def test_a_ready_file_takes_no_options(tmp_path: Path) -> None:
    path = tmp_path / "ready.onnx"
    write_perceptron(path)
    with pytest.raises(UserError, match="no option 'fast'"):
        export(OnnxExporter(), path, tmp_path, options={"fast": True})


def test_outputs_that_are_no_tensors_are_refused(tmp_path: Path) -> None:
    from tests.support.torch_modules import Nested

    with pytest.raises(UserError, match="other things than tensors"):
        export(TorchExporter(), Nested(), tmp_path)


@pytest.mark.parametrize(
    ("kind", "remedy"), [("complex64", "Return torch.view_as_real"), ("bfloat16", "Return output.float")]
)
def test_an_output_that_the_exporter_writes_as_another_type_is_refused(tmp_path: Path, kind: str, remedy: str) -> None:
    from tests.support.torch_modules import Casting

    with pytest.raises(UserError, match=f"output 'output' is of type {kind}") as caught:
        export(TorchExporter(), Casting(kind), tmp_path)
    assert caught.value.remedy.startswith(remedy)


def test_a_module_that_refuses_the_samples_is_told_what_it_was_given(tmp_path: Path) -> None:
    from torch import nn

    with pytest.raises(UserError, match=r"forward.*in this order: x"):
        export(TorchExporter(), nn.Linear(3, 2), tmp_path)


def test_a_module_that_does_not_run_in_float64_has_no_such_answers() -> None:
    from tests.support.torch_modules import Single

    exporter = TorchExporter()
    assert exporter.reference(Single(), SAMPLES, "float64") is None
    assert exporter.reference(Single(), SAMPLES, "float32") is not None
    with pytest.raises(ValueError, match="refuses these inputs"):
        exporter.reference(Single(), {"x": X[:, :3]}, "float64")


def test_a_failed_export_says_why_and_prints_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    from tests.support.torch_modules import Branching

    with pytest.raises(UserError, match="Could not guard on data-dependent expression") as caught:
        export(TorchExporter(), Branching(), tmp_path, dynamic={"x": {0: "batch"}})
    assert "\n" not in str(caught.value)
    assert capfd.readouterr() == ("", "")


def test_branches_hold_no_stack_traces_either(tmp_path: Path) -> None:
    from tests.support.torch_modules import Conditional

    answers = export(TorchExporter(), Conditional(), tmp_path, dynamic={"x": {0: "batch"}})
    path = tmp_path / "model.onnx"
    model = read_structure(path)
    inner = list(iterate_nodes(model))
    assert len(inner) > len(model.graph.node)
    assert not [p.key for node in inner for p in node.metadata_props if "stack" in p.key]
    assert b".py" not in path.read_bytes()
    expected = reference(TorchExporter(), Conditional(), SAMPLES)[OUTPUT]
    np.testing.assert_allclose(answers[OUTPUT], expected, atol=1e-6)


def exported(folder: Path) -> list[str]:
    """Digests of what exporters write into the folder."""
    import torch

    samples = rows(40)
    torch.manual_seed(0)
    models: dict[Exporter, object] = {
        SklearnExporter(): sk("neighbors.KNeighborsClassifier").fit(samples["x"], (samples["x"][:, 0] > 0).astype(int)),
        TorchExporter(): torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2)),
    }
    found: list[str] = []
    for exporter, model in models.items():
        place = folder / type(exporter).__name__
        place.mkdir()
        section, path = Export(framework="any", dynamic={"x": {0: "batch"}}), place / "model.onnx"
        model_runs.export(exporter, model, samples, path, section)
        found.append(digest_file(path))
    return found


@pytest.mark.nightly
def test_two_processes_in_two_folders_write_the_same_bytes(tmp_path: Path) -> None:
    """Hashing of strings, and with it the order of sets, is another in each process."""
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    there.mkdir()
    environment = {"PYTHONHASHSEED": "1", "PYTHONPATH": str(Path(__file__).parents[2]), "HOME": str(there)}
    code = "from pathlib import Path; from tests.adapters.test_exporter_edges import exported; print(exported(Path()))"
    command = [sys.executable, "-c", code]
    done = subprocess.run(
        command, cwd=there, env=environment, stdout=subprocess.PIPE, text=True, timeout=120, check=True
    )
    assert ast.literal_eval(done.stdout) == exported(here)
