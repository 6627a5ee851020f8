"""What a policy will take, told before any rollout begins."""

from __future__ import annotations

import math
from collections.abc import Iterator

from onnx_ops.domain.rollout_policy import RolloutPolicy
from onnx_ops.statistics.rollout.slo import clean_requests


def notes(policy: RolloutPolicy, capabilities: frozenset[str]) -> Iterator[str]:
    """What a person should know of a policy that is right, one line each."""
    if policy.shadow:
        rate = policy.shadow.max_differing
        needed = max(policy.shadow.min_requests, clean_requests(rate))
        yield f"shadow: to show that less than {100 * rate:g}% of answers differ takes {needed:,} equal ones"
    for step in policy.planned():
        if policy.slo and step.kind in ("canary", "ab"):
            rate = policy.slo.error_rate
            clean = clean_requests(rate)
            in_all = math.ceil(100 * max(clean, step.minimum) / step.percent)
            yield (
                f"step {step.percent}%: to show an error rate below {100 * rate:g}% takes {clean:,} clean requests "
                f"to the candidate; with min_requests {step.minimum:,} that is about {in_all:,} in all"
            )
    if any(rail.name != "errors" for rail in policy.guardrails) and "exceedances" not in capabilities:
        yield "latency is judged by percentiles: the provider does not count requests over a threshold"
