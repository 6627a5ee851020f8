"""Error rates of metrics that are no counts, for models exactly at the limit.

The metrics are computed on 50 to 2,000 rows. For rmse and mae, the rates are shown beside those of
the BCa bootstrap.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from scipy.optimize import brentq

from benchmarks.truth.claims import Claim, at_most, table
from benchmarks.truth.draws import make_generator
from benchmarks.truth.evidence import evidence
from onnx_ops.domain.decision import Verdict
from onnx_ops.domain.gate import MetricDefinition, MetricGate
from onnx_ops.domain.task_metrics import MetricName
from onnx_ops.metric_formulas import mean
from onnx_ops.statistics.intervals import UNSEEN_CHANGES, bca_interval, ratio_interval, replicate
from onnx_ops.statistics.rules.metric import judge_metric
from onnx_ops.statistics.scores import CANDIDATE, score

GROWTH = 1.05
BOUND = 0.06
ROWS = (50, 100, 200, 500, 2000)
RIVAL = 400
"""Number of resamples of the bootstrap that is compared.

Its error changes by at most half a point with that number.
"""

OFTEN_WRONG = 350
"""Number of rows at which f1 is wrong most often.

With fewer rows, the allowance for unseen changes makes the interval wide.
"""
MANY = 500
"""Number of rows above which there are fewer trials, as they take long."""
AGAIN, MORE = 0.045, 10
DRAWS = 20

Random = np.random.Generator
Models: TypeAlias = Callable[[Random, int], tuple[Any, Any, Any]]
"""A function that draws labels, and the answers of baseline and candidate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Population:
    """Errors of a model, in any unit, centred or not."""

    name: str
    draw: Callable[[Random, int], Any]


def _heavy(random: Random, rows: int) -> Any:
    return np.where(random.random(rows) < 0.02, 12, 1) * random.standard_normal(rows)


POPULATIONS = (
    Population(name="normal", draw=lambda random, rows: random.standard_normal(rows)),
    Population(
        name="log-normal",
        draw=lambda random, rows: (
            random.choice([-1, 1], rows) * np.exp(random.standard_normal(rows))
        ),
    ),
    Population(name="2 % of rows x 12", draw=_heavy),
    Population(name="skewed", draw=lambda random, rows: random.exponential(1, rows) - 1),
)


def prove(*, quick: bool, trials: int | None = None) -> list[Claim]:
    many = 40 if quick else trials or 600
    return [claim for part in (_errors, _giants, _maxima, _classes) for claim in part(many, quick)]


def _errors(trials: int, quick: bool) -> Iterator[Claim]:
    """Try rmse and mae at a true growth that equals the limit.

    The candidate's errors are the baseline's plus noise of the same population.
    """
    rows = []
    for power, name in ((2, "rmse"), (1, "mae")):
        worst = (0, "")
        for population in POPULATIONS:
            share = _noise(population, power)
            for n in ROWS:
                random = make_generator(power, n)
                found = np.array(
                    [_wrong(random, population, n, power, share) for _ in range(trials)]
                ).sum(axis=0)
                shown = (f"{100 * count / trials:.1f} %" for count in found)
                rows.append((name, population.name, str(n), *shown))
                worst = max(worst, (int(max(found[0], found[1])), f"{population.name}, {n} rows"))
        what = (
            f"{name} wrong on one side at a true growth equal to the limit, worst of 40: {worst[1]}"
        )
        yield at_most("losses", what, worst[0], trials, BOUND, worst_of=40)
    head = ("", "errors", "rows", "wrong PASS", "wrong FAIL", "BCa: PASS", "FAIL")
    table(
        f"metric, true growth equal to the limit of {100 * (GROWTH - 1):.0f} %, "
        f"{trials} trials each",
        head,
        rows,
    )


def _noise(population: Population, power: int) -> float:
    """Return the share of noise with which the metric grows by the limit."""
    if power == 2:
        return float((GROWTH**2 - 1) ** 0.5)
    random = make_generator(power)
    errors, noise = population.draw(random, 2_000_000), _symmetric(random, population, 2_000_000)
    grown = GROWTH * np.abs(errors).mean()
    return float(
        brentq(lambda share: np.abs(errors + share * noise).mean() - grown, 0, 5, xtol=1e-4)
    )


def _symmetric(random: Random, population: Population, rows: int) -> Any:
    return population.draw(random, rows) * random.choice([-1.0, 1.0], rows)


