"""Measure the CPU time that a mirrored request costs the worker.

    python -m benchmarks.serving.shadow_cost [--rounds N]

The worker is the one that answers the client's request. Prints the microseconds of a JSON request
in three cases: without a shadow, with a copy of each request that another process receives, and
with copies that are dropped because the queue is full. Each value is the minimum of many
interleaved rounds of one thread's time. It includes system calls and the model's run.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import multiprocessing
import socket
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from benchmarks.serving.models import MLP, write_all
from benchmarks.serving.path import REQUESTS, drive, new_ids, requests_of
from onnx_ops.domain.endpoint import EndpointState, TrafficSplit
from onnx_ops.serving.inference import request_queue
from tests.serving.serving_process import deploy
from tests.serving.serving_worker import Worker

_FLUSH_S = 0.02


class MirroringWorker(Worker):
    """A worker whose mirrored requests go to one end of a socket pair."""

    end: socket.socket

    def _start_shadow(self, *_: object) -> None:
        pass

    def _connect_shadow(self, slot: int) -> socket.socket:
        self.end.setblocking(False)
        return self.end


def discard(end: socket.socket) -> None:
    while end.recv(1 << 18):
        pass


async def measure(folder: Path, rounds: int) -> dict[str, float]:
    write_all(folder)
    request_queue._LEAVE_INLINE_S = math.inf  # noqa: SLF001 (a busy machine must not move the model to a thread)
    location = MLP.path(folder).parent
    blue, green = (
        deploy(location, name=name, version=name, model=MLP.name) for name in ("blue", "green")
    )
    plain = EndpointState(deployments=(blue, green), split=TrafficSplit(weights={"blue": 100}))
    mirrored = replace(plain, split=replace(plain.split, shadow={"green": 100}))
    requests = requests_of("JSON", new_ids)
    received, full = socket.socketpair(), socket.socketpair()
    process = multiprocessing.get_context("fork").Process(
        target=discard, args=(received[1],), daemon=True
    )
    process.start()
    plays = {}
    for name, state, end in (
        ("no shadow", plain, None),
        ("all mirrored", mirrored, received[0]),
        ("all dropped", mirrored, full[0]),
    ):
        worker = MirroringWorker(state)
        if end is not None:
            worker.end = end
        worker.assemble()
        worker.deployments.get_current()
        plays[name] = drive(worker.build_connection(), requests)
    least = dict.fromkeys(plays, math.inf)
    for _ in range(rounds):
        for name, play in plays.items():
            await asyncio.sleep(_FLUSH_S)
            started_at = time.thread_time_ns()
            play()
            await asyncio.sleep(_FLUSH_S)
            least[name] = min(least[name], (time.thread_time_ns() - started_at) / 1e3 / REQUESTS)
    process.kill()
    return least


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=40)
    with tempfile.TemporaryDirectory(prefix="onnx-ops-shadow-") as name:
        least = asyncio.run(measure(Path(name), parser.parse_args().rounds))
    base = least["no shadow"]
    for case, cost in least.items():
        print(f"{case:14}{cost:8.1f} µs{cost - base:+8.1f} µs")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
