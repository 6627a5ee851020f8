"""Scores of several models by one task metric, with intervals.

If a metric is a mean loss, its intervals are of ratios of losses. Other metrics use the paired
bootstrap over rows. If the data has groups, groups are drawn instead of rows.

The bootstrap ignores kinds of rows that are missing from the sample. The interval of a metric with
a range therefore includes their possible effect. Even if none of n rows is wrong, up to 3/n of all
rows can be wrong (at 5 % error). Each of them can change the metric by its largest step.

If two models have equal outputs on every row, the change is exactly 0. Equal classes, tokens or
texts do not show this (`_find_equal`). If only the scores of the rows are equal, and the metric has
no range, the change is unknown.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np

from onnx_ops.domain.evidence import Interval, ScoreComparison
from onnx_ops.domain.gate import MetricDefinition
from onnx_ops.domain.task_metrics import MeanLoss, Options, Resampled
from onnx_ops.metric_formulas import Array, MetricStatistic, Statistic, Weights, mean, r2
from onnx_ops.statistics.grouping import typical_size
from onnx_ops.statistics.intervals import (
    CONFIDENCE,
    RESAMPLES,
    UNSEEN_CHANGES,
    Replicates,
    bca_interval,
    find_carrying_rows,
    find_heavy_rows,
    ratio_interval,
    replicate,
)

CustomMetric: TypeAlias = Callable[[Array, Array], Any]
"""Function of predictions and labels that returns one number, or one per row."""

_NAMED = 10
"""Maximum number of rows that are named because they account for an error."""

CANDIDATE = ""
"""Key of the candidate among the models.

Other keys are those of `ScoreComparison.against`.
"""

_NO_SPREAD = "the score is constant: an interval cannot be estimated"
_NO_ERROR = "{name} has no error, so a relative change is undefined"
_SAME_SCORES = (
    "the answers differ from those of {name}, but an interval of the change cannot be estimated"
)

_ONLY_CHANCE = (
    "chance alone can cause the error of {name} on so few rows, so a relative change is undefined"
)
_IN_ORDER = frozenset({"detections", "keypoints", "masks"})
"""Kinds of answers whose rows are not sorted.

The order of rows decides between equal scores of detections and keypoints. To sort masks, all their
pixels would be copied.
"""

FEW_ROWS = 20
"""Number of rows or groups below which an interval has no meaningful level."""

UNSEEN_ROWS = -math.log((1 - CONFIDENCE) / 2)
"""Number of unseen rows that may be missing by chance.

It is the upper 95 % bound of a Poisson count of 0.
"""

_FEW_EFFECTIVE = 10
"""Effective number of rows below which the losses of two models rest on few rows.

`_compare_rest` then also compares the models without these rows. At most a fifth of all rows is
required. The number was chosen by simulation. Of models that differ little, as many pass with 20 to
2,000 rows as without this rule.
"""

_UNSEEN_LOSSES = 4
"""Number of rows that may be missing by chance, for the mean loss of one model.

