"""What must hold between a pipeline file and the project around it: targets, functions, plugins, other files."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from onnx_ops.config.binding import SettingsError
from onnx_ops.config.document import Finding, Loc
from onnx_ops.config.draft import Draft
from onnx_ops.config.functions import argument_problems, function_problem
from onnx_ops.config.metrics import function_findings
from onnx_ops.config.places import device_findings, pool_findings
from onnx_ops.config.searches import price_findings
from onnx_ops.config.targets import TargetFiles, profile_names
from onnx_ops.config.text import read_file, shown_path
from onnx_ops.config.words import did_you_mean, listing
from onnx_ops.domain.pipeline import TRANSLATIONS, Pipeline, PluginData
from onnx_ops.domain.quantities import Json
from onnx_ops.domain.quantization import AUTO
from onnx_ops.domain.target import Target
from onnx_ops.errors import ConfigError, NotFoundError, Problem, UserError

SettingsCheck = Callable[[str, Mapping[str, Json]], object]
"""Raises UserError if the plugin of that name cannot use the settings; SettingsError with the place of each problem."""

Preflight = Callable[[Draft, Mapping[str, Target], Pipeline | None], Iterable[Finding]]
"""What a run would meet: in the data, the models and the code that the sections name, and on this machine. The pipeline
is None if the file does not make one."""

PIPELINES = Path("configs") / "pipelines"


def no_check(_: str, __: Mapping[str, Json]) -> None:
    """The check of a file that is read where plugins are not at hand."""


def no_preflight(_: Draft, __: Mapping[str, Target], ___: Pipeline | None) -> Iterable[Finding]:
    """The check of a file alone."""
    return ()


def benchmarked_targets(draft: Draft, files: TargetFiles) -> tuple[dict[str, Target], list[Problem]]:
    """The targets of `benchmark.targets` that exist and can be read, and the problems in the files of the others."""
    targets: dict[str, Target] = {}
    problems: list[Problem] = []
    for name in dict.fromkeys(draft.benchmark.targets if draft.benchmark else ()):
        try:
            targets[name] = files.load(name)
        except NotFoundError:
            continue  # `_missing_targets` says where it is asked for
        except ConfigError as error:
            problems += error.problems
    return targets, problems


def project_findings(draft: Draft, files: TargetFiles, targets: Mapping[str, Target]) -> list[Finding]:
    """Targets that do not exist, models that a target cannot run, functions that are not there."""
    findings = [
        *_missing_targets(draft, files),
        *_ceilings(draft, targets),
        *price_findings(draft, targets),
        *pool_findings(draft, targets),
        *device_findings(draft, targets),
        *function_findings(draft, files.root),
    ]
    if draft.train:
        if problem := function_problem(draft.train.run, files.root):
            findings.append(Finding(loc=("train", "run"), message=problem))
        for name, problem in argument_problems(draft.train.run, draft.train.with_, files.root):
            loc: Loc = ("train", "with", name) if name else ("train", "run")
            findings.append(Finding(loc=loc, message=problem, on_key=bool(name)))
    table = draft.export.translations if draft.export else ""
    if table and (problem := function_problem(table, files.root)):
        findings.append(Finding(loc=("export", "options", TRANSLATIONS), message=problem))
    return findings


def _missing_targets(draft: Draft, files: TargetFiles) -> Iterator[Finding]:
    for index, name in enumerate(draft.benchmark.targets if draft.benchmark else ()):
        if files.path(name) is None:
            known = files.names()
            hint = (
                did_you_mean(name, {*known, *profile_names()})
                or f"; targets here: {listing(known) or 'none but the shipped ones'}"
            )
            yield Finding(loc=("benchmark", "targets", index), message=f"no target is called '{name}'{hint}")


def _ceilings(draft: Draft, targets: Mapping[str, Target]) -> Iterator[Finding]:
    if draft.export is None:
        return
    for name, target in targets.items():
        for key, value, most in (
            ("opset", draft.export.opset, target.max_opset),
            ("ir_version", draft.export.ir_version, target.max_ir_version),
        ):
            if value > most:
                message = f"target '{name}' accepts {key} <= {most}, not {value}; set export.{key}"
                yield Finding(loc=("export", key), message=message)


def plugin_findings(
    draft: Draft, targets: Mapping[str, Target], plugins: Mapping[str, Sequence[str]]
) -> Iterator[Finding]:
    """Names of plugins that are not installed. Kinds that `plugins` does not have are not checked."""
    for kind, loc, name in _plugin_names(draft, targets):
        if name in plugins.get(kind, (name,)):
            continue
        known = sorted(plugins[kind])
        hint = did_you_mean(name, known) or f"; installed: {', '.join(known) or 'none'}"
        yield Finding(loc=loc, message=f"no {kind.removesuffix('s')} plugin is called '{name}'{hint}")


def _plugin_names(draft: Draft, targets: Mapping[str, Target]) -> Iterator[tuple[str, Loc, str]]:
    for name, section in draft.data.items():
        if isinstance(section, PluginData):
            yield "data", ("data", name, "use"), section.use
    if draft.export:
        yield "exporters", ("export", "framework"), draft.export.framework
    for loc, entry in draft.quantize:
        if entry.method != AUTO:
            yield "optimizers", (*loc, "method"), entry.method
    for index, name in enumerate(draft.benchmark.targets if draft.benchmark else ()):
        if name in targets:
            yield "runtimes", ("benchmark", "targets", index), targets[name].runtime
    for loc, deployment in draft.deploy:
        yield "endpoints", (*loc, "provider"), deployment.provider
        if "source" in deployment.metrics:
            yield "metrics", (*loc, "metrics", "source"), str(deployment.metrics["source"])


def setting_findings(draft: Draft, providers: Sequence[str], check: SettingsCheck) -> Iterator[Finding]:
    """Yield settings of endpoints that their provider does not take. Providers that are not installed are skipped."""
    for loc, deployment in draft.deploy:
        if deployment.provider in providers:
            read = partial(check, deployment.provider, deployment.settings)
            yield from plugin_setting_findings((*loc, "settings"), read)


def metrics_findings(draft: Draft, sources: Sequence[str], check: SettingsCheck) -> Iterator[Finding]:
    """Yield settings that a source of metrics does not take. Sources that are not installed are skipped."""
    for loc, deployment in draft.deploy:
        settings = dict(deployment.metrics)
        source = settings.pop("source", None)
        if settings and source is None:
            hint = f"one of {', '.join(sources)}" if sources else "a metrics plugin"
            yield Finding(loc=(*loc, "metrics"), message=f"metrics need a source: {hint}")
        elif source in sources:
            yield from plugin_setting_findings((*loc, "metrics"), partial(check, str(source), settings))


def plugin_setting_findings(loc: Loc, read: Callable[[], object]) -> Iterator[Finding]:
    """Yield the problems of a plugin's settings, each where it is written if the plugin says so.

    Args:
        loc: Location of the settings.
        read: Reads them; raises UserError.
    """
    try:
        read()
    except SettingsError as error:
        for finding in error.findings:
            yield replace(finding, loc=(*loc, *finding.loc))
    except UserError as error:
        yield Finding(loc=loc, message=error.without_place())


def endpoint_findings(draft: Draft, path: Path, root: Path) -> Iterator[Finding]:
    """Endpoints that another pipeline file of the project has too."""
    if not draft.deploy:
        return
    taken: dict[str, Path] = {}
    for other in sorted((root / PIPELINES).glob("*.yaml")):
        if other.resolve() != path.resolve():
            taken |= dict.fromkeys(_endpoints_of(other), other)
    for loc, entry in draft.deploy:
        if entry.endpoint in taken:
            message = f"endpoint '{entry.endpoint}' belongs to {shown_path(taken[entry.endpoint])} already"
            yield Finding(loc=(*loc, "endpoint"), message=message)


def _endpoints_of(path: Path) -> tuple[str, ...]:
    """Endpoint names in a file, whatever else is wrong with it: its own check will say so."""
    try:
        status = path.stat()
    except OSError:
        return ()
    return _endpoints_in(path, (status.st_ino, status.st_mtime_ns, status.st_ctime_ns, status.st_size))


@functools.lru_cache(maxsize=4096)
def _endpoints_in(path: Path, state: tuple[int, ...]) -> tuple[str, ...]:
    """Of a file in this state. Without the cache many files checked in one process would each read all the others."""
    del state
    try:
        document = read_file(path)
    except UserError:
        return ()
    deploy: Any = document.at(("deploy",))
    entries = deploy if isinstance(deploy, list) else [deploy]
    names = [entry.get("endpoint") for entry in entries if isinstance(entry, dict)]
    return tuple(name for name in names if isinstance(name, str))
