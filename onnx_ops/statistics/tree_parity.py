"""Parity of tree ensembles: splits and leaves one by one, and answers within the jitter envelope."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from onnx_ops.domain.evidence import ParityMeasurement, TreeStructure
from onnx_ops.ports import Tree
from onnx_ops.statistics.parity import LARGEST, compute_epsilon, compute_ratio, is_float, is_text, measure_output

AnyArray = npt.NDArray[np.generic]
Floats = npt.NDArray[np.float64]
Tensors = Mapping[str, AnyArray]

JITTER = 2.0**-22
"""Largest relative change of an input, four times the rounding of float32."""

COPIES = 32
"""A split that rounding crosses is crossed by a third of the jittered copies: that all of 32 miss it is no matter."""

_BEYOND = 10.0
"""Error / noise above which a row differs: the parity gate's usual limit."""

SHOWN = 20
"""Differences that are told one by one."""

_CLOSE = 2.0**-21
"""Relative difference of a leaf's weight that a multiplication in another order makes."""


def jitter_rows(samples: Tensors, *, seed: int = 0, copies: int = COPIES) -> Tensors:
    """Copies of the rows, floats changed by up to `JITTER` of their size, each element by its own.

    Args:
        samples: inputs by name, axis 0 is the batch of n rows.
        seed: of the draw.
        copies: how many.

    Returns:
        (copies * n, …) by name, copy by copy. Other types than floats are repeated as they are.
    """
    draw = np.random.default_rng(seed)
    found: dict[str, AnyArray] = {}
    for name, array in samples.items():
        many = np.concatenate([array] * copies)
        if array.dtype.kind == "f":
            with np.errstate(over="ignore"):
                many = (many * (1 + draw.uniform(-JITTER, JITTER, many.shape))).astype(array.dtype)
        found[name] = many
    return found


def compute_envelope(answers: Sequence[Tensors]) -> dict[str, AnyArray]:
    """The bounds of several answers to the same rows, by output.

    Args:
        answers: outputs by name, each of shape (n, …).

    Returns:
        Floats: (2, n, …), the least and the largest answer. Everything else: (k, n, …), the different answers, with
        the first one repeated where a row has fewer than k.
    """
    found: dict[str, AnyArray] = {}
    for name, first in answers[0].items():
        stacked = np.stack([answer[name] for answer in answers])
        if is_float(first):
            exact = stacked.astype(np.float64)
            found[name] = np.stack([exact.min(axis=0), exact.max(axis=0)])
        else:
            found[name] = _different(stacked)
    return found


def join_envelopes(parts: Sequence[Mapping[str, AnyArray]]) -> dict[str, AnyArray]:
    """Bounds of consecutive parts of the rows as those of all rows.

    Args:
        parts: as `compute_envelope` gives them.
    """
    found: dict[str, AnyArray] = {}
    for name in parts[0]:
        arrays = [part[name] for part in parts]
        most = max(len(array) for array in arrays)
        whole = [np.concatenate([array, *[array[:1]] * (most - len(array))]) for array in arrays]
        found[name] = np.concatenate(whole, axis=1)
    return found


def measure_within_envelope(
    *, group: str, output: str, onnx: AnyArray, single: AnyArray | None, double: AnyArray | None, bounds: AnyArray
) -> ParityMeasurement:
    """Distance of an export's output from the envelope of a source that jumps.

    Floats: error = max of what lies beyond the bounds; noise as of `parity.measure`, over the rows whose bounds are
    closer together than the noise, since a jump is none. Everything else: error = share of rows with an answer that
    none of the bounds is. Rows that differ from the source's exact answer and lie within the bounds are `explained`.

    Args:
        group: name of the group of inputs.
        output: name of the output.
        onnx: the export's answer (n, …).
        single: the source's answer in float32, if there is one.
        double: the source's answer in float64, if there is one.
        bounds: of this output, as `compute_envelope` gives them.

    Raises:
        MeasurementError: as `parity.measure`.
    """
    plain = measure_output(group=group, output=output, onnx=onnx, single=single, double=double)
    exact = double if double is not None else single
    if plain.mismatch or exact is None or not onnx.size or bounds.shape[1:] != onnx.shape:
        return plain
    if not (is_float(onnx) or is_float(exact)):
        return _labels(plain, onnx, exact, bounds)
    return _floats(plain, onnx, _as_floats(single, double), bounds.astype(np.float64))


def _floats(plain: ParityMeasurement, answer: AnyArray, answers: Sequence[Floats], bounds: Floats) -> ParityMeasurement:
    onnx, exact = answer.astype(np.float64), answers[0]
    finite = np.isfinite(onnx) & np.isfinite(bounds).all(axis=0)
    for one in answers:
        finite &= np.isfinite(one)
    if not finite.any():
        return plain
    shown = np.where(finite, exact, 0.0)
    noise = 2 * compute_epsilon(answer) * float(np.abs(shown).max())
    apart = np.where(finite, bounds[1] - bounds[0], 0.0)
    steady = _by_row(apart, noise * _BEYOND)
    for one in answers[1:]:
        gap = np.abs(np.where(finite, one - exact, 0.0))[steady]
        noise = max(noise, float(gap.max(initial=0.0)))
    beyond = np.where(finite, np.maximum(bounds[0] - onnx, onnx - bounds[1]), 0.0).clip(min=0.0)
    differs = ~_by_row(np.abs(np.where(finite, onnx - exact, 0.0)), noise * _BEYOND)
    outside = ~_by_row(beyond, noise * _BEYOND)
    error = float(beyond.max())
    return replace(
        plain,
        error=min(error, LARGEST),
        noise=min(noise, LARGEST),
        ratio=compute_ratio(error, noise),
        tolerance="",
        explained=int((differs & ~outside).sum()),
        unexplained=int(outside.sum()),
    )


def _labels(plain: ParityMeasurement, onnx: AnyArray, exact: AnyArray, bounds: AnyArray) -> ParityMeasurement:
    if is_text(onnx):
        onnx, exact, bounds = (array.astype(np.str_) for array in (onnx, exact, bounds))
    outside = _rows((onnx != bounds).all(axis=0))
    differs = _rows(onnx != exact)
    error = float(outside.mean())
    return replace(
        plain,
        error=error,
        ratio=compute_ratio(error, 0.0),
        explained=int((differs & ~outside).sum()),
        unexplained=int(outside.sum()),
    )


def _as_floats(single: AnyArray | None, double: AnyArray | None) -> list[Floats]:
    return [answer.astype(np.float64) for answer in (double, single) if answer is not None]


def _by_row(values: Floats, limit: float) -> npt.NDArray[np.bool_]:
    """Rows of which no value exceeds the limit."""
    return ~_rows(values > limit)


def _rows(wrong: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
    return np.asarray(wrong.reshape(len(wrong), -1).any(axis=1), dtype=np.bool_)


def _different(stacked: AnyArray) -> AnyArray:
    """The different entries along axis 0, place by place, as few as the place with most of them has."""
    if stacked.dtype.kind == "O":
        stacked = stacked.astype(np.str_)
    ordered = np.sort(stacked, axis=0)
    fresh = np.ones(ordered.shape, dtype=bool)
    fresh[1:] = ordered[1:] != ordered[:-1]
    most = int(fresh.sum(axis=0).max(initial=1))
    place = np.argsort(~fresh, axis=0, kind="stable")[:most]
    chosen = np.take_along_axis(ordered, place, axis=0)
    kept = np.take_along_axis(fresh, place, axis=0)
    return np.asarray(np.where(kept, chosen, chosen[:1]))


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
