"""Latency verdicts on real sessions with known true ratios.

The ratios follow from the number of layers.
"""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import os
import random
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper, numpy_helper
from scipy import signal

from benchmarks.truth.claims import Claim, at_least, at_most, table
from benchmarks.truth.draws import derive_seed, make_generator
from benchmarks.truth.evidence import evidence
from onnx_ops.adapters.runtimes.onnxruntime import OnnxRuntime
from onnx_ops.domain.artifact import Digest
from onnx_ops.domain.decision import Verdict
from onnx_ops.domain.gate import LatencyGate
from onnx_ops.domain.target import Target
from onnx_ops.measure.timing import PairedBenchmark, compare_latency
from onnx_ops.ports import Tensors
from onnx_ops.statistics.latency import (
    FULL_RUN,
    LOOKS,
    compare,
    explain_withheld_verdict,
    should_continue,
)
from onnx_ops.statistics.rules.performance import judge_latency

LIMIT = 0.05
LAYERS = 100
WIDTH = 48
EXTRA = {"A/A": 0, "+2 %": 2, "+10 %": 10}
"""Additional layers of the candidate, by the slow-down that they cause."""

TRIALS, QUICK_TRIALS = 300, 2
SIMULATED, QUICK_SIMULATED = 1000, 10
DECISION_LIMIT_S = 1.0
TARGET = Target(name="truth")

Pairs = npt.NDArray[np.float64]
"""Log ratios of a whole run."""

Draw = Callable[[np.random.Generator], Pairs]

_BUSY_S, _IDLE_S = (0.005, 0.1), (0.02, 0.4)


@dataclass(slots=True, kw_only=True)
class Cell:
    """Trials of one slow-down under one load.

    In `noisy` of them, the self-test withheld the verdict.
    """

    load: str
    slowdown: str
    verdicts: Counter[Verdict] = field(default_factory=Counter)
    ratios: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    noisy: int = 0

    @property
    def trials(self) -> int:
        return sum(self.verdicts.values())


def prove(*, quick: bool, trials: int | None = None, load: str | None = None) -> list[Claim]:
    """Return the claims under one of `LOADS`, or under all of them."""
    count = trials or (QUICK_TRIALS if quick else TRIALS)
    cells: list[Cell] = []
    with tempfile.TemporaryDirectory(prefix="onnx-ops-truth-") as folder:
        models = {
            slowdown: write_layers(Path(folder) / f"{extra}.onnx", extra)
            for slowdown, extra in EXTRA.items()
        }
        for name, loaded in LOADS.items():
            if load not in (None, name):
                continue
            with loaded():
                found = _trials(name, models, count)
            _print(found)
            cells += found
    claims = [*_simulated(quick), *(claim for cell in cells for claim in _claims(cell, quick))]
    quiet = [cell for cell in cells if cell.load == QUIET and cell.slowdown == "A/A"]
    if quick or not quiet:
        return claims
    median = statistics.median(quiet[0].seconds)
    # The time depends on the machine, so only the full run checks it: that run uses a quiet
    # machine.
    promise = Claim(
        gate="latency",
        what="median time to decision, A/A",
        bound=f"< {DECISION_LIMIT_S:g} s",
        figure=f"{median:.2f} s",
        is_met=median < DECISION_LIMIT_S,
    )
    return [*claims, promise]


def write_layers(path: Path, extra: int) -> Path:
    """Write a model of LAYERS + `extra` equal layers.

    Each layer is a small matrix product and a Tanh, which the runtime does not merge.
    """
    draw = np.random.default_rng(0)
    nodes, weights, value = [], [], "x"
    for layer in range(LAYERS + extra):
        matrix = (draw.standard_normal((WIDTH, WIDTH)) / np.sqrt(WIDTH)).astype(np.float32)
        weights.append(numpy_helper.from_array(matrix, f"w{layer}"))
        nodes.append(helper.make_node("MatMul", [value, f"w{layer}"], [f"product{layer}"]))
        nodes.append(helper.make_node("Tanh", [f"product{layer}"], [f"layer{layer}"]))
        value = f"layer{layer}"
    nodes[-1].output[0] = "y"
    ends = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", WIDTH])
        for name in ("x", "y")
    ]
    graph = helper.make_graph(nodes, "layers", ends[:1], ends[1:], weights)
    onnx.save(
        helper.make_model(graph, ir_version=10, opset_imports=[helper.make_opsetid("", 18)]), path
    )
    return path


