"""The effect of a commit on the models of a repository, judged here and reported by the steps of a CI service."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from urllib.parse import unquote, urlsplit

from onnx_ops import codec
from onnx_ops.app.affected import Affected, affected, changed_since
from onnx_ops.app.context import Project, open_project
from onnx_ops.app.project import execute, prepare
from onnx_ops.app.results import (
    evidence_of,
    export_commit,
    find_base,
    import_commits,
    read_base_branch,
    read_provenance,
    summarize,
)
from onnx_ops.config.settings import Settings
from onnx_ops.domain.decision import Verdict, combine_verdicts
from onnx_ops.domain.pipeline import Pipeline, StageKind
from onnx_ops.errors import CorruptStateError, InfrastructureError, OnnxOpsError, RefusedError, UserError
from onnx_ops.measure.paired_rows import compare_rows
from onnx_ops.reporting.comparison import base_comparisons, champion_comparisons, variant_rows
from onnx_ops.reporting.description import made_by
from onnx_ops.reporting.html import release_report
from onnx_ops.reporting.pull_request import Checked, find_contradiction, title

RESULTS = "results.json"

_LARGEST = 16 << 20
"""Bytes of results; a pipeline has some thousand per variant and target."""

_COMMIT = re.compile(r"[0-9a-f]{7,64}")

_FAILURES = {UserError.exit_code, InfrastructureError.exit_code, RefusedError.exit_code}
"""A run that ends with one of these failed, regardless of its gate results."""


def parse_commit(text: object, where: str, *, remedy: str = "") -> str:
    """Return the commit hash that a CI service reports; raise UserError if it is invalid."""
    if isinstance(text, str) and _COMMIT.fullmatch(text):
        return text
    raise UserError(f"{str(text)[:80]!r} is not a commit", where=where, remedy=remedy)


def judge_change(
    folder: Path, base: str, until: StageKind | None, *, hosted: bool | None = None, figures: Path | None = None
) -> Iterator[str]:
    """Run every pipeline that the change since `base` affects; yield lines that report the outcome.

    The results for the step that publishes them are in `folder` afterwards, with a report of each pipeline.

    Args:
        base: the commit before; empty where there is none, so that every file counts as changed.
        hosted: whether the CI service hosts the machine, which then ends with the job; None outside a job.
        figures: folder that shares the records of earlier commits between jobs without the project's store: a job that
            stops early reads it, the others write it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    project = open_project()
    root, store = project.settings.root, project.context.store
    if figures is not None and until is not None:
        import_commits(root, store, figures)
    touched = affected(project, changed_since(root, base))
    checked = [judged(project, one, until, folder, base, hosted=hosted) for one in touched]
    (folder / RESULTS).write_bytes(codec.dumps(checked))
    if figures is not None and until is None:
        for name in sorted({one.pipeline for one in checked if one.pipeline}):
            try:
                export_commit(root, store, name, figures)
            except (OnnxOpsError, OSError) as error:
                yield f"  pull requests will not have the measurements of {name}: {error}"
    for one in checked:
        yield f"{one.verdict.value.upper()} {one.file}"
        yield from (f"  {line}" for line in (*one.error.splitlines(), *one.withheld.splitlines()))
    yield title(checked)


def judged(
    project: Project, one: Affected, until: StageKind | None, folder: Path, since: str, *, hosted: bool | None = None
) -> Checked:
    """Run one pipeline as far as the event and the runner allow; write its report beside the results."""
    if one.problem:
        return Checked(file=one.file, because=one.because, verdict=Verdict.ERROR, error=one.problem)
    withheld = ""
    try:
        prepared = prepare(project, project.settings.root / one.file, until=until)
        if until is None and hosted is not None:
            withheld = lost_with_job(project.settings, prepared.pipeline, hosted=hosted)
        if withheld:
            prepared = prepare(project, project.settings.root / one.file, until=StageKind.GATE)
        root, name = project.settings.root, prepared.pipeline.pipeline
        branch = read_base_branch(os.environ) or "the commit before"
        base = find_base(root, project.context.store, name, since, branch) if since else None
        result = execute(project, prepared, base=base)
        summary = summarize(prepared.pipeline, result, project.context)
    except OnnxOpsError as error:
        return Checked(file=one.file, because=one.because, verdict=Verdict.ERROR, error=str(error))
    evidence, pairs = evidence_of(summary, project.context.store), partial(compare_rows, project.context.store)
    measured, made = tuple(evidence.values()), read_provenance(root, project.context.clock.now(), os.environ)
    report = release_report(
        summary.decisions,
        measured,
        summary.choices,
        None,
        {} if summary.registration is None else summary.registration.versions,
        digests={(one.variant, one.target): digest for digest, one in evidence.items()},
        provenance=made,
        base=base,
        pairs=pairs,
    )
    (folder / f"{Path(one.file).stem}.html").write_text(report, encoding="utf-8")
    errors = [f"{stage}: {error}" for stage, error in result.errors.items()]
    verdicts = [choice.verdict for choice in summary.choices]
    if summary.exit_code in _FAILURES:
        verdicts.append(Verdict.ERROR)
    return Checked(
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
        withheld=withheld,
    )


def lost_with_job(settings: Settings, pipeline: Pipeline, *, hosted: bool) -> str:
    """Return why a release from this runner would be lost with the job; empty if it would be kept.

    A hosted runner keeps nothing. A self-hosted one keeps files outside the checkout; the checkout is cleaned for each
    job.
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
        f"{what} ({place.relative_to(settings.root) if place.is_relative_to(settings.root) else place})"
        for what, place in places.items()
        if place is not None and (hosted or place.is_relative_to(settings.root))
    ]
    if not lost:
        return ""
    remedy = (
        "To release from here, set tracking_uri and ledger to services in a profile of onnx-ops.toml, name the profile "
        "in the variable ONNX_OPS_PROFILE, and deploy to a provider that runs elsewhere."
        if hosted
        else "To release from here, set ONNX_OPS_STATE of this runner to a folder outside of the checkout."
    )
    what = f"Nothing was registered or released, because the job's disk would hold it: {', '.join(lost)}."
    return f"{what}\n{remedy} See `onnx-ops docs github` of onnx-ops."


def _local(place: str) -> Path | None:
    """Return the local path of a path, or of a URL of a file or SQLite; None for a service."""
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


def read_results(folder: Path) -> tuple[Checked, ...]:
    """Read the results of `judge_change`, which code of a pull request may have written in its place.

    Raises:
        UserError: there are none.
        CorruptStateError: they are no plain file, too large, not of their schema, or contradict themselves.
    """
    where = str(folder / RESULTS)
    try:
        file = os.open(folder / RESULTS, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError as error:
        raise UserError("there are no results", where=str(folder), remedy="The step `run` comes first.") from error
    except OSError as error:  # of a symbolic link
        raise CorruptStateError("not a plain file", where=where, why=error.strerror or str(error)) from error
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise CorruptStateError("not a plain file", where=where)
    with os.fdopen(file, "rb") as stream:
        data = stream.read(_LARGEST + 1)
    if len(data) > _LARGEST:
        raise CorruptStateError(f"larger than {_LARGEST >> 20} MiB", where=where)
    checked = codec.loads(data, tuple[Checked, ...], where=where)
    if wrong := next(filter(None, map(find_contradiction, checked)), ""):
        raise CorruptStateError("the results contradict themselves", where=where, why=wrong)
    return checked
