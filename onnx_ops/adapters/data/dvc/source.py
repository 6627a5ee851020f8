"""Arrays from a `.npz`, `.csv` or `.parquet` file that DVC keeps, by path and revision."""

from __future__ import annotations

import hashlib
import posixpath
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from onnx_ops.adapters.data.dvc.config import DvcConfig, read_config
from onnx_ops.adapters.data.dvc.git import Commit, find_commit, refresh_mirror, worktree
from onnx_ops.adapters.data.dvc.objects import Objects
from onnx_ops.adapters.data.dvc.pointers import LOCK, SUFFIX, Pointer, find_pointer, working_pointer
from onnx_ops.adapters.data.dvc.settings import DvcSettings, settings_of
from onnx_ops.adapters.data.file import read_arrays, sample_arrays
from onnx_ops.adapters.isolation.environments import PythonEnvironments, find_uv, hold_lock
from onnx_ops.domain.execution import Environment
from onnx_ops.domain.pipeline import DataSection
from onnx_ops.errors import DigestMismatchError, NotFoundError
from onnx_ops.ports.data import Array, Sample
from onnx_ops.scratch import Scratch

_FOLDER = ".dvc"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    """A pointer, and the repository it is in; `top` is the checkout, or None where there is only a copy of git's
    objects. `folder` is the path of `repo` in it."""

    settings: DvcSettings
    commit: Commit
    pointer: Pointer
    top: Path | None
    folder: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DvcSource:
    """`use: dvc`. Reads pointers out of git by itself and believes no byte that does not have their MD5.

    Args:
        environments: where the environment with DVC is made, once something must be fetched from a remote.
        repositories: where copies of repositories with a URL are kept.
    """

    environments: Path = Path(".onnx-ops/environments")
    repositories: Path = Path(".onnx-ops/repositories")
    requirements: tuple[str, ...] = ("dvc==3.67.1",)

    def housed(self, environments: Path, kept: Path) -> DvcSource:
        return replace(self, environments=environments, repositories=kept / "repositories")

    def fingerprint(self, section: DataSection, root: Path) -> str:
        pointer = self._find(section, root).pointer
        return f"dvc {pointer.md5} {pointer.size} {pointer.below}".rstrip()

    def origin(self, section: DataSection, root: Path) -> Mapping[str, str]:
        found = self._find(section, root)
        return {
            "kind": "dvc",
            "repo": found.settings.repo,
            "rev": found.settings.rev or "HEAD",
            "commit": found.commit.oid,
            "path": found.settings.path,
            "md5": found.pointer.md5,
        }

    def rests_on(self, section: DataSection) -> Iterable[str]:
        """The pointers of the project, unless a revision is pinned: another commit changes nothing then."""
        settings = settings_of(section)
        if settings.is_url or settings.rev:
            return
        path = posixpath.normpath(posixpath.join(settings.repo, settings.path))
        while path:
            yield f"{path}{SUFFIX}"
            path = posixpath.dirname(path)
            yield posixpath.join(path, LOCK)

    def sample(self, section: DataSection, root: Path) -> Sample | None:
        """Of the copy in the checkout, whose digest is left to `load`."""
        settings = settings_of(section)
        if settings.is_url:
            return None
        self._find(section, root)
        copy = root / settings.repo / settings.path
        return None if settings.rev or not copy.is_file() else sample_arrays(copy, where=settings.path)

    def load(self, section: DataSection, root: Path) -> Mapping[str, Array]:
        found = self._find(section, root)
        with Scratch() as folder, self._objects(found, folder) as objects:
            copy = objects.file(found.pointer)
            return read_arrays(
                copy, where=f"{found.settings.path} at {found.commit.oid[:12]}", name=found.settings.path
            )

    def _find(self, section: DataSection, root: Path) -> _Found:
        settings = settings_of(section)
        place, top, folder = root / settings.repo, None, ""
        if settings.is_url:
            commit = self._mirrored(settings)
        else:
            commit, top = find_commit(place, settings.rev), worktree(place)
            folder = place.resolve().relative_to(top.resolve()).as_posix() if top is not None else ""
        path = posixpath.normpath(posixpath.join(folder, settings.path))
        pointer = find_pointer(commit, path)
        if top is not None and find_commit(top, "").oid == commit.oid:
            _compare(pointer, working_pointer(top, commit, pointer.file, path))
        if settings.md5 and settings.md5 != pointer.md5:
            raise DigestMismatchError(
                f"the DVC pointer of {settings.path} is not the one that the pipeline pins",
                where=f"{pointer.where} at {commit.oid[:12]}",
                why=f"it says {pointer.md5}, the pipeline file {settings.md5}",
                remedy="If the data was meant to change, write its MD5 into the pipeline file.",
            )
        return _Found(settings=settings, commit=commit, pointer=pointer, top=top, folder=folder)

    def _mirrored(self, settings: DvcSettings) -> Commit:
        url = settings.repo
        mirror = self.repositories / hashlib.sha256(url.encode()).hexdigest()[:16]
        with hold_lock(mirror.with_suffix(".lock")):
            refresh_mirror(url, mirror, settings.rev)
            return find_commit(mirror, settings.rev, shown=url)

    @contextmanager
    def _objects(self, found: _Found, scratch: Path) -> Iterator[Objects]:
        copies = scratch / "objects"
        copies.mkdir()
        objects = Objects(
            config=_config(found, scratch),
            remote=found.settings.remote,
            python=lambda packages: self._python(found.settings, packages),
            scratch=copies,
        )
        with closing(objects):
            yield objects

    def _python(self, settings: DvcSettings, packages: tuple[str, ...]) -> Path:
        wanted = settings.requirements or (*self.requirements, *packages)
        environments = PythonEnvironments(folder=self.environments.resolve(), base=(), uv=find_uv())
        return environments.python(Environment(requirements=wanted))


def _config(found: _Found, scratch: Path) -> DvcConfig:
    """That of the checkout as it is now, which also has the credentials; else that of the commit."""
    parts = found.folder.split("/") if found.folder not in ("", ".") else []
    if found.top is not None:
        for depth in range(len(parts), -1, -1):
            folder = found.top.joinpath(*parts[:depth], _FOLDER)
            if folder.is_dir():
                return read_config(folder)
        raise NotFoundError("this is no DVC repository", where=str(found.top), remedy="`dvc init` makes one.")
    folder = scratch / _FOLDER
    folder.mkdir()
    (folder / "config").write_bytes(found.commit.read(f"{_FOLDER}/config") or b"")
    return read_config(folder, has_cache=False)


def _compare(committed: Pointer, working: list[Pointer] | None) -> None:
    """What a person sees in the checkout of this very commit is what is used, or nothing is."""
    if working is None or (len(working) == 1 and working[0].same_content(committed)):
        return
    said = working[0].md5 if working else "nothing"
    raise DigestMismatchError(
        f"the DVC pointer of {committed.out} was changed and not committed",
        where=working[0].where if working else committed.file,
        why=f"it says {said} ({working[0].size} bytes); the commit says {committed.md5} ({committed.size} bytes)"
        if working
        else f"it does not name {committed.out} any more; the commit says {committed.md5}",
        remedy="Commit the change and name that revision, or bring the pointer back with `git checkout`.",
    )
