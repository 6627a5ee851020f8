"""Evaluate and release what a commit changes in the models of a repository.

The steps of a CI service call this module, and report its results.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from urllib.parse import unquote, urlsplit

from onnx_ops import codec
from onnx_ops.app.affected import Affected, affected, changed_since
from onnx_ops.app.context import Project, open_project
from onnx_ops.app.hand_over import remove_evaluation
from onnx_ops.app.project import (
    PreparedPipeline,
    execute,
    prepare,
    prepare_release,
    write_evaluation,
)
from onnx_ops.app.results import (
    evidence_of,
    export_commit,
    find_base,
    import_commits,
    read_base_branch,
    read_provenance,
    render_report,
    summarize,
)
from onnx_ops.config.settings import Settings
from onnx_ops.domain.decision import Verdict, combine_verdicts
from onnx_ops.domain.pipeline import Pipeline
from onnx_ops.domain.plan import StageKind
from onnx_ops.errors import (
    CorruptStateError,
    InfrastructureError,
    OnnxOpsError,
    RefusedError,
    UserError,
)
from onnx_ops.measure.paired_rows import compare_rows
from onnx_ops.pipeline import RunResult
from onnx_ops.reporting.comparison import base_comparisons, champion_comparisons, variant_rows
from onnx_ops.reporting.description import made_by
from onnx_ops.reporting.pull_request import Checked, find_contradiction, title
from onnx_ops.scratch import read_plain_file

RESULTS = "results.json"

Lines = Iterator[str]

_LARGEST = 16 << 20
"""Maximum size of the results in bytes.

The results have a few thousand bytes per variant and target.
"""

_COMMIT = re.compile(r"[0-9a-f]{7,64}")

_FAILURES = {UserError.exit_code, InfrastructureError.exit_code, RefusedError.exit_code}
"""Exit codes of runs that failed, regardless of their gate results."""


def parse_commit(text: object, where: str, *, remedy: str = "") -> str:
    """Return the commit hash that a CI service reports.

    Raises:
        UserError: the hash is invalid.
    """
    if isinstance(text, str) and _COMMIT.fullmatch(text):
        return text
    raise UserError(f"{str(text)[:80]!r} is not a commit", where=where, remedy=remedy)


def evaluate_change(
    folder: Path,
    base: str,
    *,
    hand_over: Path | None = None,
    metrics_folder: Path | None = None,
    records: bool = False,
) -> Lines:
    """Run every pipeline that the change since `base` affects, up to its gates.

    Yield lines that report the outcome. Afterwards, `folder` contains the results for the step that
    publishes them, and a report of each pipeline that ran.

    Args:
        base: the previous commit. If it is empty, every file is treated as changed.
        hand_over: folder for the evaluations with which `release_change` continues.
        metrics_folder: folder with the records of earlier commits, for comparisons without the
            project's store.
        records: whether `metrics_folder` gets the records of this commit too.
    """
    project = open_project()
    if metrics_folder is not None:
        import_commits(project.settings.root, project.context.store, metrics_folder)
    touched = affected(project, changed_since(project.settings.root, base))
    checked = [evaluate(project, one, folder, base, hand_over) for one in touched]
    yield from _report(folder, checked)
    if metrics_folder is not None and records:
        yield from _share_metrics(project, checked, metrics_folder)


def release_change(
    folder: Path,
    base: str,
    evaluated: Path,
    *,
    hosted: bool | None = None,
    metrics_folder: Path | None = None,
) -> Lines:
    """Sign, register and deploy what `evaluate_change` has evaluated.

    Yield lines that report the outcome. No code of the pipelines runs. The affected pipelines are
    determined again, not taken from the evaluation.

    Args:
        folder: folder for the results, as in `evaluate_change`.
        evaluated: folder with the results of `evaluate_change`, and with its evaluations.
        hosted: whether the CI service hosts the machine and removes it after the job; None outside
            a job.
        metrics_folder: folder that gets the records of this commit, for comparisons without the
            project's store.
    """
    project = open_project()
    root, store = project.settings.root, project.context.store
    if metrics_folder is not None:
        import_commits(root, store, metrics_folder)
    remedy = f"Run the step `evaluate` with `--folder {evaluated}` first."
    found = {one.file: one for one in read_results(evaluated, remedy=remedy)}
    touched = affected(project, changed_since(root, base))
    checked = [
        release(project, one, found.get(one.file), folder, base, evaluated, hosted=hosted)
        for one in touched
    ]
    yield from _report(folder, checked)
    if metrics_folder is not None:
        yield from _share_metrics(project, checked, metrics_folder)


def _share_metrics(project: Project, checked: Sequence[Checked], metrics_folder: Path) -> Lines:
    """Export the records of this commit; yield a line for each failed export.

    Each export is the record of one pipeline.
    """
    for name in sorted({one.pipeline for one in checked if one.pipeline}):
        try:
            export_commit(project.settings.root, project.context.store, name, metrics_folder)
        except (OnnxOpsError, OSError) as error:
            yield f"  the measurements of {name} were not exported for pull requests: {error}"


def _report(folder: Path, checked: Sequence[Checked]) -> Lines:
    """Write results, and yield lines that report them."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / RESULTS).write_bytes(codec.dumps(checked))
    for one in checked:
        yield f"{one.verdict.value.upper()} {one.file}"
        yield from (f"  {line}" for line in (*one.error.splitlines(), *one.withheld.splitlines()))
    yield title(checked)


