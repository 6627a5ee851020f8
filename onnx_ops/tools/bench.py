"""Bench: how fast one ONNX file is, without a pipeline."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from onnx_ops.domain.evidence import RuntimeFacts, throughput_figure
from onnx_ops.domain.hardware import HardwareFingerprint
from onnx_ops.domain.measuring import Asked
from onnx_ops.domain.structure import Advice
from onnx_ops.domain.target import Target
from onnx_ops.errors import MeasurementError, UserError
from onnx_ops.measure.coverage import examine
from onnx_ops.measure.load import throughput_alone
from onnx_ops.measure.machine import fitting
from onnx_ops.measure.starts import starts_alone
from onnx_ops.measure.timing import QUANTILES, rows_of, time_alone
from onnx_ops.onnx_graph.check import full_check, refusal
from onnx_ops.ports import Runtime, Tensors
from onnx_ops.statistics.latency import quantile_gate, quantile_limit

LATENCY = "latency"
UNITS = {LATENCY: "s", "load": "s", "first": "s", "peak": "B"}
"""Of each figure; the others are throughputs."""

PER_SECOND = "req/s"

Tell = Callable[[str], None]
Conditions = Callable[[], Mapping[str, str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A figure in `unit` with 95 % bounds (0 and None where there are none), and how many samples it rests on."""

    value: float
    unit: str
    low: float
    high: float | None
    n: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Alone:
    """One model on one target.

    `figures` holds quantiles of single runs in one session, and where asked the median throughput of fresh sessions
    and the medians of fresh processes, by the names they have in evidence. `advice` says what slows it down.
    """

    batch: int
    runs: int
    preempted: int
    figures: Mapping[str, Figure]
    facts: RuntimeFacts
    hardware: HardwareFingerprint
    conditions: Mapping[str, str]
    advice: tuple[Advice, ...] = ()


def bench(
    runtime: Runtime,
    target: Target,
    model: Path,
    feed: Tensors,
    *,
    runs: int,
    conditions: Conditions,
    asked: Asked | None = None,
    seed: int = 0,
    tell: Tell = lambda _: None,
) -> Alone:
    """Time one model alone.

    Raises:
        UserError: the file is not a valid model, or too new for the target.
        MeasurementError: the model does not run there.
    """
    facts = facts_of(runtime, target, model)
    asked = asked or Asked()
    tell(f"{runs} runs of {model.name}")
    latency, _ = time_alone(runtime, model, target, feed, runs=runs)
    figures = {name: _quantile(latency.sorted_ns, q) for name, q in QUANTILES.items()}
    for level in asked.throughput:
        tell(f"windows of {level} requests at once")
        throughput, _ = throughput_alone(runtime, model, target, feed, level, seed)
        figures[throughput_figure(level)] = _median(throughput.per_second, PER_SECOND)
    if asked.starts:
        tell(f"fresh processes that load {model.name}")
        starts, _ = starts_alone(runtime, model, target, feed, seed)
        samples = {"load": starts.load_s, "first": starts.first_s, "peak": starts.peak_bytes}
        figures |= {name: _median(values, UNITS[name]) for name, values in samples.items() if values}
    return Alone(
        batch=rows_of(feed),
        runs=runs,
        preempted=latency.preempted,
        figures=figures,
        facts=facts,
        hardware=runtime.fingerprint(target),
        conditions=dict(conditions()),
        advice=examine(runtime, model, model, target).advice,
    )


def facts_of(runtime: Runtime, target: Target, model: Path) -> RuntimeFacts:
    """What really runs the model there; who is to blame if nothing does."""
    fitting(runtime, target)
    if reason := refusal(model, target):
        remedy = "Export it for this target's opset and IR version, or give the target its operators: custom_ops."
        raise UserError(reason.partition(": set export.")[0], where=model.name, remedy=remedy)
    try:
        return runtime.facts(model, target)
    except MeasurementError:
        full_check(model)  # a file that breaks the rules of ONNX is the user's to mend
        raise


def _median(values: Sequence[float], unit: str) -> Figure:
    found = quantile_limit(values, 0.5, math.inf)
    high = found.high if math.isfinite(found.high) else None
    return Figure(value=found.quantile, unit=unit, low=found.low, high=high, n=found.runs)


def _quantile(nanoseconds: Sequence[int], q: float) -> Figure:
    found = quantile_gate(nanoseconds, q, math.inf)
    high = found.high if math.isfinite(found.high) else None
    return Figure(value=found.quantile, unit="s", low=found.low, high=high, n=found.runs)
