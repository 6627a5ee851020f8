"""Every error that onnx-ops raises on purpose.

    OnnxOpsError                     what / where / why / remedy, and an exit code
    ├── UserError (2)                the user's input is wrong
    │   ├── SpecError                a pipeline or target file has problems, each with its position
    │   │   └── NotReady (4)         the file is right, and this machine lacks what it needs
    │   ├── NotFound                 a name that leads nowhere: a file, a function, a version, an endpoint
    │   └── TooLarge                 more than a limit allows; the limit protects memory
    ├── MissingPackage (4)           an optional package that is needed here is not installed
    ├── EnvironmentFailure (4)       the machine or a service failed, not the model
    │   ├── ServiceUnavailable       a server that should answer does not
    │   ├── StillOwed                a request was accepted and could not be carried out yet
    │   ├── RolledBackByAlarm        an alarm that guards the endpoint took a deployment back
    │   ├── StorageFailure           the disk is full, or a file or folder cannot be used
    │   ├── StageFailure             a stage crashed, was killed or ran past its time-out
    │   ├── MeasurementFailure       something could not be measured (missing provider, crash)
    │   └── StateCorrupt             a record on disk does not match its digest
    ├── Refused (5)                  policy, permission or signature said no
    │   ├── SignatureInvalid         a decision that nobody trusted has signed
    │   └── DigestMismatch           content that is not what was recorded
    └── Conflict (4)                 somebody else acted first; try again
        └── Overtaken                somebody else wrote the ledger's next entry; look at what it says

Exit codes are those of the command line (0 done, 1 a gate failed, 2, 3 inconclusive, 4, 5, 130).
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar


class OnnxOpsError(Exception):
    """An error with the four things a person needs to act on it.

    Args:
        what: what went wrong, one sentence.
        where: the file, version, endpoint or stage it happened in.
        why: the cause, as far as it is known.
        remedy: what to do next.
    """

    exit_code: ClassVar[int] = 4

    def __init__(self, what: str, *, where: str = "", why: str = "", remedy: str = "") -> None:
        super().__init__(what)
        self.what = what
        self.where = where
        self.why = why
        self.remedy = remedy

    def __str__(self) -> str:
        text = f"{self.where}: {self.what}" if self.where else self.what
        if self.why:
            text += f" ({self.why})"
        end = "" if text.endswith((".", "?", "!")) else "."
        return f"{text}{end} {self.remedy}" if self.remedy else text

    def without_place(self) -> str:
        """Return the text without its place, where that is shown already."""
        return str(type(self)(self.what, why=self.why, remedy=self.remedy))

    def as_document(self) -> dict[str, object]:
        """The same content for `--json`."""
        return {
            "error": type(self).__name__,
            "what": self.what,
            "where": self.where,
            "why": self.why,
            "remedy": self.remedy,
            "exit_code": self.exit_code,
        }


class UserError(OnnxOpsError):
    exit_code = 2


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Problem:
    """One problem of one file. `line` and `column` count from 1; 0 means the position is not known.

    `environment` marks a problem of this machine: the file is right, and a package or a credential is missing.
    """

    file: str
    line: int
    column: int
    path: str
    message: str
    environment: bool = False

    def __str__(self) -> str:
        place = f"{self.file}:{self.line}:{self.column}: " if self.line else f"{self.file}: "
        return f"{place}{self.path}: {self.message}" if self.path else f"{place}{self.message}"


class SpecError(UserError):
    """All problems of a file at once."""

    def __init__(self, problems: tuple[Problem, ...]) -> None:
        self.problems = tuple(sorted(problems))
        count = len(self.problems)
        super().__init__(f"{count} problem{'s' if count != 1 else ''}", where=self.problems[0].file if count else "")

    def __str__(self) -> str:
        return "\n".join(str(problem) for problem in self.problems)

    def as_document(self) -> dict[str, object]:
        document = super().as_document()
        document["problems"] = [
            {
                "file": p.file,
                "line": p.line,
                "column": p.column,
                "path": p.path,
                "message": p.message,
                "environment": p.environment,
            }
            for p in self.problems
        ]
        return document


class NotReady(SpecError):
    exit_code = 4


def spec_error(problems: tuple[Problem, ...]) -> SpecError:
    """Return the error of these problems: they are the machine's only if all of them are."""
    return (NotReady if all(problem.environment for problem in problems) else SpecError)(problems)


class NotFound(UserError):
    pass


class TooLarge(UserError):
    pass


class MissingPackage(OnnxOpsError):
    """No `EnvironmentFailure`: to try again does not help."""

    exit_code = 4


class EnvironmentFailure(OnnxOpsError):
    exit_code = 4


class ServiceUnavailable(EnvironmentFailure):
    pass


class StillOwed(EnvironmentFailure):
    pass


class RolledBackByAlarm(EnvironmentFailure):
    pass


class StorageFailure(EnvironmentFailure):
    pass


class StageFailure(EnvironmentFailure):
    pass


class MeasurementFailure(EnvironmentFailure):
    pass


class StateCorrupt(EnvironmentFailure):
    pass


class Conflict(OnnxOpsError):
    exit_code = 4


class Overtaken(Conflict):
    pass


class Refused(OnnxOpsError):
    exit_code = 5


class SignatureInvalid(Refused):
    pass


class DigestMismatch(Refused):
    pass


_QUOTED = 2000
"""Characters of a library's text that are quoted."""

_FULL = (errno.ENOSPC, errno.EDQUOT)
_CLOSED = (errno.EACCES, errno.EPERM, errno.EROFS)
_FREE = "Free some space and run the same again: what was finished is kept. See docs/runbooks/disk-full.md."
_OPEN = "Give the user who runs this access to it, or name another folder in onnx-ops.toml."


@contextmanager
def storage_errors(where: str = "") -> Iterator[None]:
    """Make an error that says what to do of a full disk and of a file or folder that is closed to this user.

    Raises:
        StorageFailure: in place of such an OSError; any other is no less unexpected than before.
    """
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            raise StorageFailure("the disk is full", where=where, why=str(error), remedy=_FREE) from error
        if error.errno in _CLOSED:
            what = "a file or folder cannot be used"
            raise StorageFailure(what, where=where, why=str(error), remedy=_OPEN) from error
        raise


def quoted(error: object) -> str:
    """Return what a library says, in one line; of a very long text the beginning and the end, in whole words."""
    words = str(error).split()
    text = " ".join(words)
    if len(text) <= _QUOTED:
        return text or type(error).__name__
    half = _QUOTED // 2
    return f"{text[:half].rpartition(' ')[0] or text[:half]} … {text[-half:].partition(' ')[2] or text[-half:]}"


def from_document(document: dict[str, object]) -> OnnxOpsError:
    """The error that `as_document` described, of the same type where it is one of these."""
    kind = globals().get(str(document.get("error")))
    if kind in (SpecError, NotReady):
        return _spec_error(document)
    if not (isinstance(kind, type) and issubclass(kind, OnnxOpsError)):
        kind = OnnxOpsError
    texts = {name: str(document.get(name, "")) for name in ("where", "why", "remedy")}
    return kind(str(document.get("what", "")), **texts)


def _spec_error(document: dict[str, object]) -> OnnxOpsError:
    problems: Any = document.get("problems")
    try:
        return spec_error(tuple(Problem(**problem) for problem in problems))
    except TypeError:
        return UserError(str(document.get("what", "")), where=str(document.get("where", "")))
