"""Which variant a target gets."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onnx_ops.domain.decision import Decision, GateResult, Preference, RankingMetrics, TargetObjective, Verdict
from onnx_ops.domain.evidence import (
    Evidence,
    Interval,
    LatencyComparison,
    LatencySamples,
    PairedCounts,
    ScoreComparison,
    ThroughputMeasurement,
)
from onnx_ops.domain.gate import MetricGate
from onnx_ops.statistics.choice import choose, estimate_prospects
from onnx_ops.statistics.judge import compute_ranking_metrics
from tests.support.evidence import DIGEST, make_evidence
from tests.support.golden import Golden


def decision(
    variant: str, verdict: Verdict, *, faster: bool | None = None, ratio: float | None = None, target: str = "cpu"
) -> Decision:
    result = GateResult(gate="size", metric="", limit="≤ 1 MB", verdict=verdict, reason=f"{variant} is 3 MB")
    return Decision(variant=variant, target=target, results=(result,), faster_than_export=faster, latency_ratio=ratio)


FP32 = decision("fp32", Verdict.PASS)


def test_the_export_stands_unless_a_variant_is_faster_with_confidence() -> None:
    slower = decision("int8", Verdict.PASS, faster=False, ratio=0.9)
    unknown = decision("fp16", Verdict.PASS)
    assert choose([FP32, slower, unknown]).variant == "fp32"
    faster = decision("int4", Verdict.PASS, faster=True, ratio=0.95)
    assert choose([FP32, slower, faster, unknown]).variant == "int4"


def test_the_fastest_wins_and_the_first_of_equals() -> None:
    variants = [
        decision(name, Verdict.PASS, faster=True, ratio=ratio) for name, ratio in [("a", 0.8), ("b", 0.6), ("c", 0.6)]
    ]
    found = choose([FP32, *variants])
    assert (found.variant, found.verdict) == ("b", Verdict.PASS)
    assert "0.6x" in found.reason


def gated(variant: str, p_value: float | None, *, verdict: Verdict = Verdict.PASS, ratio: float = 0.5) -> Decision:
    """A decision whose metric gate has a p-value."""
    found = decision(variant, Verdict.PASS, faster=True, ratio=ratio)
    result = GateResult(
        gate="metric", metric="accuracy vs fp32", limit="", verdict=verdict, reason="r", p_value=p_value
    )
    return replace(found, results=(*found.results, result))


class TestFamily:
    """One of several variants at the limit passes by chance more often than one alone."""

    def test_one_variant_passes_at_the_full_level(self) -> None:
        assert choose([FP32, gated("a", 0.049)]).variant == "a"

    def test_one_of_six_needs_more(self) -> None:
        others = [gated(name, 0.5, verdict=Verdict.INCONCLUSIVE) for name in "bcdef"]
        found = choose([FP32, gated("a", 0.02), *others])
        assert found.variant == "fp32"
        assert "a passes the metric gate alone" in found.reason
        assert choose([FP32, gated("a", 0.005), *others]).variant == "a"

    def test_variants_that_surely_pass_or_surely_fail_cost_the_others_little(self) -> None:
        sure = [gated(name, 1e-6, ratio=0.9) for name in "bcd"]
        bad = [gated(name, 0.999, verdict=Verdict.FAIL) for name in "ef"]
        assert choose([FP32, gated("a", 0.04), *sure, *bad]).variant == "a"

    def test_nothing_left_is_inconclusive(self) -> None:
        failing = decision("fp32", Verdict.FAIL)
        found = choose([failing, gated("a", 0.04), gated("b", 0.04)])
        assert (found.variant, found.verdict) == (None, Verdict.INCONCLUSIVE)

    def test_a_passing_export_comes_first_at_the_full_level(self) -> None:
        export = replace(gated("fp32", 0.04), faster_than_export=None, latency_ratio=None)
        assert choose([export, gated("a", 0.04)]).variant == "a"
        unsure = gated("fp32", 0.2, verdict=Verdict.INCONCLUSIVE)
        assert choose([unsure, gated("a", 0.04)]).variant is None

    def test_decisions_of_old_evidence_are_no_family(self) -> None:
        assert choose([FP32, *(gated(name, None) for name in "ab")]).variant == "a"

    def test_prospects_of_a_good_and_a_bad_variant(self) -> None:
        result = GateResult(
            gate="metric", metric="accuracy vs fp32", limit="", verdict=Verdict.PASS, reason="", estimate=0.0,
            low=-0.005, high=0.005, bound=-0.01, n=1000, p_value=0.001,
        )  # fmt: skip
        good, wrongly, caught = estimate_prospects(result, 1) or (0, 0, 0)
        assert good == caught == pytest.approx(0.95, abs=0.001)
        assert wrongly < 1e-5
        assert (estimate_prospects(result, 6) or (1,))[0] < good
        assert (
            estimate_prospects(replace(result, p_value=None), 1)
            is estimate_prospects(replace(result, metric="accuracy"), 1)
            is None
        )


def test_without_a_passing_export_the_fastest_passing_variant_serves() -> None:
    failed = decision("fp32", Verdict.FAIL)
    variants = [decision("a", Verdict.PASS), decision("b", Verdict.PASS, faster=False, ratio=1.1)]
    found = choose([failed, *variants])
    assert found.variant == "b"
    assert "fp32 does not pass" in found.reason


def test_nothing_passes(golden: Golden) -> None:
    found = choose([decision("int8", Verdict.FAIL), decision("fp32", Verdict.INCONCLUSIVE)])
    assert (found.variant, found.verdict) == (None, Verdict.FAIL)
    golden("reasons", found.reason)


@pytest.mark.parametrize("decisions", [[], [FP32, decision("fp32", Verdict.PASS, target="gpu")]])
def test_a_choice_is_about_one_target(decisions: list[Decision]) -> None:
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
def test_without_a_pass_the_worst_verdict_is_told(judged: list[Decision]) -> None:
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
FAST = measured("fast", Verdict.PASS, standing_of(300, (0.4, 0.45, 0.5), (-0.03, -0.02, -0.015)))
ALIKE = measured("alike", Verdict.PASS, standing_of(280, (0.42, 0.47, 0.52), (-0.05, -0.04, -0.035)))
SMALL = measured("small", Verdict.PASS, standing_of(150, (0.9, 1.1, 1.3), (-0.01, 0.0, 0.01)))


def test_ties_within_the_noise_are_told_and_broken_by_bytes(golden: Golden) -> None:
    found = choose([EXPORT_ROW, FAST, ALIKE, SMALL])
    assert (found.variant, found.tied) == ("alike", ("fast",))
    golden("reasons", found.reason)
    equal = [replace(one, standing=replace(one.standing, size_bytes=300)) for one in (FAST, ALIKE) if one.standing]
    found = choose([EXPORT_ROW, *equal])
    assert (found.variant, found.tied) == ("fast", ("alike",))
    golden("reasons", found.reason, "of one size")


def test_the_smallest_serves_where_size_is_preferred_though_it_is_no_faster(golden: Golden) -> None:
    found = choose([EXPORT_ROW, FAST, ALIKE, SMALL], TargetObjective(objective="size"))
    assert (found.variant, found.tied, found.objective) == ("small", (), "size")
    golden("reasons", found.reason)


def test_the_most_accurate_serves_where_accuracy_is_preferred(golden: Golden) -> None:
    """fp32 and the small one do not differ in speed, and the small one has fewer bytes."""
    found = choose([EXPORT_ROW, FAST, SMALL], TargetObjective(objective="accuracy"))
    assert (found.variant, found.tied) == ("small", ("fp32",))
    golden("reasons", found.reason)
    better = measured("better", Verdict.PASS, standing_of(900, change=(0.02, 0.03, 0.04)))
    found = choose([EXPORT_ROW, FAST, SMALL, better], TargetObjective(objective="accuracy"))
    assert (found.variant, found.tied) == ("better", ())
    assert "+3 points against fp32" in found.reason


def test_cost_is_time_under_load_where_it_was_measured() -> None:
    policy = TargetObjective(objective="cost", price=0.36)
    found = choose([EXPORT_ROW, FAST], policy)
    assert found.variant == "fast"
    assert "a million requests cost 0.45" in found.reason
    loads = ((0.010, 0.010, 0.011), (0.012, 0.013, 0.014))
    loaded = [
        replace(one, standing=replace(one.standing, load=Interval(estimate=load[1], low=load[0], high=load[2])))
        for one, load in zip((EXPORT_ROW, FAST), loads, strict=True)
        if one.standing
    ]
    found = choose(loaded, policy)
    assert found.variant == "fp32"
    assert "a million requests cost 1" in found.reason


def test_what_was_not_measured_is_said() -> None:
    found = choose([decision("a", Verdict.PASS), decision("b", Verdict.PASS)], TargetObjective(objective="accuracy"))
    assert (found.variant, found.tied) == ("a", ("b",))
    assert "accuracy was not measured" in found.reason


spans = st.lists(st.floats(0.1, 2.0), min_size=3, max_size=3).map(lambda values: tuple(sorted(values)))
changes = st.lists(st.floats(-0.5, 0.5), min_size=3, max_size=3).map(lambda values: tuple(sorted(values)))
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
def test_the_order_of_decisions_does_not_matter(judged: list[Decision], objective: Preference, random: Random) -> None:
    shuffled = list(judged)
    random.shuffle(shuffled)
    one, other = (
        choose(judged, TargetObjective(objective=objective)),
        choose(shuffled, TargetObjective(objective=objective)),
    )
    assert (one.variant, set(one.tied)) == (other.variant, set(other.tied))


@given(decisions | contestants, preferences)
def test_only_what_passes_is_chosen_whatever_is_preferred(judged: list[Decision], objective: Preference) -> None:
    found = choose(judged, TargetObjective(objective=objective))
    passing = {d.variant for d in judged if d.verdict is Verdict.PASS}
    assert ({found.variant, *found.tied} <= passing) if passing else (found.variant is None)
    assert (found.verdict is Verdict.PASS) == bool(passing)
    assert found.variant not in found.tied
    assert found.reason


@given(contestants, preferences)
def test_what_fails_has_no_say(judged: list[Decision], objective: Preference) -> None:
    passing = [d for d in judged if d.verdict is Verdict.PASS]
    if passing:
        assert choose(judged, TargetObjective(objective=objective)) == choose(
            passing, TargetObjective(objective=objective)
        )


@given(contestants)
def test_a_passing_export_gives_way_only_to_what_is_surely_faster(judged: list[Decision]) -> None:
    found = choose(judged)
    chosen = next((d for d in judged if d.variant == found.variant), None)
    if chosen and any(d.variant == "fp32" and d.verdict is Verdict.PASS for d in judged):
        assert chosen.variant == "fp32" or chosen.faster_than_export is True


@given(contestants)
def test_nothing_that_passes_is_smaller_than_the_smallest(judged: list[Decision]) -> None:
    found = choose(judged, TargetObjective(objective="size"))
    sizes = {d.variant: d.standing.size_bytes for d in judged if d.verdict is Verdict.PASS and d.standing}
    if sizes:
        assert found.variant is not None
        assert sizes[found.variant] == min(sizes.values())


def evidence(variant: str, **found: object) -> Evidence:
    return make_evidence(variant, size_bytes=7, **found)


def test_the_figures_of_a_variant_are_read_off_its_evidence() -> None:
    pairs, itself = ((-0.7,),) * 10, ((0.0,),) * 10
    ratios = LatencyComparison(
        against="fp32", baseline=DIGEST, log_ratios=pairs, self_log_ratios=itself, runs=1, preempted=0
    )
    counts = PairedCounts(metric="accuracy", against="fp32", n=100, both=90, only_baseline=4, only_candidate=1)
    found = compute_ranking_metrics(
        [MetricGate(max_drop=0.1)],
        evidence(
            "int8",
            comparisons=(ratios,),
            latency=LatencySamples(batch=1, runs=9, preempted=0, quantiles_ns={"p50": 2e6}),
            metrics=(counts,),
            throughput=(ThroughputMeasurement(concurrency=4, batch=1, requests=9, per_second=(100.0,) * 9),),
        ),
    )
    assert found.ratio is not None
    assert found.change is not None
    assert found.load is not None
    assert (found.size_bytes, found.seconds, found.load.estimate) == (7, 0.002, 0.01)
    assert found.ratio.estimate == pytest.approx(0.4966, abs=1e-4)
    assert found.change.estimate == pytest.approx(-0.03)
    assert found.change.low < -0.03 < found.change.high


def test_a_growing_error_is_a_change_for_the_worse() -> None:
    growth = Interval(estimate=1.2, low=1.1, high=1.3)
    score = ScoreComparison(metric="rmse", against="fp32", n=100, ratio=growth)
    found = compute_ranking_metrics([MetricGate(name="rmse", max_increase=0.5)], evidence("int8", scores=(score,)))
    assert found.change is not None
    assert (found.change.low, found.change.high) == pytest.approx((-0.3, -0.1))
    assert compute_ranking_metrics([], evidence("fp32")).change == Interval(estimate=0.0, low=0.0, high=0.0)
