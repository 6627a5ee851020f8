"""Probes: deterministic groups of inputs that reveal faults of an export.

The domain of an input is the set of values that callers can send. It is learned from real rows, the
graph, and the declarations of the pipeline. Unless the parity gate sets another rule, the export is
refused for a difference on a group within the domain. A difference on another group is advisory.
Examples are NaN where the data has none, rows scaled by 1,000, and an empty batch.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from onnx_ops.domain.input_values import InputValues
from onnx_ops.errors import UserError
from onnx_ops.ports.data import Array, Tensors

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]

MARGIN = 0.5
"""Share of the width of a range of real numbers that is added to each of its ends.

Rows are only a sample of what callers send.
"""

_MOST_CATEGORIES = 64
"""Maximum number of distinct values of a column that can contain categories."""
_MOST_PLACES = 1 << 16
"""Maximum number of columns of a table that has a range for each column."""

Rows = npt.NDArray[np.intp]

REAL = "real"
"""Name of the group of unchanged real rows."""

LENGTHS = "lengths:"
"""Prefix of the names of groups at other sizes of free axes.

For example: `lengths:height=1,width=1`.
"""

RANGE = "range"
"""Name of the group of rows that are generated within the domain."""

MIN_NOISE_ROWS = 32
"""Minimum number of rows for an estimate of the noise.

With fewer rows, the largest rounding error is not a fair sample.
"""

BATCH_SIZES = (1, 2, 3, 17, 64, 257)

_RANGE_ROWS = 3 * MIN_NOISE_ROWS
_FACTORS = {"x10": 10.0, "x1e3": 1e3, "x1e5": 1e5, "x1e-8": 1e-8, "negatives": -1.0}

Axes = Mapping[str, Sequence[tuple[str, int]]]
"""Positions (input, axis) of each free axis by symbol, without the batch axis 0."""

_GROUP_BYTES = 1 << 26
"""Maximum size of a group of `make_sized_inputs` in bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InputDomain:
    """The possible values of one input, for each place (element of a row).

    Args:
        low, high: finite bounds of numbers, of a shape that broadcasts against a row; 0 for inputs
            without a range.
        whole: places that take only whole numbers; same shape.
        listed: places that take only the values that occur at that place; same shape.
        categories: the only possible values of all places, if the pipeline lists them; otherwise
            None.
        recombined: whether places vary independently, so that any mixture of rows is a valid row.
        missing: places that can contain NaN; same shape.
        encoded: whether each row is an encoded file, whose bytes are never changed.
    """

    low: Floats
    high: Floats
    whole: Bools
    listed: Bools
    categories: Array | None
    recombined: bool
    missing: Bools
    encoded: bool = False


def learn_domains(
    samples: Tensors,
    declared: Mapping[str, InputValues] | None = None,
    bounds: Mapping[str, tuple[int, int]] | None = None,
    encoded: Collection[str] = (),
) -> dict[str, InputDomain]:
    """Derive the domain of each input from rows, declarations and the graph.

    Tables of numbers (2-D, up to 65,536 columns) have a range for each column. Images, series and
    wider tables have one range for all places. A range of real numbers is widened by half its width
    at each end, but not across zero. A range of whole numbers is not widened. A column of a table
    without a declared range can contain categories. These are up to 64 distinct whole numbers,
    fewer than half its rows. No other values are in its domain then.

    Args:
        samples: real rows by input; axis 0 is the batch.
        declared: values that the pipeline declares for some inputs.
        bounds: smallest and largest index that the graph accepts, for inputs of indices.
        encoded: inputs whose rows are encoded files.

    Raises:
        ValueError: there is no row.
        UserError: values other than numbers are declared for a numeric input.
    """
    if not min((len(array) for array in samples.values()), default=0):
        raise ValueError("there are no real samples to learn the domain from")
    domains = {}
    for name, array in samples.items():
        if name in encoded:
            domains[name] = replace(_make_unordered_domain(array, None), encoded=True)
            continue
        values = (declared or {}).get(name, InputValues())
        categories = _read_categories(name, array, values)
        domains[name] = _learn(array, values, categories, (bounds or {}).get(name))
    return domains


