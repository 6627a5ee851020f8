"""The search for variants: next step, Pareto front, node contributions.

The next step depends only on the recipes, the budget and earlier steps, so that an interrupted
search can resume from its journal. The module imports no numerical library.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from onnx_ops.domain.quantization import (
    Budget,
    FrontierSlot,
    NodeContribution,
    Recipe,
    Role,
    Sensitivity,
    Trial,
)

SLACK = 1e-9
"""Tolerance for rounding, for a drop that equals the budget."""

SMALLER = 0.95
"""Maximum size of a variant for the role `small`, as a share of its rival's size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildTrial:
    """The step to build and measure the recipe with these nodes in float."""

    recipe: str
    excluded: tuple[str, ...]
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeNode:
    """The step to measure the output error if only this node is quantized."""

    recipe: str
    node: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StopSearch:
    """The step to end the search.

    `timed_out` is True if the remaining time was too short for the next step.
    """

    reason: str
    timed_out: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchState:
    """The state of a search; `export_bytes` is the size of fp32."""

    recipes: tuple[Recipe, ...]
    budget: Budget
    export_bytes: int
    trials: tuple[Trial, ...] = ()
    sensitivities: tuple[Sensitivity, ...] = ()

    def find(self, recipe: str, excluded: Sequence[str]) -> Trial | None:
        """Return the trial of that recipe with these nodes in float, in any order."""
        wanted = frozenset(excluded)
        return next(
            (t for t in self.trials if t.recipe == recipe and frozenset(t.excluded) == wanted), None
        )

    @property
    def seconds(self) -> float:
        """Return the time spent so far in seconds."""
        return sum(t.seconds for t in self.trials) + sum(s.seconds for s in self.sensitivities)


def choose_next_step(state: SearchState) -> BuildTrial | ProbeNode | StopSearch:
    """Return the next step: whole recipes first, then repairs, then deferred recipes.

    A step that is expected to exceed the remaining time is skipped.
    """
    skipped: list[tuple[BuildTrial | ProbeNode, float]] = []
    left = 60 * state.budget.max_minutes - state.seconds
    for action in _list_steps(state):
        cost = _estimate_cost(state, action)
        if left <= 0 or cost > left:
            skipped.append((action, cost))
        elif isinstance(action, BuildTrial) and len(state.trials) >= state.budget.max_builds:
            return StopSearch(reason=f"max_builds: {state.budget.max_builds} models were built")
        else:
            return action
    if skipped:
        action, cost = skipped[0]
        what = (
            action.recipe
            if isinstance(action, BuildTrial)
            else f"{action.recipe}, node {action.node}"
        )
        why = (
            f"{max(0.0, left):.2g} s are left, and the next step ({what}) "
            f"would take about {cost:.2g} s"
        )
        return StopSearch(
            reason=f"max_minutes: of {state.budget.max_minutes:g} minutes {why}", timed_out=True
        )
    return StopSearch(reason="every recipe was tried, and repaired where useful")


def _estimate_cost(state: SearchState, action: BuildTrial | ProbeNode) -> float:
    """Return the seconds that the recipe's last step of this kind took; 0 without one."""
    past: Sequence[Trial | Sensitivity] = (
        state.trials if isinstance(action, BuildTrial) else state.sensitivities
    )
    return next((step.seconds for step in reversed(past) if step.recipe == action.recipe), 0.0)


def _list_steps(state: SearchState) -> Iterator[BuildTrial | ProbeNode]:
    """Yield the next step of each unfinished recipe, the most promising first.

    A failing recipe gets no repairs if it is slower than fp32 or another recipe with confidence;
    see `_find_time_to_beat`.
    """
    new = [recipe for recipe in state.recipes if state.find(recipe.name, ()) is None]
    yield from (_build_whole(recipe) for recipe in new if not recipe.deferred)
    for recipe, trial in _rank_failing_recipes(state):
        if not _is_surely_slower(trial, _find_time_to_beat(state, recipe)):
            yield from itertools.islice(_list_repairs(state, recipe), 1)
    yield from (_build_whole(recipe) for recipe in new if recipe.deferred)


def _build_whole(recipe: Recipe) -> BuildTrial:
    return BuildTrial(recipe=recipe.name, excluded=(), why="the unmodified recipe")


def _rank_failing_recipes(state: SearchState) -> list[tuple[Recipe, Trial]]:
    """Return recipes that lose too much accuracy, the fastest first.

    Only measured recipes with nodes that can stay in float are returned.
    """
    wholes = [(recipe, state.find(recipe.name, ())) for recipe in state.recipes if recipe.nodes]
    failing = [
        (r, t)
        for r, t in wholes
        if t and not t.failure and t.ratios and not keeps_metric(t, state.budget)
    ]
    return sorted(failing, key=lambda pair: (compute_time_ratio(pair[1]), pair[0].name))


