"""Limits on a ratio to the baseline, measured in pairs: the same rule for latency, load, starts and memory."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from onnx_ops.domain.evidence import Evidence
from onnx_ops.domain.gate import GateResult, Verdict
from onnx_ops.statistics.latency import LOOKS, Comparison, compare, pairs_needed, trend, withheld
from onnx_ops.statistics.rules.common import baseline_of, finite, not_measured, noun, percent


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """A measured ratio and how its result is worded: `of` names what it multiplies, `pairs` what n counts."""

    gate: str
    metric: str
    of: str
    log_ratios: Sequence[Sequence[float]]
    self_log_ratios: Sequence[Sequence[float]]
    pairs: str
    detail: str = ""


def judge_ratio(ratio: Ratio, max_regression: float) -> GateResult:
    """`statistics.latency.compare`, unless the baseline against itself shows that this host cannot tell."""
    found = compare(ratio.log_ratios, tolerance=max_regression)
    noisy = withheld(ratio.log_ratios, ratio.self_log_ratios, max_regression)
    limit = f"{1 + max_regression:.4g}x"
    reason = ratio_text(ratio, found, limit)
    if found.verdict is Verdict.INCONCLUSIVE:
        reason += f"; {_what_decides(ratio, found, max_regression)}"
    return GateResult(
        gate=ratio.gate,
        metric=ratio.metric,
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


def ratio_text(ratio: Ratio, found: Comparison, limit: str) -> str:
    figures = f"{found.ratio:.4g}x [{found.low:.4g}, {found.high:.4g}] {ratio.of}"
    change = trend(ratio.log_ratios)
    way = "" if change is None else f"; it {'grew' if change > 0 else 'fell'} by {percent(abs(change))} over the run"
    return f"{figures}, limit {limit}, {found.pairs} {ratio.pairs}{ratio.detail}{way}"


def _what_decides(ratio: Ratio, found: Comparison, max_regression: float) -> str:
    """How many pairs, or which other limit."""
    needed = pairs_needed(ratio.log_ratios, max_regression)
    if needed is None:
        more = "the ratio is too near to the limit for any number of pairs"
    elif needed > LOOKS[-1]:
        more = f"about {needed} pairs on end would decide, and a run has {LOOKS[-1]}: measure on a quieter machine"
    else:
        more = f"the {needed} pairs of a whole run would decide"
    if not (found.low > 0 and math.isfinite(found.high)):
        return more
    low, high = found.low / found.rest - 1, _up(found.high * found.rest - 1)
    below = f", one of {percent(low)} broken" if low > 0 else ""
    return f"{more}; a limit of {percent(high)} would be kept{below}"


def _up(fraction: float) -> float:
    """To the next tenth of a percent."""
    return math.ceil(1000 * fraction + 1e-9) / 1000


def judge_figure(
    gate: str, figure: str, of: str, pairs: str, max_regression: float | None, evidence: Evidence
) -> Iterator[GateResult]:
    """A figure of `Evidence.ratios` against the baseline; nothing where the gate sets no such limit, or there is no
    baseline."""
    baseline = baseline_of(evidence)
    if max_regression is None or not baseline:
        return
    metric = f"{figure} vs {baseline}"
    found = [r for r in evidence.ratios if (r.figure, r.against) == (figure, baseline) and any(r.log_ratios)]
    for r in found:
        ratio = Ratio(
            gate=gate,
            metric=metric,
            of=f"{of} of {noun(baseline)}",
            log_ratios=r.log_ratios,
            self_log_ratios=r.self_log_ratios,
            pairs=pairs,
        )
        yield judge_ratio(ratio, max_regression)
    if not found:
        yield not_measured(gate, metric, f"≤ {1 + max_regression:.4g}x")