def _learn(
    array: Array, declared: InputValues, categories: Array | None, bound: tuple[int, int] | None
) -> InputDomain:
    if array.dtype.kind not in "fiu":
        return _make_unordered_domain(array, categories)
    values = array.astype(np.float64)
    finite = np.isfinite(values)
    by_place = array.ndim <= 2 and values[0].size <= _MOST_PLACES
    axes = 0 if by_place else tuple(range(array.ndim))
    whole: Bools = np.asarray(((values == np.round(values)) | ~finite).all(axis=axes))
    low, high = _widen_range(*_find_range(values, finite, axes), whole)
    low, high = _apply_declared_range(low, high, declared, bound, categories)
    smallest, largest = _find_type_limits(array.dtype)
    is_mask = array.dtype.kind in "iu" and bound is None and bool(np.isin(values, (0, 1)).all())
    is_free = not is_mask and not _has_declared_range(declared, bound)
    return InputDomain(
        low=np.clip(low, smallest, largest),
        high=np.clip(high, smallest, largest),
        whole=whole,
        listed=_find_listed(values, whole) if is_free else np.zeros_like(whole),
        categories=categories,
        # The values of a mask depend on each other, for example by padding at the end of a row, so
        # they are not recombined.
        recombined=(array.ndim <= 2 and not is_mask) or bound is not None,
        missing=_find_missing(values, axes, declared),
    )


def _read_categories(name: str, array: Array, declared: InputValues) -> Array | None:
    categories = None if declared.values is None else np.asarray(declared.values)
    if array.dtype.kind in "fiu" and categories is not None and categories.dtype.kind not in "fiu":
        raise UserError(
            f"input {name!r}: its values are numbers, but {declared.values} are declared",
            where="inputs",
            remedy="Declare values of the input's type.",
        )
    return categories


def _make_unordered_domain(array: Array, categories: Array | None) -> InputDomain:
    """Return the domain of texts, booleans or objects, which have no range."""
    kind = array.dtype.kind
    return InputDomain(
        low=np.zeros(()),
        high=np.zeros(()),
        whole=np.ones((), dtype=bool),
        listed=np.ones((), dtype=bool),
        categories=categories if kind in "USO" else None,
        recombined=array.ndim == 2 and kind != "b",
        missing=np.zeros((), dtype=bool),
    )


def _find_range(
    values: Floats, finite: Bools, axes: int | tuple[int, ...]
) -> tuple[Floats, Floats]:
    """Return the smallest and the largest finite value of each place.

    Both are 0 for a place without a finite value.
    """
    known = finite.any(axis=axes)
    low = np.where(known, np.where(finite, values, np.inf).min(axis=axes, initial=np.inf), 0.0)
    high = np.where(known, np.where(finite, values, -np.inf).max(axis=axes, initial=-np.inf), 0.0)
    return low, high


def _widen_range(low: Floats, high: Floats, whole: Bools) -> tuple[Floats, Floats]:
    """Return ranges of real numbers, widened at each end but not across zero.

    Values such as counts and pixels have one sign.
    """
    room = np.where(whole, 0.0, (high - low) * MARGIN)
    return (
        np.where(low >= 0, np.maximum(low - room, 0.0), low - room),
        np.where(high <= 0, np.minimum(high + room, 0.0), high + room),
    )


def _apply_declared_range(
    low: Floats,
    high: Floats,
    declared: InputValues,
    bound: tuple[int, int] | None,
    categories: Array | None,
) -> tuple[Floats, Floats]:
    """Replace learned bounds by declared ones.

    Values that the pipeline declares override the graph. Listed values override a range.
    """
    if bound is not None:
        low, high = np.full_like(low, bound[0]), np.full_like(high, bound[1])
    if declared.min is not None:
        low = np.full_like(low, declared.min)
    if declared.max is not None:
        high = np.full_like(high, declared.max)
    if categories is not None:
        low, high = np.full_like(low, categories.min()), np.full_like(high, categories.max())
    return low, high


def _has_declared_range(declared: InputValues, bound: tuple[int, int] | None) -> bool:
    return bound is not None or declared.min is not None or declared.max is not None


def _find_listed(values: Floats, whole: Bools) -> Bools:
    """Return which columns of a table can contain categories.

    Such a column has few distinct whole numbers, and more than twice as many rows.
    """
    if whole.ndim != 1:
        # Such an input is not a table or has too many columns, so it has one range for all places.
        return np.zeros_like(whole)
    distinct = 1 + (np.diff(np.sort(values, axis=0), axis=0) != 0).sum(axis=0)
    return np.asarray(whole & (distinct <= _MOST_CATEGORIES) & (distinct < len(values) / 2))


