"""`onnx-ops rollback`: traffic first, bookkeeping afterwards."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from onnx_ops import codec
from onnx_ops.cli.common import Actor, AsJson, Quiet, Reason, answer, complain, print_json, reported
from onnx_ops.cli.terminal import say
from onnx_ops.errors import OnnxOpsError, StillPendingError, UserError
from onnx_ops.plugins import EXTRAS, absent, install_hint

if TYPE_CHECKING:
    from onnx_ops.app.project import Project
    from onnx_ops.ports import Ports
    from onnx_ops.release.rollback import RollbackResult

_REGISTRY_LOG, _NOTIFY_LOG = "registry.log", "notify.log"
"""In the state folder: what became of the aliases that a rollback left to be written, and of telling people."""

_RETRY = "15min"
"""How long the background process tries."""


@reported
def rollback(
    endpoints: Annotated[list[str] | None, typer.Argument(metavar="ENDPOINT...", help="Names of endpoints.")] = None,
    to: Annotated[str | None, typer.Option("--to", metavar="VERSION", help="Default: the previous version.")] = None,
    reason: Reason = "",
    actor: Actor = "",
    every: Annotated[bool, typer.Option("--all", help="Every endpoint of --model, and of --target if given.")] = False,
    model: Annotated[str, typer.Option("--model", help="With --all: a registered model.", show_default=False)] = "",
    target: Annotated[str, typer.Option("--target", "-t", help="With --all: a target.", show_default=False)] = "",
    force: Annotated[bool, typer.Option("--force", help="Even onto a version that was rolled back itself.")] = False,
    wait: Annotated[bool, typer.Option("--wait", help="Until the registry's aliases are written, too.")] = False,
    take_back: Annotated[
        bool, typer.Option("--withdraw", help="Instead: owe no longer what was asked for and is not done.")
    ] = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Move all traffic back to the previous version, now. Needs neither Prefect nor MLflow.

    Asking again for what was done is no error. Exit code 4, within ten seconds, if it could not be done yet: then it is
    owed, a background process tries for a quarter of an hour, and so does every reconciliation, until it is done or
    --withdraw takes it back. Meanwhile the version counts as rejected.

    The aliases follow in the background, or by the reconciler. A single endpoint of several that serve the same model
    and target is pinned and leaves the aliases as they are; --all moves them.

    Example: onnx-ops rollback digits --reason "wrong on sevens"

    Example: onnx-ops rollback --all --model digits-mlp --reason "wrong on sevens"
    """
    from onnx_ops.app.project import open_project
    from onnx_ops.release.rollback import roll_back_each, select_endpoints

    project = open_project()
    ports, names = project.ports, tuple(endpoints or ())
    if take_back:
        _withdraw(ports, names, reason, actor, as_json=as_json)
        return
    names = select_endpoints(ports, names, every=every, model=model, target=target, to=to)
    if not reason and sys.stdin.isatty() and not as_json:
        reason = typer.prompt("Why? (recorded; Enter to leave it out)", default="", show_default=False)
    moved, errors = roll_back_each(ports, names, to=to, reason=reason, actor=actor, force=force, pin=not every)
    if not as_json:
        _tell(moved, errors)
    owing = [name for name in names if name in moved and moved[name].owed]
    owing += [name for name, error in errors.items() if isinstance(error, StillPendingError)]
    pending = _settle(project, owing, actor) if wait else _hand_over(project, owing)
    _tell_people(project, tuple(moved), wait=wait)
    documents = [_document(name, moved, errors, pending) for name in names]

    def report() -> None:
        if pending and not quiet:
            say("\n".join(dict.fromkeys(pending.values())), err=True)

    answer(lambda: documents[0] if endpoints and len(names) == 1 else documents, report, as_json=as_json)
    if errors:
        raise typer.Exit(max(error.exit_code for error in errors.values()))


def _withdraw(ports: Ports, names: Sequence[str], reason: str, actor: str, *, as_json: bool) -> None:
    from onnx_ops.release.rollback import withdraw_request

    if not names:
        raise UserError("which endpoint?", remedy="onnx-ops rollback --withdraw ENDPOINT --reason WHY")
    done = {name: withdraw_request(ports, name, reason=reason, actor=actor) for name in names}
    if as_json:
        print_json([{"endpoint": name, "withdrawn": what} for name, what in done.items()])
    else:
        for name, what in done.items():
            say(f"{name}: {what} is owed no longer. The next reconciliation restores what the ledger says.")


def _tell(moved: Mapping[str, RollbackResult], errors: Mapping[str, OnnxOpsError]) -> None:
    for name, rolled in moved.items():
        if rolled.already:
            say(f"{name}: {rolled.moved_to} has 100 % of traffic already. To go back further, name it with --to.")
            continue
        say(f"{name}: {rolled.moved_from} -> {rolled.moved_to}, 100 % of traffic. Reason: {rolled.reason}")
    for error in errors.values():
        complain(error, as_json=False)


def _settle(project: Project, names: Sequence[str], actor: str) -> dict[str, str]:
    """Why the registry does not say it yet, by endpoint."""
    from onnx_ops.release.reconcile import write_aliases

    told = {name: write_aliases(project.ports, name, actor=actor) for name in names}
    return {name: f"registry pending: {why}\n  later: onnx-ops reconcile {name}" for name, why in told.items() if why}


def _hand_over(project: Project, names: Sequence[str]) -> dict[str, str]:
    """Leave the aliases, and traffic that is still owed, to a process of its own: importing MLflow takes longer than
    the whole rollback.

    Should that process die, they stay owed in the ledger, and every reconciliation tries again.
    """
    if not names:
        return {}
    log = _in_background(project, ("reconcile", "--retry", _RETRY), names, _REGISTRY_LOG)
    told = f"registry pending: written in the background (log: {log}); or now: onnx-ops reconcile {' '.join(names)}"
    if absent(EXTRAS["mlflow"]):
        hint = install_hint(*EXTRAS["mlflow"])
        told = f"registry pending: package mlflow is not installed. {hint}; then: onnx-ops reconcile {' '.join(names)}"
    return dict.fromkeys(names, told)


def _tell_people(project: Project, names: Sequence[str], *, wait: bool) -> None:
    """A chat that does not answer is no trouble of the rollback: the ledger keeps what is due, and its log says why."""
    if not (names and project.settings.notifiers):
        return
    if not wait:
        _in_background(project, ("notify",), names, _NOTIFY_LOG)
        return
    from onnx_ops.release.notify import send_pending_each

    for told in send_pending_each(project.ports, names):
        if told.trouble:
            say(f"{told.notifier}: not told: {told.trouble}", err=True)


def _in_background(project: Project, command: Sequence[str], names: Sequence[str], log_name: str) -> Path:
    """Start a command that outlives this one; returns its log."""
    log = project.settings.state / log_name
    with log.open("ab") as sink:
        subprocess.Popen(
            [sys.executable, "-P", "-m", "onnx_ops", *command, *names],
            cwd=project.settings.root,
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=sink,
            start_new_session=True,
        )
    return log


def _document(
    name: str, moved: Mapping[str, RollbackResult], errors: Mapping[str, OnnxOpsError], pending: Mapping[str, str]
) -> dict[str, Any]:
    if name in errors:
        return {"endpoint": name, **errors[name].as_document()}
    return {**codec.to_json(moved[name]), "registry_pending": name in pending, "registry": pending.get(name, "")}
