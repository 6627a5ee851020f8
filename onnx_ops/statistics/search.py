"""What a search for variants tries next, when it ends, and what its exclusions bought. Imports no numbers library.

The next step follows from the budget and from what was tried so far, and from nothing else: a search that was killed
goes on from its journal as if it never had been.


The front of a search: the variants that nothing beats in everything at once, and the places that they get. Pure."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from onnx_ops.domain.quantization import Budget, FrontierSlot, NodeContribution, Recipe, Role, Sensitivity, Trial

SLACK = 1e-9
"""Rounding of a drop that equals the budget."""

SMALLER = 0.95
"""A second variant for its size alone must have at most this part of the other's bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildTrial:
    """Build the recipe with these nodes in float, and measure it."""

    recipe: str
    excluded: tuple[str, ...]
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeNode:
    """Find the error of the outputs if only this node were quantized."""

    recipe: str
    node: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StopSearch:
    """`timed_out`: there was more to try."""

    reason: str
    timed_out: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchState:
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


def choose_next_step(known: SearchState) -> BuildTrial | ProbeNode | StopSearch:
    """What to do next: each recipe as a whole, the repair of those that are fast but not right, late ones.

    A step that by what is known would take the search beyond its time is passed over for the next that would not.
    """
    late: list[tuple[BuildTrial | ProbeNode, float]] = []
    left = 60 * known.budget.max_minutes - known.seconds
    for action in _wanted(known):
        cost = _expected_seconds(known, action)
        if left <= 0 or cost > left:
            late.append((action, cost))
        elif isinstance(action, BuildTrial) and len(known.trials) >= known.budget.max_builds:
            return StopSearch(reason=f"max_builds: {known.budget.max_builds} models were built")
        else:
            return action
    if late:
        action, cost = late[0]
        what = action.recipe if isinstance(action, BuildTrial) else f"{action.recipe}, node {action.node}"
        why = f"{max(0.0, left):.2g} s are left, and the next step ({what}) would take about {cost:.2g} s"
        return StopSearch(reason=f"max_minutes: of {known.budget.max_minutes:g} minutes {why}", timed_out=True)
    return StopSearch(reason="every recipe was tried, and what could be repaired was")


def _wanted(known: SearchState) -> Iterator[BuildTrial | ProbeNode]:
    """The next step of every recipe that still wants one, the most promising first."""
    new = [recipe for recipe in known.recipes if known.find(recipe.name, ()) is None]
    for late in (False, True):
        for recipe in new:
            if recipe.late == late:
                yield BuildTrial(recipe=recipe.name, excluded=(), why="the recipe as it is")
        if not late:
            for recipe in _repairable(known):
                yield from itertools.islice(_repair(known, recipe), 1)


def _expected_seconds(known: SearchState, action: BuildTrial | ProbeNode) -> float:
    """What the same kind of step took last, for this recipe; 0 for one that was not tried yet."""
    if isinstance(action, BuildTrial):
        return next((t.seconds for t in reversed(known.trials) if t.recipe == action.recipe), 0.0)
    return next((s.seconds for s in reversed(known.sensitivities) if s.recipe == action.recipe), 0.0)


def keeps_metric(trial: Trial, budget: Budget) -> bool:
    """Whether it keeps the task metric."""
    return not trial.failure and trial.drop is not None and trial.drop <= budget.metric_drop + SLACK


def is_eligible(trial: Trial, budget: Budget) -> bool:
    """Whether it keeps the whole budget."""
    return (
        keeps_metric(trial, budget)
        and (budget.size is None or trial.size_bytes <= budget.size)
        and (budget.p99 is None or (bool(trial.p99) and max(trial.p99.values()) <= budget.p99))
    )


def compute_time_ratio(trial: Trial) -> float:
    """Time of a request over that of fp32, the geometric mean over the targets; infinite if it was not measured."""
    if trial.failure or not trial.ratios:
        return math.inf
    return math.exp(sum(math.log(one.estimate) for one in trial.ratios.values()) / len(trial.ratios))


def _surely_slower(trial: Trial, than: float) -> bool:
    """Whether no target may run it in less than `than` times the time of fp32."""
    return bool(trial.ratios) and all(one.low > than for one in trial.ratios.values())


