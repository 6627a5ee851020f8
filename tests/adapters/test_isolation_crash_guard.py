"""Functions in a separate process.

However the process ends, its end is reported, and this process continues.
"""

from __future__ import annotations

import ctypes
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from onnx_ops.adapters.isolation.crash_guard import ProcessCrashError, run_guarded
from onnx_ops.adapters.runtimes.onnxruntime import OnnxRuntime
from onnx_ops.adapters.runtimes.placement import GuardedRuntime, guard_runtime
from onnx_ops.domain.target import Target
from onnx_ops.errors import MeasurementError, UserError
from onnx_ops.ports.runtime import PairedBenchmarkSchedule
from onnx_ops.testing.models import rows
from onnx_ops.testing.runtimes import ONE_WINDOW
from tests.support.graphs import write_graph

CPU = Target(name="cpu")


def double(number: int) -> int:
    return 2 * number


def refuse() -> None:
    raise UserError("no", remedy="Ask otherwise.")


def stumble() -> None:
    raise KeyError("nothing there")


def segfault() -> None:
    sys.stderr.write("last words\n")
    ctypes.string_at(0)


def abort() -> None:
    os.abort()


def leave() -> None:
    os._exit(7)


def hang() -> None:
    while True:
        pass


def hang_in_c() -> None:
    # The call holds the interpreter's lock, so that no Python thread can run.
    re.match(r"(a+)+$", "a" * 64 + "b")


def eat() -> None:
    held = []
    while True:
        held.append(np.ones(1 << 22))


def chatter() -> None:
    line = b"x" * 79 + b"\n"
    for _ in range(300_000):
        os.write(1, line)
    os.abort()


def test_run_guarded_returns_result_keeps_own_errors_and_wraps_others() -> None:
    assert run_guarded(double, 4) == 8
    with pytest.raises(UserError, match="no") as refused:
        run_guarded(refuse)
    assert refused.value.remedy == "Ask otherwise."
    with pytest.raises(ProcessCrashError, match="KeyError: 'nothing there'"):
        run_guarded(stumble)


def read_reason(_: int) -> str:
    with pytest.raises(ProcessCrashError) as failure:
        run_guarded(leave)
    return failure.value.reason


def test_run_guarded_with_concurrent_crashes_reports_each_exit_code() -> None:
    with ThreadPoolExecutor(8) as pool:
        reasons = set(pool.map(read_reason, range(60)))
    assert reasons == {"the process ended with exit code 7"}


@pytest.mark.parametrize(
    ("work", "how"),
    [
        (segfault, "ended with signal SIGSEGV"),
        (abort, "ended with signal SIGABRT"),
        (leave, "ended with exit code 7"),
    ],
)
def test_run_guarded_after_crash_reports_signal_or_exit_code_and_output(
    work: object, how: str
) -> None:
    with pytest.raises(ProcessCrashError, match=how) as crash:
        run_guarded(work)  # type: ignore[arg-type]
    if work is segfault:
        assert "last words" in crash.value.output
    if work is not leave:
        # The traceback names the Python function that was running.
        assert f"in {work.__name__}" in crash.value.output  # type: ignore[attr-defined]


@pytest.mark.parametrize("work", [hang, hang_in_c])
def test_run_guarded_after_timeout_stops_process_and_shows_its_stack(work: object) -> None:
    with pytest.raises(ProcessCrashError, match=r"longer than 2 s and was stopped") as crash:
        run_guarded(work, timeout=2.0)  # type: ignore[arg-type]
    assert crash.value.timed_out
    assert "hang" in crash.value.output


def test_run_guarded_above_memory_limit_raises_process_crash_error() -> None:
    with pytest.raises(ProcessCrashError, match=r"more memory than its limit of 0\.6 GB"):
        run_guarded(eat, memory=600_000_000)


UNDER_A_LOWER_LIMIT = """
import resource
from onnx_ops.adapters.isolation.worker_main import limit_memory

resource.setrlimit(resource.RLIMIT_DATA, (2_000_000_000, 2_000_000_000))
limit_memory(4_000_000_000, children_too={})
print(*resource.getrlimit(resource.RLIMIT_DATA))
"""


