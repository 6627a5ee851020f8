"""A file brought to another opset by ONNX's own converter, in a process of its own."""

from __future__ import annotations

from pathlib import Path

from onnx_ops.adapters.isolation.shield import Fallen, shielded
from onnx_ops.domain.pipeline import Export
from onnx_ops.errors import UserError
from onnx_ops.onnx_graph.compatibility import full_check
from onnx_ops.onnx_graph.files import read_model, write_model
from onnx_ops.onnx_graph.model_info import info
from onnx_ops.onnx_graph.rewrites import like_source


def convert(source: Path, result: Path, section: Export) -> None:
    """Write the file at exactly the opset and IR version of the section.

    Raises:
        UserError: the converter cannot, or what it made is not valid at that version.
    """
    try:
        shielded(_convert, source, result, section.opset, section.ir_version)
    except Fallen as fallen:
        raise UserError(
            f"the file cannot be converted to opset {section.opset}",
            where="export",
            why="\n".join(part for part in (fallen.how, fallen.said) if part),
            remedy=f"Export the model anew at opset {section.opset}, or choose another export.opset "
            f"(the file has {info(source).opsets.get('', 0)}).",
        ) from None


def _convert(source: Path, result: Path, opset: int, ir_version: int) -> None:
    from onnx import version_converter

    model = read_model(source)
    converted = version_converter.convert_version(model, opset)
    like_source(converted, model)
    converted.ir_version = ir_version
    write_model(converted, result)
    full_check(result)
