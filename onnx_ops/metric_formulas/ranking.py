"""Formulas of metrics of retrieval: one ranking of items for each query.

Grades and scores have shape (queries, items). An item with a negative grade does not exist: queries
can have different numbers of items. An item is relevant if its grade is above 0. Each query must
have a relevant item.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from onnx_ops.metric_formulas.statistic import Array

NO_ITEM = -1
"""Grade of an item that does not exist."""


def compute_recall(grades: Array, scores: Array, k: int) -> npt.NDArray[np.float64]:
    """Return the share of relevant items that are among the k best, for each query.

    An irrelevant item with the same score ranks before a relevant item.
    """
    relevant = grades > 0
    found = relevant & (_rank_relevant(grades, scores) <= k)
    return np.asarray(found.sum(axis=1) / relevant.sum(axis=1))


def compute_reciprocal_rank(grades: Array, scores: Array, k: int) -> npt.NDArray[np.float64]:
    """Return 1 / rank of the first relevant item of each query.

    The value is 0 if this item is not among the k best. An irrelevant item with the same score
    ranks before a relevant item.
    """
    first = _rank_relevant(grades, scores).min(axis=1)
    return np.asarray(np.where(first <= k, 1 / first, 0.0))


def _rank_relevant(grades: Array, scores: Array) -> npt.NDArray[np.float64]:
    """Return the rank of each relevant item from 1; infinity for other items.

    Equal scores count against the model, so that a model that scores all items equally gains
    nothing.
    """
    relevant = grades > 0
    # An item that does not exist ranks last, and an irrelevant item before a relevant one with the
    # same score.
    keys = np.where(grades < 0, np.inf, -scores.astype(np.float64))
    order = np.lexsort((relevant, keys), axis=1)
    ranks = np.empty(scores.shape)
    np.put_along_axis(ranks, order, np.arange(1.0, scores.shape[1] + 1)[None, :], axis=1)
    return np.where(relevant, ranks, np.inf)


def compute_ndcg(grades: Array, scores: Array, k: int) -> npt.NDArray[np.float64]:
    """Return nDCG of the k best items for each query.

    The gain of an item is its grade, and the discount is log2(rank + 1), as in scikit-learn. Items
    with equal scores have the mean of their gains (McSherry and Najork 2008, ECIR,
    https://doi.org/10.1007/978-3-540-78646-7_38).
    """
    items = scores.shape[1]
    discounts = np.where(np.arange(items) < k, 1 / np.log2(np.arange(2, items + 2)), 0.0)
    gains = np.maximum(grades, 0).astype(np.float64)
    keys = np.where(grades < 0, np.inf, -scores.astype(np.float64))
    order = np.argsort(keys, axis=1, kind="stable")
    ranked = _average_ties(
        np.take_along_axis(keys, order, axis=1), np.take_along_axis(gains, order, axis=1)
    )
    best = -np.sort(-gains, axis=1) @ discounts
    return np.asarray(ranked @ discounts / best)


def _average_ties(keys: Array, gains: Array) -> Array:
    """Replace the gains of items with equal keys by their mean.

    The keys of each row are sorted.
    """
    rows, items = keys.shape
    begins = np.ones((rows, items), dtype=np.bool_)
    begins[:, 1:] = keys[:, 1:] != keys[:, :-1]
    number = np.cumsum(begins.ravel()) - 1
    means = np.bincount(number, weights=gains.ravel()) / np.bincount(number)
    return np.asarray(means[number].reshape(rows, items))
