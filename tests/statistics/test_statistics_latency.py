"""The latency decider: published values, and error rates by simulation."""

from __future__ import annotations

import itertools
import math
from typing import Literal

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from onnx_ops.domain.decision import Verdict
from onnx_ops.errors import MeasurementError
from onnx_ops.statistics.latency import (
    ALPHA,
    DRIFT,
    FULL_RUN,
    LOOKS,
    compare,
    compare_latency_quantile,
    compute_block_logs,
    compute_samples_needed,
    estimate_pairs_needed,
    explain_withheld_verdict,
    find_trend,
    get_next_look,
    hodges_lehmann,
    run_interval,
    session_interval,
    should_continue,
)
from tests.support.suite import Sweep

Logs = npt.NDArray[np.float64]

SESSION_SD = 0.012
RUN_SD = 0.05
PREEMPTED_SHARE, PREEMPTED_COST = 0.05, 29.0
SLOW_SPELL, SPELL_ENDS = 2.0, 0.04
PROBE_SD = 0.15
BLOCKS = 8


def simulate(trials: int, ratio: float, seed: int, *, flagged: float = 1.0) -> Logs:
    """Return block logs from runs on a noisy host.

    The shape is (trials, rounds, blocks, 3).
    """
    rng = np.random.default_rng(seed)
    shape = (trials * FULL_RUN, BLOCKS, 3, 10)
    nanoseconds = 1e5 * np.exp(
        rng.normal(0, RUN_SD, shape)
        + rng.normal(0, SESSION_SD / math.sqrt(2), (*shape[:1], 1, 3, 1))
    )
    slow = rng.random(shape) < PREEMPTED_SHARE
    nanoseconds[slow] *= PREEMPTED_COST
    nanoseconds[:, :, 2] *= ratio
    return compute_block_logs(nanoseconds, slow & (rng.random(shape) < flagged)).reshape(
        trials, FULL_RUN, BLOCKS, 3
    )


def decide(logs: Logs, tolerance: float) -> tuple[Verdict, int]:
    """Run one gate as the benchmark stage does.

    Return the verdict and the number of session pairs that it took.
    """
    own, itself = ((logs[..., model] - logs[..., 0]).tolist() for model in (2, 1))
    looks = (
        n for n in LOOKS if n == FULL_RUN or not should_continue(own[:n], itself[:n], [tolerance])
    )
    pairs = next(looks)
    if explain_withheld_verdict(own[:pairs], itself[:pairs], tolerance) is not None:
        return Verdict.INCONCLUSIVE, pairs
    return compare(own[:pairs], tolerance=tolerance).verdict, pairs


class Simulation:
    """Simulated decisions of the gate.

    All trials are simulated where the suite makes complete sweeps, and a quarter elsewhere.
    """

    def __init__(self, whole: bool) -> None:
        self.whole = whole

    def trials(self, number: int) -> int:
        return number if self.whole else number // 4

    def rates(
        self, ratio: float, seed: int, *, trials: int = 500, flagged: float = 1.0
    ) -> dict[Verdict, float]:
        made = self.trials(trials)
        verdicts = [decide(logs, 0.05)[0] for logs in simulate(made, ratio, seed, flagged=flagged)]
        return {verdict: verdicts.count(verdict) / made for verdict in Verdict}


@pytest.fixture(scope="module")
def simulation(sweep: Sweep) -> Simulation:
    return Simulation(whole=sweep.part == 0)


NOISY = [[0.1], [-0.1], [0.05], [-0.2], [0.15]]


