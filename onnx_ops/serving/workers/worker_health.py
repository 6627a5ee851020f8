"""Detection of deployments that end or block the workers.

Such a deployment is taken out of service.

Before a worker runs a model, it records the run in shared memory. If the worker ends, or its event
loop hangs, its death is attributed to the recorded runs. Only requests that the split has routed
count. Otherwise, a client that selects a deployment could take any deployment out of service.

If several deployments were running, a share of the death is attributed to each of them. Under
load, several deployments are running at every death, and the shares hardly differ. Therefore, after
two such deaths, each new worker runs one deployment at a time for a while. Its death can then be
attributed to one deployment.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction

from onnx_ops.serving.inference.deployments import TableRevision
from onnx_ops.serving.metrics import (
    HEARTBEAT,
    HUNG_RUN,
    INLINE_RUN,
    ISOLATION,
    LOST_RUN,
    OUT_OF_SERVICE,
    ROUTED,
    RUN_CELL,
    RUN_KINDS,
    RUN_SLOT,
    SELECTED,
    SLOTS,
    UNJUDGED,
    WORKER_DEATHS,
    WORKER_RESTARTS,
    SharedMetrics,
    count_judged,
    get_column,
    make_thread_runs,
)

_log = logging.getLogger(__name__)

MIN_DEATHS = 3
"""Number of deaths of workers from which a deployment can be taken out of service."""
DEATH_RATIO = 5
"""Factor by which a deployment must end workers more often than the stable one.

Above this factor, the deployment is taken out of service. The deaths are compared per request.
Requests that end a worker with every version are evidence against no version.
"""
MIN_SHARED_DEATHS = 2
"""Number of deaths with several running deployments that isolates new workers.