def _find_missing(values: Floats, axes: int | tuple[int, ...], declared: InputValues) -> Bools:
    missing: Bools = np.asarray(np.isnan(values).any(axis=axes))
    return missing if declared.missing is None else np.full_like(missing, declared.missing)


def _find_type_limits(dtype: np.dtype[Any]) -> tuple[float, float]:
    """Return the smallest and the largest float64 that fit into a number type."""
    limits = np.finfo(dtype.name) if dtype.kind == "f" else np.iinfo(dtype.name)
    largest = float(limits.max)
    if int(largest) > limits.max:  # float64 rounds 2**63 - 1 up.
        largest = float(np.nextafter(largest, 0.0))
    return float(limits.min), largest


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeGroup:
    """Rows of one kind; `inside` is True if callers can send them."""

    inputs: Tensors
    inside: bool = True


def make_range_inputs(samples: Tensors, domains: Mapping[str, InputDomain]) -> Tensors:
    """Make 96 rows within the domain: bounds, mixtures of them, and values in between.

    Integers that do not vary independently have two rows at the bounds, and real rows. Listed
    places mix the values of real rows, and declared values are drawn at random. Booleans, texts and
    encoded files are those of real rows, except that the columns of a table of texts are mixed.
    """
    rows = _even_rows(samples, _RANGE_ROWS)
    draw = np.random.default_rng(0)
    return {
        name: _draw_in_range(array, rows, domains[name], draw) for name, array in samples.items()
    }


def make_batch_inputs(samples: Tensors) -> dict[str, Tensors]:
    """Return successive batches of 1, 2, 3, 17, 64 and 257 real rows."""
    count = _count_rows(samples)
    groups: dict[str, Tensors] = {}
    start = 0
    for size in BATCH_SIZES:
        chosen = (start + np.arange(size)) % count
        groups[f"batches:{size}"] = {name: array[chosen] for name, array in samples.items()}
        start += size
    return groups


def make_probe_groups(
    samples: Tensors, domains: Mapping[str, InputDomain], *, empty: bool
) -> dict[str, ProbeGroup]:
    """Return the groups of real rows, and of rows within and outside the domain.

    The groups `beyond_range:x10` and the like contain multiples of the floats of real rows, if
    the types of all float inputs can represent them. `beyond_range:texts` contains empty and unseen
    texts. `missing` has one NaN, and `infinite` one infinity, in each row of each float input. If
    the domain allows NaN in some places, `missing` has NaN only in these places, and is inside the
    domain. Groups for types that no input has are omitted.

    Args:
        empty: whether to include an empty batch.
    """
    kinds = {array.dtype.kind for name, array in samples.items() if not domains[name].encoded}
    rows = _even_rows(samples, MIN_NOISE_ROWS)
    groups = {REAL: ProbeGroup(inputs=samples)}
    if kinds - set("b"):
        groups[RANGE] = ProbeGroup(inputs=make_range_inputs(samples, domains))
    if "f" in kinds:
        groups |= _make_multiples(samples, rows)
        groups |= _make_non_finite(samples, rows, domains)
    if kinds & set("UO"):
        groups["beyond_range:texts"] = ProbeGroup(
            inputs=_insert_texts(samples, rows, domains), inside=False
        )
    if empty:
        groups["empty_batch"] = ProbeGroup(
            inputs={name: array[:0] for name, array in samples.items()}, inside=False
        )
    return groups


def _make_multiples(samples: Tensors, rows: Rows) -> dict[str, ProbeGroup]:
    """Return multiples of real rows that the types of all float inputs can represent."""
    # Each pair shows how far a float input can be multiplied: its largest value, and that of its
    # type.
    room = []
    for array in (array for array in samples.values() if array.dtype.kind == "f"):
        values = np.abs(array.astype(np.float64))
        room.append(
            (
                float(values[np.isfinite(values)].max(initial=0.0)),
                float(np.finfo(array.dtype.name).max),
            )
        )
    groups = {}
    for name, factor in _FACTORS.items():
        if all(abs(factor) * largest < most for largest, most in room):
            multiple = {n: _multiply_floats(array[rows], factor) for n, array in samples.items()}
            groups[f"beyond_range:{name}"] = ProbeGroup(inputs=multiple, inside=False)
    return groups


