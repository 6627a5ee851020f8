"""Commands about rollouts and rollbacks.

The commands are rollout status, advance, pause, resume and abort, and rollback.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Group
from rich.padding import Padding
from rich.text import Text

from onnx_ops import codec
from onnx_ops.cli.common import (
    Actor,
    AsJson,
    Endpoint,
    Markup,
    Quiet,
    Reason,
    add_command,
    complete_endpoint,
    console,
    exit_after_steps,
    make_group,
    markup,
    open_project,
    parse_duration,
    print_errors,
    print_json,
    print_result,
    print_steps,
    say,
)
from onnx_ops.cli.dry_runs import DryRunOption, DryRunOutcome, show_dry_run
from onnx_ops.domain.rollout import OperatorCommand
from onnx_ops.errors import OnnxOpsError, StillPendingError, UserError
from onnx_ops.plugins import EXTRAS, absent, install_hint

if TYPE_CHECKING:
    from onnx_ops.app.context import Project
    from onnx_ops.ports import Context
    from onnx_ops.release.rollback import RollbackResult
    from onnx_ops.release.status import RolloutView

rollout = make_group(
    "rollout",
    "Show or control a rollout. The reconciler moves it: `onnx-ops reconcile --watch`.",
    "onnx-ops rollout status digits-cnn --watch",
)


@add_command(rollout, "status")
def rollout_status(
    endpoint: Endpoint,
    watch: Annotated[
        bool, typer.Option("--watch", help="Keep refreshing until the rollout finishes.")
    ] = False,
    interval: Annotated[
        str, typer.Option(metavar="DURATION", help="Refresh interval for --watch.")
    ] = "2s",
    as_json: AsJson = False,
) -> None:
    """Show the steps of a rollout, its metrics and what it waits for.

    Exit code with --watch: 1 if the rollout was rolled back. Without a rollout in progress, this is
    the last one.

    Example: onnx-ops rollout status digits-cnn --watch
    """
    from onnx_ops.release.status import read_rollout_view

    pause_s, context = parse_duration(interval, "--interval"), open_project().context
    view = read_rollout_view(context, endpoint)
    if view is not None and not watch:
        print_result(
            lambda: codec.to_json(view), lambda: console().print(_render(view)), as_json=as_json
        )
        return
    if view is not None:
        _follow(context, view, pause_s, as_json=as_json)
    elif as_json:
        print_json(None)
    text, was_rolled_back = _describe_end(context, endpoint)
    if not as_json:
        console().print(text)
    if watch and was_rolled_back:
        raise typer.Exit(1)


@add_command(rollout, "resume")
def rollout_resume(
    endpoint: Endpoint,
    reason: Reason = "",
    actor: Actor = "",
    dry_run: DryRunOption = False,
    as_json: AsJson = False,
) -> None:
    """Continue a rollout that an operator paused, at its current step.

    The checks of the step then decide when the rollout advances. Without checks, it waits for
    approval. To skip the checks, or to approve, use `onnx-ops rollout advance`.

    Example: onnx-ops rollout resume digits-cnn
    """
    command = partial(_command, OperatorCommand.RESUME, reason=reason, actor=actor)
    _move_rollout(endpoint, command, actor, dry_run=dry_run, as_json=as_json)


@add_command(rollout, "advance")
def rollout_advance(
    endpoint: Endpoint,
    reason: Reason = "",
    actor: Actor = "",
    dry_run: DryRunOption = False,
    as_json: AsJson = False,
) -> None:
    """Advance a rollout by one step without waiting for its checks.

    The rollout can be paused. This command approves a step that waits for approval. A guardrail can
    still roll the rollout back.

    Example: onnx-ops rollout advance digits-cnn --reason "looked at the answers"
    """
    command = partial(_command, OperatorCommand.ADVANCE, reason=reason, actor=actor)
    _move_rollout(endpoint, command, actor, dry_run=dry_run, as_json=as_json)


@add_command(rollout, "pause")
def rollout_pause(
    endpoint: Endpoint,
    reason: Reason = "",
    actor: Actor = "",
    dry_run: DryRunOption = False,
    as_json: AsJson = False,
) -> None:
    """Pause a rollout at its current step.

    Example: onnx-ops rollout pause digits-cnn --reason "looking at the logs"
    """
    command = partial(_command, OperatorCommand.PAUSE, reason=reason, actor=actor)
    _move_rollout(endpoint, command, actor, dry_run=dry_run, as_json=as_json)


@add_command(rollout, "abort")
def rollout_abort(
    endpoint: Endpoint,
    reason: Reason = "",
    actor: Actor = "",
    dry_run: DryRunOption = False,
    as_json: AsJson = False,
) -> None:
    """Abort a rollout: move all traffic back to the stable version.

    Example: onnx-ops rollout abort digits-cnn --reason "wrong on sevens"
    """
    command = partial(_abort, reason=reason, actor=actor)
    _move_rollout(endpoint, command, actor, dry_run=dry_run, as_json=as_json)


def _abort(context: Context, endpoint: str, *, reason: str, actor: str) -> None:
    from onnx_ops.release.rollback import roll_back_each

    _, errors = roll_back_each(
        context, (endpoint,), reason=reason, actor=actor, candidate_only=True
    )
    if errors:
        raise errors[endpoint]


def _command(
    command: OperatorCommand, context: Context, endpoint: str, *, reason: str, actor: str
) -> None:
    from onnx_ops.release.rollback import send_command

    # Without MLflow, or with an invalid tracking URI, the command fails here, before it is
    # recorded.
    context.registry()
    send_command(context, endpoint, command, reason=reason, actor=actor)


def _move_rollout(
    endpoint: str,
    command: Callable[[Context, str], None],
    actor: str,
    *,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Execute a command on a rollout, and reconcile its endpoint."""
    from onnx_ops.release.notify import send_pending_each
    from onnx_ops.release.reconcile import StepReport, reconcile_until_stable

    def move(context: Context) -> dict[str, list[StepReport]]:
        command(context, endpoint)
        return {endpoint: reconcile_until_stable(context, endpoint, actor=actor)}

    if dry_run:
        show_dry_run(lambda context: DryRunOutcome(reports=move(context)), as_json=as_json)
        return
    context = open_project().context
    reports = move(context)
    send_pending_each(context, (endpoint,))
    print_result(
        lambda: codec.to_json(reports[endpoint]), lambda: print_steps(reports), as_json=as_json
    )
    exit_after_steps(reports)


