"""Targets for tools that are used without a project."""

from __future__ import annotations

from collections.abc import Mapping

from onnx_ops.config.targets import FOLDER, PROFILES, TargetFiles, profile_names
from onnx_ops.config.words import did_you_mean
from onnx_ops.domain.target import Target
from onnx_ops.errors import NotFoundError

BUILTIN: Mapping[str, Target] = {name: TargetFiles(PROFILES).load(name) for name in ("cpu-1t", "cpu-all")}
"""Profiles that every machine can run."""


def find_target(name: str, files: TargetFiles) -> Target:
    """The target of the project, else the profile of that name.

    Raises:
        NotFoundError: there is neither.
        ConfigError: the project's file has problems.
    """
    if files.path(name) is not None:
        return files.load(name)
    known = sorted({*files.names(), *profile_names()})
    hint = did_you_mean(name, known).removeprefix("; ").capitalize()
    raise NotFoundError(
        f"no target is called {name!r}",
        where="--target",
        remedy=hint or f"Targets here: {', '.join(known)}; others are files {FOLDER}/NAME.yaml of a project.",
    )


def known_targets(files: TargetFiles) -> tuple[str, ...]:
    """Names of the project's targets and of the profiles that every machine can run, sorted."""
    return tuple(sorted({*files.names(), *BUILTIN}))