def keeps_metric(trial: Trial, budget: Budget) -> bool:
    """Return whether the loss of the task metric is within the budget."""
    return not trial.failure and trial.drop is not None and trial.drop <= budget.metric_drop + SLACK


def is_eligible(trial: Trial, budget: Budget) -> bool:
    """Return whether a trial is within the budget of metric, size and latency."""
    return (
        keeps_metric(trial, budget)
        and (budget.size is None or trial.size_bytes <= budget.size)
        and (budget.p99 is None or (bool(trial.p99) and max(trial.p99.values()) <= budget.p99))
    )


def compute_time_ratio(trial: Trial) -> float:
    """Return the ratio of a trial's time to fp32's; infinite if it was not measured.

    It is the geometric mean over the targets.
    """
    if trial.failure or not trial.ratios:
        return math.inf
    return math.exp(
        sum(math.log(one.estimate) for one in trial.ratios.values()) / len(trial.ratios)
    )


def _is_surely_slower(trial: Trial, than: float) -> bool:
    """Return whether a trial takes over `than` times fp32's time on every target.

    The whole interval of each target must be above `than`.
    """
    return bool(trial.ratios) and all(one.low > than for one in trial.ratios.values())


def _find_time_to_beat(state: SearchState, recipe: Recipe) -> float:
    """Return the best time ratio of other recipes within the budget, or 1 for fp32."""
    others = [
        compute_time_ratio(t)
        for t in state.trials
        if t.recipe != recipe.name and is_eligible(t, state.budget)
    ]
    return min([1.0, *others])


def _list_repairs(state: SearchState, recipe: Recipe) -> Iterator[BuildTrial | ProbeNode]:
    """Yield the remaining repair steps of one recipe, in order."""
    probed = {s.node for s in state.sensitivities if s.recipe == recipe.name}
    for node in recipe.nodes:
        if node not in probed:
            yield ProbeNode(recipe=recipe.name, node=node)
    ranked = rank_nodes(state, recipe)
    best, missing = _find_fewest(state, recipe, ranked)
    if missing is not None:
        yield BuildTrial(
            recipe=recipe.name,
            excluded=ranked[:missing],
            why=f"the {missing} most sensitive nodes in float",
        )
    if best is None:
        return
    for node, _, excluded, trial in _try_back_in_int8(state, recipe, ranked[:best]):
        if trial is None:
            yield BuildTrial(recipe=recipe.name, excluded=excluded, why=f"{node} back in int8")


def rank_nodes(state: SearchState, recipe: Recipe) -> tuple[str, ...]:
    """Return the measured nodes by descending error when only this node is quantized.

    Nodes whose measurement failed come first.
    """
    errors = {
        s.node: math.inf if s.error is None else s.error
        for s in state.sensitivities
        if s.recipe == recipe.name
    }
    order = {node: place for place, node in enumerate(recipe.nodes)}
    return tuple(
        sorted((n for n in recipe.nodes if n in errors), key=lambda n: (-errors[n], order[n]))
    )


def _find_fewest(
    state: SearchState, recipe: Recipe, ranked: Sequence[str]
) -> tuple[int | None, int | None]:
    """Return how many of the worst nodes must stay in float, and how many to try next.

    The number is doubled, then bisected. If a trial is slower than the best so far with confidence,
    larger numbers are not tried. More nodes in float take more time.
    """
    low, passing, untried = _double_nodes_in_float(state, recipe, ranked)
    if passing is None:
        return None, untried
    while passing - low > 1:
        middle = (low + passing) // 2
        trial = state.find(recipe.name, ranked[:middle])
        if trial is None:
            return None, middle
        low, passing = (low, middle) if keeps_metric(trial, state.budget) else (middle, passing)
    return passing, None


def _double_nodes_in_float(
    state: SearchState, recipe: Recipe, ranked: Sequence[str]
) -> tuple[int, int | None, int | None]:
    """Return the bounds of the number of nodes in float, and the number to try next.

    At the lower bound, the loss exceeds the budget. At the upper bound, it is within the budget. If
    no number within the budget is known, the upper bound is None, and the result can contain a
    number to try. All nodes in float are not tried, since that is fp32.
    """
    low, count, high = 0, 1, len(ranked)
    while count < high:
        trial = state.find(recipe.name, ranked[:count])
        if trial is None:
            return low, None, count
        if keeps_metric(trial, state.budget):
            return low, count, None
        if trial.failure or _is_surely_slower(trial, _find_time_to_beat(state, recipe)):
            break
        low, count = count, high if count == high - 1 else min(2 * count, high - 1)
    return low, None, None


