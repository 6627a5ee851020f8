"""Read the tree ensembles of an ONNX file, and build inputs that probe splits."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from onnx_ops.errors import UserError
from onnx_ops.onnx_graph.files import collect_constants, iterate_nodes, read_model, share_structure
from onnx_ops.ports import Tree

if TYPE_CHECKING:
    import onnx

_FOREST = "TreeEnsemble"
"""The operator that replaces the others in version 5 of `ai.onnx.ml`."""

ENSEMBLES = ("TreeEnsembleClassifier", "TreeEnsembleRegressor", _FOREST)

_MOST_WEIGHTS = 1 << 28
"""Maximum product of an ensemble's numbers of outputs and nodes.

A file can declare any number of outputs.
"""

_PARTS = ("treeids", "nodeids", "modes", "featureids", "values", "truenodeids", "falsenodeids")
_LEAF, _AT_MOST, _BELOW = b"LEAF", b"BRANCH_LEQ", b"BRANCH_LT"

_FOREST_PARTS = (
    "modes",
    "featureids",
    "splits",
    "truenodeids",
    "trueleafs",
    "falsenodeids",
    "falseleafs",
)
_FOREST_MODES = {0: _AT_MOST, 1: _BELOW}


class _Split(NamedTuple):
    """A split: the next node is `low` if the feature is at most the threshold.

    Otherwise, the next node is `high`.
    """

    feature: int
    threshold: float
    low: int
    high: int


@dataclass(slots=True)
class _Growing:
    """One tree of a file with unsorted nodes: splits and leaves by node number."""

    splits: dict[int, _Split] = field(default_factory=dict)
    leaves: dict[int, dict[int, float]] = field(default_factory=dict)


def has_trees(path: Path) -> bool:
    """Return whether a file contains an operator of `ENSEMBLES`.

    Errors are those of `read_structure`.
    """
    return any(node.op_type in ENSEMBLES for node in iterate_nodes(share_structure(path)))


def read_trees(path: Path) -> tuple[Tree, ...]:
    """Read the trees of all `ENSEMBLES` of the main graph, in the order of the file.

    A split `x < t` is returned with the next smaller threshold, which is equivalent for float32.
    Errors are those of `read_model`, and the following.

    Raises:
        UserError: an ensemble is a `TreeEnsemble`, is not well-formed or is too large. Or a split
            is not a comparison of a feature with an upper limit.
    """
    where, trees = path.name, []
    for node in (node for node in read_model(path).graph.node if node.op_type in ENSEMBLES):
        if node.op_type == _FOREST:
            raise UserError(f"the trees of the operator {_FOREST} cannot be read", where=where)
        kind = "class" if node.op_type == ENSEMBLES[0] else "target"
        growing, nodes = _grow(node, where)
        outputs = _read_columns(
            node, [f"{kind}_{part}" for part in ("treeids", "nodeids", "ids", "weights")], where
        )
        for tree, number, output, weight in zip(*outputs, strict=True):
            if tree not in growing or number not in growing[tree].leaves or output < 0:
                raise UserError(
                    "a tree ensemble has weights for a leaf or an output that does not exist",
                    where=where,
                )
            leaf = growing[tree].leaves[number]
            leaf[output] = leaf.get(output, 0.0) + weight
        width = max(outputs[2], default=0) + 1
        if width * nodes > _MOST_WEIGHTS:
            what = (
                f"a tree ensemble has {width} outputs and {nodes} nodes, and their product can be "
                f"at most {_MOST_WEIGHTS}"
            )
            raise UserError(what, where=where)
        for number, grown in growing.items():
            try:
                roots = _find_roots((*grown.splits, *grown.leaves), grown.splits)
                trees.append(order_nodes(roots, grown.splits, grown.leaves, width))
            except ValueError as error:
                raise UserError(f"tree {number} is malformed: {error}", where=where) from error
    return tuple(trees)


def order_nodes(
    roots: Sequence[int],
    splits: Mapping[int, tuple[int, float, int, int]],
    leaves: Mapping[int, Mapping[int, float]],
    width: int,
) -> Tree:
    """Return the nodes of a single tree in preorder.

    Args:
        roots: nodes that are not a branch of any split.
        splits: by node number: feature, threshold, the next node where the comparison is true, and
            the next node where it is false.
        leaves: by node number: weights by output.

    Raises:
        ValueError: the number of roots differs from 1, or the nodes are not a tree.
    """
    if len(roots) != 1:
        raise ValueError(f"it has {len(roots)} roots")
    features: list[int] = []
    thresholds: list[float] = []
    weights = np.zeros((len(splits) + len(leaves), width), dtype=np.float32)
    waiting = [roots[0]]
    while waiting:
        number = waiting.pop()
        place = len(features)
        if place >= len(weights):
            raise ValueError("two branches lead to the same node, or one to a missing node")
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
        raise ValueError("no split leads to some of its nodes")
    return Tree(
        features=np.array(features, dtype=np.int64),
        thresholds=np.array(thresholds, dtype=np.float32),
        weights=weights,
    )


def _grow(node: onnx.NodeProto, where: str) -> tuple[dict[int, _Growing], int]:
    """Return the trees by number, without leaf weights, and the number of nodes."""
    columns = _read_columns(node, [f"nodes_{part}" for part in _PARTS], where)
    growing: dict[int, _Growing] = {}
    for tree, number, mode, feature, threshold, yes, no in zip(*columns, strict=True):
        grown = growing.setdefault(tree, _Growing())
        if mode == _LEAF:
            grown.leaves[number] = {}
        else:
            limit = _find_limit(mode, threshold, where)
            grown.splits[number] = _Split(feature, limit, yes, no)
    return growing, len(columns[0])


def _find_limit(mode: bytes, threshold: float, where: str) -> float:
    """Return the largest float32 that takes the first branch of a split."""
    if mode not in (_AT_MOST, _BELOW):
        what = f"a tree has a split of mode {mode.decode(errors='replace')}, which is not supported"
        raise UserError(what, where=where)
    limit = np.float32(threshold)
    return float(limit if mode == _AT_MOST else np.nextafter(limit, np.float32(-np.inf)))


def _find_roots(nodes: Iterable[int], splits: Mapping[int, _Split]) -> list[int]:
    below = {child for split in splits.values() for child in (split.low, split.high)}
    return [node for node in nodes if node not in below]


def _read_columns(node: onnx.NodeProto, names: Sequence[str], where: str) -> list[Sequence[Any]]:
    from onnx import helper, numpy_helper

    values: dict[str, Any] = {
        a.name: numpy_helper.to_array(a.t).ravel().tolist()
        if a.type == a.TENSOR
        else helper.get_attribute_value(a)
        for a in node.attribute
        if a.name in names
    }
    columns = [values.get(name, ()) for name in names]
    if len({len(column) for column in columns}) != 1:
        raise UserError("the lists of a tree ensemble have different lengths", where=where)
    return columns


Floats = npt.NDArray[np.float64]

MOST_SPLITS = 4096

_TRANSPARENT = ("Cast", "Identity")
_ASIDE = 2.0**-14
"""Distance of a probe from its threshold.

