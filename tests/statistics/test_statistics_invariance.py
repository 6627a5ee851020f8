"""Batch invariance as a number, and what the judge says of it."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from onnx_ops.domain.artifact import Digest
from onnx_ops.domain.decision import Decision, Verdict
from onnx_ops.domain.evidence import BatchInvariance, Evidence
from onnx_ops.domain.gate import ParityGate
from onnx_ops.domain.target import HardwareFingerprint
from onnx_ops.statistics.parity import LARGEST, measure_batch_invariance, measure_noise
from onnx_ops.statistics.rules.parity import METRIC, judge_invariance
from tests.support.golden import Golden

D = Digest("sha256:" + "0" * 64)
EVIDENCE = Evidence(
    pipeline="p",
    variant="v",
    target="cpu",
    quantized=False,
    release=D,
    manifest=D,
    target_digest=D,
    dedicated=False,
    size_bytes=1,
    hardware=HardwareFingerprint(
        machine="m", cpu_model="c", cpu_flags=(), cores=1, memory_bytes=1, runtime="r", runtime_version="1"
    ),
)
SCORES = np.random.default_rng(0).standard_normal((32, 10)).astype(np.float32)
NOISE = {"y": 1e-6}


def singles(**outputs: Any) -> list[dict[str, Any]]:
    return [{name: array[i : i + 1] for name, array in outputs.items()} for i in range(32)]


def told(*measured: BatchInvariance) -> list[Any]:
    return list(judge_invariance(ParityGate(), replace(EVIDENCE, batch_invariance=measured)))


def test_the_same_answers_are_no_distance_apart() -> None:
    (found,) = measure_batch_invariance({"y": SCORES}, singles(y=SCORES), NOISE)
    assert found == BatchInvariance(output="y", rows=32, error=0.0, ratio=0.0, changed=0.0)


def test_the_distance_is_in_units_of_the_noise_and_classes_are_counted() -> None:
    other = SCORES.copy()
    other[3, 5] += 100.0
    (found,) = measure_batch_invariance({"y": other}, singles(y=SCORES), NOISE)
    assert found.error == pytest.approx(100.0, rel=1e-5)
    assert found.ratio == pytest.approx(1e8, rel=1e-5)
    assert found.changed == (1 / 32 if SCORES[3].argmax() != 5 else 0.0)


def test_without_noise_the_unit_is_a_tenth_of_the_tolerance() -> None:
    ones = np.ones((32, 10), dtype=np.float32)
    (found,) = measure_batch_invariance({"y": ones * np.float32(1.01)}, singles(y=ones))
    assert found.ratio == pytest.approx(10 * 1e-2 / (1e-3 + 1e-5), rel=1e-3)


def test_a_value_that_is_finite_on_one_side_only_is_as_far_as_can_be() -> None:
    other = SCORES.copy()
    other[0, 0] = np.nan
    (found,) = measure_batch_invariance({"y": other}, singles(y=SCORES), NOISE)
    assert found.ratio == LARGEST


def test_nan_on_both_sides_is_no_difference() -> None:
    both = SCORES.copy()
    both[0, 0] = np.nan
    (found,) = measure_batch_invariance({"y": both}, singles(y=both), NOISE)
    assert (found.error, found.ratio) == (0.0, 0.0)


def test_a_label_alone_counts_and_beside_scores_is_as_far_as_they_are() -> None:
    labels = SCORES.argmax(1)
    other = labels.copy()
    other[:8] += 1
    (alone,) = measure_batch_invariance({"label": other}, singles(label=labels))
    assert (alone.ratio, alone.changed) == (LARGEST, 0.25)
    tie, _ = measure_batch_invariance({"label": other, "y": SCORES}, singles(label=labels, y=SCORES), NOISE)
    assert (tie.ratio, tie.changed) == (0.0, 0.25)


def test_outputs_that_have_no_entry_a_row_are_left_out() -> None:
    whole = np.ones((10,), dtype=np.float32)
    assert measure_batch_invariance({"mean": whole}, [{"mean": whole}] * 32) == ()
    assert measure_batch_invariance({"y": SCORES}, singles(other=SCORES)) == ()


def test_the_noise_is_that_of_parity_and_there_is_none_without_float64() -> None:
    double = SCORES.astype(np.float64) + 1e-4
    assert measure_noise({"y": SCORES}, {"y": double})["y"] == pytest.approx(1e-4)
    assert measure_noise({"y": SCORES}, None) == {}
    assert measure_noise({"label": SCORES.argmax(1)}, {"label": SCORES.argmax(1)}) == {}


@given(order=st.permutations(range(8)))
def test_the_order_of_rows_does_not_matter(order: list[int]) -> None:
    together, apart = SCORES[:8] + np.float32(0.25) * SCORES[8:16], SCORES[:8]
    first = measure_batch_invariance({"y": together}, [{"y": apart[i : i + 1]} for i in range(8)], NOISE)
    other = measure_batch_invariance({"y": together[order]}, [{"y": apart[i : i + 1]} for i in order], NOISE)
    assert first == other


def measured(ratio: float, **change: Any) -> BatchInvariance:
    return replace(BatchInvariance(output="y", rows=32, error=ratio * 1e-6, ratio=ratio, changed=0.0625), **change)


def test_nothing_measured_says_nothing() -> None:
    assert told() == []
    assert told(measured(99.0, rows=0)) == []


def test_dependence_is_told_and_never_enters_a_verdict(golden: Golden) -> None:
    (result,) = told(measured(1.0), measured(4e4, output="z"))
    assert (result.gate, result.metric, result.verdict, result.advisory) == ("parity", METRIC, Verdict.FAIL, True)
    golden("reasons", result.reason)
    assert Decision(variant="v", target="t", results=(result,)).verdict is Verdict.INCONCLUSIVE


def test_rounding_is_not_told() -> None:
    (result,) = told(measured(10.0))
    assert (result.verdict, result.advisory) == (Verdict.PASS, True)
    assert "do not batch" not in result.reason


@pytest.mark.parametrize("field", ["error", "ratio", "changed"])
def test_a_figure_that_is_no_number_never_passes(field: str) -> None:
    strange: dict[str, Any] = {field: math.nan}
    (result,) = told(measured(1.0), replace(measured(1.0), **strange))
    assert (result.verdict, result.advisory) == (Verdict.ERROR, True)


def test_an_output_of_one_column_has_no_classes_that_could_change() -> None:
    rows = np.linspace(0, 1, 6, dtype=np.float32).reshape(6, 1)
    (found,) = measure_batch_invariance({"y": rows}, [{"y": row[None] + np.float32(0.1)} for row in rows])
    assert found.changed is None


def test_numbers_that_are_no_classes_say_nothing_of_classes() -> None:
    (found,) = measure_batch_invariance({"y": SCORES[:, 0]}, [{"y": row[None]} for row in SCORES[:, 0]])
    assert found.changed is None
    (result,) = judge_invariance(ParityGate(), replace(EVIDENCE, batch_invariance=(found,)))
    assert "classes" not in result.reason
