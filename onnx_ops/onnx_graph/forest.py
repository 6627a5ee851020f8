"""The trees of an ONNX file, node by node."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from onnx_ops.errors import UserError
from onnx_ops.onnx_graph.files import nodes, read_model, read_structure
from onnx_ops.ports import Tree

if TYPE_CHECKING:
    import onnx

ENSEMBLES = ("TreeEnsembleClassifier", "TreeEnsembleRegressor")

_MOST_WEIGHTS = 1 << 28
"""Weights of all leaves together; a file may claim any number of outputs."""

_PARTS = ("treeids", "nodeids", "modes", "featureids", "values", "truenodeids", "falsenodeids")
_LEAF, _AT_MOST, _BELOW = b"LEAF", b"BRANCH_LEQ", b"BRANCH_LT"


@dataclass(slots=True)
class _Growing:
    """One tree of a file before it is put in order: splits and leaves by node number."""

    splits: dict[int, tuple[int, float, int, int]] = field(default_factory=dict)
    leaves: dict[int, dict[int, float]] = field(default_factory=dict)


def has_trees(path: Path) -> bool:
    """Whether a file holds a tree ensemble; raises as `read_structure` does."""
    return any(node.op_type in ENSEMBLES for node in nodes(read_structure(path)))


def read_trees(path: Path) -> tuple[Tree, ...]:
    """The trees of all ensembles of the main graph, in the order of the file; none where it has none.

    A split that asks `x < t` is told by the next smaller threshold, which for float32 is the same question.

    Raises:
        UserError: an ensemble is not well-formed, or a split asks another question than whether a feature is small.
        NotFoundError, RefusedError: as for reading the file.
    """
    found = [
        tree for node in read_model(path).graph.node if node.op_type in ENSEMBLES for tree in _ensemble(node, path.name)
    ]
    return tuple(found)


def preorder(
    roots: Sequence[int],
    splits: dict[int, tuple[int, float, int, int]],
    leaves: dict[int, dict[int, float]],
    width: int,
) -> Tree:
    """The one tree that begins at the only root.

    Args:
        roots: nodes that no split leads to.
        splits: by node number: feature, threshold, the node where it holds, the one where not.
        leaves: by node number: weights by output.
        width: number of outputs.

    Raises:
        ValueError: it is no tree.
    """
    if len(roots) != 1:
        raise ValueError(f"{len(roots)} roots")
    features: list[int] = []
    thresholds: list[float] = []
    weights = np.zeros((len(splits) + len(leaves), width), dtype=np.float32)
    waiting = [roots[0]]
    while waiting:
        number = waiting.pop()
        place = len(features)
        if place >= len(weights):
            raise ValueError("a circle")
        if number in splits:
            feature, threshold, yes, no = splits[number]
            features.append(feature)
            thresholds.append(threshold)
            waiting += [no, yes]
        else:
            features.append(-1)
            thresholds.append(0.0)
            for output, weight in leaves.get(number, {}).items():
                weights[place, output] = weight
    if len(features) != len(weights):
        raise ValueError("nodes that no split leads to")
    return Tree(
        features=np.array(features, dtype=np.int64),
        thresholds=np.array(thresholds, dtype=np.float32),
        weights=weights,
    )


def _ensemble(node: onnx.NodeProto, where: str) -> list[Tree]:
    from onnx import helper

    values: dict[str, Any] = {a.name: helper.get_attribute_value(a) for a in node.attribute}
    kind = "class" if node.op_type == ENSEMBLES[0] else "target"
    columns = [values.get(f"nodes_{part}", ()) for part in _PARTS]
    outputs = [values.get(f"{kind}_{part}", ()) for part in ("treeids", "nodeids", "ids", "weights")]
    if len({len(column) for column in columns}) != 1 or len({len(column) for column in outputs}) != 1:
        raise UserError("a tree ensemble's lists are not of one length", where=where)
    growing: dict[int, _Growing] = {}
    for tree, number, mode, feature, threshold, yes, no in zip(*columns, strict=True):
        grown = growing.setdefault(tree, _Growing())
        if mode == _LEAF:
            grown.leaves[number] = {}
        elif mode in (_AT_MOST, _BELOW):
            limit = np.float32(threshold)
            exact = limit if mode == _AT_MOST else np.nextafter(limit, np.float32(-np.inf))
            grown.splits[number] = (feature, float(exact), yes, no)
        else:
            raise UserError(f"a tree asks {mode.decode(errors='replace')}", where=where)
    for tree, number, output, weight in zip(*outputs, strict=True):
        if tree not in growing or number not in growing[tree].leaves or output < 0:
            raise UserError("a tree ensemble has weights for a leaf that does not exist", where=where)
        grown = growing[tree]
        grown.leaves[number][output] = grown.leaves[number].get(output, 0.0) + weight
    width = max(outputs[2], default=0) + 1
    if width * len(columns[0]) > _MOST_WEIGHTS:
        raise UserError(f"a tree ensemble has {width} outputs", where=where)
    return [_grown(tree, grown, width, where) for tree, grown in growing.items()]


def _grown(number: int, grown: _Growing, width: int, where: str) -> Tree:
    below = {child for _, _, yes, no in grown.splits.values() for child in (yes, no)}
    roots = [node for node in (*grown.splits, *grown.leaves) if node not in below]
    try:
        return preorder(roots, grown.splits, grown.leaves, width)
    except ValueError as error:
        raise UserError(f"tree {number} is no tree: {error}", where=where) from error
