"""Outputs and labels of models in the form that a task metric reads.

Functions raise UserError if outputs or labels do not fit the metric or each other.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from onnx_ops.domain.gate import MetricDefinition
from onnx_ops.domain.task_metrics import AnswerKind
from onnx_ops.errors import UserError
from onnx_ops.measure.decoding import Decoder, decode_outputs
from onnx_ops.measure.queries import prepare_grades
from onnx_ops.measure.text_answers import is_texts, read_texts
from onnx_ops.measure.user_functions import CUSTOM_METRIC
from onnx_ops.measure.visual_answers import (
    find_nan,
    prepare_visual_label,
    read_detections,
    read_mask,
    read_poses,
    widen,
)
from onnx_ops.metric_formulas import Array
from onnx_ops.metric_formulas.calibration import apply_softmax
from onnx_ops.ports import Tensors

_TEXTS = "USO"


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """The values that a metric reads from the outputs for some rows.

    With `columns` 0, `values` are comparable with the label. Otherwise, `values` are the index of
    the best column or the scores of all columns. With 1 column, they are one score per row.
    `broken` is the number of rows with NaN in scores, or with NaN or infinity in detections. For
    other values it is 0. With `ragged`, `values` are detections, whose number can differ from batch
    to batch. `outputs` are digests of all outputs of the model, one per batch. A digest is "" if no
    output is of floating point.
    """

    values: Array
    columns: int = 0
    broken: int = 0
    ragged: bool = False
    outputs: tuple[str, ...] = ()

    def has_equal_outputs(self, other: Prediction) -> bool:
        """Return whether two models gave equal outputs on all rows of the same batches.

        At least one output must be of floating point. Equal classes are weak evidence: a model that
        differs only in a rare class gives the same classes on most rows.
        """
        return bool(self.outputs) and all(self.outputs) and self.outputs == other.outputs


class _Form(NamedTuple):
    """A kind of output that a metric can read."""

    noun: str
    fits: Callable[[Array], bool]
    convert: Callable[[Array], Prediction]


def read_prediction(
    definition: MetricDefinition, outputs: Tensors, decode: Decoder | None = None
) -> Prediction:
    """Return the prediction from the named output, or from the first that fits.

    `decode` is the function that the definition names; it gets all outputs.
    """
    if decode is not None:
        decoded = decode_outputs(definition, outputs, decode)
        prediction = _read_form(definition, decoded)
    else:
        prediction = _read_form(definition, _select_output(definition, outputs))
    return replace(prediction, outputs=(_digest_outputs(outputs),))


def _select_output(definition: MetricDefinition, outputs: Tensors) -> Tensors:
    """Return the named output; all outputs if none is named."""
    if definition.output is None:
        return outputs
    if definition.output not in outputs:
        raise UserError(
            f"the model has no output {definition.output!r} with one entry per row",
            where=definition.label,
            remedy=f"Name one of these outputs: {', '.join(outputs)}.",
        )
    return {definition.output: outputs[definition.output]}


def _read_form(definition: MetricDefinition, named: Tensors) -> Prediction:
    """Return the prediction from the first output that has the best possible form.

    The forms of a metric are tried in order of preference.
    """
    nouns = []
    for form in _FORMS[definition.reads]:
        nouns.append(form.noun)
        for array in named.values():
            if form.fits(array):
                return form.convert(array)
    if definition.reads in _SET_FORMS:
        noun, read_set = _SET_FORMS[definition.reads]
        nouns.append(noun)
        if (prediction := read_set(named)) is not None:
            return prediction
    shapes = {name: f"{array.dtype} {tuple(array.shape)}" for name, array in named.items()}
    raise UserError(
        f"no output can be read as {' or '.join(nouns)}: {shapes}",
        where=definition.label,
        remedy=_suggest_output(definition, nouns),
    )


def _suggest_output(definition: MetricDefinition, nouns: Sequence[str]) -> str:
    """Return the remedy for outputs that cannot be read as any of these nouns."""
    if definition.decode:
        return f"Return {' or '.join(nouns)} from {definition.decode}."
    if definition.output is not None:
        return "Name another output with `output:`, or use another metric."
    other_kind = definition.other_kind or "Use a metric that fits the model."
    return (
        f"{other_kind} In a pipeline, convert the outputs with `decode: package.module:function`."
    )


def _digest_outputs(outputs: Tensors) -> str:
    """Return the digest of all outputs; empty if no output is of floating point."""
    if not any(array.dtype.kind in "fc" for array in outputs.values()):
        return ""
    digest = hashlib.sha256()
    for array in map(as_text, outputs.values()):
        digest.update(f"{array.dtype} {array.shape}".encode())
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()


def join_predictions(predictions: Sequence[Prediction]) -> Prediction:
    """Join the predictions of successive rows."""
    if all(prediction.ragged for prediction in predictions):
        places = max(prediction.values.shape[1] for prediction in predictions)
        predictions = [
            replace(prediction, values=widen(prediction.values, places))
            for prediction in predictions
        ]
    if len({(prediction.values.shape[1:], prediction.columns) for prediction in predictions}) != 1:
        forms = sorted(
            {
                f"{prediction.columns} scores"
                if prediction.columns
                else f"shape {prediction.values.shape[1:]}"
                for prediction in predictions
            }
        )
        raise UserError(
            f"the form of the answer for a row differs between batches: {', '.join(forms)}",
            remedy="Export the model with a fixed number of values for each row.",
        )
    return Prediction(
        values=np.concatenate([prediction.values for prediction in predictions]),
        columns=predictions[0].columns,
        ragged=predictions[0].ragged,
        broken=sum(prediction.broken for prediction in predictions),
        outputs=tuple(digest for prediction in predictions for digest in prediction.outputs),
    )


def as_text(array: Array) -> Array:
    """Return texts or objects as NumPy strings, and other arrays unchanged."""
    return array.astype(np.str_) if array.dtype.kind in _TEXTS else array


def flatten_column(array: Array) -> Array:
    """Return an array of shape (n, 1) as a vector, and other arrays unchanged."""
    return array[:, 0] if array.ndim == 2 and array.shape[1] == 1 else array


def _count_nan(scores: Array) -> int:
    return int(np.isnan(scores).any(axis=1).sum()) if scores.dtype.kind == "f" else 0


def _is_scores(array: Array) -> bool:
    return bool(array.ndim == 2 and array.shape[1] > 1 and array.dtype.kind in "fiu")


def _read_scores(array: Array) -> Prediction:
    """Return the prediction from one score per row, or from one score per class."""
    scores = flatten_column(array).astype(np.float64)
    columns = 1 if scores.ndim == 1 else scores.shape[1]
    return Prediction(
        values=scores, columns=columns, broken=_count_nan(scores.reshape(len(scores), columns))
    )


def _read_numbers(array: Array) -> Prediction:
    return Prediction(values=flatten_column(array).astype(np.float64))


def _make_column_form(noun: str, kinds: str, convert: Callable[[Array], Prediction]) -> _Form:
    """Return a form of one value per row, for these kinds of NumPy types."""
    return _Form(
        noun, lambda array: flatten_column(array).ndim == 1 and array.dtype.kind in kinds, convert
    )


def _make_matrix_form(noun: str, kinds: str) -> _Form:
    return _Form(
        noun,
        lambda array: array.ndim == 2 and array.dtype.kind in kinds,
        lambda array: Prediction(values=array),
    )


def _read_best_class(array: Array) -> Prediction:
    return Prediction(values=array.argmax(axis=1), columns=array.shape[1], broken=_count_nan(array))


def _read_best_token(array: Array) -> Prediction:
    return Prediction(
        values=array.argmax(axis=2), broken=int(np.isnan(array).any(axis=(1, 2)).sum())
    )


def _read_text_column(array: Array) -> Prediction:
    return Prediction(values=read_texts(flatten_column(array), "outputs"))


_COLUMN_FORM = _make_column_form("one score per row", "f", _read_scores)
_CLASS_FORMS = (
    _make_column_form(
        "labels", "iub" + _TEXTS, lambda array: Prediction(values=as_text(flatten_column(array)))
    ),
    _Form("scores per class", _is_scores, _read_best_class),
    _COLUMN_FORM,
)
_SCORE_FORMS = (_Form("scores per class", _is_scores, _read_scores), _COLUMN_FORM)
_NUMBER_FORMS = (
    _make_column_form("one number per row", "f", _read_numbers),
    _make_column_form("one whole number per row", "iu", _read_numbers),
)


def _make_boxes(read: Callable[[Tensors], Array | None], outputs: Tensors) -> Prediction | None:
    """Return detections; None if `read` cannot read the outputs."""
    values = read(outputs)
    if values is None:
        return None
    return Prediction(values=values, ragged=True, broken=int(find_nan(values).sum()))


def _make_mask(outputs: Tensors) -> Prediction | None:
    """Return the classes of pixels; None if no output is a mask."""
    mask = read_mask(outputs)
    return None if mask is None else Prediction(values=mask[0], columns=mask[1], broken=mask[2])


_SET_FORMS: Mapping[AnswerKind | None, tuple[str, Callable[[Tensors], Prediction | None]]] = {
    "detections": (
        (
            "detections: boxes (rows, n, 4), scores and classes (rows, n); "
            "or one array (rows, n, 6): x1, y1, x2, y2, score, class"
        ),
        functools.partial(_make_boxes, read_detections),
    ),
    "keypoints": (
        (
            "detections with keypoints (rows, n, 6 + 3 * keypoints): "
            "x1, y1, x2, y2, score, class, then x, y, score of each keypoint"
        ),
        functools.partial(_make_boxes, read_poses),
    ),
    "masks": (
        "masks: classes (rows, height, width) or scores (rows, classes, height, width)",
        _make_mask,
    ),
}
"""Description and reader of the kinds that need several outputs or special checks."""

_FORMS: Mapping[AnswerKind | None, Sequence[_Form]] = {
    **dict.fromkeys(_SET_FORMS, ()),
    "classes": _CLASS_FORMS,
    "ranking": _SCORE_FORMS[:1],
    "positive": _SCORE_FORMS,
    "probabilities": _SCORE_FORMS,
    "relevance": (
        _Form("scores of items (rows, items)", _is_scores, _read_scores),
        _make_column_form("one score per row", "fiu", _read_scores),
    ),
    "texts": (_Form("one text per row", is_texts, _read_text_column),),
    "numbers": _NUMBER_FORMS,
    "embeddings": (_make_matrix_form("embeddings (rows, dimensions)", "f"),),
    "tokens": (
        _make_matrix_form("tokens (rows, length)", "iu"),
        _Form(
            "scores of tokens (rows, length, vocabulary)",
            lambda array: array.ndim == 3 and array.dtype.kind == "f",
            _read_best_token,
        ),
    ),
    None: (_Form("an array", lambda _: True, lambda array: Prediction(values=as_text(array))),),
}
"""The forms of output that each kind of metric can read, in order of preference.

