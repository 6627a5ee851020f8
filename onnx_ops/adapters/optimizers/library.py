"""Calls into libraries that print, log and raise whatever their parts raise."""

from __future__ import annotations

import contextlib
import importlib
import io
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from onnx_ops.errors import OnnxOpsError, StageFailure, UserError
from onnx_ops.graph.files import constants, nodes
from onnx_ops.graph.inspect import info

if TYPE_CHECKING:
    import onnx

_DEFAULT_SEVERITY, _ERRORS_ONLY = 2, 3

_UNDEFINED, _FLOAT = 0, 1
_NAMES = {10: "float16", 11: "float64", 16: "bfloat16"}
_MATRIX = frozenset({"Conv", "ConvTranspose", "Gemm", "MatMul"})
_QUANTIZED = frozenset(
    {"ConvInteger", "DequantizeLinear", "MatMulInteger", "MatMulNBits", "QGemm", "QLinearConv", "QLinearMatMul"}
)
"""Operators that quantizers write, and no export in float has."""


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Nothing is printed; root logger and levels are afterwards as they were."""
    ort = importlib.import_module("onnxruntime")
    root = logging.getLogger()
    handlers, level, disabled = list(root.handlers), root.level, root.manager.disable
    ort.set_default_logger_severity(_ERRORS_ONLY)
    logging.disable(logging.ERROR)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        logging.disable(disabled)
        root.handlers[:] = handlers
        root.setLevel(level)
        ort.set_default_logger_severity(_DEFAULT_SEVERITY)


@contextlib.contextmanager
def told(what: str, variant: str, remedy: str) -> Iterator[None]:
    """A failure of the library is one of the stage.

    Raises:
        StageFailure: whatever the library raised, in one line.
    """
    try:
        yield
    except OnnxOpsError:
        raise
    except Exception as error:
        raise StageFailure(
            what, where=f"variant {variant}", why=f"{type(error).__name__}: {first_line(error)}", remedy=remedy
        ) from error


def first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:300] if lines else type(error).__name__


def nothing_derived(what: str, variant: str, source: onnx.ModelProto, why: str) -> UserError:
    """Return the error for a model of which a method changes nothing.

    Args:
        what: what happened.
        variant: its name.
        source: the model, whose weights tell the reason.
        why: the reason where the weights tell none.
    """
    remedy = "Leave this variant out of `quantize`."
    kinds = {node.op_type for node in nodes(source)}
    taken = {name for node in source.graph.node if node.op_type in _MATRIX for name in node.input}
    types = {tensor.data_type for name, tensor in constants(source).items() if name in taken}
    if kinds & _QUANTIZED:
        why, remedy = "the model is quantized already", "Give the float model that it was made from."
    elif types and not types & {_FLOAT, _UNDEFINED}:
        names = " and ".join(sorted(_NAMES.get(number, f"of type {number}") for number in types))
        why = f"its weights are {names}, and this method takes float32 only"
        remedy = "Export the model in float32, and derive the variant from that."
    elif not types and kinds & _MATRIX and source.functions:
        why = "its weights are in functions of its own, and this method looks at the main graph only"
        remedy = "Inline them first: onnx.inliner.inline_local_functions(model)."
    return UserError(what, where=f"variant {variant}", why=why, remedy=remedy)


def check_interface(source: Path, derived: Path, tool: str, where: str) -> None:
    """Clients and gates go by names, types and free dimensions.

    Raises:
        StageFailure: the tool changed one.
    """
    before, after = info(source), info(derived)
    for side, old, new in (("inputs", before.inputs, after.inputs), ("outputs", before.outputs, after.outputs)):
        if old != new:
            raise StageFailure(
                f"{tool} changed the model's {side}",
                where=where,
                why=f"they were {list(map(str, old))} and became {list(map(str, new))}"[:400],
                remedy="Leave this variant out of `quantize`.",
            )
