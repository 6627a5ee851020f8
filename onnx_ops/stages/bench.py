"""Bench: how fast one ONNX file is, and whether another is slower. Without a pipeline, from the files alone."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from onnx_ops.analysis.judge import judge
from onnx_ops.analysis.latency import LOOKS, faster, quantile_gate, session_interval
from onnx_ops.domain.artifact import digest_file
from onnx_ops.domain.evidence import Evidence, LatencyComparison, LatencySamples, RuntimeFacts
from onnx_ops.domain.gate import Decision, LatencyGate, Verdict
from onnx_ops.domain.target import HardwareFingerprint, Target
from onnx_ops.errors import MeasurementFailure, UserError
from onnx_ops.graph.check import ceiling, full_check
from onnx_ops.graph.inspect import info
from onnx_ops.ports import PairSamples, PairSchedule, RunSamples, Runtime, Tensors
from onnx_ops.ports.models import Array
from onnx_ops.stages.probing import shared_inputs
from onnx_ops.stages.timing import WARMUP_ALONE, Race, Timing, time_against

A = "A"
"""What the baseline is called in evidence."""

COLD_STARTS = 5
QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}

Tell = Callable[[str], None]
Conditions = Callable[[], Mapping[str, str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """Seconds, with 95 % bounds where there are any (0 and None where not), and how many samples it rests on."""

    seconds: float
    low: float
    high: float | None
    n: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Alone:
    """One model on one target: `quantiles` of single runs in one session, and `load` and `first` of fresh sessions."""

    batch: int
    runs: int
    preempted: int
    quantiles: Mapping[str, Figure]
    load: Figure
    first: Figure
    facts: RuntimeFacts
    hardware: HardwareFingerprint
    conditions: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Paired:
    """B against A, side by side.

    `ratio` is latency of B over latency of A with its bounds, `noise` the half-width of the interval of A against
    itself, None where unknown. `medians` are seconds of A and B in the same blocks. `ratios` hold one value a session
    pair.
    """

    batch: int
    decision: Decision
    evidence: Evidence
    ratio: float
    low: float | None
    high: float | None
    limit: float
    noise: float | None
    faster: bool
    medians: tuple[float, float]
    ratios: tuple[float, ...]

    @property
    def verdict(self) -> Verdict:
        return self.decision.verdict


@dataclass(frozen=True, slots=True)
class Watched:
    """A runtime that tells when the next session pairs begin."""

    inner: Runtime
    tell: Tell

    def fingerprint(self, target: Target) -> HardwareFingerprint:
        return self.inner.fingerprint(target)

    def facts(self, model: Path, target: Target) -> RuntimeFacts:
        return self.inner.facts(model, target)

    def run(self, model: Path, target: Target, batches: tuple[Tensors, ...]) -> tuple[Mapping[str, Array], ...]:
        return self.inner.run(model, target, batches)

    def sample(self, model: Path, target: Target, feed: Tensors, *, runs: int, warmup: int) -> RunSamples:
        return self.inner.sample(model, target, feed, runs=runs, warmup=warmup)

    def pair(
        self, baseline: Path, candidate: Path, target: Target, feed: Tensors, schedule: PairSchedule
    ) -> PairSamples:
        sides = "A against itself" if baseline == candidate else "B against A"
        self.tell(f"{schedule.pairs} session pairs of {sides} (looks after {', '.join(map(str, LOOKS))})")
        return self.inner.pair(baseline, candidate, target, feed, schedule)


def bench(
    runtime: Runtime,
    target: Target,
    model: Path,
    feed: Tensors,
    *,
    runs: int,
    conditions: Conditions,
    tell: Tell = lambda _: None,
) -> Alone:
    """Time one model alone.

    Load is what building a session takes with the file in the page cache, first is the first run in it.

    Raises:
        UserError: the file is not a valid model, or too new for the target.
        MeasurementFailure: the model does not run there.
    """
    facts = facts_of(runtime, target, model)
    tell(f"{COLD_STARTS} fresh sessions of {model.name}")
    loads, firsts = zip(*(_cold(runtime, target, model, feed) for _ in range(COLD_STARTS)), strict=True)
    tell(f"{runs} runs of {model.name}")
    samples = runtime.sample(model, target, feed, runs=runs, warmup=WARMUP_ALONE)
    lost = samples.preempted.astype(bool)
    kept = samples.nanoseconds if lost.all() else samples.nanoseconds[~lost]
    return Alone(
        batch=_rows(feed),
        runs=runs,
        preempted=int(lost.sum()),
        quantiles={name: _quantile(kept, q) for name, q in QUANTILES.items()},
        load=_median(loads),
        first=_median(firsts),
        facts=facts,
        hardware=runtime.fingerprint(target),
        conditions=dict(conditions()),
    )


def bench_pair(
    runtime: Runtime,
    target: Target,
    a: Path,
    b: Path,
    feed: Tensors,
    *,
    max_regression: float,
    conditions: Conditions,
    seed: int = 0,
    tell: Tell = lambda _: None,
) -> Paired:
    """Time B against A: fresh session pairs look by look, A against itself, and the verdict of a latency gate.

    Raises:
        UserError: a file is not a valid model, too new for the target, or the two take different inputs.
        MeasurementFailure: a model does not run there, or not on the provider asked for.
    """
    shared_inputs(a, b)
    _check_provider(facts_of(runtime, target, a), a)
    facts = facts_of(runtime, target, b)
    nothing = LatencySamples(batch=_rows(feed), runs=0, preempted=0, quantiles_ns={})
    timing = time_against(
        Timing(latency=nothing),
        Race(
            runtime=Watched(runtime, tell),
            target=target,
            baseline=a,
            candidate=b,
            feed=feed,
            seed=seed,
            tolerances=(max_regression,),
        ),
        A,
    )
    comparison = timing.comparisons[0]
    evidence = _evidence(runtime, target, b, facts, comparison, conditions())
    return _paired(evidence, comparison, max_regression, _side_medians(timing.raw), _rows(feed))


def _evidence(
    runtime: Runtime,
    target: Target,
    model: Path,
    facts: RuntimeFacts,
    comparison: LatencyComparison,
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
    )


def facts_of(runtime: Runtime, target: Target, model: Path) -> RuntimeFacts:
    """What really runs the model there; who is to blame if nothing does."""
    if reason := ceiling(info(model), target):
        raise UserError(reason.partition(": set export.")[0], where=model.name)
    try:
        return runtime.facts(model, target)
    except MeasurementFailure:
        full_check(model)  # a file that breaks the rules of ONNX is the user's to mend
        raise


def _check_provider(facts: RuntimeFacts, model: Path) -> None:
    first = facts.asked[0] if facts.asked else ""
    elsewhere = [name for name, count in facts.nodes.items() if name != first and count]
    if first not in facts.used or (first != "CPUExecutionProvider" and elsewhere):
        raise MeasurementFailure(
            f"{first} was asked for, {', '.join(elsewhere or facts.used)} ran instead", where=model.name
        )


def _paired(
    evidence: Evidence, comparison: LatencyComparison, tolerance: float, medians: tuple[float, float], batch: int
) -> Paired:
    share = 0.05 / len(LOOKS)
    ratio, low, high = (math.exp(min(v, 700.0)) for v in session_interval(comparison.log_ratios, share))
    _, self_low, self_high = session_interval(comparison.self_log_ratios, share)
    noise = (math.exp(min(self_high, 700.0)) - math.exp(self_low)) / 2
    return Paired(
        batch=batch,
        decision=judge((LatencyGate(max_regression=tolerance),), evidence),
        evidence=evidence,
        ratio=ratio,
        low=low if low > 0 else None,
        high=high if math.isfinite(high) and high < 1e300 else None,
        limit=1 + tolerance,
        noise=noise if noise < 1e300 else None,
        faster=faster(comparison.log_ratios),
        medians=medians,
        ratios=tuple(float(np.exp(np.median(pair))) for pair in comparison.log_ratios),
    )


def _cold(runtime: Runtime, target: Target, model: Path, feed: Tensors) -> tuple[float, float]:
    """Seconds to build a session, and of the first run in another one."""
    begun = time.perf_counter_ns()
    runtime.run(model, target, ())
    load = time.perf_counter_ns() - begun
    first = runtime.sample(model, target, feed, runs=1, warmup=0)
    return load / 1e9, float(first.nanoseconds[0]) / 1e9


def _median(seconds: tuple[float, ...]) -> Figure:
    """The median, between the smallest and the largest."""
    return Figure(seconds=float(np.median(seconds)), low=min(seconds), high=max(seconds), n=len(seconds))


def _quantile(nanoseconds: Array, q: float) -> Figure:
    found = quantile_gate(nanoseconds, q, math.inf)
    high = found.high if math.isfinite(found.high) else None
    return Figure(seconds=found.quantile, low=found.low, high=high, n=found.runs)


def _side_medians(raw: Mapping[str, Array]) -> tuple[float, float]:
    """Seconds of A and B over all blocks of all looks, without the runs that were preempted."""
    looks = [name.removesuffix("/nanoseconds") for name in raw if re.fullmatch(rf"{A}/look-\d+/nanoseconds", name)]
    sides = []
    for side in (0, 1):
        ns, gone = (
            np.concatenate([raw[f"{look}/{kind}"][:, :, side].ravel() for look in looks])
            for kind in ("nanoseconds", "preempted")
        )
        sides.append(float(np.median(ns if gone.all() else ns[~gone])) / 1e9)
    return sides[0], sides[1]


def _rows(feed: Tensors) -> int:
    return max((len(array) for array in feed.values() if array.ndim), default=1)
