"""GitHub action that runs the pipelines that a commit affects.

Each step is a separate job. `evaluate` runs code of the repository without tokens and keys, and
writes its results and reports into a folder. `release` and `publish` run no code of the
repository: they read that folder as data. `release` signs, registers and deploys. `publish` writes
the job summary, one comment on the pull request, and a check whose conclusion is the verdict. The
commit and the pull request are read from the event of this job, never from the results. Names in
the event (branches, titles, people) are never passed to a shell.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import secrets
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onnx_ops.adapters.github import REPOSITORY, GitHubRepository, validate_token
from onnx_ops.app.context import open_project, resolve_commit
from onnx_ops.domain.decision import Verdict
from onnx_ops.errors import OnnxOpsError, RefusedError, ServiceUnavailableError, UserError
from onnx_ops.integrations.commits import (
    evaluate_change,
    parse_commit,
    read_results,
    release_change,
)
from onnx_ops.printable import show
from onnx_ops.reporting.formatting import markdown
from onnx_ops.reporting.pull_request import overall, page, title

MARK = "<!-- onnx-ops: what this commit does to its models -->"
"""First line of the action's comment on a pull request.

Later runs find the comment by this line.
"""

CHECK = "onnx-ops"

_CONCLUSIONS = {
    None: "skipped",
    Verdict.PASS: "success",
    Verdict.INCONCLUSIVE: "neutral",
    Verdict.ERROR: "action_required",
    Verdict.FAIL: "failure",
}
"""Conclusion of the GitHub check by verdict.

ERROR does not mean that a model failed: the judgement failed, and a person has to find the cause.
"""

_NONE = re.compile(r"0*")

_FAILURES = {
    "evaluate": "the commit could not be judged",
    "release": "the commit could not be released",
    "publish": "the results of the commit could not be published",
}
"""Heading of the summary by the step that could not be carried out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """The event of a workflow.

    For a pull request, `commit` is its head, and `base` is the head of its base branch. Otherwise,
    `base` is the branch's previous commit; it is empty if the event has none, as for a new branch.
    `pull_request` is the number of the pull request, or None.
    """

    commit: str
    base: str
    pull_request: int | None


def main(arguments: Sequence[str] | None = None) -> int:
    """Execute a step and return its exit code.

    `evaluate` and `release` return 0 for every verdict; `publish` returns 1 for FAIL and ERROR. A
    step that cannot be carried out returns the exit code of its error.
    """
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("step", choices=tuple(_FAILURES))
    parser.add_argument(
        "--folder", type=Path, required=True, help="folder of the results and reports"
    )
    parser.add_argument(
        "--since", default="", help="commit to compare with (default: the base of the event)"
    )
    parser.add_argument("--metrics", type=Path, help="folder with the metrics of earlier commits")
    parser.add_argument(
        "--evaluated", type=Path, help="folder of the step `evaluate`, for `release`"
    )
    parser.add_argument(
        "--record",
        action="store_true",
        help="for `evaluate`: write the metrics of this commit to --metrics, instead of results "
        "for `release`",
    )
    options = parser.parse_args(arguments)
    if (options.step == "release") != (options.evaluated is not None):
        parser.error("`release` requires --evaluated, and the other steps refuse it")
    try:
        event = read_event(os.environ)
        if options.step == "publish":
            return publish(event, options.folder, os.environ)
        return run(
            event,
            options.folder,
            options.evaluated,
            since=options.since,
            metrics_folder=options.metrics,
            records=options.record,
        )
    except OnnxOpsError as error:
        _print_line(f"::error title=onnx-ops::{_command_data(str(error))}")
        text = _describe_failure(_FAILURES[options.step], error)
        _append(os.environ, "GITHUB_STEP_SUMMARY", text)
        return error.exit_code


