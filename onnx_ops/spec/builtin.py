"""Targets for tools that are used without a project."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from onnx_ops.domain.target import Target
from onnx_ops.errors import NotFound
from onnx_ops.spec.targets import FOLDER, PROFILES, load_target, profile_names, target_names, target_path
from onnx_ops.spec.words import did_you_mean

BUILTIN: Mapping[str, Target] = {name: load_target(name, root=PROFILES) for name in ("cpu-1t", "cpu-all")}
"""Profiles that every machine can run."""


def find_target(name: str, *, root: Path) -> Target:
    """The target of the project at `root`, else the profile of that name.

    Raises:
        NotFound: there is neither.
        SpecError: the project's file has problems.
    """
    if target_path(name, root) is not None:
        return load_target(name, root=root)
    known = sorted({*target_names(root), *profile_names()})
    hint = did_you_mean(name, known).removeprefix("; ").capitalize()
    raise NotFound(
        f"no target is called {name!r}",
        where="--target",
        remedy=hint or f"Targets here: {', '.join(known)}; others are files {FOLDER}/NAME.yaml of a project.",
    )


def known_targets(root: Path) -> tuple[str, ...]:
    """Names of the project's targets and of the profiles that every machine can run, sorted."""
    return tuple(sorted({*target_names(root), *BUILTIN}))
