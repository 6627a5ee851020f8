"""Latency verdicts on real sessions, against true ratios that are known from the number of layers."""

from __future__ import annotations

import contextlib
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
import onnx
from onnx import TensorProto, helper, numpy_helper

from benchmarks.truth.claims import Claim, at_least, at_most, table
from benchmarks.truth.evidence import evidence
from onnx_ops.adapters.runtimes.onnxruntime import OnnxRuntime
from onnx_ops.analysis.rules.latency import judge_latency
from onnx_ops.domain.artifact import Digest
from onnx_ops.domain.gate import LatencyGate, Verdict
from onnx_ops.domain.target import Target
from onnx_ops.ports import Tensors
from onnx_ops.stages.timing import Race, time_against

LIMIT = 0.05
LAYERS = 100
WIDTH = 48
EXTRA = {"A/A": 0, "+2 %": 2, "+10 %": 10}
"""Layers more than the baseline's, by the slow-down that they stand for."""

TRIALS, QUICK_TRIALS = 300, 2
DECISION_LIMIT_S = 1.0
TARGET = Target(name="truth")
_BUSY_S, _IDLE_S = (0.005, 0.1), (0.02, 0.4)


@dataclass(slots=True, kw_only=True)
class Cell:
    """Trials of one slow-down under one load; in `noisy` of them the self-test withheld the verdict."""

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
    """One of `LOADS`, or all."""
    count = trials or (QUICK_TRIALS if quick else TRIALS)
    cells: list[Cell] = []
    with tempfile.TemporaryDirectory(prefix="onnx-ops-truth-") as folder:
        models = {slowdown: write_layers(Path(folder) / f"{extra}.onnx", extra) for slowdown, extra in EXTRA.items()}
        for name, loaded in LOADS.items():
            if load not in (None, name):
                continue
            with loaded():
                found = _trials(name, models, count)
            _print(found)
            cells += found
    claims = [claim for cell in cells for claim in _claims(cell, quick)]
    quiet = [cell for cell in cells if cell.load == QUIET and cell.slowdown == "A/A"]
    if quick or not quiet:
        return claims
    median = statistics.median(quiet[0].seconds)
    # How long it takes is the machine's affair: only the full run, which is made on a quiet one, promises it.
    promise = Claim(
        gate="latency",
        what="median time to decision, A/A",
        bound=f"< {DECISION_LIMIT_S:g} s",
        figure=f"{median:.2f} s",
        held=median < DECISION_LIMIT_S,
    )
    return [*claims, promise]


def write_layers(path: Path, extra: int) -> Path:
    """LAYERS + `extra` equal layers, each a small matrix product and a Tanh, which the runtime does not merge."""
    draw = np.random.default_rng(0)
    nodes, weights, value = [], [], "x"
    for layer in range(LAYERS + extra):
        matrix = (draw.standard_normal((WIDTH, WIDTH)) / np.sqrt(WIDTH)).astype(np.float32)
        weights.append(numpy_helper.from_array(matrix, f"w{layer}"))
        nodes.append(helper.make_node("MatMul", [value, f"w{layer}"], [f"product{layer}"]))
        nodes.append(helper.make_node("Tanh", [f"product{layer}"], [f"layer{layer}"]))
        value = f"layer{layer}"
    nodes[-1].output[0] = "y"
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", WIDTH]) for name in ("x", "y")]
    graph = helper.make_graph(nodes, "layers", ends[:1], ends[1:], weights)
    onnx.save(helper.make_model(graph, ir_version=10, opset_imports=[helper.make_opsetid("", 18)]), path)
    return path


@contextlib.contextmanager
def bursts() -> Iterator[None]:
    """Another process burns CPU in bursts; the system moves it from core to core."""
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
    while os.getppid() == parent:  # a benchmark that was killed leaves no burner behind
        until = time.perf_counter() + draw.uniform(*_BUSY_S)
        while time.perf_counter() < until:
            pass
        time.sleep(draw.uniform(*_IDLE_S))


def _trials(load: str, models: dict[str, Path], count: int) -> list[Cell]:
    """All slow-downs in turns, so that what the machine does meanwhile meets each of them alike."""
    cells = {slowdown: Cell(load=load, slowdown=slowdown) for slowdown in models}
    feed = {"x": np.random.default_rng(1).standard_normal((1, WIDTH)).astype(np.float32)}
    for trial in range(count):
        for slowdown, model in models.items():
            _trial(cells[slowdown], models["A/A"], model, feed, seed=trial)
    return list(cells.values())


def _trial(cell: Cell, baseline: Path, candidate: Path, feed: Tensors, seed: int) -> None:
    race = Race(
        runtime=OnnxRuntime(),
        target=TARGET,
        baseline=baseline,
        candidate=candidate,
        against="champion",
        feed=feed,
        seed=1000 * seed,
        tolerances={"latency": (LIMIT,)},
    )
    begun = time.perf_counter()
    comparison, _ = time_against(race)
    cell.seconds.append(time.perf_counter() - begun)
    found = evidence(baseline="champion", comparisons=(comparison,), raw=Digest(""))
    (result,) = judge_latency(LatencyGate(max_regression=LIMIT), found)
    cell.verdicts[result.verdict] += 1
    cell.noisy += result.reason.startswith(("noisy host", "biased host"))
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
    head = ("load", "slow-down", "ratio", "trials", "FAIL/PASS/INCONCLUSIVE %", "self-test", "median", "95 %")
    title = (
        f"latency, limit {100 * LIMIT:g} %, load average {os.getloadavg()[0]:.1f}: median estimate; time to decision"
    )
    table(title, head, rows)


def _claims(cell: Cell, quick: bool) -> Iterator[Claim]:
    failed, what = cell.verdicts[Verdict.FAIL], f"{cell.slowdown}, {cell.load}"
    if cell.slowdown == "+10 %":
        yield at_least("latency", f"{what}: FAIL", failed, cell.trials, 0.99, quick=quick)
    else:
        yield at_most("latency", f"{what}: false FAIL", failed, cell.trials, 0.01, quick=quick)
