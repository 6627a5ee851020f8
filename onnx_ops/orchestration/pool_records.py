"""Records of work pools on Prefect's server, which requesters and workers share.

The records are heartbeats, descriptions of workers, and states of runs.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any
from uuid import UUID

from onnx_ops import codec
from onnx_ops.domain.pool import WorkerStatus
from onnx_ops.errors import CorruptStateError
from onnx_ops.orchestration.prefect_client import PAGE_SIZE

if TYPE_CHECKING:
    from prefect import State
    from prefect.client.orchestration import SyncPrefectClient
    from prefect.client.schemas.objects import Worker

FLOW = "work"
"""Name of the flow that executes the stages of pools.

Its deployment for a pool is `work/POOL`, with a work queue for each kind of stage.
"""

CLAIMED = "Claimed"
"""Name of the Pending state that `onnx-ops work` sets when it takes a run.

The run starts immediately.
"""

TAKEN = "taken by worker "
"""Start of the message of the state `CLAIMED`; the name of the worker follows."""

ANNOUNCEMENT = "onnx-ops-worker"
"""Tag of Prefect's variables in which workers describe themselves."""

HEARTBEAT_S = 5.0

DEAD_AFTER_HEARTBEATS = 3
"""Number of successive missed heartbeats after which a worker is treated as dead."""

FINISHED_STATES = ("COMPLETED", "FAILED")
DEAD_STATES = ("CRASHED", "CANCELLED", "CANCELLING")


def read_announcements(client: SyncPrefectClient) -> dict[str, WorkerStatus]:
    """Return the descriptions that workers have published, by Prefect variable.

    Descriptions of dead workers are included.
    """
    described = dict[str, WorkerStatus]()
    for variable in _list_variables(client):
        # Workers of other releases can write another format.
        with contextlib.suppress(CorruptStateError):
            described[variable["name"]] = codec.from_json(variable["value"], WorkerStatus)
    return described


def _list_variables(client: SyncPrefectClient) -> Iterator[dict[str, Any]]:
    """Yield the variables that workers have published, by name."""
    wanted = {"variables": {"tags": {"all_": [ANNOUNCEMENT]}}, "limit": PAGE_SIZE}
    for offset in itertools.count(step=PAGE_SIZE):
        page = client.request("POST", "/variables/filter", json=wanted | {"offset": offset}).json()
        yield from page
        if len(page) < PAGE_SIZE:
            return


def list_alive(client: SyncPrefectClient, pool: str, now: datetime) -> list[str]:
    """Return the names of a pool's workers that send heartbeats."""
    return sorted(
        worker.name for worker in client.read_workers_for_work_pool(pool) if is_alive(worker, now)
    )


def is_alive(worker: Worker, now: datetime) -> bool:
    """Return whether a worker's last heartbeat is recent at `now`, the server's time."""
    silence = timedelta(seconds=DEAD_AFTER_HEARTBEATS * (worker.heartbeat_interval_seconds or 30))
    return worker.last_heartbeat_time is not None and now - worker.last_heartbeat_time < silence


def is_final(state: State[Any] | None) -> bool:
    """Return whether a flow run in this state has ended or is being cancelled."""
    return get_state_type(state) in (*FINISHED_STATES, *DEAD_STATES)


def get_state_type(state: State[Any] | None) -> str:
    """Return the type of a state, such as RUNNING; empty without a state."""
    return "" if state is None else str(state.type.value)


def declare_crashed(client: SyncPrefectClient, run: UUID, why: str) -> None:
    """Set the state of a run with a dead process to Crashed, to end all waits for it."""
    from prefect.states import Crashed

    client.set_flow_run_state(run, Crashed(message=why), force=True)
