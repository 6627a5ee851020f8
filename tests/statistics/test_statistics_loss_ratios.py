"""Ratios of losses: intervals that hold where few rows carry most of the loss."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from onnx_ops.statistics.intervals import UNSEEN_CHANGES, find_heavy_rows, ratio_interval

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
def test_a_true_growth_equal_to_the_limit_seldom_passes_or_fails(name: str, rows: int) -> None:
    """6 % are promised: at most 14 of 120 trials are wrong in all but one of two hundred tests like this."""
    rng = np.random.default_rng(rows)
    base = population(name, rng, (120, rows))
    noise = population(name, rng, (120, rows)) * rng.choice([-1.0, 1.0], (120, rows))
    worse = base + (LIMIT**2 - 1) ** 0.5 * noise
    found = [ratio_interval(mine**2, theirs**2, UNSEEN_CHANGES) for mine, theirs in zip(worse, base, strict=True)]
    assert sum(one.high < LIMIT**2 for one in found) <= 14
    assert sum(one.low > LIMIT**2 for one in found) <= 14


def test_tiny_changes_pass_though_few_rows_carry_the_error() -> None:
    rng = np.random.default_rng(0)
    base = population("2 % x 12", rng, (20, 100))
    for row in base:
        near = row * (1 + 1e-3 * rng.standard_normal(100))
        assert ratio_interval(near**2, row**2, UNSEEN_CHANGES).high < LIMIT


def test_it_contains_its_estimate_and_knows_units() -> None:
    rng = np.random.default_rng(1)
    mine, theirs = rng.exponential(1, 60), rng.exponential(1, 60)
    found = ratio_interval(mine, theirs, 3.0)
    assert found.low < found.estimate < found.high
    scaled = ratio_interval(1e6 * mine, theirs, 3.0)
    assert (scaled.low, scaled.high) == pytest.approx((1e6 * found.low, 1e6 * found.high), rel=1e-6)


def test_where_nothing_bounds_a_ratio_its_end_is_far() -> None:
    theirs = np.full(30, 1e-3)
    theirs[0] = 1e3
    mine = np.random.default_rng(0).exponential(1, 30)
    assert ratio_interval(mine, theirs, 3.0).high > 50 * ratio_interval(mine, theirs, 3.0).estimate


def test_few_heavy_rows_are_named_the_worst_first() -> None:
    losses = np.ones(100)
    losses[[7, 40]] = 300, 200
    effective, heavy = find_heavy_rows(losses)
    assert heavy == (7,)
    assert effective == pytest.approx(598**2 / (300**2 + 200**2 + 98))
    assert find_heavy_rows(np.zeros(4)) == (4.0, ())


def test_unseen_rows_widen_it_by_the_worst_one_seen() -> None:
    mine, theirs = np.ones(100), np.ones(100)
    mine[0] = 11
    plain, wide = (ratio_interval(mine, theirs, unseen).high for unseen in (0.0, 2.5))
    assert wide - plain == pytest.approx(2.5 * (11 - 1.1) / 100, rel=1e-3)
