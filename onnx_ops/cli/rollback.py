"""`onnx-ops rollback`: traffic first, bookkeeping afterwards."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from onnx_ops import codec
from onnx_ops.cli.common import Actor, AsJson, Quiet, Reason, complain, print_json, reported
from onnx_ops.errors import NotFound, OnnxOpsError, UserError

if TYPE_CHECKING:
    from onnx_ops.operations.rollback import Rolled
    from onnx_ops.wiring.project import Project

_LOG = "registry.log"
"""In the state folder: what became of the aliases that a rollback left to be written."""


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
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Move all traffic back, now. Needs neither Prefect nor MLflow.

    The aliases follow in the background, or by the reconciler. A single endpoint of several that serve the same model
    and target is pinned and leaves the aliases as they are; --all moves them.

    Example: onnx-ops rollback digits --reason "wrong on sevens"

    Example: onnx-ops rollback --all --model digits-mlp --reason "wrong on sevens"
    """
    from onnx_ops.wiring.project import open_project

    if bool(endpoints) == every or (every and not model) or (not every and (model or target)):
        raise UserError(
            "which endpoints?", remedy="Name them, or write --all --model MODEL; `onnx-ops status` lists them."
        )
    if not reason and sys.stdin.isatty() and not as_json:
        reason = typer.prompt("Why? (recorded; Enter to leave it out)", default="", show_default=False)
    project = open_project()
    names = _of_model(project, model, target) if every else tuple(endpoints or ())
    moved, errors = _move(project, names, to=to, reason=reason, actor=actor, force=force, pin=not every)
    if not as_json:
        _tell(moved, errors)
    owing = [name for name, rolled in moved.items() if rolled.owed]
    pending = _settle(project, owing, actor) if wait else _hand_over(project, owing)
    if as_json:
        documents = [_document(name, moved, errors, pending) for name in names]
        print_json(documents[0] if endpoints and len(names) == 1 else documents)
    elif pending and not quiet:
        typer.echo("\n".join(dict.fromkeys(pending.values())), err=True)
    if errors:
        raise typer.Exit(max(error.exit_code for error in errors.values()))


def _of_model(project: Project, model: str, target: str) -> tuple[str, ...]:
    from onnx_ops.operations.status import Wanted, wanted_endpoints

    names = wanted_endpoints(project.ports, Wanted(model=model, target=target))
    if not names:
        of_target = f" on {target}" if target else ""
        raise NotFound(f"no endpoint serves {model}{of_target}", remedy="See `onnx-ops status`.")
    return names


def _move(
    project: Project,
    names: Sequence[str],
    *,
    to: str | None,
    reason: str,
    actor: str,
    force: bool,
    pin: bool,
) -> tuple[dict[str, Rolled], dict[str, OnnxOpsError]]:
    """What was moved and what was not: one endpoint's trouble does not keep the others back."""
    from onnx_ops.operations.rollback import roll_back

    moved: dict[str, Rolled] = {}
    errors: dict[str, OnnxOpsError] = {}
    for name in names:
        try:
            moved[name] = roll_back(project.ports, name, to=to, reason=reason, actor=actor, force=force, pin=pin)
        except OnnxOpsError as error:
            errors[name] = error
    return moved, errors


def _tell(moved: Mapping[str, Rolled], errors: Mapping[str, OnnxOpsError]) -> None:
    for name, rolled in moved.items():
        typer.echo(f"{name}: {rolled.moved_from} -> {rolled.moved_to}, 100 % of traffic. Reason: {rolled.reason}")
    for error in errors.values():
        complain(error, as_json=False)


def _settle(project: Project, names: Sequence[str], actor: str) -> dict[str, str]:
    """Why the registry does not say it yet, by endpoint."""
    from onnx_ops.operations.reconcile import tell_registry

    told = {name: tell_registry(project.ports, name, actor=actor) for name in names}
    return {name: f"registry pending: {why}\n  later: onnx-ops reconcile {name}" for name, why in told.items() if why}


def _hand_over(project: Project, names: Sequence[str]) -> dict[str, str]:
    """Leave the aliases to a process of its own: importing MLflow takes longer than the whole rollback.

    Should that process die, the aliases stay owed in the ledger, and the reconciler writes them.
    """
    if not names:
        return {}
    log = project.settings.state / _LOG
    with log.open("ab") as sink:
        subprocess.Popen(
            [sys.executable, "-P", "-m", "onnx_ops.cli.main", "reconcile", *names],
            cwd=project.settings.root,
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=sink,
            start_new_session=True,
        )
    told = f"registry pending: written in the background (log: {log}); or now: onnx-ops reconcile {' '.join(names)}"
    return dict.fromkeys(names, told)


def _document(
    name: str, moved: Mapping[str, Rolled], errors: Mapping[str, OnnxOpsError], pending: Mapping[str, str]
) -> dict[str, Any]:
    if name in errors:
        return {"endpoint": name, **errors[name].as_document()}
    return {**codec.to_json(moved[name]), "registry_pending": name in pending, "registry": pending.get(name, "")}
