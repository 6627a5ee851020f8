"""Errors of onnx-ops, each with the place, the cause, the remedy and an exit code.

    OnnxOpsError                       what, where, why, remedy, and an exit code
    ├── UserError (2)                  the input is wrong
    │   ├── ConfigError                a configuration file has problems, with their positions
    │   │   └── NotReadyError (4)      the file is valid, and this machine lacks what it needs
    │   ├── NotFoundError              a file, function, version or endpoint does not exist
    │   └── TooLargeError              a request exceeds a limit that protects memory
    ├── MissingPackageError (4)        an optional package is not installed
    ├── InfrastructureError (4)        the machine or a service failed, not the model
    │   ├── ServiceUnavailableError    a service is unavailable, or lacks what the request needs
    │   ├── StillPendingError          a request was accepted and is not completed yet
    │   ├── AlarmRollbackError         an alarm of the provider rolled a deployment back
    │   ├── StorageError               the disk is full, or a file or folder is not accessible
    │   ├── StageError                 a stage crashed, was killed or timed out
    │   ├── MeasurementError           something could not be measured (missing provider, crash)
    │   ├── MissingKeyError            no key on this machine is allowed to sign the record
    │   └── CorruptStateError          a stored record does not match its digest or format
    ├── RefusedError (5)               a policy, a permission or a signature check refused
    │   ├── InvalidSignatureError      no trusted key has signed a record or a webhook delivery
    │   └── DigestMismatchError        content does not match its recorded digest
    ├── InternalError (4)              onnx-ops has a fault: an exception that it did not expect
    └── ConflictError (4)              another process acted first; try again
        └── LedgerConflictError        another process wrote the next ledger entry first

The numbers are exit codes of the command line. Its other exit codes are 0 (success), 1 (failed
gate), 3 (inconclusive) and 130 (interrupted).
"""

from __future__ import annotations

import copy
import signal
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

from onnx_ops.printable import show


