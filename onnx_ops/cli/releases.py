"""Commands about releases.

The commands are explain, report, export-dvc, recheck, promote and reconcile.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from onnx_ops import codec
from onnx_ops.cli.common import (
    Actor,
    AsJson,
    Endpoints,
    Quiet,
    exit_after_steps,
    open_project,
    parse_duration,
    parse_version,
    print_json,
    print_result,
    print_steps,
    print_table,
    print_text,
    say,
    steps_to_document,
    verdict_markup,
    writing,
)
from onnx_ops.cli.dry_runs import DryRunOption, DryRunOutcome, show_dry_run
from onnx_ops.cli.progress import working
from onnx_ops.errors import UserError

if TYPE_CHECKING:
    from onnx_ops.domain.decision import RecheckResult
    from onnx_ops.ports import Context
    from onnx_ops.release.promote import PromotionResult

Target = Annotated[str, typer.Option("--target", "-t", help="Name of the target, e.g. cpu-1t.")]


def explain(
    version: Annotated[
        str,
        typer.Argument(metavar="MODEL/VERSION", help="A registered version, e.g. digits-mlp/3."),
    ],
    target: Annotated[str | None, typer.Option("--target", "-t", help="Only this target.")] = None,
    as_json: AsJson = False,
) -> None:
    """Re-evaluate a version's gates from stored evidence, and verify its signature.

    Nothing is measured. The exit code is that of `run` for the worst verdict.

    Example: onnx-ops explain digits-mlp/3 --target cpu-1t
    """
    from onnx_ops.cli.tables import gate_report
    from onnx_ops.domain.decision import combine_verdicts
    from onnx_ops.release.audit import reevaluate
    from onnx_ops.reporting.description import result_table

    model, number = parse_version(version, "explain")
    with working("explain", "reading the evidence", quiet=as_json):
        explanations = reevaluate(open_project().context, model, number, target)
    if as_json:
        print_json([codec.to_json(e) for e in explanations])
    for again in () if as_json else explanations:
        decision, signed = again.decision, again.signed.record
        gate_report(result_table([decision]))
        print_text(
            "{} on {}: {}, {}",
            version,
            again.target,
            verdict_markup(decision.verdict),
            decision.reason,
        )
        same = (
            "the same verdict"
            if again.reproduced
            else f"the signed verdict was {signed.verdict.value}"
        )
        say(f"Judged again from stored evidence: {same}. Signature {again.signature}.")
        hardware, runtime = again.evidence.hardware, again.evidence.runtime
        used = ", ".join(runtime.used) if runtime is not None else "unknown"
        where = (
            f"{hardware.cpu_model}, {hardware.cores} cores, "
            f"{hardware.runtime} {hardware.runtime_version}, {used}"
        )
        say(f"Measured on {where}; decided {signed.decided_at}.")
    raise typer.Exit(combine_verdicts(e.decision.verdict for e in explanations).exit_code)


def promote(
    version: Annotated[
        str,
        typer.Argument(metavar="MODEL/VERSION", help="A registered version, e.g. digits-mlp/3."),
    ],
    target: Target,
    reason: Annotated[
        str,
        typer.Option(
            "--reason",
            "-m",
            help="Reason, recorded in a tag of the version; with --override, also in the ledger.",
            show_default=False,
        ),
    ] = "",
    actor: Actor = "",
    override: Annotated[
        bool,
        typer.Option(
            "--override", help="Override failed gates or a previous rollback; requires --reason."
        ),
    ] = False,
    dry_run: DryRunOption = False,
    as_json: AsJson = False,
) -> None:
    """Make a version the challenger of a target, and start its rollout.

    The rollout starts on every endpoint that serves the model on the target. Without such an
    endpoint, the version becomes the champion immediately.

    Example: onnx-ops promote digits-mlp/3 --target cpu-1t --reason "better on zeros"
    """
    from onnx_ops.release.notify import send_pending_each
    from onnx_ops.release.promote import promote as make_challenger
    from onnx_ops.release.reconcile import reconcile_each

    model, number = parse_version(version, "promote")

    def begin(context: Context) -> PromotionResult:
        return make_challenger(
            context, model, number, target, actor=actor, reason=reason, override=override
        )

    if dry_run:

        def preview(context: Context) -> DryRunOutcome:
            done = begin(context)
            reports, errors = reconcile_each(context, done.endpoints, actor=actor)
            return DryRunOutcome(reports=reports, errors=errors)

        show_dry_run(preview, as_json=as_json)
        return
    context = open_project().context
    with working("promote", "registry", "endpoints", "notifications", quiet=as_json) as progress:
        done = begin(context)
        progress.begin("endpoints")
        reports, errors = reconcile_each(context, done.endpoints, actor=actor)
        progress.begin("notifications")
        send_pending_each(context, done.endpoints)

    def report() -> None:
        say(f"{model}/{done.version} on {target}: {done.did}")
        print_steps(reports, errors)

    document = {"promotion": codec.to_json(done), "steps": steps_to_document(reports, errors)}
    print_result(lambda: document, report, as_json=as_json)
    exit_after_steps(reports, errors)


def reconcile(
    endpoints: Endpoints = None,
    actor: Actor = "",
    watch: Annotated[bool, typer.Option("--watch", help="Repeat until SIGTERM or Ctrl-C.")] = False,
    interval: Annotated[
        str, typer.Option(metavar="DURATION", help="Time between two passes of --watch.")
    ] = "5s",
    retry: Annotated[
        str,
        typer.Option(
            metavar="DURATION", help="Retry failed operations for this long.", show_default=False
        ),
    ] = "0s",
    listen: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT", help="With --watch: receive MLflow's webhooks.", show_default=False
        ),
    ] = None,
    dry_run: DryRunOption = False,
    as_json: AsJson = False,
) -> None:
    """Move endpoints toward the desired state in the registry.

    The command ends when no endpoint can be moved further now. An endpoint that is stuck does not
    delay the others.

    With --watch and --json, every report is one line of JSON.

    Example: onnx-ops reconcile digits

    Example: onnx-ops reconcile --watch --interval 5s --listen 127.0.0.1:8650
    """
    from onnx_ops.release.journal import list_bound_endpoints
    from onnx_ops.release.notify import send_pending_each
    from onnx_ops.release.reconcile import reconcile_each, reconcile_with_retries

    if dry_run:
        if watch:
            raise UserError(
                "--dry-run is for one pass",
                where="--watch",
                remedy="Leave out --watch.",
            )

        def preview(context: Context) -> DryRunOutcome:
            names = tuple(endpoints or ()) or list_bound_endpoints(context)
            _require_registry(context, names)
            reports, errors = reconcile_each(context, names, actor=actor)
            return DryRunOutcome(reports=reports, errors=errors)

        show_dry_run(preview, as_json=as_json)
        return
    if watch:
        from onnx_ops.cli.watch import keep_watching

        keep_watching(
            open_project(),
            tuple(endpoints or ()),
            interval=interval,
            listen=listen,
            actor=actor,
            as_json=as_json,
        )
        return
    if listen is not None:
        raise UserError(
            "--listen needs --watch",
            remedy="onnx-ops reconcile --watch --listen 127.0.0.1:8650",
        )
    context = open_project().context
    names = tuple(endpoints or ()) or list_bound_endpoints(context)
    retry_s = parse_duration(retry, "--retry")
    with working("reconcile", "registry", "endpoints", "notifications", quiet=as_json) as progress:
        _require_registry(context, names)
        progress.begin("endpoints")
        reports, errors = reconcile_with_retries(context, names, actor=actor, for_s=retry_s)
        if len(names) == len(errors) == 1:
            raise errors[names[0]]
        progress.begin("notifications")
        send_pending_each(context, names)
    print_result(
        lambda: steps_to_document(reports, errors),
        lambda: print_steps(reports, errors),
        as_json=as_json,
    )
    exit_after_steps(reports, errors)


def _require_registry(context: Context, names: Sequence[str]) -> None:
    """Open the registry, unless a rollback or deletion of an endpoint is pending.

    These do not need the registry.
    """
    from onnx_ops.release.journal import read_readable_state

    states = [read_readable_state(context, name) for name in names]
    if not any(state.pending_rollback or state.deleting for state in states):
        context.registry()


def report(
    version: Annotated[
        str,
        typer.Argument(metavar="MODEL/VERSION", help="A registered version, e.g. digits-mlp/3."),
    ],
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            help="File to write. Default: MODEL-VERSION.html.",
            show_default=False,
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write the HTML report of a version's whole release to a file.

    Nothing is measured or judged; prints the path of the file.

    Example: onnx-ops report digits-mlp/3 --output report.html
    """

    model, number = parse_version(version, "report")
    with working("report", "fetching the report", quiet=as_json):
        registry = open_project().context.registry()
        page = registry.document(registry.version(model, number), "report.html")
    path = output or Path(f"{model.replace('/', '-')}-{number}.html")
    with writing("the report", path):
        path.write_bytes(page)
    if as_json:
        print_json({"model": model, "version": number, "report": str(path)})
    else:
        typer.echo(str(path))


