"""Judgements of rollouts whose servers count units.

The tests cover few clients, restarts, clocks, the epoch in progress, and A/B tests by user.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from onnx_ops.domain.rollout import AnalysisResult
from onnx_ops.domain.rollout_observations import (
    BADNESS_EDGES,
    USER_BLOCKS,
    EpochUnits,
    GenerationCounts,
    GenerationUnits,
    MetricsReading,
    Observations,
    RequestCounts,
    UnitCounts,
    UserBlocks,
)
from onnx_ops.domain.rollout_policy import Guardrail, RolloutPolicy, SplitTest
from onnx_ops.statistics.rollout.judge import judge
from tests.support.endpoints import fileless_deployment

CANDIDATE = fileless_deployment("v2").manifest
POLICY = RolloutPolicy(
    steps=(0.1, 0.5, 1.0), guardrails=(Guardrail(name="errors"),), min_requests=(300, 1000)
)
Clients = Sequence[tuple[int, int, bool]]
"""Requests and errors of each client in an epoch.

The last element shows whether the candidate answers.
"""


def count_units(clients: Clients) -> UnitCounts:
    bins = np.zeros((2, len(BADNESS_EDGES)), dtype=int)
    for requests, errors, mine in clients:
        bins[0 if mine else 1, bisect_left(BADNESS_EDGES, errors / requests)] += 1
    return UnitCounts(candidate=tuple(bins[0].tolist()), stable=tuple(bins[1].tolist()))


class Server:
    """Servers of one endpoint, whose counters a test restarts."""

    def __init__(self, generation: int = 7) -> None:
        self.generation, self.starts, self.at = generation, 0, 0.0
        self.tallies: dict[str, RequestCounts] = {}
        self.epochs: list[EpochUnits] = []

    def restart(self) -> None:
        self.starts, self.tallies = self.starts + 1, {}

    def serve(self, clients: Clients) -> MetricsReading:
        self.epochs.append(
            EpochUnits(
                generation=self.generation,
                epoch=len(self.epochs),
                units={"errors": count_units(clients)},
            )
        )
        for name, side in (("v2", True), ("v1", False)):
            more = [client for client in clients if client[2] == side]
            added = RequestCounts(
                requests=sum(n for n, _, _ in more), errors=sum(e for _, e, _ in more)
            )
            self.tallies[name] = self.tallies.get(name, RequestCounts()).plus(added)
        counts = GenerationCounts(
            origin=f"a{self.starts}", generation=self.generation, tallies=dict(self.tallies)
        )
        return MetricsReading(at=self.at, counts=(counts,), epochs=tuple(self.epochs[-30:]))


def begin(generation: int = 7, percent: int = 10, *, is_drawn: bool = True) -> Observations:
    split = GenerationUnits(generation=generation, step=0, percent=percent, is_drawn=is_drawn)
    return Observations(candidate=CANDIDATE, generations=(split,))


def add(observations: Observations, reading: MetricsReading) -> Observations:
    return observations.with_reading(reading, stable="v1", candidate="v2")


def run_clients(
    count: int, epochs: int, *, restarts: int = 0, failing: float = 1.0, seed: int = 5
) -> AnalysisResult:
    """Judge clients that send 100 requests in each epoch.

    The candidate fails the share `failing` of its requests.
    """
    random, server, observations = np.random.default_rng(seed), Server(), begin()
    for number in range(epochs):
        mine = random.random(count) < 0.1
        observations = add(
            observations, server.serve([(100, round(100 * failing) if m else 0, m) for m in mine])
        )
        if number < restarts:
            server.restart()
    return judge(observations, POLICY)


@pytest.mark.parametrize("count", [1, 3, 10])
def test_judge_with_few_failing_clients_detects_gross_failure_or_violation(count: int) -> None:
    assert "gross failure" in run_clients(count, 150 // count).abort_reason
    (guard,) = run_clients(count, 150 // count, failing=0.3).guardrails
    assert guard.is_violated
    assert guard.units is not None
    assert guard.units[0][0] == guard.units[0][1] > 0 == guard.units[1][0]


def test_judge_with_too_few_units_reports_unmet_target() -> None:
    judged = run_clients(1, 60, failing=0.0)
    assert judged.requests >= 300
    assert "of 20 independent units" in judged.unmet_target
    assert not run_clients(10, 40, failing=0.0).unmet_target
    server, observations = Server(), begin()
    # No epoch has compared latencies, as during the warm-up.
    for _ in range(40):
        observations = add(observations, server.serve([(100, 0, True), *[(100, 0, False)] * 9]))
    latency = replace(POLICY, guardrails=(Guardrail(name="latency_p50"),))
    assert judge(observations, latency).unmet_target.startswith(
        "latency_p50 has 0 of 20 independent units"
    )
    assert not judged.split_mismatch


@pytest.mark.parametrize("failing", [0.0, 0.3])
def test_judge_after_server_restarts_returns_same_evidence(failing: float) -> None:
    plain = run_clients(3, 60, failing=failing)
    for restarts in (1, 10, 40):
        judged = run_clients(3, 60, failing=failing, restarts=restarts)
        assert judged.guardrails == plain.guardrails
        assert judged == plain


def test_observations_count_epoch_once_and_only_in_generation_of_rollout() -> None:
    server, observations = Server(), begin()
    reading = server.serve([(10, 10, True), (10, 0, False)])
    once = add(observations, reading)
    assert add(once, reading).generations == once.generations
    assert add(once, replace(reading, counts=())).intervals == once.intervals
    other = Server(generation=6).serve([(10, 10, True)])
    ignored = add(once, other)
    assert (ignored.generations, ignored.intervals, ignored.counts) == (
        once.generations,
        once.intervals,
        once.counts,
    )
    assert once.select_new(reading).epochs == ()
    assert once.select_new(other).counts == ()


@pytest.mark.parametrize("skew_s", [-7200.0, 7200.0])
def test_observations_with_skewed_server_clock_are_unchanged(skew_s: float) -> None:
    """The split was set at time 0 of the judge's clock."""
    server, plain = Server(), Server()
    server.at = skew_s
    clients = [(100, 3, True), (100, 0, False)]
    skewed, usual = add(begin(), server.serve(clients)), add(begin(), plain.serve(clients))
    assert skewed.generations == usual.generations
    assert skewed.intervals == usual.intervals
    assert skewed.intervals[0].canary == RequestCounts(requests=100, errors=3)


