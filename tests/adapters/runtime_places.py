"""Locations of programs and packages for tests of runtimes in separate processes."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import onnx
import pytest
from onnx import helper

from onnx_ops.domain.target import Target
from onnx_ops.ports import LoadSchedule, PairedBenchmarkSchedule, Runtime
from onnx_ops.testing.models import rows
from tests.support.extras import require_programs

KEPT = "ONNX_OPS_TEST_ENVIRONMENTS"
"""Variable that names a folder in which environments stay between test runs."""


def environments(factory: pytest.TempPathFactory) -> Path:
    """Return the folder of environments, which all workers share.

    It is the kept folder, or one of this test session. Environments are made in it under a lock.
    """
    if KEPT in os.environ:
        return Path(os.environ[KEPT])
    own = factory.getbasetemp()
    folder = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "runtime-environments"
    folder.mkdir(exist_ok=True)
    return folder


def require(*programs: str) -> None:
    """Skip the test if a program for JavaScript is not on the path, or fail if it is required."""
    require_programs(*programs, packages="nodejs npm chromium")


def write_identity(
    path: Path, kind: int, shape: tuple[int | str, ...] = ("n",), name: str = "x"
) -> Path:
    """Write a model of one element type that returns its input."""
    values = [helper.make_tensor_value_info(value, kind, shape) for value in (name, "y")]
    graph = helper.make_graph(
        [helper.make_node("Identity", [name], ["y"])], "identity", values[:1], values[1:]
    )
    onnx.save(
        helper.make_model(graph, ir_version=10, opset_imports=[helper.make_opsetid("", 18)]), path
    )
    return path


@contextmanager
def ended_in_the_middle(
    end: Callable[[], None],
) -> Iterator[Callable[[Runtime, str, Path, Target], None]]:
    """Yield a function that starts a long measurement and calls `end` during it.

    Another thread calls `end`.
    """
    threads = []

    def measure(runtime: Runtime, do: str, file: Path, target: Target) -> None:
        timer = threading.Timer(1.0, end)
        threads.append(timer)
        timer.start()
        many = 10_000_000
        if do == "benchmark":
            runtime.benchmark(
                (file, file),
                target,
                rows(1),
                PairedBenchmarkSchedule(rounds=1, blocks=10, runs=many),
            )
        elif do == "sample":
            runtime.sample(file, target, rows(1), runs=many, warmup=1)
        else:
            load = LoadSchedule(concurrency=2, requests=many, rounds=1)
            runtime.under_load((file, file), target, rows(1), load)

    yield measure
    for thread in threads:
        thread.join()
