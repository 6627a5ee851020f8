"""Plans a pipeline and runs the plan: order, keys, cache, skips, retries."""

from __future__ import annotations

from onnx_ops.engine.crew import in_order
from onnx_ops.engine.parts import Probe
from onnx_ops.engine.planning import plan
from onnx_ops.engine.run import Handler, InlineExecutor, RunResult, Silent, preview, run
from onnx_ops.engine.usercode import UserCode, referred_modules, user_code

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
