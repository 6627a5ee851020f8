"""Latency gates."""

from __future__ import annotations

from collections.abc import Iterator

from onnx_ops.analysis.latency import compare, quantile_gate, self_test
from onnx_ops.analysis.rules.common import baseline_of, finite, milliseconds, no_limit, not_measured, percent
from onnx_ops.domain.evidence import Evidence, LatencyComparison
from onnx_ops.domain.gate import GateResult, LatencyGate, Verdict


def judge_latency(gate: LatencyGate, evidence: Evidence) -> Iterator[GateResult]:
    baseline = baseline_of(evidence)
    if gate.max_regression is not None and baseline:
        against = [c for c in evidence.comparisons if c.against == baseline and any(c.log_ratios)]
        for comparison in against:
            yield _judge_regression(gate.max_regression, comparison)
        if not against:
            yield not_measured("latency", f"ratio vs {baseline}", f"≤ {1 + gate.max_regression:.4g}x")
    for name, q, limit in (("p50", 0.50, gate.p50), ("p99", 0.99, gate.p99)):
        if limit is not None:
            yield _judge_quantile(name, q, limit, evidence)
    if gate.max_regression is None and gate.p50 is None and gate.p99 is None:
        yield no_limit("latency", "")


def _judge_regression(max_regression: float, comparison: LatencyComparison) -> GateResult:
    found = compare(comparison.log_ratios, tolerance=max_regression)
    noisy = self_test(comparison.self_log_ratios, max_regression)
    limit = f"{1 + max_regression:.4g}x"
    preempted = comparison.preempted / comparison.runs if comparison.runs > 0 else 0.0
    reason = (
        f"{found.ratio:.4g}x [{found.low:.4g}, {found.high:.4g}] the latency of {comparison.against}, limit {limit}, "
        f"{found.pairs} session pairs ({comparison.runs} runs, {percent(preempted)} preempted)"
    )
    return GateResult(
        gate="latency",
        metric=f"ratio vs {comparison.against}",
        limit=f"≤ {limit}",
        verdict=Verdict.INCONCLUSIVE if noisy else found.verdict,
        reason=f"{noisy}; {reason}" if noisy else reason,
        estimate=finite(found.ratio),
        low=finite(found.low),
        high=finite(found.high),
        bound=1 + max_regression,
        unit="x",
        n=found.pairs,
    )


def _judge_quantile(name: str, q: float, limit_s: float, evidence: Evidence) -> GateResult:
    limit, advisory = f"≤ {milliseconds(limit_s)}", not evidence.dedicated
    samples = evidence.latency
    if samples is None or not samples.sorted_ns:
        return not_measured("latency", name, limit, advisory=advisory)
    found = quantile_gate(samples.sorted_ns, q, limit_s)
    reason = (
        f"{name} is {milliseconds(found.quantile)} [{milliseconds(found.low)}, {milliseconds(found.high)}], "
        f"limit {milliseconds(limit_s)}, {found.exceeding} of {found.runs} runs above it"
    )
    if found.verdict is Verdict.INCONCLUSIVE and found.runs < found.needed:
        reason += f"; to pass, {found.needed} runs are needed"
    return GateResult(
        gate="latency",
        metric=name,
        limit=limit,
        verdict=found.verdict,
        reason=reason,
        estimate=finite(found.quantile),
        low=finite(found.low),
        high=finite(found.high),
        bound=limit_s,
        unit="s",
        n=found.runs,
        advisory=advisory,
    )
