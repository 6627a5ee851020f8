"""Parity verdicts on injected faults and on good variants of correct exports."""

from __future__ import annotations

import importlib
import itertools
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from onnx_ops.adapters.runtimes.onnxruntime import OnnxRuntime
from onnx_ops.analysis.probes import edge_inputs
from onnx_ops.analysis.rules.parity import judge_parity
from onnx_ops.domain.gate import GateResult, ParityGate, Verdict
from onnx_ops.domain.target import SessionSettings, Target
from onnx_ops.errors import MeasurementFailure, UserError
from onnx_ops.graph.check import full_check
from onnx_ops.ports import Tensors
from onnx_ops.stages.parity import measure_parity
from truth.claims import Claim, at_least, at_most, table
from truth.evidence import evidence
from truth.families import Exported, exports
from truth.faults import FAULTS
from truth.faults_ends import NON_FINITE

TARGET = Target(name="truth")
LEVELS, THREADS = ("disabled", "basic", "extended", "all"), (1, 2)
SEEDS, QUICK_SEEDS = 3, 1
KINDS, GOOD = 27, 36

_CLOSE = 10 * 2 * float(np.finfo(np.float32).eps)
"""Below this share of the largest output, two exports are told apart by rounding only."""

_RANDOM_ROWS = 20_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One fault in one export. `told` is why it was caught, or what became of one that was not."""

    kind: str
    family: str
    seed: int
    caught: bool
    equivalent: bool
    told: str


def prove(*, quick: bool) -> list[Claim]:
    trials: list[Trial] = []
    alarms: list[str] = []
    good = 0
    with tempfile.TemporaryDirectory(prefix="onnx-ops-truth-") as name:
        folder = Path(name)
        for export in exports(folder, QUICK_SEEDS if quick else SEEDS):
            for variant, result in _good(export, folder):
                good += 1
                if result.verdict is not Verdict.PASS:
                    alarms.append(f"{export.family} {export.seed}, {variant}: {result.reason}")
            trials += _faulty(export, folder / "faulty.onnx")
    _print(trials, alarms)
    caught = sum(trial.caught for trial in trials)
    kinds = len({trial.kind for trial in trials})
    unexplained = sum(not (t.caught or t.equivalent) for t in trials)
    return [
        Claim(gate="parity", what="kinds of fault", bound=f"≥ {KINDS}", figure=str(kinds), held=kinds >= KINDS),
        at_least("parity", "faults caught", caught, len(trials), 0.98, quick=quick),
        at_most("parity", "faults neither caught nor equivalent", unexplained, len(trials), 0.0, quick=False),
        Claim(gate="parity", what="good variants", bound=f"≥ {GOOD}", figure=str(good), held=good >= GOOD),
        at_most("parity", "false alarms", len(alarms), good, 0.0, quick=False),
    ]


def judged(path: Path, target: Target, export: Exported) -> GateResult:
    """The verdict of the product's parity gate; a file that is no valid model, or does not run, fails."""
    try:
        full_check(path)
        measured = measure_parity(OnnxRuntime(), path, target, export.groups)
    except (MeasurementFailure, UserError) as error:
        return GateResult(
            gate="parity", metric="outputs", limit="", verdict=Verdict.FAIL, reason=f"it does not run: {error}"
        )
    (result,) = judge_parity(ParityGate(), evidence(parity=measured))
    return result


def _good(export: Exported, folder: Path) -> Iterator[tuple[str, GateResult]]:
    for level, threads in itertools.product(LEVELS, THREADS):
        settings = SessionSettings(graph_level=level, intra_op_threads=threads)
        target = replace(TARGET, session=settings)
        yield f"level {level}, {threads} threads", judged(export.path, target, export)
    optimised = folder / "optimised.onnx"
    for level in LEVELS[1:]:
        _optimise(export.path, optimised, level)
        yield f"optimised file, {level}", judged(optimised, TARGET, export)


