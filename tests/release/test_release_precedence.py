"""Precedence: when a run replaces a version of another release.

It depends on the origin of both. `run` is a run of a pipeline by a schedule, a commit or a user.
The other origins name a version, so they always take precedence.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from onnx_ops.domain.ledger import ReleaseLeft
from onnx_ops.errors import OnnxOpsError, RefusedError
from onnx_ops.release.promote import (
    PromotionResult,
    delete_endpoint,
    find_successor,
    promote_release,
)
from onnx_ops.release.status import HistoryFilter, read_history
from tests.release.release_parts import CANARY, CHALLENGER, CHAMPION, MODEL, TARGET, Scene

ENDPOINT = "digits"


def run(scene: Scene, version: str, *, always: bool = False) -> PromotionResult:
    """Promote this version as the run does that released it."""
    release = scene.record(version).release
    done = promote_release(
        scene.context, MODEL, version, TARGET, release=release, always=always, expects=(ENDPOINT,)
    )
    scene.reconcile_all()
    return done


def serve_two(scene: Scene) -> None:
    """Let two runs release versions 1 and 2, one after the other."""
    for seed in ("a", "b"):
        run(scene, scene.publish(seed))


@pytest.fixture
def scene() -> Scene:
    scene = Scene()
    scene.bind()
    serve_two(scene)
    assert scene.traffic() == {"v1": 0, "v2": 100}
    return scene


def promote_by_alias(scene: Scene, version: str) -> None:
    scene.set_alias(CHALLENGER, version)
    scene.reconcile()


def move_champion(scene: Scene, version: str) -> None:
    scene.set_alias(CHAMPION, version)
    scene.reconcile()


def promote_by_command(scene: Scene, version: str) -> None:
    scene.promote(version, reason="better on zeros")
    scene.reconcile()


BY_HAND = [promote_by_alias, move_champion, promote_by_command]
"""Ways of promotion by hand.

