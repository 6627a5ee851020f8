"""Models as a task metric sees them: a statistic over rows, what it reads of each row, and what a row can cost."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from onnx_ops.domain.metric import MetricDefinition
from onnx_ops.statistics import metrics
from onnx_ops.statistics.metrics import Array, OwnMetric
from onnx_ops.statistics.resampling import Statistic


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One model's answers to the rows.

    `reads` is what the metric takes from them, one entry a row. `step` is the most that one more row gone wrong could
    cost; None for a metric without a range.
    """

    statistic: Statistic
    reads: Array
    step: float | None = None


def side(definition: MetricDefinition, label: Array, answers: Array, function: OwnMetric | None = None) -> Side:
    """The side of one model; for the arguments see `scores.score`.

    Raises:
        ValueError: the definition is no score of these arguments.
    """
    match definition.name:
        case "f1":
            return _classes(definition, label, answers)
        case "auc":
            return _ranking(label, answers)
        case "mae":
            return Side(statistic=metrics.mean(np.abs(label - answers)), reads=answers)
        case "rmse":
            return Side(statistic=metrics.rmse(label - answers), reads=answers)
        case "r2":
            return Side(statistic=metrics.r2(label, answers), reads=answers)
        case "cosine":
            return _shares(metrics.cosine_rows(answers, label))
        case "token_agreement" if definition.ignore is not None:
            return _shares(metrics.token_rows(answers, label, definition.ignore))
        case None if function is not None:
            return Side(statistic=metrics.own(function, answers, label), reads=answers)
        case _:
            raise ValueError(f"{definition.label} is no score of these arguments")


def _classes(definition: MetricDefinition, label: Array, answers: Array) -> Side:
    average = definition.average or "macro"
    # The positive class has a number even where no row is of it.
    known, numbers = np.unique(np.concatenate([label, answers, [1]]), return_inverse=True)
    true, said, positive = numbers[: len(label)], numbers[len(label) : -1], int(numbers[-1])
    settings = (true, said, len(known), average, positive)
    return Side(statistic=metrics.f1(*settings), reads=answers, step=metrics.f1_step(*settings))


def _ranking(positive: Array, scores: Array) -> Side:
    """A row gone wrong scores at random: it loses to half of the rows of the other class."""
    fewer = min(int(positive.sum()), int((~positive).sum()))
    return Side(statistic=metrics.auc(positive, scores), reads=scores, step=1 / (2 * max(1, fewer)))


def _shares(values: Array) -> Side:
    """A row gone wrong has nothing in common with what it should be."""
    return Side(statistic=metrics.mean(values), reads=values, step=1 / len(values))
