"""`judge` as a use case, on real sessions of ONNX Runtime."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from onnx_ops.adapters.runtimes.onnxruntime import OnnxRuntime
from onnx_ops.config.targets import PROFILES, TargetFiles
from onnx_ops.domain.decision import GateResult, Verdict
from onnx_ops.domain.execution import Provider
from onnx_ops.domain.gate import MetricGate
from onnx_ops.domain.target import HardwareFingerprint, Target
from onnx_ops.errors import MeasurementError
from onnx_ops.onnx_graph.input_bounds import read_input_bounds
from onnx_ops.onnx_graph.model_kind import read_candidate_kind
from onnx_ops.ports import Dataset
from onnx_ops.testing.models import CLASSES, rows, write_perceptron
from onnx_ops.tools.generated_rows import generate_samples
from onnx_ops.tools.judge import judge_candidate
from onnx_ops.tools.judgement import Judgement, JudgeRequest, SweepPoint, build_metric_gate
from onnx_ops.tools.model_inputs import shared_inputs
from onnx_ops.tools.supplied_rows import check_samples
from tests.measure.scripted import Scripted
from tests.support.graphs import write_graph
from tests.support.pairs import derive, write_changed
from tests.support.processor import detect_here, saturates_here
from tests.support.zipmap import zipped

pytestmark = pytest.mark.processor

CPU = TargetFiles(PROFILES).load("cpu-1t")
FOUR_BITS = {"bits": 4, "block": 16}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_perceptron(tmp_path / "source.onnx")


def dataset_of(source: Path, count: int = 3000, *, labels: bool = True) -> Dataset:
    """Return rows whose labels are the source's outputs; one in ten labels is wrong."""
    inputs = rows(count, seed=4)
    scores = OnnxRuntime().run(source, CPU, (inputs,))[0]["scores"]
    label = scores.argmax(axis=1)
    label[::10] = (label[::10] + 1) % 3
    return Dataset(inputs=inputs, label=label if labels else None)


def judged(
    source: Path, candidate: Path, dataset: Dataset | None = None, **changes: Any
) -> Judgement:
    inputs = shared_inputs(source, candidate)
    samples = (
        generate_samples(inputs, count=64, dims={}, bounds=read_input_bounds(source))
        if dataset is None
        else check_samples(inputs, dataset.inputs, where="rows", limit=64)
    )
    request = JudgeRequest(
        baseline=source,
        candidate=candidate,
        kind=read_candidate_kind(source, candidate),
        targets=(CPU,),
        settings=(SweepPoint(name="", batch=1, samples=samples),),
        runtime=lambda _: OnnxRuntime(),
        inside=OnnxRuntime(),
        conditions=dict,
        metric=build_metric_gate(None, 0.01, lower_is_better=False),
        dataset=dataset,
        only="parity",
    )
    return judge_candidate(replace(request, **changes))


def results_of(found: Judgement) -> dict[str, GateResult]:
    return {result.metric: result for result in found.targets[0].decision.results}


def without_relu(path: Path) -> Path:
    model = onnx.load(path)
    next(node for node in model.graph.node if node.op_type == "Relu").op_type = "Identity"
    copy = path.with_name("changed.onnx")
    onnx.save(model, copy)
    return copy


@pytest.mark.parametrize(
    ("method", "options", "metrics"),
    [
        (
            "static",
            {},
            {"weights", "activations", "saturation", "clipping", "ranges", "function", "accuracy"},
        ),
        ("dynamic", {}, {"weights", "ranges", "function", "accuracy"}),
        ("fp16", {}, {"weights", "function", "outputs", "accuracy"}),
        ("weight-only", {"bits": 8, "block": 16}, {"weights", "function", "accuracy"}),
    ],
)
def test_judge_of_correct_variant_passes_with_checks_of_its_method(
    source: Path, method: str, options: dict[str, int], metrics: set[str]
) -> None:
    # In about 1 % of the rows, the two highest scores are so close that quantization changes the
    # class.
    lenient = build_metric_gate(None, 0.05, lower_is_better=False)
    found = judged(source, derive(source, method, options), dataset_of(source), metric=lenient)
    assert found.verdict is Verdict.PASS, found.targets[0].decision.reason
    assert set(results_of(found)) - {"int8 coverage"} == metrics


