"""Fault injection: a process that dies at a chosen moment.

Every call of a port has two moments, before it takes effect and after. `Faults(at=n)` lets the process die at the n-th
moment, or with an `error` lets the call fail; `Faults()` only counts them, so that a test can sweep over all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

from onnx_ops.ports import EndpointProvider, Ledger, ModelFiles, Notifier, Ports, Registry


class Killed(BaseException):
    """The process is gone. No handler of ordinary errors sees it, as none would see a signal."""


class Faults:
    """Counts the moments of the ports it stands around; raises Killed at moment `at`, and at every later one.

    With an `error`, that is raised instead, at moment `at` alone: before its effect a call failed, after it an answer
    was lost. `between` is called at every moment: what it does happens while the process is at that point.
    """

    def __init__(
        self, *, at: int | None = None, between: Callable[[int], None] | None = None, error: Exception | None = None
    ) -> None:
        self.moments = 0
        self._at = at
        self._error = error
        self._between = between

    def around(self, ports: Ports) -> Ports:
        """The same ports, whose ledger, registry, endpoints, files and notifiers the process may not live to use."""
        return replace(
            ports,
            ledger=cast("Ledger", _Watched(ports.ledger, self)),
            files=cast("ModelFiles", _Watched(ports.files, self)),
            registry=lambda: cast("Registry", _Watched(ports.registry(), self)),
            provider=lambda name: cast("EndpointProvider", _Watched(ports.provider(name), self)),
            notifiers=lambda: {
                name: cast("Notifier", _Watched(notifier, self)) for name, notifier in ports.notifiers().items()
            },
        )

    def moment(self) -> None:
        number = self.moments
        self.moments += 1
        if self._between is not None:
            self._between(number)
        if self._error is not None and number == self._at:
            raise self._error
        if self._error is None and self._at is not None and number >= self._at:
            raise Killed(f"at moment {number}")


class _Watched:
    def __init__(self, inner: object, faults: Faults) -> None:
        self._inner = inner
        self._faults = faults

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self._inner, name)

        def call(*arguments: Any, **options: Any) -> Any:
            self._faults.moment()
            result = method(*arguments, **options)
            self._faults.moment()
            return result

        return call
