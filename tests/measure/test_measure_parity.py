"""Parity of exports: a faulty one is reported with its faulty node.

A correct export is never reported.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, cast
from unittest.mock import Mock, patch

import numpy as np
import onnx
import pytest

from benchmarks.truth.evidence import evidence
from benchmarks.truth.faults_ends import _features as exchange_features
from onnx_ops import codec
from onnx_ops.adapters.data.sklearn import SklearnSource
from onnx_ops.adapters.exporters.sklearn import SklearnExporter
from onnx_ops.adapters.exporters.torch import TorchExporter
from onnx_ops.adapters.runtimes.onnxruntime import OnnxRuntime
from onnx_ops.domain.artifact import Digest, Manifest, digest_bytes
from onnx_ops.domain.decision import GateResult, Verdict
from onnx_ops.domain.evidence import BatchInvariance, Divergence, ParityMeasurement
from onnx_ops.domain.execution import SessionSettings
from onnx_ops.domain.gate import ParityGate
from onnx_ops.domain.pipeline import Export, SklearnData
from onnx_ops.domain.plan import Stage, StageKind
from onnx_ops.domain.target import Target
from onnx_ops.errors import StageError
from onnx_ops.measure import parity
from onnx_ops.measure.files import TRAINED, put_document, put_folder
from onnx_ops.measure.parity import (
    FailedExport,
    find_hardware_divergence,
    find_worst,
    locate_divergence,
    measure_group,
    measure_invariance,
    measure_parity,
)
from onnx_ops.measure.reference_outputs import (
    ReferenceGroup,
    collect_reference_outputs,
    put_reference,
)
from onnx_ops.onnx_graph.model_info import read_model_info
from onnx_ops.pipeline.stages import validate
from onnx_ops.ports import Context, Dataset, Exporter, ExportRequest, Tensors, Tracer
from onnx_ops.ports.data import Array
from onnx_ops.statistics.output_columns import WHOLE, measure_columns
from onnx_ops.statistics.rules.parity import judge_parity
from onnx_ops.statistics.rules.parity_rules import BATCH_INVARIANCE
from onnx_ops.testing.fakes import FakeWorld
from onnx_ops.testing.models import rows, write_perceptron
from tests.support.golden import Golden
from tests.support.graphs import parse_graph
from tests.support.pairs import derive, write_changed

TARGET = Target(name="reference")
SECTION = Export(framework="torch", dynamic={"image": {0: "batch"}})
SAMPLES: Tensors = {"image": np.random.default_rng(0).random((64, 1, 8, 8), dtype=np.float32)}

Weights = np.ndarray[Any, np.dtype[np.float32]]
FAULTS: Mapping[str, Callable[[Weights], Weights]] = {
    "sign": lambda w: -w,
    "scale": lambda w: w * np.float32(1.001),
    "roll": lambda w: np.roll(w, 1, 0),
}


class Source:
    """A network with its correct export, its own outputs, and its intermediate values."""

    def __init__(self, folder: Path) -> None:
        import torch

        from examples.digits_cnn import DigitsCnn

        torch.manual_seed(0)
        self.model = DigitsCnn().eval()
        self.path = folder / "model.onnx"
        request = ExportRequest(section=SECTION, samples=SAMPLES, path=self.path)
        TorchExporter().export(self.model, request)
        self.reference: list[ReferenceGroup] = collect_reference_outputs(
            TorchExporter(), self.model, self.path, SAMPLES
        ).groups
        self.tracer: Tracer = TorchExporter().tracer(self.model, request)

    def worst(self, path: Path, target: Target = TARGET) -> ParityMeasurement | None:
        return find_worst(measure_parity(OnnxRuntime(), path, target, self.reference))

    def located(self, path: Path, worst: ParityMeasurement, tracer: Tracer | None) -> Divergence:
        look = FailedExport(
            runtime=OnnxRuntime(), target=TARGET, model=path, reference=self.reference, worst=worst
        )
        return locate_divergence(look, lambda _: tracer)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Source:
    return Source(tmp_path_factory.mktemp("source"))


def faulty(source: Source, folder: Path, weight: str, fault: str) -> tuple[Path, ParityMeasurement]:
    """Write a faulty export; return it with its worst measurement."""
    sound = folder / "model.onnx"
    sound.write_bytes(source.path.read_bytes())
    path = write_changed(sound, weight, FAULTS[fault])
    worst = source.worst(path)
    assert worst is not None
    return path, worst


@pytest.mark.parametrize(
    ("name", "rows", "is_known"),
    [("batches:1", 1, True), ("batches:64", 64, False), ("range", 1, False)],
)
def test_measure_group_uses_noise_of_real_rows_in_small_batches_only(
    name: str, rows: int, *, is_known: bool
) -> None:
    real = np.ones((64, 1), np.float32)
    columns = measure_columns(real, real + 0.5, WHOLE)
    assert columns is not None
    single = np.ones((rows, 1), np.float32)
    group = ReferenceGroup(
        name=name,
        inputs={"x": single},
        single={"y": single},
        double={"y": single.astype(np.float64)},
    )
    (measured,) = measure_group(group, {"y": single}, known={"y": columns})
    assert (measured.noise == 0.5) is is_known


@pytest.mark.nightly
def test_locate_divergence_names_faulty_node_or_next_in_most_cases(
    source: Source, tmp_path: Path
) -> None:
    graph = onnx.load(source.path).graph
    nodes = [node.name for node in graph.node]
    named = []
    for weight in (name for name, _ in source.model.named_parameters()):
        for fault in FAULTS:
            found = source.located(*faulty(source, tmp_path, weight, fault), source.tracer)
            culprit = next(i for i, node in enumerate(graph.node) if weight in node.input)
            named.append(found.node in nodes[culprit : culprit + 2])
    assert np.mean(named) >= 0.8


@pytest.mark.parametrize("level", ["disabled", "basic", "extended", "all"])
def test_measure_parity_of_correct_export_finds_no_failure(source: Source, level: Any) -> None:
    for threads in (1, 2):
        session = SessionSettings(graph_level=level, intra_op_threads=threads)
        assert source.worst(source.path, Target(name="reference", session=session)) is None


def test_locate_divergence_of_replaced_operator_names_node_and_module(
    source: Source, tmp_path: Path
) -> None:
    model = onnx.load(source.path)
    next(node for node in model.graph.node if node.name == "node_relu_1").op_type = "Sigmoid"
    path = tmp_path / "exchanged.onnx"
    onnx.save(model, path)
    worst = source.worst(path)
    assert worst is not None
    found = source.located(path, worst, source.tracer)
    assert (found.node, found.op_type, found.scope) == ("node_relu_1", "Sigmoid", "features.3")


@pytest.mark.parametrize("shown", [2, 3])
def test_locate_divergence_in_long_graph_searches_it_in_parts(
    source: Source, tmp_path: Path, shown: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parity, "SHOWN", shown)
    traced: list[int] = []

    def trace(inputs: Tensors, names: Collection[str]) -> tuple[Tensors, Tensors | None]:
        traced.append(len(names))
        return source.tracer(inputs, names)

    found = source.located(*faulty(source, tmp_path, "features.2.weight", "sign"), trace)
    assert found.node == "node_conv2d_1"
    assert len(traced) > 1
    assert max(traced) <= shown


def test_locate_divergence_without_node_explains_why(
    source: Source, tmp_path: Path, golden: Golden
) -> None:
    path, worst = faulty(source, tmp_path, "head.weight", "sign")
    golden("reasons", source.located(path, worst, None).note)
    assert source.located(path, worst, lambda *_: ({}, None)).note.startswith("no diverging value")
    assert (
        "without the runtime's optimizations"
        in source.located(source.path, worst, source.tracer).note
    )

    def broken(inputs: Tensors, names: object) -> Any:
        raise StageError("cannot be exported again", where="export")

    assert "cannot be exported again" in source.located(path, worst, broken).note


def validated(source: Source, path: Path, exporter: Exporter, root: Path) -> tuple[Divergence, ...]:
    """Return the divergences that the validate stage stores."""
    context: Context = replace(
        FakeWorld().context(root=root),
        exporter=lambda *_: exporter,
        runtime=lambda _: OnnxRuntime(),
    )
    trained = root / "trained"
    trained.mkdir()
    TorchExporter().save(source.model, trained)
    export = Manifest(
        files={
            "onnx/model.onnx": context.store.put_file(path),
            "info.json": put_document(context.store, read_model_info(path)),
            "reference.npz": put_reference(context.store, source.reference),
        }
    )
    inputs = {
        "export": export,
        "train": Manifest(files=put_folder(context.store, trained, TRAINED)),
    }
    stage = Stage(
        id="validate", kind=StageKind.VALIDATE, settings={"export": codec.to_json(SECTION)}
    )
    done: Manifest = validate.execute(stage, digest_bytes(b""), inputs, context)
    digest: Digest = done["divergence.json"]
    return codec.loads(context.store.read(digest), tuple[Divergence, ...])


def test_validate_stage_of_faulty_export_stores_diverging_node(
    source: Source, tmp_path: Path
) -> None:
    path, _ = faulty(source, tmp_path, "features.5.weight", "roll")
    (found,) = validated(source, path, TorchExporter(), tmp_path)
    assert (found.node, found.op_type, found.scope) == ("node_conv2d_2", "Conv", "features.5")
    assert found.ratio > 16


def test_validate_stage_of_correct_export_does_not_load_source(
    source: Source, tmp_path: Path
) -> None:
    with patch.object(TorchExporter, "load") as load:
        assert validated(source, source.path, TorchExporter(), tmp_path) == ()
    load.assert_not_called()


def test_validate_stage_without_tracer_explains_missing_node(
    source: Source, tmp_path: Path, golden: Golden
) -> None:
    path, _ = faulty(source, tmp_path, "head.bias", "sign")
    (found,) = validated(source, path, SklearnExporter(), tmp_path)
    assert found.node == ""
    golden("reasons", found.note)


def test_tracer_leaves_source_model_unchanged(source: Source) -> None:
    import torch

    before = {name: value.clone() for name, value in source.model.state_dict().items()}
    single, double = source.tracer(SAMPLES, {"conv2d", "output"})
    assert double is not None
    assert (single["conv2d"].dtype, double["conv2d"].dtype) == (
        np.dtype("float32"),
        np.dtype("float64"),
    )
    again, _ = source.tracer(SAMPLES, {"conv2d"})
    np.testing.assert_array_equal(single["conv2d"], again["conv2d"])
    assert set(again) == {"conv2d"}
    assert all(
        torch.equal(value, before[name]) for name, value in source.model.state_dict().items()
    )


CPU_TARGET = Target(name="cpu")


class Project(NamedTuple):
    """A trained model's exports and variants by name, rows, and the source's outputs."""

    models: dict[str, Path]
    samples: Tensors
    reference: list[ReferenceGroup]


@pytest.fixture(scope="module", params=["perceptron", "convolution"])
def project(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Project:
    from examples import digits_cnn, digits_mlp

    is_perceptron = request.param == "perceptron"
    exporter: Exporter = SklearnExporter() if is_perceptron else TorchExporter()
    name, array = ("x", "data") if is_perceptron else ("image", "images")
    data = {}
    for split in ("train", "test"):
        arrays = SklearnSource().load(SklearnData(sklearn="digits", split=split), Path())
        data[split] = Dataset(inputs={name: arrays[array]}, label=arrays["target"])
    model: object = digits_mlp.train(data) if is_perceptron else digits_cnn.train(data, epochs=4)
    samples, path = data["test"].head(256).inputs, tmp_path_factory.mktemp("project") / "fp32.onnx"
    section = Export(framework="sklearn" if is_perceptron else "torch", opset=18)
    exporter.export(model, ExportRequest(section=section, samples=samples, path=path))
    rows_of_training = data["train"].head(256).inputs
    single, double = (
        exporter.reference(model, samples, precision) for precision in ("float32", "float64")
    )
    return Project(
        models={
            "fp32": path,
            **{m: derive(path, m, calibration=rows_of_training) for m in ("dynamic", "static")},
        },
        samples=samples,
        reference=[ReferenceGroup(name="real", inputs=samples, single=single, double=double)],
    )


def measured(project: Project, variant: str, first: int = 0) -> tuple[BatchInvariance, ...]:
    samples = {name: array[first:] for name, array in project.samples.items()}
    return measure_invariance(
        OnnxRuntime(), project.models[variant], CPU_TARGET, samples, project.reference
    )


def judged(found: tuple[BatchInvariance, ...]) -> GateResult:
    results = judge_parity(ParityGate(), evidence(quantized=True, batch_invariance=found))
    return next(result for result in results if result.metric == BATCH_INVARIANCE.metric)


@pytest.mark.sweep
@pytest.mark.parametrize("variant", ["fp32", "static"])
@pytest.mark.parametrize("first", range(0, 224, 32))
def test_measure_invariance_of_float_or_static_int8_passes(
    project: Project, variant: str, first: int
) -> None:
    found = measured(project, variant, first)
    assert found
    assert {m.rows for m in found} == {32}
    assert judged(found).verdict is Verdict.PASS


@pytest.mark.parametrize("first", range(0, 224, 32))
def test_measure_invariance_of_dynamic_int8_adds_failing_advisory(
    project: Project, first: int
) -> None:
    result = judged(measured(project, "dynamic", first))
    assert (result.verdict, result.advisory) == (Verdict.FAIL, True)
    assert "do not batch" in result.reason
    assert result.estimate is not None
    assert result.estimate > 100


@pytest.mark.parametrize(
    ("batch", "samples"),
    [(2, rows(40)), ("batch", rows(1)), ("batch", {"x": np.zeros((4, 3), dtype=np.float32)})],
    ids=["fixed batch", "one row", "rows that the model refuses"],
)
def test_measure_invariance_without_comparable_batches_returns_nothing(
    tmp_path: Path, batch: int | str, samples: Tensors
) -> None:
    path = write_perceptron(tmp_path / "model.onnx", batch=batch)
    assert measure_invariance(OnnxRuntime(), path, CPU_TARGET, samples, []) == ()


PORTS = cast("Context", SimpleNamespace(runtime=lambda _: OnnxRuntime()))
ELSEWHERE = Target(name="elsewhere")


class OddMachine(OnnxRuntime):
    """A machine whose units for one product round the weights to two digits."""

    def __init__(self, weight: str) -> None:
        super().__init__()
        self._weight = weight

    def run(
        self, model: Path, target: Target, batches: tuple[Tensors, ...]
    ) -> tuple[Mapping[str, Array], ...]:
        return super().run(
            write_changed(model, self._weight, lambda w: np.round(w, 2)), target, batches
        )


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_perceptron(tmp_path / "model.onnx")


def proven(model: Path) -> list[ReferenceGroup]:
    """Return outputs of this machine's CPU in place of the source's."""
    inputs = rows(64)
    (answers,) = OnnxRuntime().run(model, ELSEWHERE, (inputs,))
    return [ReferenceGroup(name="real", inputs=inputs, single=dict(answers), double=None)]


def test_find_hardware_divergence_names_only_node_computed_differently(model: Path) -> None:
    graph, reference = onnx.load(model).graph, proven(model)

    def located(runtime: OnnxRuntime) -> Divergence | None:
        measured = measure_parity(runtime, model, ELSEWHERE, reference)
        return find_hardware_divergence(PORTS, runtime, ELSEWHERE, model, reference, measured)

    assert located(OnnxRuntime()) is None
    for weight in (tensor.name for tensor in graph.initializer if len(tensor.dims) == 2):
        found = located(OddMachine(weight))
        culprit = next(node for node in graph.node if weight in node.input)
        assert found is not None
        assert found.node == (culprit.name or culprit.output[0]), (weight, found)


def test_exchange_features_of_digits_chooses_no_feature_that_is_always_0() -> None:
    from sklearn.datasets import load_digits

    model = parse_graph("(float[batch,64] x) => (float[batch,64] y) { y = Relu(x) }")
    draw = Mock(wraps=np.random.default_rng(0))
    assert exchange_features(model, draw)
    features = draw.choice.call_args.args[0]
    assert load_digits().data[:, features].any(axis=0).all()
