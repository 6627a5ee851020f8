"""Task metrics of real ONNX files.

The tests check how outputs are read row by row, in batches that the files accept.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from onnx_ops.adapters.runtimes.onnxruntime import OnnxRuntime
from onnx_ops.domain.evidence import Interval, PairedCounts, ScoreComparison
from onnx_ops.domain.gate import ACCURACY, MetricDefinition, MetricGate
from onnx_ops.domain.target import Target
from onnx_ops.domain.task_metrics import METRICS, CountedRows, Options, Resampled, TaskMetric
from onnx_ops.errors import UserError
from onnx_ops.measure.answers import read_answers
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
from onnx_ops.measure.scoring import (
    ScoringRequest,
    TaskMetrics,
    join_parts,
    measure_metrics,
    read_predictions,
)
from onnx_ops.metric_formulas import MetricStatistic
from onnx_ops.ports import Dataset
from onnx_ops.statistics.scores import CANDIDATE
from onnx_ops.testing.models import CLASSES, rows, write_convolution, write_perceptron
from tests.support.graphs import write_graph
from tests.support.pairs import write_changed

TARGET = Target(name="cpu")
RUNTIME = OnnxRuntime()
ROWS = 100
F1 = MetricDefinition(name="f1", average="macro")
RMSE = MetricDefinition(name="rmse")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_perceptron(tmp_path_factory.mktemp("scoring") / "model.onnx")


@pytest.fixture(scope="module")
def scores(model: Path) -> Any:
    return RUNTIME.run(model, TARGET, (rows(ROWS),))[0]["scores"]


def measured(
    models: Mapping[str, Path],
    label: Any,
    *definitions: MetricDefinition,
    data: Any = None,
    **more: Any,
) -> TaskMetrics:
    dataset = Dataset(inputs=rows(ROWS), label=label, **(data or {}))
    scorer = ScoringRequest(
        runtime=RUNTIME, target=TARGET, models=models, dataset=dataset, seed=0, **more
    )
    return measure_metrics(scorer, definitions)


def estimate(found: TaskMetrics) -> float:
    """Return the candidate's own value."""
    candidate = alone(found).candidate
    assert candidate is not None
    return candidate.estimate


def alone(found: TaskMetrics) -> ScoreComparison:
    (entry,) = (one for one in found.scores if not one.against)
    return entry


def labels_of(scores: Any) -> Any:
    """Return labels that are right in nine of ten rows."""
    label = scores.argmax(axis=1)
    label[::10] = (label[::10] + 1) % CLASSES
    return label


@pytest.mark.parametrize("batch", [1, 7, ROWS, 128])
def test_read_answers_of_fixed_batch_returns_each_row_once(
    tmp_path: Path, model: Path, batch: int
) -> None:
    """100 rows are no multiple of 7, and fewer than one batch of 128."""
    fixed = write_perceptron(tmp_path / "fixed.onnx", batch=batch)
    one, other = (
        np.concatenate(
            read_answers(RUNTIME, path, TARGET, rows(ROWS), lambda outputs: outputs["scores"])
        )
        for path in (fixed, model)
    )
    np.testing.assert_allclose(one, other, atol=1e-5)


