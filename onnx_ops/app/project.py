"""Operations on the pipeline files of a project.

Modules that read and run pipelines are imported on use.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onnx_ops import codec, plugins
from onnx_ops.app.context import Project
from onnx_ops.errors import MissingPackageError, OnnxOpsError, UserError
from onnx_ops.ports import Executor, MetricsSource, Observer

if TYPE_CHECKING:
    from onnx_ops.app.hand_over import Evaluation
    from onnx_ops.app.handler import StageHandler
    from onnx_ops.app.results import Summary
    from onnx_ops.config.document import Issue
    from onnx_ops.config.rules import Draft
    from onnx_ops.domain.pipeline import Deploy, Pipeline
    from onnx_ops.domain.plan import Plan, Stage, StageKind
    from onnx_ops.domain.release import BaseRelease
    from onnx_ops.domain.target import Target
    from onnx_ops.pipeline import Handler, RunResult


@dataclass(frozen=True)
class PreparedPipeline:
    """Checked pipeline, its targets and its plan.

    `overridden` states whether values of the file were overridden. `evaluation` contains the
    results of the stages before the gates if another job ran these stages.
    """

    pipeline: Pipeline
    targets: Mapping[str, Target]
    plan: Plan
    notes: tuple[str, ...] = ()
    overridden: bool = False
    evaluation: Evaluation | None = None


@dataclass(frozen=True)
class CheckedFile:
    """Pipeline that has passed the checks, and notes for its author."""

    pipeline: Pipeline
    notes: tuple[str, ...]


def check(
    project: Project,
    file: Path,
    overrides: Sequence[str] = (),
    *,
    static: bool = False,
    machine: bool = False,
) -> CheckedFile:
    """Check a pipeline file.

    With `static`, only the file and the project's source code are checked, not data and models.
    With `machine`, the packages, hardware and credentials that a whole run needs here are checked
    too, and changes of existing endpoints.

    Raises:
        UserError: the file cannot be read.
        ConfigError: the file has problems; the error contains all that were found.
        NotReadyError: the only problems are those of this machine, such as a missing package.
    """

    from onnx_ops.config.loader import load_pipeline

    known = {kind: plugins.names(kind) for kind in plugins.KINDS}
    notes: list[str] = []

    def preflight(
        draft: Draft, targets: Mapping[str, Target], pipeline: Pipeline | None
    ) -> list[Issue]:
        from onnx_ops.app.preflight import Preflight

        preflight_ = Preflight(project.context, draft, targets)
        findings = preflight_.findings()
        notes.extend(preflight_.notes)
        if not machine:
            return [finding for finding in findings if not finding.environment]
        if pipeline is not None and all(finding.environment for finding in findings):
            findings += _machine_findings(project, pipeline, targets, preflight_.absent)
            for entry in project.settings.notify if pipeline.deploy else ():
                try:
                    project.context.notifiers()[entry.label].check()
                except OnnxOpsError as error:
                    # A rollout continues if a notification fails, so this problem is only a note.
                    notes.append(f"notifier {entry.label}: {error}")
        return findings

    pipeline = load_pipeline(
        file,
        root=project.settings.root,
        plugins=known,
        options=lambda provider, options: project.context.provider(provider).validate_options(
            options
        ),
        metrics=lambda source, options: plugins.load("metrics", source, options),
        capabilities=lambda entry: list_capabilities(project, entry),
        unservable=lambda entry, target: project.context.provider(
            entry.provider
        ).explain_unservable(target),
        uncounted=lambda entry: project.context.provider(entry.provider).explain_uncounted(
            "" if entry.metrics is None else entry.metrics.source, entry.options
        ),
        preflight=(lambda *_: ()) if static else preflight,
        machine=not static,
        shared=project.settings.shared_targets,
        overrides=tuple(overrides),
        environ=os.environ,
        reach=project.settings.reach,
    )
    return CheckedFile(pipeline=pipeline, notes=tuple(notes))


def _machine_findings(
    project: Project, pipeline: Pipeline, targets: Mapping[str, Target], reported: Collection[str]
) -> list[Issue]:
    """Return issues of what a complete run needs and this machine lacks.

    Packages in `reported` are left out. If the stages cannot be planned, the error is the only
    issue. Changes of existing endpoints that a run would refuse are issues too.
    """
    from onnx_ops.app.target_status import find_unmeasurable
    from onnx_ops.config.document import Issue
    from onnx_ops.pipeline import plan
    from onnx_ops.pipeline.probe import OutlineProbe

    probe = OutlineProbe(project.context, signing=project.settings.signing)
    try:
        planned = plan(
            pipeline, {name: targets[name] for name in pipeline.benchmark.targets}, probe
        )
    except OnnxOpsError as error:
        return [Issue((), str(error), environment=isinstance(error, MissingPackageError))]
    findings = []
    for stage, names in _missing_packages(project, planned):
        if new := [name for name in names if name not in reported]:
            are = "is" if len(new) == 1 else "are"
            text = (
                f"needs {', '.join(new)}, which {are} not installed. {plugins.install_hint(*new)}"
            )
            findings.append(Issue(_location(pipeline, stage), text, environment=True))
    benchmarked = pipeline.benchmark.targets
    for name, why in find_unmeasurable(
        project.context, [targets[name] for name in benchmarked]
    ).items():
        remedy = _advise_pool(project, name)
        loc = ("benchmark", "targets", benchmarked.index(name))
        findings.append(
            Issue(loc, f"this machine cannot measure {name}: {why}. {remedy}", environment=True)
        )
    return [*findings, *_list_endpoint_findings(project, pipeline, planned)]


def _advise_pool(project: Project, name: str) -> str:
    """Return how to measure a target on another machine, if this one cannot."""
    from onnx_ops.config.folders import TARGETS, find_config_folder

    if project.targets.is_measured(name) is None:
        change = f"set `pool` in {project.targets.source(name)}"
    else:
        folder = find_config_folder(project.settings.root) / TARGETS
        change = (
            f"copy the profile to {folder.as_posix()}/{name}.yaml, and set `pool` there "
            "(`onnx-ops docs target-profiles`)"
        )
    return f"To measure {name} on another machine, {change}. Or leave it out."


def _list_endpoint_findings(project: Project, pipeline: Pipeline, planned: Plan) -> Iterator[Issue]:
    """Yield what this machine and the servers lack for the endpoints of a pipeline.

    Changes of existing endpoints that a run would refuse are yielded too.
    """
    from onnx_ops.app.handler import binding
    from onnx_ops.app.server_memory import find_memory_shortages
    from onnx_ops.config.document import Issue
    from onnx_ops.domain.plan import StageKind
    from onnx_ops.release.promote import find_refused_change

    seen: set[str] = set()
    for stage in planned.stages:
        if stage.kind is not StageKind.DEPLOY:
            continue
        config, _ = binding(stage)
        parts = (project.context.provider(config.provider), project.context.metrics(config))
        if (refused := find_refused_change(project.context, config)) is not None:
            index = [entry.endpoint for entry in pipeline.deploy].index(config.endpoint)
            yield Issue(("deploy", index, "options"), refused.without_place())
        lacks = [lack for part in parts if (lack := part.find_missing_requirement(config))]
        for lack in lacks:
            # A provider and its metrics source can lack the same requirement, so it is reported
            # once.
            if lack.what not in seen:
                seen.add(lack.what)
                yield Issue(_location(pipeline, stage), lack.without_place(), environment=True)
        # Missing requirements include credentials, which are needed to read the servers' reports.
        for text in () if lacks else find_memory_shortages(project.context, config):
            yield Issue(_location(pipeline, stage), text, environment=True)


def _list_refused(project: Project, planned: Plan) -> Iterator[UserError]:
    """Yield the error of each change of an existing endpoint that a run would refuse."""
    from onnx_ops.app.handler import binding
    from onnx_ops.domain.plan import StageKind
    from onnx_ops.release.promote import find_refused_change

    for stage in planned.stages:
        if stage.kind is StageKind.DEPLOY:
            error = find_refused_change(project.context, binding(stage)[0])
            if error is not None:
                yield error


def _location(pipeline: Pipeline, stage: Stage) -> tuple[str | int, ...]:
    """Return the location in the pipeline file that declares a stage."""
    from onnx_ops.app.handler import binding
    from onnx_ops.domain.plan import StageKind

    match stage.kind:
        case StageKind.DATA:
            return ("data", stage.id.partition("/")[2])
        case StageKind.TAGS:
            return ("slices",)
        case StageKind.TRAIN | StageKind.EXPORT | StageKind.VALIDATE:
            return ("export", "framework")
        case StageKind.SYSTEM:
            return ("system", "source")
        case StageKind.SEARCH | StageKind.CALIBRATE | StageKind.QUANTIZE:
            entries = (
                i
                for i, entry in enumerate(pipeline.quantize)
                if stage.variant in (entry.name, *entry.variant_names())
            )
            return ("quantize", next(entries, 0), "method")
        case StageKind.SCORE | StageKind.BENCHMARK | StageKind.GATE:
            return ("benchmark", "targets", pipeline.benchmark.targets.index(stage.target or ""))
        case StageKind.DEPLOY:
            endpoint = binding(stage)[0].endpoint
            return (
                "deploy",
                [entry.endpoint for entry in pipeline.deploy].index(endpoint),
                "provider",
            )
        case _:
            return ("register",)


def list_capabilities(project: Project, entry: Deploy) -> frozenset[str]:
    """Return the capabilities of an endpoint's provider and metrics source."""
    provider = project.context.provider(entry.provider)
    able = provider.capabilities(entry.options)
    metrics = entry.metrics
    if metrics is None or metrics.source not in plugins.names("metrics"):
        return able
    try:
        source: MetricsSource = plugins.load("metrics", metrics.source, metrics.options)
    except UserError:  # Another check reports invalid options.
        return able
    offered = source.capabilities()
    # The endpoint itself supplies shadow copies, feedback and cold starts. Another metrics source
    # can report them only if the endpoint has these capabilities.
    return (able - provider.metrics(entry.options).capabilities()) | (
        offered - ({"shadow", "feedback", "cold_starts"} - able)
    )


