"""Load pipeline files and promotion policies, and report all problems of a file."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from onnx_ops.config.binding import bind_document
from onnx_ops.config.document import Issue
from onnx_ops.config.project_rules import (
    OptionsCheck,
    check_endpoint_options,
    check_other_files,
    check_plugins,
    check_project,
    check_reach,
    load_targets,
)
from onnx_ops.config.reach import PROJECT_ONLY, Reach
from onnx_ops.config.rollout_rules import (
    ABILITIES,
    Capabilities,
    Uncounted,
    Unservable,
    check_providers,
    check_rollouts,
)
from onnx_ops.config.rules import Draft, build_draft, check_file
from onnx_ops.config.substitution import read_document, substitute_parameters
from onnx_ops.config.targets import TargetFiles
from onnx_ops.domain.gate import ParityGate
from onnx_ops.domain.pipeline import Pipeline
from onnx_ops.domain.release import PromotionPolicy
from onnx_ops.domain.target import Target
from onnx_ops.errors import ConfigError, config_error

PreflightCheck = Callable[[Draft, Mapping[str, Target], Pipeline | None], Iterable[Issue]]
"""Function that returns the problems that would stop a run.

It checks the data, models and code that the sections name, and this machine. Its last argument is
None if the file has problems.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class LocatedPolicy:
    """A promotion policy, with the places of its rules and of its overrides.

    A place is `file:line`.
    """

    policy: PromotionPolicy
    places: tuple[str, ...]
    overrides_at: str


def load_pipeline(
    path: Path,
    *,
    root: Path,
    overrides: Sequence[str] = (),
    environ: Mapping[str, str] | None = None,
    reach: Reach = PROJECT_ONLY,
    shared: Path | None = None,
    plugins: Mapping[str, Sequence[str]] | None = None,
    options: OptionsCheck = lambda *_: None,
    metrics: OptionsCheck = lambda *_: None,
    capabilities: Capabilities = lambda _: frozenset(ABILITIES),
    unservable: Unservable = lambda *_: "",
    uncounted: Uncounted = lambda _: "",
    preflight: PreflightCheck = lambda *_: (),
    machine: bool = True,
) -> Pipeline:
    """Read a pipeline file, or report all its problems.

    A pipeline without a parity gate gets the default parity gate as its first gate. An export that
    computes another function therefore fails even if the file omits the gate.

    Args:
        path: The file.
        root: The project's root; targets and user code are looked for below it.
        overrides: `path=value`, each value read as YAML, such as `train.with.epochs=3`.
        environ: What `${env:NAME}` refers to; the process's environment by default.
        reach: What the file is allowed to name beyond the project.
        shared: Folder of targets that several projects share.
        plugins: Installed names by kind (`onnx_ops.plugins.KINDS`). If given, plugins and the
            endpoints of other pipeline files are checked, too. A kind that is missing here is not
            checked.
        options, metrics: Functions that check the options of installed endpoint plugins and
            metrics sources.
        capabilities, unservable: Functions that return the capabilities of an entry's endpoint
            plugin and metrics source, and why the plugin cannot run the entry's models.
        uncounted: Function that returns why an entry's metrics source counts no requests.
        preflight: Function that returns the problems that a run would have.
        machine: Whether a package of a target that this machine lacks is a problem.

    Raises:
        NotFoundError: There is no such file.
        UserError: The file, a target file or `params.yaml` cannot be read, or the folder `shared`
            is missing.
        ConfigError: The file, a target that it names, or the `params.yaml` that it refers to has
            problems. If this machine is the cause of all problems, the error is a NotReadyError.
    """
    known = os.environ if environ is None else environ
    document = read_document(path, overrides=overrides, environ=known, reach=reach)
    parameters = substitute_parameters(document, root)
    binding = bind_document(document, Pipeline)
    pipeline: Pipeline | None = binding.value
    draft, files = build_draft(document, binding), TargetFiles(root, shared)
    targets, target_problems = load_targets(draft, files, machine=machine)
    beyond = list(check_reach(draft, targets, reach, root))
    issues = [
        *check_file(draft),
        *check_rollouts(draft),
        *check_project(draft, files, targets),
        *beyond,
    ]
    if plugins is not None:
        issues += [
            *check_plugins(draft, targets, plugins),
            *check_endpoint_options(draft, plugins, options, metrics),
            *check_providers(
                draft, targets, plugins.get("endpoints", ()), capabilities, unservable, uncounted
            ),
            *check_other_files(draft, path, root),
        ]
    problems = document.problems()
    if not beyond:
        # `preflight` reads what the file refers to, so it is omitted if a reference is not allowed.
        issues += preflight(
            draft, targets, None if problems or target_problems or issues else pipeline
        )
    for issue in issues:
        loc = document.written(issue.loc)
        # An issue is left out if it can follow from an invalid value. Such a value is at the
        # location of the issue, around the location, or directly in the mapping or list there.
        if not any(
            loc[: len(other.loc)] == other.loc or other.loc[:-1] == loc for other in document.issues
        ):
            problems.append(document.problem(issue))
    problems += target_problems
    if pipeline is None or problems:
        raise config_error(tuple(problems))
    has_parity = any(isinstance(gate, ParityGate) for gate in pipeline.gates)
    gates = pipeline.gates if has_parity else (ParityGate(), *pipeline.gates)
    return replace(pipeline, gates=gates, parameters=parameters)


def load_policy(path: Path) -> LocatedPolicy:
    """Read a promotion policy.

    Raises:
        NotFoundError, UserError: The file is missing, or cannot be read.
        ConfigError: The file has problems; the error contains all of them.
    """
    document = read_document(path)
    policy: PromotionPolicy | None = bind_document(document, PromotionPolicy).value
    if policy is None or document.issues:
        raise ConfigError(tuple(document.problems()))

    def place(*loc: str | int) -> str:
        position = document.places.get(loc) or document.places[()]
        return f"{Path(position.source).name}:{position.line}"

    return LocatedPolicy(
        policy=policy,
        places=tuple(place("rules", index) for index in range(len(policy.rules))),
        overrides_at=place("overrides"),
    )
