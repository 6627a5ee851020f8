"""Batch invariance of real models: dynamic int8 answers by the batch, float and static int8 by the row."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from onnx_ops.adapters.data.sklearn import SklearnSource
from onnx_ops.adapters.exporters.sklearn import SklearnExporter
from onnx_ops.adapters.exporters.torch import TorchExporter
from onnx_ops.adapters.optimizers.onnxruntime import DynamicQuantizer, StaticQuantizer
from onnx_ops.adapters.runtimes.onnxruntime import OnnxRuntime
from onnx_ops.domain.artifact import Digest
from onnx_ops.domain.decision import GateResult, Verdict
from onnx_ops.domain.evidence import BatchInvariance, Evidence
from onnx_ops.domain.gate import ParityGate
from onnx_ops.domain.pipeline import Calibrate, Export, Quantize, SklearnData
from onnx_ops.domain.target import Target
from onnx_ops.measure.parity import measure_invariance
from onnx_ops.measure.reference_outputs import ReferenceGroup
from onnx_ops.ports import Dataset, Exporter, ExportRequest, OptimizeRequest, Tensors
from onnx_ops.statistics.rules.parity import METRIC, judge_parity
from onnx_ops.testing.models import rows, write_perceptron

TARGET = Target(name="cpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class Project:
    """A trained model with its export and variants by name, and what the benchmark stage would be given."""

    models: dict[str, Path]
    samples: Tensors
    reference: list[ReferenceGroup]


def digits(split: str, name: str, array: str) -> Dataset:
    arrays = SklearnSource().load(SklearnData(sklearn="digits", split=split), Path())  # type: ignore[arg-type]
    return Dataset(inputs={name: arrays[array]}, label=arrays["target"])


def build(folder: Path, exporter: Exporter, model: object, framework: str, train: Dataset, test: Dataset) -> Project:
    paths = {name: folder / f"{name}.onnx" for name in ("fp32", "dynamic", "static")}
    samples = test.head(256).inputs
    exporter.export(
        model, ExportRequest(section=Export(framework=framework, opset=18), samples=samples, path=paths["fp32"])
    )
    for name, optimizer in (("dynamic", DynamicQuantizer()), ("static", StaticQuantizer())):
        section = Quantize(name=name, method=name, calibrate=Calibrate(samples=256) if name == "static" else None)
        optimizer.optimize(
            OptimizeRequest(section=section, source=paths["fp32"], path=paths[name], calibration=train.head(256).inputs)
        )
    group = ReferenceGroup(
        name="real",
        inputs=samples,
        single=exporter.reference(model, samples, "float32"),
        double=exporter.reference(model, samples, "float64"),
    )
    return Project(models=paths, samples=samples, reference=[group])


@pytest.fixture(scope="module")
def perceptron(tmp_path_factory: pytest.TempPathFactory) -> Project:
    from examples import digits_mlp

    train, test = digits("train", "x", "data"), digits("test", "x", "data")
    model = digits_mlp.train({"train": train})
    return build(tmp_path_factory.mktemp("mlp"), SklearnExporter(), model, "sklearn", train, test)


@pytest.fixture(scope="module")
def convolution(tmp_path_factory: pytest.TempPathFactory) -> Project:
    from examples import digits_cnn

    train, test = digits("train", "image", "images"), digits("test", "image", "images")
    model = digits_cnn.train({"train": train}, epochs=4)
    return build(tmp_path_factory.mktemp("cnn"), TorchExporter(), model, "torch", train, test)


@pytest.fixture(params=["perceptron", "convolution"])
def project(request: pytest.FixtureRequest) -> Project:
    found: Project = request.getfixturevalue(request.param)
    return found


def measured(project: Project, variant: str, first: int = 0) -> tuple[BatchInvariance, ...]:
    samples = {name: array[first:] for name, array in project.samples.items()}
    return measure_invariance(OnnxRuntime(), project.models[variant], TARGET, samples, project.reference)


@pytest.fixture
def judged(make_evidence: Callable[..., Evidence]) -> Callable[[tuple[BatchInvariance, ...]], GateResult]:
    def judge(found: tuple[BatchInvariance, ...]) -> GateResult:
        results = judge_parity(ParityGate(), make_evidence(batch_invariance=found))
        return next(result for result in results if result.metric == METRIC)

    return judge


@pytest.fixture
def make_evidence() -> Callable[..., Evidence]:
    digest = Digest("sha256:" + "0" * 64)

    def make(**change: object) -> Evidence:
        return Evidence(
            pipeline="p",
            variant="v",
            target="cpu",
            quantized=True,
            release=digest,
            manifest=digest,
            target_digest=digest,
            dedicated=False,
            size_bytes=1,
            hardware=OnnxRuntime().fingerprint(TARGET),
            **change,  # type: ignore[arg-type]
        )

    return make


@pytest.mark.sweep
@pytest.mark.parametrize("variant", ["fp32", "static"])
@pytest.mark.parametrize("first", range(0, 224, 32))
def test_float_and_static_int8_answer_by_the_row(
    project: Project, variant: str, first: int, judged: Callable[[tuple[BatchInvariance, ...]], GateResult]
) -> None:
    found = measured(project, variant, first)
    assert found
    assert {m.rows for m in found} == {32}
    assert judged(found).verdict is Verdict.PASS


@pytest.mark.parametrize("first", range(0, 224, 32))
def test_dynamic_int8_answers_by_the_batch_and_is_told(
    project: Project, first: int, judged: Callable[[tuple[BatchInvariance, ...]], GateResult]
) -> None:
    result = judged(measured(project, "dynamic", first))
    assert (result.verdict, result.advisory) == (Verdict.FAIL, True)
    assert "do not batch" in result.reason
    assert result.estimate is not None
    assert result.estimate > 100


def test_a_fixed_batch_is_not_asked(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    write_perceptron(path, batch=2)
    assert measure_invariance(OnnxRuntime(), path, TARGET, rows(40), []) == ()


def test_one_row_is_no_batch(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    write_perceptron(path)
    assert measure_invariance(OnnxRuntime(), path, TARGET, rows(1), []) == ()


def test_a_model_that_cannot_take_one_row_is_left_to_the_other_gates(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    write_perceptron(path)
    wrong = {"x": np.zeros((4, 3), dtype=np.float32)}
    assert measure_invariance(OnnxRuntime(), path, TARGET, wrong, []) == ()