def _simulated(quick: bool) -> list[Claim]:
    """Apply the product's rule to simulated pairs of known truth.

    The pairs are independent, correlated, or drift; the pairs of the baseline with itself are of
    the same kind, or independent. The truth of a run that drifts is its mean over a full run, of
    which early looks see only the beginning. A longer run drifts back, and forth again.
    """
    trials, rows, claims = QUICK_SIMULATED if quick else SIMULATED, [], []
    for number, (world, (make, make_self)) in enumerate(WORLDS.items()):
        for slowdown in (LIMIT, 0.0, 0.1):
            draw = make_generator(number, round(100 * slowdown))
            found = [
                _rule(math.log1p(slowdown) + make(draw), make_self(draw)) for _ in range(trials)
            ]
            verdicts, pairs = (
                Counter(verdict for verdict, _ in found),
                [count for _, count in found],
            )
            shares = "/".join(
                f"{100 * verdicts[v] / trials:.1f}"
                for v in (Verdict.FAIL, Verdict.PASS, Verdict.INCONCLUSIVE)
            )
            rows.append((world, f"+{100 * slowdown:g} %", shares, f"{statistics.median(pairs):g}"))
            wrong = {LIMIT: (Verdict.PASS, Verdict.FAIL), 0.0: (Verdict.FAIL,)}.get(
                slowdown, (Verdict.PASS,)
            )
            worst = max(verdicts[verdict] for verdict in wrong)
            what = f"{world}, +{100 * slowdown:g} %: wrong, worse side"
            bound = 0.05 if slowdown == LIMIT else 0.01
            claims.append(at_most("latency", what, worst, trials, bound))
    head = ("pairs", "slow-down", "FAIL/PASS/INCONCLUSIVE %", "median pairs")
    table(f"latency, simulated, limit {100 * LIMIT:g} %, {trials} runs per row", head, rows)
    return claims


def _rule(own: Pairs, itself: Pairs) -> tuple[Verdict, int]:
    """Return the verdict as `measure.timing` makes it, and the pairs that it took."""
    ours, selves = ([[float(value)] for value in values] for values in (own, itself))
    pairs = next(n for n in LOOKS if not should_continue(ours[:n], selves[:n], (LIMIT,)))
    if explain_withheld_verdict(ours[:pairs], selves[:pairs], LIMIT) is not None:
        return Verdict.INCONCLUSIVE, pairs
    return compare(ours[:pairs], tolerance=LIMIT).verdict, pairs


def _correlated(r: float, sd: float) -> Draw:
    def make(draw: np.random.Generator) -> Pairs:
        noise = draw.standard_normal(LOOKS[-1])
        noise[1:] *= math.sqrt(1 - r * r)
        return sd * np.asarray(signal.lfilter([1.0], [1.0, -r], noise))

    return make


def _drifting(sd: float, noise: float) -> Draw:
    """Return a function that draws a line with noise, up or down.

    `sd` is the standard deviation of the line over a full run.
    """
    line = np.linspace(-1, 1, FULL_RUN)
    line *= sd / line.std()

    def make(draw: np.random.Generator) -> Pairs:
        return np.asarray(
            _there_and_back(line) * draw.choice([-1, 1]) + noise * draw.standard_normal(LOOKS[-1])
        )

    return make


def _wandering(sd: float, noise: float) -> Draw:
    def make(draw: np.random.Generator) -> Pairs:
        walk = np.cumsum(draw.standard_normal(FULL_RUN))
        walk = (walk - walk.mean()) / walk.std() * sd
        return np.asarray(_there_and_back(walk) + noise * draw.standard_normal(LOOKS[-1]))

    return make


def _there_and_back(run: Pairs) -> Pairs:
    return np.resize(np.concatenate([run, run[::-1]]), LOOKS[-1])


