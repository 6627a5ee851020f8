"""compare and bench as use cases, on real sessions of ONNX Runtime."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from onnx_ops.adapters.runtimes.onnxruntime import OnnxRuntime
from onnx_ops.config.targets import BUILTIN, TargetFiles, load_profile
from onnx_ops.domain.artifact import Digest, TensorSpec
from onnx_ops.domain.decision import Verdict
from onnx_ops.domain.evidence import Evidence, ParityMeasurement
from onnx_ops.domain.gate import LatencyGate, MeasurementRequest, ParityGate, derive_measurement_request
from onnx_ops.domain.target import HardwareFingerprint
from onnx_ops.errors import MeasurementError, UserError
from onnx_ops.measure import speed
from onnx_ops.onnx_graph.input_bounds import read_input_bounds
from onnx_ops.statistics.latency import LOOKS
from onnx_ops.statistics.probes import BATCH_SIZES
from onnx_ops.statistics.rules.parity import judge_parity
from onnx_ops.testing.models import FEATURES, rows, write_convolution, write_perceptron
from onnx_ops.tools.bench import benchmark, benchmark_pair, build_pair_gates
from onnx_ops.tools.compare import ParityResult, compare
from onnx_ops.tools.probing import build_groups, check_samples, generate_samples, shared_inputs
from tests.measure.scripted import Scripted
from tests.support.golden import Golden

ROOT = Path(__file__).resolve().parents[2]
CPU = load_profile("cpu-1t")
RUNTIME = OnnxRuntime()
FIVE = (LatencyGate(max_regression=0.05),)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "model.onnx"
    write_perceptron(path)
    return path


def changed(model: Path, name: str, tensor: str, change: Any) -> Path:
    """A copy with one weight changed."""
    proto = onnx.load(model)
    for weight in proto.graph.initializer:
        if weight.name == tensor:
            weight.CopyFrom(numpy_helper.from_array(change(numpy_helper.to_array(weight)), tensor))
    path = model.with_name(name)
    onnx.save(proto, path)
    return path


def graph(path: Path, nodes: Sequence[onnx.NodeProto], inputs: dict[str, Any], outputs: dict[str, Any]) -> Path:
    """A file of nodes without weights; inputs and outputs are (type, shape)."""
    made = helper.make_graph(
        nodes,
        "made",
        [helper.make_tensor_value_info(name, *kind) for name, kind in inputs.items()],
        [helper.make_tensor_value_info(name, *kind) for name, kind in outputs.items()],
    )
    proto = helper.make_model(made, ir_version=10, opset_imports=[helper.make_opsetid("", 18)])
    path.write_bytes(proto.SerializeToString())
    return path


def compared(a: Path, b: Path, **keywords: Any) -> ParityResult:
    samples = generate_samples(
        shared_inputs(a, b), count=keywords.get("count", 64), dims=keywords.get("dims", {}), bounds=read_input_bounds(a)
    )
    return compare(RUNTIME, CPU, a, b, samples, sizes=keywords.get("sizes", ()))


class TestTargets:
    def test_the_built_in_targets_are_those_of_the_files(self) -> None:
        for name, target in ((name, load_profile(name)) for name in BUILTIN):
            assert TargetFiles(ROOT).load(name) == target

    def test_a_projects_file_comes_first(self, tmp_path: Path) -> None:
        folder = tmp_path / "configs" / "targets"
        folder.mkdir(parents=True)
        (folder / "cpu-1t.yaml").write_text("name: cpu-1t\nsession: {intra_op_threads: 2}\n", encoding="utf-8")
        files = TargetFiles(tmp_path)
        assert files.names() == ("cpu-1t",)
        assert files.load("cpu-1t").session.intra_op_threads == 2
        assert files.load("cpu-all") == load_profile("cpu-all")


class TestProbing:
    def test_random_rows_are_the_same_every_time_and_fit_the_model(self, model: Path) -> None:
        first, second = (generate_samples(shared_inputs(model), count=10, dims={}, seed=3) for _ in range(2))
        np.testing.assert_array_equal(first.rows["x"], second.rows["x"])
        assert first.rows["x"].shape == (10, FEATURES)
        assert first.rows["x"].dtype == np.float32

    def test_a_fixed_batch_is_kept_in_every_run(self, tmp_path: Path) -> None:
        path = tmp_path / "fixed.onnx"
        write_perceptron(path, batch=5)
        samples = generate_samples(shared_inputs(path), count=32, dims={})
        found = build_groups(samples)
        assert {len(feed["x"]) for group in found for feed in group.runs} == {5}
        assert {group.name for group in found} >= {"real", "range", "beyond_range:x1e5", "missing", "infinite"}
        assert len(samples.feed(1)["x"]) == 5

    def test_what_one_model_fixes_is_fixed_for_both(self, model: Path, tmp_path: Path) -> None:
        fixed = tmp_path / "fixed.onnx"
        write_perceptron(fixed, batch=4)
        assert shared_inputs(model, fixed)[0].shape == shared_inputs(fixed, model)[0].shape == (4, FEATURES)
        assert compared(fixed, model).verdict is Verdict.PASS
        alike = compared(model, fixed, sizes=["batch"])
        assert alike.verdict is Verdict.PASS
        assert "B takes batch = 4 only" in alike.notes[0]
        refused = compared(model, fixed)
        assert refused.verdict is Verdict.FAIL
        assert "A takes any" in refused.reason

    def test_other_symbolic_dimensions_have_the_size_asked_for(self) -> None:
        spec = TensorSpec(name="x", dtype="float32", shape=("batch", 3, "height", "?"))
        assert generate_samples([spec], count=2, dims={"height": 20}).rows["x"].shape == (2, 3, 20, 8)
        with pytest.raises(UserError, match="Named ones: batch, height"):
            generate_samples([spec], count=2, dims={"hieght": 20})

    @pytest.mark.parametrize("dtype", ["float16", "float64", "int64", "int8", "uint8", "bool", "string"])
    def test_every_type_of_tensor_can_be_made_up_and_probed(self, dtype: str) -> None:
        samples = generate_samples([TensorSpec(name="x", dtype=dtype, shape=("n", 2))], count=40, dims={})
        kinds = {feed["x"].dtype for group in build_groups(samples) for feed in group.runs}
        assert {kind.str[:2] if kind.kind == "U" else kind.str for kind in kinds} == {
            "<U" if dtype == "string" else samples.rows["x"].dtype.str
        }
        assert {
            array.shape[1] for group in build_groups(samples) for feed in group.runs for array in feed.values()
        } == {2}

    @pytest.mark.parametrize("dtype", ["undefined", "float8e4m3fn", "complex64", "object", "nonsense"])
    def test_another_type_is_refused(self, dtype: str) -> None:
        with pytest.raises(UserError, match="is of type"):
            generate_samples([TensorSpec(name="x", dtype=dtype, shape=("n",))], count=4, dims={})

    @pytest.mark.parametrize("dtype", ["bfloat16", "map", "optional", "sequence"])
    def test_an_input_that_numpy_has_no_array_for_is_refused_with_its_own_remedy(self, dtype: str) -> None:
        with pytest.raises(UserError, match=f"is of type {dtype}") as caught:
            generate_samples([TensorSpec(name="x", dtype=dtype, shape=())], count=4, dims={})
        assert caught.value.remedy.partition(" ")[0] in ("Export", "NumPy")

    def test_sizes_that_no_machine_holds_are_refused(self) -> None:
        with pytest.raises(UserError, match="one row of the model's inputs takes"):
            generate_samples([TensorSpec(name="x", dtype="float32", shape=("n", 1 << 40, 1 << 40))], count=4, dims={})

    def test_large_rows_are_fewer_in_small_runs_and_without_edges(self) -> None:
        samples = generate_samples([TensorSpec(name="x", dtype="uint8", shape=("n", 1 << 22))], count=500, dims={})
        found = build_groups(samples)
        assert (len(samples), samples.large) == (16, True)
        assert [group.name for group in found] == ["real", "batches:1", "batches:2", "batches:3"]
        assert max(len(feed["x"]) for group in found for feed in group.runs) == 4

    def test_inputs_that_begin_with_different_fixed_dimensions_are_drawn_whole(self) -> None:
        specs = [TensorSpec(name=name, dtype="float32", shape=(size, 2)) for name, size in (("x", 1), ("h", 4))]
        samples = generate_samples(specs, count=3, dims={})
        (group,) = build_groups(samples)
        (run,) = group.runs
        assert {name: array.shape for name, array in run.items()} == {"x": (1, 2), "h": (4, 2)}
        with pytest.raises(UserError, match="different dimensions"):
            check_samples(specs, run, where="rows.npz", limit=3)

    @pytest.mark.parametrize(
        ("arrays", "told"),
        [
            ({"z": np.zeros((4, FEATURES))}, "has no array 'x'"),
            ({"x": np.zeros((4, FEATURES + 1))}, "has shape"),
            ({"x": np.zeros(4)}, "has shape"),
            ({"x": np.zeros((4, FEATURES), dtype=complex)}, "is of type complex128"),
            ({"x": np.full((4, FEATURES), "text")}, "is of type <U4"),
        ],
    )
    def test_rows_that_do_not_fit_are_refused(self, model: Path, arrays: dict[str, Any], told: str) -> None:
        with pytest.raises(UserError, match=told):
            check_samples(shared_inputs(model), arrays, where="rows.npz", limit=10)

    def test_rows_of_another_precision_are_cast_and_what_else_is_there_is_left_alone(self, model: Path) -> None:
        found = check_samples(
            shared_inputs(model), {"x": np.zeros((40, FEATURES)), "y": np.zeros(40)}, where="rows.npz", limit=10
        )
        assert found.rows["x"].dtype == np.float32
        assert (set(found.rows), len(found)) == ({"x"}, 10)


class TestCompare:
    def test_a_model_is_itself_whatever_the_optimisations(self, model: Path) -> None:
        found = compared(model, model)
        assert found.verdict is Verdict.PASS
        assert {d.group for d in found.differences} == {"real", "range", *(f"batches:{n}" for n in BATCH_SIZES)}
        assert "same answers on 8 groups" in found.reason or "within tolerance on 8 groups" in found.reason
        assert not found.notes

    @pytest.mark.parametrize(
        ("tensor", "change"),
        [
            ("second.bias", lambda w: w + 0.1),
            ("second.weight", lambda w: w[::-1].copy()),
            ("third.weight", lambda w: w * np.float32(1.02)),
            ("third.bias", np.zeros_like),
        ],
    )
    def test_a_changed_weight_is_told(self, model: Path, tensor: str, change: Any) -> None:
        found = compared(model, changed(model, "wrong.onnx", tensor, change))
        assert found.verdict is Verdict.FAIL
        assert "output 'scores'" in found.reason
        assert found.worst.error > found.worst.limit

    def test_the_verdict_is_that_of_the_pipelines_judge(self, model: Path) -> None:
        for other in (model, changed(model, "wrong.onnx", "third.bias", np.zeros_like)):
            found = compared(model, other)
            factor = ParityGate().noise_factor
            measured = tuple(
                ParityMeasurement(
                    output=d.output, group=d.group, rows=d.rows, error=d.error, noise=d.limit / factor,
                    ratio=d.ratio * factor, mismatch="",
                )
                for d in found.differences
            )  # fmt: skip
            assert [r.verdict for r in judge_parity(ParityGate(), evidence(measured))] == [found.verdict]

    def test_labels_are_counted_by_rows(self, tmp_path: Path) -> None:
        kind, whole = (TensorProto.FLOAT, ["n", 3]), (TensorProto.INT64, ["n"])
        best = helper.make_node("ArgMax", ["x"], ["label"], axis=1, keepdims=0)
        a = graph(tmp_path / "a.onnx", [best], {"x": kind}, {"label": whole})
        zero, step = (
            helper.make_node("Constant", [], [name], value=numpy_helper.from_array(value))
            for name, value in (("zero", np.array(0, dtype=np.int8)), ("step", np.array(2, dtype=np.float32)))
        )
        quantize = helper.make_node("QuantizeLinear", ["x", "step", "zero"], ["q"])
        back = helper.make_node("DequantizeLinear", ["q", "step", "zero"], ["r"])
        coarse = helper.make_node("ArgMax", ["r"], ["label"], axis=1, keepdims=0)
        b = graph(tmp_path / "b.onnx", [zero, step, quantize, back, coarse], {"x": kind}, {"label": whole})
        found = compared(a, b)
        assert found.verdict is Verdict.FAIL
        assert found.worst.labels
        assert "answers differ in" in found.reason

    def test_a_missing_output_and_inputs_that_only_b_refuses_fail(self, tmp_path: Path, golden: Golden) -> None:
        kind = (TensorProto.FLOAT, ["n", 2])
        relu = helper.make_node("Relu", ["x"], ["y"])
        a = graph(
            tmp_path / "a.onnx",
            [relu, helper.make_node("Neg", ["x"], ["z"])],
            {"x": kind},
            {"y": kind, "z": kind},
        )
        b = graph(tmp_path / "b.onnx", [relu], {"x": kind}, {"y": kind})
        missing = compared(a, b)
        assert missing.verdict is Verdict.FAIL
        assert "output 'z'" in missing.reason
        assert "B lacks this output" in missing.reason
        golden("reasons", "\n".join(compared(b, a).notes))
        picky = graph(
            tmp_path / "picky.onnx",
            [
                helper.make_node("Constant", [], ["shape"], value=numpy_helper.from_array(np.array([-1, 4]))),
                helper.make_node("Reshape", ["x", "shape"], ["pairs"]),
                helper.make_node("Shape", ["x"], ["old"]),
                helper.make_node("Reshape", ["pairs", "old"], ["same"]),
                helper.make_node("Relu", ["same"], ["y"]),
            ],
            {"x": kind},
            {"y": kind},
        )
        found = compared(b, picky)
        assert found.verdict is Verdict.FAIL
        assert "B refuses these inputs" in found.reason
        assert {d.group for d in found.differences if d.verdict is Verdict.FAIL} >= {"batches:1", "batches:3"}
        assert any("A refuses them" in note for note in compared(picky, b).notes)

    def test_every_row_of_a_table_is_asked_for_and_numbers_of_every_size(self, tmp_path: Path) -> None:
        table = np.random.default_rng(0).standard_normal((400, 3)).astype(np.float32)

        def lookup(name: str, values: Any) -> Path:
            node = helper.make_node("Constant", [], ["table"], value=numpy_helper.from_array(values))
            nodes = [node, helper.make_node("Gather", ["table", "tokens"], ["y"])]
            kinds = {"tokens": (TensorProto.INT64, ["n", 4])}, {"y": (TensorProto.FLOAT, ["n", 4, 3])}
            return graph(tmp_path / name, nodes, *kinds)

        right = lookup("right.onnx", table)
        for number, wrong in enumerate((np.roll(table, 1, axis=0), np.vstack([table[:-1], 0 * table[:1]]))):
            assert compared(right, lookup(f"wrong{number}.onnx", wrong), count=128).verdict is Verdict.FAIL

        def clock(name: str, fmod: int) -> Path:
            node = helper.make_node("Constant", [], ["day"], value=numpy_helper.from_array(np.array(86_400)))
            nodes = [node, helper.make_node("Mod", ["time", "day"], ["y"], fmod=fmod)]
            kind = (TensorProto.INT64, ["n", 1])
            return graph(tmp_path / name, nodes, {"time": kind}, {"y": kind})

        assert compared(clock("a.onnx", 0), clock("b.onnx", 1)).verdict is Verdict.FAIL

    def test_what_differs_only_where_no_row_is_like_that_is_a_note(self, tmp_path: Path) -> None:
        kind = (TensorProto.FLOAT, ["n", 2])
        a = graph(tmp_path / "a.onnx", [helper.make_node("Identity", ["x"], ["y"])], {"x": kind}, {"y": kind})
        bounds = [
            helper.make_node("Constant", [], [name], value=numpy_helper.from_array(np.array(value, dtype=np.float32)))
            for name, value in (("low", -100), ("high", 100))
        ]
        clip = [*bounds, helper.make_node("Clip", ["x", "low", "high"], ["y"])]
        found = compared(a, graph(tmp_path / "b.onnx", clip, {"x": kind}, {"y": kind}))
        assert found.verdict is Verdict.PASS
        assert "beyond_range:x1e3" in found.notes[0]

    def test_a_model_that_draws_random_numbers_cannot_be_compared(self, tmp_path: Path) -> None:
        kind = (TensorProto.FLOAT, ["n", 2])
        path = graph(
            tmp_path / "r.onnx", [helper.make_node("RandomNormalLike", ["x"], ["y"])], {"x": kind}, {"y": kind}
        )
        with pytest.raises(MeasurementError, match="differs each time"):
            compared(path, path)

    def test_models_of_other_inputs_are_refused(self, model: Path, tmp_path: Path) -> None:
        other = tmp_path / "other.onnx"
        write_convolution(other)
        with pytest.raises(UserError, match="do not take the same inputs"):
            compared(model, other)

    def test_a_file_that_breaks_the_rules_is_the_users_and_an_unknown_operator_is_named(
        self, model: Path, tmp_path: Path
    ) -> None:
        kind = (TensorProto.FLOAT, ["n", 2])
        broken = graph(tmp_path / "b.onnx", [helper.make_node("Relu", ["nowhere"], ["y"])], {"x": kind}, {"y": kind})
        with pytest.raises(UserError, match="not valid ONNX"):
            compared(broken, broken)
        own = graph(
            tmp_path / "o.onnx", [helper.make_node("Mine", ["x"], ["y"], domain="my")], {"x": kind}, {"y": kind}
        )
        proto = onnx.load(own)
        proto.opset_import.add(domain="my", version=1)
        onnx.save(proto, own)
        with pytest.raises(UserError, match="lacks operators: my::Mine at y"):
            compared(own, own)


class TestBench:
    def test_alone_every_figure_has_its_n(self, model: Path) -> None:
        found = benchmark(RUNTIME, CPU, model, rows(4), runs=40, conditions=lambda: {"load": "0"})
        assert (found.batch, found.runs, found.facts.used) == (4, 40, ("CPUExecutionProvider",))
        assert list(found.figures) == ["p50", "p90", "p99"]
        assert 0 < found.figures["p50"].low <= found.figures["p50"].value
        assert found.figures["p99"].high is None, "40 runs bound no 99th percentile"
        assert found.figures["p50"].n == 40 - found.preempted or found.preempted == 40

    def test_load_and_fresh_processes_are_measured_where_asked(
        self, model: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(speed, "ROUNDS_ALONE", 1)
        asked = MeasurementRequest(throughput=(2,), starts=True)
        found = benchmark(RUNTIME, CPU, model, rows(1), runs=20, conditions=dict, request=asked)
        for name in ("concurrency 2", "load", "first", "peak"):
            assert found.figures[name].value > 0

    def test_each_figure_has_its_unit_its_number_and_an_interval(self, model: Path) -> None:
        asked = MeasurementRequest(throughput=(2,), starts=True)
        found = benchmark(Scripted({model: 1.0}), CPU, model, rows(1), runs=20, conditions=dict, request=asked)
        assert list(found.figures) == ["p50", "p90", "p99", "concurrency 2", "load", "first", "peak"]
        assert [found.figures[name].unit for name in ("concurrency 2", "load", "peak")] == ["req/s", "s", "B"]
        for name in ("concurrency 2", "load", "first", "peak"):
            figure = found.figures[name]
            assert figure.n == 10
            assert figure.high is not None
            assert 0 < figure.low <= figure.value <= figure.high

    @pytest.mark.parametrize(("slower", "verdict"), [(1.0, Verdict.PASS), (0.5, Verdict.PASS), (1.2, Verdict.FAIL)])
    def test_the_verdict_follows_the_times(self, model: Path, slower: float, verdict: Verdict) -> None:
        other = changed(model, "other.onnx", "third.bias", np.zeros_like)
        found = benchmark_pair(
            Scripted({model: 1.0, other: slower}), CPU, model, other, rows(1), gates=FIVE, conditions=dict
        )
        assert found.verdict is verdict
        (one,) = found.decision.results
        assert one.estimate == pytest.approx(slower, rel=0.02)
        assert one.low is not None
        assert one.high is not None
        assert one.low < slower * 1.02
        assert one.high > slower * 0.98
        a, b = found.medians["latency"]
        assert b / a == pytest.approx(slower, rel=0.02)
        assert one.n == 5

    def test_every_figure_has_its_own_limit_and_the_worst_verdict_counts(self, model: Path) -> None:
        other = changed(model, "other.onnx", "third.bias", np.zeros_like)
        runtime = Scripted({model: 1.0, other: 1.15})
        gates = build_pair_gates(None, concurrency=4, cold=True)
        found = benchmark_pair(runtime, CPU, model, other, rows(1), gates=gates, conditions=dict)
        assert [(r.metric, r.bound) for r in found.decision.results] == [
            ("ratio vs A", 1.05),
            ("concurrency 4 vs A", 1.05),
            ("load vs A", 1.2),
            ("first vs A", 1.2),
            ("peak vs A", 1.1),
        ]
        verdicts = {r.gate: r.verdict for r in found.decision.results}
        assert verdicts == {
            "latency": Verdict.FAIL,
            "throughput": Verdict.FAIL,
            "cold_start": Verdict.PASS,
            "memory": Verdict.FAIL,
        }
        assert found.verdict is Verdict.FAIL
        a, b = found.medians["concurrency 4"]
        assert b / a == pytest.approx(1 / 1.15, rel=0.02), "requests per second fall as the time per request grows"
        assert derive_measurement_request(build_pair_gates(0.3, concurrency=1, cold=True)).tolerances == dict.fromkeys(
            ("cold_start", "latency", "memory", "throughput"), (0.3,)
        )

    def test_a_noisy_machine_is_inconclusive_after_all_looks(self, model: Path) -> None:
        told: list[str] = []
        found = benchmark_pair(
            Scripted({model: 1.0}, noise=0.4),
            CPU,
            model,
            model,
            rows(1),
            gates=FIVE,
            conditions=dict,
            report=told.append,
        )
        assert found.verdict is Verdict.INCONCLUSIVE
        assert "measure on a quieter machine" in found.decision.reason
        assert found.decision.results[0].n == LOOKS[-1]
        assert len(told) == len(LOOKS)

    def test_a_silent_fallback_is_an_error(self, model: Path) -> None:
        runtime = Scripted({model: 1.0}, used=("OtherProvider",))
        with pytest.raises(MeasurementError, match="CPUExecutionProvider was asked for, OtherProvider ran"):
            benchmark_pair(runtime, CPU, model, model, rows(1), gates=FIVE, conditions=dict)

    def test_a_model_too_new_for_the_target_is_refused(self, model: Path) -> None:
        with pytest.raises(UserError, match="accepts opset <= 9, IR version <= 13; this model has opset 18"):
            benchmark(RUNTIME, replace(CPU, max_opset=9), model, rows(1), runs=20, conditions=dict)


def evidence(measured: tuple[ParityMeasurement, ...]) -> Evidence:
    return Evidence(
        pipeline="p",
        variant="fp32",
        target="cpu-1t",
        quantized=False,
        release=Digest("r"),
        manifest=Digest("m"),
        target_digest=Digest("t"),
        dedicated=False,
        size_bytes=1,
        hardware=HardwareFingerprint(
            machine="m", cpu_model="c", cpu_flags=(), cores=1, memory_bytes=1, runtime="r", runtime_version="1"
        ),
        parity=measured,
    )
