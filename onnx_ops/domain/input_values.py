"""The values that callers send for one input of a model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from annotated_types import MinLen, doc


@dataclass(frozen=True, slots=True, kw_only=True)
class InputValues:
    """Values of one input. Default: derived from the rows of `validate.samples`."""

    min: Annotated[float | None, doc("Smallest number that callers send.")] = None
    max: Annotated[float | None, doc("Largest number that callers send.")] = None
    values: Annotated[
        tuple[int | float | str, ...] | None,
        MinLen(1),
        doc("All numbers or texts that callers send: categories."),
    ] = None
    missing: Annotated[bool | None, doc("Whether callers send NaN for a missing number.")] = None
