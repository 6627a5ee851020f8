"""Targets that need no file, for tools that are used without a project."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from onnx_ops.domain.target import SessionSettings, Target
from onnx_ops.errors import NotFound
from onnx_ops.spec.targets import FOLDER, load_target, target_names, target_path
from onnx_ops.spec.words import did_you_mean

BUILTIN: Mapping[str, Target] = {
    target.name: target
    for target in (
        Target(
            name="cpu-1t",
            description="One thread on any CPU. Threads do not spin, so that figures hold on a shared machine.",
        ),
        Target(
            name="cpu-all",
            description="Every core of the machine, one operator at a time.",
            session=SessionSettings(intra_op_threads=0),
        ),
    )
}
"""The same as the files of that name in `configs/targets/`."""


def find_target(name: str, *, root: Path) -> Target:
    """The target of the project at `root`, else the built-in one of that name.

    Raises:
        NotFound: there is neither.
        SpecError: the project's file has problems.
    """
    if target_path(name, root) is not None:
        return load_target(name, root=root)
    if name in BUILTIN:
        return BUILTIN[name]
    known = known_targets(root)
    hint = did_you_mean(name, known).removeprefix("; ").capitalize()
    raise NotFound(
        f"no target is called {name!r}",
        where="--target",
        remedy=hint or f"Targets here: {', '.join(known)}; others are files {FOLDER}/NAME.yaml of a project.",
    )


def known_targets(root: Path) -> tuple[str, ...]:
    """Names of the project's and of the built-in targets, sorted."""
    return tuple(sorted({*target_names(root), *BUILTIN}))
