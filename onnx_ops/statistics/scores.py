"""A task metric of several models on the same rows, with intervals that any limit can be held against later.

Intervals of mae, rmse and r2 are of ratios of losses (`loss_ratios`), those of the others of the paired bootstrap over
rows (`resampling`); where the data names groups, rows are groups. The bootstrap knows nothing of kinds of rows that it
has not seen, so the interval of a metric with a range is never narrower than what such rows could do: though none of n
rows went wrong, up to 3/n of all rows may (at 5 % error), each at the metric's largest step. A metric without a range
has no largest step: its interval is a point where two models answer every row alike, and is not given where only the
scores of the rows are alike.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from onnx_ops.domain.evidence import Interval, ScoreComparison
from onnx_ops.domain.gate import MetricDefinition
from onnx_ops.statistics.grouping import typical_size
from onnx_ops.statistics.intervals import (
    CONFIDENCE,
    RESAMPLES,
    UNSEEN_CHANGES,
    Replicates,
    bca_interval,
    find_heavy_rows,
    ratio_interval,
    replicate,
)
from onnx_ops.statistics.metrics import Array, CustomMetric, MetricStatistic, build_metric_statistic

_NAMED = 10
"""At most so many rows are named as those that carry an error."""

CANDIDATE = ""
"""Key of the candidate among the models; the others are named as in `ScoreComparison.against`."""

FEW_ROWS = 20
"""Below it, in rows or groups, an interval has no level to speak of."""

UNSEEN_ROWS = -math.log((1 - CONFIDENCE) / 2)
"""Rows of a kind of which none was seen that may be missing by chance: the upper 95 % bound of a Poisson count of 0."""


def score(
    definition: MetricDefinition,
    label: Array | None,
    answers: Mapping[str, Array],
    *,
    seed: int,
    function: CustomMetric | None = None,
    resamples: int = RESAMPLES,
    group: Array | None = None,
) -> tuple[ScoreComparison, ...]:
    """The candidate's own score, and one comparison with each other model. The order of rows has no influence.

    Args:
        definition: any metric but `accuracy` and `top_k`, which are counts of rows.
        label: one entry a row: class numbers for f1 (1 where positive and else 0 if it is binary), True where positive
            for auc, numbers for mae, rmse and r2, embeddings for cosine, tokens for token_agreement. None compares the
            candidate's embeddings or tokens with those of the other models.
        answers: by model, `CANDIDATE` among them: class numbers as those of the label, scores of the positive class,
            numbers, embeddings, tokens, or whatever an own metric takes.
        seed: of the resamples.
        function: the own metric.
        resamples: fewer make it faster and coarser.
        group: number of each row's group, where rows belong together.
    """
    if label is not None:
        return _score(definition, label, answers, seed, function, resamples, group)
    found = []
    for name, reference in answers.items():
        if name != CANDIDATE and not _numbers(reference):
            found.append(_senseless(definition, len(reference), name))
        elif name != CANDIDATE:
            pair = {CANDIDATE: answers[CANDIDATE], name: reference}
            entries = _score(definition, reference, pair, seed, function, resamples, group)
            found += [_at_most_equal(entry, name) for entry in entries if entry.against or not entry.candidate]
    return tuple(found)


def _at_most_equal(entry: ScoreComparison, reference: str) -> ScoreComparison:
    """No candidate is closer to the reference than the reference itself."""
    lost = entry.difference
    difference = None if lost is None else replace(lost, high=min(lost.high, 0.0))
    return replace(entry, against=reference, difference=difference)


def make_unscored(
    definition: MetricDefinition,
    n: int = 0,
    *,
    against: str = CANDIDATE,
    undefined: str = "",
    failed: str = "",
    broken: str = "",
) -> ScoreComparison:
    """An entry without a figure, and why."""
    return ScoreComparison(
        metric=definition.label, against=against, n=n, undefined=undefined, failed=failed, broken=broken
    )


def _score(
    definition: MetricDefinition,
    label: Array,
    answers: Mapping[str, Array],
    seed: int,
    function: CustomMetric | None,
    resamples: int,
    group: Array | None,
) -> tuple[ScoreComparison, ...]:
    order = _order(label, answers)
    if definition.name == "token_agreement":
        order = order[(label != definition.ignore).any(axis=1)[order]]
    label, answers = label[order], {name: array[order] for name, array in answers.items()}
    groups = None if group is None else np.unique(group[order], return_inverse=True)[1].astype(np.int64)
    if problem := _problem(definition, label, answers[CANDIDATE], function, groups):
        return (problem,)
    sound = {name: array for name, array in answers.items() if _numbers(array)}
    units = np.arange(len(label)) if groups is None else groups
    if definition.name in ("mae", "rmse", "r2"):
        entries = _losses(definition, label, sound, units)
        entries = {n: replace(e, heavy=tuple(int(order[row]) for row in e.heavy)) for n, e in entries.items()}
    else:
        entries = _bootstrapped(definition, label, sound, function, units, seed, resamples)
    if groups is not None:
        entries = {name: replace(entry, groups=int(units.max()) + 1) for name, entry in entries.items()}
    mine = entries[CANDIDATE]
    if mine.candidate is None:
        return (mine,)
    others = [name for name in answers if name != CANDIDATE]
    return (mine, *(entries[name] if name in sound else _senseless(definition, mine.n, name) for name in others))


def _bootstrapped(
    definition: MetricDefinition,
    label: Array,
    answers: Mapping[str, Array],
    function: CustomMetric | None,
    units: Array,
    seed: int,
    resamples: int,
) -> dict[str, ScoreComparison]:
    size = typical_size(units)
    sides = {name: build_metric_statistic(definition, label, array, function) for name, array in answers.items()}
    sides = {name: replace(one, step=one.step and size * one.step) for name, one in sides.items()}
    replicates = replicate({name: one.statistic for name, one in sides.items()}, units, seed, resamples)
    mine = _alone(definition, sides[CANDIDATE], replicates[CANDIDATE])
    if mine.candidate is None:
        return {CANDIDATE: mine}
    return {CANDIDATE: mine} | {
        name: _against(
            definition, mine, name, (sides[CANDIDATE], sides[name]), (replicates[CANDIDATE], replicates[name])
        )
        for name in answers
        if name != CANDIDATE
    }


def _losses(
    definition: MetricDefinition, label: Array, answers: Mapping[str, Array], units: Array
) -> dict[str, ScoreComparison]:
    """Of means of a loss a row: mae, rmse, and r2, where the loss is divided by the label's variance."""
    losses = {
        n: np.abs(label - said) if definition.name == "mae" else np.square(label - said) for n, said in answers.items()
    }
    sums: dict[str, Array] = {name: np.bincount(units, weights=loss) for name, loss in losses.items()}
    share = np.bincount(units, weights=np.square(label - label.mean()) if definition.name == "r2" else None).astype(
        float
    )
    mine = sums[CANDIDATE]
    if share.sum() <= 1e-12 * np.square(label).sum() and definition.name == "r2":
        return {
            CANDIDATE: make_unscored(
                definition, len(label), undefined="r2 is not defined on these rows: the labels are constant"
            )
        }
    if not np.ptp(losses[CANDIDATE]) > 1e-12 * losses[CANDIDATE].max():
        why = "every row scores the same: no spread to estimate an interval from"
        return {CANDIDATE: make_unscored(definition, len(label), undefined=why)}

    def value(name: str) -> Interval:
        alone = ratio_interval(sums[name], share, UNSEEN_ROWS)
        return _mirrored(alone) if definition.name == "r2" else _rooted(definition, alone)

    entry = ScoreComparison(
        metric=definition.label,
        against=CANDIDATE,
        n=len(label),
        candidate=value(CANDIDATE),
        confidence=CONFIDENCE,
        method="Student's t of the losses, with rows of the worst kind seen that may be missing",
        effective=find_heavy_rows(mine)[0],
        heavy=find_heavy_rows(losses[CANDIDATE])[1][:_NAMED],
    )
    return {CANDIDATE: entry} | {
        name: _loss_change(
            definition,
            replace(entry, against=name, reference=value(name)),
            (answers[CANDIDATE], answers[name]),
            (mine, sums[name]),
            share,
        )
        for name in answers
        if name != CANDIDATE
    }


