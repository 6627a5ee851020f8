"""Metric gates: which figure each limit is held against, and what it says."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace

from onnx_ops.domain.evidence import Evidence, Interval, PairedCounts, ScoreComparison
from onnx_ops.domain.gate import Gate, GateResult, MetricGate, Verdict
from onnx_ops.statistics import special
from onnx_ops.statistics.agreement import (
    CONFIDENCE,
    change_interval,
    change_p_value,
    sample_advice,
    value_interval,
    value_p_value,
)
from onnx_ops.statistics.rules.common import baseline_of, no_limit, not_measured, noun
from onnx_ops.statistics.rules.limit import Limit, limits_of

_Entry = PairedCounts | ScoreComparison

INDEPENDENCE = "independent rows"
"""What the advisory result is about that tells of rows which look as if some belonged together."""

_P_VALUES = 4
"""Schema of evidence since which results tell p-values; older is judged as it was, to the byte."""

_EVEN_ROWS = 50
"""Least effective rows (or groups) for a PASS of a largest error; chosen by simulation."""

_CONCENTRATED = 1 / 8
"""Share of the rows below which so few equally bad ones carry the error that they are named; 1/3 in a normal one."""


def judge_metric(gate: MetricGate, evidence: Evidence) -> Iterator[GateResult]:
    """A result for each limit and each model that it is held against.

    Where models are compared without labels, a first release has nothing to be compared with, and the gate says
    nothing.
    """
    name = gate.definition().label
    counts = [c for c in evidence.metrics if c.metric == name and c.n]
    entries: list[_Entry] = [*counts, *(s for s in evidence.scores if s.metric == name)]
    limits = tuple(limits_of(gate))
    if not limits:
        yield no_limit("metric", name)
    if gate.definition().label_free and not entries and not baseline_of(evidence):
        return
    for limit in limits:
        if limit.of_change:
            yield from (_aged(result, evidence) for result in _changes(name, limit, entries, evidence))
        elif entries:
            # Every entry tells the candidate's own value; where they differ, the worst counts.
            telling = [entry for entry in entries if _tells_value(entry)] or entries
            results = [_judge(name, limit, entry) for entry in telling]
            yield _aged(max(results, key=lambda r: (r.verdict.rank, -(r.estimate or 0.0), -r.n)), evidence)
        else:
            yield not_measured("metric", name, limit.text)


def unscored(metrics: Collection[str], scores: Sequence[ScoreComparison]) -> Mapping[str, str]:
    """Return why the candidate has no value of some of these metrics: labels or answers are of another kind."""
    return {one.metric: one.failed for one in scores if one.failed and not one.against and one.metric in metrics}


def judge_independence(gates: Sequence[Gate], evidence: Evidence) -> Iterator[GateResult]:
    """Advice to name groups, where metric gates take rows as independent that look as if some belonged together."""
    if evidence.grouped and any(isinstance(gate, MetricGate) for gate in gates):
        yield GateResult(
            gate="metric",
            metric=INDEPENDENCE,
            limit="",
            verdict=Verdict.INCONCLUSIVE,
            reason=f"rows may belong together: {'; '.join(evidence.grouped)}. If they do, intervals are too narrow: "
            "name the array that tells it with `group:` in the data set",
            advisory=True,
        )


def _aged(result: GateResult, evidence: Evidence) -> GateResult:
    return result if evidence.schema >= _P_VALUES else replace(result, p_value=None)


def _changes(name: str, limit: Limit, entries: Sequence[_Entry], evidence: Evidence) -> Iterator[GateResult]:
    """Against every model that the candidate was compared with; the baseline must be one of them."""
    compared = [e for e in entries if e.against and e.against != evidence.variant]
    for entry in compared:
        yield replace(_judge(name, limit, entry), metric=f"{name} vs {entry.against}")
    baseline = baseline_of(evidence)
    if baseline and not any(e.against == baseline for e in compared):
        metric = f"{name} vs {baseline}"
        spoilt = next((e for e in entries if isinstance(e, ScoreComparison) and e.candidate is None), None)
        found = not_measured("metric", metric, limit.text) if spoilt is None else _judge(name, limit, spoilt)
        yield replace(found, metric=metric)


def _tells_value(entry: _Entry) -> bool:
    """An entry about a baseline without a figure says nothing about the candidate."""
    return isinstance(entry, PairedCounts) or entry.candidate is not None or not entry.against


def _judge(name: str, limit: Limit, entry: _Entry) -> GateResult:
    blank = GateResult(
        gate="metric",
        metric=name,
        limit=limit.text,
        verdict=Verdict.ERROR,
        reason="",
        n=max(0, entry.n),
        groups=entry.groups,
    )
    if isinstance(entry, ScoreComparison):
        verdicts = {Verdict.FAIL: entry.broken, Verdict.ERROR: entry.failed, Verdict.INCONCLUSIVE: entry.undefined}
        for verdict, reason in verdicts.items():
            if reason:
                return replace(blank, verdict=verdict, reason=reason)
    if problem := _problem(entry):
        return replace(blank, reason=f"{name}: {problem}")
    found = _interval(limit, entry)
    if found is None:
        return replace(blank, verdict=Verdict.INCONCLUSIVE, reason=f"{name} has no interval that fits {limit.text}")
    verdict = limit.verdict(found.low, found.high)
    if verdict is Verdict.PASS and limit.kind == "max" and _is_uneven(entry):
        verdict = Verdict.INCONCLUSIVE
    return replace(
        blank,
        verdict=verdict,
        reason=_reason(name, limit, entry, found, verdict),
        estimate=found.estimate,
        low=found.low,
        high=found.high,
        bound=limit.bound,
        unit=limit.unit,
        p_value=_p_value(limit, entry, found),
    )


def _is_uneven(entry: _Entry) -> bool:
    """Whether few rows carry the error: then an unseen one may be as bad as all that were seen together."""
    return isinstance(entry, ScoreComparison) and entry.effective is not None and entry.effective < _EVEN_ROWS


def _p_value(limit: Limit, entry: _Entry, found: Interval) -> float:
    """Exact for counts; for other intervals as if the distance to the limit were normal."""
    if isinstance(entry, PairedCounts):
        return (change_p_value if limit.of_change else value_p_value)(entry, limit.bound)
    safe = limit.bound - found.estimate if limit.from_above else found.estimate - limit.bound
    end = found.high - found.estimate if limit.from_above else found.estimate - found.low
    if end <= 0:
        return 0.0 if safe > 0 else 1.0
    return float(special.ndtr(-special.ndtri((1 + CONFIDENCE) / 2) * safe / end))


def _interval(limit: Limit, entry: _Entry) -> Interval | None:
    """What the limit is held against."""
    if isinstance(entry, PairedCounts):
        return _counted(limit, entry)
    match limit.kind:
        case "max_drop":
            return entry.difference
        case "max_increase" if entry.ratio is not None:
            ratio = entry.ratio
            return Interval(estimate=ratio.estimate - 1, low=ratio.low - 1, high=ratio.high - 1)
        case "min" | "max":
            return entry.candidate
        case _:
            return None


def _counted(limit: Limit, counts: PairedCounts) -> Interval | None:
    """Tango's interval of the change, Clopper and Pearson's of the value."""
    if limit.kind == "max_drop":
        return change_interval(counts)
    return None if limit.of_change else value_interval(counts)


def _problem(entry: _Entry) -> str:
    if isinstance(entry, PairedCounts):
        parts = (entry.both, entry.only_baseline, entry.only_candidate)
        if not (1 <= entry.change_effect < math.inf and 1 <= entry.value_effect < math.inf):
            return "groups of rows do not add to what rows tell"
        return "its counts do not add up" if min(parts) < 0 or sum(parts) > entry.n else ""
    intervals = [i for i in (entry.candidate, entry.difference, entry.ratio) if i is not None]
    if not all(math.isfinite(v) for i in intervals for v in (i.estimate, i.low, i.high)):
        return "a figure is not a number"
    if entry.n < 1 or not all(i.low <= i.estimate <= i.high for i in intervals):
        return "its figures do not fit each other"
    return ""


def _reason(name: str, limit: Limit, entry: _Entry, found: Interval, verdict: Verdict) -> str:
    verb = f"{name} changes by" if limit.of_change else f"{name} is"
    against = f" against {noun(entry.against)}" if limit.of_change else ""
    figures = f"{limit.told(found.estimate)} [{limit.told(found.low)}, {limit.told(found.high)}]{against}"
    reason = f"{verb} {figures}, limit {limit.told(limit.bound)}, n = {entry.n}"
    if entry.groups:
        reason += f" in {entry.groups} groups"
    if isinstance(entry, PairedCounts) and limit.of_change:
        reason += f" ({entry.only_baseline} lost, {entry.only_candidate} won)"
    if verdict is not Verdict.INCONCLUSIVE:
        return reason
    told = (_carried(limit, entry), sample_advice(entry.n))
    return "; ".join((reason, *(one for one in told if one)))


def _carried(limit: Limit, entry: _Entry) -> str:
    """Which rows carry the error, where few do."""
    if isinstance(entry, PairedCounts) or entry.effective is None or not entry.heavy:
        return ""
    units = entry.groups or entry.n
    if entry.effective >= _CONCENTRATED * units and not (limit.kind == "max" and _is_uneven(entry)):
        return ""
    rows = ", ".join(str(row) for row in sorted(entry.heavy))
    return f"few rows carry the error ({entry.effective:.0f} of {units} count): look at rows {rows}"