class TestHodgesLehmann:
    def test_hodges_lehmann_of_depression_scores_matches_published_interval(self) -> None:
        """The source is Hollander, Wolfe and Chicken, examples 3.1 and 3.3-3.4.

        Their estimate is -.46, and their 96 % interval is (-.786, -.010).
        """
        before = np.array([1.83, 0.50, 1.62, 2.48, 1.68, 1.88, 1.55, 3.06, 1.30])
        after = np.array([0.878, 0.647, 0.598, 2.05, 1.06, 1.29, 1.06, 3.14, 1.29])
        estimate, low, high = hodges_lehmann(after - before, 0.02)
        assert estimate == pytest.approx(-0.46, abs=5e-4)
        assert low == pytest.approx(-0.786, abs=5e-4)
        assert high == pytest.approx(-0.010, abs=5e-4)

    @pytest.mark.parametrize("n", [6, 10, 20, 50])
    def test_hodges_lehmann_bounds_invert_exact_wilcoxon_test(self, n: int) -> None:
        from scipy import stats

        x = np.random.default_rng(n).normal(0.3, 1.0, n)
        alpha = 0.05 / 3
        _, low, high = hodges_lehmann(x, alpha)
        sides: tuple[tuple[float, Literal["greater", "less"], float], ...] = (
            (low, "greater", 1e-9),
            (high, "less", -1e-9),
        )
        for bound, side, inside in sides:
            rejected, kept = (
                stats.wilcoxon(x - place, alternative=side, method="exact").pvalue
                for place in (bound - inside, bound + inside)
            )
            assert rejected <= alpha < kept

    def test_hodges_lehmann_of_51_values_has_lower_bound_near_that_of_exact_wilcoxon_test(
        self,
    ) -> None:
        from scipy import stats

        x = np.random.default_rng(3).normal(size=51)
        _, low, high = hodges_lehmann(x, 0.025)
        assert stats.wilcoxon(
            x - low + 1e-9, alternative="greater", method="exact"
        ).pvalue == pytest.approx(0.025, rel=0.05)
        assert low < high

    @pytest.mark.parametrize("n", [1, 5])
    def test_hodges_lehmann_of_too_few_values_returns_infinite_bounds(self, n: int) -> None:
        assert hodges_lehmann(np.arange(n), 0.05 / 3)[1:] == (-math.inf, math.inf)

    @given(st.lists(st.floats(-10, 10), min_size=6, max_size=30), st.floats(-5, 5))
    def test_hodges_lehmann_mirrors_and_shifts_with_values(
        self, x: list[float], shift: float
    ) -> None:
        estimate, low, high = hodges_lehmann(x, 0.05)
        assert low <= estimate <= high
        assert hodges_lehmann(-np.array(x), 0.05) == pytest.approx(
            (-estimate, -high, -low), abs=1e-9
        )
        moved = hodges_lehmann(np.array(x) + shift, 0.05)
        assert moved == pytest.approx((estimate + shift, low + shift, high + shift), abs=1e-9)


class TestErrorRates:
    @pytest.mark.parametrize(
        ("ratio", "seed", "flagged", "passing", "failing"),
        [
            pytest.param(1.0, 1, 1.0, (0.98, 1), (0, 0.01), id="equal"),
            pytest.param(
                1.02, 2, 1.0, (0.95, 1), (0, 0.01), id="2 % slower", marks=pytest.mark.nightly
            ),
            pytest.param(1.10, 3, 1.0, (0, 1), (0.99, 1), id="10 % slower"),
            pytest.param(
                1.20, 4, 1.0, (0, 1), (0.99, 1), id="20 % slower", marks=pytest.mark.nightly
            ),
            pytest.param(
                1.0,
                5,
                0.5,
                (0, 1),
                (0, 0.01),
                id="equal, preemptions unnoticed",
                marks=pytest.mark.nightly,
            ),
            pytest.param(
                1.10,
                6,
                0.5,
                (0, 1),
                (0.99, 1),
                id="10 % slower, preemptions unnoticed",
                marks=pytest.mark.nightly,
            ),
        ],
    )
    def test_latency_decision_of_model_away_from_five_percent_limit_rarely_errs(
        self,
        simulation: Simulation,
        ratio: float,
        seed: int,
        flagged: float,
        passing: tuple[float, float],
        failing: tuple[float, float],
    ) -> None:
        found = simulation.rates(ratio, seed, flagged=flagged)
        assert passing[0] <= found[Verdict.PASS] <= passing[1]
        assert failing[0] <= found[Verdict.FAIL] <= failing[1]

    def test_latency_decision_with_slowdown_at_limit_errs_in_at_most_five_percent(
        self, simulation: Simulation
    ) -> None:
        """The true slow-down equals the limit.

        At most one case of twenty fails, and at most one of twenty passes.
        """
        found = simulation.rates(1.05, 7, trials=1000)
        assert found[Verdict.FAIL] <= 0.05
        assert found[Verdict.PASS] <= 0.05

    def test_latency_decision_of_equal_models_ends_early(self, simulation: Simulation) -> None:
        pairs = [decide(logs, 0.05)[1] for logs in simulate(simulation.trials(300), 1.0, 8)]
        assert np.mean(pairs) < 12.5


