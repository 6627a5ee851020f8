"""A project: its settings, its outside world, and what can be done with its pipeline files.

What reads and runs pipelines is imported where it is used: a rollback needs none of it, and would be done before all of
that is read from disk.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onnx_ops import plugins
from onnx_ops.errors import UserError
from onnx_ops.ports import Executor, Observer, Ports
from onnx_ops.settings import Settings, load_settings
from onnx_ops.wiring import connect
from onnx_ops.wiring.turns import Quiet

if TYPE_CHECKING:
    from onnx_ops.domain.pipeline import Deploy, Pipeline, Plan, Stage, StageKind, StageOutcome
    from onnx_ops.domain.release import BaseRelease
    from onnx_ops.domain.target import Target
    from onnx_ops.engine import RunResult
    from onnx_ops.spec import TargetFiles
    from onnx_ops.wiring.handler import StageHandler


@dataclass(frozen=True)
class Project:
    """Settings and ports of one project, and what its pipelines that run side by side take turns by."""

    settings: Settings
    ports: Ports
    quiet: Quiet = field(default_factory=Quiet)
    releasing: AbstractContextManager[object] = field(default_factory=threading.RLock)

    @property
    def targets(self) -> TargetFiles:
        from onnx_ops.spec import TargetFiles

        return TargetFiles(self.settings.root, self.settings.shared_targets)

    def handler(self, actor: str = "", observer: Observer | None = None, abandon: str = "") -> StageHandler:
        """How stages are done; `actor` is answerable for what they release, `observer` hears how far they are, and
        `abandon` is why endpoints may be left behind."""
        from onnx_ops.engine import Silent
        from onnx_ops.wiring.child import Performer
        from onnx_ops.wiring.handler import StageHandler

        tell = (observer or Silent()).told
        return StageHandler(
            ports=self.ports,
            perform=Performer(settings=self.settings, ports=self.ports, tell=tell, quiet=self.quiet),
            actor=actor,
            abandon=abandon,
            claims=self.settings.claims,
            releasing=self.releasing,
        )


@dataclass(frozen=True)
class Prepared:
    """A checked pipeline, its targets and its plan. `overridden` says that values differ from the file's."""

    pipeline: Pipeline
    targets: Mapping[str, Target]
    plan: Plan
    overridden: bool = False


def open_project(start: Path | None = None) -> Project:
    """The project around a folder; raises UserError for a bad settings file."""
    settings = load_settings(start)
    return Project(settings=settings, ports=connect(settings))


def check(project: Project, file: Path, overrides: Sequence[str] = ()) -> Pipeline:
    """The pipeline in a file; raises SpecError with all of its problems."""
    from onnx_ops.spec import check_pipeline

    known = {kind: plugins.names(kind) for kind in plugins.KINDS}
    return check_pipeline(
        file,
        root=project.settings.root,
        plugins=known,
        settings=lambda provider, settings: project.ports.provider(provider).check(settings),
        metrics=_check_source,
        capabilities=lambda entry: abilities(project, entry),
        unservable=lambda entry, target: project.ports.provider(entry.provider).unservable(target),
        brought=lambda pipeline, targets: _brought(project, pipeline, targets),
        shared=project.settings.shared_targets,
        overrides=tuple(overrides),
        environ=os.environ,
    )


def _brought(project: Project, pipeline: Pipeline, targets: Mapping[str, Target]) -> Sequence[str]:
    """What a ready ONNX file of the project is refused for; one from elsewhere is looked at once it is fetched."""
    if (place := _ready_file(project, pipeline)) is None:
        return ()
    from onnx_ops.graph.brought import brought_problems

    try:
        return brought_problems(place, pipeline.export, targets.values())
    except UserError as error:
        return [str(error)]


