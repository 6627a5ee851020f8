"""Detect groups of dependent rows, and compute their design effect.

Answers to rows of one patient, customer or video tend to be right or wrong together. The error rate
of such rows varies more than the error rate of as many independent rows. The ratio of the two
variances is the design effect (Kish 1965, Survey Sampling, ch. 5).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import scipy

from onnx_ops.statistics.intervals import CONFIDENCE

Array: TypeAlias = npt.NDArray[Any]

UNSEEN_GROUPS = 1.5
"""Number of groups of the typical size that are added to the observed ones.

All rows of an added group are treated as changed together. This limits how often a PASS results
from groups that are missing from the sample by chance. The number was chosen by simulation
(`benchmarks/truth/grouped.py`).
"""

_FEWEST_CARRYING = 20
"""Minimum degrees of freedom for groups with changes.

With fewer changed groups, the score interval is wide enough without a correction. A comparison
without any change can therefore pass.
"""

ALARM = 0.02
"""p-value up to which rows are reported as dependent.

The rows are neighbours, or have the same value in an array. It is the share of false alarms of one
test among data sets with independent rows.
"""

_HINT = 1 / 3
"""p-value like `ALARM`, for data whose neighbouring rows also have similar inputs."""

_ALIKE = 0.005
"""p-value up to which neighbouring rows are treated as similar.

It is the share of false alarms among data sets in random order.
"""
_ALIKE_ROWS, _ALIKE_COLUMNS = 1000, 32
"""Maximum number of successive rows to compare, and of values of each input."""

_PERMUTATIONS = 399
"""Number of permutations of the rows; the smallest p-value is therefore 1 / 400."""
_ROWS = 20_000
"""Maximum number of rows that are searched for groups."""
_WINDOWS = (2, 4, 8, 16, 32, 64)
"""Lengths of the windows of successive rows whose sums are compared."""
_COLUMNS = 8
_ID = re.compile(
    r"(^|[_\W])(id|ids|uid|uuid|key|patient|subject|person|user|customer|client|account|session|visit|group|household|"
    r"family|speaker|author|document|doc|video|scan|case|study|site|device|machine|batch|store)s?($|[_\W\d])",
    re.IGNORECASE,
)


def number_groups(array: Array) -> Array | None:
    """Return the group of each row as a number from 0.

    Return None if the array does not contain one value per row, or if a value is missing.
    """
    flat = array[:, 0] if array.ndim == 2 and array.shape[1] == 1 else array
    if flat.ndim != 1 or flat.dtype.kind not in "iufbUSOMm" or _has_missing_values(flat):
        return None
    # In an array of fixed width, one long text would widen all other elements.
    if flat.dtype.kind == "O":
        numbers = {
            value: number for number, value in enumerate(sorted({str(value) for value in flat}))
        }
        return np.array([numbers[str(value)] for value in flat], dtype=np.int64)
    return np.asarray(np.unique(flat, return_inverse=True)[1], dtype=np.int64)


def _has_missing_values(flat: Array) -> bool:
    if flat.dtype.kind in "fMmO" and any(
        value is None or value != value  # noqa: PLR0124 (NaN)
        for value in flat.tolist()
    ):
        return True
    return flat.dtype.kind in "Mm" and bool(np.isnat(flat).any())


def find_group_columns(arrays: Mapping[str, Array]) -> dict[str, Array]:
    """Return arrays that can identify groups of rows, as group numbers.

    Such an array has no fractions, at least 5 different values, and 1.5 or more rows per value on
    average. At most `_COLUMNS` arrays are returned.
    """
    columns: dict[str, Array] = {}
    for name, array in arrays.items():
        numbers = (
            None
            if array.dtype.kind == "f" and array.size and (array % 1 != 0).any()
            else number_groups(array)
        )
        if (
            numbers is not None
            and len(columns) < _COLUMNS
            and 5 <= numbers.max() + 1 <= 2 / 3 * len(numbers)
        ):
            columns[name] = numbers
    return columns


def typical_size(group: Array) -> float:
    """Return the size of the group that a row belongs to, averaged over rows."""
    sizes = np.bincount(group)
    return float((sizes**2).sum() / len(group))


def compute_design_effect(values: Array, group: Array) -> float:
    """Return the design effect of a mean over grouped rows, at least 1.

    A mean over dependent rows is as exact as a mean over this many times fewer independent rows.
    """
    sizes = np.bincount(group)
    occupied = sizes > 0
    sums = np.bincount(group, weights=values)
    return float(compute_effect_of_sums(sums[occupied], sizes[occupied], np.square(values).sum()))


def compute_effect_of_sums(sums: Array, sizes: Array, squares: Array) -> Array:
    """Return the result of `compute_design_effect` for many data sets in one step.

    The effect includes `UNSEEN_GROUPS`. It also includes an allowance for few groups. This
    allowance is a quantile of Student's t in place of the normal one (Korn and Graubard 1998,
    Survey Methodology 24:193-201). The degrees of freedom are those of Satterthwaite (1946,
    Biometrics Bulletin 2:110-114), at least `_FEWEST_CARRYING`, and at most those of the groups. If
    few groups contain changes, the estimate is skewed. Without the allowance, the confidence limit
    excludes the true change in 5.8 % of samples instead of 5 %, if 24 rows contain changes.

    Args:
        sums: sum of the values of each group, of shape (…, groups).
        sizes: number of rows of each group, of the same shape.
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
    few = scipy.special.stdtrit(degrees, level) / scipy.special.ndtri(level)
    return np.asarray(np.maximum(1.0, between / within) * few**2)