Isolated workers run one deployment at a time. A single such death can be accidental. For example,
an operator or a lack of memory can end a worker regardless of what it runs.
"""


@dataclass(frozen=True, slots=True)
class RunCounts:
    """Numbers of runs of a deployment that a worker had in progress.

    `routed` runs were routed by the split. `selected` runs are all others (see `SELECTED`).
    """

    routed: int = 0
    selected: int = 0

    @property
    def total(self) -> int:
        """Number of all runs."""
        return self.routed + self.selected


def share_death(runs: Mapping[int, RunCounts]) -> Mapping[int, Fraction]:
    """Return by slot the share of a worker's death attributed to each deployment.

    Each run in progress gets the same share. If requests end workers with every version, the
    shares of the versions are proportional to their running times. So a comparison per request
    shows no difference. With equal shares for all deployments, a deployment with a tenth of the
    traffic would get half of the deaths under full load. The share of a run counts only if the
    split has routed the run.
    """
    total = sum(counts.total for counts in runs.values())
    return {slot: Fraction(counts.routed, total) for slot, counts in runs.items() if counts.routed}


def is_deadlier(
    deaths: Fraction, requests: int, stable_deaths: Fraction, stable_requests: int
) -> bool:
    """Return whether a deployment ends workers far more often than the stable one.

    The deaths are compared per request, from `MIN_DEATHS` on. One death and one request are added
    to those of the stable deployment, so that the ratio is defined without deaths and requests.

    A deployment's requests include those that ended a worker. So the result is always False for the
    stable deployment compared with itself.
    """
    if deaths < MIN_DEATHS:
        return False
    return deaths * (stable_requests + 1) > DEATH_RATIO * (stable_deaths + 1) * requests


class WorkerHealth:
    """Record of the deaths of workers, attributed to deployments.

    Only the supervisor uses it.
    """

    def __init__(self, shared: SharedMetrics) -> None:
        self._shared = shared
        self._slots: Mapping[str, int] = {}
        self._stable = 0
        self._requests: Counter[int] = Counter()
        self._deaths: dict[int, Fraction] = {}
        self._shared_deaths = 0

    def start_table(self, revision: TableRevision) -> None:
        """Reset the deaths for a new table, whose deployments are all in service."""
        table, weights = revision.table, revision.table.state.split.weights
        serving = [name for name in table.layout if weights.get(name)]
        self._slots = revision.slots
        # The oldest deployment with traffic is the stable one.
        self._stable = revision.slots[serving[-1]] if serving else 0
        self._deaths.clear()
        self._shared_deaths = 0
        self._requests = Counter(
            {slot: self._count_requests(slot) for slot in revision.slots.values()}
        )
        self._shared.header[OUT_OF_SERVICE] = self._shared.header[ISOLATION] = 0

    def get_silence_s(self, worker: int) -> float:
        """Return the seconds since the last heartbeat of a worker's event loop.

        The result is 0 before the first heartbeat.
        """
        beat = self._shared.get_process_state(worker)[HEARTBEAT]
        return max(0.0, time.monotonic() - beat / 1e9) if beat else 0.0

    def record_hang(self, worker: int) -> None:
        """Record that the event loop of a worker hangs, before the worker is killed.

        If a run on the event loop is recorded, the death is attributed only to this run.
        """
        state = self._shared.get_process_state(worker)
        if state[INLINE_RUN + RUN_SLOT]:
            state[HUNG_RUN + RUN_CELL] = state[INLINE_RUN + RUN_CELL]
            state[HUNG_RUN + RUN_SLOT] = state[INLINE_RUN + RUN_SLOT]

    def record_death(self, worker: int) -> str:
        """Attribute the death of a worker to the deployments that it was running.

        Return the names of the deployments of the suspect runs (see `_take_runs`); empty if there
        were no runs.
        """
        self._shared.get_shadow_row(0)[WORKER_RESTARTS] += 1
        runs, suspects = self._take_runs(worker)
        for slot, counts in runs.items():
            row = self._shared.get_shadow_row(slot)
            row[get_column(500)] += counts.total
            row[UNJUDGED + get_column(500)] += counts.selected
        for slot in suspects:
            self._shared.get_shadow_row(slot)[WORKER_DEATHS] += 1
        names = {slot: name for name, slot in self._slots.items() if slot in suspects}
        charged = {slot: share for slot, share in share_death(suspects).items() if slot in names}
        for slot, share in charged.items():
            self._deaths[slot] = self._deaths.get(slot, Fraction()) + share
        for slot in charged:
            # Deployments are compared by their deaths, so all shares are added first.
            self._take_out(slot, names[slot])
        self._shared_deaths += len(charged) > 1
        is_open = (
            self._shared_deaths >= MIN_SHARED_DEATHS and not self._shared.header[OUT_OF_SERVICE]
        )
        self._shared.header[ISOLATION] = is_open
        return ", ".join(names.values())

    def get_out_of_service(self) -> Mapping[str, str]:
        """Return the deployments that are out of service, with the reason."""
        mask = self._shared.header[OUT_OF_SERVICE]
        return {
            name: self._describe_deaths(slot)
            for name, slot in self._slots.items()
            if mask >> slot & 1
        }

    def _take_runs(self, worker: int) -> tuple[Mapping[int, RunCounts], Mapping[int, RunCounts]]:
        """Return the runs of a worker that ended, and the suspect runs, by slot.

        Both are then deleted from the shared memory. If a run exceeded its limit without ending,
        only this run is a suspect.
        """
        state, threads = (
            self._shared.get_process_state(worker),
            self._shared.get_thread_runs(worker),
        )
        runs = {
            slot: RunCounts(
                threads[RUN_KINDS * slot + ROUTED], threads[RUN_KINDS * slot + SELECTED]
            )
            for slot in range(1, SLOTS)
        }
        if slot := state[INLINE_RUN + RUN_SLOT]:
            runs[slot] = _add_run(runs[slot], state[INLINE_RUN + RUN_CELL])
        suspects = runs = {slot: counts for slot, counts in runs.items() if counts.total}
        if slot := state[HUNG_RUN + RUN_SLOT]:
            suspects = {slot: _add_run(RunCounts(), state[HUNG_RUN + RUN_CELL])}
        # The next worker counts, by user, the request that was lost on the event loop. Requests on
        # threads are counted in any case.
        for number in (RUN_SLOT, RUN_CELL):
            state[LOST_RUN + number] = state[INLINE_RUN + number]
            state[INLINE_RUN + number] = state[HUNG_RUN + number] = 0
        state[HEARTBEAT] = 0
        threads[:] = make_thread_runs()
        return runs, suspects

    def _take_out(self, slot: int, name: str) -> None:
        requests, stable_requests = (
            self._count_requests(s) - self._requests[s] for s in (slot, self._stable)
        )
        stable_deaths = self._deaths.get(self._stable, Fraction())
        if is_deadlier(self._deaths[slot], requests, stable_deaths, stable_requests):
            self._shared.header[OUT_OF_SERVICE] |= 1 << slot
            _log.error("deployment %s is out of service: %s", name, self._describe_deaths(slot))

    def _describe_deaths(self, slot: int) -> str:
        share = float(self._deaths.get(slot, Fraction()))
        return (
            f"workers crashed or hung while they ran it: {share:.4g} of these are attributed to it"
        )

    def _count_requests(self, slot: int) -> int:
        return sum(count_judged(self._shared.sum_slot(slot)).values())


def _add_run(counts: RunCounts, cell: int) -> RunCounts:
    """Return the counts with one more run.

    `cell` is the user's cell plus 1. It is 0 if the split has not routed the run.
    """
    return RunCounts(counts.routed + bool(cell), counts.selected + (not cell))
