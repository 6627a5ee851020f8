"""Parity measured on a small network in float32 and float64, and on labels."""

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

from onnx_ops.domain.decision import Decision, Verdict
from onnx_ops.domain.evidence import BatchInvariance, Divergence, ParityMeasurement
from onnx_ops.domain.gate import ParityGate
from onnx_ops.errors import MeasurementError
from onnx_ops.statistics.output_columns import LARGEST, MAX_COLUMNS, Rounding, measure_columns
from onnx_ops.statistics.parity import (
    DIVERGENCE_FACTOR,
    find_first_divergence,
    find_worst_row,
    is_divergent,
    measure_batch_invariance,
    measure_noise,
    measure_output,
    pick_evenly,
    select_rows,
)
from onnx_ops.statistics.quantization import compute_weight_error
from onnx_ops.statistics.ranking_ties import is_ranked_by_scores
from onnx_ops.statistics.rules.parity import judge_invariance, judge_parity
from onnx_ops.statistics.rules.parity_rules import BATCH_INVARIANCE
from tests.support.evidence import make_evidence
from tests.support.golden import Golden

LIMIT = ParityGate().noise_factor
Array = npt.NDArray[Any]


def network(seed: int) -> list[Array]:
    rng = np.random.default_rng(seed)
    sizes = (64, 48, 32, 10)
    return [rng.normal(0, 1 / math.sqrt(a), (a, b)) for a, b in itertools.pairwise(sizes)]


def run(weights: list[Array], x: Array, dtype: Any, *, reverse: bool = False) -> Array:
    """Run a small MLP; `reverse` sums in another order, as a correct export does."""
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
    def test_measure_output_of_correct_export_stays_below_limit(self, seed: int) -> None:
        weights, x = (
            network(seed),
            np.random.default_rng(seed).normal(size=(64, 64)).astype(np.float32),
        )
        found = measured(
            run(weights, x, np.float32, reverse=True),
            *(run(weights, x, t) for t in (np.float32, float)),
        )
        assert 0 < found.ratio <= LIMIT
        assert (found.rows, found.mismatch) == (64, "")
        assert found.ratio == pytest.approx(found.error / found.noise)

    @pytest.mark.parametrize("fault", ["one weight", "rows swapped", "bias", "scale"])
    def test_measure_output_of_wrong_export_exceeds_limit(self, fault: str) -> None:
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

    @pytest.mark.parametrize(
        ("dtype", "double", "noise"),
        [(np.float32, [1.0, 8.0], 2 * 2.0**-23 * 8), (np.float16, [1.0 + 2.0**-12], 2 * 2.0**-10)],
    )
    def test_measure_output_noise_floor_is_two_epsilon_of_largest_value(
        self, dtype: Any, double: list[float], noise: float
    ) -> None:
        exact = np.array(double)
        found = measured(exact.astype(dtype), exact.astype(np.float32), exact)
        assert found.noise == pytest.approx(noise, rel=1e-3)
        assert found.ratio <= LIMIT

    def test_measure_output_of_other_shape_reports_mismatch_and_of_zero_rows_matches(
        self,
    ) -> None:
        y = np.ones((4, 3))
        assert "(4, 1)" in measured(y[:, :1], y, y).mismatch
        without_rows = measured(y[:0], y[:0], y[:0])
        assert without_rows == replace(measured(y, y, y), rows=0, noise=0.0, scale=0.0, columns=())

    def test_measure_output_with_different_nonfinite_values_reports_mismatch(self) -> None:
        y = np.array([[1.0, np.nan, np.inf, -np.inf]])
        assert measured(y, y, y).mismatch == ""
        for column in range(4):
            wrong = y.copy()
            wrong[0, column] = 5.0 if column else np.nan
            assert "1 of 4 values" in measured(wrong, y, y).mismatch
        assert measured(-y, y, y).mismatch

    def test_measure_output_with_overflow_in_float32_source_allows_overflow(self) -> None:
        double, single = np.array([[1e39, 1.0]]), np.array([[np.inf, 1.0]], dtype=np.float32)
        found = measured(single, single, double)
        assert (found.mismatch, found.ratio) == ("", 0.0)
        assert measured(np.array([[np.nan, 1.0]]), single, double).mismatch

    @pytest.mark.parametrize(
        ("onnx", "source"), [([1e-3], [0.0]), ([-1.7e308, 1.7e308], [1.7e308, -1.7e308])]
    )
    def test_measure_output_with_zero_noise_or_huge_values_returns_finite_ratio(
        self, onnx: list[float], source: list[float]
    ) -> None:
        found = measured(np.array(onnx), np.array(source), np.array(source))
        assert json.dumps([found.error, found.noise, found.ratio], allow_nan=False)
        assert LIMIT < found.ratio <= LARGEST
        assert measured(np.zeros(3), np.zeros(3), np.zeros(3)).ratio == 0

    @pytest.mark.parametrize("which", ["single", "double"])
    def test_measure_output_with_one_source_precision_uses_fixed_tolerances(
        self, which: str
    ) -> None:
        answer = np.array([[1.0, 100.0]])
        answers = {"single": None, "double": None} | {which: answer}
        at_limit = answer + np.array([2e-3, 0.0])
        assert measured(at_limit, **answers).ratio == pytest.approx(LIMIT)
        assert measured(answer, **answers).ratio == 0
        beyond = measured(answer + np.array([0.0, 0.2]), **answers)
        assert beyond.ratio == pytest.approx(beyond.error / beyond.noise)
        assert beyond.ratio > LIMIT

    def test_measure_output_without_usable_source_raises_measurement_error(self) -> None:
        with pytest.raises(MeasurementError, match="no answer"):
            measured(np.ones(2), None, None)
        with pytest.raises(MeasurementError, match="different shapes"):
            measured(np.ones(2), np.ones(3), np.ones(2))

    @given(
        st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=1, max_size=20),
        st.lists(st.floats(width=32), min_size=20, max_size=20),
    )
    def test_measure_output_of_any_values_returns_finite_numbers(
        self, source: list[float], export: list[float]
    ) -> None:
        double = np.array(source)
        found = measured(
            np.array(export[: len(source)], dtype=np.float32), double.astype(np.float32), double
        )
        assert all(math.isfinite(v) and v >= 0 for v in (found.error, found.noise, found.ratio))