It corresponds to `UNSEEN_ROWS`, but the missing rows may be worse than any observed row. The number
was chosen by simulation.
"""


def score(
    definition: MetricDefinition,
    label: Array | None,
    answers: Mapping[str, Array],
    *,
    seed: int,
    function: CustomMetric | None = None,
    resamples: int = RESAMPLES,
    group: Array | None = None,
    alike: Collection[str] = (),
) -> tuple[ScoreComparison, ...]:
    """Score the candidate, and compare it with each other model.

    The order of rows does not change the result, except for detections, keypoints and masks.

    Args:
        definition: any metric except those that are counts of rows.
        label: one entry per row, as the metric reads it (see `AnswerKind`). Examples are class
            numbers, True for positive rows, and numbers. For binary metrics, the class number is 1
            for the positive class and 0 otherwise. None compares the candidate's embeddings or
            tokens with those of the other models.
        answers: answers by model, including `CANDIDATE`. They are class numbers as in the label,
            scores of the positive class, or other answers of an `AnswerKind`. For a custom metric,
            they are its input.
        function: the function of a custom metric.
        group: group number of each row, if rows depend on each other.
        alike: models whose outputs are known to equal the candidate's on every row.

    Returns:
        The candidate's entry, if there are labels, then an entry for each model that the candidate
        can be compared with. An entry has a reason in place of a missing score.
    """
    if label is None:
        return _score_without_labels(
            definition, answers, seed=seed, resamples=resamples, group=group, alike=alike
        )
    order = _sort_rows(definition, label, answers)
    label, answers = label[order], {name: array[order] for name, array in answers.items()}
    groups = _number_groups(group, order)
    if problem := _find_problem(definition, label, answers[CANDIDATE], function, groups):
        return (problem,)
    sound = _select_finite(answers)
    units = np.arange(len(label)) if groups is None else groups
    equal = _find_equal(definition, sound, alike)
    if isinstance(definition.method, MeanLoss):
        entries = _compare_losses(definition, definition.method, label, sound, units, equal)
    else:
        entries = _compare_by_bootstrap(
            definition, label, sound, function, units, seed, resamples, equal
        )
    entries = _restore_rows(entries, order, groups)
    mine = entries.pop(CANDIDATE)
    if mine.candidate is not None:
        unsound = answers.keys() - sound.keys()
        entries |= {name: _make_non_finite(definition, mine.n, name) for name in unsound}
    return (mine, *(entries[name] for name in answers if name in entries))


def _number_groups(group: Array | None, order: Array) -> Array | None:
    """Return the groups of the rows in `order`, numbered from 0 without gaps."""
    return (
        None if group is None else np.unique(group[order], return_inverse=True)[1].astype(np.int64)
    )


def _list_others(answers: Mapping[str, Array]) -> list[str]:
    """Return the models that the candidate is compared with."""
    return [name for name in answers if name != CANDIDATE]


def _select_finite(answers: Mapping[str, Array]) -> dict[str, Array]:
    return {name: array for name, array in answers.items() if _is_finite(array)}


def _score_without_labels(
    definition: MetricDefinition,
    answers: Mapping[str, Array],
    *,
    seed: int,
    resamples: int,
    group: Array | None,
    alike: Collection[str],
) -> tuple[ScoreComparison, ...]:
    """Score the candidate with the answers of each other model as labels."""
    comparisons = []
    for name, reference in answers.items():
        if name == CANDIDATE:
            continue
        if not _is_finite(reference):
            comparisons.append(_make_non_finite(definition, len(reference), name))
            continue
        pair = {CANDIDATE: answers[CANDIDATE], name: reference}
        for entry in score(
            definition, reference, pair, seed=seed, resamples=resamples, group=group, alike=alike
        ):
            # No candidate is closer to the reference than the reference itself, so that a gain is
            # at most 0.
            lost = entry.difference
            if entry.against or not entry.candidate:
                capped = None if lost is None else replace(lost, high=min(lost.high, 0.0))
                comparisons.append(replace(entry, against=name, difference=capped))
    return tuple(comparisons)


def _sort_rows(definition: MetricDefinition, label: Array, answers: Mapping[str, Array]) -> Array:
    """Return the row numbers in an order that depends only on the content of the rows.

    Rows whose tokens are all ignored are omitted. Rows of the kinds in `_IN_ORDER` stay in the
    order of the data, which decides between detections with equal scores, as in pycocotools.
    """
    if definition.reads in _IN_ORDER:
        return np.arange(len(label))
    columns = [np.ascontiguousarray(array) for array in (label, *answers.values())]
    keys = [b"".join(column[row].tobytes() for column in columns) for row in range(len(label))]
    order: Array = np.array(sorted(range(len(keys)), key=keys.__getitem__), dtype=np.intp)
    if definition.reads == "tokens" and definition.ignore is not None:
        order = order[(label != definition.ignore).any(axis=1)[order]]
    return order


def _restore_rows(
    entries: Mapping[str, ScoreComparison], order: Array, groups: Array | None
) -> dict[str, ScoreComparison]:
    """Return entries with the original row numbers, and with the number of groups.

    The row numbers in `entries` are those of the sorted rows.
    """
    count = 0 if groups is None else int(groups.max()) + 1
    return {
        name: replace(entry, heavy=tuple(int(order[row]) for row in entry.heavy), groups=count)
        for name, entry in entries.items()
    }


def _find_equal(
    definition: MetricDefinition, answers: Mapping[str, Array], alike: Collection[str]
) -> frozenset[str]:
    """Return the models whose answers equal the candidate's.

    The change from such a model is exactly 0. For metrics of classes, tokens or texts, only the
    models in `alike` are returned. Equal decisions do not show that the models are equal.
    """
    mine, method = answers[CANDIDATE], definition.method
    of_decisions = isinstance(method, Resampled) and method.of_decisions
    return frozenset(
        name
        for name, array in answers.items()
        if name != CANDIDATE
        and (name in alike or (not of_decisions and np.array_equal(array, mine)))
    )


def _make_equal(
    definition: MetricDefinition, mine: ScoreComparison, name: str, value: float
) -> ScoreComparison:
    """Return the comparison of the candidate with a model of equal answers.

    The metric of that model is `value`.
    """
    better = definition.higher_is_better
    return ScoreComparison(
        metric=definition.label,
        against=name,
        n=mine.n,
        candidate=mine.candidate,
        baseline=value,
        reference=mine.candidate,
        difference=None if better is False else Interval.point(0.0),
        ratio=None if better is True else Interval.point(1.0),
        confidence=CONFIDENCE,
        method="equal answers on every row",
    )


def make_unscored(
    definition: MetricDefinition,
    n: int = 0,
    *,
    against: str = CANDIDATE,
    undefined: str = "",
    failed: str = "",
    broken: str = "",
) -> ScoreComparison:
    """Return an entry that has a reason in place of a score."""
    return ScoreComparison(
        metric=definition.label,
        against=against,
        n=n,
        undefined=undefined,
        failed=failed,
        broken=broken,
    )


def build_metric_statistic(
    definition: MetricDefinition, label: Array, answers: Array, function: CustomMetric | None = None
) -> MetricStatistic:
    """Build the statistic of one model from arguments like those of `score`.

    Raises:
        ValueError: the metric counts rows, or is a custom metric without a function.
    """
    match definition.method:
        case Resampled(make=make):
            return make(label, answers, definition.options)
        case MeanLoss() as method:
            return MetricStatistic(
                statistic=_make_loss_statistic(method, label, answers, definition.options),
                reads=answers,
            )
        case None if function is not None and definition.per == "row":
            values = np.asarray(function(answers, label), dtype=np.float64)
            return MetricStatistic(statistic=mean(values), reads=values)
        case None if function is not None:
            return MetricStatistic(
                statistic=_make_custom_statistic(function, answers, label), reads=answers
            )
        case _:
            raise ValueError(f"{definition.label} cannot be computed from these arguments")


def _make_loss_statistic(
    method: MeanLoss, label: Array, answers: Array, options: Options
) -> Statistic:
    if method.explained:
        return r2(label, answers)
    losses = mean(method.loss(label, answers, options))
    return (lambda weights: np.sqrt(losses(weights))) if method.root else losses


def _make_custom_statistic(function: CustomMetric, predictions: Array, labels: Array) -> Statistic:
    """Return a statistic that computes a custom metric on the rows of each resample."""

    def value(weights: Weights) -> float:
        rows = np.repeat(np.arange(len(labels)), weights.astype(np.intp))
        try:
            return float(function(predictions[rows], labels[rows]))
        except Exception:  # User code can raise any exception, for example on too few classes.
            return float("nan")

    return lambda weights: np.array([value(one) for one in weights])


def _compare_by_bootstrap(
    definition: MetricDefinition,
    label: Array,
    answers: Mapping[str, Array],
    function: CustomMetric | None,
    units: Array,
    seed: int,
    resamples: int,
    equal: Collection[str],
) -> dict[str, ScoreComparison]:
    """Compare the models by the paired bootstrap over units, which are rows or groups."""
    size = typical_size(units)
    sides = {}
    for name, array in answers.items():
        side = build_metric_statistic(definition, label, array, function)
        # A unit can change the metric by as much as all its rows can. If the rows of a unit are
        # alike, the standard error grows by the root of its size.
        step, bias = side.step and size * side.step, math.sqrt(size) * side.bias
        sides[name] = replace(side, step=step, bias=bias)
    replicates = _replicate_sides(sides, units, seed, resamples)
    # A resample repeats rows, so chance raises its value more than that of the sample. The
    # resamples are therefore centred, and the bias of the sample is allowed for separately.
    replicates = {
        name: tuple(form.centre() for form in forms) if sides[name].bias else forms
        for name, forms in replicates.items()
    }
    own = replicates[CANDIDATE][0]
    mine = _score_alone(definition, sides[CANDIDATE], replicates[CANDIDATE])
    entries = {CANDIDATE: mine}
    for name in _list_others(answers):
        if name in equal and math.isfinite(own.observed):
            entries[name] = _make_equal(definition, mine, name, own.observed)
        elif mine.candidate is not None:
            entries[name] = _compare_replicates(
                definition, replace(mine, against=name), sides, replicates
            )
    return entries


def _replicate_sides(
    sides: Mapping[str, MetricStatistic], units: Array, seed: int, resamples: int
) -> dict[str, tuple[Replicates, ...]]:
    """Return the replicates of each model's metric, and of its plain form if any."""
    forms = {
        name: [form for form in (side.statistic, side.plain) if form is not None]
        for name, side in sides.items()
    }
    numbered = {
        f"{number} {name}": form
        for name, of_model in forms.items()
        for number, form in enumerate(of_model)
    }
    replicates = replicate(numbered, units, seed, resamples)
    return {
        name: tuple(replicates[f"{number} {name}"] for number in range(len(of_model)))
        for name, of_model in forms.items()
    }


