"""Cold starts: new processes that load a model."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto

from onnx_ops.adapters.runtimes import cold_start
from onnx_ops.adapters.runtimes.onnxruntime import OnnxRuntime
from onnx_ops.domain.execution import SessionSettings
from onnx_ops.domain.target import Target
from onnx_ops.errors import MeasurementError, StageError
from onnx_ops.ports import StartSchedule
from onnx_ops.testing.models import rows
from tests.adapters.runtime_places import write_identity
from tests.support.graphs import write_graph

CPU = Target(name="cpu-1t")
MB = 1_000_000
linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def write_table(path: Path, size_bytes: int) -> Path:
    """Write `y = table[x]`: its weight has `size_bytes`, and it computes little."""
    table = np.random.default_rng(0).random(size_bytes // 4, dtype=np.float32)
    return write_graph(path, "(int64[n] x) => (float[n] y) { y = Gather(table, x) }", table=table)


@linux
def test_cold_start_with_larger_weights_reports_larger_peak_memory(tmp_path: Path) -> None:
    """A child must not inherit the larger memory of this process as its own peak."""
    ballast = np.ones(50 * MB, dtype=np.float64)
    small, large = (
        write_table(tmp_path / "small.onnx", 4 * MB),
        write_table(tmp_path / "large.onnx", 60 * MB),
    )
    feed = {"x": np.zeros(3, dtype=np.int64)}
    samples = OnnxRuntime().starts((small, large), CPU, feed, StartSchedule(rounds=1, requests=2))
    assert ballast.nbytes == 400 * MB
    assert 4 * MB < samples.peak_bytes[0, 0] < 50 * MB
    assert 60 * MB < samples.peak_bytes[0, 1] < 250 * MB


def test_cold_start_with_string_input_named_file_returns_durations(tmp_path: Path) -> None:
    path = write_identity(tmp_path / "m.onnx", TensorProto.STRING, name="file")
    feed = {"file": np.array(["a", "bc"], dtype=object)}
    samples = OnnxRuntime().starts((path,), CPU, feed, StartSchedule(rounds=1, requests=1))
    first: np.ndarray[Any, Any] = samples.first_ns
    assert (first > 0).all()


def measure_child(folder: Path, monkeypatch: pytest.MonkeyPatch, module: str) -> None:
    """Measure a start by a process that runs this module instead."""
    (folder / "child.py").write_text(module, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(folder))
    monkeypatch.setattr(cold_start, "CHILD", "child")
    cold_start.measure_start(folder / "m.onnx", CPU, {}, 1)


@pytest.mark.parametrize(
    ("module", "expected"),
    [
        (
            "import os, sys\nprint('last words', file=sys.stderr, flush=True)\nos.abort()",
            "signal SIGABRT",
        ),
        ("raise SystemExit(7)", "exit code 7"),
        ("print('no document')", "exit code 0"),
        ("print('{\"load_ns\": 1}')\nraise SystemExit(3)", "exit code 3"),
    ],
)
def test_cold_start_with_failed_process_or_invalid_answer_raises_stage_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str, expected: str
) -> None:
    with pytest.raises(StageError, match=expected) as caught:
        measure_child(tmp_path, monkeypatch, module)
    assert caught.value.where == "m.onnx"
    assert ("last words" in caught.value.why) == ("last words" in module)


def test_cold_start_with_hanging_process_raises_stage_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cold_start, "TIMEOUT_S", 0.2)
    with pytest.raises(StageError, match="did not answer within"):
        measure_child(tmp_path, monkeypatch, "import time\ntime.sleep(3600)")


def test_cold_start_with_invalid_session_setting_raises_measurement_error(file: Path) -> None:
    target = replace(CPU, session=SessionSettings(config={"": "1"}))
    with pytest.raises(MeasurementError, match="cannot run the model"):
        cold_start.measure_start(file, target, rows(1), 1)


def test_starts_of_two_models_returns_columns_in_given_order_and_varies_first_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from onnx_ops.adapters.runtimes import onnxruntime as adapter

    started: list[str] = []
    figures = {"baseline": (10, 1, 100), "candidate": (20, 2, 200)}

    def start(model: Path, *_: object) -> tuple[int, int, int]:
        started.append(model.name)
        return figures[model.name]

    monkeypatch.setattr(adapter, "measure_start", start)
    schedule = StartSchedule(rounds=8, seed=1)
    samples = OnnxRuntime().starts(
        (tmp_path / "baseline", tmp_path / "candidate"), CPU, rows(1), schedule
    )
    for side, name in enumerate(("baseline", "candidate")):
        for axis, figure in enumerate((samples.load_ns, samples.first_ns, samples.peak_bytes)):
            assert (figure[:, side] == figures[name][axis]).all()
    assert {started[i] for i in range(0, 16, 2)} == set(figures)


@linux
def test_compute_added_memory_ignores_earlier_peak() -> None:
    # Use a new process: the present process has much memory by now, and the kernel can reclaim
    # pages of it.
    program = """
import numpy as np
from onnx_ops.adapters.runtimes import cold_start
ballast = np.ones(20_000_000)
del ballast
resident, mark = cold_start.mark_memory()
more = np.ones(10_000_000)
print(mark - resident, cold_start.compute_added_memory(resident, mark))
"""
    output = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    ).stdout
    before, added = map(int, output.split())
    assert before < 40 * MB
    assert 70 * MB < added < 200 * MB


def test_compute_added_memory_is_known_only_after_new_peak(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cold_start, "_status", lambda: {"VmRSS": 50, "VmHWM": 90})
    assert cold_start.mark_memory() == (50, 90)
    assert cold_start.compute_added_memory(50, 90) == cold_start.UNKNOWN
    assert cold_start.compute_added_memory(50, 80) == 40


def test_added_memory_without_proc_is_increase_of_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cold_start, "_status", dict)
    peaks = iter([100, 100, 100, 130])
    monkeypatch.setattr(cold_start, "_highest", lambda: next(peaks))
    assert cold_start.mark_memory() == (100, 100)
    assert cold_start.compute_added_memory(100, 100) == cold_start.UNKNOWN
    assert cold_start.compute_added_memory(100, 100) == 30
