"""One use case a file: `execute(stage, key, inputs, ports) -> Manifest`."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping

from onnx_ops.domain.artifact import Digest, Manifest
from onnx_ops.domain.pipeline import Stage
from onnx_ops.ports import Ports

Execute = Callable[[Stage, Digest, Mapping[str, Manifest], Ports], Manifest]


def execute(stage: Stage, key: Digest, inputs: Mapping[str, Manifest], ports: Ports) -> Manifest:
    """Do the work of a stage; promote and deploy are operations and not among them.

    Raises:
        OnnxOpsError: the stage could not do what it should.
    """
    # Imported by name, so that a stage loads only what it needs; all of them are rooms of this package.
    run: Execute = importlib.import_module(f"onnx_ops.pipeline.stages.{stage.kind.value}").execute
    return run(stage, key, inputs, ports)
