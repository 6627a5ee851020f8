"""YAML files to domain values: strict, with the position of every problem.

The JSON Schemas are in `onnx_ops.spec.schema`, which nothing here imports.
"""

from __future__ import annotations

from onnx_ops.spec.loader import check_pipeline, load_pipeline
from onnx_ops.spec.targets import load_target, load_targets, target_names

__all__ = ["check_pipeline", "load_pipeline", "load_target", "load_targets", "target_names"]
