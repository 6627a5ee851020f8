"""The jitter envelope explains what rounding can do to a tree, and nothing more."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from onnx_ops.ports import Tree
from onnx_ops.statistics.output_columns import LARGEST, Rounding
from onnx_ops.statistics.tree_parity import (
    COPIES,
    INNER_JITTER,
    JITTER,
    SHOWN,
    compare_trees,
    compute_envelope,
    jitter_rows,
    join_envelopes,
    measure_within_envelope,
)
from tests.support.golden import Golden

EXACT = np.array([[0.2, 0.8], [0.5, 0.5], [0.9, 0.1]])
BOUNDS = np.stack([EXACT, EXACT])
BOUNDS[0, 1], BOUNDS[1, 1] = (0.3, 0.4), (0.6, 0.7)


def floats(onnx: Any, bounds: Any = BOUNDS, exact: Any = EXACT) -> Any:
    answer = np.asarray(onnx, dtype=np.float32)
    return measure_within_envelope(
        group="real",
        output="p",
        onnx=answer,
        single=exact.astype(np.float32),
        double=exact,
        bounds=bounds,
    )


def labels(onnx: Any, bounds: Any) -> Any:
    exact = np.array([1, 2, 3])
    return measure_within_envelope(
        group="real",
        output="l",
        onnx=np.asarray(onnx),
        single=exact,
        double=exact,
        bounds=np.asarray(bounds),
    )


RANKED = np.array([[3, 1, 2, 0], [3, 1, 2, 0]])
UNSURE = np.stack([RANKED, RANKED, RANKED])
UNSURE[1, 0, :3], UNSURE[2, 0, :3] = (1, 3, 2), (1, 2, 3)
"""Orders of the copies of two rows; in the first row, three places are uncertain."""


@pytest.mark.parametrize(
    ("first", "made_up", "is_explained"),
    [
        pytest.param([2, 3, 1, 0], False, True, id="another order of those that tie"),
        pytest.param([2, 3, 0, 1], False, False, id="one that does not"),
        pytest.param([2, 3, 0, 1], True, True, id="on a made-up row"),
    ],
)
def test_measure_within_envelope_of_row_with_ties_allows_their_orders_and_all_if_made_up(
    first: list[int], made_up: bool, is_explained: bool
) -> None:
    onnx = RANKED.copy()
    onnx[0] = first
    measurement = measure_within_envelope(
        group="real",
        output="i",
        onnx=onnx,
        single=RANKED,
        double=RANKED,
        bounds=UNSURE,
        made_up=made_up,
    )
    assert (measurement.explained, measurement.unexplained) == ((1, 0) if is_explained else (0, 1))


@pytest.mark.parametrize("made_up", [False, True])
def test_measure_within_envelope_of_row_without_ties_rejects_other_order(made_up: bool) -> None:
    onnx = RANKED.copy()
    onnx[1] = RANKED[1, ::-1]
    measurement = measure_within_envelope(
        group="real",
        output="i",
        onnx=onnx,
        single=RANKED,
        double=RANKED,
        bounds=UNSURE,
        made_up=made_up,
    )
    assert measurement.ratio == LARGEST


def test_jitter_rows_separates_ties_only_if_requested() -> None:
    x = np.zeros((2, 5), dtype=np.float32)
    x[1] = 3
    assert not jitter_rows({"x": x})["x"][::2].any()
    parted = jitter_rows({"x": x}, parts_ties=True)["x"]
    assert np.ptp(parted[0]) > 0
    assert np.abs(parted[::2]).max() <= 3 * JITTER * 1.01


@pytest.mark.parametrize(("head", "error"), [(0, 200.0), (1, 3e-3)])
def test_measure_within_envelope_judges_columns_of_different_scale_separately(
    head: int, error: float
) -> None:
    exact = np.array([2e4, 0.3]) * np.ones((64, 1))
    onnx = exact.copy()
    onnx[:, head] += error
    measurement = measure_within_envelope(
        group="real",
        output="y",
        onnx=onnx,
        single=exact,
        double=exact,
        bounds=np.stack([exact, exact]),
        rounding=Rounding(floor=np.zeros(exact.shape)),
    )
    assert measurement.ratio > 1000
    assert measurement.column == f"column {head}"


@given(st.integers(0, 2**31), st.integers(1, 5))
def test_jitter_rows_changes_copies_by_rounding_only(seed: int, count: int) -> None:
    x = np.random.default_rng(seed).normal(0, 10, (count, 3)).astype(np.float32)
    many = jitter_rows({"x": x, "token": np.arange(count)}, seed=seed)
    assert many["x"].shape == (COPIES * count, 3)
    assert many["x"].dtype == np.float32
    spread = np.abs(many["x"].reshape(COPIES, count, 3).astype(np.float64) / x - 1)
    assert spread.max() <= JITTER + 2.0**-23
    assert spread.max() > 0
    np.testing.assert_array_equal(
        many["token"].reshape(COPIES, count), np.tile(np.arange(count), (COPIES, 1))
    )


def test_compute_envelope_spans_floats_and_lists_labels() -> None:
    answers = [{"p": np.array([[1.0], [5.0]]), "l": np.array(["a", "b"])}]
    answers += [{"p": np.array([[3.0], [4.0]]), "l": np.array(["c", "b"])}]
    found = compute_envelope([*answers, answers[0]])
    np.testing.assert_array_equal(found["p"], [[[1.0], [4.0]], [[3.0], [5.0]]])
    assert [set(found["l"][:, row]) for row in range(2)] == [{"a", "c"}, {"b"}]


def test_compute_envelope_with_wide_copies_widens_by_jumps() -> None:
    near = [{"box": np.array([1.0, 1.0]), "index": np.array([3, 3])}]
    near += [{"box": np.array([1.0 + 1e-7, 1.0 + 1e-7]), "index": np.array([3, 3])}]
    ratio = INNER_JITTER / JITTER
    wide = [{"box": np.array([1.0 + ratio * 1e-7, 5.0]), "index": np.array([3, 4])}]
    found = compute_envelope(near, wide)
    expected = np.array([[1.0, 1.0 - ratio * 1e-7], [1.0 + 1e-7, 5.0 + ratio * 1e-7]])
    assert np.abs(found["box"].astype(np.float64) - expected).max() < 1e-12
    assert [set(found["index"][:, row]) for row in range(2)] == [{3}, {3, 4}]


def test_jitter_rows_of_ranking_widens_half_of_copies() -> None:
    x = np.random.default_rng(1).normal(0, 10, (4, 3)).astype(np.float32)
    spread = np.abs(
        jitter_rows({"x": x}, ranks=True)["x"].reshape(COPIES, 4, 3).astype(np.float64) / x - 1
    )
    narrow, wide = spread[: COPIES // 2], spread[COPIES // 2 :]
    assert narrow.max() <= JITTER + 2.0**-23
    assert INNER_JITTER / 2 < wide.max() <= INNER_JITTER + 2.0**-23


def test_join_envelopes_of_row_parts_returns_whole() -> None:
    found = join_envelopes([{"l": np.array([[1, 2], [3, 2]])}, {"l": np.array([[7]])}])
    np.testing.assert_array_equal(found["l"], [[1, 2, 7], [3, 2, 7]])


@pytest.mark.parametrize(
    ("first", "second", "explained", "error"),
    [
        pytest.param([0.2, 0.8], [0.6, 0.4], 1, 0.0, id="within its bounds"),
        pytest.param([0.2, 0.8], [0.75, 0.25], 0, 0.15, id="beyond its bounds"),
        pytest.param([0.4, 0.6], [0.5, 0.5], 0, 0.2, id="within the bounds of another row"),
    ],
)
def test_measure_within_envelope_explains_row_by_its_own_bounds_only(
    first: list[float], second: list[float], explained: int, error: float
) -> None:
    found = floats([first, second, [0.9, 0.1]])
    assert (found.explained, found.unexplained) == (explained, 1 - explained)
    assert found.error == pytest.approx(error, abs=1e-6)
    assert found.ratio <= 1 if explained else found.ratio > 1000


def test_measure_within_envelope_with_jump_in_float32_source_adds_no_noise() -> None:
    """Otherwise one row that flips would hide every fault of its group."""
    single = EXACT.copy()
    single[1] = 0.6, 0.4
    found = measure_within_envelope(
        group="real",
        output="p",
        onnx=(EXACT + np.array([[0.1], [0], [0]])).astype(np.float32),
        single=single.astype(np.float32),
        double=EXACT,
        bounds=BOUNDS,
    )
    assert found.noise < 1e-5
    assert found.unexplained == 1


def test_measure_within_envelope_of_labels_requires_observed_label() -> None:
    bounds = [[1, 2, 3], [1, 5, 3]]
    assert labels([1, 5, 3], bounds).ratio == 0
    assert labels([1, 5, 3], bounds).explained == 1
    wrong = labels([2, 5, 3], bounds)
    assert (wrong.error, wrong.ratio, wrong.unexplained) == (pytest.approx(1 / 3), LARGEST, 1)


def test_measure_within_envelope_with_other_shape_or_new_nan_reports_mismatch() -> None:
    assert "shape" in floats([[0.2, 0.8]]).mismatch
    assert "non-finite" in floats([[0.2, np.nan], [0.5, 0.5], [0.9, 0.1]]).mismatch


TREE = Tree(
    features=np.array([2, -1, 0, -1, -1]),
    thresholds=np.array([0.5, 0, -3.25, 0, 0], dtype=np.float32),
    weights=np.array([[0], [0.25], [0], [0.5], [-1]], dtype=np.float32),
)


def test_compare_trees_of_same_trees_reports_no_change() -> None:
    found = compare_trees([TREE, TREE], [TREE, TREE])
    assert (found.trees, found.splits, found.leaves, found.changed, found.differences) == (
        2,
        4,
        6,
        0,
        (),
    )


def test_compare_trees_allows_rounded_leaf_but_not_rounded_threshold(golden: Golden) -> None:
    weights, thresholds = TREE.weights.copy(), TREE.thresholds.copy()
    weights[1] = np.nextafter(weights[1], np.float32(1))
    assert compare_trees([replace(TREE, weights=weights)], [TREE]).changed == 0
    thresholds[2] = np.nextafter(thresholds[2], np.float32(0))
    found = compare_trees([TREE, replace(TREE, thresholds=thresholds)], [TREE, TREE])
    assert found.changed == 1
    golden("reasons", "\n".join(found.differences))


@given(st.sampled_from([1, 3, 4]), st.floats(1e-5, 10))
def test_compare_trees_with_changed_leaf_reports_it(node: int, factor: float) -> None:
    weights = TREE.weights.copy()
    weights[node] *= 1 + factor
    found = compare_trees([replace(TREE, weights=weights)], [TREE])
    assert found.changed == 1
    assert found.differences[0].startswith(f"tree 0, node {node}: leaf weight of output 0 ")


def test_compare_trees_with_other_feature_reports_it_once(golden: Golden) -> None:
    found = compare_trees([replace(TREE, features=np.array([1, -1, 0, -1, -1]))], [TREE])
    golden("reasons", "\n".join(found.differences))


def test_compare_trees_with_swapped_branches_reports_difference() -> None:
    swapped = Tree(
        features=TREE.features[[0, 2, 3, 4, 1]], thresholds=TREE.thresholds, weights=TREE.weights
    )
    found = compare_trees([swapped], [TREE])
    assert found.changed >= 1
    assert "arranged differently" in found.differences[0]


def test_compare_trees_with_missing_tree_or_other_outputs_reports_difference() -> None:
    assert compare_trees([TREE], [TREE, TREE]).differences == ("1 trees, the source has 2",)
    wide = replace(TREE, weights=np.zeros((5, 3), dtype=np.float32))
    assert compare_trees([wide], [TREE]).changed == 1


def test_compare_trees_with_many_differences_counts_all_and_lists_few() -> None:
    other = replace(TREE, weights=TREE.weights + np.float32(1))
    found = compare_trees([other] * 20, [TREE] * 20)
    assert found.changed == 60
    assert len(found.differences) == SHOWN
