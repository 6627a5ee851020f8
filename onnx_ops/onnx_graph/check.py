"""Is a file valid ONNX, and does a target accept its versions?"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from onnx_ops.domain.artifact import ModelInfo
from onnx_ops.domain.target import Target
from onnx_ops.errors import UserError, quoted
from onnx_ops.onnx_graph.files import nodes, read_structure
from onnx_ops.onnx_graph.inspect import info
from onnx_ops.onnx_graph.ort_file import is_ort

if TYPE_CHECKING:
    import onnx

RUNTIME_DOMAINS = frozenset(
    {
        "",
        "ai.onnx",
        "ai.onnx.ml",
        "ai.onnx.preview",
        "ai.onnx.preview.training",
        "ai.onnx.training",
        "com.microsoft",
        "com.microsoft.experimental",
        "com.microsoft.nchwc",
        "com.ms.internal.nhwc",
        "org.pytorch.aten",
    }
)
"""Domains of ONNX and of ONNX Runtime itself; whether it has the operator, only a session tells."""

_ABORT_WITHOUT_ROWS = frozenset({"GRU", "LSTM"})
"""Operators that, given no rows, let ONNX Runtime 1.31 abort the process."""


def full_check(path: Path) -> None:
    """The checker of the ONNX project, shape inference included.

    It accepts operators of unknown domains: only a session tells whether a runtime has them. Of a file in ORT format
    there is nothing to check but whether it loads.

    Raises:
        UserError: the file breaks a rule of ONNX.
        RefusedError: it names external data outside its folder.
        NotFoundError: a file is missing.
    """
    import onnx

    structure = read_structure(path)
    if is_ort(path):
        return
    if not structure.graph.output:
        remedy = "Export the model again, with names for its outputs."
        raise UserError("it is not valid ONNX", where=path.name, why="the graph has no outputs", remedy=remedy)
    inference = onnx.shape_inference.InferenceError
    try:
        onnx.checker.check_model(str(path), full_check=True)
    except (onnx.checker.ValidationError, inference, RuntimeError, ValueError) as error:  # inference raises all three
        remedy = "Export the model again, or mend what is named: onnx-ops inspect tells when it is valid."
        raise UserError("it is not valid ONNX", where=path.name, why=quoted(error), remedy=remedy) from error


def ceiling(info: ModelInfo, target: Target) -> str:
    """Why a target does not accept a model's versions; empty if it does."""
    opset = info.opsets.get("", 0)
    wanted = {"opset": (opset, target.max_opset), "ir_version": (info.ir_version, target.max_ir_version)}
    settings = [f"export.{name}: {most}" for name, (found, most) in wanted.items() if found > most]
    if not settings:
        return ""
    return (
        f"target {target.name} accepts opset <= {target.max_opset}, IR version <= {target.max_ir_version}; "
        f"this model has opset {opset}, IR version {info.ir_version}: set {' and '.join(settings)}"
    )


def foreign(model: onnx.ModelProto) -> dict[str, tuple[str, ...]]:
    """Operators that neither ONNX nor the runtime defines nor the model itself as a function: `domain::type` -> nodes.

    A node without a name is told by its first output.
    """
    own = {(function.domain, function.name) for function in model.functions}
    found: dict[str, list[str]] = {}
    for node in nodes(model):
        if node.domain not in RUNTIME_DOMAINS and (node.domain, node.op_type) not in own:
            named = node.name or next(iter(node.output), "?")
            found.setdefault(f"{node.domain}::{node.op_type}", []).append(named)
    return {name: tuple(sorted(names)) for name, names in sorted(found.items())}


def lacking(operators: Mapping[str, tuple[str, ...]], target: Target) -> str:
    """Which custom operators a target has no library for, with their nodes; empty if none."""
    domains = {domain for library in target.custom_ops for domain in library.domains}
    missing = {name: at for name, at in operators.items() if name.partition("::")[0] not in domains}
    if not missing:
        return ""
    listed = "; ".join(f"{name} at {', '.join(at[:5])}{' …' if len(at) > 5 else ''}" for name, at in missing.items())
    return f"target {target.name} lacks operators: {listed}"


def refusal(path: Path, target: Target) -> str:
    """Why a target cannot run a file, as far as the file tells; empty if nothing speaks against it.

    Raises:
        NotFoundError, UserError, RefusedError: as for reading the file.
    """
    return ceiling(info(path), target) or lacking(foreign(read_structure(path)), target)


def aborts_without_rows(path: Path) -> bool:
    """Whether ONNX Runtime would abort the process if the model were asked for an empty batch."""
    return any(node.op_type in _ABORT_WITHOUT_ROWS for node in nodes(read_structure(path)))
