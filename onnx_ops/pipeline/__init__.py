"""Plan a pipeline, and run its stages with a cache, skipped stages and retries."""

from __future__ import annotations

from onnx_ops.pipeline.planning import plan
from onnx_ops.pipeline.run import Handler, InlineExecutor, RunResult, ordered_map, preview, run
from onnx_ops.pipeline.user_code import UserCode, collect_user_code, find_referenced_modules

__all__ = [
    "Handler",
    "InlineExecutor",
    "RunResult",
    "UserCode",
    "collect_user_code",
    "find_referenced_modules",
    "ordered_map",
    "plan",
    "preview",
    "run",
]
