"""Formulas of metrics of classes, numbers, embeddings and tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from onnx_ops.metric_formulas.statistic import Array, MetricStatistic, Statistic, Weights


def r2(labels: Array, predictions: Array) -> Statistic:
    """Return the statistic for R², the explained share of the labels' variance.

    The result is undefined (NaN) if the labels of the weighted rows are equal.
    """
    centred = labels - labels.mean()
    residuals = np.square(labels - predictions)

    def statistic(weights: Weights) -> npt.NDArray[np.float64]:
        total = weights @ np.square(centred) - np.square(weights @ centred) / weights.sum(axis=1)
        with np.errstate(all="ignore"):
            return np.where(
                total > 1e-12 * np.square(centred).sum(), 1 - weights @ residuals / total, np.nan
            )

    return statistic


def f1(
    labels: Array, predictions: Array, classes: int, average: str, positive: int = 0
) -> Statistic:
    """Return the statistic for F1, the harmonic mean of precision and recall.

    Args:
        labels: class numbers of shape (rows,), below `classes`.
        average: `binary` is the F1 of the class `positive`. `macro` is the mean F1 of the classes
            that occur in labels or predictions. `weighted` is their mean weighted by their numbers
            of labels. `micro` is computed from the counts over all classes.
    """
    right = _indicator(labels, classes, labels == predictions)
    true, predicted = _indicator(labels, classes), _indicator(predictions, classes)

    def statistic(weights: Weights) -> npt.NDArray[np.float64]:
        hits, support, total = right @ weights.T, true @ weights.T, (true + predicted) @ weights.T
        with np.errstate(all="ignore"):
            each = 2 * hits / total
            match average:
                case "binary":
                    return np.asarray(each[positive])
                case "micro":
                    return np.asarray(2 * hits.sum(axis=0) / total.sum(axis=0))
                case "macro":
                    return np.asarray(np.nansum(each, axis=0) / (total > 0).sum(axis=0))
                case "weighted":
                    return np.asarray(np.nansum(support * each, axis=0) / support.sum(axis=0))
                case _:
                    raise ValueError(f"unknown average {average!r} of classes")

    return statistic


def f1_step(
    labels: Array, predictions: Array, classes: int, average: str, positive: int = 0
) -> float:
    """Return an upper bound of the decrease of F1 by one more wrong row.

    The bound holds if the row's label and prediction are classes that already occur.
    """
    hits = np.bincount(labels[labels == predictions], minlength=classes)
    support = np.bincount(labels, minlength=classes)
    total = support + np.bincount(predictions, minlength=classes)
    with np.errstate(all="ignore"):
        missed = np.where(hits > 0, 2 * hits / total - 2 * (hits - 1) / np.maximum(total - 1, 1), 0)
        taken = np.where(total > 0, 2 * hits / total - 2 * hits / (total + 1), 0)
    match average:
        case "binary":
            return float(max(missed[positive], taken[positive]))
        case "micro":
            return 1 / len(labels)
        case "macro":
            return float(missed.max() + taken.max()) / max(1, int((total > 0).sum()))
        case "weighted":
            share = support / support.sum()
            return float((share * missed).max() + (share * taken).max())
        case _:
            raise ValueError(f"unknown average {average!r} of classes")


def _indicator(numbers: Array, classes: int, selected: Array | None = None) -> Any:
    """Return a sparse matrix of the class of each row.

    Its shape is (classes, rows). An element is 1 if the row is selected and of the class, and 0
    otherwise.
    """
    from scipy import sparse  # The import is local, since few metrics need it.

    rows = np.arange(len(numbers)) if selected is None else np.flatnonzero(selected)
    shape = (classes, len(numbers))
    return sparse.csr_array((np.ones(len(rows)), (numbers[rows], rows)), shape=shape)


def auc(positive: Array, scores: Array) -> Statistic:
    """Return the statistic for the area under the ROC curve.

    A tie contributes one half. The result is undefined (NaN) if one of the classes has no rows.
    """
    order = np.argsort(scores, kind="stable")
    is_positive = positive[order].astype(np.float64)
    begins = np.flatnonzero(np.r_[True, np.diff(scores[order]) != 0])

    def statistic(weights: Weights) -> npt.NDArray[np.float64]:
        ordered = weights[:, order]
        won, lost = ordered * is_positive, ordered * (1 - is_positive)
        if len(begins) < len(order):
            won, lost = (np.add.reduceat(counts, begins, axis=1) for counts in (won, lost))
        above = np.cumsum(lost, axis=1) - lost / 2
        with np.errstate(all="ignore"):
            return np.asarray((won * above).sum(axis=1) / (won.sum(axis=1) * lost.sum(axis=1)))

    return statistic


def cosine_rows(one: Array, other: Array) -> Array:
    """Return the cosine similarity of the rows of two (rows, dimensions) arrays.

    The similarity is 1 for equal rows. It is 0 if only one of the two rows is zero.
    """
    a, b = one.astype(np.float64), other.astype(np.float64)
    product = np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1)
    cosine = np.divide((a * b).sum(axis=1), product, out=np.zeros(len(a)), where=product > 0)
    return np.where((a == b).all(axis=1), 1.0, np.clip(cosine, -1.0, 1.0))


def token_rows(one: Array, reference: Array, ignore: int) -> Array:
    """Return the share of equal tokens per row of two (rows, tokens) arrays.

    Tokens whose reference is `ignore` are not counted. The share is NaN if no token is counted.
    """
    counted = reference != ignore
    with np.errstate(all="ignore"):
        return np.asarray(((one == reference) & counted).sum(axis=1) / counted.sum(axis=1))


def top_k_rows(columns: Array, scores: Array, k: int) -> Array:
    """Return whether each row's label has one of the k highest scores.

    Args:
        columns: column of each row's label in `scores`, of shape (rows,).
        scores: scores of shape (rows, classes). An equal score of another class ranks
            before the label's.
    """
    own_score = np.take_along_axis(scores, columns[:, None], axis=1)
    return np.asarray((scores >= own_score).sum(axis=1) <= k)


def make_f1_statistic(label: Array, answers: Array, average: str) -> MetricStatistic:
    """Return F1 of predicted classes; the positive class of a binary F1 is 1."""
    # Class 1 gets a number even if no row has it.
    known, numbers = np.unique(np.concatenate([label, answers, [1]]), return_inverse=True)
    true, predicted, positive = numbers[: len(label)], numbers[len(label) : -1], int(numbers[-1])
    settings = (true, predicted, len(known), average, positive)
    return MetricStatistic(statistic=f1(*settings), reads=answers, step=f1_step(*settings))


def make_auc_statistic(label: Array, answers: Array) -> MetricStatistic:
    """Return the area under the ROC curve of scores.

    `label` is true for each positive row.
    """
    # The score of a wrong row is random: it ranks wrongly against half of the other class's rows.
    fewer = min(int(label.sum()), int((~label).sum()))
    return MetricStatistic(
        statistic=auc(label, answers), reads=answers, step=1 / (2 * max(1, fewer))
    )
