"""What of DVC's configuration must be known before DVC itself runs: where its cache is, and of which kind a remote."""

from __future__ import annotations

import configparser
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from onnx_ops.errors import UserError

_PLUGINS: Mapping[str, str] = {
    "azure": "dvc-azure==3.1.1",
    "gs": "dvc-gs==3.1.0",
    "oss": "dvc-oss==3.0.0",
    "s3": "dvc-s3==3.3.0",
    "ssh": "dvc-ssh==4.3.0",
    "webdav": "dvc-webdav==3.0.1",
    "webdavs": "dvc-webdav==3.0.1",
}
"""What DVC needs for a remote, by the scheme of its URL. Folders and http(s) need nothing."""

_DEEPEST = 8
"""Remotes that refer to one another."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DvcConfig:
    """`folder` is the `.dvc` folder; `caches` are where objects may lie on this machine."""

    folder: Path
    caches: tuple[Path, ...]
    default: str
    urls: Mapping[str, str]

    def remote(self, *asked: str) -> str:
        """The first that is asked for, else the repository's default.

        Raises:
            UserError: there is none.
        """
        name = next((name for name in asked if name), self.default)
        if not name:
            raise UserError(
                "the DVC repository has no default remote",
                where=str(self.folder / "config"),
                remedy="Set one with `dvc remote default NAME`, or name it: `with: {remote: NAME}`.",
            )
        return name

    def packages(self, remote: str) -> tuple[str, ...]:
        """What DVC needs beside itself to reach the remote."""
        scheme, name = "remote", remote
        for _ in range(_DEEPEST):
            scheme, _, rest = self.urls.get(name.lower(), "").partition("://")
            if scheme != "remote":
                break
            name = rest.partition("/")[0]
        return (_PLUGINS[scheme],) if scheme in _PLUGINS else ()


def read_config(folder: Path, *, has_cache: bool = True) -> DvcConfig:
    """The configuration as it applies to the `.dvc` folder of a repository: of the user, the repository, and the
    checkout, the last word counting.

    Args:
        folder: the `.dvc` folder.
        has_cache: whether it is a checkout that DVC works in, with a cache of its own.

    Raises:
        UserError: a file cannot be read.
    """
    home = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "dvc"
    default, cache = "", folder / "cache"
    urls: dict[str, str] = {}
    for path in (home / "config", folder / "config", folder / "config.local"):
        parsed = _parse(path)
        for section in parsed.sections():
            kind, _, name = section.strip("'").partition(" ")
            if kind == "remote":
                url = _text(parsed[section].get("url"))
                urls |= {name.strip('"').lower(): url} if url else {}
        if parsed.has_section("core"):
            default = _text(parsed["core"].get("remote")) or default
        if parsed.has_section("cache") and (place := _text(parsed["cache"].get("dir"))):
            cache = (path.parent / Path(place).expanduser()).absolute()
            has_cache = True
    return DvcConfig(folder=folder, caches=(cache,) if has_cache else (), default=default, urls=urls)


def _parse(path: Path) -> configparser.RawConfigParser:
    parsed = configparser.RawConfigParser(strict=False, allow_no_value=True)
    try:
        if path.is_file():
            parsed.read_string(path.read_text(encoding="utf-8"), source=str(path))
    except (OSError, UnicodeDecodeError, configparser.Error) as error:
        raise UserError("the DVC configuration cannot be read", where=str(path), why=str(error)) from error
    return parsed


def _text(value: str | None) -> str:
    text = (value or "").strip()
    return text[1:-1] if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"" else text
