"""Ready ONNX files: what can be known to be wrong with one before any work."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from onnx_ops.domain.artifact import ModelInfo
from onnx_ops.domain.pipeline import Export
from onnx_ops.domain.target import Target
from onnx_ops.onnx_graph.check import ceiling, foreign, lacking
from onnx_ops.onnx_graph.files import model_file, read_structure
from onnx_ops.onnx_graph.hygiene import DEFAULT_DOMAINS
from onnx_ops.onnx_graph.inspect import info

if TYPE_CHECKING:
    import onnx

CONVERT = "convert"
"""Option of the export: the file is converted to exactly `opset` and `ir_version`."""

_OLDEST = 7
"""Opset of a file that imports none."""

DROPPED = "onnx-ops.zipmap.dropped"
"""Metadata: outputs that were sequences of maps before onnx-ops made them tensors."""


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


def drop_zipmaps(model: onnx.ModelProto) -> tuple[str, ...]:
    """Let outputs that ZipMap makes a sequence of maps of be the matrix before it, a column a class.

    Returns:
        The outputs that have become tensors; the model's metadata names them too.
    """
    from onnx import TensorProto, helper

    found = _zipmaps(model)
    for node in found.values():
        kept = helper.make_node("Identity", [node.input[0]], [node.output[0]], name=node.name)
        node.CopyFrom(kept)
    for value in model.graph.output:
        if value.name in found:
            value.CopyFrom(helper.make_tensor_value_info(value.name, TensorProto.FLOAT, [None, None]))
    if found and not any(entry.domain in DEFAULT_DOMAINS for entry in model.opset_import):
        model.opset_import.add(version=_OLDEST)  # converters of trees import nothing but ai.onnx.ml
    if found:
        helper.set_model_props(model, {**{p.key: p.value for p in model.metadata_props}, DROPPED: ", ".join(found)})
    return tuple(found)


def _zipmaps(model: onnx.ModelProto) -> dict[str, onnx.NodeProto]:
    """The nodes that make maps of outputs, by output."""
    outputs = {value.name for value in model.graph.output}
    return {n.output[0]: n for n in model.graph.node if n.op_type == "ZipMap" and n.output[0] in outputs}


def no_tensors(path: Path) -> str:
    """Which inputs and outputs are no tensors, and cannot be made some; empty if none."""
    model = read_structure(path)
    graph, zipped = model.graph, _zipmaps(model)
    values = [*graph.input, *(value for value in graph.output if value.name not in zipped)]
    kinds = {value.name: value.type.WhichOneof("value") for value in values}
    found = sorted(name for name, kind in kinds.items() if kind not in ("tensor_type", "optional_type", None))
    if not found:
        return ""
    what = str(kinds[found[0]]).removesuffix("_type")
    return (
        f"{', '.join(found)} is no tensor but a {what}: an endpoint can neither take nor give it. "
        "Export the model with tensors."
    )


def brought_notes(place: Path) -> list[str]:
    """List what a pipeline does with a ready file that its owner may not expect; raises as `brought_problems`."""
    path = model_file(place)
    notes = [
        f"{name} is a sequence of maps (ZipMap), and becomes a matrix with a column for each key"
        for name in sorted(_zipmaps(read_structure(path)))
    ]
    if batch := info(path).fixed_batch:
        notes.append(f"it takes batches of {batch} only: each run has {batch} rows, and no other batch is tried")
    return notes


def brought_problems(place: Path, section: Export, targets: Iterable[Target]) -> list[str]:
    """Why the file cannot be brought, or what a target refuses of it.

    Raises:
        NotFoundError, UserError, RefusedError: as for reading the file.
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
