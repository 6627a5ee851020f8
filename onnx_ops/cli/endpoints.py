"""Commands about endpoints and versions: status, history, prune, delete."""

from __future__ import annotations

import datetime
import re
import sys
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from onnx_ops import codec
from onnx_ops.cli.common import (
    KEEP,
    Actor,
    AsJson,
    Endpoint,
    Endpoints,
    Markup,
    Reason,
    console,
    markup,
    open_project,
    parse_duration,
    print_errors,
    print_json,
    print_result,
    print_table,
    print_text,
    say,
)
from onnx_ops.cli.dry_runs import DryRunOption, DryRunOutcome, show_dry_run
from onnx_ops.cli.progress import format_seconds, working
from onnx_ops.domain.artifact import short_digest
from onnx_ops.errors import OnnxOpsError, UserError

if TYPE_CHECKING:
    from onnx_ops.domain.endpoint import EndpointServer, EndpointState
    from onnx_ops.domain.ledger import PendingRollback
    from onnx_ops.domain.pool import PoolStatus
    from onnx_ops.domain.release import ListedVersion
    from onnx_ops.ports import Context
    from onnx_ops.release.prune import OrphanSurvey, PrunePlan
    from onnx_ops.release.status import EndpointStatus, HistoryLine

OfModel = Annotated[
    str,
    typer.Option("--model", help="Only endpoints of this registered model.", show_default=False),
]
OfTarget = Annotated[
    str, typer.Option("--target", "-t", help="Only endpoints of this target.", show_default=False)
]


