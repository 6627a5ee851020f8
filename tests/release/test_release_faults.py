"""Every release operation, killed before and after every call of every port.

Other tests have other processes at work meanwhile. The end must be the same as without the kill at
every moment: the same roles, traffic, aliases and rejections. Every effect is done once and
recorded as done once.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import pytest

from onnx_ops.domain.decision import Verdict
from onnx_ops.domain.ledger import OperatorCommandSent, OverrideRecorded
from onnx_ops.domain.rollout import OperatorCommand
from onnx_ops.errors import ConflictError, ServiceUnavailableError, StillPendingError
from onnx_ops.release.reconcile import reconcile_until_stable
from tests.release.release_parts import CHALLENGER, CHAMPION, Scene, effects, roll_back
from tests.release.release_scenes import (
    asked_for,
    copies_of,
    counted_out,
    end_of,
    lost,
    misled,
    moved_by_hand,
    on_trial,
    pair,
    past_its_time,
    rolled_back_alone,
    serving,
    with_candidate,
    withdrawn,
)
from tests.support.faults import Faults, Killed
from tests.support.suite import PARTS, Sweep

MOST_MOMENTS = 1000
"""Upper limit of a driver's moments, for tests that do not count them beforehand."""


@dataclass(frozen=True)
class Scenario:
    """A request and the reconciliation that follows it.

    The process that calls `ask` and reconciles may be killed. The request is repeated if a person
    sees that it is not `done`. With the default `ask`, the reconciler finds work without a request.
    """

    setup: Callable[[], Scene]
    ask: Callable[[Scene], object] = lambda scene: None
    done: Callable[[Scene], bool] = lambda scene: False

    def act(self, scene: Scene) -> None:
        self.ask(scene)
        scene.reconcile_all()


def advance(scene: Scene) -> None:
    scene.say(OperatorCommand.ADVANCE)


def said(scene: Scene) -> bool:
    return any(
        isinstance(entry.body, OperatorCommandSent) for entry in scene.world.ledger.read("digits")
    )


def went_back(scene: Scene) -> bool:
    return not {"rollback", "abort"}.isdisjoint(effects(scene.world.ledger.read("digits")))


def overridden(scene: Scene) -> bool:
    return any(
        isinstance(entry.body, OverrideRecorded) for entry in scene.world.ledger.read("digits")
    ) and (scene.aliases().get(CHALLENGER) == "2" or scene.traffic().get("v2") == 100)


def overridden_in_registry() -> Scene:
    scene = with_candidate(serving("a"), verdict=Verdict.FAIL)
    scene.give_override("2", "sure")
    scene.set_alias(CHALLENGER, "2")
    return scene


SCENARIOS: Mapping[str, Scenario] = {
    "first deployment": Scenario(
        lambda: with_candidate(serving()), lambda scene: scene.promote("1")
    ),
    "all at once": Scenario(lambda: with_candidate(serving("a")), lambda scene: scene.promote("2")),
    "start": Scenario(
        lambda: with_candidate(on_trial(OperatorCommand.ADVANCE, OperatorCommand.ADVANCE)),
        lambda scene: scene.promote("4"),
    ),
    "advance": Scenario(on_trial, advance, said),
    "finish": Scenario(
        lambda: on_trial(OperatorCommand.ADVANCE),
        advance,
        lambda scene: (
            sum(isinstance(e.body, OperatorCommandSent) for e in scene.world.ledger.read("digits"))
            == 2
        ),
    ),
    "abort by word": Scenario(on_trial, Scene.abort, went_back),
    "abort by alias": Scenario(withdrawn),
    "replace a candidate": Scenario(
        lambda: with_candidate(on_trial()), lambda scene: scene.promote("4")
    ),
    "refuse a challenger": Scenario(lambda: misled(CHALLENGER)),
    "refuse a champion": Scenario(lambda: misled(CHAMPION)),
    "champion by hand": Scenario(moved_by_hand),
    "restore": Scenario(lost),
    "retire": Scenario(past_its_time),
    "rollback": Scenario(lambda: serving("a", "b"), Scene.roll_back, went_back),
    "rollback of a candidate": Scenario(on_trial, Scene.roll_back, went_back),
    "aliases after a rollback": Scenario(rolled_back_alone),
    "the last of two endpoints": Scenario(pair),
    "a judged start": Scenario(asked_for),
    "a judged step": Scenario(lambda: counted_out(bad=False)),
    "a judged rollback": Scenario(lambda: counted_out(bad=True)),
    "override": Scenario(
        lambda: with_candidate(serving("a"), verdict=Verdict.FAIL),
        lambda scene: scene.promote("2", override=True, reason="sure", actor="operator"),
        overridden,
    ),
    "override in the registry": Scenario(overridden_in_registry),
    "without endpoint": Scenario(
        lambda: with_candidate(with_candidate(Scene())), lambda scene: scene.promote("1")
    ),
}


def prepared(name: str) -> Scenario:
    """Return the scenario of that name, whose scene is set up only once."""
    scenario = SCENARIOS[name]
    return replace(scenario, setup=copies_of(scenario.setup))


def finish(scenario: Scenario, scene: Scene) -> Scene:
    """Do what a person and the reconciler do next."""
    scene.faults = None
    if not scenario.done(scene):
        scenario.act(scene)
    scene.reconcile_all()
    return scene


