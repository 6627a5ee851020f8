"""Benchmark one ONNX file, or compare two, without a pipeline.

Functions raise UserError for an invalid model file, or for one that does not fit the target or the
other file. They raise MeasurementError if a model fails, or if the machine does not meet the
target's requirements. `benchmark_pair` also raises it if the baseline does not run on the requested
provider.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from onnx_ops.domain.artifact import digest_file
from onnx_ops.domain.decision import Decision, Verdict
from onnx_ops.domain.evidence import Advice, Evidence, throughput_metric_name
from onnx_ops.domain.execution import RuntimeFacts
from onnx_ops.domain.gate import (
    ColdStartGate,
    Gate,
    LatencyGate,
    MeasurementRequest,
    MemoryGate,
    ThroughputGate,
    derive_measurement_request,
)
from onnx_ops.domain.target import HardwareFingerprint, Target
from onnx_ops.errors import MeasurementError, UserError
from onnx_ops.measure.execution import inspect_execution, require_hardware
from onnx_ops.measure.speed import compare_resources, measure_starts, measure_throughput
from onnx_ops.measure.timing import (
    QUANTILES,
    PairedBenchmark,
    RawSamples,
    compare_latency,
    count_rows,
    measure_latency,
)
from onnx_ops.onnx_graph.compatibility import (
    check_model,
    explain_incompatibility,
    explain_unsupported_blocks,
    find_unsupported_blocks,
)
from onnx_ops.onnx_graph.files import share_structure
from onnx_ops.onnx_graph.model_info import read_model_info
from onnx_ops.ports import Runtime, Tensors
from onnx_ops.statistics.judge import judge
from onnx_ops.statistics.latency import (
    QuantileComparison,
    compare_latency_quantile,
    compare_quantile,
)
from onnx_ops.tools.model_inputs import shared_inputs

LATENCY = "latency"
UNITS = {LATENCY: "s", "load": "s", "first": "s", "peak": "B"}
"""Units of quantities by name; quantities without an entry are throughputs."""

Reporter = Callable[[str], None]
Conditions = Callable[[], Mapping[str, str]]
"""Function that returns the state of the machine, such as its load."""

A = "A"
"""Name of the baseline in evidence."""

REGRESSIONS = {"latency": 0.05, "throughput": 0.05, "cold_start": 0.2, "memory": 0.1}
"""Default limits of B's regression, as shares of A's value, by kind of gate.

Process starts vary more than runs do.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchmarkMetric:
    """A value, a one-sided 95 % bound on each side, and the number of samples.

    `high` is None if the samples are too few for an upper bound.
    """

    value: float
    unit: str
    low: float
    high: float | None
    n: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SingleModelResult:
    """One model on one target.

    `metrics` contains quantiles of single runs in one session. If requested, it also contains the
    median throughput of fresh sessions and the medians of fresh processes. The keys are their names
    in evidence. `advice` lists the causes that slow the model down.
    """

    batch: int
    runs: int
    preempted: int
    metrics: Mapping[str, BenchmarkMetric]
    facts: RuntimeFacts
    hardware: HardwareFingerprint
    conditions: Mapping[str, str]
    advice: tuple[Advice, ...] = ()


def benchmark(
    runtime: Runtime,
    target: Target,
    model: Path,
    feed: Tensors,
    *,
    runs: int,
    conditions: Conditions,
    request: MeasurementRequest | None = None,
    seed: int = 0,
    report: Reporter = lambda _: None,
) -> SingleModelResult:
    """Measure the latency of one model on one target, and what `request` names.

    `feed` contains the inputs of one request, and `runs` is the number of timed requests.
    """
    facts = read_runtime_facts(runtime, target, model)
    request = request or MeasurementRequest()
    report(f"{runs} runs of {model.name}")
    latency, _ = measure_latency(runtime, model, target, feed, runs=runs)
    quantiles = {
        name: compare_latency_quantile(latency.sorted_ns, q, math.inf)
        for name, q in QUANTILES.items()
    }
    metrics = {name: _make_metric(quantile, "s") for name, quantile in quantiles.items()}
    for level in request.throughput:
        report(f"windows of {level} concurrent requests")
        throughput, _ = measure_throughput(runtime, model, target, feed, level, seed)
        median = compare_quantile(throughput.per_second, 0.5, math.inf)
        metrics[throughput_metric_name(level)] = _make_metric(median, "req/s")
    if request.starts:
        report(f"fresh processes that load {model.name}")
        starts, _ = measure_starts(runtime, model, target, feed, seed)
        samples = {"load": starts.load_s, "first": starts.first_s, "peak": starts.peak_bytes}
        metrics |= {
            name: _make_metric(compare_quantile(values, 0.5, math.inf), UNITS[name])
            for name, values in samples.items()
            if values
        }
    return SingleModelResult(
        batch=count_rows(feed),
        runs=runs,
        preempted=latency.preempted,
        metrics=metrics,
        facts=facts,
        hardware=runtime.fingerprint(target),
        conditions=dict(conditions()),
        advice=inspect_execution(runtime, model, model, target).advice,
    )


