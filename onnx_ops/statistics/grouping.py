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

from onnx_ops.statistics import special
from onnx_ops.statistics.intervals import CONFIDENCE

Array: TypeAlias = npt.NDArray[Any]

UNSEEN_GROUPS = 1.5
"""Groups of mean size that are added to those seen, as if all their rows had changed together.

It keeps groups that were missed by chance from leading to a PASS; chosen by simulation (`benchmarks/truth/grouped.py`).
"""

_FEWEST_CARRYING = 20
"""Of fewer groups with a change the score interval is wide enough, and no change at all is a pass."""

ALARM = 0.02
"""Share of data sets with independent rows of which neighbouring rows look alike by chance."""

_HINT = 1 / 3
"""As `ALARM`, where the inputs of neighbouring rows are alike as well."""

_ALIKE = 0.005
"""Share of data sets in any order of which the inputs of neighbouring rows are alike by chance."""
_ALIKE_ROWS, _ALIKE_COLUMNS = 1000, 32
"""At most so many successive rows are held against each other, and numbers of each."""

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


def number_groups(array: Array) -> Array | None:
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


def find_group_columns(arrays: Mapping[str, Array]) -> dict[str, Array]:
    """Of arrays that no key names, those that may tell which rows belong together: their values repeat."""
    found: dict[str, Array] = {}
    for name, array in arrays.items():
        numbers = None if array.dtype.kind == "f" and array.size and (array % 1 != 0).any() else number_groups(array)
        if numbers is not None and len(found) < _COLUMNS and 5 <= numbers.max() + 1 <= 2 / 3 * len(numbers):
            found[name] = numbers
    return found


def typical_size(group: Array) -> float:
    """Mean size of the group of a row."""
    sizes = np.bincount(group)
    return float((sizes**2).sum() / len(group))


def compute_design_effect(values: Array, group: Array) -> float:
    """How many times as many rows it takes as of independent ones to know the mean of `values` as well; at least 1.

    Args:
        values: one a row, between -1 and 1.
        group: number of each row's group.
    """
    sizes = np.bincount(group)
    kept = sizes > 0
    sums = np.bincount(group, weights=values)
    return float(compute_effect_of_sums(sums[kept], sizes[kept], np.square(values).sum()))


def compute_effect_of_sums(sums: Array, sizes: Array, squares: Array) -> Array:
    """`compute_design_effect` of many data sets at once.

    Includes `UNSEEN_GROUPS`, and the allowance for few groups: a quantile of Student's t in place of the normal one
    (Korn and Graubard 1998, Survey Methodology 24:193-201). Its degrees of freedom are those of the groups, or where
    few of them carry the changes those of Satterthwaite (1946, Biometrics Bulletin 2:110-114): a change of which 24
    rows tell is skewed, and a limit of it errs in 5.8 % in place of 5 %.

    Args:
        sums: of the values of each group, of shape (…, groups).
        sizes: rows of each group, likewise.
        squares: sum of the squared values, of shape (…).
    """
    rows, groups = sizes.sum(axis=-1), sizes.shape[-1]
    mean = sums.sum(axis=-1) / rows
    if groups < 2:
        return np.asarray(rows, dtype=np.float64)
    size = np.square(sizes).sum(axis=-1) / rows
    apart = np.square(sums - sizes * mean[..., None])
    total = apart.sum(axis=-1)
    between = total * groups / (groups - 1) + UNSEEN_GROUPS * size**2
    within = squares - rows * mean**2 + UNSEEN_GROUPS * size
    carrying = total**2 / np.maximum(np.square(apart).sum(axis=-1), 1e-300)
    degrees = np.clip(np.maximum(carrying, _FEWEST_CARRYING), 1, np.maximum(rows / size - 1, 1))
    level = (1 + CONFIDENCE) / 2
    few = special.stdtrit(degrees, level) / special.ndtri(level)
    return np.asarray(np.maximum(1.0, between / within) * few**2)


def detect_grouping(
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
        columns: see `find_group_columns`.
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
    chance = _chance([_window_variances(values) for values in shuffled])
    if chance <= ALARM:
        found.append(f"neighbouring rows err together more often than by chance (p = {chance:.2g})")
    elif chance <= _HINT and _neighbours_alike(inputs, label, rows, draw):
        found.append(f"neighbouring rows have inputs alike, and err together more often than usual (p = {chance:.2g})")
    return tuple(found)


def _without_classes(signal: Array, label: Array | None) -> Array:
    """Less the mean of each row's class."""
    if label is not None and label.ndim == 1 and label.dtype.kind in "iubU":
        known, numbers = np.unique(label[: len(signal)], return_inverse=True)
        if len(known) <= len(signal) / 10:
            return np.asarray(signal - (np.bincount(numbers, weights=signal) / np.bincount(numbers))[numbers])
    return np.asarray(signal - signal.mean())


def _neighbours_alike(inputs: Mapping[str, Array], label: Array | None, rows: int, draw: np.random.Generator) -> bool:
    """Whether successive rows have inputs nearer to each other than rows in another order would have.

    An input by which the rows are sorted is left out: it is no group.
    """
    rows = min(rows, _ALIKE_ROWS)
    numbers = [array[:rows].reshape(rows, -1) for array in inputs.values() if array.dtype.kind in "fiub"]
    values = []
    for column in (column for array in numbers for column in array.T[:: -(-array.shape[1] // _ALIKE_COLUMNS)]):
        exact = np.nan_to_num(column.astype(np.float64), posinf=0, neginf=0)
        steps, rest = np.diff(exact), _without_classes(exact, label)
        if rest.std() > 0 and (steps < 0).any() and (steps > 0).any():
            values.append(np.clip(rest / rest.std(), -3, 3).astype(np.float32))
    if not values:
        return False
    table = np.stack(values, axis=1)
    orders = [np.arange(rows), *np.argsort(draw.random((_PERMUTATIONS, rows)), axis=1)]
    products = np.array([[np.vdot(table[order][1:], table[order][:-1])] for order in orders])
    return _chance([products]) <= _ALIKE


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
        chance = _chance([_between(values, group, sizes) for values in shuffled])
        if chance <= ALARM or _ID.search(name):
            why = f"whose rows err together (p = {chance:.2g})" if chance <= ALARM else "which nothing uses"
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


def _chance(signals: Sequence[Array]) -> float:
    """Chance of the first row's statistics among their permutations; 1 if there are no signals.

    Of each signal the largest statistic counts, in standard deviations. What the signals say adds up (Fisher's method),
    and the permutations tell how often as much is said where they depend on each other.

    Args:
        signals: of shape (permutations, statistics), permuted alike.
    """
    if not signals:
        return 1.0
    logs = [np.log(_shares(_largest(statistics))) for statistics in signals]
    return float(_shares(-np.sum(logs, axis=0))[0])


def _largest(statistics: Array) -> Array:
    spread = statistics[1:].std(axis=0)
    return np.asarray(((statistics - statistics[1:].mean(axis=0)) / np.where(spread > 0, spread, np.inf)).max(axis=1))


def _shares(values: Array) -> Array:
    """Of the values that are no smaller than each of them."""
    return np.asarray(1 - np.searchsorted(np.sort(values), values - 1e-9 * np.abs(values)) / len(values))