def _repairable(known: SearchState) -> list[Recipe]:
    """Recipes that lose too much and could still win: the fastest first."""
    wholes = [(recipe, known.find(recipe.name, ())) for recipe in known.recipes if recipe.nodes]
    failing = [(r, t) for r, t in wholes if t and not t.failure and t.ratios and not keeps_metric(t, known.budget)]
    return [
        recipe
        for recipe, trial in sorted(failing, key=lambda pair: (compute_time_ratio(pair[1]), pair[0].name))
        if not _surely_slower(trial, _to_beat(known, recipe))
    ]


def _to_beat(known: SearchState, recipe: Recipe) -> float:
    """The best time of other recipes that keep the budget, or fp32's."""
    others = [compute_time_ratio(t) for t in known.trials if t.recipe != recipe.name and is_eligible(t, known.budget)]
    return min([1.0, *others])


def _repair(known: SearchState, recipe: Recipe) -> Iterator[BuildTrial | ProbeNode]:
    """Steps that are still to be done for one recipe, the first of which is the next."""
    probed = {s.node for s in known.sensitivities if s.recipe == recipe.name}
    for node in recipe.nodes:
        if node not in probed:
            yield ProbeNode(recipe=recipe.name, node=node)
    ranked = rank_nodes(known, recipe)
    best, missing = _fewest(known, recipe, ranked)
    if missing is not None:
        yield BuildTrial(
            recipe=recipe.name, excluded=ranked[:missing], why=f"the {missing} most sensitive nodes in float"
        )
    if best is None:
        return
    for _, wanted, trial in _give_back(known, recipe, ranked[:best]):
        if trial is None:
            given = next(node for node in ranked[:best] if node not in wanted)
            yield BuildTrial(recipe=recipe.name, excluded=wanted, why=f"{given} back in int8")


def rank_nodes(known: SearchState, recipe: Recipe) -> tuple[str, ...]:
    """Nodes by what quantizing each alone does to the outputs, the worst first; those that failed come first."""
    errors = {s.node: math.inf if s.error is None else s.error for s in known.sensitivities if s.recipe == recipe.name}
    order = {node: place for place, node in enumerate(recipe.nodes)}
    return tuple(sorted((n for n in recipe.nodes if n in errors), key=lambda n: (-errors[n], order[n])))


def _fewest(known: SearchState, recipe: Recipe, ranked: Sequence[str]) -> tuple[int | None, int | None]:
    """How many of the worst nodes must stay in float, and how many to try next: doubling, then halving.

    Nothing is tried beyond a trial that is surely slower than what there is: more nodes in float cost more time.
    """
    low, high = 0, len(ranked)
    count, found = 1, None
    while found is None and count < high:
        trial = known.find(recipe.name, ranked[:count])
        if trial is None:
            return None, count
        if keeps_metric(trial, known.budget):
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
        low, found = (low, middle) if keeps_metric(trial, known.budget) else (middle, found)
    return found, None


