"""The task metric that represents a release, and its value."""

from __future__ import annotations

from dataclasses import replace

import pytest

from onnx_ops import codec
from onnx_ops.domain.evidence import Evidence, Interval, SampledRows, ScoreComparison
from onnx_ops.domain.gate import Gate, MetricGate, SizeGate
from onnx_ops.reporting.metrics import headline, sampled_rows, task_metric, unit_of
from onnx_ops.statistics.judge import judge
from tests.reporting.test_reporting_html import evidence_of, page_of

ERROR = Interval(estimate=2.5, low=2.25, high=2.75)
CLOSE = Interval(estimate=0.9, low=0.8, high=1.0)


def test_headline_metric_comes_from_gate_or_evidence_and_is_on_page() -> None:
    scored = replace(
        evidence_of(), scores=(ScoreComparison(metric="mae", against="", n=900, candidate=ERROR),)
    )
    gates: tuple[Gate, ...] = (SizeGate(max=10**9), MetricGate(name="mae", max=3.0))
    assert headline([judge(gates, scored)], [scored]) == "mae"
    assert headline([judge(gates[:1], scored)], [scored]) == headline([], []) == "accuracy"
    assert headline([judge(gates[:1], scored)], [replace(scored, metrics=())]) == "mae"
    page = page_of([scored], gates)
    assert "latency and mae" in page
    assert "2.5 [2.25, 2.75]" in page
    assert "900 rows" in page


def test_sampled_rows_of_several_variants_are_reported_once() -> None:
    sampled = SampledRows(data="test", used=512, total=1000)
    two = [replace(evidence_of(name), sampled=sampled) for name in ("fp32", "int8-static")]
    assert sampled_rows(two) == "metrics of 512 of 1,000 rows of test"
    assert page_of(two).count("Metrics of 512 of 1,000 rows of test.") == 1
    assert codec.loads(codec.dumps(two[0]), Evidence) == two[0]
    assert sampled_rows([evidence_of()]) == ""
    assert b"sampled" not in codec.dumps(evidence_of())


def test_task_metric_of_baseline_comparison_returns_value_or_none_if_it_failed() -> None:
    entry = ScoreComparison(metric="cosine", against="champion", n=50, candidate=CLOSE)
    found = task_metric(replace(evidence_of(), baseline="champion", scores=(entry,)), "cosine")
    assert found is not None
    assert found.text() == "90% [80, 100]% (n = 50 rows)"
    failed = replace(entry, candidate=None, failed="NaN")
    assert (
        task_metric(replace(evidence_of(), baseline="champion", scores=(failed,)), "cosine") is None
    )


@pytest.mark.parametrize(
    ("name", "unit"),
    [
        ("accuracy", "1"),
        ("f1 macro", "1"),
        ("r2", "1"),
        ("mae", ""),
        ("rmse", ""),
        ("own:score", ""),
    ],
)
def test_unit_of_share_metric_is_1_and_of_other_metric_is_empty(name: str, unit: str) -> None:
    assert unit_of(name) == unit