def evaluate(
    project: Project, one: Affected, folder: Path, since: str, hand_over: Path | None = None
) -> Checked:
    """Run one pipeline up to its gates; write its report beside the results.

    `since` is the previous commit, or empty. If the pipeline cannot be run, the result has the
    error. With `hand_over`, the evaluation is written into a folder there. It replaces the
    evaluation of an earlier commit.
    """
    try:
        if hand_over is not None:
            # A failed evaluation must not leave that of an earlier commit for the release.
            remove_evaluation(hand_over / _name(one.file))
        if one.problem:
            return _describe_error(one, one.problem)
        prepared = prepare(project, project.settings.root / one.file, until=StageKind.GATE)
        checked, result = _execute(project, one, prepared, folder, since)
        if hand_over is not None:
            write_evaluation(project, prepared, result, hand_over / _name(one.file))
    except OnnxOpsError as error:
        return _describe_error(one, str(error))
    return checked


def release(
    project: Project,
    one: Affected,
    found: Checked | None,
    folder: Path,
    since: str,
    evaluated: Path,
    *,
    hosted: bool | None = None,
) -> Checked:
    """Release one pipeline as far as the runner allows, if it was evaluated.

    `found` is the result of the evaluation. `since` is the previous commit, or empty. The report of
    the pipeline is written beside the results. A release that would be lost with the job stops
    after the gates. If the pipeline cannot be released, the result has the error.
    """
    place = evaluated / _name(one.file)
    if one.problem or not place.is_dir():
        return _describe_error(
            one, one.problem or (found.error if found else "") or "It was not evaluated."
        )
    try:
        release_of = partial(prepare_release, project, project.settings.root / one.file, place)
        prepared = release_of()
        withheld = (
            ""
            if hosted is None
            else lost_with_job(project.settings, prepared.pipeline, hosted=hosted)
        )
        if withheld:
            prepared = release_of(until=StageKind.GATE)
        checked, _ = _execute(project, one, prepared, folder, since)
    except OnnxOpsError as error:
        return _describe_error(one, str(error))
    return replace(checked, withheld=withheld)


def _name(file: str) -> str:
    """Return the name of a pipeline's report, and of the folder with its evaluation."""
    return Path(file).stem


def _describe_error(one: Affected, error: str) -> Checked:
    return Checked(file=one.file, because=one.because, verdict=Verdict.ERROR, error=error)


