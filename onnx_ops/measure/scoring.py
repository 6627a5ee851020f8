"""Task metrics of a variant, and their comparison with other models."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from onnx_ops.domain.evidence import EXPORT, PairedCounts, ScoreComparison, SliceMeasurement
from onnx_ops.domain.gate import RMSE, MetricDefinition
from onnx_ops.domain.target import Target
from onnx_ops.domain.task_metrics import CountedRows, MeanLoss
from onnx_ops.errors import MeasurementError, OnnxOpsError, UserError
from onnx_ops.measure.answers import read_answers
from onnx_ops.measure.paired_rows import count_pairs, extract_rows
from onnx_ops.measure.predictions import (
    Prediction,
    find_column_labels,
    find_positive_label,
    flatten_column,
    join_predictions,
    prepare_label,
    read_classes,
    read_positive_scores,
    read_prediction,
    read_probabilities,
)
from onnx_ops.measure.queries import arrange_scores
from onnx_ops.measure.slices import SlicePlan, join_measurements
from onnx_ops.measure.visual_answers import (
    check_mask,
    find_nan,
    find_strange_classes,
    prepare_detections,
)
from onnx_ops.metric_formulas import Array
from onnx_ops.plugins import EXTRAS, require
from onnx_ops.ports import Dataset, Runtime, Tensors
from onnx_ops.statistics.grouping import detect_grouping
from onnx_ops.statistics.scores import CANDIDATE, make_unscored, score

ModelPredictions = Mapping[str, Prediction | OnnxOpsError]
"""The prediction, or the reason why there is none, by label of the metric."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoringRequest:
    """The inputs of metric measurements.

    `models` have the same names as in the evidence; the name of the candidate is `CANDIDATE`.
    `seed` is for resamples and permutations. `functions` are the functions of custom metrics and
    decoders by reference. `known` has predictions that were read before, by model. `slices` are
    parts of the rows that are also measured separately.
    """

    runtime: Runtime
    target: Target
    models: Mapping[str, Path]
    dataset: Dataset
    seed: int
    functions: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    known: Mapping[str, ModelPredictions] = field(default_factory=dict)
    slices: SlicePlan = field(default_factory=SlicePlan)


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskMetrics:
    """Task metrics, and the candidate's result for each row (see `paired_rows`).

    `counts` are those of metrics that count rows. `scores` are those of other metrics, or the
    reasons why a metric has no value. `grouped` are signs that rows depend on each other.
    """

    counts: tuple[PairedCounts, ...] = ()
    scores: tuple[ScoreComparison, ...] = ()
    grouped: tuple[str, ...] = ()
    rows: Mapping[str, Array] = field(default_factory=dict)
    slices: tuple[SliceMeasurement, ...] = ()


