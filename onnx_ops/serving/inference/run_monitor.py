"""Monitor that ends runs of a model at their time limits.

ONNX Runtime checks the flag `terminate` of a run's options before each node, also inside loops. If
a run does not end after the flag is set, a single node takes a long time. Such a run cannot be
ended, so its process is ended.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import onnxruntime as ort

from onnx_ops.serving.inference.responses import RunTimeoutError
from onnx_ops.serving.metrics import ROUTED, RUN_KINDS, SELECTED, MetricsRow, make_thread_runs

_log = logging.getLogger(__name__)

INLINE_LIMIT_S = 0.25
"""Seconds after which a run on the event loop is ended, and repeated on a thread.

During the run, the event loop cannot answer other requests.
"""
GRACE_S = 5.0
"""Seconds within which a run must end after its deadline."""
_TICK_S = 0.1
_NEVER = float("inf")

GiveUp = Callable[[int, int], None]
"""Function that is called for a run that does not end.

The arguments are the slot of the run, and the user's cell plus 1. The second argument is 0 if the
split has not routed the run (see `RUN_CELL`).
"""


@dataclass(slots=True, eq=False)
class _LimitedRun:
    """A run on a thread; `deadline` is on the clock of `time.perf_counter`."""

    deadline: float
    options: Any
    slot: int
    cell: int
    is_ended: bool = False


class RunMonitor:
    """Monitor that ends runs of one process at their deadlines, on a separate thread.

    Args:
        thread_runs: numbers of runs in progress, by slot and kind (see
            `SharedMetrics.get_thread_runs`).
        give_up: called for a run that does not end.

    Attributes:
        inline_since: start of the run on the event loop.
        inline_options: options of the run on the event loop; None if no run is in progress.

    `inline_since` and `inline_options` are plain attributes, because a request sets them in 0.1 µs.
    A lock would take longer.
    """

    def __init__(
        self,
        thread_runs: MetricsRow | None = None,
        give_up: GiveUp | None = None,
        *,
        grace_s: float = GRACE_S,
    ) -> None:
        self.inline_since = 0.0
        self.inline_options: Any = None
        self._thread_runs = make_thread_runs() if thread_runs is None else thread_runs
        self._give_up = give_up or end_process
        self._grace_s = grace_s
        self._changed = threading.Condition(threading.Lock())
        self._runs: list[_LimitedRun] = []
        self._wakes_at = _NEVER
        self._watches_inline = False
        self._thread: threading.Thread | None = None

    def watch_inline(self) -> None:
        """Also end runs on the event loop that take too long, from now on."""
        self._watches_inline = True
        with self._changed:
            self._wake()

    @contextmanager
    def limit(self, deadline: float, slot: int = 0, cell: int = 0) -> Iterator[Any]:
        """Yield the options of runs on this thread, which are ended at a deadline.

        Args:
            deadline: time on the clock of `time.perf_counter`.
            slot: slot of the deployment.
            cell: cell of the user plus 1; 0 if the split has not routed the run. While the run is
                in progress, it is counted by slot, and by whether `cell` is 0.

        Raises:
            RunTimeoutError: the run was ended at the deadline.
        """
        started_at = time.perf_counter()
        run = _LimitedRun(deadline, ort.RunOptions(), slot, cell)
        place = RUN_KINDS * slot + (ROUTED if cell else SELECTED)
        with self._changed:
            self._runs.append(run)
            # The run is counted before it begins, because it can end the process.
            self._thread_runs[place] += 1
            # The thread wakes at `_wakes_at`, so it is woken now only for an earlier deadline.
            if self._thread is None or deadline < self._wakes_at:
                self._wake()
        try:
            yield run.options
        except RunTimeoutError as error:
            seconds = time.perf_counter() - started_at
            raise RunTimeoutError(
                f"the run of the model was ended after {seconds:.3g} s, at its deadline"
            ) from error
        finally:
            with self._changed:
                self._runs.remove(run)
                self._thread_runs[place] -= 1

    def reset(self, options: Any) -> None:
        """Allow further runs with the options of an inline run that was possibly ended."""
        with self._changed:
            if options is not None:
                options.terminate = False

    def _wake(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._watch, name="run-monitor", daemon=True)
            self._thread.start()
        self._changed.notify()

    def _watch(self) -> None:
        with self._changed:
            while True:
                now = time.perf_counter()
                if self._watches_inline:
                    self._end_inline(now)
                due = [self._end(run, now) for run in self._runs]
                if self._watches_inline:
                    due.append(now + _TICK_S)
                self._wakes_at = min(due, default=_NEVER)
                rest_s = self._wakes_at - time.perf_counter()
                self._changed.wait(max(0.0, rest_s) if rest_s < _NEVER else None)

    def _end_inline(self, now: float) -> None:
        """End the run on the event loop if it takes too long.

        `now` was read before the current run was read. So a run that ends meanwhile has also
        exceeded the limit. Its request resets the options after this thread has released the lock.
        """
        options = self.inline_options
        if options is not None and now - self.inline_since > INLINE_LIMIT_S:
            options.terminate = True

    def _end(self, run: _LimitedRun, now: float) -> float:
        """End a run at its deadline; return the time at which to check it again."""
        if now < run.deadline:
            return run.deadline
        if not run.is_ended:
            run.is_ended = run.options.terminate = True
            run.deadline = now + self._grace_s
        elif run.deadline < _NEVER:
            run.deadline = _NEVER
            self._give_up(run.slot, run.cell)
        return run.deadline


def end_process(_slot: int, _cell: int) -> None:
    """End this process. The supervisor replaces it.

    A single thread in native code cannot be ended.
    """
    _log.error(
        "a run did not end within %.0f s after its deadline; process %d ends", GRACE_S, os.getpid()
    )
    os.kill(os.getpid(), signal.SIGKILL)
