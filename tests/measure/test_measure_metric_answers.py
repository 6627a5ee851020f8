"""Texts, rankings and probabilities of models, and functions of the project that decode them."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from onnx_ops.adapters.runtimes.onnxruntime import OnnxRuntime
from onnx_ops.domain.gate import MetricDefinition, MetricGate
from onnx_ops.domain.target import Target
from onnx_ops.domain.task_metrics import METRICS
from onnx_ops.errors import MissingPackageError, UserError
from onnx_ops.measure.decoding import decode_outputs
from onnx_ops.measure.predictions import prepare_label, read_prediction, read_probabilities
from onnx_ops.measure.queries import arrange_by_query, arrange_scores, prepare_grades
from onnx_ops.measure.scoring import ScoringRequest, find_label_problem, measure_metrics
from onnx_ops.metric_formulas.calibration import apply_softmax
from onnx_ops.ports import Dataset
from onnx_ops.statistics.scores import CANDIDATE, score
from onnx_ops.testing.models import CLASSES, rows, write_perceptron
from tests.support.extras import hide
from tests.support.pairs import write_changed

ROWS = 100
TARGET = Target(name="cpu")
RUNTIME = OnnxRuntime()
WORDS = np.array(["no", "yes", "perhaps", "never"])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_perceptron(tmp_path_factory.mktemp("answers") / "model.onnx")


@pytest.fixture(scope="module")
def scores(model: Path) -> Any:
    return RUNTIME.run(model, TARGET, (rows(ROWS),))[0]["scores"]


def define(name: str, **options: Any) -> MetricDefinition:
    return MetricGate(name=name, **options).definition()


def describe(outputs: Any) -> list[str]:
    """Return five words for each row: of the best and of the worst class."""
    values = outputs["scores"]
    best, worst = values.argmax(axis=1), values.argmin(axis=1)
    return [f"{WORDS[a]} it is {WORDS[b]} so" for a, b in zip(best, worst, strict=True)]


def measure(
    models: dict[str, Path], definition: MetricDefinition, label: Any, **data: Any
) -> dict[str, Any]:
    """Return the scores of one metric by compared model."""
    functions: dict[str, Callable[..., Any]] = {"project:describe": describe}
    request = ScoringRequest(
        runtime=RUNTIME,
        target=TARGET,
        models=models,
        dataset=Dataset(inputs=rows(ROWS), label=label, **data),
        seed=0,
        functions=functions,
    )
    return {entry.against: entry for entry in measure_metrics(request, (definition,)).scores}


@pytest.mark.parametrize("name", ["wer", "cer", "bleu", "chrf"])
def test_measure_metrics_of_decoded_texts_returns_value_and_change(
    name: str, model: Path, scores: Any
) -> None:
    label = np.array(describe({"scores": scores}))
    label[::5] = "no it is never so"
    changed = write_changed(model, "third.bias", lambda bias: bias + np.array([9, 0, 0]))
    definition = define(name, decode="project:describe")
    found = measure({CANDIDATE: changed, "fp32": model}, definition, label)
    assert found[""].candidate is not None
    assert found[""].metric == f"{name} decode:project:describe"
    between = found["fp32"].ratio if name in ("wer", "cer") else found["fp32"].difference
    assert between is not None
    assert between.low < between.estimate < between.high


def test_measure_metrics_without_package_raises_missing_package_error_before_models_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    hide(monkeypatch, "jiwer")
    with pytest.raises(MissingPackageError, match="text-metrics"):
        measure({CANDIDATE: tmp_path / "missing.onnx"}, define("wer"), np.array(["a"] * ROWS))


def test_score_of_equal_texts_returns_interval_widened_for_unseen_rows() -> None:
    label = np.array([f"word{number}" for number in range(50)])
    answers = label.copy()
    answers[:5] = "wrong"
    (_, entry) = score(define("wer"), label, {CANDIDATE: answers, "fp32": answers}, seed=0)
    assert entry.ratio is not None
    assert entry.ratio.estimate == 1
    assert entry.ratio.high == pytest.approx(1 + 3 / 5, abs=0.01)


def test_score_of_bleu_with_texts_below_four_words_is_undefined() -> None:
    """BLEU is then 0 for all models, which does not show that they are equal."""
    label, other = np.array(["one two three"] * 50), np.array(["one two"] * 50)
    found = score(define("bleu"), label, {CANDIDATE: label, "fp32": other}, seed=0)
    assert found[0].undefined
    assert all(entry.difference is None for entry in found)


def test_score_of_texts_without_errors_returns_interval_from_zero() -> None:
    label = np.array([f"word{number}" for number in range(50)])
    (mine, entry) = score(define("cer"), label, {CANDIDATE: label, "fp32": label}, seed=0)
    assert mine.candidate is not None
    assert mine.candidate.low == 0
    assert mine.candidate.high == pytest.approx(3 / 50, abs=0.01)
    assert "has no error" in entry.undefined


@pytest.mark.parametrize("name", ["brier", "log_loss", "ece"])
def test_measure_metrics_of_logits_equals_score_of_probabilities(name: str, model: Path) -> None:
    rng = np.random.default_rng(0)
    label = rng.integers(0, CLASSES, ROWS)
    found = measure({CANDIDATE: model}, define(name, logits=True), label)[""]
    assert found.candidate is not None
    assert found.metric.endswith("of logits")
    outputs = RUNTIME.run(model, TARGET, (rows(ROWS),))[0]
    (entry,) = score(define(name), label, {CANDIDATE: apply_softmax(outputs["scores"])}, seed=0)
    assert entry.candidate is not None
    assert found.candidate.estimate == pytest.approx(entry.candidate.estimate)


@pytest.mark.parametrize(
    ("values", "logits", "expected"),
    [
        ([[0.25, 0.75]], False, [[0.25, 0.75]]),
        ([[0.75]], False, [[0.25, 0.75]]),
        ([[0.0]], True, [[0.5, 0.5]]),
        ([[0.0, 0.0]], True, [[0.5, 0.5]]),
    ],
)
def test_read_probabilities_of_scores_returns_one_column_per_class(
    values: Any, logits: bool, expected: Any
) -> None:
    definition = define("brier", logits=logits)
    prediction = read_prediction(definition, {"scores": np.array(values)})
    np.testing.assert_allclose(read_probabilities(definition, prediction), expected)


@pytest.mark.parametrize(
    ("options", "remedy"),
    [
        ({}, "decode: package.module:function"),
        ({"output": "scores"}, "Name another output"),
        ({"decode": "project:describe"}, "Return one number per row"),
    ],
)
def test_read_prediction_of_unfit_outputs_raises_user_error_with_remedy(
    options: dict[str, Any], remedy: str
) -> None:
    definition = MetricDefinition(name="mae", **options)
    decode = (lambda outputs: outputs["scores"]) if "decode" in options else None
    with pytest.raises(UserError, match="no output can be read") as caught:
        read_prediction(definition, {"scores": np.zeros((2, 3), np.float32)}, decode)
    assert remedy in caught.value.remedy


@pytest.mark.parametrize("values", [[[1.0, 1.0]], [[-0.5, 1.5]], [[1.5]], [[-0.1]]])
def test_read_probabilities_of_logits_without_key_raises_user_error(values: Any) -> None:
    definition = define("log_loss")
    prediction = read_prediction(definition, {"scores": np.array(values)})
    with pytest.raises(UserError, match="logits: true"):
        read_probabilities(definition, prediction)


def test_find_label_problem_of_text_labels_and_probabilities_returns_nothing() -> None:
    label = np.array(["spam", "ham", "ham", "spam"] * 10)
    scores = np.array([[0.1, 0.9], [0.9, 0.1], [0.8, 0.2], [0.35, 0.65]] * 10)
    definition = define("log_loss")
    assert not find_label_problem(definition, Dataset(inputs={}, label=label), {"p": scores})


class TestQueries:
    """Each row is a query with its items, or each row is an item and the group is its query."""

    GRADES = np.array([[1.0, 0, 2], [0, 1, -1]])
    SCORES = np.array([[0.3, 0.2, 0.1], [0.5, 0.4, 0.0]])
    GROUP = np.array([1, 0, 1, 0, 0])

    def test_arrange_by_query_returns_one_row_of_items_per_query(self) -> None:
        values = np.array([10.0, 20, 30, 40, 50])
        found = arrange_by_query(values, self.GROUP, -1)
        np.testing.assert_array_equal(found, [[20, 40, 50], [10, 30, -1]])

    def test_score_of_queries_in_rows_equals_score_of_queries_by_group(
        self, model: Path, scores: Any
    ) -> None:
        """25 queries with 4 items each are 25 rows, or 100 rows in 25 groups."""
        rng = np.random.default_rng(0)
        group = np.repeat(np.arange(25), 4)
        grades = rng.integers(0, 3, (25, 4)).astype(np.float64)
        grades[:, 1] = 1
        own = scores[:, 0].reshape(25, 4).astype(np.float64)
        for name in ("ndcg", "mrr", "recall_at_k"):
            definition = define(name, k=2)
            (entry,) = score(definition, grades, {CANDIDATE: own}, seed=0)
            dataset = Dataset(inputs={}, label=grades.ravel(), group=group)
            label = prepare_label(definition, dataset.label, dataset.group)
            assert label is not None
            arranged = arrange_scores(own.ravel(), label, group, name)
            (other,) = score(definition, label, {CANDIDATE: arranged}, seed=0)
            assert entry == other
            assert entry.n == 25

    def test_measure_metrics_of_queries_without_groups_counts_rows(self, model: Path) -> None:
        rng = np.random.default_rng(0)
        label = rng.integers(0, 2, (ROWS, CLASSES))
        label[:, 0] = 1
        found = measure({CANDIDATE: model}, define("ndcg"), label)[""]
        assert (found.n, found.groups) == (ROWS, 0)
        assert found.candidate is not None

    def test_arrange_scores_of_missing_item_replaces_its_score(self) -> None:
        scores = np.array([[0.3, 0.2, 0.1], [0.5, 0.4, -np.inf]])
        found = arrange_scores(scores, self.GRADES, None, "ndcg")
        np.testing.assert_array_equal(found, self.SCORES)

    @pytest.mark.parametrize(
        ("label", "group", "text"),
        [
            (np.array(["a", "b"]), None, "grades must be numbers"),
            (np.array([1.0, np.nan]), np.array([0, 0]), "1 of 2 grades are NaN"),
            (np.array([1.0, 0.0]), None, "group: NAME"),
        ],
    )
    def test_prepare_grades_of_wrong_label_or_without_group_raises_user_error(
        self, label: Any, group: Any, text: str
    ) -> None:
        with pytest.raises(UserError, match=text):
            prepare_grades(label, group, "ndcg")

    def test_arrange_scores_of_other_items_raises_user_error(self) -> None:
        with pytest.raises(UserError, match="same items"):
            arrange_scores(self.SCORES[:, :2], self.GRADES, None, "ndcg")


BAD_LABELS: dict[str, tuple[MetricDefinition, Any, str]] = {
    "numbers": (define("wer"), np.arange(4), "one text per row"),
    "nothing": (define("wer"), None, "one text per row"),
    "missing text": (
        define("bleu"),
        np.array(["a", None], dtype=object),
        "row 1 must be a text, not NoneType None",
    ),
    "number in texts": (
        define("chrf"),
        np.array(["a", float("nan")], dtype=object),
        "row 1 must be a text, not float nan",
    ),
    "other encoding": (define("cer"), np.array([b"\xff"]), "not encoded in UTF-8"),
    "empty texts": (define("wer"), np.array(["", " "]), "all texts of the label are empty"),
    "empty references": (define("bleu"), np.array([["", ""]]), "all texts of the label are empty"),
    "several references": (define("cer"), np.array([["a", "b"]]), "has 2 texts per row"),
    "zero": (define("mape"), np.array([0.0, 1.0]), "1 of 2 labels are 0"),
    "k": (define("recall_at_k", k=3), np.array([[1, 0, 0]]), "recall is always 100%"),
    "no relevant item": (define("mrr"), np.array([[1, 0], [0, 0]]), "the first is query 1"),
    "fractions": (define("brier"), np.array([0.5, 1.0]), "classes, not fractions"),
    "no class": (define("ece"), np.array([np.nan, 1.0]), "NaN or infinite"),
}


@pytest.mark.parametrize("name", BAD_LABELS)
def test_prepare_label_of_label_that_does_not_fit_metric_raises_user_error(name: str) -> None:
    definition, label, text = BAD_LABELS[name]
    with pytest.raises(UserError, match=text):
        prepare_label(definition, label)


@pytest.mark.parametrize(
    "name", [name for name, metric in METRICS.items() if metric.reads == "probabilities"]
)
def test_score_of_probabilities_with_one_class_returns_value(name: str) -> None:
    label, scores = np.zeros(40, dtype=int), np.tile([[0.9, 0.1], [0.6, 0.4]], (20, 1))
    (entry,) = score(define(name), label, {CANDIDATE: scores}, seed=0)
    assert entry.candidate is not None


DECODED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "error": (lambda outputs: outputs["missing"], "raised KeyError"),
    "one text": (lambda outputs: "all rows", "not one answer for each of 3 rows"),
    "nothing": (lambda outputs: None, "not one answer for each of 3 rows"),
    "too few": (lambda outputs: ["a"], "list of length 1"),
    "ragged": (lambda outputs: [[1], [1, 2], [1]], "different shapes"),
}


@pytest.mark.parametrize("name", DECODED)
def test_decode_outputs_of_failing_function_or_wrong_result_raises_user_error(name: str) -> None:
    function, text = DECODED[name]
    definition = define("wer", decode="project:decode")
    with pytest.raises(UserError, match=text):
        decode_outputs(definition, {"scores": np.zeros((3, 2))}, function)


def test_read_prediction_of_decoded_numbers_returns_them() -> None:
    definition = define("mae", decode="project:decode")
    found = read_prediction(
        definition, {"logits": np.zeros((3, 2))}, lambda outputs: [1.5, 2.5, 3.5]
    )
    np.testing.assert_array_equal(found.values, [1.5, 2.5, 3.5])
    assert found.outputs[0]


def test_read_prediction_of_decoded_numbers_for_texts_raises_user_error() -> None:
    definition = define("wer", decode="project:decode")
    with pytest.raises(UserError, match="one text per row"):
        read_prediction(definition, {"logits": np.zeros((3, 2))}, lambda outputs: [1.5, 2.5, 3.5])


class TestPerRow:
    """A function that returns one value per row is not called again for each resample.

    The metric is the mean of its values.
    """

    LABEL = np.random.default_rng(0).normal(size=80)
    ANSWERS = LABEL + np.random.default_rng(1).normal(size=80)
    ROW = MetricDefinition(use="project:error", per="row")

    def test_score_of_function_per_row_equals_score_of_function_per_set(self) -> None:
        calls = []

        def error(answers: Any, label: Any) -> Any:
            calls.append(len(label))
            return abs(answers - label)

        answers = {CANDIDATE: self.ANSWERS, "fp32": self.ANSWERS + 0.1}
        by_row = score(self.ROW, self.LABEL, answers, seed=0, function=error)
        assert len(calls) == 3
        by_set = score(
            MetricDefinition(use="project:error"),
            self.LABEL,
            answers,
            seed=0,
            function=lambda answers, label: float(abs(answers - label).mean()),
        )
        for row, whole in zip(by_row, by_set, strict=True):
            assert row.candidate is not None
            assert whole.candidate is not None
            assert row.candidate.low == pytest.approx(whole.candidate.low)
            assert row.candidate.high == pytest.approx(whole.candidate.high)

    @pytest.mark.parametrize(
        ("function", "text"),
        [
            (lambda answers, label: 1.0, r"shape \(\), not one value for each of 80 rows"),
            (lambda answers, label: answers * np.nan, "NaN or infinity for 80 of 80 rows"),
            (lambda answers, label: 1 / 0, "ZeroDivisionError"),
        ],
    )
    def test_score_of_function_per_row_that_raises_or_returns_wrong_values_reports_failure(
        self, function: Any, text: str
    ) -> None:
        (entry,) = score(self.ROW, self.LABEL, {CANDIDATE: self.ANSWERS}, seed=0, function=function)
        assert re.search(text, entry.failed)

    def test_score_of_function_per_set_with_values_per_row_reports_failure_with_key(self) -> None:
        definition = MetricDefinition(use="project:error")
        (entry,) = score(
            definition,
            self.LABEL,
            {CANDIDATE: self.ANSWERS},
            seed=0,
            function=lambda answers, label: answers,
        )
        assert "`per: row`" in entry.failed
