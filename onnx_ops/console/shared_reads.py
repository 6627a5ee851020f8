"""Reads whose results are shared by all viewers.

Within the time to live of a value, one thread reads the value once, for any number of viewers.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from onnx_ops.errors import InternalError, OnnxOpsError, ServiceUnavailableError, quoted

_log = logging.getLogger(__name__)
_MAX_RESULTS = 256
"""Maximum number of stored results; those that were read longest ago are removed."""
_MAX_THREADS = 8

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Result:
    """A value or an error, and when it was read, in seconds of a monotonic clock."""

    value: Any
    error: OnnxOpsError | None
    at: float


class SharedReads:
    """Shared values by key.

    All methods must be called on one event loop; the reads run on threads. A viewer waits at most
    `wait_s` seconds for a read. Then the viewer gets the previous result, or an error if there is
    none. The read continues, and no second read of the key is started.
    """

    def __init__(self, *, wait_s: float) -> None:
        self._wait_s = wait_s
        self._results: OrderedDict[Hashable, _Result] = OrderedDict()
        self._running: dict[Hashable, asyncio.Task[None]] = {}
        self._threads = ThreadPoolExecutor(_MAX_THREADS, thread_name_prefix="console-read")

    async def get(self, key: Hashable, read: Callable[[], T], *, ttl_s: float) -> T:
        """Return the value of a key; read it again after `ttl_s` seconds.

        Raises:
            OnnxOpsError: the read failed. The error is also reused for `ttl_s` seconds.
            ServiceUnavailableError: the first read of the key takes longer than `wait_s`.
        """
        result = self._results.get(key)
        if result is None or time.monotonic() - result.at >= ttl_s:
            task = self._running.get(key)
            if task is None:
                task = self._running[key] = asyncio.create_task(self._read(key, read))
            await asyncio.wait({task}, timeout=self._wait_s)
            result = self._results.get(key)
        if result is None:
            raise ServiceUnavailableError(
                f"the data was not read within {self._wait_s:g} s", remedy="Reload the page."
            )
        if result.error is not None:
            raise result.error
        value: T = result.value
        return value

    def close(self) -> None:
        """Stop starting reads; those in progress end in the background."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _read(self, key: Hashable, read: Callable[[], Any]) -> None:
        value, error = None, None
        try:
            value = await asyncio.get_running_loop().run_in_executor(self._threads, read)
        except OnnxOpsError as problem:
            error = problem
        except Exception as problem:  # An unexpected error must affect only its part of the page.
            _log.exception("a read of the console failed")
            error = InternalError(
                "the read ended unexpectedly", why=f"{type(problem).__name__}: {quoted(problem)}"
            )
        finally:
            del self._running[key]
        self._results[key] = _Result(value, error, time.monotonic())
        self._results.move_to_end(key)
        while len(self._results) > _MAX_RESULTS:
            self._results.popitem(last=False)
