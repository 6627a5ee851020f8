"""Fault injection: a process that is killed at a chosen moment.

Every call of a port, and every system call that changes a file, has two moments: before it takes
effect, and after. `Faults(at=n)` ends the process at the n-th moment. With an `error`, the call
fails instead. `Faults()` only counts the moments, so that a test can try all of them.
"""

from __future__ import annotations

import builtins
import functools
import io
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

from onnx_ops.ports import Context, EndpointProvider, Ledger, ModelFiles, Notifier, Registry
from onnx_ops.testing.endpoints import Killed

__all__ = ["Faults", "Killed"]

_CHANGES = (
    "open",
    "fsync",
    "replace",
    "rename",
    "link",
    "unlink",
    "remove",
    "rmdir",
    "mkdir",
    "chmod",
)
"""Functions of `os` that make, change or remove a file."""


class Faults:
    """Counter of the moments of the ports that it wraps.

    It raises Killed at moment `at`, and at every later one. With an `error`, it raises that error
    at moment `at` only. Before the effect this is a failed call, after it a lost answer. `between`
    is called at every moment, while the process is at that point.
    """

    def __init__(
        self,
        *,
        at: int | None = None,
        between: Callable[[int], None] | None = None,
        error: Exception | None = None,
    ) -> None:
        self.moments = 0
        self._at = at
        self._error = error
        self._between = between

    def around(self, context: Context) -> Context:
        """Return the same context with ports at whose calls the process may be killed.

        These are the ledger, registry, endpoints, model files and notifiers.
        """
        return replace(
            context,
            open_ledger=lambda: cast("Ledger", _Watched(context.ledger, self)),
            files=cast("ModelFiles", _Watched(context.files, self)),
            registry=lambda: cast("Registry", _Watched(context.registry(), self)),
            provider=lambda name: cast("EndpointProvider", _Watched(context.provider(name), self)),
            notifiers=lambda: {
                name: cast("Notifier", _Watched(notifier, self))
                for name, notifier in context.notifiers().items()
            },
        )

    @contextmanager
    def in_folder(self, root: Path) -> Iterator[None]:
        """Wrap every call by which this process changes a file below `root`.

        A file that was opened and not yet written has a moment too: a kill there leaves it empty.
        Calls do not wait for the disk.
        """
        with ExitStack() as stack:
            for module, names in ((os, _CHANGES), (io, ("open",)), (builtins, ("open",))):
                for name in names:
                    stack.enter_context(
                        patch.object(
                            module, name, self._in_folder(root, name, getattr(module, name))
                        )
                    )
            yield

    def _in_folder(self, root: Path, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def watched(*arguments: Any, **options: Any) -> Any:
            if not (_changes(name, arguments, options) and _places(arguments, options, root)):
                return call(*arguments, **options)
            self.moment()
            result: Any = None if name == "fsync" else call(*arguments, **options)
            try:
                self.moment()
            except BaseException:
                if name == "open":
                    # The caller never receives the descriptor, so it is closed here.
                    os.close(result) if isinstance(result, int) else result.close()
                raise
            return result

        return watched

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

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._inner, name)
        if not callable(method):
            return method

        def call(*arguments: Any, **options: Any) -> Any:
            self._faults.moment()
            result = method(*arguments, **options)
            self._faults.moment()
            return result

        return call


def _changes(name: str, arguments: tuple[Any, ...], options: dict[str, Any]) -> bool:
    """Return whether the call changes anything: an `open` can be for reading only."""
    if name != "open":
        return True
    how = arguments[1] if len(arguments) > 1 else options.get("mode", options.get("flags", "r"))
    if isinstance(how, int):
        return bool(how & (os.O_WRONLY | os.O_RDWR))
    return not {"w", "a", "x", "+"}.isdisjoint(str(how))


def _places(arguments: tuple[Any, ...], options: dict[str, Any], root: Path) -> bool:
    """Return whether the call is about a file below `root`.

    The file is named by its path or by a descriptor.
    """
    about, folder = arguments[0], options.get("dir_fd", options.get("src_dir_fd"))
    try:
        place = (
            os.readlink(f"/proc/self/fd/{about}") if isinstance(about, int) else os.fsdecode(about)
        )
        base = os.readlink(f"/proc/self/fd/{folder}") if folder is not None else ""
    except OSError:
        return False
    return Path(base, place).is_relative_to(root)
