"""A release beside the champion, and beside its base branch, metric by metric."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from onnx_ops.domain.decision import Decision
from onnx_ops.domain.evidence import Evidence, Interval, LatencyComparison, PairedCounts, PairedRatios, ScoreComparison
from onnx_ops.domain.pipeline import EXPORT
from onnx_ops.domain.release import BaseRelease, Choice
from onnx_ops.reporting.formatting import NOTHING, format_figure, format_interval, number, scale_for
from onnx_ops.reporting.metrics import Measured, champion_values, median_latency, task_values, unit_of
from onnx_ops.reporting.plots import measured_ratio, name_of
from onnx_ops.statistics.intervals import change_interval

CHAMPION = "champion"
_THE_CHAMPION = "the champion"
PAIRED = "Changes of task metrics are of the same rows, paired. Ratios are of runs in turns on one machine."
APART = (
    "Measured at different times, so a change has an interval only where it is of the same rows, paired. Where it has "
    "none, and the two intervals overlap, noise may explain it."
)
Pairs = Callable[[Evidence, Evidence], Sequence[PairedCounts | ScoreComparison]]
"""What the answers of two runs to the same rows say of each other, metric by metric."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedMetric:
    """One line: a metric of the release, of what it is compared with, and the change. Texts carry their units."""

    metric: str
    ours: str
    theirs: str
    change: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelComparison:
    """A variant of the release beside one other model on one target.

    `against` is "the champion", or the name of the base branch. `note` says what the lines rest on, or why there are
    none.
    """

    against: str
    target: str
    ours: str
    theirs: str
    rows: tuple[ComparedMetric, ...] = ()
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class VariantLine:
    """The absolute figures of one variant on one target, as texts with their units."""

    variant: str
    target: str
    verdict: str
    metrics: tuple[tuple[str, str], ...]
    latency: str
    size: str


def variant_lines(decisions: Sequence[Decision], evidence: Sequence[Evidence]) -> tuple[VariantLine, ...]:
    """Return the absolute metrics of every variant in the order of the decisions, then those of each champion."""
    known = {(one.variant, one.target): one for one in evidence}
    found = []
    for decision in decisions:
        one = known.get((decision.variant, decision.target))
        middle = None if one is None else median_latency(one.latency)
        found.append(
            VariantLine(
                variant=decision.variant,
                target=decision.target,
                verdict=decision.verdict.value,
                metrics=() if one is None else _named(task_values(one)),
                latency=_value(middle),
                size=_bytes(one.size_bytes if one is not None else 0),
            )
        )
    for target, one in sorted({e.target: e for e in reversed(evidence) if e.baseline == CHAMPION}.items()):
        size = one.champion.size_bytes if one.champion is not None else 0
        version = f" (version {one.champion.version})" if one.champion is not None else ""
        found.append(
            VariantLine(
                variant=f"{CHAMPION}{version}",
                target=target,
                verdict="serves now",
                metrics=_named(champion_values(one)),
                latency=NOTHING,
                size=_bytes(size),
            )
        )
    return tuple(found)


def figures_of(evidence: Evidence) -> str:
    """Return the absolute figures of a variant and how they differ from the champion's, in one sentence."""
    middle = median_latency(evidence.latency)
    told = [f"{label} {text}" for label, text in _named(task_values(evidence))]
    told += [f"median latency {_value(middle)}"] if middle else []
    told += [f"size {_bytes(evidence.size_bytes)}"] if evidence.size_bytes > 0 else []
    beside = _beside_champion(evidence)
    changes = ", ".join(f"{row.metric} {row.change}" for row in beside.rows)
    against = f". Against {beside.theirs}: {changes}" if changes else ""
    return f"{evidence.target}: {', '.join(told)}{against}"


def _named(values: Mapping[str, Measured]) -> tuple[tuple[str, str], ...]:
    return tuple((label, _value(value)) for label, value in values.items())


def _bytes(size: int) -> str:
    return format_figure(float(size), "B") if size > 0 else "not measured"


def champion_comparisons(choices: Sequence[Choice], evidence: Sequence[Evidence]) -> tuple[ModelComparison, ...]:
    """Compare the chosen variant of each target, or the export if none is chosen, with the champion."""
    chosen = (_of_choice(choice, evidence) for choice in choices)
    return tuple(_beside_champion(mine) for mine in chosen if mine is not None)


def base_comparisons(
    choices: Sequence[Choice], evidence: Sequence[Evidence], base: BaseRelease, pairs: Pairs = lambda *_: ()
) -> tuple[ModelComparison, ...]:
    """Compare the chosen variant of each target with the choice of the base branch."""
    if base.why:
        return (_comparison((base.branch, "", "", ""), (), base.why),)
    found = []
    for choice in choices:
        mine = _of_choice(choice, evidence)
        before = next((one for one in base.choices if one.target == choice.target), None)
        theirs = None if before is None else _of_choice(before, base.evidence)
        if mine is None:
            continue
        name = f"{base.branch} at {base.commit[:12]}"
        if theirs is None:
            why = f"Nothing is recorded on {choice.target} for {name}."
            found.append(_comparison((base.branch, choice.target, mine.variant, name), (), why))
        else:
            found.append(_beside_base(base.branch, mine, theirs, f"{theirs.variant} of {name}", pairs))
    return tuple(found)


def _of_choice(choice: Choice, evidence: Sequence[Evidence]) -> Evidence | None:
    here = {one.variant: one for one in evidence if one.target == choice.target}
    return here.get(choice.variant or EXPORT)


