"""Gates on fresh processes: cold start and memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from onnx_ops.domain.evidence import Evidence
from onnx_ops.domain.gate import ColdStartGate, GateResult, MemoryGate
from onnx_ops.statistics.latency import quantile_limit
from onnx_ops.statistics.rules.common import finite, milliseconds, no_limit, not_measured, size_text
from onnx_ops.statistics.rules.ratio import judge_figure

_PAIRS = "pairs of fresh processes"


def judge_cold_start(gate: ColdStartGate, evidence: Evidence) -> Iterator[GateResult]:
    samples = {} if evidence.starts is None else {"load": evidence.starts.load_s, "first": evidence.starts.first_s}
    for figure, of in (("load", "the load time"), ("first", "the first inference")):
        yield from judge_figure("cold_start", figure, of, _PAIRS, gate.max_regression, evidence)
    for figure, limit in (("load", gate.load), ("first", gate.first)):
        if limit is not None:
            yield _judge_median(
                "cold_start", figure, samples.get(figure, ()), limit, "s", advisory=not evidence.dedicated
            )
    if (gate.load, gate.first, gate.max_regression) == (None, None, None):
        yield no_limit("cold_start", "")


def judge_memory(gate: MemoryGate, evidence: Evidence) -> Iterator[GateResult]:
    """Enforced everywhere: what else a machine does changes no process's memory."""
    yield from judge_figure("memory", "peak", "the peak memory", _PAIRS, gate.max_regression, evidence)
    if gate.max is not None:
        samples = () if evidence.starts is None else evidence.starts.peak_bytes
        yield _judge_median("memory", "peak", samples, gate.max, "B", advisory=False)
    if gate.max is None and gate.max_regression is None:
        yield no_limit("memory", "")


def _judge_median(
    gate: str, figure: str, samples: Sequence[float], limit: float, unit: str, *, advisory: bool
) -> GateResult:
    text = _TEXTS[unit]
    if not samples:
        return not_measured(gate, figure, f"≤ {text(limit)}", advisory=advisory)
    found = quantile_limit(samples, 0.5, limit)
    return GateResult(
        gate=gate,
        metric=figure,
        limit=f"≤ {text(limit)}",
        verdict=found.verdict,
        reason=(
            f"median {figure} {text(found.quantile)} [{text(found.low)}, {text(found.high)}], limit {text(limit)}, "
            f"{found.runs} fresh processes, from {text(min(samples))} to {text(max(samples))}"
        ),
        estimate=finite(found.quantile),
        low=finite(found.low),
        high=finite(found.high),
        bound=float(limit),
        unit=unit,
        n=found.runs,
        advisory=advisory,
    )


def _size(value: float) -> str:
    return size_text(round(value)) if value < float("inf") else "inf"


_TEXTS: dict[str, Callable[[float], str]] = {"s": milliseconds, "B": _size}
