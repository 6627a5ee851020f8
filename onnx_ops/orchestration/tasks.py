"""One task run for one piece of work: what Prefect shows of it is what the work says of itself."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from prefect import State, Task, allow_failure
from prefect.cache_policies import NO_CACHE
from prefect.logging import get_logger
from prefect.states import Failed

from onnx_ops.errors import OnnxOpsError


def run_as_task(
    kind: str,
    name: str,
    work: Callable[[], State[Any]],
    *,
    after: Sequence[State[Any]] = (),
    retries: int = 0,
    retry_if: Callable[[], bool] = lambda: False,
) -> State[Any]:
    """Run `work` here and now as a task run of its own, and return the state it ended in.

    Nothing is passed to the task and nothing is kept of it but its state: no parameters that Prefect would walk
    through, no pickled result, no cache of Prefect's, and no tags, each of which costs a concurrency lease.

    Args:
        kind: name of the task.
        name: name of the task run.
        work: answers with the state in which the run ends; what it raises ends the run as Prefect sees fit.
        after: states of earlier task runs; Prefect draws an edge from each, whatever became of it.
        retries: further attempts after a Failed state.
        retry_if: asked after each Failed state whether another attempt makes sense.
    """
    get_logger("prefect.task_runs").addFilter(_without_repetition)
    task = Task(
        fn=work,
        name=kind,
        task_run_name=lambda: name,
        retries=retries,
        retry_condition_fn=lambda _task, _run, _state: retry_if(),
        cache_policy=NO_CACHE,
        persist_result=False,
    )
    return task(return_state=True, wait_for=[allow_failure(state) for state in after])


def _without_repetition(record: logging.LogRecord) -> bool:
    """Drop what Prefect logs as an error with the traceback of none, `NoneType: None`; its next line has the state."""
    return record.exc_info != (None, None, None)


def failed(error: OnnxOpsError) -> State[Any]:
    """The end of a run that raised this error: its own words, named by its type, without a traceback."""
    return Failed(name=type(error).__name__, message=str(error))
