"""Scores of several models by one task metric, with intervals.

The intervals of mae, rmse and r2 are of ratios of losses, those of other metrics come from the paired bootstrap over
rows; where the data names groups, groups take the place of rows. The bootstrap cannot represent kinds of rows that are
not in the sample. So the interval of a metric with a range is never narrower than what such rows could do: even if none
of n rows is wrong, up to 3/n of all rows can be (at 5 % error), each at the metric's largest step. A metric without a
range has no largest step: its interval is a point where two models answer every row alike, and is omitted where only
the scores of the rows are equal.
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
"""Maximum number of rows that are named as those that carry an error."""

CANDIDATE = ""
"""Key of the candidate among the models; other keys are those of `ScoreComparison.against`."""

_NO_SPREAD = "every row has the same score: an interval cannot be estimated"

FEW_ROWS = 20
"""Rows or groups below which an interval has no meaningful level."""

UNSEEN_ROWS = -math.log((1 - CONFIDENCE) / 2)
"""Unseen rows that may be missing by chance: the upper 95 % bound of a Poisson count of 0."""

_UNSEEN_LOSSES = 4
"""Same as `UNSEEN_ROWS`, for the mean loss of one model: rows worse than any that was seen may be missing. Chosen by
simulation."""


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
    """Score the candidate, and compare it with each other model.

    The order of rows has no influence.

    Args:
        definition: any metric but `accuracy` and `top_k`, which are counts of rows.
        label: one entry per row: class numbers for f1 (1 for positive and else 0 if it is binary), True for positive
            rows for auc, numbers for mae, rmse and r2, embeddings for cosine, tokens for token_agreement. None compares
            the candidate's embeddings or tokens with those of the other models.
        answers: by model, with `CANDIDATE`: class numbers as in the label, scores of the positive class, numbers,
            embeddings, tokens, or what a custom metric takes.
        group: number of each row's group, if rows belong together.
    """
    if label is None:
        comparisons = []
        for name, reference in answers.items():
            if name == CANDIDATE:
                continue
            if not _is_finite(reference):
                comparisons.append(_make_non_finite(definition, len(reference), name))
                continue
            pair = {CANDIDATE: answers[CANDIDATE], name: reference}
            for entry in score(definition, reference, pair, seed=seed, resamples=resamples, group=group):
                # No candidate is closer to the reference than the reference itself: a gain is capped at 0.
                lost = entry.difference
                if entry.against or not entry.candidate:
                    capped = None if lost is None else replace(lost, high=min(lost.high, 0.0))
                    comparisons.append(replace(entry, against=name, difference=capped))
        return tuple(comparisons)
    columns = [np.ascontiguousarray(array) for array in (label, *answers.values())]
    keys = [b"".join(column[row].tobytes() for column in columns) for row in range(len(label))]
    order = np.array(sorted(range(len(keys)), key=keys.__getitem__), dtype=np.intp)
    if definition.name == "token_agreement":
        order = order[(label != definition.ignore).any(axis=1)[order]]
    label, answers = label[order], {name: array[order] for name, array in answers.items()}
    groups = None if group is None else np.unique(group[order], return_inverse=True)[1].astype(np.int64)
    if problem := _find_problem(definition, label, answers[CANDIDATE], function, groups):
        return (problem,)
    sound = {name: array for name, array in answers.items() if _is_finite(array)}
    units = np.arange(len(label)) if groups is None else groups
    if definition.name in ("mae", "rmse", "r2"):
        entries = _compare_losses(definition, label, sound, units)
        entries = {n: replace(e, heavy=tuple(int(order[row]) for row in e.heavy)) for n, e in entries.items()}
    else:
        entries = _compare_by_bootstrap(definition, label, sound, function, units, seed, resamples)
    if groups is not None:
        entries = {name: replace(entry, groups=int(units.max()) + 1) for name, entry in entries.items()}
    mine = entries[CANDIDATE]
    if mine.candidate is None:
        return (mine,)
    others = [name for name in answers if name != CANDIDATE]
    return (mine, *(entries[name] if name in sound else _make_non_finite(definition, mine.n, name) for name in others))


def make_unscored(
    definition: MetricDefinition,
    n: int = 0,
    *,
    against: str = CANDIDATE,
    undefined: str = "",
    failed: str = "",
    broken: str = "",
) -> ScoreComparison:
    """Return an entry without a score, and the reason."""
    return ScoreComparison(
        metric=definition.label, against=against, n=n, undefined=undefined, failed=failed, broken=broken
    )


def _compare_by_bootstrap(
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
    mine = _score_alone(definition, sides[CANDIDATE], replicates[CANDIDATE])
    if mine.candidate is None:
        return {CANDIDATE: mine}
    entries, own, better = {CANDIDATE: mine}, replicates[CANDIDATE], definition.higher_is_better
    for name in (name for name in answers if name != CANDIDATE):
        other, equal = replicates[name], np.array_equal(sides[CANDIDATE].reads, sides[name].reads)
        steps = [one.step for one in (sides[CANDIDATE], sides[name]) if one.step is not None]
        difference = ratio = None
        if better is not False:
            difference = _estimate(own - other, 0.0, equal=equal and not steps, step=max(steps, default=None))
        if better is not True and other.observed > 0:
            ratio = _estimate(own / other, 1.0, equal=equal)
        if difference is None and ratio is None:
            entries[name] = _make_undefined(definition, replace(mine, against=name))
            continue
        entries[name] = replace(
            mine,
            against=name,
            baseline=other.observed,
            reference=_score_alone(definition, sides[name], other).candidate,
            difference=difference,
            ratio=ratio,
        )
    return entries


def _compare_losses(
    definition: MetricDefinition, label: Array, answers: Mapping[str, Array], units: Array
) -> dict[str, ScoreComparison]:
    """Compare the means of a loss per row: mae, rmse, and r2, whose loss is divided by the label's variance."""
    losses = {
        n: np.abs(label - predictions) if definition.name == "mae" else np.square(label - predictions)
        for n, predictions in answers.items()
    }
    sums: dict[str, Array] = {name: np.bincount(units, weights=loss) for name, loss in losses.items()}
    share = np.bincount(units, weights=np.square(label - label.mean()) if definition.name == "r2" else None).astype(
        float
    )
    mine = sums[CANDIDATE]
    if share.sum() <= 1e-12 * np.square(label).sum() and definition.name == "r2":
        why = "r2 is not defined on these rows: the labels are constant"
        return {CANDIDATE: make_unscored(definition, len(label), undefined=why)}
    if not np.ptp(losses[CANDIDATE]) > 1e-12 * losses[CANDIDATE].max():
        return {CANDIDATE: make_unscored(definition, len(label), undefined=_NO_SPREAD)}

    def value(name: str) -> Interval:
        alone = ratio_interval(sums[name], share, _UNSEEN_LOSSES)
        if definition.name != "r2":
            return _to_metric(definition, alone)
        return Interval(estimate=1 - alone.estimate, low=1 - alone.high, high=min(1.0, 1 - alone.low))

    entry = ScoreComparison(
        metric=definition.label,
        against=CANDIDATE,
        n=len(label),
        candidate=value(CANDIDATE),
        confidence=CONFIDENCE,
        method="Student's t of the losses, with allowance for missing rows of the worst observed kind",
        effective=find_heavy_rows(mine)[0],
        heavy=find_heavy_rows(losses[CANDIDATE])[1][:_NAMED],
    )
    return {CANDIDATE: entry} | {
        name: _compare_two_losses(
            definition,
            replace(entry, against=name, reference=value(name)),
            (answers[CANDIDATE], answers[name]),
            (mine, sums[name]),
            share,
        )
        for name in answers
        if name != CANDIDATE
    }


