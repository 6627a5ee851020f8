"""The search for variants on synthetic models.

The tests check what it tries, when it ends and what it finds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onnx_ops.domain.evidence import Interval
from onnx_ops.domain.quantization import ROLES, Budget, Recipe, Sensitivity, Trial
from onnx_ops.statistics.variants.search import (
    BuildTrial,
    ProbeNode,
    SearchState,
    StopSearch,
    assign_roles,
    choose_next_step,
    compute_pareto_front,
    compute_time_ratio,
    is_eligible,
    keeps_metric,
    list_node_contributions,
    rank_nodes,
)
from tests.support.golden import Golden

SIZE = 1000
LATE = "weights"
RATIO = Interval(estimate=0.5, low=0.4, high=0.6)


@dataclass(frozen=True)
class Landscape:
    """A synthetic model: each node costs some metric in int8 and some time in float."""

    loss: Mapping[str, Mapping[str, float]]
    base: Mapping[str, float]
    price: float = 0.02
    sizes: Mapping[str, int] = field(default_factory=dict)
    broken: frozenset[str] = frozenset()
    noise: float = 0.0

    def recipes(self) -> tuple[Recipe, ...]:
        return tuple(
            Recipe(
                name=name,
                method=name,
                nodes=() if name == LATE else tuple(nodes),
                deferred=name == LATE,
            )
            for name, nodes in self.loss.items()
        )

    def trial(self, action: BuildTrial) -> Trial:
        if action.recipe in self.broken:
            return Trial(
                recipe=action.recipe,
                excluded=action.excluded,
                failure="the library failed",
                seconds=1.0,
            )
        lost = sum(
            loss for node, loss in self.loss[action.recipe].items() if node not in action.excluded
        )
        time = self.base[action.recipe] + self.price * len(action.excluded)
        ratio = Interval(estimate=time, low=time * (1 - self.noise), high=time * (1 + self.noise))
        size = self.sizes.get(action.recipe, 250) + 10 * len(action.excluded)
        return Trial(
            recipe=action.recipe,
            excluded=action.excluded,
            drop=lost,
            size_bytes=size,
            ratios={"cpu": ratio},
            seconds=1.0,
        )

    def probe(self, action: ProbeNode) -> Sensitivity:
        error = self.loss[action.recipe][action.node]
        return Sensitivity(recipe=action.recipe, node=action.node, error=error, seconds=0.1)


def start(landscape: Landscape, budget: Budget) -> SearchState:
    return SearchState(recipes=landscape.recipes(), budget=budget, export_bytes=SIZE)


def step(landscape: Landscape, known: SearchState) -> SearchState | StopSearch:
    action = choose_next_step(known)
    if isinstance(action, StopSearch):
        return action
    if isinstance(action, BuildTrial):
        return replace(known, trials=(*known.trials, landscape.trial(action)))
    return replace(known, sensitivities=(*known.sensitivities, landscape.probe(action)))


def searched(
    landscape: Landscape, budget: Budget | None = None, known: SearchState | None = None
) -> tuple[SearchState, str]:
    known = known or start(landscape, budget or Budget(metric_drop=0.01))
    for _ in range(1000):
        after = step(landscape, known)
        if isinstance(after, StopSearch):
            return known, after.reason
        known = after
    raise AssertionError("it does not end")


def nodes(*losses: float) -> dict[str, float]:
    return {f"n{i}": loss for i, loss in enumerate(losses)}


def test_search_of_recipe_within_budget_tries_no_exclusions() -> None:
    known, reason = searched(Landscape({"static": nodes(0.001, 0.002)}, {"static": 0.4}))
    assert [(t.recipe, t.excluded) for t in known.trials] == [("static", ())]
    assert known.sensitivities == ()
    assert reason.startswith("every recipe was tried")


def test_search_with_one_fragile_node_excludes_it_in_two_builds() -> None:
    losses = [0.0001] * 30
    losses[17] = 0.3
    known, _ = searched(Landscape({"dynamic": nodes(*losses)}, {"dynamic": 0.42}))
    assert known.trials[-1].excluded == ("n17",)
    assert len(known.trials) == 2
    (contribution,) = list_node_contributions(known)
    assert (contribution.node, contribution.kept) == ("n17", True)
    assert contribution.metric == pytest.approx(0.3)
    assert contribution.time["cpu"] == pytest.approx(0.44 / 0.42)


class Misleading(Landscape):
    """A model whose output errors rank those nodes first that cost no metric."""

    def probe(self, action: ProbeNode) -> Sensitivity:
        return Sensitivity(recipe=action.recipe, node=action.node, error=-float(action.node[1:]))


def test_search_removes_exclusions_without_gain() -> None:
    known, _ = searched(
        Misleading({"static": nodes(0.0, 0.0, 0.5, 0.0, 0.0, 0.0)}, {"static": 0.4})
    )
    best = min((t for t in known.trials if keeps_metric(t, known.budget)), key=compute_time_ratio)
    assert best.excluded == ("n2",)
    assert {one.node: one.kept for one in list_node_contributions(known)} == {
        "n1": False,
        "n0": False,
        "n2": True,
    }


def test_search_of_recipe_slower_than_float_tries_no_exclusions() -> None:
    """S8S8 is such a recipe on x86.

    Half of its operators stay in float, and the conversions cost extra time.
    """
    known, _ = searched(Landscape({"s8s8": nodes(0.2, 0.1)}, {"s8s8": 1.18}))
    assert len(known.trials) == 1
    assert [slot.trial for slot in assign_roles(known, "int8", ("fast",))] == [None]


def test_search_with_faster_recipe_in_budget_repairs_no_slower_recipe() -> None:
    landscape = Landscape(
        {"static": nodes(0.2, 0.0), "dynamic": nodes(0.2, 0.0)}, {"static": 0.4, "dynamic": 0.9}
    )
    known, _ = searched(landscape)
    assert {t.recipe for t in known.trials if t.excluded} == {"static"}


def test_search_with_costly_exclusions_excludes_at_most_two_nodes() -> None:
    landscape = Landscape({"static": nodes(*[0.2] * 16)}, {"static": 0.8}, price=0.15)
    known, _ = searched(landscape)
    assert all(len(t.excluded) <= 2 for t in known.trials)


def test_search_with_failing_library_reports_failure(golden: Golden) -> None:
    known, _ = searched(
        Landscape({"static": nodes(0.2)}, {"static": 0.4}, broken=frozenset({"static"}))
    )
    (slot,) = assign_roles(known, "int8", ("fast",))
    golden("reasons", slot.reason)


def test_choose_next_step_skips_steps_beyond_time_budget() -> None:
    recipes = tuple(Recipe(name=name, method=name, nodes=("a", "b")) for name in ("dear", "cheap"))
    tried = Trial(recipe="dear", drop=0.5, ratios={"t": RATIO}, seconds=50.0)
    known = SearchState(
        recipes=recipes, budget=Budget(max_minutes=1.0), export_bytes=SIZE, trials=(tried,)
    )
    action = choose_next_step(known)
    assert isinstance(action, BuildTrial)
    assert action.recipe == "cheap"
    slow = Sensitivity(recipe="dear", node="a", error=0.1, seconds=9.0)
    cheap = replace(tried, recipe="cheap", drop=0.4, seconds=0.5)
    known = replace(known, trials=(tried, cheap), sensitivities=(slow,))
    assert choose_next_step(known) == ProbeNode(recipe="cheap", node="a")


def test_choose_next_step_out_of_time_stops_and_names_untried_recipe() -> None:
    recipes = tuple(Recipe(name=name, method=name) for name in ("first", "second"))
    tried = Trial(recipe="first", drop=0.5, ratios={"t": RATIO}, seconds=70.0)
    known = SearchState(
        recipes=recipes, budget=Budget(max_minutes=1.0), export_bytes=SIZE, trials=(tried,)
    )
    stop = choose_next_step(known)
    assert isinstance(stop, StopSearch)
    assert stop.timed_out
    assert "second" in stop.reason
    (slot,) = assign_roles(known, "best", ("fast",), unfinished=stop.reason)
    assert "the search ended early" in slot.reason
    assert not StopSearch(reason="every recipe was tried").timed_out


@pytest.mark.parametrize(
    ("budget", "said"),
    [
        (Budget(max_builds=3), "max_builds: 3 models were built"),
        (Budget(max_minutes=0.05), "max_minutes: of 0.05 minutes"),
    ],
)
def test_search_at_build_or_time_budget_stops(budget: Budget, said: str) -> None:
    landscape = Landscape({"static": nodes(*[0.01] * 40)}, {"static": 0.1}, price=0.001)
    known, reason = searched(landscape, budget)
    assert reason.startswith(said)
    assert len(known.trials) <= 3


def test_search_builds_deferred_recipe_after_repairs() -> None:
    loss = {LATE: nodes(0.0), "static": nodes(0.2, 0.0, 0.0)}
    known, _ = searched(Landscape(loss, {LATE: 1.5, "static": 0.4}, sizes={LATE: 150}))
    assert [(t.recipe, t.excluded) for t in known.trials] == [
        ("static", ()),
        ("static", ("n0",)),
        (LATE, ()),
    ]
    assert [slot.trial for slot in assign_roles(known, "int8", ("fast", "small"))] == [1, 2]


losses = st.lists(st.sampled_from([0.0, 0.001, 0.004, 0.02, 0.3]), min_size=1, max_size=12)
landscapes = st.builds(
    lambda static, dynamic, base, price, noise: Landscape(
        {LATE: nodes(static[0]), "static": nodes(*static), "dynamic": nodes(*dynamic)},
        {LATE: 1.1, "static": base[0], "dynamic": base[1]},
        price=price,
        sizes={"static": 250, "dynamic": 300, LATE: 200},
        noise=noise,
    ),
    losses,
    losses,
    st.tuples(st.sampled_from([0.3, 0.5, 1.2]), st.sampled_from([0.4, 0.5, 0.9])),
    st.sampled_from([0.0, 0.01, 0.05]),
    st.sampled_from([0.0, 0.1]),
)


@given(landscapes)
def test_search_ends_without_repeated_builds_or_probes(landscape: Landscape) -> None:
    known, _ = searched(landscape)
    tried = [(t.recipe, frozenset(t.excluded)) for t in known.trials]
    assert len(tried) == len(set(tried))
    probed = [(s.recipe, s.node) for s in known.sensitivities]
    assert len(probed) == len(set(probed))


@given(landscapes, st.integers(0, 40))
def test_search_resumed_after_interruption_returns_same_result(
    landscape: Landscape, at: int
) -> None:
    whole, reason = searched(landscape)
    known = start(landscape, whole.budget)
    for _ in range(at):
        after = step(landscape, known)
        if isinstance(after, StopSearch):
            break
        known = after
    assert searched(landscape, known=known) == (whole, reason)


@given(landscapes)
def test_compute_pareto_front_keeps_budget_and_has_no_dominated_trial(landscape: Landscape) -> None:
    known, _ = searched(landscape)
    for n in compute_pareto_front(known):
        trial = known.trials[n]
        assert is_eligible(trial, known.budget)
        for other in known.trials:
            if not is_eligible(other, known.budget):
                continue
            better = (
                max(0.0, other.drop or 0.0) < max(0.0, trial.drop or 0.0)
                and other.size_bytes < trial.size_bytes
                and compute_time_ratio(other) < compute_time_ratio(trial)
            )
            assert not better


@given(landscapes)
def test_search_of_repaired_recipe_finds_trial_that_needs_each_of_its_exclusions(
    landscape: Landscape,
) -> None:
    """Losses add up: if any of the excluded nodes ran in int8, the budget would be exceeded."""
    known, _ = searched(landscape)
    for recipe in known.recipes:
        kept = [
            t
            for t in known.trials
            if t.recipe == recipe.name and t.excluded and keeps_metric(t, known.budget)
        ]
        if kept and landscape.noise == 0.0 and landscape.price > 0.0:
            least = min(kept, key=lambda t: len(t.excluded))
            for node in least.excluded:
                without = [name for name in least.excluded if name != node]
                loss = sum(
                    v for name, v in landscape.loss[recipe.name].items() if name not in without
                )
                assert loss > known.budget.metric_drop


@given(landscapes)
def test_assign_roles_returns_trial_of_pareto_front_or_reason(landscape: Landscape) -> None:
    known, _ = searched(landscape)
    slots = assign_roles(known, "int8", ROLES)
    assert [slot.role for slot in slots] == list(ROLES)
    given_ = [slot.trial for slot in slots if slot.trial is not None]
    assert len(given_) == len(set(given_))
    assert set(given_) <= set(compute_pareto_front(known))
    assert all((slot.trial is None) == bool(slot.reason) for slot in slots)
    fast = next(slot for slot in slots if slot.role == "fast")
    if fast.trial is not None:
        assert compute_time_ratio(known.trials[fast.trial]) == min(
            compute_time_ratio(known.trials[n]) for n in compute_pareto_front(known)
        )


@given(landscapes)
def test_compute_pareto_front_with_reversed_trials_returns_same_values(
    landscape: Landscape,
) -> None:
    known, _ = searched(landscape)
    turned = replace(known, trials=tuple(reversed(known.trials)))

    def figures(some: SearchState) -> set[tuple[float, int, float]]:
        return {
            (max(0.0, t.drop or 0.0), t.size_bytes, compute_time_ratio(t))
            for t in (some.trials[n] for n in compute_pareto_front(some))
        }

    assert figures(known) == figures(turned)


def test_assign_roles_gives_each_role_different_trial(golden: Golden) -> None:
    def trial(drop: float, time: float, size: int) -> Trial:
        ratio = Interval(estimate=time, low=time, high=time)
        return Trial(
            recipe="r", excluded=(str(time),), drop=drop, size_bytes=size, ratios={"cpu": ratio}
        )

    known = SearchState(
        recipes=(),
        budget=Budget(metric_drop=0.01),
        export_bytes=SIZE,
        trials=(
            trial(0.009, 0.4, 300),
            trial(0.0, 0.6, 400),
            trial(0.005, 0.9, 150),
            trial(0.009, 0.8, 500),
        ),
    )
    assert compute_pareto_front(known) == (0, 1, 2)
    assert [slot.trial for slot in assign_roles(known, "int8", ROLES)] == [0, 2, 1]
    assert [slot.trial for slot in assign_roles(known, "int8", ("exact", "fast"))] == [1, 0]
    same = assign_roles(replace(known, trials=known.trials[:1]), "int8", ROLES)
    assert [slot.trial for slot in same] == [0, None, None]
    golden("reasons", same[1].reason)


def test_assign_roles_with_uncertain_fastest_trial_gives_fast_to_certain_one() -> None:
    def trial(time: float, margin: float, size: int) -> Trial:
        ratio = Interval(estimate=time, low=time - margin, high=time + margin)
        return Trial(recipe="r", drop=0.0, size_bytes=size, ratios={"cpu": ratio})

    known = SearchState(
        recipes=(),
        budget=Budget(metric_drop=0.01),
        export_bytes=SIZE,
        trials=(trial(0.9, 0.2, 900), trial(0.95, 0.01, 800)),
    )
    (fast,) = assign_roles(known, "int8", ["fast"])
    assert fast.trial == 1
    (fast,) = assign_roles(replace(known, trials=known.trials[:1]), "int8", ["fast"])
    assert fast.reason == "no model on the front is shown to be faster than fp32 (best: 0.9x)"


def test_is_eligible_applies_size_and_p99_budgets() -> None:
    trial = Trial(recipe="r", drop=0.0, size_bytes=300, ratios={"cpu": RATIO}, p99={"cpu": 0.004})
    assert is_eligible(trial, Budget(size=300, p99=0.005))
    assert not is_eligible(trial, Budget(size=299))
    assert not is_eligible(trial, Budget(p99=0.003))
    assert not is_eligible(replace(trial, p99={}), Budget(p99=0.005))


def test_compute_time_ratio_of_failed_trial_is_infinite() -> None:
    assert math.isinf(
        compute_time_ratio(Trial(recipe="r", ratios={"cpu": RATIO}, failure="it broke"))
    )


def test_rank_nodes_puts_node_without_sensitivity_first() -> None:
    recipe = Recipe(name="static", method="static", nodes=("a", "b", "c"))
    errors = {"a": 1.0, "b": 2.0, "c": None}
    found = tuple(
        Sensitivity(recipe="static", node=node, error=error) for node, error in errors.items()
    )
    known = SearchState(recipes=(recipe,), budget=Budget(), export_bytes=SIZE, sensitivities=found)
    assert rank_nodes(known, recipe) == ("c", "b", "a")