def status(
    endpoints: Endpoints = None,
    model: OfModel = "",
    target: OfTarget = "",
    orphans: Annotated[
        bool, typer.Option("--orphans", help="List orphaned cloud resources instead.")
    ] = False,
    runs: Annotated[
        bool,
        typer.Option(
            "--runs", help="List instead the stages that run or wait in Prefect's work pools."
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Show what endpoints serve now, from the ledger and the endpoints.

    MLflow is not needed. Exit code 4 if an endpoint that should serve, or the provider of orphaned
    resources, does not answer. Also 4 if an endpoint answers its clients but cannot be changed.
    With --runs, also 4 if no running worker takes a waiting stage.

    Example: onnx-ops status --target cpu-1t
    """
    if runs:
        if endpoints or model or target or orphans:
            raise UserError(
                "--runs lists stages, not endpoints",
                where="--runs",
                remedy="Leave out endpoints, --model, --target and --orphans.",
            )
        _print_runs(as_json=as_json)
        return
    from onnx_ops.release.prune import find_orphans
    from onnx_ops.release.status import HistoryFilter, filter_endpoints, read_statuses

    context = open_project().context
    names = filter_endpoints(
        context, HistoryFilter(endpoints=tuple(endpoints or ()), model=model, target=target)
    )
    if orphans:
        with working("status", "querying the providers", quiet=as_json):
            survey = find_orphans(context, names)
        hint = (
            "`onnx-ops prune MODEL` shows what it would remove: orphans of the model's endpoints, "
            "old versions and stored objects. With --yes, it removes all of them."
            if survey.orphans
            else ""
        )
        print_result(
            lambda: codec.to_json(survey), lambda: _orphan_report(survey, hint), as_json=as_json
        )
        raise typer.Exit(4 if survey.silent else 0)
    with working("status", "querying the endpoints", quiet=as_json):
        statuses, errors = read_statuses(context, names)

    def report() -> None:
        if statuses or not errors:
            elsewhere = explain_elsewhere(context, statuses)
            status_report(statuses, context.clock.now(), elsewhere)
        print_errors(errors)

    print_result(
        lambda: [*map(status_document, statuses), *_failed(errors)], report, as_json=as_json
    )
    codes = [error.exit_code for error in errors.values()]
    codes += [
        4
        for status_ in statuses
        if status_.state.roles.stable is not None and status_.actual is None
    ]
    raise typer.Exit(max(codes, default=0))


def history(
    endpoints: Endpoints = None,
    model: OfModel = "",
    target: OfTarget = "",
    by: Annotated[
        str, typer.Option("--by", metavar="ACTOR", help="Only entries of this actor.")
    ] = "",
    since: Annotated[
        str,
        typer.Option(
            "--since",
            metavar="WHEN",
            help="A date, a time (ISO 8601, UTC), or how long ago: 7d, 20m.",
        ),
    ] = "",
    limit: Annotated[
        int | None,
        typer.Option("--limit", "-n", min=1, help="Show only the N most recent entries."),
    ] = None,
    traffic: Annotated[
        bool, typer.Option("--traffic", help="Show only traffic changes, as bars.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Show what changed on endpoints, when, by whom and why.

    With --json, the digests of the evidence are shown too. Deleted endpoints are included. MLflow
    is not needed. Exit code 4 if a ledger is damaged: the entries before the damage and the error
    are shown.

    Example: onnx-ops history --model digits-mlp --since 30d --json
    """
    from onnx_ops.release.status import HistoryFilter
    from onnx_ops.release.status import read_history as read_entries

    context = open_project().context
    wanted = HistoryFilter(
        endpoints=tuple(endpoints or ()),
        model=model,
        target=target,
        actor=by,
        since=_parse_moment(since, context.clock.now()) if since else 0.0,
        limit=limit,
        traffic=traffic,
    )
    lines, errors = read_entries(context, wanted)

    def report() -> None:
        (traffic_chart if traffic else history_table)(lines)
        print_errors(errors)

    print_result(lambda: [*codec.to_json(lines), *_failed(errors)], report, as_json=as_json)
    raise typer.Exit(max((error.exit_code for error in errors.values()), default=0))


def prune(
    models: Annotated[list[str], typer.Argument(metavar="MODEL...", help="Registered models.")],
    keep: Annotated[
        int, typer.Option("--keep", min=0, help="Number of newest releases of each model to keep.")
    ] = 5,
    older_than: Annotated[
        str, typer.Option("--older-than", metavar="AGE", help="Keep younger versions and objects.")
    ] = "30d",
    yes: Annotated[
        bool,
        typer.Option(
            "--yes", "-y", help="Remove them; without --yes, only show what would be removed."
        ),
    ] = False,
    dry_run: DryRunOption = False,
    as_json: AsJson = False,
) -> None:
    """Remove old versions from the registry, this machine, store and providers.

    A version stays if an alias points at it. It also stays if an endpoint serves it, can roll back
    to it, or will serve it next. An object stays if it is younger than --older-than or a day. It
    also stays if a recorded result, the ledger or the decision of an aliased version names it.
    MLflow only marks removed versions as deleted; `mlflow gc` frees their space.

    Example: onnx-ops prune digits-mlp --keep 3 --older-than 90d
    """
    from onnx_ops.release.prune import plan_pruning
    from onnx_ops.release.prune import prune as remove

    older_than_s = parse_duration(older_than, "--older-than")
    plan = partial(plan_pruning, models=models, keep=keep, older_than_s=older_than_s)
    if dry_run:

        def preview(context: Context) -> DryRunOutcome:
            remove(context, plan(context))
            return DryRunOutcome()

        show_dry_run(preview, as_json=as_json)
        return
    context = open_project().context
    with working(
        "prune", "reading versions and resources", *(["removing"] if yes else []), quiet=as_json
    ) as progress:
        done = plan(context)
        if yes:
            progress.begin("removing")
            done = remove(context, done)
    report = partial(_prune_report, done, context.clock.now(), removed=yes)
    print_result(lambda: {"removed": yes, **codec.to_json(done)}, report, as_json=as_json)


def delete(
    endpoint: Endpoint,
    reason: Reason = "",
    actor: Actor = "",
    yes: Annotated[
        bool,
        typer.Option("--yes", "-y", help="Skip confirmation (required in non-interactive shells)."),
    ] = False,
    dry_run: DryRunOption = False,
    as_json: AsJson = False,
) -> None:
    """Delete an endpoint and free its name. Versions, aliases and history stay.

    Example: onnx-ops delete digits-old --reason "moved to digits" --yes
    """
    from onnx_ops.release.promote import delete_with_timeout as end

    end_endpoint = partial(end, endpoint=endpoint, reason=reason, actor=actor)
    if dry_run:

        def preview(context: Context) -> DryRunOutcome:
            end_endpoint(context)
            return DryRunOutcome()

        show_dry_run(preview, as_json=as_json)
        return
    if not yes and not (
        sys.stdin.isatty()
        and typer.confirm(f"Delete endpoint {endpoint}? Requests to it will fail")
    ):
        raise UserError("nothing was deleted", where=endpoint, remedy="Confirm with --yes.")
    end_endpoint(open_project().context)
    print_result(
        lambda: {"endpoint": endpoint, "deleted": True}, f"{endpoint}: deleted", as_json=as_json
    )


def _failed(errors: Mapping[str, OnnxOpsError]) -> list[dict[str, Any]]:
    return [{"endpoint": name, **error.as_document()} for name, error in errors.items()]


def _parse_moment(text: str, now: float) -> float:
    """Return the seconds since the Unix epoch of a date, a time or an age."""
    if re.fullmatch(r"[0-9.]+ ?[a-z]+", text):
        return now - parse_duration(text, "--since")
    try:
        at = datetime.datetime.fromisoformat(text)
    except ValueError as error:
        remedy = "Write 2026-11-21, 2026-11-21T08:00, or how long ago: 7d, 20m."
        raise UserError(
            f"{text!r} is neither a date nor a duration", where="--since", remedy=remedy
        ) from error
    return (at if at.tzinfo is not None else at.replace(tzinfo=datetime.UTC)).timestamp()


def status_document(status: EndpointStatus) -> dict[str, Any]:
    """Return an endpoint's status as a JSON document."""
    state, pending = status.state, status.state.pending_rollback
    return {
        "endpoint": state.endpoint,
        "address": status.address,
        "answers": status.actual is not None or status.unsupervised,
        "supervised": status.actual is not None,
        "config": codec.to_json(state.config),
        "roles": codec.to_json(state.roles),
        "traffic": dict(status.actual.split.weights) if status.actual is not None else None,
        "drift": list(status.actual.drift) if status.actual is not None else [],
        "out_of_service": list(status.actual.out_of_service) if status.actual is not None else [],
        "replacements": list(status.actual.replacements) if status.actual is not None else [],
        "stragglers": list(status.actual.stragglers) if status.actual is not None else [],
        "servers": codec.to_json(status.servers),
        "outliers": codec.to_json(status.outliers),
        "written_off": dict(state.written_off),
        "open_intent": state.open_intent.action.why if state.open_intent is not None else None,
        "pending_rollback": None
        if pending is None
        else {
            "to": stable.name if (stable := pending.action.roles.stable) is not None else None,
            "reason": pending.action.why,
            "actor": pending.actor,
            "requested_at": pending.at,
            "attempts": pending.attempts,
            "error": pending.error,
        },
        "registry_pending": dict(state.pending_aliases),
        "rejected": dict(state.rejected),
        "deleting": state.deleting,
    }


def explain_elsewhere(context: Context, statuses: Sequence[EndpointStatus]) -> dict[str, str]:
    """Return why silent endpoints can run from another state folder, by endpoint.

    Endpoints without such a reason are left out.
    """
    reasons = {
        config.endpoint: context.provider(config.provider).explain_elsewhere(config)
        for status in statuses
        if status.actual is None and (config := status.state.config) is not None
    }
    return {name: why for name, why in reasons.items() if why}


def status_report(
    statuses: Sequence[EndpointStatus], now: float, elsewhere: Mapping[str, str] | None = None
) -> None:
    """Print the status of endpoints.

    Args:
        elsewhere: why endpoints can run from another state folder, by endpoint.
    """
    if not statuses:
        say(
            "No endpoints yet, or only endpoints of other models or targets. "
            "The first `onnx-ops run` of a pipeline with `deploy:` binds one."
        )
    for status in statuses:
        state, config = status.state, status.state.config
        if config is None:
            continue
        print_text("[bold]{}[/bold] {} on {}", state.endpoint, config.model, config.target)
        if state.deleting:
            print_text("[yellow]is being deleted[/yellow]", indent=2)
        if state.pending_rollback is not None:
            print_text(
                "[red]rollback pending[/red]: {}",
                describe_pending(state.pending_rollback, now),
                indent=2,
            )
            say(
                f"`onnx-ops reconcile {state.endpoint}` retries the rollback; "
                f"`onnx-ops rollback --withdraw {state.endpoint}` cancels it",
                indent=2,
            )
        _print_answer(status, (elsewhere or {}).get(state.endpoint, ""))
        for role in ("stable", "candidate", "previous"):
            deployment = getattr(state.roles, role)
            if deployment is not None:
                say(f"{role:<9} {deployment.name} ({deployment.variant})", indent=2)
        if state.open_intent is not None:
            left = max(0, round(state.open_intent.expires_at - now))
            say(f"in progress: {state.open_intent.action.why} (lease ends in {left} s)", indent=2)
        if state.pending_aliases:
            aliases = ", ".join(
                f"{name} -> {version or 'none'}" for name, version in state.pending_aliases.items()
            )
            print_text("[yellow]aliases pending[/yellow]: {}", aliases, indent=2)


def _print_answer(status: EndpointStatus, elsewhere: str) -> None:
    """Print whether an endpoint answers, and what it serves.

    If the endpoint is silent or lacks a supervisor, print the command that repairs it. If
    `elsewhere` gives a reason why it can run from another state folder, print this reason. A silent
    endpoint without a stable version is skipped.
    """
    address, repair = status.address or "", f"onnx-ops reconcile {status.state.endpoint}"
    if status.actual is not None:
        _print_served(status, status.actual, address)
    elif status.unsupervised:
        text = "answers at {}, but [red]has no supervisor[/red] that can change it"
        print_text(text, address, indent=2)
        say(f"{repair} restarts its supervisor without a lost request", indent=2)
    elif status.state.roles.stable is not None and elsewhere:
        print_text("[red]does not answer here[/red]: {}", elsewhere, indent=2)
        say("Run this command as the user and with the state folder of the server.", indent=2)
        say(f"If the server no longer exists, `{repair}` starts another one.", indent=2)
    elif status.state.roles.stable is not None:
        print_text("[red]does not answer[/red]; {} starts it again", repair, indent=2)


def _print_served(status: EndpointStatus, actual: EndpointState, address: str) -> None:
    """Print the traffic of an endpoint that answers, and its deviations."""
    candidate = status.state.roles.candidate
    waits = "" if candidate is None else candidate.name
    split = ", ".join(
        f"{name} {weight} %"
        for name, weight in actual.split.weights.items()
        if weight or name == waits
    )
    if address or any(server.state == "reports" for server in status.servers):
        where = f"answers at {address}" if address else "answers (no address is configured)"
        say(f"{where}: {split or 'no traffic'}", indent=2)
    else:
        print_text("[yellow]no replica reports[/yellow]; the newest table: {}", split, indent=2)
    found = (
        ("[red]out of service[/red]: {}", actual.out_of_service),
        ("[yellow]behind[/yellow]: {}", actual.stragglers),
        ("[yellow]the cloud is changing the instances[/yellow]: {}", actual.replacements),
        ("[yellow]differs from its options[/yellow]: {}", actual.drift),
        ("[yellow]replicas differ[/yellow]: {}", [outlier.summary for outlier in status.outliers]),
    )
    for template, texts in found:
        for text in texts:
            print_text(template, text, indent=2)
    if status.servers:
        _print_replicas(status.servers, status.state.written_off)


def _print_replicas(servers: Sequence[EndpointServer], written_off: Collection[str]) -> None:
    """Print the reports of replicas, and how the replicas differ."""
    for line in _describe_differing_servers(servers):
        print_text("[yellow]replicas differ[/yellow]: {}", line, indent=2)
    rows = [
        (
            f"  {server.name}",
            _describe_server_state(server, is_written_off=server.name in written_off),
            server.table or "none",
            f"{format_seconds(server.age_s)} ago",
            "yes" if server.has_lease else "",
            server.address,
        )
        for server in servers
    ]
    print_table(("  replica", "state", "table", "reported", "lease", "address"), rows)


def _describe_server_state(server: EndpointServer, *, is_written_off: bool) -> str:
    """Return the state of a server for the table of replicas.

    A server that was written off, and has ended, is shown as `written off`. If it has reported
    again, its state is shown with the word `back`.
    """
    if not is_written_off:
        return server.state
    return "written off" if server.state == "ended" else f"{server.state}, back"


def _describe_differing_servers(servers: Sequence[EndpointServer]) -> Iterator[str]:
    """Yield each package or image whose version differs among the reporting servers.

    The names of the servers are listed for each version.
    """
    reporting = [server for server in servers if server.state == "reports"]
    packages = sorted({"image", *(name for server in reporting for name in server.versions)})
    for package in packages:
        names: dict[str, list[str]] = {}
        for server in reporting:
            value = server.image if package == "image" else server.versions.get(package, "none")
            names.setdefault(value or "unknown", []).append(server.name)
        if len(names) > 1:
            listed = (f"{value} ({', '.join(who)})" for value, who in sorted(names.items()))
            yield f"{package} {'; '.join(listed)}"


def describe_pending(pending: PendingRollback, now: float) -> str:
    """Return a description of a pending rollback.

    It has the version to restore, the requester, the age in seconds, the reason and failed
    attempts.
    """
    stable = pending.action.roles.stable
    to = stable.name if stable is not None else "nothing"
    text = (
        f"to {to}, requested by {pending.actor} {max(0.0, now - pending.at):.0f} s ago "
        f"({pending.action.why})"
    )
    if not pending.attempts:
        return text
    attempts = "1 attempt" if pending.attempts == 1 else f"{pending.attempts} attempts"
    return f"{text}; {attempts} failed, the last with: {pending.error}"


def history_table(lines: Sequence[HistoryLine]) -> None:
    """Print entries of ledgers as a table."""
    if not lines:
        say("No entries match.")
        return
    first = 0 if len({line.endpoint for line in lines}) > 1 else 1
    rows = [
        (
            line.endpoint,
            str(line.sequence),
            line.at.replace(" ", KEEP),
            line.actor,
            line.what,
            line.why,
        )[first:]
        for line in lines
    ]
    print_table(("endpoint", "#", "when", "who", "what", "why")[first:], rows)


def traffic_chart(lines: Sequence[HistoryLine]) -> None:
    """Print each endpoint's shares of traffic as bars.

    There is one bar for each change, with the reason below it.
    """
    palette, width = (("█", "green"), ("▒", "cyan"), ("▓", "magenta"), ("░", "yellow")), 40
    for endpoint in dict.fromkeys(line.endpoint for line in lines):
        print_text("[bold]{}[/bold]: shares of traffic; times in UTC", endpoint)
        shades: dict[str, tuple[str, str]] = {}
        for line in (entry for entry in lines if entry.endpoint == endpoint):
            shares = {name: share for name, share in line.traffic.items() if share}
            bar = Markup()
            for name, share in shares.items():
                shade, colour = shades.setdefault(name, palette[len(shades) % len(palette)])
                bar = Markup(f"{bar}[{colour}]{shade * round(width * share / 100)}[/]")
            text = ", ".join(f"{name} {share} %" for name, share in shares.items())
            console().print(
                markup("{} {} {} {}", line.at[:10], line.at[11:19], bar, text), soft_wrap=True
            )
            print_text("[dim]{} ({})[/dim]", line.why, line.actor, indent=20, hang=0)
    if not lines:
        say("No traffic change is recorded.")


def _print_runs(*, as_json: bool) -> None:
    """Print the stages that run or wait in pools.

    Exit with 4 if no running worker takes a waiting stage.
    """
    project = open_project()
    with working("status", "querying Prefect", quiet=as_json):
        pools = project.running().pools.read_status()
    if as_json:
        print_json(codec.to_json(pools))
    elif not pools:
        say("No pool yet. `onnx-ops work --pool NAME` creates one.")
    else:
        now, rows = project.context.clock.now(), list[Sequence[str] | str]()
        for pool in pools:
            rows.append(markup("[bold]{}[/bold]: {}", pool.pool, _describe_workers(pool)))
            for run in pool.runs:
                since = format_seconds(max(now - run.since, 0.0)).replace(" ", KEEP)
                text = "; ".join(filter(None, (run.worker, run.why)))
                cell = markup("[yellow]{}[/yellow]", text) if run.why else text
                rows.append((f"  {run.stage}", run.state, since, cell))
        print_table(("  stage", "state", "for", "worker, or why it waits"), rows)
    is_stuck = any(
        run.state == "waiting" and not pool.list_takers(run.kind)
        for pool in pools
        for run in pool.runs
    )
    raise typer.Exit(4 if is_stuck else 0)


def _describe_workers(pool: PoolStatus) -> str:
    """Return the running workers of a pool with their load, or how to start a worker."""
    running = Counter(run.worker for run in pool.runs)
    workers = [
        f"{worker.name} ({', '.join(worker.kinds) or 'kinds unknown'};"
        f" {running[worker.name]} of {worker.limit or '?'} busy)"
        for worker in pool.workers
    ]
    return (
        "; ".join(workers) or f"no worker is running; start one: onnx-ops work --pool {pool.pool}"
    )


def _orphan_report(survey: OrphanSurvey, hint: str = "") -> None:
    """Print the providers' resources that no endpoint uses."""
    if survey.orphans:
        rows = []
        for orphan in survey.orphans:
            left = orphan.leftover
            rows.append(
                (
                    orphan.endpoint,
                    orphan.provider,
                    left.kind,
                    left.name,
                    "yes" if left.paid else "",
                    left.why,
                )
            )
        print_table(("endpoint", "provider", "what", "name", "costs", "why it is not needed"), rows)
    say(f"{_count(len(survey.orphans), 'orphan')} at providers.")
    for endpoint in survey.silent:
        print_text(
            "[yellow]{}: its provider could not be queried; there may be more.[/yellow]", endpoint
        )
    if hint:
        say(hint)


def _prune_report(plan: PrunePlan, now: float, *, removed: bool) -> None:
    """Print what a prune removes, or would remove."""
    fate = markup("[yellow]{}[/yellow]", "removed" if removed else "would be removed")
    leaving = [
        (model, version, fate) for model, versions in plan.remove.items() for version in versions
    ]
    staying = [(kept.model, kept.version, f"stays: {kept.why}") for kept in plan.retained]
    if leaving or staying:
        rows = [
            _describe_version(model, version, what, now)
            for model, version, what in (*leaving, *staying)
        ]
        print_table(("model", "version", "variant", "release", "age", ""), rows)
    _print_freed("Removed" if removed else "Would remove", plan, len(leaving))
    _orphan_report(plan.orphans)
    if removed:
        if leaving:
            say("`mlflow gc` frees their space in MLflow.")
    elif any((leaving, plan.folders, plan.contents, plan.orphans.orphans)):
        say("Add --yes to remove them.")


def _print_freed(verb: str, plan: PrunePlan, version_count: int) -> None:
    """Print the numbers and sizes of removed versions, model folders and objects."""
    size = sum(folder.size_bytes for folder in plan.folders) / 1e6
    say(
        f"{verb} {_count(version_count, 'version')}, and "
        f"{_count(len(plan.folders), 'model folder')} on this machine ({size:.1f} MB)."
    )
    size = sum(stored.size_bytes for stored in plan.contents) / 1e6
    objects = _count(len(plan.contents), "unreferenced object")
    say(f"{verb} {objects} in the store ({size:.1f} MB).")


def _count(number: int, noun: str) -> str:
    """Return a number with its noun."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _describe_version(model: str, version: ListedVersion, what: str, now: float) -> tuple[str, ...]:
    """Return the cells of a registered version; the last cell is `what`."""
    age_days = max(0.0, now - version.created_at) / 86_400
    age = f"{age_days:.1f}{KEEP}d"
    return (model, version.version, version.variant, short_digest(version.release), age, what)