def detect_grouping(
    inputs: Mapping[str, Array],
    columns: Mapping[str, Array],
    signals: Sequence[Array],
    label: Array | None,
    seed: int,
) -> tuple[str, ...]:
    """Return signs that rows depend on each other, as phrases; empty without signs.

    In shuffled rows without an array of groups, only duplicates are detectable.

    Args:
        columns: the result of `find_group_columns`.
        signals: arrays with one value per row: whether the answer is right, or by how much one
            model is better than another.
        label: class of each row, if there are classes; a data set sorted by class raises no alarm.
    """
    if not signals:
        return ()
    rows = min(len(signals[0]), _ROWS)
    draw = np.random.default_rng(seed)
    permuted = _permute_signals(signals, label, rows, draw)
    signs = [*_find_copies(inputs, rows), *_find_unused_groups(columns, permuted, rows)]
    chance = _compute_chance([_window_variances(values) for values in permuted])
    if chance <= ALARM:
        signs.append(f"neighbouring rows err together more often than by chance (p = {chance:.2g})")
    elif chance <= _HINT and _are_neighbours_alike(inputs, label, rows, draw):
        signs.append(
            "neighbouring rows have similar inputs, and err together more often than usual (p = "
            f"{chance:.2g})"
        )
    return tuple(signs)


def _permute_signals(
    signals: Sequence[Array], label: Array | None, rows: int, draw: np.random.Generator
) -> list[Array]:
    """Return each signal that varies within classes, and its permutations.

    Row 0 is the signal. All signals have the same permutations, which preserves their dependence
    (see `_compute_chance`).
    """
    centred = [_centre_by_class(signal[:rows].astype(np.float64), label) for signal in signals]
    orders = np.argsort(draw.random((_PERMUTATIONS, rows)), axis=1)
    return [np.concatenate([signal[None], signal[orders]]) for signal in centred if signal.any()]


def _find_copies(inputs: Mapping[str, Array], rows: int) -> Iterator[str]:
    """Yield the share of rows that repeat the inputs of other rows, if above a tenth.

    Rows that contain only whole numbers or booleans are often equal, and are not checked.
    """
    flat = [np.ascontiguousarray(array[:rows]).reshape(rows, -1) for array in inputs.values()]
    if any(_holds_measured_values(array) for array in flat):
        distinct = len({b"".join(_encode_row(array[row]) for array in flat) for row in range(rows)})
        if distinct < 0.9 * rows:
            yield f"{1 - distinct / rows:.0%} of the rows repeat the inputs of another row"


def _holds_measured_values(array: Array) -> bool:
    """Return whether an array has fractions or texts, which rarely repeat by chance."""
    return bool((array.dtype.kind == "f" and (array % 1 != 0).any()) or array.dtype.kind in "USO")


def _find_unused_groups(
    columns: Mapping[str, Array], permuted: Sequence[Array], rows: int
) -> Iterator[str]:
    """Yield a phrase on each array that seems to identify groups.

    Its rows with equal values err together, or its name is that of an identifier.
    """
    for name, numbers in columns.items():
        group = numbers[:rows]
        chance = _compute_chance(_compute_group_variances(permuted, group))
        if chance <= ALARM or _ID.search(name):
            why = (
                f"rows with the same value err together (p = {chance:.2g})"
                if chance <= ALARM
                else "its name suggests groups, but they are not declared"
            )
            yield (
                f"the data has {name!r}, {len(set(group.tolist()))} values in {rows} rows: {why}"
            )