def test_observations_assign_late_counts_to_step_of_their_generation() -> None:
    server = Server()
    before = add(begin(), server.serve([(100, 0, True)]))
    moved = before.move_to_step(
        GenerationUnits(generation=9, step=1, percent=50, is_drawn=True), 50.0
    )
    late = add(moved, server.serve([(40, 0, True)]))
    assert [(one.step, one.canary.requests) for one in late.intervals] == [(0, 100), (0, 40)]
    assert [split.epochs for split in late.generations] == [2, 0]


def test_observations_of_several_servers_add_counts_and_ignore_late_reading() -> None:
    first, second = Server(), Server()
    one, other = first.serve([(100, 1, True)]).counts[0], second.serve([(50, 0, False)]).counts[0]
    reading = MetricsReading(at=0.0, counts=(one, replace(other, origin="b")))
    assert reading.sum_tallies()["v2"] == RequestCounts(requests=100, errors=1)
    seen = add(begin(), reading)
    assert [(each.canary.requests, each.stable.requests) for each in seen.intervals] == [(100, 50)]
    fewer = replace(one, tallies={**one.tallies, "v2": RequestCounts(requests=90)})
    assert add(seen, replace(reading, counts=(fewer,))).counts == seen.counts, (
        "a late reading has lower counts"
    )


def test_judge_with_open_epoch_detects_gross_failure() -> None:
    keyless = EpochUnits(
        generation=7,
        epoch=5,
        units={"errors": count_units([*[(1, 1, True)] * 5, *[(1, 0, False)] * 45])},
    )
    server = Server()
    quiet = server.serve([(1, 0, True), *[(1, 0, False)] * 9])
    assert not judge(add(begin(), quiet), POLICY).abort_reason
    judged = judge(add(begin(), replace(quiet, open_epoch=keyless)), POLICY)
    assert (
        "gross failure: on average about 83 % of a unit's requests failed in 6 units"
        in judged.gross_failure
    )
    assert not judged.guardrails[0].is_violated, "the evidence uses only closed epochs"
    both = replace(
        keyless, units={"errors": count_units([*[(1, 1, True)] * 5, *[(1, 1, False)] * 45])}
    )
    assert not judge(add(begin(), replace(quiet, open_epoch=both)), POLICY).gross_failure


def test_judge_with_refused_requests_reports_gross_failure_only_for_several_clients() -> None:
    def read(clients: Clients) -> MetricsReading:
        reading = Server().serve([(10, 0, True), *[(10, 0, False)] * 9])
        return replace(
            reading,
            epochs=tuple(
                replace(e, units={"refused": count_units(clients)}) for e in reading.epochs
            ),
        )

    one = [(900, 900, True), *[(10, 0, True)] * 9, *[(10, 0, False)] * 90]
    assert not judge(add(begin(), read(one)), POLICY).gross_failure
    many = [*[(10, 3, True)] * 10, *[(10, 0, False)] * 90]
    assert "were refused" in judge(add(begin(), read(many)), POLICY).gross_failure


AB = RolloutPolicy(ab_test=SplitTest(duration=1e6), min_requests=(100,))


def judge_users(successes: int, others: int, users: int) -> AnalysisResult:
    """Judge the feedback of `users` users of each version.

    Each user reports 100 results.
    """
    rest = [0] * (USER_BLOCKS - users)
    tallies, blocks = {}, {}
    for name, good in (("v2", successes), ("v1", others)):
        total = 100 * users
        tallies[name] = RequestCounts(requests=total, feedback=total, successes=good * users)
        counted = UserBlocks(
            requests=(*[100] * users, *rest, 0), events=(*[good] * users, *rest, 0)
        )
        blocks[name] = {
            "feedback": counted,
            "errors": replace(counted, events=(*[0] * users, *rest, 0)),
        }
    counts = GenerationCounts(origin="a", generation=7, tallies=tallies, blocks=blocks)
    observations = begin(percent=50, is_drawn=False)
    return judge(add(observations, MetricsReading(at=1.0, counts=(counts,))), AB)


def test_ab_test_with_few_users_is_undecided_and_counts_missing_users() -> None:
    few = judge_users(90, 30, 8)
    assert few.ab_outcome == "undecided"
    assert "12 are missing" in few.ab_summary
    assert "12 are missing" in few.unmet_target
    assert judge_users(90, 30, 40).ab_outcome == "better"
    assert judge_users(30, 90, 40).ab_outcome == "worse"
    assert judge_users(50, 50, 40).ab_outcome == "undecided"
