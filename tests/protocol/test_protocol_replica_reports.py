"""Plausibility of the counts that a replica reports."""

from __future__ import annotations

from dataclasses import replace

import pytest

from onnx_ops.domain.rollout_observations import ServerUptime
from onnx_ops.protocol.messages import Counts, DeploymentCounts, TableCounts
from onnx_ops.protocol.replica_reports import has_possible_counts

HONEST = DeploymentCounts(statuses={"200": 10**12, "500": 0}, latency=(5, 6), service=(0, 0))
IMPOSSIBLE = (-1, 10**15, 10**30, 10**400)


def make_counts(
    deployment: DeploymentCounts = HONEST, uptime: ServerUptime | None = None
) -> Counts:
    table = TableCounts(generation=3, split="", deployments={"v1": deployment})
    uptimes = () if uptime is None else (uptime,)
    return Counts(
        origin="o",
        at=0.0,
        bounds_s=(1.0,),
        deployments={"v1": HONEST},
        tables=(table,),
        uptimes=uptimes,
    )


def test_has_possible_counts_of_busy_server_returns_true() -> None:
    assert has_possible_counts(
        make_counts(uptime=ServerUptime(server="", generation=3, seconds=1e8, ends=3))
    )


@pytest.mark.parametrize("number", IMPOSSIBLE)
def test_has_possible_counts_with_impossible_number_returns_false(number: int) -> None:
    for wrong in (
        replace(HONEST, statuses={"200": number}),
        replace(HONEST, unjudged={"200": number}),
        replace(HONEST, latency=(5, number)),
        replace(HONEST, service=(number, 0)),
        replace(HONEST, shadow_failed=number),
        replace(HONEST, feedback=number),
    ):
        assert not has_possible_counts(make_counts(wrong))
        assert not has_possible_counts(replace(make_counts(), deployments={"v1": wrong}))
    assert not has_possible_counts(
        make_counts(uptime=ServerUptime(server="", generation=3, ends=number))
    )


@pytest.mark.parametrize("seconds", [-1.0, float("nan"), float("inf")])
def test_has_possible_counts_with_impossible_uptime_returns_false(seconds: float) -> None:
    assert not has_possible_counts(
        make_counts(uptime=ServerUptime(server="", generation=3, seconds=seconds))
    )