def play(scenario: Scenario, faults: Faults) -> dict[str, object]:
    """Return the end of a scenario with faults, after everything that follows them.

    The process is killed, or loses a call or its answer.
    """
    scene = scenario.setup()
    scene.faults = faults
    try:
        scenario.act(scene)
    except Killed:
        scene.restart()
        finish(scenario, scene)
    except ServiceUnavailableError:
        finish(scenario, scene)
    except StillPendingError:
        assert scene.state().pending_rollback is not None or went_back(scene)
    scene.restart()
    scene.reconcile_all()
    return end_of(scene)


@pytest.mark.parametrize("name", SCENARIOS)
def test_operation_killed_at_any_moment_ends_like_undisturbed_operation(
    name: str, sweep: Sweep
) -> None:
    scenario = prepared(name)
    counted = Faults()
    expected = play(scenario, counted)
    assert counted.moments > 4
    for moment in sweep(range(counted.moments)):
        assert play(scenario, Faults(at=moment)) == expected, (
            f"killed at moment {moment} of {counted.moments}"
        )


@pytest.mark.parametrize("name", SCENARIOS)
def test_operation_with_one_failed_call_ends_like_undisturbed_operation(
    name: str, sweep: Sweep
) -> None:
    """Each call of each port, or its answer, is lost once.

    The following steps complete the request and pending effects.
    """
    scenario = prepared(name)
    counted = Faults()
    expected = without_clean_ups(play(scenario, counted))
    for moment in sweep(range(counted.moments)):
        end = play(
            scenario, Faults(at=moment, error=ServiceUnavailableError("injected", where=name))
        )
        assert without_clean_ups(end) == expected, f"moment {moment} of {counted.moments}"


def without_clean_ups(end: dict[str, object]) -> dict[str, object]:
    """Return the end without the moment of clean-ups.

    A registry that fails briefly delays a clean-up until before the next rollout.
    """
    done = {
        name: [effect for effect in found if effect != "clean-up"]
        for name, found in end["effects"].items()  # type: ignore[attr-defined]
    }
    split = [(name, {k: v for k, v in weights.items() if v}) for name, weights in end["changes"]]  # type: ignore[attr-defined]
    return {**end, "effects": done, "changes": [change for change, _ in itertools.groupby(split)]}


@pytest.mark.parametrize("name", ["all at once", "abort by word", "rollback"])
def test_operation_killed_twice_ends_like_undisturbed_operation(name: str, sweep: Sweep) -> None:
    """The process that finishes the work of a killed one can be killed as well."""
    scenario = prepared(name)
    counted = Faults()
    expected = play(scenario, counted)
    for first, second in sweep(
        itertools.product(range(0, counted.moments, 3), range(1, counted.moments, 7))
    ):
        scene = scenario.setup()
        for moment in (first, second):
            scene.faults = Faults(at=moment)
            with contextlib.suppress(Killed):
                if not scenario.done(scene):
                    scenario.act(scene)
                scene.reconcile_all()
            scene.restart()
        assert end_of(finish(scenario, scene)) == expected, (
            f"killed at moments {first} and {second}"
        )


DRIVEN = [
    name for name, scenario in SCENARIOS.items() if name not in ("without endpoint", "override")
]


@pytest.mark.parametrize("name", DRIVEN)
def test_concurrent_reconcilers_apply_each_effect_once(name: str, sweep: Sweep) -> None:
    """A second driver makes all its steps at one moment of the first one.

    This is tried for every moment.
    """
    scenario = prepared(name)
    counted = Faults()
    expected = play(scenario, counted)
    for moment in sweep(range(counted.moments)):
        scene = scenario.setup()
        other = scene.world.context("another driver")

        def drive(number: int, scene: Scene = scene, moment: int = moment) -> None:
            if number == moment:
                for endpoint in scene.world.ledger.endpoints():
                    reconcile_until_stable(other, endpoint)  # noqa: B023 (called in this turn of the loop)

        scene.faults = Faults(between=drive)
        with contextlib.suppress(ConflictError):
            scenario.act(scene)
        assert end_of(finish(scenario, scene)) == expected, (
            f"at moment {moment} of {counted.moments}"
        )


@pytest.mark.parametrize("candidate", ["c", "b"], ids=["another release", "the same release"])
def test_roll_back_at_any_moment_of_reconciliation_removes_version(
    candidate: str, sweep: Sweep
) -> None:
    """A version that the operator rolled back does not serve in the end.

    The driver's late effects do not last.
    """

    def setup() -> Scene:
        scene = serving("a", "b")
        scene.publish(candidate, variant="int8")
        scene.promote("3")
        return scene

    copies, moment = copies_of(setup), 0
    for moment in sweep(range(MOST_MOMENTS)):
        scene = copies()
        left: list[str] = []

        def go_back(number: int, scene: Scene = scene, moment: int = moment) -> None:
            if number == moment:
                left.append(roll_back(scene.world.context("operator"), "digits").moved_from)  # noqa: B023

        scene.faults = Faults(between=go_back)
        scene.reconcile()
        scene.faults = None
        if not left:
            break
        scene.reconcile()
        state = scene.state()
        assert state.roles.stable is not None
        assert state.roles.stable.name not in left, f"at moment {moment}"
        assert state.roles.candidate is None
        assert state.find_rejection(state.known[left[0].removeprefix("v")]) is not None
        assert scene.traffic()[state.roles.stable.name] == 100
        assert scene.aliases()[CHAMPION] == state.roles.stable.version
        assert effects(scene.world.ledger.read("digits")).count("rollback") == 1
    assert 20 < moment < MOST_MOMENTS - PARTS