def _multiply_floats(chosen: Array, factor: float) -> Array:
    return (
        (chosen.astype(np.float64) * factor).astype(chosen.dtype)
        if chosen.dtype.kind == "f"
        else chosen
    )


def _make_non_finite(
    samples: Tensors, rows: Rows, domains: Mapping[str, InputDomain]
) -> dict[str, ProbeGroup]:
    """Return rows with a NaN, and rows with an infinity, in each float input."""
    has_missing = any(domain.missing.any() for domain in domains.values())
    everywhere = {
        name: np.ones((), dtype=bool) for name, array in samples.items() if array.dtype.kind == "f"
    }
    places = (
        {name: domain.missing for name, domain in domains.items()} if has_missing else everywhere
    )
    infinite = _insert_values(samples, rows, (np.inf, -np.inf), everywhere)
    return {
        "missing": ProbeGroup(
            inputs=_insert_values(samples, rows, (np.nan,), places), inside=has_missing
        ),
        "infinite": ProbeGroup(inputs=infinite, inside=False),
    }


def _insert_texts(samples: Tensors, rows: Rows, domains: Mapping[str, InputDomain]) -> Tensors:
    """Return rows whose text is empty, unseen or real in turn.

    Inputs whose texts are categories are unchanged.
    """
    inputs = {name: array[rows] for name, array in samples.items()}
    for name, chosen in inputs.items():
        if chosen.dtype.kind in "UO" and domains[name].categories is None:
            row = np.arange(len(chosen)).reshape(-1, *(1,) * (chosen.ndim - 1))
            inputs[name] = np.where(row % 3 == 0, "", np.where(row % 3 == 1, "unseen", chosen))
    return inputs


def take_rows(samples: Tensors, count: int) -> Tensors:
    """Return the first `count` rows, repeated if there are fewer rows."""
    chosen = np.arange(count) % _count_rows(samples)
    return {name: array[chosen] for name, array in samples.items()}


def _count_rows(samples: Tensors) -> int:
    count = min((len(array) for array in samples.values()), default=0)
    if not count:
        raise ValueError("there are no real samples to make probes from")
    return count


