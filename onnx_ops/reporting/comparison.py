"""Compare a release with the champion and with its base branch, metric by metric."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from onnx_ops.domain.decision import Decision, Verdict
from onnx_ops.domain.evidence import (
    EXPORT,
    Evidence,
    Interval,
    LatencyComparison,
    PairedCounts,
    PairedRatios,
    ScoreComparison,
)
from onnx_ops.domain.release import BaseRelease, Choice
from onnx_ops.reporting.formatting import NOTHING, format_figure, format_interval, number, scale_for
from onnx_ops.reporting.metrics import (
    Measured,
    champion_values,
    median_latency,
    task_values,
    unit_of,
)
from onnx_ops.reporting.plots import measured_ratio, name_of
from onnx_ops.statistics.intervals import change_interval

CHAMPION = "champion"
PAIRED = (
    "Changes of task metrics compare answers to the same rows. Ratios come from alternating runs "
    "on one machine."
)
APART = (
    "The two models were measured at different times. A change has an interval only if both models "
    "scored the same rows. Without this interval, noise can explain the change if the intervals of "
    "the two values overlap."
)
Pairs = Callable[[Evidence, Evidence], Sequence[PairedCounts | ScoreComparison]]
"""Function that compares the answers of two runs to the same rows, by metric."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedMetric:
    """One metric of the release and of the other model, and its change, with units."""

    metric: str
    ours: str
    theirs: str
    change: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelComparison:
    """A variant of the release, compared with one other model on one target.

    `against` is "the champion", or the name of the base branch. `note` states how the metrics were
    compared, or why there is no comparison.
    """

    against: str
    target: str
    ours: str
    theirs: str
    rows: tuple[ComparedMetric, ...] = ()
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class VariantRow:
    """The measurements of one variant on one target.

    `latency` is the median latency. If a variant was timed in alternation with another variant, it
    is the median of the other variant times the paired ratio. Two medians from different times
    could contradict the ratio. `ratios` has the names of other models with the latency ratio to
    each. The champion has a separate row, with its version and without a verdict. Without evidence,
    `size_bytes` is None.
    """

    variant: str
    target: str
    verdict: Verdict | None
    version: str = ""
    metrics: Mapping[str, Measured] = field(default_factory=dict)
    size_bytes: int | None = None
    latency: Measured | None = None
    ratios: tuple[tuple[str, Measured], ...] = ()


def variant_rows(
    decisions: Sequence[Decision], evidence: Sequence[Evidence]
) -> tuple[VariantRow, ...]:
    """Return rows for every variant, then for each target's champion on the same data.

    Variants are in the order of the decisions.
    """
    known = {(one.variant, one.target): one for one in evidence}
    rows = []
    for decision in decisions:
        row = VariantRow(variant=decision.variant, target=decision.target, verdict=decision.verdict)
        if (one := known.get((decision.variant, decision.target))) is not None:
            row = replace(
                row,
                metrics=task_values(one),
                size_bytes=one.size_bytes,
                latency=median_latency(one.latency),
                ratios=tuple(
                    (c.against, ratio)
                    for c in one.comparisons
                    if (ratio := measured_ratio(c)) is not None
                ),
            )
        rows.append(row)
    rows = _pair_medians(rows)
    for target, one in sorted(
        {e.target: e for e in reversed(evidence) if e.baseline == CHAMPION}.items()
    ):
        row = VariantRow(
            variant=CHAMPION,
            target=target,
            verdict=None,
            metrics=champion_values(one),
            size_bytes=0,
        )
        if one.champion is not None:
            row = replace(row, version=one.champion.version, size_bytes=one.champion.size_bytes)
        rows.append(row)
    return tuple(rows)


def _pair_medians(rows: Sequence[VariantRow]) -> list[VariantRow]:
    """Return the rows with comparable medians.

    If a variant is timed beside another one, its median is derived from the median of that variant.
    """
    medians = {(row.variant, row.target): row.latency for row in rows}
    paired = []
    for row in rows:
        beside = ((medians.get((against, row.target)), ratio) for against, ratio in row.ratios)
        median, ratio = next(
            ((median, ratio) for median, ratio in beside if median is not None), (None, None)
        )
        if median is None or ratio is None:
            paired.append(row)
            continue
        latency = replace(
            median,
            estimate=median.estimate * ratio.estimate,
            low=median.estimate * ratio.low,
            high=median.estimate * ratio.high,
            n=ratio.n,
            of=ratio.of,
        )
        paired.append(replace(row, latency=latency))
    return paired