def measure_metrics(
    request: ScoringRequest, definitions: Sequence[MetricDefinition]
) -> TaskMetrics:
    """Measure every metric that the data set allows.

    A metric that cannot be read, or that is undefined on these rows, has an entry with the reason.
    A champion that does not accept these rows also has an entry.

    Raises:
        MeasurementError: the candidate or the export does not run.
        MissingPackageError: a package that computes a metric is not installed.
    """
    measurable = select_measurable(definitions, request.dataset)
    if not measurable:
        return TaskMetrics()
    for definition in measurable:
        require(*EXTRAS.get(definition.extra, ()), where=definition.label)
    readings = {
        name: request.known.get(name) or read_predictions(request, name, measurable)
        for name in request.models
    }
    counts: list[PairedCounts] = []
    scores: list[ScoreComparison] = []
    signals: list[Array] = []
    rows: dict[str, Array] = {}
    sliced: defaultdict[str, list[PairedCounts | ScoreComparison]] = defaultdict(list)
    group = request.dataset.group
    for definition in measurable:
        predictions = {name: read_of[definition.label] for name, read_of in readings.items()}
        label, answers, problems = _make_comparable(
            definition, request.dataset.label, predictions, group
        )
        scores += problems
        if CANDIDATE not in answers:
            continue
        compared = _Comparable(
            definition=definition,
            label=label,
            answers=answers,
            group=_select_units(definition, request.dataset),
            alike=_find_alike(predictions),
        )
        entries = list(_compare(request, compared))
        counts += (entry for entry in entries if isinstance(entry, PairedCounts))
        scores += (entry for entry in entries if isinstance(entry, ScoreComparison))
        for name, part in request.slices.list_rows(definition.label):
            sliced[name] += _compare_slice(request, compared, part)
        signals += _extract_signals(definition, label, answers)
        rows |= extract_rows(definition, label, answers[CANDIDATE])
    grouped: tuple[str, ...] = ()
    if group is None and signals:
        data = request.dataset
        grouped = detect_grouping(data.inputs, data.columns, signals, data.label, request.seed)
    return TaskMetrics(
        counts=tuple(counts),
        scores=tuple(scores),
        grouped=grouped,
        rows=rows,
        slices=join_measurements(request.slices, sliced),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Comparable:
    """Label and answers of a metric on some rows, in the form that `score` takes.

    For a metric that counts rows, the answers are whether each row is right. `alike` names the
    models whose outputs equal the candidate's.
    """

    definition: MetricDefinition
    label: Array | None
    answers: Mapping[str, Array]
    group: Array | None
    alike: Collection[str]

    def select(self, rows: Array) -> _Comparable:
        """Return the rows with these numbers."""
        return replace(
            self,
            label=None if self.label is None else self.label[rows],
            answers={name: array[rows] for name, array in self.answers.items()},
            group=None if self.group is None else self.group[rows],
        )


def _compare_slice(
    request: ScoringRequest, compared: _Comparable, rows: Array
) -> Iterator[PairedCounts | ScoreComparison]:
    """Yield the measurements on the rows of a slice.

    If each row is an item of a query, the metric has no value per row. A single entry then gives
    the reason.
    """
    if len(compared.answers[CANDIDATE]) != len(request.dataset):
        why = "each row is an item of a query, and a slice would divide the items of a query"
        yield make_unscored(compared.definition, failed=why)
        return
    yield from _compare(request, compared.select(rows))


def _compare(
    request: ScoringRequest, compared: _Comparable
) -> Iterator[PairedCounts | ScoreComparison]:
    """Yield the measurements of the candidate, alone and in pairs with each model."""
    definition = compared.definition
    if _is_counted(definition):
        yield from _count_all_pairs(definition, compared.answers, compared.group, compared.alike)
        return
    yield from score(
        definition,
        compared.label,
        compared.answers,
        seed=request.seed,
        function=request.functions.get(definition.use),
        group=compared.group,
        alike=compared.alike,
    )


def _select_units(definition: MetricDefinition, dataset: Dataset) -> Array | None:
    """Return the group of each row of the metric; None if the rows have no groups.

    If each row of the data set is an item, the rows of a retrieval metric are queries, and have no
    groups.
    """
    is_item = dataset.label is not None and dataset.label.ndim == 1
    return None if is_item and definition.reads == "relevance" else dataset.group


def _count_all_pairs(
    definition: MetricDefinition,
    answers: Mapping[str, Array],
    group: Array | None,
    alike: Collection[str],
) -> Iterator[PairedCounts]:
    """Yield the candidate's counts of right rows, paired with those of each model.

    The candidate is also paired with itself.
    """
    for name, right in answers.items():
        yield count_pairs(
            definition.label, name, right, answers[CANDIDATE], group, equal=name in alike
        )


def _find_alike(predictions: Mapping[str, Prediction | OnnxOpsError]) -> frozenset[str]:
    """Return the models whose outputs equal the candidate's on every row.

    Models without an output of floating point are left out.
    """
    mine = predictions[CANDIDATE]
    return frozenset(
        name
        for name, other in predictions.items()
        if name != CANDIDATE
        and isinstance(mine, Prediction)
        and isinstance(other, Prediction)
        and mine.has_equal_outputs(other)
    )


def select_measurable(
    definitions: Sequence[MetricDefinition], dataset: Dataset
) -> list[MetricDefinition]:
    """Return the metrics that a data set allows.

    A data set without labels allows only label-free metrics.
    """
    return [
        definition
        for definition in definitions
        if dataset.label is not None or definition.label_free
    ]


def add_default_metric(
    definitions: tuple[MetricDefinition, ...], dataset: Dataset
) -> tuple[tuple[MetricDefinition, ...], MetricDefinition | None]:
    """Add rmse if labels are numbers and no metric reads numbers.

    Only the answers of a model show whether it returns classes or numbers. The benchmark drops rmse
    if accuracy was measured.

    Returns:
        The metrics, and the added metric or None.
    """
    numbers = (
        dataset.label is not None
        and dataset.label.dtype.kind in "fiu"
        and flatten_column(dataset.label).ndim == 1
    )
    if not numbers or any(definition.reads == "numbers" for definition in definitions):
        return definitions, None
    return (*definitions, RMSE), RMSE


def find_label_problem(
    definition: MetricDefinition, dataset: Dataset, outputs: Tensors | None
) -> str:
    """Return why labels of a data set do not fit a metric; empty if they do.

    `outputs` have as many rows as there are labels, and the shapes and types of the model's
    answers. They are None if shapes and types are unknown. The function that decodes them is not
    called, since it needs the values of the model.
    """
    try:
        label, positive = _read_label(definition, dataset.label, dataset.group)
        if outputs is not None and not definition.decode:
            prediction = read_prediction(definition, outputs)
            _in_terms(definition, label, positive, prediction, None, dataset.group)
    except UserError as error:
        return str(error)
    return ""


def _extract_signals(
    definition: MetricDefinition, label: Array | None, answers: Mapping[str, Array]
) -> list[Array]:
    """Return values of each row that can depend on the group of the row.

    For a metric that counts rows, they are whether the row is right, and the difference from each
    other model. For a mean loss, they are the ranks of the error, and of its difference from each
    other model.
    """
    mine = answers[CANDIDATE]
    others = [array for name, array in answers.items() if name != CANDIDATE]
    match definition.method:
        case CountedRows():
            return [mine.astype(np.float64), *(mine.astype(np.float64) - other for other in others)]
        case MeanLoss(loss=loss) if label is not None:
            losses = [
                np.abs(answers - label)
                if definition.reads == "numbers"
                else loss(label, answers, definition.options)
                for answers in (mine, *others)
            ]
            changes = [losses[0], *(losses[0] - other for other in losses[1:])]
            return [
                np.argsort(np.argsort(change, kind="stable")).astype(np.float64)
                for change in changes
            ]
        case _:
            return []


def _is_counted(definition: MetricDefinition) -> bool:
    """Return whether the metric is a share of rows that are right."""
    return isinstance(definition.method, CountedRows)


def read_predictions(
    request: ScoringRequest,
    name: str,
    definitions: Sequence[MetricDefinition],
    shard: tuple[int, int] = (0, 1),
) -> ModelPredictions:
    """Return one model's answers in the form that each metric reads.

    `shard` selects a part of the answers (see `read_answers`).

    Raises:
        MeasurementError: the candidate or the export does not run.
    """

    def read_all(outputs: Tensors) -> dict[str, Prediction | OnnxOpsError]:
        predictions: dict[str, Prediction | OnnxOpsError] = {}
        for definition in definitions:
            try:
                decode = request.functions.get(definition.decode)
                predictions[definition.label] = read_prediction(definition, outputs, decode)
            except UserError as error:
                predictions[definition.label] = error
        return predictions

    try:
        inputs = request.dataset.inputs
        parts = read_answers(
            request.runtime, request.models[name], request.target, inputs, read_all, shard
        )
    except (MeasurementError, UserError) as error:
        if name in (CANDIDATE, EXPORT) and isinstance(error, MeasurementError):
            raise
        return {definition.label: error for definition in definitions}
    return join_parts(parts)


def join_parts(parts: Sequence[ModelPredictions]) -> ModelPredictions:
    """Join the predictions of successive parts of the rows.

    An error of a metric in one part replaces the predictions of all parts; the first error is used.
    """
    joined: dict[str, Prediction | OnnxOpsError] = {}
    for label in parts[0] if parts else ():
        predictions = [part[label] for part in parts]
        errors = [one for one in predictions if isinstance(one, OnnxOpsError)]
        try:
            joined[label] = (
                errors[0]
                if errors
                else join_predictions([one for one in predictions if isinstance(one, Prediction)])
            )
        except UserError as error:
            joined[label] = error
    return joined


def _make_comparable(
    definition: MetricDefinition,
    label: Array | None,
    predictions: Mapping[str, Prediction | OnnxOpsError],
    group: Array | None,
) -> tuple[Array | None, Mapping[str, Array], list[ScoreComparison]]:
    """Return the label, answers by model, and entries for models without a score."""
    try:
        label, positive = _read_label(definition, label, group)
    except UserError as error:
        return None, {}, [make_unscored(definition, failed=str(error))]
    answers: dict[str, Array] = {}
    problems: list[ScoreComparison] = []
    for name, prediction in predictions.items():
        if isinstance(prediction, Prediction) and not prediction.broken:
            try:
                read = _convert_values(definition, prediction)
                terms = _in_terms(definition, label, positive, read, answers.get(CANDIDATE), group)
                if name == CANDIDATE:
                    _check_classes(definition, label, terms)
                answers[name] = terms
            except UserError as error:
                problems.append(_make_unreadable(definition, name, error))
        else:
            problems.append(_make_unreadable(definition, name, prediction))
    if label is not None and not _is_counted(definition):
        return *_number_classes(definition, label, positive, answers), problems
    return label, answers, problems


def _convert_values(definition: MetricDefinition, prediction: Prediction) -> Prediction:
    """Return the prediction, with checked probabilities if the metric reads them.

    Shapes are checked earlier. Values are known only after the model has run.

    Raises:
        UserError: the scores of a row are not probabilities.
    """
    if definition.reads != "probabilities":
        return prediction
    return replace(prediction, values=read_probabilities(definition, prediction))


def _check_classes(definition: MetricDefinition, label: Array | None, answers: Array) -> None:
    """Raise UserError if all detections are of classes that the label lacks.

    Only metrics that read detections or keypoints are checked.
    """
    if label is None or definition.reads not in ("detections", "keypoints"):
        return
    if problem := find_strange_classes(label, answers):
        raise UserError(
            problem,
            where=definition.label,
            remedy="Number the classes of the label as the model numbers them.",
        )


def _make_unreadable(
    definition: MetricDefinition, name: str, problem: Prediction | OnnxOpsError
) -> ScoreComparison:
    """Return the entry of a model whose answers are NaN, infinite or unreadable.

    NaN is a failure of the candidate only. Another model that answers with NaN is not compared.
    """
    why, count = str(problem), 0
    if isinstance(problem, Prediction):
        count = len(problem.values)
        why = f"the model answers with NaN or infinity on {problem.broken} of {count} rows"
        if problem.ragged:
            why += f" (first: row {int(find_nan(problem.values).argmax())})"
    if name != CANDIDATE:
        return make_unscored(definition, against=name, undefined=f"{name} cannot be scored: {why}")
    if isinstance(problem, Prediction):
        return make_unscored(definition, count, broken=why)
    return make_unscored(definition, failed=why)


def _number_classes(
    definition: MetricDefinition,
    label: Array,
    positive: str | int | None,
    answers: Mapping[str, Array],
) -> tuple[Array, Mapping[str, Array]]:
    """Return classes as numbers, with 1 for the positive class if there is one.

    Answers that are not classes are unchanged.
    """
    match definition.reads:
        case "classes" if positive is not None:
            answers = {
                name: (predicted == positive).astype(np.intp) for name, predicted in answers.items()
            }
            return (label == positive).astype(np.intp), answers
        case "classes":
            known = np.unique(np.concatenate([label, *answers.values()]))
            answers = {
                name: np.searchsorted(known, predicted) for name, predicted in answers.items()
            }
            return np.searchsorted(known, label), answers
        case "positive":
            return label == positive, answers
        case "probabilities" if answers:
            columns = next(iter(answers.values())).shape[1]
            known = find_column_labels(label, columns, definition.label)
            return np.searchsorted(known, label), answers
        case _:
            return label, answers


def _read_label(
    definition: MetricDefinition, label: Array | None, group: Array | None
) -> tuple[Array | None, str | int | None]:
    """Return the label as a metric needs it, and the positive label if there is one."""
    label = prepare_label(definition, label, group)
    is_binary = definition.reads == "positive" or (
        definition.reads == "classes" and definition.average == "binary"
    )
    return label, find_positive_label(
        definition, label
    ) if is_binary and label is not None else None


def _in_terms(
    definition: MetricDefinition,
    label: Array | None,
    positive: str | int | None,
    prediction: Prediction,
    candidate: Array | None,
    group: Array | None,
) -> Array:
    """Return one model's answers as the metric needs them.

    The result consists of class labels, scores, the unchanged answers, or whether each row is
    right.
    """
    where = definition.label
    terms = prediction.values
    if label is None:
        _check_shape(definition, terms, candidate)
        return terms
    match definition.reads:
        case "classes":
            terms = read_classes(label, prediction, definition)
        case "ranking":
            label = np.searchsorted(find_column_labels(label, prediction.columns, where), label)
        case "positive" if positive is not None:
            terms = read_positive_scores(label, positive, prediction, where)
            label = label == positive
        case "probabilities":
            find_column_labels(label, max(2, prediction.columns), where)
            if candidate is not None and candidate.shape != terms.shape:
                classes = f"{terms.shape[1]} classes, but the candidate of {candidate.shape[1]}"
                raise UserError(f"the model has scores of {classes}", where=where)
        case "relevance":
            terms = arrange_scores(terms, label, group, where)
        case "detections" | "keypoints":
            terms = prepare_detections(definition, label, terms)
        case "masks":
            check_mask(definition, label, terms, prediction.columns)
        case _:
            _check_shape(definition, terms, label)
    if isinstance(definition.method, CountedRows):
        return np.asarray(definition.method.is_right(label, terms, definition.options))
    return terms


def _check_shape(definition: MetricDefinition, answers: Array, other: Array | None) -> None:
    """Check that answers have the shape of a label, or of another model's answers.

    Only label-free metrics are checked.

    Raises:
        UserError: the shapes differ.
    """
    if definition.label_free and other is not None and other.shape != answers.shape:
        shapes = f"{tuple(answers.shape)} and {tuple(other.shape)}"
        raise UserError(
            f"answers of shapes {shapes} cannot be compared row by row", where=definition.label
        )
