"""What `with:` says of data in a DVC repository."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Annotated
from urllib.parse import urlsplit

from onnx_ops.config.binding import bind_settings
from onnx_ops.domain.pipeline import DataSection, PluginData
from onnx_ops.domain.quantities import Pattern
from onnx_ops.errors import RefusedError, UserError

_SCP_LIKE = re.compile(r"[^/\\:]+@[^/\\:]+:.*|[A-Za-z][A-Za-z0-9+.-]+::.*")


@dataclass(frozen=True, slots=True, kw_only=True)
class DvcSettings:
    """`path` is a file in the repository, as DVC knows it; `repo` a folder relative to the project's root, or a URL.

    `rev` is a tag, branch or commit; empty for what is checked out. `remote` names the DVC remote; empty for that of
    the pointer, else the repository's default. `md5` is what the pointer must say, if given. `requirements` are the
    packages of DVC's environment; empty for those of this release that the remote needs.
    """

    path: str
    rev: str = ""
    repo: str = "."
    remote: str = ""
    md5: Annotated[str, Pattern(r"([0-9a-f]{32}(\.dir)?)?", "an MD5, as the .dvc file has it")] = ""
    requirements: tuple[str, ...] = ()

    @property
    def is_url(self) -> bool:
        return "://" in self.repo or _SCP_LIKE.fullmatch(self.repo) is not None


def settings_of(section: DataSection) -> DvcSettings:
    """Raises:
    UserError: it is no section of this source, or its settings cannot be used.
    RefusedError: the path leads out of the repository, or the URL holds a password.
    """
    if not isinstance(section, PluginData) or section.use != "dvc":
        raise UserError("this data source reads `use: dvc`", where=type(section).__name__)
    settings = bind_settings(
        section.with_, DvcSettings, where="data.with", remedy="For example: with: {path: data/train.npz}."
    )
    _check(settings)
    return settings


def _check(settings: DvcSettings) -> None:
    path = PurePosixPath(settings.path)
    if path.is_absolute() or ".." in path.parts or not path.parts or "\0" in settings.path:
        raise RefusedError(
            "the path leads out of its repository",
            where=f"data.with.path: {settings.path}",
            remedy="Write it relative to `repo`, with slashes.",
        )
    if "://" in settings.repo and urlsplit(settings.repo).password is not None:
        raise RefusedError(
            "a password does not belong into a pipeline file",
            where="data.with.repo",
            why="the URL holds one, and the file and the lineage are kept",
            remedy="Take it out of the URL; git asks its credential helper, or use an SSH key.",
        )
