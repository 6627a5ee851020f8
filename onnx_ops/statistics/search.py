"""What a search for variants tries next, when it ends, and what its exclusions bought. Imports no numbers library.

The next step follows from the budget and from what was tried so far, and from nothing else: a search that was killed
goes on from its journal as if it never had been.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from onnx_ops.domain.search import Bought, Budget, Recipe, Sensitivity, Trial

SLACK = 1e-9
"""Rounding of a drop that equals the budget."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Build:
    """Build the recipe with these nodes in float, and measure it."""

    recipe: str
    excluded: tuple[str, ...]
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """Find the error of the outputs if only this node were quantized."""

    recipe: str
    node: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """`timed_out`: there was more to try."""

    reason: str
    timed_out: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """A search so far. `export_bytes` is the size of fp32, which every variant is held against."""

    recipes: tuple[Recipe, ...]
    budget: Budget
    export_bytes: int
    trials: tuple[Trial, ...] = ()
    sensitivities: tuple[Sensitivity, ...] = ()

    def find(self, recipe: str, excluded: Sequence[str]) -> Trial | None:
        """The trial of that recipe with these nodes in float, in whatever order they are named."""
        wanted = frozenset(excluded)
        return next((t for t in self.trials if t.recipe == recipe and frozenset(t.excluded) == wanted), None)

    @property
    def seconds(self) -> float:
        return sum(t.seconds for t in self.trials) + sum(s.seconds for s in self.sensitivities)


def next_action(known: Known) -> Build | Probe | Stop:
    """What to do next: each recipe as a whole, the repair of those that are fast but not right, late ones.

    A step that by what is known would take the search beyond its time is passed over for the next that would not.
    """
    late: list[tuple[Build | Probe, float]] = []
    left = 60 * known.budget.max_minutes - known.seconds
    for action in _wanted(known):
        cost = _expected_seconds(known, action)
        if left <= 0 or cost > left:
            late.append((action, cost))
        elif isinstance(action, Build) and len(known.trials) >= known.budget.max_builds:
            return Stop(reason=f"max_builds: {known.budget.max_builds} models were built")
        else:
            return action
    if late:
        action, cost = late[0]
        what = action.recipe if isinstance(action, Build) else f"{action.recipe}, node {action.node}"
        why = f"{max(0.0, left):.2g} s are left, and the next step ({what}) would take about {cost:.2g} s"
        return Stop(reason=f"max_minutes: of {known.budget.max_minutes:g} minutes {why}", timed_out=True)
    return Stop(reason="every recipe was tried, and what could be repaired was")


def _wanted(known: Known) -> Iterator[Build | Probe]:
    """The next step of every recipe that still wants one, the most promising first."""
    new = [recipe for recipe in known.recipes if known.find(recipe.name, ()) is None]
    for late in (False, True):
        for recipe in new:
            if recipe.late == late:
                yield Build(recipe=recipe.name, excluded=(), why="the recipe as it is")
        if not late:
            for recipe in _repairable(known):
                yield from itertools.islice(_repair(known, recipe), 1)


def _expected_seconds(known: Known, action: Build | Probe) -> float:
    """What the same kind of step took last, for this recipe; 0 for one that was not tried yet."""
    if isinstance(action, Build):
        return next((t.seconds for t in reversed(known.trials) if t.recipe == action.recipe), 0.0)
    return next((s.seconds for s in reversed(known.sensitivities) if s.recipe == action.recipe), 0.0)


def fits(trial: Trial, budget: Budget) -> bool:
    """Whether it keeps the task metric."""
    return not trial.failure and trial.drop is not None and trial.drop <= budget.metric_drop + SLACK


def eligible(trial: Trial, budget: Budget) -> bool:
    """Whether it keeps the whole budget."""
    return (
        fits(trial, budget)
        and (budget.size is None or trial.size_bytes <= budget.size)
        and (budget.p99 is None or (bool(trial.p99) and max(trial.p99.values()) <= budget.p99))
    )


def speed(trial: Trial) -> float:
    """Time of a request over that of fp32, the geometric mean over the targets; infinite if it was not measured."""
    if trial.failure or not trial.ratios:
        return math.inf
    return math.exp(sum(math.log(one.estimate) for one in trial.ratios.values()) / len(trial.ratios))


def _surely_slower(trial: Trial, than: float) -> bool:
    """Whether no target may run it in less than `than` times the time of fp32."""
    return bool(trial.ratios) and all(one.low > than for one in trial.ratios.values())


def _repairable(known: Known) -> list[Recipe]:
    """Recipes that lose too much and could still win: the fastest first."""
    wholes = [(recipe, known.find(recipe.name, ())) for recipe in known.recipes if recipe.nodes]
    failing = [(r, t) for r, t in wholes if t and not t.failure and t.ratios and not fits(t, known.budget)]
    return [
        recipe
        for recipe, trial in sorted(failing, key=lambda pair: (speed(pair[1]), pair[0].name))
        if not _surely_slower(trial, _to_beat(known, recipe))
    ]


