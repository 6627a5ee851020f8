"""YAML files to domain values: strict, with the position of every problem.

The JSON Schemas are in `onnx_ops.spec.schema`, which nothing here imports.
"""

from __future__ import annotations

from onnx_ops.spec.loader import check_pipeline, load_pipeline
from onnx_ops.spec.targets import TargetFiles

__all__ = ["TargetFiles", "check_pipeline", "load_pipeline"]
