"""Is the candidate worse than the stable version? Asked as often as wanted, on counts of requests only.

`judge` says what observations mean under a policy, `decide` what is to be done about it.
"""

from __future__ import annotations

from onnx_ops.statistics.rollout.judge import decide, judge
from onnx_ops.statistics.rollout.slo import clean_requests
from onnx_ops.statistics.rollout.thresholds import freeze

__all__ = ["clean_requests", "decide", "freeze", "judge"]
