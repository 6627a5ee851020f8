"""Edge cases of exporters.

They are settings and modules that once failed, names of axes, and bytes across processes.
"""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, ValueInfoProto, helper

from onnx_ops.adapters.exporters.signature import OUTPUT, check_opset, name_axes
from onnx_ops.adapters.exporters.sklearn import SklearnExporter
from onnx_ops.adapters.exporters.torch import TorchExporter
from onnx_ops.domain.artifact import digest_file
from onnx_ops.domain.pipeline import Export
from onnx_ops.errors import UserError
from onnx_ops.onnx_graph.files import iterate_nodes, read_structure
from onnx_ops.ports.export import Exporter, ExportRequest
from onnx_ops.testing.models import rows
from tests.adapters import model_runs
from tests.adapters.model_runs import piped, reference, sk

SAMPLES = rows(60)
X = SAMPLES["x"]
CLASS = (X[:, 0] > 0).astype(np.int64) + (X[:, 1] > 0)


def export(exporter: Exporter, model: object, folder: Path, **section: Any) -> dict[str, Any]:
    framework = type(exporter).__name__.removesuffix("Exporter").lower()
    path = folder / "model.onnx"
    return model_runs.export(exporter, model, SAMPLES, path, Export(framework=framework, **section))


def linear() -> Any:
    return importlib.import_module("torch").nn.Linear(8, 2)


def module(name: str, *arguments: object) -> Any:
    return getattr(importlib.import_module("tests.support.torch_modules"), name)(*arguments)


SK, TORCH = SklearnExporter(), TorchExporter()
MODELS: dict[Exporter, Callable[[], object]] = {
    SK: lambda: sk("linear_model.LogisticRegression").fit(X, CLASS),
    TORCH: linear,
}
SECTIONS: dict[str, dict[str, Any]] = {
    "Did you mean 'x'": {"dynamic": {"xx": {0: "batch"}}},
    "has 2 axes, numbered from 0, and no axis 2": {"dynamic": {"x": {2: "batch"}}},
    "not a valid name of a dimension": {"dynamic": {"x": {0: "my batch"}}},
    "no option 'fast'": {"options": {"fast": True}},
}


@pytest.mark.parametrize("exporter", [SK, TORCH])
@pytest.mark.parametrize("message", SECTIONS)
def test_export_with_wrong_setting_raises_user_error(
    exporter: Exporter, message: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=message):
        export(exporter, MODELS[exporter](), tmp_path, **SECTIONS[message])


@pytest.mark.parametrize(
    ("exporter", "model", "message"),
    [
        (
            TORCH,
            lambda: importlib.import_module("torch").nn.Linear(3, 2),
            "types and shapes of the arrays",
        ),
        (TORCH, lambda: module("Nested"), "values that are not tensors"),
        (
            TORCH,
            lambda: module("Casting", "complex64"),
            "'output' has type complex64.*Return torch.view_as_real",
        ),
        (
            TORCH,
            lambda: module("Casting", "bfloat16"),
            "'output' has type bfloat16.*Return output.float",
        ),
    ],
)
def test_export_of_unsuitable_model_raises_user_error_with_cause(
    exporter: Exporter, model: Callable[[], object], message: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=message):
        export(exporter, model(), tmp_path)


@pytest.mark.parametrize(
    "make",
    [
        lambda: sk("ensemble.RandomForestClassifier", 2),
        lambda: sk("neighbors.KNeighborsClassifier"),
        lambda: sk("linear_model.RidgeClassifier"),
        lambda: sk("neural_network.MLPClassifier", 2, max_iter=2),
        lambda: sk("multiclass.OneVsRestClassifier", sk("linear_model.LogisticRegression")),
        lambda: piped(sk("linear_model.RidgeClassifierCV")),
        lambda: sk("multioutput.ClassifierChain", sk("linear_model.LogisticRegression")),
    ],
)
@pytest.mark.filterwarnings("ignore:Stochastic Optimizer")
def test_sklearn_export_of_classifier_with_several_labels_raises_user_error(
    make: Callable[[], Any], tmp_path: Path
) -> None:
    model = make().fit(X, np.eye(3, dtype=np.int64)[CLASS])
    with pytest.raises(UserError, match="predicts several labels"):
        export(SK, model, tmp_path)


def test_sklearn_export_with_first_row_that_model_refuses_succeeds(tmp_path: Path) -> None:
    path, refused = tmp_path / "model.onnx", X.copy()
    refused[0, 0] = np.nan
    request = ExportRequest(section=Export(framework="sklearn"), samples={"x": refused}, path=path)
    SK.export(sk("linear_model.LinearRegression").fit(X, CLASS), request)
    assert path.is_file()