def _try_back_in_int8(
    state: SearchState, recipe: Recipe, in_float: tuple[str, ...]
) -> Iterator[tuple[str, Trial, tuple[str, ...], Trial | None]]:
    """Yield each node with its trial in float and its trial back in int8.

    A tuple has the node, the trial with the node in float, the other nodes in float, and the trial
    of these. The least sensitive node comes first. The iteration ends at the first missing trial.
    """
    current = state.find(recipe.name, in_float)
    for node in reversed(in_float):
        if current is None or len(current.excluded) < 2:
            return
        excluded = tuple(name for name in current.excluded if name != node)
        without = state.find(recipe.name, excluded)
        yield node, current, excluded, without
        if without is None:
            return
        if _stays_in_int8(state, current, without):
            current = without


def _stays_in_int8(state: SearchState, current: Trial, without: Trial) -> bool:
    """Return whether a node can return to int8.

    Without the node in float, the metric must be within the budget. If float is faster with
    confidence on every target, the node cannot return.
    """
    faster_in_float = bool(without.ratios) and all(
        name in current.ratios and current.ratios[name].high < one.low
        for name, one in without.ratios.items()
    )
    return keeps_metric(without, state.budget) and not faster_in_float


def list_node_contributions(state: SearchState) -> tuple[NodeContribution, ...]:
    """Return how much each node in float contributed to metric and time."""
    contributions = []
    for recipe in state.recipes:
        ranked = rank_nodes(state, recipe)
        best, _ = (
            _find_fewest(state, recipe, ranked)
            if len(ranked) == len(recipe.nodes)
            else (None, None)
        )
        if best is None:
            continue
        if (
            best == 1
            and (whole := state.find(recipe.name, ()))
            and (kept_worst := state.find(recipe.name, ranked[:1]))
        ):
            contributions.append(_make_contribution(kept_worst, whole, ranked[0], kept=True))
        for node, current, _, without in _try_back_in_int8(state, recipe, ranked[:best]):
            if without is not None and not without.failure:
                contributions.append(
                    _make_contribution(
                        current, without, node, kept=not _stays_in_int8(state, current, without)
                    )
                )
    return tuple(contributions)


def _make_contribution(
    current: Trial, without: Trial, node: str, *, kept: bool
) -> NodeContribution:
    return NodeContribution(
        recipe=current.recipe,
        node=node,
        metric=_get_drop(without) - _get_drop(current),
        time={
            name: current.ratios[name].estimate / one.estimate
            for name, one in without.ratios.items()
            if name in current.ratios
        },
        kept=kept,
    )


def compute_pareto_front(state: SearchState) -> tuple[int, ...]:
    """Return the numbers of the eligible trials on the Pareto front.

    Neither fp32 nor another eligible trial dominates them.
    """
    targets = sorted({name for trial in state.trials for name in trial.ratios})
    points = [
        (n, _get_costs(trial, targets))
        for n, trial in enumerate(state.trials)
        if is_eligible(trial, state.budget) and trial.ratios
    ]
    # Among equal trials, the first wins. So fp32 has the number -1, before all trials.
    others = [(-1, (0.0, float(state.export_bytes), *(1.0 for _ in targets))), *points]
    return tuple(
        n
        for n, costs in points
        if not any(_dominates(other, costs, is_earlier=m < n) for m, other in others)
    )


def _get_drop(trial: Trial) -> float:
    return trial.drop or 0.0


def _compute_loss(trial: Trial) -> float:
    """Return the loss of the metric; a gain is 0, since it is due to chance."""
    return max(0.0, _get_drop(trial))


def _get_costs(trial: Trial, targets: Sequence[str]) -> tuple[float, ...]:
    """Return the costs of a trial: loss, bytes and the time on each target."""
    times = (trial.ratios[name].estimate if name in trial.ratios else math.inf for name in targets)
    return (_compute_loss(trial), float(trial.size_bytes), *times)


def _dominates(costs: tuple[float, ...], than: tuple[float, ...], *, is_earlier: bool) -> bool:
    """Return whether the costs of one trial dominate those of another trial.

    Each cost must be at most as high. At least one cost must be lower, or the first trial must be
    earlier.
    """
    return all(a <= b for a, b in zip(costs, than, strict=True)) and (costs != than or is_earlier)


def assign_roles(
    state: SearchState, name: str, roles: Sequence[Role], *, unfinished: str = ""
) -> tuple[FrontierSlot, ...]:
    """Assign the trials of the front to roles, with at most one role for each trial.

    `unfinished` is the reason why the search ended early, or empty.
    """
    trials, places = state.trials, compute_pareto_front(state)
    if not places:
        reason = _explain_empty_front(state) + (
            f"; the search ended early: {unfinished}" if unfinished else ""
        )
        return tuple(FrontierSlot(role=role, reason=reason) for role in roles)
    fast = min(
        places, key=lambda n: (not _is_shown_faster(trials[n]), compute_time_ratio(trials[n]), n)
    )
    taken: dict[Role, int] = {}
    slots = []
    for role in roles:
        place, why = _find_trial(state, role, places, fast, rival="fast" in roles)
        other = next((r for r, n in taken.items() if n == place), None)
        if other is not None:
            place, why = None, f"{name}-{other} is also the best for this role"
        if place is not None:
            taken[role] = place
        slots.append(FrontierSlot(role=role, trial=place, reason=why))
    return tuple(slots)