_LIKE: dict[str, Draw] = {
    **{f"independent, sd {100 * sd:g} %": _correlated(0.0, sd) for sd in (0.01, 0.02, 0.03)},
    **{
        f"correlated .7, sd {100 * sd:g} %": _correlated(0.7, sd) for sd in (0.01, 0.02, 0.03, 0.05)
    },
    **{
        f"drift, sd 2 %, noise {100 * noise:g} %": _drifting(0.02, noise)
        for noise in (0.003, 0.01, 0.02)
    },
    **{
        f"random walk, sd 2 %, noise {100 * noise:g} %": _wandering(0.02, noise)
        for noise in (0.003, 0.01)
    },
}
_ALONE: dict[str, Draw] = {
    name: _LIKE[name] for name in _LIKE if not name.startswith("independent")
}
WORLDS: dict[str, tuple[Draw, Draw]] = {
    **{name: (make, make) for name, make in _LIKE.items()},
    **{
        f"{name}, of the candidate alone": (make, _correlated(0.0, 0.003))
        for name, make in _ALONE.items()
    },
}
"""Pairs of the candidate, and pairs of the baseline with itself, by world."""


@contextlib.contextmanager
def bursts() -> Iterator[None]:
    """Burn CPU in bursts in another process.

    The system moves that process from core to core.
    """
    burner = multiprocessing.get_context("spawn").Process(target=_burn, args=(0,), daemon=True)
    burner.start()
    try:
        yield
    finally:
        burner.kill()
        burner.join()


QUIET = "as it is"
LOADS: dict[str, Callable[[], contextlib.AbstractContextManager[None]]] = {
    QUIET: contextlib.nullcontext,
    "bursts": bursts,
}


def _burn(seed: int) -> None:
    draw = random.Random(seed)  # noqa: S311 - not a secret
    parent = os.getppid()
    while os.getppid() == parent:  # The process also ends if the benchmark is killed.
        until = time.perf_counter() + draw.uniform(*_BUSY_S)
        while time.perf_counter() < until:
            pass
        time.sleep(draw.uniform(*_IDLE_S))


def _trials(load: str, models: dict[str, Path], count: int) -> list[Cell]:
    """Try all slow-downs in turns, so that other load affects them alike."""
    cells = {slowdown: Cell(load=load, slowdown=slowdown) for slowdown in models}
    feed = {"x": np.random.default_rng(1).standard_normal((1, WIDTH)).astype(np.float32)}
    for trial in range(count):
        for slowdown, model in models.items():
            _trial(cells[slowdown], models["A/A"], model, feed, trial)
    return list(cells.values())


def _trial(cell: Cell, baseline: Path, candidate: Path, feed: Tensors, trial: int) -> None:
    race = PairedBenchmark(
        runtime=OnnxRuntime(),
        target=TARGET,
        baseline=baseline,
        candidate=candidate,
        against="champion",
        feed=feed,
        seed=derive_seed(trial),
        tolerances={"latency": (LIMIT,)},
    )
    begun = time.perf_counter()
    comparison, _ = compare_latency(race)
    cell.seconds.append(time.perf_counter() - begun)
    found = evidence(baseline="champion", comparisons=(comparison,), raw=Digest(""))
    (result,) = judge_latency(LatencyGate(max_regression=LIMIT), found)
    cell.verdicts[result.verdict] += 1
    cell.noisy += result.reason.startswith("biased host")
    cell.ratios.append(result.estimate or 0.0)


def _print(cells: list[Cell]) -> None:
    verdicts = (Verdict.FAIL, Verdict.PASS, Verdict.INCONCLUSIVE)
    rows = [
        (
            cell.load,
            cell.slowdown,
            f"{statistics.median(cell.ratios):.3f}",
            str(cell.trials),
            "/".join(f"{100 * cell.verdicts[v] / cell.trials:.1f}" for v in verdicts),
            f"{100 * cell.noisy / cell.trials:.1f} %",
            f"{statistics.median(cell.seconds):.2f} s",
            f"{np.quantile(cell.seconds, 0.95):.2f} s",
        )
        for cell in cells
    ]
    head = (
        "load",
        "slow-down",
        "ratio",
        "trials",
        "FAIL/PASS/INCONCLUSIVE %",
        "self-test",
        "median",
        "95 %",
    )
    title = (
        f"latency, limit {100 * LIMIT:g} %, load average {os.getloadavg()[0]:.1f}: "
        "median estimate; time to decision"
    )
    table(title, head, rows)


def _claims(cell: Cell, quick: bool) -> Iterator[Claim]:
    failed, what = cell.verdicts[Verdict.FAIL], f"{cell.slowdown}, {cell.load}"
    if cell.slowdown == "+10 %":
        yield at_least("latency", f"{what}: FAIL", failed, cell.trials, 0.99)
    else:
        yield at_most("latency", f"{what}: false FAIL", failed, cell.trials, 0.01)
