"""The fresh process of a cold start: reads one request, prints one line of JSON."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import sys
import time
from pathlib import Path
from typing import Any

from onnx_ops import codec
from onnx_ops.adapters.runtimes.arrays import get_arrays
from onnx_ops.adapters.runtimes.onnxruntime_session import check_machine, failures, new_session
from onnx_ops.domain.target import Target
from onnx_ops.errors import OnnxOpsError

UNKNOWN = -1


def main() -> None:
    # Whatever libraries print belongs with the errors: the answer is alone on standard output.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    try:
        document = measure(json.loads(sys.stdin.readline()))
    except OnnxOpsError as error:
        document = {"error": error.as_document()}
    answers.write(json.dumps(document) + "\n")
    answers.close()


def measure(request: dict[str, Any]) -> dict[str, Any]:
    """Nanoseconds to build the session and of the first inference; bytes added at the peak, or UNKNOWN."""
    model, target = Path(request["model"]), codec.from_json(request["target"], Target)
    feed = dict(get_arrays(Path(request["feed"])))
    check_machine(target)  # imports the runtime
    resident, mark = memory_mark()
    begun = time.perf_counter_ns()
    session = new_session(model, target)
    loaded = time.perf_counter_ns()
    names = [output.name for output in session.get_outputs()]
    with failures(model):
        asked = time.perf_counter_ns()
        session.run(names, feed)
        answered = time.perf_counter_ns()
        for _ in range(request["requests"] - 1):
            session.run(names, feed)
    return {"load_ns": loaded - begun, "first_ns": answered - asked, "peak_bytes": added(resident, mark)}


def memory_mark() -> tuple[int, int]:
    """Bytes resident now, and the highest so far, which the kernel is asked to forget first.

    Where there is no /proc, both are the highest so far.
    """
    # Where that is not allowed the peak of the imports stands, and `added` does not take it for the model's.
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    status = _status()
    if "VmRSS" in status and "VmHWM" in status:
        return status["VmRSS"], status["VmHWM"]
    return _highest(), _highest()


def added(resident: int, mark: int) -> int:
    """Peak of resident memory since `memory_mark`, less `resident`; UNKNOWN if it has not risen above `mark`."""
    highest = _status().get("VmHWM") or _highest()
    return highest - resident if highest > mark else UNKNOWN


def _status() -> dict[str, int]:
    """Memory of this process in bytes, by its names in /proc/self/status; empty where there is none."""
    try:
        lines = Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return {}
    pairs = (line.partition(":")[::2] for line in lines)
    return {name: 1024 * int(value.split()[0]) for name, value in pairs if value.endswith(" kB")}


def _highest() -> int:
    """The peak that getrusage tells: kB, but bytes on macOS. On Linux it may be the parent's, hence only a fallback."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


if __name__ == "__main__":
    main()
