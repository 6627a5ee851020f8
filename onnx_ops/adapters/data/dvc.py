"""Read a file of arrays or a table that DVC tracks, by path and revision.

DVC itself runs in an isolated environment. It finds the pointer of a commit, and fetches objects
that are in no cache on this machine. `load` checks the bytes against the MD5 of the pointer,
because DVC does not detect changed files in its cache or its remote.
"""

from __future__ import annotations

import hashlib
import json
import os
import posixpath
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Annotated, Any
from urllib.parse import urlsplit

from onnx_ops import codec
from onnx_ops.adapters.data.file import read_arrays, sample_arrays
from onnx_ops.adapters.isolation.environments import PythonEnvironments, find_uv
from onnx_ops.adapters.isolation.process import (
    IsolatedProcess,
    ProcessLimits,
    build_interpreter_command,
)
from onnx_ops.config.binding import bind_options
from onnx_ops.config.reach import is_url
from onnx_ops.domain.execution import Environment
from onnx_ops.domain.pipeline import DataSection, PluginData
from onnx_ops.domain.quantities import Pattern
from onnx_ops.errors import (
    DigestMismatchError,
    InfrastructureError,
    NotFoundError,
    OnnxOpsError,
    RefusedError,
    ServiceUnavailableError,
    UserError,
)
from onnx_ops.file_locks import hold_lock
from onnx_ops.ports import DataSource
from onnx_ops.ports.data import Array, Sample
from onnx_ops.scratch import Scratch, write_durably

_WORKER = "onnx_ops.adapters.data.dvc_worker:run_dvc"
_TIMEOUT_S = 3600.0
"""Seconds within which DVC must answer one request, such as a download."""

_PLUGINS: Mapping[str, str] = {
    "azure": "dvc-azure==3.1.1",
    "gs": "dvc-gs==3.1.0",
    "oss": "dvc-oss==3.0.0",
    "s3": "dvc-s3==3.3.0",
    "ssh": "dvc-ssh==4.3.0",
    "webdav": "dvc-webdav==3.0.1",
    "webdavs": "dvc-webdav==3.0.1",
}
"""Package that DVC needs for a remote, by the scheme of its URL.

Folders and http(s) need no package.
"""

_FOLDER_SUFFIX = ".dir"
"""Suffix of the MD5 of a file that lists the files of a folder."""

_MD5 = re.compile(r"[0-9a-f]{32}(\.dir)?")
_GIT_VARIABLES = (
    "GIT_DIR",
    "GIT_WORK_TREE",
    "GIT_INDEX_FILE",
    "GIT_PREFIX",
    "GIT_OBJECT_DIRECTORY",
    "GIT_COMMON_DIR",
)
"""Variables that git can set inside hooks.

With these variables, git could use another repository.
"""

