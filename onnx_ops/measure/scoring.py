"""Task metrics of a variant, alone and beside other models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from onnx_ops.domain.evidence import PairedCounts, ScoreComparison
from onnx_ops.domain.gate import MetricDefinition
from onnx_ops.domain.pipeline import EXPORT
from onnx_ops.domain.target import Target
from onnx_ops.errors import MeasurementError, OnnxOpsError, UserError
from onnx_ops.measure.answers import read_answers
from onnx_ops.measure.paired_rows import count_pairs, extract_rows
from onnx_ops.measure.predictions import (
    Prediction,
    find_column_labels,
    find_positive_label,
    join_predictions,
    prepare_label,
    read_classes,
    read_positive_scores,
    read_prediction,
)
from onnx_ops.ports import Dataset, Runtime, Tensors
from onnx_ops.statistics.grouping import detect_grouping
from onnx_ops.statistics.metrics import Array, CustomMetric, top_k_rows
from onnx_ops.statistics.scores import CANDIDATE, make_unscored, score

ModelPredictions = Mapping[str, Prediction | OnnxOpsError]
"""By label of the metric: the prediction, or why there is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoringRequest:
    """What metrics are measured with.

    Args:
        runtime: runs the models.
        target: where.
        models: named as in the evidence, the candidate by `CANDIDATE`.
        dataset: the scored rows.
        seed: of resamples and permutations.
        functions: custom metrics by reference.
        known: predictions that were read before.
    """

    runtime: Runtime
    target: Target
    models: Mapping[str, Path]
    dataset: Dataset
    seed: int
    functions: Mapping[str, CustomMetric] = field(default_factory=dict)
    known: Mapping[str, ModelPredictions] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskMetrics:
    """Task metrics, and the candidate's answers row by row (see `paired_rows`)."""

    counts: tuple[PairedCounts, ...] = ()
    scores: tuple[ScoreComparison, ...] = ()
    grouped: tuple[str, ...] = ()
    rows: Mapping[str, Array] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Terms:
    """The label as a metric needs it, and which one is positive, where one is."""

    label: Array | None
    positive: str | int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Answers:
    """The label and each model's answers, comparable row by row."""

    label: Array | None
    by_model: Mapping[str, Array]


def measure_metrics(request: ScoringRequest, definitions: Sequence[MetricDefinition]) -> TaskMetrics:
    """Measure every metric that the data set allows.

    A metric that cannot be read or is not defined on these rows has an entry with the reason.

    Raises:
        MeasurementError: the candidate or the export does not run. A champion that does not accept these rows has an
            entry.
    """
    measurable = [d for d in definitions if request.dataset.label is not None or d.label_free]
    if not measurable:
        return TaskMetrics()
    readings = {name: request.known.get(name) or read_predictions(request, name, measurable) for name in request.models}
    counts: list[PairedCounts] = []
    scores: list[ScoreComparison] = []
    signals: list[Array] = []
    rows: dict[str, Array] = {}
    group = request.dataset.group
    for definition in measurable:
        predictions = {name: read_of[definition.label] for name, read_of in readings.items()}
        answers, problems = _make_comparable(definition, request.dataset.label, predictions)
        scores += problems
        if CANDIDATE not in answers.by_model:
            continue
        if definition.name in ("accuracy", "top_k"):
            right = answers.by_model
            counts += [count_pairs(definition.label, name, right[name], right[CANDIDATE], group) for name in right]
        else:
            function = request.functions.get(definition.use)
            scores += score(
                definition, answers.label, answers.by_model, seed=request.seed, function=function, group=group
            )
        signals += _extract_signals(definition, answers)
        rows |= extract_rows(definition, answers.label, answers.by_model[CANDIDATE])
    grouped: tuple[str, ...] = ()
    if group is None and signals:
        data = request.dataset
        grouped = detect_grouping(data.inputs, data.columns, signals, data.label, request.seed)
    return TaskMetrics(counts=tuple(counts), scores=tuple(scores), grouped=grouped, rows=rows)


def find_label_problem(definition: MetricDefinition, label: Array | None, outputs: Tensors | None) -> str:
    """Return why a metric cannot be computed; empty if it can.

    Args:
        definition: of the metric.
        label: of the data set.
        outputs: as many rows, of the shapes and types of the model's answers; None if these are unknown.
    """
    try:
        terms = _read_terms(definition, label)
        if outputs is not None:
            _in_terms(definition, terms, read_prediction(definition, outputs), None)
    except UserError as error:
        return str(error)
    return ""


def _extract_signals(definition: MetricDefinition, answers: _Answers) -> list[Array]:
    """Return what rows that belong together share: right or wrong, the rank of the error, and its change."""
    mine = answers.by_model[CANDIDATE]
    others = [array for name, array in answers.by_model.items() if name != CANDIDATE]
    if definition.name in ("accuracy", "top_k"):
        return [mine.astype(np.float64), *(mine.astype(np.float64) - other for other in others)]
    if definition.name in ("mae", "rmse", "r2") and answers.label is not None:
        error = np.abs(mine - answers.label)
        changes = [error, *(error - np.abs(other - answers.label) for other in others)]
        return [np.argsort(np.argsort(change, kind="stable")).astype(np.float64) for change in changes]
    return []


