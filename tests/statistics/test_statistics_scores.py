"""Scores with intervals: error rates at the limit, and what never leads to PASS."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onnx_ops.domain.decision import Verdict
from onnx_ops.domain.evidence import Interval, ScoreComparison
from onnx_ops.domain.gate import MetricDefinition
from onnx_ops.domain.task_metrics import METRICS, MeanLoss, TaskMetric
from onnx_ops.statistics.rules.metric import MetricLimit
from onnx_ops.statistics.scores import CANDIDATE, FEW_ROWS, build_metric_statistic, score

F1 = MetricDefinition(name="f1", average="macro")
BINARY = MetricDefinition(name="f1", average="binary")
AUC = MetricDefinition(name="auc")
MAE = MetricDefinition(name="mae")
RMSE = MetricDefinition(name="rmse")
R2 = MetricDefinition(name="r2")
COSINE = MetricDefinition(name="cosine")
TOKENS = MetricDefinition(name="token_agreement", ignore=-100)
OWN = MetricDefinition(use="own:metric")

Rows = tuple[Any, Any, Any]
"""Label, baseline's answers, candidate's answers."""


def classes(n: int, rng: np.random.Generator) -> Rows:
    """Return rows in which the baseline errs in 6 %, and the candidate in about 8 %."""
    label = rng.choice(3, n, p=[0.6, 0.3, 0.1])
    wrong, luck = (label + 1) % 3, rng.random(n)
    base = np.where(rng.random(n) < 0.06, wrong, label)
    return label, base, np.where(luck < 0.025, wrong, np.where(luck > 0.99, label, base))


def binary(n: int, rng: np.random.Generator) -> Rows:
    label, base, candidate = classes(n, rng)
    return tuple(np.where(array == 1, 1, 0) for array in (label, base, candidate))  # type: ignore[return-value]


def ranking(n: int, rng: np.random.Generator) -> Rows:
    label = rng.random(n) < 0.3
    base = rng.standard_normal(n) + 1.5 * label
    return label, base, base + 0.5 * rng.standard_normal(n)


def numbers(n: int, rng: np.random.Generator) -> Rows:
    label = 5 * rng.standard_normal(n)
    base = label + rng.standard_normal(n)
    return label, base, base + 0.35 * rng.standard_normal(n)


World = Callable[[int, np.random.Generator], Rows]
WORLDS: tuple[tuple[MetricDefinition, World], ...] = (
    (F1, classes),
    (BINARY, binary),
    (AUC, ranking),
    (MAE, numbers),
    (RMSE, numbers),
    (R2, numbers),
)
ids = [definition.label for definition, _ in WORLDS]


def compared(
    definition: MetricDefinition, rows: Rows, seed: int = 0, resamples: int = 300
) -> ScoreComparison:
    label, base, candidate = rows
    entries = score(
        definition, label, {CANDIDATE: candidate, "fp32": base}, seed=seed, resamples=resamples
    )
    return next((entry for entry in entries if entry.against), entries[0])


def verdict(entry: ScoreComparison, drop: float = 0.02, growth: float = 0.05) -> Verdict:
    if entry.ratio is not None:
        limit = MetricLimit(kind="max_increase", value=growth, plain=True)
        return limit.verdict(entry.ratio.low - 1, entry.ratio.high - 1)
    assert entry.difference is not None
    return MetricLimit(kind="max_drop", value=drop, plain=False).verdict(
        entry.difference.low, entry.difference.high
    )


@pytest.mark.parametrize(("definition", "draw"), WORLDS, ids=ids)
@pytest.mark.parametrize(
    ("rows", "trials"), [(500, 100), pytest.param(2000, 25, marks=pytest.mark.nightly)]
)
def test_score_with_true_change_at_limit_rarely_passes(
    definition: MetricDefinition, draw: World, rows: int, trials: int
) -> None:
    """The promised rate of passes is 5.5 %.

    At that rate, only one of 200 tests like this one has too many passes.
    """
    from scipy import stats

    rng = np.random.default_rng([rows, trials])
    label, *models = draw(400_000, rng)
    base, candidate = (
        build_metric_statistic(definition, label, said).statistic(np.ones((1, len(label))))[0]
        for said in models
    )
    passed = 0
    for trial in range(trials):
        entry = compared(definition, draw(rows, rng), seed=trial)
        passed += verdict(entry, drop=base - candidate, growth=candidate / base - 1) is Verdict.PASS
    assert stats.binom.sf(passed - 1, trials, 0.055) > 0.005


@pytest.mark.parametrize(("definition", "draw"), WORLDS, ids=ids)
def test_score_of_2000_rows_passes_wide_and_fails_narrow_limit(
    definition: MetricDefinition, draw: World
) -> None:
    entry = compared(definition, draw(2000, np.random.default_rng(1)))
    assert verdict(entry, drop=0.2, growth=0.5) is Verdict.PASS
    assert verdict(entry, drop=0.0005, growth=0.001) is Verdict.FAIL


@pytest.mark.parametrize(("definition", "draw"), WORLDS, ids=ids)
@settings(max_examples=10)
@given(seed=st.integers(0, 1000))
def test_score_with_shuffled_rows_is_unchanged(
    definition: MetricDefinition, draw: World, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    rows = draw(60, rng)
    order = rng.permutation(60)
    shuffled = tuple(array[order] for array in rows)
    one, other = (
        replace(compared(definition, rows_, resamples=100), heavy=()) for rows_ in (shuffled, rows)
    )
    assert one == other


@settings(max_examples=30)
@given(
    seed=st.integers(0, 1000),
    wrong=st.integers(0, 40),
    more=st.integers(1, 40),
    drop=st.floats(0.001, 0.3),
)
@pytest.mark.parametrize("definition", [F1, BINARY, COSINE, TOKENS], ids=lambda d: d.label)
def test_score_with_more_wrong_rows_never_improves_verdict(
    definition: MetricDefinition, seed: int, wrong: int, more: int, drop: float
) -> None:
    order = np.random.default_rng(seed).permutation(200)
    label = np.arange(200) % 2
    reference = {
        "f1": label,
        "cosine": np.eye(2)[label],
        "token_agreement": np.column_stack([label, label]),
    }[definition.name or ""]

    def candidate(count: int) -> Any:
        said = reference.copy()
        said[order[:count]] = (
            said[order[:count]][:, ::-1] if definition is COSINE else 1 - said[order[:count]]
        )
        return said

    before, after = (
        verdict(compared(definition, (reference, reference, candidate(count))), drop=drop)
        for count in (wrong, wrong + more)
    )
    assert after.rank >= before.rank


@pytest.mark.parametrize(("definition", "draw"), [*WORLDS[2:]], ids=ids[2:])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_score_with_nonfinite_answer_returns_no_interval_that_depends_on_it(
    definition: MetricDefinition, draw: World, bad: float
) -> None:
    label, base, candidate = draw(100, np.random.default_rng(0))
    spoilt = base.copy()
    spoilt[3] = bad
    (entry,) = score(definition, label, {CANDIDATE: spoilt, "fp32": base}, seed=0)
    assert entry.broken == "the model answers with NaN or infinity on 1 of 100 rows"
    assert entry.candidate is entry.difference is entry.ratio is None
    alone, other = score(definition, label, {CANDIDATE: candidate, "fp32": spoilt}, seed=0)
    assert alone.candidate is not None
    assert "NaN" in other.undefined
    assert other.difference is other.ratio is None


@given(n=st.integers(0, FEW_ROWS - 1))
def test_score_of_few_rows_is_undefined(n: int) -> None:
    for definition, draw in WORLDS:
        label, base, candidate = (array[:n] for array in draw(FEW_ROWS, np.random.default_rng(0)))
        (entry,) = score(definition, label, {CANDIDATE: candidate, "fp32": base}, seed=0)
        assert "too few" in entry.undefined


def test_score_of_rows_that_do_not_define_metric_or_interval_is_undefined() -> None:
    values = np.arange(50.0)
    cases = [
        (AUC, np.ones(50, dtype=bool), values),
        (R2, np.full(50, 0.1), values),
        (BINARY, np.zeros(50, dtype=int), np.zeros(50, dtype=int)),
        (MAE, values, values + 1),
        (TOKENS, np.full((50, 3), -100), np.zeros((50, 3), dtype=int)),
    ]
    for definition, label, said in cases:
        (entry,) = score(definition, label, {CANDIDATE: said}, seed=0)
        assert entry.undefined
        assert entry.candidate is None
        # MAE is defined for its rows, though the interval of MAE is not.
        if definition is not MAE:
            assert (
                len(
                    score(
                        definition, label, {CANDIDATE: said, "fp32": said}, seed=0, alike={"fp32"}
                    )
                )
                == 1
            )


class TestEqualAnswers:
    @settings(max_examples=25)
    @given(seed=st.integers(0, 1000), rows=st.integers(FEW_ROWS, 400), positives=st.integers(1, 10))
    @pytest.mark.parametrize(("definition", "draw"), WORLDS, ids=ids)
    def test_score_of_equal_outputs_returns_point_interval_without_change(
        self, definition: MetricDefinition, draw: World, seed: int, rows: int, positives: int
    ) -> None:
        label, base, _ = draw(rows, np.random.default_rng(seed))
        if definition in (BINARY, AUC):
            label = np.arange(rows) < positives
            label = label if definition is AUC else label.astype(int)
        found = score(
            definition,
            label,
            {CANDIDATE: base, "fp32": base.copy()},
            seed=0,
            resamples=50,
            alike={"fp32"},
        )
        if definition is BINARY and not (label.any() or base.any()):
            return
        (entry,) = (entry for entry in found if entry.against)
        assert (entry.difference or entry.ratio) == Interval.point(0.0 if entry.difference else 1.0)
        assert (entry.ratio is None) is (definition not in (MAE, RMSE))

    @pytest.mark.parametrize(
        ("label", "answers"), [(np.arange(50.0), np.arange(50.0)), (np.arange(50) % 3, np.ones(50))]
    )
    @pytest.mark.parametrize("definition", [MAE, RMSE, R2], ids=lambda d: d.label)
    def test_score_of_candidate_with_baseline_answers_returns_no_change(
        self, definition: MetricDefinition, label: Any, answers: Any
    ) -> None:
        alone, entry = score(
            definition, label.astype(float), {CANDIDATE: answers, "fp32": answers}, seed=0
        )
        assert (entry.difference or entry.ratio) == Interval.point(0.0 if definition is R2 else 1.0)
        assert alone.candidate is None or definition is not R2 or alone.candidate.estimate < 1

    @pytest.mark.parametrize(("definition", "draw"), WORLDS[:2], ids=ids[:2])
    def test_score_of_equal_classes_from_other_outputs_returns_interval_around_zero(
        self, definition: MetricDefinition, draw: World
    ) -> None:
        label, base, _ = draw(1000, np.random.default_rng(0))
        found = compared(definition, (label, base, base))
        assert found.difference is not None
        assert found.difference.estimate == 0
        assert -0.03 < found.difference.low < -0.002
        assert found.difference.high == -found.difference.low

    def test_score_with_equal_errors_or_exact_baseline_is_undefined(self) -> None:
        label, error = np.random.default_rng(0).standard_normal((2, 100))
        cases = (
            (label + error, label - error, "cannot be estimated"),
            (label, label + np.linspace(0, 1, 100), "no error"),
        )
        for base, candidate, cause in cases:
            entry = compared(MAE, (label, base, candidate))
            assert entry.ratio is None
            assert cause in entry.undefined


class TestWithoutLabels:
    def test_score_without_labels_compares_candidate_with_each_model(self) -> None:
        rng = np.random.default_rng(0)
        base = rng.standard_normal((300, 8))
        answers = {
            CANDIDATE: base + 0.05 * rng.standard_normal(base.shape),
            "fp32": base,
            "champion": -base,
        }
        entries = {entry.against: entry for entry in score(COSINE, None, answers, seed=0)}
        assert set(entries) == {"fp32", "champion"}
        close, far = entries["fp32"], entries["champion"]
        assert close.candidate is not None
        assert close.difference is not None
        assert far.candidate is not None
        assert 0.98 < close.candidate.low < close.candidate.estimate < close.candidate.high <= 1
        assert close.difference.estimate == pytest.approx(close.candidate.estimate - 1)
        assert close.difference.high <= 0
        assert far.candidate.estimate < -0.99

    def test_score_without_labels_with_nan_or_single_model_returns_no_interval(self) -> None:
        good, bad = np.ones((50, 3)), np.full((50, 3), np.nan)
        assert score(COSINE, None, {CANDIDATE: good}, seed=0) == ()
        (entry,) = score(COSINE, None, {CANDIDATE: bad, "fp32": good}, seed=0)
        assert (entry.against, bool(entry.broken)) == ("fp32", True)
        (entry,) = score(COSINE, None, {CANDIDATE: good, "fp32": bad}, seed=0)
        assert (entry.against, bool(entry.undefined)) == ("fp32", True)


class TestUserMetric:
    LABEL = np.random.default_rng(0).standard_normal(80)
    SAID = LABEL + np.random.default_rng(1).standard_normal(80) / 4

    def test_score_of_user_metric_returns_difference_and_ratio(self) -> None:
        def within(said: Any, label: Any) -> float:
            return float((np.abs(said - label) < 0.3).mean())

        entries = score(
            OWN,
            self.LABEL,
            {CANDIDATE: self.SAID, "fp32": self.LABEL + 0.2},
            seed=0,
            function=within,
            resamples=200,
        )
        alone, other = entries
        assert alone.candidate is not None
        assert alone.candidate.low < within(self.SAID, self.LABEL) < alone.candidate.high
        assert other.difference is not None
        assert other.ratio is not None
        assert other.baseline == 1.0

    @pytest.mark.parametrize(
        ("function", "why"),
        [(lambda said, label: float("nan"), "gave nan"), (lambda said, label: "much", "ValueError"),
         (lambda said, label: 1 / 0, "division by zero")],
    )  # fmt: skip
    def test_score_of_failing_user_metric_reports_error(self, function: Any, why: str) -> None:
        (entry,) = score(OWN, self.LABEL, {CANDIDATE: self.SAID}, seed=0, function=function)
        assert why in entry.failed

    def test_score_of_user_metric_with_equal_values_is_undefined(self) -> None:
        def mean_size(said: Any, label: Any) -> float:
            return float(np.abs(said).mean())

        answers = {CANDIDATE: self.SAID, "fp32": -self.SAID}
        entries = score(OWN, self.LABEL, answers, seed=0, function=mean_size, resamples=100)
        (other,) = (entry for entry in entries if entry.against)
        assert "the answers differ from those of fp32" in other.undefined

    def test_score_of_user_metric_that_fails_on_resamples_is_undefined(self) -> None:
        def picky(said: Any, label: Any) -> float:
            if len(np.unique(label)) < len(label):
                raise ValueError("a row occurs twice")
            return 1.0

        (entry,) = score(
            OWN, self.LABEL, {CANDIDATE: self.SAID}, seed=0, function=picky, resamples=100
        )
        assert "undefined on these rows" in entry.undefined


@pytest.mark.parametrize(("definition", "world"), [(F1, classes), (RMSE, numbers), (R2, numbers)])
def test_score_of_baseline_has_same_interval_as_score_of_candidate(
    definition: MetricDefinition, world: World
) -> None:
    label, base, candidate = world(300, np.random.default_rng(3))
    _, compared = score(
        definition, label, {CANDIDATE: candidate, "champion": base}, seed=0, resamples=300
    )
    (own,) = score(definition, label, {CANDIDATE: base}, seed=0, resamples=300)
    assert compared.reference is not None
    assert own.candidate is not None
    assert compared.reference.estimate == pytest.approx(own.candidate.estimate)
    assert compared.reference.low == pytest.approx(
        own.candidate.low, abs=0.02 * abs(own.candidate.estimate)
    )


class TestHeavyRows:
    """A very large error that two models share hides all other rows."""

    @settings(max_examples=25)
    @given(
        seed=st.integers(0, 1000),
        giants=st.integers(1, 9),
        scale=st.sampled_from([1e-6, 1.0, 1e6]),
        rows=st.sampled_from([50, 500]),
    )
    @pytest.mark.parametrize("definition", [MAE, RMSE], ids=lambda d: d.label)
    def test_score_with_giant_errors_compares_other_rows_without_them(
        self, definition: MetricDefinition, seed: int, giants: int, scale: float, rows: int
    ) -> None:
        label, error = scale * np.random.default_rng(seed).standard_normal((2, rows))
        error[:giants] = 1e6 * scale
        mine = np.where(np.arange(rows) < giants, error, 1.2 * error)
        entry = compared(definition, (label, label + error, label + mine))
        assert entry.ratio is not None
        assert entry.ratio.estimate < 1.01
        assert entry.carrying >= giants
        assert entry.rest == pytest.approx(1.2, rel=1e-6)

    def test_score_of_r2_with_giant_label_compares_other_rows(self) -> None:
        label, error = np.random.default_rng(0).standard_normal((2, 500))
        label[7] = 1e4
        entry = compared(R2, (label, label + 0.3 * error, label + 0.36 * error))
        assert entry.carrying == 1
        assert entry.rest == pytest.approx(-0.04, abs=0.01)

    @pytest.mark.parametrize("definition", [MAE, RMSE], ids=lambda d: d.label)
    def test_score_with_one_giant_error_keeps_ratio_interval_wide(
        self, definition: MetricDefinition
    ) -> None:
        label, error = np.random.default_rng(0).standard_normal((2, 500))
        error[0] = 1e4
        entry = compared(
            definition,
            (label, label + error, label + np.where(np.arange(500) < 1, error, 1.2 * error)),
        )
        assert entry.ratio is not None
        assert entry.ratio.high > 1.15

    @pytest.mark.parametrize("definition", [MAE, RMSE, R2], ids=lambda d: d.label)
    def test_score_of_ordinary_errors_reports_no_heavy_rows(
        self, definition: MetricDefinition
    ) -> None:
        for rows in (20, 50, 500):
            entry = compared(definition, numbers(rows, np.random.default_rng(rows)))
            assert (entry.carrying, entry.rest) == (0, None)


def test_score_with_infinite_loss_is_undefined_and_counts_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    inverse = MeanLoss(loss=lambda label, answers, _: abs(label - answers) / label, of_errors=False)
    monkeypatch.setitem(
        METRICS, "relative", TaskMetric(reads="numbers", method=inverse, higher_is_better=False)
    )
    label = np.ones(100)
    label[:2] = 0.0
    with np.errstate(all="ignore"):
        (entry,) = score(
            MetricDefinition(name="relative"),
            label,
            {CANDIDATE: label + 0.5, "fp32": label},
            seed=0,
        )
    assert entry.undefined == "the loss of relative is not finite on 2 of 100 rows"