class OnnxOpsError(Exception):
    """Base class of all errors that onnx-ops reports to the user.

    Args:
        what: what went wrong, in one sentence.
        where: the file, version, endpoint or stage.
        why: the cause, if known.
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
        return show(f"{text}{end} {self.remedy}" if self.remedy else text)

    def without_place(self) -> str:
        """Return the text of the error without `where`."""
        placeless = copy.copy(self)
        placeless.where = ""
        return str(placeless)

    def as_document(self) -> dict[str, object]:
        """Return the error as the document that `--json` prints."""
        return {
            "error": type(self).__name__,
            "what": self.what,
            "where": self.where,
            "why": self.why,
            "remedy": self.remedy,
            "exit_code": self.exit_code,
        }


class UserError(OnnxOpsError):
    """Wrong input of the user, such as an invalid file or option."""

    exit_code = 2


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Problem:
    """One problem of one file.

    `line` and `column` count from 1; they are 0 if the position is unknown. `path` names the key,
    such as `train.with.seed`, or is empty.

    `environment` marks a problem of this machine: the file is valid, and for example a package is
    missing.
    """

    file: str
    line: int
    column: int
    path: str
    message: str
    environment: bool = False

    def __str__(self) -> str:
        place = f"{self.file}:{self.line}:{self.column}: " if self.line else f"{self.file}: "
        return show(
            f"{place}{self.path}: {self.message}" if self.path else f"{place}{self.message}"
        )


class ConfigError(UserError):
    """Problems of one or more configuration files, with their positions."""

    def __init__(self, problems: tuple[Problem, ...]) -> None:
        self.problems = tuple(sorted(problems))
        count = len(self.problems)
        super().__init__(
            f"{count} problem{'s' if count != 1 else ''}",
            where=self.problems[0].file if count else "",
        )

    def __str__(self) -> str:
        return "\n".join(str(problem) for problem in self.problems)

    def as_document(self) -> dict[str, object]:
        """Return the document that `--json` prints, with all problems."""
        document = super().as_document()
        document["problems"] = [asdict(problem) for problem in self.problems]
        return document


class NotReadyError(ConfigError):
    """A valid file that needs something that this machine lacks, such as a package."""

    exit_code = 4


def config_error(problems: tuple[Problem, ...]) -> ConfigError:
    """Return a `NotReadyError` or a `ConfigError`.

    The error is a `NotReadyError` if this machine is the cause of every problem.
    """
    return (NotReadyError if all(problem.environment for problem in problems) else ConfigError)(
        problems
    )


class NotFoundError(UserError):
    """A file, function, version or endpoint that does not exist."""


class TooLargeError(UserError):
    """A request beyond a limit that protects memory."""


class MissingPackageError(OnnxOpsError):
    """An optional package that is not installed.

    Unlike an `InfrastructureError`, it is not retried.
    """


class InfrastructureError(OnnxOpsError):
    """A failure of the machine or of a service, not of the model."""


class ServiceUnavailableError(InfrastructureError):
    """A service that is unavailable, or lacks what the request needs."""


class StillPendingError(InfrastructureError):
    """A request that was accepted and is not completed yet."""


class AlarmRollbackError(InfrastructureError):
    """A deployment that an alarm of the provider rolled back."""


class StorageError(InfrastructureError):
    """A full disk, or a file or folder that is not accessible."""


class StageError(InfrastructureError):
    """A stage that crashed, was killed or timed out."""


class MeasurementError(InfrastructureError):
    """A measurement that is not possible, for example because a provider is missing."""


class MissingKeyError(InfrastructureError):
    """A record that no key on this machine is allowed to sign."""


class CorruptStateError(InfrastructureError):
    """A stored record that does not match its digest or format."""


class InternalError(OnnxOpsError):
    """An exception that onnx-ops did not expect.

    The cause is a defect of onnx-ops, not a problem of the user's files.
    """


class ConflictError(OnnxOpsError):
    """A conflict with a change that another process made first."""


class LedgerConflictError(ConflictError):
    """A ledger entry whose number another process used first."""


class RefusedError(OnnxOpsError):
    """A refusal by policy, permission or signature check."""

    exit_code = 5


class InvalidSignatureError(RefusedError):
    """A record or a webhook delivery that no trusted key has signed."""


class DigestMismatchError(RefusedError):
    """Content that does not match its recorded digest."""


_QUOTED = 2000
"""Maximum length of a quoted message of a library, in characters."""


def quoted(error: object) -> str:
    """Return a library's message as one line.

    A very long message is cut in the middle, at whole words. The type's name replaces an empty
    message.
    """
    words = str(error).split()
    text = " ".join(words)
    if len(text) <= _QUOTED:
        return text or type(error).__name__
    half = _QUOTED // 2
    return (
        f"{text[:half].rpartition(' ')[0] or text[:half]} … "
        f"{text[-half:].partition(' ')[2] or text[-half:]}"
    )


def describe_error(error: BaseException) -> str:
    """Return the type of a library's exception, and its message as `quoted` does."""
    return f"{type(error).__name__}: {quoted(error)}"


def describe_exit(code: int) -> str:
    """Describe how a process ended: its signal or exit code."""
    names = {number.value: number.name for number in signal.Signals}
    return f"signal {names.get(-code, -code)}" if code < 0 else f"exit code {code}"


def suggest(name: str, known: Iterable[str], otherwise: str) -> str:
    """Return `Did you mean 'x'?` if a known name is close, else `otherwise`."""
    import difflib

    close = difflib.get_close_matches(name, list(known), n=1)
    return f"Did you mean {close[0]!r}?" if close else otherwise


def from_document(document: dict[str, object]) -> OnnxOpsError:
    """Return the error that a document of `as_document` describes.

    An unknown type becomes an `OnnxOpsError`. A `ConfigError` or `NotReadyError` without a list of
    problems becomes a `UserError`.
    """
    kind = globals().get(str(document.get("error")))
    if kind in (ConfigError, NotReadyError):
        problems: Any = document.get("problems")
        try:
            return config_error(tuple(Problem(**problem) for problem in problems))
        except TypeError:
            kind = UserError
    if not (isinstance(kind, type) and issubclass(kind, OnnxOpsError)):
        kind = OnnxOpsError
    texts = {name: str(document.get(name, "")) for name in ("where", "why", "remedy")}
    return kind(str(document.get("what", "")), **texts)