def _beside_champion(mine: Evidence) -> ModelComparison:
    facts = mine.champion
    version = "" if facts is None else f" (version {facts.version})"
    theirs = f"{_THE_CHAMPION}{version}"
    rows: tuple[ComparedMetric, ...] = ()
    if facts is not None and facts.manifest == mine.manifest:
        note = f"{mine.target}: {mine.variant} has the same files as {theirs}."
    elif rows := tuple(_champion_rows(mine)):
        note = PAIRED
    else:
        note = f"The registry knew no champion of {mine.target} when this release was measured."
    about = (_THE_CHAMPION, mine.target, mine.variant, theirs)
    return _comparison(about, rows, note)


def _champion_rows(mine: Evidence) -> Iterator[ComparedMetric]:
    ours, theirs = task_values(mine), champion_values(mine)
    entries: list[PairedCounts | ScoreComparison] = [*mine.metrics, *mine.scores]
    for entry in entries:
        change = _change(entry) if entry.against == CHAMPION else ""
        if change:
            yield ComparedMetric(
                metric=entry.metric,
                ours=_value(ours.get(entry.metric)),
                theirs=_value(theirs.get(entry.metric)),
                change=change,
            )
    comparisons: list[LatencyComparison | PairedRatios] = [*mine.comparisons, *mine.ratios]
    for comparison in comparisons:
        ratio = measured_ratio(comparison) if comparison.against == CHAMPION else None
        if ratio is not None:
            latency = isinstance(comparison, LatencyComparison)
            middle = median_latency(mine.latency) if latency else None
            interval = format_interval(ratio.low, ratio.high, "x", near=ratio.estimate)
            yield ComparedMetric(
                metric="median latency" if latency else name_of(comparison),
                ours=_value(middle) if middle else NOTHING,
                theirs=NOTHING,
                change=f"{format_figure(ratio.estimate, 'x')} {interval}",
            )
    if mine.champion is not None:
        yield from _sizes(mine.size_bytes, mine.champion.size_bytes)


def _beside_base(branch: str, mine: Evidence, theirs: Evidence, name: str, pairs: Pairs) -> ModelComparison:
    about = (branch, mine.target, mine.variant, name)
    if mine.manifest == theirs.manifest:
        return _comparison(about, (), f"{mine.target}: {mine.variant} has the same files as {name}.")
    if mine.champion is not None and mine.champion.manifest == theirs.manifest:
        same = f"{mine.target}: {name} is the champion (version {mine.champion.version}), which is compared above."
        return _comparison(about, (), same)
    ours, before = task_values(mine), task_values(theirs)
    changes = {entry.metric: _change(entry) for entry in pairs(mine, theirs)}
    rows = [
        ComparedMetric(
            metric=label,
            ours=_value(ours.get(label)),
            theirs=_value(before.get(label)),
            change=changes.get(label)
            or (_apart(ours[label], before[label]) if label in ours and label in before else NOTHING),
        )
        for label in dict.fromkeys((*ours, *before))
    ]
    fast, slow = median_latency(mine.latency), median_latency(theirs.latency)
    if fast is not None and slow is not None and slow.estimate > 0:
        ratio = format_figure(fast.estimate / slow.estimate, "x")
        rows.append(ComparedMetric(metric="median latency", ours=_value(fast), theirs=_value(slow), change=ratio))
    rows += _sizes(mine.size_bytes, theirs.size_bytes)
    other = theirs.hardware.cpu_model
    note = APART if other == mine.hardware.cpu_model else f"{APART} The base was measured on another machine: {other}."
    return _comparison(about, tuple(rows), note)


def _comparison(about: tuple[str, str, str, str], rows: tuple[ComparedMetric, ...], note: str) -> ModelComparison:
    against, target, ours, theirs = about
    return ModelComparison(against=against, target=target, ours=ours, theirs=theirs, rows=rows, note=note)


def _sizes(mine: int, theirs: int) -> list[ComparedMetric]:
    if mine <= 0 or theirs <= 0:
        return []
    ours, before = (format_figure(float(size), "B") for size in (mine, theirs))
    return [ComparedMetric(metric="size", ours=ours, theirs=before, change=format_figure(mine / theirs, "x"))]


def _value(found: Measured | None) -> str:
    if found is None:
        return "not measured"
    interval = format_interval(found.low, found.high, found.unit, near=found.estimate)
    return f"{format_figure(found.estimate, found.unit)} {interval}".strip()


def _change(entry: PairedCounts | ScoreComparison) -> str:
    """Return the paired change of a task metric; empty where none could be measured."""
    if isinstance(entry, PairedCounts):
        parts = (entry.both, entry.only_baseline, entry.only_candidate)
        sound = entry.n > 0 and min(parts) >= 0 and sum(parts) <= entry.n
        return _difference(change_interval(entry), "1") if sound else ""
    if entry.ratio is not None:
        interval = format_interval(entry.ratio.low, entry.ratio.high, "x", near=entry.ratio.estimate)
        return f"{format_figure(entry.ratio.estimate, 'x')} {interval}"
    return "" if entry.difference is None else _difference(entry.difference, unit_of(entry.metric))


def _difference(found: Interval, unit: str) -> str:
    """Format a change with its sign; of a share in percentage points."""
    scale = scale_for(found.estimate, unit)
    shown = [_signed(value / scale.divisor) for value in (found.estimate, found.low, found.high)]
    return f"{shown[0]} [{shown[1]}, {shown[2]}]{' points' if unit == '1' else scale.suffix}"


def _apart(ours: Measured, theirs: Measured) -> str:
    """Return the change between two measurements that share no rows, without an interval."""
    difference = ours.estimate - theirs.estimate
    if ours.unit == "1":
        return f"{_signed(100 * difference)} points"
    return format_figure(ours.estimate / theirs.estimate, "x") if theirs.estimate > 0 else _signed(difference)


def _signed(value: float) -> str:
    return f"+{number(value)}" if value > 0 and math.isfinite(value) else number(value)
