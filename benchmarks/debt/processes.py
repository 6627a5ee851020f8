"""Processes that can be killed, and waits with a time limit."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from types import FrameType

from benchmarks.debt.project import Place
from onnx_ops.errors import MeasurementError
from tests.support.forks import fork_context

KILLED_S = 20.0
"""A process that still runs after this time is killed."""
MODULES: Mapping[str, tuple[str, ...]] = {
    "local": (),
    "sagemaker": ("boto3",),
    "azureml": ("azure.ai.ml", "azure.identity", "azure.storage.blob"),
    "replicas": ("s3fs", "adlfs"),
}
"""What the processes of a provider have imported before they start."""
_ALWAYS = ("benchmarks.debt.sites", "benchmarks.truth.claims")


def run_bounded(
    function: Callable[..., None],
    place: Place,
    *arguments: object,
    limit_s: float = KILLED_S,
    killed_s: float | None = None,
) -> float:
    """Run a function in a separate process, and return its seconds.

    The process is killed on purpose after `killed_s`. Without `killed_s`, it is killed after
    `limit_s` if it has not ended. The result is 0 if `killed_s` is given.

    Raises:
        MeasurementError: the function ended with an error.
    """
    process = start_process(function, place, *arguments)
    began = time.monotonic()
    process.join(limit_s if killed_s is None else killed_s)
    seconds = time.monotonic() - began
    in_time = end_process(process)
    if killed_s is not None:
        return 0.0
    if in_time and process.exitcode:
        raise MeasurementError(f"{function.__name__} ended with {process.exitcode}")
    return seconds


def context_of(place: Place) -> ForkServerContext:
    return fork_context(*_ALWAYS, *MODULES[place.config.provider])


def start_process(function: Callable[..., None], place: Place, *arguments: object) -> BaseProcess:
    process: BaseProcess = context_of(place).Process(target=function, args=(place, *arguments))
    process.start()
    return process


def end_process(process: BaseProcess) -> bool:
    """Kill the process if it still runs; return whether it had ended before."""
    ended = process.exitcode is not None
    process.kill()
    process.join(KILLED_S)
    return ended


def comes_true(condition: Callable[[], bool], within_s: float) -> bool:
    deadline = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


@contextmanager
def given_up_after(seconds: float) -> Iterator[None]:
    """Raise TimeoutError in the block when the time is over."""

    def give_up(number: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"not over after {seconds:g} s")

    before = signal.signal(signal.SIGALRM, give_up)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
