"""Requests of several threads to one session."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from onnx_ops.adapters.runtimes import onnxruntime as adapter
from onnx_ops.adapters.runtimes.onnxruntime import OnnxRuntime, run_load_window
from onnx_ops.domain.target import Target
from onnx_ops.errors import MeasurementError
from onnx_ops.ports import LoadSchedule
from onnx_ops.testing.models import rows, write_perceptron

CPU = Target(name="cpu-1t")


@pytest.mark.parametrize(("concurrency", "requests"), [(1, 1), (1, 7), (4, 40), (5, 3)])
def test_every_request_is_answered_once(concurrency: int, requests: int) -> None:
    answered: list[int] = []
    with ThreadPoolExecutor(concurrency) as pool:
        assert run_load_window(lambda: answered.append(1), pool, concurrency, requests) > 0
    assert len(answered) == requests


def test_that_many_requests_are_in_flight_at_once() -> None:
    """Each call waits until as many others are inside: fewer threads would never get through."""
    together = threading.Barrier(4)
    with ThreadPoolExecutor(4) as pool:
        run_load_window(lambda: together.wait(timeout=30), pool, 4, 12)


def test_a_window_ends_with_its_last_answer() -> None:
    delays_s = [0.02, 0.0]
    entered: list[int] = []
    answered: list[int] = []

    def call() -> None:
        entered.append(time.perf_counter_ns())
        time.sleep(delays_s.pop())
        answered.append(time.perf_counter_ns())

    with ThreadPoolExecutor(2) as pool:
        assert run_load_window(call, pool, 2, 2) >= max(answered) - min(entered)


def test_what_one_thread_raises_ends_the_window() -> None:
    answered: list[int] = []

    def call() -> None:
        answered.append(1)
        if len(answered) == 3:
            raise ValueError("the third")

    with ThreadPoolExecutor(2) as pool, pytest.raises(ValueError, match="the third"):
        run_load_window(call, pool, 2, 10_000)
    assert len(answered) < 10_000


def test_threads_that_cannot_be_started_are_a_failure_to_measure() -> None:
    with ThreadPoolExecutor(2) as pool:
        start = pool.submit
        left = [1]

        def limited(work: object) -> object:
            if not left:
                raise RuntimeError("can't start new thread")
            left.pop()
            return start(work)  # type: ignore[arg-type]

        pool.submit = limited  # type: ignore[assignment, method-assign]
        with pytest.raises(MeasurementError, match="2 threads could not be started"):
            run_load_window(lambda: None, pool, 2, 10)


@pytest.mark.nightly
def test_sides_are_kept_apart_sessions_are_fresh_and_orders_follow_the_seed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("baseline", "candidate"):
        write_perceptron(tmp_path / f"{name}.onnx")
    built: list[str] = []
    called: list[str] = []
    times = {"baseline.onnx": 10, "candidate.onnx": 20}

    def session(model: Path, *_: object) -> str:
        built.append(model.name)
        return model.name

    def spent(call: object, *_: object) -> int:
        called.append(str(call))
        return times[str(call)]

    monkeypatch.setattr(adapter, "build_session", session)
    monkeypatch.setattr(adapter, "_call", lambda session, _: session)
    monkeypatch.setattr(adapter, "run_load_window", spent)
    schedule = LoadSchedule(concurrency=2, requests=5, heats=3, windows=4, seed=2)
    runs = []
    for _ in range(2):
        built.clear()
        called.clear()
        samples = OnnxRuntime().under_load(
            (tmp_path / "baseline.onnx", tmp_path / "candidate.onnx"), CPU, rows(1), schedule
        )
        runs.append((tuple(built), tuple(called)))
        assert samples.nanoseconds.shape == (3, 4, 2)
        np.testing.assert_array_equal(samples.nanoseconds[..., 0], 10)
        np.testing.assert_array_equal(samples.nanoseconds[..., 1], 20)
    assert runs[0] == runs[1]
    assert sorted(runs[0][0]) == ["baseline.onnx"] * 3 + ["candidate.onnx"] * 3
    assert len(runs[0][1]) == 3 * (4 + 1) * 2, "each session has one window that is not timed"
    assert {runs[0][1][i] for i in range(0, 30, 2)} == set(times), "either side comes first now and then"
