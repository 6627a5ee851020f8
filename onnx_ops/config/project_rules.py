"""Rules between a pipeline file and its environment.

The environment consists of targets, functions, installed plugins and other pipeline files.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from onnx_ops.config.binding import OptionsError
from onnx_ops.config.document import Issue, Loc
from onnx_ops.config.folders import find_pipelines, list_source_folders
from onnx_ops.config.functions import (
    check_arguments,
    explain_missing_function,
    find_module_file,
    find_source,
)
from onnx_ops.config.messages import did_you_mean, quote_names
from onnx_ops.config.reach import Reach
from onnx_ops.config.rules import Draft
from onnx_ops.config.targets import TargetFiles, profile_names
from onnx_ops.config.yaml_reader import format_path, read_file
from onnx_ops.domain.pinned_address import find_pin_problem
from onnx_ops.domain.pipeline import TRANSLATIONS, FileData, PluginData, SystemComparison
from onnx_ops.domain.quantities import Json
from onnx_ops.domain.quantization import AUTO
from onnx_ops.domain.target import CustomOps, Target
from onnx_ops.errors import ConfigError, NotFoundError, Problem, UserError
from onnx_ops.plugins import has_extra

OptionsCheck = Callable[[str, Mapping[str, Json]], object]
"""Function that raises UserError if a plugin cannot use the options.

