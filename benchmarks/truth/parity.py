"""Parity verdicts on injected faults and on good variants of correct exports."""

from __future__ import annotations

import importlib
import itertools
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import onnx
from onnx import numpy_helper

from benchmarks.truth.claims import Claim, at_least, at_most, table
from benchmarks.truth.evidence import evidence
from benchmarks.truth.families import Exported, exports
from benchmarks.truth.faults import FAULTS
from onnx_ops.adapters.runtimes.onnxruntime import OnnxRuntime
from onnx_ops.domain.decision import GateResult, Verdict
from onnx_ops.domain.execution import SessionSettings
from onnx_ops.domain.gate import ParityGate
from onnx_ops.domain.target import Target
from onnx_ops.errors import MeasurementError, UserError
from onnx_ops.measure.parity import measure_parity
from onnx_ops.onnx_graph.compatibility import check_model
from onnx_ops.onnx_graph.input_bounds import read_index_bounds, read_input_bounds
from onnx_ops.onnx_graph.tree_ensembles import build_split_probes, read_trees
from onnx_ops.ports import Tensors
from onnx_ops.statistics.probes import learn_domains, make_range_inputs
from onnx_ops.statistics.rules.parity import judge_parity
from onnx_ops.statistics.tree_parity import compare_trees
from onnx_ops.tools.compare import compare
from onnx_ops.tools.generated_rows import generate_samples
from onnx_ops.tools.model_inputs import shared_inputs

for _module in ("faults_ends", "faults_inputs"):
    # The import registers the faults of the module.
    importlib.import_module(f"benchmarks.truth.{_module}")

TARGET = Target(name="truth")
LEVELS: tuple[Literal["disabled", "basic", "extended", "all"], ...] = (
    "disabled",
    "basic",
    "extended",
    "all",
)
THREADS = (1, 2)
SEEDS, QUICK_SEEDS = 3, 1
KINDS, GOOD = 60, 36

_CLOSE = 10 * 2 * float(np.finfo(np.float32).eps)
"""Share of the largest output below which two exports differ by rounding only."""

_RANDOM_ROWS = 20_000

_MADE_UP_ROWS = 128
"""Number of rows that `judge` generates by default."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One fault in one export.

    `detail` is why the fault was caught, or what became of a fault that was not caught. `compared`
    is whether a comparison of the two files without any data shows a difference.
    """

    kind: str
    family: str
    seed: int
    caught: bool
    equivalent: bool
    detail: str
    compared: bool


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
    equivalent = sum(trial.equivalent for trial in trials)
    kinds = len({trial.kind for trial in trials})
    faults = len(trials) - equivalent
    return [
        Claim(
            gate="parity",
            what="kinds of fault",
            bound=f"≥ {KINDS}",
            figure=str(kinds),
            is_met=kinds >= KINDS,
        ),
        at_least(
            "parity", f"faults caught, {equivalent} proven equivalent apart", caught, faults, 0.99
        ),
        at_least(
            "parity",
            "the same, by comparing two files without data",
            sum(trial.compared for trial in trials if not trial.equivalent),
            faults,
            0.97,
        ),
        Claim(
            gate="parity",
            what="good variants",
            bound=f"≥ {GOOD}",
            figure=str(good),
            is_met=good >= GOOD,
        ),
        at_most("parity", "false alarms", len(alarms), good, 0.0),
    ]


def judged(path: Path, target: Target, export: Exported) -> GateResult:
    """Return the verdict of the product's parity gate.

    A file fails if it is not a valid model, or if it does not run.
    """
    try:
        check_model(path)
        measured = measure_parity(OnnxRuntime(), path, target, export.groups)
        trees = compare_trees(read_trees(path), export.trees) if export.trees is not None else None
    except (MeasurementError, UserError) as error:
        return GateResult(
            gate="parity",
            metric="outputs",
            limit="",
            verdict=Verdict.FAIL,
            reason=f"it does not run: {error}",
        )
    results = judge_parity(ParityGate(), evidence(parity=measured, trees=trees))
    return max((r for r in results if not r.advisory), key=lambda r: r.verdict.rank)


def _good(export: Exported, folder: Path) -> Iterator[tuple[str, GateResult]]:
    for level, threads in itertools.product(LEVELS, THREADS):
        settings = SessionSettings(graph_level=level, intra_op_threads=threads)
        target = replace(TARGET, session=settings)
        yield f"level {level}, {threads} threads", judged(export.path, target, export)
    optimized = folder / "optimized.onnx"
    for level in LEVELS[1:]:
        optimize(export.path, optimized, level)
        yield f"optimized file, {level}", judged(optimized, TARGET, export)
    if _multiplied(export.path, optimized):
        yield "scaled by the reciprocal", judged(optimized, TARGET, export)


def _multiplied(source: Path, path: Path) -> bool:
    """Write a model whose scaler multiplies by 1 / deviation, if it has a scaler.

    Such a scaler rounds differently and is as right.
    """
    model = onnx.load(source)
    tensors = {tensor.name: tensor for tensor in model.graph.initializer}
    found = [
        node for node in model.graph.node if node.op_type == "Div" and node.input[1] in tensors
    ]
    for node in found:
        node.op_type = "Mul"
        tensor = tensors[node.input[1]]
        tensor.CopyFrom(numpy_helper.from_array(1 / numpy_helper.to_array(tensor), tensor.name))
    onnx.save(model, path)
    return bool(found)


