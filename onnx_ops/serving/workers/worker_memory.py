"""Return of memory to the system after large requests.

ONNX Runtime's arena retains the memory that the largest run has needed. A model that multiplies its
input by the transpose of the input retained 1.6 GiB permanently after one request of 320 KB. malloc
also retains memory, in smaller parts.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from onnx_ops.serving.inference.deployments import LoadedDeployment
from onnx_ops.serving.inference.tensors import release_parsers

_log = logging.getLogger(__name__)

TRIM_RATIO = 1.2
"""Ratio of the resident memory to its smallest value, above which it is trimmed."""
CHECK_S = 2.0
_REST_S = 10.0
"""Shortest time in seconds between two trims.

While large requests continue to arrive, they cause the page faults of at most one trim in this
time.
"""
_MAX_REST_S = 160.0
"""Longest pause in seconds after a trim.

Each trim that does not return enough memory doubles the pause, up to this limit.
"""


_M_ARENA_MAX = -8
"""Parameter of mallopt(3)."""


def use_one_arena() -> None:
    """Let all threads of this process and of its forks share one arena of malloc.

    Call this before the threads start. An arena returns memory only from its end. After large
    requests on several threads, workers retained up to 80 % of the size of these requests in
    several arenas. In one arena, they retained 20 %. The variable MALLOC_ARENA_MAX takes
    precedence.
    """
    if "MALLOC_ARENA_MAX" not in os.environ:
        with suppress(AttributeError):  # Some C libraries, such as musl, lack `mallopt`.
            ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 1)


class MemoryTrimmer:
    """Trimmer of the memory of a worker.

    The runtime's arena returns memory only at the end of a run. Therefore a trim runs each model
    with an arena once on its smallest inputs.
    """

    def __init__(
        self, list_loaded: Callable[[], Iterable[LoadedDeployment]], *, rest_s: float = _REST_S
    ) -> None:
        self._list_loaded = list_loaded
        self._rest_s = self._least_rest_s = rest_s
        self._trimmed_at = float("-inf")
        self._least_bytes = read_resident_bytes()

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Exclude the memory of the models that are loaded in the block from later trims."""
        before = read_resident_bytes()
        yield
        self._least_bytes += max(0, read_resident_bytes() - before)

    def check(self) -> bool:
        """Trim the memory if it exceeds `TRIM_RATIO` times its smallest value.

        Return whether it was trimmed. During the pause after a trim, the result is False. Do not
        call this on the event loop, since releasing memory blocks.
        """
        resident = read_resident_bytes()
        self._least_bytes = min(self._least_bytes, resident)
        now = time.monotonic()
        if resident <= TRIM_RATIO * self._least_bytes or now < self._trimmed_at + self._rest_s:
            return False
        for loaded in self._list_loaded():
            loaded.release_memory()
        release_parsers()
        ctypes.CDLL(None).malloc_trim(0)
        self._trimmed_at, after = now, read_resident_bytes()
        is_enough = after <= TRIM_RATIO * self._least_bytes
        self._rest_s = self._least_rest_s if is_enough else min(_MAX_REST_S, 2 * self._rest_s)
        _log.info("the resident memory was trimmed from %d to %d MiB", resident >> 20, after >> 20)
        return True


def read_resident_bytes() -> int:
    """Return the resident memory of this process in bytes."""
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * mmap.PAGESIZE