@pytest.mark.parametrize("method", ["dynamic", "fp16", "weight-only"])
def test_judge_of_variant_without_relu_fails_by_function(source: Path, method: str) -> None:
    derived = derive(source, method, FOUR_BITS if method == "weight-only" else {})
    found = judged(source, without_relu(derived), dataset_of(source))
    assert found.verdict is Verdict.FAIL
    assert results_of(found)["function"].verdict is Verdict.FAIL


@pytest.mark.parametrize(
    ("method", "tensor", "change"),
    [
        ("static", "second.weight_quantized", lambda a: np.roll(a, 1, axis=0)),
        ("fp16", "second.weight", lambda a: a * 1.02),
    ],
)
def test_judge_of_variant_with_wrong_weight_fails_by_weights(
    source: Path, method: str, tensor: str, change: Callable[[Any], Any]
) -> None:
    found = judged(
        source, write_changed(derive(source, method), tensor, change), dataset_of(source)
    )
    assert results_of(found)["weights"].verdict is Verdict.FAIL
    assert found.verdict is Verdict.FAIL


def test_judge_of_quantized_variant_on_generated_rows_is_inconclusive(source: Path) -> None:
    found = judged(source, derive(source, "static"))
    assert found.verdict is Verdict.INCONCLUSIVE
    results = results_of(found)
    assert {name for name, result in results.items() if result.verdict is Verdict.INCONCLUSIVE} == {
        "agreement"
    }
    assert "--data" in results["agreement"].reason
    assert "saturation" not in results


def test_judge_without_labels_bounds_accuracy_by_changed_answers(source: Path) -> None:
    dataset = dataset_of(source, labels=False)
    few = judged(source, derive(source, "fp16"), dataset)
    assert few.verdict is Verdict.PASS
    assert "accuracy drops by at most this share" in results_of(few)["agreement"].reason
    many = judged(source, derive(source, "weight-only", FOUR_BITS), dataset)
    assert many.verdict is Verdict.INCONCLUSIVE
    assert "only labels can show" in results_of(many)["agreement"].reason


def test_judge_of_float_candidate_uses_outputs_only(source: Path) -> None:
    assert judged(source, source).verdict is Verdict.PASS
    found = judged(source, write_changed(source, "third.bias", lambda a: a + 0.01))
    assert (found.verdict, set(results_of(found))) == (Verdict.FAIL, {"outputs"})


def test_judge_with_quantized_baseline_passes_copy_and_fails_changed_weight(source: Path) -> None:
    baseline = derive(source, "static")
    assert judged(baseline, baseline).verdict is Verdict.PASS
    wrong = write_changed(baseline, "third.weight_quantized", lambda a: np.roll(a, 1, axis=0))
    assert judged(baseline, wrong).verdict is Verdict.FAIL


EIGHT_BITS = {"reduce_range": False}


class WithoutVnni(OnnxRuntime):
    """A runtime that reports a processor with saturating int8 products."""

    def fingerprint(self, target: Target) -> HardwareFingerprint:
        return replace(super().fingerprint(target), machine="x86_64", cpu_flags=("avx2",))


def test_judge_names_saturation_only_for_failing_variant_of_8_bit_weights(source: Path) -> None:
    dataset, strict = dataset_of(source), build_metric_gate(None, 1e-9, lower_is_better=False)
    for options, is_named in ((EIGHT_BITS, True), ({"reduce_range": True}, False)):
        derived = derive(source, "dynamic", options)
        found = judged(source, derived, dataset, metric=strict, runtime=lambda _: WithoutVnni())
        result = results_of(found)["accuracy"]
        assert result.verdict is not Verdict.PASS
        assert ("sums of B's int8 products can saturate" in result.reason) is is_named
        assert ("reduce_range: true" in result.reason) is is_named
    lenient = build_metric_gate(None, 0.9, lower_is_better=False)
    found = judged(source, derive(source, "dynamic", EIGHT_BITS), dataset, metric=lenient)
    assert results_of(found)["accuracy"].verdict is Verdict.PASS
    assert "saturate" not in results_of(found)["accuracy"].reason


