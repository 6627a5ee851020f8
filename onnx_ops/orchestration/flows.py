"""Run pipelines, reconciliation and rollbacks in the flows of `flows/`.

The module also determines the final states of the flow runs.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, ParamSpec

from prefect import State, runtime
from prefect.states import Completed, Failed

from onnx_ops.app.affected import Affected, affected, changed_since
from onnx_ops.app.context import Project
from onnx_ops.app.project import execute, prepare
from onnx_ops.app.results import Summary, evidence_of, find_run_base, summarize
from onnx_ops.domain.plan import StageKind
from onnx_ops.domain.release import Choice
from onnx_ops.errors import OnnxOpsError
from onnx_ops.orchestration.artifacts import publish_pictures, publish_progress, publish_tables
from onnx_ops.orchestration.events import emit_run_events
from onnx_ops.orchestration.tasks import FAILED_STATES, PrefectExecutor, failed, run_as_task
from onnx_ops.pipeline import ordered_map
from onnx_ops.ports import Context
from onnx_ops.release.notify import send_pending_each
from onnx_ops.release.reconcile import write_aliases
from onnx_ops.release.reconcile_pass import ReconcilePass
from onnx_ops.release.rollback import roll_back_each

P = ParamSpec("P")


def ends_as_failed(flow: Callable[P, State[Any]]) -> Callable[P, State[Any]]:
    """Return the flow, with the state Failed in place of an `OnnxOpsError`.

    The state has the message of the error, without a traceback.
    """

    @functools.wraps(flow)
    def run(*args: P.args, **kwargs: P.kwargs) -> State[Any]:
        try:
            return flow(*args, **kwargs)
        except OnnxOpsError as error:
            return failed(error)

    return run


def named_after_file() -> str:
    """Return the name of the current flow run: its pipeline file without suffix.

    The parameter `file` of the flow run names the file.
    """
    return Path(runtime.flow_run.parameters["file"]).stem


def actor(context: Context) -> str:
    """Return the actor for the ledger: the user of the worker, and the flow run."""
    return f"{context.host.actor()} via prefect flow run {runtime.flow_run.id}"


def final_state(summary: Summary, errors: Mapping[str, OnnxOpsError]) -> State[Any]:
    """Return the final state of a pipeline's flow run.

    The state is Completed if `onnx-ops run` would exit with 0, and Failed otherwise.
    """
    unserved = [_choice_line(choice) for choice in summary.choices if choice.variant is None]
    failures = [f"{stage} failed: {error}" for stage, error in errors.items()]
    if summary.exit_code:
        return Failed(
            name=FAILED_STATES[summary.exit_code], message="\n".join([*unserved, *failures])
        )
    kept = {promotion.target for promotion in summary.left}
    served = [
        _choice_line(c) for c in summary.choices if c.variant is not None and c.target not in kept
    ]
    left = [promotion.explain_left() for promotion in summary.left]
    waiting = [
        f"{target}: awaiting promotion (alias challenger-{target})" for target in summary.awaiting
    ]
    count = len(summary.executed)
    work = (
        f"{count} of {len(summary.outcomes)} stages executed"
        if count
        else "nothing changed: no stage was executed"
    )
    return Completed(message="\n".join([*served, *left, *waiting, *failures, work]))


def _choice_line(choice: Choice) -> str:
    if choice.variant is None:
        return f"{choice.target}: no release. {choice.reason}"
    return f"{choice.target}: {choice.variant} is chosen ({choice.reason})"


def reconcile_as_task(reconcile_pass: ReconcilePass, endpoint: str, by: str) -> State[Any]:
    """Reconcile one endpoint in a task run; a failure does not stop other endpoints."""

    def reconcile() -> State[Any]:
        try:
            reports = reconcile_pass.reconcile(endpoint, actor=by)
        except OnnxOpsError as error:
            return failed(error)
        message = "\n".join(
            f"{report.did}: {report.why}" if report.did else report.why for report in reports
        )
        if any(report.refused for report in reports):
            return Failed(name="Refused", message=message)
        if why := reports[-1].registry_down:
            return Failed(
                name="RegistryDown", message=f"{message}\nthe registry could not be read: {why}"
            )
        return Completed(message=message)

    return run_as_task("reconcile", f"reconcile {endpoint}", reconcile)


def roll_back_endpoints(
    context: Context,
    names: Sequence[str],
    *,
    to: str | None,
    reason: str,
    by: str,
    force: bool,
    pin: bool,
) -> Mapping[str, State[Any]]:
    """Roll back the named endpoints, and record a task run for each.

    All rollbacks are carried out first. Then the task runs are recorded, the registry is updated,
    and people are notified.
    """
    results, errors = roll_back_each(
        context, names, to=to, reason=reason, actor=by, force=force, pin=pin
    )

    def report(name: str) -> State[Any]:
        if name in errors:
            return failed(errors[name])
        result = results[name]
        message = (
            f"{result.moved_from} -> {result.moved_to}, 100 % of traffic. Reason: {result.reason}"
        )
        pending = write_aliases(context, name, actor=by) if result.pending_aliases else ""
        return Completed(message=f"{message}\nregistry pending: {pending}" if pending else message)

    states = {
        name: run_as_task("rollback", f"rollback {name}", functools.partial(report, name))
        for name in names
    }
    send_pending_each(context, tuple(results))
    return states


def aggregate_state(states: Mapping[str, State[Any]]) -> State[Any]:
    """Return the state of a flow run over several endpoints.

    The state is Completed, or Failed with the name of the first failure.
    """
    summary = "\n".join(f"{name}: {state.message}" for name, state in states.items())
    bad = [state.name for state in states.values() if not state.is_completed()]
    if bad:
        return Failed(name=bad[0], message=summary)
    return Completed(
        message=summary or "no endpoints yet: the first run of a pipeline with `deploy` binds one"
    )


def run_pipeline(
    project: Project,
    file: str,
    *,
    overrides: Sequence[str] = (),
    until: StageKind | None = None,
    no_cache: Collection[StageKind] = (),
    abandon: str = "",
    jobs: int | None = None,
) -> State[Any]:
    """Run a pipeline with a task run for each stage.

    Artifacts, events and notifications are published. Up to `jobs` stages run in parallel, by
    default one per core. While a stage measures times, this process runs no other stage in a child
    process.
    """
    prepared = prepare(
        project, project.settings.root / Path(file), overrides=overrides, until=until
    )
    root, store = project.settings.root, project.context.store
    with publish_progress() as progress:
        result = execute(
            project,
            prepared,
            no_cache=no_cache,
            executor=PrefectExecutor(),
            observer=progress,
            actor=actor(project.context),
            abandon=abandon,
            jobs=jobs or os.cpu_count() or 1,
            base=find_run_base(root, store, prepared.pipeline.pipeline, os.environ),
        )
    summary = summarize(prepared.pipeline, result, project.context)
    publish_tables(summary)
    publish_pictures(summary, evidence_of(summary, project.context.store).values())
    emit_run_events(project.context, prepared.pipeline, summary)
    send_pending_each(project.context, [entry.endpoint for entry in prepared.pipeline.deploy])
    return final_state(summary, result.errors)


def run_affected(
    project: Project, since: str, until: StageKind | None, jobs: int | None = None
) -> State[Any]:
    """Run the pipelines that the changes since a commit affect.

    If a pipeline fails, the other pipelines still run. Up to `jobs` pipelines run in parallel. If
    only one pipeline is affected, up to `jobs` of its stages run in parallel.
    """
    touched = affected(project, changed_since(project.settings.root, since))
    if not touched:
        return Completed(message="no pipeline is affected by this change")
    jobs = jobs or os.cpu_count() or 1

    def run_one(one: Affected) -> State[Any]:
        if one.problem:
            return Failed(name="WrongInput", message=one.problem)
        try:
            return run_pipeline(
                project, one.file, until=until, jobs=1 if len(touched) > 1 else jobs
            )
        except OnnxOpsError as error:
            return failed(error)

    states = dict(
        zip((one.file for one in touched), ordered_map(jobs, run_one, touched), strict=True)
    )
    return aggregate_state(states)