class TestLabels:
    @pytest.mark.parametrize(
        "labels",
        [
            np.array([1, 2, 3, 4]),
            np.array(["a", "b", "c", "d"]),
            np.array([True, False, True, False]),
        ],
    )
    def test_measure_output_of_labels_returns_share_of_different_rows(self, labels: Array) -> None:
        onnx = labels.copy()
        assert measured(onnx, labels, labels).ratio == 0
        onnx[0] = labels[1]
        found = measured(onnx, labels, labels)
        assert (found.error, found.noise, found.ratio) == (0.25, 0.0, LARGEST)

    NONE, ZEROS, TEXT = (
        np.empty((0,), dtype=np.int64),
        np.zeros((4, 5), dtype=np.int64),
        np.array(["no", "yes"]),
    )

    @pytest.mark.parametrize(
        ("onnx", "single", "double", "error"),
        [
            pytest.param([1, 2], [1, 2], [1, 3], 0, id="a row that the source itself is unsure of"),
            pytest.param(
                ZEROS + (np.arange(4) == 2)[:, None], ZEROS, ZEROS, 0.25, id="a row counts once"
            ),
            pytest.param(TEXT.astype(object), TEXT, TEXT, 0, id="texts of several types"),
            pytest.param(NONE, NONE, NONE, 0, id="no rows"),
        ],
    )
    def test_measure_output_of_labels_counts_each_wrong_row_once_if_source_is_sure_of_it(
        self, onnx: Any, single: Any, double: Any, error: float
    ) -> None:
        assert measured(*map(np.asarray, (onnx, single, double))).error == error

    def test_measure_output_of_numbers_against_text_reports_mismatch(self) -> None:
        assert "int64" in measured(np.array([1, 2]), self.TEXT, self.TEXT).mismatch


HEADS = np.array([2e4, 15.0, 0.3])
"""Magnitudes of three columns of one output."""


