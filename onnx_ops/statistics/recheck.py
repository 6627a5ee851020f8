"""Judge the change of a released variant between its release and now.

The same files are measured both times.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from onnx_ops.domain.decision import GateResult, Verdict
from onnx_ops.domain.evidence import EXPORT, Evidence, Interval, PairedCounts, ScoreComparison
from onnx_ops.domain.gate import Gate, LatencyGate, MetricGate
from onnx_ops.statistics.judge import compute_ranking_metrics, judge
from onnx_ops.statistics.latency import compare_latency_quantile
from onnx_ops.statistics.rules.common import as_ms
from onnx_ops.statistics.rules.metric import MetricLimit, list_limits

_ROUNDING = 1e-9
"""Tolerance above a limit, since shares of rows are rounded floats."""


def judge_recheck(gates: Sequence[Gate], then: Evidence, now: Evidence) -> tuple[GateResult, ...]:
    """Judge the present evidence, and its change since the evidence of the decision.

    A failure of the present evidence is advisory if the old evidence fails the same gate against
    the present baseline. Such a failure shows no change. Measurements can change as far as the
    gates allow for a release: by `max_regression` of latency, and by `max_drop` and `max_increase`
    of a metric.
    """
    changes: list[GateResult] = []
    for gate in gates:
        if isinstance(gate, LatencyGate) and gate.max_regression is not None:
            changes += _judge_latency(gate.max_regression, gates, then, now)
        if isinstance(gate, MetricGate):
            for limit in (limit for limit in list_limits(gate) if limit.of_change):
                changes += _judge_metric_change(gate.definition().label, limit, then, now)
    return (*_judge_again(gates, then, now), *changes)


def _judge_again(gates: Sequence[Gate], then: Evidence, now: Evidence) -> Iterator[GateResult]:
    """Yield the gate results of the present evidence.

    A failure is advisory if the old evidence also fails that gate against the present baseline.
    """
    old_results = judge(gates, replace(then, baseline=now.baseline)).results
    failed_before = {
        (result.gate, result.metric) for result in old_results if result.verdict is Verdict.FAIL
    }
    for result in judge(gates, now).results:
        if result.verdict is Verdict.FAIL and (result.gate, result.metric) in failed_before:
            reason = f"{result.reason}; the evidence of the release fails this gate too"
            yield replace(result, advisory=True, reason=reason)
        else:
            yield result


def list_environment_changes(then: Evidence, now: Evidence) -> tuple[str, ...]:
    """Return what changed in the runtime and the machine, as phrases."""
    before, after = _describe_environment(then), _describe_environment(now)
    changed = {
        name: before.get(name, "") for name, value in after.items() if before.get(name, "") != value
    }
    return tuple(
        f"{name} {after[name] or 'none'}, was {old or 'none'}" for name, old in changed.items()
    )


def _describe_environment(evidence: Evidence) -> dict[str, str]:
    hardware, runtime = evidence.hardware, evidence.runtime
    environment = {
        "runtime": f"{hardware.runtime} {hardware.runtime_version}",
        "architecture": hardware.machine,
        "CPU": hardware.cpu_model,
        "CPU features": " ".join(sorted(hardware.cpu_flags)),
        "cores": str(hardware.cores),
        "memory": f"{hardware.memory_bytes / 2**30:.0f} GiB",
        "accelerators": ", ".join(hardware.accelerators),
        "driver": hardware.driver,
    }
    if runtime is not None:
        environment |= {"build": runtime.build, "providers": ", ".join(runtime.used)}
    return environment


def _judge_latency(
    limit: float, gates: Sequence[Gate], then: Evidence, now: Evidence
) -> Iterator[GateResult]:
    """Judge the change of the time ratio to the export, and of the median run time.

    The ratio is measured in pairs at both times, so that the speed of the host cancels out. The
    median depends on other load on a shared machine. The result for the median is advisory unless
    the machine was dedicated both times.
    """
    yield from _judge_ratio_growth(limit, gates, then, now)
    if then.latency is None or now.latency is None:
        return
    old, new = (
        compare_latency_quantile(one.sorted_ns, 0.5, math.inf)
        for one in (then.latency, now.latency)
    )
    if old.low > 0 and math.isfinite(old.high) and math.isfinite(new.high):
        text = f"{as_ms(old.estimate)} then, {as_ms(new.estimate)} now"
        yield _make_growth(
            "p50 since", limit, old, new, text, advisory=not (then.dedicated and now.dedicated)
        )


def _judge_ratio_growth(
    limit: float, gates: Sequence[Gate], then: Evidence, now: Evidence
) -> Iterator[GateResult]:
    if now.variant == EXPORT:
        return
    before, after = (
        compute_ranking_metrics(gates, then).ratio,
        compute_ranking_metrics(gates, now).ratio,
    )
    if before is not None and after is not None and min(before.low, before.estimate) > 0:
        text = f"{before.estimate:.4g}x of {EXPORT} then, {after.estimate:.4g}x now"
        yield _make_growth(f"ratio vs {EXPORT} since", limit, before, after, text, advisory=False)


def _make_growth(
    metric: str, limit: float, old: Interval, new: Interval, text: str, *, advisory: bool
) -> GateResult:
    """Return the result for the ratio of a new value to an old one.

    Its interval reaches from new low / old high to new high / old low.
    """
    low, high = new.low / old.high, new.high / old.low
    bound = 1 + limit
    verdict = (
        Verdict.PASS if high <= bound else Verdict.FAIL if low > bound else Verdict.INCONCLUSIVE
    )
    estimate = new.estimate / old.estimate
    return GateResult(
        gate="latency",
        metric=metric,
        limit=f"≤ {bound:.4g}x",
        verdict=verdict,
        reason=f"{text}: {estimate:.4g}x [{low:.4g}, {high:.4g}], limit {bound:.4g}x",
        estimate=estimate,
        low=low,
        high=high,
        bound=bound,
        unit="x",
        advisory=advisory,
    )


def _judge_metric_change(
    name: str, limit: MetricLimit, then: Evidence, now: Evidence
) -> Iterator[GateResult]:
    """Judge the change of a metric on the same rows; it has no interval.

    No result is yielded if a value is missing, or if the numbers of rows differ. A relative limit
    also needs an old value above 0.
    """
    old, new = _find_value(name, then), _find_value(name, now)
    if old is None or new is None or old[1] != new[1]:
        return
    moved = new[0] - old[0]
    if limit.kind == "max_increase":
        if old[0] <= 0:
            return
        moved /= old[0]
    beyond = limit.bound - moved if limit.kind == "max_drop" else moved - limit.bound
    yield GateResult(
        gate="metric",
        metric=f"{name} since",
        limit=limit.text,
        verdict=Verdict.PASS if beyond <= _ROUNDING else Verdict.FAIL,
        reason=f"{name} was {old[0]:.4g} and is {new[0]:.4g}: {limit.format(moved)}, "
        f"limit {limit.format(limit.bound)}",
        estimate=moved,
        bound=limit.bound,
        unit="1",
        n=new[1],
    )


def _find_value(name: str, evidence: Evidence) -> tuple[float, int] | None:
    """Return the variant's own value of a metric, and its number of rows."""
    entries: tuple[PairedCounts | ScoreComparison, ...] = (*evidence.metrics, *evidence.scores)
    for entry in entries:
        if entry.metric != name or not entry.n:
            continue
        if isinstance(entry, PairedCounts):
            return (entry.both + entry.only_candidate) / entry.n, entry.n
        if entry.candidate is not None and math.isfinite(entry.candidate.estimate):
            return entry.candidate.estimate, entry.n
    return None
