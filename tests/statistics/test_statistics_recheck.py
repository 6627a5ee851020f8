"""The change of a variant since its decision."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onnx_ops.domain.decision import GateResult, Verdict, combine_verdicts
from onnx_ops.domain.evidence import Evidence, Interval, ScoreComparison
from onnx_ops.domain.execution import RuntimeFacts
from onnx_ops.domain.gate import LatencyGate, MetricGate
from onnx_ops.statistics.recheck import judge_recheck, list_environment_changes
from tests.statistics.test_statistics_judge import FP32, GATES, INT8, against, counts, parity, timed
from tests.support.golden import Golden

MS = 1_000_000
INT8_NOW = replace(
    INT8, baseline="", comparisons=(against("fp32", 0.7),), metrics=(counts(""), counts("fp32"))
)
"""The same files measured again: a champion is compared with its export only."""


def verdict(results: tuple[GateResult, ...]) -> Verdict:
    return combine_verdicts(result.verdict for result in results if not result.advisory)


def result(results: tuple[GateResult, ...], metric: str) -> GateResult:
    (found,) = [one for one in results if one.metric == metric]
    return found


def slower(factor: float, evidence: Evidence = INT8_NOW) -> Evidence:
    return replace(evidence, latency=timed(*[int(factor * MS)] * 400))


def relative(ratio: float) -> Evidence:
    return replace(INT8_NOW, comparisons=(against("fp32", ratio),))


@pytest.mark.parametrize(("then", "now"), [(INT8, INT8_NOW), (FP32, FP32)], ids=["int8", "fp32"])
def test_judge_recheck_of_unchanged_evidence_passes(then: Evidence, now: Evidence) -> None:
    found = judge_recheck(GATES, then, now)
    assert verdict(found) is Verdict.PASS, found
    assert list_environment_changes(then, now) == ()


@pytest.mark.parametrize(
    ("ratio", "expected"),
    [(0.7, Verdict.PASS), (0.6, Verdict.PASS), (0.735, Verdict.INCONCLUSIVE), (0.8, Verdict.FAIL)],
)
def test_judge_recheck_of_ratio_against_export_applies_latency_limit(
    ratio: float, expected: Verdict
) -> None:
    found = result(judge_recheck(GATES, INT8, relative(ratio)), "ratio vs fp32 since")
    assert found.verdict is expected, found
    assert found.estimate == pytest.approx(ratio / 0.7, rel=0.01)
    assert "0.7x of fp32 then" in found.reason


@pytest.mark.parametrize(
    ("factor", "expected"), [(1.0, Verdict.PASS), (1.04, Verdict.PASS), (1.06, Verdict.FAIL)]
)
def test_judge_recheck_of_median_latency_binds_on_dedicated_machine_only(
    factor: float, expected: Verdict
) -> None:
    found = judge_recheck(GATES, INT8, slower(factor))
    assert result(found, "p50 since").verdict is expected
    assert verdict(found) is expected
    shared = replace(slower(factor), dedicated=False)
    assert result(judge_recheck(GATES, INT8, shared), "p50 since").advisory
    assert verdict(judge_recheck(GATES, INT8, shared)) is Verdict.PASS


def test_judge_recheck_with_wide_latency_interval_is_inconclusive() -> None:
    spread = tuple(int(MS * (0.8 + 0.5 * k / 40)) for k in range(40))
    now = replace(INT8_NOW, latency=timed(*spread))
    assert result(judge_recheck(GATES, INT8, now), "p50 since").verdict is Verdict.INCONCLUSIVE


def test_judge_recheck_without_limit_of_change_returns_no_change_results() -> None:
    gates = (LatencyGate(p99=0.002), MetricGate(min=0.9))
    assert not [
        one for one in judge_recheck(gates, INT8, slower(1.5)) if one.metric.endswith("since")
    ]


@pytest.mark.parametrize(
    ("lost", "expected"), [(0, Verdict.PASS), (20, Verdict.PASS), (21, Verdict.FAIL)]
)
def test_judge_recheck_of_accuracy_on_same_rows_compares_exact_counts(
    lost: int, expected: Verdict
) -> None:
    now = replace(INT8_NOW, metrics=(replace(counts(""), both=1920 - lost), counts("fp32")))
    found = result(judge_recheck(GATES, INT8, now), "accuracy since")
    assert found.verdict is expected
    assert found.estimate == pytest.approx(-lost / 2000)


def test_judge_recheck_with_other_rows_skips_accuracy() -> None:
    now = replace(INT8_NOW, metrics=(counts("", n=1000), counts("fp32", n=1000)))
    assert not [one for one in judge_recheck(GATES, INT8, now) if one.metric == "accuracy since"]


def score(value: float) -> ScoreComparison:
    return ScoreComparison(
        metric="mae", against="", n=500, candidate=Interval(estimate=value, low=value, high=value)
    )


@pytest.mark.parametrize(
    ("then", "now", "expected"),
    [
        (1.0, 1.05, Verdict.PASS),
        (1.0, 1.2, Verdict.FAIL),
        (1.0, 0.5, Verdict.PASS),
        (0.0, 1.0, None),
    ],
)
def test_judge_recheck_of_error_metric_applies_max_increase_unless_error_was_zero(
    then: float, now: float, expected: Verdict | None
) -> None:
    gates = (MetricGate(name="mae", max_increase=0.1),)
    old, new = (
        replace(one, metrics=(), scores=(score(v),)) for one, v in ((INT8, then), (INT8_NOW, now))
    )
    found = [one.verdict for one in judge_recheck(gates, old, new) if one.metric == "mae since"]
    assert found == ([] if expected is None else [expected])


def test_judge_recheck_of_float_champion_with_changed_outputs_fails() -> None:
    found = judge_recheck(GATES, FP32, replace(FP32, parity=(parity(1e4),)))
    assert verdict(found) is Verdict.FAIL
    assert result(found, "outputs").verdict is Verdict.FAIL


def test_judge_recheck_of_initial_failure_against_export_is_advisory(golden: Golden) -> None:
    """The variant was chosen for its size, although it was slower than its export.

    It passed against the champion at that time, and replaced it.
    """
    then = replace(INT8, comparisons=(against("fp32", 1.5), against("champion", 0.9)))
    found = judge_recheck(GATES, then, relative(1.5))
    failure = result(found, "ratio vs fp32")
    assert (failure.verdict, failure.advisory) == (Verdict.FAIL, True)
    golden("reasons", failure.reason)
    assert verdict(found) is Verdict.PASS
    assert verdict(judge_recheck(GATES, then, relative(1.7))) is Verdict.FAIL


def test_judge_recheck_with_failed_or_missing_measurement_is_error_or_inconclusive() -> None:
    assert (
        verdict(judge_recheck(GATES, INT8, replace(INT8_NOW, failure="no provider here")))
        is Verdict.ERROR
    )
    assert (
        verdict(judge_recheck(GATES, INT8, replace(INT8_NOW, comparisons=())))
        is Verdict.INCONCLUSIVE
    )


def test_list_environment_changes_names_runtime_and_hardware(golden: Golden) -> None:
    hardware = replace(
        INT8.hardware, runtime_version="2", cpu_model="other", memory_bytes=8 * 2**30, driver="550"
    )
    facts = RuntimeFacts(
        runtime="onnxruntime", version="2", asked=(), used=("A", "B"), nodes={}, build="b"
    )
    golden(
        "reasons",
        "\n".join(list_environment_changes(INT8, replace(INT8, hardware=hardware, runtime=facts))),
    )


@given(st.floats(0.01, 100), st.floats(0.01, 100))
def test_judge_recheck_of_slower_champion_never_improves_verdict(one: float, other: float) -> None:
    """The verdicts have the same order as the ratios."""
    ranks = {Verdict.PASS: 0, Verdict.INCONCLUSIVE: 1, Verdict.FAIL: 2}
    low, high = sorted((one, other))
    found = [
        result(judge_recheck(GATES, INT8, relative(r)), "ratio vs fp32 since") for r in (low, high)
    ]
    assert ranks[found[0].verdict] <= ranks[found[1].verdict]
    for moved in found:
        assert moved.low is not None
        assert moved.high is not None
        assert moved.low <= (moved.estimate or math.nan) <= moved.high
