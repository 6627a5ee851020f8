"""Commands about pipeline files: init, check, plan, run, affected."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from onnx_ops import codec
from onnx_ops.cli.common import (
    AsJson,
    Quiet,
    SetValue,
    console,
    documents,
    error_console,
    exit_after_steps,
    open_project,
    print_json,
    print_result,
    print_text,
    render_error,
    require_folder,
    say,
    writing,
)
from onnx_ops.cli.dry_runs import DryRunOutcome, build_dry_run_document, print_changes
from onnx_ops.cli.run_progress import RunProgress
from onnx_ops.domain.plan import StageKind, StageOutcome, StageStatus
from onnx_ops.errors import ConfigError, OnnxOpsError, Problem, UserError, config_error

if TYPE_CHECKING:
    from onnx_ops.app.context import Project
    from onnx_ops.app.project import PipelineResult, PreparedPipeline
    from onnx_ops.app.repository_setup import RepositorySource
    from onnx_ops.app.results import Summary
    from onnx_ops.cli.tables import PlannedStage
    from onnx_ops.domain.pipeline import Pipeline
    from onnx_ops.domain.release import BaseRelease

File = Annotated[
    Path, typer.Argument(help="Pipeline file, e.g. configs/pipelines/digits-mlp.yaml.")
]
_KINDS = ", ".join(StageKind)

Until = Annotated[
    StageKind | None,
    typer.Option("--until", metavar="STAGE", help=f"Stop after this kind of stage: {_KINDS}."),
]
NoCache = Annotated[
    list[StageKind] | None,
    typer.Option(
        "--no-cache",
        metavar="STAGE",
        help="Run this kind of stage again although it is cached; repeat for several.",
    ),
]
Abandon = Annotated[
    str,
    typer.Option(
        "--abandon",
        metavar="REASON",
        help="Leave endpoints running that the file no longer names or has moved; "
        "the reason is recorded.",
        show_default=False,
    ),
]
Base = Annotated[
    str,
    typer.Option(
        "--base",
        metavar="REF",
        help="Branch, tag or commit whose recorded results are compared; "
        "default in a pull request: its target branch.",
        show_default=False,
    ),
]
HandOver = Annotated[
    Path | None,
    typer.Option(
        "--hand-over",
        metavar="FOLDER",
        help="Write the results before the gates to a new folder, "
        "for --take-over in a job that has the key.",
        show_default=False,
    ),
]
TakeOver = Annotated[
    Path | None,
    typer.Option(
        "--take-over",
        metavar="FOLDER",
        help="Sign, register and deploy the results of --hand-over, "
        "without running any stage before the gates.",
        show_default=False,
    ),
]
Jobs = Annotated[
    int,
    typer.Option(
        "--jobs",
        "-j",
        min=1,
        max=256,
        metavar="N",
        help="Maximum number of pipelines or stages that run in parallel.",
    ),
]


def check(
    files: Annotated[list[Path], typer.Argument(help="Pipeline files.")],
    overrides: SetValue = None,
    static: Annotated[
        bool,
        typer.Option(
            "--static",
            help="Read files and source code only: no data, models, packages, credentials.",
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Validate pipeline files without running them.

    The checks cover data, existing models, the training function's signature, and the packages and
    credentials that a run needs. The problems of all files are reported together, with line and
    column if known.

    Exit code: 0 no problems, 2 a file is wrong, 4 only this machine lacks something.

    Example: onnx-ops check configs/pipelines/*.yaml
    """
    from onnx_ops.app import project as projects
    from onnx_ops.app.rollout_forecasts import warn_of_rollouts

    project = open_project()
    problems: list[Problem] = []
    notes: list[str] = []
    for file in files:
        try:
            checked = projects.check(
                project, file, overrides or (), static=static, machine=not static
            )
            place = f"{file}: " if len(files) > 1 else ""
            notes += [
                f"{place}{note}"
                for note in (
                    *checked.notes,
                    *projects.describe_rollouts(project, checked.pipeline),
                    *warn_of_rollouts(project, checked.pipeline),
                )
            ]
        except ConfigError as error:
            problems.extend(error.problems)
        except UserError as error:
            # One unreadable file does not prevent the check of the other files.
            if len(files) == 1:
                raise
            message = str(UserError(error.what, why=error.why, remedy=error.remedy))
            problems.append(Problem(file=error.where, line=0, column=0, path="", message=message))
    if problems:
        raise config_error(tuple(problems))
    text = f"{len(files)} file{'s' if len(files) != 1 else ''} checked, no problems"
    print_result(
        lambda: {"files": [str(file) for file in files], "problems": [], "notes": notes},
        lambda: say("\n".join([*notes, text])),
        as_json=as_json,
    )


