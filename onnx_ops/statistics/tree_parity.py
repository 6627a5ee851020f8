"""Parity of models whose answers jump: tree ensembles and rankings.

Trees are compared node by node. The answers of trees and rankings are compared with a jitter
envelope. A correct export of a scaler with trees differs from its source in some rows. A feature
that is rounded differently falls on the other side of a split. Jittered copies of a row have inputs
that differ by a few times the rounding of float32. The row is explained if the source's answers to
the copies enclose the export's answer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from onnx_ops.domain.evidence import ParityMeasurement, TreeStructure
from onnx_ops.ports import Tree
from onnx_ops.ports.data import Array, Tensors
from onnx_ops.statistics.output_columns import (
    WHOLE,
    Bools,
    ColumnNoise,
    Columns,
    Rounding,
    any_by_row,
    compute_column_noises,
    compute_epsilon,
    compute_ratio,
    find_floors,
    is_float,
    is_text,
    report_columns,
)
from onnx_ops.statistics.parity import measure_output
from onnx_ops.statistics.ranking_ties import find_ties

Floats = npt.NDArray[np.float64]

JITTER = 2.0**-22
"""Maximum relative change of an input: four times the rounding of float32."""

INNER_JITTER = 128 * JITTER
"""Maximum relative change of an input of a model that ranks scores.

The scores are rounded too, by more than the inputs are.
"""

COPIES = 32
"""Number of jittered copies of each row.

About a third of the copies cross a split that rounding crosses, so that 32 copies practically
always include one that does.
"""

_BEYOND = 10.0
"""Ratio of error to noise above which a row differs.

