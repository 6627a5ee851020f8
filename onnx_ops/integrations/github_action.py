"""What the GitHub action does: run the pipelines that a commit touches, and say on the commit what came of it.

Two steps, so that the reports can be uploaded in between: `run` leaves its results and reports in a folder, `publish`
writes the job summary, one comment on the pull request, and a check whose conclusion is the verdict. Everything that
the event names (branches, titles, people) is data and never reaches a shell.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onnx_ops import codec
from onnx_ops.adapters.github import REPOSITORY, Repository, plain
from onnx_ops.domain.evidence import Evidence
from onnx_ops.domain.gate import Verdict, combine
from onnx_ops.domain.pipeline import StageKind
from onnx_ops.errors import OnnxOpsError, Refused, ServiceUnavailable, UserError
from onnx_ops.reporting.html import release_report
from onnx_ops.reporting.pull_request import Checked, overall, page, title
from onnx_ops.wiring.affected import Affected, affected, changed_since
from onnx_ops.wiring.project import Project, execute, open_project, prepare
from onnx_ops.wiring.summary import Summary, summarise

MARK = "<!-- onnx-ops: what this commit does to its models -->"
"""By it the one comment of a pull request is found again."""

CHECK = "onnx-ops"
RESULTS = "results.json"

_CONCLUSIONS = {
    None: "skipped",
    Verdict.PASS: "success",
    Verdict.INCONCLUSIVE: "neutral",
    Verdict.ERROR: "action_required",
    Verdict.FAIL: "failure",
}
"""A model that could not be measured has not failed: a person has to look why."""

_COMMIT = re.compile(r"[0-9a-f]{7,64}")
_NONE = re.compile(r"0+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """What happened: `base` is the commit before, empty for a new branch; `pull_request` its number, or None."""

    commit: str
    base: str
    pull_request: int | None

    @property
    def until(self) -> StageKind | None:
        """A pull request stops at its gates: only what is merged is registered."""
        return None if self.pull_request is None else StageKind.GATE


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code: of `run` 0 unless nothing could be done at all; of `publish` 1 for FAIL and ERROR."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("step", choices=("run", "publish"))
    parser.add_argument("--folder", type=Path, required=True, help="where results and reports lie")
    parser.add_argument("--since", default="", help="the commit before; that of the event if left out")
    parser.add_argument("--reports", default="", help="address of the uploaded reports")
    options = parser.parse_args(arguments)
    try:
        event = read_event(os.environ)
        if options.step == "run":
            return run(event, options.folder, since=options.since)
        return publish(event, options.folder, os.environ, reports=options.reports)
    except OnnxOpsError as error:
        _tell(f"::error title=onnx-ops::{_command_data(str(error))}")
        return error.exit_code


def read_event(environ: Mapping[str, str]) -> Event:
    """The event that started the workflow.

    Raises:
        UserError: this is no GitHub workflow.
    """
    try:
        document = json.loads(Path(environ["GITHUB_EVENT_PATH"]).read_text(encoding="utf-8"))
        commit = environ["GITHUB_SHA"]
    except (KeyError, OSError, ValueError) as error:
        raise UserError(
            "this is no run of a GitHub workflow", why=f"{type(error).__name__}: {error}", remedy="See docs/github.md."
        ) from error
    pull: Mapping[str, Any] = document.get("pull_request") or {}
    if pull:
        return Event(commit=_sha(pull["head"]["sha"]), base=_sha(pull["base"]["sha"]), pull_request=int(pull["number"]))
    before = str(document.get("before") or "")
    return Event(commit=_sha(commit), base="" if _NONE.fullmatch(before) else _sha(before), pull_request=None)


def run(event: Event, folder: Path, *, since: str = "") -> int:
    """Run every pipeline that the change touches; what came of each lies in `folder` afterwards."""
    folder.mkdir(parents=True, exist_ok=True)
    project = open_project()
    base = since or event.base or "HEAD~1"
    touched = affected(project, changed_since(project.settings.root, base))
    checked = [judged(project, one, event.until, folder) for one in touched]
    (folder / RESULTS).write_bytes(codec.dumps(checked))
    for one in checked:
        _tell(f"{one.verdict.value.upper()} {one.file}")
    _tell(title(checked))
    return 0


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
    verdicts = [choice.verdict for choice in summary.choices] + ([Verdict.ERROR] if summary.exit_code == 4 else [])
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
    store = project.ports.store
    stored = [
        outcome.manifest["evidence.json"]
        for outcome in summary.outcomes
        if outcome.manifest is not None and "evidence.json" in outcome.manifest
    ]
    evidence = {digest: codec.loads(store.read(digest), Evidence) for digest in stored}
    digests = {(e.variant, e.target): digest for digest, e in evidence.items()}
    versions = {} if summary.registration is None else summary.registration.versions
    return release_report(summary.decisions, tuple(evidence.values()), summary.choices, None, versions, digests=digests)


def publish(event: Event, folder: Path, environ: Mapping[str, str], *, reports: str = "") -> int:
    """Write summary, comment and check. What GitHub does not let this run write is said in the summary."""
    checked = _results(folder)
    told = page(checked, commit=event.commit, reports=reports)
    verdict, notes = overall(checked), []
    repository = _repository(environ)
    deeds: list[tuple[str, Callable[[], None]]] = [("check", lambda: _check(repository, event, checked, told))]
    if event.pull_request is not None:
        number = event.pull_request
        deeds.append(("comment", lambda: _comment(repository, number, told, wanted=bool(checked))))
    for what, deed in deeds:
        try:
            deed()
        except (Refused, ServiceUnavailable) as error:  # a fork's token may only read
            notes.append(f"The {what} could not be written: {error}")
    _summary(environ, "\n\n".join([told, *notes]))
    for note in notes:
        _tell(f"::warning title=onnx-ops::{_command_data(note)}")
    _output(environ, "verdict", "none" if verdict is None else verdict.value)
    return 1 if verdict in (Verdict.FAIL, Verdict.ERROR) else 0


def _results(folder: Path) -> tuple[Checked, ...]:
    try:
        return codec.loads((folder / RESULTS).read_bytes(), tuple[Checked, ...])
    except FileNotFoundError as error:
        raise UserError("there are no results", where=str(folder), remedy="The step `run` comes first.") from error


def _check(repository: Repository, event: Event, checked: Sequence[Checked], told: str) -> None:
    about = {
        "name": CHECK,
        "head_sha": event.commit,
        "status": "completed",
        "conclusion": _CONCLUSIONS[overall(checked)],
        "output": {"title": title(checked), "summary": told},
    }
    repository.ask("POST", "check-runs", about)


def _comment(repository: Repository, number: int, told: str, *, wanted: bool) -> None:
    """One comment a pull request, written anew by each commit; none where there never was anything to say."""
    body = {"body": f"{MARK}\n{told}"}
    for comment in repository.listed(f"issues/{number}/comments"):
        ours = (comment.get("user") or {}).get("type") == "Bot"  # whoever copies the mark keeps their comment
        if ours and str(comment.get("body") or "").startswith(MARK):
            repository.ask("PATCH", f"issues/comments/{int(comment['id'])}", body)
            return
    if wanted:
        repository.ask("POST", f"issues/{number}/comments", body)


def _repository(environ: Mapping[str, str]) -> Repository:
    name, token = environ.get("GITHUB_REPOSITORY", ""), environ.get("GITHUB_TOKEN", "").strip()
    if not REPOSITORY.fullmatch(name):
        raise UserError(f"{name!r} is no repository", where="GITHUB_REPOSITORY")
    if not token:
        raise UserError("there is no token", where="GITHUB_TOKEN", remedy="Give the step `${{ github.token }}`.")
    return Repository(name=name, token=lambda: plain(token, "GITHUB_TOKEN"))


def _summary(environ: Mapping[str, str], text: str) -> None:
    if path := environ.get("GITHUB_STEP_SUMMARY"):
        with Path(path).open("a", encoding="utf-8") as stream:
            stream.write(text)


def _output(environ: Mapping[str, str], name: str, value: str) -> None:
    if path := environ.get("GITHUB_OUTPUT"):
        with Path(path).open("a", encoding="utf-8") as stream:
            stream.write(f"{name}={value}\n")


def _sha(text: object) -> str:
    if not (isinstance(text, str) and _COMMIT.fullmatch(text)):
        raise UserError(f"{str(text)[:80]!r} is no commit", where="GITHUB_EVENT_PATH")
    return text


def _tell(line: str) -> None:
    sys.stdout.write(f"{line}\n")


def _command_data(text: str) -> str:
    """Text that cannot end the runner's command it stands in."""
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


if __name__ == "__main__":
    sys.exit(main())
