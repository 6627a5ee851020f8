"""Servers that end more often under a candidate than before."""

from __future__ import annotations

import numpy as np
import pytest

from onnx_ops.domain.rollout_observations import ServerUptime
from onnx_ops.statistics.rollout.guardrails import evaluate_ends


def uptime(seconds: float, ends: int, server: str = "r1") -> ServerUptime:
    return ServerUptime(server=server, generation=1, seconds=seconds, ends=ends)


def is_violated(before: tuple[float, int], now: tuple[float, int]) -> bool:
    result = evaluate_ends([uptime(*before)], [uptime(*now)])
    return result is not None and result.is_violated


@pytest.mark.parametrize(
    ("before", "now", "expected"),
    [
        ((7200, 0), (60, 3), False),
        ((7200, 0), (60, 4), True),
        ((60, 0), (8, 1), False),
        ((60, 0), (8, 6), True),
        ((0, 0), (60, 20), False),
        ((3600, 120), (3600, 140), False),
        ((3600, 120), (600, 80), True),
    ],
)
def test_evaluate_ends_is_violated_only_by_clearly_higher_rate_than_before(
    before: tuple[float, int], now: tuple[float, int], expected: bool
) -> None:
    assert is_violated(before, now) is expected


def test_evaluate_ends_names_servers_that_ended_and_without_ends_returns_none() -> None:
    result = evaluate_ends([uptime(7200, 0)], [uptime(60, 1), uptime(0, 3, "r2"), uptime(0, 1)])
    assert result is not None
    assert result.rule == (
        "5 ends of servers without a last report in 60 s of this rollout: r2 (3), r1 (2); "
        "0 in 2 h with the stable version alone"
    )
    assert evaluate_ends([uptime(60, 3)], [uptime(60, 0)]) is None


@pytest.mark.parametrize("rate", [0.5, 5.0, 40.0])
def test_evaluate_ends_at_steady_rate_rarely_reaches_limit(rate: float) -> None:
    random = np.random.default_rng(7)
    fired, rollouts = 0, 400
    for _ in range(rollouts):
        before, times = int(random.poisson(rate)), np.cumsum(random.exponential(1 / rate, 80))
        fired += any(
            is_violated((1.0, before), (at, ends)) for ends, at in enumerate(times, 1) if at < 5
        )
    # At most 0.1 % of rollouts reach the limit: 0.4 of 400 on average; 3 allows for chance.
    assert fired <= 3
