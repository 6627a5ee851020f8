"""Replay thousands of decisions of the latency gate from one recording.

    python -m benchmarks.latency_replay [--rounds 240] [--decisions 2000] [--load "as it is"|bursts]

Shows how often the gate errs, and how long it measures. One model races two copies of itself for a
while. The decisions draw from that recording, so that later load on the machine does not matter.
Each decision starts at a random round and takes the rounds that follow. It shuffles the three
sessions of each round, and slows one of them down by a known ratio. Exits with 1 if a promised
bound does not hold.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.truth.claims import Claim, at_least, at_most, summary, table
from benchmarks.truth.latency import LIMIT, LOADS, QUIET, TARGET, WIDTH, write_layers
from onnx_ops.adapters.runtimes.onnxruntime import OnnxRuntime
from onnx_ops.domain.decision import Verdict
from onnx_ops.measure.timing import split_log_ratios
from onnx_ops.ports import PairedBenchmarkSamples, PairedBenchmarkSchedule
from onnx_ops.statistics.latency import (
    LOOKS,
    compare,
    compute_block_logs,
    explain_withheld_verdict,
    should_continue,
)

RATIOS = (1.0, 1.02, 1.0 + LIMIT, 1.10)
COPIES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """A race of one model with itself.

    `round_s` is the duration of a round in seconds, with the build and the warm-up of its sessions.
    """

    samples: PairedBenchmarkSamples
    round_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Decided:
    verdict: Verdict
    rounds: int


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=240, help="rounds to record")
    parser.add_argument("--decisions", type=int, default=2000, help="of each ratio")
    parser.add_argument("--load", choices=LOADS, default=QUIET)
    options = parser.parse_args()
    with LOADS[options.load]():
        recording = record(options.rounds)
    rows, claims = [], []
    for ratio in RATIOS:
        for probed in (True, False):
            found = decisions(recording, ratio, options.decisions, probed=probed)
            rows.append(_row(found, recording, ratio, probed=probed))
            claims += _claims(found, ratio) if probed else []
    conditions = f"{1e3 * recording.round_s:.0f} ms a round, load average {os.getloadavg()[0]:.1f}"
    table(
        f"latency, limit {100 * LIMIT:g} %, {conditions}",
        ("true ratio", "probe", "FAIL/PASS/INCONCLUSIVE %", "rounds", "median", "95 %"),
        rows,
    )
    summary(claims)
    return 0 if all(claim.is_met for claim in claims) else 1


def record(rounds: int) -> Recording:
    feed = {"x": np.random.default_rng(1).standard_normal((1, WIDTH)).astype(np.float32)}
    with tempfile.TemporaryDirectory(prefix="onnx-ops-replay-") as folder:
        model = write_layers(Path(folder) / "model.onnx", 0)
        begun = time.perf_counter()
        samples = OnnxRuntime().benchmark(
            (model,) * COPIES, TARGET, feed, PairedBenchmarkSchedule(rounds=rounds)
        )
        return Recording(samples=samples, round_s=(time.perf_counter() - begun) / rounds)


def decisions(recording: Recording, ratio: float, count: int, *, probed: bool) -> list[Decided]:
    draw = np.random.default_rng(0)
    samples = recording.samples if probed else replace(recording.samples, probe=None)
    return [_decide(samples, ratio, draw) for _ in range(count)]


def _decide(samples: PairedBenchmarkSamples, ratio: float, draw: np.random.Generator) -> Decided:
    """Decide look by look, as `measure.timing` does."""
    recorded = len(samples.nanoseconds)
    rounds = (int(draw.integers(recorded)) + np.arange(LOOKS[-1])) % recorded
    deal = np.argsort(draw.random((LOOKS[-1], COPIES)), axis=1)
    figures = (
        split_log_ratios(_look(samples, rounds[:goal], deal[:goal], ratio)) for goal in LOOKS
    )
    own, itself = next(figure for figure in figures if not should_continue(*figure, (LIMIT,)))
    noisy = explain_withheld_verdict(own, itself, LIMIT) is not None
    verdict = Verdict.INCONCLUSIVE if noisy else compare(own, tolerance=LIMIT).verdict
    return Decided(verdict=verdict, rounds=len(own))


def _look(
    samples: PairedBenchmarkSamples,
    rounds: npt.NDArray[np.int64],
    deal: npt.NDArray[np.int64],
    ratio: float,
) -> npt.NDArray[np.float64]:
    def dealt(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
        return np.take_along_axis(array[rounds], deal[:, np.newaxis, :, np.newaxis], axis=2)

    times = dealt(samples.nanoseconds.astype(np.float64))
    times[:, :, -1] *= ratio
    return compute_block_logs(
        times, dealt(samples.preempted), None if samples.probe is None else dealt(samples.probe)
    )


def _row(
    found: list[Decided], recording: Recording, ratio: float, *, probed: bool
) -> tuple[str, ...]:
    verdicts = Counter(decided.verdict for decided in found)
    rounds = Counter(decided.rounds for decided in found)
    seconds = recording.round_s * np.array([decided.rounds for decided in found])
    shares = (
        100 * verdicts[v] / len(found) for v in (Verdict.FAIL, Verdict.PASS, Verdict.INCONCLUSIVE)
    )
    return (
        f"{ratio:g}",
        "yes" if probed else "no",
        "/".join(f"{share:.1f}" for share in shares),
        ", ".join(f"{look}: {100 * rounds[look] / len(found):.0f} %" for look in LOOKS),
        f"{np.median(seconds):.2f} s",
        f"{np.quantile(seconds, 0.95):.2f} s",
    )


def _claims(found: list[Decided], ratio: float) -> list[Claim]:
    failed, passed = (
        sum(decided.verdict is v for decided in found) for v in (Verdict.FAIL, Verdict.PASS)
    )
    trials, what = len(found), f"true ratio {ratio:g}"
    if ratio < 1 + LIMIT:
        return [at_most("latency", f"{what}: false FAIL", failed, trials, 0.01)]
    if ratio > 1 + LIMIT:
        return [at_least("latency", f"{what}: FAIL", failed, trials, 0.99)]
    return [
        at_most("latency", f"{what}: {verdict}", events, trials, 0.05)
        for verdict, events in (("FAIL", failed), ("PASS", passed))
    ]


if __name__ == "__main__":
    sys.exit(main())