def answer_heads(rows: int = 256, *, seed: int = 0) -> tuple[Array, Array, Array]:
    """Return an export's output, and the source's in float32 and in float64.

    The export is correct. Each column has a separate rounding error.
    """
    rng = np.random.default_rng(seed)
    double = HEADS * rng.uniform(0.5, 1.5, (rows, 3))
    onnx, single = (double * (1 + rng.uniform(-1, 1, double.shape) * 2.0**-23) for _ in range(2))
    return onnx.astype(np.float32), single.astype(np.float32), double


class TestColumns:
    FLOORS = Rounding(floor=np.broadcast_to(HEADS * 2.0**-23, (256, 3)))

    def measure(self, onnx: Array, rounding: Rounding, *, group: str = "real") -> ParityMeasurement:
        _, single, double = answer_heads()
        return measure_output(
            group=group, output="y", onnx=onnx, single=single, double=double, rounding=rounding
        )

    def test_measure_output_of_columns_of_different_scale_stays_below_limit(self) -> None:
        assert self.measure(answer_heads()[0], self.FLOORS).ratio <= LIMIT / 4

    @pytest.mark.parametrize("head", range(3))
    @pytest.mark.parametrize("share", [0.05, 0.01, 1e-4])
    def test_measure_output_with_wrong_column_of_any_scale_exceeds_limit(
        self, head: int, share: float
    ) -> None:
        onnx = answer_heads()[0]
        onnx[:, head] *= 1 + share
        measurement = self.measure(onnx, self.FLOORS)
        assert measurement.ratio > LIMIT
        assert measurement.column == f"column {head}"
        assert measurement.scale == pytest.approx(1.5 * HEADS[head], rel=0.05)

    @pytest.mark.parametrize(("head", "is_seen"), [(0, True), (2, False)])
    def test_measure_output_without_floor_uses_scale_of_largest_column(
        self, head: int, is_seen: bool
    ) -> None:
        onnx = answer_heads()[0]
        onnx[:, head] += 0.01 * HEADS[head]
        unknown = Rounding()
        assert (self.measure(onnx, unknown).ratio > LIMIT) is is_seen

    def test_measure_output_with_wide_rounding_floor_allows_error_of_column(self) -> None:
        onnx, *_ = answer_heads()
        onnx[:, 2] += 5e-6
        wide = Rounding(floor=np.broadcast_to(np.array([0, 0, 1e-6]), (256, 3)))
        assert self.measure(onnx, self.FLOORS).ratio > LIMIT
        assert self.measure(onnx, wide).ratio < LIMIT

    def test_measure_output_with_nonfinite_floor_ignores_it(self) -> None:
        onnx, *_ = answer_heads()
        onnx[:, 1] *= 1.01
        floor = np.array(self.FLOORS.floor)
        floor[0], floor[1] = np.inf, np.nan
        assert self.measure(onnx, Rounding(floor=floor)).ratio > LIMIT

    def test_measure_output_lists_columns_for_real_rows_only(self) -> None:
        measurement = self.measure(answer_heads()[0], self.FLOORS)
        assert [column.column for column in measurement.columns] == [
            "column 0",
            "column 1",
            "column 2",
        ]
        assert all(column.noise < 1e-6 * column.scale for column in measurement.columns)
        assert self.measure(answer_heads()[0], self.FLOORS, group="range").columns == ()

    @pytest.mark.parametrize(
        ("axis", "name"), [(1, "channel 2"), (-1, "column 4"), (3, "column 4")]
    )
    def test_measure_output_with_column_axis_names_column_along_it(
        self, axis: int, name: str
    ) -> None:
        double = np.ones((8, 3, 2, 5))
        onnx = double.copy()
        onnx[3, 2, 1, 4] += 0.1
        rounding = Rounding(floor=np.zeros(double.shape), axis=axis)
        measurement = measure_output(
            group="real", output="y", onnx=onnx, single=double, double=double, rounding=rounding
        )
        assert measurement.column == name

    def test_measure_output_with_segments_judges_joined_parts_separately(self) -> None:
        double = np.concatenate([np.full((64, 4, 10), 640.0), np.full((64, 2, 10), 0.5)], axis=1)
        segments = np.repeat([[0] * 4 + [1] * 2], 64, axis=0)[..., None].repeat(10, axis=2)
        onnx = double.copy()
        onnx[:, 4:] *= 1.00001
        for rounding, is_seen in (
            (Rounding(floor=np.zeros(double.shape)), False),
            (Rounding(floor=np.zeros(double.shape), segments=segments), True),
        ):
            measurement = measure_output(
                group="real", output="y", onnx=onnx, single=double, double=double, rounding=rounding
            )
            assert (measurement.ratio > LIMIT) is is_seen
            assert not is_seen or measurement.column == "segment 1, column 9"

    def test_measure_output_of_few_rows_uses_noise_and_scale_of_real_rows(self) -> None:
        _, single, double = answer_heads()
        double[0], single[0] = 1e-3 * HEADS, 1e-3 * HEADS
        floors = Rounding(floor=np.zeros((1, 3)))
        known = measure_columns(single, double, Rounding(floor=np.zeros((256, 3))))
        onnx = double[:1] * (1 + 2e-4)
        alone, with_real = (
            measure_output(
                group="batches:1",
                output="y",
                onnx=onnx,
                single=single[:1],
                double=double[:1],
                rounding=floors,
                known=columns,
            )
            for columns in (None, known)
        )
        assert alone.ratio > LIMIT > with_real.ratio

    @pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
    def test_measure_output_shares_source_rounding_among_columns_of_one_scale_only(
        self, scale: float
    ) -> None:
        double = scale * np.linspace(1, 9, 6) * np.ones((128, 1))
        single, onnx = double.copy(), double.copy()
        single[5, 0] += 1e-4 * scale
        onnx[7, 3] += 5e-4 * scale
        rounding = Rounding(floor=np.zeros(double.shape))
        measurement = measure_output(
            group="real", output="y", onnx=onnx, single=single, double=double, rounding=rounding
        )
        assert measurement.ratio == pytest.approx(5)
        onnx[:, 0] = double[:, 0]
        apart = double.copy()
        apart[:, 3] *= 1e-3
        moved = apart.copy()
        moved[7, 3] += 5e-4 * scale
        single = apart.copy()
        single[5, 0] += 1e-4 * scale
        measurement = measure_output(
            group="real", output="y", onnx=moved, single=single, double=apart, rounding=rounding
        )
        assert measurement.ratio > LIMIT

    def test_measure_output_above_max_columns_shares_floors_by_scale(self) -> None:
        double = np.ones((2, MAX_COLUMNS + 1))
        onnx, floor = double.copy(), np.zeros(double.shape)
        onnx[0, 7] += 1e-3
        floor[:, 8] = 2e-4
        for width, is_seen in ((MAX_COLUMNS + 1, False), (MAX_COLUMNS, True)):
            measurement = measure_output(
                group="real",
                output="y",
                onnx=onnx[:, :width],
                single=double[:, :width],
                double=double[:, :width],
                rounding=Rounding(floor=floor[:, :width]),
            )
            assert (measurement.ratio > LIMIT) is is_seen

    @pytest.mark.parametrize("head", range(3))
    def test_measure_output_with_one_source_applies_tolerance_to_each_column(
        self, head: int
    ) -> None:
        _, single, _ = answer_heads()
        for share, is_seen in ((0.01, True), (5e-4, False)):
            onnx = single.copy()
            onnx[:, head] *= 1 + share
            measurement = measure_output(
                group="real",
                output="y",
                onnx=onnx,
                single=single,
                double=None,
                rounding=self.FLOORS,
            )
            assert (measurement.ratio > LIMIT) is is_seen

    def test_measure_output_with_one_source_widens_tolerance_by_floor(self) -> None:
        single = np.full((8, 1), 1e-6)
        for floor, is_seen in ((0.0, True), (6e-8, False)):
            measurement = measure_output(
                group="real",
                output="y",
                onnx=single + 1e-7,
                single=single,
                double=None,
                rounding=Rounding(floor=np.full(single.shape, floor)),
            )
            assert (measurement.ratio > LIMIT) is is_seen