def _execute(
    project: Project, one: Affected, prepared: PreparedPipeline, folder: Path, since: str
) -> tuple[Checked, RunResult]:
    """Run a plan, and write its report beside the results."""
    root, name = project.settings.root, prepared.pipeline.pipeline
    branch = read_base_branch(os.environ) or "the commit before"
    base = find_base(root, project.context.store, name, since, branch) if since else None
    result = execute(project, prepared, base=base)
    summary = summarize(prepared.pipeline, result, project.context)
    report = render_report(summary, project, os.environ, base)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{_name(one.file)}.html").write_text(report, encoding="utf-8")
    measured = tuple(evidence_of(summary, project.context.store).values())
    pairs = partial(compare_rows, project.context.store)
    made = read_provenance(root, project.context.clock.now(), os.environ)
    errors = [f"{stage}: {error}" for stage, error in result.errors.items()]
    verdicts = [choice.verdict for choice in summary.choices]
    if summary.exit_code in _FAILURES:
        verdicts.append(Verdict.ERROR)
    checked = Checked(
        file=one.file,
        because=one.because,
        pipeline=summary.pipeline,
        verdict=combine_verdicts(verdicts),
        choices=summary.choices,
        decisions=summary.decisions,
        comparisons=(
            *champion_comparisons(summary.choices, measured),
            *(() if base is None else base_comparisons(summary.choices, measured, base, pairs)),
        ),
        variants=variant_rows(summary.decisions, measured),
        made_by=made_by(made),
        error="\n".join(errors),
    )
    return checked, result


def lost_with_job(settings: Settings, pipeline: Pipeline, *, hosted: bool) -> str:
    """Return why a release from this runner would be lost; empty if it would be kept.

    A hosted runner keeps no file after the job. A self-hosted runner keeps files outside the
    checkout, which is cleaned for each job.
    """
    if pipeline.register is None:
        return ""
    places = {"registry": _local(settings.tracking_uri)}
    if pipeline.deploy:
        places["ledger"] = _local(settings.ledger)
    places |= {
        f"server of endpoint {entry.endpoint}": settings.endpoints
        for entry in pipeline.deploy
        if entry.provider == "local"
    }
    lost = [
        f"{what} "
        f"({place.relative_to(settings.root) if place.is_relative_to(settings.root) else place})"
        for what, place in places.items()
        if place is not None and (hosted or place.is_relative_to(settings.root))
    ]
    if not lost:
        return ""
    remedy = (
        "To release from here, set tracking_uri and ledger to services in a profile of "
        "onnx-ops.toml. Name the profile in the variable ONNX_OPS_PROFILE, "
        "and deploy to a provider that runs elsewhere."
        if hosted
        else "To release from here, set ONNX_OPS_STATE of this runner to a folder outside the "
        "checkout."
    )
    what = (
        "Nothing was registered or released, because these places lose their data after the job: "
        f"{', '.join(lost)}."
    )
    return f"{what}\n{remedy} See `onnx-ops docs github`."


def _local(place: str) -> Path | None:
    """Return the local path of a path, or of a file or SQLite URL; None for a service."""
    parts = urlsplit(place)
    match parts.scheme.partition("+")[0]:
        case "":
            return Path(place).absolute()
        case "file":
            return Path(unquote(parts.path))
        case "sqlite":
            return Path(unquote(parts.path).removeprefix("/")).absolute()
        case _:
            return None


def read_results(folder: Path, *, remedy: str) -> tuple[Checked, ...]:
    """Return the results that `evaluate_change` or `release_change` wrote to a folder.

    The results are not trusted, because code of a pull request was able to replace them.

    Args:
        remedy: remedy of the error for missing results.

    Raises:
        UserError: there are no results.
        CorruptStateError: the results are not a plain file, are too large, or contradict their
            schema or themselves.
    """
    where = str(folder / RESULTS)
    try:
        data = read_plain_file(folder / RESULTS, most=_LARGEST)
    except FileNotFoundError as error:
        raise UserError("there are no results", where=str(folder), remedy=remedy) from error
    checked = codec.loads(data, tuple[Checked, ...], where=where)
    if wrong := next(filter(None, map(find_contradiction, checked)), ""):
        raise CorruptStateError("the results contradict themselves", where=where, why=wrong)
    return checked
