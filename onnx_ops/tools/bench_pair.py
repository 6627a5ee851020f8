"""Bench of two ONNX files: is B slower than A, or does it need more? Side by side, with the verdicts of gates."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from onnx_ops.domain.artifact import digest_file
from onnx_ops.domain.evidence import Evidence, LatencyComparison, PairedRatios, RuntimeFacts
from onnx_ops.domain.gate import (
    ColdStartGate,
    Decision,
    Gate,
    LatencyGate,
    MemoryGate,
    ThroughputGate,
    Verdict,
)
from onnx_ops.domain.measuring import asked_by
from onnx_ops.domain.target import Target
from onnx_ops.errors import MeasurementError
from onnx_ops.measure.coverage import examine
from onnx_ops.measure.speed import compare_more
from onnx_ops.measure.timing import Race, Raw, rows_of, time_against
from onnx_ops.onnx_graph.inspect import info
from onnx_ops.ports import Runtime, Tensors
from onnx_ops.statistics.judge import judge
from onnx_ops.tools.bench import LATENCY, UNITS, Conditions, Tell, facts_of
from onnx_ops.tools.probing import shared_inputs

A = "A"
"""What the baseline is called in evidence."""

REGRESSIONS = {"latency": 0.05, "throughput": 0.05, "cold_start": 0.2, "memory": 0.1}
"""What B may lose by kind of gate, unless said otherwise: starts of processes vary more than runs do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Paired:
    """B against A. `medians` are those of A and B by figure, latency first, in the unit that `UNITS` has for it."""

    batch: int
    decision: Decision
    evidence: Evidence
    medians: Mapping[str, tuple[float, float]]

    @property
    def verdict(self) -> Verdict:
        return self.decision.verdict


def pair_gates(max_regression: float | None, *, concurrency: int | None, cold: bool) -> tuple[Gate, ...]:
    """The gates that B must pass; one limit for all of them, or that of `REGRESSIONS` for each."""

    def limit(kind: str) -> float:
        return REGRESSIONS[kind] if max_regression is None else max_regression

    gates: list[Gate] = [LatencyGate(max_regression=limit("latency"))]
    if concurrency is not None:
        gates.append(ThroughputGate(concurrency=concurrency, max_regression=limit("throughput")))
    if cold:
        gates += [
            ColdStartGate(max_regression=limit("cold_start")),
            MemoryGate(max_regression=limit("memory")),
        ]
    return tuple(gates)


def bench_pair(
    runtime: Runtime,
    target: Target,
    a: Path,
    b: Path,
    feed: Tensors,
    *,
    gates: Sequence[Gate],
    conditions: Conditions,
    seed: int = 0,
    tell: Tell = lambda _: None,
) -> Paired:
    """Time B against A look by look, A against itself, and what the gates say about it.

    Args:
        runtime: runs both.
        target: where.
        a: the baseline.
        b: the candidate.
        feed: one request.
        gates: a latency gate with `max_regression`, and further ones that ask for further measurements.
        conditions: tells the state of the machine.
        seed: of the order of runs.
        tell: hears what is at work.

    Raises:
        UserError: a file is not a valid model, too new for the target, or the two take different inputs.
        MeasurementError: a model does not run there, or not on the provider asked for.
    """
    shared_inputs(a, b)
    _check_provider(facts_of(runtime, target, a), a)
    facts = facts_of(runtime, target, b)
    asked = asked_by(gates)
    race = Race(
        runtime=runtime,
        target=target,
        baseline=a,
        candidate=b,
        against=A,
        feed=feed,
        seed=seed,
        tolerances=asked.tolerances,
        tell=tell,
    )
    comparison, raw = time_against(race)
    ratios, more = compare_more(race, asked)
    evidence = _evidence(runtime, target, b, facts, comparison, ratios, conditions())
    evidence = replace(evidence, advice=examine(runtime, a, b, target).advice)
    decision = judge(gates, evidence)
    return Paired(
        batch=rows_of(feed),
        decision=decision,
        evidence=evidence,
        medians={LATENCY: _latencies(raw), **{r.figure: _medians(r.figure, more) for r in ratios}},
    )


def _evidence(
    runtime: Runtime,
    target: Target,
    model: Path,
    facts: RuntimeFacts,
    comparison: LatencyComparison,
    ratios: tuple[PairedRatios, ...],
    conditions: Mapping[str, str],
) -> Evidence:
    """What a pipeline's judge asks for; without a release, the file's digest stands for it."""
    digest = digest_file(model)
    return Evidence(
        pipeline="",
        variant="B",
        target=target.name,
        quantized=False,
        release=digest,
        manifest=digest,
        target_digest=target.digest(),
        dedicated=target.dedicated,
        size_bytes=info(model).size_bytes,
        hardware=runtime.fingerprint(target),
        conditions=dict(conditions),
        runtime=facts,
        baseline=A,
        comparisons=(comparison,),
        ratios=ratios,
    )


def _check_provider(facts: RuntimeFacts, model: Path) -> None:
    first = facts.asked[0] if facts.asked else ""
    elsewhere = [name for name, count in facts.nodes.items() if name != first and count]
    if first not in facts.used or (first != "CPUExecutionProvider" and elsewhere):
        raise MeasurementError(
            f"{first} was asked for, {', '.join(elsewhere or facts.used)} ran instead", where=model.name
        )


def _latencies(raw: Raw) -> tuple[float, float]:
    """Seconds of A and B over all blocks of all looks, without the runs that were preempted."""
    looks = [name.removesuffix("/nanoseconds") for name in raw if re.fullmatch(rf"{A}/look-\d+/nanoseconds", name)]
    sides = []
    for side in (0, -1):
        ns, gone = (
            np.concatenate([raw[f"{look}/{kind}"][:, :, side].ravel() for look in looks])
            for kind in ("nanoseconds", "preempted")
        )
        sides.append(float(np.median(ns if gone.all() else ns[~gone])) / 1e9)
    return sides[0], sides[1]


def _medians(figure: str, raw: Raw) -> tuple[float, float]:
    """Of A and B over all pairs, in the figure's unit."""
    if figure in UNITS:
        scale = 1e9 if UNITS[figure] == "s" else 1.0
        a, _, b = np.median(raw[f"starts/{A}/{figure}"].astype(np.float64), axis=0) / scale
        return float(a), float(b)
    where = f"throughput/{figure.rpartition(' ')[2]}/{A}"
    a, _, b = np.median(raw[f"{where}/nanoseconds"].astype(np.float64), axis=(0, 1)) / 1e9
    requests = float(raw[f"{where}/requests"])
    return requests / float(a), requests / float(b)
