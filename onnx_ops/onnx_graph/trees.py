"""Tree ensembles in ONNX, and inputs that show whether a split stands where the source has it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from onnx_ops.onnx_graph.files import constants, read_model
from onnx_ops.onnx_graph.forest import ENSEMBLES

if TYPE_CHECKING:
    import onnx

Floats = npt.NDArray[np.float64]

MOST_SPLITS = 4096

_BELOW = (b"BRANCH_LEQ", b"BRANCH_LT")
_TRANSPARENT = ("Cast", "Identity")
_ASIDE = 2.0**-14
"""Distance of a probe from its threshold, relative to the numbers that are added on the way: far above float32's
rounding (2^-24), so that a good export decides like its source, and below that of float16 (2^-11)."""


@dataclass(frozen=True, slots=True)
class _Split:
    feature: int
    threshold: float
    low: int
    high: int


def split_probes(path: Path, samples: Mapping[str, Any]) -> dict[str, Any] | None:
    """Two rows for every split of a tree ensemble, one on each side of its threshold and close to it.

    A row is a real one that comes by that split, with the split's feature moved. A split that stands elsewhere, leads
    elsewhere or looks at another feature then gives another answer, though no real row may be near it. Of very many
    splits an even choice is probed.

    Args:
        path: the model.
        samples: real inputs by name, axis 0 is the batch.

    Returns:
        Inputs by name; None for a model that is no ensemble over its one matrix or its joined columns of numbers,
        scaled at most.
    """
    model = read_model(path)
    ensemble = next((node for node in model.graph.node if node.op_type in ENSEMBLES), None)
    if ensemble is None or any(array.ndim != 2 or array.dtype.kind not in "fi" for array in samples.values()):
        return None
    start, order = _matrix(model, list(samples))
    rows = np.concatenate([samples[name].astype(np.float64) for name in order], axis=1) if order else np.empty((0, 0))
    if not len(rows):
        return None
    scaling = _scaling(model, ensemble.input[0], start, rows.shape[1])
    trees = _trees(ensemble, rows.shape[1])
    if scaling is None or not trees:
        return None
    trees = trees[:: max(1, sum(map(len, trees)) // (4 * MOST_SPLITS))]
    step = max(1, -(-sum(map(len, trees)) // MOST_SPLITS))
    pairs = (pair for tree in trees for pair in _probes(tree, rows, *scaling))
    chosen = list(itertools.islice(pairs, 0, None, step))
    if not chosen:
        return None
    ends = np.cumsum([samples[name].shape[1] for name in order])[:-1]
    parts = dict(zip(order, np.split(np.stack(chosen), ends, axis=2), strict=True))
    return {name: _as_type(parts[name], array.dtype) for name, array in samples.items()}


def _as_type(pairs: Floats, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """Rows of pairs of shape (pairs, 2, columns); whole numbers are the next ones on either side."""
    if np.issubdtype(dtype, np.integer):
        pairs = np.where(pairs > pairs.min(axis=1, keepdims=True), np.ceil(pairs), np.floor(pairs))
    return pairs.reshape(-1, pairs.shape[2]).astype(dtype)


def _matrix(model: onnx.ModelProto, names: list[str]) -> tuple[str, list[str]]:
    """The value that holds all inputs side by side, and their order in it; no order where there is none."""
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
    for _ in makers:  # a file may hold a circle
        node = makers.get(value)
        if node is None or node.op_type not in _TRANSPARENT:
            break
        value = node.input[0]
    return value


def _probes(tree: Mapping[int, _Split], rows: Floats, factor: Floats, shift: Floats) -> Iterator[Floats]:
    """For each split that is reached, both sides of its threshold, shape (2, features)."""
    below = {split.low for split in tree.values()} | {split.high for split in tree.values()}
    roots = [node for node in tree if node not in below]
    waiting = [(root, rows[index % len(rows)]) for index, root in enumerate(roots)]
    seen = set(roots)  # a file may hold a circle
    reached: dict[int, Floats] = dict.fromkeys(roots, rows)
    while waiting:
        node, spare = waiting.pop()
        split = tree[node]
        here = reached.pop(node, rows[:0])
        row = here[0] if len(here) else spare
        sides = np.stack([row, row])
        factor_f, shift_f = factor[split.feature], shift[split.feature]
        middle = (split.threshold - shift_f) / factor_f
        aside = _ASIDE * max(abs(middle), abs(shift_f / factor_f), 1e-6)
        sides[:, split.feature] = (middle - aside, middle + aside) if factor_f > 0 else (middle + aside, middle - aside)
        yield sides
        is_low = here[:, split.feature] * factor_f + shift_f <= split.threshold
        for child, part, side in ((split.low, here[is_low], sides[0]), (split.high, here[~is_low], sides[1])):
            if child in tree and child not in seen:
                seen.add(child)
                reached[child] = part
                waiting.append((child, side))


def _trees(ensemble: onnx.NodeProto, features: int) -> list[dict[int, _Split]]:
    """Splits by node number, a tree each; nothing where a split asks another question than 'is it below?'."""
    from onnx import helper

    values: dict[str, Any] = {a.name: helper.get_attribute_value(a) for a in ensemble.attribute}
    parts = ("treeids", "nodeids", "modes", "featureids", "values", "truenodeids", "falsenodeids")
    columns = [values.get(f"nodes_{part}", ()) for part in parts]
    if len({len(column) for column in columns}) != 1:
        return []
    trees: dict[int, dict[int, _Split]] = {}
    for tree, node, mode, feature, threshold, yes, no in zip(*columns, strict=True):
        if mode == b"LEAF":
            continue
        if mode not in _BELOW or not 0 <= feature < features:
            return []
        trees.setdefault(tree, {})[node] = _Split(feature, float(threshold), yes, no)
    return list(trees.values())


def _scaling(model: onnx.ModelProto, value: str, start: str, columns: int) -> tuple[Floats, Floats] | None:
    """Factor and shift of each column on the way from the model's input to `value`; None if it is not of that kind."""
    from onnx import numpy_helper

    makers = {name: node for node in model.graph.node for name in node.output}
    stored = constants(model)
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