def describe_rollouts(project: Project, pipeline: Pipeline) -> list[str]:
    """Return notes on what a pipeline's rollouts require, for the file's author."""
    if not any(entry.rollout.is_analyzed for entry in pipeline.deploy):
        return []
    from onnx_ops.statistics.rollout.judge import describe_policy

    return [
        f"{entry.endpoint}: {note}"
        for entry in pipeline.deploy
        for note in describe_policy(entry.rollout, list_capabilities(project, entry))
    ]


def prepare(
    project: Project,
    file: Path,
    *,
    overrides: Sequence[str] = (),
    until: StageKind | None = None,
    offline: bool = False,
) -> PreparedPipeline:
    """Check a pipeline file and plan its stages.

    Args:
        offline: whether the plan is only shown. An unpinned remote model is then not requested, and
            is treated as changed.
    """
    from onnx_ops.pipeline import plan
    from onnx_ops.pipeline.probe import OfflineProbe, ProjectProbe, needs_request
    from onnx_ops.pipeline.stage_settings import apply_default_pools

    checked = check(project, file, overrides)
    pipeline = checked.pipeline
    files = project.targets
    targets = {name: files.load(name) for name in pipeline.benchmark.targets}
    probe = OfflineProbe(project.context) if offline else ProjectProbe(project.context)
    planned = plan(pipeline, targets, probe, until=until)
    planned = apply_default_pools(planned, project.settings.default_pools)
    notes = checked.notes
    if offline:
        notes += tuple(f"a run is refused: {error}" for error in _list_refused(project, planned))
    if offline and pipeline.model and needs_request(pipeline.model):
        notes += (
            f"only a run checks whether {pipeline.model} has changed; this plan assumes a change",
        )
    return PreparedPipeline(
        pipeline=pipeline, targets=targets, plan=planned, notes=notes, overridden=bool(overrides)
    )


