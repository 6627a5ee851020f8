"""Probes: inputs made from real samples on which a wrong export shows itself. Deterministic.

A group that is inside the domain holds rows that callers can send: there a difference refuses the export. The others
(NaN where the data holds none, rows of a thousandfold size, no rows at all) only advise.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from onnx_ops.statistics.input_domain import InputDomain

AnyArray = npt.NDArray[np.generic]
Bools = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float64]
Rows = npt.NDArray[np.intp]
Tensors = Mapping[str, AnyArray]

REAL = "real"
"""Name of the group that holds real samples as they are."""

ENOUGH_ROWS = 32
"""Rows below which the largest rounding error is not a fair sample of the noise."""

BATCH_SIZES = (1, 2, 3, 17, 64, 257)

_RANGE_ROWS = 3 * ENOUGH_ROWS
_FACTORS = {"x10": 10.0, "x1e3": 1e3, "x1e5": 1e5, "x1e-8": 1e-8, "negatives": -1.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeGroup:
    """Rows of one kind. `inside` says whether callers can send them."""

    inputs: Tensors
    inside: bool = True


def range_inputs(samples: Tensors, domains: Mapping[str, InputDomain]) -> Tensors:
    """96 rows within the domain: its ends and their mixtures, one place at an end, and values in between.

    Places that do not vary independently keep real rows. So do text and booleans, but that the columns of a table of
    texts are mixed.

    Args:
        samples: real inputs by name, axis 0 is the batch.
        domains: of each input.

    Raises:
        ValueError: there is no row.
    """
    rows = _even_rows(samples, _RANGE_ROWS)
    draw = np.random.default_rng(0)
    return {name: _in_range(array, rows, domains[name], draw) for name, array in samples.items()}


def batch_inputs(samples: Tensors) -> dict[str, Tensors]:
    """Real rows in batches of 1, 2, 3, 17, 64 and 257, each starting where the one before ended.

    Raises:
        ValueError: there is no row.
    """
    count = _count(samples)
    groups: dict[str, Tensors] = {}
    start = 0
    for size in BATCH_SIZES:
        chosen = (start + np.arange(size)) % count
        groups[f"batches:{size}"] = {name: array[chosen] for name, array in samples.items()}
        start += size
    return groups


def probe_groups(samples: Tensors, domains: Mapping[str, InputDomain], *, empty: bool) -> dict[str, ProbeGroup]:
    """Real rows, rows within the domain, and 32 rows each of what lies outside of it.

    `beyond_range` holds multiples of real rows; a multiple that an input's type cannot hold is left out;
    `beyond_range:texts` empty and unseen texts. The rows of
    `missing` and `infinite` have one such element in each float input; NaN where it may come, if it may anywhere.
    Only floats are distorted; a group that would only repeat real rows is left out.

    Args:
        samples: real inputs by name, axis 0 is the batch.
        domains: of each input.
        empty: whether a batch of no rows is among them.

    Raises:
        ValueError: there is no row.
    """
    found = {REAL: ProbeGroup(inputs=samples)}
    kinds = {array.dtype.kind for array in samples.values()}
    if kinds - set("b"):
        found["range"] = ProbeGroup(inputs=range_inputs(samples, domains))
    rows = _even_rows(samples, ENOUGH_ROWS)
    if "f" in kinds:
        for name, factor in _FACTORS.items():
            if all(_holds(array, factor) for array in samples.values()):
                multiple = {n: _multiple(array[rows], factor) for n, array in samples.items()}
                found[f"beyond_range:{name}"] = ProbeGroup(inputs=multiple, inside=False)
        holed = any(domain.missing.any() for domain in domains.values())
        anywhere = {name: np.ones((), dtype=bool) for name, array in samples.items() if array.dtype.kind == "f"}
        at = {name: domain.missing for name, domain in domains.items()} if holed else anywhere
        found["missing"] = ProbeGroup(inputs=_distorted(samples, rows, (np.nan,), at), inside=holed)
        found["infinite"] = ProbeGroup(inputs=_distorted(samples, rows, (np.inf, -np.inf), anywhere), inside=False)
    if "U" in kinds:
        found["beyond_range:texts"] = ProbeGroup(
            inputs={
                name: _replaced(array[rows], domains[name]) if array.dtype.kind == "U" else array[rows]
                for name, array in samples.items()
            },
            inside=False,
        )
    if empty:
        found["empty_batch"] = ProbeGroup(inputs={name: array[:0] for name, array in samples.items()}, inside=False)
    return found


def in_rows(samples: Tensors, count: int) -> Tensors:
    """The first `count` rows; rows repeat if there are fewer."""
    chosen = np.arange(count) % _count(samples)
    return {name: array[chosen] for name, array in samples.items()}


def _count(samples: Tensors) -> int:
    count = min((len(array) for array in samples.values()), default=0)
    if not count:
        raise ValueError("probes are made from real samples, and there are none")
    return count


def _even_rows(samples: Tensors, rows: int) -> Rows:
    count = _count(samples)
    return np.arange(rows) * max(1, count // rows) % count


def _in_range(array: AnyArray, rows: Rows, domain: InputDomain, draw: np.random.Generator) -> AnyArray:
    chosen = array[rows]
    if domain.categories is not None:
        return draw.choice(domain.categories, chosen.shape).astype(array.dtype)
    if array.dtype.kind not in "fiu":
        return _mixed(array, chosen.shape, draw) if domain.recombined else chosen
    made = _numbers(chosen, domain, draw)
    if domain.listed.any():
        made = np.where(domain.listed, _mixed(array, chosen.shape, draw).astype(np.float64), made)
    if array.dtype.kind == "f":
        made[~np.isfinite(chosen.astype(np.float64))] = np.nan
        return np.where(np.isnan(made), chosen.astype(np.float64), made).astype(array.dtype)
    if not domain.recombined:
        made[2:] = chosen[2:]
    return made.astype(array.dtype)


def _numbers(chosen: AnyArray, domain: InputDomain, draw: np.random.Generator) -> Floats:
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
    if chosen.dtype.kind in "iu":
        made[2 * third :] = _swept(low, high, made[2 * third :].shape)
    return np.where(domain.whole, np.clip(np.round(made), np.ceil(low), np.floor(high)), made)


def _swept(low: Floats, high: Floats, shape: tuple[int, ...]) -> Floats:
    """Whole numbers from end to end, as many different ones as fit."""
    count = int(np.prod(shape))
    width = high - low + 1
    step = np.maximum(1.0, np.floor(width / max(1, count)))
    return np.asarray(low + (np.arange(count).reshape(shape) * step) % np.maximum(width, 1))


def _mixed(array: AnyArray, shape: tuple[int, ...], draw: np.random.Generator) -> AnyArray:
    return np.take_along_axis(array, draw.integers(0, len(array), shape), axis=0)


def _distorted(samples: Tensors, rows: Rows, values: Sequence[float], at: Mapping[str, Bools]) -> Tensors:
    """The rows with one of the values in each, walking over the places where it may stand."""
    found = {name: array[rows] for name, array in samples.items()}
    for name, allowed in at.items():
        chosen = found[name]
        if chosen.dtype.kind != "f":
            continue
        flat = chosen.astype(np.float64).reshape(len(chosen), -1)
        places = np.flatnonzero(np.broadcast_to(allowed, chosen.shape[1:]))
        if places.size:
            row = np.arange(len(chosen))
            flat[row, places[row * max(1, len(places) // len(chosen)) % len(places)]] = np.resize(values, len(chosen))
            found[name] = flat.reshape(chosen.shape).astype(chosen.dtype)
    return found


def _replaced(chosen: AnyArray, domain: InputDomain) -> AnyArray:
    """Empty and unseen texts in turn; texts of declared categories stay."""
    if domain.categories is not None:
        return chosen
    row = np.arange(len(chosen)).reshape(-1, *(1,) * (chosen.ndim - 1))
    return np.where(row % 3 == 0, "", np.where(row % 3 == 1, "unseen", chosen))


def _multiple(chosen: AnyArray, factor: float) -> AnyArray:
    return (chosen.astype(np.float64) * factor).astype(chosen.dtype) if chosen.dtype.kind == "f" else chosen


def _holds(array: AnyArray, factor: float) -> bool:
    if array.dtype.kind != "f":
        return True
    values = np.abs(array.astype(np.float64))
    largest = float(values[np.isfinite(values)].max(initial=0.0))
    return abs(factor) * largest < float(np.finfo(array.dtype.name).max)
