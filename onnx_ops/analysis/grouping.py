"""Rows that belong together: their numbers, what they cost in evidence, and the signs of them where nothing names them.

Rows of one patient, customer or video are right and wrong together. Their errors then vary more than those of as many
independent rows, by a factor that survey statistics calls the design effect (Kish 1965, Survey Sampling, ch. 5).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from scipy import special

from onnx_ops.analysis.agreement import CONFIDENCE

Array: TypeAlias = npt.NDArray[Any]

UNSEEN_GROUPS = 1.5
"""Groups of mean size that are added to those seen, as if all their rows had changed together.

It keeps groups that were missed by chance from leading to a PASS; chosen by simulation (`benchmarks/truth/grouped.py`).
"""

ALARM = 0.015
"""Share of data sets with independent rows of which neighbouring rows look alike by chance."""

_PERMUTATIONS = 399
_ROWS = 20_000
"""At most so many rows are searched for signs."""
_WINDOWS = (2, 4, 8, 16, 32, 64)
_COLUMNS = 8
_ID = re.compile(
    r"(^|[_\W])(id|ids|uid|uuid|key|patient|subject|person|user|customer|client|account|session|visit|group|household|"
    r"family|speaker|author|document|doc|video|scan|case|study|site|device|machine|batch|store)s?($|[_\W\d])",
    re.IGNORECASE,
)


def group_numbers(array: Array) -> Array | None:
    """The group of each row as a number from 0; None if it is not one value a row, or one is missing."""
    flat = array[:, 0] if array.ndim == 2 and array.shape[1] == 1 else array
    if flat.ndim != 1 or flat.dtype.kind not in "iufbUSOMm":
        return None
    if flat.dtype.kind in "fMmO" and any(value is None or value != value for value in flat.tolist()):  # noqa: PLR0124 (NaN)
        return None
    if flat.dtype.kind in "Mm" and np.isnat(flat).any():
        return None
    values = flat.astype(np.str_) if flat.dtype.kind == "O" else flat
    return np.asarray(np.unique(values, return_inverse=True)[1], dtype=np.int64)


def group_columns(arrays: Mapping[str, Array]) -> dict[str, Array]:
    """Of arrays that no key names, those that may tell which rows belong together: their values repeat."""
    found: dict[str, Array] = {}
    for name, array in arrays.items():
        numbers = None if array.dtype.kind == "f" and array.size and (array % 1 != 0).any() else group_numbers(array)
        if numbers is not None and len(found) < _COLUMNS and 5 <= numbers.max() + 1 <= 2 / 3 * len(numbers):
            found[name] = numbers
    return found


def typical_size(group: Array) -> float:
    """Mean size of the group of a row."""
    sizes = np.bincount(group)
    return float((sizes**2).sum() / len(group))


def design_effect(values: Array, group: Array) -> float:
    """How many times as many rows it takes as of independent ones to know the mean of `values` as well; at least 1.

    Includes `UNSEEN_GROUPS`, and the allowance for few groups: a quantile of Student's t in place of the normal one
    (Korn and Graubard 1998, Survey Methodology 24:193-201).

    Args:
        values: one a row, between -1 and 1.
        group: number of each row's group.
    """
    away = values - values.mean()
    sizes = np.bincount(group)
    sums = np.bincount(group, weights=away)
    groups, size = int((sizes > 0).sum()), typical_size(group)
    if groups < 2:
        return float(len(values))
    between = float((sums**2).sum()) * groups / (groups - 1) + UNSEEN_GROUPS * size**2
    within = float((away**2).sum()) + UNSEEN_GROUPS * size
    level = (1 + CONFIDENCE) / 2
    few = special.stdtrit(max(1.0, len(values) / size - 1), level) / special.ndtri(level)
    return max(1.0, between / within) * float(few) ** 2


def grouping_signs(
    inputs: Mapping[str, Array],
    columns: Mapping[str, Array],
    signals: Sequence[Array],
    label: Array | None,
    seed: int,
) -> tuple[str, ...]:
    """What speaks for rows that belong together, in words; empty if nothing does.

    Rows that were shuffled and of which no array tells the group leave no trace but copies.

    Args:
        inputs: of the models.
        columns: see `group_columns`.
        signals: what was seen of each row: right or wrong, or by how much a model is better than another.
        label: classes, where there are; a set that is sorted by them is no reason for an alarm.
        seed: of the permutations.
    """
    if not signals:
        return ()
    rows = min(len(signals[0]), _ROWS)
    seen = [_without_classes(signal[:rows].astype(np.float64), label) for signal in signals]
    draw = np.random.default_rng(seed)
    orders = np.argsort(draw.random((_PERMUTATIONS, rows)), axis=1)
    shuffled = [np.concatenate([signal[None], signal[orders]]) for signal in seen if signal.any()]
    found = [*_copies(inputs, rows), *_telling(columns, shuffled, rows)]
    runs = [_chance(_window_variances(values)) for values in shuffled]
    if runs and min(runs) <= ALARM / len(runs):
        found.append(f"neighbouring rows err together more often than by chance (p = {min(runs):.2g})")
    return tuple(found)


def _without_classes(signal: Array, label: Array | None) -> Array:
    """Less the mean of each row's class."""
    if label is not None and label.ndim == 1 and label.dtype.kind in "iubU":
        known, numbers = np.unique(label[: len(signal)], return_inverse=True)
        if len(known) <= len(signal) / 10:
            return np.asarray(signal - (np.bincount(numbers, weights=signal) / np.bincount(numbers))[numbers])
    return np.asarray(signal - signal.mean())