def read_predictions(request: ScoringRequest, name: str, definitions: Sequence[MetricDefinition]) -> ModelPredictions:
    """Read one model's answers in the terms of each metric.

    Raises:
        MeasurementError: the candidate or the export does not run.
    """

    def read_all(outputs: Tensors) -> dict[str, Prediction | OnnxOpsError]:
        predictions: dict[str, Prediction | OnnxOpsError] = {}
        for definition in definitions:
            try:
                predictions[definition.label] = read_prediction(definition, outputs)
            except UserError as error:
                predictions[definition.label] = error
        return predictions

    try:
        parts = read_answers(request.runtime, request.models[name], request.target, request.dataset.inputs, read_all)
    except (MeasurementError, UserError) as error:
        if name in (CANDIDATE, EXPORT) and isinstance(error, MeasurementError):
            raise
        return {definition.label: error for definition in definitions}
    joined: dict[str, Prediction | OnnxOpsError] = {}
    for label in (definition.label for definition in definitions):
        predictions = [part[label] for part in parts]
        try:
            joined[label] = next((one for one in predictions if isinstance(one, OnnxOpsError)), None) or (
                join_predictions([one for one in predictions if isinstance(one, Prediction)])
            )
        except UserError as error:
            joined[label] = error
    return joined


def _make_comparable(
    definition: MetricDefinition, label: Array | None, predictions: Mapping[str, Prediction | OnnxOpsError]
) -> tuple[_Answers, list[ScoreComparison]]:
    """Return the answers that can be scored, and entries for the others."""
    try:
        terms = _read_terms(definition, label)
    except UserError as error:
        return _Answers(label=None, by_model={}), [make_unscored(definition, failed=str(error))]
    answers: dict[str, Array] = {}
    problems = []
    for name, prediction in predictions.items():
        why = str(prediction)
        if isinstance(prediction, Prediction) and prediction.broken:
            count = len(prediction.values)
            why = f"the model answers with NaN on {prediction.broken} of {count} rows"
            if name == CANDIDATE:
                problems.append(make_unscored(definition, count, broken=why))
                continue
        elif isinstance(prediction, Prediction):
            try:
                answers[name] = _in_terms(definition, terms, prediction, answers.get(CANDIDATE))
                continue
            except UserError as error:
                why = str(error)
        if name == CANDIDATE:
            problems.append(make_unscored(definition, failed=why))
        else:
            problems.append(make_unscored(definition, against=name, undefined=f"{name} cannot be scored: {why}"))
    return _encode(definition, terms, answers), problems


def _read_terms(definition: MetricDefinition, label: Array | None) -> _Terms:
    own_label = prepare_label(definition, label)
    binary = definition.name == "auc" or definition.average == "binary"
    positive = find_positive_label(definition, own_label) if binary and own_label is not None else None
    return _Terms(label=own_label, positive=positive)


def _in_terms(definition: MetricDefinition, terms: _Terms, prediction: Prediction, candidate: Array | None) -> Array:
    """Return one model's answers: right or wrong, class labels, scores, or unchanged."""
    where, label = definition.label, terms.label
    if label is not None and definition.name == "accuracy":
        return np.asarray(read_classes(label, prediction, definition) == label)
    if label is not None and definition.k is not None:
        names = find_column_labels(label, prediction.columns, where)
        return top_k_rows(np.searchsorted(names, label), prediction.values, definition.k)
    if label is not None and definition.name == "f1":
        return read_classes(label, prediction, definition)
    if label is not None and terms.positive is not None:
        return read_positive_scores(label, terms.positive, prediction, where)
    other = candidate if label is None else label
    if definition.label_free and other is not None and other.shape != prediction.values.shape:
        shapes = f"{tuple(prediction.values.shape)} and {tuple(other.shape)}"
        raise UserError(f"answers of shapes {shapes} cannot be compared row by row", where=where)
    return prediction.values


def _encode(definition: MetricDefinition, terms: _Terms, answers: Mapping[str, Array]) -> _Answers:
    """Encode labels and answers for `score`: classes by number, or by whether they are the positive one."""
    label, positive = terms.label, terms.positive
    if label is None or definition.name not in ("f1", "auc"):
        return _Answers(label=label, by_model=answers)
    if definition.name == "auc":
        return _Answers(label=label == positive, by_model=answers)
    if positive is not None:
        by_model = {name: (predicted == positive).astype(np.intp) for name, predicted in answers.items()}
        return _Answers(label=(label == positive).astype(np.intp), by_model=by_model)
    known = np.unique(np.concatenate([label, *answers.values()]))
    by_model = {name: np.searchsorted(known, predicted) for name, predicted in answers.items()}
    return _Answers(label=np.searchsorted(known, label), by_model=by_model)