def _optimise(source: Path, path: Path, level: str) -> None:
    ort = importlib.import_module("onnxruntime")
    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.graph_optimization_level = getattr(ort.GraphOptimizationLevel, f"ORT_ENABLE_{level.upper()}")
    options.optimized_model_filepath = str(path)
    ort.InferenceSession(str(source), options, providers=["CPUExecutionProvider"])


def _faulty(export: Exported, path: Path) -> Iterator[Trial]:
    for number, (kind, inject) in enumerate(FAULTS.items()):
        model = onnx.load(export.path)
        del model.graph.value_info[:]  # shapes that no longer fit would give the fault away
        before = model.SerializeToString(deterministic=True)
        if not inject(model, np.random.default_rng([export.seed, number])):
            continue
        if model.SerializeToString(deterministic=True) == before:
            continue  # the places were alike, so that nothing is wrong
        if kind in NON_FINITE and all(group.name != "nonfinite" for group in export.groups):
            continue  # the source refuses such rows, so that there is no right answer
        onnx.save(model, path)
        result = judged(path, TARGET, export)
        caught = result.verdict is Verdict.FAIL
        difference, told = (0.0, result.reason) if caught else _difference(export, path)
        yield Trial(
            kind=kind,
            family=export.family,
            seed=export.seed,
            caught=caught,
            equivalent=not caught and difference <= _CLOSE,
            told=told,
        )


def _difference(export: Exported, faulty: Path) -> tuple[float, str]:
    """Largest difference from the correct export over many inputs that the gate did not use."""
    inputs = _many(export)
    right = OnnxRuntime().run(export.path, TARGET, inputs)
    wrong = OnnxRuntime().run(faulty, TARGET, inputs)
    largest = 0.0
    for a, b in zip(right, wrong, strict=True):
        for name, array in a.items():
            largest = max(largest, _distance(array, b[name]))
    rows = sum(len(next(iter(feed.values()))) for feed in inputs)
    return largest, f"gate passes; on {rows} further rows it differs by {largest:.2g} of the largest output"


def _distance(right: Any, wrong: Any) -> float:
    if right.dtype.kind != "f":
        return float((right != wrong).any())
    same = np.isfinite(right) == np.isfinite(wrong)
    finite = np.isfinite(right) & np.isfinite(wrong)
    if not same.all():
        return float("inf")
    scale = float(np.abs(right[finite]).max(initial=0.0)) or 1.0
    return float(np.abs(right[finite] - wrong[finite]).max(initial=0.0)) / scale


def _many(export: Exported) -> tuple[Tensors, ...]:
    ((name, rows),) = export.unseen.items()
    draw = np.random.default_rng(export.seed)
    spread = float(np.abs(rows).max())
    heights = draw.choice([0.01, 1, spread], (_RANDOM_ROWS, *[1] * (rows.ndim - 1)))
    random = draw.normal(0, 1, (_RANDOM_ROWS, *rows.shape[1:])) * heights
    return export.unseen, {name: random.astype(np.float32)}, *edge_inputs(export.unseen).values()


def _print(trials: list[Trial], alarms: list[str]) -> None:
    by_kind: dict[str, Counter[str]] = defaultdict(Counter)
    for trial in trials:
        outcome = "caught" if trial.caught else "equivalent" if trial.equivalent else "missed"
        by_kind[trial.kind].update([outcome, f"in {trial.family}"])
    rows = [
        (
            kind,
            *(str(counts[outcome]) for outcome in ("caught", "equivalent", "missed")),
            ", ".join(sorted(place[3:] for place in counts if place.startswith("in "))),
        )
        for kind, counts in by_kind.items()
    ]
    table("parity, injected faults", ("kind", "caught", "equivalent", "missed", "families"), rows)
    uncaught = [
        ("equivalent" if t.equivalent else "MISSED", t.kind, f"{t.family} {t.seed}", t.told)
        for t in trials
        if not t.caught
    ]
    if uncaught:
        table("parity, faults that were not caught", ("", "kind", "export", "why"), uncaught)
    if alarms:
        table("parity, false alarms", ("good variant",), [(alarm,) for alarm in alarms])
