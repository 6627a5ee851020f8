"""Ready ONNX files: what can be known to be wrong with one before any work."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from onnx_ops.domain.artifact import ModelInfo
from onnx_ops.domain.pipeline import Export
from onnx_ops.domain.target import Target
from onnx_ops.graph.check import ceiling, foreign, lacking
from onnx_ops.graph.files import model_file, read_structure
from onnx_ops.graph.inspect import info

CONVERT = "convert"
"""Option of the export: the file is converted to exactly `opset` and `ir_version`."""


def newer(found: ModelInfo, section: Export) -> str:
    """Why a file is not taken as it is: it is newer than asked for; empty if it is not."""
    opset = found.opsets.get("", 0)
    if opset <= section.opset and found.ir_version <= section.ir_version:
        return ""
    return (
        f"the file has opset {opset} and IR version {found.ir_version}, "
        f"the pipeline asks for opset {section.opset} and IR version {section.ir_version}"
    )


def remedy(found: ModelInfo) -> str:
    """What to set for a file that is newer than asked for."""
    opset = found.opsets.get("", 0)
    return (
        f"Set export.opset: {opset} and export.ir_version: {found.ir_version}, "
        f"or have it converted: export.options: {{{CONVERT}: true}}."
    )


def no_tensors(path: Path) -> str:
    """Which inputs and outputs are no tensors (a classifier with ZipMap gives a sequence of maps); empty if none."""
    graph = read_structure(path).graph
    kinds = {value.name: value.type.WhichOneof("value") for value in (*graph.input, *graph.output)}
    found = sorted(name for name, kind in kinds.items() if kind not in ("tensor_type", "optional_type", None))
    if not found:
        return ""
    what = str(kinds[found[0]]).removesuffix("_type")
    return (
        f"{', '.join(found)} is no tensor but a {what}: nothing can be compared with it. "
        "Export the model with tensors (scikit-learn's classifiers: options={'zipmap': False})."
    )


def brought_problems(place: Path, section: Export, targets: Iterable[Target]) -> list[str]:
    """Why the file cannot be brought, or what a target refuses of it.

    Raises:
        NotFound, UserError, Refused: as for reading the file.
    """
    path = model_file(place)
    found = info(path)
    operators = foreign(read_structure(path))
    converted = section.options.get(CONVERT) is True
    too_new = "" if converted else newer(found, section)
    problems = [f"{too_new}. {remedy(found)}"] if too_new else []
    problems += [why for why in (no_tensors(path),) if why]
    for target in targets:
        reason = "" if converted or too_new else ceiling(found, target)
        problems += [one for one in (reason, lacking(operators, target)) if one]
    return problems
