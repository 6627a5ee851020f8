"""Benchmarks on workers of Prefect work pools: one pool for each kind of machine."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from uuid import UUID

from onnx_ops.domain.quantities import Json
from onnx_ops.errors import MeasurementError, OnnxOpsError, ServiceUnavailableError, UserError
from onnx_ops.ports import Pools

if TYPE_CHECKING:
    from prefect import State
    from prefect.client.orchestration import SyncPrefectClient

FLOW = "measure"

_FINAL = ("COMPLETED", "FAILED")
_DEAD = ("CRASHED", "CANCELLED", "CANCELLING")


class _WorkerDied(Exception):
    """The worker died after it started the work."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefectPools(Pools):
    """Runs the deployment `measure/POOL` for each request. Durations are seconds.

    A worker that is killed together with its flow run reports nothing. If its runs send Prefect's heartbeats, `silence`
    without one counts as death; another worker of the pool then takes the work, `tries` times in all.
    """

    poll: float = 1.0
    patience: float = 600.0
    silence: float = 100.0
    tries: int = 2
    runs: set[UUID] = field(default_factory=set)
    """Flow runs that are waited for."""

    def measure(self, pool: str, title: str, request: Mapping[str, Json], *, timeout: float | None) -> None:
        """Run a measurement on a worker of the pool, and wait for it."""
        from prefect.exceptions import ObjectNotFound

        deaths: list[str] = []
        with _open_client() as client:
            try:
                deployment = client.read_deployment_by_name(f"{FLOW}/{pool}").id
            except ObjectNotFound as error:
                raise UserError(
                    f"no deployment is called {FLOW}/{pool}",
                    where=f"pool {pool}",
                    remedy="Deploy it as prefect.yaml does for `local`: "
                    f"prefect --no-prompt deploy flows/measure.py:measure --name {pool} --pool {pool}; "
                    f"and start a worker there: prefect worker start --pool {pool}",
                ) from error
            while len(deaths) < self.tries:
                parameters = {"request": dict(request)}
                run = client.create_flow_run_from_deployment(deployment, parameters=parameters, name=title).id
                self.runs.add(run)
                try:
                    return self._wait(client, run, pool, title, timeout)
                except BaseException as error:
                    _cancel(client, run)
                    if not isinstance(error, _WorkerDied):
                        raise
                    deaths.append(str(error))
                finally:
                    self.runs.discard(run)
        raise MeasurementError(
            f"{self.tries} workers of pool {pool} died over it, one after the other",
            where=title,
            why=deaths[-1],
            remedy="See the flow runs of `measure` in Prefect, and whether those machines have enough memory.",
        )

    def cancel(self) -> None:
        """Cancel the flow runs that are waited for."""
        if runs := tuple(self.runs):
            with contextlib.suppress(OnnxOpsError), _open_client() as client:
                for run in runs:
                    _cancel(client, run)

    def _wait(self, client: SyncPrefectClient, run: UUID, pool: str, title: str, timeout: float | None) -> None:
        asked, started = time.monotonic(), None
        beat, heard = "", asked
        while True:
            state = client.read_flow_run(run).state
            kind = _kind(state)
            if kind in _FINAL:
                return
            if kind in _DEAD:
                raise _WorkerDied(f"its flow run ended as {state.name if state else kind}")
            now = time.monotonic()
            if kind == "RUNNING":
                started = now if started is None else started
                if timeout is not None and now - started > timeout:
                    raise MeasurementError(
                        f"it ran longer than its time-out of {timeout:g} s and was stopped",
                        where=title,
                        remedy="Raise `timeout` in the pipeline file if the work is really that long.",
                    )
                if (last := _heartbeat(client, run)) != beat:
                    beat, heard = last, now
                if beat and now - heard > self.silence:
                    raise _WorkerDied(f"its flow run has sent no heartbeat for {now - heard:.0f} s")
            elif now - asked > self.patience:
                raise MeasurementError(
                    f"no worker of pool {pool} took it within {self.patience:g} s",
                    where=title,
                    remedy=f"Start one on the machine: prefect worker start --pool {pool}",
                )
            time.sleep(self.poll)


def _cancel(client: SyncPrefectClient, run: UUID) -> None:
    """Stop a running worker, and prevent the start of a pending one. Raise nothing."""
    from prefect.states import Cancelling

    with contextlib.suppress(Exception):  # any exception of Prefect's client: the first error is the one that counts
        if _kind(client.read_flow_run(run).state) not in (*_FINAL, *_DEAD):
            client.set_flow_run_state(run, Cancelling(message="its result is no longer wanted"), force=True)


def _kind(state: State[Any] | None) -> str:
    return "" if state is None else str(state.type.value)


@contextlib.contextmanager
def _open_client() -> Iterator[SyncPrefectClient]:
    import httpx
    from prefect.client.orchestration import get_client
    from prefect.settings import PREFECT_API_URL

    if not PREFECT_API_URL.value():
        raise UserError(
            "a target with a `pool` is measured through a Prefect server, and none is set",
            where="PREFECT_API_URL",
            remedy="prefect config set PREFECT_API_URL=http://HOST:4200/api; or leave `pool` out of the target.",
        )
    try:
        with get_client(sync_client=True) as client:
            yield client
    except httpx.TransportError as error:
        raise ServiceUnavailableError(
            "Prefect's server does not answer", where=str(PREFECT_API_URL.value()), why=type(error).__name__
        ) from error


def _heartbeat(client: SyncPrefectClient, run: UUID) -> str:
    """Return the time of the run's last heartbeat; empty if it sent none."""
    wanted = {
        "filter": {
            "event": {"name": ["prefect.flow-run.heartbeat"]},
            "resource": {"id": [f"prefect.flow-run.{run}"]},
            "order": "DESC",
        },
        "limit": 1,
    }
    events = client.request("POST", "/events/filter", json=wanted).json()["events"]
    return str(events[0]["id"]) if events else ""
