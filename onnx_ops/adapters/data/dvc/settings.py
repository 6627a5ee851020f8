"""What `with:` says of data in a DVC repository."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import PurePosixPath
from typing import Any
from urllib.parse import urlsplit

from onnx_ops import codec
from onnx_ops.domain.pipeline import DataSection, PluginData
from onnx_ops.errors import RefusedError, UserError

_SCP_LIKE = re.compile(r"[^/\\:]+@[^/\\:]+:.*|[A-Za-z][A-Za-z0-9+.-]+::.*")
_MD5 = re.compile(r"[0-9a-f]{32}(\.dir)?")


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
    md5: str = ""
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
    known = [field.name for field in fields(DvcSettings)]
    for key in section.with_:
        if key not in known:
            close = difflib.get_close_matches(key, known, n=1)
            hint = f"Did you mean {close[0]!r}?" if close else f"Known: {', '.join(known)}."
            raise UserError(f"unknown setting {key!r}", where="data.with", remedy=hint)
    if "path" not in section.with_:
        raise UserError("data from DVC needs a path", where="data.with", remedy="Write `with: {path: data/train.npz}`.")
    _check_texts(section.with_)
    settings = codec.from_json(dict(section.with_), DvcSettings, where="data.with")
    _check(settings)
    return settings


def _check_texts(given: Mapping[str, Any]) -> None:
    for key, value in given.items():
        if key == "requirements":
            if not isinstance(value, list | tuple) or not all(isinstance(one, str) for one in value):
                raise UserError(
                    "requirements must be a list of texts", where="data.with", remedy="Write [dvc==3.67.1]."
                )
        elif not isinstance(value, str):
            raise UserError(f"{key} must be a text, not {value!r}", where="data.with", remedy="Put it into quotes.")


def _check(settings: DvcSettings) -> None:
    path = PurePosixPath(settings.path)
    if path.is_absolute() or ".." in path.parts or not path.parts or "\0" in settings.path:
        raise RefusedError(
            "the path leads out of its repository",
            where=f"data.with.path: {settings.path}",
            remedy="Write it relative to `repo`, with slashes.",
        )
    if settings.md5 and not _MD5.fullmatch(settings.md5):
        raise UserError(f"{settings.md5!r} is no MD5", where="data.with.md5", remedy="Copy it from the .dvc file.")
    if "://" in settings.repo and urlsplit(settings.repo).password is not None:
        raise RefusedError(
            "a password does not belong into a pipeline file",
            where="data.with.repo",
            why="the URL holds one, and the file and the lineage are kept",
            remedy="Take it out of the URL; git asks its credential helper, or use an SSH key.",
        )
