"""A task metric of several models on the same rows, with intervals that any limit can be held against later.

Intervals are of the paired bootstrap over rows (`resampling`). It knows nothing of kinds of rows that it has not seen,
so the interval of a metric with a range is never narrower than what such rows could do: though none of n rows went
wrong, up to 3/n of all rows may (at 5 % error), each at the metric's largest step. A metric without a range has no
largest step: its interval is a point where two models answer every row alike, and is not given where only the scores
of the rows are alike.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from onnx_ops.analysis.agreement import CONFIDENCE
from onnx_ops.analysis.metrics import Array, OwnMetric
from onnx_ops.analysis.resampling import RESAMPLES, Replicates, bca_interval, replicate
from onnx_ops.analysis.sides import Side, side
from onnx_ops.domain.evidence import Interval, ScoreComparison
from onnx_ops.domain.metric import MetricDefinition

CANDIDATE = ""
"""Key of the candidate among the models; the others are named as in `ScoreComparison.against`."""

FEW_ROWS = 20
"""Below it a bootstrap interval has no level to speak of."""

UNSEEN_ROWS = -math.log((1 - CONFIDENCE) / 2)
"""Rows of a kind of which none was seen that may be missing by chance: the upper 95 % bound of a Poisson count of 0."""


def score(
    definition: MetricDefinition,
    label: Array | None,
    answers: Mapping[str, Array],
    *,
    seed: int,
    function: OwnMetric | None = None,
    resamples: int = RESAMPLES,
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
    """
    if label is not None:
        return _score(definition, label, answers, seed, function, resamples)
    found = []
    for name, reference in answers.items():
        if name != CANDIDATE and not _numbers(reference):
            found.append(_senseless(definition, len(reference), name))
        elif name != CANDIDATE:
            pair = {CANDIDATE: answers[CANDIDATE], name: reference}
            entries = _score(definition, reference, pair, seed, function, resamples)
            found += [_at_most_equal(entry, name) for entry in entries if entry.against or not entry.candidate]
    return tuple(found)


def _at_most_equal(entry: ScoreComparison, reference: str) -> ScoreComparison:
    """No candidate is closer to the reference than the reference itself."""
    lost = entry.difference
    difference = None if lost is None else replace(lost, high=min(lost.high, 0.0))
    return replace(entry, against=reference, difference=difference)


def refused(
    definition: MetricDefinition, n: int = 0, *, against: str = CANDIDATE, undefined: str = "", failed: str = ""
) -> ScoreComparison:
    """An entry without a figure, and why."""
    return ScoreComparison(metric=definition.label, against=against, n=n, undefined=undefined, failed=failed)


def _score(
    definition: MetricDefinition,
    label: Array,
    answers: Mapping[str, Array],
    seed: int,
    function: OwnMetric | None,
    resamples: int,
) -> tuple[ScoreComparison, ...]:
    label, answers = _in_order(label, answers)
    if definition.name == "token_agreement":
        counted = (label != definition.ignore).any(axis=1)
        label, answers = label[counted], {name: array[counted] for name, array in answers.items()}
    if problem := _problem(definition, label, answers[CANDIDATE], function):
        return (problem,)
    sound = {name: array for name, array in answers.items() if _numbers(array)}
    sides = {name: side(definition, label, array, function) for name, array in sound.items()}
    replicates = replicate({name: one.statistic for name, one in sides.items()}, len(label), seed, resamples)
    mine = _alone(definition, sides[CANDIDATE], replicates[CANDIDATE])
    if mine.candidate is None:
        return (mine,)
    entries = [mine]
    for name in answers:
        if name not in sound:
            entries.append(_senseless(definition, mine.n, name))
        elif name != CANDIDATE:
            pair = (sides[CANDIDATE], sides[name])
            entries.append(_against(definition, mine, name, pair, (replicates[CANDIDATE], replicates[name])))
    return tuple(entries)


def _senseless(definition: MetricDefinition, n: int, name: str) -> ScoreComparison:
    return refused(definition, n, against=name, undefined=f"{name} answers with NaN or infinity")


def _in_order(label: Array, answers: Mapping[str, Array]) -> tuple[Array, dict[str, Array]]:
    """The rows in an order that depends on what they hold and not on how they came."""
    columns = [np.ascontiguousarray(array) for array in (label, *answers.values())]
    keys = [b"".join(column[row].tobytes() for column in columns) for row in range(len(label))]
    order = np.array(sorted(range(len(keys)), key=keys.__getitem__), dtype=np.intp)
    return label[order], {name: array[order] for name, array in answers.items()}


def _problem(
    definition: MetricDefinition, label: Array, candidate: Array, function: OwnMetric | None
) -> ScoreComparison | None:
    """Why the candidate cannot be scored at all."""
    n = len(label)
    if not _numbers(candidate):
        return refused(definition, n, failed="the candidate answers with NaN or infinity")
    if not _numbers(label):
        return refused(definition, n, failed="the labels hold NaN or infinity")
    if n < FEW_ROWS:
        return refused(definition, n, undefined=f"{n} rows are too few for an interval, which needs {FEW_ROWS}")
    if function is None:
        return None
    try:
        value = float(function(candidate, label))
    except Exception as error:  # a person's own code may raise anything
        return refused(definition, n, failed=f"{definition.use} raised {type(error).__name__}: {error}")
    return None if np.isfinite(value) else refused(definition, n, failed=f"{definition.use} gave {value}")


def _numbers(array: Array) -> bool:
    return array.dtype.kind not in "fc" or bool(np.isfinite(array).all())


def _alone(definition: MetricDefinition, one: Side, replicates: Replicates) -> ScoreComparison:
    n = len(one.reads)
    found = bca_interval(replicates)
    if found is None:
        why = f"{definition.label} is not defined on these rows, or not on enough of their resamples"
        return refused(definition, n, undefined=why)
    if not replicates.spread and one.step is None:
        return refused(definition, n, undefined="every row scores the same: no spread to estimate an interval from")
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
    pair: tuple[Side, Side],
    replicates: tuple[Replicates, Replicates],
) -> ScoreComparison:
    better = definition.higher_is_better
    difference = None if better is False else _difference(pair, replicates)
    ratio = None if better is True else _ratio(pair, replicates)
    if difference is None and ratio is None:
        why = f"no row scores otherwise than with {name}, or {name} is without error: no interval for the change"
        return refused(definition, mine.n, against=name, undefined=why)
    return replace(mine, against=name, baseline=replicates[1].observed, difference=difference, ratio=ratio)


def _difference(pair: tuple[Side, Side], replicates: tuple[Replicates, Replicates]) -> Interval | None:
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


def _ratio(pair: tuple[Side, Side], replicates: tuple[Replicates, Replicates]) -> Interval | None:
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
