"""The comparison of servers: all run at the same time, and take turns in a round."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from benchmarks.serving.contestants import Call, Contestant
from benchmarks.serving.load import Burst, burst
from benchmarks.serving.models import Model
from onnx_ops import plugins
from onnx_ops.domain.evidence import LatencySamples
from onnx_ops.domain.target import Target
from onnx_ops.measure.speed import measure_scheduling
from onnx_ops.statistics.variants.choice import choose_scheduling
from tests.support.processes import cpu_seconds, memory

_BARE = Path(__file__).with_name("peers") / "bare_run.py"
_BARE_RUNS = 20_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """One way of calling one contestant, at some number of connections.

    With `together`, client and server share one processor. Otherwise, each wakes the other on a
    different processor, which takes longer than many answers on a virtual machine.
    """

    name: str
    contestant: Contestant
    call: Call
    connections: int
    together: bool = False

    @property
    def place(self) -> str:
        """Return the number of connections and the processors, as a text for people."""
        return f"{self.connections}, one CPU" if self.together else str(self.connections)


@dataclass(slots=True, kw_only=True)
class Score:
    """The results of one match; the lists have one value for each round."""

    match: Match
    rates: list[float] = field(default_factory=list)
    cpu_us: list[float] = field(default_factory=list)
    p50_us: list[float] = field(default_factory=list)
    p99_us: list[float] = field(default_factory=list)
    requests: int = 0
    failed: int = 0
    ready_s: float = 0.0
    pss: int = 0
    rss: int = 0

    def add(self, figures: Burst, cpu_s: float) -> None:
        self.requests += figures.requests
        self.failed += figures.failed
        good = max(figures.requests - figures.failed, 1)
        self.rates.append((figures.requests - figures.failed) / figures.seconds)
        self.cpu_us.append(1e6 * cpu_s / good)
        self.p50_us.append(figures.p50_us)
        self.p99_us.append(figures.p99_us)

    def document(self) -> dict[str, object]:
        """Return the values for `--json`.

        CPU is the minimum of the rounds. Rates and latencies are medians.
        """
        return {
            "server": self.match.name,
            "model": self.match.contestant.model.name,
            "connections": self.match.connections,
            "one_processor": self.match.together,
            "requests_per_s": statistics.median(self.rates),
            "cpu_us": min(self.cpu_us),
            "p50_us": statistics.median(self.p50_us),
            "p99_us": statistics.median(self.p99_us),
            "ready_s": self.ready_s,
            "pss_mb": self.pss / 1e6,
            "rss_mb": self.rss / 1e6,
            "requests": self.requests,
            "failed": self.failed,
        }


def run_matches(
    matches: Sequence[Match], *, rounds: int, seconds: float, starts: int, folder: Path
) -> list[Score]:
    """Start every contestant, run all matches in turn in every round, and stop them.

    A contestant is started `starts` times; the shortest start counts.
    """
    contestants = list(dict.fromkeys(match.contestant for match in matches))
    scores = [Score(match=match) for match in matches]
    ready: dict[Contestant, list[float]] = {}
    with ExitStack() as stack:
        for contestant in contestants:
            stack.callback(contestant.stop)
            contestant.prepare()
            for turn in range(starts):
                if turn:
                    contestant.stop()
                ready.setdefault(contestant, []).append(contestant.start())
        for score in scores:  # These first requests warm the server up and are not counted.
            if not score.match.contestant.answers(score.match.call):
                raise SystemExit(
                    f"{score.match.name} does not answer 200 to its request: "
                    "nothing can be compared"
                )
            burst(
                score.match.call,
                score.match.contestant.port,
                connections=1,
                seconds=1,
                folder=folder,
            )
        for _ in range(rounds):
            for score in scores:
                play(score, seconds, folder)
        for score in scores:
            used = memory(score.match.contestant.processes())
            score.pss, score.rss = used.pss, used.rss
            score.ready_s = min(ready[score.match.contestant])
    return scores


def play(score: Score, seconds: float, folder: Path) -> None:
    match = score.match
    processes = match.contestant.processes()
    before = cpu_seconds(processes)
    with _one_processor(processes) if match.together else nullcontext():
        figures = burst(
            match.call,
            match.contestant.port,
            connections=match.connections,
            seconds=seconds,
            folder=folder,
        )
    score.add(figures, cpu_seconds(processes) - before)


@contextmanager
def _one_processor(pids: Sequence[int]) -> Iterator[None]:
    """Restrict processes, and those that this one starts, to one processor."""
    usual = os.sched_getaffinity(0)
    try:
        _move(pids, {min(usual)})
        yield
    finally:
        _move(pids, usual)


def _move(pids: Sequence[int], processors: set[int]) -> None:
    os.sched_setaffinity(0, processors)
    for pid in pids:
        for thread in Path(f"/proc/{pid}/task").iterdir():
            with suppress(ProcessLookupError):
                # A thread can end between the listing and this call.
                os.sched_setaffinity(int(thread.name), processors)


def choose_threads(model: Model, folder: Path) -> int:
    """Return the threads with which a release of the model would be served here."""
    runtime = plugins.load("runtimes", "onnxruntime")
    target, inputs, cores = Target(name="cpu-1t"), {"x": model.rows()[:, 0]}, os.cpu_count() or 1
    samples = runtime.sample(model.path(folder), target, {"x": inputs["x"][:1]}, runs=20, warmup=20)
    p50_ns = float(np.median(samples.nanoseconds))
    latency = LatencySamples(batch=1, runs=20, preempted=0, quantiles_ns={"p50": p50_ns})
    ways = measure_scheduling(runtime, model.path(folder), target, inputs, latency, cores, seed=1)
    return choose_scheduling(ways, independent=True)[0]


def bare_run_us(model: Model, folder: Path, rounds: int) -> float:
    """Return the CPU time of `session.run` alone in microseconds.

    This is the minimum of the rounds.
    """
    shape = ",".join(str(size) for size in (1, *model.shape))
    command: list[str | Path] = [sys.executable, _BARE, model.path(folder), shape, str(_BARE_RUNS)]
    outputs = [
        subprocess.run(command, check=True, capture_output=True, text=True).stdout
        for _ in range(rounds)
    ]
    return min(float(output) for output in outputs)