class TestUnsteadyHost:
    """A host that halves its speed for milliseconds at a time.

    A probe shows the speed roughly.
    """

    @staticmethod
    def decisions(
        simulation: Simulation, ratio: float, seed: int, *, probed: bool
    ) -> list[tuple[Verdict, int]]:
        rng, decided = np.random.default_rng(seed), []
        for _ in range(simulation.trials(80)):
            looks = []
            # As in the stage `benchmark`, the rounds up to the next interim analysis are measured
            # together. Here, the effect of the probe is estimated from these rounds alone.
            for rounds in np.diff((0, *(look for look in LOOKS if look <= FULL_RUN))):
                shape = (int(rounds), BLOCKS, 3, 10)
                slow = (rng.random(shape).ravel() < SPELL_ENDS).cumsum().reshape(shape) % 2
                session = rng.normal(0, SESSION_SD / math.sqrt(2), (shape[0], 1, 3, 1))
                times = 1e5 * np.exp(
                    rng.normal(0, RUN_SD, shape) + math.log(SLOW_SPELL) * slow + session
                )
                times[:, :, 2] *= ratio
                probe = 2e3 * np.exp(rng.normal(0, PROBE_SD, shape) + math.log(SLOW_SPELL) * slow)
                looks.append(compute_block_logs(times, np.zeros(shape), probe if probed else None))
            decided.append(decide(np.concatenate(looks), 0.05))
        return decided

    def test_latency_decision_with_probe_on_unsteady_host_needs_fewer_pairs(
        self, simulation: Simulation
    ) -> None:
        without, probed = (
            np.mean([pairs for _, pairs in self.decisions(simulation, 1.0, 21, probed=probed)])
            for probed in (False, True)
        )
        assert probed < 0.75 * without

    def test_latency_decision_of_ten_percent_slowdown_on_unsteady_host_fails(
        self, simulation: Simulation
    ) -> None:
        assert {verdict for verdict, _ in self.decisions(simulation, 1.10, 22, probed=True)} == {
            Verdict.FAIL
        }

    @pytest.mark.parametrize("probed", [False, True])
    @pytest.mark.parametrize("ratio", [1.0, 1.02])
    def test_latency_decision_of_good_model_on_unsteady_host_never_fails(
        self, simulation: Simulation, ratio: float, probed: bool
    ) -> None:
        decided = self.decisions(simulation, ratio, 23, probed=probed)
        assert Verdict.FAIL not in {verdict for verdict, _ in decided}


class TestCompare:
    def test_compare_of_log_ratios_returns_ratios(self) -> None:
        found = compare([[math.log(2.0)] * 4] * 10, tolerance=0.05)
        assert (found.verdict, found.n) == (Verdict.FAIL, 10)
        assert (found.estimate, found.low, found.high) == pytest.approx((2.0, 2.0, 2.0))
        assert found.rest == pytest.approx(math.exp(DRIFT * 30 / 40))

    def test_compare_of_one_pair_is_inconclusive_and_of_empty_pair_raises_value_error(self) -> None:
        found = compare([[3.0]], tolerance=0.05)
        assert (found.verdict, found.low, found.high) == (Verdict.INCONCLUSIVE, 0.0, math.inf)
        with pytest.raises(ValueError, match="no session pair"):
            compare([[]], tolerance=0.05)

    def test_session_interval_with_more_blocks_per_pair_is_unchanged(self) -> None:
        few = [[0.01], [0.02], [0.03], [-0.01], [0.0]]
        many = [pair * 50 for pair in few]
        assert session_interval(few, 0.05 / 3) == session_interval(many, 0.05 / 3)

    def test_session_interval_of_five_pairs_matches_student_t_interval(self) -> None:
        from scipy import stats

        values = np.array([0.01, 0.02, 0.03, -0.01, 0.0])
        half = stats.t.isf(0.05 / 3, 4) * stats.sem(values)
        expected = (values.mean(), values.mean() - half, values.mean() + half)
        assert session_interval(values[:, None].tolist(), 0.05 / 3) == pytest.approx(expected)

    def test_compare_of_nan_is_inconclusive(self) -> None:
        assert compare([[math.nan]] * 5, tolerance=0.05).verdict is Verdict.INCONCLUSIVE

    @given(
        st.lists(st.lists(st.floats(-1, 1), min_size=1, max_size=4), min_size=5, max_size=12),
        st.floats(0.01, 0.5),
    )
    def test_compare_in_reverse_order_agrees_and_wider_limit_never_lowers_verdict(
        self, pairs: list[list[float]], tolerance: float
    ) -> None:
        found = compare(pairs, tolerance=tolerance)
        again = compare(pairs[::-1], tolerance=tolerance)
        assert (again.estimate, again.low, again.high) == pytest.approx(
            (found.estimate, found.low, found.high)
        )
        order = [Verdict.FAIL, Verdict.INCONCLUSIVE, Verdict.PASS]
        assert order.index(compare(pairs, tolerance=tolerance + 0.1).verdict) >= order.index(
            found.verdict
        )