def _compare_replicates(
    definition: MetricDefinition,
    entry: ScoreComparison,
    sides: Mapping[str, MetricStatistic],
    replicates: Mapping[str, tuple[Replicates, ...]],
) -> ScoreComparison:
    """Return the comparison of the candidate with one other model.

    It has a difference, a ratio or both, or else the reason why the change is undefined.
    """
    name = entry.against
    pairs = list(zip(replicates[CANDIDATE], replicates[name], strict=True))
    value = replicates[name][0].observed
    difference = ratio = None
    steps = [side.step for side in (sides[CANDIDATE], sides[name]) if side.step is not None]
    step = max(steps, default=None)
    if definition.higher_is_better is not False:
        difference = _estimate([own - other for own, other in pairs], step)
        difference = _allow_for_jumps(difference, sides[CANDIDATE], sides[name])
    if definition.higher_is_better is not True and value > 0:
        observed = replicates[CANDIDATE][0].observed
        ratio = _allow_for_bias(
            _estimate([own / other for own, other in pairs], step and step / value),
            sides[CANDIDATE].bias / observed if observed else 0.0,
            sides[name].bias / value,
        )
    if difference is None and ratio is None:
        if sides[name].bias >= value > 0:
            return _make_undefined(definition, entry, _ONLY_CHANCE)
        no_error = definition.higher_is_better is False and not value > 0
        return _make_undefined(definition, entry, _NO_ERROR if no_error else _SAME_SCORES)
    return replace(
        entry,
        baseline=value,
        reference=_score_alone(definition, sides[name], replicates[name]).candidate,
        difference=difference,
        ratio=ratio,
    )


