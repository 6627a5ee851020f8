"""Rows in groups: their numbers, design effects, intervals, and the signs of groups."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from onnx_ops.domain.evidence import PairedCounts
from onnx_ops.statistics.grouping import (
    compute_design_effect,
    compute_effect_of_sums,
    detect_grouping,
    find_group_columns,
    number_groups,
)
from onnx_ops.statistics.intervals import (
    change_interval,
    change_p_value,
    value_interval,
    value_p_value,
)


def drawn(groups: int, rows: int, rho: float, lost: float, seed: int) -> Any:
    """Return changes of rows; each has its group's change with probability sqrt(rho)."""
    rng = np.random.default_rng(seed)
    shares = [lost, 1 - lost - 0.01, 0.01]
    own, shared = (rng.choice([-1.0, 0.0, 1.0], (groups, size), p=shares) for size in (rows, 1))
    return np.where(rng.random((groups, rows)) < rho**0.5, shared, own).ravel()


def counts(change: Any, group: Any) -> PairedCounts:
    return PairedCounts(
        metric="accuracy",
        against="fp32",
        n=len(change),
        both=int((change == 0).sum()),
        only_baseline=int((change < 0).sum()),
        only_candidate=int((change > 0).sum()),
        groups=len(np.unique(group)),
        change_effect=compute_design_effect(change, group),
        value_effect=compute_design_effect((change >= 0).astype(float), group),
    )


class TestNumbers:
    @pytest.mark.parametrize(
        "array",
        [np.array(["b", "a", "b"]), np.array([[7], [3], [7]]), np.array([7.0, 3.0, 7.0]),
         np.array(["b", "a", "b"], object), np.array([True, False, True]),
         np.array(["2026-02-01", "2026-01-01", "2026-02-01"], "M8[D]")],
    )  # fmt: skip
    def test_number_groups_of_sortable_values_numbers_them_in_order(self, array: Any) -> None:
        found = number_groups(array)
        assert found is not None
        assert found.tolist() == [1, 0, 1]

    @pytest.mark.parametrize(
        "array",
        [np.ones((3, 2)), np.array([1.0, np.nan]), np.array(["a", None], object), np.array([1j]),
         np.array(["2026-01-01", "NaT"], "M8[D]")],
    )  # fmt: skip
    def test_number_groups_with_missing_complex_or_several_values_per_row_returns_none(
        self, array: Any
    ) -> None:
        assert number_groups(array) is None

    def test_find_group_columns_returns_columns_of_many_values_that_repeat(self) -> None:
        arrays = {
            "patient": np.arange(60) // 4,
            "row": np.arange(60),
            "sex": np.arange(60) % 2,
            "weight": np.linspace(0, 1, 60),
            "image": np.ones((60, 8)),
        }
        assert set(find_group_columns(arrays)) == {"patient"}