def _compare_two_losses(
    definition: MetricDefinition,
    entry: ScoreComparison,
    answers: tuple[Array, Array],
    sums: tuple[Array, Array],
    share: Array,
) -> ScoreComparison:
    """Compare the losses of two models. Equal answers give a point: a metric without a range has no step."""
    mine, theirs = sums
    equal = np.array_equal(*answers)
    total = float(theirs.sum() / share.sum())
    if definition.name == "r2":
        if not equal and np.allclose(mine, theirs, rtol=1e-9, atol=0):
            return _make_undefined(definition, entry)
        change = Interval.point(0.0) if equal else ratio_interval(theirs - mine, share, UNSEEN_CHANGES)
        return replace(entry, baseline=1 - total, difference=change)
    if total <= 0 or (not equal and np.allclose(mine, theirs, rtol=1e-9, atol=0)):
        return _make_undefined(definition, entry)
    ratio = Interval.point(1.0)
    if not equal:
        ratio = _to_metric(definition, ratio_interval(mine, theirs, UNSEEN_CHANGES))
    return replace(entry, baseline=_to_metric(definition, Interval.point(total)).estimate, ratio=ratio)


def _make_undefined(definition: MetricDefinition, entry: ScoreComparison) -> ScoreComparison:
    name = entry.against
    why = f"every row scores as with {name}, or {name} has no error: no interval for the change"
    return make_unscored(definition, entry.n, against=name, undefined=why)