def _compare_losses(
    definition: MetricDefinition,
    method: MeanLoss,
    label: Array,
    answers: Mapping[str, Array],
    units: Array,
    equal: Collection[str],
) -> dict[str, ScoreComparison]:
    """Compare models by the mean of a loss per row.

    An explained share divides the loss by the label's variance.
    """
    losses: dict[str, Array] = {
        name: method.loss(label, predictions, definition.options)
        for name, predictions in answers.items()
    }
    sums: dict[str, Array] = {
        name: np.bincount(units, weights=loss) for name, loss in losses.items()
    }
    # The metric divides the sum of losses by the sum of these shares. A unit's share is its number
    # of rows or, for a metric such as R², the sum of squared deviations of its labels.
    weights = np.square(label - label.mean()) if method.explained else None
    share = np.bincount(units, weights=weights).astype(float)
    if why := _explain_undefined_mean(definition, method, label, losses[CANDIDATE], share):
        return {CANDIDATE: make_unscored(definition, len(label), undefined=why)}
    mine = sums[CANDIDATE]
    own = _convert_mean(method, float(mine.sum() / share.sum()))
    if not np.ptp(losses[CANDIDATE]) > 1e-12 * losses[CANDIDATE].max():
        entry = make_unscored(definition, len(label), undefined=_NO_SPREAD)
        return {CANDIDATE: entry} | {
            name: _make_equal(definition, entry, name, own) for name in equal
        }
    entry = ScoreComparison(
        metric=definition.label,
        against=CANDIDATE,
        n=len(label),
        candidate=_bound_value(method, mine, share),
        confidence=CONFIDENCE,
        method="Student's t of the losses, with allowance for missing rows of the worst observed "
        "kind",
        effective=_count_effective_units(method, mine, share),
        heavy=find_heavy_rows(losses[CANDIDATE])[1][:_NAMED],
    )
    entries = {CANDIDATE: entry}
    for name in _list_others(answers):
        if name in equal:
            entries[name] = _make_equal(definition, entry, name, own)
            continue
        pair = mine, sums[name]
        other = replace(entry, against=name, reference=_bound_value(method, sums[name], share))
        other = _compare_two_losses(definition, method, other, pair, share)
        entries[name] = _compare_rest(method, other, pair, label, units)
    return entries


