"""Metric gates."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from onnx_ops.analysis.agreement import at_least, non_inferiority, sample_advice
from onnx_ops.analysis.rules.common import baseline_of, no_limit, not_measured, percent, signed_percent
from onnx_ops.domain.evidence import Evidence, PairedCounts
from onnx_ops.domain.gate import GateResult, MetricGate, Verdict


def judge_metric(gate: MetricGate, evidence: Evidence) -> Iterator[GateResult]:
    counts = [c for c in evidence.metrics if c.metric == gate.name and c.n]
    if gate.max_drop is not None:
        paired = [c for c in counts if c.against and c.against != evidence.variant]
        for pair in paired:
            yield _judge_drop(gate.name, gate.max_drop, pair)
        baseline = baseline_of(evidence)
        if baseline and not any(c.against == baseline for c in paired):
            yield not_measured("metric", f"{gate.name} vs {baseline}", f"drop ≤ {percent(gate.max_drop)}")
    if gate.min is not None:
        yield _judge_minimum(gate.name, gate.min, counts)
    if gate.max_drop is None and gate.min is None:
        yield no_limit("metric", gate.name)


def _judge_drop(name: str, max_drop: float, counts: PairedCounts) -> GateResult:
    metric, limit = f"{name} vs {counts.against}", f"drop ≤ {percent(max_drop)}"
    if problem := _problem(counts):
        return _uncountable(metric, limit, counts, problem)
    found = non_inferiority(counts.n, counts.only_baseline, counts.only_candidate, max_drop)
    interval = f"[{signed_percent(found.low)}, {signed_percent(found.high)}]"
    return GateResult(
        gate="metric",
        metric=metric,
        limit=limit,
        verdict=found.verdict,
        reason=_with_advice(
            f"{name} changes by {signed_percent(found.estimate)} {interval} against {counts.against}, "
            f"limit {signed_percent(-max_drop)}, "
            f"n = {counts.n} ({counts.only_baseline} lost, {counts.only_candidate} won)",
            found.verdict,
            counts.n,
        ),
        estimate=found.estimate,
        low=found.low,
        high=found.high,
        bound=-max_drop,
        unit="1",
        n=counts.n,
    )


def _judge_minimum(name: str, minimum: float, entries: Sequence[PairedCounts]) -> GateResult:
    """Every entry tells the candidate's own value; where they differ, the worst counts."""
    limit = f"≥ {percent(minimum)}"
    if not entries:
        return not_measured("metric", name, limit)
    results = [_judge_value(name, minimum, limit, counts) for counts in entries]
    return max(results, key=lambda r: (r.verdict.rank, -(r.estimate or 0.0), -r.n))


def _judge_value(name: str, minimum: float, limit: str, counts: PairedCounts) -> GateResult:
    if problem := _problem(counts):
        return _uncountable(name, limit, counts, problem)
    found = at_least(counts.both + counts.only_candidate, counts.n, minimum)
    interval = f"[{percent(found.low)}, {percent(found.high)}]"
    return GateResult(
        gate="metric",
        metric=name,
        limit=limit,
        verdict=found.verdict,
        reason=_with_advice(
            f"{name} is {percent(found.estimate)} {interval}, limit {percent(minimum)}, n = {counts.n}",
            found.verdict,
            counts.n,
        ),
        estimate=found.estimate,
        low=found.low,
        high=found.high,
        bound=minimum,
        unit="1",
        n=counts.n,
    )


def _problem(counts: PairedCounts) -> str:
    parts = (counts.both, counts.only_baseline, counts.only_candidate)
    return "its counts do not add up" if min(parts) < 0 or sum(parts) > counts.n else ""


def _uncountable(metric: str, limit: str, counts: PairedCounts, problem: str) -> GateResult:
    return GateResult(
        gate="metric",
        metric=metric,
        limit=limit,
        verdict=Verdict.ERROR,
        reason=f"{metric}: {problem}",
        n=max(0, counts.n),
    )


def _with_advice(reason: str, verdict: Verdict, n: int) -> str:
    advice = sample_advice(n) if verdict is Verdict.INCONCLUSIVE else ""
    return f"{reason}; {advice}" if advice else reason