They are the alias of a challenger or a champion in MLflow, and the command. GitHub's workflow calls
the command too.
"""


@pytest.mark.parametrize("always", [False, True])
def test_run_of_newer_release_serves_it(scene: Scene, always: bool) -> None:
    assert run(scene, scene.publish("c"), always=always).left == ""
    assert scene.traffic()["v3"] == 100


@pytest.mark.parametrize("always", [False, True])
def test_run_of_serving_release_changes_nothing(scene: Scene, always: bool) -> None:
    before = scene.state().head
    assert run(scene, "2", always=always).did == "serves already"
    assert scene.state().head == before


def test_run_of_older_release_is_skipped_and_recorded_once(scene: Scene) -> None:
    for _ in range(3):
        done = run(scene, "1")
        assert (done.did, done.left, done.endpoints) == ("left", "2", (ENDPOINT,))
        assert "onnx-ops promote" in done.explain_left()
    assert scene.traffic()["v2"] == 100
    assert CHALLENGER not in scene.aliases()
    left = [e.body for e in scene.world.ledger.read(ENDPOINT) if isinstance(e.body, ReleaseLeft)]
    assert left == [ReleaseLeft(version="1", serving="2")]
    lines, _ = read_history(scene.context, HistoryFilter(endpoints=(ENDPOINT,)))
    assert [line.what for line in lines if line.kind == "release-left"] == ["skipped version 1"]


def test_run_of_older_release_with_always_serves_it(scene: Scene) -> None:
    assert run(scene, "1", always=True).did == "challenger"
    assert scene.traffic()["v1"] == 100


@pytest.mark.parametrize("always", [False, True])
def test_run_after_revert_serves_earlier_release_only_with_always(
    scene: Scene, always: bool
) -> None:
    reverted = scene.publish("a")  # The earlier commit gives the earlier release.
    assert reverted == "1"
    assert run(scene, reverted, always=always).left == ("" if always else "2")
    assert scene.traffic()["v1"] == (100 if always else 0)


@pytest.mark.parametrize("by_hand", BY_HAND)
def test_repeated_run_after_manual_promotion_moves_no_traffic_until_new_release(
    scene: Scene, by_hand: Callable[[Scene, str], None]
) -> None:
    by_hand(scene, "1")
    assert scene.traffic()["v1"] == 100
    applied = len(scene.world.provider.applied)
    for _ in range(50):
        scene.world.clock.advance(600.0)
        assert run(scene, "2").left == "1"
    assert len(scene.world.provider.applied) == applied
    assert scene.aliases()[CHAMPION] == "1"
    # A new release replaces a version that was promoted by hand.
    assert run(scene, scene.publish("c")).left == ""
    assert scene.traffic()["v3"] == 100


@pytest.mark.parametrize("by_hand", BY_HAND)
def test_manual_promotion_of_skipped_release_serves_it(
    scene: Scene, by_hand: Callable[[Scene, str], None]
) -> None:
    run(scene, "1")
    by_hand(scene, "1")
    assert scene.traffic()["v1"] == 100
    assert run(scene, "1").did == "serves already"


@pytest.mark.parametrize("always", [False, True])
def test_run_of_rolled_back_release_is_refused(scene: Scene, always: bool) -> None:
    scene.roll_back()
    scene.reconcile()
    with pytest.raises(RefusedError, match="rolled this release back"):
        run(scene, "2", always=always)
    assert scene.traffic()["v1"] == 100


def test_run_after_manual_override_moves_no_traffic(scene: Scene) -> None:
    scene.roll_back()
    scene.reconcile()
    scene.promote("2", override=True, reason="it was the load balancer")
    scene.reconcile()
    assert scene.traffic()["v2"] == 100
    assert run(scene, "1").left == "2"
    assert run(scene, "2").did == "serves already"
    assert scene.traffic()["v2"] == 100


@pytest.mark.parametrize("always", [False, True])
def test_run_during_rollout_of_same_release_keeps_candidate(always: bool) -> None:
    scene = Scene()
    scene.bind(policy=CANARY)
    run(scene, scene.publish("a"))
    version = scene.publish("b")
    assert run(scene, version, always=always).left == ""
    applied = len(scene.world.provider.applied)
    for _ in range(2):
        assert run(scene, version, always=always).left == ""
        assert scene.state().roles.candidate is not None
    assert len(scene.world.provider.applied) == applied


def test_run_of_older_release_during_rollout_keeps_candidate() -> None:
    scene = Scene()
    scene.bind(policy=CANARY)
    run(scene, scene.publish("a"))
    for version in (scene.publish("b"), scene.publish("c")):
        run(scene, version)
    assert run(scene, "2").left == "3"
    candidate = scene.state().roles.candidate
    assert candidate is not None
    assert candidate.version == "3"
    # Version 1 serves already.
    assert run(scene, "1").did != "left"


def test_repeated_run_after_endpoint_outage_serves_its_release(scene: Scene) -> None:
    version = scene.publish("c")
    scene.world.provider.down = True
    with pytest.raises(OnnxOpsError):
        run(scene, version)
    scene.world.provider.down = False
    scene.restart()
    assert run(scene, version).left == ""
    assert scene.traffic()["v3"] == 100


def test_run_without_endpoint_keeps_manually_set_champion_unless_always() -> None:
    scene = Scene()
    for seed in ("a", "b"):
        version = scene.publish(seed)
        promote_release(
            scene.context, MODEL, version, TARGET, release=scene.record(version).release
        )
    scene.set_alias(CHAMPION, "1")
    for _ in range(2):
        done = promote_release(scene.context, MODEL, "2", TARGET, release=scene.record("2").release)
        assert (done.did, done.left) == ("left", "1")
    assert scene.aliases()[CHAMPION] == "1"
    promote_release(
        scene.context, MODEL, "2", TARGET, release=scene.record("2").release, always=True
    )
    assert scene.aliases()[CHAMPION] == "2"


def test_run_after_endpoint_deletion_serves_older_release(scene: Scene) -> None:
    delete_endpoint(scene.context, ENDPOINT, reason="test")
    scene.bind()
    assert run(scene, "1").left == ""
    assert scene.traffic()["v1"] == 100


def test_run_of_older_release_requested_by_alias_serves_it(scene: Scene) -> None:
    scene.set_alias(CHALLENGER, "1")
    assert run(scene, "1").did == "challenger"
    assert scene.traffic()["v1"] == 100


def test_find_successor_of_reused_version_number_returns_none(scene: Scene) -> None:
    other = scene.record(scene.publish("z")).release
    assert find_successor(scene.state(), "1", other) is None
    assert (
        find_successor(scene.state(), "1", scene.record("1").release) == scene.state().roles.stable
    )


def test_run_after_manual_promotion_on_two_endpoints_is_skipped(scene: Scene) -> None:
    scene.bind("digits-eu")
    scene.reconcile_all()
    promote_by_alias(scene, "1")
    scene.reconcile_all()
    assert run(scene, "2").left == "1"
    scene.reconcile_all()
    assert [scene.traffic(name)["v1"] for name in ("digits", "digits-eu")] == [100, 100]
