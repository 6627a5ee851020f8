"""Rule of the gate on slices: no slice loses more than a limit.

A slice fails if its p-value, corrected for all judged slices, is at most 5 %. It also fails if the
answers of the model are not finite. The gate passes if each judged slice is within the limit with
its own interval. This needs no correction: if one slice exceeds the limit, the gate passes only if
this slice passes (Berger 1982, Technometrics 24:295-300).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import scipy

from onnx_ops.domain.decision import GateResult, SliceResult, Verdict, combine_verdicts
from onnx_ops.domain.evidence import Evidence, PairedCounts, ScoreComparison, SliceMeasurement
from onnx_ops.domain.gate import FEWEST_SLICE_ROWS, SlicesGate
from onnx_ops.statistics.intervals import CONFIDENCE, advise_sample_size
from onnx_ops.statistics.rules.common import (
    get_baseline,
    judge_gate,
    make_unlimited,
    make_unmeasured,
    name_baseline,
)
from onnx_ops.statistics.rules.metric import (
    Entry,
    MetricLimit,
    judge_entry,
    judge_missing_change,
    list_entries,
    list_limits,
)
from onnx_ops.statistics.slices import (
    FAMILY_LEVEL,
    compute_excess_p_value,
    compute_harm_p_value,
    compute_shortfall_p_value,
    correct_for_all,
)

_NAMED = 3
"""Maximum number of slices that a reason names."""

_FAR = 100
"""Multiple of the present rows above which no number of rows is advised."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Comparison:
    """A metric of the candidate in each slice, against one other model.

    `against` is empty for the candidate's own value.
    """

    name: str
    limit: MetricLimit
    against: str

    @property
    def metric(self) -> str:
        """Return the name of the comparison in results."""
        return f"{self.name} by slice" + (f" vs {self.against}" if self.against else "")


@judge_gate.register
def judge_slices(gate: SlicesGate, evidence: Evidence) -> Iterator[GateResult]:
    """Judge each limit in all slices together, for each model that it applies to."""
    definition = gate.definition()
    limits = tuple(list_limits(gate))
    if not limits:
        yield make_unlimited("slices", f"{definition.label} by slice")
    baseline = get_baseline(evidence)
    compared = _list_compared(definition.label, evidence)
    if definition.label_free and not compared and not baseline:
        return
    for limit in limits:
        if limit.of_change and baseline and baseline not in compared:
            yield _explain_missing(definition.label, limit, baseline, evidence)
        for against in compared if limit.of_change else ("",):
            comparison = _Comparison(name=definition.label, limit=limit, against=against)
            yield _judge_slices(comparison, gate.fewest_rows, evidence)


def _list_compared(name: str, evidence: Evidence) -> list[str]:
    """Return the models that the candidate is compared with in any slice."""
    entries = [e for measured in evidence.slices for e in _select_entries(name, measured)]
    return list(
        dict.fromkeys(e.against for e in entries if e.against not in ("", evidence.variant))
    )


def _explain_missing(
    name: str, limit: MetricLimit, baseline: str, evidence: Evidence
) -> GateResult:
    """Return the result if no slice is compared with the baseline.

    The reason is that of the metric of all rows, if it is known.
    """
    metric = f"{name} by slice vs {baseline}"
    result = judge_missing_change(metric, name, limit, list_entries(name, evidence))
    return replace(result, gate="slices", limit=_describe_limit(limit))


def _describe_limit(limit: MetricLimit) -> str:
    return f"{limit.text} in each slice"


def _judge_slices(comparison: _Comparison, fewest: int, evidence: Evidence) -> GateResult:
    """Judge a comparison in all slices."""
    limit = comparison.limit
    if not evidence.slices:
        return make_unmeasured("slices", comparison.metric, _describe_limit(limit))
    judged: list[SliceResult] = []
    skipped: list[SliceResult] = []
    p_values: list[float] = []
    for measured in evidence.slices:
        entries = _select_entries(comparison.name, measured)
        if reason := _explain_few(measured, entries, fewest):
            skipped.append(
                SliceResult(slice=measured.slice, verdict=None, reason=reason, n=measured.rows)
            )
            continue
        result, p_value = _judge_slice(comparison, measured, entries)
        judged.append(result)
        p_values.append(p_value)
    corrected = correct_for_all(p_values)
    # All slices are within the limit only if every single slice is. So the largest p-value is that
    # of all slices (intersection-union test, Berger 1982).
    keeping = [result.p_value for result in judged if result.p_value is not None]
    results = sorted(
        (
            _apply_correction(comparison.limit, result, p_value, len(judged))
            for result, p_value in zip(judged, corrected, strict=True)
        ),
        key=lambda result: _rank_slice(limit, result),
    )
    skipped.sort(key=lambda result: (-result.n, result.slice))
    summary = _summarize(comparison, results, skipped, fewest)
    return replace(summary, p_value=max(keeping, default=None))


