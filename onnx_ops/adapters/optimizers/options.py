"""Options of the optimizers, as a pipeline file gives them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from annotated_types import MinLen

from onnx_ops.config.binding import bind_settings
from onnx_ops.domain.pipeline import Quantize
from onnx_ops.domain.quantization import find_type_conflict
from onnx_ops.errors import UserError

Names = Annotated[tuple[str, ...], MinLen(1)]


def read_options(section: Quantize, kind: type) -> Mapping[str, Any]:
    """Return the options that are given, as the optimizer's dataclass has them.

    Raises:
        UserError: One is unknown or wrong, or they do not fit together.
    """
    where = f"variant {section.name}, options"
    options: Any = bind_settings(section.options, kind, where=where)
    if problem := find_type_conflict(section.options):
        raise UserError(problem, where=where)
    return {name: getattr(options, name) for name in section.options}