class TestRun:
    """Successive pairs on a machine with slow spells."""

    @staticmethod
    def width(values: Logs) -> float:
        _, low, high = run_interval([[float(x)] for x in values])
        return high - low

    def test_run_interval_of_correlated_pairs_is_wider_than_of_shuffled_pairs(self) -> None:
        draw = np.random.default_rng(0)
        values = np.sort(draw.normal(0, 0.01, 40))
        shuffled = draw.permutation(values)
        assert 2.2 < self.width(values) / self.width(shuffled) < 5

    def test_run_interval_of_independent_pairs_is_hardly_wider_than_session_interval(self) -> None:
        draw = np.random.default_rng(1)
        wider = []
        for _ in range(100):
            pairs = [[float(x)] for x in draw.normal(0, 0.01, 40)]
            (_, low, high), (_, plain_low, plain_high) = (
                run_interval(pairs),
                session_interval(pairs, ALPHA / 8),
            )
            wider.append((high - low) / (plain_high - plain_low))
        assert min(wider) > 0.999
        assert np.mean(wider) < 1.15

    def test_compare_of_unfinished_run_allows_for_drift(self) -> None:
        pairs = [[0.035], [0.037]] * 20
        found = [compare(pairs[:n], tolerance=0.05) for n in LOOKS if n <= FULL_RUN]
        assert all(f.high < 1.05 for f in found)
        assert [f.verdict for f in found] == [Verdict.INCONCLUSIVE] * 6 + [Verdict.PASS] * 2
        assert found[-1].rest == 1

    @pytest.mark.parametrize("change", [-0.07, 0.0, 0.07])
    def test_find_trend_returns_change_of_drifting_pairs_only(self, change: float) -> None:
        noise = np.random.default_rng(2).normal(0, 0.005, 40)
        found = find_trend([[float(x)] for x in noise + np.linspace(0, change, 40)])
        assert (found is None) == (change == 0)
        assert found is None or found == pytest.approx(change, rel=0.2)

    def test_find_trend_of_autocorrelated_pairs_rarely_returns_change(self) -> None:
        draw = np.random.default_rng(3)
        seen = 0
        for _ in range(100):
            values = draw.normal(0, 0.01, 40)
            for i in range(1, 40):
                values[i] += 0.5 * values[i - 1]
            seen += find_trend([[float(x)] for x in values]) is not None
        assert seen <= 12


class TestPairsNeeded:
    def test_estimate_pairs_needed_at_quarter_of_distance_returns_sixteen_times_as_many(
        self,
    ) -> None:
        noise = np.random.default_rng(4).normal(0, 0.03, 40)
        noise -= np.median((noise[:, None] + noise) / 2)
        far, near = (
            estimate_pairs_needed([[float(x + shift)] for x in noise], 0.0)
            for shift in (0.008, 0.002)
        )
        assert far is not None
        assert near is not None
        assert near == pytest.approx(16 * far, rel=0.35)

    def test_estimate_pairs_needed_returns_at_least_full_run_and_none_at_limit(self) -> None:
        assert estimate_pairs_needed([[0.01], [0.011], [0.009], [0.01], [0.01]], 0.05) == FULL_RUN
        assert estimate_pairs_needed([[0.01], [-0.01]] * 20, 0.0) is None


