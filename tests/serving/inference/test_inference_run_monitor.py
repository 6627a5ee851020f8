"""Runs that take too long are ended."""

from __future__ import annotations

import threading
import time
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from onnx_ops.serving.inference.responses import RunTimeoutError
from onnx_ops.serving.inference.run_monitor import RunMonitor
from onnx_ops.serving.metrics import ROUTED, RUN_KINDS, SELECTED, SLOTS, make_thread_runs
from tests.serving.serving_process import FOREVER, deploy_loop, load_once

NEVER = float("inf")


def test_limit_ends_only_run_past_its_deadline(tmp_path: Path) -> None:
    model = load_once(deploy_loop(tmp_path / "loop"))
    monitor = RunMonitor()
    x = np.ones((1, 2), np.float32)
    ended: list[str] = []

    def run_forever() -> None:
        with (
            pytest.raises(RunTimeoutError, match="at its deadline"),
            monitor.limit(time.perf_counter()) as options,
        ):
            model.run(("y",), {"n": np.array([FOREVER]), "x": x}, options)
        ended.append("run")

    with monitor.limit(NEVER) as options:
        thread = threading.Thread(target=run_forever)
        thread.start()
        thread.join(30)
        assert ended == ["run"]
        (y,) = model.run(("y",), {"n": np.array([2]), "x": x}, options)
    assert y.tolist() == [[3.0, 3.0]]


def test_limit_of_hanging_run_calls_give_up_once_with_its_deployment() -> None:
    given_up: list[tuple[int, int]] = []
    thread_runs = make_thread_runs()
    gave_up = threading.Event()

    def give_up(slot: int, cell: int) -> None:
        given_up.append((slot, cell))
        gave_up.set()

    monitor = RunMonitor(thread_runs, give_up, grace_s=0.0)
    with monitor.limit(time.perf_counter(), 7, 3) as options:
        # The run ignores the flag, as a run does within one long node.
        assert gave_up.wait(30)
        assert options.terminate
        gave_up.clear()
        with monitor.limit(time.perf_counter(), 8):
            assert gave_up.wait(30)
    assert given_up == [(7, 3), (8, 0)]


@given(st.lists(st.tuples(st.integers(0, SLOTS - 1), st.integers(0, 9)), max_size=300))
def test_limit_counts_runs_in_progress_by_deployment(runs: list[tuple[int, int]]) -> None:
    thread_runs = make_thread_runs()
    monitor = RunMonitor(thread_runs)
    with ExitStack() as stack:
        for run in runs:
            stack.enter_context(monitor.limit(NEVER, *run))
        for slot in range(SLOTS):
            counts = (
                thread_runs[RUN_KINDS * slot + ROUTED],
                thread_runs[RUN_KINDS * slot + SELECTED],
            )
            cells = [cell for other, cell in runs if other == slot]
            assert counts == (sum(cell > 0 for cell in cells), cells.count(0))
    assert not any(thread_runs)


def test_watch_inline_ends_long_run_and_reset_permits_next_run(tmp_path: Path) -> None:
    model = load_once(deploy_loop(tmp_path / "loop"))
    monitor = RunMonitor()
    monitor.watch_inline()
    feed = {"n": np.array([FOREVER]), "x": np.ones((1, 2), np.float32)}
    for _ in range(2):
        monitor.inline_since = time.perf_counter()
        monitor.inline_options = model.options
        with pytest.raises(RunTimeoutError, match="took too long"):
            model.run(("y",), feed)
        monitor.inline_options = None
        monitor.reset(model.options)
    (y,) = model.run(("y",), {**feed, "n": np.array([1])})
    assert y.tolist() == [[2.0, 2.0]]
