"""Calls of functions in a forked process that can crash, hang or exhaust memory.

Each of these failures raises an error in this process. In contrast to module `process`, the child
uses this installation. It is forked from a server process that has already imported the libraries.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import threading
import time
from collections.abc import Callable
from multiprocessing import forkserver, spawn
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any, TypeVar, cast

from onnx_ops.adapters.isolation.process import OutputTail, read_memory_bytes
from onnx_ops.adapters.isolation.worker_main import limit_memory
from onnx_ops.errors import OnnxOpsError, describe_error, describe_exit

T = TypeVar("T")

DEFAULT_TIMEOUT_S = 1800.0
"""Default time limit of a function in seconds."""

_GRACE_S = 2.0


class ProcessCrashError(Exception):
    """A guarded function did not return.

    `reason` is the cause, and `output` contains the last lines that the function printed.
    `timed_out` shows whether the function exceeded its time limit.
    """

    def __init__(self, reason: str, output: str = "", *, timed_out: bool = False) -> None:
        super().__init__(reason)
        self.reason = reason
        self.output = output
        self.timed_out = timed_out
        self.explanation = f"{reason}\n{output}" if output else reason


def prepare(module: str) -> None:
    """Start the fork server for functions of a module, unless it is running.

    The fork server imports the module while this process continues.
    """
    # Without the preload, each fork would import the module again.
    forkserver.set_forkserver_preload(["onnx", "onnxruntime", __name__, module])
    forkserver.ensure_running()


def run_guarded(
    work: Callable[..., T],
    *arguments: object,
    timeout: float = DEFAULT_TIMEOUT_S,
    memory: int | None = None,
) -> T:
    """Call a function in a forked process and return its result.

    Function, arguments and result must be picklable. `timeout` is in seconds. `memory` is the limit
    of the process's data segment (RLIMIT_DATA) in bytes, by default the machine's memory.

    Raises:
        OnnxOpsError: the function raised this error.
        ProcessCrashError: the function raised another error, crashed, or exceeded its time limit
            or memory limit.
    """
    limit = memory or read_memory_bytes()
    prepare(work.__module__)
    context = multiprocessing.get_context("forkserver")
    answers, theirs = context.Pipe(duplex=False)
    output, printed = context.Pipe(duplex=False)
    process = context.Process(
        target=_child, args=(theirs, printed, work, arguments, timeout, limit), daemon=True
    )
    with _children:
        _start_without_main(process)
    began = time.monotonic()
    theirs.close()
    printed.close()
    tail = OutputTail(os.fdopen(os.dup(output.fileno()), "rb"))
    output.close()
    try:
        kind, value = answers.recv() if answers.poll(timeout + _GRACE_S) else ("late", None)
    except (EOFError, OSError):
        _join(process)
        kind, value = ("late" if time.monotonic() - began >= timeout else "crashed"), None
    finally:
        answers.close()
        _join(process)
        if process.exitcode is None:
            process.kill()
            process.join()
    if kind == "done":
        return cast("T", value)
    if isinstance(value, OnnxOpsError):
        raise value
    raise ProcessCrashError(
        _explain(kind, value, process.exitcode or 0, timeout, limit),
        tail.summary(),
        timed_out=kind == "late",
    )


_children = threading.Lock()
"""Lock for the start and the join of a child.

Both operations read the exit codes of ended children, and each code is reported only once.
"""

_starting = threading.local()
_prepare_child = spawn.get_preparation_data


def _prepare_child_without_main(name: str) -> dict[str, Any]:
    data: dict[str, Any] = _prepare_child(name)
    if getattr(_starting, "is_guarded", False):
        data = {key: value for key, value in data.items() if not key.startswith("init_main_")}
    return data


def _start_without_main(process: BaseProcess) -> None:
    """Start a process that does not import the main module.

    multiprocessing imports the main module in every child, for functions that are defined there.
    Guarded functions are in other modules. If the main module is a script that calls onnx-ops at
    its top level, the import would repeat this call in the child. Processes that other threads
    start are not affected.
    """
    spawn.get_preparation_data = _prepare_child_without_main
    _starting.is_guarded = True
    try:
        process.start()
    finally:
        _starting.is_guarded = False


def _join(process: BaseProcess) -> None:
    with _children:
        process.join(_GRACE_S)


def _explain(kind: str, value: str | None, code: int, timeout: float, limit: int) -> str:
    if kind == "late":
        return f"the process took longer than {timeout:g} s and was stopped"
    if kind == "memory":
        return f"the process needs more memory than its limit of {limit / 1e9:.1f} GB"
    return value if value is not None else f"the process ended with {describe_exit(code)}"


def _child(
    answers: Connection,
    output: Connection,
    work: Callable[..., object],
    arguments: Any,
    timeout: float,
    memory: int,
) -> None:
    for stream in (1, 2):
        os.dup2(output.fileno(), stream)
    faulthandler.enable(all_threads=False)
    # This timer is a C thread. It prints the traceback and ends the process even if a library
    # never releases the GIL.
    faulthandler.dump_traceback_later(timeout, exit=True)
    limit_memory(memory)
    try:
        answer: tuple[str, object] = ("done", work(*arguments))
    except OnnxOpsError as error:
        answer = ("raised", error)
    except MemoryError:
        answer = ("memory", None)
    except Exception as error:  # The guarded libraries raise many types of exceptions.
        answer = ("raised", describe_error(error))
    answers.send(answer)
