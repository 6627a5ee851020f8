"""`compare` and `bench` as use cases, on real sessions of ONNX Runtime."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from benchmarks.truth.evidence import evidence
from onnx_ops.adapters.runtimes.onnxruntime import OnnxRuntime
from onnx_ops.config.targets import PROFILES, TargetFiles
from onnx_ops.domain.artifact import TensorSpec
from onnx_ops.domain.decision import Verdict
from onnx_ops.domain.evidence import ParityMeasurement
from onnx_ops.domain.gate import (
    Gate,
    LatencyGate,
    MeasurementRequest,
    ParityGate,
    derive_measurement_request,
)
from onnx_ops.errors import MeasurementError, UserError
from onnx_ops.measure import speed
from onnx_ops.onnx_graph.compatibility import check_model
from onnx_ops.onnx_graph.input_bounds import read_input_bounds
from onnx_ops.statistics.latency import FULL_RUN, LOOKS
from onnx_ops.statistics.probes import BATCH_SIZES
from onnx_ops.statistics.rules.parity import judge_parity
from onnx_ops.testing.models import FEATURES, rows, write_convolution, write_perceptron
from onnx_ops.tools.bench import (
    ComparisonResult,
    benchmark,
    benchmark_pair,
    build_pair_gates,
    read_runtime_facts,
)
from onnx_ops.tools.compare import ParityResult, compare
from onnx_ops.tools.generated_rows import generate_samples
from onnx_ops.tools.model_inputs import shared_inputs
from onnx_ops.tools.quantize import _copy_with_weights
from onnx_ops.tools.sample_rows import build_groups
from onnx_ops.tools.supplied_rows import check_samples, find_input_problems
from tests.measure.scripted import Scripted
from tests.support.external import write_external
from tests.support.golden import Golden
from tests.support.graphs import write_graph
from tests.support.pairs import write_changed

CPU = TargetFiles(PROFILES).load("cpu-1t")
RUNTIME = OnnxRuntime()
FIVE = (LatencyGate(max_regression=0.05),)
EVERYTHING = MeasurementRequest(throughput=(2,), starts=True)
VOICE = (
    TensorSpec(name="x", dtype="float32", shape=("n", 4)),
    TensorSpec(name="rate", dtype="int64", shape=()),
)
"""Inputs of a model whose sample rate is a scalar."""
RELU = "(float[n,2] x) => (float[n,2] y) { y = Relu(x) }"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_perceptron(tmp_path / "model.onnx")


def compared(a: Path, b: Path, *, count: int = 64, sizes: Sequence[str] = ()) -> ParityResult:
    samples = generate_samples(
        shared_inputs(a, b), count=count, dims={}, bounds=read_input_bounds(a)
    )
    return compare(RUNTIME, CPU, a, b, samples, sizes=sizes)


class TestProbing:
    def test_generate_samples_with_same_seed_returns_same_rows(self, model: Path) -> None:
        first, second = (
            generate_samples(shared_inputs(model), count=10, dims={}, seed=3) for _ in range(2)
        )
        np.testing.assert_array_equal(first.rows["x"], second.rows["x"])
        assert first.rows["x"].shape == (10, FEATURES)
        assert first.rows["x"].dtype == np.float32

    def test_build_groups_of_fixed_batch_keeps_it_in_each_run(self, tmp_path: Path) -> None:
        path = write_perceptron(tmp_path / "fixed.onnx", batch=5)
        samples = generate_samples(shared_inputs(path), count=32, dims={})
        found = build_groups(samples)
        assert {len(feed["x"]) for group in found for feed in group.runs} == {5}
        assert {group.name for group in found} >= {
            "real",
            "range",
            "beyond_range:x1e5",
            "missing",
            "infinite",
        }
        assert len(samples.feed(1)["x"]) == 5

    def test_shared_inputs_of_fixed_and_free_batch_are_fixed(
        self, model: Path, tmp_path: Path
    ) -> None:
        fixed = write_perceptron(tmp_path / "fixed.onnx", batch=4)
        assert (
            shared_inputs(model, fixed)[0].shape
            == shared_inputs(fixed, model)[0].shape
            == (4, FEATURES)
        )

    def test_generate_samples_uses_size_of_named_dimension_and_rejects_unknown_name(self) -> None:
        spec = TensorSpec(name="x", dtype="float32", shape=("batch", 3, "height", "?"))
        assert generate_samples([spec], count=2, dims={"height": 20}).rows["x"].shape == (
            2,
            3,
            20,
            8,
        )
        with pytest.raises(UserError, match="Named dimensions: batch, height"):
            generate_samples([spec], count=2, dims={"hieght": 20})

    @pytest.mark.parametrize(
        "dtype", ["float16", "float64", "int64", "int8", "uint8", "bool", "string"]
    )
    def test_generate_samples_of_supported_type_returns_rows_of_that_type(self, dtype: str) -> None:
        samples = generate_samples(
            [TensorSpec(name="x", dtype=dtype, shape=("n", 2))], count=40, dims={}
        )
        arrays = [feed["x"] for group in build_groups(samples) for feed in group.runs]
        assert {"string" if array.dtype.kind == "U" else array.dtype.name for array in arrays} == {
            dtype
        }
        assert {array.shape[1] for array in arrays} == {2}

    @pytest.mark.parametrize(
        ("dtype", "remedy"),
        [
            *(
                (dtype, "Inputs")
                for dtype in ("undefined", "float8e4m3fn", "complex64", "object", "nonsense")
            ),
            *((dtype, "Export") for dtype in ("map", "optional", "sequence")),
            ("bfloat16", "NumPy"),
        ],
    )
    def test_generate_samples_of_unsupported_type_raises_user_error_with_remedy(
        self, dtype: str, remedy: str
    ) -> None:
        with pytest.raises(UserError, match=f"is of type {dtype}") as caught:
            generate_samples([TensorSpec(name="x", dtype=dtype, shape=("n",))], count=4, dims={})
        assert caught.value.remedy.partition(" ")[0] == remedy

    def test_generate_samples_of_huge_shape_raises_user_error(self) -> None:
        with pytest.raises(UserError, match="one row of the model's inputs takes"):
            generate_samples(
                [TensorSpec(name="x", dtype="float32", shape=("n", 1 << 40, 1 << 40))],
                count=4,
                dims={},
            )

    def test_generate_samples_of_large_rows_reduces_rows_and_groups(self) -> None:
        samples = generate_samples(
            [TensorSpec(name="x", dtype="uint8", shape=("n", 1 << 22))], count=500, dims={}
        )
        found = build_groups(samples)
        assert (len(samples), samples.large) == (16, True)
        assert [group.name for group in found] == ["real", "batches:1", "batches:2", "batches:3"]
        assert max(len(feed["x"]) for group in found for feed in group.runs) == 4

    def test_generate_samples_of_different_fixed_sizes_draws_whole_inputs(self) -> None:
        specs = [
            TensorSpec(name=name, dtype="float32", shape=(size, 2))
            for name, size in (("x", 1), ("h", 4))
        ]
        samples = generate_samples(specs, count=3, dims={})
        shapes = {"x": (1, 2), "h": (4, 2)}
        assert {name: array.shape for name, array in samples.fixed.items()} == shapes
        runs = {group.name: group.runs for group in build_groups(samples)}
        assert runs["real"] == ({},)
        assert {name: array.shape for name, array in runs["draws:1"][0].items()} == shapes
        supplied = check_samples(specs, samples.fixed, where="rows.npz", limit=3)
        assert (supplied.rows, set(supplied.fixed)) == ({}, {"x", "h"})

    def test_check_samples_with_constant_column_for_scalar_returns_its_value(self) -> None:
        for column in (np.full(5, 16000), np.full((5, 1), 16000)):
            samples = check_samples(
                VOICE, {"x": np.zeros((5, 4)), "rate": column}, where="rows.npz", limit=5
            )
            assert (samples.fixed["rate"].shape, samples.fixed["rate"].item()) == ((), 16000)

    def test_check_samples_with_different_values_for_scalar_raises_user_error(self) -> None:
        arrays = {"x": np.zeros((5, 4)), "rate": np.array([8000, 16000, 8000, 8000, 8000])}
        with pytest.raises(
            UserError, match="array 'rate' has 2 different values, but the model takes a scalar"
        ) as caught:
            check_samples(VOICE, arrays, where="rows.npz", limit=5)
        assert "--fix rate=VALUE" in caught.value.remedy

    def test_find_input_problems_with_column_for_scalar_suggests_values(self) -> None:
        arrays = {"x": np.zeros((5, 4), np.float32), "rate": np.full(5, 16000)}
        ((name, problem),) = find_input_problems(VOICE, arrays, {})
        assert (
            name,
            problem.endswith("the model takes a scalar. Set its value under `values:`"),
        ) == (
            "rate",
            True,
        )
        assert list(find_input_problems(VOICE, {"x": arrays["x"]}, {"rate": 16000})) == []

    @pytest.mark.parametrize(
        ("arrays", "expected"),
        [
            ({"z": np.zeros((4, FEATURES))}, "has no array 'x'"),
            ({"x": np.zeros((4, FEATURES + 1))}, "has shape"),
            ({"x": np.zeros(4)}, "has shape"),
            ({"x": np.zeros((4, FEATURES), dtype=complex)}, "is of type complex128"),
            ({"x": np.full((4, FEATURES), "text")}, "is of type <U4"),
        ],
    )
    def test_check_samples_with_wrong_arrays_raises_user_error(
        self, model: Path, arrays: dict[str, Any], expected: str
    ) -> None:
        with pytest.raises(UserError, match=expected):
            check_samples(shared_inputs(model), arrays, where="rows.npz", limit=10)

    def test_check_samples_casts_precision_and_ignores_other_arrays(self, model: Path) -> None:
        arrays = {"x": np.zeros((40, FEATURES)), "y": np.zeros(40)}
        found = check_samples(shared_inputs(model), arrays, where="rows.npz", limit=10)
        assert found.rows["x"].dtype == np.float32
        assert (set(found.rows), len(found)) == ({"x"}, 10)


class TestCompare:
    def test_compare_of_model_with_itself_passes_on_all_groups(self, model: Path) -> None:
        found = compared(model, model)
        assert found.verdict is Verdict.PASS
        assert {d.group for d in found.differences} == {
            "real",
            "range",
            *(f"batches:{n}" for n in BATCH_SIZES),
        }
        assert (
            "identical answers on 8 groups" in found.reason
            or "within tolerance on 8 groups" in found.reason
        )
        assert not found.notes

    def test_compare_of_free_with_fixed_batch_fails_unless_one_size_is_sufficient(
        self, model: Path, tmp_path: Path
    ) -> None:
        fixed = write_perceptron(tmp_path / "fixed.onnx", batch=4)
        assert compared(fixed, model).verdict is Verdict.PASS
        alike = compared(model, fixed, sizes=["batch"])
        assert alike.verdict is Verdict.PASS
        assert "B accepts only batch = 4" in alike.notes[0]
        refused = compared(model, fixed)
        assert refused.verdict is Verdict.FAIL
        assert "A accepts any" in refused.reason

    @pytest.mark.parametrize(
        ("tensor", "change"),
        [
            ("second.bias", lambda w: w + 0.1),
            ("second.weight", lambda w: w[::-1]),
            ("third.weight", lambda w: w * np.float32(1.02)),
            ("third.bias", np.zeros_like),
        ],
    )
    def test_compare_of_changed_weight_fails_and_names_output(
        self, model: Path, tensor: str, change: Any
    ) -> None:
        found = compared(model, write_changed(model, tensor, change))
        assert found.verdict is Verdict.FAIL
        assert "output 'scores'" in found.reason
        assert found.worst.error > found.worst.limit

    def test_compare_verdict_matches_parity_gate_of_pipeline(self, model: Path) -> None:
        for other in (model, write_changed(model, "third.bias", np.zeros_like)):
            found = compared(model, other)
            factor = ParityGate().noise_factor
            measured = tuple(
                ParityMeasurement(
                    output=d.output,
                    group=d.group,
                    rows=d.rows,
                    error=d.error,
                    noise=d.limit / factor,
                    ratio=d.ratio * factor,
                    mismatch="",
                )
                for d in found.differences
            )
            assert [r.verdict for r in judge_parity(ParityGate(), evidence(parity=measured))] == [
                found.verdict
            ]

    def test_compare_of_models_with_different_labels_fails(self, tmp_path: Path) -> None:
        best = (
            "(float[n,3] x) => (int64[n] label) { label = ArgMax<axis: int = 1, keepdims: "
            "int = 0>(x) }"
        )
        coarse = best.replace(
            "{", "{ q = QuantizeLinear(x, step, zero)\n r = DequantizeLinear(q, step, zero)\n "
        )
        rounding = {"step": np.float32(2), "zero": np.int8(0)}
        a = write_graph(tmp_path / "a.onnx", best)
        found = compared(
            a, write_graph(tmp_path / "b.onnx", coarse.replace("(x) }", "(r) }"), **rounding)
        )
        assert found.verdict is Verdict.FAIL
        assert found.worst.labels
        assert "answers differ in" in found.reason

    def test_compare_with_missing_output_or_rejected_inputs_fails(
        self, tmp_path: Path, golden: Golden
    ) -> None:
        two = "(float[n,2] x) => (float[n,2] y, float[n,2] z) { y = Relu(x)\n z = Neg(x) }"
        pairs = "p = Reshape(x, shape)\n old = Shape(x)\n same = Reshape(p, old)\n y = Relu(same)"
        a, b = write_graph(tmp_path / "a.onnx", two), write_graph(tmp_path / "b.onnx", RELU)
        missing = compared(a, b)
        assert missing.verdict is Verdict.FAIL
        assert "output 'z'" in missing.reason
        assert "B lacks this output" in missing.reason
        golden("reasons", "\n".join(compared(b, a).notes))
        picky = write_graph(
            tmp_path / "picky.onnx", RELU.replace("y = Relu(x)", pairs), shape=[-1, 4]
        )
        found = compared(b, picky)
        assert found.verdict is Verdict.FAIL
        assert "B rejects these inputs" in found.reason
        assert {d.group for d in found.differences if d.verdict is Verdict.FAIL} >= {
            "batches:1",
            "batches:3",
        }
        assert any("A rejects them" in note for note in compared(picky, b).notes)

    def test_compare_of_unequal_lookup_or_modulo_models_fails(self, tmp_path: Path) -> None:
        table = np.random.default_rng(0).standard_normal((400, 3)).astype(np.float32)
        lookup = "(int64[n,4] tokens) => (float[n,4,3] y) { y = Gather(table, tokens) }"
        right = write_graph(tmp_path / "right.onnx", lookup, table=table)
        for wrong in (np.roll(table, 1, axis=0), np.vstack([table[:-1], 0 * table[:1]])):
            other = write_graph(tmp_path / "wrong.onnx", lookup, table=wrong)
            assert compared(right, other, count=128).verdict is Verdict.FAIL
        clocks = [
            write_graph(
                tmp_path / f"{fmod}.onnx",
                f"(int64[n,1] time) => (int64[n,1] y) {{ y = Mod<fmod: int = {fmod}>(time, day) }}",
                day=86_400,
            )
            for fmod in (0, 1)
        ]
        assert compared(*clocks).verdict is Verdict.FAIL

    def test_compare_of_difference_beyond_range_passes_with_note(self, tmp_path: Path) -> None:
        a = write_graph(tmp_path / "a.onnx", RELU.replace("Relu(x)", "Identity(x)"))
        clip = RELU.replace("Relu(x)", "Clip(x, low, high)")
        found = compared(
            a, write_graph(tmp_path / "b.onnx", clip, low=np.float32(-100), high=np.float32(100))
        )
        assert found.verdict is Verdict.PASS
        assert "beyond_range:x1e3" in found.notes[0]

    def test_compare_of_model_with_random_outputs_raises_measurement_error(
        self, tmp_path: Path
    ) -> None:
        path = write_graph(tmp_path / "r.onnx", RELU.replace("Relu", "RandomNormalLike"))
        with pytest.raises(MeasurementError, match="differs between runs"):
            compared(path, path)

    def test_compare_of_models_with_different_inputs_raises_user_error(
        self, model: Path, tmp_path: Path
    ) -> None:
        with pytest.raises(UserError, match="do not take the same inputs"):
            compared(model, write_convolution(tmp_path / "other.onnx"))

    def test_compare_of_invalid_file_or_unknown_operator_raises_user_error(
        self, tmp_path: Path
    ) -> None:
        broken = write_graph(tmp_path / "b.onnx", RELU.replace("Relu(x)", "Relu(nowhere)"))
        with pytest.raises(UserError, match="not valid ONNX"):
            compared(broken, broken)
        own = write_graph(tmp_path / "o.onnx", RELU.replace("Relu", "my.Mine"))
        proto = onnx.load(own)
        proto.opset_import.add(domain="my", version=1)
        onnx.save(proto, own)
        with pytest.raises(UserError, match="lacks operators: my::Mine at y"):
            compared(own, own)


def raced(
    runtime: Scripted, a: Path, b: Path, gates: Sequence[Gate] = FIVE, **more: Any
) -> ComparisonResult:
    return benchmark_pair(runtime, CPU, a, b, rows(1), gates=gates, conditions=dict, **more)


class TestBench:
    def test_read_runtime_facts_with_unsupported_blocks_names_block_option(
        self, tmp_path: Path
    ) -> None:
        node = "y = com.microsoft.MatMulNBits<K = 96, N = 2, bits = 4, block_size = 48>(x, w, s)"
        stored = {"w": np.zeros((2, 2, 24), np.uint8), "s": np.ones(4, np.float32)}
        graph = f"(float[N,96] x) => (float[N,2] y) {{ {node} }}"
        path = write_graph(tmp_path / "m.onnx", graph, domains={"com.microsoft": 1}, **stored)
        with pytest.raises(UserError, match="has blocks of 48") as caught:
            read_runtime_facts(RUNTIME, CPU, path)
        assert "--option block=32" in caught.value.remedy

    def test_benchmark_of_one_model_returns_quantiles_with_count(self, model: Path) -> None:
        found = benchmark(RUNTIME, CPU, model, rows(4), runs=40, conditions=lambda: {"load": "0"})
        assert (found.batch, found.runs, found.facts.used) == (4, 40, ("CPUExecutionProvider",))
        assert list(found.metrics) == ["p50", "p90", "p99"]
        assert 0 < found.metrics["p50"].low <= found.metrics["p50"].value
        assert found.metrics["p99"].high is None, "40 runs bound no 99th percentile"
        assert found.metrics["p50"].n == 40 - found.preempted or found.preempted == 40

    def test_benchmark_with_throughput_and_starts_measures_them(
        self, model: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(speed, "ROUNDS_ALONE", 1)
        found = benchmark(
            RUNTIME, CPU, model, rows(1), runs=20, conditions=dict, request=EVERYTHING
        )
        for name in ("concurrency 2", "load", "first", "peak"):
            assert found.metrics[name].value > 0

    def test_benchmark_returns_unit_count_and_interval_of_each_value(self, model: Path) -> None:
        runtime = Scripted({model: 1.0})
        found = benchmark(
            runtime, CPU, model, rows(1), runs=20, conditions=dict, request=EVERYTHING
        )
        assert list(found.metrics) == [
            "p50",
            "p90",
            "p99",
            "concurrency 2",
            "load",
            "first",
            "peak",
        ]
        assert [found.metrics[name].unit for name in ("concurrency 2", "load", "peak")] == [
            "req/s",
            "s",
            "B",
        ]
        for name in ("concurrency 2", "load", "first", "peak"):
            metric = found.metrics[name]
            assert metric.n == 10
            assert metric.high is not None
            assert 0 < metric.low <= metric.value <= metric.high

    @pytest.mark.parametrize(
        ("slower", "verdict"), [(1.0, Verdict.PASS), (0.5, Verdict.PASS), (1.2, Verdict.FAIL)]
    )
    def test_benchmark_pair_verdict_follows_latency_ratio(
        self, model: Path, slower: float, verdict: Verdict
    ) -> None:
        other = write_changed(model, "third.bias", np.zeros_like)
        found = raced(Scripted({model: 1.0, other: slower}), model, other)
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

    def test_benchmark_pair_applies_limit_per_value_and_returns_worst_verdict(
        self, model: Path
    ) -> None:
        other = write_changed(model, "third.bias", np.zeros_like)
        runtime = Scripted({model: 1.0, other: 1.15})
        gates = build_pair_gates(None, concurrency=4, cold=True)
        found = raced(runtime, model, other, gates=gates)
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
        assert b / a == pytest.approx(1 / 1.15, rel=0.02), (
            "requests per second fall as the time per request grows"
        )
        assert derive_measurement_request(
            build_pair_gates(0.3, concurrency=1, cold=True)
        ).tolerances == dict.fromkeys(("cold_start", "latency", "memory", "throughput"), (0.3,))

    def test_benchmark_pair_on_noisy_machine_is_inconclusive_after_at_least_full_run(
        self, model: Path
    ) -> None:
        lines: list[str] = []
        found = raced(Scripted({model: 1.0}, noise=0.4), model, model, report=lines.append)
        assert found.verdict is Verdict.INCONCLUSIVE
        assert "a limit of 18.4% would be kept" in found.decision.reason
        pairs = found.decision.results[0].n
        assert pairs is not None
        assert pairs >= FULL_RUN
        assert len(lines) == LOOKS.index(pairs) + 1

    def test_benchmark_pair_with_provider_fallback_raises_measurement_error(
        self, model: Path
    ) -> None:
        runtime = Scripted({model: 1.0}, used=("OtherProvider",))
        with pytest.raises(
            MeasurementError, match="CPUExecutionProvider was requested, but OtherProvider ran"
        ):
            raced(runtime, model, model)

    def test_benchmark_of_too_new_opset_raises_user_error(self, model: Path) -> None:
        with pytest.raises(
            UserError, match="accepts opset <= 9, IR version <= 13; this model has opset 18"
        ):
            benchmark(RUNTIME, replace(CPU, max_opset=9), model, rows(1), runs=20, conditions=dict)


def test_copy_with_weights_renames_them_and_replaces_no_other_file(tmp_path: Path) -> None:
    made, source = tmp_path / "trial" / "model.onnx", tmp_path / "model.onnx"
    made.parent.mkdir()
    write_external(made, "model.onnx.data", factors=(5.0, 7.0))
    write_external(source, "model.onnx.data")
    before = (tmp_path / "model.onnx.data").read_bytes()
    _copy_with_weights(made, tmp_path / "best.closest.onnx")
    assert (tmp_path / "model.onnx.data").read_bytes() == before
    factors = np.array([5.0, 7.0], np.float32).tobytes()
    assert (tmp_path / "best.closest.onnx.data").read_bytes() == factors
    check_model(tmp_path / "best.closest.onnx")