def _explain_undefined_mean(
    definition: MetricDefinition, method: MeanLoss, label: Array, losses: Array, share: Array
) -> str:
    """Return why the metric of one model has no value; empty if it has one."""
    if infinite := int((~np.isfinite(losses)).sum()):
        return f"the loss of {definition.name} is not finite on {infinite} of {len(label)} rows"
    if method.explained and share.sum() <= 1e-12 * np.square(label).sum():
        return f"{definition.name} is not defined on these rows: the labels are constant"
    return ""


def _count_effective_units(method: MeanLoss, sums: Array, share: Array) -> float:
    """Return the effective number of units that account for the losses.

    An explained share is a loss divided by the variance of the label. If fewer units account
    for this variance, their number is returned.
    """
    of_losses = find_heavy_rows(sums)[0]
    return min(of_losses, find_heavy_rows(share)[0]) if method.explained else of_losses


def _bound_value(method: MeanLoss, sums: Array, share: Array) -> Interval:
    """Return the interval of a metric, from the losses of one model."""
    mean_loss = ratio_interval(sums, share, _UNSEEN_LOSSES)
    if not method.explained:
        return _to_metric(method, mean_loss)
    return Interval(
        estimate=1 - mean_loss.estimate, low=1 - mean_loss.high, high=min(1.0, 1 - mean_loss.low)
    )


def _convert_mean(method: MeanLoss, mean_loss: float) -> float:
    """Convert a mean loss to the metric."""
    return (
        1 - mean_loss
        if method.explained
        else _to_metric(method, Interval.point(mean_loss)).estimate
    )


def _compare_two_losses(
    definition: MetricDefinition,
    method: MeanLoss,
    entry: ScoreComparison,
    sums: tuple[Array, Array],
    share: Array,
) -> ScoreComparison:
    """Compare the losses of two models with different answers."""
    mine, theirs = sums
    if not method.explained and theirs.sum() <= 0:
        return _make_undefined(definition, entry, _NO_ERROR)
    if np.allclose(mine, theirs, rtol=1e-9, atol=0):
        return _make_undefined(definition, entry, _SAME_SCORES)
    entry = replace(entry, baseline=_convert_mean(method, float(theirs.sum() / share.sum())))
    if method.explained:
        return replace(entry, difference=ratio_interval(theirs - mine, share, UNSEEN_CHANGES))
    return replace(entry, ratio=_to_metric(method, ratio_interval(mine, theirs, UNSEEN_CHANGES)))


