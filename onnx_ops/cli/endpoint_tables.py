"""Tables about endpoints and versions for people, and their documents for machines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.markup import escape

from onnx_ops import codec
from onnx_ops.cli.terminal import KEEP, console, print_table, print_text
from onnx_ops.domain.artifact import short_digest

if TYPE_CHECKING:
    from onnx_ops.domain.ledger import PendingRollback
    from onnx_ops.release.prune import OrphanSurvey, PrunePlan
    from onnx_ops.release.status import EndpointStatus, HistoryLine


def status_document(status: EndpointStatus) -> dict[str, Any]:
    """Return an endpoint's status for --json."""
    state = status.state
    return {
        "endpoint": state.endpoint,
        "address": status.address,
        "answers": status.actual is not None or status.unsupervised,
        "supervised": status.actual is not None,
        "config": codec.to_json(state.config),
        "roles": codec.to_json(state.roles),
        "traffic": dict(status.actual.split.weights) if status.actual is not None else None,
        "drift": list(status.actual.drift) if status.actual is not None else [],
        "open_intent": state.open_intent.action.why if state.open_intent is not None else None,
        "pending_rollback": _pending_document(state.pending_rollback),
        "registry_pending": dict(state.pending_aliases),
        "rejected": dict(state.rejected),
        "deleting": state.deleting,
    }


def status_report(statuses: Sequence[EndpointStatus], now: float) -> None:
    """Print what endpoints serve."""
    out = console()
    if not statuses:
        print_text(out, "No endpoints yet. The first `onnx-ops run` of a pipeline with `deploy:` binds one.")
    for status in statuses:
        state, config = status.state, status.state.config
        if config is None:
            continue
        print_text(out, f"[bold]{escape(state.endpoint)}[/bold] {escape(config.model)} on {escape(config.target)}")
        if state.deleting:
            print_text(out, "[yellow]is being deleted[/yellow]", indent=2)
        if state.pending_rollback is not None:
            print_text(
                out, f"[red]rollback owed[/red]: {escape(describe_pending(state.pending_rollback, now))}", indent=2
            )
            print_text(
                out,
                f"onnx-ops reconcile {escape(state.endpoint)} tries again; rollback --withdraw takes it back",
                indent=2,
            )
        if status.actual is not None:
            waits = "" if state.roles.candidate is None else state.roles.candidate.name
            weights = {name: weight for name, weight in status.actual.split.weights.items() if weight or name == waits}
            split = ", ".join(f"{name} {weight} %" for name, weight in weights.items()) or "no traffic"
            print_text(out, f"answers at {escape(status.address or '?')}: {escape(split)}", indent=2)
            for drift in status.actual.drift:
                print_text(out, f"[yellow]differs from its settings[/yellow]: {escape(drift)}", indent=2)
        elif status.unsupervised:
            print_text(
                out,
                f"answers at {escape(status.address or '?')}, but [red]has no supervisor[/red]: no change is possible",
                indent=2,
            )
            print_text(
                out,
                f"onnx-ops reconcile {escape(state.endpoint)} restarts its supervisor without a lost request",
                indent=2,
            )
        elif state.roles.stable is not None:
            print_text(
                out,
                f"[red]does not answer[/red]; onnx-ops reconcile {escape(state.endpoint)} starts it again",
                indent=2,
            )
        for role in ("stable", "candidate", "previous"):
            deployment = getattr(state.roles, role)
            if deployment is not None:
                print_text(out, f"{role:<9} {escape(deployment.name)} ({escape(deployment.variant)})", indent=2)
        if state.open_intent is not None:
            left = max(0, round(state.open_intent.expires_at - now))
            print_text(out, f"at work: {escape(state.open_intent.action.why)} (lease for {left} s more)", indent=2)
        if state.pending_aliases:
            owed = ", ".join(f"{name} -> {version or 'none'}" for name, version in state.pending_aliases.items())
            print_text(out, f"[yellow]registry pending[/yellow]: {escape(owed)}", indent=2)


def _pending_document(pending: PendingRollback | None) -> dict[str, Any] | None:
    if pending is None:
        return None
    stable = pending.action.roles.stable
    return {
        "to": stable.name if stable is not None else None,
        "reason": pending.action.why,
        "actor": pending.actor,
        "requested_at": pending.at,
        "attempts": pending.attempts,
        "error": pending.error,
    }