def _copies(inputs: Mapping[str, Array], rows: int) -> Iterator[str]:
    """Rows of measured numbers or texts that occur twice; of a few categories equal rows are a matter of course."""
    flat = [np.ascontiguousarray(array[:rows]).reshape(rows, -1) for array in inputs.values()]
    if not any((array.dtype.kind == "f" and (array % 1 != 0).any()) or array.dtype.kind in "US" for array in flat):
        return
    known = len({b"".join(array[row].tobytes() for array in flat) for row in range(rows)})
    if known < 0.9 * rows:
        yield f"{1 - known / rows:.0%} of the rows repeat the inputs of another row"


def _telling(columns: Mapping[str, Array], shuffled: Sequence[Array], rows: int) -> Iterator[str]:
    for name, numbers in columns.items():
        group = numbers[:rows]
        sizes = np.maximum(np.bincount(group), 1)
        chances = [_chance(_between(values, group, sizes)) for values in shuffled]
        alike = bool(chances) and min(chances) <= ALARM / len(chances)
        if alike or _ID.search(name):
            why = f"whose rows err together (p = {min(chances):.2g})" if alike else "which nothing uses"
            yield f"the data holds {name!r}, {len(set(group.tolist()))} values in {rows} rows, {why}"


def _between(values: Array, group: Array, sizes: Array) -> Array:
    """Weighted squares of the groups' means, of shape (permutations, 1)."""
    places = group[None, :] + len(sizes) * np.arange(len(values))[:, None]
    sums = np.bincount(places.ravel(), weights=values.ravel(), minlength=len(values) * len(sizes))
    return np.asarray((sums.reshape(len(values), -1) ** 2 / sizes).sum(axis=1)[:, None])


def _window_variances(values: Array) -> Array:
    """Mean squared sums over all windows of successive rows, of shape (permutations, lengths)."""
    sums = np.cumsum(np.pad(values, ((0, 0), (1, 0))), axis=1)
    lengths = [length for length in _WINDOWS if 8 * length <= values.shape[1]] or [2]
    return np.stack([((sums[:, n:] - sums[:, :-n]) ** 2).mean(axis=1) for n in lengths], axis=1)


def _chance(statistics: Array) -> float:
    """Share of the permutations whose largest statistic is no smaller than the first row's: a permutation test."""
    spread = statistics[1:].std(axis=0)
    largest = ((statistics - statistics[1:].mean(axis=0)) / np.where(spread > 0, spread, np.inf)).max(axis=1)
    return float(1 + (largest[1:] >= largest[0]).sum()) / len(largest)