def _compare_rest(
    method: MeanLoss, entry: ScoreComparison, sums: tuple[Array, Array], label: Array, units: Array
) -> ScoreComparison:
    """Compare two models without the few rows (or groups) that account for the losses.

    The entry is unchanged if the losses are evenly spread. For an explained share, the variance of
    the labels is treated like a loss, since the metric depends on both.
    """
    if entry.difference is None and entry.ratio is None:
        return entry
    above, below = sums
    if method.explained:
        above, below = above - below, np.bincount(units, weights=np.square(label - label.mean()))
    loads = np.abs(above) / np.abs(above).sum() + below / below.sum()
    carrying = find_carrying_rows(loads, min(_FEW_EFFECTIVE, len(loads) / 5))
    if not carrying.any():
        return entry
    total = float(below[~carrying].sum())
    if method.explained:
        others = label[~carrying[units]]
        total = float(np.square(others - others.mean()).sum()) if others.size else 0.0
    entry = replace(entry, carrying=int(carrying.sum()))
    if total <= 0:
        return entry
    rest = float(above[~carrying].sum()) / total
    if method.explained:
        rest = -rest
    elif method.root:
        rest = math.sqrt(max(rest, 0.0))
    return replace(entry, rest=rest)


def _make_undefined(
    definition: MetricDefinition, entry: ScoreComparison, why: str
) -> ScoreComparison:
    return make_unscored(
        definition, entry.n, against=entry.against, undefined=why.format(name=entry.against)
    )


def _to_metric(method: MeanLoss, interval: Interval) -> Interval:
    """Convert the interval of a mean loss to the metric, which can be its square root."""
    ends = (max(value, 0.0) for value in (interval.estimate, interval.low, interval.high))
    estimate, low, high = map(math.sqrt, ends) if method.root else ends
    return Interval(estimate=estimate, low=low, high=high)


def _make_non_finite(definition: MetricDefinition, n: int, name: str) -> ScoreComparison:
    return make_unscored(
        definition, n, against=name, undefined=f"{name} answers with NaN or infinity"
    )


def _find_problem(
    definition: MetricDefinition,
    label: Array,
    candidate: Array,
    function: CustomMetric | None,
    groups: Array | None,
) -> ScoreComparison | None:
    """Return an entry with the reason why the candidate cannot be scored, or None."""
    n = len(label)
    if not _is_finite(candidate):
        odd = int((~np.isfinite(candidate.reshape(n, -1))).any(axis=1).sum())
        return make_unscored(
            definition, n, broken=f"the model answers with NaN or infinity on {odd} of {n} rows"
        )
    if not _is_finite(label):
        return make_unscored(definition, n, failed="the labels contain NaN or infinity")
    few = max(FEW_ROWS, 0 if definition.metric is None else definition.metric.min_rows)
    if n < few:
        return make_unscored(
            definition, n, undefined=f"{n} rows are too few for an interval, which needs {few}"
        )
    if groups is not None and (count := int(groups.max()) + 1) < few:
        why = f"{count} groups are too few for an interval, which needs {few}"
        return make_unscored(definition, n, undefined=why)
    if function is None:
        return None
    failed = _find_function_problem(definition, function, candidate, label)
    return make_unscored(definition, n, failed=failed) if failed else None


