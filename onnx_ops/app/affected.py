"""Find the pipelines that a change affects.

A pipeline depends on its files, targets, data, models, and the code that they import.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from onnx_ops.app.context import Project, ask_git, resolve_commit
from onnx_ops.app.project import check
from onnx_ops.config.folders import TARGETS, find_config_folder, find_pipelines
from onnx_ops.config.settings import FILE
from onnx_ops.config.substitution import PARAMETERS_FILE
from onnx_ops.domain.gate import TaskMetricGate
from onnx_ops.domain.pipeline import FileData, Pipeline, SystemComparison
from onnx_ops.domain.quantization import AUTO
from onnx_ops.errors import OnnxOpsError, UserError
from onnx_ops.onnx_graph.files import list_external_names
from onnx_ops.pipeline import collect_user_code, find_referenced_modules
from onnx_ops.pipeline.stages.data import get_source_name


@dataclass(frozen=True, slots=True, kw_only=True)
class Affected:
    """Affected pipeline file, and the changed paths on which it depends.

    The file is relative to the project's root. `problem` is the error that occurred when the file
    was checked or its dependencies were listed. The dependencies are then unknown, so the pipeline
    is affected by every change.
    """

    file: str
    because: tuple[str, ...]
    problem: str = ""


def affected(project: Project, changed: Collection[str]) -> tuple[Affected, ...]:
    """Return the pipelines that depend on a changed path.

    Args:
        project: the project whose pipelines `find_pipelines` lists.
        changed: paths relative to the project's root; they need not exist any more.
    """
    root = project.settings.root
    pipelines = []
    for path in find_pipelines(root):
        name, problem = path.relative_to(root).as_posix(), ""
        try:
            pipeline = check(project, path, static=True).pipeline
            rests_on = frozenset(
                place
                for source in _list_sources(project, name, pipeline)
                for place in _locate(source, root)
            )
        except OnnxOpsError as error:
            rests_on, problem = frozenset((name, *changed)), str(error)
        touched = (
            path
            for path in changed
            if not rests_on.isdisjoint([path, *map(str, PurePosixPath(path).parents)])
        )
        if because := tuple(sorted(touched)):
            pipelines.append(Affected(file=name, because=because, problem=problem))
    return tuple(pipelines)


def changed_since(root: Path, base: str) -> frozenset[str]:
    """Return the paths that changed since this branch diverged from `base`.

    Committed and uncommitted changes are included, and untracked files that git does not ignore.
    Paths are relative to the project's root. Without a `base`, all tracked and untracked paths are
    returned, except those that git ignores.

    Raises:
        UserError: git is missing, or cannot open a repository. Or `base` does not exist.
    """
    if not ask_git(root, "rev-parse", "--git-dir", may_fail=True):
        raise UserError(
            "git is not installed, or cannot open a repository in this folder",
            where=str(root),
            remedy="Install git, and run the command in a checkout of the project.",
        )
    if not base:
        listed = ask_git(root, "ls-files", "--cached", "--others", "--exclude-standard", "-z")
        return frozenset(name for name in listed.split("\0") if name)
    if not resolve_commit(root, base):
        raise UserError(
            f"git found no commit {base!r}",
            where=str(root),
            remedy="Name a branch, tag or commit. In a shallow clone, fetch the history first "
            "(in GitHub's checkout action: `fetch-depth: 0`).",
        )
    fork = (
        ask_git(root, "merge-base", "--end-of-options", base, "HEAD", may_fail=True).strip() or base
    )
    listed = ask_git(root, "diff", "--name-only", "--no-renames", "--relative", "-z", fork, "--")
    loose = ask_git(root, "ls-files", "--others", "--exclude-standard", "-z")
    return frozenset(name for name in (listed + loose).split("\0") if name)


def _list_sources(project: Project, name: str, pipeline: Pipeline) -> Iterator[str]:
    """Yield the paths on which the results of the pipeline depend.

    Paths are absolute or relative to the project's root. A folder includes all files below it. For
    a large file, the repository can contain a pointer file instead, such as `data.npz.dvc`.
    """
    root = project.settings.root
    yield from (name, FILE)
    yield from _list_target_files(project, pipeline)
    yield from _list_data_files(project, pipeline)
    if pipeline.parameters:
        yield PARAMETERS_FILE
    yield from _list_model_files(root, pipeline)
    if table := pipeline.export.translations:
        yield from collect_user_code((table,), root).files
    if pipeline.system is not None:
        yield from _list_system_files(root, pipeline.system)
    for entry in pipeline.quantize:
        if entry.method != AUTO:
            yield from project.context.optimizer(entry.method, entry.env).files(entry)
    for gate in pipeline.gates:
        if isinstance(gate, TaskMetricGate) and (functions := gate.definition().functions):
            yield from collect_user_code(tuple(functions), root).files
    if (slices := pipeline.slices) is not None:
        yield from (slices.tags, f"{slices.tags}.dvc") if slices.tags else ()
        yield from collect_user_code((slices.use,), root).files if slices.use else ()


def _list_target_files(project: Project, pipeline: Pipeline) -> Iterator[str]:
    """Yield the files of targets, and the targets' libraries of custom operators.

    For each target, the path of its present file is yielded, and its path in the project.
    """
    targets = find_config_folder(project.settings.root) / TARGETS
    yield from ((targets / f"{target}.yaml").as_posix() for target in pipeline.benchmark.targets)
    for target in pipeline.benchmark.targets:
        if (file := project.targets.path(target)) is not None:
            yield str(file)
        # The library of a missing package is not a file of the project.
        yield from (
            library.path for library in project.targets.load(target, machine=False).custom_ops
        )


def _list_data_files(project: Project, pipeline: Pipeline) -> Iterator[str]:
    for section in pipeline.data.values():
        source = project.context.source(get_source_name(section))
        if isinstance(section, FileData):
            for file in filter(None, (section.file, section.annotations)):
                yield from (file, f"{file}.dvc")
        else:
            yield from source.list_dependencies(section)


def _list_model_files(root: Path, pipeline: Pipeline) -> Iterator[str]:
    """Yield the model's file, and the code that defines, exports or trains the model."""
    if pipeline.model:
        yield from _list_with_weights(root, pipeline.model)
        if pipeline.export.framework != "onnx":  # An ONNX file uses no code of the project.
            yield from collect_user_code(
                find_referenced_modules(root / pipeline.model, root), root
            ).files
    if pipeline.train is not None:
        yield from collect_user_code((pipeline.train.run,), root, pipeline.train.depends).files


def _list_with_weights(root: Path, model: str) -> Iterator[str]:
    """Yield a model's path, those of its external data, and of pointer files to both."""
    names = [model]
    # The file can be a pointer, or be missing in this clone.
    with contextlib.suppress(UserError):
        if model.endswith(".onnx"):
            folder = Path(model).parent
            names += [(folder / name).as_posix() for name in list_external_names(root / model)]
    for name in names:
        yield from (name, f"{name}.dvc")


def _list_system_files(root: Path, section: SystemComparison) -> Iterator[str]:
    """Yield the raw inputs, the graphs and the code of the section `system`."""
    yield from (section.files, f"{section.files}.dvc")
    for _, graph in section.list_graphs():
        yield from _list_with_weights(root, graph)
    references = [reference for _, reference in section.list_functions()]
    yield from collect_user_code(references, root, section.depends).files


def _locate(path: str, root: Path) -> Iterator[str]:
    """Yield a path relative to the root, as written and then with links resolved.

    Paths outside the project are left out.
    """
    for place in map(Path, (os.path.normpath(root / path), os.path.realpath(root / path))):
        if place.is_relative_to(root):
            yield place.relative_to(root).as_posix()