def _wrong(random: Random, population: Population, n: int, power: int, share: float) -> list[bool]:
    """Return whether the product wrongly passes or fails, then the same of the rival."""
    errors = population.draw(random, n)
    theirs = np.abs(errors) ** power
    mine = np.abs(errors + share * _symmetric(random, population, n)) ** power
    ours, limit = ratio_interval(mine, theirs, UNSEEN_CHANGES), GROWTH**power
    statistics = {"mine": mean(mine), "theirs": mean(theirs)}
    drawn = replicate(statistics, np.arange(n), int(random.integers(2**31)), RIVAL)
    rival = bca_interval(drawn["mine"] / drawn["theirs"])
    both = [ours.high < limit, ours.low > limit]
    return both + ([False, False] if rival is None else [rival.high < limit, rival.low > limit])


def _giants(trials: int, quick: bool) -> Iterator[Claim]:
    """Try giant errors that both models share.

    They are 10,000 times the other errors. The candidate's other errors are 20 % larger. In the
    sample, the metric itself hardly grows. A PASS would rest on the giant errors alone.
    """
    rows = []
    metrics: tuple[MetricName, ...] = ("rmse", "mae")
    for name in metrics:
        gate, passed, tried = MetricGate(name=name, max_increase=GROWTH - 1), 0, 0
        for giants in (1, 2, 5):
            for n in ROWS:
                random = make_generator(n, giants)
                found = sum(
                    _passes_with_giants(gate, random, n, giants) for _ in range(trials // 8)
                )
                passed, tried = passed + found, tried + trials // 8
                rows.append((name, str(giants), str(n), f"{100 * found / (trials // 8):.1f} %"))
        what = f"{name}: PASS of a candidate whose other errors are 20 % larger than the baseline's"
        yield at_most("losses", what, passed, tried, 0.01)
    table("metric, giant errors that both models share", ("", "giants", "rows", "PASS"), rows)


def _passes_with_giants(gate: MetricGate, random: Random, n: int, giants: int) -> bool:
    errors = random.standard_normal(n)
    mine = 1.2 * errors
    errors[:giants] = mine[:giants] = 1e4
    scores = score(gate.definition(), np.zeros(n), {CANDIDATE: mine, "fp32": errors}, seed=0)
    (result,) = judge_metric(gate, evidence(scores=scores, baseline="fp32"))
    return result.verdict is Verdict.PASS


def _maxima(trials: int, quick: bool) -> Iterator[Claim]:
    """Try an absolute `max` of rmse and mae that equals the true value.

    A setting with an error rate above `AGAIN` is tried once more, as in `_classes`.
    """
    rows = []
    metrics: tuple[tuple[int, MetricName], ...] = ((2, "rmse"), (1, "mae"))
    for power, name in metrics:
        worst = (0.0, 0, 1, "")
        for population in POPULATIONS:
            random = make_generator(power)
            draws = [
                (np.abs(population.draw(random, 1_000_000)) ** power).mean()
                for _ in range(1 if quick else 30)
            ]
            gate = MetricGate(name=name, max=float(np.mean(draws) ** (1 / power)))
            for n in ROWS:
                few = trials
                found = _judge_maximum(gate, population, make_generator(power, n, 1), n, few)
                if max(found[Verdict.PASS], found[Verdict.FAIL]) > AGAIN * few and not quick:
                    few *= MORE
                    found = _judge_maximum(gate, population, make_generator(power, n, 2), n, few)
                wrong = found[Verdict.PASS], found[Verdict.FAIL]
                rows.append(
                    (
                        name,
                        population.name,
                        str(n),
                        *(f"{100 * count / few:.1f} %" for count in wrong),
                        str(few),
                    )
                )
                worst = max(
                    worst, (max(wrong) / few, max(wrong), few, f"{population.name}, {n} rows")
                )
        what = f"{name} wrong on one side at a true value equal to `max`, worst of 40: {worst[3]}"
        yield at_most("losses", what, worst[1], worst[2], BOUND, worst_of=40)
    table(
        "metric, absolute max", ("", "errors", "rows", "wrong PASS", "wrong FAIL", "trials"), rows
    )


def _judge_maximum(
    gate: MetricGate, population: Population, random: Random, n: int, trials: int
) -> Counter[Verdict]:
    verdicts: Counter[Verdict] = Counter()
    for _ in range(trials):
        scores = score(
            gate.definition(), np.zeros(n), {CANDIDATE: population.draw(random, n)}, seed=0
        )
        (result,) = judge_metric(gate, evidence(scores=scores))
        verdicts[result.verdict] += 1
    return verdicts


def _classes(trials: int, quick: bool) -> Iterator[Claim]:
    """Try f1 and auc, whose true drop is known from 8,000,000 rows.

    A setting with an error rate above `AGAIN` is tried once more, with other draws and `MORE` times
    as many. Only these count.
    """
    rows = []
    for definition, populations in (
        (MetricDefinition(name="f1", average="binary"), LABELS),
        (MetricDefinition(name="auc"), SCORES),
    ):
        worst = (0.0, 0, 1, "")
        for name, draw in populations.items():
            drop = _true_drop(definition, draw, 1 if quick else DRAWS)
            for n in ROWS[:1] if quick else (*ROWS, OFTEN_WRONG):
                random = make_generator(n)
                few = 20 if quick else max(20, trials // (2 if n <= MANY else 6))
                found = _wrong_drops(definition, draw, random, n, drop, few)
                if found.max() > AGAIN * few and not quick:
                    few *= MORE
                    found = _wrong_drops(definition, draw, random, n, drop, few)
                shown = (f"{100 * count / few:.1f} %" for count in found)
                rows.append((definition.label, name, str(n), *shown, str(few)))
                worst = max(worst, (found.max() / few, int(found.max()), few, f"{name}, {n} rows"))
        what = (
            f"{definition.label} wrong on one side at a true drop equal to the limit, "
            f"worst of 48: {worst[3]}"
        )
        yield at_most("losses", what, worst[1], worst[2], BOUND, worst_of=48)
    table(
        "metric, f1 and auc", ("", "population", "rows", "wrong PASS", "wrong FAIL", "trials"), rows
    )


def _wrong_drops(
    definition: MetricDefinition, draw: Models, random: Random, n: int, drop: float, trials: int
) -> npt.NDArray[np.int64]:
    """Return how often the metric passes and fails."""
    found = np.zeros(2, np.int64)
    for trial in range(trials):
        label, base, candidate = draw(random, n)
        change = score(
            definition, label, {CANDIDATE: candidate, "fp32": base}, seed=trial, resamples=500
        )[-1].difference
        if change is not None:
            found += np.array([change.low > -drop, change.high < -drop])
    return found


def _labels(positive: float, wrong: float, changed: float) -> Models:
    """Return a function that draws labels and answers.

    The arguments are shares: of positive rows, of the baseline's wrong answers, and of the answers
    that the candidate changes.
    """

    def draw(random: Random, n: int) -> tuple[Any, Any, Any]:
        label = (random.random(n) < positive).astype(int)
        base = np.where(random.random(n) < wrong, 1 - label, label)
        return label, base, np.where(random.random(n) < changed, 1 - base, base)

    return draw


def _scores(positive: float, noise: float, tail: float = np.inf) -> Models:
    """Return a function that draws scores with tails of Student's t.

    The candidate adds noise.
    """

    def draw(random: Random, n: int) -> tuple[Any, Any, Any]:
        label = random.random(n) < positive
        spread = random.standard_t(tail, n) if np.isfinite(tail) else random.standard_normal(n)
        base = spread + 1.5 * label
        return label, base, base + noise * random.standard_normal(n)

    return draw


LABELS: dict[str, Models] = {
    "30 % positive": _labels(0.3, 0.06, 0.03),
    "10 % positive": _labels(0.1, 0.02, 0.01),
    "half positive, 20 % wrong": _labels(0.5, 0.2, 0.05),
    "few changes": _labels(0.3, 0.06, 0.01),
}
SCORES: dict[str, Models] = {
    "30 % positive": _scores(0.3, 0.5),
    "10 % positive": _scores(0.1, 0.5),
    "half positive, much noise": _scores(0.5, 1.0),
    "heavy tails": _scores(0.3, 0.5, tail=3),
}


def _true_drop(definition: MetricDefinition, draw: Models, draws: int) -> float:
    """Return the mean of the drops in `draws` draws of 400,000 rows.

    The standard error of a single draw is .07 times that of 2,000 rows.
    """
    from onnx_ops.statistics.scores import build_metric_statistic

    drops = []
    for number in range(1, draws + 1):
        label, *models = draw(make_generator(number), 400_000)
        base, candidate = (
            float(
                build_metric_statistic(definition, label, said).statistic(np.ones((1, len(label))))[
                    0
                ]
            )
            for said in models
        )
        drops.append(base - candidate)
    return float(np.mean(drops))
