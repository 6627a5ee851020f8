"""Judge a rollout from counts of requests, at any time.

`judge` evaluates observations under a policy, `decide` derives the next action.
"""

from __future__ import annotations

from onnx_ops.statistics.rollout.evidence import compute_clean_requests
from onnx_ops.statistics.rollout.guardrails import fix_thresholds
from onnx_ops.statistics.rollout.judge import decide, judge

__all__ = ["compute_clean_requests", "decide", "fix_thresholds", "judge"]
