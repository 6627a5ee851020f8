"""Latency gates."""

from __future__ import annotations

from collections.abc import Iterator

from onnx_ops.domain.evidence import Evidence, LatencyComparison
from onnx_ops.domain.gate import GateResult, LatencyGate, Verdict
from onnx_ops.statistics.latency import compare, quantile_gate
from onnx_ops.statistics.rules.common import baseline_of, finite, milliseconds, no_limit, not_measured, noun, percent
from onnx_ops.statistics.rules.ratio import Ratio, judge_ratio, ratio_text

_SAID = {
    Verdict.PASS: "surely faster",
    Verdict.INCONCLUSIVE: "not shown to be faster",
    Verdict.FAIL: "surely not faster",
}


def judge_latency(gate: LatencyGate, evidence: Evidence) -> Iterator[GateResult]:
    baseline = baseline_of(evidence)
    if gate.max_regression is not None and baseline:
        against = [c for c in evidence.comparisons if c.against == baseline and any(c.log_ratios)]
        for comparison in against:
            yield judge_ratio(_ratio(comparison), gate.max_regression)
        if not against:
            yield not_measured("latency", f"ratio vs {baseline}", f"≤ {1 + gate.max_regression:.4g}x")
    if gate.faster_than is not None and evidence.variant != gate.faster_than:
        yield from _judge_faster(gate.faster_than, gate.min_speedup or 0.0, evidence)
    limits = {name: (share, limit) for name, (share, limit) in gate.quantiles().items() if limit is not None}
    for name, (share, limit) in limits.items():
        yield _judge_quantile(name, share, limit, evidence)
    if not limits and gate.max_regression is None and gate.faster_than is None:
        yield no_limit("latency", "")


def _ratio(comparison: LatencyComparison) -> Ratio:
    preempted = comparison.preempted / comparison.runs if comparison.runs > 0 else 0.0
    means = f", each the mean of {comparison.calls}" if comparison.calls > 1 else ""
    return Ratio(
        gate="latency",
        metric=f"ratio vs {comparison.against}",
        of=f"the latency of {noun(comparison.against)}",
        log_ratios=comparison.log_ratios,
        self_log_ratios=comparison.self_log_ratios,
        pairs="session pairs",
        detail=f" ({comparison.runs} runs{means}, {percent(preempted)} preempted)",
    )


def _judge_faster(name: str, min_speedup: float, evidence: Evidence) -> Iterator[GateResult]:
    """Whether the other model takes at least `1 + min_speedup` times as long. Without a limit to be noisy about, the
    interval alone decides: on a noisy host it is wide, and shows nothing."""
    bound = 1 / (1 + min_speedup)
    metric, limit = f"faster than {name}", f"< {bound:.4g}x"
    enough = f" by {percent(min_speedup)}" if min_speedup else ""
    against = [c for c in evidence.comparisons if c.against == name and any(c.log_ratios)]
    for comparison in against:
        ratio = _ratio(comparison)
        found = compare(ratio.log_ratios, tolerance=bound - 1)
        yield GateResult(
            gate="latency",
            metric=metric,
            limit=limit,
            verdict=found.verdict,
            reason=f"{_SAID[found.verdict]}{enough}: {ratio_text(ratio, found, f'{bound:.4g}x')}",
            estimate=finite(found.ratio),
            low=finite(found.low),
            high=finite(found.high),
            bound=bound,
            unit="x",
            n=found.pairs,
        )
    if not against:
        yield not_measured("latency", metric, limit)


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