def export_dvc(
    version: Annotated[
        str,
        typer.Argument(metavar="MODEL/VERSION", help="Any version of the release, e.g. digits/3."),
    ],
    metrics: Annotated[Path, typer.Option(metavar="FILE", help="Output file for metrics.")] = Path(
        "metrics.json"
    ),
    plots: Annotated[
        Path, typer.Option(metavar="FOLDER", help="Output folder for plot data.")
    ] = Path("plots"),
    as_json: AsJson = False,
) -> None:
    """Write the metrics of a release in DVC's formats.

    The files are for `dvc metrics show` and `dvc plots show`. Nothing is measured; the metrics come
    from the signed evidence.

    Example: onnx-ops export-dvc digits-mlp/3 --metrics metrics.json --plots plots
    """
    from onnx_ops.release.audit import reevaluate_release
    from onnx_ops.reporting.metrics import dvc_metrics, dvc_plots

    model, number = parse_version(version, "export-dvc")
    decisions = reevaluate_release(open_project().context, model, number)
    judged = {
        variant: {
            decision.target: (decision.signed.record.verdict, decision.evidence)
            for decision in explained
        }
        for variant, explained in decisions.items()
    }
    files = {
        metrics: dvc_metrics(judged),
        **{plots / name: points for name, points in dvc_plots(judged).items()},
    }
    for path, content in files.items():
        with writing("the file", path):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    if as_json:
        print_json({"model": model, "version": number, "files": [str(path) for path in files]})
    else:
        for path in files:
            typer.echo(str(path))


