"""What callers may send to a model: declared in a pipeline file, else learnt from its data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal, TypeAlias

from annotated_types import MinLen, doc

InputGroup: TypeAlias = Literal[
    "range", "batches", "lengths", "splits", "beyond_range", "missing", "infinite", "empty_batch"
]
"""Kinds of inputs that parity asks beside the real rows; `range` to `splits` are such as callers can send."""

GroupRule: TypeAlias = Literal["fail", "advise", "ignore"]


@dataclass(frozen=True, slots=True, kw_only=True)
class InputValues:
    """The values of one input. What is left out is learnt from the rows of `validate.samples`."""

    min: Annotated[float | None, doc("Smallest number that callers send.")] = None
    max: Annotated[float | None, doc("Largest number that callers send.")] = None
    values: Annotated[
        tuple[int | float | str, ...] | None, MinLen(1), doc("The only numbers or texts that callers send: categories.")
    ] = None
    missing: Annotated[bool | None, doc("Whether callers send NaN for a missing number.")] = None
