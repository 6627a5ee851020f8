"""Record the changes that an operation would make, in a dry run."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

NOTHING = "none"
"""Text of a missing value before or after a change."""


class ChangeKind(StrEnum):
    """Kinds of changes. `--json` prints the values."""

    LEDGER_ENTRY = "ledger-entry"
    TRAFFIC = "traffic"
    DEPLOYMENT = "deployment"
    OPTIONS = "options"
    CONFIRMATION = "confirmation"
    ENDPOINT = "endpoint"
    SERVER = "server"
    RESOURCE = "resource"
    ALIAS = "alias"
    TAG = "tag"
    VERSION = "version"
    MODEL_FOLDER = "model-folder"
    STORED_OBJECT = "stored-object"


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One change that a command would make.

    `subject` is the endpoint, the model, or the object. `what` is a verb phrase that can follow
    "would". `before` and `after` describe the changed value; both are empty if the verb phrase is
    complete. `needs` are the rights and keys that the change requires.
    """

    kind: ChangeKind
    subject: str
    what: str
    before: str = ""
    after: str = ""
    needs: tuple[str, ...] = ()

    def describe(self) -> str:
        """Return the change as a clause that begins with `would`."""
        values = " -> ".join(filter(None, (self.before, self.after)))
        return f"would {self.what}{': ' if values else ''}{values}"


class ChangeLog:
    """The changes of one dry run, in order. Several threads can add changes."""

    def __init__(self) -> None:
        self._changes: list[Change] = []

    @property
    def changes(self) -> tuple[Change, ...]:
        """The changes that were recorded so far."""
        return tuple(self._changes)

    def add(self, change: Change) -> None:
        """Record a change."""
        self._changes.append(change)