An OptionsError has the location of each problem.
"""


def load_targets(
    draft: Draft, files: TargetFiles, *, machine: bool = True
) -> tuple[dict[str, Target], list[Problem]]:
    """Return the valid benchmarked targets, and the problems of the invalid ones.

    Both results leave out targets without a file.

    Args:
        machine: whether a package that this machine lacks is a problem.

    Raises:
        UserError: a target's file cannot be read, or the folder of shared targets is missing.
    """
    targets: dict[str, Target] = {}
    problems: list[Problem] = []
    for name in dict.fromkeys(draft.targets):
        try:
            targets[name] = files.load(name, machine=machine)
        except NotFoundError:
            continue  # `_check_target_names` reports the missing target.
        except ConfigError as error:
            problems += error.problems
    return targets, problems


def check_project(
    draft: Draft, files: TargetFiles, targets: Mapping[str, Target]
) -> Iterator[Issue]:
    """Yield missing targets and functions, and values that do not suit the targets.

    Parameters that do not suit the training function are also yielded.
    """
    yield from _check_target_names(draft, files)
    for name, target in targets.items():
        yield from _check_target(draft, name, target)
    for loc, variant in draft.quantize:
        if (
            variant.method == AUTO
            and variant.pool
            and variant.pool not in {one.pool for one in targets.values()}
        ):
            message = (
                f"no benchmarked target has the work pool '{variant.pool}', "
                "on which the search would time its variants"
            )
            yield Issue(
                (*loc, "pool"), f"{message}; name the pool of a target, or leave `pool` out"
            )
    for loc, entry in draft.deploy:
        if entry.target in targets and targets[entry.target].ort_format is not None:
            message = (
                f"target '{entry.target}' runs .ort files, and endpoints serve only .onnx files: "
                "deploy another target, or download the .ort file from the registry"
            )
            yield Issue((*loc, "target"), message)
    for loc, reference in _list_functions(draft):
        if problem := explain_missing_function(reference, files.root):
            yield Issue(loc, problem)
    if draft.train:
        for name, problem in check_arguments(draft.train.run, draft.train.with_, files.root):
            yield Issue(
                ("train", "with", name) if name else ("train", "run"), problem, on_key=bool(name)
            )


_PLUGIN_PATHS = {"dvc": "repo"}
"""Option that is a path, by shipped data source."""


def check_reach(
    draft: Draft, targets: Mapping[str, Target], reach: Reach, root: Path
) -> Iterator[Issue]:
    """Yield files, libraries and functions outside the project that are not allowed.

    The project's settings can allow them. Addresses that must be pinned, and are not, are also
    yielded.
    """
    for loc, text in _list_paths(draft, targets):
        if why := find_pin_problem(text) or reach.explain_path(text, root):
            yield Issue(loc, why)
    for loc, package in _list_packages(draft, targets):
        if why := reach.explain_library(package):
            yield Issue(loc, why)
    for loc, reference in _list_functions(draft):
        module = reference.partition(":")[0]
        is_own = any(find_module_file(module, folder) for folder in list_source_folders(root))
        # Another check reports a missing module.
        if is_own or find_source(module, root) is None:
            continue
        if why := reach.explain_package(module):
            yield Issue(loc, why)


def _list_paths(draft: Draft, targets: Mapping[str, Target]) -> Iterator[tuple[Loc, str]]:
    for name, section in draft.data.items():
        if isinstance(section, FileData):
            yield ("data", name, "file"), section.file
            if section.annotations:
                yield ("data", name, "annotations"), section.annotations
        elif (
            isinstance(section, PluginData)
            and (key := _PLUGIN_PATHS.get(section.source)) in section.options
        ):
            yield ("data", name, "options", str(key)), str(section.options[str(key)])
    for at, name in enumerate(draft.train.depends if draft.train else ()):
        yield ("train", "depends", at), name
    if draft.slices and draft.slices.tags:
        yield ("slices", "tags"), draft.slices.tags
    if draft.model:
        yield ("model",), draft.model
    if draft.system:
        yield from _list_system_paths(draft.system)
    for loc, library in _list_libraries(draft, targets):
        if not library.package:
            yield loc, library.path


def _list_packages(draft: Draft, targets: Mapping[str, Target]) -> Iterator[tuple[Loc, str]]:
    """Yield the packages whose libraries the targets load, with their locations.

    Packages that an extra of onnx-ops provides are left out, because the user has chosen to
    install this extra.
    """
    for loc, library in _list_libraries(draft, targets):
        if library.package and not has_extra(library.package):
            yield loc, library.package


def _list_libraries(draft: Draft, targets: Mapping[str, Target]) -> Iterator[tuple[Loc, CustomOps]]:
    """Yield the libraries of operators that the targets load, with their locations."""
    for at, name in enumerate(draft.targets):
        for library in targets[name].custom_ops if name in targets else ():
            yield ("benchmark", "targets", at), library


def _list_system_paths(section: SystemComparison) -> Iterator[tuple[Loc, str]]:
    yield ("system", "files"), section.files
    yield from ((("system", *loc), graph) for loc, graph in section.list_graphs())
    for at, name in enumerate(section.depends):
        yield ("system", "depends", at), name


def _list_functions(draft: Draft) -> Iterator[tuple[Loc, str]]:
    """Yield each function reference, `package.module:function`, with its location."""
    yield from draft.metric_functions
    if draft.slices and draft.slices.use:
        yield ("slices", "use"), draft.slices.use
    yield from draft.system_functions
    if draft.train and draft.train.run:
        yield ("train", "run"), draft.train.run
    if draft.export and draft.export.translations:
        yield ("export", "options", TRANSLATIONS), draft.export.translations


def _check_target_names(draft: Draft, files: TargetFiles) -> Iterator[Issue]:
    for index, name in enumerate(draft.targets):
        if files.path(name) is None:
            known = files.names()
            hint = did_you_mean(name, {*known, *profile_names()})
            hint = hint or f"; targets here: {quote_names(known) or 'only the shipped targets'}"
            yield Issue(("benchmark", "targets", index), f"no target is called '{name}'{hint}")


def _check_target(draft: Draft, name: str, target: Target) -> Iterator[Issue]:
    export = draft.export
    for key, limit in (
        (("opset", target.max_opset), ("ir_version", target.max_ir_version)) if export else ()
    ):
        if (value := getattr(export, key)) > limit:
            yield Issue(
                ("export", key),
                f"target '{name}' accepts {key} <= {limit}, not {value}; "
                f"set export.{key} to {limit} or lower",
            )
    if draft.objective.on(name) == "cost" and target.price_per_hour is None:
        remedy = f"set price_per_hour, e.g. 0.096, in the target file {name}.yaml"
        yield Issue(("objective",), f"objective: cost needs the price of '{name}': {remedy}")


def check_plugins(
    draft: Draft, targets: Mapping[str, Target], plugins: Mapping[str, Sequence[str]]
) -> Iterator[Issue]:
    """Yield names of plugins that are not installed.

    Only the kinds in `plugins` are checked.
    """
    names: list[tuple[str, Loc, str]] = [
        ("data", ("data", name, "source"), section.source)
        for name, section in draft.data.items()
        if isinstance(section, PluginData)
    ]
    if draft.export:
        names.append(("exporters", ("export", "framework"), draft.export.framework))
    names += [
        ("optimizers", (*loc, "method"), entry.method)
        for loc, entry in draft.quantize
        if entry.method != AUTO
    ]
    for index, name in enumerate(draft.targets):
        if name in targets:
            names.append(("runtimes", ("benchmark", "targets", index), targets[name].runtime))
    for loc, deployment in draft.deploy:
        names.append(("endpoints", (*loc, "provider"), deployment.provider))
        if deployment.metrics is not None:
            names.append(("metrics", (*loc, "metrics", "source"), deployment.metrics.source))
    for kind, loc, name in names:
        if name not in plugins.get(kind, (name,)):
            known = sorted(plugins[kind])
            hint = did_you_mean(name, known) or f"; installed: {', '.join(known) or 'none'}"
            yield Issue(loc, f"no {kind.removesuffix('s')} plugin is called '{name}'{hint}")


def check_endpoint_options(
    draft: Draft,
    plugins: Mapping[str, Sequence[str]],
    provider: OptionsCheck,
    source: OptionsCheck,
) -> Iterator[Issue]:
    """Yield options that a provider or a metrics source does not accept.

    Only the options of installed plugins are checked.
    """
    for loc, deployment in draft.deploy:
        if deployment.provider in plugins.get("endpoints", ()):
            read = partial(provider, deployment.provider, deployment.options)
            yield from check_plugin_options((*loc, "options"), read)
        metrics = deployment.metrics
        if metrics is not None and metrics.source in plugins.get("metrics", ()):
            # If no options are given, their problems are located at the section `metrics`. They are
            # then not reported if the section has a problem, from which they can follow.
            place = ("metrics", "options") if metrics.options else ("metrics",)
            read = partial(source, metrics.source, metrics.options)
            yield from check_plugin_options((*loc, *place), read)


def check_plugin_options(loc: Loc, read: Callable[[], object]) -> Iterator[Issue]:
    """Yield the problems that reading the options at `loc` raises.

    Each problem is located at the option that the plugin names, or at `loc` if it names none.
    """
    try:
        read()
    except OptionsError as error:
        for issue in error.issues:
            yield replace(issue, loc=(*loc, *issue.loc))
    except UserError as error:
        yield Issue(loc, error.without_place())


def check_other_files(draft: Draft, path: Path, root: Path) -> Iterator[Issue]:
    """Yield endpoints that another pipeline file of the project also declares."""
    taken: dict[str, Path] = {}
    for other in find_pipelines(root) if draft.deploy else ():
        with contextlib.suppress(OSError):
            # Another process can delete the file after it was listed.
            status = other.stat()
            state = (status.st_ino, status.st_mtime_ns, status.st_ctime_ns, status.st_size)
            if other.resolve() != path.resolve():
                taken |= dict.fromkeys(_read_endpoint_names(other, state), other)
    for loc, entry in draft.deploy:
        if entry.endpoint in taken:
            message = (
                f"endpoint '{entry.endpoint}' is already declared in "
                f"{format_path(taken[entry.endpoint])}"
            )
            yield Issue((*loc, "endpoint"), f"{message}; choose another name")


@functools.lru_cache(maxsize=4096)
def _read_endpoint_names(path: Path, _state: tuple[int, ...]) -> tuple[str, ...]:
    """Return the endpoint names in a file in this state.

    Other problems of the file are ignored, since the check of that file reports them. The result is
    cached: a check of many files would otherwise read all files for each file.
    """
    try:
        deploy: Any = read_file(path).at(("deploy",))
    except UserError:
        return ()
    entries = deploy if isinstance(deploy, list) else [deploy]
    names = [entry.get("endpoint") for entry in entries if isinstance(entry, dict)]
    return tuple(name for name in names if isinstance(name, str))