def prepare_release(
    project: Project,
    file: Path,
    folder: Path,
    *,
    overrides: Sequence[str] = (),
    until: StageKind | None = None,
) -> PreparedPipeline:
    """Plan the gates and the release of a pipeline that was evaluated elsewhere.

    The evaluation is read from a folder. Neither code of the user nor data is loaded.

    Raises:
        ConfigError: the file has problems.
        UserError: the file cannot be read, or the folder lacks an evaluation.
        CorruptStateError: a file of the evaluation is damaged.
        RefusedError: the evaluation belongs to another commit or pipeline file, or a measurement is
            that of another variant, target or file.
    """
    from onnx_ops.app.context import resolve_commit
    from onnx_ops.app.hand_over import adopt, read_evaluation
    from onnx_ops.pipeline import plan
    from onnx_ops.pipeline.probe import ReleaseProbe

    checked = check(project, file, overrides, static=True)
    pipeline, store = checked.pipeline, project.context.store
    evaluation = read_evaluation(folder, resolve_commit(project.settings.root, "HEAD"), store)
    targets = {name: project.targets.load(name) for name in pipeline.benchmark.targets}
    planned = plan(
        pipeline,
        targets,
        ReleaseProbe(project.context, signing=project.settings.signing),
        until=until,
    )
    return PreparedPipeline(
        pipeline=pipeline,
        targets=targets,
        plan=adopt(evaluation, pipeline, planned, store),
        notes=checked.notes,
        overridden=bool(overrides),
        evaluation=evaluation,
    )


