"""A model of replicas that follow numbered routing tables.

The tests check every state that a few steps of the model can reach. The model is checked before the
code that it describes. The ledger contains intents, each with the number of its table: `PREPARE`
(the candidate has weight 0), `WEIGHT` (it gets traffic) and `ABORT` (back to stable, permanently).
Any process may create the object of an intent, once, at any time afterwards. It can be a delayed
reconciler, or one of two reconcilers. A hint, `head`, names an object. Its writers can be delayed
too, and set it back.

A replica that lists the objects takes the highest one. It gives a candidate traffic only for
`LEASE` ticks of the replica's clock after it has listed. Once that time is over, it does so again
only after the judge has looked at the rollout. The reason is that an abort may be intended without
an object yet. A replica that is cut off, frozen or slow takes no step for a while. The same is true
if a store is down. The model allows this at every moment.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import pytest

# These tests execute no code of the package, so no change of the package fails them.
pytestmark = pytest.mark.nightly

LEASE = 2
PREPARE, WEIGHT, ABORT = 1, 2, 3
_TICKS = 4
"""Ticks of the model: one more than a lease, and one for the abort."""


class Replica(NamedTuple):
    """One server.

    `adopted` is the table that it follows, 0 for none. `reported` is the last table that its
    reports name. `age` is the number of ticks since it renewed its lease. `last_look` is the last
    look of the judge that it has read. `is_confirmed` is true if it has read a new one since its
    last gap, a time without a lease.
    """

    adopted: int = 0
    reported: int = 0
    age: int = LEASE + 1
    last_look: int = 0
    is_confirmed: bool = False

    @property
    def serves_candidate(self) -> bool:
        return self.adopted == WEIGHT and self.age <= LEASE and self.is_confirmed


class World(NamedTuple):
    """The state that all processes share.

    `since_abort` are the ticks since the object of the abort was created, `since_intent` those
    since it was intended; both are -1 before. `looks` counts those of the judge that continue the
    rollout. `is_removed`: whether a reconciler has recorded that no replica serves the candidate.
    `began_late`: a replica began to serve it longer than a lease after the abort was intended.
    """

    intents: int = 0
    objects: frozenset[int] = frozenset()
    head: int = 0
    replicas: tuple[Replica, ...] = (Replica(), Replica())
    since_abort: int = -1
    since_intent: int = -1
    looks: int = 0
    is_removed: bool = False
    began_late: bool = False
    restarts: int = 0
    ticks: int = 0

    def with_replica(self, place: int, replica: Replica) -> World:
        """Return the world with another replica; the order of replicas does not matter."""
        others = self.replicas[:place] + self.replicas[place + 1 :]
        return self._replace(replicas=tuple(sorted((*others, replica))))


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """The rules of the protocol, each of which a test breaks once.

    The judge looks at most `looks` times. Replicas restart `restarts` times.
    """

    weight_waits_for_reports: bool = True
    head_renews_lease: bool = False
    removal_ticks: int = LEASE + 1
    late_objects_count: bool = False
    restart_keeps_lease: bool = False
    gap_needs_look: bool = True
    looks: int = 1
    restarts: int = 1


def list_steps(world: World, rules: Rules) -> Iterator[World]:
    """Yield the worlds that one step of one process leads to."""
    serving = sum(one.serves_candidate for one in world.replicas)
    for step in _list_next(world, rules):
        is_late = (
            step.since_intent > LEASE
            and sum(one.serves_candidate for one in step.replicas) > serving
        )
        yield step._replace(began_late=is_late)


def _list_next(world: World, rules: Rules) -> Iterator[World]:
    yield from _reconcile(world, rules)
    for place, replica in enumerate(world.replicas):
        yield from _follow(world, place, replica, rules)
    if world.ticks < _TICKS:
        aged = tuple(
            sorted(one._replace(age=min(one.age + 1, LEASE + 1)) for one in world.replicas)
        )
        since_abort = world.since_abort + (world.since_abort >= 0)
        since_intent = world.since_intent + (world.since_intent >= 0)
        ticked = world._replace(ticks=world.ticks + 1, replicas=aged)
        yield ticked._replace(since_abort=since_abort, since_intent=since_intent)


def _reconcile(world: World, rules: Rules) -> Iterator[World]:
    """Yield the worlds after each step of a reconciler.

    A reconciler writes an intent, creates an object, writes the hint, or records that no
    replica serves the candidate.
    """
    is_ready = (
        all(one.reported >= PREPARE for one in world.replicas) or not rules.weight_waits_for_reports
    )
    if world.intents < ABORT and (world.intents != PREPARE or is_ready):
        since_intent = 0 if world.intents + 1 == ABORT else -1
        yield world._replace(intents=world.intents + 1, since_intent=since_intent)
    if WEIGHT in world.objects and world.intents < ABORT and world.looks < rules.looks:
        yield world._replace(looks=world.looks + 1)
    for number in range(1, world.intents + 1):
        if number not in world.objects:
            since_abort = 0 if number == ABORT else world.since_abort
            yield world._replace(objects=world.objects | {number}, since_abort=since_abort)
        elif number != world.head:
            yield world._replace(head=number)
    has_reports = all(one.reported >= ABORT for one in world.replicas)
    if (
        ABORT in world.objects
        and not world.is_removed
        and (has_reports or world.since_abort >= rules.removal_ticks)
    ):
        yield world._replace(is_removed=True)


def _follow(world: World, place: int, replica: Replica, rules: Rules) -> Iterator[World]:
    """Yield the worlds after each step of a replica.

    A replica lists the objects, reads the hint, reports, or restarts.
    """
    for number in world.objects if rules.late_objects_count else [max(world.objects, default=0)]:
        if number:
            yield world.with_replica(
                place, _renew(world, replica, rules)._replace(adopted=number, age=0)
            )
    if world.head:
        age = 0 if rules.head_renews_lease else replica.age
        yield world.with_replica(
            place, replica._replace(adopted=max(replica.adopted, world.head), age=age)
        )
    if replica.adopted > replica.reported:
        yield world.with_replica(place, replica._replace(reported=replica.adopted))
    # A restarted replica has lost the clock of its lease, so it ignores its table on disk.
    if world.restarts < rules.restarts:
        adopted, age = (replica.adopted, 0) if rules.restart_keeps_lease else (0, LEASE + 1)
        again = world.with_replica(
            place, Replica(adopted=adopted, age=age, reported=replica.reported)
        )
        yield again._replace(restarts=world.restarts + 1)


def _renew(world: World, replica: Replica, rules: Rules) -> Replica:
    """Return a replica that has read the number of the judge's looks."""
    is_gap = replica.age > LEASE and rules.gap_needs_look
    is_confirmed = not is_gap and (
        replica.is_confirmed or world.looks != replica.last_look or not rules.gap_needs_look
    )
    return replica._replace(last_look=world.looks, is_confirmed=is_confirmed)


