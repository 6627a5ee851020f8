"""YAML files to domain values: strict, with the position of every problem.

The JSON Schemas are in `onnx_ops.config.schema`, which nothing here imports.
"""

from __future__ import annotations

from onnx_ops.config.loader import check_pipeline, load_pipeline
from onnx_ops.config.targets import TargetFiles

__all__ = ["TargetFiles", "check_pipeline", "load_pipeline"]
