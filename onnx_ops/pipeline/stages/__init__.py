"""The stages of a pipeline: one module each, with `execute`.

The module `quantize` calibrates, too.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping

from onnx_ops.domain.artifact import Digest, Manifest
from onnx_ops.domain.pipeline import Stage, StageKind
from onnx_ops.ports import Context

Execute = Callable[[Stage, Digest, Mapping[str, Manifest], Context], Manifest]


def execute(
    stage: Stage, key: Digest, inputs: Mapping[str, Manifest], context: Context
) -> Manifest:
    """Execute a stage. Promotion and deployment are release operations instead."""
    # Imported by name, so that a stage loads only what it needs.
    name = "quantize" if stage.kind is StageKind.CALIBRATE else stage.kind.value
    run: Execute = importlib.import_module(f"onnx_ops.pipeline.stages.{name}").execute
    return run(stage, key, inputs, context)
