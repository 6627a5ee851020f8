"""One release over several endpoints, one after the other."""

from __future__ import annotations

import pytest

from onnx_ops.domain.rollout import OperatorCommand
from onnx_ops.domain.rollout_policy import RolloutPolicy
from onnx_ops.release.promote import bind_endpoint
from onnx_ops.release.rollback import roll_back_each, select_endpoints
from tests.release.release_parts import CANARY, CHALLENGER, CHAMPION, MODEL, Scene, config_of
from tests.support.golden import Golden

NAMES = ("digits", "region", "world")
SOAK_S = 3600.0
DAY_S = 86_400.0


@pytest.fixture
def scene() -> Scene:
    """Return a scene with three endpoints that serve version 1.

    They get the next version in order, the last two after an hour each.
    """
    scene = Scene()
    scene.bind(policy=CANARY)
    bind_endpoint(
        scene.context,
        config_of("region"),
        RolloutPolicy(depends_on=("digits",), depends_on_soak=SOAK_S),
    )
    bind_endpoint(
        scene.context,
        config_of("world"),
        RolloutPolicy(depends_on=("digits", "region"), depends_on_soak=SOAK_S),
    )
    scene.promote(scene.publish("first"))
    for served in (["1", "", ""], ["1", "1", ""], ["1", "1", "1"]):
        scene.reconcile_all()
        assert stable(scene) == served, "a first deployment waits for the soak time too"
        scene.world.clock.advance(SOAK_S)
    scene.promote(scene.publish("second"))
    return scene


def stable(scene: Scene) -> list[str]:
    found = [scene.state(name).roles.stable for name in NAMES]
    return [one.version if one else "" for one in found]


def finish_the_first(scene: Scene) -> None:
    for _ in range(2):
        scene.reconcile("digits")
        scene.say(OperatorCommand.ADVANCE)
    scene.reconcile("digits")


def test_first_deployment_of_dependent_endpoint_waits_for_its_dependency(golden: Golden) -> None:
    scene = Scene()
    scene.bind()
    bind_endpoint(scene.context, config_of("region"), RolloutPolicy(depends_on=("digits",)))
    scene.promote(scene.publish("first"))
    golden("reasons", scene.reconcile("region")[-1].why)
    scene.reconcile("digits")
    scene.reconcile("region")
    assert scene.traffic("region") == {"v1": 100}


def test_dependent_endpoint_waits_for_dependencies_and_soak_time(
    scene: Scene, golden: Golden
) -> None:
    scene.reconcile("digits")
    golden("reasons", scene.reconcile("region")[-1].why, "in progress")
    finish_the_first(scene)
    assert stable(scene) == ["2", "1", "1"]
    golden("reasons", scene.reconcile("region")[-1].why, "within the hour")
    assert scene.aliases()[CHAMPION] == "1"
    scene.world.clock.advance(SOAK_S)
    golden("reasons", scene.reconcile("world")[-1].why, "not served")
    scene.reconcile("region")
    assert stable(scene) == ["2", "2", "1"]
    scene.world.clock.advance(SOAK_S)
    scene.reconcile("world")
    scene.reconcile_all()
    assert stable(scene) == ["2", "2", "2"]
    assert scene.aliases()[CHAMPION] == "2"
    assert CHALLENGER not in scene.aliases()


def test_soak_time_continues_after_retirement_of_previous_version(scene: Scene) -> None:
    bind_endpoint(
        scene.context,
        config_of("region"),
        RolloutPolicy(depends_on=("digits",), depends_on_soak=2 * DAY_S),
    )
    finish_the_first(scene)
    scene.world.clock.advance(DAY_S)
    scene.reconcile("digits")
    assert scene.state("digits").roles.finished_at == 0.0, "the previous version is retired"
    assert "for less than 172800 s" in scene.reconcile("region")[-1].why
    scene.world.clock.advance(DAY_S)
    scene.reconcile("region")
    assert stable(scene) == ["2", "2", "1"]


def test_soak_time_starts_again_when_release_returns_by_rollback(scene: Scene) -> None:
    finish_the_first(scene)
    scene.roll_back("digits")
    scene.reconcile("digits")
    state = scene.state("digits")
    assert (state.roles.stable and state.roles.stable.version) == "1"
    assert state.stable_since == scene.world.clock.now()
    scene.world.clock.advance(SOAK_S)
    scene.reconcile("digits")
    assert scene.state("digits").stable_since == state.stable_since, "the same version serves"


def test_release_rolled_back_on_first_endpoint_reaches_no_other(scene: Scene) -> None:
    scene.reconcile("digits")
    scene.abort()
    for name in (*NAMES, *NAMES):
        scene.reconcile(name)
    scene.world.clock.advance(2 * SOAK_S)
    scene.set_alias(CHALLENGER, "2")
    assert "rolled this release back" in scene.reconcile("region")[-1].why
    assert stable(scene) == ["1", "1", "1"]


def test_started_rollout_of_dependent_endpoint_continues_after_rollback_of_its_dependency(
    scene: Scene,
) -> None:
    bind_endpoint(
        scene.context, config_of("region"), RolloutPolicy(steps=(0.1, 1.0), depends_on=("digits",))
    )
    finish_the_first(scene)
    scene.reconcile("region")
    assert scene.traffic("region") == {"v2": 10, "v1": 90}
    scene.roll_back("digits")
    scene.say(OperatorCommand.ADVANCE, "region")
    scene.reconcile("region")
    assert scene.traffic("region") == {"v2": 100, "v1": 0}


def test_roll_back_each_of_partly_rolled_out_release_moves_all_reached_endpoints(
    scene: Scene,
) -> None:
    finish_the_first(scene)
    scene.world.clock.advance(SOAK_S)
    scene.reconcile("region")
    assert stable(scene) == ["2", "2", "1"]
    names = select_endpoints(scene.context, (), every=True, model=MODEL)
    assert names == ("digits", "region"), "the release has not reached the others"
    moved, errors = roll_back_each(scene.context, names, reason="it is slow", pin=False)
    assert (set(moved), errors) == ({"digits", "region"}, {})
    scene.reconcile_all()
    assert stable(scene) == ["1", "1", "1"]
    assert scene.aliases()[CHAMPION] == "1"
    assert select_endpoints(scene.context, (), every=True, model=MODEL) == names, (
        "asked again, it is the same rollback"
    )
    again, errors = roll_back_each(scene.context, names, reason="it is slow", pin=False)
    assert ([one.already for one in again.values()], errors) == ([True, True], {})
    assert stable(scene) == ["1", "1", "1"]
    assert select_endpoints(scene.context, (), every=True, model=MODEL, to="1") == NAMES
