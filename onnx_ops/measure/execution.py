"""How a target executes a model: the hardware it needs, and int8 operators."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from onnx_ops.domain.arithmetic import detect_arithmetic
from onnx_ops.domain.evidence import Advice, Int8Coverage
from onnx_ops.domain.target import HardwareFingerprint, Target
from onnx_ops.errors import MeasurementError, UserError
from onnx_ops.onnx_graph.compatibility import explain_version_limits
from onnx_ops.onnx_graph.files import read_model, share_structure
from onnx_ops.onnx_graph.int8_coverage import advise, measure_int8_coverage, quantizes_activations
from onnx_ops.onnx_graph.model_info import read_model_info
from onnx_ops.onnx_graph.ort_format import is_ort_format
from onnx_ops.onnx_graph.saturation import find_saturating_weights
from onnx_ops.ports import Runtime
from onnx_ops.scratch import Scratch


def require_hardware(runtime: Runtime, target: Target) -> HardwareFingerprint:
    """Return the machine's fingerprint, if it meets the target's requirements.

    Raises:
        MeasurementError: the machine does not meet the requirements.
    """
    fingerprint = runtime.fingerprint(target)
    if missing := target.requires.find_missing(fingerprint):
        raise MeasurementError(
            f"this machine does not meet the target's requirements: {'; '.join(missing)}",
            where=f"target {target.name}",
            remedy="Measure this target on a machine that meets its requirements. The target's key "
            "`pool` names a Prefect work pool of such machines.",
        )
    return fingerprint


def require_versions(model: Path, target: Target) -> None:
    """Raise UserError if the model's opset or IR version is too new for the target."""
    if reason := explain_version_limits(read_model_info(model), target):
        remedy = "Export the model for this target's opset and IR version."
        raise UserError(reason.partition(": set export.")[0], where=model.name, remedy=remedy)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutionReport:
    """Findings in the graph that the runtime has rewritten.

    `why` is the reason if the runtime cannot write that graph. A file in ORT format has neither
    findings nor a reason.
    """

    coverage: Int8Coverage | None = None
    advice: tuple[Advice, ...] = ()
    why: str = ""


def inspect_execution(
    runtime: Runtime, source: Path, variant: Path, target: Target, excluded: Iterable[str] = ()
) -> ExecutionReport:
    """Return which operators run in int8, and what slows a variant down.

    `source` is the float export, whose node names the report uses. `excluded` names nodes that
    should stay in float.
    """
    if is_ort_format(variant):
        return ExecutionReport()
    with Scratch() as folder:
        copy = folder / "rewritten.onnx"
        try:
            runtime.rewritten(variant, target, copy)
        except MeasurementError as error:
            return ExecutionReport(why=str(error))
        is_quantized = quantizes_activations(share_structure(variant))
        coverage = measure_int8_coverage(source, copy, excluded) if is_quantized else None
        machine = detect_arithmetic(runtime.fingerprint(target), target)
        return ExecutionReport(
            coverage=coverage, advice=advise(variant, copy, target, machine, coverage)
        )


def explain_saturation(runtime: Runtime, model: Path, target: Target, name: str) -> str:
    """Return why sums of the model's int8 products can be wrong on the target's CPU.

    The text is empty if no sum can saturate, and for a file in ORT format. `name` is the model's
    name in the text.
    """
    if is_ort_format(model) or not detect_arithmetic(runtime.fingerprint(target), target).saturates:
        return ""
    weights = find_saturating_weights(read_model(model))
    if not weights:
        return ""
    more = f" and {len(weights) - 1} more" if len(weights) > 1 else ""
    return (
        f"this CPU has no VNNI, so sums of {name}'s int8 products can saturate at 16 bits "
        f"({weights[0]}{more}): quantize with weights of 7 bits, `options: "
        "{reduce_range: true}`, or use a CPU with VNNI"
    )
