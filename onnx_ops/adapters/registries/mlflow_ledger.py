"""Ledger entries as runs of MLflow's experiment `releases/<endpoint>`."""

from __future__ import annotations

from typing import TYPE_CHECKING, assert_never

from onnx_ops import codec
from onnx_ops.domain.ledger import (
    ActionOutcome,
    AliasesWritten,
    EndpointAbandoned,
    EndpointBound,
    EndpointDeleted,
    EntryBody,
    Intent,
    LeaseRenewed,
    LedgerEntry,
    MetricsRecorded,
    NotificationSent,
    OperatorCommandSent,
    OverrideRecorded,
    RequestWithdrawn,
    RollbackRequested,
    RolloutPaused,
    ThresholdsFixed,
    VersionRefused,
)

if TYPE_CHECKING:
    from mlflow import MlflowClient

_TAG_LIMIT = 5000


def show_entry(client: MlflowClient, experiment: str, entry: LedgerEntry, model: str) -> None:
    """Write the entry as a run at its time; complete a run that was started."""
    runs = client.search_runs([experiment], f"tags.sequence = '{entry.sequence}'", max_results=1)
    if runs and runs[0].info.status != "RUNNING":
        return
    body = entry.body
    at = round(entry.at * 1000)
    title, details = _describe(body)
    tags = {
        "sequence": str(entry.sequence),
        "endpoint": entry.endpoint,
        "model": model,
        "actor": entry.actor,
        "kind": body.kind,
        "mlflow.user": entry.actor,
        **details,
        "entry": codec.dumps(entry).decode(),
    }
    run = (
        runs[0]
        if runs
        else client.create_run(
            experiment,
            start_time=at,
            run_name=f"{entry.sequence:05d} {title}",
            tags={key: value[:_TAG_LIMIT] for key, value in tags.items() if value},
        )
    )
    if isinstance(body, Intent):
        from mlflow.entities import Metric

        split = body.action.state.split.weights
        metrics = [Metric(f"percent/{name}", float(weight), at, step=0) for name, weight in sorted(split.items())]
        client.log_batch(run.info.run_id, metrics=metrics)
    failed = isinstance(body, ActionOutcome) and not body.ok
    client.set_terminated(run.info.run_id, "FAILED" if failed else "FINISHED", end_time=at)


def _describe(body: EntryBody) -> tuple[str, dict[str, str]]:
    """Return the title of an entry's run, and its tags."""
    title: str = body.kind
    details: dict[str, str] = {}
    match body:
        case Intent() | RollbackRequested():
            title = f"{'requested: ' if isinstance(body, RollbackRequested) else ''}{body.action.kind.value}"
            roles = body.action.roles
            serving = {"stable": roles.stable, "previous": roles.previous, "candidate": roles.candidate}
            versions = {role: deployment.version for role, deployment in serving.items() if deployment}
            details = {"why": body.action.why, **versions}
        case ActionOutcome():
            title = f"{'done' if body.ok else 'failed'}: entry {body.of}"
            details = {"of": str(body.of), "why": body.detail}
        case EndpointBound():
            details = {"provider": body.config.provider, "target": body.config.target}
        case AliasesWritten():
            details = {"aliases": " ".join(f"{alias}={to or '-'}" for alias, to in sorted(body.aliases.items()))}
        case VersionRefused():
            details = {"alias": body.alias, "version": body.version, "why": body.reason}
        case OverrideRecorded():
            details = {"version": body.version, "why": body.reason}
        case OperatorCommandSent():
            title, details = f"command: {body.command.value}", {"why": body.reason}
        case EndpointDeleted() | EndpointAbandoned() | RequestWithdrawn():
            details = {"why": body.reason}
        case RolloutPaused():
            details = {"why": body.why}
        case ThresholdsFixed() | MetricsRecorded() | NotificationSent() | LeaseRenewed():
            pass
        case _:
            assert_never(body)
    return title, details
