"""Objects of DVC by their MD5, from its cache or a remote, each hashed here before anybody reads it."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from onnx_ops.adapters.data.dvc.config import DvcConfig
from onnx_ops.adapters.data.dvc.pointers import FOLDER_MARK, Pointer
from onnx_ops.adapters.isolation.process import ProcessLimits, WorkerProcess, build_interpreter_command
from onnx_ops.errors import DigestMismatchError, InfrastructureError, NotFoundError

INSIDE = "onnx_ops.adapters.data.dvc.inside:main"

PATIENCE_S = 3600.0
"""Seconds in which one object must have come."""

_CHUNK = 1 << 20


@dataclass(slots=True, kw_only=True)
class Objects:
    """What a pointer of one repository stands for.

    Args:
        config: of the repository.
        remote: name of the one that is asked for, or empty.
        python: the interpreter with DVC, given the packages that the remote needs; made when something must be fetched.
        scratch: an empty folder for copies.
    """

    config: DvcConfig
    remote: str
    python: Callable[[tuple[str, ...]], Path]
    scratch: Path
    _process: WorkerProcess | None = field(default=None, init=False)

    def file(self, pointer: Pointer) -> Path:
        """A copy of the file that a pointer stands for, checked.

        Raises:
            DigestMismatchError: the cache, the remote or the pointer does not hold what it should.
            NotFoundError: neither cache nor remote has it, or the folder has no such file.
            ServiceUnavailableError: the remote cannot be reached.
        """
        if not pointer.is_folder:
            copy, place = self._object(pointer, pointer.md5)
            if pointer.size not in (-1, copy.stat().st_size):
                raise _pointer_wrong(pointer, f"it says {pointer.size} bytes; {place} has {copy.stat().st_size}")
            return copy
        listed = self._listing(pointer)
        if pointer.below not in listed:
            known = ", ".join(sorted(listed)[:8])
            raise NotFoundError(
                f"{pointer.out} has no file {pointer.below}" if pointer.below else f"{pointer.out} is a folder",
                where=pointer.where,
                why=f"it holds {known}",
                remedy=f"Name one file, such as {pointer.out}/{min(listed, default='FILE')}.",
            )
        return self._object(pointer, listed[pointer.below])[0]

    def close(self) -> None:
        if self._process is not None:
            self._process.stop()

    def _listing(self, pointer: Pointer) -> dict[str, str]:
        """MD5 by path below the folder that the pointer stands for."""
        copy, place = self._object(pointer, pointer.md5)
        try:
            entries: Any = json.loads(copy.read_bytes())
            listed = {str(entry["relpath"]): str(entry["md5"]) for entry in entries}
        except (ValueError, TypeError, KeyError) as error:
            raise _pointer_wrong(pointer, f"what it names is no list of files: {place}") from error
        wrong = [md5 for md5 in listed.values() if len(md5) != len(pointer.md5) - len(FOLDER_MARK) or not md5.isalnum()]
        if wrong:
            raise _pointer_wrong(pointer, f"the list of files names no MD5: {wrong[0]!r} in {place}")
        return listed

    def _object(self, pointer: Pointer, md5: str) -> tuple[Path, str]:
        """A checked copy of an object, and where it came from."""
        relative = f"{md5[:2]}/{md5[2:]}" if pointer.legacy else f"files/md5/{md5[:2]}/{md5[2:]}"
        copy = self.scratch / md5
        for cache in self.config.caches:
            if _copied(cache / relative, copy):
                place = str(cache / relative)
                self._check(copy, md5, "DVC cache file", place, pointer, "Delete that file, then `dvc fetch`")
                return copy, place
        place = self._fetch(pointer, relative, copy)
        remedy = "Delete that object, then `dvc push` from a checkout whose cache is right"
        self._check(copy, md5, "object in the DVC remote", place, pointer, remedy)
        return copy, place

    def _fetch(self, pointer: Pointer, relative: str, copy: Path) -> str:
        remote = self.config.remote(self.remote, pointer.remote)
        if self._process is None:
            python = self.python(self.config.packages(remote))
            self._process = WorkerProcess(build_interpreter_command(python, INSIDE), ProcessLimits(), "data")
            self._process.ask("open", timeout=PATIENCE_S, folder=str(self.config.folder), remote=remote)
        answer = self._process.ask("fetch", timeout=PATIENCE_S, relative=relative, path=str(copy))
        if not answer["found"]:
            raise NotFoundError(
                f"DVC has lost {pointer.out}",
                where=pointer.where,
                why=f"neither the cache nor the remote {remote} has {copy.name}: {answer['place']}",
                remedy="`dvc push` it from where it was added. What was imported is not pushed: name its own "
                "repository as `repo`. If nobody has it, the pointer may have been changed by hand.",
            )
        return str(answer["place"])

    def _check(self, copy: Path, md5: str, what: str, place: str, pointer: Pointer, remedy: str) -> None:
        digest = hashlib.md5(usedforsecurity=False)
        with copy.open("rb") as stream:
            while chunk := stream.read(_CHUNK):
                digest.update(chunk)
        if digest.hexdigest() != md5.removesuffix(FOLDER_MARK):
            copy.unlink()
            raise DigestMismatchError(
                f"the {what} is not what its pointer names",
                where=place,
                why=f"its MD5 is {digest.hexdigest()}; {pointer.where} wants {md5.removesuffix(FOLDER_MARK)}",
                remedy=f"It was damaged or changed; DVC itself does not look. {remedy}.",
            )


def _copied(source: Path, copy: Path) -> bool:
    """Whether there was such a file. What is checked and read is the copy, which nobody else writes to."""
    try:
        shutil.copyfile(source, copy)
    except FileNotFoundError:
        return False
    except OSError as error:
        raise InfrastructureError(
            "the DVC cache file cannot be read",
            where=str(source),
            why=error.strerror or str(error),
            remedy="Look at who may read it; `dvc cache dir` tells where the cache is.",
        ) from error
    return True


def _pointer_wrong(pointer: Pointer, why: str) -> DigestMismatchError:
    return DigestMismatchError(
        "the DVC pointer is not what DVC wrote",
        where=pointer.where,
        why=why,
        remedy="Bring it back with `git checkout`, or make it anew with `dvc add`, and commit.",
    )