@pytest.mark.parametrize("method", ["dynamic", "static"])
def test_judge_of_8_bit_weights_passes_unless_processor_saturates(
    tmp_path: Path, method: str
) -> None:
    """Each class adds 64 inputs.

    Those of the first class are neighbours, so that the sums of their products saturate.
    """
    weight = np.zeros((128, 2), np.float32)
    weight[:64, 0] = weight[::2, 1] = 1
    text = "(float[batch,128] x) => (float[batch,2] scores) { [product] scores = MatMul(x, w) }"
    source = write_graph(tmp_path / "ends.onnx", text, w=weight)
    x = np.random.default_rng(0).random((2000, 128), dtype=np.float32)
    dataset = Dataset(inputs={"x": x}, label=(x @ weight).argmax(axis=1))
    derived = derive(source, method, EIGHT_BITS, calibration={"x": x[:256]})
    found = judged(
        source, derived, dataset, metric=build_metric_gate(None, 0.02, lower_is_better=False)
    )
    result = results_of(found)["accuracy"]
    assert (result.verdict is Verdict.PASS) is not saturates_here(), result.reason
    assert ("products can saturate" in result.reason) is saturates_here()


def test_judge_with_8_bit_baseline_reports_saturation_if_processor_saturates(source: Path) -> None:
    baseline = derive(source, "static", EIGHT_BITS)
    assert judged(baseline, baseline).verdict is Verdict.PASS
    wrong = write_changed(baseline, "third.weight_quantized", lambda a: np.roll(a, 1, axis=0))
    found = judged(baseline, wrong)
    assert found.verdict in (
        Verdict.FAIL,
        Verdict.INCONCLUSIVE if detect_here().saturates else Verdict.FAIL,
    )
    assert (
        "sums of A's int8 products can saturate" in results_of(found)["outputs"].reason
    ) is detect_here().saturates


def test_judge_with_unavailable_target_is_error_and_judges_others(source: Path) -> None:
    absent = replace(CPU, name="absent", providers=(Provider(name="CUDAExecutionProvider"),))
    found = judged(source, source, targets=(absent, CPU))
    assert [one.decision.verdict for one in found.targets] == [Verdict.ERROR, Verdict.PASS]
    assert found.verdict is Verdict.ERROR
    assert "CUDAExecutionProvider" in found.targets[0].decision.reason


def test_judge_of_latency_covers_each_batch_size_of_sweep(source: Path) -> None:
    slow = write_perceptron(source.with_name("slow.onnx"))
    samples = generate_samples(shared_inputs(source), count=64, dims={})
    found = judged(
        source,
        slow,
        runtime=lambda _: Scripted({source: 1.0, slow: 1.2}),
        settings=tuple(
            SweepPoint(name=f"batch {size}", batch=size, samples=samples) for size in (1, 8)
        ),
        only="latency",
    )
    results = results_of(found)
    assert list(results) == ["latency, batch 1", "latency, batch 8"]
    assert {result.verdict for result in results.values()} == {Verdict.FAIL}
    assert [one.batch for one in found.targets[0].paired] == [1, 8]


def halve(source: Path, name: str, factor: float = 1.0) -> Path:
    """Write the source with one weight in float16, followed by a Cast."""
    model = onnx.load(source)
    stored = next(tensor for tensor in model.graph.initializer if tensor.name == name)
    values = np.multiply(numpy_helper.to_array(stored), factor).astype(np.float16)
    stored.CopyFrom(numpy_helper.from_array(values, f"{name}.half"))
    for node in model.graph.node:
        node.input[:] = [f"{name}.float" if given == name else given for given in node.input]
    model.graph.node.insert(
        0, helper.make_node("Cast", [f"{name}.half"], [f"{name}.float"], to=onnx.TensorProto.FLOAT)
    )
    onnx.save(model, source.with_name("half.onnx"))
    return source.with_name("half.onnx")