def explain_fault(world: World) -> str:
    """Return the violated invariant; empty if there is none."""
    serves = any(one.serves_candidate for one in world.replicas)
    if serves and world.since_abort > LEASE:
        return "the candidate gets traffic longer than a lease after its abort"
    if world.began_late:
        return "the candidate gets traffic again, longer than a lease after its abort was intended"
    if serves and world.is_removed:
        return "the candidate gets traffic after its removal was recorded"
    if WEIGHT in world.objects and any(not one.reported for one in world.replicas):
        return "the candidate has weight before all have loaded it"
    return ""


def find_fault(rules: Rules) -> tuple[str, int]:
    """Return the fault with the fewest steps, and the number of visited worlds."""
    first = World()
    seen, queue = {first}, deque([first])
    while queue:
        world = queue.popleft()
        if fault := explain_fault(world):
            return fault, len(seen)
        for step in list_steps(world, rules):
            if step not in seen:
                seen.add(step)
                queue.append(step)
    return "", len(seen)


@pytest.mark.parametrize(("looks", "restarts"), [(1, 0), (1, 1), (2, 1)])
def test_find_fault_with_intact_rules_returns_no_fault(looks: int, restarts: int) -> None:
    fault, worlds = find_fault(Rules(looks=looks, restarts=restarts))
    assert fault == ""
    assert worlds > 10_000, "too few worlds were visited"


@pytest.mark.parametrize(
    ("broken", "fault"),
    [
        (Rules(weight_waits_for_reports=False), "before all have loaded it"),
        (Rules(head_renews_lease=True), "longer than a lease"),
        (Rules(removal_ticks=LEASE), "after its removal was recorded"),
        (Rules(late_objects_count=True), "longer than a lease"),
        (Rules(restart_keeps_lease=True), "longer than a lease"),
        (Rules(gap_needs_look=False), "again, longer than a lease after its abort was intended"),
    ],
)
def test_find_fault_with_broken_rule_returns_its_fault(broken: Rules, fault: str) -> None:
    assert fault in find_fault(broken)[0]
