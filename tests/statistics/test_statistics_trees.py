"""One changed leaf, threshold, feature, branch or tree is told by its place."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from onnx_ops.ports import Tree
from onnx_ops.statistics.tree_parity import SHOWN, compare_trees
from tests.support.golden import Golden

TREE = Tree(
    features=np.array([2, -1, 0, -1, -1]),
    thresholds=np.array([0.5, 0, -3.25, 0, 0], dtype=np.float32),
    weights=np.array([[0], [0.25], [0], [0.5], [-1]], dtype=np.float32),
)


def test_the_same_trees_do_not_differ() -> None:
    found = compare_trees([TREE, TREE], [TREE, TREE])
    assert (found.trees, found.splits, found.leaves, found.changed, found.differences) == (2, 4, 6, 0, ())


def test_rounding_of_a_leaf_is_no_difference_and_a_float32_of_a_threshold_is(golden: Golden) -> None:
    weights, thresholds = TREE.weights.copy(), TREE.thresholds.copy()
    weights[1] = np.nextafter(weights[1], np.float32(1))
    assert compare_trees([replace(TREE, weights=weights)], [TREE]).changed == 0
    thresholds[2] = np.nextafter(thresholds[2], np.float32(0))
    found = compare_trees([TREE, replace(TREE, thresholds=thresholds)], [TREE, TREE])
    assert found.changed == 1
    golden("reasons", "\n".join(found.differences))


@given(st.sampled_from([1, 3, 4]), st.floats(1e-5, 10))
def test_one_changed_leaf_is_told(node: int, factor: float) -> None:
    weights = TREE.weights.copy()
    weights[node] *= 1 + factor
    found = compare_trees([replace(TREE, weights=weights)], [TREE])
    assert found.changed == 1
    assert found.differences[0].startswith(f"tree 0, node {node}: leaf weight of output 0 ")


def test_another_feature_is_told_once(golden: Golden) -> None:
    found = compare_trees([replace(TREE, features=np.array([1, -1, 0, -1, -1]))], [TREE])
    golden("reasons", "\n".join(found.differences))


def test_swapped_branches_differ_though_all_splits_are_there() -> None:
    swapped = Tree(features=TREE.features[[0, 2, 3, 4, 1]], thresholds=TREE.thresholds, weights=TREE.weights)
    found = compare_trees([swapped], [TREE])
    assert found.changed >= 1
    assert "arranged otherwise" in found.differences[0]


def test_a_missing_tree_and_other_outputs_are_told() -> None:
    assert compare_trees([TREE], [TREE, TREE]).differences == ("1 trees, the source has 2",)
    wide = replace(TREE, weights=np.zeros((5, 3), dtype=np.float32))
    assert compare_trees([wide], [TREE]).changed == 1


def test_many_differences_are_counted_and_few_of_them_told() -> None:
    other = replace(TREE, weights=TREE.weights + np.float32(1))
    found = compare_trees([other] * 20, [TREE] * 20)
    assert found.changed == 60
    assert len(found.differences) == SHOWN