def _to_metric(definition: MetricDefinition, interval: Interval) -> Interval:
    """Convert the interval of a mean loss to the metric: rmse is the root of the mean loss."""
    ends = (max(value, 0.0) for value in (interval.estimate, interval.low, interval.high))
    estimate, low, high = map(math.sqrt, ends) if definition.name == "rmse" else ends
    return Interval(estimate=estimate, low=low, high=high)


def _make_non_finite(definition: MetricDefinition, n: int, name: str) -> ScoreComparison:
    return make_unscored(definition, n, against=name, undefined=f"{name} answers with NaN or infinity")


def _find_problem(
    definition: MetricDefinition, label: Array, candidate: Array, function: CustomMetric | None, groups: Array | None
) -> ScoreComparison | None:
    """Return why the candidate cannot be scored at all, or None."""
    n = len(label)
    if not _is_finite(candidate):
        odd = int((~np.isfinite(candidate.reshape(n, -1))).any(axis=1).sum())
        return make_unscored(definition, n, broken=f"the model answers with NaN or infinity on {odd} of {n} rows")
    if not _is_finite(label):
        return make_unscored(definition, n, failed="the labels hold NaN or infinity")
    if n < FEW_ROWS:
        return make_unscored(definition, n, undefined=f"{n} rows are too few for an interval, which needs {FEW_ROWS}")
    if groups is not None and (count := int(groups.max()) + 1) < FEW_ROWS:
        why = f"{count} groups are too few for an interval, which needs {FEW_ROWS}"
        return make_unscored(definition, n, undefined=why)
    if function is None:
        return None
    try:
        value = float(function(candidate, label))
    except Exception as error:  # user code may raise anything
        return make_unscored(definition, n, failed=f"{definition.use} raised {type(error).__name__}: {error}")
    return None if np.isfinite(value) else make_unscored(definition, n, failed=f"{definition.use} gave {value}")


def _is_finite(array: Array) -> bool:
    return array.dtype.kind not in "fc" or bool(np.isfinite(array).all())


def _score_alone(definition: MetricDefinition, statistic: MetricStatistic, replicates: Replicates) -> ScoreComparison:
    n = len(statistic.reads)
    interval = bca_interval(replicates)
    if interval is None:
        why = f"{definition.label} is not defined on these rows, or not on enough of their resamples"
        return make_unscored(definition, n, undefined=why)
    if not replicates.spread and statistic.step is None:
        return make_unscored(definition, n, undefined=_NO_SPREAD)
    interval = _widen(interval, statistic.step)
    if statistic.step is not None:
        interval = replace(interval, high=min(interval.high, 1.0))
    method = f"bootstrap over rows (BCa, {replicates.resampled.size} resamples)"
    return ScoreComparison(
        metric=definition.label, against=CANDIDATE, n=n, candidate=interval, confidence=CONFIDENCE, method=method
    )


def _estimate(between: Replicates, same: float, *, equal: bool, step: float | None = None) -> Interval | None:
    """Return the interval of a difference or ratio; `same` where all rows are answered alike, without a step."""
    if equal:
        return Interval.point(same)
    if step is None and not between.spread:
        return None
    interval = bca_interval(between)
    return None if interval is None else _widen(interval, step)


def _widen(interval: Interval, step: float | None) -> Interval:
    """Widen an interval by the effect that unseen rows can have."""
    if step is None:
        return interval
    room = UNSEEN_ROWS * step
    return replace(
        interval, low=min(interval.low, interval.estimate - room), high=max(interval.high, interval.estimate + room)
    )
