"""Many pipelines, some of them side by side: each as if it ran alone, and what two of them share is done once."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from onnx_ops.app.context import Project
from onnx_ops.app.project import execute, prepare
from onnx_ops.app.results import Summary, find_base, summarize
from onnx_ops.domain.pipeline import StageKind
from onnx_ops.errors import OnnxOpsError
from onnx_ops.pipeline import ordered_map
from onnx_ops.ports import Observer

_WORST_FIRST = (2, 5, 1, 4, 3)
"""Wrong input, refused, a gate failed, the environment failed, inconclusive: as one run orders them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineResult:
    """The outcome of one pipeline of several: a summary with the errors of its stages, or why it was not started."""

    file: Path
    summary: Summary | None = None
    errors: Mapping[str, OnnxOpsError] = field(default_factory=dict)
    refused: OnnxOpsError | None = None

    @property
    def exit_code(self) -> int:
        """Exit code that `onnx-ops run` of this file would have."""
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
    actor: str = "",
    base: str = "",
) -> Iterator[PipelineResult]:
    """Plan and run every file, at most `jobs` of them at once; results come in the order of the files.

    A file that is wrong, or fails, stops no other. Yielded results are not kept, nor are plans that have run.
    """
    root = project.settings.root

    def led(file: Path) -> PipelineResult:
        try:
            prepared = prepare(project, file, overrides=overrides, until=until)
            against = find_base(root, project.context.store, prepared.pipeline.pipeline, base) if base else None
            result = execute(
                project, prepared, no_cache=no_cache, observer=observe(), actor=actor, abandon=abandon, base=against
            )
            summary = summarize(prepared.pipeline, result, project.context)
        except OnnxOpsError as error:
            return PipelineResult(file=file, refused=error)
        return PipelineResult(file=file, summary=summary, errors=result.errors)

    return ordered_map(jobs, led, files)


def worst_exit_code(codes: Iterable[int]) -> int:
    """Return one exit code for several runs."""
    distinct = set(codes)
    return next((code for code in _WORST_FIRST if code in distinct), max(distinct, default=0))
