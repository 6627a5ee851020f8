"""The domain of an input: which values callers can send, learnt from real rows, the graph and what is declared."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from onnx_ops.domain.inputs import InputValues

AnyArray = npt.NDArray[np.generic]
Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]
Tensors = Mapping[str, AnyArray]

MARGIN = 0.5
"""By how much of its width a range of real numbers is widened at each end: rows are a sample of what callers send."""

_MOST_CATEGORIES = 64
_MOST_PLACES = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class InputDomain:
    """The values of one input by place, a place being an element of a row.

    Args:
        low, high: finite bounds, of a shape that broadcasts against a row.
        whole: places that hold whole numbers only; same shape.
        listed: places that take the values which were seen there, and no others; same shape.
        categories: the only values there are, whatever the place; None where any between the bounds may come.
        recombined: whether places vary independently of each other, so that any mixture of rows is a row.
        missing: places at which NaN may come; same shape.
    """

    low: Floats
    high: Floats
    whole: Bools
    listed: Bools
    categories: AnyArray | None
    recombined: bool
    missing: Bools


def learn_domains(
    samples: Tensors,
    declared: Mapping[str, InputValues] | None = None,
    bounds: Mapping[str, tuple[int, int]] | None = None,
) -> dict[str, InputDomain]:
    """The domain of each input.

    Tables (2-D floats) have a range for each column; images, series and whole numbers of other ranks one for all
    places. A range of real numbers is widened by half its width at each end, but not across zero; one of whole numbers
    is not. Where a column of a table holds up to 64 different whole numbers these may be categories, so that no others
    are in the domain.

    Args:
        samples: real rows by input, axis 0 is the batch.
        declared: what the pipeline says of some inputs.
        bounds: least and largest index that the graph takes of whole-number inputs that are indices.

    Raises:
        ValueError: there is no row, or texts are declared for an input of numbers.
    """
    if not min((len(array) for array in samples.values()), default=0):
        raise ValueError("the domain is learnt from real samples, and there are none")
    found = {}
    for name, array in samples.items():
        try:
            found[name] = _learn(array, (declared or {}).get(name, InputValues()), (bounds or {}).get(name))
        except ValueError as error:
            raise ValueError(f"input {name!r}: {error}") from error
    return found


def _learn(array: AnyArray, declared: InputValues, bound: tuple[int, int] | None) -> InputDomain:
    categories = None if declared.values is None else np.asarray(declared.values)
    kind = array.dtype.kind
    if kind not in "fiu":
        nothing = np.zeros(())
        return InputDomain(
            low=nothing,
            high=nothing,
            whole=np.ones((), dtype=bool),
            listed=np.ones((), dtype=bool),
            categories=categories if kind in "USO" else None,
            recombined=array.ndim == 2 and kind != "b",
            missing=np.zeros((), dtype=bool),
        )
    if categories is not None and categories.dtype.kind not in "fiu":
        raise ValueError(f"its values are numbers, and {declared.values} are declared")
    values = array.astype(np.float64)
    finite = np.isfinite(values)
    by_place = array.ndim <= 2 and values[0].size <= _MOST_PLACES
    axes = 0 if by_place else tuple(range(array.ndim))
    known = finite.any(axis=axes)
    low = np.where(known, np.where(finite, values, np.inf).min(axis=axes, initial=np.inf), 0.0)
    high = np.where(known, np.where(finite, values, -np.inf).max(axis=axes, initial=-np.inf), 0.0)
    whole: Bools = np.asarray(((values == np.round(values)) | ~finite).all(axis=axes))
    room = np.where(whole, 0.0, (high - low) * MARGIN)
    low = np.where(low >= 0, np.maximum(low - room, 0.0), low - room)
    high = np.where(high <= 0, np.minimum(high + room, 0.0), high + room)
    if bound is not None:
        low, high = np.full_like(low, bound[0]), np.full_like(high, bound[1])
    if declared.min is not None:
        low = np.full_like(low, declared.min)
    if declared.max is not None:
        high = np.full_like(high, declared.max)
    if categories is not None:
        low, high = np.full_like(low, categories.min()), np.full_like(high, categories.max())
    binary = kind in "iu" and bound is None and bool(np.isin(values, (0, 1)).all())
    free = not binary and bound is None and declared.min is None and declared.max is None
    missing: Bools = np.asarray(np.isnan(values).any(axis=axes))
    if declared.missing is not None:
        missing = np.full_like(missing, declared.missing)
    largest = np.finfo(array.dtype.name).max if kind == "f" else np.iinfo(array.dtype.name).max
    return InputDomain(
        low=np.clip(low, -float(largest), float(largest)),
        high=np.clip(high, -float(largest), float(largest)),
        whole=whole,
        listed=whole & _few(values) if free and by_place and array.ndim == 2 else np.zeros_like(whole),
        categories=categories,
        recombined=(array.ndim <= 2 and not binary) or bound is not None,
        missing=missing,
    )


def _few(values: Floats) -> Bools:
    """Columns that hold few different values."""
    ordered = np.sort(values, axis=0)
    different = 1 + (np.diff(ordered, axis=0) != 0).sum(axis=0)
    return np.asarray((different <= _MOST_CATEGORIES) & (different < len(values) / 2))