class TestWithheld:
    SHIFTED = ([[0.03], [0.031], [0.029]] * 14)[:40]

    @pytest.mark.parametrize(
        ("log_ratio", "withheld"),
        [(0.03, True), (0.06, True), (-2.0, False), (0.0, False), (2.0, False)],
    )
    def test_explain_withheld_verdict_on_biased_host_withholds_only_ratios_near_limit(
        self, log_ratio: float, withheld: bool
    ) -> None:
        why = explain_withheld_verdict([[log_ratio]] * 40, self.SHIFTED, 0.05)
        assert ("biased host" in (why or "")) is (why is not None) is withheld

    def test_explain_withheld_verdict_with_noisy_self_test_returns_none(self) -> None:
        assert explain_withheld_verdict([[0.001], [-0.001]] * 20, NOISY * 8, 0.05) is None

    @given(st.floats(-3, 3))
    def test_explain_withheld_verdict_without_enough_self_measurements_withholds_all(
        self, log_ratio: float
    ) -> None:
        assert explain_withheld_verdict([[log_ratio]] * 5, [], 0.05) is not None
        assert explain_withheld_verdict([[log_ratio]] * 5, [[0.0]], 0.05) is not None


class TestLooks:
    def test_get_next_look_returns_next_planned_number_of_pairs(self) -> None:
        assert [get_next_look(n) for n in (0, 4, 5, 10, 20, 40, 45)] == [5, 5, 6, 11, 28, 56, 56]

    QUIET = ([0.001], [-0.001], [0.0], [0.002], [-0.002])

    @pytest.mark.parametrize(
        ("pairs", "itself", "tolerances", "goes_on"),
        [
            pytest.param([[-0.3]] * 5, QUIET, [0.05, 0.0], False, id="everything is decided"),
            pytest.param(QUIET, QUIET, [0.05], False, id="the limit is decided"),
            pytest.param(QUIET, QUIET, [0.05, 0.0], True, id="one limit is not"),
            pytest.param([[0.0]] * 5, [[0.03]] * 5, [0.05], True, id="the host is biased"),
            pytest.param([[2.0]] * 5, NOISY, [0.05], False, id="no bias could matter"),
            pytest.param([[-0.3]] * 7, [[0.0]] * 7, [0.05], True, id="between looks"),
            pytest.param(
                [[0.0135 + 0.0015 * (19 * i % 40)] for i in range(40)],
                [[0.0]] * 40,
                [0.05],
                True,
                id="a longer run may decide",
            ),
            pytest.param(
                [[0.05], [0.047]] * 20, [[0.0]] * 40, [0.05], False, id="no longer run would"
            ),
            pytest.param([[0.06], [0.03]] * 80, [[0.0]] * 160, [0.05], False, id="after the last"),
        ],
    )
    def test_should_continue_returns_whether_run_needs_more_pairs(
        self,
        pairs: list[list[float]],
        itself: list[list[float]],
        tolerances: list[float],
        goes_on: bool,
    ) -> None:
        assert should_continue(pairs, itself, tolerances) is goes_on


class TestQuantileGate:
    @pytest.mark.parametrize(
        ("confidence", "expected"),
        [(0.95, (299, 473, 628)), (0.99, (459, 662, 838))],
        ids=["95", "99"],
    )
    def test_compute_samples_needed_matches_mlperf_counts(
        self, confidence: float, expected: tuple[int, ...]
    ) -> None:
        """The source is MLPerf LoadGen's early stopping at the 99th percentile.

        It has these counts for 0, 1 and 2 slow runs.
        """
        found = tuple(
            compute_samples_needed(0.99, exceeding=k, confidence=confidence) for k in range(3)
        )
        assert found == expected

    @pytest.mark.parametrize(
        ("quick", "slow", "verdict"),
        [
            (299, 0, Verdict.PASS),
            (298, 0, Verdict.INCONCLUSIVE),
            (472, 1, Verdict.PASS),
            (471, 1, Verdict.INCONCLUSIVE),
            (380, 20, Verdict.FAIL),
            (0, 100, Verdict.INCONCLUSIVE),
            (0, 0, Verdict.INCONCLUSIVE),
        ],
    )
    def test_compare_latency_quantile_decides_from_needed_number_of_runs(
        self, quick: int, slow: int, verdict: Verdict
    ) -> None:
        found = compare_latency_quantile([1_000_000] * quick + [9_000_000] * slow, 0.99, 0.002)
        assert (found.verdict, found.exceeding, found.n) == (verdict, slow, quick + slow)
        assert quick + slow or (found.low, found.high) == (0.0, math.inf)

    @pytest.mark.parametrize("q", [0.5, 0.99])
    def test_compare_latency_quantile_with_true_quantile_at_limit_errs_in_at_most_five_percent(
        self, q: float
    ) -> None:
        from scipy import stats

        rng = np.random.default_rng(11)
        limit_s = float(np.exp(stats.norm.ppf(q) * 0.5)) / 1e3
        runs = 1e6 * np.exp(rng.normal(0, 0.5, (2000, 800)))
        verdicts = [compare_latency_quantile(row, q, limit_s).verdict for row in runs]
        for wrong in (Verdict.PASS, Verdict.FAIL):
            assert verdicts.count(wrong) / len(verdicts) <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / 2000)

    @given(
        st.lists(st.integers(1, 10_000), min_size=5, max_size=400),
        st.sampled_from([0.5, 0.9, 0.99]),
    )
    def test_compare_latency_quantile_with_larger_limit_never_lowers_verdict(
        self, runs: list[int], q: float
    ) -> None:
        limits = sorted({*runs, 0, 20_000})
        verdicts = [
            compare_latency_quantile(runs, q, limit / 1e9).verdict
            for limit in itertools.islice(limits, 0, None, 7)
        ]
        order = [Verdict.FAIL, Verdict.INCONCLUSIVE, Verdict.PASS]
        ranks = [order.index(v) for v in verdicts]
        assert ranks == sorted(ranks)