def write_evaluation(
    project: Project, prepared: PreparedPipeline, result: RunResult, folder: Path
) -> None:
    """Write the stages of a run before its gates, for a release on another machine.

    `prepare_release` reads them there.

    Raises:
        UserError: the folder has content, or is a file.
    """
    from onnx_ops.app import hand_over
    from onnx_ops.app.context import resolve_commit

    settings = project.settings
    commit, shared = resolve_commit(settings.root, "HEAD"), "://" in settings.store
    hand_over.write_evaluation(
        folder, prepared.pipeline, result, commit, project.context.store, shared=shared
    )


def require_packages(project: Project, plan: Plan) -> None:
    """Raise MissingPackageError if a plan needs packages that are not installed here.

    The check is made before any stage of the plan starts.
    """
    if needed := _missing_packages(project, plan):
        missing = [name for _, names in needed for name in names]
        why = "; ".join(f"{stage.id} needs {', '.join(names)}" for stage, names in needed)
        raise plugins.missing_package(*missing, where=f"pipeline {plan.pipeline}", why=why)


def _missing_packages(project: Project, plan: Plan) -> list[tuple[Stage, list[str]]]:
    """Return the packages that are not installed, with the stages that need them.

    Each package is listed only with the first stage that needs it.
    """
    seen: set[str] = set()
    needed = []
    for stage in plan.stages:
        missing = [
            name for name in plugins.absent(_list_packages(project, stage)) if name not in seen
        ]
        seen.update(missing)
        needed += [(stage, missing)] if missing else []
    return needed


def _list_packages(project: Project, stage: Stage) -> Iterator[str]:
    """Yield the distributions that a stage needs here, installed or missing.

    For the tools of a stage, only missing distributions are yielded.
    """
    from onnx_ops.adapters.data.tables import find_table_suffix
    from onnx_ops.app.handler import RELEASE, binding
    from onnx_ops.domain.plan import StageKind
    from onnx_ops.pipeline.stage_settings import get_pool

    settings: Mapping[str, Any] = stage.settings
    yield from (name for name, version in stage.tools.items() if version == plugins.MISSING)
    if stage.kind in (StageKind.DATA, StageKind.TAGS):
        section = settings["section"]
        path = str(section.get("file") or section.get("options", {}).get("path", ""))
        if find_table_suffix(path) or find_table_suffix(settings.get("tags", "")):
            yield "pyarrow"
    compared = stage.kind is StageKind.BENCHMARK and settings["model"]
    if compared or stage.kind is StageKind.REGISTER or stage.kind in RELEASE:
        yield from plugins.EXTRAS["mlflow"]
    if stage.kind is StageKind.DEPLOY:
        yield from plugins.tools(project.context.provider(binding(stage)[0].provider))
    if get_pool(stage):
        yield from plugins.EXTRAS["prefect"]


