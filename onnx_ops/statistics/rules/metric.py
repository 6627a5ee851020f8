"""The limits of a metric gate: how each is told, and what an interval says about it.

Metric gates: which figure each limit is held against, and what it says."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from onnx_ops.domain.decision import GateResult, Verdict
from onnx_ops.domain.evidence import Evidence, Interval, PairedCounts, ScoreComparison
from onnx_ops.domain.gate import Gate, MetricGate
from onnx_ops.statistics import special
from onnx_ops.statistics.intervals import (
    CONFIDENCE,
    advise_sample_size,
    change_interval,
    change_p_value,
    value_interval,
    value_p_value,
)
from onnx_ops.statistics.rules.common import (
    as_percent,
    as_signed_percent,
    get_baseline,
    make_unlimited,
    make_unmeasured,
    noun,
)

_Entry = PairedCounts | ScoreComparison

INDEPENDENCE = "independent rows"
"""What the advisory result is about that tells of rows which look as if some belonged together."""

_P_VALUES = 4
"""Schema of evidence since which results tell p-values; older is judged as it was, to the byte."""

_EVEN_ROWS = 50
"""Least effective rows (or groups) for a PASS of a largest error; chosen by simulation."""

_CONCENTRATED = 1 / 8
"""Share of the rows below which so few equally bad ones carry the error that they are named; 1/3 in a normal one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricLimit:
    """One limit. Those of a change are held against an interval of the change: `max_drop` of candidate minus baseline,
    `max_increase` of candidate over baseline, minus 1. `plain` says that values have the label's unit."""

    kind: Literal["max_drop", "max_increase", "min", "max"]
    value: float
    plain: bool

    @property
    def of_change(self) -> bool:
        return self.kind in ("max_drop", "max_increase")

    @property
    def from_above(self) -> bool:
        """Whether figures must stay below the bound."""
        return self.kind in ("max_increase", "max")

    @property
    def bound(self) -> float:
        """The number that intervals are held against."""
        return -self.value if self.kind == "max_drop" else self.value

    @property
    def unit(self) -> str:
        return "" if self.plain and not self.of_change else "1"

    @property
    def text(self) -> str:
        words = {"max_drop": "drop ≤ ", "max_increase": "increase ≤ ", "min": "≥ ", "max": "≤ "}
        return words[self.kind] + (f"{self.value:.4g}" if not self.unit else as_percent(self.value))

    def told(self, value: float) -> str:
        """A figure in the limit's terms."""
        if self.of_change:
            return as_signed_percent(value)
        return as_percent(value) if self.unit else f"{value:.4g}"

    def verdict(self, low: float, high: float) -> Verdict:
        """PASS where the whole interval keeps the limit, FAIL where it lies beyond it."""
        match self.kind:
            case "max_drop":
                kept, broken = low > self.bound, high < self.bound
            case "max_increase":
                kept, broken = high < self.bound, low > self.bound
            case "min":
                kept, broken = low >= self.bound, high < self.bound
            case _:
                kept, broken = high <= self.bound, low > self.bound
        return Verdict.PASS if kept else Verdict.FAIL if broken else Verdict.INCONCLUSIVE


def list_limits(gate: MetricGate) -> Iterator[MetricLimit]:
    plain = gate.definition().higher_is_better is False or gate.higher_is_better is False
    if gate.max_drop is not None:
        yield MetricLimit(kind="max_drop", value=gate.max_drop, plain=plain)
    if gate.max_increase is not None:
        yield MetricLimit(kind="max_increase", value=gate.max_increase, plain=plain)
    if gate.min is not None:
        yield MetricLimit(kind="min", value=gate.min, plain=plain)
    if gate.max is not None:
        yield MetricLimit(kind="max", value=gate.max, plain=plain)


def judge_metric(gate: MetricGate, evidence: Evidence) -> Iterator[GateResult]:
    """A result for each limit and each model that it is held against.

    Where models are compared without labels, a first release has nothing to be compared with, and the gate says
    nothing.
    """
    name = gate.definition().label
    counts = [c for c in evidence.metrics if c.metric == name and c.n]
    entries: list[_Entry] = [*counts, *(s for s in evidence.scores if s.metric == name)]
    limits = tuple(list_limits(gate))
    if not limits:
        yield make_unlimited("metric", name)
    if gate.definition().label_free and not entries and not get_baseline(evidence):
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
            yield make_unmeasured("metric", name, limit.text)


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


def _changes(name: str, limit: MetricLimit, entries: Sequence[_Entry], evidence: Evidence) -> Iterator[GateResult]:
    """Against every model that the candidate was compared with; the baseline must be one of them."""
    compared = [e for e in entries if e.against and e.against != evidence.variant]
    for entry in compared:
        yield replace(_judge(name, limit, entry), metric=f"{name} vs {entry.against}")
    baseline = get_baseline(evidence)
    if baseline and not any(e.against == baseline for e in compared):
        metric = f"{name} vs {baseline}"
        spoilt = next((e for e in entries if isinstance(e, ScoreComparison) and e.candidate is None), None)
        found = make_unmeasured("metric", metric, limit.text) if spoilt is None else _judge(name, limit, spoilt)
        yield replace(found, metric=metric)


def _tells_value(entry: _Entry) -> bool:
    """An entry about a baseline without a figure says nothing about the candidate."""
    return isinstance(entry, PairedCounts) or entry.candidate is not None or not entry.against


def _judge(name: str, limit: MetricLimit, entry: _Entry) -> GateResult:
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


def _p_value(limit: MetricLimit, entry: _Entry, found: Interval) -> float:
    """Exact for counts; for other intervals as if the distance to the limit were normal."""
    if isinstance(entry, PairedCounts):
        return (change_p_value if limit.of_change else value_p_value)(entry, limit.bound)
    safe = limit.bound - found.estimate if limit.from_above else found.estimate - limit.bound
    end = found.high - found.estimate if limit.from_above else found.estimate - found.low
    if end <= 0:
        return 0.0 if safe > 0 else 1.0
    return float(special.ndtr(-special.ndtri((1 + CONFIDENCE) / 2) * safe / end))


def _interval(limit: MetricLimit, entry: _Entry) -> Interval | None:
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


def _counted(limit: MetricLimit, counts: PairedCounts) -> Interval | None:
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


def _reason(name: str, limit: MetricLimit, entry: _Entry, found: Interval, verdict: Verdict) -> str:
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
    told = (_carried(limit, entry), advise_sample_size(entry.n))
    return "; ".join((reason, *(one for one in told if one)))


def _carried(limit: MetricLimit, entry: _Entry) -> str:
    """Which rows carry the error, where few do."""
    if isinstance(entry, PairedCounts) or entry.effective is None or not entry.heavy:
        return ""
    units = entry.groups or entry.n
    if entry.effective >= _CONCENTRATED * units and not (limit.kind == "max" and _is_uneven(entry)):
        return ""
    rows = ", ".join(str(row) for row in sorted(entry.heavy))
    return f"few rows carry the error ({entry.effective:.0f} of {units} count): look at rows {rows}"
