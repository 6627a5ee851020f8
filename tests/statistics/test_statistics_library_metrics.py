"""Metrics of texts, rankings, probabilities and numbers against the libraries that define them.

Each run draws new cases. A failure shows their seed.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from onnx_ops.domain.gate import MetricDefinition, MetricGate
from onnx_ops.domain.task_metrics import METRICS
from onnx_ops.metric_formulas.calibration import apply_softmax
from onnx_ops.metric_formulas.texts import list_references
from onnx_ops.statistics.scores import build_metric_statistic

CASES = 200
SEED = random.SystemRandom().randrange(2**32)
EXACT = 1e-9

Case = tuple[MetricDefinition, Any, Any]
"""A metric, its label and the answers."""


def define(name: str, **options: Any) -> MetricDefinition:
    return MetricGate(name=name, **options).definition()


def compute(case: Case, rows: Any = None) -> float:
    """Return a metric of all rows, or of rows that are drawn several times."""
    definition, label, answers = case
    counts = np.bincount(np.arange(len(label)) if rows is None else rows, minlength=len(label))
    statistic = build_metric_statistic(definition, label, answers).statistic
    return float(statistic(counts[None].astype(np.float64))[0])


WORDS = ("the", "a", "cat", "dog", "sat", "mat", "ran", "don't", "12.5", "größer", "猫", ",", "!")


def draw_text(rng: random.Random, least: int = 1) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(rng.randint(least, 12)))


def change_text(rng: random.Random, text: str) -> str:
    kept = (word for word in text.split() if rng.random() < 0.9)
    changed = [word if rng.random() < 0.7 else rng.choice(WORDS) for word in kept]
    return " ".join(changed + [rng.choice(WORDS)] * rng.randint(0, 1))


def draw_texts(name: str, seed: int) -> Case:
    """Draw texts with one to three references, some of them empty."""
    rng = random.Random(seed)  # noqa: S311 (no secret is drawn)
    count = rng.randint(1, 3) if name in ("bleu", "chrf") else 1
    table = [
        [draw_text(rng), *(draw_text(rng, 0) for _ in range(count - 1))]
        for _ in range(rng.randint(2, 12))
    ]
    label = np.array(table if count > 1 else [row[0] for row in table])
    return define(name), label, np.array([change_text(rng, row[0]) for row in table])


def draw_ranking(name: str, seed: int) -> Case:
    """Draw queries, every second time with many equal scores."""
    rng = np.random.default_rng(seed)
    shape = (int(rng.integers(2, 8)), int(rng.integers(2, 15)))
    grades = rng.integers(0, 4, shape)
    if name == "mrr":
        grades = np.zeros(shape, dtype=np.int64)
    grades[:, 0] = 1
    scores = rng.normal(size=shape) if seed % 2 else rng.integers(0, 4, shape).astype(float)
    k = shape[1] if name == "mrr" else int(rng.integers(1, shape[1] + 3))
    return define(name, k=k), grades, scores


def draw_probabilities(name: str, seed: int) -> Case:
    rng = np.random.default_rng(seed)
    classes, rows = int(rng.integers(2, 6)), int(rng.integers(20, 60))
    scores = apply_softmax(rng.normal(size=(rows, classes)) * rng.choice([1, 5]))
    options = {"bins": int(rng.integers(2, 20))} if name == "ece" else {}
    return define(name, **options), rng.integers(0, classes, rows), scores


def draw_numbers(name: str, seed: int) -> Case:
    rng = np.random.default_rng(seed)
    label = rng.normal(size=30) + 0.01
    options = {"q": float(rng.uniform(0.05, 0.95))} if name == "quantile_loss" else {}
    return define(name, **options), label, label + rng.normal(size=30)


def compute_sacrebleu(kind: str, label: Any, answers: Any) -> float:
    from sacrebleu.metrics.bleu import BLEU
    from sacrebleu.metrics.chrf import CHRF

    table = list_references(label)
    most = max(map(len, table))
    streams = [
        [row[number] if number < len(row) else None for row in table] for number in range(most)
    ]
    metric: Any = BLEU() if kind == "bleu" else CHRF()
    return float(metric.corpus_score(answers.tolist(), streams).score) / 100


def compute_jiwer(kind: str, label: Any, answers: Any) -> float:
    import jiwer

    return float(getattr(jiwer, kind)(label.tolist(), answers.tolist()))


def compute_sklearn(definition: MetricDefinition, label: Any, answers: Any) -> float:
    from sklearn import metrics

    match definition.name:
        case "ndcg":
            return float(metrics.ndcg_score(label, answers, k=definition.k))
        case "mrr":
            # With one relevant item for each row, MRR equals this metric.
            return float(metrics.label_ranking_average_precision_score(label, answers))
        case "log_loss":
            return float(metrics.log_loss(label, answers, labels=range(answers.shape[1])))
        case "brier" if answers.shape[1] == 2:
            return float(metrics.brier_score_loss(label, answers[:, 1], pos_label=1))
        case "brier":
            known = list(range(answers.shape[1]))
            return float(metrics.brier_score_loss(label, answers, labels=known))
        case "mape":
            return float(metrics.mean_absolute_percentage_error(label, answers))
        case _:
            return float(metrics.mean_pinball_loss(label, answers, alpha=definition.q))


def count_recall(grades: Any, scores: Any, k: int) -> float:
    """Return recall by sorting the items of each query; equal scores count against the model."""
    shares = []
    for own, values in zip(grades.tolist(), scores.tolist(), strict=True):
        ranked = sorted(range(len(own)), key=lambda item: (-values[item], own[item] > 0))
        shares.append(sum(own[item] > 0 for item in ranked[:k]) / sum(grade > 0 for grade in own))
    return float(sum(shares) / len(shares))


def sum_calibration_error(label: Any, answers: Any, bins: int) -> float:
    """Return the calibration error, bin by bin."""
    confidence, right = answers.max(axis=1), answers.argmax(axis=1) == label
    error = 0.0
    for number in range(bins):
        inside = (confidence > number / bins) & (confidence <= (number + 1) / bins)
        if inside.any():
            error += inside.sum() * abs(confidence[inside].mean() - right[inside].mean())
    return float(error / len(label))


def compute_reference(case: Case) -> float:
    definition, label, answers = case
    match definition.name:
        case "bleu" | "chrf" as name:
            return compute_sacrebleu(name, label, answers)
        case "wer" | "cer" as name:
            return compute_jiwer(name, label, answers)
        case "recall_at_k":
            return count_recall(label, answers, definition.k or 0)
        case "ece":
            return sum_calibration_error(label, answers, definition.bins or 0)
        case _:
            return compute_sklearn(definition, label, answers)


DRAW: dict[str, Callable[[str, int], Case]] = {
    **dict.fromkeys(("wer", "cer", "bleu", "chrf"), draw_texts),
    **dict.fromkeys(("recall_at_k", "ndcg", "mrr"), draw_ranking),
    **dict.fromkeys(("brier", "log_loss", "ece"), draw_probabilities),
    **dict.fromkeys(("quantile_loss", "mape"), draw_numbers),
}


def draw_cases(name: str) -> Iterator[tuple[int, Case]]:
    for seed in range(SEED, SEED + CASES):
        yield seed, DRAW[name](name, seed)


@pytest.mark.parametrize("name", DRAW)
def test_metric_of_random_cases_equals_reference(name: str) -> None:
    for seed, case in draw_cases(name):
        assert compute(case) == pytest.approx(compute_reference(case), abs=EXACT), seed


@pytest.mark.parametrize("name", DRAW)
def test_metric_of_drawn_rows_equals_reference_on_repeated_rows(name: str) -> None:
    for seed, (definition, label, answers) in draw_cases(name):
        rows = np.random.default_rng(seed).integers(0, len(label), len(label))
        if name in ("bleu", "chrf", "wer", "cer") and not "".join(label[rows].ravel()).strip():
            continue
        expected = compute_reference((definition, label[rows], answers[rows]))
        found = compute((definition, label, answers), rows)
        assert found == pytest.approx(expected, abs=EXACT), seed


FIRST = ["The dog bit the man.", "It was not unexpected.", "The man bit him first."]
SECOND = ["The dog had bit the man.", "No one was surprised.", "The man had bitten the dog."]
SYSTEM = np.array(["The dog bit the man.", "It wasn't surprising.", "The man had just bitten him."])
REFERENCES = np.array([FIRST, SECOND]).T
RELEVANCE = np.array([[10, 0, 0, 1, 5]])

PUBLISHED: dict[str, tuple[Case, float]] = {
    "jiwer": ((define("wer"), np.array(["hello world"]), np.array(["hello duck"])), 0.5),
    "sacrebleu-bleu": ((define("bleu"), REFERENCES, SYSTEM), 0.4853),
    "sacrebleu-chrf": ((define("chrf"), REFERENCES, SYSTEM), 0.5973),
    "sklearn-ndcg": ((define("ndcg"), RELEVANCE, np.array([[0.1, 0.2, 0.3, 4, 70]])), 0.6957),
    "sklearn-ndcg-ties": ((define("ndcg", k=1), RELEVANCE, np.array([[1.0, 0, 0, 0, 1]])), 0.75),
    "sklearn-mape": (
        (define("mape"), np.array([3, -0.5, 2, 7]), np.array([2.5, 0.0, 2, 8])),
        0.3274,
    ),
    "sklearn-pinball": (
        (define("quantile_loss", q=0.1), np.array([1.0, 2, 3]), np.array([0.0, 2, 3])),
        0.0333,
    ),
    "sklearn-log-loss": (
        (
            define("log_loss"),
            np.array([1, 0, 0, 1]),
            np.array([[0.1, 0.9], [0.9, 0.1], [0.8, 0.2], [0.35, 0.65]]),
        ),
        0.2162,
    ),
}
"""Examples of the documentation of the libraries, with the values there."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_metric_of_published_example_has_published_value(name: str) -> None:
    case, value = PUBLISHED[name]
    assert compute(case) == pytest.approx(value, abs=5e-5)
    assert compute(case) == pytest.approx(compute_reference(case), abs=EXACT)


