"""Block medians, and the speed of the machine taken off by a probe."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from onnx_ops.errors import MeasurementError
from onnx_ops.statistics.latency import compute_block_logs

Floats = npt.NDArray[np.float64]

SHAPE = (4, 6, 3, 10)
NO_LOSS = np.zeros(SHAPE, dtype=bool)
SLOW = 2.0
seeds = st.integers(0, 2**32 - 1)


def race(seed: int, *, ratio: float = 1.0) -> tuple[Floats, Floats]:
    """Runs and probes on a machine that is slow in spells; the last model takes `ratio` times as long."""
    rng = np.random.default_rng(seed)
    slow = (rng.random(SHAPE).ravel() < 0.05).cumsum().reshape(SHAPE) % 2
    times = 1e5 * np.exp(math.log(SLOW) * slow + rng.normal(0, 0.03, SHAPE))
    times[:, :, 2] *= ratio
    return times, 2e3 * np.exp(math.log(SLOW) * slow + rng.normal(0, 0.1, SHAPE))


def ratio_of(logs: Floats) -> float:
    return float(np.median(np.median(logs[..., 2] - logs[..., 0], axis=1)))


class TestMedians:
    def test_differences_are_the_logs_of_ratios(self) -> None:
        nanoseconds = np.full(SHAPE, 100)
        nanoseconds[:, :, 2] = 150
        logs = compute_block_logs(nanoseconds, NO_LOSS)
        assert logs.shape == SHAPE[:3]
        assert logs[..., 2] - logs[..., 0] == pytest.approx(math.log(1.5))

    @pytest.mark.parametrize("probed", [False, True])
    def test_preempted_runs_are_left_out_while_three_remain(self, probed: bool) -> None:
        times, probe = race(1) if probed else (np.full(SHAPE, 1e5), None)
        lost = np.random.default_rng(2).random(SHAPE) < 0.2
        before = compute_block_logs(times, lost, probe)
        np.testing.assert_array_equal(compute_block_logs(np.where(lost, 29 * times, times), lost, probe), before)

    def test_a_block_of_lost_runs_counts_them_all(self) -> None:
        nanoseconds, lost = np.full((1, 1, 2, 5), 100), np.zeros((1, 1, 2, 5), dtype=bool)
        nanoseconds[0, 0, 1, :4], lost[0, 0, 1, :4] = 9000, True
        first, second = compute_block_logs(nanoseconds, lost)[0, 0]
        assert second == first, "one run kept its core"
        lost[0, 0, 1, 4] = True
        first, second = compute_block_logs(nanoseconds, lost)[0, 0]
        assert second - first == pytest.approx(math.log(90))

    def test_no_duration_is_no_measurement(self) -> None:
        with pytest.raises(MeasurementError, match="no measurable time"):
            compute_block_logs(np.zeros(SHAPE), NO_LOSS)

    def test_a_clock_that_stands_still_now_and_then_is_one(self) -> None:
        times, probe = race(3)
        times[..., ::4] = 0
        assert np.isfinite(compute_block_logs(times, NO_LOSS, probe)).all()


class TestProbe:
    def test_takes_off_what_the_machine_did(self) -> None:
        spreads = {True: [], False: []}  # type: dict[bool, list[float]]
        for seed in range(40):
            times, probe = race(seed)
            for probed, found in spreads.items():
                found.append(ratio_of(compute_block_logs(times, NO_LOSS, probe if probed else None)))
        assert np.std(spreads[True]) < 0.5 * np.std(spreads[False])

    @given(seeds, st.permutations(range(3)))
    def test_knows_no_model_from_another(self, seed: int, order: list[int]) -> None:
        """So that baseline and candidate exchanged negate the estimate."""
        times, probe = race(seed)
        logs = compute_block_logs(times, NO_LOSS, probe)
        swapped = compute_block_logs(times[:, :, order], NO_LOSS, probe[:, :, order])
        np.testing.assert_allclose(swapped, logs[:, :, order], atol=1e-12)

    @given(seeds, st.floats(0.2, 5))
    def test_a_slower_model_stays_as_much_slower(self, seed: int, ratio: float) -> None:
        times, probe = race(seed)
        slower = times.copy()
        slower[:, :, 2] *= ratio
        before, after = (ratio_of(compute_block_logs(t, NO_LOSS, probe)) for t in (times, slower))
        assert after - before == pytest.approx(math.log(ratio), abs=1e-9)

    @given(seeds, st.floats(0.2, 5))
    def test_a_model_that_slows_the_probe_is_not_excused_by_it(self, seed: int, factor: float) -> None:
        """Cold caches or a lower clock that a model leaves behind are its own doing."""
        times, probe = race(seed)
        disturbed = probe.copy()
        disturbed[:, :, 2] *= factor
        np.testing.assert_allclose(
            compute_block_logs(times, NO_LOSS, disturbed), compute_block_logs(times, NO_LOSS, probe), atol=1e-9
        )

    @pytest.mark.parametrize("share", [0.05, 0.5, 0.9, 0.95])
    def test_chance_gives_no_model_a_slow_probe_of_its_own(self, share: float) -> None:
        """On a machine that is nearly always slow, its few fast spells fall to one model more than to another."""
        rng = np.random.default_rng(9)
        for _ in range(20):
            slow = (rng.random((*SHAPE[:2], 6)) < share).repeat(5, axis=-1).reshape(SHAPE)
            times = 1e5 * np.exp(math.log(SLOW) * slow + rng.normal(0, 0.02, SHAPE))
            probe = 2e3 * np.exp(math.log(SLOW) * slow + rng.normal(0, 0.05, SHAPE))
            assert abs(ratio_of(compute_block_logs(times, NO_LOSS, probe))) < 0.03

    def test_jitter_of_the_candidate_stays_in(self) -> None:
        rng = np.random.default_rng(5)
        times, probe = race(6)
        times[:, :, 2] *= np.where(rng.random(SHAPE[:2] + SHAPE[3:]) < 0.8, 1.2, 1.0)
        assert ratio_of(compute_block_logs(times, NO_LOSS, probe)) > math.log(1.12)

    @pytest.mark.parametrize("value", [math.nan, math.inf, 0.0, -1.0])
    def test_one_probe_that_says_nothing_leaves_the_plain_estimate(self, value: float) -> None:
        times, probe = race(7)
        probe[1, 2, 0, 3] = value
        np.testing.assert_array_equal(compute_block_logs(times, NO_LOSS, probe), compute_block_logs(times, NO_LOSS))

    @given(seeds, st.sampled_from([0.0, 1.0, 2e3, math.nan]))
    def test_a_probe_that_never_changes_leaves_the_plain_estimate(self, seed: int, value: float) -> None:
        times, _ = race(seed)
        np.testing.assert_array_equal(
            compute_block_logs(times, NO_LOSS, np.full(SHAPE, value)), compute_block_logs(times, NO_LOSS)
        )

    def test_too_few_runs_for_a_curve_leave_the_plain_estimate(self) -> None:
        times, probe = (array[:1, :1] for array in race(8))
        few: Any = NO_LOSS[:1, :1]
        np.testing.assert_array_equal(compute_block_logs(times, few, probe), compute_block_logs(times, few))
