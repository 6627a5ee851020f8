"""Flow runs of tests, and their records on Prefect's server.

Prefect is imported late, since not every worker needs it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast
from uuid import UUID

if TYPE_CHECKING:
    from prefect import State
    from prefect.client.schemas.objects import Artifact, TaskRun


def in_flow(work: Callable[[], Any]) -> State[Any]:
    """Call `work` in a flow run; return the final state, or raise the error of `work`."""
    from prefect import flow

    errors: list[Exception] = []

    @flow(name="story", persist_result=False)
    def story() -> Any:
        try:
            return work()
        except Exception as error:
            errors.append(error)
            raise

    state = cast("State[Any]", story(return_state=True))
    if errors:
        raise errors[0]
    return state


def run_of(state: State[Any]) -> UUID:
    return UUID(str(state.state_details.flow_run_id))


def artifacts_of(run: UUID) -> dict[str, Artifact]:
    """Return the last artifact of each key.

    Prefect's client writes an artifact again if the first answer took too long.
    """
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterFlowRunId

    wanted = ArtifactFilter(flow_run_id=ArtifactFilterFlowRunId(any_=[run]))
    with get_client(sync_client=True) as client:
        found = client.read_artifacts(artifact_filter=wanted)
    return {
        str(artifact.key): artifact
        for artifact in sorted(found, key=lambda artifact: str(artifact.created))
    }


def task_runs_of(run: UUID) -> list[TaskRun]:
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId

    with get_client(sync_client=True) as client:
        return client.read_task_runs(flow_run_filter=FlowRunFilter(id=FlowRunFilterId(any_=[run])))


def names_of_task_runs(state: State[Any], *awaited: str) -> list[str]:
    """Return the names of the task runs in order, once they include those in `awaited`.

    The server receives task runs by events, a moment after the flow run has ended.
    """
    names: list[str] = []
    for _ in range(150):
        runs = sorted(
            task_runs_of(run_of(state)), key=lambda run: str(run.expected_start_time or run.created)
        )
        names = [run.name for run in runs]
        if set(awaited) <= set(names) and not any(name.startswith("rollout-") for name in names):
            break
        threading.Event().wait(0.2)
    return names