@pytest.mark.parametrize(("factor", "verdict"), [(1.0, Verdict.PASS), (1.02, Verdict.FAIL)])
def test_judge_of_partly_float16_file_uses_noise_of_float16(
    source: Path, factor: float, verdict: Verdict
) -> None:
    found = judged(source, halve(source, "second.weight", factor), dataset_of(source))
    assert found.kind.candidate.precision == "float16"
    assert results_of(found)["outputs"].verdict is verdict
    assert found.verdict is verdict


def add_table(candidate: Path) -> Path:
    """Add a quantized constant that the source lacks.

    The outputs stay unchanged.
    """
    model = onnx.load(candidate)
    model.graph.initializer.extend(
        [
            numpy_helper.from_array(np.zeros(CLASSES - 1, np.int8), "extra"),
            numpy_helper.from_array(np.asarray(1, np.float32), "extra.scale"),
        ]
    )
    last = model.graph.node[-1]
    result, last.output[0] = last.output[0], "before"
    model.graph.node.extend(
        [
            helper.make_node("DequantizeLinear", ["extra", "extra.scale"], ["extra.float"]),
            helper.make_node("ReduceSum", ["extra.float"], ["extra.sum"], keepdims=0),
            helper.make_node("Add", ["before", "extra.sum"], [result]),
        ]
    )
    onnx.save(model, candidate.with_name("extended.onnx"))
    return candidate.with_name("extended.onnx")


def rename_all(candidate: Path) -> Path:
    """Replace all names of nodes, values and constants by meaningless ones."""
    model = onnx.load(candidate)
    ends = {value.name for value in (*model.graph.input, *model.graph.output)}
    names = (
        {name for node in model.graph.node for name in (*node.input, *node.output)} - ends - {""}
    )
    short = {name: f"t{number}" for number, name in enumerate(sorted(names))}
    for number, node in enumerate(model.graph.node):
        node.name = f"n{number}"
        node.input[:] = [short.get(name, name) for name in node.input]
        node.output[:] = [short.get(name, name) for name in node.output]
    for tensor in model.graph.initializer:
        tensor.name = short.get(tensor.name, tensor.name)
    del model.graph.value_info[:]
    onnx.save(model, candidate.with_name("renamed.onnx"))
    return candidate.with_name("renamed.onnx")


@pytest.mark.parametrize("method", ["static", "dynamic", "weight-only"])
def test_judge_of_variant_with_meaningless_names_keeps_verdict(source: Path, method: str) -> None:
    lenient = build_metric_gate(None, 0.05, lower_is_better=False)
    renamed = rename_all(
        derive(source, method, {"bits": 8, "block": 16} if method == "weight-only" else {})
    )
    found = judged(source, renamed, dataset_of(source), metric=lenient)
    assert found.verdict is Verdict.PASS, found.targets[0].decision.reason
    assert {"weights", "function"} <= set(results_of(found))
    scale = next(
        t
        for t in onnx.load(renamed).graph.initializer
        if t.data_type == onnx.TensorProto.FLOAT and t.dims
    )
    found = judged(
        source,
        write_changed(renamed, scale.name, lambda a: 1.5 * a),
        dataset_of(source),
        metric=lenient,
    )
    assert found.verdict is Verdict.FAIL


def test_judge_of_unpaired_weight_adds_note_and_decides_by_task_metric(source: Path) -> None:
    lenient = build_metric_gate(None, 0.05, lower_is_better=False)
    extended = add_table(derive(source, "weight-only", {"bits": 8, "block": 16}))
    found = judged(source, extended, dataset_of(source), metric=lenient)
    assert found.verdict is Verdict.PASS
    assert any("extra" in note and "task metric" in note for note in found.notes)
    assert "function" not in results_of(found)
    assert judged(source, extended).verdict is Verdict.INCONCLUSIVE