def rank(scores: Array, count: int) -> Array:
    return np.argsort(-scores, axis=-1, kind="stable")[:, :count]


class TestTies:
    SCORES_OF = np.random.default_rng(0).normal(size=(64, 20))
    ERRORS = np.full((64, 20), 1e-6)

    def measure(self, onnx: Array, expected: Array, **rounding: Any) -> ParityMeasurement:
        known = Rounding(**{"scores": self.SCORES_OF, "scores_error": self.ERRORS, **rounding})
        return measure_output(
            group="real", output="i", onnx=onnx, single=expected, double=expected, rounding=known
        )

    @pytest.mark.parametrize(("gap", "is_seen"), [(1e-6, False), (1e-4, True)])
    def test_measure_output_with_exchanged_indices_allows_tied_scores_only(
        self, gap: float, is_seen: bool
    ) -> None:
        expected = rank(self.SCORES_OF, 5)
        scores = self.SCORES_OF.copy()
        scores[3, expected[3, 1]] = scores[3, expected[3, 0]] - gap
        onnx = expected.copy()
        onnx[3, :2] = expected[3, 1::-1]
        measurement = self.measure(onnx, expected, scores=scores)
        assert (measurement.ratio > LIMIT) is is_seen
        assert measurement.explained == (not is_seen)

    def test_measure_output_with_one_exchange_without_tie_exceeds_limit(self) -> None:
        expected = rank(self.SCORES_OF, 5)
        onnx = expected.copy()
        onnx[9, [2, 3]] = expected[9, [3, 2]]
        assert self.measure(onnx, expected).ratio == LARGEST

    @pytest.mark.parametrize("wrong", [-1, 20, 10**12])
    def test_measure_output_with_index_out_of_range_exceeds_limit(self, wrong: int) -> None:
        flat = {"scores": np.zeros((64, 20)), "scores_error": self.ERRORS}
        expected = rank(self.SCORES_OF, 1)[:, 0]
        onnx = expected.copy()
        onnx[0] = wrong
        assert self.measure(onnx, expected, **flat).ratio == LARGEST

    def test_measure_output_with_repeated_index_exceeds_limit(self) -> None:
        flat = {"scores": np.zeros((64, 20)), "scores_error": self.ERRORS}
        expected = rank(self.SCORES_OF, 5)
        onnx = expected.copy()
        onnx[4, 1] = onnx[4, 0]
        assert self.measure(onnx, expected, **flat).ratio == LARGEST
        onnx[4, :2] = expected[4, 1::-1]
        assert self.measure(onnx, expected, **flat).ratio == 0

    @pytest.mark.parametrize("dtype", [np.str_, np.int64])
    def test_measure_output_of_classes_allows_ties_by_scores_of_their_indices(
        self, dtype: Any
    ) -> None:
        labels = np.arange(100, 120)[::-1].astype(dtype)
        scores = self.SCORES_OF.copy()
        first, second = rank(scores, 2)[5]
        scores[5, second] = scores[5, first]
        expected = labels[rank(self.SCORES_OF, 1)[:, 0]]
        onnx = expected.copy()
        onnx[5] = labels[second]
        assert self.measure(onnx, expected, scores=scores, labels=labels).ratio == 0
        onnx[6] = 7
        assert self.measure(onnx, expected, scores=scores, labels=labels).ratio == LARGEST

    @pytest.mark.parametrize(
        ("scores", "double", "ranks"),
        [
            pytest.param(SCORES_OF, np.arange(64) % 2, True, id="different scores"),
            pytest.param(
                np.zeros((64, 20)), np.arange(64) % 2, False, id="the same score for everything"
            ),
            pytest.param(np.zeros((64, 20)), np.zeros(64, int), False, id="and one answer"),
            pytest.param(
                np.arange(64.0)[:, None].repeat(20, 1),
                np.zeros(64, int),
                True,
                id="one answer, other rows",
            ),
            pytest.param(
                np.arange(64.0)[:, None].repeat(20, 1), np.arange(64) % 2, False, id="a lost class"
            ),
        ],
    )
    def test_is_ranked_by_scores_returns_true_for_unsure_source_or_if_scores_explain_answers(
        self, scores: Array, double: Array, ranks: bool
    ) -> None:
        rounding = Rounding(scores=scores, scores_error=self.ERRORS)
        assert is_ranked_by_scores(double, double, rounding) is ranks
        unsure = 1 - double
        assert is_ranked_by_scores(unsure, double, rounding)


