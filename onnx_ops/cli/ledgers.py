"""Commands about ledgers that are damaged, unsigned, or written with a stolen key."""

from __future__ import annotations

import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated

import typer

from onnx_ops.cli.common import (
    Actor,
    AsJson,
    Endpoint,
    Reason,
    add_command,
    make_group,
    open_project,
    print_result,
    say,
)
from onnx_ops.domain.artifact import short_digest
from onnx_ops.domain.endpoint import serves_only
from onnx_ops.errors import OnnxOpsError, RefusedError, UserError

if TYPE_CHECKING:
    from onnx_ops.domain.ledger import ReleaseState
    from onnx_ops.ports import Context
    from onnx_ops.release.adoption import Adoption

ledger = make_group(
    "ledger", "Accept a state of a damaged or unsigned ledger.", "onnx-ops ledger adopt digits"
)


@add_command(ledger, "adopt")
def ledger_adopt(
    endpoint: Endpoint,
    last: Annotated[
        int | None,
        typer.Option(
            "--last", metavar="N", min=1, help="Last entry to accept. Default: the last intact one."
        ),
    ] = None,
    unsigned: Annotated[
        bool,
        typer.Option(
            "--unsigned", help="Trust entries without a valid signature: you vouch for them."
        ),
    ] = False,
    reason: Reason = "",
    actor: Actor = "",
    yes: Annotated[
        bool,
        typer.Option("--yes", "-y", help="Skip confirmation (required in non-interactive shells)."),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Restore the last intact state of a ledger, with a signed entry.

    Use this command for a ledger that is damaged or was restored from a backup. The entries after
    that state stay stored but have no effect. Rejections among them are lost, except for their tags
    in MLflow. The endpoint does not change before the next `onnx-ops rollback` or `reconcile`. The
    command needs a release key. If possible, restore the files from a backup instead.

    Example: onnx-ops ledger adopt digits --reason "disk failure"
    """
    from onnx_ops.release.adoption import adopt, find_adoption

    context = open_project().context
    adoption = find_adoption(context, endpoint, last=last, signed=not unsigned)
    if not adoption.damage and adoption.state.head == adoption.count:
        raise RefusedError(
            "the ledger is intact",
            where=f"ledger {endpoint}",
            remedy="There is no state to adopt.",
        )
    keys = ", ".join(map(short_digest, context.ledger.release_keys))
    for line in (
        *_describe(adoption),
        *_compare_with_endpoint(context, adoption.state),
        f"release keys that would be accepted: {keys} (this machine trusts them)",
    ):
        say(line, err=as_json)
    signer = context.signer()
    if signer is not None and signer.key not in adoption.state.keys:
        say(
            f"other machines accept this state only if they trust key {short_digest(signer.key)}: "
            "copy its public key to these machines",
            err=as_json,
        )
    if not yes and not (sys.stdin.isatty() and typer.confirm("Accept this state?")):
        raise UserError("nothing was changed", where=endpoint, remedy="Confirm with --yes.")
    sequence = adopt(context, adoption, reason=reason, actor=actor)
    done = {"endpoint": endpoint, "last": adoption.state.head, "entry": sequence}
    print_result(lambda: done, f"{endpoint}: entry {sequence} adopts this state", as_json=as_json)


def _describe(adoption: Adoption) -> list[str]:
    """Return lines that describe the state to restore and the entries to ignore."""
    state, roles = adoption.state, adoption.state.roles
    stable = "nothing" if roles.stable is None else roles.stable.name
    candidate = "" if roles.candidate is None else f", candidate {roles.candidate.name}"
    lost = adoption.count - state.head
    pending = "" if state.pending_rollback is None else "; a rollback is pending"
    return [
        *([f"damage: {adoption.damage}"] if adoption.damage else []),
        (
            f"state of entry {state.head}: {stable} serves{candidate}; "
            f"rejected versions: {len(state.rejected)}{pending}"
        ),
        f"entries that would have no effect: {lost}"
        + (f" ({state.head + 1} to {adoption.count})" if lost else ""),
    ]


def _compare_with_endpoint(context: Context, state: ReleaseState) -> list[str]:
    """Return a line with a remedy if the endpoint serves another version.

    The entries that would have no effect possibly rolled the version of the state back.
    """
    stable, observed = state.roles.stable, None
    if state.config is None or stable is None:
        return []
    with suppress(OnnxOpsError):
        observed = context.provider(state.config.provider).observe(state.config)
    if observed is None:
        return []
    served = observed.leader()
    if served.manifest == stable.manifest or not serves_only(observed, served):
        return []
    remedy = (
        f"if {stable.name} was rolled back after this state, run "
        f'`onnx-ops rollback {state.endpoint} --to {served.version} --reason "…"` '
        f"after the adoption and before `onnx-ops reconcile {state.endpoint}`"
        if served.version in state.known
        else f"`onnx-ops reconcile {state.endpoint}` first gives all traffic to {stable.name}"
    )
    return [f"the endpoint serves {served.name}, not {stable.name}: {remedy}"]