def _find_function_problem(
    definition: MetricDefinition, function: CustomMetric, candidate: Array, label: Array
) -> str:
    """Return why the function of a custom metric cannot be used; empty if it can."""
    try:
        values = np.asarray(function(candidate, label), dtype=np.float64)
    except Exception as error:  # User code can raise any exception.
        return f"{definition.use} raised {type(error).__name__}: {error}"
    if definition.per == "row" and values.shape != (len(label),):
        return (
            f"{definition.use} gave an array of shape {values.shape}, not one value for each of "
            f"{len(label)} rows"
        )
    if definition.per == "set" and values.size != 1:
        return (
            f"{definition.use} gave {values.size} values, not one; set `per: row` if it returns "
            "one value per row"
        )
    odd = ~np.isfinite(values)
    if definition.per == "row" and odd.any():
        return f"{definition.use} gave NaN or infinity for {int(odd.sum())} of {len(label)} rows"
    return f"{definition.use} gave {float(values.reshape(()))}" if odd.any() else ""


def _is_finite(array: Array) -> bool:
    return array.dtype.kind not in "fc" or bool(np.isfinite(array).all())


def _score_alone(
    definition: MetricDefinition, statistic: MetricStatistic, replicates: Sequence[Replicates]
) -> ScoreComparison:
    n = len(statistic.reads)
    interval = _cover(replicates)
    if interval is None:
        why = f"{definition.label} is undefined on these rows, or on too many of their resamples"
        return make_unscored(definition, n, undefined=why)
    if not replicates[0].spread and not statistic.step:
        return make_unscored(definition, n, undefined=_NO_SPREAD)
    interval = _widen(interval, statistic.step)
    low = interval.low - statistic.bias - statistic.jump
    interval = replace(interval, low=low, high=interval.high + statistic.jump)
    if statistic.step is not None:
        interval = _limit_to_range(definition, interval)
    method = f"bootstrap (BCa, {replicates[0].resampled.size} resamples)"
    return ScoreComparison(
        metric=definition.label,
        against=CANDIDATE,
        n=n,
        candidate=interval,
        confidence=CONFIDENCE,
        method=method,
    )


def _allow_for_bias(ratio: Interval | None, mine: float, theirs: float) -> Interval | None:
    """Return the interval of a ratio of two values that chance can raise.

    `mine` and `theirs` are the largest shares of the values that are due to chance. The result is
    None if the whole value of the other model can be due to chance.
    """
    if ratio is None or theirs >= 1:
        return None
    return replace(ratio, low=ratio.low * max(0.0, 1 - mine), high=ratio.high / (1 - theirs))


def _limit_to_range(definition: MetricDefinition, interval: Interval) -> Interval:
    """Return an interval that is limited to possible values of the metric.

    Scores with a range are at most 1. Errors are at least 0, and can exceed 1.
    """
    if definition.higher_is_better is False:
        return replace(interval, low=max(interval.low, 0.0))
    return replace(interval, high=min(interval.high, 1.0))


def _allow_for_jumps(
    difference: Interval | None, one: MetricStatistic, other: MetricStatistic
) -> Interval | None:
    """Return the interval of a difference of metrics that can jump independently."""
    if difference is None:
        return None
    jump = math.hypot(one.jump, other.jump)
    return replace(difference, low=difference.low - jump, high=difference.high + jump)


def _cover(forms: Sequence[Replicates]) -> Interval | None:
    """Return the interval of the first form, widened to cover those of the others.

    Return None if a form has no interval.
    """
    intervals = [bca_interval(form) for form in forms]
    known = [interval for interval in intervals if interval is not None]
    if len(known) < len(intervals):
        return None
    low, high = min(one.low for one in known), max(one.high for one in known)
    return replace(known[0], low=low, high=high)


def _estimate(between: Sequence[Replicates], step: float | None = None) -> Interval | None:
    """Return the interval of a difference or ratio.

    The statistic must have a spread or a step, and every form an interval. Otherwise, return None.
    """
    if not step and not between[0].spread:
        return None
    interval = _cover(between)
    return None if interval is None else _widen(interval, step)


def _widen(interval: Interval, step: float | None) -> Interval:
    """Return an interval that also covers the possible effect of unseen rows."""
    if step is None:
        return interval
    room = UNSEEN_ROWS * step
    return replace(
        interval,
        low=min(interval.low, interval.estimate - room),
        high=max(interval.high, interval.estimate + room),
    )
