"""The stages of a pipeline: one module each, with `execute`."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping

from onnx_ops.domain.artifact import Digest, Manifest
from onnx_ops.domain.pipeline import Stage
from onnx_ops.ports import Context

Execute = Callable[[Stage, Digest, Mapping[str, Manifest], Context], Manifest]


def execute(stage: Stage, key: Digest, inputs: Mapping[str, Manifest], context: Context) -> Manifest:
    """Run a stage; promotion and deployment are release operations and not among them."""
    # Imported by name, so that a stage loads only what it needs.
    run: Execute = importlib.import_module(f"onnx_ops.pipeline.stages.{stage.kind.value}").execute
    return run(stage, key, inputs, context)
