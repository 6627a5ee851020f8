"""Is the candidate worse than the stable version? Asked as often as wanted, on counts of requests only.

`judge` says what observations mean under a policy, `decide` what is to be done about it.
"""

from __future__ import annotations

from onnx_ops.statistics.rollout.evidence import compute_clean_requests
from onnx_ops.statistics.rollout.guardrails import fix_thresholds
from onnx_ops.statistics.rollout.judge import decide, judge

__all__ = ["compute_clean_requests", "decide", "fix_thresholds", "judge"]
