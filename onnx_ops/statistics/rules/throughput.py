"""Throughput gates."""

from __future__ import annotations

import math
from collections.abc import Iterator
from statistics import median

from onnx_ops.domain.evidence import Evidence, Throughput, throughput_figure
from onnx_ops.domain.gate import GateResult, ThroughputGate
from onnx_ops.statistics.latency import quantile_limit
from onnx_ops.statistics.rules.common import finite, no_limit, not_measured
from onnx_ops.statistics.rules.ratio import judge_figure


def judge_throughput(gate: ThroughputGate, evidence: Evidence) -> Iterator[GateResult]:
    """Throughput as time per request under load, so that more is worse, as everywhere else."""
    figure = throughput_figure(gate.concurrency)
    of = f"the time per request at {figure}"
    yield from judge_figure("throughput", figure, of, "session pairs", gate.max_regression, evidence)
    if gate.min is not None:
        measured = [t for t in evidence.throughput if t.concurrency == gate.concurrency and t.per_second]
        for one in measured:
            yield _judge_minimum(gate.min, figure, one, advisory=not evidence.dedicated)
        if not measured:
            yield not_measured("throughput", figure, f"≥ {_rate(gate.min)}", advisory=not evidence.dedicated)
    if gate.max_regression is None and gate.min is None:
        yield no_limit("throughput", figure)


def _judge_minimum(minimum: float, figure: str, measured: Throughput, *, advisory: bool) -> GateResult:
    found = quantile_limit([1 / rate for rate in measured.per_second], 0.5, 1 / minimum)
    low = 1 / found.high if found.high > 0 else 0.0
    high = 1 / found.low if found.low > 0 else math.inf
    middle = median(measured.per_second)
    return GateResult(
        gate="throughput",
        metric=figure,
        limit=f"≥ {_rate(minimum)}",
        verdict=found.verdict,
        reason=(
            f"median {_rate(middle)} [{_rate(low)}, {_rate(high)}] at {figure}, limit {_rate(minimum)}, "
            f"{found.runs} sessions ({measured.requests} requests)"
        ),
        estimate=middle,
        low=low,
        high=finite(high),
        bound=minimum,
        unit="req/s",
        n=found.runs,
        advisory=advisory,
    )


def _rate(per_second: float) -> str:
    return f"{per_second:.4g} req/s"
