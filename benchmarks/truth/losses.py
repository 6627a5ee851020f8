"""Metrics that are no counts, at 50 to 2,000 rows: how often they err at their limit, beside the plain bootstrap."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.optimize import brentq

from benchmarks.truth.claims import Claim, at_most, table
from onnx_ops.analysis.loss_ratios import UNSEEN_CHANGES, ratio_interval
from onnx_ops.analysis.metrics import mean
from onnx_ops.analysis.resampling import bca_interval, replicate
from onnx_ops.analysis.scores import CANDIDATE, score
from onnx_ops.domain.metric import MetricDefinition

GROWTH = 1.05
DROP = 0.02
BOUND = 0.06
ROWS = (50, 100, 200, 500, 2000)
RIVAL = 400
"""Resamples of the rival; its error does not depend on their number by more than half a point."""

Random = np.random.Generator


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
        draw=lambda random, rows: random.choice([-1, 1], rows) * np.exp(random.standard_normal(rows)),
    ),
    Population(name="2 % of rows x 12", draw=_heavy),
    Population(name="skewed", draw=lambda random, rows: random.exponential(1, rows) - 1),
)


def prove(*, quick: bool, trials: int | None = None) -> list[Claim]:
    many = 40 if quick else trials or 600
    return [claim for part in (_errors, _classes) for claim in part(many, quick)]


def _errors(trials: int, quick: bool) -> Iterator[Claim]:
    """rmse and mae: the candidate's errors are the baseline's and as much noise of the same population."""
    rows = []
    for power, name in ((2, "rmse"), (1, "mae")):
        worst = (0, "")
        for population in POPULATIONS:
            share = _noise(population, power)
            for n in ROWS:
                random = np.random.default_rng([power, n])
                found = np.array([_wrong(random, population, n, power, share) for _ in range(trials)]).sum(axis=0)
                shown = (f"{100 * count / trials:.1f} %" for count in found)
                rows.append((name, population.name, str(n), *shown))
                worst = max(worst, (int(max(found[0], found[1])), f"{population.name}, {n} rows"))
        luck = 0 if quick else round(1.7 * (BOUND * (1 - BOUND) / trials) ** 0.5, 4)  # of the worst of 40
        what = f"{name} wrong on one side at a true growth equal to the limit, worst of 40: {worst[1]}"
        yield at_most("losses", what, worst[0], trials, BOUND + luck, quick=quick)
    head = ("", "errors", "rows", "wrong PASS", "wrong FAIL", "BCa: PASS", "FAIL")
    table(f"metric, true growth equal to the limit of {100 * (GROWTH - 1):.0f} %, {trials} trials each", head, rows)


def _noise(population: Population, power: int) -> float:
    """How much noise makes the metric grow by the limit."""
    if power == 2:
        return float((GROWTH**2 - 1) ** 0.5)
    random = np.random.default_rng(0)
    errors, noise = population.draw(random, 2_000_000), _symmetric(random, population, 2_000_000)
    grown = GROWTH * np.abs(errors).mean()
    return float(brentq(lambda share: np.abs(errors + share * noise).mean() - grown, 0, 5, xtol=1e-4))


def _symmetric(random: Random, population: Population, rows: int) -> Any:
    return population.draw(random, rows) * random.choice([-1.0, 1.0], rows)


def _wrong(random: Random, population: Population, n: int, power: int, share: float) -> list[bool]:
    """Whether ours passes and fails, and the bootstrap does."""
    errors = population.draw(random, n)
    theirs = np.abs(errors) ** power
    mine = np.abs(errors + share * _symmetric(random, population, n)) ** power
    ours, limit = ratio_interval(mine, theirs, UNSEEN_CHANGES), GROWTH**power
    statistics = {"mine": mean(mine), "theirs": mean(theirs)}
    drawn = replicate(statistics, np.arange(n), int(random.integers(2**31)), RIVAL)
    rival = bca_interval(drawn["mine"].over(drawn["theirs"]))
    both = [ours.high < limit, ours.low > limit]
    return both + ([False, False] if rival is None else [rival.high < limit, rival.low > limit])


def _classes(trials: int, quick: bool) -> Iterator[Claim]:
    """f1 and auc, whose true drop is known from 400,000 rows."""
    rows = []
    few = max(20, trials // 2)
    for definition, draw in (
        (MetricDefinition(name="f1", average="binary"), _binary),
        (MetricDefinition(name="auc"), _ranks),
    ):
        worst = (0, 0)
        for n in ROWS[:1] if quick else ROWS:
            random = np.random.default_rng(n)
            drop = _true_drop(definition, draw)
            found = np.zeros(2, int)
            for trial in range(few):
                label, base, candidate = draw(random, n)
                answers = {CANDIDATE: candidate, "fp32": base}
                change = score(definition, label, answers, seed=trial, resamples=500)[-1].difference
                if change is not None:
                    found += np.array([change.low > -drop, change.high < -drop])
            rows.append((definition.label, str(n), *(f"{100 * count / few:.1f} %" for count in found)))
            worst = max(worst, (int(found.max()), n))
        luck = 0 if quick else round(1.2 * (BOUND * (1 - BOUND) / few) ** 0.5, 4)  # of the worst of 10
        what = f"{definition.label} wrong on one side at a true drop equal to the limit, worst at {worst[1]} rows"
        yield at_most("losses", what, worst[0], few, BOUND + luck, quick=quick)
    table(f"metric, f1 and auc, {few} trials each", ("", "rows", "wrong PASS", "wrong FAIL"), rows)


def _binary(random: Random, n: int) -> tuple[Any, Any, Any]:
    label = (random.random(n) < 0.3).astype(int)
    base = np.where(random.random(n) < 0.06, 1 - label, label)
    return label, base, np.where(random.random(n) < 0.03, 1 - base, base)


def _ranks(random: Random, n: int) -> tuple[Any, Any, Any]:
    label = random.random(n) < 0.3
    base = random.standard_normal(n) + 1.5 * label
    return label, base, base + 0.5 * random.standard_normal(n)


def _true_drop(definition: MetricDefinition, draw: Callable[[Random, int], tuple[Any, Any, Any]]) -> float:
    from onnx_ops.analysis.sides import side

    label, *models = draw(np.random.default_rng(1), 400_000)
    base, candidate = (float(side(definition, label, said).statistic(np.ones((1, len(label))))[0]) for said in models)
    return base - candidate