@pytest.mark.parametrize("name", DRAW)
def test_metric_step_is_none_for_means_and_numbers_and_at_most_one_otherwise(name: str) -> None:
    """The step is that of a row of average length and content."""
    definition, label, answers = DRAW[name](name, SEED)
    side = build_metric_statistic(definition, label, answers)
    assert (side.step is None) == (METRICS[name].reads in ("numbers",) or name in MEANS), SEED
    assert side.step is None or 0 <= side.step <= 1, SEED


MEANS = {"brier", "log_loss"}


def test_ranking_metrics_with_padded_items_ignore_them() -> None:
    for name in ("recall_at_k", "ndcg", "mrr"):
        for seed in range(SEED, SEED + 20):
            definition, grades, scores = draw_ranking(name, seed)
            padded = np.pad(grades, ((0, 0), (0, 3)), constant_values=-1)
            more = np.pad(scores, ((0, 0), (0, 3)), constant_values=99.0)
            expected = compute((definition, grades, scores))
            assert compute((definition, padded, more)) == pytest.approx(expected), (name, seed)


def test_recall_at_k_and_mrr_with_equal_scores_assume_worst_order() -> None:
    grades, scores = np.array([[1, 0, 0, 0]]), np.ones((1, 4))
    assert compute((define("recall_at_k", k=3), grades, scores)) == 0
    assert compute((define("mrr"), grades, scores)) == 0.25


def test_word_error_rate_of_insertions_exceeds_one_and_of_empty_reference_is_nan() -> None:
    longer = np.array(["a"]), np.array(["a b c d"])
    assert compute((define("wer"), *longer)) == 3
    assert np.isnan(compute((define("wer"), np.array([""]), np.array(["a"]))))
