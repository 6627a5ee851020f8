"""Limits of metric gates that no model passes with the given number of rows."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from onnx_ops.domain.decision import Verdict
from onnx_ops.domain.evidence import PairedCounts
from onnx_ops.domain.gate import MetricGate
from onnx_ops.domain.task_metrics import METRICS, Resampled
from onnx_ops.statistics.rules.metric import judge_metric, list_limits
from onnx_ops.statistics.sample_size import advise_rows, find_needed_rows
from onnx_ops.statistics.scores import CANDIDATE, score
from tests.support.evidence import make_evidence


def find_needed(gate: MetricGate) -> int | None:
    (limit,) = list_limits(gate)
    return find_needed_rows(gate.definition(), limit)


def judge_counts(gate: MetricGate, rows: int) -> Verdict:
    """Return the verdict on two models that are right on all rows."""
    counts = tuple(
        PairedCounts(
            metric="accuracy", against=name, n=rows, both=rows, only_baseline=0, only_candidate=0
        )
        for name in ("", "fp32")
    )
    (result, *_) = judge_metric(gate, make_evidence("int8", quantized=True, metrics=counts))
    return result.verdict


@pytest.mark.parametrize(
    "limit", [{"max_drop": 0.01}, {"max_drop": 0.003}, {"min": 0.95}, {"min": 0.998}]
)
def test_find_needed_rows_of_counted_metric_returns_fewest_that_pass(limit: dict[str, Any]) -> None:
    gate = MetricGate(**limit)
    needed = find_needed(gate)
    assert needed is not None
    assert judge_counts(gate, needed) is Verdict.PASS
    assert judge_counts(gate, needed - 1) is Verdict.INCONCLUSIVE


@pytest.mark.parametrize("limit", [{"max_drop": 0.99}, {"min": 0.04}])
def test_find_needed_rows_of_limit_that_one_row_passes_returns_one(limit: dict[str, Any]) -> None:
    assert find_needed(MetricGate(**limit)) == 1


def judge_queries(gate: MetricGate, rows: int) -> Verdict:
    """Return the verdict on two models that rank all queries well, with different scores."""
    grades = np.tile([1, 0], (rows, 1))
    better = np.tile([1.0, 0.0], (rows, 1))
    answers = {CANDIDATE: better, "fp32": better + 1}
    scores = score(gate.definition(), grades, answers, seed=0, resamples=20)
    (result, *_) = judge_metric(gate, make_evidence("int8", quantized=True, scores=scores))
    return result.verdict


@pytest.mark.parametrize("limit", [{"max_drop": 0.03}, {"min": 0.95}])
def test_find_needed_rows_of_resampled_metric_returns_passing_number_within_one(
    limit: dict[str, Any],
) -> None:
    gate = MetricGate(name="mrr", **limit)
    needed = find_needed(gate)
    assert needed is not None
    assert judge_queries(gate, needed + 1) is Verdict.PASS
    assert judge_queries(gate, needed - 1) is Verdict.INCONCLUSIVE


@pytest.mark.parametrize(
    ("settings", "rows", "groups", "expected"),
    [
        ({"max_drop": 0.01}, 512, 0, []),
        (
            {"max_drop": 0.001},
            512,
            0,
            ["drop ≤ 0.1%: 512 rows, unless the outputs of both models are equal, 2703 rows"],
        ),
        (
            {"min": 1.0},
            512,
            0,
            ["≥ 100%: any number of rows"],
        ),
        (
            {"name": "cosine", "max_drop": 0.0},
            512,
            0,
            ["drop ≤ 0%: any number of rows, unless the outputs of both models are equal"],
        ),
        (
            {"name": "wer", "max": 0.02, "max_increase": 0.5},
            512,
            100,
            ["≤ 2%: 100 groups, 150 groups"],
        ),
        (
            {"name": "rmse", "max": 3.0, "max_increase": 0.01},
            50,
            0,
            ["≤ 3: 50 rows, 75 rows"],
        ),
        ({"use": "shop:profit", "higher_is_better": True, "max_drop": 0.1}, 20, 0, []),
    ],
)
def test_advise_rows_names_limits_that_cannot_be_passed(
    settings: dict[str, Any], rows: int, groups: int, expected: list[str]
) -> None:
    gate = MetricGate(**settings)
    advice = list(advise_rows(gate, rows, groups))
    assert all(text.startswith(f"{gate.definition().label}: ") for text in advice)
    assert [shorten(text) for text in advice] == expected


def shorten(advice: str) -> str:
    """Return the limit, the number of rows, and the number of rows that can suffice."""
    limit, _, rest = advice.partition(": ")[2].partition(" cannot be passed with ")
    rest = re.sub(r"(, even if [^;]+)?; (.+) can suffice", r", \2", rest)
    return f"{limit}: {rest}"


@pytest.mark.parametrize(
    "name",
    [
        name
        for name, metric in METRICS.items()
        if isinstance(metric.method, Resampled) and metric.method.row_effect
    ],
)
def test_row_effect_of_resampled_metrics_is_at_most_step_times_rows(name: str) -> None:
    """Otherwise, `find_needed_rows` would require more rows than a limit needs."""
    method = METRICS[name].method
    assert isinstance(method, Resampled)
    rows = 40
    texts = np.array(["one two three four"] * rows)
    numbers = np.random.default_rng(0).random((rows, 3))
    first = np.tile([1, 0, 0], (rows, 1))
    masks = np.arange(rows * 4).reshape(rows, 2, 2) % 3
    objects = np.tile([10.0, 10, 30, 40, 1, 0], (rows, 1, 1))
    detections = np.tile([10.0, 10, 30, 40, 0.9, 1], (rows, 1, 1))
    points = np.tile([20.0, 20, 2], (rows, 1, 17))
    persons = np.concatenate([objects, np.full((rows, 1, 1), 600), points], axis=2)
    answers: dict[str, tuple[Any, Any]] = {
        "texts": (texts, texts),
        "relevance": (first, numbers),
        "probabilities": (np.zeros(rows, dtype=int), numbers / numbers.sum(1, keepdims=True)),
        "positive": (np.arange(rows) % 3 == 0, numbers[:, 0]),
        "embeddings": (numbers, numbers),
        "tokens": (first, first),
        "detections": (objects, detections),
        "keypoints": (persons, np.concatenate([detections, points], axis=2)),
        "masks": (masks, masks),
    }
    label, given = answers[METRICS[name].reads]
    side = method.make(label, given, MetricGate(name=name).definition().options)
    assert side.step is not None
    assert side.step * rows >= method.row_effect - 1e-9
