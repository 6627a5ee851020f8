"""Resources of the fake that change over several reads, as Azure's do.

Reads show a change with a delay.
"""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.support.clouds.azureml_web import Reply

Body = dict[str, Any]
BUSY = ("Creating", "Updating", "Deleting")


@dataclass(slots=True)
class Operation:
    """State of a long-running request. `error` is a code and a message."""

    done: bool = False
    error: tuple[str, str] | None = None


@dataclass(slots=True)
class Resource:
    """A resource at a path.

    Its operation ends after `left` polls. Polls replace a clock, so that every run is alike. With
    `ends_at`, it ends at that time instead. The next `stale` reads show `before`; None means that
    they do not find the resource.
    """

    body: Body
    left: int = 0
    ends_at: float | None = None
    then: Callable[[], tuple[str, str] | None] | None = None
    operation: Operation = field(default_factory=Operation)
    before: Body | None = None
    stale: int = 0

    @property
    def state(self) -> str:
        return str(self.body["properties"].get("provisioningState", "Succeeded"))

    @state.setter
    def state(self, value: str) -> None:
        self.body["properties"]["provisioningState"] = value

    def look(self) -> None:
        """Count one poll, and complete the operation after the last one."""
        if not self.left:
            return
        self.left = self.left - 1 if self.ends_at is None else int(time.monotonic() < self.ends_at)
        if not self.left and self.then is not None:
            then, self.then = self.then, None
            self.operation.error = then()
            self.operation.done = True

    def begin(
        self, state: str, looks: int, then: Callable[[], tuple[str, str] | None]
    ) -> Operation:
        """Start an operation; its effect comes with its end."""
        self.state, self.left, self.then, self.operation = state, max(1, looks), then, Operation()
        return self.operation

    def shown(self) -> Body | None:
        """Return what a read shows now."""
        if self.stale:
            self.stale -= 1
            return self.before
        return self.body

    def lags(self, reads: int, before: Body | None) -> None:
        self.stale, self.before = reads, copy.deepcopy(before)


def reply(status: int, document: object = None, headers: Mapping[str, str] | None = None) -> Reply:
    return Reply(
        status=status,
        body=b"" if document is None else json.dumps(document).encode(),
        headers=headers or {},
    )


def refuse(status: int, code: str, message: str) -> Reply:
    return reply(status, {"error": {"code": code, "message": message}})
