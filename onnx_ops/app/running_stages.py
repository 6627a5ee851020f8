"""Processes, pools and locks of the stages that run on this machine."""

from __future__ import annotations

import contextlib
import importlib
import os
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from onnx_ops import plugins
from onnx_ops.app.fork_server import ForkedProcess
from onnx_ops.domain.artifact import Digest, hex_digits
from onnx_ops.file_locks import hold_lock, hold_temporary_lock
from onnx_ops.ports import Pools


def machine_lock(
    on_wait: Callable[[], None] | None = None,
) -> contextlib.AbstractContextManager[None]:
    """Return a context that holds this machine's lock for measurements of times.

    Only one process of the user measures times at any moment. `on_wait` is called if the lock is
    not free.
    """
    return hold_lock(
        Path(tempfile.gettempdir()) / f"onnx-ops-benchmark-{os.getuid()}.lock", on_wait=on_wait
    )


class MeasurementLock:
    """Lock that reserves the machine for one measurement among concurrent stages.

    The stages belong to pipelines of one process. The lock is granted in the order of requests.
    Work without measurements runs concurrently. A measurement waits for all running work, and later
    work waits for the measurement.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._tickets = 0
        self._admitted = 0
        self._working = 0
        self._measuring = False

    @contextlib.contextmanager
    def hold(self, *, alone: bool, on_wait: Callable[[], None] | None = None) -> Iterator[None]:
        """Hold the lock: `alone` for a measurement of times, shared for other work.

        Args:
            alone: whether no other work may run at the same time.
            on_wait: called if the lock is not free.
        """
        with self._changed:
            ticket, self._tickets = self._tickets, self._tickets + 1

            def is_free() -> bool:
                return (
                    self._admitted == ticket
                    and not self._measuring
                    and not (alone and self._working)
                )

            if on_wait is not None and not is_free():
                on_wait()
            self._changed.wait_for(is_free)
            self._admitted += 1
            self._measuring = alone
            self._working += not alone
            self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                self._measuring = False
                self._working -= not alone
                self._changed.notify_all()


class RunningStages:
    """Child processes and pools of running stages, and their lock.

    A run that is cancelled ends all of its stages through this object.
    """

    def __init__(self) -> None:
        self.lock = MeasurementLock()
        self.processes: set[ForkedProcess] = set()
        self.ended = False
        self._pools: Pools | None = None
        self._preparation: threading.Thread | None = None

    def import_registry(self) -> None:
        """Import MLflow on a thread, while stages run in other processes.

        The import takes two seconds. Only the first call starts it.
        """
        if self._preparation is None:
            self._preparation = threading.Thread(target=_import_registry, daemon=True)
            self._preparation.start()

    def wait_until_prepared(self) -> None:
        """Wait for the imports, which would disturb a measurement of times."""
        if self._preparation is not None:
            self._preparation.join()

    @property
    def pools(self) -> Pools:
        """Client of the work pools, loaded on first use.

        Raises:
            MissingPackageError: Prefect is not installed.
        """
        if self._pools is None:
            plugins.require(*plugins.EXTRAS["prefect"], where="pools")
            self._pools = plugins.load("pools", "prefect")
        return self._pools

    @contextlib.contextmanager
    def ended_on_error(self) -> Iterator[None]:
        """End every running stage, on every machine, if the block raises an exception.

        KeyboardInterrupt and other cancellations also end the stages.
        """
        try:
            yield
        except BaseException:
            self.end()
            raise

    def end(self) -> None:
        """End every running stage, on every machine; no further stage starts."""
        self.ended = True
        for process in tuple(self.processes):
            process.kill()
        if self._pools is not None:
            self._pools.cancel()


def _import_registry() -> None:
    with contextlib.suppress(ImportError):  # The stage that uses MLflow reports a missing package.
        importlib.import_module("onnx_ops.adapters.registries.mlflow_connection").import_mlflow()


def hold_key_lock(folder: Path, key: Digest) -> contextlib.AbstractContextManager[None]:
    """Return a context that holds the lock of a key in a folder of locks.

    The lock excludes other threads and processes on this machine that use this folder.
    """
    return hold_temporary_lock(folder / f"{hex_digits(key)}.lock")
