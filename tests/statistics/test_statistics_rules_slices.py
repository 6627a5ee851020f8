"""The gate on slices: verdicts of single slices, and of all of them together."""

from __future__ import annotations

from typing import Any

import pytest

from onnx_ops.domain.decision import GateResult, Verdict
from onnx_ops.domain.evidence import Interval, PairedCounts, ScoreComparison, SliceMeasurement
from onnx_ops.domain.gate import SlicesGate
from onnx_ops.statistics.rules.common import judge_gate
from tests.support.evidence import make_evidence

GATE = SlicesGate(name="accuracy", max_drop=0.05)


def measured(name: str, n: int, lost: int = 0, won: int = 0, **more: Any) -> SliceMeasurement:
    entry = PairedCounts(
        metric="accuracy",
        against="fp32",
        n=n,
        both=n - lost - won,
        only_baseline=lost,
        only_candidate=won,
        **more,
    )
    return SliceMeasurement(slice=name, rows=n, metrics=(entry,))


def judged(*slices: SliceMeasurement, gate: SlicesGate = GATE, **more: Any) -> GateResult:
    (result,) = judge_gate(gate, make_evidence(slices=slices, **more))
    return result


def test_judge_slices_that_keep_limit_passes() -> None:
    result = judged(measured("s=a", 300), measured("s=b", 200, lost=2, won=1))
    assert result.verdict is Verdict.PASS
    assert [one.slice for one in result.slices] == ["s=b", "s=a"]
    assert (result.estimate, result.n) == (-0.005, 200)


def test_judge_slices_with_large_loss_fails_and_names_slice() -> None:
    result = judged(measured("s=a", 300), measured("s=b", 200, lost=40))
    assert result.verdict is Verdict.FAIL
    assert result.slices[0].slice == "s=b"
    assert result.slices[0].verdict is Verdict.FAIL
    assert "s=b -20%" in result.reason


def test_judge_slices_corrects_for_their_number() -> None:
    harmed = measured("s=bad", 200, lost=20, won=1)
    others = [measured(f"s={number}", 200) for number in range(30)]

    assert judged(harmed).verdict is Verdict.FAIL

    result = judged(harmed, *others)
    assert result.verdict is Verdict.INCONCLUSIVE
    assert "corrected for 31 slices does not exclude the limit" in result.slices[0].reason
    assert "rows of the slice would decide it" in result.slices[0].reason


@pytest.mark.parametrize(
    ("slices", "reason"),
    [
        ((measured("s=b", 12, lost=12),), "not judged: 12 rows"),
        ((measured("s=b", 90, lost=90, groups=3),), "not judged: 90 rows in 3 groups"),
    ],
)
def test_judge_slices_with_few_rows_or_groups_returns_no_verdict_for_that_slice(
    slices: tuple[SliceMeasurement, ...], reason: str
) -> None:
    result = judged(measured("s=a", 300), *slices)
    assert result.verdict is Verdict.PASS
    assert (result.slices[-1].verdict, result.slices[-1].reason) == (None, reason)


def test_judge_slices_without_enough_rows_is_inconclusive() -> None:
    result = judged(measured("s=a", 51))
    assert result.verdict is Verdict.INCONCLUSIVE
    assert "no slice has 52 rows" in result.reason
    assert "the largest slice has 51 rows" in result.reason


def test_judge_slices_uses_min_rows_of_gate() -> None:
    gate = SlicesGate(name="accuracy", max_drop=0.05, min_rows=301)
    assert judged(measured("s=a", 300), gate=gate).slices[0].verdict is None


def test_judge_slices_without_measurement_is_inconclusive() -> None:
    assert judged().verdict is Verdict.INCONCLUSIVE


def test_judge_slices_without_comparison_with_baseline_is_inconclusive() -> None:
    results = judge_gate(GATE, make_evidence(slices=(measured("s=a", 300),), baseline="champion"))
    assert {result.metric: result.verdict for result in results} == {
        "accuracy by slice vs champion": Verdict.INCONCLUSIVE,
        "accuracy by slice vs fp32": Verdict.PASS,
    }


def test_judge_slices_of_first_export_has_no_result() -> None:
    assert list(judge_gate(GATE, make_evidence(variant="fp32"))) == []


def test_judge_slices_without_limit_is_inconclusive() -> None:
    (result,) = judge_gate(SlicesGate(), make_evidence(slices=(measured("s=a", 300),)))
    assert result.verdict is Verdict.INCONCLUSIVE


def _score(name: str, low: float, high: float, **more: Any) -> SliceMeasurement:
    middle = (low + high) / 2
    ratio = Interval(estimate=middle, low=low, high=high)
    entry = ScoreComparison(metric="rmse", against="fp32", n=100, ratio=ratio, **more)
    return SliceMeasurement(slice=name, rows=100, scores=(entry,))


def test_judge_slices_by_error_fails_where_increase_is_certain() -> None:
    gate = SlicesGate(name="rmse", max_increase=0.1)
    result = judged(_score("s=a", 0.9, 1.05), _score("s=b", 1.4, 1.6), gate=gate)
    assert [one.verdict for one in result.slices] == [Verdict.FAIL, Verdict.PASS]


def test_judge_slices_with_undefined_metric_is_inconclusive() -> None:
    entry = ScoreComparison(metric="rmse", against="", n=100, undefined="every row is alike")
    gate = SlicesGate(name="rmse", max_increase=0.1)
    undefined = SliceMeasurement(slice="s=b", rows=100, scores=(entry,))
    result = judged(_score("s=a", 0.9, 1.05), undefined, gate=gate)
    assert result.verdict is Verdict.INCONCLUSIVE
    assert "s=b: every row is alike" in result.reason