It is the default limit of the parity gate.
"""

SHOWN = 20
"""Maximum number of differences that are reported one by one."""

_CLOSE = 2.0**-21
"""Relative tolerance of leaf weights, which depend on the order of multiplication."""


def jitter_rows(
    samples: Tensors, *, seed: int = 0, ranks: bool = False, parts_ties: bool = False
) -> Tensors:
    """Return copies of the rows with each float changed by up to `JITTER` of its size.

    Args:
        ranks: change floats by up to `INNER_JITTER` of their size in the second half of the copies.
        parts_ties: also change floats by up to `JITTER` of the input's largest value, so that equal
            values differ.

    Returns:
        (COPIES * n, …) by name, copy by copy. Other types are repeated unchanged.
    """
    draw = np.random.default_rng(seed)
    jittered: dict[str, Array] = {}
    for name, array in samples.items():
        array_copies = np.concatenate([array] * COPIES)
        if array.dtype.kind == "f":
            with np.errstate(over="ignore"):
                change = draw.uniform(-JITTER, JITTER, array_copies.shape)
                if ranks:
                    change[len(change) // 2 :] *= INNER_JITTER / JITTER
                moved = array_copies * (1 + change)
                if parts_ties:
                    largest = np.abs(array[np.isfinite(array)]).max(initial=0.0)
                    moved = moved + float(largest) * draw.uniform(
                        -JITTER, JITTER, array_copies.shape
                    )
                array_copies = moved.astype(array.dtype)
        jittered[name] = array_copies
    return jittered


def compute_envelope(answers: Sequence[Tensors], wide: Sequence[Tensors] = ()) -> dict[str, Array]:
    """Return the bounds of several answers to the same rows, by output.

    Args:
        wide: answers to copies that differ by up to `INNER_JITTER`. They widen the bounds of
            floats only where the answers jump.

    Returns:
        Floats: (2, n, …), the smallest and largest answer. Other types: (k, n, …), the distinct
            answers; the first one is repeated where a row has fewer than k.
    """
    bounds: dict[str, Array] = {}
    for name, first in answers[0].items():
        stacked = np.stack([answer[name] for answer in answers])
        every = np.stack([*stacked, *(answer[name] for answer in wide)])
        if is_float(first):
            near, reach = (
                np.stack([a.min(axis=0), a.max(axis=0)]).astype(np.float64)
                for a in (stacked, every)
            )
            with np.errstate(over="ignore", invalid="ignore"):
                # In these differences, infinite answers can give NaN, and large ones can overflow.
                followed = INNER_JITTER / JITTER * (near[1] - near[0])
                jumps = reach[1] - reach[0] > 4 * followed
                # At a jump, the answers on both sides also follow the change of the inputs, so the
                # bounds are widened.
                reach += np.stack([-followed, followed])
            bounds[name] = np.where(jumps, reach, near)
        else:
            bounds[name] = _find_distinct(every)
    return bounds


def join_envelopes(parts: Sequence[Mapping[str, Array]]) -> dict[str, Array]:
    """Join the bounds of successive row ranges, in the form of `compute_envelope`."""
    joined: dict[str, Array] = {}
    for name in parts[0]:
        arrays = [part[name] for part in parts]
        most = max(len(array) for array in arrays)
        whole = [np.concatenate([array, *[array[:1]] * (most - len(array))]) for array in arrays]
        joined[name] = np.concatenate(whole, axis=1)
    return joined


def measure_within_envelope(
    *,
    group: str,
    output: str,
    onnx: Array,
    single: Array | None,
    double: Array | None,
    bounds: Array,
    rounding: Rounding = WHOLE,
    made_up: bool = False,
) -> ParityMeasurement:
    """Measure how far an export's output lies outside a jumping model's envelope.

    For floats, the error is the largest distance beyond the bounds. The noise is that of
    `parity.measure_output`, over the rows whose bounds are at most `_BEYOND` floors apart.

    For other types, the error is the share of rows with an answer outside the bounds that does not
    tie with the exact one. A place whose answers differ between copies of a row is unsure.
    Its answer can also be that of another unsure place of that row, since a ranking of ties has any
    order.

    Rows that differ from the source's exact answer and lie within the bounds are `explained`.

    Args:
        bounds: the bounds of this output, from `compute_envelope`.
        made_up: whether the rows are generated. Any answer to such a row with an unsure place is
            explained, since its ties do not occur in use.

    Raises:
        MeasurementError: as in `parity.measure_output`.
    """
    plain = measure_output(
        group=group, output=output, onnx=onnx, single=single, double=double, rounding=rounding
    )
    exact = double if double is not None else single
    if plain.mismatch or exact is None or not onnx.size or bounds.shape[1:] != onnx.shape:
        return plain
    if not (is_float(onnx) or is_float(exact)):
        return _measure_labels(plain, onnx, exact, bounds, rounding, made_up=made_up)
    answers = [answer.astype(np.float64) for answer in (double, single) if answer is not None]
    return _measure_floats(plain, onnx, answers, bounds.astype(np.float64), rounding)


def _measure_labels(
    plain: ParityMeasurement,
    onnx: Array,
    exact: Array,
    bounds: Array,
    rounding: Rounding,
    *,
    made_up: bool,
) -> ParityMeasurement:
    if is_text(onnx):
        onnx, exact, bounds = (array.astype(np.str_) for array in (onnx, exact, bounds))
    unlike = (onnx != bounds).all(axis=0) & ~find_ties(onnx, exact, rounding)
    outside = any_by_row(unlike & ~_find_exchanged(onnx, bounds, made_up=made_up))
    error = float(outside.mean())
    return replace(
        plain,
        error=error,
        ratio=compute_ratio(error, 0.0),
        explained=int((any_by_row(onnx != exact) & ~outside).sum()),
        unexplained=int(outside.sum()),
    )


def _find_exchanged(onnx: Array, bounds: Array, *, made_up: bool) -> Bools:
    """Return the unsure places whose answer is that of any unsure place of the row.

    A place is unsure if the source has several answers at that place. In a generated row with an
    unsure place, the result is True for every place.
    """
    unsure = (bounds != bounds[:1]).any(axis=0)
    rows = onnx.reshape(len(onnx), -1)
    unsure_rows = unsure.reshape(rows.shape)
    exchanged = np.zeros(rows.shape, dtype=bool)
    for row in np.flatnonzero(unsure_rows.any(axis=1)):
        places = unsure_rows[row]
        possible = np.unique(bounds.reshape(len(bounds), *rows.shape)[:, row, places])
        exchanged[row] = True if made_up else places & np.isin(rows[row], possible)
    return exchanged.reshape(onnx.shape)


def _measure_floats(
    plain: ParityMeasurement,
    answer: Array,
    answers: Sequence[Floats],
    bounds: Floats,
    rounding: Rounding,
) -> ParityMeasurement:
    onnx, exact = answer.astype(np.float64), answers[0]
    finite = np.isfinite(onnx) & np.isfinite(bounds).all(axis=0)
    for other in answers:
        finite &= np.isfinite(other)
    if not finite.any():
        return plain
    columns = Columns.of(exact, rounding)
    scales = columns.find_largest(np.abs(np.where(finite, exact, 0.0)))
    floors = find_floors(scales, columns, rounding, compute_epsilon(answer))
    widths = np.where(finite, bounds[1] - bounds[0], 0.0)
    steady = ~any_by_row(np.asarray(widths > columns.spread(floors) * _BEYOND))
    gaps = np.zeros(len(scales))
    for other in answers[1:]:
        gap = np.abs(np.where(finite, other - exact, 0.0))
        gaps = np.maximum(gaps, columns.find_largest(np.where(_as_column(steady, exact), gap, 0.0)))
    noises = compute_column_noises(ColumnNoise(scales=scales, gaps=gaps), floors)
    limits = columns.spread(noises) * _BEYOND
    beyond = np.where(finite, np.maximum(bounds[0] - onnx, onnx - bounds[1]), 0.0).clip(min=0.0)
    differs = any_by_row(np.abs(np.where(finite, onnx - exact, 0.0)) > limits)
    outside = any_by_row(beyond > limits)
    measured = report_columns(plain, columns, columns.find_largest(beyond), noises, scales)
    return replace(
        measured,
        tolerance="",
        explained=int((differs & ~outside).sum()),
        unexplained=int(outside.sum()),
    )


def _as_column(by_row: Bools, like: Floats) -> Bools:
    return by_row.reshape(-1, *(1,) * (like.ndim - 1))


def _find_distinct(stacked: Array) -> Array:
    """Return the distinct entries along axis 0 for each place.

    The length of that axis is the largest number of distinct entries of a place. A place with fewer
    distinct entries repeats its smallest one.
    """
    if stacked.dtype.kind == "O":
        stacked = stacked.astype(np.str_)
    ordered = np.sort(stacked, axis=0)
    fresh = np.ones(ordered.shape, dtype=bool)
    fresh[1:] = ordered[1:] != ordered[:-1]
    most = int(fresh.sum(axis=0).max(initial=1))
    place = np.argsort(~fresh, axis=0, kind="stable")[:most]
    chosen = np.take_along_axis(ordered, place, axis=0)
    is_distinct = np.take_along_axis(fresh, place, axis=0)
    return np.asarray(np.where(is_distinct, chosen, chosen[:1]))


def compare_trees(trees: Sequence[Tree], source_trees: Sequence[Tree]) -> TreeStructure:
    """Compare the trees of an export with those of its source, by position.

    Features and thresholds must be equal; weights of leaves can differ by `_CLOSE`. If two trees
    differ in shape, their splits are compared as multisets.
    """
    texts: list[str] = []
    changed = 0
    if len(trees) != len(source_trees):
        changed = abs(len(trees) - len(source_trees))
        texts.append(f"{len(trees)} trees, the source has {len(source_trees)}")
    for index, (tree, source) in enumerate(zip(trees, source_trees, strict=False)):
        for count, text in _find_differences(tree, source):
            changed += count
            texts.append(f"tree {index}{text}")
    return TreeStructure(
        trees=len(source_trees),
        splits=sum(int((tree.features >= 0).sum()) for tree in source_trees),
        leaves=sum(int((tree.features < 0).sum()) for tree in source_trees),
        changed=changed,
        differences=tuple(texts[:SHOWN]),
    )


def _find_differences(tree: Tree, source: Tree) -> Iterator[tuple[int, str]]:
    """Yield how many nodes differ, and how they differ."""
    if tree.weights.shape[1:] != source.weights.shape[1:]:
        yield (
            1,
            (
                f": leaves for {tree.weights.shape[1]} outputs, "
                f"the source has {source.weights.shape[1]}"
            ),
        )
        return
    leaf, other = tree.features < 0, source.features < 0
    if leaf.shape != other.shape or (leaf != other).any():
        here, there = _count_splits(tree), _count_splits(source)
        yield (
            max(1, ((here - there) + (there - here)).total()),
            (
                f": {_describe_size(tree)} arranged differently, the source has "
                f"{_describe_size(source)}"
            ),
        )
        return
    splits = ~leaf
    for node in np.flatnonzero(splits & (tree.features != source.features)):
        yield (
            1,
            (
                f", node {node}: splits at feature {tree.features[node]}, "
                f"the source has feature {source.features[node]}"
            ),
        )
    same = splits & (tree.features == source.features)
    for node in np.flatnonzero(same & (tree.thresholds != source.thresholds)):
        yield (
            1,
            (
                f", node {node}: threshold {tree.thresholds[node]:.9g}, "
                f"the source has {source.thresholds[node]:.9g}"
            ),
        )
    weights, originals = tree.weights.astype(np.float64), source.weights.astype(np.float64)
    close = np.abs(weights - originals) <= _CLOSE * np.maximum(np.abs(weights), np.abs(originals))
    for node in np.flatnonzero(leaf & ~close.all(axis=1)):
        output = int(np.flatnonzero(~close[node])[0])
        values = f"{weights[node, output]:.9g}, the source has {originals[node, output]:.9g}"
        yield 1, f", node {node}: leaf weight of output {output} is {values}"


def _count_splits(tree: Tree) -> Counter[tuple[int, float]]:
    splits = tree.features >= 0
    return Counter(
        zip(tree.features[splits].tolist(), tree.thresholds[splits].tolist(), strict=True)
    )


def _describe_size(tree: Tree) -> str:
    leaves = int((tree.features < 0).sum())
    return f"{len(tree.features) - leaves} splits and {leaves} leaves"
