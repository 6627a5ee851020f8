"""Plans a pipeline and runs the plan: order, keys, cache, skips, retries."""

from __future__ import annotations

from onnx_ops.pipeline.code_digest import UserCode, referred_modules, user_code
from onnx_ops.pipeline.crew import in_order
from onnx_ops.pipeline.parts import Probe
from onnx_ops.pipeline.planning import plan
from onnx_ops.pipeline.run import Handler, InlineExecutor, RunResult, Silent, preview, run

__all__ = [
    "Handler",
    "InlineExecutor",
    "Probe",
    "RunResult",
    "Silent",
    "UserCode",
    "in_order",
    "plan",
    "preview",
    "referred_modules",
    "run",
    "user_code",
]