def read_event(environ: Mapping[str, str]) -> Event:
    """Return the workflow's event.

    Raises:
        UserError: this process does not run in a workflow, or the event lacks a valid commit.
    """
    variable = "GITHUB_EVENT_PATH"
    try:
        document = json.loads(Path(environ[variable]).read_text(encoding="utf-8"))
        commit = environ["GITHUB_SHA"]
    except (KeyError, OSError, ValueError) as error:
        raise UserError(
            "the event of the GitHub workflow could not be read",
            why=f"{type(error).__name__}: {error}",
            remedy="See `onnx-ops docs github`.",
        ) from error
    pull: Mapping[str, Any] = document.get("pull_request") or {}
    if pull:
        head, base = (parse_commit(pull[side]["sha"], variable) for side in ("head", "base"))
        return Event(commit=head, base=base, pull_request=int(pull["number"]))
    before = str(document.get("before") or "")
    base = "" if _NONE.fullmatch(before) else parse_commit(before, variable)
    return Event(commit=parse_commit(commit, variable), base=base, pull_request=None)


def run(
    event: Event,
    folder: Path,
    evaluated: Path | None,
    *,
    since: str = "",
    metrics_folder: Path | None = None,
    records: bool = False,
) -> int:
    """Evaluate every pipeline that the change affects, or release what was evaluated.

    `evaluated` is the folder of an evaluation to release. The results are written into `folder`. An
    evaluation of a pull request, or with `records`, writes nothing for a release. A release, or an
    evaluation with `records`, adds the metrics to `metrics_folder`.
    """
    root = open_project().settings.root
    # After a force push, the event's previous commit is not in the checkout. The first push of a
    # branch has no previous commit. In both cases, the parent of HEAD is used if it is known.
    base = since or next(
        (name for name in (event.base, "HEAD~1") if name and resolve_commit(root, name)), ""
    )
    if evaluated is not None:
        lines = release_change(
            folder, base, evaluated, hosted=is_hosted(os.environ), metrics_folder=metrics_folder
        )
    else:  # A pull request is only evaluated and never released.
        hand_over = folder if event.pull_request is None and not records else None
        lines = evaluate_change(
            folder, base, hand_over=hand_over, metrics_folder=metrics_folder, records=records
        )
    # The repository's code must not send commands to the runner through its output. The runner
    # accepts commands again after a random token, which that code cannot guess.
    word = secrets.token_hex(16)
    _print_line(f"::stop-commands::{word}")
    try:
        for line in lines:
            _print_line(line)
    finally:
        _print_line(f"::{word}::")
    return 0


def is_hosted(environ: Mapping[str, str]) -> bool | None:
    """Return whether GitHub hosts this machine; None outside a job.

    A machine that GitHub hosts is removed after the job.
    """
    if environ.get("GITHUB_ACTIONS") != "true":
        return None
    return environ.get("RUNNER_ENVIRONMENT") != "self-hosted"


def publish(event: Event, folder: Path, environ: Mapping[str, str]) -> int:
    """Write the summary, the comment and the check; return the exit code.

    The summary lists the parts that could not be written to GitHub. If the results are missing or
    invalid, the check reports this. Without a check, a pull request that requires it would wait
    forever.
    """
    verdict: Verdict | None = Verdict.ERROR
    try:
        remedy = "Run the step `evaluate` or `release` with the same `--folder` first."
        checked = read_results(folder, remedy=remedy)
    except OnnxOpsError as error:
        _print_line(f"::error title=onnx-ops::{_command_data(str(error))}")
        heading = "the commit has no valid results"
        text = _describe_failure(heading, error)
    else:
        verdict, heading = overall(checked), title(checked)
        reports, unreviewed = get_run_address(environ), event.pull_request is not None
        text = page(checked, commit=event.commit, reports=reports, unreviewed=unreviewed)
    notes = _write_to_github(event, environ, verdict, heading, text)
    _append(environ, "GITHUB_STEP_SUMMARY", "\n\n".join([text, *notes]))
    for note in notes:
        _print_line(f"::warning title=onnx-ops::{_command_data(note)}")
    _print_line(_command_data(heading))
    _append(environ, "GITHUB_OUTPUT", f"verdict={'none' if verdict is None else verdict.value}\n")
    return 1 if verdict in (Verdict.FAIL, Verdict.ERROR) else 0


