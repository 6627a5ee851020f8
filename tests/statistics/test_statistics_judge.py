"""The judge: every rule with its reason, and properties of every verdict."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onnx_ops import codec
from onnx_ops.domain.decision import Decision, GateResult, Verdict
from onnx_ops.domain.evidence import (
    ActivationMeasurement,
    Evidence,
    LatencyComparison,
    LatencySamples,
    PairedCounts,
    PairedRatios,
    ParityMeasurement,
    SourceLimits,
    ThroughputMeasurement,
    WeightMeasurement,
)
from onnx_ops.domain.execution import RuntimeFacts
from onnx_ops.domain.gate import (
    GATES as GATE_KINDS,
)
from onnx_ops.domain.gate import (
    ColdStartGate,
    Gate,
    LatencyGate,
    MemoryGate,
    MetricGate,
    ParityGate,
    SizeGate,
    ThroughputGate,
)
from onnx_ops.statistics.judge import judge
from onnx_ops.statistics.rules.common import judge_gate
from tests.support.evidence import CPU, CPU_FACTS, DIGEST, QUIET, make_evidence
from tests.support.golden import Golden


def test_judge_gate_has_rule_for_each_gate_kind() -> None:
    without = judge_gate.dispatch(Gate)
    assert [kind for kind, gate in GATE_KINDS.items() if judge_gate.dispatch(gate) is without] == []


def parity(ratio: float = 1.0, **change: Any) -> ParityMeasurement:
    return replace(
        ParityMeasurement(
            output="y", group="real", rows=128, error=ratio * 1e-6, noise=1e-6, ratio=ratio
        ),
        **change,
    )


def counts(against: str, b: int = 0, c: int = 0, n: int = 2000) -> PairedCounts:
    return PairedCounts(
        metric="accuracy",
        against=against,
        n=n,
        both=int(n * 0.96) - b - c if n else 0,
        only_baseline=b,
        only_candidate=c,
    )


def against(name: str, ratio: float, **change: Any) -> LatencyComparison:
    ratios = tuple((math.log(ratio) + noise,) for (noise,) in QUIET)
    comparison = LatencyComparison(
        against=name,
        baseline=DIGEST,
        log_ratios=ratios,
        self_log_ratios=QUIET,
        runs=400,
        preempted=20,
    )
    return replace(comparison, **change)


def figure(name: str, baseline: str, ratio: float, **change: Any) -> PairedRatios:
    ratios = tuple((math.log(ratio) + noise,) for (noise,) in QUIET)
    found = PairedRatios(
        figure=name, against=baseline, baseline=DIGEST, log_ratios=ratios, self_log_ratios=QUIET
    )
    return replace(found, **change)


def rate(per_second: float, concurrency: int = 4) -> ThroughputMeasurement:
    return ThroughputMeasurement(
        concurrency=concurrency, batch=1, requests=100, per_second=(per_second,) * 10
    )


def timed(*nanoseconds: int) -> LatencySamples:
    runs = tuple(sorted(nanoseconds))
    return LatencySamples(
        batch=1, runs=len(runs), preempted=0, quantiles_ns={"p50": runs[0]}, sorted_ns=runs
    )


GATES: tuple[Gate, ...] = (
    ParityGate(),
    MetricGate(max_drop=0.01, min=0.9),
    LatencyGate(max_regression=0.05, p99=0.002),
    SizeGate(max=2_000_000),
)
INT8 = make_evidence(
    dedicated=True,
    size_bytes=1_000_000,
    runtime=CPU_FACTS,
    baseline="champion",
    export_parity=(parity(), parity(group="x10")),
    weights=(WeightMeasurement(tensor="w", steps=0.5, elements=100),),
    metrics=(counts(""), counts("fp32"), counts("champion")),
    comparisons=(against("fp32", 0.7), against("champion", 0.8)),
    latency=timed(*[1_000_000] * 400),
)
FP32 = replace(
    INT8,
    variant="fp32",
    quantized=False,
    parity=INT8.export_parity,
    weights=(),
    comparisons=(),
    baseline="",
    metrics=(counts(""),),
)


def only(decision: Decision, gate: str, metric: str) -> GateResult:
    found = [r for r in decision.results if (r.gate, r.metric) == (gate, metric)]
    assert len(found) == 1, decision.results
    return found[0]


def test_judge_of_good_evidence_passes_with_estimate_and_reason_for_each_gate() -> None:
    for evidence in (INT8, FP32):
        decision = judge(GATES, evidence)
        assert decision.verdict is Verdict.PASS, decision.results
        for result in decision.results:
            assert result.estimate is not None
            assert result.limit
            assert result.n > 0
            assert "limit" in result.reason
            assert "\n" not in result.reason
    assert [(r.gate, r.metric, r.unit) for r in judge(GATES, INT8).results] == [
        ("parity", "export", "x"),
        ("parity", "weights", "steps"),
        ("metric", "accuracy vs fp32", "1"),
        ("metric", "accuracy vs champion", "1"),
        ("metric", "accuracy", "1"),
        ("latency", "ratio vs champion", "x"),
        ("latency", "p99", "s"),
        ("size", "", "B"),
    ]


def test_decision_with_extreme_values_is_equal_after_json_round_trip() -> None:
    extreme = replace(INT8, comparisons=(against("champion", 2.0, log_ratios=((900.0,),)),))
    for evidence in (
        INT8,
        FP32,
        extreme,
        replace(FP32, parity=(parity(math.inf), parity(math.nan))),
    ):
        decision = judge(GATES, evidence)
        assert codec.loads(codec.dumps(decision), Decision) == decision


def test_judge_of_failed_measurement_returns_error_for_each_gate() -> None:
    decision = judge(GATES, replace(FP32, failure="no provider\n  here", parity=(parity(1e6),)))
    assert [r.gate for r in decision.results] == ["parity", "metric", "latency", "size"]
    assert {(r.verdict, r.reason, r.advisory) for r in decision.results} == {
        (Verdict.ERROR, "no provider here", False)
    }


class TestProvider:
    CUDA = "CUDAExecutionProvider"

    @pytest.mark.parametrize(
        ("facts", "verdict"),
        [
            (None, Verdict.INCONCLUSIVE),
            (replace(CPU_FACTS, asked=(CUDA, CPU)), Verdict.ERROR),
            (
                replace(CPU_FACTS, asked=(CUDA, CPU), used=(CUDA, CPU), nodes={CUDA: 5, CPU: 1}),
                Verdict.ERROR,
            ),
            (
                replace(
                    CPU_FACTS,
                    asked=(CUDA, CPU),
                    used=(CUDA, CPU),
                    nodes={CUDA: 5, CPU: 2},
                    shape_nodes={CPU: 2},
                ),
                None,
            ),
            (
                replace(
                    CPU_FACTS,
                    asked=(CUDA, CPU),
                    used=(CUDA, CPU),
                    nodes={CUDA: 5, CPU: 3},
                    shape_nodes={CPU: 2},
                ),
                Verdict.ERROR,
            ),
            (
                replace(CPU_FACTS, asked=(CUDA, CPU), used=(CUDA, CPU), nodes={}),
                Verdict.INCONCLUSIVE,
            ),
            (
                replace(CPU_FACTS, asked=(CUDA, CPU), used=(CUDA, CPU), nodes={CUDA: 5, CPU: 0}),
                None,
            ),
            (replace(CPU_FACTS, asked=(CPU,), used=(CPU,), nodes={}), None),
            (replace(CPU_FACTS, asked=(CPU,), used=(), nodes={}), Verdict.INCONCLUSIVE),
        ],
        ids=[
            "unknown",
            "all on another",
            "some",
            "shapes",
            "more than shapes",
            "nodes unknown",
            "as asked",
            "cpu",
            "used unknown",
        ],
    )
    def test_judge_passes_only_if_compute_nodes_run_on_requested_provider(
        self, facts: RuntimeFacts | None, verdict: Verdict | None
    ) -> None:
        decision = judge(GATES, replace(FP32, runtime=facts))
        if verdict is None:
            assert decision.verdict is Verdict.PASS
        else:
            assert (only(decision, "provider", "").verdict, decision.verdict) == (verdict, verdict)


class TestParity:
    def test_parity_gate_with_several_outputs_judges_and_names_worst(self) -> None:
        evidence = replace(FP32, parity=(parity(2.0), parity(31.0, output="z", group="spikes")))
        result = only(judge([ParityGate()], evidence), "parity", "outputs")
        assert (result.verdict, result.estimate, result.n) == (Verdict.FAIL, 31.0, 128)
        assert "'z'" in result.reason
        assert "'spikes'" in result.reason
        assert "31x" in result.reason

    def test_parity_gate_with_difference_outside_input_domain_adds_one_advisory_unless_configured(
        self,
    ) -> None:
        outside = [
            replace(parity(99.0, group=group), inside=False)
            for group in ("missing", "beyond_range:x1e3")
        ]
        evidence = replace(FP32, parity=(parity(), *outside))
        decision = judge([ParityGate()], evidence)
        assert decision.verdict is Verdict.PASS
        (advice,) = [r for r in decision.results if r.advisory]
        assert (advice.verdict, advice.estimate) == (Verdict.FAIL, 99.0)
        assert "beyond_range:x1e3, missing" in advice.reason
        assert judge([ParityGate(groups={"missing": "fail"})], evidence).verdict is Verdict.FAIL
        ignored = ParityGate(groups={"missing": "ignore", "beyond_range": "ignore"})
        assert [r.advisory for r in judge([ignored], evidence).results] == [False]

    def test_parity_gate_with_failing_group_set_to_advise_passes(self) -> None:
        evidence = replace(FP32, parity=(parity(), parity(99.0, group="lengths:length=7")))
        assert judge([ParityGate()], evidence).verdict is Verdict.FAIL
        assert judge([ParityGate(groups={"lengths": "advise"})], evidence).verdict is Verdict.PASS

    def test_parity_gate_with_slow_source_reports_unmeasured_rows(self) -> None:
        evidence = replace(FP32, parity=(parity(),), source=SourceLimits(rows=64, samples=512))
        (row_result,) = [r for r in judge([ParityGate()], evidence).results if r.metric == "rows"]
        assert row_result.advisory
        assert "64 of 512 rows" in row_result.reason
        assert "47%" in row_result.reason

    @pytest.mark.parametrize(
        "measured", [(), (parity(rows=0, group="empty_batch"),), (parity(inside=False),)]
    )
    def test_parity_gate_without_rows_inside_input_domain_is_inconclusive(
        self, measured: tuple[ParityMeasurement, ...]
    ) -> None:
        assert judge([ParityGate()], replace(FP32, parity=measured)).verdict is Verdict.INCONCLUSIVE
        assert (
            judge([ParityGate()], replace(INT8, export_parity=measured)).verdict
            is Verdict.INCONCLUSIVE
        )


class TestMetric:
    GATE = MetricGate(max_drop=0.01)

    def test_judge_of_first_export_returns_no_result_of_comparing_gates(self) -> None:
        assert judge([self.GATE, TestLatency.GATE], FP32).results == ()
        assert judge([self.GATE], FP32).verdict is Verdict.INCONCLUSIVE
        assert judge([self.GATE, SizeGate(max=2_000_000)], FP32).verdict is Verdict.PASS

    @pytest.mark.parametrize("baseline", ["champion", "fp32", ""])
    def test_metric_gate_with_missing_comparison_is_inconclusive(self, baseline: str) -> None:
        decision = judge(
            [self.GATE, SizeGate(max=2_000_000)],
            replace(INT8, baseline=baseline, metrics=(counts(""),)),
        )
        assert decision.verdict is Verdict.INCONCLUSIVE
        assert "was not measured" in decision.reason

    @pytest.mark.parametrize(
        ("minimum", "verdict"),
        [(0.9, Verdict.PASS), (0.96, Verdict.INCONCLUSIVE), (0.98, Verdict.FAIL)],
    )
    def test_metric_gate_with_minimum_compares_interval_with_limit(
        self, minimum: float, verdict: Verdict
    ) -> None:
        result = only(judge([MetricGate(min=minimum)], FP32), "metric", "accuracy")
        assert (result.verdict, result.estimate) == (verdict, 0.96)

    @pytest.mark.parametrize(
        "bad", [counts("fp32", n=0), replace(counts("fp32"), both=5000), counts("fp32", b=-1)]
    )
    def test_metric_gate_with_empty_or_impossible_counts_returns_error_or_inconclusive(
        self, bad: PairedCounts
    ) -> None:
        for gate in (self.GATE, MetricGate(min=0.1)):
            decision = judge([gate], replace(INT8, baseline="fp32", metrics=(bad,)))
            assert decision.verdict in (Verdict.ERROR, Verdict.INCONCLUSIVE)

    def test_metric_gate_without_rows_is_inconclusive(self) -> None:
        decision = judge(
            [MetricGate(max_drop=0.01, min=0.9)], replace(FP32, baseline="champion", metrics=())
        )
        empty = replace(
            FP32, baseline="champion", metrics=(counts("", n=0), counts("champion", n=0))
        )
        assert judge([MetricGate(max_drop=0.01, min=0.9)], empty).results == decision.results
        assert decision.verdict is Verdict.INCONCLUSIVE
        unlabelled = replace(FP32, metrics=())
        for minimum in (0.9, 0.96, 0.98):
            assert judge([MetricGate(min=minimum)], unlabelled).verdict is Verdict.INCONCLUSIVE


class TestLatency:
    GATE = LatencyGate(max_regression=0.05)

    @pytest.mark.parametrize(
        ("ratio", "verdict"),
        [(1.02, Verdict.PASS), (1.05, Verdict.INCONCLUSIVE), (1.1, Verdict.FAIL)],
    )
    def test_latency_gate_with_max_regression_compares_with_baseline(
        self, ratio: float, verdict: Verdict
    ) -> None:
        evidence = replace(INT8, comparisons=(against("fp32", 3.0), against("champion", ratio)))
        result = only(judge([self.GATE], evidence), "latency", "ratio vs champion")
        assert (result.verdict, result.n) == (verdict, 40)
        assert "limit 1.05x" in result.reason
        assert "400 runs, 5% preempted" in result.reason

    @pytest.mark.parametrize(("ratio", "spread"), [(1.05, 0.001), (1.04, 0.1), (1.04, 0.04)])
    def test_latency_gate_if_inconclusive_explains_how_to_decide(
        self, ratio: float, spread: float, golden: Golden
    ) -> None:
        pairs = tuple((math.log(ratio) + spread * x,) for x in (1, -1, 0.5, -0.5) * 10)
        found = replace(INT8, comparisons=(against("champion", ratio, log_ratios=pairs),))
        result = only(judge([self.GATE], found), "latency", "ratio vs champion")
        assert result.verdict is Verdict.INCONCLUSIVE
        golden("reasons", result.reason)

    def test_latency_gate_with_candidate_slowing_down_reports_trend(self, golden: Golden) -> None:
        pairs = tuple((0.002 * i + x,) for i, x in enumerate((0.001, -0.001) * 20))
        found = replace(INT8, comparisons=(against("champion", 1.0, log_ratios=pairs),))
        golden("reasons", only(judge([self.GATE], found), "latency", "ratio vs champion").reason)

    @pytest.mark.parametrize(
        "comparisons", [(), (against("fp32", 0.5),), (against("champion", 1.0, log_ratios=()),)]
    )
    def test_latency_gate_with_missing_comparison_is_inconclusive(
        self, comparisons: tuple[LatencyComparison, ...], golden: Golden
    ) -> None:
        decision = judge(
            [self.GATE, SizeGate(max=2_000_000)], replace(INT8, comparisons=comparisons)
        )
        assert decision.verdict is Verdict.INCONCLUSIVE
        golden("reasons", decision.reason)

    def test_latency_gate_with_absolute_limit_binds_on_dedicated_target_only(self) -> None:
        slow = replace(FP32, latency=timed(*[9_000_000] * 400))
        gates: list[Gate] = [
            LatencyGate(p50=0.001, p90=0.001, p95=0.001, p99=0.002),
            SizeGate(max=2_000_000),
        ]
        assert judge(gates, slow).verdict is Verdict.FAIL
        shared = judge(gates, replace(slow, dedicated=False))
        assert shared.verdict is Verdict.PASS
        assert [(r.verdict, r.advisory) for r in shared.results[:4]] == [(Verdict.FAIL, True)] * 4

    def test_judge_with_export_comparison_sets_faster_than_export_and_ratio(self) -> None:
        assert judge(GATES, FP32).faster_than_export is None
        assert judge(GATES, INT8).faster_than_export is True
        assert judge(GATES, INT8).latency_ratio == pytest.approx(0.7, rel=1e-6)
        equal = judge(GATES, replace(INT8, comparisons=(against("fp32", 1.0),)))
        assert equal.faster_than_export is False
        assert equal.latency_ratio == pytest.approx(1.0, rel=1e-6)
        assert judge(GATES, replace(INT8, comparisons=())).faster_than_export is None


def one_row(**change: Any) -> ParityMeasurement:
    return parity(50.0, group="batches:1", rows=1, error=5e-7, noise=1e-8, **change)


FAIL, PASS, INCONCLUSIVE = Verdict.FAIL, Verdict.PASS, Verdict.INCONCLUSIVE
SIZE, DROP, SLOWER = (
    SizeGate(max=2_000_000),
    MetricGate(max_drop=0.01),
    LatencyGate(max_regression=0.05),
)
BIASED = against("champion", 1.15, self_log_ratios=((0.1,), (0.11,)) * 20)


@pytest.mark.parametrize(
    ("gate", "evidence", "metric", "verdict", "reason"),
    [
        (ParityGate(), replace(FP32, parity=(parity(mismatch="shape (1,)"), parity(9.0))),
         "outputs", FAIL, "(1,)"),
        (ParityGate(noise_factor=1000), replace(FP32, parity=(parity(1e30, noise=0.0),)),
         "outputs", FAIL, "noise is 0"),
        (ParityGate(), replace(FP32, parity=(one_row(),)), "outputs", FAIL, "50x"),
        (ParityGate(), replace(INT8, export_parity=(parity(11.0),)), "export", FAIL, "11x"),
        (ParityGate(), replace(INT8, weights=()), "weights", INCONCLUSIVE, "not measured"),
        (DROP, replace(INT8, metrics=(counts("champion", b=80, c=5),)), "accuracy vs champion",
         FAIL, "changes by -3.75%…limit -1%, n = 2000 (80 lost, 5 won)"),
        (DROP, replace(INT8, baseline="fp32", metrics=(counts("fp32", n=100),)),
         "accuracy vs fp32", INCONCLUSIVE, "expect INCONCLUSIVE below 500 samples"),
        (SLOWER, replace(INT8, baseline="fp32", comparisons=(against("fp32", 1.2),)),
         "ratio vs fp32", FAIL, "1.2x"),
        (SLOWER, replace(INT8, comparisons=(BIASED,)), "ratio vs champion", INCONCLUSIVE,
         "biased host"),
        (LatencyGate(p99=0.002), replace(FP32, latency=timed(*[1_000_000] * 100)), "p99",
         INCONCLUSIVE, "299 runs are needed"),
        (SIZE, replace(FP32, size_bytes=2_000_000), "", PASS, "2 MB"),
        (SIZE, replace(FP32, size_bytes=2_000_001), "", FAIL, "2 MB"),
        (SIZE, replace(FP32, size_bytes=0), "", INCONCLUSIVE, "not measured"),
    ],
    ids=[
        "a mismatch whatever its ratio", "one wrong label", "a small batch",
        "a variant of a wrong export", "no weights", "a lost metric", "few samples",
        "a first release against the export", "a biased host", "too few runs", "size at the limit",
        "size above it", "no size",
    ],
)  # fmt: skip
def test_judge_with_single_gate_returns_verdict_and_reason(
    gate: Gate, evidence: Evidence, metric: str, verdict: Verdict, reason: str
) -> None:
    result = only(judge([gate], evidence), gate.kind, metric)
    assert result.verdict is verdict
    assert all(words in result.reason for words in reason.split("…"))


GOOD = {
    "parity": st.builds(
        parity, st.floats(0, 10), group=st.sampled_from(["real", "x10", "batches:1"])
    ),
    "export_parity": st.builds(parity, st.floats(0, 10)),
    "weights": st.builds(
        WeightMeasurement, tensor=st.just("w"), steps=st.floats(0, 0.5), elements=st.just(3)
    ),
    "metrics": st.builds(
        counts, st.sampled_from(["", "fp32", "champion"]), b=st.integers(0, 60), c=st.integers(0, 9)
    ),
    "comparisons": st.builds(against, st.sampled_from(["fp32", "champion"]), st.floats(0.5, 1.5)),
    "ratios": st.builds(
        figure,
        st.sampled_from(["concurrency 4", "concurrency 8", "load", "first", "peak"]),
        st.sampled_from(["fp32", "champion"]),
        st.floats(0.5, 1.5),
    ),
    "throughput": st.builds(rate, st.floats(1, 1000), st.sampled_from([4, 8])),
}
FAILING: dict[str, list[Any]] = {
    "parity": [
        parity(99.0),
        parity(0.0, mismatch="shape"),
        parity(99.0, group="batches:1", rows=1),
    ],
    "export_parity": [parity(99.0)],
    "weights": [WeightMeasurement(tensor="v", steps=0.9, elements=5)],
    "metrics": [counts("champion", b=300), counts("fp32", b=300), replace(counts(""), both=100)],
    "comparisons": [against("champion", 2.0), against("fp32", 2.0)],
    "ratios": [
        figure(name, to, 2.0)
        for name in ("concurrency 4", "load", "peak")
        for to in ("champion", "fp32")
    ],
    "throughput": [rate(1.0), rate(1.0, 8)],
}
ACTIVATION = ActivationMeasurement(tensor="relu", values=1000, noise=1.73, saturated=0.001)
NAN: list[tuple[str, Any]] = [
    ("parity", parity(math.nan, error=0.0)),
    ("parity", parity(1.0, error=math.nan)),
    ("export_parity", parity(1.0, noise=math.nan)),
    ("weights", WeightMeasurement(tensor="v", steps=math.nan, elements=5)),
    ("activations", replace(ACTIVATION, noise=math.nan)),
    ("activations", replace(ACTIVATION, saturated=math.nan)),
    ("comparisons", against("champion", 0.5, log_ratios=((0.0,), (math.nan,)))),
    ("ratios", figure("load", "champion", 0.5, self_log_ratios=((math.inf,),))),
    ("throughput", replace(rate(5.0), per_second=(5.0, math.nan))),
]
KINDS = sorted(GOOD)


@st.composite
def evidences(draw: st.DrawFn) -> Evidence:
    entries: dict[str, Any] = {
        kind: tuple(draw(st.lists(GOOD[kind], max_size=3))) for kind in KINDS
    }
    base = draw(st.sampled_from([INT8, FP32]))
    return replace(base, baseline=draw(st.sampled_from(["", "fp32", "champion"])), **entries)


FURTHER: tuple[Gate, ...] = (
    MetricGate(max_drop=0.02),
    LatencyGate(max_regression=0.1),
    LatencyGate(faster_than="fp32", min_speedup=0.1),
    ThroughputGate(max_regression=0.1, min=300.0),
    ColdStartGate(max_regression=0.2, load=0.5),
    MemoryGate(max_regression=0.1, max=10),
)
gate_lists = st.lists(st.sampled_from([*GATES, *FURTHER]), max_size=6)


class TestProperties:
    @given(gate_lists, evidences(), st.data())
    def test_judge_with_added_failing_evidence_never_improves_verdict(
        self, gates: list[Gate], evidence: Evidence, data: st.DataObject
    ) -> None:
        kind = data.draw(st.sampled_from(KINDS))
        entry = data.draw(st.sampled_from(FAILING[kind]))
        entries: dict[str, Any] = {kind: (*getattr(evidence, kind), entry)}
        worse = replace(evidence, **entries)
        assert judge(gates, worse).verdict.rank >= judge(gates, evidence).verdict.rank

    @given(gate_lists, evidences(), st.randoms(use_true_random=False))
    def test_judge_with_shuffled_gates_and_evidence_returns_same_decision(
        self, gates: list[Gate], evidence: Evidence, random: Any
    ) -> None:
        shuffled: dict[str, Any] = {
            kind: tuple(random.sample(getattr(evidence, kind), len(getattr(evidence, kind))))
            for kind in KINDS
        }
        other = judge(random.sample(gates, len(gates)), replace(evidence, **shuffled))
        first = judge(gates, evidence)
        assert other.verdict is first.verdict
        assert (other.faster_than_export, other.latency_ratio) == (
            first.faster_than_export,
            first.latency_ratio,
        )
        assert sorted(r.reason for r in other.results) == sorted(r.reason for r in first.results)

    @pytest.mark.parametrize(("kind", "entry"), NAN)
    @settings(max_examples=20)
    @given(gates=gate_lists, evidence=evidences())
    def test_judge_with_nan_or_infinite_evidence_never_passes(
        self, gates: list[Gate], evidence: Evidence, kind: str, entry: Any
    ) -> None:
        before = judge(gates, evidence).verdict
        entries: dict[str, Any] = {kind: (*getattr(evidence, kind), entry)}
        after = judge(gates, replace(evidence, **entries)).verdict
        assert after.rank >= max(before.rank, Verdict.ERROR.rank)

    @given(gate_lists)
    def test_judge_without_measurements_is_inconclusive(self, gates: list[Gate]) -> None:
        empty = replace(
            FP32,
            size_bytes=0,
            parity=(),
            export_parity=(),
            metrics=(),
            latency=None,
            runtime=None,
            baseline="",
        )
        assert judge(gates, empty).verdict is Verdict.INCONCLUSIVE

    @given(evidences())
    def test_judge_without_gates_is_inconclusive(self, evidence: Evidence) -> None:
        assert judge([], evidence).verdict is Verdict.INCONCLUSIVE

    def test_judge_with_nan_limit_never_passes(self) -> None:
        nan = math.nan
        gates: list[Gate] = [
            ParityGate(noise_factor=nan, weight_steps=nan),
            MetricGate(max_drop=nan),
            MetricGate(min=nan),
            LatencyGate(max_regression=nan),
            LatencyGate(p99=nan),
            LatencyGate(faster_than="fp32", min_speedup=nan),
            ThroughputGate(max_regression=nan),
            ThroughputGate(min=nan),
            ColdStartGate(load=nan),
        ]
        for gate in gates:
            assert judge([gate], INT8).verdict is not Verdict.PASS
