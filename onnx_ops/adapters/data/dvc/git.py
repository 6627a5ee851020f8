"""What git is asked. Nothing of it is believed that a hash can show: objects are checked against their names."""

from __future__ import annotations

import hashlib
import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from onnx_ops.errors import DigestMismatchError, InfrastructureError, NotFoundError, ServiceUnavailableError, UserError

_REGULAR = ("100644", "100755")
_FOLDER = "40000"
_SHA1_DIGITS = 40
_SHA256_DIGITS = 64
_NOT_INHERITED = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_PREFIX", "GIT_OBJECT_DIRECTORY", "GIT_COMMON_DIR")
"""Set inside hooks; they would choose another repository."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One name in a folder of a commit."""

    mode: str
    oid: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """The files of a commit. `folder` is where git runs; `oid` the whole name of the commit."""

    folder: Path
    oid: str

    def names(self, folder: str = "") -> Mapping[str, Entry]:
        """What a folder of the commit holds; empty if there is no such folder.

        Raises:
            DigestMismatchError: an object of git is not what its name says.
        """
        tree = _header(self._object("commit", self.oid), b"tree")
        for part in (part for part in folder.split("/") if part):
            entry = _entries(self._object("tree", tree), len(self.oid)).get(part)
            if entry is None or entry.mode != _FOLDER:
                return {}
            tree = entry.oid
        return _entries(self._object("tree", tree), len(self.oid))

    def read(self, path: str) -> bytes | None:
        """A file of the commit, or None if there is no regular one; raises as `names` does."""
        folder, _, name = path.rpartition("/")
        entry = self.names(folder).get(name)
        return self._object("blob", entry.oid) if entry is not None and entry.mode in _REGULAR else None

    def _object(self, kind: str, oid: str) -> bytes:
        done = _run(self.folder, "cat-file", kind, oid)
        if done.returncode:
            raise DigestMismatchError(
                f"git cannot read the {kind} {oid}",
                where=str(self.folder),
                why=_said(done),
                remedy="`git fsck` names what is damaged or missing; `git fetch --refetch` brings it again.",
            )
        digest = hashlib.sha256() if len(oid) == _SHA256_DIGITS else hashlib.sha1(usedforsecurity=False)
        digest.update(b"%s %d\0" % (kind.encode(), len(done.stdout)))
        digest.update(done.stdout)
        if digest.hexdigest() != oid:
            raise DigestMismatchError(
                f"the git object {oid} is not what its name says",
                where=str(self.folder),
                why=f"its content has the name {digest.hexdigest()}: somebody has changed the repository's files",
                remedy="Clone the repository anew from where you trust it; `git fsck` shows what else was changed.",
            )
        return done.stdout


def find_commit(folder: Path, rev: str, *, shown: str = "") -> Commit:
    """The commit that a tag, branch or hash names; an empty one is what is checked out.

    Raises:
        NotFoundError: the folder is in no git repository, or that has no such commit.
    """
    if _run(folder, "rev-parse", "--git-dir").returncode:
        raise NotFoundError(
            "this is no git repository",
            where=shown or str(folder),
            why=_said(_run(folder, "rev-parse", "--git-dir")),
            remedy="`repo` is a folder of a checkout, relative to the project's root, or a URL.",
        )
    done = _run(folder, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{rev or 'HEAD'}^{{commit}}")
    if done.returncode:
        raise NotFoundError(
            f"there is no revision {rev!r}" if rev else "nothing was committed yet",
            where=shown or str(folder),
            why="git knows no tag, branch or commit of that name",
            remedy="Look for it with `git tag` and `git branch`. A shallow clone lacks them: `git fetch --tags "
            "--unshallow`, in GitHub's checkout `fetch-depth: 0`.",
        )
    return Commit(folder=folder, oid=done.stdout.decode().strip())


def worktree(folder: Path) -> Path | None:
    """The top of the checkout around a folder; None for a bare repository or none."""
    done = _run(folder, "rev-parse", "--show-toplevel")
    return Path(done.stdout.decode(errors="surrogateescape").rstrip("\n")) if done.returncode == 0 else None


def refresh_mirror(url: str, mirror: Path, rev: str) -> None:
    """Bring a bare copy of a repository up to date, unless it holds the commit that `rev` names in full.

    Raises:
        ServiceUnavailableError: the repository cannot be reached.
    """
    if not (mirror / "HEAD").is_file():
        mirror.parent.mkdir(parents=True, exist_ok=True)
        done = _run(mirror.parent, "clone", "--bare", "--quiet", "--", url, str(mirror))
    elif (
        len(rev) in (_SHA1_DIGITS, _SHA256_DIGITS)
        and _run(mirror, "cat-file", "-e", f"{rev}^{{commit}}").returncode == 0
    ):
        return
    else:
        refs = ("+refs/heads/*:refs/heads/*", "+refs/tags/*:refs/tags/*")
        done = _run(mirror, "fetch", "--quiet", "--prune", "origin", *refs)
    if done.returncode:
        raise ServiceUnavailableError(
            "the repository cannot be reached",
            where=url,
            why=_said(done),
            remedy="Try `git ls-remote URL`; git's own credential helpers and SSH keys are used, and nothing is asked.",
        )


def _run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[bytes]:
    environ = {key: value for key, value in os.environ.items() if key not in _NOT_INHERITED}
    environ |= {"GIT_NO_REPLACE_OBJECTS": "1", "GIT_TERMINAL_PROMPT": "0", "LC_ALL": "C"}
    try:
        return subprocess.run(
            ["git", *arguments], cwd=folder, env=environ, stdin=subprocess.DEVNULL, capture_output=True, check=False
        )
    except FileNotFoundError as error:
        if not folder.is_dir():
            raise NotFoundError(
                "no such folder", where=str(folder), remedy="`repo` is relative to the project's root."
            ) from error
        raise InfrastructureError("git is not installed", where=str(folder)) from error
    except (NotADirectoryError, ValueError) as error:
        raise UserError("git cannot be asked here", where=str(folder), why=str(error)) from error


def _said(done: subprocess.CompletedProcess[bytes]) -> str:
    lines = done.stderr.decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else "git said nothing"


def _header(commit: bytes, name: bytes) -> str:
    """The first line of a commit names its tree."""
    key, _, value = commit.partition(b"\n")[0].partition(b" ")
    return value.decode() if key == name else ""


def _entries(tree: bytes, digits: int) -> Mapping[str, Entry]:
    """Mode, space, name, zero byte, and the name of the object as bytes; again and again."""
    found, position, width = {}, 0, digits // 2
    while position < len(tree):
        end = tree.index(b"\0", position)
        mode, _, name = tree[position:end].partition(b" ")
        oid = tree[end + 1 : end + 1 + width].hex()
        found[name.decode(errors="surrogateescape")] = Entry(mode=mode.decode(), oid=oid)
        position = end + 1 + width
    return found
