"""Is a file valid ONNX, and does a target accept its versions?"""

from __future__ import annotations

from pathlib import Path

from onnx_ops.domain.artifact import ModelInfo
from onnx_ops.domain.target import Target
from onnx_ops.errors import UserError
from onnx_ops.graph.files import nodes, read_structure

_ABORT_WITHOUT_ROWS = frozenset({"GRU", "LSTM"})
"""Operators that, given no rows, let ONNX Runtime 1.31 abort the process."""


def full_check(path: Path) -> None:
    """The checker of the ONNX project, shape inference included.

    It accepts operators of unknown domains: only a session tells whether a runtime has them.

    Raises:
        UserError: the file breaks a rule of ONNX.
        Refused: it names external data outside its folder.
        NotFound: a file is missing.
    """
    import onnx

    read_structure(path)
    inference = onnx.shape_inference.InferenceError
    try:
        onnx.checker.check_model(str(path), full_check=True)
    except (onnx.checker.ValidationError, inference, RuntimeError, ValueError) as error:  # inference raises all three
        raise UserError("it is not valid ONNX", where=path.name, why=_first_line(error)) from error


def ceiling(info: ModelInfo, target: Target) -> str:
    """Why a target does not accept a model's versions; empty if it does."""
    opset = info.opsets.get("", 0)
    if opset > target.max_opset:
        return f"target {target.name} accepts opset <= {target.max_opset}, the model has {opset}: set export.opset"
    if info.ir_version > target.max_ir_version:
        accepted, found = target.max_ir_version, info.ir_version
        return f"target {target.name} accepts IR version <= {accepted}, the model has {found}: set export.ir_version"
    return ""


def aborts_without_rows(path: Path) -> bool:
    """Whether ONNX Runtime would abort the process if the model were asked for an empty batch."""
    return any(node.op_type in _ABORT_WITHOUT_ROWS for node in nodes(read_structure(path)))


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:300] if lines else type(error).__name__