def _select_entries(name: str, measured: SliceMeasurement) -> list[Entry]:
    counts = [counts for counts in measured.metrics if counts.metric == name and counts.n]
    return [*counts, *(score for score in measured.scores if score.metric == name)]


def _explain_few(measured: SliceMeasurement, entries: Sequence[Entry], fewest: int) -> str:
    """Return why a slice is not judged; empty if it has enough rows and groups."""
    if measured.rows < fewest:
        return f"not judged: {_count(measured.rows, 'row')}"
    groups = max((entry.groups for entry in entries), default=0)
    if 0 < groups < FEWEST_SLICE_ROWS:
        return f"not judged: {_count(measured.rows, 'row')} in {_count(groups, 'group')}"
    return ""


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _judge_slice(
    comparison: _Comparison, measured: SliceMeasurement, entries: Sequence[Entry]
) -> tuple[SliceResult, float]:
    """Return the result of one slice by its own interval, and the p-value of its loss."""
    name, limit = comparison.name, comparison.limit
    matching = [e for e in entries if e.against == comparison.against]
    result = (
        judge_entry(name, limit, matching[0])
        if matching
        else judge_missing_change(comparison.metric, name, limit, entries)
    )
    slice_result = SliceResult(
        slice=measured.slice,
        verdict=result.verdict,
        # The advice on the rows of a slice is more exact than that on rows in general.
        reason=result.reason.removesuffix(f"; {advise_sample_size(measured.rows)}"),
        n=measured.rows,
        groups=result.groups,
        estimate=result.estimate,
        low=result.low,
        high=result.high,
        p_value=result.p_value,
    )
    return slice_result, _find_harm(limit, matching[0], result) if matching else 1.0


def _find_harm(limit: MetricLimit, entry: Entry, result: GateResult) -> float:
    """Return the p-value of "the slice is within the limit"; 1 without an interval."""
    if result.estimate is None or result.low is None or result.high is None:
        return 1.0
    if isinstance(entry, PairedCounts):
        if limit.of_change:
            return compute_harm_p_value(entry, limit.bound)
        return compute_shortfall_p_value(entry, limit.bound)
    excess = result.estimate - limit.bound if limit.from_above else limit.bound - result.estimate
    end = result.estimate - result.low if limit.from_above else result.high - result.estimate
    return compute_excess_p_value(excess, end, _count_units(entry))


def _count_units(entry: ScoreComparison) -> float:
    """Return the number of rows or groups that the estimate is based on."""
    units = float(entry.groups or entry.n)
    return units if entry.effective is None else min(units, entry.effective)


def _apply_correction(
    limit: MetricLimit, result: SliceResult, corrected: float, count: int
) -> SliceResult:
    """Return the result with the verdict after the correction for all slices."""
    if result.estimate is None:
        return replace(result, p_value=None)
    result = replace(result, p_value=corrected)
    if corrected <= FAMILY_LEVEL:
        text = f"{result.reason}, p = {corrected:.2g} corrected for {_count(count, 'slice')}"
        return replace(result, verdict=Verdict.FAIL, reason=text)
    if result.verdict is Verdict.PASS:
        return result
    if result.verdict is Verdict.FAIL:
        result = replace(
            result,
            verdict=Verdict.INCONCLUSIVE,
            reason=f"{result.reason}; p = {corrected:.2g} corrected for {_count(count, 'slice')} "
            "does not exclude the limit",
        )
    advice = _advise_rows(limit, result, count)
    return replace(result, reason=f"{result.reason}; {advice}") if advice else result