def optimize(source: Path, path: Path, level: str) -> None:
    ort = importlib.import_module("onnxruntime")
    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.graph_optimization_level = getattr(
        ort.GraphOptimizationLevel, f"ORT_ENABLE_{level.upper()}"
    )
    options.optimized_model_filepath = str(path)
    ort.InferenceSession(str(source), options, providers=["CPUExecutionProvider"])


def _faulty(export: Exported, path: Path) -> Iterator[Trial]:
    for number, (kind, inject) in enumerate(FAULTS.items()):
        model = onnx.load(export.path)
        # Outdated shapes would reveal the fault before the model runs.
        del model.graph.value_info[:]
        before = model.SerializeToString(deterministic=True)
        if not inject(model, np.random.default_rng([export.seed, number])):
            continue
        if model.SerializeToString(deterministic=True) == before:
            # The change had no effect, so the model still computes the same function.
            continue
        onnx.save(model, path)
        result = judged(path, TARGET, export)
        caught = result.verdict is Verdict.FAIL
        equivalent, detail = (False, result.reason) if caught else equivalence(export, path)
        yield Trial(
            kind=kind,
            family=export.family,
            seed=export.seed,
            caught=caught,
            equivalent=equivalent,
            detail=detail,
            compared=_told_apart(export.path, path),
        )


def _told_apart(right: Path, wrong: Path) -> bool:
    """Return whether `judge` refuses the faulty file on generated rows."""
    try:
        samples = generate_samples(
            shared_inputs(right, wrong),
            count=_MADE_UP_ROWS,
            dims={},
            bounds=read_input_bounds(right),
        )
        return compare(OnnxRuntime(), TARGET, right, wrong, samples).verdict is Verdict.FAIL
    except (MeasurementError, UserError):
        return True


def equivalence(export: Exported, faulty: Path) -> tuple[bool, str]:
    """Return whether the change alters no answer that a caller can get, and why.

    This is shown on many inputs that the gate did not use.
    """
    inputs = _many(export)
    largest = _largest(export.path, faulty, inputs)
    rows = sum(len(next(iter(feed.values()))) for feed in inputs)
    if largest > _CLOSE:
        return (
            False,
            (
                f"gate passes; it differs by {largest:.2g} of the largest output on {rows} further "
                "rows"
            ),
        )
    same = (
        "identical answers"
        if largest == 0
        else f"within rounding ({largest:.1g} of the largest answer)"
    )
    return True, f"{same} on {rows} further rows (real, random, ends of the range, next to splits)"


def _largest(right: Path, wrong: Path, inputs: tuple[Tensors, ...]) -> float:
    """Return the largest distance of two files' answers.

    The unit is the largest answer.
    """
    answers = OnnxRuntime().run(right, TARGET, inputs)
    others = OnnxRuntime().run(wrong, TARGET, inputs)
    return max(
        _distance(a[name], b[name]) for a, b in zip(answers, others, strict=True) for name in a
    )


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
    domains = learn_domains(export.samples, bounds=read_index_bounds(export.path))
    low, high = domains[name].low, domains[name].high
    random = low + (high - low) * draw.random((_RANDOM_ROWS, *rows.shape[1:]))
    random = np.where(domains[name].whole, np.round(random), random)
    splits = build_split_probes(export.path, export.unseen)
    near = () if splits is None else (splits,)
    return (
        export.unseen,
        {name: random.astype(rows.dtype)},
        *near,
        make_range_inputs(export.unseen, domains),
    )


def _print_kinds(trials: list[Trial]) -> None:
    """Print the outcomes of each kind of fault, and the families of models."""
    outcomes: dict[str, Counter[str]] = defaultdict(Counter)
    families: dict[str, set[str]] = defaultdict(set)
    for trial in trials:
        outcomes[trial.kind][
            "caught" if trial.caught else "equivalent" if trial.equivalent else "missed"
        ] += 1
        families[trial.kind].add(trial.family)
    names = ("caught", "equivalent", "missed")
    rows = [
        (kind, *(str(counts[name]) for name in names), ", ".join(sorted(families[kind])))
        for kind, counts in outcomes.items()
    ]
    table("parity, injected faults", ("kind", *names, "families"), rows)


def _print(trials: list[Trial], alarms: list[str]) -> None:
    _print_kinds(trials)
    uncaught = [
        ("equivalent" if t.equivalent else "MISSED", t.kind, f"{t.family} {t.seed}", t.detail)
        for t in trials
        if not t.caught
    ]
    if uncaught:
        table("parity, changes that were not caught", ("", "kind", "export", "proven by"), uncaught)
    blind = [(t.kind, f"{t.family} {t.seed}") for t in trials if not (t.compared or t.equivalent)]
    if blind:
        table("compare without data, faults that were not seen", ("kind", "export"), blind)
    if alarms:
        table("parity, false alarms", ("good variant",), [(alarm,) for alarm in alarms])
