"""Verdicts on rollouts whose traffic another program splits."""

from __future__ import annotations

import itertools
from typing import Literal

import numpy as np
import pytest

from onnx_ops.domain.rollout_analysis import (
    AnalysisPolicy,
    AnalysisState,
    AnalysisVerdict,
    RolloutKey,
)
from onnx_ops.domain.rollout_observations import ObservationInterval, RequestCounts
from onnx_ops.domain.rollout_policy import Guardrail, ServiceLevel
from onnx_ops.statistics.rollout.verdict import is_share_changed, judge_state


def judge(
    rows: list[tuple[int, int, int, int]], policy: AnalysisPolicy | None = None
) -> AnalysisVerdict:
    intervals = tuple(
        ObservationInterval(
            step=0,
            canary=RequestCounts(requests=of_mine, errors=mine),
            stable=RequestCounts(requests=of_theirs, errors=theirs),
        )
        for mine, of_mine, theirs, of_theirs in rows
    )
    state = AnalysisState(
        key=RolloutKey(analysis="web", rollout="shop"), canary="b", stable="a", intervals=intervals
    )
    return judge_state(state, policy or AnalysisPolicy())


def test_judge_state_requires_minimum_of_intervals_only_for_sticky_assignment() -> None:
    assert judge([(3, 300, 27, 2700)]).verdict == "pass"
    sticky = judge([(3, 300, 27, 2700)], AnalysisPolicy(assignment="sticky"))
    assert (sticky.verdict, sticky.waits_for[:18]) == ("inconclusive", "1 of the 3 interva")


def test_judge_state_with_violated_hold_guardrail_is_inconclusive() -> None:
    rail = Guardrail(name="errors", on_violation="hold")
    verdict = judge([(30, 300, 27, 2700)], AnalysisPolicy(guardrails=(rail,)))
    assert verdict.verdict == "inconclusive"
    assert "evidence" in verdict.reason


def test_judge_state_with_uncertified_service_level_is_inconclusive() -> None:
    policy = AnalysisPolicy(slo=ServiceLevel(error_rate=0.01))
    verdict = judge([(0, 300, 0, 2700)], policy)
    assert verdict.verdict == "inconclusive"
    assert "not below 1 %" in verdict.reason


def test_judge_state_without_counts_of_stable_is_inconclusive() -> None:
    assert judge([(0, 500, 0, 0)]).verdict == "inconclusive"


@pytest.mark.parametrize(
    ("assignment", "most"), [("request", 0.05), ("sticky", 0.05)], ids=["request", "sticky"]
)
def test_judge_state_of_equal_revisions_with_bursts_rarely_fails(
    assignment: Literal["request", "sticky"], most: float
) -> None:
    random = np.random.default_rng(7)
    failed = 0
    for _ in range(60):
        rows = []
        for _ in range(15):
            canary = int(random.binomial(400, 0.2))
            rate = 0.3 if random.random() < 0.2 else 0.005
            events = int(random.binomial(400, rate))
            mine = int(random.hypergeometric(canary, 400 - canary, events))
            rows.append((mine, canary, events - mine, 400 - canary))
        failed += any(
            judge(rows[:end], AnalysisPolicy(assignment=assignment)).verdict == "fail"
            for end in (5, 10, 15)
        )
    assert failed <= 3 + most * 60


def test_is_share_changed_requires_more_than_chance() -> None:
    random = np.random.default_rng(1)
    draws = random.binomial(500, 0.1, size=2000)
    pairs = list(itertools.pairwise(draws))
    assert sum(is_share_changed((int(a), 500), (int(b), 500)) for a, b in pairs) <= 2
    assert is_share_changed((50, 500), (150, 500))
    assert not is_share_changed((0, 500), (0, 500))