def _ready_file(project: Project, pipeline: Pipeline) -> Path | None:
    """Return the path of the project's ready ONNX file; None for a model from elsewhere, or of a framework."""
    if pipeline.model is None or pipeline.export.framework != "onnx":
        return None
    place = project.settings.root / pipeline.model
    if "://" in pipeline.model or pipeline.model.startswith("models:/") or not place.exists():
        return None
    return place


def model_notes(project: Project, pipeline: Pipeline) -> list[str]:
    """List what the pipeline does with a ready file that its owner may not expect."""
    if (place := _ready_file(project, pipeline)) is None:
        return []
    from onnx_ops.graph.brought import brought_notes

    return [f"{pipeline.model}: {note}" for note in brought_notes(place)]


def abilities(project: Project, entry: Deploy) -> frozenset[str]:
    """What can be done for an endpoint, by its provider and by whatever counts its requests."""
    provider = project.ports.provider(entry.provider)
    able = provider.capabilities(entry.settings)
    settings = dict(entry.metrics)
    source = settings.pop("source", None)
    if source not in plugins.names("metrics"):
        return able
    try:
        told: frozenset[str] = plugins.load("metrics", str(source), settings).capabilities()
    except UserError:  # its settings are a problem of their own
        return able
    # Copies, clients' reports and cold starts come to be at the endpoint, whoever counts them.
    return (able - provider.metrics().capabilities()) | (told - ({"shadow", "outcomes", "cold_starts"} - able))


def _check_source(source: str, settings: Mapping[str, str | int | float | bool]) -> None:
    """Raises UserError for settings that this source of metrics does not take."""
    plugins.load("metrics", source, settings)


def rollout_notes(project: Project, pipeline: Pipeline) -> list[str]:
    """What its rollouts will take, for a person who writes the file."""
    if not any(entry.rollout.judged for entry in pipeline.deploy):
        return []
    from onnx_ops.analysis.rollout.notes import notes

    return [
        f"{entry.endpoint}: {note}"
        for entry in pipeline.deploy
        for note in notes(entry.rollout, abilities(project, entry))
    ]


def prepare(project: Project, file: Path, *, overrides: Sequence[str] = (), until: StageKind | None = None) -> Prepared:
    """Check a file and plan it.

    Raises:
        SpecError: the file has problems.
        UserError: something that it names does not exist.
    """
    from onnx_ops.engine import plan
    from onnx_ops.wiring.probe import ProjectProbe

    pipeline = check(project, file, overrides)
    files = project.targets
    targets = {name: files.load(name) for name in pipeline.benchmark.targets}
    planned = plan(pipeline, targets, ProjectProbe(project.ports), until=until)
    return Prepared(pipeline=pipeline, targets=targets, plan=planned, overridden=bool(overrides))


def foresee(
    project: Project, prepared: Prepared, fresh: Collection[StageKind] = ()
) -> Mapping[str, StageOutcome | None]:
    """What a run would find known, and what it would do."""
    from onnx_ops.engine import preview

    return preview(prepared.plan, handler=replace(project.handler(), confirms=False), fresh=fresh)


def require_packages(project: Project, plan: Plan) -> None:
    """Refuse a plan that needs packages which are not installed here, before any of its stages begins.

    Raises:
        MissingPackage: names all of them, the first stage that needs each, and the extras that bring them.
    """
    missing: list[str] = []
    reasons: list[str] = []
    for stage in plan.stages:
        if new := [name for name in plugins.absent(_packages(project, stage)) if name not in missing]:
            missing += new
            reasons.append(f"{stage.id} needs {', '.join(new)}")
    if missing:
        raise plugins.missing_package(*missing, where=f"pipeline {plan.pipeline}", why="; ".join(reasons))


