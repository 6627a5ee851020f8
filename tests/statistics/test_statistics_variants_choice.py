"""The choice of a variant for a target."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onnx_ops.domain.decision import (
    Decision,
    GateResult,
    Preference,
    RankingMetrics,
    TargetObjective,
    Verdict,
)
from onnx_ops.domain.evidence import (
    Evidence,
    Interval,
    LatencyComparison,
    LatencySamples,
    PairedCounts,
    SchedulingMeasurement,
    ScoreComparison,
    ThroughputMeasurement,
)
from onnx_ops.domain.gate import MetricGate
from onnx_ops.statistics.judge import compute_ranking_metrics
from onnx_ops.statistics.variants.choice import choose, choose_scheduling, estimate_prospects
from tests.support.evidence import DIGEST, make_evidence
from tests.support.golden import Golden


def decision(
    variant: str,
    verdict: Verdict,
    *,
    faster: bool | None = None,
    ratio: float | None = None,
    target: str = "cpu",
) -> Decision:
    result = GateResult(
        gate="size", metric="", limit="≤ 1 MB", verdict=verdict, reason=f"{variant} is 3 MB"
    )
    return Decision(
        variant=variant,
        target=target,
        results=(result,),
        faster_than_export=faster,
        latency_ratio=ratio,
    )


FP32 = decision("fp32", Verdict.PASS)


SLOWER, FASTER = (
    decision("int8", Verdict.PASS, faster=False, ratio=0.9),
    decision("int4", Verdict.PASS, faster=True),
)
UNKNOWN, FAILED = decision("fp16", Verdict.PASS), decision("fp32", Verdict.FAIL)
FAST = [
    decision(n, Verdict.PASS, faster=True, ratio=r) for n, r in (("a", 0.8), ("b", 0.6), ("c", 0.6))
]


@pytest.mark.parametrize(
    ("decisions", "variant", "reason"),
    [
        ([FP32, SLOWER, UNKNOWN], "fp32", "no passing variant is faster with 95 % confidence"),
        ([FP32, SLOWER, FASTER, UNKNOWN], "int4", ""),
        ([FP32, *FAST], "b", "0.6x"),
        (
            [FAILED, UNKNOWN, decision("b", Verdict.PASS, faster=False, ratio=1.1)],
            "b",
            "fp32 does not pass",
        ),
    ],
    ids=[
        "the export stands",
        "a variant is faster",
        "the first of the fastest",
        "the export does not pass",
    ],
)
def test_choose_keeps_export_unless_it_fails_or_variant_is_faster_with_confidence(
    decisions: list[Decision], variant: str, reason: str
) -> None:
    found = choose(decisions)
    assert (found.variant, found.verdict) == (variant, Verdict.PASS)
    assert reason in found.reason


def gated(
    variant: str, p_value: float | None, *, verdict: Verdict = Verdict.PASS, ratio: float = 0.5
) -> Decision:
    """Return a decision whose metric gate has a p-value."""
    found = decision(variant, Verdict.PASS, faster=True, ratio=ratio)
    result = GateResult(
        gate="metric",
        metric="accuracy vs fp32",
        limit="",
        verdict=verdict,
        reason="r",
        p_value=p_value,
    )
    return replace(found, results=(*found.results, result))


class TestFamily:
    """One of several variants at the limit passes by chance more often than one alone."""

    OTHERS = tuple(gated(name, 0.5, verdict=Verdict.INCONCLUSIVE) for name in "bcdef")
    SURE = tuple(gated(name, 1e-6, ratio=0.9) for name in "bcd")
    BAD = tuple(gated(name, 0.999, verdict=Verdict.FAIL) for name in "ef")
    EXPORT = replace(gated("fp32", 0.04), faster_than_export=None, latency_ratio=None)
    UNSURE = gated("fp32", 0.2, verdict=Verdict.INCONCLUSIVE)

    @pytest.mark.parametrize(
        ("decisions", "variant"),
        [
            pytest.param((FP32, gated("a", 0.049)), "a", id="one alone at the full level"),
            pytest.param((FP32, gated("a", 0.02), *OTHERS), "fp32", id="one of six needs more"),
            pytest.param((FP32, gated("a", 0.005), *OTHERS), "a", id="one of six has more"),
            pytest.param(
                (FP32, gated("a", 0.04), *SURE, *BAD), "a", id="sure and bad ones cost little"
            ),
            pytest.param((EXPORT, gated("a", 0.04)), "a", id="a passing export comes first"),
            pytest.param(
                (UNSURE, gated("a", 0.04)), None, id="an export that does not pass is one of them"
            ),
            pytest.param(
                (FP32, gated("a", None), gated("b", None)), "a", id="old evidence is no family"
            ),
        ],
    )
    def test_choose_of_one_or_several_variants_corrects_for_their_number(
        self, decisions: tuple[Decision, ...], variant: str | None
    ) -> None:
        assert choose(decisions).variant == variant

    def test_choose_with_variants_that_pass_only_uncorrected_does_not_choose_them(self) -> None:
        assert (
            "a passes alone, but not with the correction for several variants"
            in choose([FP32, gated("a", 0.02), *self.OTHERS]).reason
        )
        found = choose([FAILED, gated("a", 0.04), gated("b", 0.04)])
        assert (found.variant, found.verdict) == (None, Verdict.INCONCLUSIVE)

    def test_estimate_prospects_returns_probabilities_only_for_uncertain_change_with_p_value(
        self,
    ) -> None:
        result = GateResult(
            gate="metric",
            metric="accuracy vs fp32",
            limit="",
            verdict=Verdict.PASS,
            reason="",
            estimate=0.0,
            low=-0.005,
            high=0.005,
            bound=-0.01,
            n=1000,
            p_value=0.001,
        )
        good, wrongly, caught = estimate_prospects(result, 1) or (0, 0, 0)
        assert good == caught == pytest.approx(0.95, abs=0.001)
        assert wrongly < 1e-5
        assert (estimate_prospects(result, 6) or (1,))[0] < good
        assert (
            estimate_prospects(replace(result, p_value=None), 1)
            is estimate_prospects(replace(result, metric="accuracy"), 1)
            is estimate_prospects(replace(result, low=0.0, high=0.0), 1)
            is None
        )


def test_choose_without_passing_variant_explains_failures(golden: Golden) -> None:
    found = choose([decision("int8", Verdict.FAIL), decision("fp32", Verdict.INCONCLUSIVE)])
    assert (found.variant, found.verdict) == (None, Verdict.FAIL)
    golden("reasons", found.reason)


@pytest.mark.parametrize("decisions", [[], [FP32, decision("fp32", Verdict.PASS, target="gpu")]])
def test_choose_with_zero_or_two_targets_raises_value_error(decisions: list[Decision]) -> None:
    with pytest.raises(ValueError, match="one target"):
        choose(decisions)


decisions = st.lists(
    st.builds(
        decision,
        st.sampled_from(["fp32", "a", "b"]),
        st.sampled_from(list(Verdict)),
        faster=st.sampled_from([None, True, False]),
        ratio=st.sampled_from([None, 0.5, 1.0, 2.0]),
    ),
    min_size=1,
    max_size=4,
    unique_by=lambda d: d.variant,
)


@given(decisions)
def test_choose_without_passing_variant_returns_worst_verdict(judged: list[Decision]) -> None:
    failed = [d for d in judged if d.verdict is not Verdict.PASS]
    if failed:
        assert choose(failed).verdict.rank == max(d.verdict.rank for d in failed)


def standing_of(
    size: int,
    ratio: tuple[float, float, float] = (1.0, 1.0, 1.0),
    change: tuple[float, float, float] = (0.0, 0.0, 0.0),
    *,
    load: tuple[float, float, float] | None = None,
) -> RankingMetrics:
    def interval(values: tuple[float, float, float]) -> Interval:
        return Interval(estimate=values[1], low=values[0], high=values[2])

    return RankingMetrics(
        size_bytes=size,
        ratio=interval(ratio),
        metric="accuracy",
        change=interval(change),
        seconds=0.01 * ratio[1],
        load=interval(load) if load else None,
    )


def measured(variant: str, verdict: Verdict, found: RankingMetrics) -> Decision:
    ratio = found.ratio
    return replace(
        decision(variant, verdict),
        standing=found,
        faster_than_export=None if variant == "fp32" or ratio is None else ratio.high < 1,
        latency_ratio=None if variant == "fp32" or ratio is None else ratio.estimate,
    )


EXPORT_ROW = measured("fp32", Verdict.PASS, standing_of(1000))
QUICK = measured("fast", Verdict.PASS, standing_of(300, (0.4, 0.45, 0.5), (-0.03, -0.02, -0.015)))
ALIKE = measured(
    "alike", Verdict.PASS, standing_of(280, (0.42, 0.47, 0.52), (-0.05, -0.04, -0.035))
)
SMALL = measured("small", Verdict.PASS, standing_of(150, (0.9, 1.1, 1.3), (-0.01, 0.0, 0.01)))


def test_choose_with_ties_within_noise_lists_them_and_prefers_fewer_bytes(golden: Golden) -> None:
    found = choose([EXPORT_ROW, QUICK, ALIKE, SMALL])
    assert (found.variant, found.tied) == ("alike", ("fast",))
    golden("reasons", found.reason)
    equal = [
        replace(one, standing=replace(one.standing, size_bytes=300))
        for one in (QUICK, ALIKE)
        if one.standing
    ]
    found = choose([EXPORT_ROW, *equal])
    assert (found.variant, found.tied) == ("fast", ("alike",))
    golden("reasons", found.reason, "of one size")


def test_choose_by_size_returns_smallest_variant_even_if_slower(golden: Golden) -> None:
    found = choose([EXPORT_ROW, QUICK, ALIKE, SMALL], TargetObjective(objective="size"))
    assert (found.variant, found.tied, found.objective) == ("small", (), "size")
    golden("reasons", found.reason)


def test_choose_by_accuracy_returns_most_accurate_variant(golden: Golden) -> None:
    """fp32 and the small variant are indistinguishable; the small one has fewer bytes."""
    found = choose([EXPORT_ROW, QUICK, SMALL], TargetObjective(objective="accuracy"))
    assert (found.variant, found.tied) == ("small", ("fp32",))
    golden("reasons", found.reason)
    better = measured("better", Verdict.PASS, standing_of(900, change=(0.02, 0.03, 0.04)))
    found = choose([EXPORT_ROW, QUICK, SMALL, better], TargetObjective(objective="accuracy"))
    assert (found.variant, found.tied) == ("better", ())
    assert "with the best accuracy, 3% better than fp32" in found.reason


def test_choose_by_cost_uses_time_under_load_if_measured() -> None:
    policy = TargetObjective(objective="cost", price=0.36)
    found = choose([EXPORT_ROW, QUICK], policy)
    assert found.variant == "fast"
    assert "a million requests cost 0.45" in found.reason
    loads = ((0.010, 0.010, 0.011), (0.012, 0.013, 0.014))
    loaded = [
        replace(
            one,
            standing=replace(
                one.standing, load=Interval(estimate=load[1], low=load[0], high=load[2])
            ),
        )
        for one, load in zip((EXPORT_ROW, QUICK), loads, strict=True)
        if one.standing
    ]
    found = choose(loaded, policy)
    assert found.variant == "fp32"
    assert "a million requests cost 1" in found.reason


def test_choose_by_accuracy_without_measurement_reports_it() -> None:
    found = choose(
        [decision("a", Verdict.PASS), decision("b", Verdict.PASS)],
        TargetObjective(objective="accuracy"),
    )
    assert (found.variant, found.tied) == ("a", ("b",))
    assert "accuracy was not measured" in found.reason
    assert "; not compared with b, and " in found.reason


def test_choose_by_size_of_equally_small_variants_returns_first_and_lists_other_as_tied() -> None:
    standing = standing_of(1000, (0.5, 0.5, 0.5), (0.0, 0.0, 0.0))
    found = choose(
        [measured(name, Verdict.PASS, standing) for name in ("a", "b")],
        TargetObjective(objective="size"),
    )
    assert (found.variant, found.tied) == ("a", ("b",))
    assert "as small as b, and it comes first in the file" in found.reason


spans = st.lists(st.floats(0.1, 2.0), min_size=3, max_size=3).map(
    lambda values: tuple(sorted(values))
)
changes = st.lists(st.floats(-0.5, 0.5), min_size=3, max_size=3).map(
    lambda values: tuple(sorted(values))
)
contestants = st.lists(
    st.builds(
        measured,
        st.sampled_from(["fp32", "a", "b", "c", "d"]),
        st.sampled_from([Verdict.PASS, Verdict.PASS, Verdict.FAIL, Verdict.INCONCLUSIVE]),
        st.builds(standing_of, st.integers(1, 10**9), spans, changes),
    ),
    min_size=1,
    max_size=5,
    unique_by=(lambda d: d.variant, lambda d: d.standing.size_bytes if d.standing else 0),
)
preferences = st.sampled_from(["latency", "size", "accuracy", "cost"])


@given(contestants, preferences, st.randoms(use_true_random=False))
def test_choose_with_shuffled_decisions_returns_same_variant(
    judged: list[Decision], objective: Preference, random: Random
) -> None:
    shuffled = list(judged)
    random.shuffle(shuffled)
    one, other = (choose(some, TargetObjective(objective=objective)) for some in (judged, shuffled))
    assert (one.variant, set(one.tied)) == (other.variant, set(other.tied))


@given(decisions | contestants, preferences)
def test_choose_by_any_objective_returns_passing_variants_only(
    judged: list[Decision], objective: Preference
) -> None:
    found = choose(judged, TargetObjective(objective=objective))
    passing = {d.variant for d in judged if d.verdict is Verdict.PASS}
    assert ({found.variant, *found.tied} <= passing) if passing else (found.variant is None)
    assert (found.verdict is Verdict.PASS) == bool(passing)
    assert found.variant not in found.tied
    assert found.reason


@given(contestants, preferences)
def test_choose_with_failing_variants_ignores_them(
    judged: list[Decision], objective: Preference
) -> None:
    passing = [d for d in judged if d.verdict is Verdict.PASS]
    if passing:
        policy = TargetObjective(objective=objective)
        assert choose(judged, policy) == choose(passing, policy)


@given(contestants)
def test_choose_with_passing_export_replaces_it_only_by_faster_variant(
    judged: list[Decision],
) -> None:
    found = choose(judged)
    chosen = next((d for d in judged if d.variant == found.variant), None)
    if chosen and any(d.variant == "fp32" and d.verdict is Verdict.PASS for d in judged):
        assert chosen.variant == "fp32" or chosen.faster_than_export is True


@given(contestants)
def test_choose_by_size_returns_smallest_passing_variant(
    judged: list[Decision],
) -> None:
    found = choose(judged, TargetObjective(objective="size"))
    sizes = {
        d.variant: d.standing.size_bytes for d in judged if d.verdict is Verdict.PASS and d.standing
    }
    if sizes:
        assert found.variant is not None
        assert sizes[found.variant] == min(sizes.values())


def evidence(variant: str, **found: object) -> Evidence:
    return make_evidence(variant, size_bytes=7, **found)


def test_compute_ranking_metrics_reads_size_latency_load_and_change_from_evidence() -> None:
    pairs, itself = ((-0.7,),) * 10, ((0.0,),) * 10
    ratios = LatencyComparison(
        against="fp32",
        baseline=DIGEST,
        log_ratios=pairs,
        self_log_ratios=itself,
        runs=1,
        preempted=0,
    )
    counts = PairedCounts(
        metric="accuracy", against="fp32", n=100, both=90, only_baseline=4, only_candidate=1
    )
    found = compute_ranking_metrics(
        [MetricGate(max_drop=0.1)],
        evidence(
            "int8",
            comparisons=(ratios,),
            latency=LatencySamples(batch=1, runs=9, preempted=0, quantiles_ns={"p50": 2e6}),
            metrics=(counts,),
            throughput=(
                ThroughputMeasurement(concurrency=4, batch=1, requests=9, per_second=(100.0,) * 9),
            ),
        ),
    )
    assert found.ratio is not None
    assert found.change is not None
    assert found.load is not None
    assert (found.size_bytes, found.seconds, found.load.estimate) == (7, 0.002, 0.01)
    assert found.ratio.estimate == pytest.approx(0.4966, abs=1e-4)
    assert found.change.estimate == pytest.approx(-0.03)
    assert found.change.low < -0.03 < found.change.high


def test_compute_ranking_metrics_with_increased_error_returns_negative_change() -> None:
    growth = Interval(estimate=1.2, low=1.1, high=1.3)
    score = ScoreComparison(metric="rmse", against="fp32", n=100, ratio=growth)
    found = compute_ranking_metrics(
        [MetricGate(name="rmse", max_increase=0.5)], evidence("int8", scores=(score,))
    )
    assert found.change is not None
    assert (found.change.low, found.change.high) == pytest.approx((-0.3, -0.1))


def test_compute_ranking_metrics_of_export_returns_zero_change() -> None:
    assert compute_ranking_metrics([], evidence("fp32")).change == Interval(
        estimate=0.0, low=0.0, high=0.0
    )


WAYS = {
    "memory bound": {
        (1, 1): 60.0,
        (1, 16): 100.0,
        (2, 1): 60.0,
        (2, 8): 97.0,
        (4, 1): 61.0,
        (4, 4): 80.0,
    }
}
WAYS["compute bound"] = {
    (1, 1): 25.0,
    (1, 16): 26.0,
    (2, 1): 50.0,
    (2, 8): 52.0,
    (4, 1): 99.0,
    (4, 4): 100.0,
}
WAYS["better alone"] = {(1, 1): 50.0, (1, 16): 20.0, (2, 1): 100.0, (2, 8): 40.0}
WAYS["batches on one"] = {(1, 1): 50.0, (1, 16): 100.0, (2, 1): 80.0, (2, 8): 85.0}
WAYS["fixed batch"] = {(1, 3): 100.0, (2, 3): 104.0}


@pytest.mark.parametrize(
    ("ways", "independent", "chosen"),
    [
        ("memory bound", True, (2, True)),
        ("memory bound", False, (0, False)),
        ("compute bound", True, (0, True)),
        ("compute bound", False, (0, False)),
        ("better alone", True, (0, False)),
        ("batches on one", True, (1, True)),
        ("batches on one", False, (0, False)),
        ("fixed batch", True, (0, True)),
        ("", True, (0, True)),
        ("", False, (0, False)),
    ],
)
def test_choose_scheduling_selects_threads_and_batches_by_throughput_only_of_independent_rows(
    ways: str, independent: bool, chosen: tuple[int, bool]
) -> None:
    measured = [
        SchedulingMeasurement(threads=threads, rows=rows, rows_per_s=rate)
        for (threads, rows), rate in WAYS.get(ways, {}).items()
    ]
    assert choose_scheduling(measured, independent=independent) == chosen


@given(
    st.dictionaries(
        st.sampled_from([(t, r) for t in (1, 2, 4) for r in (1, 16 // t)]), st.floats(1e-3, 1e6)
    )
)
def test_choose_scheduling_returns_most_threads_within_ten_percent_of_best_rate(
    rates: dict[tuple[int, int], float],
) -> None:
    measured = [
        SchedulingMeasurement(threads=t, rows=r, rows_per_s=rate) for (t, r), rate in rates.items()
    ]
    threads, _ = choose_scheduling(measured, independent=True)
    if rates:
        most = max(count for count, _ in rates)
        fast = [count for (count, _), rate in rates.items() if rate >= 0.9 * max(rates.values())]
        assert (threads or most) == max(fast)
        assert threads != most