class TestDesignEffect:
    @pytest.mark.parametrize(
        ("change", "rows", "least", "most"),
        [
            pytest.param(
                drawn(1000, 2, 0.0, 0.02, 0), 2, 1, 1.2, id="independent rows in many small groups"
            ),
            pytest.param(drawn(200, 20, 1.0, 0.2, 0), 20, 18, 24, id="rows that change as one"),
            pytest.param(np.zeros(400), 20, 20, np.inf, id="rows none of which changed"),
            pytest.param(
                np.repeat([-1.0, 0.0], [25, 3975]), 1, 1.05, 1.1, id="few rows that changed"
            ),
            pytest.param(
                np.repeat([-1.0, 0.0], [1000, 3000]), 1, 1, 1.01, id="many rows that changed"
            ),
        ],
    )
    def test_compute_design_effect_grows_with_correlation_and_with_few_changes(
        self, change: Any, rows: int, least: float, most: float
    ) -> None:
        assert least <= compute_design_effect(change, np.arange(len(change)) // rows) < most

    def test_change_and_value_intervals_of_single_group_are_wide(self) -> None:
        change = drawn(1, 50, 0.0, 0.2, 0)
        found = counts(change, np.zeros(50, np.int64))
        assert change_interval(found).low < -0.5
        assert value_interval(found).low < 0.3

    @pytest.mark.parametrize(
        ("groups", "rows", "rho"), [(50, 40, 0.5), (100, 20, 0.3), (400, 5, 0.3)]
    )
    def test_change_interval_of_grouped_rows_with_true_drop_at_limit_rarely_excludes_limit(
        self, groups: int, rows: int, rho: float
    ) -> None:
        """The promised error rate is 5.5 %.

        With it, at most 20 of 200 trials are wrong in all but one of 200 tests like this one.
        """
        group = np.arange(groups * rows) // rows
        found = [counts(drawn(groups, rows, rho, 0.03, seed), group) for seed in range(200)]
        assert sum(change_interval(one).low > -0.02 for one in found) <= 20
        assert sum(change_interval(one).high < -0.02 for one in found) <= 20
        plain = [replace(one, groups=0, change_effect=1.0, value_effect=1.0) for one in found]
        assert sum(change_interval(one).low > -0.02 for one in plain) > 20

    def test_change_and_value_p_values_agree_with_intervals(self) -> None:
        group = np.arange(2000) // 4
        for seed in range(30):
            found = counts(drawn(500, 4, 0.3, 0.03, seed), group)
            assert (change_p_value(found, -0.02) < 0.05) == (change_interval(found).low > -0.02)
            assert (value_p_value(found, 0.97) < 0.05) == (value_interval(found).low > 0.97)

    def test_compute_effect_of_sums_of_several_sets_matches_effect_of_each(self) -> None:
        rng = np.random.default_rng(0)
        changes = rng.choice([-1.0, 0.0, 1.0], (3, 200, 4), p=[0.05, 0.92, 0.03])
        found = compute_effect_of_sums(
            changes.sum(axis=2), np.full((3, 200), 4), np.square(changes).sum(axis=(1, 2))
        )
        assert found == pytest.approx(
            [compute_design_effect(change.ravel(), np.arange(800) // 4) for change in changes]
        )


class TestSigns:
    def test_detect_grouping_of_independent_rows_rarely_alarms(self) -> None:
        """The promised rate is 2 %.

        With it, more than six alarms in a hundred occur in one of 200 tests like this one.
        """
        alarms = [
            detect_grouping({}, {}, [drawn(300, 1, 0.0, 0.05, seed)], None, seed)
            for seed in range(100)
        ]
        assert sum(map(bool, alarms)) <= 6

    def test_detect_grouping_of_correlated_neighbors_alarms(self) -> None:
        found = detect_grouping({}, {}, [drawn(100, 10, 0.5, 0.05, 0)], None, 0)
        assert any("neighbouring" in sign for sign in found)

    def test_detect_grouping_of_weakly_correlated_neighbors_alarms_more_if_their_inputs_are_similar(
        self,
    ) -> None:
        rng = np.random.default_rng(0)
        changes = [drawn(50, 10, 0.1, 0.05, seed) for seed in range(40)]
        inputs = {
            "x": rng.standard_normal((50, 4)).repeat(10, axis=0) + rng.standard_normal((500, 4)),
            "without values": np.zeros((500, 0)),
        }
        shuffled = {"x": inputs["x"][rng.permutation(500)]}
        alike, unlike = (
            sum(
                bool(detect_grouping(read, {}, [change], None, seed))
                for seed, change in enumerate(changes)
            )
            for read in (inputs, shuffled)
        )
        assert alike >= 1.3 * unlike

    def test_detect_grouping_of_rows_sorted_by_input_rarely_alarms(self) -> None:
        rng = np.random.default_rng(1)
        inputs = {"age": np.sort(rng.random(500)), "height": rng.random(500)}
        signals = [[drawn(500, 1, 0.0, 0.05, seed)] for seed in range(40)]
        assert (
            sum(
                bool(detect_grouping(inputs, {}, signal, None, n))
                for n, signal in enumerate(signals)
            )
            <= 4
        )

    def test_detect_grouping_of_shuffled_groups_alarms_only_with_their_column(self) -> None:
        order = np.random.default_rng(0).permutation(1000)
        change, ward = drawn(100, 10, 0.5, 0.05, 0)[order], (np.arange(1000) // 10)[order]
        assert not detect_grouping({}, {}, [change], None, 0)
        (sign,) = detect_grouping({}, {"ward": ward}, [change], None, 0)
        assert "'ward'" in sign

    def test_detect_grouping_with_id_column_alarms_even_for_independent_rows(self) -> None:
        change = drawn(1000, 1, 0.0, 0.05, 3)
        numbers = np.random.default_rng(0).integers(0, 200, 1000)
        assert not detect_grouping({}, {"age": numbers}, [change], None, 0)
        assert detect_grouping({}, {"patient_id": numbers}, [change], None, 0)

    def test_detect_grouping_of_rows_sorted_by_class_alarms_only_without_labels(self) -> None:
        rng = np.random.default_rng(0)
        label = np.repeat(np.arange(5), 200)
        right = (rng.random(1000) < np.array([0.99, 0.6, 0.95, 0.8, 0.9])[label]).astype(float)
        assert not detect_grouping({}, {}, [right], label, 0)
        assert detect_grouping({}, {}, [right], None, 0)

    def test_detect_grouping_of_repeated_rows_alarms_unless_values_are_few(self) -> None:
        rng = np.random.default_rng(0)
        signal = rng.random(400)
        measured, few = (
            rng.random((100, 3))[np.arange(400) // 4],
            rng.integers(0, 3, (400, 2)).astype(np.float32),
        )
        assert "repeat" in detect_grouping({"x": measured}, {}, [signal], None, 0)[0]
        texts = np.array([f"text {value}" for value in measured[:, 0]], dtype=object)[:, None]
        assert "repeat" in detect_grouping({"x": texts}, {}, [signal], None, 0)[0]
        assert not detect_grouping({"x": few}, {}, [signal], None, 0)