def _give_back(
    known: SearchState, recipe: Recipe, kept: tuple[str, ...]
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


def _given_back(known: SearchState, current: Trial, without: Trial) -> bool:
    """Whether a node that is back in int8 stays there: the metric is kept, and float was not surely faster."""
    faster_in_float = bool(without.ratios) and all(
        name in current.ratios and current.ratios[name].high < one.low for name, one in without.ratios.items()
    )
    return keeps_metric(without, known.budget) and not faster_in_float


def list_node_contributions(known: SearchState) -> tuple[NodeContribution, ...]:
    """What each node that was tried in float bought, by comparing two trials that differ in it alone."""
    found = []
    for recipe in known.recipes:
        ranked = rank_nodes(known, recipe)
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


def _bought(current: Trial, without: Trial, node: str, *, kept: bool) -> NodeContribution:
    return NodeContribution(
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


def compute_pareto_front(known: SearchState) -> tuple[int, ...]:
    """Numbers of the trials that keep the budget and that nothing else beats in metric, size and every time at once.

    fp32 is among what can beat them. A gain of the metric counts as no loss: it is chance.
    """
    points = [(n, _point(t, known)) for n, t in enumerate(known.trials) if is_eligible(t, known.budget) and t.ratios]
    names = sorted({name for t in known.trials for name in t.ratios})
    others = [(-1, (0.0, float(known.export_bytes), *(1.0 for _ in names))), *points]
    return tuple(n for n, point in points if not any(_beats(m, other, n, point) for m, other in others))


def _point(trial: Trial, known: SearchState) -> tuple[float, ...]:
    names = sorted({name for t in known.trials for name in t.ratios})
    times = (trial.ratios[name].estimate if name in trial.ratios else math.inf for name in names)
    return (max(0.0, trial.drop or 0.0), float(trial.size_bytes), *times)


def _beats(m: int, other: tuple[float, ...], n: int, point: tuple[float, ...]) -> bool:
    """Whether it is at least as good in everything, and better in something; of equals the first stays."""
    return all(a <= b for a, b in zip(other, point, strict=True)) and (other != point or m < n)


def assign_roles(
    known: SearchState, name: str, roles: Sequence[Role], *, unfinished: str = ""
) -> tuple[FrontierSlot, ...]:
    """Which trial of the front each role gets; a role that another one's variant fills too stays empty.

    `unfinished` says why the search ended before everything was tried.
    """
    trials, places = known.trials, compute_pareto_front(known)
    if not places:
        reason = f"{_nothing(known)}; not everything was tried: {unfinished}" if unfinished else _nothing(known)
        return tuple(FrontierSlot(role=role, reason=reason) for role in roles)
    fast = min(places, key=lambda n: (compute_time_ratio(trials[n]), n))
    taken: dict[Role, int] = {}
    slots = []
    for role in roles:
        place, why = _place(known, role, places, fast, rival="fast" in roles)
        other = next((r for r, n in taken.items() if n == place), None)
        if other is not None:
            place, why = None, f"{name}-{other} is the best for this too"
        if place is not None:
            taken[role] = place
        slots.append(FrontierSlot(role=role, trial=place, reason=why))
    return tuple(slots)


def _place(known: SearchState, role: Role, places: Sequence[int], fast: int, *, rival: bool) -> tuple[int | None, str]:
    """The trial for a role, or why there is none. `rival`: the fastest has a place of its own."""
    trials = known.trials
    fastest = trials[fast]
    quick = any(one.high < 1 for one in fastest.ratios.values())
    match role:
        case "fast":
            if quick:
                return fast, ""
            return (
                None,
                f"nothing that keeps the budget is surely faster than fp32 (best: {compute_time_ratio(fastest):.3g}x)",
            )
        case "small":
            least = min(places, key=lambda n: (trials[n].size_bytes, compute_time_ratio(trials[n]), n))
            beside = min(fastest.size_bytes, known.export_bytes) if quick and rival else known.export_bytes
            if trials[least].size_bytes <= SMALLER * beside or (quick and rival and least == fast):
                return least, ""
            return None, f"nothing that keeps the budget is notably smaller ({trials[least].size_bytes} bytes at best)"
        case "exact":
            best = min(places, key=lambda n: (max(0.0, trials[n].drop or 0.0), compute_time_ratio(trials[n]), n))
            lost, least_lost = (max(0.0, trials[n].drop or 0.0) for n in (fast, best))
            if not (quick and rival) or best == fast or lost - least_lost > known.budget.metric_drop / 4:
                return best, ""
            return (
                None,
                f"nothing on the front is notably more exact than the fastest (it loses {100 * lost:.2g} points)",
            )


def _nothing(known: SearchState) -> str:
    """Why the front is empty, told by the trial that came nearest."""
    measured = [t for t in known.trials if not t.failure and t.drop is not None]
    if not measured:
        why = next((t.failure for t in known.trials), "no recipe fits the model and its targets")
        return f"nothing could be built: {why}"
    kept = [t for t in measured if keeps_metric(t, known.budget)]
    if not kept:
        least = min(t.drop or 0.0 for t in measured)
        return f"nothing keeps the task metric: the least loss is {100 * least:.2g} points"
    if not any(is_eligible(t, known.budget) for t in kept):
        return "what keeps the task metric is larger, or slower at its 99th percentile, than the budget allows"
    best = min(map(compute_time_ratio, kept))
    return f"nothing that keeps the task metric is faster or smaller than fp32 (best: {best:.3g}x)"