def _write_to_github(
    event: Event, environ: Mapping[str, str], verdict: Verdict | None, heading: str, text: str
) -> list[str]:
    """Write the check and the comment; return a note on each failure."""
    notes = []
    check = {
        "name": CHECK,
        "head_sha": event.commit,
        "status": "completed",
        "conclusion": _CONCLUSIONS[verdict],
        "output": {"title": heading, "summary": text},
    }
    for what in ("check",) if event.pull_request is None else ("check", "comment"):
        try:
            repository = _open_repository(environ)
            if event.pull_request is not None and what == "comment":
                _write_comment(repository, event.pull_request, text, wanted=verdict is not None)
            else:
                repository.request("POST", "check-runs", check)
        except (
            RefusedError,
            ServiceUnavailableError,
            UserError,
        ) as error:
            # For example, the token of a pull request from a fork has no write permission.
            notes.append(f"The {what} could not be written: {error}")
    return notes


def get_run_address(environ: Mapping[str, str]) -> str:
    """Return the address of the workflow's run, which lists the reports.

    The text is empty if the address is unknown.
    """
    server, run = environ.get("GITHUB_SERVER_URL", ""), environ.get("GITHUB_RUN_ID", "")
    repository = environ.get("GITHUB_REPOSITORY", "")
    return (
        f"{server}/{repository}/actions/runs/{run}#artifacts"
        if server and repository and run
        else ""
    )


def _describe_failure(heading: str, error: OnnxOpsError) -> str:
    quoted = "\n".join(f"> {markdown(line)}  " for line in str(error).splitlines())
    return f"## onnx-ops: {heading}\n\n{quoted}\n"


def _write_comment(repository: GitHubRepository, number: int, text: str, *, wanted: bool) -> None:
    """Write the comment of a pull request, or update it if it exists.

    A new comment is written only if `wanted` is set.
    """
    body = {"body": f"{MARK}\n{text}"}
    for comment in repository.list_entries(f"issues/{number}/comments"):
        ours = (comment.get("user") or {}).get(
            "type"
            # The comment of a person can quote the mark, so only comments of bots are updated.
        ) == "Bot"
        if ours and str(comment.get("body") or "").startswith(MARK):
            repository.request("PATCH", f"issues/comments/{int(comment['id'])}", body)
            return
    if wanted:
        repository.request("POST", f"issues/{number}/comments", body)


def _open_repository(environ: Mapping[str, str]) -> GitHubRepository:
    name, token = environ.get("GITHUB_REPOSITORY", ""), environ.get("GITHUB_TOKEN", "").strip()
    if not REPOSITORY.fullmatch(name):
        raise UserError(f"{name!r} is not of the form OWNER/REPOSITORY", where="GITHUB_REPOSITORY")
    if not token:
        raise UserError(
            "no token was given",
            where="GITHUB_TOKEN",
            remedy="Set GITHUB_TOKEN: ${{ github.token }} in the step.",
        )
    return GitHubRepository(name=name, token=lambda: validate_token(token, "GITHUB_TOKEN"))


def _append(environ: Mapping[str, str], variable: str, text: str) -> None:
    """Append text to the file that the runner names in a variable."""
    if path := environ.get(variable):
        with Path(path).open("a", encoding="utf-8") as stream:
            stream.write(text)


def _print_line(line: str) -> None:
    """Print a line immediately, so that later output of child processes follows it."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def _command_data(text: str) -> str:
    """Escape text, so that it cannot end the runner's command that contains it."""
    return show(text).replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


if __name__ == "__main__":
    sys.exit(main())