class TestWeights:
    def test_compute_weight_error_of_zero_point_off_by_one_exceeds_half_step(self) -> None:
        weight = np.random.default_rng(0).normal(size=(16, 8)).astype(np.float32)
        scale = np.abs(weight).max(axis=0, keepdims=True) / 127
        assert 0.4 < compute_weight_error(weight, np.round(weight / scale) * scale, scale) <= 0.5001
        assert compute_weight_error(weight, (np.round(weight / scale) + 1) * scale, scale) > 0.99

    @pytest.mark.parametrize(
        ("original", "dequantized", "scale", "steps"),
        [
            ([np.nan], [0.0], 1.0, LARGEST),
            ([1.0], [0.0], 0.0, LARGEST),
            ([1.0, 0.0], [1.0, 0.0], 0.0, 0),
            ([], [], 1, 0),
        ],
    )
    def test_compute_weight_error_with_nan_or_zero_scale_is_largest_and_of_equal_weights_zero(
        self, original: list[float], dequantized: list[float], scale: float, steps: float
    ) -> None:
        assert compute_weight_error(original, dequantized, scale) == steps

    def test_compute_weight_error_of_different_shapes_raises_value_error(self) -> None:
        with pytest.raises(ValueError, match="shape"):
            compute_weight_error(np.ones((2, 3)), np.ones((3, 2)), 1.0)


