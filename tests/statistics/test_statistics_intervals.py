"""Intervals for task metrics: published values and error rates."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from onnx_ops.domain.decision import Verdict
from onnx_ops.statistics.intervals import (
    UNSEEN_CHANGES,
    advise_sample_size,
    clopper_pearson,
    find_heavy_rows,
    ratio_interval,
    tango_interval,
)
from onnx_ops.statistics.rules.metric import MetricLimit


@st.composite
def counts(draw: st.DrawFn) -> tuple[int, int, int]:
    n = draw(st.integers(1, 3000))
    b = draw(st.integers(0, n))
    return n, b, draw(st.integers(0, n - b))


class TestTango:
    @pytest.mark.parametrize(
        ("n", "b", "c", "confidence", "low", "high"),
        [
            pytest.param(44, 1, 0, 0.90, -0.096, 0.037, id="contact lenses, Tango 1998"),
            pytest.param(
                21, 7, 1, 0.95, -0.517, -0.026, id="airway reactivity, Fagerland et al. 2014"
            ),
            pytest.param(618, 25, 28, 0.90, -0.0148, 0.0247, id="PropCIs scoreci.mp"),
        ],
    )
    def test_tango_interval_matches_published_values(
        self, n: int, b: int, c: int, confidence: float, low: float, high: float
    ) -> None:
        estimate, found_low, found_high = tango_interval(n, b, c, confidence)
        assert estimate == (c - b) / n
        assert found_low == pytest.approx(low, abs=5.1e-4 if n < 100 else 5.1e-5)
        assert found_high == pytest.approx(high, abs=5.1e-4 if n < 100 else 5.1e-5)

    @pytest.mark.parametrize("n", [1, 30, 300, 5000])
    def test_tango_interval_without_discordant_rows_matches_closed_form(self, n: int) -> None:
        from scipy import stats

        z = stats.norm.ppf(0.95)
        expected = z * z / (n + z * z)
        assert tango_interval(n, 0, 0) == pytest.approx((0.0, -expected, expected), abs=1e-9)

    @given(counts(), st.floats(0.5, 0.999))
    def test_tango_interval_contains_estimate_and_mirrors_swapped_counts(
        self, rows: tuple[int, int, int], confidence: float
    ) -> None:
        n, b, c = rows
        estimate, low, high = tango_interval(n, b, c, confidence)
        assert -1 <= low <= estimate <= high <= 1
        assert tango_interval(n, c, b, confidence) == pytest.approx(
            (-estimate, -high, -low), abs=1e-9
        )

    @pytest.mark.parametrize("bad", [(0, 0, 0), (10, -1, 0), (10, 6, 5)])
    def test_tango_interval_of_impossible_counts_raises_value_error(
        self, bad: tuple[int, int, int]
    ) -> None:
        with pytest.raises(ValueError, match="do not fit"):
            tango_interval(*bad)


@functools.cache
def verdict(n: int, b: int, c: int, max_drop: float) -> Verdict:
    _, low, high = tango_interval(n, b, c)
    return MetricLimit(kind="max_drop", value=max_drop, plain=False).verdict(low, high)


def rates(
    n: int, drop: float, discordant: float, max_drop: float, trials: int = 20_000
) -> dict[Verdict, float]:
    rng = np.random.default_rng(n)
    b, c = (discordant + drop) / 2, (discordant - drop) / 2
    rows = rng.multinomial(n, [b, c, 1 - b - c], size=trials)
    kinds, times = np.unique(rows[:, :2], axis=0, return_counts=True)
    found = dict.fromkeys(Verdict, 0.0)
    for (lost, won), count in zip(kinds.tolist(), times.tolist(), strict=True):
        found[verdict(n, lost, won, max_drop)] += count / trials
    return found


class TestNonInferiority:
    @pytest.mark.parametrize(("n", "discordant"), [(500, 0.03), (2000, 0.02), (2000, 0.06)])
    def test_metric_limit_with_true_drop_at_limit_rarely_passes_or_fails(
        self, n: int, discordant: float
    ) -> None:
        found = rates(n, 0.01, discordant, 0.01)
        assert found[Verdict.PASS] <= 0.055
        assert found[Verdict.FAIL] <= 0.055

    def test_metric_limit_with_2000_rows_separates_equal_from_worse(self) -> None:
        assert rates(2000, 0.0, 0.01, 0.01)[Verdict.PASS] >= 0.9
        assert rates(2000, 0.03, 0.04, 0.01)[Verdict.FAIL] >= 0.95

    def test_metric_limit_with_few_rows_rarely_passes_drop_and_without_change_needs_over_100_rows(
        self,
    ) -> None:
        assert rates(200, 0.02, 0.04, 0.01)[Verdict.PASS] <= 0.05
        assert verdict(100, 0, 0, 0.01) is Verdict.INCONCLUSIVE
        assert verdict(300, 0, 0, 0.01) is Verdict.PASS

    @given(counts(), st.floats(0, 0.2))
    def test_metric_limit_with_one_more_lost_row_never_improves_verdict(
        self, rows: tuple[int, int, int], max_drop: float
    ) -> None:
        n, b, c = rows
        if b + c < n:
            before = verdict(n, b, c, max_drop)
            after = verdict(n, b + 1, c, max_drop)
            order = [Verdict.PASS, Verdict.INCONCLUSIVE, Verdict.FAIL]
            assert order.index(after) >= order.index(before)


class TestClopperPearson:
    @pytest.mark.parametrize(("k", "n"), [(0, 10), (10, 10), (5, 10), (431, 450)])
    def test_clopper_pearson_matches_scipy(self, k: int, n: int) -> None:
        from scipy import stats

        expected = stats.binomtest(k, n).proportion_ci(0.95, method="exact")
        estimate, low, high = clopper_pearson(k, n, 0.95)
        assert (estimate, low, high) == pytest.approx((k / n, expected.low, expected.high))

    @pytest.mark.parametrize("bad", [(1, 0), (-1, 3), (4, 3)])
    def test_clopper_pearson_of_impossible_counts_raises_value_error(
        self, bad: tuple[int, int]
    ) -> None:
        with pytest.raises(ValueError, match="not a proportion"):
            clopper_pearson(*bad)


def test_advise_sample_size_below_500_samples_returns_advice() -> None:
    assert advise_sample_size(499) == "expect INCONCLUSIVE below 500 samples"
    assert advise_sample_size(500) == ""


LIMIT = 1.05


def population(name: str, rng: np.random.Generator, shape: tuple[int, int]) -> Any:
    error = rng.standard_normal(shape)
    match name:
        case "log-normal":
            return np.sign(error) * np.exp(rng.standard_normal(shape))
        case "2 % x 12":
            return np.where(rng.random(shape) < 0.02, 12, 1) * error
        case "skewed":
            return rng.exponential(1, shape) - 1
        case _:
            return error


@pytest.mark.parametrize("name", ["normal", "log-normal", "2 % x 12", "skewed"])
@pytest.mark.parametrize("rows", [50, 500])
def test_ratio_interval_with_true_growth_at_limit_rarely_excludes_limit(
    name: str, rows: int
) -> None:
    """The promised error rate is 6 %.

    With it, at most 14 of 120 trials are wrong in all but one of 200 tests like this one.
    """
    rng = np.random.default_rng(rows)
    base = population(name, rng, (120, rows))
    noise = population(name, rng, (120, rows)) * rng.choice([-1.0, 1.0], (120, rows))
    worse = base + (LIMIT**2 - 1) ** 0.5 * noise
    found = [
        ratio_interval(mine**2, theirs**2, UNSEEN_CHANGES)
        for mine, theirs in zip(worse, base, strict=True)
    ]
    assert sum(one.high < LIMIT**2 for one in found) <= 14
    assert sum(one.low > LIMIT**2 for one in found) <= 14


def test_ratio_interval_of_tiny_changes_stays_below_limit_with_few_heavy_rows() -> None:
    rng = np.random.default_rng(0)
    base = population("2 % x 12", rng, (20, 100))
    for row in base:
        near = row * (1 + 1e-3 * rng.standard_normal(100))
        assert ratio_interval(near**2, row**2, UNSEEN_CHANGES).high < LIMIT


def test_ratio_interval_contains_estimate_and_scales_with_units() -> None:
    rng = np.random.default_rng(1)
    mine, theirs = rng.exponential(1, 60), rng.exponential(1, 60)
    found = ratio_interval(mine, theirs, 3.0)
    assert found.low < found.estimate < found.high
    scaled = ratio_interval(1e6 * mine, theirs, 3.0)
    assert (scaled.low, scaled.high) == pytest.approx((1e6 * found.low, 1e6 * found.high), rel=1e-6)


def test_ratio_interval_with_one_dominant_baseline_row_has_distant_upper_end() -> None:
    theirs = np.full(30, 1e-3)
    theirs[0] = 1e3
    mine = np.random.default_rng(0).exponential(1, 30)
    assert ratio_interval(mine, theirs, 3.0).high > 50 * ratio_interval(mine, theirs, 3.0).estimate


def test_find_heavy_rows_returns_effective_count_and_dominant_rows() -> None:
    losses = np.ones(100)
    losses[[7, 40]] = 300, 200
    effective, heavy = find_heavy_rows(losses)
    assert heavy == (7,)
    assert effective == pytest.approx(598**2 / (300**2 + 200**2 + 98))
    assert find_heavy_rows(np.zeros(4)) == (4.0, ())


def test_ratio_interval_with_unseen_rows_widens_by_worst_seen_row() -> None:
    mine, theirs = np.ones(100), np.ones(100)
    mine[0] = 11
    plain, wide = (ratio_interval(mine, theirs, unseen).high for unseen in (0.0, 2.5))
    assert wide - plain == pytest.approx(2.5 * (11 - 1.1) / 100, rel=1e-3)
