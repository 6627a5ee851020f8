"""Target files: `configs/targets/NAME.yaml` below a project's root."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from onnx_ops.domain.pipeline import NAME_PATTERN
from onnx_ops.domain.target import Target
from onnx_ops.errors import NotFound, Problem, SpecError
from onnx_ops.spec.document import Finding
from onnx_ops.spec.reading import bind_document, read_document
from onnx_ops.spec.words import did_you_mean

FOLDER = Path("configs") / "targets"


def target_names(root: Path) -> tuple[str, ...]:
    """Names of the project's targets, sorted."""
    return tuple(sorted(path.stem for path in (root / FOLDER).glob("*.yaml")))


def target_path(name: str, root: Path) -> Path | None:
    """The target's file, if there is one. A name that is not a target's name leads nowhere, whatever it spells."""
    path = root / FOLDER / f"{name}.yaml"
    return path if re.fullmatch(NAME_PATTERN, name) and path.is_file() else None


def load_target(name: str, *, root: Path) -> Target:
    """Read one target; its libraries' paths are absolute then.

    Raises:
        NotFound: the project has no such target.
        SpecError: its file has problems; all of them at once.
    """
    path = target_path(name, root)
    if path is None:
        known = target_names(root)
        hint = did_you_mean(name, known).removeprefix("; ").capitalize()
        remedy = hint or f"Targets there: {', '.join(known) or 'none'}."
        raise NotFound(f"no target is called {name!r}", where=str(FOLDER), remedy=remedy)
    document = read_document(path)
    bound, problems = bind_document(document, Target)
    target: Target | None = bound.result
    if target is not None and target.name != path.stem:
        finding = Finding(loc=("name",), message=f"'{target.name}' is not the name of its file, '{path.stem}'")
        problems.append(document.problem(finding))
    if target is None or problems:
        raise SpecError(tuple(problems))
    libraries = tuple(replace(library, path=str(root / library.path)) for library in target.custom_ops)
    return replace(target, custom_ops=libraries)


def load_targets(names: Iterable[str], *, root: Path) -> dict[str, Target]:
    """Read several targets, by name.

    Raises:
        NotFound: the project lacks one of them.
        SpecError: files have problems; those of all files at once.
    """
    targets: dict[str, Target] = {}
    problems: list[Problem] = []
    for name in dict.fromkeys(names):
        try:
            targets[name] = load_target(name, root=root)
        except SpecError as error:
            problems += error.problems
    if problems:
        raise SpecError(tuple(problems))
    return targets