def _even_rows(samples: Tensors, rows: int) -> Rows:
    count = _count_rows(samples)
    return np.arange(rows) * max(1, count // rows) % count


def _draw_in_range(
    array: Array, rows: Rows, domain: InputDomain, draw: np.random.Generator
) -> Array:
    chosen = array[rows]
    if domain.encoded:
        return chosen
    if domain.categories is not None:
        return draw.choice(domain.categories, chosen.shape).astype(array.dtype)
    if array.dtype.kind not in "fiu":
        return _mix_rows(array, chosen.shape, draw) if domain.recombined else chosen
    made = _draw_numbers(chosen, domain, draw)
    if domain.listed.any():
        made = np.where(
            domain.listed, _mix_rows(array, chosen.shape, draw).astype(np.float64), made
        )
    if array.dtype.kind == "f":
        made[~np.isfinite(chosen.astype(np.float64))] = np.nan
        return np.where(np.isnan(made), chosen.astype(np.float64), made).astype(array.dtype)
    # In float64, the sample 2**63 - 1 becomes 2**63, which int64 cannot represent.
    # `domain.high` is below it.
    whole = np.clip(made, domain.low, domain.high).astype(array.dtype)
    if not domain.recombined:
        whole[2:] = chosen[2:]
    return whole


def _draw_numbers(chosen: Array, domain: InputDomain, draw: np.random.Generator) -> Floats:
    shape = chosen.shape
    low: Floats = np.broadcast_to(domain.low, shape[1:])
    high: Floats = np.broadcast_to(domain.high, shape[1:])
    middle, third = low + (high - low) / 2, len(chosen) // 3
    made = low + (high - low) * draw.random(shape)
    plain = np.stack([low, high, middle, np.clip(0.0, low, high), np.clip(1.0, low, high)])
    made[: len(plain)] = plain
    corners = slice(len(plain), third)
    made[corners] = np.where(draw.random(made[corners].shape) < 0.5, low, high)
    spikes = made[third : 2 * third].reshape(third, -1)
    spikes[:] = np.clip(0.0, low, high).reshape(1, -1)
    if places := spikes.shape[1]:
        row = np.arange(third)
        place = row * max(1, places // third) % places
        ends = np.where(row % 2, low.reshape(-1)[place], high.reshape(-1)[place])
        spikes[row, place] = ends
    made[third : 2 * third] = spikes.reshape(made[third : 2 * third].shape)
    # For an integer input, the last third of the rows counts up from the lower bound in equal
    # steps through the whole range. If the range has no more numbers than these rows have
    # elements, each is tested.
    if chosen.dtype.kind in "iu":
        swept = made[2 * third :].shape
        count, width = int(np.prod(swept)), high - low + 1
        step = np.maximum(1.0, width / max(1, count))
        offset = np.floor(np.arange(count).reshape(swept) * step)
        made[2 * third :] = low + offset % np.maximum(width, 1)
    return np.where(domain.whole, np.clip(np.round(made), np.ceil(low), np.floor(high)), made)


def _mix_rows(array: Array, shape: tuple[int, ...], draw: np.random.Generator) -> Array:
    return np.take_along_axis(array, draw.integers(0, len(array), shape), axis=0)


def _insert_values(
    samples: Tensors, rows: Rows, values: Sequence[float], at: Mapping[str, Bools]
) -> Tensors:
    """Put a value into each row of each float input.

    The places of successive rows are spread evenly over the allowed ones. `values` are used in
    turn.
    """
    inputs = {name: array[rows] for name, array in samples.items()}
    for name, allowed in at.items():
        chosen = inputs[name]
        if chosen.dtype.kind != "f":
            continue
        flat = chosen.astype(np.float64).reshape(len(chosen), -1)
        places = np.flatnonzero(np.broadcast_to(allowed, chosen.shape[1:]))
        if places.size:
            row = np.arange(len(chosen))
            flat[row, places[row * max(1, len(places) // len(chosen)) % len(places)]] = np.resize(
                values, len(chosen)
            )
            inputs[name] = flat.reshape(chosen.shape).astype(chosen.dtype)
    return inputs


def choose_other_sizes(size: int) -> tuple[int, ...]:
    """Return other sizes of an axis to test.

    They are 1, half the size, and twice the size. Half the size is rounded down. Two more are odd:
    the smallest that is at least the half, and the smallest above the size.
    """
    half, larger = size // 2, size + 1 + size % 2
    return tuple(sorted({1, half, half | 1, larger, 2 * size} - {0, size}))


def make_sized_inputs(samples: Tensors, axes: Axes) -> dict[str, Tensors]:
    """Return 32 real rows at other sizes of each free axis, and of all axes together.

    Rows are cut or repeated to fit. A symbol that several inputs share has the same size in all of
    them. A group has fewer rows if 32 exceed 64 MiB, and is omitted if 2 rows exceed it.
    """
    first = take_rows(samples, 1)
    present = {symbol: int(first[at[0][0]].shape[at[0][1]]) for symbol, at in axes.items() if at}
    groups: dict[str, Tensors] = {}
    for sizes in _combine_sizes(present):
        row_bytes = sum(array.nbytes for array in _resize(first, axes, sizes).values())
        count = min(MIN_NOISE_ROWS, _GROUP_BYTES // max(1, row_bytes))
        if count >= 2:
            name = LENGTHS + ",".join(f"{symbol}={size}" for symbol, size in sizes.items())
            groups[name] = _resize(take_rows(samples, count), axes, sizes)
    return groups


def _combine_sizes(present: Mapping[str, int]) -> list[dict[str, int]]:
    """Return combinations of other sizes of the axes.

    The first combinations change one axis each. The others change all axes: to the smallest, to the
    largest, and to unequal sizes.
    """
    ranked = {symbol: choose_other_sizes(size) for symbol, size in present.items()}
    combined = [{symbol: size} for symbol, sizes in ranked.items() for size in sizes]
    if len(ranked) > 1:
        combined += [{symbol: sizes[end] for symbol, sizes in ranked.items()} for end in (0, -1)]
        # The position in the list of sizes changes from axis to axis: with equal sizes, an
        # exchange of axes would have no effect.
        unequal = {
            symbol: sizes[(place + 2) % len(sizes)]
            for place, (symbol, sizes) in enumerate(ranked.items())
        }
        combined.append(unequal)
    return combined


def _resize(rows: Tensors, axes: Axes, sizes: Mapping[str, int]) -> Tensors:
    made = dict(rows)
    for symbol, size in sizes.items():
        for name, axis in axes[symbol]:
            if present_size := made[name].shape[axis]:
                made[name] = np.take(made[name], np.arange(size) % present_size, axis=axis)
    return made