def recheck(
    pipelines: Annotated[
        list[str] | None,
        typer.Argument(metavar="PIPELINE...", help="Pipelines or models; all by default."),
    ] = None,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Benchmark the champions again, and judge them by the gates of their release.

    Use this command after an upgrade or on a new machine. It repeats the benchmark of each
    champion's release on the current machine. It stores the measurement, and changes
    neither the ledger, the registry nor an endpoint.

    Exit code: 1 if a champion fails a gate that passed before, else 4 if one could not be
    measured, else 0.

    Example: onnx-ops recheck digits-mlp
    """
    from onnx_ops.app.champions import list_champions, measure_again
    from onnx_ops.app.execution import StageExecutor
    from onnx_ops.domain.decision import compute_recheck_exit_code

    project = open_project()
    executor = StageExecutor(settings=project.settings, context=project.context)
    results: list[RecheckResult] = []
    with working("recheck", "registry", quiet=quiet or as_json) as progress:
        champions = list_champions(project.context, tuple(pipelines or ()))
        names = [
            f"{champion.record.model} v{champion.record.version} on {champion.target}"
            for champion in champions
        ]
        progress.plan(names)
        for name, champion in zip(names, champions, strict=True):
            progress.begin(name)
            results.append(measure_again(project.context, executor, champion))
    if as_json:
        print_json(codec.to_json(results))
    elif results:
        rows = []
        for result in results:
            verdict = verdict_markup(result.verdict)
            rows.append(
                (
                    result.model,
                    result.version,
                    result.target,
                    result.variant,
                    verdict,
                    result.reason,
                )
            )
        print_table(("model", "version", "target", "variant", "verdict", "why"), rows)
    else:
        typer.echo("no champions yet: the first version that is promoted on a target becomes one")
    raise typer.Exit(compute_recheck_exit_code(results))