def _follow(context: Context, view: RolloutView | None, pause_s: float, *, as_json: bool) -> None:
    """Show the rollout until it ends.

    A terminal redraws the rollout in place. With `as_json`, each state is printed as JSON.
    Otherwise, the rollout is printed when its next action changes.
    """
    from rich.live import Live

    from onnx_ops.release.status import read_rollout_view

    live = (
        Live(console=console(), auto_refresh=False) if sys.stdout.isatty() and not as_json else None
    )
    last = ""
    with live or contextlib.nullcontext():
        while view is not None:
            if live is not None:
                live.update(_render(view), refresh=True)
            elif as_json:
                print_json(codec.to_json(view))
            elif view.next != last:
                console().print(_render(view))
            last = view.next
            time.sleep(pause_s)
            view = read_rollout_view(context, view.endpoint)


def _render(view: RolloutView) -> Group:
    marks = []
    for index, step in enumerate(view.steps):
        text = f"shadow {step.mirror_percent} %" if step.kind == "shadow" else f"{step.percent} %"
        marks.append(markup("[bold]{}[/bold]" if index == view.step else "{}", text))
    head = markup(
        "[bold]{}[/bold] {} -> {}: {}",
        view.endpoint,
        view.stable,
        view.candidate,
        Markup(" → ".join(marks)),
    )
    lines = [view.next]
    if (judged := view.judged) is not None:
        summaries = [guard.summary for guard in judged.guardrails]
        outliers = [outlier.summary for outlier in judged.outliers]
        texts = [*summaries, judged.ab_summary, judged.split_mismatch, *outliers]
        # `next` already contains some of these texts, which are not repeated.
        lines = [
            *(text for text in texts if text and text not in view.next),
            view.next,
        ]
    here = f"{head}, here for {view.seconds:.0f} s{_forecast_requests(view)}"
    first = Text.from_markup(here, emoji=False)
    return Group(first, *(Padding(Text(line), (0, 0, 0, 2), expand=False) for line in lines))


def _forecast_requests(view: RolloutView) -> str:
    """Return when the step will have enough requests; empty without a forecast."""
    if view.judged is None:
        return ""
    from onnx_ops.reporting.rollout_forecast import format_duration
    from onnx_ops.statistics.rollout.forecast import forecast_rest

    needed = view.steps[view.step].minimum
    rest = forecast_rest(view.judged.requests, needed, view.seconds)
    return "" if rest is None else f"; {needed:,} requests expected in {format_duration(rest)}"


