"""Bets on the assignment of units.

Their mean is at most 1, and more failures never reduce the evidence. The tests also check the
evidence of few units.
"""

from __future__ import annotations

import math
from bisect import bisect_left

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onnx_ops.domain.rollout_observations import BADNESS_EDGES, GenerationUnits, UnitCounts
from onnx_ops.statistics.rollout import unit_evidence
from onnx_ops.statistics.rollout.evidence import Array

BINS = len(BADNESS_EDGES)
PLACES = ("errors", "latency_p50", "latency_p99", "latency@p80")
percents = st.sampled_from([1, 5, 10, 50, 90, 99])


def find_badness_bin(events: int, requests: int) -> int:
    return bisect_left(BADNESS_EDGES, events / requests)


def split(
    candidate: Array, stable: Array, percent: int = 10, place: str = "errors"
) -> GenerationUnits:
    units = UnitCounts(candidate=tuple(map(int, candidate)), stable=tuple(map(int, stable)))
    return GenerationUnits(
        generation=1, step=0, percent=percent, is_drawn=True, units={place: units}
    )


def units_at(bin_: int, count: int) -> Array:
    counts = np.zeros(BINS)
    counts[bin_] = count
    return counts


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("percent", [1, 5, 10, 50, 90, 99])
def test_make_log_factors_without_worse_units_has_mean_of_at_most_one(
    place: str, percent: int
) -> None:
    """The test covers each bet and each pair of badness bins.

    Only the assignment of units to versions is random.
    """
    for tolerated in (1.0, 1.2, 5.0):
        factors = np.exp(
            unit_evidence.make_log_factors(percent, tolerated, unit_evidence.choose_centers(place))
        )
        assert np.isfinite(np.log(factors)).all()
        edges = np.array(BADNESS_EDGES)
        for bin_, badness in enumerate(edges):
            worst = (
                int(np.searchsorted(edges, min(1.0, tolerated * badness) + 1e-12, side="right")) - 1
            )
            mean = (
                percent / 100 * factors[:, 0, : worst + 1]
                + (1 - percent / 100) * factors[:, 1, bin_, None]
            )
            assert mean.max() <= 1 + 1e-12
            assert percent / 100 * factors[:, 0, 0] + (1 - percent / 100) * factors[
                :, 1, 0
            ] == pytest.approx(1)


@pytest.mark.parametrize("place", PLACES)
def test_make_log_factors_rises_with_candidate_badness_and_falls_with_stable_badness(
    place: str,
) -> None:
    for percent in (1, 10, 50, 99):
        factors = unit_evidence.make_log_factors(percent, 1.0, unit_evidence.choose_centers(place))
        assert (np.diff(factors[:, 0], axis=-1) >= 0).all()
        assert (np.diff(factors[:, 1], axis=-1) <= 0).all()


def test_measure_unit_evidence_with_further_failure_never_falls() -> None:
    """A thousand simulated populations have users with their own error rates.

    One more request of the candidate fails in each.
    """
    random = np.random.default_rng(20_251_127)
    for _ in range(1000):
        percent = int(random.choice([1, 10, 50, 90]))
        users = int(random.integers(1, 60))
        requests = random.integers(1, 200, users)
        events = random.binomial(requests, random.beta(0.2, 2.0, users))
        mine = random.random(users) < percent / 100
        counts = np.zeros((2, BINS))
        np.add.at(
            counts, (np.where(mine, 0, 1), np.searchsorted(BADNESS_EDGES, events / requests)), 1
        )
        before = unit_evidence.measure_unit_evidence(
            [split(counts[0], counts[1], percent)], "errors", 1.0
        )
        for user in np.flatnonzero(mine)[:3]:
            worse = counts.copy()
            worse[0, find_badness_bin(events[user], requests[user])] -= 1
            worse[0, find_badness_bin(events[user] + 1, requests[user] + 1)] += 1
            assert (
                unit_evidence.measure_unit_evidence(
                    [split(worse[0], worse[1], percent)], "errors", 1.0
                )
                >= before - 1e-9
            )