def read_runtime_facts(runtime: Runtime, target: Target, model: Path) -> RuntimeFacts:
    """Return the execution providers that run the model on this machine.

    Raises:
        UserError: the file is not a valid model, or the target does not support the model.
        MeasurementError: the machine does not meet the target's requirements, or the model fails.
    """
    require_hardware(runtime, target)
    if reason := explain_incompatibility(model, target):
        blocks = find_unsupported_blocks(share_structure(model))
        remedy = (
            "Quantize the model again with a block size that the reason lists: `onnx-ops quantize "
            "FLOAT.onnx OUT.onnx --method weight-only --option block=32`."
            if reason == explain_unsupported_blocks(blocks, target)
            else "Export the model for this target's opset and IR version, or declare its "
            "operators in the target's `custom_ops`."
        )
        raise UserError(reason.partition(": set export.")[0], where=model.name, remedy=remedy)
    try:
        return runtime.facts(model, target)
    except MeasurementError:
        check_model(model)  # For an invalid file, this call raises a UserError instead.
        raise


def _make_metric(quantile: QuantileComparison, unit: str) -> BenchmarkMetric:
    high = quantile.high if math.isfinite(quantile.high) else None
    return BenchmarkMetric(
        value=quantile.estimate, unit=unit, low=quantile.low, high=high, n=quantile.n
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparisonResult:
    """The comparison of B with A.

    `medians` are of A and B, in the units of `UNITS` or, for a throughput, in requests per second.
    """

    batch: int
    decision: Decision
    evidence: Evidence
    medians: Mapping[str, tuple[float, float]]

    @property
    def verdict(self) -> Verdict:
        """Return the verdict of the gates."""
        return self.decision.verdict


def build_pair_gates(
    max_regression: float | None, *, concurrency: int | None, cold: bool
) -> tuple[Gate, ...]:
    """Return the gates for B, with the limit `max_regression` or default limits.

    With `concurrency`, throughput is judged too, and with `cold`, fresh processes.
    """

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


def benchmark_pair(
    runtime: Runtime,
    target: Target,
    a: Path,
    b: Path,
    feed: Tensors,
    *,
    gates: Sequence[Gate],
    conditions: Conditions,
    seed: int = 0,
    report: Reporter = lambda _: None,
) -> ComparisonResult:
    """Time B against A, and A against itself, and judge the result.

    `gates` are a latency gate with `max_regression`, and gates that need further measurements.

    Raises:
        UserError: the two models have different inputs; also the cases of `read_runtime_facts`.
        MeasurementError: the requested execution provider did not run all nodes of A, the machine
            does not meet the target's requirements, or a model fails.
    """
    shared_inputs(a, b)
    before = read_runtime_facts(runtime, target, a)
    first = before.asked[0] if before.asked else ""
    elsewhere = [name for name, count in before.nodes.items() if name != first and count]
    if first not in before.used or (first != "CPUExecutionProvider" and elsewhere):
        others = ", ".join(elsewhere or before.used)
        what = f"{first} was requested, but {others} ran nodes of the model"
        raise MeasurementError(what, where=a.name)
    facts = read_runtime_facts(runtime, target, b)
    request = derive_measurement_request(gates)
    pair = PairedBenchmark(
        runtime=runtime,
        target=target,
        baseline=a,
        candidate=b,
        against=A,
        feed=feed,
        seed=seed,
        tolerances=request.tolerances,
        report=report,
    )
    comparison, raw = compare_latency(pair)
    ratios, more = compare_resources(pair, request)
    evidence = replace(
        make_evidence(runtime, target, b),
        conditions=dict(conditions()),
        runtime=facts,
        comparisons=(comparison,),
        ratios=ratios,
    )
    decision = judge(gates, evidence)
    return ComparisonResult(
        batch=count_rows(feed),
        decision=decision,
        evidence=evidence,
        medians={
            LATENCY: _find_median_latencies(raw),
            **{r.figure: _find_medians(r.figure, more) for r in ratios},
        },
    )


def make_evidence(runtime: Runtime, target: Target, model: Path) -> Evidence:
    """Return evidence about B, with the digest of B in place of a release digest."""
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
        size_bytes=read_model_info(model).size_bytes,
        hardware=runtime.fingerprint(target),
        baseline=A,
    )


def _find_median_latencies(raw: RawSamples) -> tuple[float, float]:
    """Return the median latencies of A and B in seconds.

    The medians are over all blocks of all interim analyses. Preempted runs are left out, unless all
    runs were preempted.
    """
    looks = [
        name.removesuffix("/nanoseconds")
        for name in raw
        if re.fullmatch(rf"{A}/look-\d+/nanoseconds", name)
    ]
    sides = []
    for side in (0, -1):
        ns, preempted = (
            np.concatenate([raw[f"{look}/{kind}"][:, :, side].ravel() for look in looks])
            for kind in ("nanoseconds", "preempted")
        )
        sides.append(float(np.median(ns if preempted.all() else ns[~preempted])) / 1e9)
    return sides[0], sides[1]


def _find_medians(figure: str, raw: RawSamples) -> tuple[float, float]:
    """Return the medians of A and B over all pairs, in the unit of the quantity."""
    if figure in UNITS:
        scale = 1e9 if UNITS[figure] == "s" else 1.0
        a, _, b = np.median(raw[f"starts/{A}/{figure}"].astype(np.float64), axis=0) / scale
        return float(a), float(b)
    where = f"throughput/{figure.rpartition(' ')[2]}/{A}"
    a, _, b = np.median(raw[f"{where}/nanoseconds"].astype(np.float64), axis=(0, 1)) / 1e9
    requests = float(raw[f"{where}/requests"])
    return requests / float(a), requests / float(b)