It is relative to the numbers that are added before the comparison. It is far above the rounding of
float32 (2^-24), so that a correct export decides like its source. It is below the rounding of
float16 (2^-11).
"""


def build_split_probes(path: Path, samples: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return two rows for every split, one on each side of its threshold.

    A row is a real row that reaches the split, with the split's feature moved. If no real row
    reaches it, the row is made from a probe of the split above. A split with a wrong position,
    branch or feature then changes the answer, even if no real row is near the threshold. If there
    are very many splits, an even selection is probed.

    Returns:
        Inputs by name, for the first ensemble of the model. None without rows or splits. Also
            None if the ensemble reads anything but one matrix or joined columns of numbers, with
            only scaling in between.
    """
    model = read_model(path)
    ensemble = next((node for node in model.graph.node if node.op_type in ENSEMBLES), None)
    if ensemble is None or not all(map(_is_matrix_of_numbers, samples.values())):
        return None
    start, order = _matrix(model, list(samples))
    rows = (
        np.concatenate([samples[name].astype(np.float64) for name in order], axis=1)
        if order
        else np.empty((0, 0))
    )
    if not len(rows):
        return None
    scaling = _scaling(model, ensemble.input[0], start, rows.shape[1])
    trees = _read_splits(ensemble, path.name)
    features = {split.feature for tree in trees for split in tree.values()}
    if scaling is None or not features <= set(range(rows.shape[1])):
        return None
    trees = trees[:: max(1, sum(map(len, trees)) // (4 * MOST_SPLITS))]
    step = max(1, -(-sum(map(len, trees)) // MOST_SPLITS))
    sides = (pair for tree in trees for pair in _probes(tree, rows, *scaling))
    chosen = list(itertools.islice(sides, 0, None, step))
    return _split_columns(np.stack(chosen), samples, order) if chosen else None


def _read_splits(ensemble: onnx.NodeProto, where: str) -> list[dict[int, _Split]]:
    """Return the splits of each tree that has any.

    The result is empty if the ensemble cannot be read.
    """
    try:
        if ensemble.op_type == _FOREST:
            return _read_forest(ensemble, where)
        return [grown.splits for grown in _grow(ensemble, where)[0].values() if grown.splits]
    except UserError:
        return []


def _read_forest(node: onnx.NodeProto, where: str) -> list[dict[int, _Split]]:
    """Return the splits of each tree of a `TreeEnsemble`; -1 is any leaf."""
    columns = _read_columns(node, [f"nodes_{part}" for part in _FOREST_PARTS], where)
    splits = {}
    for number, (kind, feature, threshold, *branches) in enumerate(zip(*columns, strict=True)):
        limit = _find_limit(_FOREST_MODES.get(kind, b"%d" % kind), threshold, where)
        yes, yes_is_leaf, no, no_is_leaf = branches
        splits[number] = _Split(
            feature, limit, -1 if yes_is_leaf else yes, -1 if no_is_leaf else no
        )
    trees = []
    for root in _read_columns(node, ["tree_roots"], where)[0]:
        tree: dict[int, _Split] = {}
        waiting = [root]
        while waiting:
            number = waiting.pop()
            # A damaged file can contain a cycle, so each split is taken once.
            if number in splits:
                tree[number] = split = splits.pop(number)
                waiting += [split.low, split.high]
        trees.append(tree)
    return trees


def _is_matrix_of_numbers(array: Any) -> bool:
    return array.ndim == 2 and array.dtype.kind in "fi"


def _split_columns(
    chosen: Floats, samples: Mapping[str, Any], order: Sequence[str]
) -> dict[str, Any]:
    """Split pairs of concatenated rows into one array for each input.

    `chosen` has the shape (pairs, 2, columns). The columns of integer inputs are rounded outward:
    the larger value of a pair up, the smaller value down.
    """
    ends = np.cumsum([samples[name].shape[1] for name in order])[:-1]
    parts = dict(zip(order, np.split(chosen, ends, axis=2), strict=True))
    probes = {}
    for name, array in samples.items():
        pairs = parts[name]
        if array.dtype.kind == "i":
            # Rounded outwards, the two rows of a pair stay on different sides of the threshold.
            pairs = np.where(
                pairs > pairs.min(axis=1, keepdims=True), np.ceil(pairs), np.floor(pairs)
            )
        probes[name] = pairs.reshape(-1, pairs.shape[2]).astype(array.dtype)
    return probes


def _matrix(model: onnx.ModelProto, names: list[str]) -> tuple[str, list[str]]:
    """Return the value that joins all inputs, and their order in this value.

    The order is empty if there is no such value.
    """
    if len(names) == 1:
        return names[0], names
    makers = {name: node for node in model.graph.node for name in node.output}
    for node in model.graph.node:
        if node.op_type == "Concat":
            parts = [_origin(makers, part) for part in node.input]
            if sorted(parts) == sorted(names):
                return node.output[0], parts
    return "", []


def _origin(makers: Mapping[str, onnx.NodeProto], value: str) -> str:
    for _ in makers:  # The loop is limited, since a damaged file can contain a cycle.
        node = makers.get(value)
        if node is None or node.op_type not in _TRANSPARENT:
            break
        value = node.input[0]
    return value


def _probes(
    tree: Mapping[int, _Split], rows: Floats, factor: Floats, shift: Floats
) -> Iterator[Floats]:
    """Yield one row on each side of the threshold, for each split of the tree.

    Each pair of rows has the shape (2, features).
    """
    roots = _find_roots(tree, tree)
    waiting = [(root, rows[index % len(rows)]) for index, root in enumerate(roots)]
    visited = set(roots)  # Visited nodes are recorded, since a damaged file can contain a cycle.
    reached: dict[int, Floats] = dict.fromkeys(roots, rows)
    while waiting:
        node, spare = waiting.pop()
        split = tree[node]
        local_rows = reached.pop(node, rows[:0])
        row = local_rows[0] if len(local_rows) else spare
        sides = np.stack([row, row])
        factor_f, shift_f = factor[split.feature], shift[split.feature]
        middle = (split.threshold - shift_f) / factor_f
        aside = _ASIDE * max(abs(middle), abs(shift_f / factor_f), 1e-6)
        sides[:, split.feature] = (
            (middle - aside, middle + aside) if factor_f > 0 else (middle + aside, middle - aside)
        )
        yield sides
        is_low = local_rows[:, split.feature] * factor_f + shift_f <= split.threshold
        for child, part, side in (
            (split.low, local_rows[is_low], sides[0]),
            (split.high, local_rows[~is_low], sides[1]),
        ):
            if child in tree and child not in visited:
                visited.add(child)
                reached[child] = part
                waiting.append((child, side))


def _scaling(
    model: onnx.ModelProto, value: str, start: str, columns: int
) -> tuple[Floats, Floats] | None:
    """Return factor and shift of each column between the model's input and `value`.

    Return None if there are other operations between them, or if a factor is 0.
    """
    from onnx import numpy_helper

    makers = {name: node for node in model.graph.node for name in node.output}
    stored = collect_constants(model)
    steps: list[tuple[str, Floats]] = []
    while value != start:
        node = makers.get(value)
        if node is None:
            return None
        if node.op_type not in _TRANSPARENT:
            if node.op_type not in ("Sub", "Add", "Mul", "Div") or node.input[1] not in stored:
                return None
            array = numpy_helper.to_array(stored[node.input[1]]).astype(np.float64)
            if array.size not in (1, columns):
                return None
            steps.append((node.op_type, np.broadcast_to(array.reshape(-1), columns)))
        value = node.input[0]
    factor, shift = np.ones(columns), np.zeros(columns)
    for operator, array in reversed(steps):
        if operator in ("Add", "Sub"):
            shift = shift + array if operator == "Add" else shift - array
        else:
            by = array if operator == "Mul" else 1 / np.where(array == 0, 1.0, array)
            factor, shift = factor * by, shift * by
    return (factor, shift) if (factor != 0).all() else None
