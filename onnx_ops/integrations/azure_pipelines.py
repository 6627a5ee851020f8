"""The Azure Pipelines steps: run the pipelines that a commit affects, and report the outcome on the build.

Two steps, as in GitHub: `run` leaves its results and reports in a folder, `publish` attaches the page to the build and
ends it by the verdict: FAIL and ERROR fail it, INCONCLUSIVE lets it end with issues. Names in the event (branches,
titles, people) are data: they come in variables, and are never printed as a command of the agent.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from onnx_ops.app.context import open_project, resolve_commit
from onnx_ops.domain.decision import Verdict
from onnx_ops.domain.pipeline import StageKind
from onnx_ops.errors import OnnxOpsError, UserError
from onnx_ops.integrations.commits import judge_change, parse_commit, results
from onnx_ops.reporting.pull_request import overall, page, title

PAGE = "onnx-ops.md"

_BEFORE = "HEAD~1"
_BRANCH = re.compile(r"refs/heads/(?P<name>[\w.][\w./-]*)", re.ASCII)


def main(arguments: Sequence[str] | None = None) -> int:
    """Execute a step and return its exit code.

    `run` returns 0 unless it could not start; `publish` returns 1 for FAIL and ERROR.
    """
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("step", choices=("run", "publish"))
    parser.add_argument("--folder", type=Path, required=True, help="where results and reports lie")
    parser.add_argument("--since", default="", help="the commit before; found by the event if left out")
    options = parser.parse_args(arguments)
    try:
        if options.step == "run":
            return run(options.folder, os.environ, since=options.since)
        return publish(options.folder, os.environ)
    except OnnxOpsError as error:
        _command("task.logissue type=error", str(error))
        return error.exit_code


def base_of(environ: Mapping[str, str]) -> str:
    """Return the base of the comparison: the target branch of a pull request, else the commit before.

    Raises:
        UserError: the branch name is invalid.
    """
    target = environ.get("SYSTEM_PULLREQUEST_TARGETBRANCH", "")
    if not target:
        return _BEFORE
    match = _BRANCH.fullmatch(target)
    if match is None or ".." in target:
        raise UserError(f"{target[:80]!r} is not a branch", where="SYSTEM_PULLREQUEST_TARGETBRANCH")
    return f"origin/{match['name']}"


def run(folder: Path, environ: Mapping[str, str], *, since: str = "") -> int:
    """Run every pipeline that the change affects; one of a pull request stops at its gates."""
    until = StageKind.GATE if environ.get("BUILD_REASON") == "PullRequest" else None
    base = since or base_of(environ)
    if base == _BEFORE and not resolve_commit(open_project().settings.root, base):  # a first push
        base = ""
    for line in judge_change(folder, base, until, hosted=is_hosted(environ)):
        _print_line(line)
    return 0


def is_hosted(environ: Mapping[str, str]) -> bool | None:
    """Return whether Microsoft hosts this machine, which then ends with the job; None outside a job.

    Agents that their owners set up have an empty Agent.CloudId (microsoft/azure-pipelines-agent#3984).
    """
    if environ.get("TF_BUILD") != "True":
        return None
    return environ.get("AGENT_CLOUDID") != ""


def publish(folder: Path, environ: Mapping[str, str]) -> int:
    """Attach the page to the build, and end it by the verdict."""
    variable = "BUILD_SOURCEVERSION"
    commit = parse_commit(environ.get(variable, ""), variable, remedy="See `onnx-ops docs scale`.")
    checked = results(folder)
    verdict = overall(checked)
    path = (folder / PAGE).resolve()
    path.write_text(page(checked, commit=commit), encoding="utf-8")
    _command("task.uploadsummary", str(path))
    _command("task.setvariable variable=verdict;isOutput=true", "none" if verdict is None else verdict.value)
    if verdict is Verdict.INCONCLUSIVE:
        _command("task.complete result=SucceededWithIssues;", title(checked))
    return 1 if verdict in (Verdict.FAIL, Verdict.ERROR) else 0


def _command(name: str, text: str) -> None:
    """Return a logging command of the agent, with its text on one line."""
    data = text.replace("%", "%AZP25").replace("\r", "%0D").replace("\n", "%0A")
    _print_line(f"##vso[{name}]{data}", command=True)


def _print_line(line: str, *, command: bool = False) -> None:
    """Print text, escaped against logging commands, which the agent detects anywhere in a line."""
    sys.stdout.write((line if command else line.replace("##", "# #")) + "\n")


if __name__ == "__main__":
    sys.exit(main())