def test_read_answers_beyond_input_limit_reads_rows_in_chunks(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("onnx_ops.measure.answers._INPUT_BYTES", 8 * 4 * 9)
    sizes: list[int] = []
    found = read_answers(
        RUNTIME, model, TARGET, rows(ROWS), lambda outputs: sizes.append(len(outputs["scores"]))
    )
    assert len(found) == len(sizes) == 12
    assert (max(sizes), sum(sizes)) == (9, ROWS)


@pytest.mark.parametrize("count", [1, 3, 12, 40])
def test_read_predictions_in_shards_matches_whole(
    model: Path, tmp_path: Path, scores: Any, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With 12 batches, most of the 40 shards get none."""
    monkeypatch.setattr("onnx_ops.measure.answers._INPUT_BYTES", 8 * 4 * 9)
    fixed = write_perceptron(tmp_path / "fixed.onnx", batch=9)
    definitions = [
        ACCURACY,
        MetricDefinition(name="top_k", k=2),
        MetricDefinition(name="cosine"),
        RMSE,
    ]
    for path in (model, fixed):
        dataset = Dataset(inputs=rows(ROWS), label=labels_of(scores))
        request = ScoringRequest(
            runtime=RUNTIME, target=TARGET, models={CANDIDATE: path}, dataset=dataset, seed=0
        )
        whole = read_predictions(request, CANDIDATE, definitions)
        shards = [
            read_predictions(request, CANDIDATE, definitions, (number, count))
            for number in range(count)
        ]
        joined = join_parts([shard for shard in shards if shard])
        for label, prediction in whole.items():
            found = joined[label]
            if isinstance(prediction, Prediction):
                assert isinstance(found, Prediction)
                np.testing.assert_array_equal(found.values, prediction.values)
                assert found.has_equal_outputs(prediction)
                assert (found.columns, found.broken) == (prediction.columns, prediction.broken)
            else:
                assert str(found) == str(prediction)
        assert not isinstance(whole["rmse"], Prediction)


def test_measure_metrics_of_accuracy_and_top_k_returns_counts(
    model: Path, scores: Any, tmp_path: Path
) -> None:
    from sklearn import metrics as reference

    fixed = write_perceptron(tmp_path / "fixed.onnx", batch=16)
    label = labels_of(scores)
    found = measured(
        {CANDIDATE: model, "fp32": fixed}, label, ACCURACY, MetricDefinition(name="top_k", k=2)
    )
    assert found.scores == ()
    right = int(
        reference.top_k_accuracy_score(label, scores, k=2, labels=range(CLASSES), normalize=False)
    )
    assert found.counts == tuple(
        PairedCounts(
            metric=name, against=against, n=ROWS, both=both, only_baseline=0, only_candidate=0
        )
        for name, both in (("accuracy", 90), ("top_2", right))
        for against in ("", "fp32")
    )


class TestEqualOutputs:
    """Two models with equal outputs for every row have an equal metric.

    This applies however few rows are positive.
    """

    DEFINITIONS = (
        ACCURACY,
        MetricDefinition(name="top_k", k=2),
        MetricDefinition(name="f1", average="binary", positive=2),
        MetricDefinition(name="auc", positive=2),
    )

    @staticmethod
    def rare(scores: Any) -> Any:
        """Return labels, three of which are 2."""
        label = labels_of(scores) % 2
        label[np.argsort(-scores[:, 2])[:3]] = 2
        return label

    def test_measure_metrics_of_copied_model_returns_zero_change(
        self, model: Path, scores: Any, tmp_path: Path
    ) -> None:
        copy = tmp_path / "copy.onnx"
        copy.write_bytes(model.read_bytes())
        found = measured({CANDIDATE: model, "fp32": copy}, self.rare(scores), *self.DEFINITIONS)
        assert [one.equal for one in found.counts] == [False, True, False, True]
        changes = [one.difference for one in found.scores if one.against]
        assert changes == [Interval.point(0.0)] * 2

    def test_measure_metrics_of_other_outputs_with_equal_classes_returns_interval_around_zero(
        self, model: Path, scores: Any, tmp_path: Path
    ) -> None:
        near = write_changed(
            model, "third.bias", lambda bias: bias + np.float32(1e-6), name="near.onnx"
        )
        found = measured({CANDIDATE: model, "fp32": near}, self.rare(scores), *self.DEFINITIONS)
        assert not any(one.equal for one in found.counts)
        changes = [one.difference for one in found.scores if one.against]
        assert all(change is not None and change.low < 0 < change.high for change in changes)

    def test_has_equal_outputs_returns_true_for_equal_fractions_only(self) -> None:
        classes: dict[str, Any] = {"label": np.array([0, 1, 0])}
        scored = {**classes, "p": np.array([[0.1], [0.9], [0.2]], dtype=np.float32)}
        other = {**scored, "p": scored["p"] + np.float32(1e-7)}
        one, same, near, discrete = (
            read_prediction(ACCURACY, outputs) for outputs in (scored, scored, other, classes)
        )
        assert one.has_equal_outputs(same)
        assert not one.has_equal_outputs(near)
        assert not discrete.has_equal_outputs(discrete)
        joined = join_predictions([one, same])
        assert joined.has_equal_outputs(join_predictions([same, one]))
        assert not joined.has_equal_outputs(one)


@pytest.mark.parametrize("average", ["macro", "micro", "weighted", "binary"])
def test_measure_metrics_of_f1_matches_scikit_learn(model: Path, scores: Any, average: Any) -> None:
    from sklearn import metrics as reference

    label = labels_of(scores)
    positive = 2 if average == "binary" else None
    found = measured(
        {CANDIDATE: model}, label, MetricDefinition(name="f1", average=average, positive=positive)
    )
    said = scores.argmax(axis=1)
    truth, seen, how = (label == 2, said == 2, "binary") if positive else (label, said, average)
    assert estimate(found) == pytest.approx(reference.f1_score(truth, seen, average=how))


@pytest.mark.parametrize(("names", "positive"), [([0, 1, 2], 1), (["ant", "bee", "cat"], "bee")])
def test_measure_metrics_of_auc_reads_column_of_positive_label(
    model: Path, scores: Any, names: list[Any], positive: int | str
) -> None:
    from sklearn import metrics as reference

    label = np.array(names)[labels_of(scores)]
    found = measured(
        {CANDIDATE: model}, label, ACCURACY, MetricDefinition(name="auc", positive=positive)
    )
    assert found.counts[0].both == 90
    assert estimate(found) == pytest.approx(
        reference.roc_auc_score(label == positive, scores[:, 1])
    )


def _make_median_error(label: Any, answers: Any, _: Options) -> MetricStatistic:
    errors = np.abs(label - answers)
    return MetricStatistic(
        statistic=lambda weights: np.array(
            [np.median(np.repeat(errors, row.astype(int))) for row in weights]
        ),
        reads=answers,
    )


NEW_METRICS = {
    "within_half": TaskMetric(
        reads="numbers",
        method=CountedRows(is_right=lambda label, answers, _: abs(label - answers) < 0.5),
    ),
    "median_error": TaskMetric(
        reads="numbers", method=Resampled(make=_make_median_error), higher_is_better=False
    ),
    "above_zero": TaskMetric(
        reads="positive",
        method=CountedRows(is_right=lambda label, answers, _: (answers > 0) == label),
        options={"positive": None},
    ),
}


@pytest.mark.parametrize("name", NEW_METRICS)
def test_measure_metrics_with_metric_added_to_table_returns_its_value(
    model: Path, scores: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setitem(METRICS, name, NEW_METRICS[name])
    weight = np.ones((rows(1)["x"].shape[1], 1), dtype=np.float32)
    text = f"(float[N,{len(weight)}] x) => (float[N,1] y) {{ y = MatMul(x, weight) }}"
    numeric = write_graph(tmp_path / "numeric.onnx", text, weight=weight)
    numbers = (rows(ROWS)["x"] @ weight)[:, 0]
    label = numbers + np.random.default_rng(0).uniform(-1, 1, ROWS)
    classes = labels_of(scores)
    expected = {
        "within_half": (np.abs(label - numbers) < 0.5).sum(),
        "median_error": np.median(np.abs(label - numbers)),
        "above_zero": ((scores[:, 2] > 0) == (classes == 2)).sum(),
    }
    definition = MetricGate(name=name, positive=2 if name == "above_zero" else None).definition()
    if name == "above_zero":
        found = measured({CANDIDATE: model}, classes, definition)
    else:
        found = measured({CANDIDATE: numeric}, label, definition)
    value = found.counts[0].both if found.counts else estimate(found)
    assert value == pytest.approx(expected[name], rel=1e-5)
    metrics = [entry.metric for entry in found.counts] + [entry.metric for entry in found.scores]
    assert metrics == [definition.label]


def test_measure_metrics_of_cosine_without_labels_compares_with_other_model(
    model: Path, tmp_path: Path
) -> None:
    same = write_perceptron(tmp_path / "same.onnx", batch=16)
    (entry,) = measured(
        {CANDIDATE: model, "fp32": same}, None, ACCURACY, MetricDefinition(name="cosine")
    ).scores
    assert entry.against == "fp32"
    assert entry.candidate is not None
    assert entry.candidate.estimate == pytest.approx(1)


def test_measure_metrics_of_user_metric_passes_predictions_and_labels(
    model: Path, scores: Any
) -> None:
    def share(predictions: Any, labels: Any) -> float:
        return float((predictions.argmax(axis=1) == labels).mean())

    definition = MetricDefinition(use="own:share")
    found = measured(
        {CANDIDATE: model}, labels_of(scores), definition, functions={"own:share": share}
    )
    assert estimate(found) == pytest.approx(0.9)


@pytest.mark.parametrize(
    ("definition", "label", "why"),
    [
        (
            MetricDefinition(name="mae"),
            np.zeros(ROWS),
            "no output can be read as one number per row",
        ),
        (
            MetricDefinition(name="accuracy", output="logits"),
            np.zeros(ROWS, int),
            "no output 'logits'",
        ),
        (MetricDefinition(name="auc"), np.arange(ROWS) % 3, "none is configured as positive"),
        (ACCURACY, np.arange(ROWS), "do not fit 3 columns"),
        (ACCURACY, np.linspace(0, 1, ROWS), "not fractions"),
        (F1, np.zeros((ROWS, 2)), "one class per row"),
        (MetricDefinition(name="cosine"), np.zeros((ROWS, 9)), "cannot be compared row by row"),
    ],
)
def test_measure_metrics_of_unfit_answers_or_labels_reports_failure(
    model: Path, definition: MetricDefinition, label: Any, why: str
) -> None:
    found = measured({CANDIDATE: model}, label, definition, MetricDefinition(name="top_k", k=3))
    score = next(entry for entry in found.scores if entry.metric == definition.label)
    assert why in score.failed
    assert score.candidate is None


def test_measure_metrics_with_incompatible_champion_reports_it(
    model: Path, scores: Any, tmp_path: Path
) -> None:
    other = write_convolution(tmp_path / "other.onnx")
    found = measured({CANDIDATE: model, "champion": other}, labels_of(scores), ACCURACY)
    assert [c.against for c in found.counts] == [""]
    (entry,) = found.scores
    assert (entry.against, entry.failed) == ("champion", "")
    assert "cannot be scored" in entry.undefined


def test_measure_metrics_of_answers_with_nan_returns_no_value(model: Path, scores: Any) -> None:
    spoilt = scores.copy()
    spoilt[3, 1] = np.nan
    definitions = (ACCURACY, MetricDefinition(name="top_k", k=2))
    readings = {
        definition.label: read_prediction(definition, {"scores": spoilt})
        for definition in definitions
    }
    found = measured(
        {CANDIDATE: model}, labels_of(scores), *definitions, known={CANDIDATE: readings}
    )
    assert found.counts == ()
    assert [(entry.metric, bool(entry.broken), entry.candidate) for entry in found.scores] == [
        (definition.label, True, None) for definition in definitions
    ]


class TestReading:
    LABELS = np.array([1, 0, 2], dtype=np.int64)
    SCORES = np.array([[0.1, 0.7, 0.2], [0.8, 0.1, 0.1], [0.3, 0.3, 0.4]], dtype=np.float32)

    def test_read_prediction_prefers_labels_to_scores_unless_output_is_named(self) -> None:
        outputs: dict[str, np.ndarray[Any, Any]] = {"scores": self.SCORES, "label": self.LABELS}
        assert read_prediction(ACCURACY, outputs).columns == 0
        named = read_prediction(MetricDefinition(name="accuracy", output="scores"), outputs)
        assert (named.columns, named.values.tolist()) == (3, [1, 0, 2])

    def test_read_prediction_with_nan_score_counts_broken_row(self) -> None:
        scores = self.SCORES.copy()
        scores[1, 2] = np.nan
        for definition in (
            ACCURACY,
            MetricDefinition(name="top_k", k=1),
            MetricDefinition(name="auc"),
        ):
            assert read_prediction(definition, {"scores": scores}).broken == 1
        tokens = read_prediction(
            MetricDefinition(name="token_agreement", ignore=0), {"logits": scores[:, None, :]}
        )
        assert (tokens.broken, tokens.values.shape) == (1, (3, 1))

    def test_read_classes_of_one_column_applies_probability_threshold(self) -> None:
        label = np.array([1, 0, 1])
        reading = read_prediction(
            ACCURACY, {"p": np.array([[0.9], [0.2], [0.4]], dtype=np.float32)}
        )
        assert read_classes(label, reading, ACCURACY).tolist() == [1, 0, 0]
        with pytest.raises(UserError, match="between 0 and 1"):
            read_classes(label, Prediction(values=np.array([0.2, 3.0, -1.0]), columns=1), ACCURACY)

    def test_read_positive_scores_of_one_column_negates_them_for_smaller_label(self) -> None:
        label, reading = np.array(["no", "yes"]), Prediction(values=np.array([0.2, 0.9]), columns=1)
        assert read_positive_scores(label, "yes", reading, "").tolist() == [0.2, 0.9]
        assert read_positive_scores(label, "no", reading, "").tolist() == [-0.2, -0.9]
        with pytest.raises(UserError, match="no column"):
            read_positive_scores(label, "maybe", reading, "")

    def test_read_classes_of_string_output_returns_labels(self) -> None:
        reading = read_prediction(ACCURACY, {"label": np.array(["a", "b"], dtype=object)})
        assert read_classes(np.array(["a", "c"]), reading, ACCURACY).tolist() == ["a", "b"]
        with pytest.raises(UserError, match="the labels are of type int64"):
            read_classes(np.array([0, 1]), reading, ACCURACY)

    @pytest.mark.parametrize(
        ("label", "positive"),
        [([0, 1], 1), ([0, 0], 1), ([-1, 1], 1), ([1, 2], 2), (["no", "yes"], "yes")],
    )
    def test_find_positive_label_returns_greater_label_or_1_for_zeros(
        self, label: list[Any], positive: object
    ) -> None:
        assert find_positive_label(MetricDefinition(name="auc"), np.array(label)) == positive

    @given(st.lists(st.integers(0, 4), min_size=1), st.integers(5, 9))
    def test_find_column_labels_of_integers_returns_column_numbers(
        self, label: list[int], count: int
    ) -> None:
        assert find_column_labels(np.array(label), count, "").tolist() == list(range(count))

    def test_join_predictions_of_different_shapes_raises_user_error(self) -> None:
        with pytest.raises(UserError, match="differs between batches"):
            join_predictions(
                [Prediction(values=np.ones((2, 3))), Prediction(values=np.ones((2, 4)))]
            )

    def test_prepare_label_of_float_labels_returns_integers(self) -> None:
        found = prepare_label(ACCURACY, np.array([[1.0], [0.0]]))
        assert found is not None
        assert (found.dtype.kind, found.tolist()) == ("i", [1, 0])


class TestGroups:
    """Rows of one group count as fewer independent rows."""

    def test_measure_metrics_with_named_groups_counts_them_without_warning(
        self, model: Path, scores: Any
    ) -> None:
        both, group = {CANDIDATE: model, "fp32": model}, np.arange(ROWS) // 4
        found = measured(both, labels_of(scores), ACCURACY, data={"group": group})
        assert [(c.groups, c.change_effect > 1, c.value_effect > 1) for c in found.counts] == [
            (25, True, True)
        ] * 2
        assert found.grouped == ()

    def test_measure_metrics_with_groups_resamples_them_unless_few(
        self, model: Path, scores: Any
    ) -> None:
        plain, by_group = (
            alone(measured({CANDIDATE: model}, labels_of(scores), F1, data={"group": group}))
            for group in (None, np.arange(ROWS) // 4)
        )
        assert (plain.groups, by_group.groups) == (0, 25)
        assert plain.candidate is not None
        assert by_group.candidate is not None
        assert by_group.candidate.estimate == plain.candidate.estimate
        assert by_group.candidate.low < plain.candidate.low
        few = measured(
            {CANDIDATE: model}, labels_of(scores), F1, data={"group": np.arange(ROWS) // 10}
        )
        assert "10 groups are too few" in alone(few).undefined

    def test_measure_metrics_with_unused_id_column_reports_it(
        self, model: Path, scores: Any
    ) -> None:
        both, columns = {CANDIDATE: model, "fp32": model}, {"patient": np.arange(ROWS) // 4}
        found = measured(both, labels_of(scores), ACCURACY, data={"columns": columns})
        assert any("'patient'" in sign for sign in found.grouped)
