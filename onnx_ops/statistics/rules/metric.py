"""Rules of metric gates: their limits, and verdicts from the intervals of metrics."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import scipy

from onnx_ops.domain.decision import GateResult, Verdict
from onnx_ops.domain.evidence import Evidence, Interval, PairedCounts, ScoreComparison
from onnx_ops.domain.gate import Gate, MetricGate, TaskMetricGate
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
    judge_gate,
    make_unlimited,
    make_unmeasured,
    name_baseline,
)

Entry = PairedCounts | ScoreComparison

INDEPENDENCE = "independent rows"
"""Metric name of the advisory result on rows that seem to depend on each other."""

_P_VALUES = 4
"""First schema of evidence with p-values in results.

Results of older evidence have no p-values.
"""

EVEN_ROWS = 75
"""Minimum effective number of rows for a PASS of `min` or `max` of a mean loss.

Of grouped rows, it is the effective number of groups.

The number was chosen by simulation (`benchmarks.truth.losses`).
"""

_CONCENTRATED = 1 / 8
"""Effective share of rows below which the rows with most of the error are named.

The share is about 1/3 for the squares of normally distributed errors.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricLimit:
    """One limit of a metric gate.

    It is compared with an interval. `min` and `max` are compared with that of the candidate's
    value. `max_drop` is compared with that of candidate minus baseline, and `max_increase` with
    that of candidate / baseline - 1. `plain` is True if values have the label's unit.
    """

    kind: Literal["max_drop", "max_increase", "min", "max"]
    value: float
    plain: bool

    @property
    def of_change(self) -> bool:
        """Return whether the limit applies to the change from another model."""
        return self.kind in ("max_drop", "max_increase")

    @property
    def from_above(self) -> bool:
        """Return whether values must stay below the bound."""
        return self.kind in ("max_increase", "max")

    @property
    def bound(self) -> float:
        """Return the number that intervals are compared with."""
        return -self.value if self.kind == "max_drop" else self.value

    @property
    def unit(self) -> str:
        """Return `1` for shares and changes, or an empty string for the label's unit."""
        return "" if self.plain and not self.of_change else "1"

    @property
    def text(self) -> str:
        """Return the limit as messages show it."""
        words = {"max_drop": "drop ≤ ", "max_increase": "increase ≤ ", "min": "≥ ", "max": "≤ "}
        return words[self.kind] + (f"{self.value:.4g}" if not self.unit else as_percent(self.value))

    def format(self, value: float) -> str:
        """Format a value in the unit of the limit."""
        if self.of_change:
            return as_signed_percent(value)
        return as_percent(value) if self.unit else f"{value:.4g}"

    def verdict(self, low: float, high: float) -> Verdict:
        """Return PASS if the whole interval is within the limit, FAIL if none of it is."""
        match self.kind:
            case "max_drop":
                keeps, broken = low > self.bound, high < self.bound
            case "max_increase":
                keeps, broken = high < self.bound, low > self.bound
            case "min":
                keeps, broken = low >= self.bound, high < self.bound
            case _:
                keeps, broken = high <= self.bound, low > self.bound
        return Verdict.PASS if keeps else Verdict.FAIL if broken else Verdict.INCONCLUSIVE


def list_limits(gate: TaskMetricGate) -> Iterator[MetricLimit]:
    """Yield the limits that a gate sets."""
    kinds: tuple[Literal["max_drop", "max_increase", "min", "max"], ...] = (
        "max_drop",
        "max_increase",
        "min",
        "max",
    )
    for kind in kinds:
        value: float | None = getattr(gate, kind)
        if value is not None:
            yield MetricLimit(kind=kind, value=value, plain=not gate.is_share)


