"""Parity measured on a real network in float32 and float64, and on labels."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from onnx_ops.domain.evidence import ParityMeasurement
from onnx_ops.domain.gate import ParityGate
from onnx_ops.errors import MeasurementError
from onnx_ops.statistics.parity import LARGEST, measure_output, pool_noise
from onnx_ops.statistics.quantization import compute_weight_error

LIMIT = ParityGate().noise_factor
Array = npt.NDArray[Any]


def network(seed: int) -> list[Array]:
    rng = np.random.default_rng(seed)
    sizes = (64, 48, 32, 10)
    return [rng.normal(0, 1 / math.sqrt(a), (a, b)) for a, b in itertools.pairwise(sizes)]


def run(weights: list[Array], x: Array, dtype: Any, *, reverse: bool = False) -> Array:
    """A small MLP; `reverse` sums in another order, which is what a good export does."""
    order = slice(None, None, -1) if reverse else slice(None)
    x = x.astype(dtype)
    for i, weight in enumerate(weights):
        stored = weight.astype(np.float32).astype(dtype)
        x = (x[:, order, None] * stored[order]).sum(axis=1)
        x = np.maximum(x, 0) if i < len(weights) - 1 else x
    return x


def measured(onnx: Array, single: Array | None, double: Array | None) -> ParityMeasurement:
    return measure_output(group="real", output="y", onnx=onnx, single=single, double=double)


class TestFloats:
    @pytest.mark.parametrize("seed", range(8))
    def test_a_good_export_stays_below_the_limit(self, seed: int) -> None:
        weights, x = network(seed), np.random.default_rng(seed).normal(size=(64, 64)).astype(np.float32)
        found = measured(run(weights, x, np.float32, reverse=True), *(run(weights, x, t) for t in (np.float32, float)))
        assert 0 < found.ratio <= LIMIT
        assert (found.rows, found.mismatch) == (64, "")
        assert found.ratio == pytest.approx(found.error / found.noise)

    @pytest.mark.parametrize("fault", ["one weight", "rows swapped", "bias", "scale"])
    def test_a_wrong_export_does_not(self, fault: str) -> None:
        weights, x = network(1), np.random.default_rng(1).normal(size=(64, 64)).astype(np.float32)
        wrong = [w.copy() for w in weights]
        if fault == "one weight":
            wrong[1][3, 4] *= 1.01
        elif fault == "rows swapped":
            wrong[2][[0, 1]] = wrong[2][[1, 0]]
        elif fault == "scale":
            wrong[0] *= 1 + 1e-4
        onnx = run(wrong, x, np.float32) + np.float32(1e-4 if fault == "bias" else 0)
        assert measured(onnx, run(weights, x, np.float32), run(weights, x, float)).ratio > LIMIT

    def test_noise_floor_is_two_epsilon_of_the_largest_value(self) -> None:
        double = np.array([[1.0], [8.0]])
        found = measured(double.astype(np.float32), double.astype(np.float32), double)
        assert found.noise == pytest.approx(2 * 2.0**-23 * 8)
        assert found.ratio == 0

    def test_coarser_outputs_have_a_coarser_floor(self) -> None:
        double = np.array([[1.0 + 2.0**-12]])
        found = measured(double.astype(np.float16), double.astype(np.float32), double)
        assert found.noise == pytest.approx(2 * 2.0**-10, rel=1e-3)
        assert found.ratio <= LIMIT

    def test_shapes_must_be_equal(self) -> None:
        y = np.ones((4, 3))
        assert "(4, 1)" in measured(y[:, :1], y, y).mismatch
        assert measured(y[:0], y[:0], y[:0]) == replace(measured(y, y, y), rows=0, noise=0.0)

    def test_non_finite_values_must_be_the_same(self) -> None:
        y = np.array([[1.0, np.nan, np.inf, -np.inf]])
        assert measured(y, y, y).mismatch == ""
        for column in range(4):
            wrong = y.copy()
            wrong[0, column] = 5.0 if column else np.nan
            assert "1 of 4 values" in measured(wrong, y, y).mismatch
        assert measured(-y, y, y).mismatch

    def test_what_overflows_in_the_source_may_overflow_in_the_export(self) -> None:
        double, single = np.array([[1e39, 1.0]]), np.array([[np.inf, 1.0]], dtype=np.float32)
        found = measured(single, single, double)
        assert (found.mismatch, found.ratio) == ("", 0.0)
        assert measured(np.array([[np.nan, 1.0]]), single, double).mismatch

    def test_zero_noise_is_written_as_a_large_number(self) -> None:
        zeros = np.zeros((3, 2))
        found = measured(zeros + 1e-3, zeros, zeros)
        assert found.ratio == LARGEST
        assert measured(zeros, zeros, zeros).ratio == 0
        assert json.dumps([found.error, found.noise, found.ratio], allow_nan=False)

    def test_huge_values_stay_finite(self) -> None:
        y = np.array([[1.7e308, -1.7e308]])
        found = measured(-y, y, y)
        assert all(map(math.isfinite, (found.error, found.noise, found.ratio)))
        assert found.ratio > LIMIT

    @pytest.mark.parametrize("which", ["single", "double"])
    def test_one_answer_falls_back_on_fixed_tolerances(self, which: str) -> None:
        answer = np.array([[1.0, 100.0]])
        answers = {"single": None, "double": None} | {which: answer}
        at_limit = answer + np.array([2e-3, 0.0])
        assert measured(at_limit, **answers).ratio == pytest.approx(LIMIT)
        assert measured(answer, **answers).ratio == 0
        beyond = measured(answer + np.array([0.0, 0.2]), **answers)
        assert beyond.ratio == pytest.approx(beyond.error / beyond.noise)
        assert beyond.ratio > LIMIT

    def test_no_answer_is_a_failure_to_measure(self) -> None:
        with pytest.raises(MeasurementError, match="no answer"):
            measured(np.ones(2), None, None)
        with pytest.raises(MeasurementError, match="different shapes"):
            measured(np.ones(2), np.ones(3), np.ones(2))

    @given(
        st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=1, max_size=20),
        st.lists(st.floats(width=32), min_size=20, max_size=20),
    )
    def test_figures_are_always_finite(self, source: list[float], export: list[float]) -> None:
        double = np.array(source)
        found = measured(np.array(export[: len(source)], dtype=np.float32), double.astype(np.float32), double)
        assert all(math.isfinite(v) and v >= 0 for v in (found.error, found.noise, found.ratio))


class TestLabels:
    @pytest.mark.parametrize(
        "labels", [np.array([1, 2, 3, 4]), np.array(["a", "b", "c", "d"]), np.array([True, False, True, False])]
    )
    def test_share_of_rows_that_differ(self, labels: Array) -> None:
        onnx = labels.copy()
        assert measured(onnx, labels, labels).ratio == 0
        onnx[0] = labels[1]
        found = measured(onnx, labels, labels)
        assert (found.error, found.noise, found.ratio) == (0.25, 0.0, LARGEST)

    def test_rows_that_the_source_itself_is_unsure_of_do_not_count(self) -> None:
        assert measured(np.array([1, 2]), np.array([1, 2]), np.array([1, 3])).error == 0

    def test_a_row_counts_once(self) -> None:
        y = np.zeros((4, 5), dtype=np.int64)
        wrong = y.copy()
        wrong[2] = 1
        assert measured(wrong, y, y).error == 0.25

    def test_strings_come_in_several_types(self) -> None:
        text = np.array(["no", "yes"])
        assert measured(text.astype(object), text, text).error == 0

    def test_text_is_not_a_number(self) -> None:
        found = measured(np.array([1, 2]), np.array(["a", "b"]), np.array(["a", "b"]))
        assert "int64" in found.mismatch

    def test_no_rows_no_error(self) -> None:
        none = np.empty((0,), dtype=np.int64)
        assert measured(none, none, none).error == 0


class TestPooledNoise:
    REAL = ParityMeasurement(output="y", group="real", rows=128, error=1e-6, noise=1e-6, ratio=1.0)
    SMALL = ParityMeasurement(output="y", group="batches:1", rows=1, error=5e-7, noise=1e-8, ratio=50.0)

    def test_small_batches_take_the_noise_of_real_rows(self) -> None:
        found = pool_noise([self.SMALL, self.REAL])
        assert found == (replace(self.SMALL, noise=1e-6, ratio=0.5), self.REAL)

    @pytest.mark.parametrize(
        "change", [{"group": "spikes"}, {"rows": 64}, {"output": "z"}, {"noise": 1e-5, "ratio": 0.05}]
    )
    def test_nothing_else_does(self, change: dict[str, Any]) -> None:
        kept = replace(self.SMALL, **change)
        assert pool_noise([kept, self.REAL])[0] == kept


class TestWeights:
    def test_rounding_is_half_a_step(self) -> None:
        rng = np.random.default_rng(0)
        weight = rng.normal(size=(16, 8)).astype(np.float32)
        scale = np.abs(weight).max(axis=0, keepdims=True) / 127
        assert 0.4 < compute_weight_error(weight, np.round(weight / scale) * scale, scale) <= 0.5001

    def test_a_zero_point_off_by_one_is_seen(self) -> None:
        weight = np.linspace(-1, 1, 100)
        assert compute_weight_error(weight, (np.round(weight / 0.01) + 1) * 0.01, 0.01) > 0.99

    def test_what_is_not_finite_is_as_large_as_can_be(self) -> None:
        assert compute_weight_error([np.nan], [0.0], 1.0) == LARGEST
        assert compute_weight_error([1.0], [0.0], 0.0) == LARGEST
        assert compute_weight_error([1.0, 0.0], [1.0, 0.0], 0.0) == 0
        assert compute_weight_error([], [], 1.0) == 0

    def test_shapes_must_fit(self) -> None:
        with pytest.raises(ValueError, match="shape"):
            compute_weight_error(np.ones((2, 3)), np.ones((3, 2)), 1.0)
