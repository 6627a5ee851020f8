"""Verdicts on rollouts whose traffic another program splits.

The test is that of `evidence`. In each interval, the number of the canary's events has Fisher's
noncentral hypergeometric law given the margins. The likelihood ratios of the intervals are
multiplied. Its validity depends on how requests are assigned to revisions:

- `request`: the proxy draws a revision for each request. The assignment is then the only random
  part, and the law is valid for any cause of the events. The design effect is 1. It is not
  estimated, since an estimate costs power. A canary with 1 % of errors, against 0.1 % of the stable
  revision, fails after 418 requests (median of 300 rollouts). With an estimate, it fails after 584
  (`benchmarks.analysis_truth`). Two conditions remain. The split must not change within an
  interval. Otherwise, the odds ratio of the mixed splits is not 1 if the rate of events changes too
  (Simpson 1951, J. R. Stat. Soc. B 13:238-241). The counts of both revisions must also cover the
  same time. They must therefore come from the same target, such as the proxy. Otherwise a burst
  falls into one interval of the canary and a different interval of the stable revision.
- `sticky`: a user or a connection stays with one revision. The design effect is estimated from the
  variation between intervals (`design_effect.estimate_dispersion`), which covers bursts and
  retries. No test on such counts can cover users who differ for the whole rollout.

If the setting is `request` but users stay with one revision, the error rate is not guaranteed. A
user with many failures looks like a fault of the user's revision.

An interval of a metrics source is left out if its split differs from that of the previous interval
(`is_share_changed`). The comparison uses the numbers of requests, not of events, so the evidence of
the other intervals stays valid. The first interval of a step only shows the split.
"""

from __future__ import annotations

import math

from onnx_ops.domain.artifact import Digest
from onnx_ops.domain.rollout import AnalysisResult, find_missing
from onnx_ops.domain.rollout_analysis import (
    AnalysisPolicy,
    AnalysisState,
    AnalysisVerdict,
    VerdictKind,
)
from onnx_ops.domain.rollout_observations import Observations
from onnx_ops.statistics.rollout.judge import judge

_SHARE_LIMIT = 4.0
"""Difference between the canary's shares of two intervals, in standard errors.

Intervals with the same split exceed it with a probability below 0.01 %.
"""


def judge_state(state: AnalysisState, policy: AnalysisPolicy) -> AnalysisVerdict:
    """Judge the recorded intervals of a rollout."""
    rollout_policy = policy.make_rollout_policy(state.step)
    observations = Observations(
        candidate=Digest(state.canary),
        step=state.step,
        started_at=state.started_at,
        intervals=state.intervals,
        thresholds=state.thresholds,
        slower=state.slower,
        is_independent=policy.assignment == "request",
    )
    result = judge(observations, rollout_policy)
    here = [each for each in state.intervals if each.step == state.step]
    requests = result.requests, sum(each.stable.requests for each in here)
    step = rollout_policy.planned()[state.step]
    missing = find_missing(step, rollout_policy, result, 0.0)
    kind: VerdictKind = "pass"
    reason = f"no regression detected in {result.requests} requests of the canary"
    if result.abort_reason:
        kind, reason, missing = "fail", result.abort_reason.removesuffix(" -> ROLL BACK"), ""
    elif result.hold_reason:
        kind, reason = "inconclusive", result.hold_reason.removesuffix(" -> HOLD")
    elif missing:
        kind, reason = "inconclusive", _explain_shortage(missing, result, state)
    return AnalysisVerdict(
        verdict=kind,
        reason=reason,
        waits_for=missing,
        requests=requests,
        guardrails=result.guardrails,
    )


def _explain_shortage(missing: str, result: AnalysisResult, state: AnalysisState) -> str:
    if result.requests or not state.left_out_reason:
        return missing
    return f"{missing}; an interval was left out: {state.left_out_reason}"


def is_share_changed(before: tuple[int, int], now: tuple[int, int]) -> bool:
    """Return whether two intervals had different splits; False without requests.

    Only requests are compared, not events, so that the evidence stays valid if an interval
    is left out.

    Args:
        before: requests of the canary and of both revisions in the earlier interval.
        now: the same numbers of the later interval.
    """
    if not before[1] or not now[1]:
        return False
    share = (before[0] + now[0]) / (before[1] + now[1])
    variance = share * (1 - share) * (1 / before[1] + 1 / now[1])
    difference = abs(now[0] / now[1] - before[0] / before[1])
    return difference > _SHARE_LIMIT * math.sqrt(variance) + 1e-9
