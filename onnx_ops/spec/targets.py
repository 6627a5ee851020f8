"""Target files: `configs/targets/NAME.yaml` below a project's root, and the profiles that are shipped.

A file of the project wins over the profile of its name.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from onnx_ops.domain.pipeline import NAME_PATTERN
from onnx_ops.domain.provider_options import PROVIDER_OPTIONS
from onnx_ops.domain.target import Target
from onnx_ops.errors import NotFound, Problem, SpecError
from onnx_ops.spec.document import Document, Finding
from onnx_ops.spec.gates import gate_findings
from onnx_ops.spec.reading import bind_document, read_document
from onnx_ops.spec.words import did_you_mean

FOLDER = Path("configs") / "targets"
PROFILES = Path(__file__).parent / "profiles"


def target_names(root: Path) -> tuple[str, ...]:
    """Names of the project's targets, sorted."""
    return tuple(sorted(path.stem for path in (root / FOLDER).glob("*.yaml")))


def profile_names() -> tuple[str, ...]:
    """Names of the profiles that are shipped, sorted."""
    return tuple(sorted(path.stem for path in PROFILES.glob("*.yaml")))


def target_path(name: str, root: Path) -> Path | None:
    """The file of the project's target, else of the profile, if there is one.

    A name that is not a target's name leads nowhere, whatever it spells.
    """
    paths = (folder / f"{name}.yaml" for folder in (root / FOLDER, PROFILES) if re.fullmatch(NAME_PATTERN, name))
    return next((path for path in paths if path.is_file()), None)


def load_target(name: str, *, root: Path) -> Target:
    """Read one target, or the profile of that name; its libraries' paths are absolute then.

    Raises:
        NotFound: there is neither.
        SpecError: its file has problems; all of them at once.
    """
    path = target_path(name, root)
    if path is None:
        names, profiles = target_names(root), profile_names()
        hint = did_you_mean(name, {*names, *profiles}).removeprefix("; ").capitalize()
        remedy = hint or f"Targets there: {', '.join(names) or 'none'}. Shipped: {', '.join(profiles)}."
        raise NotFound(f"no target is called {name!r}", where=str(FOLDER), remedy=remedy)
    document = read_document(path)
    bound, problems = bind_document(document, Target)
    target: Target | None = bound.result
    if target is not None and target.name != path.stem:
        finding = Finding(loc=("name",), message=f"'{target.name}' is not the name of its file, '{path.stem}'")
        problems.append(document.problem(finding))
    if target is not None:
        limits = gate_findings((("gates", index), gate) for index, gate in enumerate(target.gates))
        problems += [document.problem(finding) for finding in (*_option_findings(target, document), *limits)]
    if target is None or problems:
        raise SpecError(tuple(problems))
    libraries = tuple(replace(library, path=str(root / library.path)) for library in target.custom_ops)
    return replace(target, custom_ops=libraries)


def load_targets(names: Iterable[str], *, root: Path) -> dict[str, Target]:
    """Read several targets, by name.

    Raises:
        NotFound: one of them is neither a target of the project nor a profile.
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


def _option_findings(target: Target, document: Document) -> Iterator[Finding]:
    """Options that their provider does not read, each where it is written."""
    for index, provider in enumerate(target.providers):
        known = PROVIDER_OPTIONS.get(provider.name)
        for option in provider.options if known is not None else ():
            if known is not None and option not in known:
                hint = did_you_mean(option, known) or ("; it has none" if not known else "")
                yield Finding(
                    loc=document.written(("providers", index, "options", option)),
                    message=f"{provider.name} has no option '{option}'{hint}",
                    on_key=True,
                )
