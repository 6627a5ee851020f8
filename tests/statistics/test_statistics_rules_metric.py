"""Metric gates over scores.

Each limit is compared with its interval, and some findings never lead to a PASS.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from onnx_ops.domain.decision import GateResult, Verdict
from onnx_ops.domain.evidence import Evidence, Interval, PairedCounts, ScoreComparison
from onnx_ops.domain.gate import MetricGate
from onnx_ops.statistics.judge import judge
from tests.support.evidence import make_evidence
from tests.support.golden import Golden


def evidence(*scores: ScoreComparison, **change: Any) -> Evidence:
    return make_evidence(**{"dedicated": True, "baseline": "fp32", "scores": scores, **change})


def interval(estimate: float, half: float = 0.01) -> Interval:
    return Interval(estimate=estimate, low=estimate - half, high=estimate + half)


def entry(metric: str, against: str = "fp32", **figures: Any) -> ScoreComparison:
    found = {
        "n": 1000,
        "candidate": interval(0.9),
        "confidence": 0.9,
        "method": "bootstrap",
        **figures,
    }
    return ScoreComparison(metric=metric, against=against, **found)


def judged(gate: MetricGate, found: Evidence) -> list[GateResult]:
    return [result for result in judge([gate], found).results if result.gate == "metric"]


@pytest.mark.parametrize(
    ("gate", "entries", "metric", "limit", "verdict", "estimate"),
    [
        (MetricGate(name="f1", max_drop=0.05), [entry("f1 macro", difference=interval(-0.02))],
         "f1 macro vs fp32", "drop ≤ 5%", Verdict.PASS, -0.02),
        (MetricGate(name="auc", max_drop=0.02), [entry("auc", difference=interval(-0.02))],
         "auc vs fp32", "drop ≤ 2%", Verdict.INCONCLUSIVE, -0.02),
        (MetricGate(name="r2", max_drop=0.01), [entry("r2", difference=interval(-0.05))],
         "r2 vs fp32", "drop ≤ 1%", Verdict.FAIL, -0.05),
        (MetricGate(name="mae", max_increase=0.05), [entry("mae", ratio=interval(1.02))],
         "mae vs fp32", "increase ≤ 5%", Verdict.PASS, 0.02),
        (MetricGate(name="rmse", max_increase=0.05), [entry("rmse", ratio=interval(1.2))],
         "rmse vs fp32", "increase ≤ 5%", Verdict.FAIL, 0.2),
        (MetricGate(name="mae", max=1.5), [entry("mae", "", candidate=interval(1.49))],
         "mae", "≤ 1.5", Verdict.PASS, 1.49),
        (MetricGate(name="mae", max=1.5), [entry("mae", "", candidate=interval(1.6))],
         "mae", "≤ 1.5", Verdict.FAIL, 1.6),
        (MetricGate(name="cosine", min=0.95), [entry("cosine", candidate=interval(0.97))],
         "cosine", "≥ 95%", Verdict.PASS, 0.97),
        (MetricGate(use="own:score", higher_is_better=False, max=2.0), [entry("own:score", "")],
         "own:score", "≤ 2", Verdict.PASS, 0.9),
    ],
)  # fmt: skip
def test_metric_gate_compares_each_limit_with_its_interval(
    gate: MetricGate,
    entries: list[ScoreComparison],
    metric: str,
    limit: str,
    verdict: Verdict,
    estimate: float,
) -> None:
    (result,) = judged(gate, evidence(*entries))
    assert (result.metric, result.limit, result.verdict) == (metric, limit, verdict)
    assert result.estimate == pytest.approx(estimate)
    assert result.n == 1000
    assert "limit" in result.reason


@pytest.mark.parametrize(
    ("gate", "worst"),
    [(MetricGate(name="mae", max=2.0), 1.5), (MetricGate(name="mae", min=1.0), 1.2)],
    ids=["max", "min"],
)
def test_metric_gate_with_several_values_of_equal_verdict_returns_worst(
    gate: MetricGate, worst: float
) -> None:
    entries = (entry("mae", other, candidate=interval(v)) for other, v in (("", 1.2), ("b", 1.5)))
    (result,) = judged(gate, evidence(*entries))
    assert (result.verdict, result.estimate) == (Verdict.PASS, worst)


def test_metric_gate_at_limit_decides_by_interval_bound() -> None:
    touching = entry("f1 macro", difference=Interval(estimate=0.0, low=-0.05, high=0.05))
    assert (
        judged(MetricGate(name="f1", max_drop=0.05), evidence(touching))[0].verdict
        is Verdict.INCONCLUSIVE
    )
    exact = entry("f1 macro", "", candidate=Interval(estimate=0.95, low=0.9, high=1.0))
    assert judged(MetricGate(name="f1", min=0.9), evidence(exact))[0].verdict is Verdict.PASS


def test_metric_gate_with_other_settings_ignores_score(golden: Golden) -> None:
    found = evidence(entry("f1 macro", difference=interval(0.0)))
    (other,) = judged(MetricGate(name="f1", average="micro", max_drop=0.05), found)
    assert other.verdict is Verdict.INCONCLUSIVE
    golden("reasons", other.reason)


@pytest.mark.parametrize(
    "gate", [MetricGate(name="auc", max_drop=0.5), MetricGate(name="auc", min=0.1)]
)
def test_metric_gate_of_score_without_value_returns_its_reason(gate: MetricGate) -> None:
    undefined = ScoreComparison(metric="auc", against="", n=9, undefined="only one class")
    failed = replace(undefined, undefined="", failed="it raised")
    broken = replace(undefined, undefined="", broken="NaN on 9 rows")
    verdicts = {Verdict.INCONCLUSIVE: undefined, Verdict.ERROR: failed, Verdict.FAIL: broken}
    for verdict, found in verdicts.items():
        (result,) = judged(gate, evidence(found))
        assert (result.verdict, result.reason) == (
            verdict,
            found.undefined or found.failed or found.broken,
        )


def test_metric_gate_with_undefined_score_of_champion_still_judges_minimum() -> None:
    found = evidence(
        entry("auc", ""),
        entry("auc", difference=interval(0.0)),
        ScoreComparison(
            metric="auc", against="champion", n=1000, undefined="champion answers with NaN"
        ),
        baseline="champion",
    )
    results = {
        r.metric: r.verdict for r in judged(MetricGate(name="auc", max_drop=0.05, min=0.5), found)
    }
    assert results == {
        "auc vs fp32": Verdict.PASS, "auc vs champion": Verdict.INCONCLUSIVE, "auc": Verdict.PASS,
    }  # fmt: skip


def test_metric_gate_with_export_comparison_still_requires_baseline() -> None:
    found = evidence(entry("auc", difference=interval(0.0)), baseline="champion")
    results = {r.metric: r.verdict for r in judged(MetricGate(name="auc", max_drop=0.05), found)}
    assert results == {"auc vs fp32": Verdict.PASS, "auc vs champion": Verdict.INCONCLUSIVE}


@pytest.mark.parametrize(
    "bad",
    [
        interval(math.nan),
        Interval(estimate=0.9, low=math.nan, high=1.0),
        Interval(estimate=0.9, low=0.8, high=math.inf),
        Interval(estimate=0.9, low=0.95, high=1.0),
    ],
)
def test_metric_gate_with_inconsistent_interval_is_error(bad: Interval) -> None:
    for limit, figure in (("max_drop", "difference"), ("min", "candidate")):
        limits: dict[str, Any] = {limit: 0.5}
        figures: dict[str, Any] = {figure: bad}
        (result,) = judged(MetricGate(name="r2", **limits), evidence(entry("r2", **figures)))
        assert result.verdict is Verdict.ERROR
    (result,) = judged(MetricGate(name="r2", min=0.0), evidence(entry("r2", n=0)))
    assert result.verdict is Verdict.ERROR


def test_metric_gate_with_limit_of_wrong_kind_is_inconclusive() -> None:
    for gate in (MetricGate(name="mae", max_drop=1.0), MetricGate(name="auc", max_increase=1.0)):
        name = gate.definition().label
        figures: dict[str, Any] = (
            {"ratio": interval(1.0)} if name == "mae" else {"difference": interval(0.0)}
        )
        (result,) = judged(gate, evidence(entry(name, **figures)))
        assert result.verdict is Verdict.INCONCLUSIVE


def test_cosine_gate_without_score_is_inconclusive_and_of_first_export_has_no_result() -> None:
    gate = MetricGate(name="cosine", min=0.9)
    assert judged(gate, evidence(variant="fp32", baseline="")) == []
    assert judge([gate], evidence(variant="fp32", baseline="")).verdict is Verdict.INCONCLUSIVE
    (missing,) = judged(gate, evidence())
    assert missing.verdict is Verdict.INCONCLUSIVE
    refused = ScoreComparison(metric="cosine", against="fp32", n=3, undefined="too few")
    (result,) = judged(gate, evidence(refused))
    assert (result.verdict, result.reason) == (Verdict.INCONCLUSIVE, "too few")


def test_metric_gate_with_few_effective_rows_names_heavy_rows_and_passes_no_maximum() -> None:
    few = entry("rmse", "", candidate=interval(1.0), effective=4.2, heavy=(17, 93), n=200)
    (found,) = judged(MetricGate(name="rmse", max=1.5), evidence(few))
    assert found.verdict is Verdict.INCONCLUSIVE
    assert "17, 93" in found.reason
    even = replace(few, effective=80.0)
    assert judged(MetricGate(name="rmse", max=1.5), evidence(even))[0].verdict is Verdict.PASS
    assert judged(MetricGate(name="rmse", max=0.5), evidence(few))[0].verdict is Verdict.FAIL


@pytest.mark.parametrize(
    ("metric", "limit", "change", "bad", "good"),
    [
        ("rmse", "max_increase", "ratio", 1.2, 1.01),
        ("mae", "max_increase", "ratio", 1.2, 0.9),
        ("r2", "max_drop", "difference", -0.1, 0.0),
    ],
)
def test_metric_gate_with_change_on_few_rows_passes_only_if_others_keep_limit(
    metric: str, limit: str, change: str, bad: float, good: float
) -> None:
    limits: dict[str, Any] = {limit: 0.05}
    gate = MetricGate(name=metric, **limits)
    no_change = float(change == "ratio")
    kept: dict[str, Any] = {change: interval(no_change)}
    few = entry(metric, **kept, carrying=2, rest=bad, heavy=(17, 93))
    (found,) = judged(gate, evidence(few))
    assert found.verdict is Verdict.INCONCLUSIVE
    assert "2 of 1000 rows" in found.reason
    assert "17, 93" in found.reason
    assert judged(gate, evidence(replace(few, rest=None)))[0].verdict is Verdict.INCONCLUSIVE
    assert judged(gate, evidence(replace(few, rest=math.nan)))[0].verdict is Verdict.INCONCLUSIVE
    assert judged(gate, evidence(replace(few, rest=good)))[0].verdict is Verdict.PASS
    broken: dict[str, Any] = {
        change: interval(no_change + (0.2 if limit == "max_increase" else -0.2))
    }
    worse = replace(few, **broken)
    assert judged(gate, evidence(worse))[0].verdict is Verdict.FAIL


def test_metric_gate_with_single_heavy_row_describes_it_in_singular() -> None:
    few = entry("rmse", ratio=interval(1.001), carrying=1, rest=1.2, heavy=(17,))
    (result,) = judged(MetricGate(name="rmse", max_increase=0.05), evidence(few))
    assert result.reason.endswith(
        "1 of 1000 rows accounts for the change, and the change in the other rows is +20%: "
        "check row 17"
    )


def test_metric_gate_with_minimum_r2_passes_only_if_many_rows_contribute() -> None:
    few = entry("r2", "", effective=4.2, heavy=(17,))
    assert judged(MetricGate(name="r2", min=0.5), evidence(few))[0].verdict is Verdict.INCONCLUSIVE
    assert (
        judged(MetricGate(name="r2", min=0.5), evidence(replace(few, effective=80.0)))[0].verdict
        is Verdict.PASS
    )


def test_metric_gate_of_equal_answers_passes_with_zero_change() -> None:
    counts = PairedCounts(
        metric="accuracy", against="fp32", n=30, both=20, only_baseline=0, only_candidate=0
    )
    gate = MetricGate(name="accuracy", max_drop=0.01)
    assert judged(gate, evidence(metrics=(counts,)))[0].verdict is Verdict.INCONCLUSIVE
    (equal,) = judged(gate, evidence(metrics=(replace(counts, equal=True),)))
    assert (equal.verdict, equal.low, equal.high, equal.p_value) == (Verdict.PASS, 0.0, 0.0, 0.0)
    assert "exactly 0" in equal.reason
    wrong = replace(counts, equal=True, only_baseline=1)
    assert judged(gate, evidence(metrics=(wrong,)))[0].verdict is Verdict.ERROR
    points: dict[str, dict[str, Any]] = {
        "f1 macro": {"difference": Interval.point(0.0)},
        "mae": {"ratio": Interval.point(1.0)},
    }
    for name, figures in points.items():
        limits: dict[str, Any] = {"max_drop" if "difference" in figures else "max_increase": 0.001}
        scored = entry(name, candidate=None, **figures)
        (found,) = judged(MetricGate(name=name.split()[0], **limits), evidence(scored))
        assert (found.verdict, found.estimate) == (Verdict.PASS, 0.0)
        assert "every row alike" in found.reason


def test_metric_gate_with_grouped_rows_adds_advisory() -> None:
    scored = evidence(
        entry("f1 macro", difference=interval(0.0, 0.001)), grouped=("the data has 'patient'",)
    )
    decision = judge([MetricGate(name="f1", max_drop=0.05)], scored)
    (result,) = (result for result in decision.results if result.metric == "f1 macro vs fp32")
    assert result.verdict is Verdict.PASS
    (advice,) = (result for result in decision.results if result.advisory)
    assert "'patient'" in advice.reason
    assert "group:" in advice.reason


def test_metric_gate_passes_exactly_if_p_value_is_below_five_percent() -> None:
    verdicts = []
    for estimate in (-0.02, -0.035, -0.045):
        (found,) = judged(
            MetricGate(name="f1", max_drop=0.05),
            evidence(entry("f1 macro", difference=interval(estimate))),
        )
        assert found.p_value is not None
        assert (found.p_value < 0.05) == (found.verdict is Verdict.PASS)
        verdicts.append(found.verdict)
    assert verdicts == [Verdict.PASS, Verdict.PASS, Verdict.INCONCLUSIVE]
