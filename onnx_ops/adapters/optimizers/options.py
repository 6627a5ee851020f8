"""Options of the optimizers, as a pipeline file gives them."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from onnx_ops.domain.pipeline import Quantize
from onnx_ops.domain.quantization import types_problem
from onnx_ops.errors import UserError


@dataclass(frozen=True, slots=True)
class Kind:
    """What a value must be, in words, and whether one is."""

    words: str
    fits: Callable[[Any], bool]


YES_NO = Kind("true or false", lambda value: isinstance(value, bool))
NAMES = Kind(
    "a list of names, such as [Conv, MatMul]",
    lambda value: isinstance(value, list | tuple) and bool(value) and all(isinstance(one, str) for one in value),
)
SIZES = Kind(
    "a mapping of names to sizes, such as {sequence: 128}",
    lambda value: (
        isinstance(value, Mapping)
        and bool(value)
        and all(isinstance(size, int) and not isinstance(size, bool) and size > 0 for size in value.values())
    ),
)


def whole(least: int) -> Kind:
    return Kind(
        f"a whole number of at least {least}",
        lambda value: isinstance(value, int) and not isinstance(value, bool) and value >= least,
    )


def one_of(*known: str | int) -> Kind:
    return Kind(f"one of {', '.join(map(str, known))}", lambda value: not isinstance(value, bool) and value in known)


def read_options(section: Quantize, known: Mapping[str, Kind]) -> Mapping[str, Any]:
    """The options that are given.

    Raises:
        UserError: one is unknown or of another kind, or they do not fit together.
    """
    where = f"variant {section.name}, options"
    for name, value in section.options.items():
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"Did you mean {close[0]!r}?" if close else f"There are {', '.join(known) or 'none'}."
            raise UserError(f"no option is called {name!r}", where=where, remedy=hint)
        if not known[name].fits(value):
            raise UserError(f"{name} must be {known[name].words}", where=where)
    if problem := types_problem(section.options):
        raise UserError(problem, where=where)
    return section.options