def _loss_change(
    definition: MetricDefinition,
    entry: ScoreComparison,
    answers: tuple[Array, Array],
    sums: tuple[Array, Array],
    share: Array,
) -> ScoreComparison:
    """What the losses of two models say of each other. Without a range there is no largest step: models that answer
    alike have a point."""
    mine, theirs = sums
    equal = np.array_equal(*answers)
    total = float(theirs.sum() / share.sum())
    if definition.name == "r2":
        if not equal and np.allclose(mine, theirs, rtol=1e-9, atol=0):
            return _no_change(definition, entry)
        none = Interval(estimate=0.0, low=0.0, high=0.0)
        change = none if equal else ratio_interval(theirs - mine, share, UNSEEN_CHANGES)
        return replace(entry, baseline=1 - total, difference=change)
    if total <= 0 or (not equal and np.allclose(mine, theirs, rtol=1e-9, atol=0)):
        return _no_change(definition, entry)
    one = Interval(estimate=1.0, low=1.0, high=1.0)
    ratio = one if equal else _rooted(definition, ratio_interval(mine, theirs, UNSEEN_CHANGES))
    return replace(
        entry, baseline=_rooted(definition, Interval(estimate=total, low=total, high=total)).estimate, ratio=ratio
    )


def _no_change(definition: MetricDefinition, entry: ScoreComparison) -> ScoreComparison:
    name = entry.against
    why = f"no row scores otherwise than with {name}, or {name} is without error: no interval for the change"
    return make_unscored(definition, entry.n, against=name, undefined=why)


def _rooted(definition: MetricDefinition, found: Interval) -> Interval:
    """In the metric's own terms: rmse is the root of the mean loss."""
    ends = (max(value, 0.0) for value in (found.estimate, found.low, found.high))
    estimate, low, high = map(math.sqrt, ends) if definition.name == "rmse" else ends
    return Interval(estimate=estimate, low=low, high=high)