def plan(
    file: File,
    overrides: SetValue = None,
    until: Until = None,
    no_cache: NoCache = None,
    as_json: AsJson = False,
) -> None:
    """Show what a run would do with each stage, and where it runs.

    The plan shows which results are already stored. The time of a stage is that of its last
    execution from this machine, without waiting. The price of a benchmark is this time multiplied
    by the `price_per_hour` of its target. Below the stages, the plan shows what the release would
    do to endpoints if it passes its gates.

    Example: onnx-ops plan configs/pipelines/digits-mlp.yaml --set train.with.seed=3
    """
    _show_plan(
        file, overrides=overrides or (), until=until, no_cache=no_cache or (), as_json=as_json
    )


def _show_plan(
    file: Path,
    *,
    overrides: Sequence[str],
    until: StageKind | None,
    no_cache: Sequence[StageKind],
    abandon: str = "",
    as_json: bool,
) -> None:
    """Print the plan of a run, and what the run would do to endpoints after its gates.

    Exit with the code of the worst error of a deployment that is known in advance.
    """
    from onnx_ops.app import project as projects
    from onnx_ops.app.deploy_preview import preview_deployments
    from onnx_ops.app.dry_run import open_dry_run
    from onnx_ops.cli.tables import plan_table
    from onnx_ops.pipeline import preview

    with open_dry_run() as dry_run:
        project = replace(open_project(), context=dry_run.context)
        prepared = projects.prepare(project, file, overrides=overrides, until=until, offline=True)
        handler = replace(project.handler(abandon=abandon), confirms=False)
        outcomes = preview(prepared.plan, handler=handler, no_cache=no_cache)
        rows = _list_planned(project, prepared, outcomes)
        deployed = preview_deployments(handler, prepared.plan, outcomes, abandon=abandon)
        outcome = DryRunOutcome(notes=deployed.notes, errors=deployed.errors)
        if not as_json:
            for note in prepared.notes:
                say(note, err=True)
            _print_rollouts(project, prepared.pipeline)
        name = prepared.plan.pipeline

        def report() -> None:
            plan_table(name, rows)
            if dry_run.changes or deployed.notes or deployed.errors:
                print_changes(dry_run, outcome, None)

        print_result(
            lambda: {
                "pipeline": name,
                "stages": codec.to_json(rows),
                "deploy": build_dry_run_document(dry_run, outcome, None),
            },
            report,
            as_json=as_json,
        )
    exit_after_steps({}, deployed.errors)


def _list_planned(
    project: Project, prepared: PreparedPipeline, outcomes: Mapping[str, StageOutcome | None]
) -> list[PlannedStage]:
    """Return the rows of a plan: work, place and duration of each stage."""
    from onnx_ops.cli.tables import PlannedStage
    from onnx_ops.pipeline.stage_settings import get_pool

    last = project.durations(prepared.plan.pipeline).last
    rows = []
    for stage in prepared.plan.stages:
        outcome = outcomes[stage.id]
        seconds = last.get(stage.id) if outcome is None else None
        target = (
            prepared.targets.get(stage.target or "") if stage.kind is StageKind.BENCHMARK else None
        )
        hourly = target.price_per_hour if target is not None else None
        rows.append(
            PlannedStage(
                stage=stage.id,
                needs=tuple(dict.fromkeys((*stage.needs, *stage.tolerates))),
                would=_describe_outcome(outcome),
                pool=get_pool(stage),
                seconds=seconds,
                price=None if seconds is None or hourly is None else seconds / 3600 * hourly,
            )
        )
    return rows


