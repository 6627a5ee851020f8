"""Stages of a pipeline: a module for each kind, with the function `execute`.

The module `quantize` also contains the calibration stage. Promotion and deployment have no module.
The module `champion` is not a stage: it finds the champion for benchmarks.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping

from onnx_ops.domain.artifact import Digest, Manifest
from onnx_ops.domain.plan import Stage, StageKind
from onnx_ops.ports import Context

Execute = Callable[[Stage, Digest, Mapping[str, Manifest], Context], Manifest]


def execute(
    stage: Stage, key: Digest, inputs: Mapping[str, Manifest], context: Context
) -> Manifest:
    """Execute a stage of any kind except promotion and deployment."""
    # The module is imported here, so that a stage loads only the packages that it needs.
    name = "quantize" if stage.kind is StageKind.CALIBRATE else stage.kind.value
    run: Execute = importlib.import_module(f"onnx_ops.pipeline.stages.{name}").execute
    return run(stage, key, inputs, context)