def summarize_metrics(evidence: Evidence) -> str:
    """Return a variant's measurements as a sentence.

    A second sentence has the differences from the champion, if they were measured.
    """
    labels = [f"{label} {value.figure}" for label, value in task_values(evidence).items()]
    if middle := median_latency(evidence.latency):
        labels.append(f"median latency {middle.figure}")
    if evidence.size_bytes > 0:
        labels.append(f"size {format_figure(evidence.size_bytes, 'B')}")
    beside = _beside_champion(evidence)
    changes = ", ".join(f"{row.metric} {row.change}" for row in beside.rows)
    against = f". Against {beside.theirs}: {changes}" if changes else ""
    return f"{evidence.target}: {', '.join(labels)}{against}"


def champion_comparisons(
    choices: Sequence[Choice], evidence: Sequence[Evidence]
) -> tuple[ModelComparison, ...]:
    """Return comparisons of each target's chosen variant with the champion.

    If no variant is chosen, the export is compared. Targets without evidence are left out.
    """
    chosen = (_of_choice(choice, evidence) for choice in choices)
    return tuple(_beside_champion(mine) for mine in chosen if mine is not None)


def base_comparisons(
    choices: Sequence[Choice],
    evidence: Sequence[Evidence],
    base: BaseRelease,
    pairs: Pairs = lambda *_: (),
) -> tuple[ModelComparison, ...]:
    """Return comparisons of each target's chosen variant with that of the base branch.

    If `base.why` is set, the only result has this reason as its note.
    """
    if base.why:
        return (ModelComparison(against=base.branch, target="", ours="", theirs="", note=base.why),)
    name = f"{base.branch} at {base.commit[:12]}"
    comparisons = []
    for choice in choices:
        mine = _of_choice(choice, evidence)
        before = next((one for one in base.choices if one.target == choice.target), None)
        theirs = None if before is None else _of_choice(before, base.evidence)
        if mine is None:
            continue
        blank = ModelComparison(
            against=base.branch, target=choice.target, ours=mine.variant, theirs=name
        )
        if theirs is None:
            comparisons.append(
                replace(blank, note=f"No evidence is recorded for {name} on {choice.target}.")
            )
        else:
            comparisons.append(
                _beside_base(
                    replace(blank, theirs=f"{theirs.variant} of {name}"), mine, theirs, pairs
                )
            )
    return tuple(comparisons)


def _of_choice(choice: Choice, evidence: Sequence[Evidence]) -> Evidence | None:
    here = {one.variant: one for one in evidence if one.target == choice.target}
    return here.get(choice.variant or EXPORT)


def _beside_champion(mine: Evidence) -> ModelComparison:
    facts = mine.champion
    theirs = "the champion" if facts is None else f"the champion (version {facts.version})"
    rows: list[ComparedMetric] = []
    if facts is not None and facts.manifest == mine.manifest:
        note = f"{mine.target}: {mine.variant} has the same files as {theirs}."
    else:
        rows = _compare_with_champion(mine)
        note = PAIRED if rows else f"{mine.target}: this release was measured without a champion."
    return ModelComparison(
        against="the champion",
        target=mine.target,
        ours=mine.variant,
        theirs=theirs,
        rows=tuple(rows),
        note=note,
    )


def _compare_with_champion(mine: Evidence) -> list[ComparedMetric]:
    ours, theirs = task_values(mine), champion_values(mine)
    entries: list[PairedCounts | ScoreComparison] = [*mine.metrics, *mine.scores]
    rows = [
        _make_row(entry.metric, ours.get(entry.metric), theirs.get(entry.metric), change)
        for entry in entries
        if entry.against == CHAMPION and (change := _change(entry))
    ]
    comparisons: list[LatencyComparison | PairedRatios] = [*mine.comparisons, *mine.ratios]
    rows += [
        _make_ratio_row(comparison, ratio, mine)
        for comparison in comparisons
        if comparison.against == CHAMPION and (ratio := measured_ratio(comparison)) is not None
    ]
    return rows + (
        _sizes(mine.size_bytes, mine.champion.size_bytes) if mine.champion is not None else []
    )