@judge_gate.register
def judge_metric(gate: MetricGate, evidence: Evidence) -> Iterator[GateResult]:
    """Judge each limit of a metric gate; a limit of a change for each other model.

    A comparison without labels is left out for a first release.
    """
    name = gate.definition().label
    entries = list_entries(name, evidence)
    limits = tuple(list_limits(gate))
    if not limits:
        yield make_unlimited("metric", name)
    if gate.definition().label_free and not entries and not get_baseline(evidence):
        return
    for limit in limits:
        if limit.of_change:
            results = list(_judge_changes(name, limit, entries, evidence))
        else:
            results = [_judge_value(name, limit, entries)]
        yield from (
            r if evidence.schema >= _P_VALUES else replace(r, p_value=None) for r in results
        )


def list_entries(name: str, evidence: Evidence) -> list[Entry]:
    """Return the measurements of a metric, counted rows before scores."""
    counts = [c for c in evidence.metrics if c.metric == name and c.n]
    return [*counts, *(s for s in evidence.scores if s.metric == name)]


def explain_unscored(
    metrics: Collection[str], scores: Sequence[ScoreComparison]
) -> Mapping[str, str]:
    """Return why the measurement of the candidate failed, by metric.

    Other metrics have no entry, even if they are undefined or the model's outputs are broken.
    """
    return {
        score.metric: score.failed
        for score in scores
        if score.failed and not score.against and score.metric in metrics
    }


def judge_independence(gates: Sequence[Gate], evidence: Evidence) -> Iterator[GateResult]:
    """Yield advice to name groups if rows seem to depend on each other."""
    if evidence.grouped and any(isinstance(gate, TaskMetricGate) for gate in gates):
        yield GateResult(
            gate="metric",
            metric=INDEPENDENCE,
            limit="",
            verdict=Verdict.INCONCLUSIVE,
            reason=f"rows may belong together: {'; '.join(evidence.grouped)}. If they do, "
            "intervals are too narrow: name the array of groups with `group:` in the data "
            "set",
            advisory=True,
        )


def _judge_value(name: str, limit: MetricLimit, entries: Sequence[Entry]) -> GateResult:
    """Judge the candidate's value.

    Several entries can contain the value. The result with the worst verdict is returned; of equal
    verdicts, that with the worst value.
    """
    if not entries:
        return make_unmeasured("metric", name, limit.text)
    valued = [
        e
        for e in entries
        if isinstance(e, PairedCounts) or e.candidate is not None or not e.against
    ]
    judged = [judge_entry(name, limit, entry) for entry in valued or entries]
    return max(judged, key=lambda result: _rank_result(limit, result))


def _rank_result(limit: MetricLimit, result: GateResult) -> tuple[int, float, int]:
    """Return a sort key that puts the worst result last."""
    if result.estimate is None:
        return result.verdict.rank, math.inf, -result.n
    badness = result.estimate if limit.from_above else -result.estimate
    return result.verdict.rank, badness, -result.n


def _judge_changes(
    name: str, limit: MetricLimit, entries: Sequence[Entry], evidence: Evidence
) -> Iterator[GateResult]:
    """Judge the change from every compared model, which must include the baseline."""
    compared = [e for e in entries if e.against and e.against != evidence.variant]
    for entry in compared:
        yield replace(judge_entry(name, limit, entry), metric=f"{name} vs {entry.against}")
    baseline = get_baseline(evidence)
    if baseline and not any(e.against == baseline for e in compared):
        yield judge_missing_change(f"{name} vs {baseline}", name, limit, entries)


def judge_missing_change(
    metric: str, name: str, limit: MetricLimit, entries: Sequence[Entry]
) -> GateResult:
    """Return a result for a value that cannot be compared with the baseline's.

    The result contains the reason, if it is known.
    """
    unscored = next(
        (e for e in entries if isinstance(e, ScoreComparison) and e.candidate is None), None
    )
    result = (
        judge_entry(name, limit, unscored)
        if unscored
        else make_unmeasured("metric", metric, limit.text)
    )
    return replace(result, metric=metric)


