"""Commands about what there is: status, history, prune, delete."""

from __future__ import annotations

import datetime
import re
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from onnx_ops import codec
from onnx_ops.cli.common import (
    Actor,
    AsJson,
    Reason,
    handle_errors,
    parse_duration,
    print_error,
    print_json,
    print_result,
)
from onnx_ops.cli.terminal import say
from onnx_ops.errors import OnnxOpsError, UserError

if TYPE_CHECKING:
    from onnx_ops.ports import Ports

Endpoints = Annotated[list[str] | None, typer.Argument(help="Endpoints; all by default.")]
OfModel = Annotated[str, typer.Option("--model", help="Only endpoints of this registered model.", show_default=False)]
OfTarget = Annotated[str, typer.Option("--target", "-t", help="Only endpoints of this target.", show_default=False)]

_AGO = re.compile(r"[0-9.]+ ?[a-z]+")


@handle_errors
def status(
    endpoints: Endpoints = None,
    model: OfModel = "",
    target: OfTarget = "",
    orphans: Annotated[bool, typer.Option("--orphans", help="List orphaned cloud resources instead.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show what endpoints serve now, from the ledger and the endpoints. Needs no MLflow.

    Exit code 4 if an endpoint that should serve, or a provider that is asked for orphans, does not answer; also if an
    endpoint answers its clients, but can no longer be changed.

    Example: onnx-ops status --target cpu-1t
    """
    from onnx_ops.app.project import open_project
    from onnx_ops.cli.endpoint_tables import status_document, status_report
    from onnx_ops.cli.progress import working
    from onnx_ops.release.status import HistoryFilter, filter_endpoints, read_statuses

    ports = open_project().ports
    names = filter_endpoints(ports, HistoryFilter(endpoints=tuple(endpoints or ()), model=model, target=target))
    if orphans:
        _orphans(ports, names, as_json=as_json)
        return
    with working("status", "asking the endpoints", quiet=as_json):
        statuses, errors = read_statuses(ports, names)

    def report() -> None:
        if statuses or not errors:
            status_report(statuses, ports.clock.now())
        for error in errors.values():
            print_error(error, as_json=False)

    print_result(
        lambda: [*(status_document(status_) for status_ in statuses), *_failed(errors)], report, as_json=as_json
    )
    codes = [error.exit_code for error in errors.values()]
    codes += [4 for status_ in statuses if status_.state.roles.stable is not None and status_.actual is None]
    raise typer.Exit(max(codes, default=0))


@handle_errors
def history(
    endpoints: Endpoints = None,
    model: OfModel = "",
    target: OfTarget = "",
    by: Annotated[str, typer.Option("--by", metavar="ACTOR", help="Only entries of this actor.")] = "",
    since: Annotated[
        str, typer.Option("--since", metavar="WHEN", help="A date, a time (ISO 8601, UTC), or how long ago: 7d, 20m.")
    ] = "",
    limit: Annotated[
        int | None, typer.Option("--limit", "-n", min=1, help="Show only the N most recent entries.")
    ] = None,
    traffic: Annotated[bool, typer.Option("--traffic", help="Only changes of traffic, drawn as bars.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show what happened to endpoints: who, when, what and why; with --json also the evidence.

    Deleted endpoints are included. Needs no MLflow. Exit code 4 if a ledger is damaged: the entries before the damage
    are shown, and what is wrong.

    Example: onnx-ops history --model digits-mlp --since 30d --json
    """
    from onnx_ops.app.project import open_project
    from onnx_ops.cli.endpoint_tables import history_table, traffic_chart
    from onnx_ops.release.status import HistoryFilter
    from onnx_ops.release.status import read_history as read_entries

    ports = open_project().ports
    wanted = HistoryFilter(
        endpoints=tuple(endpoints or ()),
        model=model,
        target=target,
        actor=by,
        since=_moment(since, ports.clock.now()) if since else 0.0,
        limit=limit,
        traffic=traffic,
    )
    lines, errors = read_entries(ports, wanted)
    if as_json:
        print_json([*(codec.to_json(line) for line in lines), *_failed(errors)])
    else:
        (traffic_chart if traffic else history_table)(lines)
        for error in errors.values():
            print_error(error, as_json=False)
    raise typer.Exit(max((error.exit_code for error in errors.values()), default=0))


@handle_errors
def prune(
    models: Annotated[list[str], typer.Argument(metavar="MODEL...", help="Registered models.")],
    keep: Annotated[int, typer.Option("--keep", min=0, help="Number of newest releases of each model to keep.")] = 5,
    older_than: Annotated[
        str, typer.Option("--older-than", metavar="AGE", help="Keep younger versions and objects.")
    ] = "30d",
    yes: Annotated[
        bool, typer.Option("--yes", "-y", help="Remove them; without it, only show what would be removed.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Remove old versions from the registry, this machine, the store and the providers.

    Never removed: a version that an alias points at, or that an endpoint serves, may go back to, or is about to serve;
    an object that a recorded result, the ledger or a decision behind an alias names, or that is younger than a day.
    MLflow marks what is removed as deleted; `mlflow gc` frees its space.

    Example: onnx-ops prune digits-mlp --keep 3 --older-than 90d
    """
    from onnx_ops.app.project import open_project
    from onnx_ops.cli.endpoint_tables import prune_report
    from onnx_ops.cli.progress import working
    from onnx_ops.release.prune import plan_pruning
    from onnx_ops.release.prune import prune as remove

    ports = open_project().ports
    older_than_s = parse_duration(older_than, "--older-than")
    with working("prune", "reading what there is", *(["removing"] if yes else []), quiet=as_json) as progress:
        done = plan_pruning(ports, models, keep=keep, older_than_s=older_than_s)
        if yes:
            progress.begin("removing")
            done = remove(ports, done)
    if as_json:
        print_json({"removed": yes, **codec.to_json(done)})
    else:
        prune_report(done, ports.clock.now(), removed=yes)


@handle_errors
def delete(
    endpoint: Annotated[str, typer.Argument(help="Name of the endpoint.")],
    reason: Reason = "",
    actor: Actor = "",
    yes: Annotated[
        bool, typer.Option("--yes", "-y", help="Skip confirmation (required in non-interactive shells).")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Delete an endpoint and free its name. Versions, aliases and history stay.

    Example: onnx-ops delete digits-old --reason "moved to digits" --yes
    """
    from onnx_ops.app.project import open_project
    from onnx_ops.release.promote import delete_with_timeout as end

    if not yes and not (sys.stdin.isatty() and typer.confirm(f"Delete endpoint {endpoint}? Requests to it will fail")):
        raise UserError("nothing was deleted", where=endpoint, remedy="Confirm with --yes.")
    end(open_project().ports, endpoint, reason=reason, actor=actor)
    if as_json:
        print_json({"endpoint": endpoint, "deleted": True})
    else:
        say(f"{endpoint}: deleted")


def _failed(errors: Mapping[str, OnnxOpsError]) -> list[dict[str, Any]]:
    return [{"endpoint": name, **error.as_document()} for name, error in errors.items()]


def _orphans(ports: Ports, names: Sequence[str], *, as_json: bool) -> None:
    from onnx_ops.cli.endpoint_tables import orphan_report
    from onnx_ops.cli.progress import working
    from onnx_ops.release.prune import find_orphans

    with working("status", "asking the providers", quiet=as_json):
        survey = find_orphans(ports, names)
    if as_json:
        print_json(codec.to_json(survey))
    else:
        orphan_report(survey)
        if survey.orphans:
            say("`onnx-ops prune MODEL --yes` removes them.")
    if survey.silent:
        raise typer.Exit(4)


def _moment(text: str, now: float) -> float:
    """Seconds since the epoch."""
    if _AGO.fullmatch(text):
        return now - parse_duration(text, "--since")
    try:
        at = datetime.datetime.fromisoformat(text)
    except ValueError as error:
        remedy = "Write 2026-11-21, 2026-11-21T08:00, or how long ago: 7d, 20m."
        raise UserError(f"{text!r} is neither a date nor a duration", where="--since", remedy=remedy) from error
    return (at if at.tzinfo is not None else at.replace(tzinfo=datetime.UTC)).timestamp()