def _ignore_state(project: Project) -> None:
    """Exclude a state folder within the project from version control.

    A separate `.gitignore` is written into the state folder.
    """
    settings = project.settings
    file = settings.state / ".gitignore"
    if settings.state.is_relative_to(settings.root) and not file.exists():
        settings.state.mkdir(parents=True, exist_ok=True)
        file.write_text("*\n", encoding="utf-8")


def execute(
    project: Project,
    prepared: PreparedPipeline,
    *,
    no_cache: Collection[StageKind] = (),
    executor: Executor | None = None,
    observer: Observer | None = None,
    actor: str = "",
    abandon: str = "",
    jobs: int = 1,
    base: BaseRelease | None = None,
) -> RunResult:
    """Run a plan, and compare the release with `base` in the report.

    Up to `jobs` stages run concurrently. The measurements are recorded under the commit if all
    values are those of the file, and all tracked files those of the commit. An error of this
    recording is ignored; later comparisons then report that no measurements are recorded.

    Args:
        no_cache: kinds of stages whose cached results are ignored.
        actor: user recorded in the ledger (default: the user of this process).
        abandon: reason, recorded in the ledger, for leaving endpoints running that the file no
            longer names or has moved.
        base: release to compare with, if any.

    Raises:
        MissingPackageError: a package that a stage needs is not installed; nothing was done.
        RefusedError: an endpoint would continue to run without a pipeline, and `abandon` is empty.
        ConflictError: another process is changing an endpoint that is abandoned.
        MissingKeyError: no key on this machine can sign that an endpoint is abandoned.
        UserError: an existing endpoint cannot be changed as the file declares.
        StorageError: the disk is full, or a file or folder cannot be used.
    """
    from onnx_ops.app.handler import binding
    from onnx_ops.app.results import record_commit, summarize
    from onnx_ops.domain.plan import StageKind
    from onnx_ops.pipeline import InlineExecutor, run
    from onnx_ops.pipeline.stage_settings import get_pool
    from onnx_ops.release.promote import abandon_dropped, require_no_orphans

    own = _list_own_stages(prepared)
    require_packages(project, replace(prepared.plan, stages=own))
    _ignore_state(project)
    name, stages = prepared.plan.pipeline, prepared.plan.stages
    releases = any(stage.kind is StageKind.REGISTER for stage in stages)
    configs = [binding(stage)[0] for stage in stages if stage.kind is StageKind.DEPLOY]
    if releases:
        require_no_orphans(project.context, name, configs, abandon=abandon)
    planned = _add_release_hints(project, prepared.plan, base) if releases else prepared.plan
    if any(map(get_pool, own)):  # The pools are prepared while earlier stages run on this machine.
        threading.Thread(target=project.running().pools.prepare, daemon=True).start()
    handler = project.handler(actor, observer, abandon, no_cache, project.durations(name), planned)
    result = run(
        planned,
        handler=_choose_handler(prepared, handler),
        executor=executor or InlineExecutor(),
        observer=observer or Observer(),
        clock=project.context.clock,
        no_cache=no_cache,
        jobs=jobs,
    )
    if releases and abandon and _has_deployed(result):
        abandon_dropped(project.context, name, configs, reason=abandon, actor=actor)
    if not prepared.overridden:
        summary = summarize(prepared.pipeline, result, project.context)
        with suppress(OnnxOpsError, OSError):
            record_commit(project.settings.root, project.context.store, summary)
    return result


def _list_own_stages(prepared: PreparedPipeline) -> tuple[Stage, ...]:
    """Return the stages of a plan that are not part of an evaluation."""
    evaluated = () if prepared.evaluation is None else prepared.evaluation.stages
    done = {stage.id for stage in evaluated}
    return tuple(stage for stage in prepared.plan.stages if stage.id not in done)


