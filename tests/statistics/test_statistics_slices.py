"""Slices of rows: their names, the p-values of losses, and the correction for all slices."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest

from onnx_ops.domain.evidence import PairedCounts
from onnx_ops.domain.gate import FEWEST_SLICE_ROWS, SlicesGate
from onnx_ops.statistics.intervals import change_p_value, compute_tango_scores, tango_interval
from onnx_ops.statistics.slices import (
    compute_excess_p_value,
    compute_harm_p_value,
    compute_shortfall_p_value,
    correct_for_all,
    make_slicing,
    read_values,
)


def counts(n: int, lost: int, won: int, **more: Any) -> PairedCounts:
    return PairedCounts(
        metric="accuracy",
        against="fp32",
        n=n,
        both=n - lost - won,
        only_baseline=lost,
        only_candidate=won,
        **more,
    )


@pytest.mark.parametrize(
    ("array", "texts"),
    [
        (np.array(["DE", "", " "]), ["DE", "(missing)", "(missing)"]),
        (np.array([1.0, math.nan, 2.5]), ["1", "(missing)", "2.5"]),
        (np.array([[3], [4]]), ["3", "4"]),
        (np.array([True, False]), ["true", "false"]),
        (np.array(["x", None], dtype=object), ["x", "(missing)"]),
        (np.array(["2024-01-02", "NaT"], dtype="M8[D]"), ["2024-01-02", "(missing)"]),
    ],
)
def test_read_values_returns_strings_and_marks_missing_values(array: Any, texts: list[str]) -> None:
    assert read_values(array).tolist() == texts


def test_make_slicing_of_crossing_names_only_combinations_that_occur() -> None:
    slicing = make_slicing(
        {"country": np.array(["DE", "AT", "DE"]), "device": np.array(["a", "b", "a"])}
    )
    assert slicing.names == ("country=AT, device=b", "country=DE, device=a")
    assert slicing.numbers.tolist() == [1, 0, 1]


@pytest.mark.parametrize(("n", "lost", "won", "bound"), [(60, 9, 1, -0.05), (200, 0, 0, -0.02)])
def test_compute_tango_scores_agrees_with_change_p_value(
    n: int, lost: int, won: int, bound: float
) -> None:
    score, _ = compute_tango_scores(n, np.array(lost), np.array(won), bound)
    normal = 0.5 * math.erfc(float(score) / math.sqrt(2))
    assert change_p_value(counts(n, lost, won), bound) == pytest.approx(normal)


def _enumerate_rejections(n: int, limit: float, won: float, level: float) -> float:
    """Return the probability that the p-value of a slice at the limit is at most `level`."""
    lost, total = won + limit, 0.0
    logs = [math.lgamma(k + 1) for k in range(n + 1)]
    for b, c in itertools.product(range(n + 1), range(n + 1)):
        if b + c > n or b <= c + n * limit:
            continue
        rest = n - b - c
        if won == 0 and c:
            continue
        log = logs[n] - logs[b] - logs[c] - logs[rest] + b * math.log(lost)
        log += (c * math.log(won) if c else 0.0) + rest * math.log(1 - lost - won)
        if log > -25 and compute_harm_p_value(counts(n, b, c), -limit) <= level:
            total += math.exp(log)
    return total


@pytest.mark.parametrize(("n", "limit", "won"), [(100, 0.1, 0.0), (60, 0.05, 0.05)])
def test_harm_p_value_of_slice_at_limit_keeps_level(n: int, limit: float, won: float) -> None:
    level = 0.05 / 20
    rate = _enumerate_rejections(n, limit, won, level)
    assert rate <= 1.02 * level


def test_harm_p_value_of_many_rows_is_one_minus_change_p_value() -> None:
    many = counts(200_000, 9_000, 4_000)
    assert compute_harm_p_value(many, -0.02) == pytest.approx(1 - change_p_value(many, -0.02))


def test_harm_p_value_of_equal_answers_is_one() -> None:
    equal = counts(100, 0, 0, equal=True)
    assert compute_harm_p_value(equal, -0.01) == 1.0


def test_harm_p_value_of_groups_is_larger_than_of_rows() -> None:
    rows = compute_harm_p_value(counts(200, 30, 2), -0.05)
    grouped = compute_harm_p_value(counts(200, 30, 2, groups=40, change_effect=2.0), -0.05)
    assert rows < grouped
    assert rows < 0.05 < grouped * 10


def test_shortfall_p_value_is_binomial_tail() -> None:
    # 8 of 10 right at a bound of 90 %: P(X <= 8) = 1 - 0.9^10 - 10 * 0.9^9 * 0.1.
    expected = 1 - 0.9**10 - 10 * 0.9**9 * 0.1
    assert compute_shortfall_p_value(counts(10, 2, 0), 0.9) == pytest.approx(expected)


def test_excess_p_value_is_half_at_estimate_and_five_percent_at_end_of_interval() -> None:
    assert compute_excess_p_value(0.3, 0.3, 50) == pytest.approx(0.05)
    assert compute_excess_p_value(0.0, 0.3, 50) == pytest.approx(0.5)


def test_correct_for_all_returns_p_values_of_holm() -> None:
    assert correct_for_all([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert correct_for_all([0.6, 0.7]) == [1.0, 1.0]


@pytest.mark.parametrize("limit", [0.01, 0.05, 0.2])
def test_count_needed_rows_of_max_drop_returns_fewest_rows_that_can_pass_or_fewest_of_slice(
    limit: float,
) -> None:
    needed = SlicesGate(max_drop=limit).count_needed_rows()
    assert tango_interval(needed, 0, 0)[1] > -limit
    assert needed == FEWEST_SLICE_ROWS or -limit >= tango_interval(needed - 1, 0, 0)[1]


def test_count_needed_rows_of_min_returns_fewest_rows_that_can_pass() -> None:
    needed = SlicesGate(min=0.95).count_needed_rows()
    assert 0.05 ** (1 / needed) >= 0.95 > 0.05 ** (1 / (needed - 1))
