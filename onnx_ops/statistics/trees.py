"""Trees beside trees: does an export hold the splits and leaves of its source?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np

from onnx_ops.domain.structure import TreeStructure
from onnx_ops.ports import Tree

SHOWN = 20
"""Differences that are told one by one."""

_CLOSE = 2.0**-21
"""Relative difference of a leaf's weight that a multiplication in another order makes."""


def compare_trees(found: Sequence[Tree], expected: Sequence[Tree]) -> TreeStructure:
    """Trees of an export against those of its source, by their place.

    Features and thresholds must be equal, weights of leaves to the rounding of float32. Where two trees differ in
    their shape, their splits are held against each other as multisets.

    Args:
        found: of the export.
        expected: of the source.
    """
    told: list[str] = []
    changed = 0
    if len(found) != len(expected):
        changed += abs(len(found) - len(expected))
        told.append(f"{len(found)} trees, the source has {len(expected)}")
    for index, (tree, source) in enumerate(zip(found, expected, strict=False)):
        for count, text in _differences(tree, source):
            changed += count
            told.append(f"tree {index}{text}")
    return TreeStructure(
        trees=len(expected),
        splits=sum(int((tree.features >= 0).sum()) for tree in expected),
        leaves=sum(int((tree.features < 0).sum()) for tree in expected),
        changed=changed,
        differences=tuple(told[:SHOWN]),
    )


def _differences(tree: Tree, source: Tree) -> Iterator[tuple[int, str]]:
    """How many nodes differ, and in what."""
    if tree.weights.shape[1:] != source.weights.shape[1:]:
        yield 1, f": leaves for {tree.weights.shape[1]} outputs, the source has {source.weights.shape[1]}"
        return
    leaf, other = tree.features < 0, source.features < 0
    if leaf.shape != other.shape or (leaf != other).any():
        here, there = _counts(tree), _counts(source)
        yield (
            max(1, ((here - there) + (there - here)).total()),
            f": {_size(tree)} arranged otherwise than the source's {_size(source)}",
        )
        return
    splits = ~leaf
    for node in np.flatnonzero(splits & (tree.features != source.features)):
        yield 1, f", node {node}: splits at feature {tree.features[node]}, the source at {source.features[node]}"
    same = splits & (tree.features == source.features)
    for node in np.flatnonzero(same & (tree.thresholds != source.thresholds)):
        yield 1, f", node {node}: threshold {tree.thresholds[node]:.9g}, the source has {source.thresholds[node]:.9g}"
    weights, originals = tree.weights.astype(np.float64), source.weights.astype(np.float64)
    close = np.abs(weights - originals) <= _CLOSE * np.maximum(np.abs(weights), np.abs(originals))
    for node in np.flatnonzero(leaf & ~close.all(axis=1)):
        output = int(np.flatnonzero(~close[node])[0])
        values = f"{weights[node, output]:.9g}, the source has {originals[node, output]:.9g}"
        yield 1, f", node {node}: leaf weight of output {output} is {values}"


def _counts(tree: Tree) -> Counter[tuple[int, float]]:
    splits = tree.features >= 0
    return Counter(zip(tree.features[splits].tolist(), tree.thresholds[splits].tolist(), strict=True))


def _size(tree: Tree) -> str:
    leaves = int((tree.features < 0).sum())
    return f"{len(tree.features) - leaves} splits and {leaves} leaves"