The key None is for custom metrics.
"""


def prepare_label(
    definition: MetricDefinition, label: Array | None, group: Array | None = None
) -> Array | None:
    """Return the label as the metric needs it; None without a label.

    Only metrics of embeddings and tokens need no label. A label that they cannot read is ignored.
    `group` numbers the query of each row for metrics of retrieval.
    """
    prepared = _convert_label(definition, label, group)
    if prepared is not None and definition.metric is not None:
        problem = definition.metric.find_label_problem(prepared, definition.options)
        if problem:
            raise UserError(problem, where=definition.label)
    return prepared


def _convert_label(
    definition: MetricDefinition, label: Array | None, group: Array | None
) -> Array | None:
    match definition.reads:
        case "texts":
            return _prepare_texts(definition, label)
        case "relevance":
            if label is None or label.ndim not in (1, 2):
                raise _make_label_error(definition, label, "grades of items")
            return prepare_grades(label, group, definition.label)
        case "embeddings":
            return _select_matrix(label, "f")
        case "tokens":
            return _select_matrix(label, "iu")
        case "numbers":
            return _prepare_numbers(definition, label)
        case "detections" | "keypoints" | "masks":
            return prepare_visual_label(definition, label)
        case None:
            if label is None:
                raise _make_label_error(definition, label, "an array")
            return as_text(label)
        case _:
            return _prepare_classes(definition, label)


def _select_matrix(label: Array | None, kinds: str) -> Array | None:
    """Return the label if it is a matrix of these types; otherwise None."""
    return label if label is not None and label.ndim == 2 and label.dtype.kind in kinds else None


def _prepare_texts(definition: MetricDefinition, label: Array | None) -> Array:
    """Return one text per row, or several references per row."""
    if label is None or label.dtype.kind not in _TEXTS or label.ndim not in (1, 2):
        needed = "one text per row, or texts of shape (rows, references)"
        raise _make_label_error(definition, label, needed)
    return read_texts(flatten_column(label), definition.label)


def _prepare_numbers(definition: MetricDefinition, label: Array | None) -> Array:
    if label is None:
        raise _make_label_error(definition, label, "one number per row")
    is_number = label.dtype.kind in "fiub"
    if not is_number or flatten_column(label).ndim != 1:
        remedy = "" if is_number else definition.other_kind
        raise _make_label_error(definition, label, "one number per row", remedy)
    return flatten_column(label).astype(np.float64)


def _prepare_classes(definition: MetricDefinition, label: Array | None) -> Array:
    classes = None if label is None else as_text(flatten_column(label))
    if classes is None or classes.ndim != 1:
        wide = classes is not None and classes.ndim == 2
        remedy = (
            "For one column per class, use the class number: labels.argmax(axis=1)." if wide else ""
        )
        raise _make_label_error(definition, label, "one class per row", remedy)
    if classes.dtype.kind != "f":
        return classes
    if missing := int((~np.isfinite(classes)).sum()):
        text = f"{missing} of {len(classes)} labels are NaN or infinite"
        raise UserError(text, where=definition.label, remedy="Leave out rows without a label.")
    if (classes % 1).any():
        raise _make_label_error(definition, label, "classes, not fractions", definition.other_kind)
    return classes.astype(np.int64)


def _make_label_error(
    definition: MetricDefinition, label: Array | None, needed: str, remedy: str = ""
) -> UserError:
    has = "there is none" if label is None else f"it is {label.dtype} {tuple(label.shape)}"
    return UserError(f"the label must be {needed}; {has}", where=definition.label, remedy=remedy)


_USE_COLUMNS = "Use the column numbers 0, 1, … as labels."


def find_column_labels(label: Array, count: int, where: str, remedy: str = _USE_COLUMNS) -> Array:
    """Return the label of each of `count` score columns, in order.

    Labels from 0 to `count` - 1 are column numbers. For other labels, the columns are in the sorted
    order of the labels, which is known only if every label occurs.
    """
    known = np.unique(label)
    if label.dtype.kind != "U" and known.size and known[0] >= 0 and known[-1] < count:
        return np.arange(count)
    if len(known) != count:
        shown = ", ".join(str(one) for one in known[:5])
        raise UserError(
            f"labels ({shown}{', …' if len(known) > 5 else ''}) "
            f"do not fit {count} columns of scores",
            where=where,
            remedy=remedy,
        )
    return known


def read_classes(label: Array, prediction: Prediction, definition: MetricDefinition) -> Array:
    """Return the predicted labels, one per row."""
    values, where = prediction.values, definition.label
    if prediction.columns == 1:
        if ((values < 0) | (values > 1)).any():
            raise UserError(
                "one score per row is read as a probability, but some scores are not between 0 "
                "and 1",
                where=where,
                remedy=definition.other_kind,
            )
        remedy = definition.other_kind if label.dtype.kind != "U" else _USE_COLUMNS
        return find_column_labels(label, 2, where, remedy)[(values > 1 / 2).astype(np.intp)]
    if prediction.columns:
        return find_column_labels(label, prediction.columns, where)[values]
    if (label.dtype.kind == "U") != (values.dtype.kind == "U"):
        raise UserError(
            f"the model answers with values of type {values.dtype}, but the labels are of type "
            f"{label.dtype}",
            where=where,
        )
    return values


def find_positive_label(definition: MetricDefinition, label: Array) -> str | int:
    """Return the positive label: the configured one, or the greater of two labels.

    Without a configured label, it is at least 1 for numbers.
    """
    if definition.positive is not None:
        return str(definition.positive) if label.dtype.kind == "U" else definition.positive
    known = np.unique(label)
    if len(known) > 2:
        raise UserError(
            f"the labels have {len(known)} classes, and none is configured as positive",
            where=definition.label,
            remedy=f"In a pipeline, set `positive: LABEL`. {CUSTOM_METRIC}",
        )
    positive: str | int = known[-1].item()
    return positive if label.dtype.kind == "U" else max(positive, 1)


def read_positive_scores(
    label: Array, positive: str | int, prediction: Prediction, where: str
) -> Array:
    """Return the scores of the positive label, one per row.

    A single column has the scores of the second of two labels. Their sign is changed if the
    positive label is the first.
    """
    names = find_column_labels(label, max(2, prediction.columns), where)
    column = np.flatnonzero(names == positive)
    if not column.size:
        raise UserError(f"no column of scores belongs to label {positive!r}", where=where)
    if prediction.columns > 1:
        return np.asarray(prediction.values[:, column[0]])
    return prediction.values if column[0] == 1 else -prediction.values


_SUM_ERROR = 0.01
"""Maximum deviation of a sum of probabilities from 1.

Probabilities of 1,000 classes in float16 deviate by less.
"""


def read_probabilities(definition: MetricDefinition, prediction: Prediction) -> Array:
    """Return probabilities of shape (rows, classes).

    One score per row is the probability, or the logit, of the second of two classes.

    Raises:
        UserError: the scores of a row are not probabilities.
    """
    scores = prediction.values
    if prediction.columns == 1:
        scores = np.stack([np.zeros_like(scores), scores], axis=1)
        if not definition.logits:
            scores[:, 0] = 1 - scores[:, 1]
    if definition.logits:
        return apply_softmax(scores)
    wrong = (scores < 0).any(axis=1) | (np.abs(scores.sum(axis=1) - 1) > _SUM_ERROR)
    if wrong.any():
        raise UserError(
            f"the scores of {int(wrong.sum())} of {len(scores)} rows are not probabilities, which "
            "are at least 0 and sum to 1",
            where=definition.label,
            remedy="In a pipeline, set `logits: true` for logits, or `output: NAME` for another "
            f"output. {CUSTOM_METRIC}",
        )
    return np.asarray(scores)