def _is_shown_faster(trial: Trial) -> bool:
    """Return whether a trial is faster than fp32 with confidence on any target."""
    return any(ratio.high < 1 for ratio in trial.ratios.values())


def _was_measured(trial: Trial) -> bool:
    return not trial.failure and trial.drop is not None


def find_closest_trial(state: SearchState) -> int | None:
    """Return the number of the trial with the least loss; None if none was measured.

    Among equal trials, the fastest is returned.
    """
    measured = [n for n, trial in enumerate(state.trials) if _was_measured(trial)]

    def rank(place: int) -> tuple[float, float]:
        trial = state.trials[place]
        return _compute_loss(trial), compute_time_ratio(trial)

    return min(measured, key=rank, default=None)


def _find_trial(
    state: SearchState, role: Role, places: Sequence[int], fast: int, *, rival: bool
) -> tuple[int | None, str]:
    """Return the trial for a role, or the reason why there is none.

    `fast` is the fastest trial that is faster than fp32 with confidence; without such a trial, it
    is the fastest one. `rival` is True if the role `fast` is assigned too.
    """
    fastest = state.trials[fast]
    is_faster = _is_shown_faster(fastest)
    beside = fast if is_faster and rival else None
    match role:
        case "fast":
            best_ratio = f"{compute_time_ratio(fastest):.3g}x"
            why = f"no model on the front is shown to be faster than fp32 (best: {best_ratio})"
            return (fast, "") if is_faster else (None, why)
        case "small":
            return _find_smallest(state, places, beside)
        case "exact":
            return _find_most_exact(state, places, beside)


def _find_smallest(
    state: SearchState, places: Sequence[int], beside: int | None
) -> tuple[int | None, str]:
    """Return the smallest trial, if it is notably smaller than its rivals.

    The rivals are fp32 and `beside`, the trial with the role `fast`. If `beside` is the smallest
    trial, it is returned.
    """
    trials = state.trials
    least = min(places, key=lambda n: (trials[n].size_bytes, compute_time_ratio(trials[n]), n))
    rival_bytes = (
        state.export_bytes if beside is None else min(trials[beside].size_bytes, state.export_bytes)
    )
    if least == beside or trials[least].size_bytes <= SMALLER * rival_bytes:
        return least, ""
    return (
        None,
        (
            f"no model within the budget is notably smaller than {rival_bytes} bytes "
            f"({trials[least].size_bytes} bytes at best)"
        ),
    )


def _find_most_exact(
    state: SearchState, places: Sequence[int], beside: int | None
) -> tuple[int | None, str]:
    """Return the most exact trial, if it is notably more exact than its rival.

    The rival is `beside`, the trial with the role `fast`. If it is the most exact trial, or is
    None, the most exact trial is returned. A difference is notable if it exceeds a quarter of the
    drop that the budget allows.
    """
    trials = state.trials
    best = min(places, key=lambda n: (_compute_loss(trials[n]), compute_time_ratio(trials[n]), n))
    if beside is None or best == beside:
        return best, ""
    lost = _compute_loss(trials[beside])
    if lost - _compute_loss(trials[best]) > state.budget.metric_drop / 4:
        return best, ""
    return (
        None,
        (
            "no model on the front is notably more exact than the `fast` variant, which loses "
            f"{100 * lost:.2g}%"
        ),
    )


def _explain_empty_front(state: SearchState) -> str:
    """Return why the front is empty."""
    measured = [trial for trial in state.trials if _was_measured(trial)]
    if not measured:
        why = next(
            (trial.failure for trial in state.trials), "no recipe fits the model and its targets"
        )
        return f"no model could be measured: {why}"
    keeping = [trial for trial in measured if keeps_metric(trial, state.budget)]
    if not keeping:
        least = min(measured, key=_get_drop)
        return (
            f"no model stays within metric_drop: {least.label} loses the least, "
            f"{100 * _get_drop(least):.2g}%"
        )
    eligible = [trial for trial in keeping if is_eligible(trial, state.budget)]
    if not eligible:
        return (
            "every model within metric_drop is larger, or slower at its 99th percentile, "
            "than the budget allows"
        )
    best = min(map(compute_time_ratio, eligible))
    return f"no model within the budget is faster or smaller than fp32 (best: {best:.3g}x)"
