"""What the flows in `flows/` are told in: names, actors, and the states in which a flow run ends."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ParamSpec

from prefect import State, runtime
from prefect.states import Completed, Failed

from onnx_ops.app.summary import Summary
from onnx_ops.domain.release import Choice
from onnx_ops.errors import OnnxOpsError
from onnx_ops.orchestration.tasks import failed, run_as_task
from onnx_ops.ports import Ports
from onnx_ops.release.notify import send_pending_each
from onnx_ops.release.reconcile import DryRun, write_aliases
from onnx_ops.release.rollback import RollbackResult, roll_back_each

P = ParamSpec("P")

ENDS = {1: "GateFailed", 2: "WrongInput", 3: "Inconclusive", 4: "EnvironmentFailed", 5: "Refused"}
"""Names of the Failed states in which a pipeline ends, by the exit code that `onnx-ops run` would have."""


def concluding(story: Callable[P, State[Any]]) -> Callable[P, State[Any]]:
    """Errors that onnx-ops raises on purpose end a flow run as Failed, in their own words and without a traceback."""

    @functools.wraps(story)
    def told(*args: P.args, **kwargs: P.kwargs) -> State[Any]:
        try:
            return story(*args, **kwargs)
        except OnnxOpsError as error:
            return failed(error)

    return told


def named_after_file() -> str:
    """Name of a flow run whose parameter `file` is a pipeline file: `digits-mlp`."""
    return Path(runtime.flow_run.parameters["file"]).stem


def actor(ports: Ports) -> str:
    """Who acts, for the ledger: whoever runs the worker, and the flow run that can be looked up in Prefect."""
    return f"{ports.host.actor()} via prefect flow run {runtime.flow_run.id}"


def conclusion(summary: Summary, errors: Mapping[str, OnnxOpsError]) -> State[Any]:
    """The end of a pipeline's flow run: Completed where `onnx-ops run` would exit 0, else Failed with the reasons."""
    unserved = [_choice_line(choice) for choice in summary.choices if choice.variant is None]
    failures = [f"{stage} failed: {error}" for stage, error in errors.items()]
    if summary.exit_code:
        return Failed(name=ENDS[summary.exit_code], message="\n".join([*unserved, *failures]))
    served = [_choice_line(choice) for choice in summary.choices if choice.variant is not None]
    waiting = [f"{target}: awaiting promotion, by alias challenger-{target}" for target in summary.awaiting]
    count = len(summary.executed)
    work = f"{count} of {len(summary.outcomes)} stages executed" if count else "nothing changed: no stage was executed"
    return Completed(message="\n".join([*served, *waiting, *failures, work]))


def _choice_line(choice: Choice) -> str:
    if choice.variant is None:
        return f"{choice.target}: no release. {choice.reason}"
    return f"{choice.target}: serves {choice.variant} ({choice.reason})"


def reconcile_as_task(glance: DryRun, endpoint: str, by: str) -> State[Any]:
    """Settle one endpoint in a task run of its own; one endpoint's trouble is not another's."""
    return run_as_task("reconcile", f"reconcile {endpoint}", lambda: _settled(glance, endpoint, by))


def back_as_tasks(
    ports: Ports,
    names: Sequence[str],
    *,
    to: str | None,
    reason: str,
    by: str,
    force: bool,
    pin: bool,
) -> Mapping[str, State[Any]]:
    """Move the traffic of all of them back, then say so in a task run for each, tell the registry, and tell people."""
    moved, errors = roll_back_each(ports, names, to=to, reason=reason, actor=by, force=force, pin=pin)
    states: dict[str, State[Any]] = {}
    for name in names:
        if name in errors:
            states[name] = run_as_task("rollback", f"rollback {name}", functools.partial(failed, errors[name]))
        else:
            told = functools.partial(_moved, ports, moved[name], by)
            states[name] = run_as_task("rollback", f"rollback {name}", told)
    send_pending_each(ports, tuple(moved))
    return states


def _moved(ports: Ports, rolled: RollbackResult, by: str) -> State[Any]:
    told = f"{rolled.moved_from} -> {rolled.moved_to}, 100 % of traffic. Reason: {rolled.reason}"
    pending = write_aliases(ports, rolled.endpoint, actor=by) if rolled.owed else ""
    return Completed(message=f"{told}\nregistry pending: {pending}" if pending else told)


def together(states: Mapping[str, State[Any]]) -> State[Any]:
    """The end of a flow run over several endpoints: Failed, named by the first that is, or Completed."""
    told = "\n".join(f"{name}: {state.message}" for name, state in states.items())
    bad = [state.name for state in states.values() if not state.is_completed()]
    if bad:
        return Failed(name=bad[0], message=told)
    return Completed(message=told or "no endpoints yet: the first run of a pipeline with `deploy` binds one")


def _settled(glance: DryRun, endpoint: str, by: str) -> State[Any]:
    try:
        reports = glance.settle(endpoint, actor=by)
    except OnnxOpsError as error:
        return failed(error)
    told = "\n".join(f"{report.did}: {report.why}" if report.did else report.why for report in reports)
    if any(report.refused for report in reports):
        return Failed(name="Refused", message=told)
    if reports[-1].registry_down:
        return Failed(name="RegistryDown", message=f"{told}\nthe registry does not answer: {reports[-1].registry_down}")
    return Completed(message=told)
