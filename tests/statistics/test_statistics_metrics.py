"""Task metrics against scikit-learn's, on plain and on weighted rows."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onnx_ops import metric_formulas as metrics
from onnx_ops.domain.gate import RMSE
from onnx_ops.domain.task_metrics import Average
from onnx_ops.statistics.intervals import bca_interval, replicate
from onnx_ops.statistics.scores import build_metric_statistic

few = settings(max_examples=25, deadline=None)

AVERAGES: tuple[Average, ...] = ("binary", "macro", "micro", "weighted")


def weights(rows: int, seed: int) -> Any:
    return np.random.default_rng(seed).integers(0, 4, (3, rows)).astype(float)


def draw(seed: int, rows: int = 60, classes: int = 4) -> tuple[Any, Any]:
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, classes, rows)
    return labels, np.where(rng.random(rows) < 0.6, labels, rng.integers(0, classes, rows))


@pytest.mark.parametrize("average", AVERAGES)
@few
@given(seed=st.integers(0, 10_000))
def test_f1_with_weights_matches_scikit_learn(average: Average, seed: int) -> None:
    from sklearn import metrics as reference

    labels, said = draw(seed, classes=2 if average == "binary" else 4)
    given_weights = weights(len(labels), seed)
    found = metrics.f1(labels, said, 4, average, positive=1)(given_weights)
    for value, weight in zip(found, given_weights, strict=True):
        kept = np.repeat(np.arange(len(labels)), weight.astype(int))
        expected = reference.f1_score(labels[kept], said[kept], average=average, zero_division=0.0)
        assert value == pytest.approx(expected)


@pytest.mark.parametrize("average", AVERAGES)
@few
@given(seed=st.integers(0, 10_000))
def test_f1_step_bounds_loss_from_one_wrong_row(average: Average, seed: int) -> None:
    labels, said = draw(seed, rows=30, classes=2 if average == "binary" else 3)
    one = np.ones((1, len(labels)))
    before = metrics.f1(labels, said, 3, average, 1)(one)[0]
    step = metrics.f1_step(labels, said, 3, average, 1)
    for row in np.flatnonzero(labels == said):
        wrong = said.copy()
        wrong[row] = (said[row] + 1) % (2 if average == "binary" else 3)
        assert before - metrics.f1(labels, wrong, 3, average, 1)(one)[0] <= step + 1e-12


@few
@given(seed=st.integers(0, 10_000), levels=st.sampled_from([2, 5, 1000]))
def test_auc_with_and_without_ties_matches_scikit_learn(seed: int, levels: int) -> None:
    from sklearn import metrics as reference

    rng = np.random.default_rng(seed)
    positive = np.r_[True, False, rng.random(40) < 0.3]
    scores = rng.integers(0, levels, 42) + positive * rng.integers(0, 2, 42)
    given_weights = 1 + weights(42, seed)
    for value, weight in zip(
        metrics.auc(positive, scores)(given_weights), given_weights, strict=True
    ):
        assert value == pytest.approx(
            reference.roc_auc_score(positive, scores, sample_weight=weight)
        )


@few
@given(seed=st.integers(0, 10_000))
def test_mae_rmse_and_r2_with_weights_match_scikit_learn(seed: int) -> None:
    from sklearn import metrics as reference

    rng = np.random.default_rng(seed)
    labels, weight = 100 + rng.standard_normal(50), 1 + weights(50, seed)
    said = labels + rng.standard_normal(50)
    pairs = [
        (metrics.mean(np.abs(labels - said)), reference.mean_absolute_error),
        (build_metric_statistic(RMSE, labels, said).statistic, reference.root_mean_squared_error),
        (metrics.r2(labels, said), reference.r2_score),
    ]
    for statistic, expected in pairs:
        for value, one in zip(statistic(weight), weight, strict=True):
            assert value == pytest.approx(expected(labels, said, sample_weight=one))


@few
@given(seed=st.integers(0, 10_000), k=st.integers(1, 4))
def test_top_k_rows_matches_scikit_learn(seed: int, k: int) -> None:
    from sklearn import metrics as reference

    rng = np.random.default_rng(seed)
    scores, labels = rng.standard_normal((40, 5)), rng.integers(0, 5, 40)
    expected = reference.top_k_accuracy_score(labels, scores, k=k, labels=range(5))
    assert metrics.top_k_rows(labels, scores, k).mean() == pytest.approx(expected)


def test_top_k_rows_of_equal_scores_are_all_wrong() -> None:
    assert not metrics.top_k_rows(np.arange(5), np.ones((5, 5)), 4).any()


def test_auc_r2_and_f1_of_rows_that_leave_them_undefined_return_nan() -> None:
    one = np.ones((1, 4))
    assert math.isnan(metrics.auc(np.ones(4, dtype=bool), np.arange(4.0))(one)[0])
    assert math.isnan(metrics.r2(np.full(4, 0.1), np.arange(4.0))(one)[0])
    assert math.isnan(
        metrics.f1(np.zeros(4, dtype=int), np.zeros(4, dtype=int), 2, "binary", 1)(one)[0]
    )


def test_cosine_rows_of_zero_and_tiny_vectors_returns_defined_values() -> None:
    a = np.array([[1, 0], [1, 1], [0, 0], [0, 0], [1e-30, 0], [3, 4]], dtype=np.float32)
    b = np.array([[2, 0], [-1, -1], [0, 0], [1, 0], [1e-30, 0], [4, -3]], dtype=np.float32)
    assert metrics.cosine_rows(a, b) == pytest.approx([1, -1, 1, 0, 1, 0])


def test_token_rows_with_ignored_tokens_excludes_them() -> None:
    label = np.array([[1, 2, -100], [1, -100, -100], [-100, -100, -100]])
    said = np.array([[1, 3, -100], [1, 5, 5], [1, 2, 3]])
    assert metrics.token_rows(said, label, -100) == pytest.approx([0.5, 1, np.nan], nan_ok=True)


def level_of(values: Any) -> float:
    """Return the level at which a plain BCa interval equals one of Student's t.

    The tails of the latter are .9 times 5 %.
    """
    from scipy import stats

    squares = np.square(values - values.mean())
    degrees = squares.sum() ** 2 / np.square(squares).sum() - 1
    return float(2 * stats.norm.cdf(stats.t.ppf(1 - 0.9 * 0.05, degrees)) - 1)


class TestInterval:
    @pytest.mark.parametrize(
        ("rows", "seed", "resamples", "near"), [(120, 0, 20_000, 0.008), (1500, 3, 8000, 0.003)]
    )
    def test_bca_interval_of_mean_matches_scipy(
        self, rows: int, seed: int, resamples: int, near: float
    ) -> None:
        from scipy import stats

        values = np.random.default_rng(seed).exponential(size=rows)
        found = bca_interval(
            replicate({"m": metrics.mean(values)}, np.arange(rows), 0, resamples)["m"]
        )
        settings: dict[str, Any] = {
            "n_resamples": resamples,
            "random_state": 1,
            "method": "BCa",
            "batch": 200,
        }
        level = level_of(values)
        expected = stats.bootstrap(
            (values,), np.mean, confidence_level=level, **settings
        ).confidence_interval
        assert found is not None
        assert (found.low, found.high) == pytest.approx((expected.low, expected.high), abs=near)

    def test_bca_interval_with_many_undefined_resamples_returns_none(self) -> None:
        positive = np.arange(30) == 0
        assert (
            bca_interval(
                replicate({"a": metrics.auc(positive, np.arange(30.0))}, np.arange(30), 0)["a"]
            )
            is None
        )

    def test_bca_interval_with_same_seed_returns_same_interval(self) -> None:
        values = np.random.default_rng(0).random(50)
        one, two = (
            bca_interval(replicate({"m": metrics.mean(values)}, np.arange(50), 7)["m"])
            for _ in range(2)
        )
        assert one == two