def test_torch_reference_of_float32_only_module_in_float64_returns_none() -> None:
    exporter = TORCH
    assert exporter.reference(module("Single"), SAMPLES, "float64") is None
    assert exporter.reference(module("Single"), SAMPLES, "float32") is not None


def test_torch_reference_of_float32_only_module_with_wrong_inputs_raises_value_error() -> None:
    with pytest.raises(ValueError, match="refuses these inputs"):
        TORCH.reference(module("Single"), {"x": X[:, :3]}, "float64")


def test_torch_export_of_unsupported_branch_raises_one_line_user_error_and_prints_nothing(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UserError, match="Could not guard on data-dependent expression") as caught:
        export(TorchExporter(), module("Branching"), tmp_path, dynamic={"x": {0: "batch"}})
    assert "\n" not in str(caught.value)
    assert capfd.readouterr() == ("", "")


def test_torch_export_of_branches_equals_source_and_contains_no_stack_traces(
    tmp_path: Path,
) -> None:
    answers = export(TorchExporter(), module("Conditional"), tmp_path, dynamic={"x": {0: "batch"}})
    path = tmp_path / "model.onnx"
    model = read_structure(path)
    inner = list(iterate_nodes(model))
    assert len(inner) > len(model.graph.node)
    assert not [p.key for node in inner for p in node.metadata_props if "stack" in p.key]
    assert b".py" not in path.read_bytes()
    expected = reference(TorchExporter(), module("Conditional"), SAMPLES)[OUTPUT]
    np.testing.assert_allclose(answers[OUTPUT], expected, atol=1e-6)


def exported(folder: Path) -> list[str]:
    """Return the digests of the files that exporters write into the folder."""
    import torch

    samples = rows(40)
    torch.manual_seed(0)
    models: dict[Exporter, object] = {
        SklearnExporter(): sk("neighbors.KNeighborsClassifier").fit(
            samples["x"], (samples["x"][:, 0] > 0).astype(int)
        ),
        TorchExporter(): torch.nn.Sequential(
            torch.nn.Linear(8, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2)
        ),
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
def test_export_in_two_processes_writes_same_bytes(tmp_path: Path) -> None:
    """Each process has its own hash seed, and with it another order of sets."""
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    there.mkdir()
    environment = {
        "PYTHONHASHSEED": "1",
        "PYTHONPATH": str(Path(__file__).parents[2]),
        "HOME": str(there),
    }
    code = (
        "from pathlib import Path; from tests.adapters.test_exporter_edges import exported; "
        "print(exported(Path()))"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(
        command,
        cwd=there,
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        timeout=120,
        check=True,
    )
    assert ast.literal_eval(done.stdout) == exported(here)


def axes(values: Iterable[ValueInfoProto]) -> list[list[str | int]]:
    """Return the axes of each value: the name of a free axis, the size of another one.

    A free axis without a name is 0.
    """
    return [
        [axis.dim_param or axis.dim_value for axis in value.type.tensor_type.shape.dim]
        for value in values
    ]


@pytest.mark.parametrize(
    ("dynamic", "inputs", "output"),
    [
        ({}, [["batch", 0], ["batch", 4]], ["batch", 0]),
        (
            {"a": {0: "rows", 1: "words"}, "b": {0: "rows"}},
            [["rows", "words"], ["rows", 4]],
            ["rows", 0],
        ),
        ({"a": {0: "rows"}}, [["rows", 0], ["batch", 4]], [0, 0]),
    ],
    ids=["by default", "as the pipeline says", "inputs of two batches"],
)
def test_name_axes_names_axes_of_inputs_and_output_batch_that_inputs_share(
    dynamic: dict[str, dict[int, str]], inputs: list[list[str | int]], output: list[str | int]
) -> None:
    shapes: dict[str, list[str | int]] = {
        "a": ["unk_1", "unk_2"],
        "b": ["unk_3", 4],
        "y": ["unk_4", "unk_5"],
    }
    a, b, y = (
        helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)
        for name, shape in shapes.items()
    )
    model = helper.make_model(helper.make_graph([], "g", [a, b], [y]))
    name_axes(model, Export(framework="keras", dynamic=dynamic))
    assert axes(model.graph.input) == inputs
    assert axes(model.graph.output) == [output]


@pytest.mark.parametrize(("opset", "nearest"), [(8, 9), (9, 9), (17, 17), (18, 17)])
def test_check_opset_accepts_only_range_of_exporter(opset: int, nearest: int) -> None:
    section = Export(framework="keras", opset=opset)
    if opset == nearest:
        check_opset(section, 9, 17)
    else:
        with pytest.raises(UserError, match="exporter keras accepts opsets 9 to 17") as refused:
            check_opset(section, 9, 17)
        assert str(nearest) in refused.value.remedy
