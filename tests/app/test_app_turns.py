"""Turns of measurements and other work.

A measurement runs alone, and other work runs in parallel. Work with the same key runs one at a
time. This applies to threads and processes.
"""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from onnx_ops.app.context import build_context
from onnx_ops.app.execution import StageExecutor
from onnx_ops.app.running_stages import MeasurementLock, hold_key_lock
from onnx_ops.config.settings import load_settings
from onnx_ops.domain.artifact import Manifest, digest_bytes, hex_digits
from onnx_ops.domain.plan import Stage, StageKind

TIMEOUT_S = 30.0
KEY = digest_bytes(b"key")


def test_measurement_lock_for_measurement_excludes_other_work() -> None:
    quiet, noting = MeasurementLock(), threading.Lock()
    working, measuring, wrong = 0, 0, []

    def one(number: int) -> None:
        nonlocal working, measuring
        alone = number * 7919 % 5 < 2
        with quiet.hold(alone=alone):
            with noting:
                working, measuring = working + (not alone), measuring + alone
                if measuring and (working or measuring > 1):
                    wrong.append(number)
            time.sleep(0)  # Other threads get their turn.
            with noting:
                working, measuring = working - (not alone), measuring - alone

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(one, range(2000)))
    assert wrong == []


def test_measurement_lock_without_measurement_admits_concurrent_work() -> None:
    quiet, both = MeasurementLock(), threading.Barrier(2)

    def one(_: int) -> int:
        with quiet.hold(alone=False):
            return both.wait(TIMEOUT_S)

    with ThreadPoolExecutor(2) as pool:
        assert sorted(pool.map(one, range(2))) == [0, 1]


def test_measurement_lock_with_waiting_measurement_delays_later_work() -> None:
    quiet = MeasurementLock()
    begun, order = threading.Event(), []

    def measure() -> None:
        begun.set()
        with quiet.hold(alone=True):
            order.append("measure")

    def work() -> None:
        with quiet.hold(alone=False):
            order.append("work")

    threads = []
    with quiet.hold(alone=False):
        for job in (measure, work):
            thread = threading.Thread(target=job)
            thread.start()
            threads.append(thread)
            assert begun.wait(TIMEOUT_S)
            while quiet._tickets < 1 + len(threads):
                # The loop ends when the job is queued.
                pass
        assert order == []
    for thread in threads:
        thread.join(TIMEOUT_S)
    assert order == ["measure", "work"]


def test_measurement_lock_after_error_is_released() -> None:
    quiet = MeasurementLock()
    for alone in (False, True):
        with pytest.raises(ZeroDivisionError), quiet.hold(alone=alone):
            raise ZeroDivisionError
    with quiet.hold(alone=True):
        pass


def test_stage_without_own_process_waits_until_measurement_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    executed = threading.Event()

    def execute(*_: object) -> Manifest:
        executed.set()
        return Manifest(files={})

    monkeypatch.setattr("onnx_ops.app.execution.execute", execute)
    settings = load_settings(tmp_path, {})
    executor = StageExecutor(settings=settings, context=build_context(settings))
    stage = Stage(id="data/test", kind=StageKind.DATA, settings={})
    with ThreadPoolExecutor(1) as pool:
        with executor.running.lock.hold(alone=True):
            ended = pool.submit(executor, stage, KEY, {})
            assert not executed.wait(0.3)
        assert ended.result(TIMEOUT_S) == Manifest(files={})


def test_hold_key_lock_admits_one_thread_per_key(tmp_path: Path) -> None:
    at_work, most, turns = 0, 0, 0

    def one(_: int) -> None:
        nonlocal at_work, most, turns
        with hold_key_lock(tmp_path / "claims", KEY):
            at_work += 1
            time.sleep(0)  # Other threads get their turn.
            most, turns = max(most, at_work), turns + 1
            at_work -= 1

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(one, range(400)))
    assert (most, turns) == (1, 400)
    assert list((tmp_path / "claims").iterdir()) == []


def test_hold_key_lock_of_other_key_does_not_wait(tmp_path: Path) -> None:
    with hold_key_lock(tmp_path, KEY), hold_key_lock(tmp_path, digest_bytes(b"other")):
        assert len(list(tmp_path.iterdir())) == 2


def test_hold_key_lock_after_kill_of_holder_is_acquired(tmp_path: Path) -> None:
    holder = (
        "import sys; from pathlib import Path; from onnx_ops.app.running_stages import "
        "hold_key_lock\n"
        f"with hold_key_lock(Path({str(tmp_path)!r}), {KEY!r}):\n"
        "    print('mine', flush=True); sys.stdin.read()"
    )
    mine = threading.Event()

    def claim() -> None:
        with hold_key_lock(tmp_path, KEY):
            mine.set()

    with subprocess.Popen(
        [sys.executable, "-c", holder], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "mine\n"
        assert (tmp_path / f"{hex_digits(KEY)}.lock").exists()
        waiting = threading.Thread(target=claim)
        waiting.start()
        assert not mine.wait(0.3)
        process.kill()
        assert mine.wait(TIMEOUT_S)
        waiting.join(TIMEOUT_S)