def judge_entry(name: str, limit: MetricLimit, entry: Entry) -> GateResult:
    """Judge one measurement by its own interval.

    A PASS that rests on few rows becomes INCONCLUSIVE.
    """
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
        verdicts = {
            Verdict.FAIL: entry.broken,
            Verdict.ERROR: entry.failed,
            Verdict.INCONCLUSIVE: entry.undefined,
        }
        for verdict, reason in verdicts.items():
            if reason:
                return replace(blank, verdict=verdict, reason=reason)
    if problem := _find_problem(entry):
        return replace(blank, reason=f"{name}: {problem}")
    interval = _find_interval(limit, entry)
    if interval is None:
        return replace(
            blank,
            verdict=Verdict.INCONCLUSIVE,
            reason=f"{name} was measured without the interval that the limit needs: {limit.text}",
        )
    verdict = limit.verdict(interval.low, interval.high)
    if verdict is Verdict.PASS and (
        _rests_on_few(limit, entry) if limit.of_change else _is_uneven(entry)
    ):
        verdict = Verdict.INCONCLUSIVE
    return replace(
        blank,
        verdict=verdict,
        reason=_explain(name, limit, entry, interval, verdict),
        estimate=interval.estimate,
        low=interval.low,
        high=interval.high,
        bound=limit.bound,
        unit=limit.unit,
        p_value=_p_value(limit, entry, interval),
    )


def _is_uneven(entry: Entry) -> bool:
    """Return whether so few rows cause the error that unseen rows can be as bad."""
    return (
        isinstance(entry, ScoreComparison)
        and entry.effective is not None
        and entry.effective < EVEN_ROWS
    )


def _rests_on_few(limit: MetricLimit, entry: Entry) -> bool:
    """Return whether few rows account for the losses, and the rest fails the limit.

    The result is also True if the other rows have no loss. The losses of both models are
    considered.
    """
    if not isinstance(entry, ScoreComparison) or not entry.carrying:
        return False
    rest = _get_rest(limit, entry)
    return rest is None or limit.verdict(rest, rest) is not Verdict.PASS


def _get_rest(limit: MetricLimit, entry: ScoreComparison) -> float | None:
    """Return the change that the limit applies to, without the rows of largest loss."""
    if entry.rest is None:
        return None
    return entry.rest - 1 if limit.kind == "max_increase" else entry.rest


def _p_value(limit: MetricLimit, entry: Entry, interval: Interval) -> float:
    """Return the p-value of a limit.

    For counts, it is that of Tango's score for a change, and of the exact binomial test for a
    value. For scores, the estimate is assumed to be normally distributed.
    """
    if isinstance(entry, PairedCounts):
        return (change_p_value if limit.of_change else value_p_value)(entry, limit.bound)
    safe = limit.bound - interval.estimate if limit.from_above else interval.estimate - limit.bound
    end = (
        interval.high - interval.estimate if limit.from_above else interval.estimate - interval.low
    )
    if end <= 0:
        return 0.0 if safe > 0 else 1.0
    return float(scipy.special.ndtr(-scipy.special.ndtri((1 + CONFIDENCE) / 2) * safe / end))


def _find_interval(limit: MetricLimit, entry: Entry) -> Interval | None:
    """Return the interval that the limit is compared with.

    For counts, it is Tango's interval of the change, or the Clopper-Pearson interval of the value.
    Return None if the measurement has no interval for this kind of limit.
    """
    if isinstance(entry, PairedCounts):
        if limit.kind == "max_drop":
            return change_interval(entry)
        return None if limit.of_change else value_interval(entry)
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


def _find_problem(entry: Entry) -> str:
    """Return why a measurement cannot be true; empty if it can."""
    return (
        _find_count_problem(entry)
        if isinstance(entry, PairedCounts)
        else _find_score_problem(entry)
    )