def _compute_group_variances(permuted: Sequence[Array], group: Array) -> list[Array]:
    """Return, for each signal, the sum over groups of squared group sum / group size.

    The shape is (1 + permutations, 1) for each signal.
    """
    sizes = np.maximum(np.bincount(group), 1)
    # A single bincount covers all permutations: each permutation has separate group numbers.
    places = (group + len(sizes) * np.arange(_PERMUTATIONS + 1)[:, None]).ravel()
    sums = (
        np.bincount(places, weights=values.ravel()).reshape(-1, len(sizes)) for values in permuted
    )
    return [(each**2 / sizes).sum(axis=1)[:, None] for each in sums]


def _encode_row(row: Array) -> bytes:
    """Return bytes that are equal only for equal rows; objects are compared as text."""
    return repr(row.tolist()).encode() if row.dtype.kind == "O" else row.tobytes()


def _centre_by_class(signal: Array, label: Array | None) -> Array:
    """Return the signal minus the mean of each row's class.

    Without classes, or with fewer than ten rows per class on average, the mean of all rows is
    subtracted.
    """
    if label is not None and label.ndim == 1 and label.dtype.kind in "iubU":
        known, numbers = np.unique(label[: len(signal)], return_inverse=True)
        if len(known) <= len(signal) / 10:
            return np.asarray(
                signal - (np.bincount(numbers, weights=signal) / np.bincount(numbers))[numbers]
            )
    return np.asarray(signal - signal.mean())


def _are_neighbours_alike(
    inputs: Mapping[str, Array], label: Array | None, rows: int, draw: np.random.Generator
) -> bool:
    """Return whether successive rows have more similar inputs than reordered rows.

    Inputs that the rows are sorted by are skipped: their order shows no groups.
    """
    rows = min(rows, _ALIKE_ROWS)
    values = []
    for exact in _list_number_columns(inputs, rows):
        steps, rest = np.diff(exact), _centre_by_class(exact, label)
        if rest.std() > 0 and (steps < 0).any() and (steps > 0).any():
            values.append(np.clip(rest / rest.std(), -3, 3).astype(np.float32))
    if not values:
        return False
    table = np.stack(values, axis=1)
    orders = [np.arange(rows), *np.argsort(draw.random((_PERMUTATIONS, rows)), axis=1)]
    products = np.array([[np.vdot(table[order][1:], table[order][:-1])] for order in orders])
    return _compute_chance([products]) <= _ALIKE


def _list_number_columns(inputs: Mapping[str, Array], rows: int) -> Iterator[Array]:
    """Yield columns of the numeric inputs, evenly spaced over the values of a row.

    Values that are not finite are replaced by zero.
    """
    for array in inputs.values():
        if array.dtype.kind in "fiub" and array.size:
            flat = array[:rows].reshape(rows, -1)
            for column in flat.T[:: -(-flat.shape[1] // _ALIKE_COLUMNS)]:
                yield np.nan_to_num(column.astype(np.float64), posinf=0, neginf=0)


def _window_variances(values: Array) -> Array:
    """Return the mean squared sums over windows of successive rows.

    The shape is (1 + permutations, window lengths).
    """
    sums = np.cumsum(np.pad(values, ((0, 0), (1, 0))), axis=1)
    lengths = [length for length in _WINDOWS if 8 * length <= values.shape[1]] or [2]
    return np.stack([((sums[:, n:] - sums[:, :-n]) ** 2).mean(axis=1) for n in lengths], axis=1)


def _compute_chance(signals: Sequence[Array]) -> float:
    """Return the p-value of the statistics in row 0 among those of the permutations.

    It is 1 without signals. For each signal, the largest statistic is used, in standard
    deviations. The signals are combined by Fisher's method; the shared permutations account for
    their dependence.

    Args:
        signals: arrays of shape (1 + permutations, statistics), with the same permutations.
    """
    if not signals:
        return 1.0
    logs = []
    for statistics in signals:
        spread = statistics[1:].std(axis=0)
        standardised = (statistics - statistics[1:].mean(axis=0)) / np.where(
            spread > 0, spread, np.inf
        )
        logs.append(np.log(_rank_shares(standardised.max(axis=1))))
    return float(_rank_shares(-np.sum(logs, axis=0))[0])


def _rank_shares(values: Array) -> Array:
    """Return, for each value, the share of values that are at least as large."""
    return np.asarray(
        1 - np.searchsorted(np.sort(values), values - 1e-9 * np.abs(values)) / len(values)
    )
