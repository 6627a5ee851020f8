"""What a commit does to the models of a repository: judged here, told by the step of each service that runs checks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from onnx_ops import codec
from onnx_ops.domain.gate import Verdict, combine
from onnx_ops.domain.pipeline import StageKind
from onnx_ops.errors import EnvironmentFailure, OnnxOpsError, Refused, UserError
from onnx_ops.reporting.html import release_report
from onnx_ops.reporting.pull_request import Checked, title
from onnx_ops.wiring.affected import Affected, affected, changed_since
from onnx_ops.wiring.project import Project, execute, open_project, prepare
from onnx_ops.wiring.summary import Summary, evidence_of, summarise

RESULTS = "results.json"

_FAILURES = {UserError.exit_code, EnvironmentFailure.exit_code, Refused.exit_code}
"""A run that ends with one of these did not do what it should, whatever its gates say of the variants."""


def judge_change(folder: Path, base: str, until: StageKind | None) -> Iterator[str]:
    """Run every pipeline that the change since `base` touches; tells in lines what came of it.

    What came of each lies in `folder` afterwards: results for the step that publishes them, and a report of each.
    """
    folder.mkdir(parents=True, exist_ok=True)
    project = open_project()
    touched = affected(project, changed_since(project.settings.root, base))
    checked = [judged(project, one, until, folder) for one in touched]
    (folder / RESULTS).write_bytes(codec.dumps(checked))
    yield from (f"{one.verdict.value.upper()} {one.file}" for one in checked)
    yield title(checked)


def judged(project: Project, one: Affected, until: StageKind | None, folder: Path) -> Checked:
    """One pipeline run as far as the event allows; its report lies beside the results."""
    if one.problem:
        return Checked(file=one.file, because=one.because, verdict=Verdict.ERROR, error=one.problem)
    try:
        prepared = prepare(project, project.settings.root / one.file, until=until)
        result = execute(project, prepared)
        summary = summarise(prepared.pipeline, result, project.ports)
    except OnnxOpsError as error:
        return Checked(file=one.file, because=one.because, verdict=Verdict.ERROR, error=str(error))
    report = report_of(project, summary)
    (folder / f"{Path(one.file).stem}.html").write_text(report, encoding="utf-8")
    errors = [f"{stage}: {error}" for stage, error in result.errors.items()]
    verdicts = [choice.verdict for choice in summary.choices]
    if summary.exit_code in _FAILURES:
        verdicts.append(Verdict.ERROR)
    return Checked(
        file=one.file,
        because=one.because,
        verdict=combine(verdicts),
        choices=summary.choices,
        decisions=summary.decisions,
        error="\n".join(errors),
    )


def report_of(project: Project, summary: Summary) -> str:
    """The page about a release that is not registered yet, or never will be."""
    evidence = evidence_of(summary, project.ports.store)
    digests = {(e.variant, e.target): digest for digest, e in evidence.items()}
    versions = {} if summary.registration is None else summary.registration.versions
    return release_report(summary.decisions, tuple(evidence.values()), summary.choices, None, versions, digests=digests)


def results(folder: Path) -> tuple[Checked, ...]:
    """What `judge_change` left there.

    Raises:
        UserError: it has not run.
    """
    try:
        return codec.loads((folder / RESULTS).read_bytes(), tuple[Checked, ...])
    except FileNotFoundError as error:
        raise UserError("there are no results", where=str(folder), remedy="The step `run` comes first.") from error
