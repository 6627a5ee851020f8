"""Check the axes that a pipeline declares free."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from onnx_ops.domain.artifact import ModelInfo
from onnx_ops.errors import UserError
from onnx_ops.measure.reference_outputs import ReferenceOutputs
from onnx_ops.statistics.probes import LENGTHS

if TYPE_CHECKING:
    from onnx_ops.domain.pipeline import Export


def check_free_axes(section: Export, model_info: ModelInfo, reference: ReferenceOutputs) -> None:
    """Check that declared axes are free in the export, and in the source.

    If the source rejected other sizes of an axis, it must have answered at least one other size.
    The answers are compared with the export later. Without this check, an axis could be released
    for which every comparison at another size was left out.

    Raises:
        UserError: an axis is fixed in the file, or the source rejects all other sizes.
    """
    shapes = {spec.name: spec.shape for spec in model_info.inputs}
    answered = {group.name: "" for group in reference.groups}
    for name, axes in section.dynamic.items():
        shape = shapes.get(name, ())
        for axis, symbol in axes.items():
            place, remedy = (
                f"axis {axis} of {name} ({symbol})",
                f"Leave the axis out of `export.dynamic.{name}`.",
            )
            if axis < len(shape) and isinstance(shape[axis], int):
                raise UserError(
                    f"the export has {place} fixed at {shape[axis]}",
                    where="export.dynamic",
                    why="the converter or the model fixes this axis",
                    remedy=remedy,
                )
            rejected = _select_sizes(reference.limits.refused, symbol)
            if rejected and not _select_sizes(answered, symbol):
                sizes = ", ".join(rejected)
                raise UserError(
                    f"the source rejected all other sizes of {place} that were tried",
                    where="export.dynamic",
                    why=f"it rejected the sizes {sizes}; the first error was: "
                    f"{next(iter(rejected.values()))}",
                    remedy=f"{remedy} If the source accepts only some sizes, "
                    "validate with samples for which it also accepts half or double the size.",
                )


def _select_sizes(groups: Mapping[str, str], symbol: str) -> dict[str, str]:
    """Return values by size, from the groups that change only the size of this symbol."""
    prefix = f"{LENGTHS}{symbol}="
    sizes = {
        name.removeprefix(prefix): value
        for name, value in groups.items()
        if name.startswith(prefix)
    }
    return {size: value for size, value in sizes.items() if size.isdecimal()}
