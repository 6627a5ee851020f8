"""Commands about releases: explain, promote, reconcile."""

from __future__ import annotations

from typing import Annotated

import typer

from onnx_ops import codec
from onnx_ops.cli.common import Actor, AsJson, Reason, answer, duration, print_json, reported, version_of
from onnx_ops.cli.steps import exit_for, steps_document, tell_steps
from onnx_ops.cli.terminal import say
from onnx_ops.errors import UserError

Target = Annotated[str, typer.Option("--target", "-t", help="Name of the target, e.g. cpu-1t.")]


@reported
def explain(
    version: Annotated[str, typer.Argument(metavar="MODEL/VERSION", help="A registered version, e.g. digits-mlp/3.")],
    target: Annotated[str | None, typer.Option("--target", "-t", help="Only this target.")] = None,
    as_json: AsJson = False,
) -> None:
    """Judge a version again from its stored evidence, and compare with what was signed.

    Nothing is measured. Exit code as of `run`, by the worst verdict.

    Example: onnx-ops explain digits-mlp/3 --target cpu-1t
    """
    from onnx_ops.app.project import open_project
    from onnx_ops.cli.progress import working
    from onnx_ops.cli.tables import explanation_report
    from onnx_ops.domain.decision import combine_verdicts
    from onnx_ops.release.audit import reevaluate as judge_again

    model, number = version_of(version, "explain")
    with working("explain", "reading the evidence", quiet=as_json):
        explanations = judge_again(open_project().ports, model, number, target)
    if as_json:
        print_json([codec.to_json(e) for e in explanations])
    else:
        explanation_report(version, explanations)
    raise typer.Exit(combine_verdicts(e.decision.verdict for e in explanations).exit_code)


@reported
def promote(
    model: Annotated[str, typer.Argument(help="Registered model.")],
    version: Annotated[str, typer.Argument(help="Its version.")],
    target: Target,
    reason: Reason = "",
    actor: Actor = "",
    override: Annotated[
        bool, typer.Option("--override", help="Promote it although its gates or history forbid it; needs --reason.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Make a version the challenger of a target, and start its rollout on every endpoint that serves the target.

    Example: onnx-ops promote digits-mlp 3 --target cpu-1t --reason "better on zeros"
    """
    from onnx_ops.app.project import open_project
    from onnx_ops.cli.progress import working
    from onnx_ops.release.notify import send_pending_each
    from onnx_ops.release.promote import promote as make_challenger
    from onnx_ops.release.reconcile import reconcile_each

    ports = open_project().ports
    with working("promote", "registry", "endpoints", "notifications", quiet=as_json) as progress:
        done = make_challenger(
            ports, model, version.removeprefix("v"), target, actor=actor, reason=reason, override=override
        )
        progress.begin("endpoints")
        reports, errors = reconcile_each(ports, done.endpoints, actor=actor)
        progress.begin("notifications")
        send_pending_each(ports, done.endpoints)

    def report() -> None:
        say(f"{model}/{done.version} on {target}: {done.did}")
        tell_steps(reports, errors)

    document = {"promotion": codec.to_json(done), "steps": steps_document(reports, errors)}
    answer(lambda: document, report, as_json=as_json)
    exit_for(reports, errors)


@reported
def reconcile(
    endpoints: Annotated[list[str] | None, typer.Argument(help="Endpoints; all by default.")] = None,
    actor: Actor = "",
    watch: Annotated[bool, typer.Option("--watch", help="Repeat until SIGTERM or Ctrl-C.")] = False,
    every: Annotated[str, typer.Option(metavar="DURATION", help="Between two passes of --watch.")] = "5s",
    retry: Annotated[
        str, typer.Option(metavar="DURATION", help="Retry what fails for this long.", show_default=False)
    ] = "0s",
    listen: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="With --watch: receive MLflow's webhooks.", show_default=False),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Move endpoints toward the state that the registry asks for.

    Ends when nothing is left to do now. An endpoint that cannot be moved does not hold up the others.

    With --watch and --json, every report is a JSON document on a line of its own.

    Example: onnx-ops reconcile digits

    Example: onnx-ops reconcile --watch --every 5s --listen 127.0.0.1:8650
    """
    from onnx_ops.app.project import open_project
    from onnx_ops.cli.progress import working
    from onnx_ops.release.journal import list_bound_endpoints, read_readable_state
    from onnx_ops.release.notify import send_pending_each
    from onnx_ops.release.reconcile import reconcile_with_retries

    if watch:
        from onnx_ops.cli.watching import keep_watching

        keep_watching(open_project(), tuple(endpoints or ()), every=every, listen=listen, actor=actor, as_json=as_json)
        return
    if listen is not None:
        raise UserError("--listen goes with --watch", remedy="onnx-ops reconcile --watch --listen 127.0.0.1:8650")
    ports = open_project().ports
    names = tuple(endpoints or ()) or list_bound_endpoints(ports)
    retry_s = duration(retry, "--retry")
    with working("reconcile", "registry", "endpoints", "notifications", quiet=as_json) as progress:
        if not any(
            read_readable_state(ports, name).pending_rollback for name in names
        ):  # which the ledger alone can carry out
            ports.registry()
        progress.begin("endpoints")
        reports, errors = reconcile_with_retries(ports, names, actor=actor, for_s=retry_s)
        if len(names) == len(errors) == 1:
            raise errors[names[0]]
        progress.begin("notifications")
        send_pending_each(ports, names)
    if as_json:
        print_json(steps_document(reports, errors))
    else:
        tell_steps(reports, errors)
    exit_for(reports, errors)
