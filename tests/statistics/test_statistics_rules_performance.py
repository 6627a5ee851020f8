"""Gates on throughput, cold start, memory and speed against the export."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from onnx_ops.domain.decision import GateResult, Verdict
from onnx_ops.domain.evidence import (
    ColdStartMeasurement,
    Evidence,
    LatencyComparison,
    PairedRatios,
    ThroughputMeasurement,
)
from onnx_ops.domain.gate import (
    ColdStartGate,
    Gate,
    LatencyGate,
    MemoryGate,
    MetricGate,
    SizeGate,
    ThroughputGate,
)
from onnx_ops.statistics.judge import judge
from onnx_ops.statistics.latency import compare_quantile
from tests.support.evidence import CPU_FACTS, DIGEST, QUIET, make_evidence

LOUD = ((0.1,), (-0.1,), (0.02,), (0.05,), (-0.04,)) * 8
INT8 = make_evidence(runtime=CPU_FACTS)
STARTS = ColdStartMeasurement(
    batch=1,
    requests=20,
    load_s=(0.1, 0.11, 0.12, 0.1, 0.1, 0.13),
    first_s=(0.01,) * 6,
    peak_bytes=(290_000_000, 291_000_000, 290_500_000, 290_000_000, 290_100_000, 305_000_000),
)


def shifted(ratio: float, noise: tuple[tuple[float], ...] = QUIET) -> tuple[tuple[float, ...], ...]:
    return tuple((math.log(ratio) + x,) for (x,) in noise)


def figure(
    name: str, ratio: float, noise: tuple[tuple[float], ...] = QUIET, against: str = "fp32"
) -> PairedRatios:
    return PairedRatios(
        figure=name,
        against=against,
        baseline=DIGEST,
        log_ratios=shifted(ratio, noise),
        self_log_ratios=noise,
    )


def latency(ratio: float, noise: tuple[tuple[float], ...] = QUIET) -> LatencyComparison:
    return LatencyComparison(
        against="fp32",
        baseline=DIGEST,
        log_ratios=shifted(ratio, noise),
        self_log_ratios=noise,
        runs=400,
        preempted=4,
    )


def only(gate: Gate, evidence: Evidence) -> GateResult:
    (result,) = judge([gate], evidence).results
    assert result.limit
    assert "\n" not in result.reason
    return result


class TestThroughput:
    @pytest.mark.parametrize(
        ("ratio", "verdict"),
        [
            (0.9, Verdict.PASS),
            (1.02, Verdict.PASS),
            (1.2, Verdict.FAIL),
            (1.05, Verdict.INCONCLUSIVE),
        ],
    )
    def test_throughput_gate_compares_time_per_request_with_baseline(
        self, ratio: float, verdict: Verdict
    ) -> None:
        gate = ThroughputGate(concurrency=4, max_regression=0.05)
        result = only(
            gate,
            replace(INT8, ratios=(figure("concurrency 8", 9.0), figure("concurrency 4", ratio))),
        )
        assert (result.verdict, result.metric, result.n, result.bound) == (
            verdict,
            "concurrency 4 vs fp32",
            40,
            1.05,
        )
        assert result.estimate == pytest.approx(ratio, rel=1e-3)
        assert "session pairs" in result.reason

    @pytest.mark.parametrize(
        ("minimum", "verdict"),
        [
            (190.0, Verdict.PASS),
            (195.0, Verdict.PASS),
            (205.0, Verdict.INCONCLUSIVE),
            (221.0, Verdict.FAIL),
        ],
    )
    def test_throughput_gate_with_minimum_compares_interval_and_binds_only_if_dedicated(
        self, minimum: float, verdict: Verdict
    ) -> None:
        rates = ThroughputMeasurement(
            concurrency=4, batch=1, requests=500, per_second=(200.0, 195.0, 210.0, 220.0, 205.0)
        )
        gate = ThroughputGate(min=minimum)
        result = only(gate, replace(INT8, throughput=(rates,)))
        assert (result.verdict, result.advisory, result.unit) == (verdict, True, "req/s")
        assert result.estimate == 205.0
        assert (result.low, result.high) == pytest.approx((195, 220))
        assert not only(gate, replace(INT8, throughput=(rates,), dedicated=True)).advisory

    def test_throughput_gate_with_other_concurrency_is_inconclusive(self) -> None:
        other = ThroughputMeasurement(concurrency=8, batch=1, requests=1, per_second=(1e9,))
        evidence = replace(INT8, throughput=(other,), ratios=(figure("concurrency 8", 0.1),))
        for result in judge([ThroughputGate(max_regression=0.1, min=1.0)], evidence).results:
            assert result.verdict is Verdict.INCONCLUSIVE
            assert "was not measured" in result.reason

    def test_throughput_gate_of_first_export_returns_no_results(self) -> None:
        assert (
            judge([ThroughputGate(max_regression=0.1)], replace(INT8, variant="fp32")).results == ()
        )


class TestStarts:
    def test_cold_start_gate_judges_load_and_first_by_bounds_of_medians(self) -> None:
        gate = ColdStartGate(load=0.125, first=0.009)
        load, first = judge([gate], replace(INT8, starts=STARTS)).results
        assert (load.metric, load.verdict, load.n, load.unit) == (
            "load",
            Verdict.INCONCLUSIVE,
            6,
            "s",
        )
        assert load.low == pytest.approx(0.1)
        assert load.high == pytest.approx(0.13)
        assert (first.verdict, first.advisory) == (Verdict.FAIL, True)
        assert judge([gate], replace(INT8, starts=STARTS)).verdict is Verdict.INCONCLUSIVE, (
            "advisory failures do not count"
        )
        assert judge([gate], replace(INT8, starts=STARTS, dedicated=True)).verdict is Verdict.FAIL

    def test_cold_start_gate_with_max_regression_binds_for_load_and_first(self) -> None:
        evidence = replace(INT8, starts=STARTS, ratios=(figure("load", 1.0), figure("first", 1.5)))
        load, first = judge([ColdStartGate(max_regression=0.2)], evidence).results
        assert (load.verdict, first.verdict) == (Verdict.PASS, Verdict.FAIL)
        assert not load.advisory
        assert not first.advisory
        assert "fresh processes" in first.reason

    @pytest.mark.parametrize(
        ("limit", "verdict"),
        [
            (300_000_000, Verdict.INCONCLUSIVE),
            (305_000_000, Verdict.PASS),
            (289_000_000, Verdict.FAIL),
        ],
    )
    def test_memory_gate_binds_on_shared_target(self, limit: int, verdict: Verdict) -> None:
        result = only(MemoryGate(max=limit), replace(INT8, starts=STARTS))
        assert (result.verdict, result.advisory, result.unit, result.n) == (verdict, False, "B", 6)
        assert "from 290 MB to 305 MB" in result.reason

    def test_memory_gate_without_peak_memory_is_inconclusive(self) -> None:
        evidence = replace(INT8, starts=replace(STARTS, peak_bytes=()))
        results = judge([MemoryGate(max=10**9, max_regression=0.1)], evidence).results
        assert [r.verdict for r in results] == [Verdict.INCONCLUSIVE] * 2

    @pytest.mark.parametrize(
        "bad",
        [
            replace(STARTS, load_s=(math.nan,) * 6),
            replace(STARTS, first_s=(0.0,) * 6),
            replace(STARTS, peak_bytes=(-1,) * 6),
        ],
    )
    def test_judge_of_starts_with_impossible_values_returns_error(
        self, bad: ColdStartMeasurement
    ) -> None:
        decision = judge(
            [ColdStartGate(load=1.0), MemoryGate(max=10**9)],
            replace(INT8, starts=bad, dedicated=True),
        )
        assert decision.verdict is Verdict.ERROR


class TestFasterThanTheExport:
    @pytest.mark.parametrize(
        ("ratio", "speedup", "verdict"),
        [
            (0.8, None, Verdict.PASS),
            (1.0, None, Verdict.INCONCLUSIVE),
            (1.02, None, Verdict.FAIL),
            (0.8, 0.2, Verdict.PASS),
            (0.8, 0.25, Verdict.INCONCLUSIVE),
            (0.95, 0.1, Verdict.FAIL),
        ],
    )
    def test_latency_gate_with_faster_than_requires_confidence(
        self, ratio: float, speedup: float | None, verdict: Verdict
    ) -> None:
        gate = LatencyGate(faster_than="fp32", min_speedup=speedup)
        result = only(gate, replace(INT8, comparisons=(latency(ratio),)))
        assert (result.verdict, result.metric) == (verdict, "faster than fp32")
        assert result.bound == pytest.approx(1 / (1 + (speedup or 0.0)))
        assert "[" in result.reason

    def test_latency_gate_with_faster_than_export_ignores_champion(self) -> None:
        champion = replace(latency(0.5), against="champion")
        evidence = replace(INT8, baseline="champion", comparisons=(champion, latency(1.1)))
        assert only(LatencyGate(faster_than="fp32"), evidence).verdict is Verdict.FAIL

    def test_latency_gate_with_faster_than_on_noisy_host_is_inconclusive(self) -> None:
        result = only(
            LatencyGate(faster_than="fp32"), replace(INT8, comparisons=(latency(0.97, LOUD),))
        )
        assert result.verdict is Verdict.INCONCLUSIVE
        assert "not shown" in result.reason

    def test_latency_gate_with_faster_than_skips_export_and_requires_comparison(self) -> None:
        gate = LatencyGate(faster_than="fp32")
        assert judge([gate], replace(INT8, variant="fp32")).results == ()
        assert only(gate, INT8).verdict is Verdict.INCONCLUSIVE


def test_gates_without_limit_are_inconclusive() -> None:
    gates = (
        ThroughputGate(),
        ColdStartGate(),
        MemoryGate(),
        LatencyGate(),
        LatencyGate(min_speedup=0.1),
        MetricGate(),
    )
    for gate in gates:
        decision = judge([gate, SizeGate(max=1)], replace(INT8, starts=STARTS))
        assert decision.verdict is Verdict.INCONCLUSIVE


def test_compare_quantile_of_median_returns_order_statistics() -> None:
    found = compare_quantile([5, 1, 4, 2, 3], 0.5, 5)
    assert (found.estimate, found.low, found.high, found.verdict) == (3, 1, 5, Verdict.PASS)
    assert compare_quantile([1, 2, 3, 4], 0.5, 100).verdict is Verdict.INCONCLUSIVE, (
        "four samples bound no median"
    )