def _print_rollouts(project: Project, pipeline: Pipeline) -> None:
    """Print forecasts of the durations of analyzed rollouts, as notes."""
    if any(entry.rollout.is_analyzed for entry in pipeline.deploy):
        from onnx_ops.app.rollout_forecasts import forecast_offline
        from onnx_ops.reporting.rollout_forecast import summarize_forecast

        for result in forecast_offline(project, pipeline):
            say(summarize_forecast(result), err=True)


def _describe_outcome(outcome: StageOutcome | None) -> str:
    """Return what a run would do with a stage, in a few words.

    `outcome` is None if the run must execute the stage. Otherwise, it is the outcome of a cached or
    skipped stage.
    """
    if outcome is None:
        return "run"
    return "unchanged" if outcome.status is StageStatus.CACHED else f"skip: {outcome.reason}"


def run(
    files: Annotated[
        list[Path], typer.Argument(help="Pipeline files, e.g. configs/pipelines/digits-mlp.yaml.")
    ],
    overrides: SetValue = None,
    until: Until = None,
    no_cache: NoCache = None,
    jobs: Jobs = 1,
    abandon: Abandon = "",
    details: Annotated[bool, typer.Option("--details", help="Print every gate result.")] = False,
    html: Annotated[
        Path | None,
        typer.Option(
            "--html", metavar="FILE", help="Write a report, also of a release that fails."
        ),
    ] = None,
    base: Base = "",
    hand_over: HandOver = None,
    take_over: TakeOver = None,
    *,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only show the plan, as `onnx-ops plan` does.")
    ] = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Run pipelines, from training to deployment.

    The main stages are train, export, validate, quantize, benchmark, gate, register and deploy.
    Stored results are reused. With --jobs, several pipelines, or the stages of one, run in
    parallel; a measurement runs alone on the machine.

    Training code can read all that this command can read, including the key. To protect the key,
    run twice, on two machines or as two users. The first run has no key and uses --until gate and
    --hand-over; the second uses --take-over.

    Exit code: 0 every judged target has a chosen variant, 1 a gate failed, 2 a file is wrong, 3
    inconclusive, 4 the environment failed, 5 refused; of several files, the worst.

    Example: onnx-ops run configs/pipelines/digits-mlp.yaml --until gate
    """
    from onnx_ops.app import project as projects
    from onnx_ops.app.project import run_files

    set_values, repeated = tuple(overrides or ()), tuple(no_cache or ())
    if dry_run:
        _show_plan(
            _get_only_file(files, hand_over, take_over, html),
            overrides=set_values,
            until=until,
            no_cache=repeated,
            abandon=abandon,
            as_json=as_json,
        )
        return
    project, is_silent = open_project(), as_json or quiet
    if len(files) > 1:
        _refuse_files_of_one_run(hand_over, take_over, html)
        results = run_files(
            project,
            files,
            jobs=jobs,
            overrides=set_values,
            until=until,
            no_cache=repeated,
            abandon=abandon,
            base=base,
            observe=lambda: (
                None if is_silent else RunProgress(error_console(), is_one_of_several=True)
            ),
        )
        with project.running().ended_on_error():
            code = _print_results(results, as_json=as_json)
        raise typer.Exit(code)

    _check_folders(hand_over, take_over, html, repeated)
    if take_over is None:
        prepared = projects.prepare(project, files[0], overrides=set_values, until=until)
    else:
        prepared = projects.prepare_release(
            project, files[0], take_over, overrides=set_values, until=until
        )
    observer = None
    if not is_silent:
        for note in prepared.notes:
            say(note, err=True)
        observer = RunProgress(error_console(), jobs=jobs)

    from onnx_ops.app.results import find_run_base, render_report, summarize

    name, store = prepared.pipeline.pipeline, project.context.store
    against = find_run_base(project.settings.root, store, name, os.environ, base)
    with project.running().ended_on_error():
        result = projects.execute(
            project,
            prepared,
            no_cache=repeated,
            observer=observer,
            abandon=abandon,
            jobs=jobs,
            base=against,
        )
    summary = summarize(prepared.pipeline, result, project.context)
    if hand_over is not None:
        projects.write_evaluation(project, prepared, result, hand_over)
    _print_run(project, summary, result.errors, against, details=details, as_json=as_json)
    if html is not None:
        # The results are already printed, so a full disk hides no verdict.
        with writing("the report", f"--html {html}"):
            html.write_text(render_report(summary, project, os.environ, against), encoding="utf-8")
    raise typer.Exit(summary.exit_code)


def _get_only_file(files: Sequence[Path], *outputs: Path | None) -> Path:
    """Return the file of a dry run; raise UserError for options of a real run."""
    if len(files) > 1 or any(outputs):
        raise UserError(
            "--dry-run is for one file, without --hand-over, --take-over and --html",
            remedy="Run `onnx-ops plan FILE` for each file.",
        )
    return files[0]


def _refuse_files_of_one_run(*files: Path | None) -> None:
    if any(files):
        raise UserError(
            "--hand-over, --take-over and --html are for one file",
            remedy="Run each file with its own folder or report.",
        )


def _check_folders(
    hand_over: Path | None,
    take_over: Path | None,
    html: Path | None,
    no_cache: Sequence[StageKind],
) -> None:
    """Raise UserError for unusable options that name files, or an unusable --no-cache.

    The folder of --hand-over must be new or empty. With --take-over, only the gates and later
    stages are executed, so --no-cache applies only to these.
    """
    from onnx_ops.app.hand_over import EVALUATION, require_new_folder

    if html is not None:
        require_folder("--html", html)
    if hand_over is not None:
        require_new_folder(hand_over)
    if take_over is not None and set(no_cache) & set(EVALUATION):
        raise UserError(
            "--take-over executes no stage before the gates",
            where="--no-cache",
            remedy="Name only later stages, such as gate, or repeat the run with --hand-over.",
        )


def _print_run(
    project: Project,
    summary: Summary,
    errors: Mapping[str, OnnxOpsError],
    base: BaseRelease | None,
    *,
    details: bool,
    as_json: bool,
) -> None:
    """Print the results of one pipeline.

    If there is a `base`, the results are compared with the champions and the base.
    """
    from onnx_ops.app.results import evidence_of
    from onnx_ops.cli.tables import comparison_report, summary_report
    from onnx_ops.measure.paired_rows import compare_rows
    from onnx_ops.reporting.comparison import (
        ModelComparison,
        base_comparisons,
        champion_comparisons,
    )

    store = project.context.store
    # The JSON document contains evidence only with a comparison, so other evidence is not read for
    # it.
    evidence = (
        tuple(evidence_of(summary, store).values()) if base is not None or not as_json else ()
    )
    compared: tuple[ModelComparison, ...] = ()
    if base is not None:
        champions = champion_comparisons(summary.choices, evidence)
        compared = (
            *champions,
            *base_comparisons(summary.choices, evidence, base, partial(compare_rows, store)),
        )
    with_base = {} if base is None else {"comparisons": codec.to_json(compared)}

    def report() -> None:
        measured = {(one.variant, one.target): one for one in evidence}
        summary_report(summary, errors, project, measured, details=details)
        comparison_report(compared)

    print_result(
        lambda: {**codec.to_json(summary), **with_base, "errors": documents(errors)},
        report,
        as_json=as_json,
    )


def affected(
    since: Annotated[str, typer.Option(help="Branch, tag or commit to compare with.")] = "main",
    as_json: AsJson = False,
) -> None:
    """List the pipelines that a change affects.

    A pipeline is affected by changes of its file, targets, data, model, or imported code, and of
    onnx-ops.toml. All changes since this branch diverged from the other branch are considered,
    committed or not. A `.dvc` file stands for the data to which it points. Exit code: 0, even if no
    pipeline is affected.

    Example: onnx-ops affected --since origin/main
    """
    from onnx_ops.app.affected import affected as use_case
    from onnx_ops.app.affected import changed_since

    project = open_project()
    pipelines = use_case(project, changed_since(project.settings.root, since))
    if as_json:
        print_json(codec.to_json(pipelines))
        return
    for pipeline in pipelines:
        problem = f"\n  {pipeline.problem}" if pipeline.problem else ""
        say(f"{pipeline.file}  because of {', '.join(pipeline.because)}{problem}")
    if not pipelines:
        say("no pipeline is affected")


class PresetChoice(StrEnum):
    """Names of the presets of new projects."""

    CI_ONLY = "ci-only"
    SKLEARN = "sklearn"
    TABLE = "table"
    TORCH = "torch"
    ONNX = "onnx"


def init(
    folder: Annotated[
        Path | None, typer.Argument(metavar="DIR", help="New or empty folder.", show_default=False)
    ] = None,
    preset: Annotated[
        PresetChoice | None,
        typer.Option(
            help="Starting point: ci-only (gates on pull requests, no releases), or releases of a "
            "model of sklearn (default), table (CSV), torch or onnx. With --into, only ci-only is "
            "allowed.",
            show_default=False,
        ),
    ] = None,
    name: Annotated[
        str | None,
        typer.Option(
            help="Name of pipeline, model and endpoint. Default: the name of the folder or "
            "package.",
            show_default=False,
        ),
    ] = None,
    into: Annotated[
        Path | None,
        typer.Option(
            "--into",
            metavar="DIR",
            help="Existing repository to add a pipeline to.",
            show_default=False,
        ),
    ] = None,
    source: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="SOURCE",
            help="With --into: an ONNX file of the repository, "
            "or its training function, package.module:function.",
            show_default=False,
        ),
    ] = None,
    data: Annotated[
        list[str] | None,
        typer.Option(
            "--data",
            metavar="SET=FILE",
            help="With --into: rows of a data set, such as test=data/test.csv; repeat for several.",
            show_default=False,
        ),
    ] = None,
    label: Annotated[
        str | None,
        typer.Option(
            metavar="COLUMN", help="With --into: the label of the rows.", show_default=False
        ),
    ] = None,
    parameters: Annotated[
        list[str] | None,
        typer.Option(
            "--with",
            metavar="NAME=VALUE",
            help="With --into: a parameter of the training function; repeat for several.",
            show_default=False,
        ),
    ] = None,
    framework: Annotated[
        str,
        typer.Option(
            help="With --into: the exporter. Default: derived from the imports of the function.",
            show_default=False,
        ),
    ] = "",
    as_json: AsJson = False,
) -> None:
    """Create a working project, or add a pipeline to an existing repository.

    A new project has a pipeline, a model, flows, workflows, infrastructure and tests. Its demo and
    tests run immediately. With --preset ci-only it only runs gates on pull requests, without flows,
    infrastructure, registry and endpoint.

    In a repository, only missing files are written: files below onnx-ops/, onnx-ops.toml, and files
    below .github/ if it exists. Existing files are not changed.

    Example: onnx-ops init fraud --preset sklearn

    Example: onnx-ops init --into . --from fraud.training:train --data test=data/test.csv
    """
    if into is not None:
        if source is None or folder is not None:
            remedy = "For example: onnx-ops init --into . --from models/model.onnx."
            raise UserError("--into needs --from and no argument DIR", where="init", remedy=remedy)
        if preset not in (None, PresetChoice.CI_ONLY):
            raise UserError("--into takes the preset ci-only, or none", where=f"--preset {preset}")
        given = _read_source(source, data or [], label, parameters or [], framework)
        given = replace(given, releases=preset is None)
        _add_to_repository(into, name, given, as_json=as_json)
        return
    if folder is None or source is not None:
        remedy = (
            "Name the folder of a new project (onnx-ops init fraud), or a repository: "
            "--into DIR --from SOURCE."
        )
        what = "init needs a folder without --from, or --into with --from"
        raise UserError(what, where="init", remedy=remedy)
    from onnx_ops.app.scaffold import scaffold

    chosen = name or folder.resolve().name
    wanted = preset or PresetChoice.SKLEARN
    files = scaffold(folder, chosen, wanted.value)
    if as_json:
        print_json({"name": chosen, "folder": str(folder), "files": list(files)})
        return
    typer.echo(
        f"Created {len(files)} files in {folder} (pipeline: configs/pipelines/{chosen}.yaml)"
    )
    does = "releases and serves the model"
    if wanted is PresetChoice.CI_ONLY:
        does = "measures the model and judges it by its gates"
    typer.echo(
        f"\n  cd {shlex.quote(str(folder))}\n"
        f"  make demo                    # makes .venv/; {does}\n"
        "  make test\n"
        "  . .venv/bin/activate         # puts onnx-ops on the path\n"
        "\nSee README.md for the project layout."
    )


def _read_source(
    source: str, data: list[str], label: str | None, parameters: list[str], framework: str
) -> RepositorySource:
    """Return a repository's model and data, from the options of `init --into`."""
    from onnx_ops.app.repository_setup import RepositorySource
    from onnx_ops.cli.tools import parse_values

    sets = dict(text.partition("=")[::2] for text in data)
    if bad := [text for text in data if not all(text.partition("=")[::2])]:
        raise UserError(
            f"{bad[0]!r} is not SET=FILE",
            where="--data",
            remedy="For example: --data test=data/test.csv.",
        )
    return RepositorySource(
        source=source,
        data=sets,
        label=label,
        framework=framework,
        parameters=parse_values(parameters, "--with"),
    )


