"""DVC's pointers: the `.dvc` files and `dvc.lock` that stand in git for data, and say its MD5."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from onnx_ops.adapters.data.dvc.git import Commit
from onnx_ops.config.document import Document, Loc
from onnx_ops.config.yaml_reader import read_text
from onnx_ops.errors import ConfigError, DigestMismatchError, NotFoundError, RefusedError, UserError

SUFFIX = ".dvc"
LOCK = "dvc.lock"
_RECIPE = "dvc.yaml"
FOLDER_MARK = ".dir"
"""Ends the MD5 of a list of files, which stands for a folder."""

_MD5 = re.compile(r"[0-9a-f]{32}(\.dir)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Pointer:
    """What a pointer says of one output.

    `file` is the pointer's path in the repository, `line` where it says the MD5; `out` the path that it stands for,
    `below` what is asked for within it where it is a folder. `legacy`: it was written by DVC 1 or 2, which store
    objects elsewhere. `size` is -1 if it says none.
    """

    file: str
    line: int
    out: str
    below: str
    md5: str
    size: int
    remote: str
    legacy: bool

    @property
    def is_folder(self) -> bool:
        return self.md5.endswith(FOLDER_MARK)

    @property
    def where(self) -> str:
        return f"{self.file}:{self.line}"

    def same_content(self, other: Pointer) -> bool:
        """Whether both name the same bytes."""
        return (self.md5, self.size, self.legacy) == (other.md5, other.size, other.legacy)


def find_pointer(commit: Commit, path: str) -> Pointer:
    """The pointer that a commit has for a path of its repository.

    Raises:
        NotFoundError: there is none.
        DigestMismatchError: it cannot be what DVC wrote, or git's object is not what its name says.
        RefusedError: several claim the path, or it points to what is not stored by content.
    """
    found: list[Pointer] = []
    looked: list[str] = []
    for folder in _folders(path):
        for name in sorted(commit.names(folder)):
            if name == LOCK or (name.endswith(SUFFIX) and name != SUFFIX):
                looked.append(posixpath.join(folder, name))
                found += read_pointer(commit, looked[-1], path)
    if not found:
        raise NotFoundError(
            f"DVC knows no {path}",
            where=f"commit {commit.oid[:12]}",
            why=f"no pointer names it: looked at {', '.join(looked[:8]) or 'no .dvc file and no dvc.lock'}",
            remedy="Was the .dvc file committed, and before this revision? `path` is relative to `repo`.",
        )
    if len(found) > 1:
        raise RefusedError(
            f"several DVC pointers claim {path}",
            where=" and ".join(pointer.where for pointer in found),
            why="DVC never writes that: one of them was put there by hand",
            remedy="Remove the one that is wrong, and commit.",
        )
    return found[0]


def read_pointer(commit: Commit, file: str, path: str) -> list[Pointer]:
    """What the pointer file `file` of a commit says of `path`; raises as `find_pointer` does."""
    content = commit.read(file)
    if content is None:
        return []
    return parse_pointer(content, file, path, wdirs=_wdirs(commit, file) if posixpath.basename(file) == LOCK else {})


def working_pointer(top: Path, commit: Commit, file: str, path: str) -> list[Pointer] | None:
    """What the pointer file in the checkout says of `path`; None if it is not there. Raises as `find_pointer` does."""
    try:
        content = (top / file).read_bytes()
    except OSError:
        return None
    return parse_pointer(content, file, path, wdirs=_wdirs(commit, file) if posixpath.basename(file) == LOCK else {})


def parse_pointer(content: bytes, file: str, path: str, *, wdirs: Mapping[str, str]) -> list[Pointer]:
    """The outputs of a pointer file that are `path` or hold it.

    Args:
        content: of the file.
        file: its path in the repository.
        path: what is looked for, from the top of the repository.
        wdirs: of the stages of a `dvc.lock`, by name, the folder that their outputs are relative to.
    """
    try:
        document = read_text(content.decode("utf-8"), source=file)
    except (UnicodeDecodeError, ConfigError) as error:
        raise _damaged(file, f"it is not YAML: {error}") from error
    found = []
    for loc, wdir in _outputs(document, file, wdirs):
        entry: Any = document.at(loc)
        if not isinstance(entry, dict) or not isinstance(entry.get("path"), str):
            continue
        out = posixpath.normpath(posixpath.join(posixpath.dirname(file), wdir, entry["path"]))
        if out == path or path.startswith(f"{out}/"):
            found.append(_pointer(document, loc, file, out, path))
    return found


def _outputs(document: Document, file: str, wdirs: Mapping[str, str]) -> Iterator[tuple[Loc, str]]:
    """Locations of outputs, each with the folder that it is relative to."""
    value: Any = document.value
    if not isinstance(value, dict):
        raise _damaged(file, "it holds no mapping")
    if posixpath.basename(file) != LOCK:
        wdir = value.get("wdir", ".")
        yield from _listed(document, ("outs",), wdir if isinstance(wdir, str) else ".")
        return
    stages = value.get("stages")
    for name in stages if isinstance(stages, dict) else ():
        yield from _listed(document, ("stages", name, "outs"), wdirs.get(str(name).partition("@")[0], "."))


def _listed(document: Document, loc: Loc, wdir: str) -> Iterator[tuple[Loc, str]]:
    outs: Any = document.at(loc)
    for index in range(len(outs) if isinstance(outs, list) else 0):
        yield (*loc, index), wdir


def _wdirs(commit: Commit, lock: str) -> dict[str, str]:
    """`wdir` of the stages in the `dvc.yaml` beside a `dvc.lock`."""
    content = commit.read(posixpath.join(posixpath.dirname(lock), _RECIPE))
    try:
        value: Any = read_text((content or b"{}").decode("utf-8"), source=_RECIPE).value
    except (UnicodeDecodeError, ConfigError) as error:
        raise UserError("dvc.yaml cannot be read", where=f"{lock} at {commit.oid[:12]}", why=str(error)) from error
    stages = value.get("stages") if isinstance(value, dict) else None
    found = {}
    for name, stage in (stages if isinstance(stages, dict) else {}).items():
        inner = stage.get("do", stage) if isinstance(stage, dict) else {}
        wdir = inner.get("wdir") if isinstance(inner, dict) else None
        if isinstance(wdir, str):
            found[str(name)] = wdir
    return found


def _pointer(document: Document, loc: Loc, file: str, out: str, path: str) -> Pointer:
    entry: Any = document.at(loc)
    line = document.places[(*loc, "md5")].line if "md5" in entry else document.places[loc].line
    md5, size = entry.get("md5"), entry.get("size", -1)
    if "md5" not in entry:
        raise RefusedError(
            f"the DVC pointer has no MD5 for {out}",
            where=f"{file}:{line}",
            why="its remote keeps versions of the cloud, or DVC does not keep the file",
            remedy="Only what DVC stores by content can be checked: `dvc add` it, with a remote that is neither "
            "`version_aware` nor `worktree`.",
        )
    if not isinstance(md5, str) or not _MD5.fullmatch(md5):
        raise _damaged(f"{file}:{line}", f"{md5!r} is no MD5")
    if not isinstance(size, int) or isinstance(size, bool) or size < -1:
        raise _damaged(f"{file}:{line}", f"its size is {size!r}")
    below = path[len(out) + 1 :]
    if below and not md5.endswith(FOLDER_MARK):
        raise _damaged(f"{file}:{line}", f"{out} is a file, so there is no {below} in it")
    remote = entry.get("remote", "")
    return Pointer(
        file=file,
        line=line,
        out=out,
        below=below,
        md5=md5,
        size=size,
        remote=remote if isinstance(remote, str) else "",
        legacy=entry.get("hash") != "md5",
    )


def _damaged(where: str, why: str) -> DigestMismatchError:
    return DigestMismatchError(
        "the DVC pointer is not what DVC writes",
        where=where,
        why=why,
        remedy="Bring it back with `git checkout`, or make it anew with `dvc add`, and commit.",
    )


def _folders(path: str) -> Iterator[str]:
    """The folders around a path, from the top: a pointer stands beside or above what it points to."""
    for parent in reversed(PurePosixPath(path).parents):
        yield "" if str(parent) == "." else str(parent)
