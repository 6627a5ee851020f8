"""What of a quantized variant a target really runs in int8."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from onnx_ops.domain.structure import Int8Coverage
from onnx_ops.domain.target import Target
from onnx_ops.errors import MeasurementFailure
from onnx_ops.graph.coverage import int8_coverage
from onnx_ops.ports import RewritingRuntime, Runtime
from onnx_ops.stages.files import scratch


def measure_coverage(
    runtime: Runtime, source: Path, variant: Path, target: Target, excluded: Iterable[str] = ()
) -> Int8Coverage | None:
    """Read off the graph that the runtime makes of the variant; None where a runtime does not show it.

    Args:
        runtime: runs the variant.
        source: the float export, whose names are told.
        variant: the quantized file.
        target: as on which.
        excluded: names of nodes that were to stay in float.
    """
    if not isinstance(runtime, RewritingRuntime):
        return None
    with scratch() as folder:
        copy = folder / "rewritten.onnx"
        try:
            runtime.rewritten(variant, target, copy)
        except MeasurementFailure:
            return None
        return int8_coverage(source, copy, excluded)
