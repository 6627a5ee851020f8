"""Options of the quantizers, as a pipeline file gives them."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from onnx_ops.domain.pipeline import Quantize
from onnx_ops.errors import UserError

KNOWN = ("op_types", "reduce_range")


def read_options(section: Quantize) -> Mapping[str, Any]:
    """`op_types` (a list of operator types to quantize) and `reduce_range` (true or false), where they are given.

    Raises:
        UserError: an option is unknown or of another type.
    """
    where = f"variant {section.name}, options"
    for name in section.options:
        if name not in KNOWN:
            close = difflib.get_close_matches(name, KNOWN, n=1)
            hint = f"Did you mean {close[0]!r}?" if close else f"There are {', '.join(KNOWN)}."
            raise UserError(f"no option is called {name!r}", where=where, remedy=hint)
    types = section.options.get("op_types", ["MatMul"])
    if not isinstance(types, list | tuple) or not types or not all(isinstance(entry, str) for entry in types):
        raise UserError("op_types must be a list of operator types", where=where, remedy="op_types: [Conv, MatMul]")
    if not isinstance(section.options.get("reduce_range", False), bool):
        raise UserError("reduce_range must be true or false", where=where)
    return section.options
