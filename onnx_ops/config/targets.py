"""Load targets of the project, targets that projects share, and profiles.

The project's files are `targets/NAME.yaml` in the folder `configs`, or in `onnx-ops` within another
project. Profiles are shipped with onnx-ops.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onnx_ops.config.binding import bind_document
from onnx_ops.config.document import Document, Issue, Loc
from onnx_ops.config.folders import TARGETS, find_config_folder
from onnx_ops.config.messages import did_you_mean
from onnx_ops.config.operator_libraries import resolve_libraries
from onnx_ops.config.substitution import read_document
from onnx_ops.config.yaml_reader import read_text
from onnx_ops.domain.quantities import NAME_PATTERN
from onnx_ops.domain.target import CustomOps, Target
from onnx_ops.errors import NotFoundError, UserError, config_error

if TYPE_CHECKING:
    from onnx_ops.domain.gate import Gate

PROFILES = Path(__file__).parent / "profiles"
BUILTIN = ("cpu-1t", "cpu-all")
"""Profiles that every machine can run."""
UNMEASURED = frozenset(
    {
        "coreml",
        "directml",
        "migraphx",
        "mobile-ort",
        "nnapi",
        "openvino-gpu",
        "openvino-npu",
        "qnn",
        "tensorrt",
        "webgpu",
        "xnnpack",
    }
)
"""Profiles on whose hardware the developers of onnx-ops timed no model.

A comment in the file of each profile states it.
"""


@dataclass(frozen=True, slots=True)
class TargetFiles:
    """Target files of the project, of the shared folder, and shipped profiles.

    The project is at `root`, and several projects share the folder `shared`. If several files have
    the same name, the project's file is used first, then the shared one. Paths of libraries are
    relative to `root`, also in shared files. All methods raise UserError if the shared folder does
    not exist.
    """

    root: Path
    shared: Path | None = None

    def names(self) -> tuple[str, ...]:
        """Return the sorted names of the project's targets and the shared targets."""
        return tuple(
            sorted({path.stem for folder in self._folders for path in folder.glob("*.yaml")})
        )

    def path(self, name: str) -> Path | None:
        """Return the file of a target, or of the profile of that name, if there is one.

        The result is None for an invalid name, even if the name is the path of a file.
        """
        folders = (*self._folders, PROFILES)
        paths = (folder / f"{name}.yaml" for folder in folders if re.fullmatch(NAME_PATTERN, name))
        return next((path for path in paths if path.is_file()), None)

    def source(self, name: str) -> str:
        """Return the path of the target's file for messages, or `shipped`.

        A path in the project is relative to its root.
        """
        path = self.path(name)
        if path is None or path.parent == PROFILES:
            return "shipped"
        return (
            path.relative_to(self.root).as_posix() if path.is_relative_to(self.root) else str(path)
        )

    def is_measured(self, name: str) -> bool | None:
        """Return whether the developers of onnx-ops timed models with the profile.

        The result is None if the target is not a shipped profile.
        """
        path = self.path(name)
        return None if path is None or path.parent != PROFILES else name not in UNMEASURED

    def load(self, name: str, *, where: str = "configs/targets", machine: bool = True) -> Target:
        """Return a target, or the profile of that name.

        The paths of its libraries are absolute.

        Args:
            where: the place that a NotFoundError shows, such as an option.
            machine: whether a package that this machine lacks is a problem. Otherwise, the
                package's library is left out.

        Raises:
            NotFoundError: there is no target or profile of this name.
            ConfigError: the target's file has problems, which the error lists.
            NotReadyError: the only problems are packages with libraries of the target, which are
                not installed.
            UserError: the target's file cannot be read.
        """
        path = self.path(name)
        if path is None:
            names, profiles = self.names(), profile_names()
            hint = did_you_mean(name, {*names, *profiles}).removeprefix("; ").capitalize()
            remedy = (
                hint
                or f"Targets here: {', '.join(names) or 'none'}. "
                f"Shipped targets: {', '.join(profiles)}."
            )
            raise NotFoundError(f"no target is called {name!r}", where=where, remedy=remedy)
        document = read_document(path)
        target: Target | None = bind_document(document, Target).value
        libraries: tuple[CustomOps, ...] = ()
        if target is not None:
            if target.name != path.stem:
                message = f"'{target.name}' differs from the name of the file, '{path.stem}'"
                document.issues.append(Issue(("name",), message))
            document.issues += _check_provider_options(target, document)
            libraries, issues = resolve_libraries(target.custom_ops, self.root, document)
            document.issues += (issue for issue in issues if machine or not issue.environment)
            document.issues += check_gates(
                (("gates", index), gate) for index, gate in enumerate(target.gates)
            )
        if target is None or document.issues:
            raise config_error(tuple(document.problems()))
        return replace(target, custom_ops=libraries)

    @property
    def _folders(self) -> tuple[Path, ...]:
        own = self.root / find_config_folder(self.root) / TARGETS
        if self.shared is None:
            return (own,)
        if not self.shared.is_dir():
            remedy = "Correct `targets` in onnx-ops.toml, or ONNX_OPS_TARGETS."
            raise UserError(
                "the folder of shared targets was not found", where=str(self.shared), remedy=remedy
            )
        return (own, self.shared)


def profile_names() -> tuple[str, ...]:
    """Return the sorted names of the shipped profiles."""
    return tuple(sorted(path.stem for path in PROFILES.glob("*.yaml")))


def _check_provider_options(target: Target, document: Document) -> Iterator[Issue]:
    """Yield an issue for each option that its provider does not read.

    Some providers silently ignore an unknown option.
    """
    for index, provider in enumerate(target.providers):
        known = load_provider_options().get(provider.name, provider.options)
        for option in (option for option in provider.options if option not in known):
            hint = did_you_mean(option, known) or ("; it has none" if not known else "")
            loc = document.written(("providers", index, "options", option))
            yield Issue(loc, f"{provider.name} has no option '{option}'{hint}", on_key=True)


@functools.cache
def load_provider_options() -> Mapping[str, frozenset[str]]:
    """Return the names of the options that each provider reads, by provider.

    The options of other providers are not checked.
    """
    path = PROFILES.parent / "provider_options.yaml"
    read: Any = read_text(path.read_text(encoding="utf-8"), source=str(path)).value
    return {name: frozenset(options) for name, options in read.items()}


def list_targets(files: TargetFiles) -> tuple[str, ...]:
    """Return the sorted names of the project's targets and of built-in profiles.

    The built-in profiles (`BUILTIN`) are those that every machine can run.
    """
    return tuple(sorted({*files.names(), *BUILTIN}))


def check_gates(gates: Iterable[tuple[Loc, Gate]]) -> Iterator[Issue]:
    """Yield issues of gates whose limits are missing, unreachable or without effect.

    The gates are those of a pipeline or a target.
    """
    for loc, gate in gates:
        for key, message in gate.find_problems():
            yield Issue((*loc, key) if key else loc, message)
