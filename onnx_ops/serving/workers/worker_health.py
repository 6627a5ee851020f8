"""Which deployments end or block the workers, and which of them is taken out of service for that.

Workers write into shared memory what they run, before they run it. When one dies, or its event loop stands still, its
death is charged to that deployment. Only requests that the split has routed decide: a client that selects a deployment
could end any worker with it.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Mapping

from onnx_ops.serving.inference.deployments import TableRevision
from onnx_ops.serving.metrics import (
    HEARTBEAT,
    HUNG_RUN,
    INLINE_RUN,
    LOST_RUN,
    OUT_OF_SERVICE,
    RUN_CELL,
    RUN_SLOT,
    THREAD_RUN,
    UNJUDGED,
    WORKER_DEATHS,
    SharedMetrics,
    count_judged,
    get_column,
)

_log = logging.getLogger(__name__)

MIN_DEATHS = 3
"""Deaths of workers after which a deployment can be taken out of service."""
DEATH_RATIO = 5
"""How many times as often as the stable deployment, by request, it must have ended workers: requests that end a worker
whatever the version are evidence against no version."""


class WorkerHealth:
    """Charges deaths of workers to deployments. It belongs to the supervisor."""

    def __init__(self, shared: SharedMetrics) -> None:
        self._shared = shared
        self._slots: Mapping[str, int] = {}
        self._stable = 0
        self._requests: Counter[int] = Counter()
        self._deaths: Counter[int] = Counter()

    def start_table(self, revision: TableRevision) -> None:
        """Begin anew for a table that is published: its deployments are all in service."""
        table, weights = revision.table, revision.table.state.split.weights
        serving = [name for name in table.layout if weights.get(name)]
        self._slots = revision.slots
        self._stable = revision.slots[serving[-1]] if serving else 0  # the oldest one
        self._deaths.clear()
        self._requests = Counter({slot: self._count_requests(slot) for slot in revision.slots.values()})
        self._shared.header[OUT_OF_SERVICE] = 0

    def get_silence_s(self, worker: int) -> float:
        """Return the seconds since the last heartbeat of a worker's event loop; 0 before the first one."""
        beat = self._shared.get_process_state(worker)[HEARTBEAT]
        return max(0.0, time.monotonic() - beat / 1e9) if beat else 0.0

    def record_death(self, worker: int) -> str:
        """Charge the death of a worker to what it was running; return the deployment, or empty if it ran none."""
        state = self._shared.get_process_state(worker)
        runs = [(state[run + RUN_SLOT], state[run + RUN_CELL]) for run in (HUNG_RUN, INLINE_RUN, THREAD_RUN)]
        slot, cell = next((run for run in runs if run[0]), (0, 0))
        # The next worker counts a request that was lost on the event loop by user. Those on threads are counted anyway.
        state[LOST_RUN + RUN_SLOT], state[LOST_RUN + RUN_CELL] = runs[1]
        state[HEARTBEAT] = 0
        for run in (HUNG_RUN, INLINE_RUN, THREAD_RUN):
            state[run + RUN_SLOT] = state[run + RUN_CELL] = 0
        name = next((name for name, known in self._slots.items() if known == slot), "")
        if slot:
            row = self._shared.get_shadow_row(slot)
            row[WORKER_DEATHS] += 1
            row[get_column(500)] += 1
            row[UNJUDGED + get_column(500)] += not cell
        if name and cell:  # the split has routed it
            self._deaths[slot] += 1
            self._take_out(slot, name)
        return name

    def get_out_of_service(self) -> Mapping[str, str]:
        """Return the deployments that are out of service, with the reason."""
        mask = self._shared.header[OUT_OF_SERVICE]
        return {
            name: f"{self._deaths[slot]} workers died or stood still while they ran it"
            for name, slot in self._slots.items()
            if mask >> slot & 1
        }

    def _take_out(self, slot: int, name: str) -> None:
        deaths, stable_deaths = self._deaths[slot], self._deaths[self._stable]
        requests, stable_requests = (self._count_requests(s) - self._requests[s] for s in (slot, self._stable))
        if slot == self._stable or deaths < MIN_DEATHS:
            return
        if deaths * (stable_requests + 1) > DEATH_RATIO * (stable_deaths + 1) * requests:
            self._shared.header[OUT_OF_SERVICE] |= 1 << slot
            _log.error(
                "deployment %s is out of service: %d workers died or stood still while they ran it", name, deaths
            )

    def _count_requests(self, slot: int) -> int:
        return sum(count_judged(self._shared.sum_slot(slot)).values())
