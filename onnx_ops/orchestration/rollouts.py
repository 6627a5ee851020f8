"""Run one endpoint's rollout as a flow run.

The flow run has a task run for each step, and publishes a page about the rollout.
"""

from __future__ import annotations

import datetime
import re
from functools import partial
from time import sleep
from typing import Any

from prefect import State
from prefect.artifacts import create_markdown_artifact
from prefect.states import Completed, Failed

from onnx_ops.config.quantities import parse_option
from onnx_ops.domain.rollout import ActionKind
from onnx_ops.errors import ConflictError, OnnxOpsError
from onnx_ops.orchestration.tasks import failed, run_as_task
from onnx_ops.ports import Context
from onnx_ops.release.journal import Journal
from onnx_ops.release.notify import send_pending_each
from onnx_ops.release.reconcile import StepReport, reconcile_until_stable
from onnx_ops.release.status import RolloutTimeline, build_timeline
from onnx_ops.reporting.formatting import markdown_table
from onnx_ops.reporting.plots import as_data_url, evidence_svg

_ENDED_BADLY = (ActionKind.ABORT, ActionKind.ROLLBACK)


def run_rollout(
    context: Context, endpoint: str, *, by: str, limit: str, interval: str
) -> State[Any]:
    """Reconcile the endpoint until its rollout ends or the time limit is over.

    Other processes can reconcile the endpoint at the same time. After the time limit, the rollout
    stays at its step, and the reconciler or another run continues it.

    Args:
        limit: maximum duration of the flow run, such as `1 d`.
        interval: interval between passes, such as `10 s`.

    Raises:
        NotFoundError: the endpoint does not exist.
        UserError: a duration is invalid.
    """
    Journal.open(context, endpoint).config  # noqa: B018 (raises NotFoundError for an unknown name)
    remedy = "Write a duration, such as 10 s or 2 h."
    pause = parse_option(interval, "s", "interval", remedy)
    deadline = context.clock.monotonic() + parse_option(limit, "s", "limit", remedy)
    trouble, published = "", -1
    while True:
        reports, error = _reconcile(context, endpoint, by)
        if error is not None and str(error) != trouble:
            trouble = str(error)
            run_as_task("rollout", f"{endpoint}: trouble", partial(failed, error))
        send_pending_each(context, (endpoint,))
        journal = Journal.open(context, endpoint)
        if journal.state.head != published:
            published = journal.state.head
            publish_rollout(context, endpoint)
        is_over = journal.state.roles.candidate is None and error is None and reports[-1].stable
        if is_over or context.clock.monotonic() >= deadline:
            break
        sleep(pause)
    if error is not None:
        return failed(error)
    if not is_over:
        return Completed(name="TimeIsOver", message=f"not over yet: {reports[-1].why}")
    timeline = build_timeline(endpoint, context.ledger.read(endpoint))
    if timeline is not None and timeline.end in _ENDED_BADLY:
        return Failed(
            name="RolledBack", message=f"{timeline.candidate.name}: {timeline.steps[-1].why}"
        )
    return Completed(message=reports[-1].why)


def publish_rollout(context: Context, endpoint: str) -> None:
    """Publish `<endpoint>-rollout`: the steps, their reasons and the evidence.

    The call has an effect only if the endpoint has had a rollout.
    """
    timeline = build_timeline(endpoint, context.ledger.read(endpoint))
    if timeline is None:
        return
    model, version = timeline.candidate.model, timeline.candidate.version
    try:
        link = context.registry().page(model, version, "report.html")
    except OnnxOpsError:
        # The page has a link only if the registry answers.
        link = ""
    command = f"Write the report to a file: `onnx-ops report {model}/{version}`"
    text = page(endpoint, timeline, f"[Report of the release]({link})" if link else command)
    key = re.sub(r"[^a-z0-9]+", "-", f"{endpoint}-rollout".lower()).strip("-")
    description = f"Steps of the last rollout of {endpoint}, with their reasons."
    create_markdown_artifact(text, key=key, description=description)


def page(endpoint: str, timeline: RolloutTimeline, report: str) -> str:
    """Return a page about a rollout, as Markdown.

    The plot is an image with a data URL, since Prefect shows no inline SVG.
    """
    from onnx_ops.statistics.rollout.judge import trace_guardrails

    name = timeline.candidate.name
    ended = {ActionKind.FINISH: "has all traffic", ActionKind.ABORT: "was aborted"}
    how = "is on trial" if timeline.end is None else ended.get(timeline.end, "was rolled back")
    steps = []
    for step in timeline.steps:
        at = datetime.datetime.fromtimestamp(step.at, tz=datetime.UTC).strftime("%Y-%m-%d %H:%M:%S")
        share = "" if step.percent is None else f"{step.percent} %"
        steps.append((at, step.what, share, step.why, step.actor))
    lines = [
        f"# {endpoint}: {name} {how}",
        "",
        *markdown_table(("when (UTC)", "what", "share", "why", "by"), steps),
    ]
    if plot := evidence_svg(trace_guardrails(timeline.history, timeline.policy)):
        lines += ["", f"![Evidence against {name}]({as_data_url(plot)})"]
    return "\n".join([*lines, "", report, ""])


def _reconcile(
    context: Context, endpoint: str, by: str
) -> tuple[list[StepReport], OnnxOpsError | None]:
    """Run one pass, and record a task run for every step with an effect.

    The task run describes the step and its reason.
    """
    reports: list[StepReport] = []

    def record(report: StepReport) -> None:
        reports.append(report)
        state: State[Any] = Completed(message=report.why)
        if report.refused:
            state = Failed(name="Refused", message=report.why)
        if report.did:
            run_as_task("rollout", f"{report.endpoint}: {report.did}", lambda: state)

    try:
        reconcile_until_stable(context, endpoint, actor=by, on_step=record)
    except ConflictError:  # The next pass reads the action of the other process.
        reports.append(
            StepReport(
                endpoint=endpoint, did="", why="another process acted meanwhile", stable=False
            )
        )
    except OnnxOpsError as error:
        return reports, error
    return reports, None
