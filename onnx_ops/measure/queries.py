"""Queries and their items, as metrics of retrieval read them."""

from __future__ import annotations

import numpy as np

from onnx_ops.errors import UserError
from onnx_ops.metric_formulas import Array
from onnx_ops.metric_formulas.ranking import NO_ITEM


def prepare_grades(label: Array, group: Array | None, where: str) -> Array:
    """Return the grade of each item, of shape (queries, items).

    Args:
        label: grades of shape (queries, items), or of shape (items,) with the query of each item in
            `group`. A grade of -1 marks an item that does not exist.

    Raises:
        UserError: grades are not finite numbers, or the queries of the items are unknown.
    """
    if label.dtype.kind not in "fiub":
        raise UserError(f"grades must be numbers, not {label.dtype}", where=where)
    grades = label.astype(np.float64)
    if odd := int((~np.isfinite(grades)).sum()):
        raise UserError(f"{odd} of {grades.size} grades are NaN or infinite", where=where)
    if grades.ndim == 1:
        if group is None:
            raise UserError(
                "the label has one grade per row, and the query of each row is unknown",
                where=where,
                remedy="In a pipeline, set `group: NAME` of the data set to the array of the "
                "queries. `onnx-ops judge` needs labels of shape (queries, items).",
            )
        return arrange_by_query(grades, group, NO_ITEM)
    return grades


def arrange_by_query(values: Array, group: Array, fill: float) -> Array:
    """Return the values of the items of each query, of shape (queries, items).

    Queries are in the order of their numbers. Missing items have the value `fill`.
    """
    order = np.argsort(group, kind="stable")
    _, query, sizes = np.unique(group[order], return_inverse=True, return_counts=True)
    place = np.arange(len(group)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    table = np.full((len(sizes), int(sizes.max())), fill, dtype=np.float64)
    table[query, place] = values[order]
    return table


def arrange_scores(scores: Array, grades: Array, group: Array | None, where: str) -> Array:
    """Return the scores in the shape of the grades that `prepare_grades` returned.

    The score of an item that does not exist is 0, whatever the model answers.

    Raises:
        UserError: a query has another number of scores than grades.
    """
    if scores.ndim == 1 and group is not None:
        scores = arrange_by_query(scores, group, 0.0)
    if scores.shape != grades.shape:
        raise UserError(
            f"scores of shape {tuple(scores.shape)} do not fit grades of shape "
            f"{tuple(grades.shape)}",
            where=where,
            remedy="The model and the label must list the same items for each query.",
        )
    return np.where(grades < 0, 0.0, scores)
