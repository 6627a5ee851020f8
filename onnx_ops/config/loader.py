"""Pipeline files: from YAML to `Pipeline`, with every problem of a file reported at once."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from onnx_ops.config.binding import bind_document
from onnx_ops.config.document import Document, Finding, Loc
from onnx_ops.config.draft import draft_of
from onnx_ops.config.parameters import substitute_parameters
from onnx_ops.config.project import (
    Preflight,
    SettingsCheck,
    benchmarked_targets,
    endpoint_findings,
    metrics_findings,
    no_check,
    no_preflight,
    plugin_findings,
    project_findings,
    setting_findings,
)
from onnx_ops.config.reading import read_document
from onnx_ops.config.rollouts import (
    Capabilities,
    Unservable,
    capability_findings,
    serves_all,
    unservable_findings,
)
from onnx_ops.config.rules import file_findings
from onnx_ops.config.targets import TargetFiles
from onnx_ops.domain.gate import ParityGate
from onnx_ops.domain.pipeline import Pipeline
from onnx_ops.errors import config_error


def load_pipeline(
    path: Path, *, root: Path, overrides: Sequence[str] = (), environ: Mapping[str, str] | None = None
) -> Pipeline:
    """Read a pipeline file that is about to run.

    Checked are its syntax, its types, what its sections say about each other, its targets and its training function.
    A pipeline whose gates hold no parity gate gets the default one, in first place: an export that computes
    something else is never let through by omission.

    Args:
        path: the file.
        root: the project's root; targets and user code are looked for below it.
        overrides: `path=value`, each value read as YAML, such as `train.with.epochs=3`.
        environ: what `${env:NAME}` refers to; the process's environment by default.

    Raises:
        NotFoundError: there is no such file.
        ConfigError: the file, or the `params.yaml` that it refers to, has problems.
    """
    return _load(path, root=root, plugins={}, elsewhere=False, overrides=overrides, environ=environ)


def check_pipeline(
    path: Path,
    *,
    root: Path,
    plugins: Mapping[str, Sequence[str]],
    settings: SettingsCheck = no_check,
    metrics: SettingsCheck = no_check,
    capabilities: Capabilities | None = None,
    unservable: Unservable = serves_all,
    preflight: Preflight = no_preflight,
    shared: Path | None = None,
    overrides: Sequence[str] = (),
    environ: Mapping[str, str] | None = None,
) -> Pipeline:
    """`load_pipeline`, and also: every plugin is installed, its endpoints know their settings and can keep the policies
    of their rollouts, no other pipeline file claims an endpoint, and `preflight` finds nothing.

    Args:
        plugins: installed names by kind (`onnx_ops.plugins.GROUPS`); a kind that is left out is not checked.
        settings: raises UserError for settings that an installed endpoint plugin does not take.
        metrics: raises UserError for settings that an installed source of metrics does not take.
        preflight: what a run would meet in data, models and code, and on this machine.
        shared: folder of targets that several projects share.
        unservable: why an installed endpoint plugin cannot run models as they were measured on a target.
        capabilities: of an entry whose endpoint plugin is installed; without it policies are not held against it.

    Raises:
        NotFoundError: there is no such file.
        ConfigError: the file has problems.
    """
    return _load(
        path,
        root=root,
        plugins=plugins,
        elsewhere=True,
        shared=shared,
        settings=settings,
        metrics=metrics,
        capabilities=capabilities,
        unservable=unservable,
        preflight=preflight,
        overrides=overrides,
        environ=environ,
    )


def _load(
    path: Path,
    *,
    root: Path,
    plugins: Mapping[str, Sequence[str]],
    elsewhere: bool,
    shared: Path | None = None,
    settings: SettingsCheck = no_check,
    metrics: SettingsCheck = no_check,
    capabilities: Capabilities | None = None,
    unservable: Unservable = serves_all,
    preflight: Preflight = no_preflight,
    overrides: Sequence[str],
    environ: Mapping[str, str] | None,
) -> Pipeline:
    document = read_document(path, overrides=overrides, environ=os.environ if environ is None else environ)
    parameters = substitute_parameters(document, root)
    binding = bind_document(document, Pipeline)
    problems = document.problems()
    draft = draft_of(document, binding)
    files = TargetFiles(root, shared)
    targets, target_problems = benchmarked_targets(draft, files)
    findings = [
        *file_findings(draft),
        *project_findings(draft, files, targets),
        *plugin_findings(draft, targets, plugins),
        *setting_findings(draft, plugins.get("endpoints", ()), settings),
        *metrics_findings(draft, plugins.get("metrics", ()), metrics),
        *(capability_findings(draft, plugins.get("endpoints", ()), capabilities) if capabilities else ()),
        *unservable_findings(draft, targets, plugins.get("endpoints", ()), unservable),
        *(endpoint_findings(draft, path, root) if elsewhere else ()),
    ]
    pipeline: Pipeline | None = binding.value
    whole = pipeline if not problems and not target_problems and not findings else None
    findings += preflight(draft, targets, whole)
    problems += [document.problem(finding) for finding in _independent(findings, document)] + target_problems
    if pipeline is None or problems:
        raise config_error(tuple(problems))
    shielded = any(isinstance(gate, ParityGate) for gate in pipeline.gates)
    gates = pipeline.gates if shielded else (ParityGate(), *pipeline.gates)
    return replace(pipeline, gates=gates, parameters=parameters)


def _independent(findings: Iterable[Finding], document: Document) -> list[Finding]:
    """Findings of rules that do not merely follow from what is wrong at the same place, just below or above it."""
    wrong = [finding.loc for finding in document.findings]
    return [f for f in findings if not any(_same_place(document.written(f.loc), loc) for loc in wrong)]


def _same_place(judged: Loc, wrong: Loc) -> bool:
    if judged[: len(wrong)] == wrong:
        return True
    return wrong[: len(judged)] == judged and len(wrong) == len(judged) + 1