def _add_release_hints(project: Project, plan: Plan, base: BaseRelease | None) -> Plan:
    """Add the provenance and the base of the release to its register stage.

    The provenance is the author, time and commit of the release. The base is the release with which
    it is compared.
    """
    from onnx_ops.app.results import read_provenance
    from onnx_ops.domain.plan import StageKind
    from onnx_ops.pipeline.stages.register import BASE, PROVENANCE

    provenance = read_provenance(project.settings.root, project.context.clock.now(), os.environ)
    hints = {PROVENANCE: codec.to_json(provenance)}
    if base is not None:
        hints[BASE] = codec.to_json(base)
    stages = (
        replace(stage, hints={**stage.hints, **hints})
        if stage.kind is StageKind.REGISTER
        else stage
        for stage in plan.stages
    )
    return replace(plan, stages=tuple(stages))


def _has_deployed(result: RunResult) -> bool:
    """Return whether all deploy stages of a run are done or cached."""
    from onnx_ops.domain.plan import StageKind, StageStatus

    served = (StageStatus.DONE, StageStatus.CACHED)
    deploys = [stage for stage in result.plan.stages if stage.kind is StageKind.DEPLOY]
    return all(result.outcomes[stage.id].status in served for stage in deploys)


def _choose_handler(prepared: PreparedPipeline, handler: StageHandler) -> Handler:
    """Return the handler of a plan.

    If another job ran the stages before the gates, it is a `ReleaseHandler`.
    """
    if prepared.evaluation is None:
        return handler
    from onnx_ops.app.hand_over import ReleaseHandler

    return ReleaseHandler(handler, prepared.evaluation)


_WORST_FIRST = (2, 5, 1, 4, 3)
"""Exit codes of several runs, in order of precedence.

The codes mean: wrong input, refused, a gate failed, the environment failed, inconclusive.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineResult:
    """Result of one pipeline in a run of several.

    A finished run has a summary and the errors of its stages. `refused` is the error that prevented
    or stopped the run.
    """

    file: Path
    summary: Summary | None = None
    errors: Mapping[str, OnnxOpsError] = field(default_factory=dict)
    refused: OnnxOpsError | None = None

    @property
    def exit_code(self) -> int:
        """Exit code of `onnx-ops run` with this pipeline file."""
        if self.refused is not None:
            return self.refused.exit_code
        return 0 if self.summary is None else self.summary.exit_code


def run_files(
    project: Project,
    files: Iterable[Path],
    *,
    jobs: int = 1,
    overrides: Sequence[str] = (),
    until: StageKind | None = None,
    no_cache: Collection[StageKind] = (),
    abandon: str = "",
    observe: Callable[[], Observer | None] = lambda: None,
    base: str = "",
) -> Iterator[PipelineResult]:
    """Plan and run every file, up to `jobs` of them concurrently.

    Results are yielded in the order of the files. After an invalid or failed file, the other files
    still run. Yielded results and finished plans are not kept in memory.

    Args:
        observe: returns an observer for each run.
        base: tag, commit or branch whose recorded results are compared with those of each run;
            by default the target branch of the pull request.
    """
    from onnx_ops.app.results import find_run_base, summarize
    from onnx_ops.pipeline import ordered_map

    root, store = project.settings.root, project.context.store

    def led(file: Path) -> PipelineResult:
        try:
            prepared = prepare(project, file, overrides=overrides, until=until)
            result = execute(
                project,
                prepared,
                no_cache=no_cache,
                observer=observe(),
                abandon=abandon,
                base=find_run_base(root, store, prepared.pipeline.pipeline, os.environ, base),
            )
            summary = summarize(prepared.pipeline, result, project.context)
        except OnnxOpsError as error:
            return PipelineResult(file=file, refused=error)
        return PipelineResult(file=file, summary=summary, errors=result.errors)

    return ordered_map(jobs, led, files)


def worst_exit_code(codes: Iterable[int]) -> int:
    """Return the exit code with the highest precedence among those of several runs."""
    distinct = set(codes)
    return next((code for code in _WORST_FIRST if code in distinct), max(distinct, default=0))
