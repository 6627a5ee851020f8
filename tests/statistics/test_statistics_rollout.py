"""Statistical evidence of rollouts.

The tests check exact distributions and expectations of 1. What is
promised must not depend on the order or number of analyses.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onnx_ops.domain.rollout_observations import (
    USER_BLOCKS,
    LatencyQuantiles,
    ObservationInterval,
    RequestCounts,
    UserBlocks,
)
from onnx_ops.statistics.rollout import design_effect, guardrails
from onnx_ops.statistics.rollout import evidence as ev
from onnx_ops.statistics.rollout.evidence import compute_clean_requests, compute_log_likelihood
from onnx_ops.statistics.rollout.guardrails import fix_thresholds


@st.composite
def rows(draw: st.DrawFn, most: int = 60) -> tuple[int, int, int, int]:
    canary, stable = draw(st.integers(0, most)), draw(st.integers(0, most))
    return draw(st.integers(0, canary)), canary, draw(st.integers(0, stable)), stable


tables = st.lists(rows(), min_size=1, max_size=6)
quickly = settings(max_examples=60, deadline=None)


def close(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=1e-7, abs_tol=1e-7)


@quickly
@given(row=rows(), odds=st.floats(0.05, 50))
def test_compute_log_likelihood_matches_noncentral_hypergeometric_distribution(
    row: tuple[int, ...], odds: float
) -> None:
    from scipy.stats import nchypergeom_fisher

    canary, n, stable, m = row
    law = (n + m, canary + stable, n)
    expected = nchypergeom_fisher.logpmf(canary, *law, odds) - nchypergeom_fisher.logpmf(
        canary, *law, 1.0
    )
    assert math.isclose(
        float(compute_log_likelihood(row, [odds])[0]), float(expected), rel_tol=1e-6, abs_tol=1e-6
    )


@quickly
@given(row=rows(), tolerated=st.floats(1, 3), under=st.floats(0.3, 1))
def test_compute_log10_evidence_has_mean_1_at_limit_and_at_most_1_below(
    row: tuple[int, ...], tolerated: float, under: float
) -> None:
    from scipy.stats import nchypergeom_fisher

    canary, n, stable, m = row
    events = canary + stable
    ks = np.arange(max(0, events - m), min(n, events) + 1)
    logs = compute_log_likelihood(
        np.stack([ks, 0 * ks + n, events - ks, 0 * ks + m], axis=-1),
        ev.make_alternatives(tolerated),
    )
    values = 10 ** ev.compute_log10_evidence(logs)
    at_limit = nchypergeom_fisher.pmf(ks, n + m, events, n, tolerated)
    below = nchypergeom_fisher.pmf(ks, n + m, events, n, max(0.05, tolerated * under))
    assert math.isclose(float(values @ at_limit), 1.0, rel_tol=1e-6)
    assert float(values @ below) <= 1 + 1e-6


@quickly
@given(table=tables, at=st.integers(0, 5), tolerated=st.sampled_from([1.0, 1.2, 3.0]))
def test_measure_evidence_with_one_more_candidate_event_never_falls(
    table: list[tuple[int, int, int, int]], at: int, tolerated: float
) -> None:
    at %= len(table)
    events, requests, *stable = table[at]
    if events == requests:
        return
    worse = [*table[:at], (events + 1, requests, *stable), *table[at + 1 :]]
    assert ev.measure_evidence(worse, tolerated) >= ev.measure_evidence(table, tolerated) - 1e-9


@quickly
@given(table=tables, seed=st.integers(0, 99))
def test_measure_evidence_with_shuffled_intervals_is_unchanged(
    table: list[tuple[int, int, int, int]], seed: int
) -> None:
    shuffled = np.random.default_rng(seed).permutation(np.array(table))
    assert close(ev.measure_evidence(shuffled, 1.0), ev.measure_evidence(table, 1.0))
    assert np.allclose(ev.bound_odds_ratio(shuffled), ev.bound_odds_ratio(table))


def test_measure_evidence_of_merged_intervals_mistakes_drift_for_regression() -> None:
    """Both versions fail more in the second interval.

    The candidate has more of the traffic in that interval.
    """
    drifted = [(1, 100, 9, 900), (40, 400, 60, 600)]
    merged = [tuple(int(n) for n in np.sum(drifted, axis=0))]
    assert ev.measure_evidence(drifted, 1.0) < 0 < ev.measure_evidence(merged, 1.0)


@pytest.mark.parametrize(
    "table", [[], [(0, 0, 0, 0)], [(5, 5, 0, 0)], [(0, 9, 0, 90)], [(9, 9, 90, 90)]]
)
def test_measure_evidence_without_events_to_compare_is_zero(table: list[tuple[int, ...]]) -> None:
    assert close(ev.measure_evidence(table, 1.0), 0)
    low, high = ev.bound_odds_ratio(table)
    assert low == 0.01
    assert high == pytest.approx(100.0)


@pytest.mark.parametrize("row", [(2, 1, 0, 5), (-1, 1, 0, 5), (0, 1, 6, 5)])
def test_compute_log_likelihood_of_impossible_counts_raises_value_error(
    row: tuple[int, ...],
) -> None:
    with pytest.raises(ValueError, match="events"):
        compute_log_likelihood(row, [2.0])


@pytest.mark.parametrize("count", [10**8, 10**14])
def test_compute_log_likelihood_of_huge_counts_stays_finite_and_decisive(count: int) -> None:
    alike, worse = (count // 10, count, count // 10, count), (count // 5, count, count // 10, count)
    logs = compute_log_likelihood([alike, worse], [1.5, 2.0])
    assert np.isfinite(logs).all()
    assert (logs[0] < -1000).all()
    assert (logs[1] > 1000).all()


def test_compute_log_likelihood_of_scaled_counts_is_weaker_than_of_exact_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    row = (300, 10_000, 200, 10_000)
    exact = compute_log_likelihood(row, [1.5])
    monkeypatch.setattr(ev, "_CELLS", 100)
    scaled = compute_log_likelihood(row, [1.5])
    assert 0 < scaled[0] < exact[0]


def test_measure_evidence_of_large_counts_ignores_order_of_intervals() -> None:
    """One interval has a million requests, and many have few."""
    table = [(600, 100_000, 4500, 900_000), *[(1, 20, 2, 180)] * 3000]
    assert ev.measure_evidence(table[:1], 1.0) > 1
    assert close(ev.measure_evidence(table, 1.0), ev.measure_evidence(table[::-1], 1.0))


def test_bound_odds_ratio_contains_true_odds_ratio_in_at_least_95_of_100_tables() -> None:
    random = np.random.default_rng(0)
    missed = 0
    for _ in range(100):
        table = [(random.binomial(50, 0.2), 50, random.binomial(50, 0.1), 50) for _ in range(10)]
        low, high = ev.bound_odds_ratio(table)
        missed += not low <= 2.25 <= high
    assert missed <= 5


def test_run_split_test_with_swapped_versions_mirrors_outcome() -> None:
    table = [(60, 200, 30, 200)] * 3
    mirrored = [(c, d, a, b) for a, b, c, d in table]
    better, higher, lower = ev.run_split_test(table, higher_is_better=True)
    worse, swapped_higher, swapped_lower = ev.run_split_test(mirrored, higher_is_better=True)
    assert (better, worse) == ("better", "worse")
    assert close(higher, swapped_lower)
    assert close(lower, swapped_higher)
    assert ev.run_split_test(table, higher_is_better=False)[0] == "worse"
    assert ev.run_split_test([], higher_is_better=True)[0] == "undecided"


@pytest.mark.parametrize("rate", [0.001, 0.02, 0.3])
def test_compute_clean_requests_returns_smallest_number_that_certifies_rate(rate: float) -> None:
    needed = compute_clean_requests(rate)
    assert ev.is_rate_certified(0, needed, rate)
    assert not ev.is_rate_certified(0, needed - 1, rate)
    assert not ev.is_rate_certified(1, needed, rate)
    assert ev.bound_error_rate(0, needed) < rate <= ev.bound_error_rate(0, needed - 1)


@quickly
@given(errors=st.integers(0, 50), good=st.integers(0, 2000), rate=st.floats(0.001, 0.5))
def test_is_rate_certified_agrees_with_bound_error_rate(
    errors: int, good: int, rate: float
) -> None:
    bound = ev.bound_error_rate(errors, errors + good)
    if abs(bound - rate) > 1e-6:
        assert bool(ev.is_rate_certified(errors, errors + good, rate)) == (bound < rate)
    assert not ev.is_rate_certified(0, 0, rate)


def test_compute_clean_requests_of_rate_not_between_0_and_1_raises_value_error() -> None:
    for rate in (0.0, 1.0, math.nan):
        with pytest.raises(ValueError, match="rate"):
            compute_clean_requests(rate)


def test_compute_evidence_above_grows_with_excess_events() -> None:
    assert ev.compute_evidence_above(0, 0, 0.01) == 0
    assert ev.compute_evidence_above(1, 100, 0.01) < 1
    assert ev.compute_evidence_above(10, 100, 0.01) > 3


@quickly
@given(n=st.integers(0, 10_000), percent=st.integers(1, 99))
def test_compute_mismatch_evidence_of_configured_split_is_small(n: int, percent: int) -> None:
    assert float(guardrails.compute_mismatch_evidence(round(n * percent / 100), n, percent)) <= 0.01


def test_compute_mismatch_evidence_of_wrong_split_exceeds_limit() -> None:
    evidence = guardrails.compute_mismatch_evidence([200, 0, 105], 1000, 10)
    assert (evidence[:2] > guardrails.MISMATCH_LIMIT).all()
    assert evidence[2] < 0


@pytest.mark.parametrize(
    ("exceeds", "canary", "stable", "expected"),
    [
        (guardrails.is_grossly_failing, (10, 20), (0, 180), True),
        (guardrails.is_grossly_failing, (9, 20), (0, 180), False),
        (guardrails.is_grossly_failing, (19, 19), (0, 180), False),
        (guardrails.is_grossly_failing, (20, 20), (0, 0), True),
        (guardrails.is_grossly_failing, (20, 20), (90, 180), False),
        (guardrails.is_grossly_failing, (20, 20), (36, 180), True),
        (guardrails.is_grossly_failing, (0, 0), (0, 0), False),
        (guardrails.is_refusing, (20, 200), (10, 1000), True),
        (guardrails.is_refusing, (20, 199), (10, 1000), False),
        (guardrails.is_refusing, (19, 200), (0, 1000), False),
        (guardrails.is_refusing, (40, 200), (50, 1000), False),
        (guardrails.is_refusing, (200, 200), (0, 0), True),
        (guardrails.is_refusing, (0, 10_000), (0, 10_000), False),
    ],
)
def test_failure_and_refusal_guardrails_fire_at_limits_if_rate_is_five_times_that_of_stable(
    exceeds: Callable[..., bool], canary: tuple[int, int], stable: tuple[int, int], expected: bool
) -> None:
    assert exceeds(canary, stable) is expected


BOUNDS_S = (0.001, 0.002, 0.004, 0.008)


def test_fix_thresholds_returns_bounds_nearest_to_percentiles() -> None:
    found, slower = fix_thresholds(BOUNDS_S, (300, 250, 430, 12, 8), {"latency_p50": 0.6})
    assert found is not None
    assert (found.p50_s, found.p99_s, found.requests) == (0.002, 0.008, 1000)
    assert slower is not None
    assert (slower.p50_s, slower.p99_s, slower.requests) == (0.004, 0.008, 1000)


def test_fix_thresholds_of_few_requests_returns_no_thresholds() -> None:
    assert fix_thresholds(BOUNDS_S, (100, 50, 20, 10, 8), {}) == (None, None)


def test_fix_thresholds_of_wrong_number_of_counts_raises_value_error() -> None:
    with pytest.raises(ValueError, match="counts"):
        fix_thresholds(BOUNDS_S, (300, 250), {})


def slower(times: float, requests: int = 100) -> ObservationInterval:
    return ObservationInterval(
        step=0,
        canary=RequestCounts(requests=requests),
        stable=RequestCounts(requests=900),
        canary_latency=LatencyQuantiles(p50_s=0.002 * times, p99_s=0.01 * times),
        stable_latency=LatencyQuantiles(p50_s=0.002, p99_s=0.01),
    )


def test_count_slower_intervals_requires_traffic_and_margin() -> None:
    assert guardrails.count_slower_intervals([slower(1.05)] * 5, "latency_p50") == (0, 5)
    assert guardrails.count_slower_intervals([slower(1.2)] * 5, "latency_p50") == (5, 5)
    assert guardrails.count_slower_intervals([slower(1.2)] * 5, "latency_p99") == (0, 0)
    assert guardrails.count_slower_intervals([slower(float("nan"), 300)] * 5, "latency_p99") == (
        5,
        5,
    )
    assert guardrails.count_slower_intervals([ObservationInterval(step=0)], "latency_p50") == (0, 0)


def test_compute_sign_evidence_reaches_limit_between_seven_and_nine_slower_intervals() -> None:
    assert (
        guardrails.compute_sign_evidence(9, 9)
        > ev.compute_evidence_limit(3)
        > guardrails.compute_sign_evidence(7, 7)
    )
    assert guardrails.compute_sign_evidence(0, 0) == pytest.approx(0)


blocks = st.lists(
    st.integers(1, 30).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n))),
    min_size=USER_BLOCKS,
    max_size=USER_BLOCKS,
)


def in_blocks(n: Sequence[int], e: Sequence[int], keyless: tuple[int, int] = (0, 0)) -> UserBlocks:
    """Return the users of one version, each in a separate block."""
    rest = [0] * (USER_BLOCKS - len(n))
    return UserBlocks(requests=(*n, *rest, keyless[0]), events=(*e, *rest, keyless[1]))


@quickly
@given(mine=blocks, theirs=blocks)
def test_compute_block_effect_returns_variance_ratio_to_single_requests(
    mine: list[tuple[int, int]], theirs: list[tuple[int, int]]
) -> None:
    n, e = np.array([*mine, *theirs]).T
    effect = design_effect.compute_block_effect(
        [in_blocks(*zip(*side, strict=True)) for side in (mine, theirs)]
    )
    rate = e.sum() / n.sum()
    if not 0 < rate < 1:
        assert effect == 1
        return
    assert effect == pytest.approx(
        max(1.0, ((e - rate * n) ** 2).sum() / (rate * (1 - rate) * n.sum()))
    )


def test_design_effects_of_requests_without_keys_are_one() -> None:
    alone = [in_blocks((), (), (900, 9)), in_blocks((), (), (100, 3))]
    assert design_effect.compute_block_effect(alone) == pytest.approx(1)
    assert design_effect.compute_split_effect(alone) == pytest.approx(1)
    assert design_effect.count_effective_users(alone[0]) == pytest.approx(900)
    assert design_effect.compute_block_effect([]) == design_effect.compute_split_effect([]) == 1


def test_compute_block_effect_of_ten_errors_by_one_user_is_ten() -> None:
    alone = [in_blocks([10], [10], (990, 0))]
    assert design_effect.compute_block_effect(alone) == pytest.approx(10, rel=0.1)
    rows = [(10, 100, 0, 900)]
    assert ev.measure_evidence(rows, 1.0) > 6
    assert ev.measure_evidence(rows, 1.0, design_effect.compute_block_effect(alone)) < 1
    assert ev.measure_evidence(rows, 1.0, float(design_effect.estimate_dispersion(rows))) < 0.5, (
        "one interval with many errors is no evidence either"
    )


def test_count_effective_users_with_heavy_user_returns_few() -> None:
    assert design_effect.count_effective_users(in_blocks([5] * 40, [0] * 40)) == pytest.approx(40)
    assert design_effect.count_effective_users(in_blocks([400, *[1] * 40], [0] * 41)) < 1.3
    assert design_effect.count_effective_users(in_blocks((), ())) == 0


def test_estimate_error_effect_counts_interval_as_few_requests() -> None:
    """The estimate assumes an outage that was not observed.

    The outage fails 30 % of an interval.
    """
    clean = [(0, 200, 0, 1800)]
    assert float(design_effect.estimate_error_effect(clean)) == pytest.approx(60)
    assert float(design_effect.estimate_error_effect(clean * 10)) == pytest.approx(60)
    uneven = [(0, 2000, 0, 0), *[(0, 1, 0, 0)] * 99]
    assert float(design_effect.estimate_error_effect(uneven)) > 500
    outage = [*clean * 14, (60, 200, 540, 1800)]
    assert float(design_effect.estimate_error_effect(outage)) > 60


def test_estimate_dispersion_of_bunched_events_exceeds_that_of_steady_rates() -> None:
    random = np.random.default_rng(1)
    canary = np.full(60, 100)
    steady = np.stack(
        [random.binomial(100, 0.1, 60), canary, random.binomial(900, 0.01, 60), canary * 9], axis=-1
    )
    assert float(design_effect.estimate_dispersion(steady)) < 2
    bunched = np.stack(
        [
            10 * random.binomial(10, 0.02, 60),
            canary,
            10 * random.binomial(90, 0.02, 60),
            canary * 9,
        ],
        -1,
    )
    assert 4 < float(design_effect.estimate_dispersion(bunched)) < 25
    assert float(design_effect.estimate_error_effect(bunched)) > 4
    assert float(design_effect.estimate_dispersion([(0, 5, 0, 50)])) == 1


def test_compute_mismatch_evidence_with_split_effect_of_heavy_user_is_small() -> None:
    candidate, stable = in_blocks([400, *[1] * 60], [0] * 61), in_blocks([0, *[9] * 60], [0] * 61)
    effect = design_effect.compute_split_effect([candidate, stable])
    assert float(guardrails.compute_mismatch_evidence(460, 1000, 10)) > guardrails.MISMATCH_LIMIT
    assert float(guardrails.compute_mismatch_evidence(460, 1000, 10, effect)) < 2