Floats = npt.NDArray[np.float64]

SHAPE = (4, 6, 3, 10)
NO_LOSS = np.zeros(SHAPE, dtype=bool)
SLOW = 2.0
seeds = st.integers(0, 2**32 - 1)


def race(seed: int, *, ratio: float = 1.0) -> tuple[Floats, Floats]:
    """Return the times of runs and probes on a machine with slow spells.

    The last model takes `ratio` times as long.
    """
    rng = np.random.default_rng(seed)
    slow = (rng.random(SHAPE).ravel() < 0.05).cumsum().reshape(SHAPE) % 2
    times = 1e5 * np.exp(math.log(SLOW) * slow + rng.normal(0, 0.03, SHAPE))
    times[:, :, 2] *= ratio
    return times, 2e3 * np.exp(math.log(SLOW) * slow + rng.normal(0, 0.1, SHAPE))


def ratio_of(logs: Floats) -> float:
    return float(np.median(np.median(logs[..., 2] - logs[..., 0], axis=1)))


class TestMedians:
    def test_compute_block_logs_returns_logs_whose_differences_are_log_ratios(self) -> None:
        nanoseconds = np.full(SHAPE, 100)
        nanoseconds[:, :, 2] = 150
        logs = compute_block_logs(nanoseconds, NO_LOSS)
        assert logs.shape == SHAPE[:3]
        assert logs[..., 2] - logs[..., 0] == pytest.approx(math.log(1.5))

    @pytest.mark.parametrize("probed", [False, True])
    def test_compute_block_logs_of_partly_preempted_blocks_ignores_preempted_runs(
        self, probed: bool
    ) -> None:
        times, probe = race(1) if probed else (np.full(SHAPE, 1e5), None)
        lost = np.random.default_rng(2).random(SHAPE) < 0.2
        before = compute_block_logs(times, lost, probe)
        np.testing.assert_array_equal(
            compute_block_logs(np.where(lost, 29 * times, times), lost, probe), before
        )

    def test_compute_block_logs_of_fully_preempted_block_counts_all_runs(self) -> None:
        nanoseconds, lost = np.full((1, 1, 2, 5), 100), np.zeros((1, 1, 2, 5), dtype=bool)
        nanoseconds[0, 0, 1, :4], lost[0, 0, 1, :4] = 9000, True
        first, second = compute_block_logs(nanoseconds, lost)[0, 0]
        assert second == first, "one run was not preempted"
        lost[0, 0, 1, 4] = True
        first, second = compute_block_logs(nanoseconds, lost)[0, 0]
        assert second - first == pytest.approx(math.log(90))

    def test_compute_block_logs_of_zero_durations_raises_measurement_error(self) -> None:
        with pytest.raises(MeasurementError, match="no measurable time"):
            compute_block_logs(np.zeros(SHAPE), NO_LOSS)

    def test_compute_block_logs_with_some_zero_durations_stays_finite(self) -> None:
        times, probe = race(3)
        times[..., ::4] = 0
        assert np.isfinite(compute_block_logs(times, NO_LOSS, probe)).all()