NAMES = ["a", "b", "c", "d"]
DOUBLE = {name: np.random.default_rng(i).standard_normal((32, 6)) for i, name in enumerate(NAMES)}
SINGLE = {name: array.astype(np.float32) for name, array in DOUBLE.items()}


def test_find_first_divergence_of_rounding_only_returns_none() -> None:
    rounded = {name: np.nextafter(array, np.float32(9)) for name, array in SINGLE.items()}
    assert find_first_divergence(NAMES, rounded, SINGLE, DOUBLE) is None
    assert find_first_divergence(NAMES, SINGLE, SINGLE) is None


@pytest.mark.parametrize("double", [DOUBLE, None])
@given(first=st.integers(0, 3))
def test_find_first_divergence_returns_first_wrong_name_in_order(
    double: dict[str, object] | None, first: int
) -> None:
    wrong = {
        name: array + np.float32(0.5 * (i >= first))
        for i, (name, array) in enumerate(SINGLE.items())
    }
    found = find_first_divergence(NAMES, wrong, SINGLE, double)  # type: ignore[arg-type]
    assert found is not None
    assert found[0] == NAMES[first]
    assert found[1] > DIVERGENCE_FACTOR


def test_find_first_divergence_with_other_shape_or_nan_returns_largest() -> None:
    for wrong in (SINGLE["b"].T, np.full((32, 6), np.nan, dtype=np.float32)):
        assert find_first_divergence(NAMES, SINGLE | {"b": wrong}, SINGLE, DOUBLE) == ("b", LARGEST)


def test_find_first_divergence_skips_booleans_and_values_that_only_one_model_has() -> None:
    flags = {"a": SINGLE["a"] > 0}
    assert find_first_divergence(["a", "e"], {"a": ~flags["a"], "e": SINGLE["a"]}, flags) is None


def test_is_divergent_with_nan_ratio_returns_true() -> None:
    measured = ParityMeasurement(
        output="y", group="real", rows=1, error=0.0, noise=0.0, ratio=float("nan")
    )
    assert is_divergent(measured)


@given(count=st.integers(0, 300), limit=st.integers(1, 64))
def test_pick_evenly_keeps_order_and_last_name(count: int, limit: int) -> None:
    names = [str(index) for index in range(count)]
    chosen = pick_evenly(names, limit)
    assert chosen == sorted(set(chosen), key=int)
    assert len(chosen) == min(count, limit)
    assert chosen[-1:] == names[-1:]


@given(count=st.integers(1, 300), worst=st.integers(0, 299))
def test_select_rows_of_any_count_includes_worst_row(count: int, worst: int) -> None:
    reference = np.zeros((count, 3), dtype=np.float32)
    onnx = reference.copy()
    onnx[worst % count, 1] = 7.0
    chosen = select_rows(onnx, reference)
    assert worst % count in chosen
    assert len(chosen) <= 32
    assert set(chosen) <= set(range(count))


