"""The inner side: runs where DVC is installed, knows its remotes, and fetches bytes. What they are worth is judged
outside.

Only the filesystem of a remote is used, and none of DVC's repositories: those take locks, and call what was changed in
place up to date.
"""

from __future__ import annotations

import os
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from onnx_ops.adapters.isolation.worker_main import serve
from onnx_ops.errors import MissingPackageError, ServiceUnavailableError, UserError


class Inside:
    """One remote at a time."""

    where = "data"
    refusing: tuple[str, ...] = ()

    def __init__(self) -> None:
        self._fs: Any = None
        self._place = ""

    def open(self, folder: str, remote: str) -> None:
        """The remote as the configuration below `folder`, the user and the machine describe it."""
        from dvc.config import Config, ConfigError
        from dvc.fs import get_cloud_fs

        where = f"DVC remote {remote}"
        try:
            config: Any = Config(dvc_dir=folder)
            told = config.get("remote", {}).get(remote.lower(), {})
            kind, settings, self._place = get_cloud_fs(config, name=remote)
        except ImportError as error:
            raise MissingPackageError(
                "DVC lacks a package for this remote",
                where=where,
                why=str(error)[:300],
                remedy="List it beside DVC: `with: {requirements: ['dvc==3.67.1', 'dvc-s3==3.3.0']}`.",
            ) from error
        except ConfigError as error:
            raise UserError(
                "the DVC remote cannot be used",
                where=where,
                why=str(error),
                remedy="`dvc remote list` shows those that there are.",
            ) from error
        if told.get("version_aware") or told.get("worktree"):
            raise UserError(
                "the DVC remote does not store by content",
                where=where,
                why="it is `version_aware` or `worktree`",
                remedy="Push to a plain remote: what has no MD5 cannot be checked.",
            )
        try:
            self._fs = kind(**settings)
        except Exception as error:  # each cloud's package raises its own
            raise _unreachable(where, error) from error

    def fetch(self, relative: str, path: str) -> dict[str, object]:
        """Copy an object to `path`; tells its place without credentials, and whether it was there."""
        source = self._fs.join(self._place, *relative.split("/"))
        place = _shown(self._fs.unstrip_protocol(source))
        try:
            self._fs.get_file(source, path)
        except FileNotFoundError:
            return {"place": place, "found": False}
        except Exception as error:
            raise _unreachable(place, error) from error
        return {"place": place, "found": os.path.isfile(path)}


def main() -> None:
    serve(Inside())


def _unreachable(where: str, error: Exception) -> ServiceUnavailableError:
    return ServiceUnavailableError(
        "the DVC remote cannot be read",
        where=where,
        why=f"{type(error).__name__}: {str(error)[:300]}",
        remedy="Try `dvc fetch` with the same variables: credentials come from them or from `.dvc/config.local`.",
    )


def _shown(url: str) -> str:
    with suppress(ValueError):
        parts = urlsplit(url)
        return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2], query=""))
    return ""
