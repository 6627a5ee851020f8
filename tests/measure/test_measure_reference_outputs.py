"""The inputs of a source, those that it refuses, and the effect on its export."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from benchmarks.truth.evidence import evidence
from onnx_ops import codec
from onnx_ops.adapters.exporters.onnx import OnnxExporter
from onnx_ops.adapters.exporters.sklearn import SklearnExporter
from onnx_ops.adapters.exporters.torch import TorchExporter
from onnx_ops.adapters.runtimes.onnxruntime import OnnxRuntime
from onnx_ops.domain.artifact import Manifest, digest_bytes
from onnx_ops.domain.decision import Verdict
from onnx_ops.domain.evidence import NAN_PROPERTY, ParityMeasurement, SourceLimits, TreeStructure
from onnx_ops.domain.gate import ParityGate
from onnx_ops.domain.input_values import InputValues
from onnx_ops.domain.pipeline import Export
from onnx_ops.domain.plan import Stage, StageKind
from onnx_ops.domain.target import Target
from onnx_ops.errors import UserError
from onnx_ops.measure.files import TRAINED, put_dataset, put_folder
from onnx_ops.measure.parity import measure_group, measure_parity
from onnx_ops.measure.reference_outputs import (
    ReferenceGroup,
    ReferenceOutputs,
    _Source,
    build_probes,
    collect_reference_outputs,
    get_reference,
    put_reference,
)
from onnx_ops.onnx_graph.model_info import read_lineage
from onnx_ops.pipeline.stages import export, validate
from onnx_ops.pipeline.stages.score import check_compatibility
from onnx_ops.ports import Dataset, Exporter, ExportRequest, Tensors
from onnx_ops.statistics.rules.parity import judge_parity
from onnx_ops.testing.fakes import FakeWorld
from onnx_ops.testing.models import rows, write_perceptron
from tests.support.graphs import write_graph
from tests.support.pairs import write_changed

TARGET = Target(name="cpu")


def exported(
    exporter: Exporter, model: Any, section: Export, samples: Tensors, path: Path
) -> ReferenceOutputs:
    exporter.export(model, ExportRequest(section=section, samples=samples, path=path))
    return collect_reference_outputs(exporter, model, path, samples)


def worst(path: Path, asked: ReferenceOutputs) -> ParityMeasurement:
    found = measure_parity(OnnxRuntime(), path, TARGET, asked.groups)
    return max(found, key=lambda m: (bool(m.mismatch), m.ratio))


@pytest.fixture(scope="module")
def images() -> Tensors:
    return {"image": np.random.default_rng(0).random((40, 1, 6, 8), dtype=np.float32)}


SKLEARN = Export(framework="sklearn")
FREE = Export(framework="torch", dynamic={"image": {0: "batch", 2: "height", 3: "width"}})


def pooled() -> Any:
    import torch

    from tests.support.torch_modules import Pooled

    torch.manual_seed(0)
    return Pooled().eval()


@pytest.fixture(scope="module")
def free(
    images: Tensors, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, ReferenceOutputs]:
    path = tmp_path_factory.mktemp("free") / "model.onnx"
    return path, exported(TorchExporter(), pooled(), FREE, images, path)


def test_reference_of_free_axes_covers_other_sizes_and_records_rejected_sizes(
    free: tuple[Path, ReferenceOutputs],
) -> None:
    path, asked = free
    shapes = {group.inputs["image"].shape[2:] for group in asked.groups}
    assert {(3, 8), (7, 8), (12, 8), (6, 5), (6, 9), (6, 16), (12, 16)} <= shapes
    assert {"lengths:height=1", "lengths:width=1"} <= set(asked.limits.refused)
    assert "kernel" in asked.limits.refused["lengths:height=1"].lower()
    assert worst(path, asked).ratio <= 10
    assert not worst(path, asked).mismatch


def test_measure_parity_of_export_fixed_to_one_size_reports_mismatch(
    free: tuple[Path, ReferenceOutputs], tmp_path: Path
) -> None:
    model = onnx.load(free[0])
    model.graph.initializer.append(numpy_helper.from_array(np.array([0, 1, 6, 8]), "frozen.size"))
    for node in model.graph.node:
        node.input[:] = ["frozen" if name == "image" else name for name in node.input]
    model.graph.node.insert(
        0, onnx.helper.make_node("Reshape", ["image", "frozen.size"], ["frozen"])
    )
    onnx.save(model, tmp_path / "frozen.onnx")
    found = worst(tmp_path / "frozen.onnx", free[1])
    assert found.group.startswith("lengths:")
    assert "export refuses" in found.mismatch


def test_build_probes_of_fixed_size_adds_no_other_sizes(images: Tensors, tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    section = Export(framework="torch", dynamic={"image": {0: "batch"}})
    TorchExporter().export(pooled(), ExportRequest(section=section, samples=images, path=path))
    assert not [name for name in build_probes(path, images) if name.startswith("lengths:")]


def cancer(rows: int) -> tuple[Any, Any]:
    from sklearn.datasets import load_breast_cancer

    x, y = load_breast_cancer(return_X_y=True)
    return x[:rows].astype(np.float32), y[:rows]


def scaled(estimator: Any) -> Any:
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    return make_pipeline(StandardScaler(), estimator)


def scaled_regression() -> Any:
    from sklearn.linear_model import LogisticRegression

    return scaled(LogisticRegression())


def forest(trees: int = 3) -> Any:
    from sklearn.ensemble import RandomForestClassifier

    return RandomForestClassifier(trees, random_state=0)


@pytest.mark.parametrize(("make", "policy"), [(scaled_regression, "refused"), (forest, "answered")])
def test_reference_with_nan_compares_answers_or_records_rejection(
    make: Callable[[], Any], policy: str, tmp_path: Path
) -> None:
    x, y = cancer(200)
    asked = exported(SklearnExporter(), make().fit(x, y), SKLEARN, {"x": x}, tmp_path / "m.onnx")
    assert asked.limits.nan == policy
    assert ("missing" in asked.limits.refused) == (policy == "refused")
    assert ("missing" in [group.name for group in asked.groups]) == (policy != "refused")
    assert "infinity" in asked.limits.refused["infinite"]
    assert worst(tmp_path / "m.onnx", asked).ratio <= 10


def test_reference_outputs_for_nan_record_whether_model_propagates_it(tmp_path: Path) -> None:
    path = write_perceptron(tmp_path / "model.onnx")
    asked = collect_reference_outputs(OnnxExporter(), str(path), path, rows(40))
    assert asked.limits.nan in ("passed on", "answered")
    answers = next(g.single for g in asked.groups if g.name == "missing") or {}
    assert (asked.limits.nan == "passed on") == bool(np.isnan(answers["scores"]).any())


def test_reference_of_rows_with_nan_puts_missing_values_inside_domain(tmp_path: Path) -> None:
    from sklearn.ensemble import HistGradientBoostingClassifier

    x, y = cancer(200)
    x[::3, 2] = np.nan
    model = HistGradientBoostingClassifier(max_iter=5).fit(x, y)
    asked = exported(SklearnExporter(), model, SKLEARN, {"x": x}, tmp_path / "m.onnx")
    assert {group.name: group.inside for group in asked.groups}["missing"]


# torch itself causes this warning.
@pytest.mark.filterwarnings("ignore:The .grad attribute")
def test_parity_gate_of_recurrent_export_with_nan_difference_is_advisory_unless_configured(
    tmp_path: Path,
) -> None:
    """The runtime's kernels return a number for NaN, and the source returns NaN."""
    import torch

    class Recurrent(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cells = torch.nn.LSTM(3, 4, batch_first=True)

        def forward(self, series: torch.Tensor) -> torch.Tensor:
            hidden: torch.Tensor = self.cells(series)[0]
            return hidden[:, -1]

    torch.manual_seed(0)
    samples = {"series": np.random.default_rng(0).standard_normal((40, 5, 3)).astype(np.float32)}
    path = tmp_path / "model.onnx"
    asked = exported(TorchExporter(), Recurrent().eval(), Export(framework="torch"), samples, path)
    found = measure_parity(OnnxRuntime(), path, TARGET, asked.groups)
    departed = {m.group: m.inside for m in found if m.mismatch or m.ratio > 10}
    assert departed == {"missing": False}
    results = list(judge_parity(ParityGate(), evidence(parity=found)))
    assert [(r.verdict, r.advisory) for r in results] == [
        (Verdict.PASS, False),
        (Verdict.FAIL, True),
    ]
    strict = ParityGate(groups={"missing": "fail"})
    (refused,) = judge_parity(strict, evidence(parity=found))
    assert refused.verdict is Verdict.FAIL
    assert "for example row " in refused.reason
    # Rows of a data set can contain personal data.
    assert "series =" not in refused.reason
    (ignored,) = judge_parity(ParityGate(groups={"missing": "ignore"}), evidence(parity=found))
    assert not ignored.advisory


def test_measure_group_of_output_without_row_axis_compares_it() -> None:
    """An example is the last state of a recurrent layer, (layers, rows, width)."""
    samples = rows(40)
    wide = {"state": np.zeros((60, 3), dtype=np.float32)}
    group = ReferenceGroup(name="real", inputs=samples, single=wide, double=None)
    (found,) = measure_group(
        group, {"state": wide["state"] + np.eye(60, 3, k=-57, dtype=np.float32)}
    )
    assert found.ratio > 10
    assert not found.example


class Slow:
    """A linear source that takes a tenth of a second per row, by a simulated clock."""

    def __init__(self, clock: list[float]) -> None:
        self._clock = clock
        self.rows = 0

    def reference(self, model: object, inputs: Tensors, precision: str) -> Tensors:
        (x,) = inputs.values()
        self._clock[0] += 0.1 * len(x)
        self.rows += len(x)
        return {"y": x.sum(axis=1)}


def test_reference_of_slow_source_uses_fewer_rows_and_records_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_perceptron(tmp_path / "model.onnx")
    clock = [0.0]
    monkeypatch.setattr("onnx_ops.measure.reference_outputs.time.perf_counter", lambda: clock[0])
    slow: Any = Slow(clock)
    asked = collect_reference_outputs(slow, None, path, rows(400), seconds=60)
    assert (asked.limits.rows, asked.limits.samples) == (16, 400)
    assert clock[0] < 90
    assert {"real", "range", "batches:257", "missing"} <= {group.name for group in asked.groups}
    assert max(len(group.inputs["x"]) for group in asked.groups) == 16


@pytest.mark.parametrize("count", [2, 3])
def test_reference_of_slow_source_with_few_rows_ends_near_time_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    path = write_perceptron(tmp_path / "model.onnx")
    clock = [0.0]
    monkeypatch.setattr("onnx_ops.measure.reference_outputs.time.perf_counter", lambda: clock[0])
    slow: Any = Slow(clock)
    collect_reference_outputs(slow, None, path, rows(count), seconds=60)
    assert clock[0] < 90


class Ranked:
    """A source that ranks a row, and reads the reversed row at these indices."""

    def reference(self, model: object, inputs: Tensors, precision: str) -> Tensors:
        x = inputs["x"]
        order = np.argsort(np.negative(x.astype(np.float64)), axis=1, kind="stable")[:, :2]
        return {"i": order, "y": np.take_along_axis(x[:, ::-1], order, axis=1)}


def test_reference_of_outputs_in_ranked_order_includes_bounds(tmp_path: Path) -> None:
    text = """(float[N,4] x) => (int64[N,K] i, float[N,K] y) {
        v, i = TopK(x, k)
        r = Gather<axis=1>(x, turned)
        y = GatherElements<axis=1>(r, i)
    }"""
    path = write_graph(
        tmp_path / "model.onnx", text, k=np.array([2]), turned=np.array([3, 2, 1, 0])
    )
    x = np.random.default_rng(0).normal(size=(40, 4)).astype(np.float32)
    x[7] = (2, 2, 1, -9)
    source: Any = Ranked()
    groups = {
        group.name: group
        for group in collect_reference_outputs(source, None, path, {"x": x}).groups
    }
    bounds = groups["real"].bounds
    assert bounds is not None
    assert set(bounds) == {"y"}
    assert np.flatnonzero(np.ptp(bounds["y"], axis=0).max(axis=1) > 1e-3).tolist() == [7]
    assert groups["range"].bounds is not None


RANDOM: dict[str, Callable[[Any, Any], Any]] = {
    "noise": lambda torch, x: x + 0.1 * torch.randn_like(x),
    "noise no larger than rounding to float32": lambda torch, x: x + 1e-7 * torch.randn_like(x),
    "dropout": lambda torch, x: torch.nn.functional.dropout(x, 0.1, training=True),
    "sampling": lambda torch, x: torch.multinomial(torch.softmax(x, 1), 1),
    "any number of columns": lambda torch, x: (torch.rand(()) * x[:, :1]).expand(
        -1, int(torch.randint(1, 1000, ()))
    ),
}


@pytest.mark.parametrize("name", RANDOM)
def test_source_changes_with_random_answers_reports_change(name: str) -> None:
    """The randomness would count as noise that the export is allowed to have."""
    import torch

    class Random(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            return RANDOM[name](torch, x)

    source = _Source(TorchExporter(), Random().eval(), False)
    x = np.random.default_rng(0).standard_normal((64, 8)).astype(np.float32)
    assert source.changes(source.group("real", {"x": x}))


def test_reference_of_source_with_random_predictions_raises_user_error(tmp_path: Path) -> None:
    from sklearn.linear_model import LinearRegression

    x = np.random.default_rng(0).standard_normal((64, 4)).astype(np.float32)
    model = LinearRegression().fit(x, x.sum(1))
    path = tmp_path / "model.onnx"
    exported(SklearnExporter(), model, SKLEARN, {"x": x}, path)
    sure = model.predict
    model.predict = lambda rows: sure(rows) + np.random.default_rng().standard_normal(len(rows))
    with pytest.raises(UserError, match="the same rows differently") as refused:
        collect_reference_outputs(SklearnExporter(), model, path, {"x": x})
    assert "differs by up to" in refused.value.why


def test_reference_of_source_that_rejects_samples_raises_user_error(tmp_path: Path) -> None:
    x, y = cancer(100)
    model = scaled_regression().fit(x, y)
    path = tmp_path / "model.onnx"
    exported(SklearnExporter(), model, SKLEARN, {"x": x}, path)
    x[3, 2] = np.nan
    with pytest.raises(UserError, match="rejects the samples"):
        collect_reference_outputs(SklearnExporter(), model, path, {"x": x})


class Forest(NamedTuple):
    """A scaler and a forest, its export, and its own outputs for samples."""

    model: Any
    samples: Tensors
    path: Path
    asked: ReferenceOutputs


@pytest.fixture(scope="module")
def scaled_forest(tmp_path_factory: pytest.TempPathFactory) -> Forest:
    x, y = cancer(569)
    model = scaled(forest(12)).fit(x, y)
    samples, path = {"x": x[:256]}, tmp_path_factory.mktemp("forest") / "model.onnx"
    return Forest(model, samples, path, exported(SklearnExporter(), model, SKLEARN, samples, path))


def reciprocal(sound: Path, path: Path) -> Path:
    """Write the scaler as a product with 1 / deviation.

    It rounds differently and is equally correct.
    """
    model = onnx.load(sound)
    node = next(node for node in model.graph.node if node.op_type == "Div")
    node.op_type = "Mul"
    onnx.save(model, path)
    return write_changed(path, node.input[1], lambda deviation: 1 / deviation)


def test_measure_parity_of_forest_allows_flips_explained_by_jitter(
    scaled_forest: Forest, tmp_path: Path
) -> None:
    model, samples, sound, asked = scaled_forest
    thresholds = np.concatenate(
        [tree.tree_.threshold[tree.tree_.feature >= 0] for tree in model[-1].estimators_]
    )
    features = np.concatenate(
        [tree.tree_.feature[tree.tree_.feature >= 0] for tree in model[-1].estimators_]
    )
    x = np.repeat(samples["x"][:1], len(thresholds), axis=0).astype(np.float64)
    middle = thresholds * model[0].scale_[features] + model[0].mean_[features]
    x[np.arange(len(x)), features] = middle
    on_the_edge = {"x": x.astype(np.float32)}
    path = reciprocal(sound, tmp_path / "model.onnx")
    groups = collect_reference_outputs(SklearnExporter(), model, path, on_the_edge).groups
    real = next(group for group in groups if group.name == "real")
    (explained,) = [
        m
        for m in measure_parity(OnnxRuntime(), path, TARGET, [real])
        if m.output == "probabilities"
    ]
    assert explained.explained > 0
    assert explained.unexplained == 0
    assert explained.ratio <= 10
    plain = replace(real, bounds=None, single=real.double)
    assert max(m.ratio for m in measure_parity(OnnxRuntime(), path, TARGET, [plain])) > 1000
    assert worst(path, asked).ratio <= 10


@pytest.mark.parametrize(
    "fault", ["features swapped", "tree dropped", "classes permuted", "scaler mean rolled"]
)
def test_measure_parity_of_faulty_forest_exceeds_limit_despite_jitter(
    scaled_forest: Forest, fault: str, tmp_path: Path
) -> None:
    _, samples, sound, asked = scaled_forest
    path = tmp_path / "model.onnx"
    broken = onnx.load(sound)
    if fault == "features swapped":
        order = np.arange(samples["x"].shape[1])
        order[[2, 5]] = order[[5, 2]]
        broken.graph.initializer.append(numpy_helper.from_array(order, "order"))
        broken.graph.node[0].input[0] = "swapped"
        broken.graph.node.insert(
            0, onnx.helper.make_node("Gather", ["x", "order"], ["swapped"], axis=1)
        )
    elif fault == "scaler mean rolled":
        name = next(node.input[1] for node in broken.graph.node if node.op_type == "Sub")
        broken = onnx.load(write_changed(sound, name, lambda mean: np.roll(mean, 1)))
    else:
        attributes = next(
            n for n in broken.graph.node if n.op_type.startswith("TreeEnsemble")
        ).attribute
        weights = next(a for a in attributes if a.name == "class_weights")
        trees = next(a for a in attributes if a.name == "class_treeids").ints
        if fault == "tree dropped":
            weights.floats[:] = [
                0.0 if tree == 3 else w for tree, w in zip(trees, weights.floats, strict=True)
            ]
        else:
            weights.floats[:] = [1 / 12 - w for w in weights.floats]
    onnx.save(broken, path)
    measured = measure_parity(OnnxRuntime(), path, TARGET, asked.groups)
    assert max(m.unexplained for m in measured if m.group == "real") > 0
    assert max(m.ratio for m in measured if m.group == "real") > 10


def test_export_and_validate_stages_store_limits_bounds_and_trees(
    scaled_forest: Forest, tmp_path: Path
) -> None:
    model, samples, _, _ = scaled_forest
    context = replace(
        FakeWorld().context(root=tmp_path),
        exporter=lambda *_: SklearnExporter(),
        runtime=lambda _: OnnxRuntime(),
    )
    trained = tmp_path / "trained"
    trained.mkdir()
    SklearnExporter().save(model, trained)
    inputs = {
        "train": Manifest(files=put_folder(context.store, trained, TRAINED)),
        "data/test": put_dataset(context.store, Dataset(inputs=samples)),
    }
    section = codec.to_json(SKLEARN)
    settings = {
        "section": section,
        "data": "test",
        "limit": 64,
        "inputs": {},
        "ordered": False,
        "source_time": 10.0,
    }
    settings["pipeline"] = "p"
    stage = Stage(id="export", kind=StageKind.EXPORT, settings=settings)
    done = export.execute(stage, digest_bytes(b""), inputs, context)
    limits = codec.loads(context.store.read(done["source.json"]), SourceLimits)
    assert limits.nan == "answered"
    assert read_lineage(context.store.path(done["onnx/model.onnx"]))[NAN_PROPERTY] == "answered"
    assert any(group.bounds for group in get_reference(context.store, done["reference.npz"]))
    stage = Stage(id="validate", kind=StageKind.VALIDATE, settings={"export": section})
    validated = validate.execute(stage, digest_bytes(b""), {**inputs, "export": done}, context)
    (trees,) = codec.loads(context.store.read(validated["trees.json"]), tuple[TreeStructure, ...])
    assert (trees.trees, trees.changed) == (12, 0)


def test_put_reference_then_get_reference_returns_same_groups(
    scaled_forest: Forest, tmp_path: Path
) -> None:
    asked = scaled_forest.asked
    store = FakeWorld().context(root=tmp_path).store
    found = get_reference(store, put_reference(store, asked.groups))
    restored = {group.name: group for group in found}
    assert len(found) == len(restored) == len(asked.groups)
    for before in asked.groups:
        after = restored[before.name]
        assert after.outputs == before.outputs
        assert after.inside == before.inside
        for one, other in (
            (before.inputs, after.inputs),
            (before.single, after.single),
            (before.double, after.double),
            (before.bounds, after.bounds),
        ):
            assert (one or {}).keys() == (other or {}).keys()
            for name, array in (one or {}).items():
                np.testing.assert_array_equal(array, (other or {})[name])


def test_build_probes_of_free_batch_includes_groups_inside_and_outside_domain(
    tmp_path: Path,
) -> None:
    probes = build_probes(write_perceptron(tmp_path / "model.onnx"), rows(40))
    assert {"real", "range", "missing", "infinite", "empty_batch", "batches:257"} <= set(probes)
    assert len(probes["real"].inputs["x"]) == 40
    inside = {name for name, probe in probes.items() if probe.inside}
    assert {"real", "range", "batches:257"} <= inside
    assert inside.isdisjoint({"missing", "infinite", "empty_batch"})


def test_build_probes_names_remedy_for_values_of_wrong_type_but_not_for_missing_rows(
    tmp_path: Path,
) -> None:
    path = write_perceptron(tmp_path / "model.onnx")
    with pytest.raises(UserError, match="there are no real samples") as caught:
        build_probes(path, rows(0))
    assert not caught.value.remedy
    with pytest.raises(UserError, match="input 'x': its values are numbers") as caught:
        build_probes(path, rows(4), {"x": InputValues(values=("a",))})
    assert caught.value.remedy == "Declare values of the input's type."


def test_build_probes_of_fixed_batch_uses_its_size_and_runs(tmp_path: Path) -> None:
    path = write_perceptron(tmp_path / "model.onnx", batch=2)
    probes = build_probes(path, rows(40))
    assert not [name for name in probes if "batch" in name]
    feeds = tuple(probe.inputs for probe in probes.values())
    assert {tensors["x"].shape for tensors in feeds} == {(2, 8)}
    assert len(OnnxRuntime().run(path, TARGET, feeds)) == len(probes)
    repeated = build_probes(write_perceptron(tmp_path / "model.onnx", batch=5), rows(3))[
        "real"
    ].inputs["x"]
    np.testing.assert_array_equal(repeated, rows(3)["x"][[0, 1, 2, 0, 1]])


def test_build_probes_of_recurrent_model_omits_empty_batch(tmp_path: Path) -> None:
    """ONNX Runtime would abort the process for an empty batch."""
    text = (
        "(float[time,batch,4] x) => (float[time,1,batch,3] y) { y = LSTM<hidden_size: "
        "int = 3>(x, w, r) }"
    )
    weights = {"w": np.ones((1, 12, 4), np.float32), "r": np.ones((1, 12, 3), np.float32)}
    path = write_graph(tmp_path / "model.onnx", text, **weights)
    probes = build_probes(path, {"x": np.ones((6, 2, 4), dtype=np.float32)})
    assert "empty_batch" not in probes
    assert "batches:1" in probes


def test_check_compatibility_of_too_new_opset_raises_user_error_with_remedy(tmp_path: Path) -> None:
    path = write_perceptron(tmp_path / "model.onnx", opset=18, ir_version=9)
    message = r"accepts opset <= 17, .* this model has opset 18, IR version 9: set export.opset: 17"
    with pytest.raises(UserError, match=message) as caught:
        check_compatibility(path, replace(TARGET, max_opset=17), "benchmark/fp32@cpu")
    assert "leave out target cpu" in caught.value.remedy
    check_compatibility(path, replace(TARGET, max_opset=18, max_ir_version=9), "benchmark/fp32@cpu")


def test_check_compatibility_of_unsupported_block_size_raises_user_error_with_remedy(
    tmp_path: Path,
) -> None:
    text = (
        "(float[n, 512] x) => (float[n, 1] y) { y = com.microsoft.MatMulNBits<K = 512, N = 1, "
        "bits = 4, block_size = 512>(x, w, s) }"
    )
    path = write_graph(tmp_path / "model.onnx", text, domains={"com.microsoft": 1})
    with pytest.raises(UserError, match="blocks of 512") as caught:
        check_compatibility(path, TARGET, "benchmark/w4@cpu")
    assert "quantize with a block size" in caught.value.remedy
    assert "leave out target cpu" in caught.value.remedy