def test_select_rows_with_other_shape_returns_31_rows() -> None:
    assert len(select_rows(np.zeros((3, 4)), np.zeros((100, 4)))) == 31


def reason(divergence: Divergence | None, ratio: float = 5000.0, quantized: bool = False) -> str:
    measured = ParityMeasurement(
        output="y", group="real", rows=128, error=ratio * 1e-6, noise=1e-6, ratio=ratio
    )
    evidence = make_evidence(
        quantized=quantized, parity=(measured,), export_parity=(measured,), divergence=divergence
    )
    result = next(judge_parity(ParityGate(), evidence))
    assert result.verdict is (Verdict.PASS if ratio <= 10 else Verdict.FAIL)
    return result.reason


@pytest.mark.parametrize("quantized", [False, True])
def test_judge_parity_with_divergence_names_node_and_module(quantized: bool) -> None:
    place = Divergence(node="node_conv2d_1", op_type="Conv", scope="features.2", ratio=5e5)
    ending = "; first diverging node: node_conv2d_1 (Conv) in module features.2"
    assert reason(place, quantized=quantized).endswith(ending)
    assert reason(Divergence(node="n", op_type="Gemm", ratio=1e3)).endswith(
        "; first diverging node: n (Gemm)"
    )


def test_judge_parity_without_diverging_node_explains_why(golden: Golden) -> None:
    golden("reasons", reason(Divergence(note="the source shows\nno intermediate values")))


def test_judge_parity_of_passing_or_untraced_export_names_no_node() -> None:
    assert "diverging" not in reason(Divergence(node="n", op_type="Conv", ratio=99.0), ratio=3.0)
    assert "diverging" not in reason(None)


def test_find_worst_row_prefers_one_sided_nan_to_largest_difference() -> None:
    reference = np.array([[1.0, 2.0], [3.0, np.nan], [5.0, np.inf]])
    assert find_worst_row(np.array([[1.0, 2.5], [3.0, np.nan], [5.1, np.inf]]), reference) == 0
    assert find_worst_row(np.array([[1.0, 9.0], [3.0, 1.0], [5.0, np.inf]]), reference) == 1
    assert find_worst_row(np.array(["a", "b"]), np.array(["a", "c"])) == 1


SCORES = np.random.default_rng(0).standard_normal((32, 10)).astype(np.float32)
NOISE = {"y": 1e-6}


def singles(**outputs: Any) -> list[dict[str, Any]]:
    return [{name: array[i : i + 1] for name, array in outputs.items()} for i in range(32)]


def invariance_results(*measured_in_batches: BatchInvariance) -> list[Any]:
    return list(judge_invariance(ParityGate(), make_evidence(batch_invariance=measured_in_batches)))


def test_measure_batch_invariance_of_equal_answers_returns_zero() -> None:
    (found,) = measure_batch_invariance({"y": SCORES}, singles(y=SCORES), NOISE)
    assert found == BatchInvariance(output="y", rows=32, error=0.0, ratio=0.0, changed=0.0)


def test_measure_batch_invariance_returns_ratio_to_noise_and_changed_classes() -> None:
    other = SCORES.copy()
    other[3, 5] += 100.0
    (found,) = measure_batch_invariance({"y": other}, singles(y=SCORES), NOISE)
    assert found.error == pytest.approx(100.0, rel=1e-5)
    assert found.ratio == pytest.approx(1e8, rel=1e-5)
    assert found.changed == (1 / 32 if SCORES[3].argmax() != 5 else 0.0)


ONES = np.ones((32, 10), dtype=np.float32)
MISSING = np.where(np.arange(320).reshape(32, 10) == 0, np.float32(np.nan), SCORES)


@pytest.mark.parametrize(
    ("together", "alone", "noise", "ratio"),
    [
        pytest.param(
            1.01 * ONES,
            ONES,
            None,
            10 * 1e-2 / (1e-3 + 1e-5),
            id="a tenth of the tolerance without noise",
        ),
        pytest.param(MISSING, SCORES, NOISE, LARGEST, id="finite on one side only"),
        pytest.param(MISSING, MISSING, NOISE, 0.0, id="NaN on both sides"),
    ],
)
def test_measure_batch_invariance_uses_tolerance_without_noise_and_largest_for_one_sided_nan(
    together: Array, alone: Array, noise: dict[str, float] | None, ratio: float
) -> None:
    (found,) = measure_batch_invariance({"y": together}, singles(y=alone), noise)
    assert found.ratio == pytest.approx(ratio, rel=1e-3)