def _advise_rows(limit: MetricLimit, result: SliceResult, count: int) -> str:
    """Return how many rows of the slice would decide it at the same estimate."""
    if result.estimate is None or result.low is None or result.high is None:
        return ""
    excess = result.estimate - limit.bound if limit.from_above else limit.bound - result.estimate
    towards_limit = (excess > 0) != limit.from_above
    end = result.high - result.estimate if towards_limit else result.estimate - result.low
    level = scipy.special.ndtri((1 + CONFIDENCE) / 2)
    if excess > 0:
        end *= -scipy.special.ndtri(FAMILY_LEVEL / count) / level
    if not 0 < end < _FAR**0.5 * abs(excess):
        return "no practicable number of rows decides an estimate so near to the limit"
    needed = result.n * (end / excess) ** 2
    digits = max(0, math.floor(math.log10(max(needed, 1))) - 1)
    rounded = math.ceil(needed / 10**digits) * 10**digits
    return f"about {max(rounded, result.n + 1)} rows of the slice would decide it"


def _rank_slice(limit: MetricLimit, result: SliceResult) -> tuple[int, float, str]:
    """Return the key that sorts slices, the worst first."""
    rank = 0 if result.verdict is None else -result.verdict.rank
    if result.estimate is None:
        return rank, math.inf, result.slice
    return rank, -result.estimate if limit.from_above else result.estimate, result.slice


def _summarize(
    comparison: _Comparison,
    results: Sequence[SliceResult],
    skipped: Sequence[SliceResult],
    fewest: int,
) -> GateResult:
    """Return the result of all slices together, with the values of the worst slice."""
    limit = comparison.limit
    blank = GateResult(
        gate="slices",
        metric=comparison.metric,
        limit=_describe_limit(limit),
        verdict=combine_verdicts(r.verdict for r in results if r.verdict is not None),
        reason=_explain(comparison, results, skipped, fewest),
        unit=limit.unit,
        bound=limit.bound,
        slices=(*results, *skipped),
    )
    if not results:
        return blank
    worst = results[0]
    return replace(
        blank,
        estimate=worst.estimate,
        low=worst.low,
        high=worst.high,
        n=worst.n,
        groups=worst.groups,
    )


def _explain(
    comparison: _Comparison,
    results: Sequence[SliceResult],
    skipped: Sequence[SliceResult],
    fewest: int,
) -> str:
    """Return the reason: the number of slices by verdict, and the worst slices."""
    if not results:
        enough = f"{fewest} rows, and at least {FEWEST_SLICE_ROWS} groups if the rows have groups"
        largest = f" (the largest slice has {skipped[0].n} rows)" if skipped else ""
        return f"no slice has {enough}{largest}: score more rows, or choose larger slices"
    numbers: Mapping[Verdict, int] = {
        verdict: sum(r.verdict is verdict for r in results) for verdict in Verdict
    }
    against = f" against {name_baseline(comparison.against)}" if comparison.against else ""
    words = {
        Verdict.FAIL: "beyond the limit",
        Verdict.ERROR: "not measured",
        Verdict.INCONCLUSIVE: "undecided",
        Verdict.PASS: "within the limit",
    }
    counts = ", ".join(f"{numbers[v]} {text}" for v, text in words.items() if numbers[v])
    parts = [f"{comparison.name} in {_count(len(results), 'slice')}{against}: {counts}"]
    worst = results[0].verdict
    shown = [r for r in results if r.verdict is worst][: 1 if worst is Verdict.PASS else _NAMED]
    parts += [_describe_slice(comparison.limit, r) for r in shown]
    if skipped:
        parts.append(
            f"{_count(len(skipped), 'slice')} not judged because of too few rows or groups"
        )
    return "; ".join(parts)


def _describe_slice(limit: MetricLimit, result: SliceResult) -> str:
    if result.estimate is None or result.low is None or result.high is None:
        return f"{result.slice}: {result.reason}"
    ends = f"[{limit.format(result.low)}, {limit.format(result.high)}]"
    text = f"{result.slice} {limit.format(result.estimate)} {ends}, n = {result.n}"
    if result.verdict is Verdict.INCONCLUSIVE:
        return f"{text} ({result.reason.rpartition('; ')[2]})"
    return text
