"""Guarantees that a server family breaks after a kill."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice

import numpy as np
import pytest

from onnx_ops.domain.artifact import digest_bytes
from onnx_ops.domain.endpoint import Deployment
from tests.support.chaos import CONNECTIONS, Outcome, Victim
from tests.support.load import Failure, Records
from tests.support.publish_stress import states


def records(*statuses: int) -> Records:
    return Records.from_rows(
        np.array([(0, 0, 0, status, 0, 0, 0) for status in statuses]).reshape(-1, 7), [""]
    )


WELL = Outcome(
    moment=4,
    reached=True,
    answered=True,
    generation=3,
    wanted=3,
    healed=True,
    stale=0,
    records=records(200, 200),
)


@pytest.mark.parametrize(
    ("outcome", "victim", "broken"),
    [
        (WELL, "supervisor", []),
        (replace(WELL, generation=2), "supervisor", ["it came back with generation 2, not 3"]),
        (replace(WELL, answered=False, generation=2), "worker", []),
        (
            replace(WELL, answered=False, generation=1),
            "worker",
            ["it came back with generation 1, not 2 or 3"],
        ),
        (replace(WELL, healed=False), "worker", ["the next publication was refused"]),
        (replace(WELL, stale=2), "supervisor", ["2 stale answers"]),
        (replace(WELL, records=records(200, Failure.RESET)), "worker", []),
        (
            replace(WELL, records=records(200, Failure.RESET)),
            "supervisor",
            ["requests failed: {'reset': 1}"],
        ),
        (replace(WELL, records=records(200, 503)), "worker", ["requests failed: {'503': 1}"]),
        (
            replace(WELL, records=records(200, *[Failure.CLOSED] * (CONNECTIONS + 1))),
            "worker",
            [f"requests failed: {{'closed': {CONNECTIONS + 1}}}"],
        ),
        (replace(WELL, records=records()), "worker", ["no request was sent meanwhile"]),
    ],
)
def test_outcome_broken_lists_violations_for_victim(
    outcome: Outcome, victim: Victim, broken: list[str]
) -> None:
    assert outcome.broken(victim) == broken


def test_states_alternate_between_new_and_first_deployment() -> None:
    digest = digest_bytes(b"")
    first = Deployment(
        name="a",
        model="m",
        version="0",
        variant="fp32",
        release=digest,
        manifest=digest,
        location="/a",
    )
    seen = list(islice(states(first), 5))
    serving = [[name for name, weight in state.split.weights.items() if weight] for state in seen]
    assert serving == [["a"], ["a-1"], ["a"], ["a-2"], ["a"]]
    assert [len(state.deployments) for state in seen] == [1, 2, 2, 2, 2]