def _describe_end(context: Context, endpoint: str) -> tuple[Text, bool]:
    """Return a line about the last change of version, and whether it is a rollback."""
    from onnx_ops.domain.ledger import Intent
    from onnx_ops.domain.rollout import ActionKind

    changes = (ActionKind.FINISH, ActionKind.ABORT, ActionKind.ROLLBACK, ActionKind.FIRST)
    actions = [e.body.action for e in context.ledger.read(endpoint) if isinstance(e.body, Intent)]
    last = next((action for action in reversed(actions) if action.kind in changes), None)
    if last is None:
        return Text(f"{endpoint}: no rollout yet"), False
    text = f"{endpoint}: no rollout in progress; last change of the version: {last.kind.value}: "
    return Text(text + last.why), last.kind in (ActionKind.ABORT, ActionKind.ROLLBACK)


def rollback(
    endpoints: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="ENDPOINT...", help="Names of endpoints.", autocompletion=complete_endpoint
        ),
    ] = None,
    to: Annotated[
        str | None,
        typer.Option(
            "--to",
            metavar="VERSION",
            help="Version to restore. Default: in a rollout the stable one, else the previous one.",
        ),
    ] = None,
    reason: Reason = "",
    actor: Actor = "",
    all_: Annotated[
        bool,
        typer.Option(
            "--all",
            help="Roll back the endpoints of --model that serve its latest release; with --to, all "
            "endpoints of --model.",
        ),
    ] = False,
    model: Annotated[
        str, typer.Option("--model", help="With --all: the registered model.", show_default=False)
    ] = "",
    target: Annotated[
        str,
        typer.Option(
            "--target", "-t", help="With --all: only endpoints on this target.", show_default=False
        ),
    ] = "",
    force: Annotated[
        bool,
        typer.Option(
            "--force", help="Allow rolling back to a version that was itself rolled back."
        ),
    ] = False,
    wait: Annotated[
        bool,
        typer.Option("--wait", help="Update the registry's aliases before the command ends."),
    ] = False,
    withdraw: Annotated[
        bool,
        typer.Option(
            "--withdraw",
            help="Withdraw a rollback or deletion that was requested and could not be done yet.",
        ),
    ] = False,
    *,
    write_off: Annotated[
        str,
        typer.Option(
            "--write-off", metavar="REPLICA", help="Record that a silent replica will not return."
        ),
    ] = "",
    dry_run: DryRunOption = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Move all traffic back to the previous version, now.

    Does not need Prefect, and needs MLflow only if model files are lost. Repeating a finished
    rollback is no error. Exit code 4, within ten seconds, if the rollback could not be done yet.
    Without --wait, a background process then retries for 15 minutes, if this machine can change the
    endpoint. Every reconciliation retries too, until the rollback is done or withdrawn with
    --withdraw. Meanwhile the version is rejected.

    The aliases are moved in the background, or by the reconciler. If several endpoints serve the
    same model and target, a rollback of one of them leaves the aliases unchanged; --all moves them.

    Example: onnx-ops rollback digits --reason "wrong on sevens"

    Example: onnx-ops rollback --all --model digits-mlp --reason "wrong on sevens"
    """
    from onnx_ops.release.rollback import roll_back_each, select_endpoints

    names = tuple(endpoints or ())
    if withdraw:
        request = partial(_withdraw, names=names, reason=reason, actor=actor)
        _record_request(request, dry_run=dry_run, as_json=as_json)
        return
    if write_off:
        request = partial(_write_off, names=names, server=write_off, reason=reason, actor=actor)
        _record_request(request, dry_run=dry_run, as_json=as_json)
        return
    select = partial(
        select_endpoints, endpoints=names, every=all_, model=model, target=target, to=to
    )
    move = partial(roll_back_each, to=to, actor=actor, force=force, pin=not all_)
    if dry_run:
        show_dry_run(
            lambda context: _preview_rollback(
                context, partial(move, context, select(context), reason=reason), actor
            ),
            as_json=as_json,
        )
        return
    project = open_project()
    context = project.context
    names = select(context)
    if not (reason or as_json):
        reason = _ask_reason(context, names)
    moved, errors = move(context, names, reason=reason)
    # The moves are printed first, since writing the aliases takes longer.
    if not as_json:
        _print_moves(moved, errors)

    finish = partial(_finish, actor=actor) if wait else _hand_over
    pending = finish(project, _list_unfinished(project, moved, errors), tuple(moved))
    documents = [_document(name, moved, errors, pending) for name in names]

    def report() -> None:
        if pending and not quiet:
            say("\n".join(dict.fromkeys(pending.values())), err=True)

    print_result(
        lambda: documents[0] if endpoints and len(names) == 1 else documents,
        report,
        as_json=as_json,
    )
    if errors:
        raise typer.Exit(max(error.exit_code for error in errors.values()))


@dataclass(frozen=True, slots=True, kw_only=True)
class _RecordedRequest:
    """The document and the lines of a request that only writes ledgers."""

    document: Any
    lines: Sequence[str]


def _record_request(
    request: Callable[[Context], _RecordedRequest], *, dry_run: bool, as_json: bool
) -> None:
    """Append the entries of a request to ledgers, and print the result."""
    if dry_run:

        def preview(context: Context) -> DryRunOutcome:
            request(context)
            return DryRunOutcome()

        show_dry_run(preview, as_json=as_json)
        return
    recorded = request(open_project().context)

    def report() -> None:
        for line in recorded.lines:
            say(line)

    print_result(lambda: recorded.document, report, as_json=as_json)


def _withdraw(
    context: Context, *, names: Sequence[str], reason: str, actor: str
) -> _RecordedRequest:
    """Withdraw the pending rollback or deletion of each endpoint."""
    from onnx_ops.release.rollback import withdraw_request

    if not names:
        raise UserError(
            "no endpoint is named",
            where="--withdraw",
            remedy="Run `onnx-ops rollback --withdraw ENDPOINT --reason WHY`.",
        )
    withdrawn = {
        name: withdraw_request(context, name, reason=reason, actor=actor) for name in names
    }
    return _RecordedRequest(
        document=[{"endpoint": name, "withdrawn": what} for name, what in withdrawn.items()],
        lines=[
            f"{name}: {what} is withdrawn. The next reconciliation restores the state in the "
            "ledger."
            for name, what in withdrawn.items()
        ],
    )


def _write_off(
    context: Context, *, names: Sequence[str], server: str, reason: str, actor: str
) -> _RecordedRequest:
    """Record that rollbacks no longer wait for a replica of an endpoint."""
    from onnx_ops.release.rollback import write_off_server

    if len(names) != 1:
        raise UserError(
            "exactly one endpoint must be named",
            where="--write-off",
            remedy="Run `onnx-ops rollback ENDPOINT --write-off REPLICA --reason WHY`.",
        )
    is_new = write_off_server(context, names[0], server, reason=reason, actor=actor)
    text = "is written off; no rollback waits for it" if is_new else "was already written off"
    return _RecordedRequest(
        document={"endpoint": names[0], "written_off": server, "already": not is_new},
        lines=[f"{names[0]}: replica {server} {text}"],
    )


def _preview_rollback(
    context: Context,
    move: Callable[[], tuple[dict[str, RollbackResult], dict[str, OnnxOpsError]]],
    actor: str,
) -> DryRunOutcome:
    """Move traffic in a dry run, and write the aliases as a background process would."""
    from onnx_ops.release.reconcile import write_aliases

    moved, errors = move()
    reasons = {
        name: write_aliases(context, name, actor=actor)
        for name, result in moved.items()
        if result.pending_aliases
    }
    notes = [
        f"{name}: {result.moved_to} already has 100 % of traffic"
        for name, result in moved.items()
        if result.already
    ]
    notes += [
        f"{name}: its aliases would be pending: {why}" for name, why in reasons.items() if why
    ]
    return DryRunOutcome(errors=errors, notes=notes)


def _ask_reason(context: Context, names: Sequence[str]) -> str:
    """Prompt for the reason of a rollback; return an empty string without a terminal.

    The prompt appears only if a named endpoint exists.
    """
    if not sys.stdin.isatty() or set(names).isdisjoint(context.ledger.endpoints()):
        return ""
    reason: str = typer.prompt("Why? (recorded; Enter to skip)", default="", show_default=False)
    return reason


def _print_moves(moved: Mapping[str, RollbackResult], errors: Mapping[str, OnnxOpsError]) -> None:
    """Print the version that each endpoint now serves, and errors of failed rollbacks."""
    for name, move in moved.items():
        if move.already:
            say(
                f"{name}: {move.moved_to} already has 100 % of traffic. To roll back to an older "
                "version, name it with --to."
            )
        else:
            say(
                f"{name}: {move.moved_from} -> {move.moved_to}, 100 % of traffic. "
                f"Reason: {move.reason}"
            )
    print_errors(errors)


def _list_unfinished(
    project: Project, moved: Mapping[str, RollbackResult], errors: Mapping[str, OnnxOpsError]
) -> list[str]:
    """Return the endpoints with unfinished work that this machine can finish.

    Either their aliases are pending, or their rollback is pending and this machine can reach them.
    """
    unfinished = [name for name, move in moved.items() if move.pending_aliases]
    pending = [name for name, error in errors.items() if isinstance(error, StillPendingError)]
    return [*unfinished, *(name for name in pending if _is_here(project, name))]


def _document(
    name: str,
    moved: Mapping[str, RollbackResult],
    errors: Mapping[str, OnnxOpsError],
    pending: Mapping[str, str],
) -> dict[str, Any]:
    """Return the JSON document of an endpoint's rollback.

    The document contains the error of the endpoint, or its move and the pending aliases.
    """
    if name in errors:
        return {"endpoint": name, **errors[name].as_document()}
    return {
        **codec.to_json(moved[name]),
        "registry_pending": name in pending,
        "registry": pending.get(name, ""),
    }


def _is_here(project: Project, endpoint: str) -> bool:
    """Return whether a reconciliation on this machine changes what the clients get."""
    config = project.context.ledger.state(endpoint).config
    return config is None or not project.context.provider(config.provider).explain_elsewhere(config)


def _finish(
    project: Project, pending_names: Sequence[str], moved: Sequence[str], actor: str
) -> dict[str, str]:
    """Write aliases and send notifications; return a text for each pending endpoint.

    The text is the reason why the aliases of the endpoint are not written yet. A failed
    notification does not fail the rollback, since the ledger records pending notifications.
    """
    from onnx_ops.release.notify import send_pending_each
    from onnx_ops.release.reconcile import write_aliases

    reasons = {name: write_aliases(project.context, name, actor=actor) for name in pending_names}
    for delivery in (
        send_pending_each(project.context, moved) if moved and project.settings.notify else ()
    ):
        if delivery.error:
            say(f"{delivery.notifier}: not sent: {delivery.error}", err=True)
    return {
        name: f"Registry aliases are pending: {why}\n"
        f"  To update them later: onnx-ops reconcile {name}"
        for name, why in reasons.items()
        if why
    }


def _hand_over(
    project: Project, pending_names: Sequence[str], moved: Sequence[str]
) -> dict[str, str]:
    """Start background processes for aliases, pending rollbacks and notifications.

    Importing MLflow here would delay the command by seconds. If a background process ends early,
    the ledger still contains the pending work, and every reconciliation tries it again. Return a
    text for each endpoint with pending work.
    """
    state = project.settings.state
    log = state / "registry.log"
    work: dict[Path, Sequence[str]] = {}
    if pending_names:
        work[log] = ("reconcile", "--retry", "15min", *pending_names)
    if moved and project.settings.notify:
        work[state / "notify.log"] = ("notify", *moved)
    for path, arguments in work.items():
        with path.open("ab") as sink:
            subprocess.Popen(
                [sys.executable, "-P", "-m", "onnx_ops", *arguments],
                cwd=project.settings.root,
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=sink,
                start_new_session=True,
            )
    has_moved = [name for name in pending_names if name in moved]
    still_pending = [name for name in pending_names if name not in moved]
    retried = (
        f"The rollback is retried in the background for 15 minutes (log: {log}). "
        f"To retry it now: onnx-ops reconcile {' '.join(still_pending)}"
    )
    aliases = _describe_pending_aliases(log, f"onnx-ops reconcile {' '.join(has_moved)}")
    return {**dict.fromkeys(has_moved, aliases), **dict.fromkeys(still_pending, retried)}


def _describe_pending_aliases(log: Path, command: str) -> str:
    """Return how the aliases of endpoints that have moved are updated."""
    if absent(EXTRAS["mlflow"]):
        hint = install_hint(*EXTRAS["mlflow"])
        return (
            f"Registry aliases are pending: package mlflow is not installed. {hint}; "
            f"then: {command}"
        )
    return (
        f"Registry aliases will be updated in the background (log: {log}). "
        f"To update them now: {command}"
    )