def _make_ratio_row(
    comparison: LatencyComparison | PairedRatios, ratio: Measured, mine: Evidence
) -> ComparedMetric:
    is_latency = isinstance(comparison, LatencyComparison)
    middle = median_latency(mine.latency) if is_latency else None
    return ComparedMetric(
        metric="median latency" if is_latency else name_of(comparison),
        ours=middle.figure if middle else NOTHING,
        theirs=NOTHING,
        change=ratio.figure,
    )


def _beside_base(
    blank: ModelComparison, mine: Evidence, theirs: Evidence, pairs: Pairs
) -> ModelComparison:
    if mine.manifest == theirs.manifest:
        return replace(
            blank, note=f"{mine.target}: {mine.variant} has the same files as {blank.theirs}."
        )
    if mine.champion is not None and mine.champion.manifest == theirs.manifest:
        champion = f"the champion (version {mine.champion.version})"
        return replace(
            blank, note=f"{mine.target}: {blank.theirs} is {champion}, which is compared above."
        )
    rows = _compare_task_metrics(mine, theirs, pairs)
    fast, slow = median_latency(mine.latency), median_latency(theirs.latency)
    if fast is not None and slow is not None and slow.estimate > 0:
        rows.append(
            _make_row(
                "median latency", fast, slow, format_figure(fast.estimate / slow.estimate, "x")
            )
        )
    rows += _sizes(mine.size_bytes, theirs.size_bytes)
    other = theirs.hardware.cpu_model
    note = (
        APART
        if other == mine.hardware.cpu_model
        else f"{APART} The base was measured on another machine: {other}."
    )
    return replace(blank, rows=tuple(rows), note=note)


def _compare_task_metrics(mine: Evidence, theirs: Evidence, pairs: Pairs) -> list[ComparedMetric]:
    ours, before = task_values(mine), task_values(theirs)
    changes = {entry.metric: _change(entry) for entry in pairs(mine, theirs)}
    rows = []
    for label in dict.fromkeys((*ours, *before)):
        change = changes.get(label, "")
        # The change has an interval only with a paired comparison.
        if not change and label in ours and label in before:
            change = _describe_difference(ours[label], before[label])
        rows.append(_make_row(label, ours.get(label), before.get(label), change or NOTHING))
    return rows


def _describe_difference(after: Measured, before: Measured) -> str:
    """Return the change of a metric as a text.

    A share changes in percentage points. Another metric changes by a ratio if the old value is
    positive, and otherwise by a difference.
    """
    difference = after.estimate - before.estimate
    if after.unit == "1":
        return f"{_signed(100 * difference)} points"
    if before.estimate > 0:
        return format_figure(after.estimate / before.estimate, "x")
    return _signed(difference)


def _make_row(
    metric: str, ours: Measured | None, theirs: Measured | None, change: str
) -> ComparedMetric:
    texts = ["not measured" if one is None else one.figure for one in (ours, theirs)]
    return ComparedMetric(metric=metric, ours=texts[0], theirs=texts[1], change=change)


def _sizes(mine: int, theirs: int) -> list[ComparedMetric]:
    if mine <= 0 or theirs <= 0:
        return []
    ours, before = (format_figure(size, "B") for size in (mine, theirs))
    return [
        ComparedMetric(
            metric="size", ours=ours, theirs=before, change=format_figure(mine / theirs, "x")
        )
    ]


def _change(entry: PairedCounts | ScoreComparison) -> str:
    """Return the paired change of a task metric; empty if it was not measured."""
    if isinstance(entry, PairedCounts):
        parts = (entry.both, entry.only_baseline, entry.only_candidate)
        sound = entry.n > 0 and min(parts) >= 0 and sum(parts) <= entry.n
        return _difference(change_interval(entry), "1") if sound else ""
    if entry.ratio is not None:
        interval = format_interval(
            entry.ratio.low, entry.ratio.high, "x", near=entry.ratio.estimate
        )
        return f"{format_figure(entry.ratio.estimate, 'x')} {interval}"
    return "" if entry.difference is None else _difference(entry.difference, unit_of(entry.metric))


def _difference(interval: Interval, unit: str) -> str:
    """Return a signed change with its interval; in percentage points for a share."""
    scale = scale_for(interval.estimate, unit)
    shown = [
        _signed(value / scale.divisor) for value in (interval.estimate, interval.low, interval.high)
    ]
    return f"{shown[0]} [{shown[1]}, {shown[2]}]{' points' if unit == '1' else scale.suffix}"


def _signed(value: float) -> str:
    return f"+{number(value)}" if value > 0 and math.isfinite(value) else number(value)
