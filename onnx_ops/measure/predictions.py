"""What a model's outputs say in a metric's terms: classes, scores, numbers, embeddings, tokens. Read in this one place,
batch by batch, whatever the labels."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from onnx_ops.domain.metric import MetricDefinition
from onnx_ops.errors import UserError
from onnx_ops.ports import Tensors
from onnx_ops.statistics.metrics import Array

_TEXTS = "USO"


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What was read of some rows.

    `columns` is 0 where `values` are what the label holds too. Otherwise `values` are the numbers of the best of so
    many columns, or the scores in all of them, or, with 1, one score a row. `broken` counts rows with a score of NaN.
    """

    values: Array
    columns: int = 0
    broken: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Form:
    """A kind of output that a metric can read."""

    noun: str
    fits: Callable[[Array], bool]
    take: Callable[[Array], Reading]


def read(definition: MetricDefinition, outputs: Tensors) -> Reading:
    """What the metric reads of the named output, or of the first one that fits.

    Raises:
        UserError: there is no such output, or none that fits.
    """
    if definition.output is not None and definition.output not in outputs:
        raise UserError(
            f"the model has no output {definition.output!r} with one entry a row",
            where=definition.label,
            remedy=f"It has: {', '.join(outputs)}.",
        )
    named = outputs if definition.output is None else {definition.output: outputs[definition.output]}
    forms = _FORMS[definition.name]
    for form in forms:
        for array in named.values():
            if form.fits(array):
                return form.take(array)
    shapes = {name: f"{array.dtype} {tuple(array.shape)}" for name, array in named.items()}
    raise UserError(
        f"no output can be read as {' or '.join(form.noun for form in forms)}: {shapes}",
        where=definition.label,
        remedy=f"{definition.other_kind or 'Take a metric that fits the model.'} Or name the output with `output:`.",
    )


def joined(readings: Sequence[Reading]) -> Reading:
    """Readings of successive rows as one.

    Raises:
        UserError: their shapes do not fit together.
    """
    if len({(one.values.shape[1:], one.columns) for one in readings}) != 1:
        shapes = sorted({str(one.values.shape[1:]) for one in readings})
        raise UserError(f"the shape of its answers changes from batch to batch: {', '.join(shapes)}")
    return Reading(
        values=np.concatenate([one.values for one in readings]),
        columns=readings[0].columns,
        broken=sum(one.broken for one in readings),
    )


def texts(array: Array) -> Array:
    return array.astype(np.str_) if array.dtype.kind in _TEXTS else array


def flat(array: Array) -> Array:
    return array[:, 0] if array.ndim == 2 and array.shape[1] == 1 else array


def _is_labels(array: Array) -> bool:
    return flat(array).ndim == 1 and array.dtype.kind in "iub" + _TEXTS


def _is_column(array: Array) -> bool:
    return flat(array).ndim == 1 and array.dtype.kind == "f"


def _is_scores(array: Array) -> bool:
    return bool(array.ndim == 2 and array.shape[1] > 1 and array.dtype.kind in "fiu")


def _label_of(array: Array) -> Reading:
    return Reading(values=texts(flat(array)))


def _best_of(array: Array) -> Reading:
    return Reading(values=array.argmax(axis=1), columns=array.shape[1], broken=_with_nan(array))


def _scores_of(array: Array) -> Reading:
    scores = array.astype(np.float64)
    return Reading(values=scores, columns=scores.shape[1], broken=_with_nan(scores))


def _column_of(array: Array) -> Reading:
    scores = flat(array).astype(np.float64)
    return Reading(values=scores, columns=1, broken=_with_nan(scores[:, None]))


def _numbers_of(array: Array) -> Reading:
    return Reading(values=flat(array).astype(np.float64))


def _with_nan(scores: Array) -> int:
    return int(np.isnan(scores).any(axis=1).sum()) if scores.dtype.kind == "f" else 0


def _plain(array: Array) -> Reading:
    return Reading(values=texts(array))


_CLASS_FORMS = (
    _Form(noun="labels", fits=_is_labels, take=_label_of),
    _Form(noun="scores per class", fits=_is_scores, take=_best_of),
    _Form(noun="one score a row", fits=_is_column, take=_column_of),
)
_SCORE_FORMS = (
    _Form(noun="scores per class", fits=_is_scores, take=_scores_of),
    _Form(noun="one score a row", fits=_is_column, take=_column_of),
)
_NUMBER_FORMS = (
    _Form(noun="one number a row", fits=_is_column, take=_numbers_of),
    _Form(
        noun="one whole number a row",
        fits=lambda array: flat(array).ndim == 1 and array.dtype.kind in "iu",
        take=_numbers_of,
    ),
)
_FORMS: Mapping[str | None, Sequence[_Form]] = {
    "accuracy": _CLASS_FORMS,
    "f1": _CLASS_FORMS,
    "top_k": _SCORE_FORMS[:1],
    "auc": _SCORE_FORMS,
    "mae": _NUMBER_FORMS,
    "rmse": _NUMBER_FORMS,
    "r2": _NUMBER_FORMS,
    "cosine": (
        _Form(
            noun="embeddings (rows, dimensions)",
            fits=lambda array: array.ndim == 2 and array.dtype.kind == "f",
            take=_plain,
        ),
    ),
    "token_agreement": (
        _Form(noun="tokens (rows, length)", fits=lambda a: a.ndim == 2 and a.dtype.kind in "iu", take=_plain),
        _Form(
            noun="scores of tokens (rows, length, vocabulary)",
            fits=lambda array: array.ndim == 3 and array.dtype.kind == "f",
            take=lambda array: Reading(values=array.argmax(axis=2), broken=int(np.isnan(array).any(axis=(1, 2)).sum())),
        ),
    ),
    None: (_Form(noun="an array", fits=lambda _: True, take=_plain),),
}
"""What each metric reads, the best form first."""