@pytest.mark.parametrize("children_too", [True, False])
def test_limit_memory_keeps_lower_limit_of_administrator(children_too: bool) -> None:
    script = UNDER_A_LOWER_LIMIT.format(children_too)
    output = subprocess.run([sys.executable, "-c", script], capture_output=True, check=True).stdout
    assert output.split() == [b"2000000000"] * 2


def test_run_guarded_after_crash_with_much_output_shortens_it_and_reports_its_size() -> None:
    with pytest.raises(ProcessCrashError) as crash:
        run_guarded(chatter)
    assert "24 MB of output" in crash.value.output
    assert len(crash.value.output) < 20_000


def write_endless(path: Path) -> None:
    """Write a model that doubles its input 2^62 times."""
    body = """round (int64 count, bool condition, float[batch] before) => (bool again, float[batch] after)
        { again = Identity(condition) after = Add(before, before) }"""  # noqa: E501
    write_graph(
        path,
        f'(float[batch] x) => (float[batch] y) {{ y = Loop<body = {body}>(most, "", x) }}',
        most=1 << 62,
    )


def test_guarded_runtime_with_hanging_session_raises_measurement_error(tmp_path: Path) -> None:
    write_endless(tmp_path / "endless.onnx")
    with pytest.raises(MeasurementError, match="ONNX Runtime did not finish in time") as caught:
        GuardedRuntime(timeout=2).run(
            tmp_path / "endless.onnx", CPU, ({"x": np.ones(1, np.float32)},)
        )
    assert "2 s and was stopped" in caught.value.why


def test_guarded_runtime_returns_same_outputs_as_plain_runtime(file: Path) -> None:
    feeds = (rows(3), rows(5))
    plain, shield = OnnxRuntime(), guard_runtime(OnnxRuntime(), 60)
    assert isinstance(shield, GuardedRuntime)
    for one, other in zip(plain.run(file, CPU, feeds), shield.run(file, CPU, feeds), strict=True):
        np.testing.assert_array_equal(one["scores"], other["scores"])


def test_guard_runtime_of_guarded_runtime_returns_it() -> None:
    shield = guard_runtime(OnnxRuntime(), 60)
    assert guard_runtime(shield) is shield


TRANSPOSED = """(float[batch, 4, 8] x) => (float[rows, columns, 8] y) {
    half = Cast<to = 10>(x) turned = Transpose<perm = [1, 0, 2]>(half)
    product = MatMul(turned, weight) y = Cast<to = 1>(product) }"""
"""A product of float16 matrices after a transposition.

It crashes ONNX Runtime 1.31 on a CPU while the session is built.
"""


@pytest.fixture
def crashing(tmp_path: Path) -> Path:
    return write_graph(tmp_path / "crashing.onnx", TRANSPOSED, weight=np.ones((8, 8), np.float16))


FEED = {"x": np.ones((2, 4, 8), np.float32)}
SCHEDULE = PairedBenchmarkSchedule(rounds=4)


@pytest.mark.parametrize(
    "use",
    [
        lambda runtime, model: runtime.facts(model, CPU),
        lambda runtime, model: runtime.rewritten(model, CPU, model.with_name("copy.onnx")),
        lambda runtime, model: runtime.run(model, CPU, (FEED,)),
        lambda runtime, model: runtime.sample(model, CPU, FEED, runs=1, warmup=0),
        lambda runtime, model: runtime.benchmark((model, model), CPU, FEED, SCHEDULE),
        lambda runtime, model: runtime.under_load((model, model), CPU, FEED, ONE_WINDOW),
    ],
    ids=["facts", "rewritten", "run", "sample", "benchmark", "under_load"],
)
def test_guarded_runtime_with_crashing_model_raises_measurement_error(
    crashing: Path, use: Callable[[GuardedRuntime, Path], object]
) -> None:
    with pytest.raises(MeasurementError, match="ONNX Runtime crashed") as caught:
        use(GuardedRuntime(), crashing)
    assert signal.SIGSEGV.name in caught.value.why
    assert "`session.graph_level`" in caught.value.remedy