@settings(max_examples=40, deadline=None)
@given(percent=percents, seed=st.integers(0, 999))
def test_measure_unit_evidence_with_expected_share_is_mean_of_products_of_factors(
    percent: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    units = rng.integers(0, 200, BINS) * (np.arange(BINS) % 9 == 0)
    candidate = rng.binomial(units, percent / 100)
    total = np.stack([candidate, units - candidate])
    shown = unit_evidence.measure_unit_evidence([split(total[0], total[1], percent)], "errors", 1.0)
    factors = unit_evidence.make_log_factors(percent, 1.0, (0.0,))
    logs = np.tensordot(factors, total, axes=([1, 2], [0, 1]))
    assert shown == pytest.approx(
        float(np.logaddexp.reduce(logs) - math.log(len(logs))) / math.log(10)
    )


@pytest.mark.parametrize(("percent", "failing"), [(1, 2), (10, 3), (20, 4), (50, 8)])
def test_measure_unit_evidence_of_few_failing_units_reaches_sixty_to_one(
    percent: int, failing: int
) -> None:
    """This many failing clients suffice, however many requests a client has."""
    limit = math.log10(60)
    for count, expected in ((failing - 1, False), (failing, True)):
        stable = units_at(0, round(count * (100 - percent) / percent))
        one = split(units_at(BINS - 1, count), stable, percent)
        assert (unit_evidence.measure_unit_evidence([one], "errors", 1.0) >= limit) is expected


def test_measure_unit_evidence_of_clients_failing_in_both_versions_is_negative() -> None:
    one = split(units_at(BINS - 1, 20), units_at(BINS - 1, 180))
    assert unit_evidence.measure_unit_evidence([one], "errors", 1.0) < 0


def test_measure_unit_evidence_with_one_more_failing_unit_rises() -> None:
    """100 units of the candidate have three errors in 100 requests; then one of them fails."""
    candidate, stable = (
        units_at(find_badness_bin(3, 100), 100),
        units_at(0, 500) + units_at(find_badness_bin(1, 100), 400),
    )
    usual = unit_evidence.measure_unit_evidence([split(candidate, stable)], "errors", 1.0)
    candidate[find_badness_bin(3, 100)] -= 1
    candidate[-1] += 1
    assert (
        unit_evidence.measure_unit_evidence([split(candidate, stable)], "errors", 1.0) > usual > 3
    )


def test_badness_edges_separate_rare_errors_of_busy_units() -> None:
    bins = [find_badness_bin(events, 1000) for events in (0, 1, 3, 5, 10, 20, 50, 80)]
    assert bins == sorted(set(bins))


def test_measure_unit_evidence_of_wrong_split_is_negative() -> None:
    """The candidate has twice its share of units, and of their errors."""
    alike = split(
        units_at(0, 360) + units_at(BINS - 1, 40), units_at(0, 1440) + units_at(BINS - 1, 160)
    )
    assert unit_evidence.measure_unit_evidence([alike], "errors", 1.0) < 0
    factors = unit_evidence.make_log_factors(10, 1.0, (0.0,))
    assert (40 * factors[:, 0, -1] + 160 * factors[:, 1, -1]).max() > 2 * math.log(60)


def test_measure_unit_evidence_of_latency_compares_equal_shares() -> None:
    """Equally many units of both versions are compared.

    This does not depend on the candidate's share.
    """
    assert unit_evidence.choose_percent("latency_p50", np.array([10, 90])).tolist() == [50, 50]
    assert unit_evidence.choose_percent("errors", np.array([10, 90])).tolist() == [10, 90]
    alike = split(units_at(20, 100), units_at(20, 100), 10, "latency_p50")
    assert unit_evidence.measure_unit_evidence([alike], "latency_p50", 1.0) < 0
    slower = split(units_at(30, 100), units_at(20, 100), 10, "latency_p50")
    assert unit_evidence.measure_unit_evidence([slower], "latency_p50", 1.0) > 2


def test_measure_unit_evidence_without_two_versions_is_zero() -> None:
    assert unit_evidence.measure_unit_evidence([], "errors", 1.0) == 0
    assert (
        unit_evidence.measure_unit_evidence(
            [split(units_at(BINS - 1, 50), units_at(0, 0), 100)], "errors", 1.0
        )
        == 0
    )