def _packages(project: Project, stage: Stage) -> Iterator[str]:
    """Distributions that a stage needs in this installation, those that are missing among them."""
    from onnx_ops.domain.pipeline import StageKind
    from onnx_ops.wiring.handler import RELEASE, binding
    from onnx_ops.wiring.remote import pool_of

    settings: Mapping[str, Any] = stage.settings
    yield from (name for name, version in stage.tools.items() if version == plugins.MISSING)
    if stage.kind is StageKind.DATA:
        section = settings["section"]
        if str(section.get("file") or section.get("with", {}).get("path", "")).lower().endswith((".csv", ".parquet")):
            yield "pyarrow"
    compared = stage.kind is StageKind.BENCHMARK and settings["model"]
    if compared or stage.kind is StageKind.REGISTER or stage.kind in RELEASE:
        yield from plugins.EXTRAS["mlflow"]
    if stage.kind is StageKind.DEPLOY:
        yield from plugins.tools(project.ports.provider(binding(stage)[0].provider))
    if pool_of(stage):
        yield from plugins.EXTRAS["prefect"]


def execute(
    project: Project,
    prepared: Prepared,
    *,
    fresh: Collection[StageKind] = (),
    executor: Executor | None = None,
    observer: Observer | None = None,
    actor: str = "",
    abandon: str = "",
    jobs: int = 1,
    base: BaseRelease | None = None,
) -> RunResult:
    """Run a plan, `jobs` stages at once; `actor` is answerable for what it releases, by default whoever runs this
    process. The report compares the release with `base`, by default the
    branch that a pull request goes to. What a commit as it is came to is recorded under it.

    Raises:
        MissingPackage: a package that a stage needs is not installed; nothing was done.
        Refused: an endpoint would be left behind, and `abandon` gives no reason why it may.
        UserError: an endpoint that exists cannot be changed as the file says.
    """
    from onnx_ops.domain.pipeline import StageKind, StageStatus
    from onnx_ops.engine import InlineExecutor, Silent, run
    from onnx_ops.operations.abandon import leave_dropped, refuse_orphans
    from onnx_ops.wiring.handler import binding
    from onnx_ops.wiring.history import base_branch, find_base, record_commit
    from onnx_ops.wiring.summary import summarise

    require_packages(project, prepared.plan)
    name, stages = prepared.plan.pipeline, prepared.plan.stages
    releases = any(stage.kind is StageKind.REGISTER for stage in stages)
    deploys = [stage for stage in stages if stage.kind is StageKind.DEPLOY]
    configs = [binding(stage)[0] for stage in deploys]
    if releases:
        refuse_orphans(project.ports, name, configs, abandon=abandon)
    if base is None and (branch := base_branch(os.environ)):
        base = find_base(project.settings.root, project.ports.store, name, branch)
    result = run(
        _with_hints(project, prepared.plan, base),
        handler=project.handler(actor, observer, abandon),
        executor=executor or InlineExecutor(),
        observer=observer or Silent(),
        clock=project.ports.clock,
        fresh=fresh,
        jobs=jobs,
    )
    if not prepared.overridden:
        record_commit(project.settings.root, project.ports.store, summarise(prepared.pipeline, result, project.ports))
    served = (StageStatus.DONE, StageStatus.CACHED)
    if releases and abandon and all(result.outcomes[stage.id].status in served for stage in deploys):
        leave_dropped(project.ports, name, configs, reason=abandon, actor=actor)
    return result


def _with_hints(project: Project, plan: Plan, base: BaseRelease | None) -> Plan:
    """Return the plan whose registration knows who made the release, and what it is compared with."""
    from onnx_ops import codec
    from onnx_ops.domain.pipeline import StageKind
    from onnx_ops.stages.register import BASE, PROVENANCE
    from onnx_ops.wiring.history import provenance_of

    if not any(stage.kind is StageKind.REGISTER for stage in plan.stages):
        return plan
    made = provenance_of(project.settings.root, project.ports.clock.now(), os.environ)
    hints = {PROVENANCE: codec.to_json(made), **({} if base is None else {BASE: codec.to_json(base)})}
    stages = (
        replace(stage, hints={**stage.hints, **hints}) if stage.kind is StageKind.REGISTER else stage
        for stage in plan.stages
    )
    return replace(plan, stages=tuple(stages))