def test_measure_batch_invariance_of_labels_takes_ratio_of_scores_if_present() -> None:
    labels = SCORES.argmax(1)
    other = labels.copy()
    other[:8] += 1
    (alone,) = measure_batch_invariance({"label": other}, singles(label=labels))
    assert (alone.ratio, alone.changed) == (LARGEST, 0.25)
    tie, _ = measure_batch_invariance(
        {"label": other, "y": SCORES}, singles(label=labels, y=SCORES), NOISE
    )
    assert (tie.ratio, tie.changed) == (0.0, 0.25)


def test_measure_batch_invariance_of_output_without_rows_or_counterpart_returns_nothing() -> None:
    whole = np.ones((10,), dtype=np.float32)
    assert measure_batch_invariance({"mean": whole}, [{"mean": whole}] * 32) == ()
    assert measure_batch_invariance({"y": SCORES}, singles(other=SCORES)) == ()


def test_measure_noise_requires_float64_answers_and_returns_float32_error_of_floats() -> None:
    double = SCORES.astype(np.float64) + 1e-4
    assert measure_noise({"y": SCORES}, {"y": double})["y"] == pytest.approx(1e-4)
    assert measure_noise({"y": SCORES}, None) == {}
    assert measure_noise({"label": SCORES.argmax(1)}, {"label": SCORES.argmax(1)}) == {}


@given(order=st.permutations(range(8)))
def test_measure_batch_invariance_with_reordered_rows_is_unchanged(order: list[int]) -> None:
    together, apart = SCORES[:8] + np.float32(0.25) * SCORES[8:16], SCORES[:8]
    first = measure_batch_invariance(
        {"y": together}, [{"y": apart[i : i + 1]} for i in range(8)], NOISE
    )
    other = measure_batch_invariance(
        {"y": together[order]}, [{"y": apart[i : i + 1]} for i in order], NOISE
    )
    assert first == other


def measured_in_batches(ratio: float, **change: Any) -> BatchInvariance:
    return replace(
        BatchInvariance(output="y", rows=32, error=ratio * 1e-6, ratio=ratio, changed=0.0625),
        **change,
    )


def test_judge_invariance_without_measured_rows_returns_nothing() -> None:
    assert invariance_results() == []
    assert invariance_results(measured_in_batches(99.0, rows=0)) == []


def test_judge_invariance_of_batch_dependence_is_advisory(golden: Golden) -> None:
    (result,) = invariance_results(measured_in_batches(1.0), measured_in_batches(4e4, output="z"))
    assert (result.gate, result.metric, result.verdict, result.advisory) == (
        "parity",
        BATCH_INVARIANCE.metric,
        Verdict.FAIL,
        True,
    )
    golden("reasons", result.reason)
    assert Decision(variant="v", target="t", results=(result,)).verdict is Verdict.INCONCLUSIVE


@pytest.mark.parametrize(
    "change", [{}, {"error": math.nan}, {"ratio": math.nan}, {"changed": math.nan}]
)
def test_judge_invariance_with_difference_within_limit_passes_and_with_nan_is_error(
    change: dict[str, Any],
) -> None:
    (result,) = invariance_results(
        measured_in_batches(10.0), measured_in_batches(**{"ratio": 10.0, **change})
    )
    assert (result.verdict, result.advisory) == (Verdict.ERROR if change else Verdict.PASS, True)
    assert "do not batch" not in result.reason


@pytest.mark.parametrize("rows", [SCORES[:, :1], SCORES[:, 0]], ids=["one column", "numbers"])
def test_judge_invariance_of_output_without_classes_omits_them(rows: Array) -> None:
    (found,) = measure_batch_invariance(
        {"y": rows}, [{"y": row[None] + np.float32(0.1)} for row in rows]
    )
    assert found.changed is None
    (result,) = invariance_results(found)
    assert "classes" not in result.reason