_LATE_REMEDY = (
    "Check the connection to the repository and to the DVC remote. In a checkout, "
    "`dvc fetch` downloads the data into DVC's cache without this limit."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DvcOptions:
    """Options of data in a DVC repository.

    `path` is a file that DVC tracks, relative to `repo`. `repo` is a folder or a URL. A relative
    folder starts at the project's root.

    `rev` is a tag, branch or commit; empty for the commit of the checkout, or for the default
    branch of a URL. `remote` names the DVC remote; if it is empty, the remote of the pointer or
    else the repository's default is used. `md5` is the required MD5 of the pointer, if given.
    `requirements` are the packages of DVC's environment. If they are empty, the source's default
    packages and the package for the remote are installed.
    """

    path: str
    rev: str = ""
    repo: str = "."
    remote: str = ""
    md5: Annotated[str, Pattern(r"([0-9a-f]{32}(\.dir)?)?", "an MD5, as in the .dvc file")] = ""
    requirements: tuple[str, ...] = ()

    @property
    def is_url(self) -> bool:
        """Whether `repo` is a URL. A local copy of such a repository is stored."""
        return is_url(self.repo)


@dataclass(frozen=True, slots=True, kw_only=True)
class DvcPointer:
    """DVC's record of one output.

    The record contains the pointer file, the MD5 and the size (-1 if unknown) of the output, and
    where its objects are. `remote` is the remote that the pointer names; it can be empty. `scheme`
    is the scheme of the URL of the remote that is used; empty for a folder. `cache` is the folder
    of objects on this machine; empty if there is none. With `legacy`, the objects are stored in the
    layout of DVC 1 and 2.
    """

    file: str
    out: str
    md5: str | None
    size: int
    remote: str
    scheme: str
    legacy: bool
    cache: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _TrackedFile:
    """A tracked file at a commit.

    `folder` is where git runs; it is a bare repository unless `is_checkout`. `path` is relative to
    the top of the repository. `inner` is the path of `folder` below this top.
    """

    options: DvcOptions
    folder: Path
    is_checkout: bool
    commit: str
    path: str
    inner: str
    pointer: DvcPointer


@dataclass(frozen=True, slots=True, kw_only=True)
class DvcSource(DataSource):
    """Data sets of `source: dvc`.

    Args:
        environments: folder of the environment with DVC, which is created on first use.
        repositories: folder of local copies of repositories that have a URL, and of the pointers
            that DVC found.
        requirements: default packages of DVC's environment, apart from those for remotes.
    """

    environments: Path = Path(".onnx-ops/environments")
    repositories: Path = Path(".onnx-ops/repositories")
    requirements: tuple[str, ...] = ("dvc==3.67.1",)

    def with_folders(self, environments: Path, state: Path) -> DvcSource:
        """Return the same source with environments and state below these folders."""
        return replace(self, environments=environments, repositories=state / "repositories")

    def fingerprint(self, section: DataSection, root: Path) -> str:
        """Return MD5, size, and the file's path within a tracked folder."""
        tracked = self._find(section, root)
        below = tracked.path[len(tracked.pointer.out) + 1 :]
        return f"dvc {tracked.pointer.md5} {tracked.pointer.size} {below}".rstrip()

    def origin(self, section: DataSection, root: Path) -> Mapping[str, str]:
        """Return repository, revision, commit, path and MD5."""
        tracked = self._find(section, root)
        return {
            "kind": "dvc",
            "repo": tracked.options.repo,
            "rev": tracked.options.rev or "HEAD",
            "commit": tracked.commit,
            "path": tracked.options.path,
            "md5": str(tracked.pointer.md5),
        }

    def list_dependencies(self, section: DataSection) -> Iterable[str]:
        """Yield the possible pointer files; nothing for a URL or if `rev` is set.

        These are the `.dvc` files of the path and of the folders above it, and the files `dvc.lock`
        in these folders.
        """
        options = _read_options(section)
        if options.is_url or options.rev:
            return
        path = PurePosixPath(posixpath.normpath(posixpath.join(options.repo, options.path)))
        for place in (path, *path.parents):
            if place.name not in ("", ".."):
                yield from (f"{place}.dvc", str(place.parent / "dvc.lock"))

    def sample(self, section: DataSection, root: Path) -> Sample | None:
        """Read the first rows of the file in the checkout, without DVC.

        Neither the pointer nor the MD5 of the file is checked, because DVC could need the network.
        The result is None for a URL, if `rev` is set, or for a file that is not checked out.

        Raises:
            NotFoundError: the checkout lacks the file, and no file of DVC in the repository can
                track it.
        """
        options = _read_options(section)
        copy = root / options.repo / options.path
        if options.is_url or options.rev:
            return None
        if copy.is_file():
            return sample_arrays(copy, where=options.path)
        # A stage of any folder can write the path, and `dvc.lock` then lists it.
        locks = _git(root / options.repo, "ls-files", "--", ":(glob)**/dvc.lock")
        can_be_tracked = locks.returncode or locks.stdout
        candidates = (root / place for place in self.list_dependencies(section))
        if not (can_be_tracked or any(place.is_file() for place in candidates)):
            raise NotFoundError(
                f"DVC does not track {options.path}",
                where=options.repo,
                why="the repository has no dvc.lock, and no .dvc file for the path",
                remedy="Correct `path`, which is relative to `repo`. If it is right, run `dvc add` "
                "for a file, or `dvc repro` for the output of a stage.",
            )
        return None

    def load(self, section: DataSection, root: Path) -> Mapping[str, Array]:
        """Read the file from DVC's cache or remote, after checking it against its MD5.

        Raises:
            NotFoundError: the repository, the revision, the pointer or the data does not exist.
            RefusedError: the pointer lacks an MD5, there are several pointers, or an option is not
                permitted.
            DigestMismatchError: the pointer is invalid, or differs from the pinned MD5, the
                checkout or the data.
            InfrastructureError: DVC fails, or its cache, the repository or the remote cannot be
                read.
            UserError: the options, the remote or the file are not valid.
            MissingPackageError: DVC or the format of the file needs a package that is missing.
        """
        tracked = self._find(section, root)
        pointer = tracked.pointer
        with Scratch() as folder:
            copy, place = self._copy_object(tracked, str(pointer.md5), folder)
            if str(pointer.md5).endswith(_FOLDER_SUFFIX):
                copy, _ = self._copy_object(tracked, _find_in_folder(tracked, copy, place), folder)
            elif pointer.size not in (-1, copy.stat().st_size):
                raise _wrong_pointer(
                    pointer,
                    f"the pointer states {pointer.size} bytes; {place} has {copy.stat().st_size}",
                )
            where = f"{tracked.options.path} at {tracked.commit[:12]}"
            return read_arrays(copy, where=where, name=tracked.options.path)

    def _find(self, section: DataSection, root: Path) -> _TrackedFile:
        options = _read_options(section)
        folder, inner = root / options.repo, "."
        if options.is_url:
            folder = self._refresh_mirror(options)
        commit = _find_commit(folder, options.rev, options.repo if options.is_url else "")
        top = _git(folder, "rev-parse", "--show-toplevel")
        if is_checkout := not (options.is_url or top.returncode):
            inner = folder.resolve().relative_to(Path(_text(top)).resolve()).as_posix()
        path = posixpath.normpath(posixpath.join(inner, options.path))
        pointer = self._find_pointer(options, folder, commit, path)
        tracked = _TrackedFile(
            options=options,
            folder=folder,
            is_checkout=is_checkout,
            commit=commit,
            path=path,
            inner=inner,
            pointer=pointer,
        )
        if is_checkout and commit == _find_commit(folder, ""):
            self._check_checkout(tracked, Path(_text(top)))
        if options.md5 and options.md5 != pointer.md5:
            raise DigestMismatchError(
                f"the DVC pointer of {options.path} differs from the MD5 in the pipeline file",
                where=f"{pointer.file} at {commit[:12]}",
                why=f"the pointer names MD5 {pointer.md5}; the pipeline file names {options.md5}",
                remedy="If the data changed intentionally, write its MD5 into the pipeline file.",
            )
        return tracked

    def _find_pointer(
        self, options: DvcOptions, folder: Path, commit: str, path: str
    ) -> DvcPointer:
        """Return the pointer of a file at a commit; request it from DVC only once.

        A commit never changes, so the pointer of a commit, path and remote is stored.

        Raises:
            NotFoundError: DVC does not track the file at this commit, or is unused in the
                repository.
            RefusedError: the pointer lacks an MD5, or there are several pointers.
            DigestMismatchError: the pointer is not valid, or DVC cannot read the repository.
            InfrastructureError: DVC fails.
        """
        key = json.dumps([str(folder.resolve()), commit, path, options.remote])
        stored = (
            self.repositories / "pointers" / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.json"
        )
        with suppress(OSError, ValueError, OnnxOpsError):
            return codec.loads(stored.read_bytes(), DvcPointer)
        place = str(folder.resolve())
        answers = self._ask(
            options, (), "find", repo=place, rev=commit, path=path, remote=options.remote
        )
        if not answers:
            raise NotFoundError(
                f"DVC does not track {path}",
                where=f"commit {commit[:12]}",
                why="neither a .dvc file nor a dvc.yaml of that commit names this path",
                remedy="Check that this revision contains the .dvc file or dvc.yaml. `path` is "
                "relative to `repo`.",
            )
        pointer = codec.from_json(answers[0], DvcPointer)
        if not pointer.md5:
            raise RefusedError(
                f"the DVC pointer has no MD5 for {pointer.out}",
                where=pointer.file,
                why="`dvc.lock` lacks an entry for it, the remote uses cloud versioning, or an "
                "import was not downloaded",
                remedy="For a stage output, run `dvc repro` and commit `dvc.lock`. For an import, "
                "run `dvc update` and commit the pointer. Otherwise turn off `version_aware` and "
                "`worktree` of the remote, run `dvc add`, commit the pointer, and run `dvc push`.",
            )
        if not _MD5.fullmatch(pointer.md5):
            raise _wrong_pointer(pointer, f"{pointer.md5!r} is not an MD5")
        if pointer.size < -1:
            raise _wrong_pointer(pointer, f"its size is {pointer.size}")
        if path != pointer.out and not pointer.md5.endswith(_FOLDER_SUFFIX):
            raise _wrong_pointer(pointer, f"{pointer.out} is a file and cannot contain {path}")
        write_durably(stored, codec.dumps(pointer))
        return pointer

    def _check_checkout(self, tracked: _TrackedFile, top: Path) -> None:
        """Raise DigestMismatchError if an uncommitted change alters the pointer.

        Only the MD5 and the size in the pointer are compared. A deleted pointer file is not an
        error.
        """
        file, path = tracked.pointer.file, tracked.path
        if (
            not (top / file).is_file()
            or not _git(top, "diff", "--quiet", tracked.commit, "--", file).returncode
        ):
            return
        place = str(tracked.folder.resolve())
        answers = self._ask(tracked.options, (), "find", repo=place, rev="", path=path, remote="")
        changed = [codec.from_json(pointer, DvcPointer) for pointer in answers]
        if [(pointer.md5, pointer.size) for pointer in changed] != [
            (tracked.pointer.md5, tracked.pointer.size)
        ]:
            stated = (
                f"{changed[0].md5} ({changed[0].size} bytes)"
                if changed
                else f"no MD5 of {tracked.pointer.out}"
            )
            raise DigestMismatchError(
                f"the DVC pointer of {tracked.pointer.out} was changed and not committed",
                where=file,
                why=f"the checkout names {stated}; the commit names {tracked.pointer.md5} "
                f"({tracked.pointer.size} bytes)",
                remedy="Commit the change and update `rev` if it is set. Or restore the pointer "
                f"with `git -C {shlex.quote(str(top))} checkout HEAD -- {shlex.quote(file)}`.",
            )

    def _copy_object(self, tracked: _TrackedFile, md5: str, scratch: Path) -> tuple[Path, str]:
        """Copy an object from the cache or else the remote, and check the copy.

        Returns:
            The copy and its origin.

        Raises:
            NotFoundError: neither the cache nor the remote has the object.
            UserError: the remote is missing, or does not store objects by MD5.
            MissingPackageError: DVC needs another package for the remote.
            DigestMismatchError: the object does not match its MD5.
            InfrastructureError: DVC fails, or the cache or the remote cannot be read.
        """
        pointer, copy = tracked.pointer, scratch / md5
        cached = Path(pointer.cache) / md5[:2] / md5[2:]
        if pointer.cache and _copy_cached(cached, copy):
            _check_object(
                copy,
                pointer,
                "DVC cache file",
                str(cached),
                "Delete the cache file, then run `dvc fetch`",
            )
            return copy, str(cached)
        answer = self._ask(
            tracked.options,
            (_PLUGINS[pointer.scheme],) if pointer.scheme in _PLUGINS else (),
            "fetch",
            repo=str(tracked.folder.resolve()),
            # In a checkout, DVC reads the config files of the working tree, because a commit does
            # not contain the credentials.
            rev="" if tracked.is_checkout else tracked.commit,
            remote=tracked.options.remote or pointer.remote,
            md5=md5,
            legacy=pointer.legacy,
            copy=str(copy),
        )
        if not answer["found"]:
            raise NotFoundError(
                f"DVC has no copy of {pointer.out}",
                where=pointer.file,
                why=f"neither the cache nor the remote has {md5}: {answer['place']}",
                remedy=f"{_advise_push(tracked, md5)}, on the machine that added the data. DVC "
                "does not push imported data: set `repo` to the repository that it comes from. If "
                "no copy exists, check whether the pointer was edited manually.",
            )
        remedy = f"Delete that object. {_advise_push(tracked, md5)} and with an undamaged cache"
        _check_object(copy, pointer, "object in the DVC remote", answer["place"], remedy)
        return copy, str(answer["place"])

    def _ask(
        self, options: DvcOptions, packages: tuple[str, ...], do: str, **arguments: object
    ) -> Any:
        """Send one request to DVC in a new process of its environment.

        `do` is a method of `DvcWorker`. `packages` are added to the default packages.
        """
        requirements = options.requirements or (*self.requirements, *packages)
        environments = PythonEnvironments(folder=self.environments.resolve(), base=(), uv=find_uv())
        command = build_interpreter_command(
            environments.python(Environment(requirements=requirements)), _WORKER
        )
        process = IsolatedProcess(command, ProcessLimits(), "data", late_remedy=_LATE_REMEDY)
        try:
            return process.ask(do, timeout=_TIMEOUT_S, **arguments)
        finally:
            process.stop()

    def _refresh_mirror(self, options: DvcOptions) -> Path:
        """Create or update the bare copy of a repository; return its folder.

        If `rev` is a full hash and the copy has this commit, the copy is not updated.

        Raises:
            ServiceUnavailableError: the repository cannot be cloned or fetched.
        """
        mirror = self.repositories / hashlib.sha256(options.repo.encode()).hexdigest()[:16]
        with hold_lock(mirror.with_suffix(".lock")):
            if not (mirror / "HEAD").is_file():
                done = _git(
                    mirror.parent, "clone", "--bare", "--quiet", "--", options.repo, str(mirror)
                )
            elif (
                len(options.rev) in (40, 64)
                and not _git(mirror, "cat-file", "-e", f"{options.rev}^{{commit}}").returncode
            ):
                return mirror
            else:
                done = _fetch(mirror)
        if done.returncode:
            raise ServiceUnavailableError(
                "git could not clone or update the repository",
                where=options.repo,
                why=_last_error(done),
                remedy=f"Try `git ls-remote {shlex.quote(options.repo)}`. Git's own credential "
                "helpers and SSH keys are used, without prompts. If it works, delete "
                f"{mirror}: it is cloned again.",
            )
        return mirror


def _read_options(section: DataSection) -> DvcOptions:
    if not isinstance(section, PluginData) or section.source != "dvc":
        raise UserError("the data section has no `source: dvc`", where=type(section).__name__)
    options = bind_options(
        section.options,
        DvcOptions,
        where="data.options",
        remedy="Set the options as in this example: `options: {path: data/train.npz}`.",
    )
    path = PurePosixPath(options.path)
    if path.is_absolute() or ".." in path.parts or not path.parts or "\0" in options.path:
        raise RefusedError(
            "the path is empty, `.` or absolute, or contains `..` or a null byte",
            where=f"data.options.path: {options.path}",
            remedy="Write the path of a file relative to `repo`, with slashes.",
        )
    if "://" in options.repo and urlsplit(options.repo).password is not None:
        raise RefusedError(
            "a pipeline file must not contain a password",
            where="data.options.repo",
            why="the URL contains a password, which the stored lineage would contain too",
            remedy="Remove the password from the URL; use git's credential helper or an SSH key.",
        )
    return options


def _find_in_folder(tracked: _TrackedFile, listing: Path, place: str) -> str:
    """Return the MD5 of a file within a tracked folder.

    `listing` is a copy of the object that the pointer names. It lists the files of the folder.

    Raises:
        DigestMismatchError: the object does not list files with their MD5.
        NotFoundError: the folder does not contain the file.
    """
    pointer = tracked.pointer
    try:
        files = {
            str(entry["relpath"]): str(entry["md5"]) for entry in json.loads(listing.read_bytes())
        }
    except (ValueError, TypeError, KeyError) as error:
        raise _wrong_pointer(
            pointer, f"the object that it names is not a list of files: {place}"
        ) from error
    if unclear := [md5 for md5 in files.values() if not _MD5.fullmatch(md5)]:
        raise _wrong_pointer(
            pointer, f"the list of files contains an invalid MD5: {unclear[0]!r} in {place}"
        )
    below = tracked.path[len(pointer.out) + 1 :]
    if below not in files:
        example = f"{pointer.out}/{min(files, default='FILE')}"
        raise NotFoundError(
            f"{pointer.out} has no file {below}" if below else f"{pointer.out} is a folder",
            where=pointer.file,
            why=f"the folder contains {', '.join(sorted(files)[:8])}",
            remedy=f"Set `path` to one file, such as {posixpath.relpath(example, tracked.inner)}.",
        )
    return files[below]


def _advise_push(tracked: _TrackedFile, md5: str) -> str:
    """Return the part of a remedy that uploads an object which the remote lacks.

    If the remote has the list of a folder, `dvc push` assumes that it has the folder's files too.
    """
    folder, remote = str(tracked.pointer.md5), tracked.options.remote
    first = (
        f"Delete the object {folder[:2]}/{folder[2:]} in the remote: without this list of the "
        "folder, DVC checks each file. "
    )
    command = f"dvc push --remote {shlex.quote(remote)}" if remote else "dvc push"
    return (
        f"{first if md5 != folder else ''}Run `{command}` with commit {tracked.commit[:12]} "
        "checked out"
    )


def _wrong_pointer(pointer: DvcPointer, why: str) -> DigestMismatchError:
    return DigestMismatchError(
        "the DVC pointer is not valid",
        where=pointer.file,
        why=why,
        remedy="Restore an earlier version of the pointer with `git checkout COMMIT -- FILE`, or "
        "recreate it with `dvc add` (`dvc.lock`: `dvc repro`). Then commit, and update `rev` if it "
        "is set.",
    )


def _check_object(copy: Path, pointer: DvcPointer, what: str, place: str, remedy: str) -> None:
    """Raise DigestMismatchError if the MD5 of a copy differs from its file name.

    The copy is deleted in this case. `what`, `place` and `remedy` are parts of the error.
    """
    wanted = copy.name.removesuffix(_FOLDER_SUFFIX)
    with copy.open("rb") as stream:
        digest = hashlib.file_digest(stream, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
    if digest != wanted:
        copy.unlink()
        raise DigestMismatchError(
            f"the {what} does not match its pointer",
            where=place,
            why=f"its MD5 is {digest}; {pointer.file} requires {wanted}",
            remedy=f"The data was damaged or changed; DVC does not detect this. {remedy}.",
        )


def _copy_cached(source: Path, copy: Path) -> bool:
    """Copy a file of the cache; return whether the file exists.

    Only the copy is checked and read, since other processes can write to the original.

    Raises:
        InfrastructureError: the file cannot be read.
    """
    try:
        shutil.copyfile(source, copy)
    except FileNotFoundError:
        return False
    except OSError as error:
        raise InfrastructureError(
            "the DVC cache file cannot be copied",
            where=str(source),
            why=error.strerror or str(error),
            remedy="Check the permissions of the file, and the free space for temporary files.",
        ) from error
    return True


def _find_commit(folder: Path, rev: str, url: str = "") -> str:
    """Return the commit that a tag, branch or hash names.

    An empty `rev` names the commit of the checkout, or of the default branch in a copy. A branch
    can exist only at `origin`, as in a new clone. `url` is the URL of the repository of which
    `folder` is a copy.

    Raises:
        NotFoundError: `folder` is not a git repository, or lacks the revision.
        InfrastructureError: git is not installed.
    """
    repository = _git(folder, "rev-parse", "--git-dir")
    if repository.returncode:
        why = _last_error(repository)
        remedy = (
            "Set `repo` to a folder of a checkout, relative to the project's root, or to a URL."
        )
        if why.startswith("git config "):
            # For a repository of another owner, git's last line is the command that permits it.
            why, remedy = "the repository has another owner", f"Run `{why}`."
        raise NotFoundError(
            "git cannot open the repository", where=url or str(folder), why=why, remedy=remedy
        )
    for name in (rev, f"refs/remotes/origin/{rev}") if rev else ("HEAD",):
        done = _git(
            folder, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{name}^{{commit}}"
        )
        if not done.returncode:
            return _text(done)
    raise _missing_revision(folder, rev, url)


def _fetch(mirror: Path) -> subprocess.CompletedProcess[bytes]:
    """Fetch the branches, the tags and HEAD of a bare copy; return git's last process.

    `git fetch` does not change HEAD of the copy, so it is set here. Otherwise, the copy would keep
    the default branch of the time when it was cloned.
    """
    listed = _git(mirror, "ls-remote", "--symref", "origin", "HEAD")
    if listed.returncode:
        return listed
    # The list also contains branches such as `x/HEAD`. The first line of HEAD names its branch; if
    # HEAD is detached, it contains the commit.
    lines = _text(listed).splitlines()
    head = next((line.removesuffix("\tHEAD") for line in lines if line.endswith("\tHEAD")), "")
    refs = ["+refs/heads/*:refs/heads/*", "+refs/tags/*:refs/tags/*", *(["HEAD"] if head else [])]
    fetched = _git(mirror, "fetch", "--quiet", "--prune", "origin", *refs)
    if fetched.returncode or not head:
        return fetched
    if head.startswith("ref: "):
        return _git(mirror, "symbolic-ref", "HEAD", head.removeprefix("ref: "))
    return _git(mirror, "update-ref", "--no-deref", "HEAD", head)


def _missing_revision(folder: Path, rev: str, url: str) -> NotFoundError:
    listed = f"`git ls-remote --heads --tags {shlex.quote(url)}` lists branches and tags."
    if not rev:
        return NotFoundError(
            "the default branch has no commit" if url else "nothing was committed yet",
            where=url or str(folder),
            remedy=f"Set `rev`: {listed}" if url else "Commit the DVC pointer, or set `rev`.",
        )
    return NotFoundError(
        f"there is no revision {rev!r}",
        where=url or str(folder),
        why="git has no tag, branch or commit with that name",
        remedy=f"Correct `rev`: {listed}"
        if url
        else "List tags and branches with `git tag` and `git branch --all`. A shallow clone lacks "
        "most of them: run `git fetch --tags --unshallow`, or set `fetch-depth: 0` in GitHub's "
        "checkout action.",
    )


def _git(folder: Path, *arguments: str) -> subprocess.CompletedProcess[bytes]:
    environ = {key: value for key, value in os.environ.items() if key not in _GIT_VARIABLES}
    environ |= {"GIT_NO_REPLACE_OBJECTS": "1", "GIT_TERMINAL_PROMPT": "0", "LC_ALL": "C"}
    try:
        return subprocess.run(
            ["git", *arguments],
            cwd=folder,
            env=environ,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            check=False,
        )
    except FileNotFoundError as error:
        if not folder.is_dir():
            remedy = "Set `repo` to a folder relative to the project's root, or to a URL."
            raise NotFoundError("no such folder", where=str(folder), remedy=remedy) from error
        raise InfrastructureError("git is not installed", where=str(folder)) from error
    except (NotADirectoryError, ValueError) as error:
        raise UserError("git could not be started", where=str(folder), why=str(error)) from error


def _text(done: subprocess.CompletedProcess[bytes]) -> str:
    return done.stdout.decode(errors="surrogateescape").strip()


def _last_error(done: subprocess.CompletedProcess[bytes]) -> str:
    lines = done.stderr.decode(errors="replace").strip().splitlines()
    return lines[-1].strip() if lines else "git printed no error"
