"""Admission of new deployments by their total memory.

The tests also measure the process that loads them.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onnx_ops.domain.endpoint import ServerMemory
from onnx_ops.errors import InfrastructureError
from onnx_ops.serving.workers import memory_admission
from onnx_ops.serving.workers.available_memory import GpuMemory
from onnx_ops.serving.workers.memory_admission import (
    HOST,
    MemoryMeter,
    MemoryNeed,
    check_memory,
    estimate_restarts,
    find_shortage,
    measure_memory,
    measure_server_memory,
)
from tests.support.endpoints import fileless_deployment

MIB, GIB = 1 << 20, 1 << 30
ALLOCATE = """
import sys
data = bytearray(int(sys.argv[1]))
data[::4096] = b"x" * len(data[::4096])
print(flush=True)
input()
"""
sizes = st.integers(0, 1 << 45)


@given(workers=st.integers(1, 256), worker=sizes, shadow=sizes, restart=sizes)
def test_memory_need_includes_reserve_of_one_eighth(
    workers: int, worker: int, shadow: int, restart: int
) -> None:
    need = MemoryNeed(
        workers=workers, worker_bytes=worker, shadow_bytes=shadow, restart_bytes=restart
    )
    new = workers * worker + shadow
    assert 8 * (need.total_bytes - restart) in range(9 * new, 9 * new + 8)


@given(workers=st.integers(1, 255), worker=st.integers(1, 1 << 45), available=sizes)
def test_memory_need_that_fits_also_fits_with_fewer_workers_or_more_memory(
    workers: int, worker: int, available: int
) -> None:
    need = MemoryNeed(workers=workers, worker_bytes=worker)
    assert not need.fits(need.total_bytes - 1)
    assert need.fits(need.total_bytes)
    assert need.fits(need.total_bytes + available)
    more = MemoryNeed(workers=workers + 1, worker_bytes=worker)
    assert need.fits(available) or not more.fits(available)


def test_memory_need_of_zero_bytes_fits_into_zero_bytes() -> None:
    assert MemoryNeed(workers=256, worker_bytes=0).fits(0)
    assert not MemoryNeed(workers=1, worker_bytes=1).fits(0)


def test_check_memory_without_enough_memory_raises_error_with_need_and_workers() -> None:
    need = MemoryNeed(
        workers=4, worker_bytes=600 * MIB, shadow_bytes=100 * MIB, restart_bytes=50 * MIB
    )
    needs = {HOST: need, "1": MemoryNeed(workers=4, worker_bytes=GIB)}
    deployments = [fileless_deployment("green"), fileless_deployment("red")]
    check_memory(deployments, needs, {HOST: 2863 * MIB, "1": 5 * GIB})
    with pytest.raises(InfrastructureError) as refusal:
        check_memory(deployments, needs, {HOST: 2862 * MIB, "1": 5 * GIB})
    assert refusal.value.what == "the memory of the server is too small to load green, red"
    for words in (
        "2,863 MiB",
        "4 workers × 600 MiB",
        "100 MiB in shadow",
        "50 MiB in workers",
        "2,862 MiB are",
    ):
        assert words in refusal.value.why
    with pytest.raises(InfrastructureError, match="memory of GPU 1"):
        check_memory(deployments, needs, {HOST: 2863 * MIB, "1": 4 * GIB})


@pytest.fixture
def process() -> Iterator[subprocess.Popen[str]]:
    """Yield a process with 200 MiB of private memory."""
    command = [sys.executable, "-c", ALLOCATE, str(200 * MIB)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as started:
        assert started.stdout is not None
        started.stdout.readline()
        yield started
        started.kill()


def build_meter(available: int | None) -> MemoryMeter:
    return MemoryMeter(
        gpu_memory=GpuMemory(()),
        before_bytes=0,
        available_bytes={} if available is None else {HOST: available},
    )


def test_memory_meter_watch_beyond_available_memory_kills_process(
    process: subprocess.Popen[str],
) -> None:
    meter = build_meter(200 * MIB)
    asyncio.run(meter.watch(process.pid))
    assert meter.has_exceeded
    assert process.wait() == -signal.SIGKILL
    assert meter.compute_peak(0, 0)[HOST] >= 200 * MIB


@pytest.mark.parametrize("available", [GIB, None])
def test_memory_meter_sample_within_memory_keeps_process_running(
    process: subprocess.Popen[str], available: int | None
) -> None:
    meter = build_meter(available)
    meter.sample(process.pid)
    assert not meter.has_exceeded
    assert process.poll() is None
    peak = meter.compute_peak(0, 0)
    assert peak == {} if available is None else 200 * MIB <= peak[HOST] < 300 * MIB


@given(
    samples=st.lists(
        st.tuples(st.integers(0, 1 << 40), st.integers(0, 1 << 40)), min_size=1, max_size=5
    ),
    between=st.integers(0, 1 << 40),
)
def test_compute_peak_includes_private_memory_between_samples(
    samples: list[tuple[int, int]], between: int
) -> None:
    """At the peak between samples, as many files are mapped as before."""
    meter = build_meter(1 << 50)
    meter._private, meter._shared = (max(values) for values in zip(*samples, strict=True))
    resident = max(private + shared for private, shared in [*samples, (between, meter._shared)])
    peak = meter.compute_peak(samples[-1][0], resident)[HOST]
    assert peak == max(between, *(private for private, _ in samples))


def test_estimate_restarts_counts_missing_workers_like_running_ones(
    process: subprocess.Popen[str],
) -> None:
    used = measure_memory(process.pid)[0] - MIB
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    assert estimate_restarts([process.pid], 1, MIB) == 0
    assert estimate_restarts([process.pid, ended.pid], 4, MIB) == pytest.approx(
        3 * used, abs=3 * MIB
    )


def test_estimate_restarts_without_workers_is_zero() -> None:
    assert estimate_restarts([], 256, 0) == 0


def test_measure_server_memory_counts_only_running_workers_and_subtracts_own_memory(
    process: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_admission, "read_available_bytes", lambda: GIB)
    measured = measure_server_memory([process.pid, 1 << 22])
    assert measured is not None
    assert (measured.workers, measured.available_bytes) == (1, GIB)
    assert measured.worker_bytes == max(
        0, measure_memory(process.pid)[0] - measure_memory(os.getpid())[0]
    )


def test_measure_server_memory_without_running_workers_or_readable_memory_returns_none(
    process: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert measure_server_memory([]) is None
    monkeypatch.setattr(memory_admission, "read_available_bytes", lambda: None)
    assert measure_server_memory([process.pid]) is None


@given(workers=st.integers(1, 256), peak=sizes, available=sizes)
def test_find_shortage_agrees_with_trial_load_admission(
    workers: int, peak: int, available: int
) -> None:
    memory = ServerMemory(workers=workers, worker_bytes=0, available_bytes=available)
    assert bool(find_shortage(memory, peak)) != MemoryNeed(workers=workers, worker_bytes=peak).fits(
        available
    )
