"""Labels as each metric needs them, and answers in the labels' terms."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from onnx_ops.domain.metric import MetricDefinition
from onnx_ops.errors import UserError
from onnx_ops.measure.predictions import Reading, flat, texts
from onnx_ops.statistics.metrics import Array


def label_of(definition: MetricDefinition, label: Array | None) -> Array | None:
    """The label as the metric needs it; None where it compares models with each other.

    Raises:
        UserError: it is not of the kind that the metric needs.
    """
    match definition.name:
        case "cosine" | "token_agreement":
            fits = label is not None and label.ndim == 2 and label.dtype.kind in _KINDS[definition.name]
            return label if fits else None
        case "mae" | "rmse" | "r2":
            if label is None or flat(label).ndim != 1 or label.dtype.kind not in "fiub":
                is_number = label is None or label.dtype.kind in "fiub"
                raise _unfit(definition, label, "one number a row", "" if is_number else definition.other_kind)
            return flat(label).astype(np.float64)
        case None:
            if label is None:
                raise _unfit(definition, label, "an array")
            return texts(label)
        case _:
            return _class_label(definition, label)


_KINDS: Mapping[str, str] = {"cosine": "f", "token_agreement": "iu"}


def _class_label(definition: MetricDefinition, label: Array | None) -> Array:
    found = None if label is None else texts(flat(label))
    if found is None or found.ndim != 1:
        wide = found is not None and found.ndim == 2
        remedy = "Of one column a class, take its number: labels.argmax(axis=1)." if wide else ""
        raise _unfit(definition, label, "one class a row", remedy)
    if found.dtype.kind != "f":
        return found
    if missing := int((~np.isfinite(found)).sum()):
        text = f"{missing} of {len(found)} labels are NaN or infinite"
        raise UserError(text, where=definition.label, remedy="Leave out rows without a label.")
    if (found % 1).any():
        raise _unfit(definition, label, "classes, not fractions", definition.other_kind)
    return found.astype(np.int64)


def _unfit(definition: MetricDefinition, label: Array | None, needed: str, remedy: str = "") -> UserError:
    has = "there is none" if label is None else f"it is {label.dtype} {tuple(label.shape)}"
    return UserError(f"the label must be {needed}; {has}", where=definition.label, remedy=remedy)


_USE_COLUMNS = "Use labels 0, 1, …, the numbers of the columns."


def column_labels(label: Array, count: int, where: str, remedy: str = _USE_COLUMNS) -> Array:
    """The label that each of `count` columns of scores stands for, in ascending order.

    Whole numbers from 0 are numbers of columns. Other labels have their columns in sorted order, which is only known
    where all of them occur.

    Raises:
        UserError: the labels do not fit so many columns.
    """
    known = np.unique(label)
    if label.dtype.kind != "U" and known.size and known[0] >= 0 and known[-1] < count:
        return np.arange(count)
    if len(known) != count:
        shown = ", ".join(str(one) for one in known[:5])
        raise UserError(
            f"labels ({shown}{', …' if len(known) > 5 else ''}) do not fit {count} columns of scores",
            where=where,
            remedy=remedy,
        )
    return known


def classes_of(label: Array, reading: Reading, definition: MetricDefinition) -> Array:
    """The answers as labels, one a row.

    Raises:
        UserError: the labels do not fit the answers.
    """
    values, where = reading.values, definition.label
    if reading.columns == 1:
        if ((values < 0) | (values > 1)).any():
            raise UserError(
                "one score a row is read as a probability, but some are not between 0 and 1",
                where=where,
                remedy=definition.other_kind,
            )
        remedy = definition.other_kind if label.dtype.kind != "U" else _USE_COLUMNS
        return column_labels(label, 2, where, remedy)[(values > 1 / 2).astype(np.intp)]
    if reading.columns:
        return column_labels(label, reading.columns, where)[values]
    if (label.dtype.kind == "U") != (values.dtype.kind == "U"):
        raise UserError(f"the model answers with {values.dtype}, the labels are {label.dtype}", where=where)
    return values


def positive_of(definition: MetricDefinition, label: Array) -> str | int:
    """The positive label: the one that was named, or the greater of two.

    Raises:
        UserError: it is not named, and there are more than two.
    """
    if definition.positive is not None:
        return str(definition.positive) if label.dtype.kind == "U" else definition.positive
    known = np.unique(label)
    if len(known) > 2:
        raise UserError(
            f"there are {len(known)} classes; which one is positive?",
            where=definition.label,
            remedy="Name it: `positive: LABEL`.",
        )
    found: str | int = known[-1].item()
    return found if label.dtype.kind == "U" else max(found, 1)


def positive_scores(label: Array, positive: str | int, reading: Reading, where: str) -> Array:
    """The scores of the positive label, one a row; those of the other of two, negative, where only these are given.

    Raises:
        UserError: no column stands for it.
    """
    names = column_labels(label, max(2, reading.columns), where)
    column = np.flatnonzero(names == positive)
    if not column.size:
        raise UserError(f"no column of scores is that of label {positive!r}", where=where)
    if reading.columns > 1:
        return np.asarray(reading.values[:, column[0]])
    return reading.values if column[0] == 1 else -reading.values
