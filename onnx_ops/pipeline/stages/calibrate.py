"""Calibrate: read the ranges of activations from a part of the calibration rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from onnx_ops.domain.artifact import Digest, Manifest
from onnx_ops.domain.pipeline import Stage
from onnx_ops.measure.files import RANGES
from onnx_ops.pipeline.stage_settings import read_environment
from onnx_ops.pipeline.stages.quantize import build_request
from onnx_ops.ports import Ports
from onnx_ops.scratch import Scratch


def execute(stage: Stage, key: Digest, inputs: Mapping[str, Manifest], ports: Ports) -> Manifest:
    """Store the ranges of a shard of the batches; nothing if it has none."""
    settings: Mapping[str, Any] = stage.settings
    with Scratch() as folder:
        request, _ = build_request(stage, inputs, ports, folder)
        path = folder / "ranges"
        optimizer = ports.optimizer(request.section.method, read_environment(stage))
        optimizer.read_ranges(request, path, (settings["shard"] - 1, settings["shards"]))
        return Manifest(files={RANGES: ports.store.put_file(path)} if path.exists() else {})