def _add_to_repository(
    root: Path, name: str | None, given: RepositorySource, *, as_json: bool
) -> None:
    """Add a pipeline to a repository; list the files written and the existing ones."""
    from onnx_ops.app.repository_setup import add_to_repository, choose_name

    setup = add_to_repository(root, name or choose_name(root), given)
    if as_json:
        print_json(
            {"pipeline": setup.pipeline, "written": list(setup.written), "kept": list(setup.kept)}
        )
        return
    for title, files in (("Written", setup.written), ("Existing and unchanged", setup.kept)):
        if files:
            typer.echo(f"{title}:\n" + "\n".join(f"  {file}" for file in files))
    prefix = "" if root.resolve() == Path.cwd() else f"  cd {shlex.quote(str(root))}\n"
    typer.echo(
        f"\n{prefix}"
        f"  onnx-ops check {setup.pipeline}\n"
        + (
            f"  onnx-ops run {setup.pipeline} --until gate    # measures, registers nothing"
            if given.releases
            else f"  onnx-ops run {setup.pipeline}"
        )
    )


def _print_results(results: Iterable[PipelineResult], *, as_json: bool) -> int:
    """Print each result in the order of the files; return the worst exit code.

    With `as_json`, one document with all results is printed at the end.
    """
    from onnx_ops.app.project import worst_exit_code
    from onnx_ops.cli.tables import choice_lines

    codes: list[int] = []
    ended: list[dict[str, object]] = []
    for result in results:
        summary, refused = result.summary, result.refused
        document: dict[str, object] = {"file": str(result.file), "exit_code": result.exit_code}
        if summary is None:
            document["error"] = None if refused is None else refused.as_document()
        else:
            document |= {**codec.to_json(summary), "errors": documents(result.errors)}
        codes.append(result.exit_code)
        ended.append(document)
        if as_json:
            continue
        done = (
            ""
            if summary is None
            else f" ({len(summary.executed)} of {len(summary.outcomes)} stages executed)"
        )
        print_text("[bold]{}[/bold]{}", result.file, done)
        if summary is not None:
            choice_lines(summary, result.errors)
        elif refused is not None:
            render_error(console(), refused, "not run")
    worst = worst_exit_code(codes)
    print_result(
        lambda: {"pipelines": ended, "exit_code": worst},
        lambda: say(
            f"{len(codes)} pipelines: {codes.count(0)} done, {len(codes) - codes.count(0)} not done"
        ),
        as_json=as_json,
    )
    return worst
