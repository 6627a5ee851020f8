"""How a target executes a model: its hardware, and what it runs in integer arithmetic."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from onnx_ops.domain.evidence import Advice, Int8Coverage
from onnx_ops.domain.quantization import detect_arithmetic
from onnx_ops.domain.target import HardwareFingerprint, Target
from onnx_ops.errors import MeasurementError
from onnx_ops.onnx_graph.files import nodes, read_structure
from onnx_ops.onnx_graph.int8_coverage import advise, int8_coverage
from onnx_ops.onnx_graph.ort_format import is_ort
from onnx_ops.ports import RewritingRuntime, Runtime
from onnx_ops.scratch import Scratch

_INTEGERS = frozenset(
    {"ConvInteger", "DequantizeLinear", "DynamicQuantizeLinear", "MatMulInteger", "QLinearConv", "QLinearMatMul"}
)
"""Operators of which a float model has none."""


def require_hardware(runtime: Runtime, target: Target) -> HardwareFingerprint:
    """The machine's fingerprint, if it has what the target requires.

    Raises:
        MeasurementError: it does not.
    """
    found = runtime.fingerprint(target)
    if lacking := target.requires.lacking(found):
        raise MeasurementError(
            f"this machine is not what the target requires: {'; '.join(lacking)}",
            where=f"target {target.name}",
            remedy="Figures from here mean nothing for this target; measure it on a machine that fits, see `pool`.",
        )
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutionReport:
    """What the rewritten graph shows; nothing where a runtime does not show it, or the variant is float."""

    coverage: Int8Coverage | None = None
    advice: tuple[Advice, ...] = ()


def inspect_execution(
    runtime: Runtime, source: Path, variant: Path, target: Target, excluded: Iterable[str] = ()
) -> ExecutionReport:
    """Read off the graph that the runtime makes of the variant.

    Args:
        runtime: runs the variant.
        source: the float export, whose names are told.
        variant: the derived file.
        target: as on which.
        excluded: names of nodes that were to stay in float.
    """
    if not isinstance(runtime, RewritingRuntime) or is_ort(variant):
        return ExecutionReport()
    with Scratch() as folder:
        copy = folder / "rewritten.onnx"
        try:
            runtime.rewritten(variant, target, copy)
        except MeasurementError:
            return ExecutionReport()
        coverage = int8_coverage(source, copy, excluded) if is_quantized_model(variant) else None
        machine = detect_arithmetic(runtime.fingerprint(target), target)
        return ExecutionReport(coverage=coverage, advice=advise(variant, copy, target, machine, coverage))


def is_quantized_model(model: Path) -> bool:
    """Whether any operator of the file computes in integers, or writes or reads them."""
    return any(node.op_type in _INTEGERS for node in nodes(read_structure(model)))