def _find_count_problem(counts: PairedCounts) -> str:
    parts = (counts.both, counts.only_baseline, counts.only_candidate)
    if counts.equal and any(parts[1:]):
        return "two models are marked as equal, but are right on different rows"
    if not (1 <= counts.change_effect < math.inf and 1 <= counts.value_effect < math.inf):
        effects = f"{counts.change_effect:g}, {counts.value_effect:g}"
        return f"a design effect is below 1 or not finite: {effects}"
    if min(parts) < 0 or sum(parts) > counts.n:
        return f"the counts {', '.join(map(str, parts))} do not fit {counts.n} rows"
    return ""


def _find_score_problem(score: ScoreComparison) -> str:
    intervals = [i for i in (score.candidate, score.difference, score.ratio) if i is not None]
    if not all(i.is_finite for i in intervals):
        return "a value is not a finite number"
    if score.n < 1 or not all(i.low <= i.estimate <= i.high for i in intervals):
        return "no row was scored" if score.n < 1 else "an interval does not contain its estimate"
    return ""


def _explain(
    name: str, limit: MetricLimit, entry: Entry, interval: Interval, verdict: Verdict
) -> str:
    reason = (
        f"{_describe_interval(name, limit, entry, interval)}, limit {limit.format(limit.bound)}, "
        f"n = {entry.n}"
    )
    if entry.groups:
        reason += f" in {entry.groups} groups"
    if limit.of_change and interval.is_point:
        return f"{reason}: both models answer every row alike"
    if limit.of_change and isinstance(entry, PairedCounts):
        reason += f" ({entry.only_baseline} lost, {entry.only_candidate} won)"
    return (
        reason + _explain_indecision(limit, entry, interval)
        if verdict is Verdict.INCONCLUSIVE
        else reason
    )


def _describe_interval(name: str, limit: MetricLimit, entry: Entry, interval: Interval) -> str:
    """Return the value with its interval, or the change with its interval, as a text.

    The text on a change names the other model.
    """
    ends = f"[{limit.format(interval.low)}, {limit.format(interval.high)}]"
    value = f"{limit.format(interval.estimate)} {ends}"
    if not limit.of_change:
        return f"{name} is {value}"
    change = "exactly 0" if interval.is_point else value
    return f"{name} changes by {change} against {name_baseline(entry.against)}"


def _explain_indecision(limit: MetricLimit, entry: Entry, interval: Interval) -> str:
    """Return why a limit is undecided, with advice on the number of rows."""
    reason = ""
    if isinstance(entry, ScoreComparison):
        reason += _explain_few_rows(limit, entry)
        if limit.of_change and interval.estimate == 0:
            reason += (
                "; no change was measured, but unseen rows can cause one: add rows, "
                "of the rarest class first"
            )
    advice = advise_sample_size(entry.n)
    return f"{reason}; {advice}" if advice else reason


def _explain_few_rows(limit: MetricLimit, entry: ScoreComparison) -> str:
    """Return a text on the rows that account for the error, if they are few.

    Otherwise, the text is empty.
    """
    units, kind = entry.groups or entry.n, "groups" if entry.groups else "rows"
    if limit.of_change and _rests_on_few(limit, entry):
        rest = _get_rest(limit, entry)
        others = (
            f"the other {kind} have no error"
            if rest is None
            else f"the change in the other {kind} is {limit.format(rest)}"
        )
        verb = "accounts" if entry.carrying == 1 else "account"
        return (
            f"; {entry.carrying} of {units} {kind} {verb} for the change, and {others}"
            f"{_name_heavy_rows(entry)}"
        )
    if entry.effective is None or not entry.heavy:
        return ""
    if entry.effective < _CONCENTRATED * units or (not limit.of_change and _is_uneven(entry)):
        return (
            f"; few rows account for the error (equivalent to {entry.effective:.0f} of {units} "
            f"{kind}){_name_heavy_rows(entry)}"
        )
    return ""


def _name_heavy_rows(entry: ScoreComparison) -> str:
    if not entry.heavy:
        return ""
    noun = "row" if len(entry.heavy) == 1 else "rows"
    return f": check {noun} {', '.join(str(row) for row in sorted(entry.heavy))}"