def _mirrored(found: Interval) -> Interval:
    return Interval(estimate=1 - found.estimate, low=1 - found.high, high=min(1.0, 1 - found.low))


def _senseless(definition: MetricDefinition, n: int, name: str) -> ScoreComparison:
    return make_unscored(definition, n, against=name, undefined=f"{name} answers with NaN or infinity")


def _order(label: Array, answers: Mapping[str, Array]) -> Array:
    """An order of the rows that depends on what they hold and not on how they came."""
    columns = [np.ascontiguousarray(array) for array in (label, *answers.values())]
    keys = [b"".join(column[row].tobytes() for column in columns) for row in range(len(label))]
    return np.array(sorted(range(len(keys)), key=keys.__getitem__), dtype=np.intp)


def _problem(
    definition: MetricDefinition, label: Array, candidate: Array, function: CustomMetric | None, groups: Array | None
) -> ScoreComparison | None:
    """Why the candidate cannot be scored at all."""
    n = len(label)
    if not _numbers(candidate):
        odd = int((~np.isfinite(candidate.reshape(n, -1))).any(axis=1).sum())
        return make_unscored(definition, n, broken=f"the model answers with NaN or infinity on {odd} of {n} rows")
    if not _numbers(label):
        return make_unscored(definition, n, failed="the labels hold NaN or infinity")
    if n < FEW_ROWS:
        return make_unscored(definition, n, undefined=f"{n} rows are too few for an interval, which needs {FEW_ROWS}")
    if groups is not None and (count := int(groups.max()) + 1) < FEW_ROWS:
        return make_unscored(
            definition, n, undefined=f"{count} groups are too few for an interval, which needs {FEW_ROWS}"
        )
    if function is None:
        return None
    try:
        value = float(function(candidate, label))
    except Exception as error:  # a person's own code may raise anything
        return make_unscored(definition, n, failed=f"{definition.use} raised {type(error).__name__}: {error}")
    return None if np.isfinite(value) else make_unscored(definition, n, failed=f"{definition.use} gave {value}")


def _numbers(array: Array) -> bool:
    return array.dtype.kind not in "fc" or bool(np.isfinite(array).all())


def _alone(definition: MetricDefinition, one: MetricStatistic, replicates: Replicates) -> ScoreComparison:
    n = len(one.reads)
    found = bca_interval(replicates)
    if found is None:
        why = f"{definition.label} is not defined on these rows, or not on enough of their resamples"
        return make_unscored(definition, n, undefined=why)
    if not replicates.spread and one.step is None:
        return make_unscored(
            definition, n, undefined="every row scores the same: no spread to estimate an interval from"
        )
    found = _widened(found, one.step)
    if one.step is not None:
        found = replace(found, high=min(found.high, 1.0))
    method = f"bootstrap over rows (BCa, {replicates.resampled.size} resamples)"
    return ScoreComparison(
        metric=definition.label, against=CANDIDATE, n=n, candidate=found, confidence=CONFIDENCE, method=method
    )


def _against(
    definition: MetricDefinition,
    mine: ScoreComparison,
    name: str,
    pair: tuple[MetricStatistic, MetricStatistic],
    replicates: tuple[Replicates, Replicates],
) -> ScoreComparison:
    better = definition.higher_is_better
    difference = None if better is False else _difference(pair, replicates)
    ratio = None if better is True else _ratio(pair, replicates)
    if difference is None and ratio is None:
        return _no_change(definition, replace(mine, against=name))
    theirs = _alone(definition, pair[1], replicates[1]).candidate
    return replace(
        mine, against=name, baseline=replicates[1].observed, reference=theirs, difference=difference, ratio=ratio
    )


def _difference(
    pair: tuple[MetricStatistic, MetricStatistic], replicates: tuple[Replicates, Replicates]
) -> Interval | None:
    """Candidate minus baseline."""
    mine, theirs = pair
    between = replicates[0].minus(replicates[1])
    steps = [one.step for one in pair if one.step is not None]
    if steps:
        found = bca_interval(between)
        return None if found is None else _widened(found, max(steps))
    if np.array_equal(mine.reads, theirs.reads):
        return Interval(estimate=0.0, low=0.0, high=0.0)
    return bca_interval(between) if between.spread else None


def _ratio(pair: tuple[MetricStatistic, MetricStatistic], replicates: tuple[Replicates, Replicates]) -> Interval | None:
    """Candidate over baseline."""
    if replicates[1].observed <= 0:
        return None
    if np.array_equal(pair[0].reads, pair[1].reads):
        return Interval(estimate=1.0, low=1.0, high=1.0)
    between = replicates[0].over(replicates[1])
    return bca_interval(between) if between.spread else None


def _widened(interval: Interval, step: float | None) -> Interval:
    """Room for what rows that were not seen may do."""
    if step is None:
        return interval
    room = UNSEEN_ROWS * step
    return replace(
        interval, low=min(interval.low, interval.estimate - room), high=max(interval.high, interval.estimate + room)
    )
