"""`onnx-ops run` of several pipeline files."""

from __future__ import annotations

import functools
from collections.abc import Collection, Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from onnx_ops import codec
from onnx_ops.app.batch import Ended, run_files, worst
from onnx_ops.app.project import Project
from onnx_ops.cli.common import print_result
from onnx_ops.cli.progress import RunProgress
from onnx_ops.cli.tables import choice_lines
from onnx_ops.cli.terminal import console, error_console, print_text, render_error
from onnx_ops.domain.pipeline import StageKind


def run_several(
    project: Project,
    files: Sequence[Path],
    *,
    jobs: int,
    overrides: Sequence[str],
    until: StageKind | None,
    fresh: Collection[StageKind],
    abandon: str,
    base: str,
    as_json: bool,
    quiet: bool,
) -> int:
    """Run them and tell what came of each, in the order of the files; the worst of their exit codes."""
    out, err = console(), error_console()
    make_observer = None if as_json or quiet else functools.partial(RunProgress, err, is_one_of_several=True)
    codes: list[int] = []
    documents: list[dict[str, object]] = []
    for ended in run_files(
        project,
        files,
        jobs=jobs,
        overrides=overrides,
        until=until,
        fresh=fresh,
        abandon=abandon,
        base=base,
        observe=make_observer or (lambda: None),
    ):
        codes.append(ended.exit_code)
        documents.append(_document(ended))
        if not as_json:
            _tell(out, ended)
    print_result(
        lambda: {"pipelines": documents, "exit_code": worst(codes)},
        lambda: out.print(f"{len(codes)} pipelines: {codes.count(0)} done, {len(codes) - codes.count(0)} not"),
        as_json=as_json,
    )
    return worst(codes)


def _document(ended: Ended) -> dict[str, object]:
    document: dict[str, object] = {"file": str(ended.file), "exit_code": ended.exit_code}
    if ended.refused is not None or ended.summary is None:
        return document | {"error": None if ended.refused is None else ended.refused.as_document()}
    errors = {stage: error.as_document() for stage, error in ended.errors.items()}
    return {**document, **codec.to_json(ended.summary), "errors": errors}


def _tell(out: Console, ended: Ended) -> None:
    if ended.summary is None:
        print_text(out, f"[bold]{escape(str(ended.file))}[/bold]")
        if ended.refused is not None:
            render_error(out, ended.refused, "not run")
        return
    done, known = len(ended.summary.executed), len(ended.summary.outcomes)
    out.print(f"[bold]{escape(str(ended.file))}[/bold] ({done} of {known} stages executed)")
    choice_lines(out, ended.summary, ended.errors)
