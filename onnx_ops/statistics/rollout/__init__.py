"""Judge a rollout from counts of requests, at any time.

`judge` evaluates observations under a policy, `analyze` those of the rollout in progress.
"""

from __future__ import annotations

from onnx_ops.statistics.rollout.evidence import compute_clean_requests
from onnx_ops.statistics.rollout.guardrails import fix_thresholds
from onnx_ops.statistics.rollout.judge import analyze, judge

__all__ = ["analyze", "compute_clean_requests", "fix_thresholds", "judge"]