class WrongOptimizer(OnnxRuntime):
    """A runtime with a faulty graph optimization: wrong outputs, or no session."""

    def __init__(self, *, raises: bool) -> None:
        self.raises = raises

    def run(self, model: Path, target: Any, batches: Any) -> Any:
        answers = super().run(model, target, batches)
        if target.session.graph_level != "all" or model.name != "copy.onnx":
            return answers
        if self.raises:
            raise MeasurementError("ONNX Runtime cannot run the model", where=model.name)
        return tuple(
            {name: np.multiply(array, 1.1) for name, array in answer.items()} for answer in answers
        )


@pytest.mark.parametrize("raises", [False, True])
def test_judge_with_graph_optimization_fault_suggests_lower_graph_level(
    source: Path, raises: bool
) -> None:
    copy = write_changed(source, "third.bias", lambda a: a, "copy.onnx")
    found = judged(source, copy, runtime=lambda _: WrongOptimizer(raises=raises)).targets[0]
    assert found.decision.verdict is (Verdict.ERROR if raises else Verdict.FAIL)
    assert "session: {graph_level: basic}" in found.decision.reason
    wrong = write_changed(source, "third.bias", lambda a: a + 1, "copy.onnx")
    found = judged(source, wrong, runtime=lambda _: WrongOptimizer(raises=False)).targets[0]
    assert found.decision.verdict is Verdict.FAIL
    assert "graph_level" not in found.decision.reason


@pytest.mark.parametrize("metric", ["accuracy", "f1", "auc"])
def test_judge_of_copied_model_passes_with_zero_change_on_few_labels(
    source: Path, metric: str
) -> None:
    dataset = dataset_of(source, 40)
    assert dataset.label is not None
    dataset = replace(dataset, label=(np.arange(40) < 2).astype(np.int64))
    copy = source.with_name("copy.onnx")
    copy.write_bytes(source.read_bytes())
    gate = MetricGate(name=metric, positive=1 if metric == "auc" else None, max_drop=0.001)
    result = results_of(judged(source, copy, dataset, metric=gate))[gate.definition().label]
    assert (result.verdict, result.low, result.high) == (Verdict.PASS, 0.0, 0.0), result.reason
    assert "exactly 0" in result.reason


def test_judge_of_retrained_candidate_uses_task_metric_only(source: Path) -> None:
    dataset = dataset_of(source)
    other = without_relu(source)
    assert judged(source, other, dataset).verdict is Verdict.FAIL
    for candidate, verdict in ((other, Verdict.FAIL), (source, Verdict.PASS)):
        found = judged(source, candidate, dataset, retrained=True)
        assert {name: r.verdict for name, r in results_of(found).items()} == {"accuracy": verdict}


def test_judge_of_classifier_with_maps_scores_them_as_matrix(tmp_path: Path) -> None:
    for name, keys in (("a.onnx", [0, 1, 2]), ("b.onnx", [0, 2, 1])):
        onnx.save(zipped(keys), tmp_path / name)
    x = np.random.default_rng(0).standard_normal((600, 3)).astype(np.float32)
    dataset = Dataset(inputs={"x": x}, label=x.argmax(axis=1))
    right, wrong = (
        results_of(judged(tmp_path / "a.onnx", tmp_path / name, dataset))["accuracy"]
        for name in ("a.onnx", "b.onnx")
    )
    assert (right.verdict, wrong.verdict) == (Verdict.PASS, Verdict.FAIL)


def test_build_metric_gate_sets_limit_by_direction_of_metric() -> None:
    assert build_metric_gate("f1", 0.01, lower_is_better=False).max_drop == 0.01
    assert build_metric_gate("rmse", 0.01, lower_is_better=False).max_increase == 0.01
    assert build_metric_gate("m:f", 0.01, lower_is_better=True).max_increase == 0.01
    assert build_metric_gate("m:f", 0.01, lower_is_better=False).higher_is_better is True