class TestProbe:
    def test_compute_block_logs_with_probe_halves_spread_of_ratios(self) -> None:
        races = [race(seed) for seed in range(40)]
        plain = np.std([ratio_of(compute_block_logs(times, NO_LOSS)) for times, _ in races])
        probed = np.std(
            [ratio_of(compute_block_logs(times, NO_LOSS, probe)) for times, probe in races]
        )
        assert probed < 0.5 * plain

    @given(seeds, st.permutations(range(3)))
    def test_compute_block_logs_with_permuted_models_permutes_logs(
        self, seed: int, order: list[int]
    ) -> None:
        """In particular, exchanging baseline and candidate negates the estimate."""
        times, probe = race(seed)
        logs = compute_block_logs(times, NO_LOSS, probe)
        swapped = compute_block_logs(times[:, :, order], NO_LOSS, probe[:, :, order])
        np.testing.assert_allclose(swapped, logs[:, :, order], atol=1e-12)

    @given(seeds, st.floats(0.2, 5))
    def test_compute_block_logs_with_probe_keeps_ratio_of_slower_or_faster_model(
        self, seed: int, ratio: float
    ) -> None:
        times, probe = race(seed)
        slower = times.copy()
        slower[:, :, 2] *= ratio
        before, after = (ratio_of(compute_block_logs(t, NO_LOSS, probe)) for t in (times, slower))
        assert after - before == pytest.approx(math.log(ratio), abs=1e-9)

    @given(seeds, st.floats(0.2, 5))
    def test_compute_block_logs_with_probe_slowed_or_sped_up_by_model_returns_same_logs(
        self, seed: int, factor: float
    ) -> None:
        """The model is charged for cold caches or a lower clock that it causes."""
        times, probe = race(seed)
        disturbed = probe.copy()
        disturbed[:, :, 2] *= factor
        np.testing.assert_allclose(
            compute_block_logs(times, NO_LOSS, disturbed),
            compute_block_logs(times, NO_LOSS, probe),
            atol=1e-9,
        )

    @pytest.mark.parametrize("share", [0.05, 0.5, 0.9, 0.95])
    def test_compute_block_logs_with_random_slow_spells_favors_no_model(self, share: float) -> None:
        """At a share of 0.95, the machine is nearly always slow.

        One model then has more runs in the few fast spells than another.
        """
        rng = np.random.default_rng(9)
        for _ in range(20):
            slow = (rng.random((*SHAPE[:2], 6)) < share).repeat(5, axis=-1).reshape(SHAPE)
            times = 1e5 * np.exp(math.log(SLOW) * slow + rng.normal(0, 0.02, SHAPE))
            probe = 2e3 * np.exp(math.log(SLOW) * slow + rng.normal(0, 0.05, SHAPE))
            assert abs(ratio_of(compute_block_logs(times, NO_LOSS, probe))) < 0.03

    def test_compute_block_logs_with_probe_keeps_jitter_of_candidate(self) -> None:
        rng = np.random.default_rng(5)
        times, probe = race(6)
        times[:, :, 2] *= np.where(rng.random(SHAPE[:2] + SHAPE[3:]) < 0.8, 1.2, 1.0)
        assert ratio_of(compute_block_logs(times, NO_LOSS, probe)) > math.log(1.12)

    @pytest.mark.parametrize("value", [math.nan, math.inf, 0.0, -1.0])
    def test_compute_block_logs_with_invalid_probe_returns_plain_estimate(
        self, value: float
    ) -> None:
        times, probe = race(7)
        probe[1, 2, 0, 3] = value
        for one in (probe, np.full(SHAPE, value)):
            np.testing.assert_array_equal(
                compute_block_logs(times, NO_LOSS, one), compute_block_logs(times, NO_LOSS)
            )

    def test_compute_block_logs_with_few_runs_or_constant_probe_returns_plain_estimate(
        self,
    ) -> None:
        times, probe = race(8)
        for part, one in ((np.s_[:1, :1], probe), (np.s_[:], np.full(SHAPE, 2e3))):
            some, lost = times[part], NO_LOSS[part]
            np.testing.assert_array_equal(
                compute_block_logs(some, lost, one[part]), compute_block_logs(some, lost)
            )
