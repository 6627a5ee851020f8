"""Measurement of cold starts.

A fresh process builds a session, answers requests and reports the durations.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from onnx_ops import codec
from onnx_ops.adapters.isolation.worker_main import dump, load
from onnx_ops.adapters.runtimes.onnxruntime_session import (
    build_session,
    check_machine,
    convert_runtime_errors,
)
from onnx_ops.adapters.runtimes.ort_format import prepare_model_file
from onnx_ops.domain.target import Target
from onnx_ops.errors import OnnxOpsError, StageError, describe_exit, from_document
from onnx_ops.ports.data import Tensors
from onnx_ops.ports.runtime import StartSamples, StartSchedule
from onnx_ops.scratch import Scratch

CHILD = "onnx_ops.adapters.runtimes.cold_start"
TIMEOUT_S = 600.0
"""Seconds after which a process is stopped."""


def collect_starts(
    models: Sequence[Path], schedule: StartSchedule, measure: Callable[[Path], tuple[int, int, int]]
) -> StartSamples:
    """Measure one cold start of each model in every round, in random order.

    `measure` returns the same values as `measure_start`.
    """
    import numpy as np

    order = np.random.default_rng(schedule.seed)
    figures = np.zeros((3, schedule.rounds, len(models)), dtype=np.int64)
    for round_number in range(schedule.rounds):
        for turn in order.permutation(len(models)):
            figures[:, round_number, turn] = measure(models[turn])
    return StartSamples(load_ns=figures[0], first_ns=figures[1], peak_bytes=figures[2])


def measure_start(
    model: Path, target: Target, feed: Tensors, requests: int
) -> tuple[int, int, int]:
    """Load a model in a fresh process, and answer one request `requests` times.

    Returns:
        Nanoseconds to build the session, nanoseconds of the first inference, and peak bytes, as
        in `ports.StartSamples`.

    Raises:
        MeasurementError: the machine lacks a requirement of the target, or ONNX Runtime refuses
            the model.
        StageError: the process crashes or exceeds `TIMEOUT_S`.
    """
    check_machine(target)
    loaded = prepare_model_file(model, target)
    request = {"model": str(loaded), "target": target, "feed": feed, "requests": requests}
    with Scratch() as folder:
        try:
            done = subprocess.run(
                [sys.executable, "-P", "-m", CHILD],
                input=dump(request, folder) + "\n",
                capture_output=True,
                text=True,
                errors="replace",
                timeout=TIMEOUT_S,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise StageError(
                f"a fresh process did not answer within {TIMEOUT_S:g} s and was stopped",
                where=model.name,
            ) from error
    answer: Any = {}
    with contextlib.suppress(ValueError, IndexError):
        answer = json.loads(done.stdout.splitlines()[-1])
    if not isinstance(answer, dict):
        answer = {}
    if "error" in answer:
        raise from_document(answer["error"])
    if done.returncode or not answer:
        raise StageError(
            f"a fresh process that loads the model ended with {describe_exit(done.returncode)}",
            where=model.name,
            why="\n".join(done.stderr.splitlines()[-15:]) or "the process printed nothing",
        )
    return answer["load_ns"], answer["first_ns"], answer["peak_bytes"]


UNKNOWN = -1


def main() -> None:
    """Serve one request of `measure_start` in the fresh process."""
    # Libraries must not print to standard output, since it contains the answer.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    try:
        document = measure_in_this_process(load(sys.stdin.readline()))
    except OnnxOpsError as error:
        document = {"error": error.as_document()}
    answers.write(json.dumps(document) + "\n")
    answers.close()


def measure_in_this_process(request: dict[str, Any]) -> dict[str, Any]:
    """Measure the load and the first inference in ns, and the added memory in bytes."""
    model, target = Path(request["model"]), codec.from_json(request["target"], Target)
    check_machine(target)  # This call also imports the runtime, before the measurement starts.
    resident, mark = mark_memory()
    begun = time.perf_counter_ns()
    session = build_session(model, target)
    loaded = time.perf_counter_ns()
    names = [output.name for output in session.get_outputs()]
    with convert_runtime_errors(model):
        sent = time.perf_counter_ns()
        session.run(names, request["feed"])
        answered = time.perf_counter_ns()
        for _ in range(request["requests"] - 1):
            session.run(names, request["feed"])
    return {
        "load_ns": loaded - begun,
        "first_ns": answered - sent,
        "peak_bytes": compute_added_memory(resident, mark),
    }


def mark_memory() -> tuple[int, int]:
    """Reset the peak memory of this process; return resident bytes and peak bytes.

    Without /proc, both values are the peak until now.
    """
    # If the system does not permit the reset, the peak can be that of the imports.
    # `compute_added_memory` detects this case.
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    status = _status()
    if "VmRSS" in status and "VmHWM" in status:
        return status["VmRSS"], status["VmHWM"]
    return _highest(), _highest()


def compute_added_memory(resident: int, mark: int) -> int:
    """Return the bytes added at the peak; UNKNOWN if the peak did not exceed `mark`."""
    highest = _status().get("VmHWM") or _highest()
    return highest - resident if highest > mark else UNKNOWN


def _status() -> dict[str, int]:
    """Return the memory values of /proc/self/status in bytes, by their names.

    The result is empty if this file does not exist.
    """
    try:
        lines = Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return {}
    pairs = (line.partition(":")[::2] for line in lines)
    return {name: 1024 * int(value.split()[0]) for name, value in pairs if value.endswith(" kB")}


def _highest() -> int:
    """Return the peak memory from getrusage in bytes.

    The value is only a fallback, since on Linux it can be the peak of the parent process.
    """
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


if __name__ == "__main__":
    main()