def describe_pending(pending: PendingRollback, now: float) -> str:
    """Return where a rollback leads, who asked for it how many seconds ago and why it is still owed."""
    stable = pending.action.roles.stable
    to = stable.name if stable is not None else "nothing"
    text = f"to {to}, asked for by {pending.actor} {max(0.0, now - pending.at):.0f} s ago ({pending.action.why})"
    return f"{text}; {pending.attempts} failed, the last: {pending.error}" if pending.attempts else text


def history_table(lines: Sequence[HistoryLine]) -> None:
    """Print entries of ledgers as a table."""
    if not lines:
        console().print("No entries: nothing of what is asked for has happened yet.")
        return
    several = len({line.endpoint for line in lines}) > 1
    heads = (*(("endpoint",) if several else ()), "#", "when", "who", "what", "why")
    rows = []
    for line in lines:
        cells = (str(line.sequence), line.at.replace(" ", KEEP), line.actor, line.what, line.why)
        rows.append([escape(text) for text in ((line.endpoint, *cells) if several else cells)])
    print_table(console(), heads, rows)


_SHADES = (("█", "green"), ("▒", "cyan"), ("▓", "magenta"), ("░", "yellow"))
_BAR = 40


def traffic_chart(lines: Sequence[HistoryLine]) -> None:
    """Each endpoint's shares of traffic as bars, one for each time that they changed, with the reason below it."""
    out = console()
    for endpoint in dict.fromkeys(line.endpoint for line in lines):
        print_text(out, f"[bold]{escape(endpoint)}[/bold]: shares of traffic; times in UTC")
        shades: dict[str, tuple[str, str]] = {}
        last: dict[str, int] = {}
        for line in (entry for entry in lines if entry.endpoint == endpoint):
            shares = {name: share for name, share in line.traffic.items() if share}
            if shares == last:
                continue
            last = shares
            bar = ""
            for name, share in shares.items():
                shade, colour = shades.setdefault(name, _SHADES[len(shades) % len(_SHADES)])
                bar += f"[{colour}]{shade * round(_BAR * share / 100)}[/]"
            text = ", ".join(f"{name} {share} %" for name, share in shares.items())
            out.print(f"{line.at[:10]} {line.at[11:19]} {bar} {escape(text)}", soft_wrap=True)
            print_text(out, f"[dim]{escape(line.why)} ({escape(line.actor)})[/dim]", indent=20, hang=0)
    if not lines:
        print_text(out, "No traffic was moved yet.")


def orphan_report(survey: OrphanSurvey) -> None:
    """Print what providers hold that no release needs."""
    out = console()
    if survey.orphans:
        rows = []
        for orphan in survey.orphans:
            left = orphan.leftover
            cells = (orphan.endpoint, orphan.provider, left.kind, left.name, "yes" if left.paid else "", left.why)
            rows.append([escape(text) for text in cells])
        print_table(out, ("endpoint", "provider", "what", "name", "costs", "why it is not needed"), rows)
    print_text(out, f"{len(survey.orphans)} orphans at providers.")
    for endpoint in survey.silent:
        print_text(out, f"[yellow]{escape(endpoint)}: its provider does not answer; there may be more.[/yellow]")


def prune_report(plan: PrunePlan, now: float, *, removed: bool) -> None:
    """Print what a prune removes, or would remove."""
    out, rows = console(), []
    leaving = [(model, entry, "") for model, entries in plan.remove.items() for entry in entries]
    for model, entry, why in (
        *leaving,
        *((entry_kept.model, entry_kept.version, entry_kept.why) for entry_kept in plan.kept),
    ):
        age = f"{max(0.0, now - entry.created_at) / 86_400:.1f}{KEEP}d"
        fate = (
            f"stays: {escape(why)}" if why else "[yellow]removed[/yellow]" if removed else "[yellow]would go[/yellow]"
        )
        rows.append([escape(model), entry.version, escape(entry.variant), short_digest(entry.release), age, fate])
    if rows:
        print_table(out, ("model", "version", "variant", "release", "age", ""), rows)
    size = sum(folder.size_bytes for folder in plan.folders) / 1e6
    verb = "Removed" if removed else "Would remove"
    print_text(
        out, f"{verb} {len(leaving)} versions, and {len(plan.folders)} model folders of this machine ({size:.1f} MB)."
    )
    size = sum(stored.size_bytes for stored in plan.contents) / 1e6
    print_text(out, f"{verb} {len(plan.contents)} unreferenced objects of the store ({size:.1f} MB).")
    orphan_report(plan.orphans)
    if not removed and (leaving or plan.folders or plan.contents or plan.orphans.orphans):
        print_text(out, "Add --yes to remove them.")
    if removed and leaving:
        print_text(out, "`mlflow gc` frees their space in MLflow.")
