"""Where models are run: on the event loop or in a lane."""

from __future__ import annotations

import pytest

from onnx_ops.serving.inference.request_queue import INLINE_S, LatencyEstimator


def test_fast_models_run_at_once_and_slow_ones_do_not() -> None:
    run_time = LatencyEstimator(20e-6)
    run_time.observe(5e-3)  # the system took the processor away once
    fast = [run_time.is_fast]
    for _ in range(3):
        run_time.observe(5e-3)
    fast.append(run_time.is_fast)
    for _ in range(30):
        run_time.observe(20e-6)
    fast.append(run_time.is_fast)
    run_time.observe(10.0)
    fast.append(run_time.is_fast)
    assert fast == [True, False, True, False]


@pytest.mark.parametrize("seconds", [INLINE_S * 1.02, INLINE_S * 1.2])
def test_one_between_the_limits_stays_where_it_is(seconds: float) -> None:
    came_from = {True: LatencyEstimator(INLINE_S / 2), False: LatencyEstimator(INLINE_S * 2)}
    for fast, run_time in came_from.items():
        for _ in range(100):
            run_time.observe(seconds)
            assert run_time.is_fast is fast


def test_one_slow_run_of_a_model_near_the_limit_moves_nothing() -> None:
    run_time = LatencyEstimator(0.8 * INLINE_S)
    run_time.observe(50e-3)
    assert run_time.is_fast


@pytest.mark.parametrize(
    ("leader", "own", "at_once"), [(0.9, 1.1, True), (0.9, 3.9, True), (0.9, 4.1, False), (1.1, 0.9, False)]
)
def test_all_follow_the_leader_but_those_that_are_far_slower(leader: float, own: float, at_once: bool) -> None:
    assert LatencyEstimator(own * INLINE_S).should_run_inline(LatencyEstimator(leader * INLINE_S)) is at_once


def test_whoever_is_far_slower_leaves_though_it_is_cut_short() -> None:
    leader, own = LatencyEstimator(0.9 * INLINE_S), LatencyEstimator(0.9 * INLINE_S)
    for _ in range(6):
        own.observe(90e-3)
    assert not own.should_run_inline(leader)


def test_the_leader_itself_leaves_by_its_own_limits_only() -> None:
    leader = LatencyEstimator(0.9 * INLINE_S)
    assert leader.should_run_inline(leader)
    leader.observe(1.0)
    assert not leader.should_run_inline(leader)