def _to_beat(known: Known, recipe: Recipe) -> float:
    """The best time of other recipes that keep the budget, or fp32's."""
    others = [speed(t) for t in known.trials if t.recipe != recipe.name and eligible(t, known.budget)]
    return min([1.0, *others])


def _repair(known: Known, recipe: Recipe) -> Iterator[Build | Probe]:
    """Steps that are still to be done for one recipe, the first of which is the next."""
    probed = {s.node for s in known.sensitivities if s.recipe == recipe.name}
    for node in recipe.nodes:
        if node not in probed:
            yield Probe(recipe=recipe.name, node=node)
    ranked = ranking(known, recipe)
    best, missing = _fewest(known, recipe, ranked)
    if missing is not None:
        yield Build(recipe=recipe.name, excluded=ranked[:missing], why=f"the {missing} most sensitive nodes in float")
    if best is None:
        return
    for _, wanted, trial in _give_back(known, recipe, ranked[:best]):
        if trial is None:
            given = next(node for node in ranked[:best] if node not in wanted)
            yield Build(recipe=recipe.name, excluded=wanted, why=f"{given} back in int8")


def ranking(known: Known, recipe: Recipe) -> tuple[str, ...]:
    """Nodes by what quantizing each alone does to the outputs, the worst first; those that failed come first."""
    errors = {s.node: math.inf if s.error is None else s.error for s in known.sensitivities if s.recipe == recipe.name}
    order = {node: place for place, node in enumerate(recipe.nodes)}
    return tuple(sorted((n for n in recipe.nodes if n in errors), key=lambda n: (-errors[n], order[n])))


def _fewest(known: Known, recipe: Recipe, ranked: Sequence[str]) -> tuple[int | None, int | None]:
    """How many of the worst nodes must stay in float, and how many to try next: doubling, then halving.

    Nothing is tried beyond a trial that is surely slower than what there is: more nodes in float cost more time.
    """
    low, high = 0, len(ranked)
    count, found = 1, None
    while found is None and count < high:
        trial = known.find(recipe.name, ranked[:count])
        if trial is None:
            return None, count
        if fits(trial, known.budget):
            found = count
        elif trial.failure or _surely_slower(trial, _to_beat(known, recipe)):
            return None, None
        else:
            low, count = count, high if count == high - 1 else min(2 * count, high - 1)
    if found is None:
        return None, None
    while found - low > 1:
        middle = (low + found) // 2
        trial = known.find(recipe.name, ranked[:middle])
        if trial is None:
            return None, middle
        low, found = (low, middle) if fits(trial, known.budget) else (middle, found)
    return found, None


def _give_back(
    known: Known, recipe: Recipe, kept: tuple[str, ...]
) -> Iterator[tuple[Trial, tuple[str, ...], Trial | None]]:
    """Each node by itself back in int8, the least sensitive first: the trial with it in float, what is then left in
    float, and the trial of that. It ends at the first trial that is missing."""
    current = known.find(recipe.name, kept)
    for node in reversed(kept):
        if current is None or len(current.excluded) < 2:
            return
        wanted = tuple(name for name in current.excluded if name != node)
        without = known.find(recipe.name, wanted)
        yield current, wanted, without
        if without is None:
            return
        if _given_back(known, current, without):
            current = without


def _given_back(known: Known, current: Trial, without: Trial) -> bool:
    """Whether a node that is back in int8 stays there: the metric is kept, and float was not surely faster."""
    faster_in_float = bool(without.ratios) and all(
        name in current.ratios and current.ratios[name].high < one.low for name, one in without.ratios.items()
    )
    return fits(without, known.budget) and not faster_in_float


def purchases(known: Known) -> tuple[Bought, ...]:
    """What each node that was tried in float bought, by comparing two trials that differ in it alone."""
    found = []
    for recipe in known.recipes:
        ranked = ranking(known, recipe)
        best, _ = _fewest(known, recipe, ranked) if len(ranked) == len(recipe.nodes) else (None, None)
        if best is None:
            continue
        if best == 1 and (whole := known.find(recipe.name, ())) and (one := known.find(recipe.name, ranked[:1])):
            found.append(_bought(one, whole, ranked[0], kept=True))
        for current, wanted, without in _give_back(known, recipe, ranked[:best]):
            if without is not None and not without.failure:
                node = next(name for name in current.excluded if name not in wanted)
                found.append(_bought(current, without, node, kept=not _given_back(known, current, without)))
    return tuple(found)


def _bought(current: Trial, without: Trial, node: str, *, kept: bool) -> Bought:
    return Bought(
        recipe=current.recipe,
        node=node,
        metric=(without.drop or 0.0) - (current.drop or 0.0),
        time={
            name: current.ratios[name].estimate / one.estimate
            for name, one in without.ratios.items()
            if name in current.ratios
        },
        kept=kept,
    )
